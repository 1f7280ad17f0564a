"""`python examples/demo`: the same robots without and with batching, and the picture of both."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from demo.command import main
from demo.gain import Lanes
from reflex_runtime.observe.journal import BatchLine, Journal, Member, read_journal


def run_of(*batches: tuple[float, float, Iterable[tuple[int, str, float, str]]]) -> Journal:
    """A journal of batches: begin, end, and its members as (seq, robot, age, outcome)."""
    lines = [
        BatchLine(
            id=i, group="default", reason="", cause="", at=at, finished=end, elapsed=end - at,
            expected=None, cost=None, unit=None, size=1, queued=None,
            members=[Member(seq, "", robot, 1.0, 1.0, "waiting", age, outcome=how) for seq, robot, age, how in members],
        )
        for i, (at, end, members) in enumerate(batches)
    ]  # fmt: skip
    return cast(Journal, SimpleNamespace(batches=lines))


def test_robots_on_a_slow_machine_are_told_as_late_in_one_line_and_that_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo.command.TIME_LIMIT", 0.0)
    assert main(["--robots", "2", "--episodes", "1", "--out", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 of 2 robots were late, 0 s were not enough: this machine is too slow for 2 robots at once; try" in out
    assert "try --robots 1" in out
    assert not re.search("code|0/0|gain", out)


def near(pairs: list[tuple[float, float]]) -> Any:
    return [pytest.approx(pair) for pair in pairs]


def test_lanes_show_waits_calls_and_answers_of_the_window() -> None:
    run = run_of(
        (1.0, 2.0, [(0, "r0", 0.5, "more"), (1, "r1", 0.25, "done")]),
        (3.0, 4.0, [(0, "r0", 2.5, "done")]),  # it waited between two calls
        (5.0, 6.0, [(2, "r1", 0.0, "done")]),
    )
    every = Lanes.of(run, window=8.0)  # both are at work from 1.0 to 4.0, so it begins at -1.5
    assert every.waits == {"r0": near([(2.0, 0.5), (3.5, 1.0)]), "r1": near([(2.25, 0.25)])}
    assert every.calls == {"r0": near([(2.5, 1.0), (4.5, 1.0)]), "r1": near([(2.5, 1.0), (6.5, 1.0)])}
    assert every.rate == pytest.approx(2 / 3)  # from 1.0 to 4.0; r1 alone was at work after that
    part = Lanes.of(run, window=2.0)  # from 1.5 to 3.5
    assert part.waits == {"r0": near([(0.5, 1.0)]), "r1": []}
    assert part.calls == {"r0": near([(0.0, 0.5), (1.5, 0.5)]), "r1": near([(0.0, 0.5)])}
    assert part.rate == every.rate  # the window is what is drawn
    assert Lanes.of(run_of()).rate == 0.0


def test_where_robots_never_work_at_once_answers_of_all_of_the_run_count() -> None:
    run = run_of((1.0, 2.0, [(0, "r0", 0.5, "done")]), (3.0, 4.5, [(1, "r1", 0.5, "done")]))
    lanes = Lanes.of(run, window=4.0)  # from 0.5, the first request, to 4.5
    assert lanes.rate == pytest.approx(2 / 4)
    assert lanes.calls == {"r0": near([(0.5, 1.0)]), "r1": near([(2.5, 1.5)])}


# The stock client was written for an earlier version of websockets.
@pytest.mark.long  # two fleets in a simulator
@pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")
@pytest.mark.parametrize(
    ("wire", "recorded"),
    [("openpi", "openpi"), ("msgpack", "act")],  # which --ab plays
)
def test_the_demo_plays_without_and_with_batching(
    wire: str, recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On openpi through the stock client, unmodified."""
    monkeypatch.setattr("demo.command.CONTROL_HZ", 0.0)  # as fast as the simulator can
    options = ["--wire", wire, "--robots", "2", "--episodes", "1", "--call-ms", "5", "--out", str(tmp_path)]
    assert main([*options]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    alone, batched = (read_journal(tmp_path / f"{name}.jsonl") for name in ("alone", "batches"))
    assert {batch.size for batch in alone.batches} == {1}
    assert min(batch.elapsed for batch in (*alone.batches, *batched.batches)) >= 0.005
    assert re.search(r"requests in a call, mean +│ +1\.0 │ +\d\.\d ", out), out
    assert re.search(r"--max-batch-size +1\b", (tmp_path / "alone.log").read_text())
    assert "--max-batch-size" not in (tmp_path / "batches.log").read_text()  # the default
    assert "every call 5 ms longer" in out
    for name in ("gain.png", "gain.svg", "batches.png"):
        assert (tmp_path / name).stat().st_size > 5_000
    drawn = (tmp_path / "gain.svg").read_text()
    assert "without and with batching" in drawn
    for run in (alone, batched):
        assert f"{Lanes.of(run).rate:.0f} answers a second" in drawn
    assert re.search(r"chunks, refused +│ +[1-9]\d*, 0 │ +[1-9]\d*, 0 ", out), out
    assert {line.wire for line in batched.requests} == {recorded}
    assert {line.request.robot_id for line in batched.requests} == {"r0", "r1"}
    assert len({line.request.episode_id for line in batched.requests}) == 2


@pytest.mark.parametrize("wrong", [["--call-ms", "-1"], ["--call-ms", "2000"], ["--ab", "--call-ms", "3"]])
def test_call_ms_is_checked(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*wrong]) == 2
    assert f"demo: --call-ms={wrong[-1]}: " in capsys.readouterr().err
