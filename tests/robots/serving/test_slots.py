"""One slot, and the versions that come and go in it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ConfigError, NonFiniteResult, ProcessorError
from reflex_runtime.core.request import Ticket
from reflex_runtime.robots import ActionChunk, Export, Policy, load_policy
from reflex_runtime.robots.policy.processors import parse_fault
from reflex_runtime.robots.policy.spec import Embodiment
from reflex_runtime.robots.versions.slots import Slot, Version, check_alike, faults_of, group_of, load
from reflex_runtime.settings import ServeConfig
from robots.tiny import Bench, asked, write_export


def decomposed(root: Path, **settings: Any) -> Policy:
    return load_policy(write_export(root, "decomposed", lambda c: c.update(settings)), "prod")


class Recorder:
    """A processor that notes what it is told."""

    repeatable = True

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def start(self) -> None:
        self.told.append(("start", None))

    def run(self, batch: Batch) -> Sequence[Any]:
        self.told.append(("run", ([t.id for t in batch.grants], [t.id for t in batch.left])))
        return [t.id for t in batch.grants]

    def drop(self, tickets: Sequence[Ticket]) -> None:
        self.told.append(("drop", [t.id for t in tickets]))

    def stop(self) -> None:
        self.told.append(("stop", None))


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    found = slot_of(decomposed(tmp_path / "one"))
    found.version.processor = Recorder()
    return found


@pytest.fixture
def versions(slot: Slot, tmp_path: Path) -> tuple[Version, Version]:
    other = slot.made(decomposed(tmp_path / "other", model_id="other"))
    other.processor = Recorder()
    return slot.version, other


def batch_of(version: Version, *names: int, left: Sequence[Ticket] = ()) -> Batch:
    bench = Bench(version.policy)
    for name in names:
        bench.submit(asked(version.policy, name))
    found = bench.step()
    assert found is not None
    return replace(found, left=tuple(left))


def test_v13_versions_of_a_slot_never_share_a_batch_nor_what_batches_cost(versions: tuple[Version, Version]) -> None:
    one, other = versions
    first, second = asked(one.policy, 1), asked(other.policy, 2)
    assert first.group == second.group
    assert first.partition != second.partition
    assert first.shape != second.shape
    assert (one.name.split("@")[0], other.name.split("@")[0]) == ("tiny", "other")


def test_v13_each_batch_runs_on_the_version_it_was_prepared_for(slot: Slot, versions: tuple[Version, Version]) -> None:
    one, other = versions
    slot.start()
    slot.exchange(other)
    for version, name in ((one, 1), (other, 2), (other, 3), (one, 4)):
        slot.run(batch_of(version, name))
    assert [told for told in one.processor.told if told[0] != "drop"] == [
        ("start", None),
        ("run", (["request-1"], [])),
        ("run", (["request-4"], [])),
    ]
    # The one that came later was started before its first batch, on the thread that runs it, and once.
    assert other.processor.told == [
        ("start", None),
        ("run", (["request-2"], [])),
        ("run", (["request-3"], [])),
    ]
    slot.stop()
    assert one.processor.told[-1] == other.processor.told[-1] == ("stop", None)


def test_v13_residents_that_left_are_dropped_where_they_were(slot: Slot, versions: tuple[Version, Version]) -> None:
    one, other = versions
    slot.exchange(other)
    gone = [next(iter(batch_of(v, n).grants)) for v, n in ((one, 7), (other, 8))]
    slot.run(batch_of(one, 1, left=gone))
    assert one.processor.told[-1] == ("run", (["request-1"], ["request-7"]))
    assert other.processor.told[-1] == ("drop", ["request-8"])
    slot.drop(gone)
    assert one.processor.told[-1] == ("drop", ["request-7"])
    assert other.processor.told[-1] == ("drop", ["request-8"])


def test_v13_a_batch_of_a_version_that_was_let_go_fails_and_nothing_else(
    slot: Slot, versions: tuple[Version, Version]
) -> None:
    one, other = versions
    slot.exchange(other)
    assert slot.let_go([]) == [one]
    with pytest.raises(ProcessorError, match="no policy is loaded"):
        slot.run(batch_of(one, 1))
    assert slot.run(batch_of(other, 2)) == ["request-2"]


# -- the server's slot -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("watchdog_s", "times"), [(0.0, 16.0), (7.9, 0.0), (10.0, 16.0)])
def test_no_batch_is_planned_that_a_short_watchdog_would_give_up(
    tmp_path: Path, watchdog_s: float, times: float
) -> None:
    group = group_of(ServeConfig(watchdog_s=watchdog_s), "prod", decomposed(tmp_path))
    assert (group.flush.max_batch_cost, group.flush.times_fixed) == (0.1, times)


def slot_of(policy: Policy, **settings: Any) -> Slot:
    return Slot("prod", ServeConfig(**settings), policy, [])


def test_v13_the_old_version_leaves_memory_once_nobody_needs_it(tmp_path: Path) -> None:
    policy = decomposed(tmp_path / "one")
    slot = slot_of(policy)
    group = group_of(ServeConfig(), "prod", policy)
    shape, old = policy.shape, weakref.ref(policy)
    before = slot.version
    before.users += 1  # an exchange has prepared something for it
    slot.exchange(slot.made(decomposed(tmp_path / "other")))
    assert slot.loaded == 2
    assert slot.let_go([]) == []
    before.users -= 1
    assert slot.let_go([shape]) == []  # a ticket waits or runs
    (gone,) = slot.let_go([slot.policy.shape])
    assert gone is before
    assert slot.loaded == 1
    del policy, before, gone
    gc.collect()
    assert old() is None  # not the faults of a drill, nor the group's cost model, nor anything else holds it
    assert group.cost().stages == ("prefix", "denoise")


def test_v13_a_version_that_was_never_put_in_is_forgotten_and_drills_reach_the_others(tmp_path: Path) -> None:
    slot = slot_of(decomposed(tmp_path / "one"))
    bad = weakref.ref(slot.made(decomposed(tmp_path / "bad")))
    gc.collect()
    assert bad() is None
    running, coming = slot.version, slot.made(decomposed(tmp_path / "coming"))
    slot.inject([parse_fault("prod:raise:1")])
    for version in (running, coming):
        with pytest.raises(ProcessorError, match="injected fault prod:raise:1"):
            version.processor.run(batch_of(version, 1))


def test_v12_the_version_before_comes_back_without_what_it_had_carried_over(tmp_path: Path) -> None:
    config = ServeConfig(rtc=True, on_bad_action="hold")
    policy = load(config, "prod", Export.load(write_export(tmp_path / "one", "decomposed")))
    slot = Slot("prod", config, policy, [])
    policy.tails.remember("e", np.zeros((4, 2), np.float32), 0.1)  # type: ignore[attr-defined]
    first = slot.version
    guard = first.processor.guard
    assert guard is not None
    guard.keep(np.zeros((4, 2), np.float32), "e")
    second = slot.made(decomposed(tmp_path / "other"))
    slot.exchange(second, keep=True)
    assert (slot.version, slot.loaded) == (second, 2)
    assert slot.let_go([]) == []  # it may be needed again
    assert slot.go_back() is first
    assert slot.go_back() is None
    assert policy.tails.anchor("e", 1) is None  # type: ignore[attr-defined]
    with pytest.raises(NonFiniteResult, match="no good action to hold"):
        guard.check(ActionChunk(np.full((4, 2), np.nan, np.float32), 5), "e")
    assert slot.let_go([]) == [second]


def test_v12_once_the_guard_has_watched_long_enough_there_is_no_way_back(tmp_path: Path) -> None:
    slot = slot_of(decomposed(tmp_path / "one"))
    first = slot.version
    slot.exchange(slot.made(decomposed(tmp_path / "two")), keep=True)
    slot.previous = None
    assert slot.go_back() is None
    assert slot.let_go([]) == [first]
    assert slot.let_go([]) == []


def test_v1_versions_behind_one_router_drive_the_same_robot(tmp_path: Path) -> None:
    exports = {"a": Export.load(write_export(tmp_path / "a")), "b": Export.load(write_export(tmp_path / "b"))}
    check_alike(exports)
    longer = replace(exports["b"], action_dim=7, x_dim=7, action_norm=None, embodiment=Embodiment())
    with pytest.raises(ConfigError, match="action_dim: found 7 for slot b, expected 2"):
        check_alike(exports | {"b": longer})


def test_e4_faults_belong_to_slots_that_are_there() -> None:
    found = faults_of(["a:raise:1", "b:slow:0.5:20"], ("a", "b"), "--inject-fault")
    assert {slot: [str(f) for f in faults] for slot, faults in found.items()} == {
        "a": ["a:raise:1"],
        "b": ["b:slow:0.5:20"],
    }
    with pytest.raises(ConfigError, match="slot shadow is not served, only a, b"):
        faults_of(["shadow:raise:1"], ("a", "b"), "--inject-fault")
