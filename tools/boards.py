"""Makes the Grafana boards in deploy/grafana from the table of series (`reflex_runtime/observe/metrics.py`).

    python tools/boards.py

A panel names series, and their kind says how they are asked for: of a counter its rate, of a histogram of times three
quantiles, of another histogram its mean, of a gauge its value. `A / B` is one rate over the other. A test makes the
boards again, looks for series that are on none, and asks a real Prometheus every expression.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from reflex_runtime.observe import metrics
from reflex_runtime.observe.metrics import SeriesRow

FOLDER: Final = Path(__file__).resolve().parent.parent / "deploy" / "grafana"
SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
SERVER: Final = 'instance=~"$instance"'
PER_LINE, WIDTH, HEIGHT = 3, 8, 7

KEYS: Final = {  # what a series of each table is about: panels have a line for each
    "POLICIES": ("policy", "policy_slot"), "ENGINE": (), "MODEL_SERVER": (), "STREAMS": (), "WORKERS": (),
    "GENERATE_BATCHER": (), "FUNCTIONS": ("function",),
    "SPANS": (), "FEEDS": ("feed",), "COORDINATORS": ("coordinator",), "OUTPUTS": ("output",),
    "FEEDS_AT_COORDINATORS": ("feed",),
}  # fmt: skip
ROWS: Final[dict[str, tuple[SeriesRow, tuple[str, ...]]]] = {
    row.name: (row, (*key, *row.labels)) for table, key in KEYS.items() for row in getattr(metrics, table)
}
LEFT_OUT: Final = {  # series that are on no board, and why
    "reflex_feed_pending": "of each feed it is what reflex_feed_in_flight says",
    "reflex_feed_batch_items_total": "summed over feeds, reflex_feed_submissions_total says it",
    "reflex_feed_batch_timeouts_total": "summed over feeds, reflex_feed_timeouts_total says it",
}


class Panel(NamedTuple):
    """A panel. shown: a series, or several by what a legend calls them. by: the labels that have lines of their own;
    None: all that the series has beside those of its server. of: what several gauges become. over: how long rates are
    taken."""

    title: str
    shown: str | dict[str, str]
    by: tuple[str, ...] | None = None
    of: str = "sum"
    over: str = "$__rate_interval"

    def rate(self, name: str) -> str:
        """Of a counter, perhaps with `{more labels}`."""
        name, _, more = name.rstrip("}").partition("{")
        return f"rate({name}{{{SERVER}{', ' if more else ''}{more}}}[{self.over}])"


SPANS: Final = Panel("Spans by what became of them", "reflex_spans_total")
BOARDS: Final[dict[str, tuple[str, str, dict[str, list[Panel]]]]] = {
    "policies": ("Reflex: policies", "reflex_requests_total", {
        "Requests": [
            Panel("Requests by outcome", "reflex_requests_total", ("outcome",)),
            Panel("Requests by protocol", "reflex_requests_total", ("wire",)),
            Panel("Answers that warn", "reflex_request_warnings_total", ("kind",)),
            Panel("From the head of a request to its answer", "reflex_request_latency_seconds", ("outcome",)),
            Panel("Queue and model", "reflex_act_latency_seconds"),
            Panel("Before the first batch", "reflex_queue_wait_seconds"),
            Panel("Preparing pictures", "reflex_prepare_seconds"),
            Panel("Requests now", {"waiting": "reflex_policy_runtime_queue_depth",
                                   "all": "reflex_in_flight_requests"}),
            Panel("Predicted work that waits", "reflex_backlog_seconds"),
        ],
        "Batches": [
            Panel("Requests in a batch", "reflex_batch_size_per_flush"),
            Panel("Why batches leave", "reflex_batch_flush_total", ("cause",)),
            Panel("Predicted over measured time", "reflex_batch_cost_error_ratio"),
            Panel("Time of the device that is busy", "reflex_device_busy_seconds_total"),
            Panel("Estimated time of a batch", "reflex_batch_cost_per_flush_ms"),
            Panel("Batches on the event loop, and at captured sizes",
                  {"on the loop": "reflex_batch_on_loop_total / reflex_batch_size_per_flush_count",
                   "captured": "reflex_captured_graph_hit_rate"}, of="avg"),
        ],
        "Policies in steps": [
            Panel("Prefix cache", {"hits": "reflex_cache_hit_total", "misses": "reflex_cache_miss_total"}),
            Panel("Denoise steps", {"made": "reflex_denoise_steps_total",
                                    "spared": "reflex_denoise_steps_spared_total"}),
            Panel("What was done to chunks", {"guarded": "reflex_guard_total", "continued": "reflex_rtc_total"}),
        ],
        "Versions and recording": [
            Panel("Slots out of service", "reflex_slot_drained", of="max"),
            Panel("Episodes that succeed, of an hour",
                  {"": 'reflex_episode_outcomes_total{success="true"} / reflex_episode_outcomes_total'},
                  ("policy", "policy_slot"), over="1h"),
            Panel("Shadow: distance of actions", "reflex_shadow_divergence"),
            Panel("Shadow: what requests waited for it", "reflex_shadow_delay_seconds"),
            Panel("Recording", {"lines missing": "reflex_recording_dropped_total",
                                "failed": "reflex_recording_failed"}, ("instance",), "max"),
            Panel("Latency that a drill adds", "reflex_injected_latency_seconds_total"),
            SPANS,
        ],
    }),
    "tokens": ("Reflex: language models", "reflex_openai_requests_total", {
        "Answers": [
            Panel("Answers by path and status", "reflex_openai_requests_total"),
            Panel("Requests by how they ended", "reflex_request_success_total"),
            Panel("Streams held for slow readers", "reflex_stream_holds_total"),
            Panel("Arrival to the first token", "reflex_time_to_first_token_seconds"),
            Panel("One token to the next", "reflex_inter_token_latency_seconds"),
            Panel("Arrival to the end", "reflex_e2e_request_latency_seconds"),
        ],
        "Tokens and steps": [
            Panel("Tokens", {"prompts": "reflex_prompt_tokens_total", "generated": "reflex_generation_tokens_total"}),
            Panel("Tokens in a step", "reflex_iteration_tokens_total"),
            Panel("Arrival to the first step", "reflex_request_queue_time_seconds"),
            Panel("Requests now", {"waiting": "reflex_num_requests_waiting", "running": "reflex_num_requests_running"}),
            Panel("Waiting, by what the last step was short of", "reflex_num_requests_waiting_by_reason"),
            Panel("Guessed tokens", {"computed": "reflex_spec_decode_num_draft_tokens_total",
                                     "right": "reflex_spec_decode_num_accepted_tokens_total"}),
        ],
        "Cache": [
            Panel("Blocks of the cache that are held", "reflex_kv_cache_usage_perc", ("instance", "worker"), "max"),
            Panel("Prompt tokens found in the cache",
                  {"found": "reflex_prefix_cache_hits_total / reflex_prefix_cache_queries_total"}),
            Panel("Requests that lost their blocks", "reflex_num_preemptions_total"),
        ],
        "Workers and their batcher": [
            Panel("Workers that take requests", "reflex_worker_ready", ("instance", "worker"), "min"),
            Panel("Workers started again", "reflex_worker_restarts_total", ("instance", "worker")),
            Panel("Requests in a message", "reflex_generate_batcher_batch_size"),
            Panel("Arrival to a message", "reflex_generate_batcher_queue_wait_ms"),
            Panel("Requests in messages by tier", "reflex_generate_batcher_priority_mix_total"),
            Panel("Requests that went alone, and why", "reflex_generate_batcher_fallback_total"),
            Panel("Defects of the engine", "reflex_invariant_violations_total"),
            SPANS,
        ],
    }),
    "functions": ("Reflex: functions", "reflex_function_requests_total", {
        "Requests": [
            Panel("Requests by outcome", "reflex_function_requests_total", ("function", "outcome")),
            Panel("Requests by protocol", "reflex_function_requests_total", ("wire",)),
            Panel("From the head of a request to its answer", "reflex_function_latency_seconds"),
            Panel("Arrival to the first batch", "reflex_function_queue_wait_seconds"),
            Panel("Requests now", {"waiting": "reflex_function_waiting", "all": "reflex_function_in_flight"}),
        ],
        "Batches": [
            Panel("Items in a batch", "reflex_function_batch_size"),
            Panel("Why batches leave", "reflex_function_batches_total", ("cause",)),
            Panel("Time of the device that is busy", "reflex_function_busy_seconds_total"),
            SPANS,
        ],
    }),
    "feeds": ("Reflex: feeds", "reflex_feed_up", {
        "Feeds": [
            Panel("Feeds that run", "reflex_feed_up", of="min"),
            Panel("Frames answered a second", "reflex_feed_fps"),
            Panel("Age of the last answered frame", "reflex_feed_age_seconds", of="max"),
            Panel("Frames", {"read": "reflex_feed_frames_total", "answered": "reflex_feed_frames_processed_total"}),
            Panel("Frames that left unanswered", "reflex_feed_drops_total", ("reason",)),
            Panel("Capture to answer", "reflex_feed_latency_seconds"),
            Panel("Frames now", {"waiting": "reflex_feed_waiting", "at the processor": "reflex_feed_in_flight"}),
            Panel("Sources opened again, packets damaged",
                  {"opened": "reflex_feed_restarts_total", "damaged": "reflex_feed_corrupt_total"}),
            Panel("Submission to answer", "reflex_feed_answer_seconds"),
            Panel("Submissions by how they ended", "reflex_feed_submissions_total", ("outcome",)),
            Panel("Answers that came too late", "reflex_feed_timeouts_total"),
        ],
        "Batches": [
            Panel("Frames in a batch", "reflex_feed_batch_size"),
            Panel("Places of batches that are filled", "reflex_feed_batch_fill_ratio", of="avg"),
            Panel("Batches", "reflex_feed_batches_total"),
            Panel("Oldest frame's arrival to its batch", "reflex_feed_batch_formation_seconds"),
            Panel("Time in the processor", "reflex_feed_batch_processing_seconds"),
            Panel("Batches in a row without an answer", "reflex_feed_batch_consecutive_errors", of="max"),
            Panel("Submissions, admitted or refused", "reflex_feed_batch_submissions_total"),
            Panel("Frames at the processor", "reflex_feed_batch_pending"),
        ],
        "Behind the batch": [
            Panel("Time of a feed in a stage", "reflex_feed_stage_seconds_total"),
            Panel("Frames of stages", {"given": "reflex_feed_stage_runs_total",
                                       "failed": "reflex_feed_stage_errors_total"}),
            Panel("Results on which a sink failed", "reflex_feed_sink_errors_total"),
            Panel("Boxes in zones", "reflex_feed_zone_count"),
            Panel("Objects that cross lines", {"in": "reflex_feed_line_in_total", "out": "reflex_feed_line_out_total"}),
        ],
        "Outputs": [
            Panel("Receivers that take results", "reflex_feed_output_up", of="min"),
            Panel("Results", {"given": "reflex_feed_output_results_total", "arrived": "reflex_feed_output_sent_total"}),
            Panel("Results that did not arrive", "reflex_feed_output_drops_total"),
            Panel("Results that wait", "reflex_feed_output_waiting"),
            Panel("Tried again", "reflex_feed_output_retries_total"),
            SPANS,
        ],
    }),
}  # fmt: skip


def names(panel: Panel) -> list[str]:
    """The series on a panel."""
    shown = panel.shown.values() if isinstance(panel.shown, dict) else [panel.shown]
    found = (name.partition("{")[0] for one in shown for name in one.split(" / "))
    return [name if name in ROWS else name.removesuffix("_count") for name in found]


def queries(panel: Panel) -> Iterator[tuple[str, str]]:
    """The expressions of a panel, and what the legend calls them."""
    several = panel.shown if isinstance(panel.shown, dict) else {"": panel.shown}
    for called, shown in several.items():
        first, *others = shown.split(" / ")
        row, labels = ROWS[first.partition("{")[0]]
        by = labels if panel.by is None else panel.by
        legend = " ".join([*([called] if called else []), *(f"{{{{{label}}}}}" for label in by)]) or panel.title
        group = f" by ({', '.join(by)})" if by else ""
        if others:
            yield f"sum{group} ({panel.rate(first)}) / sum{group} ({panel.rate(others[0])})", legend
        elif row.kind == "counter":
            yield f"sum{group} ({panel.rate(first)})", legend
        elif row.kind == "gauge":
            yield f"{panel.of}{group} ({first}{{{SERVER}}})", legend
        elif first.endswith(("_seconds", "_ms")):
            within = f"sum by ({', '.join(('le', *by))}) ({panel.rate(f'{first}_bucket')})"
            for share in ("0.5", "0.95", "0.99"):
                yield f"histogram_quantile({share}, {within})", f"p{share[2:].ljust(2, '0')} {legend}"
        else:
            yield f"sum{group} ({panel.rate(f'{first}_sum')}) / sum{group} ({panel.rate(f'{first}_count')})", legend


def _unit(panel: Panel) -> str:
    """As Grafana calls it, by the first series."""
    name = names(panel)[0]
    if isinstance(panel.shown, dict) and "/" in next(iter(panel.shown.values())):
        return "percentunit"
    if name.endswith(("_perc", "_fill_ratio", "_hit_rate", "_seconds_total")):
        return "percentunit"
    if ROWS[name][0].kind == "counter":
        return "cps"
    return "s" if name.endswith("_seconds") else "ms" if "_ms" in name else "short"


def _drawn(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    found = enumerate(queries(panel))
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": "; ".join(dict.fromkeys(ROWS[name][0].help for name in names(panel))),
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": _unit(panel), "min": 0, "custom": {"fillOpacity": 8, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(65 + i), "expr": expr, "legendFormat": legend, "datasource": SOURCE}
            for i, (expr, legend) in found
        ],
    }


def board(name: str) -> str:
    """The file of a board, a panel a line."""
    title, first, sections = BOARDS[name]
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, drawn in sections.items():
        place = {"x": 0, "y": y, "w": WIDTH * PER_LINE, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": heading, "gridPos": place, "panels": []})
        for i, panel in enumerate(drawn):
            x, line = WIDTH * (i % PER_LINE), y + 1 + HEIGHT * (i // PER_LINE)
            panels.append(_drawn(panel, len(panels) + 1, x, line))
        y += 1 + HEIGHT * -(-len(drawn) // PER_LINE)
    server = {
        "name": "instance", "type": "query", "label": "Server", "datasource": SOURCE, "refresh": 2,
        "query": {"query": f"label_values({first}, instance)", "refId": "instance"},
        "includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"}
    whole = {
        "title": title, "uid": f"reflex-{name}", "tags": ["reflex"], "schemaVersion": 39, "version": 1,
        "editable": True, "refresh": "5s", "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, server]},
    }  # fmt: skip
    head = json.dumps(whole, indent=1).removesuffix("\n}")
    return f'{head},\n "panels": [\n  ' + ",\n  ".join(map(json.dumps, panels)) + "\n ]\n}\n"


def main() -> None:
    """Write all of them."""
    for name in BOARDS:
        (FOLDER / f"{name}.json").write_text(board(name), encoding="utf-8")


if __name__ == "__main__":
    main()
