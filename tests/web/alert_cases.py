"""For each alert of deploy/prometheus what makes it fire, and the nearest that does not: series and their values minute
by minute, as `promtool test rules` writes them, at 40 minutes."""

from __future__ import annotations

Series = dict[str, str]


def share(name: str, wrong: str, right: str, of_wrong: int, of_all: int) -> Series:
    """Two counters: one grows by `of_wrong` a minute, the other by the rest of `of_all`."""
    return {
        f'{name}{{instance="a", {wrong}}}': f"0+{of_wrong}x60",
        f'{name}{{instance="a", {right}}}': f"0+{of_all - of_wrong}x60",
    }


def one(series: str, values: str) -> Series:
    return {series.replace("{", '{instance="a", ', 1) if "{" in series else f'{series}{{instance="a"}}': values}


REQUESTS, ANSWERS = "reflex_requests_total", "reflex_openai_requests_total"
RATIO, QUEUE = "reflex_batch_cost_error_ratio", "reflex_request_queue_time_seconds"
HOLD = "reflex_generate_batcher_queue_wait_ms"


def waits(name: str, bound: str, above: int) -> Series:
    """A histogram, of which `above` of 100 values a minute are over the bound."""
    found = one(f'{name}_bucket{{le="{bound}"}}', f"0+{100 - above}x60")
    for le in ("1000.0", "+Inf"):
        found |= one(f'{name}_bucket{{le="{le}"}}', "0+100x60")
    return found


def ratio(mean: float) -> Series:
    return one(f"{RATIO}_sum", f"0+{100 * mean:g}x60") | one(f"{RATIO}_count", "0+100x60")


def feed(up: int, age: int, skipped: int = 0) -> Series:
    found = one('reflex_feed_up{feed="f"}', f"{up}x60") | one('reflex_feed_age_seconds{feed="f"}', f"{age}x60")
    found |= one('reflex_feed_frames_total{feed="f"}', "0+600x60")
    return found | one('reflex_feed_drops_total{feed="f", reason="skipped"}', f"0+{skipped}x60")


def failing(failed: int) -> Series:
    found = one('reflex_feed_frames_total{feed="f"}', "0+1000x60")
    return found | one('reflex_feed_drops_total{feed="f", reason="failed"}', f"0+{failed}x60")


def lost(opened: str) -> Series:
    return one('reflex_feed_up{feed="f"}', "0x60") | one('reflex_feed_restarts_total{feed="f"}', opened)


def preempted(count: int) -> Series:
    found = one("reflex_num_preemptions_total", f"0+{count}x60")
    return found | one('reflex_request_success_total{finished_reason="stop"}', "0+100x60")


SLOT = 'reflex_slot_drained{policy_slot="a"}'
CASES: dict[str, tuple[Series, Series]] = {
    "ReflexDown": (one('up{job="reflex"}', "1x30 0x30"), one('up{job="reflex"}', "0x30 1x30")),
    "ReflexSpansLost": (
        one('reflex_spans_total{result="failed"}', "0+1x60"), one('reflex_spans_total{result="exported"}', "0+1x60"),
    ),
    "ReflexSlotDrained": (one(SLOT, "0x30 1x30"), one(SLOT, "1x30 0x30")),
    "ReflexRefuses": (
        share(REQUESTS, 'outcome="rejected"', 'outcome="ok"', 11, 1000),
        share(REQUESTS, 'outcome="shed"', 'outcome="ok"', 10, 1000),
    ),
    "ReflexFails": (
        share(REQUESTS, 'outcome="failed"', 'outcome="ok"', 2, 1000),
        share(REQUESTS, 'outcome="failed"', 'outcome="ok"', 1, 1000),
    ),
    "ReflexBacklog": (one("reflex_backlog_seconds", "1.5x60"), one("reflex_backlog_seconds", "0.9x60")),
    "ReflexMispredicts": (ratio(1.6), ratio(0.6)),
    "ReflexRecordingFailed": (one("reflex_recording_failed", "0x30 1x30"), one("reflex_recording_failed", "0x60")),
    "ReflexDrillRuns": (
        one("reflex_injected_latency_seconds_total", "0+1x60"), one("reflex_injected_latency_seconds_total", "7x60"),
    ),
    "ReflexAnswersFail": (
        share(ANSWERS, 'status="500"', 'status="200"', 2, 1000), share(ANSWERS, 'status="400"', 'status="200"', 9, 10),
    ),
    "ReflexAnswersRefused": (
        share(ANSWERS, 'status="429"', 'status="200"', 11, 1000),
        share(ANSWERS, 'status="503"', 'status="200"', 10, 1000),
    ),
    "ReflexTokensWait": (waits(QUEUE, "1.0", 51), waits(QUEUE, "1.0", 49)),
    "ReflexCacheSmall": (preempted(11), preempted(10)),
    "ReflexEngineDefect": (
        one('reflex_invariant_violations_total{invariant="blocks"}', "0x30 1x30"),
        one('reflex_invariant_violations_total{invariant="blocks"}', "0x60"),
    ),
    "ReflexWorkerDown": (
        one('reflex_worker_ready{worker="worker-0"}', "1x30 0x30"),
        one('reflex_worker_ready{worker="worker-0"}', "1x60"),
    ),
    "ReflexWorkerRestarts": (
        one('reflex_worker_restarts_total{worker="worker-0"}', "0+1x60"),
        one('reflex_worker_restarts_total{worker="worker-0"}', "0x30 2x30"),
    ),
    "ReflexBatcherWaits": (waits(HOLD, "100.0", 6), waits(HOLD, "100.0", 4)),
    "ReflexBatcherOff": (
        one('reflex_generate_batcher_fallback_total{reason="capability"}', "0+1x60"),
        one('reflex_generate_batcher_fallback_total{reason="options"}', "0+1x60"),
    ),
    "ReflexFeedLost": (lost("0+1x60"), lost("7x60")),
    "ReflexFeedStands": (feed(1, 11), feed(1, 11, skipped=600)),
    "ReflexFeedBatchesFail": (
        one('reflex_feed_batch_consecutive_errors{coordinator="c"}', "3x60"),
        one('reflex_feed_batch_consecutive_errors{coordinator="c"}', "2x60"),
    ),
    "ReflexFeedFails": (failing(11), failing(10)),
    "ReflexFeedResultsFail": (
        one('reflex_feed_sink_errors_total{feed="f"}', "0+1x60"),
        one('reflex_feed_sink_errors_total{feed="f"}', "7x60"),
    ),
    "ReflexFeedOutputLost": (
        one('reflex_feed_output_up{output="o"}', "1x30 0x30"), one('reflex_feed_output_up{output="o"}', "0x30 1x30"),
    ),
    "ReflexFeedResultsLost": (
        one('reflex_feed_output_drops_total{output="o", reason="lost"}', "0+1x60"),
        one('reflex_feed_output_drops_total{output="o", reason="lost"}', "7x60"),
    ),
}  # fmt: skip
