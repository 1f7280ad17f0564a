"""`python examples/demo --ab`: the drill step by step, and the whole of it with real robots on a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from demo.command import main
from demo.drill import Drill, Solved, even_run
from demo.run import planned
from reflex_runtime.client import ClientError
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.robots.versions.router import Router

EPISODE = {"event": "episode_end"}


class Operator:
    """Stands in for the client: a server whose changes a test makes."""

    def __init__(self) -> None:
        self.changes: list[dict[str, Any]] = []
        self.faults: list[Any] = []
        self.looks = 0
        self.broken = False

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/diagnostics/rollout"
        self.looks += 1
        return {"changes": self.changes}

    def post(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        assert path == "/admin/faults"
        if self.broken:
            raise ClientError("no")
        self.faults.append(fields["faults"])
        return {}

    def change(self, kind: str, slot: str = "b") -> None:
        numbers = {"slot": slot, "breaker": {"slots": {slot: {"why": "5 calls crashed in a row", "cooldown_s": 2.0}}}}
        self.changes.append({"kind": kind, "numbers": numbers})


@pytest.fixture
def operator() -> Operator:
    return Operator()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def drill(operator: Operator, told: list[str]) -> Drill:
    made = Drill(4, told.append)
    made._client = operator  # type: ignore[assignment]
    return made


def act(robot: str, status: int = 200, slot: str | None = "a", moved: bool = False) -> dict[str, Any]:
    if status != 200:
        return {"event": "act", "robot_id": robot, "status": status, "code": "processor_failed"}
    return {"event": "act", "robot_id": robot, "status": status, "slot": slot, "moved": moved}


def test_the_drill_goes_from_the_fault_to_the_return(drill: Drill, operator: Operator, told: list[str]) -> None:
    drill(EPISODE)
    drill(act("r1", slot="b"))
    assert operator.faults == []
    drill(EPISODE)
    assert operator.faults == [["b:raise:1"]], "half of four episodes"
    drill(EPISODE)
    for _ in range(4):
        drill(act("r1", 500))
    assert drill.missing is not None
    operator.change("drain")
    drill(act("r1", 500))
    assert operator.faults == [["b:raise:1"], []], "ended as soon as b is drained"
    drill(act("r1", slot="a", moved=True))
    drill(act("r2", slot="a"))
    assert "b had not come back" in str(drill.missing)
    operator.change("return")
    drill(act("r2", slot="b"))
    assert drill.missing is None
    looks = operator.looks
    drill(act("r2", slot="b"))
    assert operator.looks == looks, "nothing is left to look for"
    words = ["every call of b fails", "asks anew", "is drained", "is mended", "r1 goes on with a", "of r2, the probe"]
    assert len(told) == len(words)
    assert all(word in line for word, line in zip(words, told, strict=True)), told
    assert "5 calls crashed in a row" in told[2]
    assert "for 2 s" in told[3]
    assert (dict(drill.failed), drill.most) == ({"r1": 5}, 5)


def test_the_server_is_not_asked_at_every_call(drill: Drill, operator: Operator) -> None:
    drill(EPISODE)
    drill(EPISODE)
    for _ in range(1000):
        drill(act("r1", slot="a"))
    assert operator.looks <= 5, "five times a second at most, unless b has done something"


def test_what_other_slots_do_is_not_the_drill(drill: Drill, operator: Operator) -> None:
    drill(EPISODE)
    drill(EPISODE)
    operator.change("drain", "a")
    drill(act("r1", 500))
    assert drill.phase == "broken"


def test_a_server_that_takes_no_faults_is_told(drill: Drill, operator: Operator, told: list[str]) -> None:
    operator.broken = True
    drill(EPISODE)
    drill(EPISODE)
    assert "cannot go on" in told[0]
    assert drill.missing == "the fault was never injected"


def test_episodes_are_counted_for_who_played_all_of_them() -> None:
    tally = Solved()
    end = {"event": "episode_end", "task": "t", "robot_id": "r0"}
    for slots, moved, success in (
        (["b", "b"], False, True),
        (["a"], True, True),
        (["b", "a"], True, False),
        ([], False, 0),
    ):
        for slot in slots:
            tally(act("r0", slot=slot, moved=moved))
        tally(act("r0", 500))
        tally(end | {"success": success})
    assert [tally.cell(["t"], by) for by in ("a", "b", "moved", "nobody")] == ["", "1/1", "1/2", "0/1"]


@pytest.mark.parametrize(("robots", "episodes"), [(2, 8), (3, 14), (8, 40), (64, 100)])
def test_b_gets_its_share_and_gets_it_evenly(robots: int, episodes: int) -> None:
    run, of_b = even_run(robots, episodes, 80)
    total = robots * episodes
    assert abs(of_b - total / 5) <= max(1.0, 0.01 * total)
    router = Router(80)
    on_b = [router.route(name, "q", 0.0).slot == "b" for name in planned(run, robots, episodes)]
    assert sum(on_b) == of_b, "the server decides the same"
    assert sum(on_b[total // 2 :]) >= of_b / 4, "some are left after half-time"


def test_too_few_episodes_for_a_drill_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 robots x 3 episodes"):
        even_run(1, 3, 80)
    assert main(["--ab", "--robots", "65"]) == 2


@pytest.mark.long  # forty episodes
def test_demo_ab_breaks_b_and_brings_it_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo.ab.SPLIT", 50)  # of few episodes some begin on b after it is mended
    monkeypatch.setattr("demo.ab.CONTROL_HZ", 400.0)  # five times as fast, as is the cool-down
    options = ["--robots", "3", "--episodes", "6", "--serve", "--probe-cooldown-s 0.06", "--out", str(tmp_path)]
    assert main(["--ab", *options]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    for words in ("every call of b fails", "asks anew", "b is drained", "b is mended", "the probe, and is back"):
        assert out.count(words) == 1, (words, out)
    assert "not complete" not in out
    (path,) = (tmp_path / "recordings").iterdir()
    recording = read_journal(path)
    assert [note.fields["action"] for note in recording.noted("decision")] == ["fault", "drain", "mended", "return"]
    assert len(recording.noted("outcome")) == 18, "every robot said how every episode ended"
    ended = [note.fields for note in recording.noted("outcome")]
    table = re.search(r"│ all +│([^│]+)│([^│]+)│([^│]+)│", out)
    assert table is not None, out
    for slot, cell in zip(("a", "b", None), table.groups(), strict=True):
        mine = [e["success"] for e in ended if e["slot"] == slot]
        assert cell.strip() == (f"{sum(mine)}/{len(mine)}" if mine else ""), slot
    failed = [line for line in recording.requests if line.error is not None]
    assert {(line.slot, line.error.slug) for line in failed if line.error} == {("b", "processor_failed")}
    assert f"b failed {len(failed)} calls" in out
    assert re.search(r"a against b: \w", out)
    for name in ("batches.png", "batches.svg"):
        assert (tmp_path / name).stat().st_size > 10_000
    batches = [json.loads(line) for line in (tmp_path / "batches.jsonl").read_text().splitlines()[1:]]
    assert {b["group"] for b in batches if b["kind"] == "batch"} == {"a", "b"}
