"""The router: the same slot from an episode's first request to its last, in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.versions.router import Router, Routing, bucket

REPEATABLE = settings(max_examples=200, deadline=None, derandomize=True, database=None)
VECTORS = {"ep_xyz": 77, "ep_abc": 50, "req_42": 20, "a": 50, "": 52}


@pytest.mark.parametrize(("key", "expected"), VECTORS.items())
def test_v2_the_buckets_of_the_contract(key: str, expected: int) -> None:
    assert bucket(key) == expected


def test_v2_slot_a_iff_the_bucket_is_below_the_split() -> None:
    for split in range(101):
        routing = Router(split).route("ep_xyz", "r", 0.0)
        assert routing == Routing("a" if split > 77 else "b", "ep_xyz", degraded=False, cached=False)


def test_v2_another_process_with_another_hash_seed_answers_alike() -> None:
    keys = ["ep_xyz", "", "naïve-épisode", "机器人", "\N{ROBOT FACE}", "a" * 256, *(f"ep_{i}" for i in range(50))]
    program = (
        "import json, sys; from reflex_runtime.robots.versions.router import Router, bucket; r = Router(80);"
        "keys = json.load(sys.stdin); print(json.dumps([[bucket(k), r.route(k, '42', 0.0).slot] for k in keys]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, input=json.dumps(keys), capture_output=True, text=True, check=True, env=environment)
    here = Router(80)
    assert json.loads(run.stdout) == [[bucket(k), here.route(k, "42", 0.0).slot] for k in keys]


def test_v2_the_split_is_kept_over_many_keys() -> None:
    router = Router(80, episodes=10)
    share = sum(router.route(f"ep_{i}", "r", 0.0).slot == "a" for i in range(20_000)) / 20_000
    assert 0.79 < share < 0.81


@pytest.mark.parametrize("key", ["\ud800", "x\udfff", "\ud83e\udd16", "\x00", "\r\n"])
def test_v2_any_text_has_a_bucket(key: str) -> None:
    assert 0 <= bucket(key) < 100
    assert Router(50).route(key, key, 0.0).key == key


@REPEATABLE
@given(st.text(st.characters()), st.text(st.characters()), st.integers(0, 100))
def test_v2_no_text_raises_and_routing_is_a_function_of_the_key(episode: str, request: str, split: int) -> None:
    first, second = Router(split).route(episode, request, 0.0), Router(split).route(episode, request, 9.0)
    assert first == second
    assert first.key == (episode or request)
    assert (first.slot == "a") == (bucket(first.key) < split)


def test_v3_without_an_episode_the_request_is_the_key_and_says_so() -> None:
    router = Router(50)
    routing = router.route(None, "req_42", 0.0)
    assert routing == Routing("a", "req_42", degraded=True, cached=False)
    assert len(router) == 0  # nothing to stick to
    router.set_split(20)
    assert router.route(None, "req_42", 0.0).slot == "b"


def test_v3_a_robot_is_the_key_where_no_episode_is_named_and_stays_where_it_is() -> None:
    router = Router(100)
    first = router.route(None, "r1", 0.0, robot_id="ep_xyz")
    assert first == Routing("a", "ep_xyz", degraded=False, cached=False)
    router.set_split(0)
    assert router.route("", "r2", 1.0, robot_id="ep_xyz") == Routing("a", "ep_xyz", degraded=False, cached=True)
    assert router.route("ep_xyz", "r3", 1.0).slot == "b"  # an episode of that name is no robot
    assert router.rollback("b", 2.0) == []  # no episode moves
    assert router.route(None, "r4", 3.0, robot_id="ep_xyz").changed


def test_v3_a_connection_is_the_key_where_nothing_is_named_and_degraded_until_it_comes_back() -> None:
    router = Router(100, episodes=10)
    router.route("running", "r", 0.0)
    first = router.route(None, "r1", 0.0, connection=("127.0.0.1", 5))
    assert first == Routing("a", "127.0.0.1:5", degraded=True, cached=False)
    router.set_split(0)
    assert router.route(None, "r2", 1.0, connection=("127.0.0.1", 5)) == Routing("a", "127.0.0.1:5", False, True)
    assert router.route(None, "r2", 1.0, connection="ipv4:127.0.0.1:5").slot == "b"
    for port in range(100):  # a client that opens one for each request
        router.route(None, "r", 2.0, connection=("10.0.0.1", port))
    assert router.route("running", "r", 3.0).cached
    assert len(router) == 1
    assert router.rollback("a", 4.0) == []  # no episode moves
    assert router.route(None, "r", 5.0, connection=("10.0.0.1", 99)).changed


def test_v3_two_robots_with_one_name_for_their_episodes_are_told_of_a_move_each() -> None:
    router = Router(0)
    one, two = (router.route("0", "r", 0.0, robot_id=name) for name in ("one", "two"))
    assert one == two == Routing("b", "0", degraded=False, cached=False)
    assert router.rollback("a", 1.0) == ["one\n0", "two\n0"]
    assert [router.route("0", "r", 2.0, robot_id=name).changed for name in ("one", "two", "one")] == [True, True, False]


def test_v3_an_empty_episode_id_names_no_episode() -> None:
    assert Router(50).route("", "req_42", 0.0).degraded
    assert not Router(50).route("ep_xyz", "req_42", 0.0).degraded


def test_v11_started_episodes_keep_their_slot_when_the_split_changes() -> None:
    router = Router(80)
    before = {f"ep_{i}": router.route(f"ep_{i}", "r", 0.0) for i in range(500)}
    assert not any(routing.cached for routing in before.values())
    router.set_split(20)
    for key, routing in before.items():
        again = router.route(key, "r", 1.0)
        assert (again.slot, again.cached, again.changed) == (routing.slot, True, False)
    fresh = [router.route(f"new_{i}", "r", 1.0) for i in range(500)]
    assert all((routing.slot == "a") == (bucket(routing.key) < 20) for routing in fresh)
    assert not any(routing.cached for routing in fresh)


def test_v11_the_table_holds_so_many_episodes_and_forgets_the_longest_unused() -> None:
    router = Router(100)
    for i in range(10_000):
        router.route(f"ep_{i}", "r", float(i) / 1e4)
    assert router.route("ep_0", "r", 2.0).cached  # used again: ep_1 is the longest unused now
    router.set_split(0)
    router.route("one more", "r", 3.0)
    assert len(router) == 10_000
    assert router.route("ep_0", "r", 3.0).slot == "a"
    assert router.route("ep_2", "r", 3.0).slot == "a"
    forgotten = router.route("ep_1", "r", 3.0)
    assert (forgotten.slot, forgotten.cached) == ("b", False)
    assert len(router) == 10_000


def test_v11_an_hour_without_a_request_ends_an_episode() -> None:
    router = Router(100)
    router.route("idle", "r", 0.0)
    router.route("busy", "r", 0.0)
    router.route("busy", "r", 3000.0)
    router.set_split(0)
    assert router.route("idle", "r", 3599.0).slot == "a"  # and it is used again by that
    assert router.route("busy", "r", 6000.0).slot == "a"
    assert len(router) == 2
    assert router.route("idle", "r", 7199.0).slot == "b"
    assert router.route("busy", "r", 7199.0).slot == "a"


def test_v11_rollback_moves_running_episodes_and_tells_each_once() -> None:
    router = Router(50)
    slots = {f"ep_{i}": router.route(f"ep_{i}", "r", 0.0).slot for i in range(200)}
    moved = router.rollback("a", 1.0)
    assert set(moved) == {key for key, slot in slots.items() if slot == "b"}
    assert len(moved) == len(set(moved))
    assert router.split == 100
    for key, slot in slots.items():
        first, second = router.route(key, "r", 2.0), router.route(key, "r", 3.0)
        assert (first.slot, first.cached, first.changed) == ("a", True, slot == "b")
        assert (second.slot, second.changed) == ("a", False)
    assert router.rollback("a", 4.0) == []
    assert router.route("ep_new", "r", 5.0).slot == "a"


def test_v11_rollback_to_b_and_not_of_episodes_that_are_over() -> None:
    router = Router(100)
    router.route("over", "r", 0.0)
    router.route("runs", "r", 3000.0)
    assert router.rollback("b", 3600.0) == ["runs"]
    assert router.split == 0
    assert router.route("runs", "r", 3601.0) == Routing("b", "runs", degraded=False, cached=True, changed=True)
    assert router.route("over", "r", 3601.0) == Routing("b", "over", degraded=False, cached=False)


def test_v11_moved_there_and_back_before_it_asked_again_is_one_telling() -> None:
    router = Router(100)
    router.route("ep", "r", 0.0)
    assert router.rollback("b", 1.0) == ["ep"]
    assert router.rollback("a", 2.0) == ["ep"]
    assert [router.route("ep", "r", 3.0).changed for _ in range(3)] == [True, False, False]


def test_v11_a_drain_moves_a_running_episode_and_tells_it_once() -> None:
    router = Router(100)
    router.route("ep", "r", 0.0)
    routing = router.route("ep", "r", 1.0)
    moved = router.move(routing, "b")
    assert moved == Routing("b", "ep", degraded=False, cached=True, changed=True)
    assert router.move(routing, "b").changed is False  # a second request that was routed before the move
    assert router.route("ep", "r", 2.0) == Routing("b", "ep", degraded=False, cached=True)  # and there it stays


def test_v11_what_a_request_was_to_tell_it_tells_though_another_moved_the_episode() -> None:
    router = Router(100)
    router.route("ep", "r", 0.0)
    router.rollback("b", 1.0)
    first, second = router.route("ep", "r", 2.0), router.route("ep", "r", 2.0)
    assert (first.changed, second.changed) == (True, False)
    assert router.move(second, "a").changed
    assert router.move(first, "a").changed


def test_v11_move_tells_nothing_to_those_who_had_not_begun() -> None:
    router = Router(100)
    first = router.move(router.route("new", "r", 0.0), "b")
    assert first == Routing("b", "new", degraded=False, cached=False)
    assert router.route("new", "r", 1.0).slot == "b"
    nameless = router.move(router.route(None, "req", 0.0), "b")
    assert nameless == Routing("b", "req", degraded=True, cached=False)
    assert len(router) == 1


def test_v11_move_to_where_it_is_changes_nothing_and_keeps_what_is_to_be_told() -> None:
    router = Router(100)
    router.route("ep", "r", 0.0)
    router.rollback("b", 1.0)
    routing = router.route("ep", "r", 2.0)
    assert router.move(routing, "b") is routing
    assert routing.changed
    assert router.move(routing, "a") == Routing("a", "ep", degraded=False, cached=True, changed=True)


@pytest.mark.parametrize("split", [-1, 101, 50.0, "50", True, None])
def test_v1_a_split_outside_its_range_names_flag_value_and_range(split: object) -> None:
    router = Router(50)
    for attempt in (lambda: Router(split), lambda: router.set_split(split)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"--split=.*must be a whole number in \[0, 100\]") as error:
            attempt()
        assert str(split) in str(error.value)
    assert router.split == 50


def test_the_snapshot_is_json() -> None:
    router = Router(80)
    for i in range(100):
        router.route(f"ep_{i}", "r", 0.0)
    found = json.loads(json.dumps(router.snapshot()))
    assert found["split"] == 80
    assert found["episodes"]["a"] == sum(bucket(f"ep_{i}") < 80 for i in range(100))
    assert sum(found["episodes"].values()) == len(router) == 100


class Naive:
    """What the router promises, without a thought for speed: every episode ever seen, with all that happened to it."""

    def __init__(self, split: int, episodes: int, idle: float) -> None:
        self.split, self.episodes, self.idle = split, episodes, idle
        self.seen: OrderedDict[str, list] = OrderedDict()  # key → [slot, last use, to tell]

    def forget(self, now: float) -> None:
        self.seen = OrderedDict((k, e) for k, e in self.seen.items() if now - e[1] < self.idle)

    def route(self, key: str, now: float, drained: str | None) -> tuple[str, bool, bool]:
        self.forget(now)
        cached = key in self.seen
        slot, _, tell = self.seen.pop(key) if cached else ["a" if bucket(key) < self.split else "b", 0.0, False]
        if slot == drained:
            slot, tell = ("b" if slot == "a" else "a"), cached
        self.seen[key] = [slot, now, False]
        while len(self.seen) > self.episodes:
            self.seen.popitem(last=False)
        return slot, cached, tell

    def rollback(self, slot: str, now: float) -> set[str]:
        self.forget(now)
        self.split = 100 if slot == "a" else 0
        moved = {key for key, e in self.seen.items() if e[0] != slot}
        for key in moved:
            self.seen[key][0], self.seen[key][2] = slot, True
        return moved


@pytest.mark.parametrize("seed", range(30))
def test_v11_over_random_histories_it_is_the_obvious_one(seed: int) -> None:
    random = Random(seed)
    bounds = random.choice([1, 3, 8, 1000]), random.choice([5.0, 60.0, 3600.0])
    router, naive, now = Router(50, *bounds), Naive(50, *bounds), 0.0
    for _ in range(600):
        now += random.choice([0.0, 0.125, 1.0, 7.0])
        what = random.random()
        if what < 0.03:
            slot = random.choice("ab")
            assert set(router.rollback(slot, now)) == naive.rollback(slot, now)
        elif what < 0.06:
            naive.split = random.randint(0, 100)
            router.set_split(naive.split)
        else:
            key, drained = f"ep_{random.randrange(12)}", random.choice([None, None, "a", "b"])
            routing = router.route(key, "r", now)
            if routing.slot == drained:
                routing = router.move(routing, "b" if drained == "a" else "a")
            assert (routing.slot, routing.cached, routing.changed) == naive.route(key, now, drained)
        assert router.split == naive.split
        assert len(router) <= bounds[0]
