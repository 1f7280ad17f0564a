"""Router, breaker, comparison and ramp as one, without a server."""

from __future__ import annotations

import json
import logging

import pytest

from reflex_runtime.core.batch import RequestAnswered
from reflex_runtime.robots.versions.breaker import Breaker
from reflex_runtime.robots.versions.ramp import Change, Ramp, RampGuard
from reflex_runtime.robots.versions.rollout import Rollout
from reflex_runtime.web.errors import Conflict, Degraded, NotFound
from serving.pair import episodes


class Versions:
    """A rollout of a and b, what it said, and whom it moved."""

    def __init__(self, split: int = 50, ramp: str = "", guard: str = "") -> None:
        self.changes: list[Change] = []
        self.moved: list[str] = []
        found = RampGuard.parse(guard) if guard else None

        def made(now: float) -> Ramp:
            return Ramp(Ramp.shares_of(ramp), 60.0, found, now)

        self.rollout = Rollout(
            ("a", "b"), Breaker(("a", "b"), cooldown=10.0), split, made if ramp else None, found,
            on_change=self.changes.append, on_moved=self.moved.extend,
        )  # fmt: skip
        self.rollout.begin(0.0)

    def crash(self, slot: str, times: int = 5, now: float = 0.0) -> None:
        for _ in range(times):
            self.rollout.crashed(slot, now)

    @property
    def kinds(self) -> list[str]:
        return [change.kind for change in self.changes]


@pytest.fixture
def versions() -> Versions:
    return Versions()


def test_v3_the_warning_is_told_once_in_a_process(versions: Versions, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "reflex.rollout"):
        for i in range(3):
            assert versions.rollout.place(None, f"r{i}", 0.0).key == f"r{i}"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("policy_router.degraded_mode request_id=r0:")


def test_v12_the_outcome_of_an_episode_is_that_of_its_robot(versions: Versions) -> None:
    rollout = versions.rollout
    for robot in ("one", "two"):
        rollout.place("0", "r", 0.0, robot)
    rollout.place("alone", "r", 0.0, "one")
    with pytest.raises(Conflict, match="2 robots have an episode_id '0': say whose by robot_id"):
        rollout.outcome("0", True)
    first, second = rollout.outcome("0", True, "one"), rollout.outcome("0", False, "two")
    assert first["counted"] is second["counted"] is True
    assert (first["robot_id"], second["robot_id"]) == ("one", "two")
    assert rollout.outcome("0", True, "one")["repeated"] is True
    assert rollout.outcome("alone", True)["robot_id"] == "one"
    with pytest.raises(NotFound):
        rollout.outcome("0", True, "three")
    assert sum(record.episodes for record in rollout.records.values()) == 3


def test_one_policy_needs_no_routing_and_refuses_to_split() -> None:
    rollout = Rollout(("prod",), Breaker(("prod",), max_consecutive=1, cooldown=10.0))
    assert rollout.place("e", "r", 0.0).key == ""
    for refused in (lambda: rollout.set_split(10, 0.0), lambda: rollout.rollback(0.0)):
        with pytest.raises(Conflict, match="--policy-b"):
            refused()
    rollout.crashed("prod", 0.0)
    with pytest.raises(Degraded) as found:
        rollout.place("e", "r", 1.0)
    assert found.value.retry_after == 60.0
    assert rollout.place("e", "r", 10.0).slot == "prod"  # the probe
    json.dumps(rollout.snapshot(10.0))


def test_v6_a_drain_moves_who_is_running_and_drops_what_they_carried(versions: Versions) -> None:
    running, new = episodes("b", 2)
    assert versions.rollout.place(running, "r", 0.0).slot == "b"
    versions.crash("b")
    first, second = (versions.rollout.place(running, "r", 1.0) for _ in range(2))
    assert [(p.slot, p.changed) for p in (first, second)] == [("a", True), ("a", False)]
    assert versions.moved == [running]
    placed = versions.rollout.place(new, "r", 1.0)
    assert (placed.slot, placed.changed) == ("a", False)
    assert versions.moved == [running]
    assert versions.kinds == ["drain"]


def test_v11_a_move_that_could_not_be_told_is_told_with_the_next_answer(versions: Versions) -> None:
    (episode,) = episodes("b", 1)
    versions.rollout.place(episode, "r", 0.0)
    assert versions.rollout.rollback(0.0) == [episode]
    failed = versions.rollout.place(episode, "r", 1.0)
    assert failed.changed
    versions.rollout.untold(failed)
    told = versions.rollout.place(episode, "r", 2.0)
    assert told.changed
    assert not versions.rollout.place(episode, "r", 3.0).changed
    versions.rollout.untold(versions.rollout.place(episode, "r", 4.0))  # nothing was to be told
    assert not versions.rollout.place(episode, "r", 5.0).changed


def test_v11_a_move_is_told_once_the_server_is_no_longer_degraded(versions: Versions) -> None:
    (episode,) = episodes("b", 1)
    versions.rollout.place(episode, "r", 0.0)
    versions.rollout.rollback(0.0)
    versions.crash("a")
    versions.crash("b")
    with pytest.raises(Degraded):
        versions.rollout.place(episode, "r", 1.0)
    versions.rollout.reset("a", 2.0)
    assert versions.rollout.place(episode, "r", 3.0).changed


def test_v11_rollback_of_a_running_ramp_ends_it() -> None:
    versions = Versions(ramp="50,100")
    versions.rollout.rollback(5.0)
    assert versions.rollout.ramp is not None
    assert versions.rollout.ramp.state == "rolled_back"
    assert versions.rollout.evaluate(1000.0) == {}
    assert versions.rollout.router is not None
    assert versions.rollout.router.split == 100


def test_v11_rollback_counts_the_episodes_that_moved_and_no_robots_or_connections() -> None:
    versions = Versions(split=0)
    rollout = versions.rollout
    rollout.place("one", "r", 0.0)
    rollout.place("one", "r", 0.0, "arm")
    rollout.place(None, "r", 0.0, "arm")
    rollout.place(None, "r", 0.0, connection=("127.0.0.1", 5))
    assert rollout.snapshot(0.0)["router"]["episodes"] == {"a": 0, "b": 2}
    assert sorted(rollout.rollback(1.0)) == sorted(versions.moved) == ["arm\none", "one"]
    assert versions.changes[-1].numbers["episodes_moved"] == 2
    assert rollout.place(None, "r", 2.0, "arm").changed
    assert rollout.place(None, "r", 2.0, connection=("127.0.0.1", 5)).changed
    assert rollout.snapshot(2.0)["router"]["episodes"] == {"a": 2, "b": 0}


def test_v12_the_share_follows_the_ramp_and_the_comparison_is_told() -> None:
    versions = Versions(split=50, ramp="5,20,100")
    rollout = versions.rollout
    assert rollout.router is not None
    assert rollout.comparison is not None
    seen = []
    for now in range(0, 200, 10):
        rollout.evaluate(float(now))
        seen.append((rollout.router.split, rollout.comparison.split))
    assert sorted(set(seen), reverse=True) == [(95, 95), (80, 80), (0, 0)]
    assert versions.kinds == ["ramp"] * 4


def test_v12_a_guard_rolls_back_within_one_evaluation_and_the_change_has_its_numbers() -> None:
    versions = Versions(ramp="20,100", guard="error=1%")
    episode = episodes("b", 1, split=80)[0]
    versions.rollout.place(episode, "r", 0.0)
    for i in range(40):
        versions.rollout.answered("b", "failed" if i % 2 else "ok", 0.01)
        versions.rollout.answered("a", "failed", 0.01)  # not b's
        versions.rollout.answered("b", "rejected", 0.01)  # nobody's
    assert versions.rollout.evaluate(1.0) == {}
    assert versions.kinds == ["ramp", "rollback", "ramp"]
    assert versions.moved == [episode]
    assert versions.changes[-1].numbers["error_share"] == 0.5
    assert "error 50.00% (20 of 40 answers), limit 1%" in versions.changes[-1].why


def test_v12_what_is_nobodys_fault_never_trips_a_guard() -> None:
    versions = Versions(ramp="20,100", guard="p99=100ms,error=1%")
    for outcome in ("client_error", "rejected", "expired", "cancelled", "shed", "superseded", "drained"):
        for _ in range(100):
            versions.rollout.answered("b", outcome, 10.0)
    versions.rollout.evaluate(1.0)
    assert versions.kinds == ["ramp"]


@pytest.mark.parametrize("why", ["drain", "guard"])
def test_v12_the_guard_after_an_exchange_names_the_slot_once(why: str) -> None:
    versions = Versions(guard="error=1%")
    rollout = versions.rollout
    rollout.exchanged("b", 60.0)
    if why == "drain":
        versions.crash("b")
    else:
        for _ in range(40):
            rollout.answered("b", "failed", 0.1)
    assert rollout.evaluate(1.0) == {"b": True}
    assert rollout.evaluate(2.0) == {}
    rollout.exchanged("b")
    assert rollout.breaker.verdict == "ok"


def test_v12_a_guard_that_has_watched_long_enough_does_not_trip() -> None:
    versions = Versions(guard="error=1%")
    rollout = versions.rollout
    rollout.exchanged("b", 1.0)
    for _ in range(29):
        rollout.answered("b", "ok", 0.1)
    assert rollout.evaluate(1.0) == {}  # 30 answers are enough to decide
    rollout.answered("b", "ok", 0.1)
    assert rollout.evaluate(0.9) == {}
    assert rollout.evaluate(1.0) == {"b": False}
    versions.crash("b")
    assert rollout.evaluate(2.0) == {}
    rollout.exchanged("b", 3.0)  # another one: what drained the slot before is not its fault
    assert rollout.evaluate(3.0) == {}


def test_v13_what_was_known_of_the_policy_before_says_nothing_of_the_next(versions: Versions) -> None:
    rollout = versions.rollout
    before, across, after, other = *episodes("b", 3), episodes("a", 1)[0]
    for episode in (before, across, other):
        rollout.place(episode, "r", 0.0)
    rollout.outcome(before, True)
    versions.crash("b", 4)
    rollout.exchanged("b")
    assert rollout.breaker.count("b") == 0
    assert {slot: record.episodes for slot, record in rollout.records.items()} == {"a": 0, "b": 0}
    rollout.place(across, "r", 2.0)
    rollout.place(after, "r", 2.0)
    assert rollout.outcome(across, False)["counted"] is False
    assert rollout.outcome(after, True)["counted"] is True
    assert rollout.outcome(other, True)["counted"] is True
    assert rollout.comparison is not None
    assert rollout.comparison.counts == {"a": (1, 1), "b": (1, 1)}
    versions.crash("b", 4)
    assert rollout.breaker.verdict == "ok"  # four and four are no eight


def test_v13_an_outcome_that_comes_after_the_exchange_is_not_the_new_ones(versions: Versions) -> None:
    (episode,) = episodes("b", 1)
    versions.rollout.place(episode, "r", 0.0)
    versions.rollout.exchanged("b")
    told = versions.rollout.outcome(episode, False)
    assert (told["slot"], told["counted"]) == ("b", False)


def test_v13_no_exchange_while_a_ramp_runs() -> None:
    versions = Versions(ramp="50,100")
    with pytest.raises(Conflict, match="a ramp is running"):
        versions.rollout.may_exchange()
    versions.rollout.rollback(1.0)
    versions.rollout.may_exchange()


def test_a_shadow_is_none_of_its_business(versions: Versions) -> None:
    versions.rollout(RequestAnswered(0.0, "shadow", "ok", 200, 1.0))
    versions.rollout.exchanged("shadow")
    assert versions.rollout.breaker.verdict == "ok"
    assert versions.changes == []


def test_tables_of_episodes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.robots.versions.rollout.EPISODES", 10)
    versions = Versions()
    for i in range(30):
        versions.rollout.place(f"e{i}", "r", 0.0)
        versions.rollout.outcome(f"e{i}", True)
    with pytest.raises(NotFound):
        versions.rollout.outcome("e0", True)
    assert versions.rollout.outcome("e29", True)["repeated"] is True
    assert len(versions.rollout._episodes) == len(versions.rollout._reported) == 10


def test_everything_it_tells_is_json(versions: Versions) -> None:
    versions.rollout.place("é", "r", 0.0)
    versions.crash("b")
    versions.rollout.set_split(20, 3.0)
    told = json.loads(json.dumps(versions.rollout.snapshot(5.0)))
    assert told["slots"] == {"a": {"verdict": "ok"}, "b": {"verdict": "drained"}}
    assert [c["ago_s"] for c in told["changes"]] == [5.0, 2.0]
    with pytest.raises(NotFound, match="no slot 'x'; the slots are a, b"):
        versions.rollout.reset("x", 6.0)
