"""A rollout that goes forward and back by itself, on a server."""

from __future__ import annotations

import itertools

from serving.harness import Server
from serving.pair import Pair, admin, episodes, rollout, two, until, version_of
from serving.requests import numbered


class Load:
    """New episodes, as many as are asked for."""

    def __init__(self, server: Server) -> None:
        self.server, self._names = server, itertools.count()

    def __call__(self, n: int = 40) -> None:
        names = [f"load-{next(self._names)}" for _ in range(n)]
        self.server.at_once([r | {"episode_id": e} for r, e in zip(numbered(n), names, strict=True)])


def test_v12_a_ramp_advances_by_itself_and_finishes(pair: Pair) -> None:
    options = ("--ramp", "20,60,100", "--ramp-every", "1s", "--guard", "error=50%")
    with two(pair, *options, split=None) as server:
        begun = rollout(server)
        assert (begun["split"], begun["ramp"]["state"], begun["ramp"]["share"]) == (80, "running", 20)
        (early,) = episodes("a", 1, split=80)
        assert version_of(server.act(episode_id=early, seed=1), 1) == "v1"
        load = Load(server)

        def goes_on() -> None:
            load()
            server.act(episode_id=early, seed=1)  # one that runs: 10,000 newer ones would make an idle one forgotten

        until(lambda: rollout(server)["ramp"]["state"] == "finished", goes_on)
        told = rollout(server)
        assert told["split"] == 0
        decisions = [(d["why"].partition(":")[0], d["numbers"]) for d in told["ramp"]["decisions"]]
        moved = [(what, n["share"], n["stage_answers"]) for what, n in decisions if what != "hold"]  # on a busy machine
        assert [one[:2] for one in moved] == [("advance", 60), ("advance", 100), ("finish", 100)]
        assert all(answers >= 30 for _, _, answers in moved)
        server.wait_log("ramp: finish: ")
        lines = [line for line in server.log if "WARNING reflex.rollout ramp: " in line and "ramp: hold: " not in line]
        assert len(lines) == 4  # its start, and three decisions
        assert "advance: b was watched at 20 % for its time" in lines[1]
        assert "stage_answers" in lines[1]
        assert version_of(server.act(episode_id="late", seed=1), 1) == "v2"
        assert version_of(server.act(episode_id=early, seed=1), 1) == "v1"  # it had started


def test_v12_a_guard_that_trips_takes_everything_back_and_says_why(pair: Pair) -> None:
    options = ("--ramp", "50,100", "--ramp-every", "10m", "--guard", "error=5%", "--max-consecutive-crashes", "0")
    with two(pair, *options, split=None) as server:
        load = Load(server)
        load()
        running = episodes("b", 1)[0]
        assert version_of(server.act(episode_id=running, seed=1), 1) == "v2"
        admin(server, "faults", faults=["b:raise:0.5"])
        until(lambda: rollout(server)["ramp"]["state"] == "rolled_back", load)
        admin(server, "faults", faults=[])
        told = rollout(server)
        assert told["split"] == 100
        assert told["ramp"]["share"] == 0
        (decision,) = told["ramp"]["decisions"]
        assert decision["why"].startswith("rollback: guard: error ")
        assert "limit 5%" in decision["why"]
        assert decision["numbers"]["error_share"] > 0.05
        (back,) = [c for c in told["changes"] if c["kind"] == "rollback"]
        assert back["numbers"]["episodes_moved"] > 0
        assert "rollback: guard: error" in server.wait_log("WARNING reflex.rollout ramp: rollback")
        moved = [server.act(episode_id=running, seed=1) for _ in range(2)]
        assert [(version_of(m, 1), m.json["policy_changed"]) for m in moved] == [("v1", True), ("v1", False)]
        load()
        assert rollout(server)["split"] == 100  # and stays there


def test_v12_a_slow_b_trips_the_latency_guard_within_one_evaluation(pair: Pair) -> None:
    options = ("--ramp", "50,100", "--ramp-every", "10m", "--guard", "p90=100ms")
    with two(pair, *options, "--inject-fault", "b:slow:1:150", split=None) as server:
        keys = episodes("b", 40)
        server.at_once([r | {"episode_id": e} for r, e in zip(numbered(40), keys, strict=True)])
        until(lambda: rollout(server)["ramp"]["state"] == "rolled_back")
        assert "p90" in rollout(server)["ramp"]["decisions"][-1]["why"]


def test_v12_a_drain_of_b_ends_its_ramp(pair: Pair) -> None:
    options = ("--ramp", "50,100", "--ramp-every", "10m", "--probe-cooldown-s", "480")
    with two(pair, *options, "--inject-fault", "b:raise:1", split=None) as server:
        for episode in episodes("b", 6):
            server.act(episode_id=episode)
        told = rollout(server)
        assert (told["split"], told["ramp"]["state"]) == (100, "rolled_back")
        assert "drained" in told["ramp"]["decisions"][-1]["why"]


# Run first in the server's process: the first look at the ramp fails, for whatever reason.
STUMBLES = """
import reflex_runtime.robots.versions.rollout as module
really = module.Rollout.evaluate
def evaluate(self, now):
    module.Rollout.evaluate = really
    raise RuntimeError("stumbled")
module.Rollout.evaluate = evaluate
"""


def test_v12_a_look_that_fails_does_not_end_the_looking(pair: Pair) -> None:
    with two(pair, "--ramp", "50", "--ramp-every", "1s", split=None, before=STUMBLES) as server:
        assert server.wait_log("RuntimeError: stumbled")
        until(lambda: rollout(server)["ramp"]["state"] == "finished")


def test_v12_a_running_ramp_is_ended_by_an_operator(pair: Pair) -> None:
    with two(pair, "--ramp", "50,100", "--ramp-every", "10m", split=None) as server:
        answer = admin(server, "load", slot="b", path=str(pair.v3))
        assert (answer.status, answer.code) == (409, "invalid_request")
        assert "a ramp is running" in answer.json["message"]
        assert admin(server, "split", split=70).status == 200
        assert "ramp" not in rollout(server)
        assert admin(server, "load", slot="b", path=str(pair.v3)).status == 200
