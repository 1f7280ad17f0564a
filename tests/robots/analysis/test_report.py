"""The report of recordings: what it counts, what it concludes, and that it can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from observe.test_journal_recording import Run, asked
from reflex_runtime.cli import main
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.journal import JournalError
from reflex_runtime.observe.journal_writer import JournalWriter, Recording
from reflex_runtime.robots.analysis.report import RolloutReport, evidence, report
from reflex_runtime.robots.versions.comparison import Comparison, wilson

POLICIES = [{"slot": s, "model_id": f"arm-{s}", "model_hash": f"{s}{s}{s}{s}"} for s in ("a", "b")]


class Clock:
    """The wall clock of a recorder, moved by hand."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        self.now += 0.01  # notes of one moment keep their order
        return self.now


class Day:
    """A recorder of two policies that is told of episodes."""

    def __init__(self, directory: Path, split: int | None = 50, policies: Any = POLICIES, **changes: Any) -> None:
        self.clock = Clock(**changes)
        header = {"model_hash": "m", "policies": policies, "split": split}
        to = Recording(directory, gzip=False)
        self.recorder = JournalWriter(to, header=header, clock=lambda: 1000.0, wall=self.clock)
        self.run = Run(self.recorder)
        self.episodes = 0

    def episode(self, slot: str, success: bool | None, took: float = 0.0215, **changes: Any) -> str:
        self.episodes += 1
        name = changes.setdefault("episode_id", f"episode-{self.episodes}")
        self.run.batch(asked(self.episodes, **changes), slot=slot, took=took)
        if success is not None:
            self.recorder.note("outcome", episode_id=name, slot=slot, success=success)
        return str(name)

    def close(self) -> Path:
        assert self.recorder.close()
        assert self.recorder.path is not None
        return self.recorder.path


def compared(directory: Path, rates: tuple[float, float], n: int, seed: int = 0, split: int = 50) -> RolloutReport:
    """n episodes of each side's share, succeeding at these rates."""
    day, rng = Day(directory, split), Random(seed)
    for _ in range(n):
        slot = "a" if rng.random() * 100 < split else "b"
        day.episode(slot, rng.random() < rates[slot == "b"])
    return report([day.close()])


# -- what it counts ----------------------------------------------------------------------------------------------------


def test_each_slot_has_its_own_figures(tmp_path: Path) -> None:
    day = Day(tmp_path)
    for i in range(100):
        day.episode("a", i < 70, took=0.001 * (i + 1))
    day.episode("b", True, guard={"clamped": 2, "joints": ["0"], "held": False})
    day.episode("b", False, guard={"clamped": 3, "joints": ["0"], "held": True})
    day.episode("b", None, guard={"clamped": 0, "joints": [], "held": False})
    day.episode("b", None, actions=None)
    found = report([day.close()])
    a, b = found.slots["a"], found.slots["b"]
    assert (a.requests, len(a.started), a.finished, a.successes) == (100, 100, 100, 70)
    assert (a.latency(0.50), a.latency(0.99)) == (50.0, 99.0)
    assert (b.requests, len(b.latencies), b.finished, b.successes) == (4, 3, 2, 1)
    assert (b.clamped, b.held, dict(b.errors)) == (1, 1, {"queue_full": 1})
    told = found.as_dict()
    json.dumps(told, allow_nan=False)
    assert told["slots"]["a"]["episodes"]["interval"] == list(wilson(70, 100))
    assert told["slots"]["b"]["models"] == ["arm-b@bbbb"]
    assert told["lines_dropped"] == 0


def test_an_episode_counts_once_and_for_one_slot(tmp_path: Path) -> None:
    day = Day(tmp_path)
    name = day.episode("a", True)
    day.recorder.note("outcome", episode_id=name, slot="a", success=False)  # the first that was told counts
    moved = day.episode("b", None)
    day.episode("a", None, episode_id=moved)
    day.recorder.note("outcome", episode_id=moved, slot="a", success=True)
    day.recorder.note("outcome", episode_id="nobody's", success=True)
    silent = day.episode("b", None)
    day.recorder.note("outcome", episode_id=silent, success=True)  # the slot is known from its requests
    found = report([day.close()])
    assert (found.slots["a"].successes, found.slots["a"].finished) == (1, 1)
    assert (found.slots["b"].successes, found.slots["b"].finished) == (1, 1)
    assert found.mixed == 1


def test_a_journal_without_requests_ends_when_it_began(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "t.jsonl"):
        pass  # as a run of `reflex trace --prompts` has none
    found = report([tmp_path / "t.jsonl"])
    assert found.ended == found.started > 0.0
    assert " UTC, 0 s" in found.text()


def test_several_files_are_one_run_in_order_of_time(tmp_path: Path) -> None:
    late = Day(tmp_path / "x", split=80, now=1_700_003_600.0)
    late.episode("b", True)
    late.recorder.note("decision", action="split", split=20)
    early = Day(tmp_path / "x", split=50)
    early.recorder.note("decision", action="split", split=80)
    early.episode("a", False)
    paths = [late.close(), early.close()]
    for found in (report(paths), report([tmp_path / "x"])):
        assert found.files == [paths[1], paths[0]]
        assert [e.fields["split"] for e in found.timeline] == [80, 20]
        assert found.comparison is not None
        assert found.comparison.split == 20
        assert found.ended - found.started == pytest.approx(3600.0, abs=5.0)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no recordings"):
        report([tmp_path])
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(JournalError, match=r"x\.jsonl, line 1"):
        report([tmp_path])


def test_a_run_that_was_killed_is_reported_and_said_so(tmp_path: Path) -> None:
    day = Day(tmp_path)
    for _ in range(3):
        day.episode("a", True)
    path = day.close()
    path.write_bytes(b"\n".join(path.read_bytes().splitlines()[:-1])[:-9])
    found = report([path])
    assert found.unfinished == 1
    assert "1 without a footer" in found.text()


# -- what it concludes -------------------------------------------------------------------------------------------------


def test_the_comparison_is_the_servers_own(tmp_path: Path) -> None:
    """Fed in the recorded order, with the recorded splits, it ends where the server's comparison ended."""
    day, rng = Day(tmp_path, split=80), Random(1)
    live = Comparison(80)
    for i in range(300):
        if i == 150:
            day.recorder.note("decision", action="ramp", why="advance: fine", numbers={"share": 50})
            live.set_split(50)
        slot = "a" if rng.random() < 0.7 else "b"
        success = rng.random() < (0.5 if slot == "a" else 0.7)
        day.episode(slot, success)
        live.add(slot, success)
    found = report([day.close()])
    assert found.comparison is not None
    assert found.comparison.snapshot() == live.snapshot()


def test_a_better_version_is_told_and_equal_ones_are_not(tmp_path: Path) -> None:
    better = compared(tmp_path / "1", (0.5, 0.9), 400)
    assert "a against b: b is better" in better.text()
    same = compared(tmp_path / "2", (0.7, 0.7), 400)
    assert "a against b: undecided" in same.text()
    assert same.comparison is not None
    assert same.comparison.e["b_better"] < 1000.0


def test_one_policy_has_no_comparison(tmp_path: Path) -> None:
    day = Day(tmp_path, split=None, policies=None)
    day.episode("prod", True)
    found = report([day.close()])
    assert found.comparison is None
    assert found.slots["prod"].models == ["m"]
    assert "against" not in found.text()


# -- what it tells -----------------------------------------------------------------------------------------------------


def eventful(directory: Path) -> Path:
    day = Day(directory, split=95)
    for i in range(40):
        day.episode("ab"[i % 2], i % 3 > 0)
        if i % 10 == 0:
            why = "advance: p99 31 ms is under 150 ms and errors 0.0 % are under 1 % over the last 500 answers"
            day.recorder.note("decision", action="ramp", why=why, numbers={"share": 5 + i})
    day.recorder.note("decision", action="drain", slot="b", why="b crashes: drain-b", numbers={"log_e": 7.2})
    day.recorder.note("shadow", mean=0.25, largest=0.5, per_joint=[0.1, 0.4])
    day.recorder.note("shadow", mean=0.75, largest=2.5, per_joint=[0.3, 0.8])
    return day.close()


def test_the_text_fits_80_columns_and_tells_the_timeline(tmp_path: Path) -> None:
    text = report([eventful(tmp_path)]).text()
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"22:13:2\d  ramp +advance: p99 31 ms is under 150 ms", text)
    assert re.search(r"answers; split 65$", text, re.MULTILINE)
    assert re.search(r"22:13:2\d  drain +b crashes: drain-b; b$", text, re.MULTILINE)
    assert "shadow: 2 pairs, mean difference 0.5, largest 2.5\n  per joint 0.2, 0.6" in text
    assert re.search(r"success +1\d of 20, \d\d\.\d% ", text)


def test_a_decision_without_a_reason_is_in_the_timeline(tmp_path: Path) -> None:
    day = Day(tmp_path)
    day.episode("a", True)
    day.recorder.note("decision", action="freeze")
    assert re.search(r"22:13:2\d  freeze +–$", report([day.close()]).text(), re.MULTILINE)


def test_callers_words_cannot_break_the_text(tmp_path: Path) -> None:
    day = Day(tmp_path, policies=[{"slot": "a", "model_id": "x" * 200 + "\n\x1b[31m", "model_hash": "h"}])
    day.episode("a", True)
    day.recorder.note("decision", action="\x1b[2J\n", why="y" * 300)
    text = report([day.close()]).text()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_evidence_is_told_without_powers_of_ten_while_it_can_be_read() -> None:
    told = [evidence(value) for value in (0.19412, 8.154, 999.6, 31049.0, 2.22e6, 3.57e8)]
    assert told == ["0.194", "8.15", "1,000", "31,000", "2,220,000", "3.57e+08"]


def test_the_command_prints_text_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = eventful(tmp_path / "r")
    assert main(["report", str(tmp_path / "r")]) == 0
    assert capsys.readouterr().out.startswith(str(path)[:79])
    assert main(["report", str(path), "--format", "json", "--margin", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["comparison"]["margin"] == 0.02
    assert len(told["timeline"]) == 5
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(path), "--format", "xml"])
    assert main(["report", str(path), "--margin", "0"]) == 2
    assert "--margin=0: must be a number in (0, 100), of percentage points" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "gone.jsonl")]) == 2
    assert np.isfinite(told["slots"]["a"]["latency_ms"]["p99"])


# -- which policy is meant ---------------------------------------------------------------------------------------------


def test_a_load_begins_the_slot_and_the_comparison_anew(tmp_path: Path) -> None:
    day = Day(tmp_path)
    for i in range(60):
        day.episode("ab"[i % 2], i % 2 == 1)
    day.recorder.note("decision", action="load", why="slot b is now v3", numbers={"slot": "b", "version": "arm-c@cccc"})
    late = day.episode("b", None)
    day.recorder.note("outcome", episode_id=late, slot="b", success=True, counted=False)  # it had begun before
    for i in range(10):
        day.episode("ab"[i % 2], False)
    found = report([day.close()])
    assert (found.slots["b"].successes, found.slots["b"].finished) == (0, 5)
    assert (found.slots["a"].successes, found.slots["a"].finished) == (0, 35)
    assert found.comparison is not None
    assert found.comparison.blocks == 5
    assert found.slots["b"].models == ["arm-b@bbbb", "arm-c@cccc"]
    text = found.text()
    assert "arm-c@cccc" in text
    assert "arm-b@bbbb" not in text.split("timeline")[0]
    assert "success and comparison count from the last load" in text


def test_recordings_of_other_models_in_a_slot_are_not_added_up(tmp_path: Path) -> None:
    swapped = [POLICIES[0] | {"slot": "b"}, POLICIES[1] | {"slot": "a"}]
    files = []
    for policies in (POLICIES, swapped):
        day = Day(tmp_path, policies=policies)
        day.episode("a", True)
        files.append(day.close())
    with pytest.raises(ConfigError, match=r"slot [ab] is model \w+ in .* and \w+ in .*: make a report for each"):
        report(files)
    assert report(files[:1]).slots["a"].finished == 1
