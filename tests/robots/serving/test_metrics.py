"""B14, B15, V9: every series exists from the start with `prod`, and every one is moved by something here."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.core.batch import Batch, BatchFinished, BatchScheduled, Cause, Done
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.observe.metrics import OUTCOMES, Metrics
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.web.app import App
from robots.tiny import write_export
from serving.harness import PATIENCE, Server
from serving.harness import Metrics as Reading
from serving.in_process import Caller, nothing, with_app
from serving.requests import TAUGHT, busy, marked, measured, numbered, observe, outlasted, queued

HISTOGRAMS = {
    "reflex_batch_cost_per_flush_ms": [10, 25, 50, 100, 200, 500, 1000, 2000, 5000],
    "reflex_batch_size_per_flush": [1, 2, 4, 8, 16, 32],
    "reflex_prepare_seconds": None,
    "reflex_queue_wait_seconds": None,
    "reflex_request_latency_seconds": None,
    "reflex_act_latency_seconds": None,
    "reflex_batch_cost_error_ratio": None,
}
COUNTERS = {
    "reflex_batch_flush_total",
    "reflex_batch_on_loop_total",
    "reflex_requests_total",
    "reflex_request_warnings_total",
    "reflex_cache_hit_total",
    "reflex_cache_miss_total",
    "reflex_denoise_steps_total",
    "reflex_denoise_steps_spared_total",
    "reflex_guard_total",
    "reflex_rtc_total",
    "reflex_injected_latency_seconds_total",
    "reflex_episode_outcomes_total",
    "reflex_recording_dropped_total",
    "reflex_device_busy_seconds_total",
}
GAUGES = {
    "reflex_captured_graph_hit_rate",
    "reflex_policy_runtime_queue_depth",
    "reflex_in_flight_requests",
    "reflex_backlog_seconds",
    "reflex_recording_failed",
    "reflex_slot_drained",
}
OF_A_SHADOW = {"reflex_shadow_delay_seconds", "reflex_shadow_divergence"}  # there only with one
MOVED: dict[str, str] = {
    "reflex_batch_cost_per_flush_ms": "test_b14_a_flush_moves_cost_size_and_reason",
    "reflex_batch_size_per_flush": "test_b14_a_flush_moves_cost_size_and_reason",
    "reflex_batch_on_loop_total": "test_p50_a_brief_policy_runs_on_the_loop_which_metrics_and_trace_tell",
    "reflex_batch_flush_total": "test_b14_a_flush_moves_cost_size_and_reason",
    "reflex_captured_graph_hit_rate": "test_b14_the_hit_rate_is_over_the_last_100_batches_of_captured_stages",
    "reflex_policy_runtime_queue_depth": "test_b14_the_queue_depth_is_read_live",
    "reflex_in_flight_requests": "test_b14_the_queue_depth_is_read_live",
    "reflex_backlog_seconds": "test_b14_the_backlog_is_the_predicted_time_of_what_waits",
    "reflex_device_busy_seconds_total": "test_b14_the_device_is_busy_for_as_long_as_batches_take",
    "reflex_request_warnings_total": "test_an_instruction_that_changes_nothing_is_a_warning_and_is_counted",
    "reflex_prepare_seconds": "test_a_request_waits_for_its_pictures_and_the_time_is_counted",
    "reflex_queue_wait_seconds": "test_b15_waits_and_latencies_are_seconds",
    "reflex_request_latency_seconds": "test_b15_every_outcome_is_counted",
    "reflex_requests_total": "test_b15_every_outcome_is_counted",
    "reflex_act_latency_seconds": "test_b15_waits_and_latencies_are_seconds",
    "reflex_batch_cost_error_ratio": "test_b15_the_error_ratio_is_predicted_over_measured",
    "reflex_cache_hit_total": "test_v9_cache_and_steps_move",
    "reflex_cache_miss_total": "test_v9_cache_and_steps_move",
    "reflex_denoise_steps_total": "test_v9_cache_and_steps_move",
    "reflex_denoise_steps_spared_total": "test_e3_adaptive_steps_stop_where_the_velocity_is_steady",
    "reflex_guard_total": "test_e3_the_guard_clamps_and_reports_it",
    "reflex_rtc_total": "test_e2_the_next_chunk_continues_the_last_and_the_answer_says_how",
    "reflex_injected_latency_seconds_total":
        "test_e3_injected_latency_shows_in_the_answer_the_trace_and_the_metrics",
    "reflex_episode_outcomes_total": "test_the_first_word_about_an_episode_counts",
    "reflex_recording_dropped_total": "test_t3_a_disk_error_ends_the_recording_and_nothing_else",
    "reflex_slot_drained": "test_v6_the_verdict_stands_in_headers_metrics_and_trace",
    "reflex_recording_failed": "test_t3_a_disk_error_ends_the_recording_and_nothing_else",
    "reflex_shadow_delay_seconds": "test_v10_what_a_shadow_step_costs_who_comes_meanwhile_is_told",
    "reflex_shadow_divergence": "test_v10_divergence_is_nothing_against_itself_and_something_against_another",
}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Reading]]:
    """A server with an embodiment, and what its metrics were before anybody asked it anything."""
    with Server(write_export(tmp_path_factory.mktemp("named"))) as server:
        yield server, server.metrics()


def test_b15_no_series_without_a_test_that_moves_it() -> None:
    families = Metrics().registry.collect()
    registered = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert registered == HISTOGRAMS.keys() | COUNTERS | GAUGES | OF_A_SHADOW
    assert registered == MOVED.keys()
    tests = [file.read_text(encoding="utf-8") for file in Path(__file__).parents[1].rglob("test_*.py")]
    for series, name in MOVED.items():
        assert any(f"def {name}(" in text and series in text for text in tests), series


def test_b14_every_series_exists_from_the_start_with_prod(fresh: tuple[Server, Reading]) -> None:
    _, seen = fresh
    labels = {"embodiment": "bench-arm", "policy_slot": "prod"}
    for name in COUNTERS | GAUGES:
        assert seen(name, **labels) == 0.0
    for name, buckets in HISTOGRAMS.items():
        assert seen(f"{name}_count", **labels) == 0.0
        assert seen(f"{name}_sum", **labels) == 0.0
        edges = {dict(found)["le"] for (n, found) in seen.samples if n == f"{name}_bucket"}
        if buckets is not None:
            assert {float(e) for e in edges} == {*map(float, buckets), float("inf")}
    for cause in Cause:
        assert seen("reflex_batch_flush_total", reason=cause.reason.value, cause=cause.value) == 0.0
    for outcome in OUTCOMES:
        assert seen("reflex_requests_total", outcome=outcome) == 0.0
        assert seen("reflex_request_latency_seconds_count", outcome=outcome) == 0.0
    assert not any(name.endswith("_created") for name, _ in seen.samples)
    for _, found in seen.samples:  # and no sample without the two labels
        assert labels.items() <= dict(found).items()


def test_b14_without_an_embodiment_the_label_is_unknown(tiny: Path) -> None:
    with Server(tiny) as server:
        assert server.metrics()("reflex_requests_total", embodiment="unknown", outcome="ok") == 0.0


def test_b14_a_flush_moves_cost_size_and_reason(tiny: Path) -> None:
    options = ("--max-batch-cost-ms", "10", "--max-batch-size", "4", "--inject-latency-ms", "1")
    with Server(tiny, *options, takes="0.06 if batch.notes.get('injected_ms') else 0.001") as server:
        for _ in range(8):
            server.act()
        seen = server.metrics()
        assert seen("reflex_batch_flush_total", reason="timeout", cause="idle") >= 1
        assert seen("reflex_batch_flush_total", reason="single_request_over_budget") >= 1
        assert seen("reflex_batch_size_per_flush_count") == seen("reflex_batch_flush_total") == 8
        assert seen("reflex_batch_size_per_flush_sum") == 8
        assert seen("reflex_batch_cost_per_flush_ms_count") == 8
        assert seen("reflex_batch_cost_per_flush_ms_bucket", le="50.0") < 8  # it learned of the 60 ms
    with Server(tiny, "--max-batch-size", "4", held=True) as server, busy(server):
        server.behind(numbered(8))
        seen = server.reach(lambda m: m("reflex_batch_flush_total") == 3)
        assert seen("reflex_batch_flush_total", reason="budget_reached", cause="size_reached") >= 1  # four, the cap
        assert seen("reflex_batch_size_per_flush_bucket", le="2.0") == 1


def test_b14_the_queue_depth_is_read_live(tiny: Path) -> None:
    with Server(tiny, held=True) as server, busy(server) as plug, server.burst(numbered(5)) as burst:
        burst.send()
        seen = server.reach(queued(5))
        assert seen("reflex_in_flight_requests") == 6
        burst.hang_up([0, 1])
        server.reach(lambda m: m("reflex_policy_runtime_queue_depth") == 3 and m("reflex_in_flight_requests") == 4)
        server.release()
        burst.answers([2, 3, 4])
        plug.answers()
        seen = server.metrics()
        assert seen("reflex_policy_runtime_queue_depth") == seen("reflex_in_flight_requests") == 0


def test_b14_the_backlog_is_the_predicted_time_of_what_waits(tiny: Path) -> None:
    with Server(tiny, held=True, takes="0.05 + 0.01 * len(batch)") as server:
        for body in numbered(12):
            assert server.post(body).status == 200  # it learns that a single takes 60 ms
        with busy(server) as plug, server.burst(numbered(5)) as burst:
            assert server.metrics()("reflex_backlog_seconds") == 0.0
            burst.send()
            assert 0.0 < server.reach(queued(5))("reflex_backlog_seconds") <= 5 * 0.06 + 1e-6
            server.release()
            burst.answers([0, 1, 2, 3, 4])
            plug.answers()
            assert server.metrics()("reflex_backlog_seconds") == 0.0


def test_b14_the_device_is_busy_for_as_long_as_batches_take(tiny: Path) -> None:
    with Server(tiny, "--inject-latency-ms", "30", "--brief-ms", "0") as server:
        for body in numbered(3):
            assert server.post(body).status == 200
        found = server.reach(lambda m: m("reflex_device_busy_seconds_total") >= 0.09)
        assert found("reflex_device_busy_seconds_total") < 30


def test_b14_the_hit_rate_is_over_the_last_100_batches_of_captured_stages(tiny: Path) -> None:
    metrics = Metrics()
    metrics.add_slot("prod", "arm", lambda: 0.0, lambda: 0.0, lambda: 0.0)

    def rate() -> float:
        return Reading(metrics.render().decode())("reflex_captured_graph_hit_rate")

    def flush(captured: bool | None) -> None:
        ticket = Ticket(Request(group="prod"), 0, 0.0)
        batch = Batch(1, "prod", "", "", Cause.IDLE, 0.0, 0.01, 0.01, {ticket: 1.0}, (ticket,))
        metrics(BatchScheduled(0.0, batch, 0))
        if captured is not None:  # else of a stage that is never captured
            batch.notes["captured"] = captured
        ticket.outcome = Done()
        metrics(BatchFinished(0.01, batch, 0.01, False))

    flush(None)
    assert rate() == 0.0
    flush(True)
    flush(None)
    flush(False)
    assert rate() == 0.5
    for _ in range(100):
        flush(True)
    assert rate() == 1.0
    with Server(tiny) as server:  # without --cuda-graphs it is 0
        server.act()
        assert server.metrics()("reflex_captured_graph_hit_rate") == 0.0


def test_b15_waits_and_latencies_are_seconds(tiny: Path) -> None:
    with Server(tiny, "--inject-latency-ms", "400", held=True) as server:
        began = time.monotonic()
        with busy(server) as plug:
            answers = [*server.behind(numbered(1)), *plug.answers()]
        assert {answer.status for answer in answers} == {200}
        seen = server.metrics()
        took = time.monotonic() - began
    assert seen("reflex_queue_wait_seconds_count") == 2
    assert 0.0 < seen("reflex_queue_wait_seconds_sum") < 2 * took
    assert seen("reflex_act_latency_seconds_count") == 2
    assert 0.8 <= seen("reflex_act_latency_seconds_sum") < 2 * took
    assert seen("reflex_request_latency_seconds_sum", outcome="ok") >= seen("reflex_act_latency_seconds_sum")


def test_b15_the_error_ratio_is_predicted_over_measured(tiny: Path) -> None:
    takes = "elapsed if elapsed == 0.05 else 0.001"  # of a warm-up
    with Server(tiny, "--brief-ms", "0", before=measured(0.05), takes=takes) as server:
        for _ in range(25):
            server.act()
        seen = server.metrics()
    assert seen("reflex_batch_cost_error_ratio_count") == 25
    assert seen("reflex_batch_cost_error_ratio_bucket", le="0.25") >= 1  # it believed the warm-up
    close = [seen("reflex_batch_cost_error_ratio_bucket", le=edge) for edge in ("0.75", "1.25")]
    assert close[1] - close[0] >= 10  # and learned


def test_b15_every_outcome_is_counted(tiny: Path) -> None:
    """One request for each way to end; `reflex_requests_total` and the latency histogram agree on all of them."""
    ids = [f"id-{i}" for i in range(40)]
    bad = min(marked("raise", 0.2, ids))
    fine = [i for i in ids if i not in marked("raise", 0.2, ids)]
    options = ("--inject-fault", "prod:raise:0.2", "--latest-only", "--max-queue", "3", "--drain-timeout-s", "0")
    with Server(tiny, *options, held=True) as server:
        assert server.act(request_id=bad).status == 500
        assert server.post(b"{").status == 400
        with busy(server), server.burst(_ends(fine)) as burst:
            burst.send(0, 3)
            server.reach(lambda m: _count(m, "superseded") == 1)
            burst.hang_up([0])
            server.reach(lambda m: _count(m, "cancelled") == 1)
            burst.send(3)
            server.reach(queued(3))
            assert server.act(request_id=fine[20]).code == "queue_full"
            server.release()
            seen = server.reach(lambda m: _count(m, "ok") >= 1 and m("reflex_in_flight_requests") == 0)
        for outcome in ("ok", "cancelled", "superseded", "failed", "client_error", "rejected"):
            assert seen("reflex_requests_total", outcome=outcome) >= 1, outcome
        for outcome in OUTCOMES:
            total = seen("reflex_requests_total", outcome=outcome)
            assert total == seen("reflex_request_latency_seconds_count", outcome=outcome)


def _ends(fine: list[str]) -> list[dict[str, Any]]:
    state = {"state": [0.0, 0.0]}
    return [
        state | {"request_id": fine[10], "robot_id": "leaves"},
        state | {"request_id": fine[11], "robot_id": "newer"},
        state | {"request_id": fine[12], "robot_id": "newer"},
        state | {"request_id": fine[13], "robot_id": "one"},
        state | {"request_id": fine[14], "robot_id": "another"},
    ]


def _count(metrics: Reading, *outcomes: str) -> float:
    return sum(metrics("reflex_requests_total", outcome=o) for o in outcomes)


def test_b15_expired_and_shed_are_outcomes_of_their_own(tiny: Path) -> None:
    with Server(tiny, "--max-batch-size", "1", held=True, takes=TAUGHT) as server:
        with busy(server):
            assert server.act(deadline_ms=50).status == 504
            server.release()
        assert outlasted(server).code == "deadline_unreachable"  # shed: it had been queued
        seen = server.metrics()
        assert (_count(seen, "expired"), _count(seen, "shed"), _count(seen, "rejected")) == (1, 1, 0)


def test_b15_drained_is_an_outcome_of_its_own(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        processor, gate = runtime.first.slots["prod"], threading.Event()
        processor.run = lambda batch: gate.wait(PATIENCE)  # type: ignore[method-assign, assignment, return-value]
        caller = Caller(app)
        caller.say(json.dumps(numbered(1)[0]).encode())
        while not runtime.batcher.scheduler.unsettled("prod"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        app.close()
        runtime.drain()
        await runtime.stop(asyncio.get_running_loop().time(), nothing)
        assert (await caller.answer()).code == "shutting_down"
        assert _count(Reading(runtime.metrics.render().decode()), "drained") == 1
        gate.set()

    with_app(tiny, check)


def test_v9_cache_and_steps_move() -> None:
    from reflex_runtime.demo import POLICY

    with Server(POLICY) as server:
        for _ in range(3):
            observe(server, 7)
        seen = server.metrics()
    labels = {"embodiment": "metaworld-sawyer", "policy_slot": "prod"}
    found = {dict(k)["embodiment"] for _, k in seen.samples}
    assert len(found) == 1
    labels["embodiment"] = found.pop()
    assert seen("reflex_cache_miss_total", **labels) == 1
    assert seen("reflex_cache_hit_total", **labels) == 2
    assert seen("reflex_denoise_steps_total", **labels) == 15
    assert seen("reflex_act_latency_seconds_count", **labels) == 3


def test_v9_a_policy_in_one_call_counts_its_steps_too(fresh: tuple[Server, Reading]) -> None:
    server, before = fresh
    picture = _picture()
    sent = {"image": picture, "instruction": "open the door", "state": [0.0, 0.0]}
    assert server.post(sent).status == 200
    after = server.metrics()
    assert after("reflex_denoise_steps_total") - before("reflex_denoise_steps_total") == 5


def _picture() -> str:
    from serving.requests import grey

    return grey()
