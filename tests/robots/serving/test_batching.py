"""What the scheduler does, seen from outside: who shares a batch, who is refused, who is never computed."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.batch import Cause
from reflex_runtime.demo import POLICY
from reflex_runtime.observe.journal import BatchLine
from serving.exports import expected, write_tiny
from serving.harness import STATE, Server, encode
from serving.pair import until
from serving.requests import TAUGHT, busy, marked, numbered, observe, outlasted, queued, right, traced


def members(batches: list[BatchLine]) -> list[str]:
    return [m.id for b in batches for m in b.entered]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy without a batch axis that takes a few milliseconds a row."""
    return write_tiny(tmp_path_factory.mktemp("static"), batch=1, weight=64)


def test_b5_while_the_device_is_busy_the_queue_grows_into_one_batch(tiny: Path) -> None:
    with Server(tiny, held=True) as server, busy(server) as plug:
        answers = server.behind(numbered(10))
        assert plug.answers()[0].json["batch"]["size"] == 1
        assert all(right(a, i) for i, a in enumerate(answers))
        assert {(a.json["batch"]["id"], a.json["batch"]["size"]) for a in answers} == {(2, 10)}
        assert min(a.json["timing"]["queue_ms"] for a in answers) > 0.0  # counted from arrival, not from the forming


def test_b6_a_lone_request_is_not_held(tiny: Path, file: Path) -> None:
    with Server(tiny, "--batch-timeout-ms", "1000", "--trace", str(file)) as server:
        for _ in range(10):
            server.act(robot_id="alone")
        assert [batch.cause for batch in traced(server, file)] == ["idle"] * 10


def test_b3_the_reason_of_each_batch_is_told(tiny: Path, file: Path) -> None:
    options = ("--max-batch-cost-ms", "10", "--inject-latency-ms", "1", "--max-batch-size", "4")
    takes = "0.060 if batch.notes.get('injected_ms') else 0.001"  # not in the warm-up
    with Server(tiny, *options, "--trace", str(file), held=True, takes=takes) as server:
        first = server.act()
        assert first.json["batch"]["reason"] == "idle"  # it believes the warm-up
        causes = [server.act().json["batch"]["reason"] for _ in range(8)]
        assert causes[-1] == "over_budget"  # one alone takes 60 ms
        with busy(server):
            crowd = server.behind(numbered(9))
        assert {a.json["batch"]["size"] for a in crowd} <= {1, 2, 3, 4}
        batches = traced(server, file)
    reasons = {"timeout", "single_request_over_budget", "budget_reached"}
    assert {b.reason for b in batches} <= reasons
    assert all(b.cause not in reasons and Cause(b.cause).reason == b.reason for b in batches)


def test_b4_the_budget_is_a_ceiling_on_measured_time(tiny: Path) -> None:
    """Requests that are measured to take 10 ms each, under a budget of 45: four share a batch, and no more."""
    with Server(tiny, "--max-batch-cost-ms", "45", held=True, takes="0.010 * len(batch)") as server, busy(server):
        answers = server.behind([{"state": STATE}] * 60)
    batches = {a.json["batch"]["id"]: a.json["batch"] for a in answers}
    assert [b["size"] for b in batches.values()] == [4] * 15
    assert [b["cost_ms"] for b in batches.values()] == pytest.approx([40.0] * 15, rel=0.05)


@pytest.mark.parametrize(("options", "sizes"), [((), [50]), (("--max-batch-cost-ms", "106"), [16, 16, 16, 2])])
def test_b4_by_default_a_batch_may_take_sixteen_times_its_fixed_part(
    tiny: Path, options: tuple[str, ...], sizes: list[int]
) -> None:
    """Requests whose batches take 40 + 4 n ms: within 106 ms there are 16, and within 640 ms 150."""
    at_once = "from reflex_runtime.core.flush import Planner; Planner.PERIOD = 0.0"
    with Server(tiny, *options, before=at_once, held=True, takes="0.040 + 0.004 * len(batch)") as server, busy(server):
        answers = server.behind([{"state": STATE}] * 50)
        budget = server.get("/diagnostics/cost-model").json["max_batch_cost_ms"]["prod"]
    assert budget == pytest.approx(106.0 if options else 640.0, rel=0.1)
    assert list({a.json["batch"]["id"]: a.json["batch"]["size"] for a in answers}.values()) == sizes


def test_b8_diagnostics_show_every_key(tiny: Path) -> None:
    with Server(tiny) as server:
        for _ in range(5):
            server.act()
        body = server.get("/diagnostics/cost-model").json
    assert body["cost_model"] == "affine"
    documented, learned = body["slots"]["prod"]
    assert documented["median_ms"] > 0
    assert documented["samples"] >= 5
    assert set(learned) >= {"shape", "class", "stage", "samples", "ready", "fixed_ms", "marginal_ms"}
    assert learned["ready"] is True


def test_b8_the_median_alone_does_not_learn_what_company_costs(tiny: Path) -> None:
    sizes = {}
    for model in ("affine", "median"):
        with Server(tiny, "--cost-model", model, held=True, takes="0.080") as server:
            for _ in range(12):  # 80 ms each: two of them, by the median, are over the budget of 100
                server.act()
            with busy(server):
                sizes[model] = max(a.json["batch"]["size"] for a in server.behind(numbered(8)))
            shown = server.get("/diagnostics/cost-model").json["cost_model"]
    assert sizes["median"] < sizes["affine"]
    assert shown == "median"


def test_b9_hits_and_misses_are_separate_keys() -> None:
    picture = {"dtype": "|u1", "shape": [64, 64, 3], "data": bytes(64 * 64 * 3)}
    import msgpack

    body = msgpack.packb({"image": picture, "instruction": "open the door", "state": [0.0] * 4, "episode_id": "e"})
    with Server(POLICY) as server:
        for _ in range(6):
            assert server.ask("POST", "/act", body, {"Content-Type": "application/msgpack"}).status == 200
        rows = server.get("/diagnostics/cost-model").json["slots"]["prod"]
    classes = {row["class"]: row for row in rows if row["stage"] is None}
    hit, miss = classes["hit, 5 steps"], classes["miss, 5 steps"]
    assert hit["samples"] == 5
    assert miss["samples"] > 5  # the warm-up's were misses
    assert hit["median_ms"] > 0
    assert miss["median_ms"] > 0


def test_b11_without_a_batch_axis_the_trace_says_so(tiny: Path, tmp_path: Path, file: Path) -> None:
    static = write_tiny(tmp_path / "static", batch=1)
    for export, noted in ((static, "sequential"), (tiny, None)):
        with Server(export, "--trace", str(file), held=True) as server:
            with busy(server):
                answers = server.behind(numbered(5))
            assert all(right(a, i) for i, a in enumerate(answers))
            assert server.get("/config").json["policy"]["fanout"] == (noted or "batched")
            batches = traced(server, file)
        assert [b.notes.get("fanout") for b in batches] == [noted, noted]


def test_b13_a_full_queue_refuses_with_exactly_these_values(tiny: Path) -> None:
    with Server(tiny, "--max-queue", "3", held=True) as server, busy(server):
        with server.burst(numbered(3)) as waiting:
            waiting.send()
            server.reach(queued(3))
            refused = server.act()
            body = refused.json
            assert refused.status == 503
            assert refused.headers["retry-after"] == "1"
            assert {k: body[k] for k in ("error", "message", "policy_id", "max_queue")} == {
                "error": "queue_full",
                "message": "policy runtime queue at capacity",
                "policy_id": "prod",
                "max_queue": 3,
            }
            assert set(body) - {"error", "message", "policy_id", "max_queue"} == {"request_id", "retry_safe"}
            assert body["retry_safe"] is True
            server.release()
            assert all(right(a, i) for i, a in enumerate(waiting.answers()))


def test_b13_retry_after_is_the_predicted_drain_time_when_that_is_longer(tiny: Path) -> None:
    with Server(tiny, "--max-queue", "4", "--inject-latency-ms", "1200", held=True) as server:
        assert server.act().status == 200  # 1.2 s each, so far
        with busy(server), server.burst([{"state": STATE}] * 4) as crowd:
            crowd.send()
            server.reach(queued(4))
            refused = server.act()
            assert refused.code == "queue_full"
            assert int(refused.headers["retry-after"]) >= 2


def test_b13_max_queue_s_bounds_the_predicted_time_that_waits(tiny: Path) -> None:
    with Server(tiny, "--max-queue-s", "0.000001", held=True) as server, busy(server):
        with server.burst(numbered(1)) as waiting:
            waiting.send()
            server.reach(queued(1))
            refused = server.act()
            assert (refused.status, refused.code, refused.json["max_queue_s"]) == (503, "queue_full", 1e-6)
            assert refused.headers["retry-after"] == "1"
            assert refused.json["message"] == "policy runtime queue at capacity"
            with server.burst([{"state": STATE, "priority": "background"}]) as background:
                background.send()
                server.reach(queued(2))
                server.release()
                assert [a.status for a in (*waiting.answers(), *background.answers())] == [200, 200]


def test_400_at_once_on_a_queue_of_64(tiny: Path) -> None:
    with Server(tiny, "--max-queue", "64", held=True) as server, busy(server), server.burst(numbered(400)) as burst:
        burst.send()
        server.reach(lambda m: m("reflex_requests_total", outcome="rejected") == 400 - 64)
        server.release()
        answers = burst.answers()
    served = [i for i, a in enumerate(answers) if a.status == 200]
    refused = [a for a in answers if a.status != 200]
    assert len(served) == 64
    assert all(right(answers[i], i) for i in served)
    assert {(a.status, a.code, a.headers["retry-after"]) for a in refused} == {(503, "queue_full", "1")}


def test_refusals_wait_for_no_batch(tiny: Path) -> None:
    with Server(tiny, "--max-queue", "1", held=True) as server, busy(server):
        with server.burst(numbered(1)) as waiting:
            waiting.send()
            server.reach(queued(1))
            assert {server.act().code for _ in range(40)} == {"queue_full"}  # the device has still not come back
            server.release()
            assert waiting.answers()[0].status == 200


def test_b16_callers_that_hang_up_while_queued_are_never_computed(tiny: Path, file: Path) -> None:
    with Server(tiny, "--trace", str(file), held=True) as server, busy(server) as plug:
        with server.burst(numbered(48)) as burst:
            burst.send()
            server.reach(queued(48))
            burst.hang_up(range(32))
            server.reach(lambda m: m("reflex_requests_total", outcome="cancelled") == 32)
            server.release()
            assert plug.answers()[0].status == 200
            answers = burst.answers(range(32, 48))
        assert all(right(a, i) for i, a in zip(range(32, 48), answers, strict=True))
        seen = server.metrics()
        assert seen("reflex_requests_total", outcome="failed") == 0
        assert seen("reflex_requests_total", outcome="ok") == 17
        assert server.get("/health").json["consecutive_crashes"] == 0
        assert members(traced(server, file)) == ["plug", *(f"r{i}" for i in range(32, 48))]


def test_b16_hanging_up_takes_back_pipelined_requests_too(tiny: Path, file: Path) -> None:
    with Server(tiny, "--trace", str(file), held=True) as server, busy(server) as plug:
        with server.connect() as sock:
            sock.sendall(b"".join(encode(fields) for fields in numbered(3)))
            server.reach(queued(1))  # answered in order, so one at a time is asked of the policy
        server.reach(lambda m: m("reflex_policy_runtime_queue_depth") == 0)
        server.release()
        assert plug.answers()[0].status == 200
        assert members(traced(server, file)) == ["plug"]


def test_b16_one_that_hangs_up_while_it_runs_is_no_fault(tiny: Path) -> None:
    with Server(tiny, "--max-consecutive-crashes", "1", held=True) as server:
        busy(server).hang_up([0])
        assert server.get("/health").status == 200  # the loop has met the end of the other connection before this
        server.release()
        seen = server.reach(lambda m: m("reflex_requests_total", outcome="cancelled") == 1)
        assert seen("reflex_requests_total", outcome="failed") == 0
        assert server.get("/health").json["consecutive_crashes"] == 0
        assert server.act().status == 200


def test_b16_closing_the_sending_side_while_queued_is_leaving(tiny: Path) -> None:
    with Server(tiny, held=True) as server, busy(server), server.burst(numbered(1)) as burst:
        burst.send()
        server.reach(queued(1))
        burst.sockets[0].shutdown(socket.SHUT_WR)
        assert burst.sockets[0].recv(1) == b""
        server.reach(lambda m: m("reflex_requests_total", outcome="cancelled") == 1)


def test_b17_deadlines(tiny: Path, file: Path) -> None:
    options = ("--max-batch-size", "1", "--trace", str(file))
    with Server(tiny, *options, held=True, takes=TAUGHT) as server:
        # passed while it waited: 504
        with busy(server):
            late = server.act(deadline_ms=50, request_id="late")
            server.release()
        assert (late.status, late.code, late.json["retry_safe"]) == (504, "deadline_exceeded", True)
        # could be met when it came, not any more when the device was free: shed
        shed = outlasted(server)
        assert (shed.status, shed.code) == (503, "deadline_unreachable")
        # cannot be met, by the estimate: 503 at once
        with busy(server):
            refused = server.act(deadline_ms=100, request_id="never")
            server.release()
        assert (refused.status, refused.code, refused.json["retry_safe"]) == (503, "deadline_unreachable", True)
        assert refused.json["needed_ms"] > 100
        # can be met
        assert server.act(deadline_ms=600_000, request_id="fine").status == 200
        seen = server.metrics()
        counts = {o: seen("reflex_requests_total", outcome=o) for o in ("expired", "rejected", "shed", "failed")}
        assert counts == {"expired": 1, "rejected": 1, "shed": 1, "failed": 0}
        ran = members(traced(server, file))
    assert not {"late", "never", "r0"} & set(ran)
    assert ran[-1] == "fine"


def test_b17_a_slow_spell_locks_nobody_out(tiny: Path, tmp_path: Path) -> None:
    spell = tmp_path / "spell"
    takes = f"600.0 if __import__('os').path.exists({str(spell)!r}) else 0.005"
    with Server(tiny, held=True, takes=takes) as server:
        spell.touch()
        for _ in range(5):
            assert server.act().status == 200  # it learns that one takes 600 s
        with busy(server):
            assert server.act(deadline_ms=400_000).code == "deadline_unreachable"
            server.release()
        spell.unlink()
        until(lambda: server.act(deadline_ms=400_000).status == 200)  # nothing else is sent
        assert {server.act(deadline_ms=400_000).status for _ in range(20)} == {200}


def test_b17_deadline_ms_is_the_limit_of_requests_that_bring_none(tiny: Path) -> None:
    with Server(tiny, "--deadline-ms", "100", held=True) as server, busy(server):
        with server.burst([{"state": STATE}, {"state": STATE, "deadline_ms": 60_000}]) as burst:
            burst.send()
            assert burst.answers([0])[0].status == 504  # the device has still not come back
            server.release()
            assert burst.answers([1])[0].status == 200


def with_one_bad(kind: str, rate: float, n: int) -> list[dict[str, Any]]:
    """n requests of which the fault strikes exactly the third."""
    ids = [f"request-{i}" for i in range(1000)]
    bad = marked(kind, rate, ids)
    fine = [i for i in ids if i not in bad][: n - 1]
    chosen = [*fine[:2], min(bad), *fine[2:]]
    return [{"state": [0.1 * i, 0.0], "seed": i, "request_id": name} for i, name in enumerate(chosen)]


@pytest.mark.parametrize("kind", ["raise", "nan"])
def test_b18_one_bad_item_of_16_leaves_15_right_answers(kind: str, tiny: Path, file: Path) -> None:
    options = ("--inject-fault", f"prod:{kind}:0.05", "--trace", str(file))
    with Server(tiny, *options, held=True) as server:
        requests = with_one_bad(kind, 0.05, 16)
        with busy(server):
            answers = server.behind(requests)
        assert [a.status for a in answers] == [200, 200, 500] + [200] * 13
        for i, answer in enumerate(answers):
            if i != 2:
                assert np.allclose(answer.json["actions"], expected([0.1 * i, 0.0], i), atol=1e-5)
                assert answer.json["batch"]["size"] == 16
        bad = answers[2].json
        assert (bad["error"], bad["retry_safe"]) == ("processor_failed", False)
        assert "Traceback" not in bad["message"]
        assert server.get("/health").json["consecutive_crashes"] == 0  # others of the batch succeeded
        _, batch, *parts = traced(server, file)
    ended = [m.outcome for m in batch.members]
    assert not any(b.crashed for b in (batch, *parts))
    if kind == "raise":
        assert ended == ["apart"] * 16
        assert 0 < len(parts) <= 2 * 4
        assert {b.cause for b in parts} == {"apart"}
        assert sorted(str(m.outcome) for b in parts for m in b.members if m.outcome != "apart") == (
            ["done"] * 15 + ["failed"]
        )
    else:
        assert (ended, parts) == (["done", "done", "failed"] + ["done"] * 13, [])


def test_16_together_of_which_one_is_malformed(tiny: Path) -> None:
    requests: list[Any] = numbered(16)
    requests[5] = {"state": [float("nan"), 1.0]}
    requests[11] = b'{"state": [1, 2'
    with Server(tiny, held=True) as server, busy(server), server.burst(requests) as burst:
        burst.send()
        server.reach(queued(14))
        server.release()
        answers = burst.answers()
    assert {a.json["batch"]["size"] for a in answers if a.status == 200} == {14}
    assert (answers[5].status, answers[5].json["field"]) == (422, "state")
    assert (answers[11].status, answers[11].code) == (400, "invalid_json")
    assert all(right(a, i) for i, a in enumerate(answers) if i not in (5, 11))


def test_b21_a_greedy_client_does_not_starve_the_others(tiny: Path) -> None:
    with Server(tiny, "--max-batch-size", "4", held=True) as server, busy(server):
        greedy = numbered(24, robot_id="greedy")
        modest = [{"state": STATE, "robot_id": f"modest-{i}"} for i in range(3)]
        with server.burst([*greedy, *modest]) as burst:
            burst.send(0, 24)
            server.reach(queued(24))
            burst.send(24)
            server.reach(queued(27))
            server.release()
            answers = burst.answers()
    last_of_the_greedy = max(a.json["batch"]["id"] for a in answers[:24])
    assert last_of_the_greedy >= 7
    assert max(a.json["batch"]["id"] for a in answers[24:]) <= 3  # the plug is 1; 2 may have left before they came


def test_b21_a_client_at_its_cap_is_429(tiny: Path) -> None:
    options = ("--max-in-flight-per-client", "2")
    with Server(tiny, *options, held=True) as server, busy(server), server.burst(numbered(2, robot_id="r")) as burst:
        burst.send()
        server.reach(queued(2))
        refused = server.act(robot_id="r")
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (429, "client_at_capacity", "1")
        assert refused.json["retry_safe"] is True
        server.release()
        assert server.act(robot_id="other").status == 200
        assert [a.status for a in burst.answers()] == [200, 200]
        assert server.act(robot_id="r").status == 200


def test_b21_without_a_robot_the_episode_and_then_the_connection_is_the_client(tiny: Path) -> None:
    with Server(tiny, "--max-in-flight-per-client", "1", held=True) as server, busy(server):
        with server.burst([{"state": STATE, "episode_id": "e"}, {"state": STATE}, {"state": STATE}]) as burst:
            burst.send()
            server.reach(queued(3))
            assert server.act(episode_id="e").status == 429
            server.release()
            assert [a.status for a in burst.answers()] == [200] * 3


@pytest.mark.parametrize("latest", [True, False])
def test_b22_a_newer_request_of_a_robot_replaces_its_waiting_one(tiny: Path, file: Path, latest: bool) -> None:
    options = ["--latest-only"] if latest else []
    with Server(tiny, "--trace", str(file), *options, held=True) as server, busy(server) as plug:
        requests = numbered(3, robot_id="r") + numbered(1, robot_id="s", request_id="other")
        with server.burst(requests) as burst:
            for i in range(4):
                burst.send(i, i + 1)
                server.reach(lambda m, i=i: m("reflex_in_flight_requests") >= 2 and _seen(server, m, i, latest))
            replaced = burst.answers([0, 1]) if latest else []  # at once, not with the batch
            server.release()
            answers = replaced + burst.answers(range(len(replaced), 4))
        assert plug.answers()[0].status == 200  # it ran already: it is not replaced
        if not latest:
            assert [a.status for a in answers] == [200] * 4
            return
        assert [a.status for a in answers] == [409, 409, 200, 200]
        assert {(a.code, a.json["retry_safe"]) for a in answers[:2]} == {("superseded", True)}
        age = answers[2].json["timing"]["age_ms"]
        assert answers[2].json["timing"]["queue_ms"] <= age
        assert server.metrics()("reflex_requests_total", outcome="superseded") == 2
        assert members(traced(server, file)) == ["plug", "r2", "other"]


def test_b22_the_replaced_request_is_answered_at_once(tiny: Path) -> None:
    with Server(tiny, "--latest-only", held=True) as server, busy(server):
        with server.burst(numbered(2, robot_id="r")) as burst:
            burst.send(0, 1)
            server.reach(queued(1))
            burst.send(1, 2)
            (replaced,) = burst.answers([0])  # nothing else is asked meanwhile
            assert (replaced.status, replaced.code) == (409, "superseded")
            assert server.metrics()("reflex_in_flight_requests") == 2  # the device has still not come back


def _seen(server: Server, metrics: Any, i: int, latest: bool) -> bool:
    """Whether request i of the three of one robot, and a fourth of another, has been queued."""
    waiting = metrics("reflex_policy_runtime_queue_depth")
    if not latest:
        return bool(waiting == i + 1)
    return bool(waiting == (2 if i == 3 else 1) and metrics("reflex_requests_total", outcome="superseded") == min(i, 2))


def test_b23_a_newcomer_joins_a_running_batch_at_a_step(file: Path) -> None:
    body = {"instruction": "open the door", "state": [0.0] * 4, "image": _black()}
    options = ("--max-batch-cost-ms", "10000", "--trace", str(file))
    takes = "0.001 if batch.stage == 'prefix' else 1.0"  # so that joining pays, however long the first waits here
    with Server(POLICY, *options, held=True, takes=takes) as server:
        with server.burst([body | {"request_id": "plug"}, body | {"request_id": "second"}]) as burst:
            burst.send(0, 1)
            server.release()  # its prefix
            server.release()  # and its first step
            server.reach(lambda m: m("reflex_denoise_steps_total") == 1)
            burst.send(1, 2)
            server.reach(queued(1))  # while the second step is held
            for _ in range(4):
                server.release()
            first, second = burst.answers()
        seen = server.metrics()
        batches = traced(server, file)
    assert first.json["batch"]["size"] == second.json["batch"]["size"] == 1  # each was an admission group of its own
    assert seen("reflex_batch_flush_total") == 2
    assert seen("reflex_denoise_steps_total") == 10
    shared = [b for b in batches if b.stage == "denoise" and b.size == 2]
    assert shared
    assert all({m.id for m in b.members} == {"plug", "second"} for b in shared)
    # and the answers are those of requests alone
    with Server(POLICY) as server:
        for answer, name in ((first, "plug"), (second, "second")):
            alone = server.post(body | {"request_id": name}).json["actions"]
            assert np.allclose(answer.json["actions"], alone, atol=1e-4)


def _black() -> str:
    import base64
    import io

    import PIL.Image

    file = io.BytesIO()
    PIL.Image.new("RGB", (64, 64)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


# -- options without a rule of their own -------------------------------------------------------------------------------


def test_h10_max_batch_size_bounds_a_batch(tiny: Path) -> None:
    with Server(tiny, "--max-batch-size", "3", held=True) as server, busy(server):
        sizes = [a.json["batch"]["size"] for a in server.behind(numbered(10))]
    assert max(sizes) == 3


def test_h10_deterministic_is_the_size_of_every_call(tiny: Path, tmp_path: Path) -> None:
    sizes = tmp_path / "sizes"
    spy = f"""
from reflex_runtime.run.onnx_session import OnnxSession
_session_run = OnnxSession.run
def run(self, rows, notes=None):
    with open({str(sizes)!r}, "a") as file:
        print(len(rows["pose"]), file=file)
    return _session_run(self, rows, notes)
OnnxSession.run = run
"""
    with Server(tiny, "--deterministic", "4", before=spy, held=True) as server, busy(server):
        together = server.behind(numbered(10))
        alone = [server.post(fields) for fields in numbered(10)]
    assert max(answer.json["batch"]["size"] for answer in together) == 4
    assert [answer.json["actions"] for answer in together] == [answer.json["actions"] for answer in alone]
    assert set(sizes.read_text().split()) == {"4"}


def test_h10_batch_timeout_holds_for_callers_that_come_back(tiny: Path) -> None:
    """Eight callers in closed loop, split in two by a late start: only with a hold is a batch ever kept waiting."""
    for hold in (0, 50):
        options = ("--batch-timeout-ms", str(hold), "--inject-latency-ms", "60")
        with Server(tiny, *options) as server, _closed_loop(server, callers=8) as answered:

            def held() -> bool:
                assert all(answered.acquire(timeout=60) for _ in range(64))  # nothing else is asked meanwhile
                return server.metrics()("reflex_batch_flush_total", cause="held") > 0

            assert until(held) if hold else not held()


@contextmanager
def _closed_loop(server: Server, callers: int) -> Iterator[threading.Semaphore]:
    """Yields a semaphore that is released with each answer."""
    over, answered = threading.Event(), threading.Semaphore(0)

    def robot(i: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        while not over.is_set():
            connection.request("POST", "/act", json.dumps({"state": STATE, "robot_id": f"robot-{i}"}))
            assert json.loads(connection.getresponse().read())["num_actions"]
            answered.release()
        connection.close()

    threads = [threading.Thread(target=robot, args=(i,)) for i in range(callers)]
    threads[0].start()
    try:
        server.reach(lambda m: m("reflex_in_flight_requests") == 1)
        for thread in threads[1:]:
            thread.start()
        yield answered
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.timing  # CPU
def test_h10_threads_are_onnx_runtimes(one_by_one: Path) -> None:
    import psutil

    for threads in (1, 4):  # of which the device's is one; beside the loop's, once the thread that loaded has ended
        with Server(one_by_one, "--threads", str(threads)) as server:
            process = psutil.Process(server.process.pid)
            server.wait_until(lambda one=process, n=1 + threads: one.num_threads() == n)


def test_h10_the_provider_in_force_is_shown(tiny: Path) -> None:
    with Server(tiny, "--provider", "CPUExecutionProvider", "--robot-id", "arm-7") as server:
        assert server.get("/config").json["policy"]["provider"] == "CPUExecutionProvider"
        assert server.get("/health").json["robot_id"] == "arm-7"


# -- E1: the prefix cache ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cached() -> Iterator[Server]:
    with Server(POLICY) as server:
        yield server


def test_e1_the_same_scene_of_an_episode_is_a_hit(cached: Server) -> None:
    before = cached.metrics()
    first = observe(cached, 10)
    again = observe(cached, 10)
    assert (first["cache"], again["cache"]) == ("miss", "hit")
    assert np.allclose(first["actions"], again["actions"], atol=1e-5)
    assert observe(cached, 11)["cache"] == "miss"  # another picture
    assert observe(cached, 10, episode="f")["cache"] == "miss"  # another episode
    assert observe(cached, 10, instruction="close the door")["cache"] == "miss"
    assert observe(cached, 10, episode=None)["cache"] == "off"  # nothing is kept without an episode
    after = cached.metrics()
    moved = {n: after(n) - before(n) for n in ("reflex_cache_hit_total", "reflex_cache_miss_total")}
    assert moved == {"reflex_cache_hit_total": 1, "reflex_cache_miss_total": 4}


def test_e1_prefix_max_age_chunks_allows_so_many_blind_chunks() -> None:
    with Server(POLICY, "--prefix-max-age-chunks", "2") as server:
        uses = [observe(server, shade)["cache"] for shade in (1, 2, 3, 4, 5)]
        assert uses == ["miss", "hit_stale", "hit_stale", "miss", "hit_stale"]
        assert server.metrics()("reflex_cache_hit_total") == 3


def test_e1_prefix_cache_mb_0_is_off() -> None:
    with Server(POLICY, "--prefix-cache-mb", "0") as server:
        assert [observe(server, 1)["cache"] for _ in range(2)] == ["off", "off"]
        seen = server.metrics()
        assert seen("reflex_cache_hit_total") == seen("reflex_cache_miss_total") == 0
        assert server.get("/config").json["policy"]["prefix_cache"] is None


def test_h10_prefix_cache_mb_bounds_what_is_kept() -> None:
    with Server(POLICY, "--prefix-cache-mb", "0.05") as server:
        for shade in range(30):
            observe(server, shade)
        cache = server.get("/config").json["policy"]["prefix_cache"]
    assert cache["bytes"] <= cache["max_bytes"] == int(0.05 * 2**20)
    assert cache["evictions"] > 0
