"""What happens when the model, the device or the process fails: every caller is told, and the server goes on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.demo import POLICY
from reflex_runtime.observe.journal import read_journal
from robots.tiny import write_export
from serving.exports import expected
from serving.harness import STATE, Server
from serving.pair import outcome
from serving.requests import busy, grey, marked, numbered, observe, queued, right, strike

# -- B19 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "code"), [("hang", "processor_hung"), ("die", "processor_failed")])
def test_b19_a_lost_device_thread_is_replaced_once_then_the_process_exits_1(kind: str, code: str, tiny: Path) -> None:
    fault = {"hang": "prod:hang:1:9000", "die": "prod:die:1"}[kind]  # it ends before the default watchdog would end it
    watchdog = ("--watchdog-s", "3" if kind == "hang" else "0")
    options = (*watchdog, "--inject-fault", fault, "--max-consecutive-crashes", "0")
    with Server(tiny, *options, held=True) as server:
        first = server.act()
        assert (first.status, first.code, first.json["retry_safe"]) == (500, code, False)
        health = server.get("/health")
        assert health.status == 200
        assert health.json["consecutive_crashes"] == 1
        assert health.json["hung_batches"] == (1 if kind == "hang" else 0)
        # The second is lost with its batch; what waited behind it is answered too, and then the process goes.
        with busy(server) as plug, server.burst(numbered(4)) as burst:
            burst.send()
            server.reach(queued(4))
            server.release()
            assert plug.answers()[0].code == code
            assert {answer.code for answer in burst.answers()} == {"shutting_down"}
        assert server.wait() == 1
        assert any("the device is lost" in line for line in server.log)


@pytest.mark.parametrize("kind", ["hang", "die"])
def test_b19_after_one_loss_the_next_batch_is_served(kind: str, tiny: Path) -> None:
    rate, number = strike(kind)
    with Server(tiny, "--watchdog-s", "3", "--inject-fault", f"prod:{kind}:{rate}") as server:
        assert {server.act().status for _ in range(number - 1)} <= {200}
        assert server.act().status == 500
        for i in range(3):
            answer = server.post(numbered(3)[i])
            assert right(answer, i)
        assert server.get("/health").json["consecutive_crashes"] == 0
        assert server.stop() == 0  # a thread that still hangs does not keep the process


def test_b19_those_who_wait_behind_a_hang_are_served_after_it(tiny: Path) -> None:
    rate, number = strike("hang")
    with Server(tiny, "--watchdog-s", "3", "--inject-fault", f"prod:hang:{rate}") as server:
        for _ in range(number - 1):
            server.act()
        with busy(server) as plug, server.burst(numbered(4)) as burst:
            burst.send()
            server.reach(queued(4))
            assert server.get("/health").status == 200  # it answers while the device hangs
            answers = burst.answers()
            assert plug.answers()[0].code == "processor_hung"
        assert all(right(a, i) for i, a in enumerate(answers))


def test_b19_without_a_watchdog_a_slow_batch_is_waited_for(tiny: Path) -> None:
    with Server(tiny, "--watchdog-s", "0", "--inject-latency-ms", "300") as server:
        assert server.act().status == 200
        assert server.get("/health").json["hung_batches"] == 0


# -- E4: each kind -----------------------------------------------------------------------------------------------------


def test_e4_raise_and_nan_strike_a_share_of_requests_and_the_same_ones_again(tiny: Path) -> None:
    for kind in ("raise", "nan"):
        with Server(tiny, "--inject-fault", f"prod:{kind}:0.3", "--max-consecutive-crashes", "0") as server:
            ids = [f"id-{i}" for i in range(20)]
            bad = marked(kind, 0.3, ids)
            assert 0 < len(bad) < 20
            for _ in range(2):
                failed = {i for i in ids if server.act(request_id=i).status == 500}
                assert failed == bad


def test_e4_slow_takes_longer(tiny: Path) -> None:
    rate, number = strike("slow")
    with Server(tiny, "--inject-fault", f"prod:slow:{rate}:700") as server:
        for _ in range(number - 1):
            server.act()
        first, *others = [server.act() for _ in range(3)]
    assert {answer.status for answer in (first, *others)} == {200}
    assert first.json["timing"]["batch_ms"] >= 700
    assert min(other.json["timing"]["batch_ms"] for other in others) < 700


def test_e4_start_up_health_and_answers_say_that_it_is_on(tiny: Path) -> None:
    options = ("--inject-fault", "prod:slow:0:5", "--inject-fault", "prod:nan:0", "--inject-latency-ms", "30")
    with Server(tiny, *options) as server:
        loud = [line for line in server.log if "FAULT INJECTION IS ON" in line]
        assert len(loud) == 3
        assert all("WARNING" in line for line in loud)
        told = server.get("/health").json["injected"]
        assert told == {"faults": ["prod:slow:0:5", "prod:nan:0"], "latency_ms": 30.0}
        answer = server.act()
        assert answer.json["injected"] == {"latency_ms": 30.0}
        assert answer.json["timing"]["batch_ms"] >= 30
    with Server(tiny) as server:
        assert "injected" not in server.get("/health").json
        assert server.act().json["injected"] is None


def test_e3_on_bad_action_hold_repeats_the_episodes_last_good_action(tiny: Path) -> None:
    ids = [f"id-{i}" for i in range(50)]
    bad = min(marked("nan", 0.2, ids))
    good = next(i for i in ids if i not in marked("nan", 0.2, ids))
    with Server(tiny, "--inject-fault", "prod:nan:0.2", "--on-bad-action", "hold") as server:
        none = server.act(request_id=bad, episode_id="e")
        assert (none.status, none.code) == (500, "processor_failed")
        assert "not finite" in none.json["message"]
        last = server.act(request_id=good, episode_id="e").json["actions"][-1]
        held = server.act(request_id=bad, episode_id="e").json
        assert held["guard"]["held"] is True
        assert all(np.allclose(action, last) for action in held["actions"])
        assert server.act(request_id=bad, episode_id="another").status == 500
        for repeated in (False, True):  # the same id in one run after another
            assert outcome(server, "e").json["repeated"] is repeated
            assert server.act(request_id=bad, episode_id="e").status == 500
            assert server.act(request_id=good, episode_id="e").status == 200
            assert server.act(request_id=bad, episode_id="e").status == 200
    with Server(tiny, "--inject-fault", "prod:nan:0.2") as server:
        assert server.act(request_id=good, episode_id="e").status == 200
        assert server.act(request_id=bad, episode_id="e").status == 500  # the default is an error


# -- degraded (H6, V6 and V7 for one slot) -----------------------------------------------------------------------------


def failing(*options: str, kind: str = "raise") -> tuple[str, ...]:
    return ("--inject-fault", f"prod:{kind}:0.5", *options)


def names(kind: str) -> tuple[list[str], list[str]]:
    """Ids that fail and ids that do not, at a rate of one half."""
    ids = [f"id-{i}" for i in range(60)]
    bad = marked(kind, 0.5, ids)
    return [i for i in ids if i in bad], [i for i in ids if i not in bad]


def test_h6_after_so_many_crashed_batches_in_a_row_it_is_degraded(tiny: Path) -> None:
    bad, good = names("raise")
    with Server(tiny, *failing("--max-consecutive-crashes", "3")) as server:
        server.act(request_id=bad[0])
        server.act(request_id=bad[1])
        health = server.get("/health")
        assert (health.status, health.json["consecutive_crashes"]) == (200, 2)
        server.act(request_id=good[0])  # an answer resets the count
        health = server.get("/health")
        assert (health.status, health.json["consecutive_crashes"]) == (200, 0)
        assert server.ask("POST", "/admin/reset", b'{"slot": "prod"}').status == 200  # and this the rate
        for i in bad[2:5]:
            server.act(request_id=i)
        health = server.get("/health")
        assert health.status == 503
        assert (health.json["state"], health.json["status"]) == ("degraded", "degraded")
        assert (health.json["consecutive_crashes"], health.json["max_consecutive_crashes"]) == (3, 3)
        assert health.json["slots"] == {"prod": {"verdict": "drained", "consecutive_crashes": 3}}
        refused = server.act(request_id=good[1])
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "degraded", "60")
        assert refused.json["retry_safe"] is True
        assert server.get("/metrics").status == server.get("/config").status == 200
        assert server.stop() == 0


def test_h6_a_probe_finds_out_that_it_works_again(tiny: Path) -> None:
    bad, good = names("raise")
    options = failing("--max-consecutive-crashes", "2", "--probe-cooldown-s", "0")
    with Server(tiny, *options) as server:
        for i in bad[:2]:
            assert server.act(request_id=i).status == 500
        assert server.get("/health").json["state"] == "degraded"
        assert server.act(request_id=bad[2]).status == 500  # a probe, and it crashes too
        assert server.get("/health").json["consecutive_crashes"] == 3
        assert server.act(request_id=good[0]).status == 200
        assert server.get("/health").json["state"] == "ready"
        assert server.get("/health").json["slots"] == {"prod": {"verdict": "ok", "consecutive_crashes": 0}}


def test_h6_max_consecutive_crashes_0_is_off(tiny: Path) -> None:
    bad, _ = names("raise")
    with Server(tiny, *failing("--max-consecutive-crashes", "0")) as server:
        assert {server.act(request_id=i).status for i in bad[:8]} == {500}
        assert server.get("/health").status == 200


def test_h6_a_policy_in_steps_whose_last_step_always_fails_becomes_degraded() -> None:
    """Its prefix succeeds every time; a step is no answer."""
    options = ("--inject-fault", "prod:nan:1", "--max-consecutive-crashes", "3")
    with Server(POLICY, *options) as server:
        for _ in range(3):
            with pytest.raises(AssertionError, match="processor_failed"):
                observe(server, 1)
        assert server.get("/health").json["state"] == "degraded"


def test_what_the_callers_do_wrong_is_no_crash(tiny: Path) -> None:
    options = ("--max-consecutive-crashes", "1", "--max-queue", "1")
    with Server(tiny, *options, held=True) as server:
        with busy(server), server.burst(numbered(1)) as waiting:
            waiting.send()
            server.reach(queued(1))
            assert server.act().code == "queue_full"
            assert server.post(b"{").status == 400
            assert server.post({"state": [1.0]}).status == 422
            server.release()
            assert waiting.answers()[0].status == 200
        server.reach(lambda m: m("reflex_in_flight_requests") == 0)
        assert server.get("/health").json["consecutive_crashes"] == 0


# -- the trace on a disk that fails ------------------------------------------------------------------------------------


def test_a_trace_that_cannot_be_written_is_told_and_serving_goes_on(tiny: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs a device that is always full")
    with Server(tiny, "--trace", "/dev/full") as server:
        for _ in range(3):
            assert server.act().status == 200
        told: Any = None
        while told is None:
            health = server.get("/health")
            assert health.status == 200
            told = health.json.get("trace_error")
        assert "No space left" in told
        assert server.act().status == 200


def test_the_trace_of_a_run_is_whole(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with Server(tiny, "--trace", str(file)) as server:
        for i in range(5):
            server.act(request_id=f"r{i}")
        assert server.stop() == 0
    trace = read_journal(file)
    assert trace.footer is not None
    assert trace.footer.batches == len(trace.batches) == 5
    assert trace.groups["prod"].budget == pytest.approx(0.1)
    assert [b.members[0].outcome for b in trace.batches] == ["done"] * 5


def test_e4_a_monolithic_and_a_decomposed_policy_meet_the_same_faults(tmp_path: Path) -> None:
    ids = [f"id-{i}" for i in range(12)]
    bad = marked("raise", 0.4, ids)
    for kind in ("monolithic", "decomposed"):
        export = write_export(tmp_path / kind, kind)
        with Server(export, "--inject-fault", "prod:raise:0.4", "--max-consecutive-crashes", "0") as server:
            picture = {"image": grey(), "instruction": "open the door", "state": [0.0, 0.0]}
            failed = {i for i in ids if server.post(picture | {"request_id": i}).status == 500}
        assert failed == bad


def test_expected_is_not_the_same_for_all() -> None:
    """The oracle of these tests can tell requests apart."""
    seen = {hashlib.sha256(expected([0.1 * i, -0.1 * i], i).tobytes()).hexdigest() for i in range(48)}
    assert len(seen) == 48
    assert not np.allclose(expected(STATE, 1), expected([0.1, 0.2], 1), atol=1e-3)
