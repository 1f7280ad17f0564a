"""What the verdicts of the benchmarks and their own websocket client rest on. `make test-long` runs it."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader

from bench.cached import OURS, WAYS, Replayed, replay, working_set
from bench.capacity import HIGHEST, IN_TIME, LOWEST, STEPS, Halving
from bench.conversations import TRACES, chats, trace
from bench.load.wires.connection import masked
from bench.report import row, table
from bench.soak.__main__ import bars
from reflex_runtime.demo import POLICY
from reflex_runtime.llm.engine.blocks import BlockPool
from reflex_runtime.robots import load_policy

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("bar", "met"),
    [({"most": 2.0}, True), ({"most": 1.9}, False), ({"least": 2.0}, True), ({"least": 2.1}, False), ({}, None)],
)
def test_a_row_is_judged_by_its_median(bar: dict[str, float], met: bool | None) -> None:
    found = row("case", "what", [9.0, 1.0, 2.0], "ms", **bar)
    assert (found.value, found.low, found.high, found.met) == (2.0, 1.0, 9.0, met)
    assert ("NOT MET" in table([found])) is (met is False)


@pytest.mark.parametrize("capacity", [0.2, 0.45, 0.8, 0.93, 1.3])
def test_the_rate_with_nine_of_ten_in_time_is_found(capacity: float) -> None:
    halving = Halving()
    for _ in range(STEPS):
        halving.tried(IN_TIME if halving.share <= capacity else IN_TIME - 0.01)
    assert abs(halving.share - min(max(capacity, LOWEST), HIGHEST)) <= (HIGHEST - LOWEST) / 2 ** (STEPS + 1) + 1e-9


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_frames_of_the_load_generator_are_frames(size: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    reader = StreamReader()
    reader.feed_data(masked(payload))
    with pytest.raises(StopIteration) as stop:
        next(Frame.parse(reader.read_exact, mask=True))
    assert (stop.value.value.opcode, bytes(stop.value.value.data)) == (Opcode.BINARY, payload)


def test_conversations_are_replayed_through_the_pool() -> None:
    asked = sorted(chats(random.Random(1), 20), key=lambda one: one.at)
    replayed = [Replayed(one, i) for i, one in enumerate(asked)]
    most = working_set(replayed)
    assert 0 < most < len({block for one in replayed for block in one.blocks})
    uses: dict[bytes, list[int]] = {}
    for one in reversed(replayed):
        for block in one.wanted:
            uses.setdefault(block, []).append(one.number)
    found = {}
    for way, make in WAYS.items():
        pool = BlockPool(max(150, most // 2), 64)
        found[way], _ = replay(replayed, pool, None if make is None else make(pool, uses))
        assert pool.usage == 0.0
    assert found[OURS] == found["LRU"] < max(found.values()) == found["foreseen"]  # no two of them begin alike


def test_traces_of_conversations_are_the_same_each_time() -> None:
    for name in TRACES:
        first = trace(name, 1)
        assert first == trace(name, 1)
        assert [one.at for one in first] == sorted(one.at for one in first)
        assert {sum(tokens for _, tokens in one.texts) <= one.prompt for one in first} == {True}


def test_the_policy_of_the_evaluation_is_larger_and_the_same_function() -> None:
    small, large = load_policy(POLICY), load_policy("python:bench.apps.metaworld_torch:make")
    assert large.spec.model_bytes > 20 * small.spec.model_bytes
    rng = np.random.default_rng(0)
    seen = {"images": {"image": rng.integers(0, 256, (64, 64, 3), np.uint8)}, "state": rng.uniform(-1.0, 1.0, 4)}
    prepared = [
        policy.request(policy.prepare(**seen, instruction="close the drawer", seed=3)) for policy in (small, large)
    ]
    ours, theirs = (policy.answers([one])[0].actions for policy, one in zip((small, large), prepared, strict=True))
    assert np.allclose(ours, theirs, atol=1e-4)


def test_the_soak_says_of_each_bar_whether_it_is_met() -> None:
    rows = [
        row("45 kinds of faults", "survived", [43], "", least=45),
        row("1 minutes of mixed traffic", "feeds: growth after the first fifth", [1.5], "MB"),
        *(row("a caller", "p99 over that alone", [ratio], "x", most=3.0) for ratio in (1.25, 2.0)),
    ]
    assert [" ".join(line.split()) for line in bars(rows)] == [
        "NOT MET kinds of faults survived: 43 (>= 45.0)",
        "not run hostile inputs that did harm: -",
        "not run requests under faults without one right answer, a refusal or a closed connection: -",
        "not judged MB that a product grew by after minute two: 1.5",
        "met times that p99 is beside a greedy caller over that alone: 1.25, 2 (<= 3.00)",
    ]


def soaked(out: Path, *more: str) -> Any:
    """What a soak of a minute has found."""
    command = [sys.executable, "-m", "bench.soak", "--minutes", "1", "--out", str(out), *more]
    assert subprocess.run(command, check=False, cwd=ROOT).returncode in (0, 1)  # times are for people
    return json.loads((out / "soak.json").read_text())


def not_by_chance(out: Path, details: dict[str, list[str]]) -> list[str]:
    """Faults and inputs that are found again in a second run: on a busy machine a server is late by itself."""
    parts = {"faults not survived": "faults", "hostile inputs": "hostile"}
    if not (found := [what for what in parts if details[what]]):
        return []
    again = soaked(out, "--only", *(parts[what] for what in found))["details"]
    names = ({line.partition(":")[0] for what in found for line in run[what]} for run in (details, again))
    return sorted(set.intersection(*names))


def test_what_a_busy_machine_did_to_a_soak_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def second(out: Path, *more: str) -> Any:
        asked.extend(more)
        return {"details": {"hostile inputs": ["bomb: /health 2 s", "late: /health 0.3 s"]}}

    monkeypatch.setattr(sys.modules[__name__], "soaked", second)
    assert not_by_chance(tmp_path, {"faults not survived": [], "hostile inputs": []}) == asked == []
    first = {"faults not survived": [], "hostile inputs": ["bomb: /health 1 s", "slow: /health 0.3 s"]}
    assert not_by_chance(tmp_path, first) == ["bomb"]
    assert asked == ["--only", "hostile"]


@pytest.mark.timeout(1800)
def test_the_soak_runs_and_nothing_is_wrong(tmp_path: Path) -> None:
    found = soaked(tmp_path / "first")
    assert found["details"]["wrong under faults"] == []
    assert not_by_chance(tmp_path / "again", found["details"]) == []
    assert {row["case"].partition(" ")[2].partition(", ")[0] for row in found["rows"]} == {
        "kinds of faults", "hostile inputs", "caller beside one with extreme pictures",
        "caller beside one with the largest bodies", "caller beside one with n: 128", "minutes of mixed traffic",
    }  # fmt: skip


@pytest.mark.parametrize("case", ["load", "bad", "start"])
def test_the_benchmark_of_functions_runs(case: str, tmp_path: Path) -> None:
    kept = tmp_path / "rows.json"
    shortest = ["--rounds", "1", "--seconds", "1", "--callers", "2", "--only", case, "--json", str(kept)]
    command = [sys.executable, "-m", "bench.functions", *shortest]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=120).stdout
    assert {
        "load": "answers a second over by hand",
        "bad": "| right answers of 1875 innocent ones, reflex  | 1875   | 1875…1875 | >= 1875 | met |",
        "start": "RSS of the largest process, reflex",
    }[case] in told
    assert len(json.loads(kept.read_text())["rows"]) == sum("…" in line for line in told.splitlines())


def shown() -> list[tuple[str, str]]:
    """Each command of the pages that runs in virtual time, and what they say that it prints."""
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    block = r"^    \$ (reflex simulate|python -m bench\.sim)( .*)\n((?:    .+\n)+)"
    return [
        (name.replace("reflex", "python -m reflex_runtime") + options, textwrap.dedent(printed))
        for page in pages
        for name, options, printed in re.findall(block, page, re.MULTILINE)
    ]


@pytest.mark.parametrize(("command", "printed"), shown())
def test_pages_show_what_is_printed_today(command: str, printed: str) -> None:
    run = subprocess.run(
        [sys.executable, *command.split()[1:]], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    )
    assert run.stdout == printed


def test_the_benchmarks_start() -> None:
    command = [sys.executable, "-m", "bench", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60).stdout
    assert "wires" in told
