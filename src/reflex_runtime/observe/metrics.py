"""Series for prometheus-client: counters and histograms that events write, and the table of every server's series.

One thread writes counters and histograms, several times for every request and without a lock; prometheus-client's own
take a lock each time and cost five times as much. A scrape on another thread reads numbers that are at most one
observation apart. The tables of `docs/metrics.md` are made of the rows below."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from reflex_runtime.core.batch import BatchFinished, BatchScheduled, Cause, Done, Event, RequestAnswered
from reflex_runtime.observe.batch_metrics import BOUNDS, BatchMetrics, Durations


class CounterChild:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class HistogramChild:
    """One series of a histogram. bounds: upper bounds of its buckets, inclusive, the last one inf."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


# -- rows --------------------------------------------------------------------------------------------------------------


class SeriesRow(NamedTuple):
    """A series: a histogram if it has buckets, a counter if its name ends in `_total`, else a gauge.

    labels: in addition to those that all series of its server have.
    value: of a series that is read from snapshots at a scrape. It returns a number; None for no sample; with a label a
    mapping of numbers by its values; with buckets (the last one inf) the counts below each, and their total.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: Sequence[float] = ()
    value: Callable[[Any], Any] | None = None

    @property
    def kind(self) -> str:
        return "histogram" if self.buckets else "counter" if self.name.endswith("_total") else "gauge"

    def collect(self, labels: Sequence[str], snapshots: Mapping[Any, Any]) -> Metric:
        """The series of these snapshots, which stand under the values of `labels`."""
        assert self.value is not None, self.name
        values = [(key, self.value(snapshot)) for key, snapshot in list(snapshots.items())]  # others may come meanwhile
        if self.buckets:
            return _histogram(self.name, self.help, labels, self.buckets, values)
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name.removesuffix("_total"), self.help, labels=(*labels, *self.labels))
        for key, value in values:
            for more, number in (((k,), n) for k, n in value.items()) if self.labels else (((), value),):
                if number is not None:
                    family.add_metric((*key, *more), float(number))
        return family


class SeriesSet(Collector):
    """The series of these rows in a registry. labels: those that all of them have, before their own."""

    def __init__(self, rows: Iterable[SeriesRow], registry: CollectorRegistry, labels: Sequence[str] = ()) -> None:
        self._rows: dict[str, SeriesRow] = {}  # of counters and histograms: read from their series
        self._labels: dict[str, tuple[str, ...]] = {}
        self._series: dict[str, dict[tuple[str, ...], Any]] = {}  # by the values of the labels
        self._gauges: dict[str, Gauge] = {}
        for row in rows:
            names = (*labels, *row.labels)
            if row.kind == "gauge":
                self._gauges[row.name] = Gauge(row.name, row.help, names, registry=registry)
                continue
            if row.kind == "counter":
                own = row._replace(labels=(), value=attrgetter("value"))
            else:
                bounds = (*map(float, row.buckets), inf)
                own = row._replace(labels=(), buckets=bounds, value=attrgetter("counts", "total"))
            self._rows[row.name] = own
            self._labels[row.name], self._series[row.name] = names, {}
        registry.register(self)

    def counter(self, name: str, *values: str) -> CounterChild:
        """The series of a counter with these values of its labels, made if it is new."""
        found: CounterChild = self._series[name].setdefault(values, CounterChild())
        return found

    def histogram(self, name: str, *values: str) -> HistogramChild:
        found: HistogramChild = self._series[name].setdefault(values, HistogramChild(self._rows[name].buckets))
        return found

    def gauge(self, name: str, *values: str) -> Gauge:
        made = self._gauges[name]
        return made.labels(*values) if values else made

    def collect(self) -> Iterator[Metric]:
        for name, row in self._rows.items():
            yield row.collect(self._labels[name], self._series[name])

    describe = collect  # a name is taken once in a registry


def _histogram(
    name: str,
    help: str,
    labels: Sequence[str],
    bounds: Sequence[float],
    samples: Iterable[tuple[Sequence[str], tuple[Sequence[int], float]]],
) -> Metric:
    family = HistogramMetricFamily(name, help, labels=labels)
    names = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]
    for values, (counts, total) in samples:
        family.add_metric(values, list(zip(names, accumulate(counts), strict=True)), total)
    return family


class _Families(Collector):
    """Families that exist, for a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def rendered(families: Iterable[Metric]) -> bytes:
    """The page of existing families."""
    return generate_latest(_Families(families))


Row: TypeAlias = SeriesRow

# -- policies: every one also has `embodiment` and `policy_slot`, and `policy` where several are served ----------------

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_COST: Final = (10, 25, 50, 100, 200, 500, 1000, 2000, 5000)
_RATIO: Final = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
_APART: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

POLICIES: Final = (
    Row("reflex_batch_cost_per_flush_ms", "Predicted device time of a batch, ms", (), _COST),
    Row("reflex_batch_size_per_flush", "Requests in a batch", (), (1, 2, 4, 8, 16, 32)),
    Row("reflex_batch_flush_total", "Batches, by why they left", ("reason", "cause")),
    Row("reflex_captured_graph_hit_rate", "Share of the last 100 batches that ran as a CUDA graph (--cuda-graphs)"),
    Row("reflex_policy_runtime_queue_depth", "Requests that wait; at --max-queue the next one is refused"),
    Row("reflex_backlog_seconds", "Predicted device time of the requests that wait: scale on it"),
    Row("reflex_device_busy_seconds_total", "Time that the device computed; its rate is the share that it is busy"),
    Row("reflex_in_flight_requests", "Requests admitted and not yet answered"),
    Row("reflex_slot_drained", "1 while the slot is out of service for its crashes"),
    Row("reflex_queue_wait_seconds", "From ready to run until the first batch", (), _SECONDS),
    Row("reflex_prepare_seconds", "From admission until the pictures are decoded", (), _SECONDS),
    Row("reflex_request_latency_seconds", "From the head of a request to its answer", ("outcome",), _SECONDS),
    Row("reflex_act_latency_seconds", "Queue and model, of successful answers", (), _SECONDS),
    Row("reflex_requests_total", "Answers, and callers that left before one", ("outcome", "wire")),
    Row("reflex_request_warnings_total", "Answers that warn: a part of the request had no effect", ("kind",)),
    Row("reflex_batch_on_loop_total", "Batches that ran on the event loop, because they are brief (--brief-ms)"),
    Row("reflex_batch_cost_error_ratio", "Predicted over measured time of a batch", (), _RATIO),
    Row("reflex_cache_hit_total", "Answers whose prefix was cached, stale ones included"),
    Row("reflex_cache_miss_total", "Answers whose prefix had to be computed"),
    Row("reflex_denoise_steps_total", "Denoise steps, summed over requests"),
    Row("reflex_denoise_steps_spared_total", "Denoise steps that --adaptive-steps left out"),
    Row("reflex_guard_total", "Chunks that the action guard changed or refused", ("result",)),
    Row("reflex_rtc_total", "Chunks that continued their episode's last one"),
    Row("reflex_injected_latency_seconds_total", "Time that --inject-latency-ms added: 0 in production"),
    Row("reflex_recording_dropped_total", "Lines missing from the recording, because the disk is too slow"),
    Row("reflex_recording_failed", "1 if a disk error ended the recording"),
    Row("reflex_episode_outcomes_total", "Episodes with a reported outcome that one version answered", ("success",)),
    Row("reflex_shadow_delay_seconds", "What a request waited for a running shadow step", (),
        _SECONDS),
    Row("reflex_shadow_divergence", "Mean absolute difference of the served and the shadow chunk", (), _APART),
)  # fmt: skip

# -- language models: the names of vLLM with our prefix ----------------------------------------------------------------

_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_FIRST: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_GAP: Final = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_WHOLE: Final = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)

_MESSAGES: Final = (1, 2, 4, 6, 8, 10, 12, 14, 16, 24, 32, 64)
_WAITS: Final = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 20.0, 50.0, 100.0, 1000.0)

ENGINE: Final = (
    Row("reflex_num_requests_waiting", "Requests that wait, preempted ones included"),
    Row("reflex_num_requests_waiting_by_reason", "The same, by what kept them out of the last step", ("reason",)),
    Row("reflex_num_requests_running", "Requests that hold a place"),
    Row("reflex_kv_cache_usage_perc", "Share of the cache's blocks that requests hold, 0 to 1"),
    Row("reflex_num_preemptions_total", "Requests that lost their blocks or place, and start over"),
    Row("reflex_prefix_cache_queries_total", "Tokens looked up in the prefix cache"),
    Row("reflex_prefix_cache_hits_total", "Tokens found there, and so not computed"),
    Row("reflex_spec_decode_num_draft_tokens_total", "Guessed tokens that were computed (--speculate)"),
    Row("reflex_spec_decode_num_accepted_tokens_total", "Those that were right"),
    Row("reflex_prompt_tokens_total", "Prompt tokens of requests that got a token"),
    Row("reflex_generation_tokens_total", "Tokens generated"),
    Row("reflex_request_success_total", "Requests ended, by how", ("finished_reason",)),
    Row("reflex_invariant_violations_total", "Bugs of the engine: please report them", ("invariant",)),
    Row("reflex_iteration_tokens_total", "Tokens in a step", (), _TOKENS),
    Row("reflex_time_to_first_token_seconds", "From arrival to the first token", (), _FIRST),
    Row("reflex_inter_token_latency_seconds", "From one token of a request to the next", (), _GAP),
    Row("reflex_request_queue_time_seconds", "From arrival to the first step", (), _FIRST),
    Row("reflex_e2e_request_latency_seconds", "From arrival to the end, of answered requests", (), _WHOLE),
)
MODEL_SERVER: Final = (Row("reflex_openai_requests_total", "Answers over HTTP", ("path", "status")),)
STREAMS: Final = (Row("reflex_stream_holds_total", "Times that a stream was held for its slow reader"),)
WORKERS: Final = (
    Row("reflex_worker_ready", "1 if the runtime process accepts requests", ("worker",)),
    Row("reflex_worker_restarts_total", "Times that it was started again; its counters then begin at 0", ("worker",)),
)
GENERATE_BATCHER: Final = (
    Row("reflex_generate_batcher_batch_size", "Requests in a message to a runtime process", (), _MESSAGES),
    Row("reflex_generate_batcher_queue_wait_ms", "From arrival until the message is formed, ms", (), _WAITS),
    Row("reflex_generate_batcher_priority_mix_total", "Requests in messages, by tier", ("priority",)),
    Row("reflex_generate_batcher_fallback_total", "Requests that were sent alone", ("reason",)),
)

# -- functions: every one also has `function` --------------------------------------------------------------------------

FUNCTIONS: Final = (
    Row("reflex_function_requests_total", "Answers", ("outcome", "wire")),
    Row("reflex_function_latency_seconds", "From the head of a request to its answer", ("outcome",), _SECONDS),
    Row("reflex_function_queue_wait_seconds", "From the arrival of an item to its first batch", (), _SECONDS),
    Row("reflex_function_batches_total", "Calls of the function, and steps of one that streams", ("cause",)),
    Row("reflex_function_batch_size", "Items in a batch", (), (1, 2, 4, 8, 16, 32, 64, 128)),
    Row("reflex_function_busy_seconds_total", "Time that the function computed"),
    Row("reflex_function_waiting", "Requests that wait for a batch"),
    Row("reflex_function_in_flight", "Requests that are not answered yet"),
)

# -- every server with --otel ------------------------------------------------------------------------------------------

SPANS: Final = (Row("reflex_spans_total", "Spans by what became of them", ("result",)),)

# -- feeds: read from a snapshot of the runtime, a value that was not measured yet has no sample -----------------------

SIZES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, inf)  # items per batch
REFUSALS: Final = ("rejected", "in_flight_exceeded", "closed")
ENDS: Final = ("processed", "failed", "dropped")


def _read(name: str, help: str, value: Callable[[Any], Any], label: str = "", bounds: Sequence[float] = ()) -> Row:
    return Row(name, help, (label,) if label else (), bounds, value)


def _timing(name: str, help: str, value: Callable[[Any], Durations]) -> Row:
    def counts(snapshot: Any) -> tuple[Sequence[int], float]:
        durations = value(snapshot)
        return durations.buckets, durations.total

    return Row(name, help, (), BOUNDS, counts)


def _of(names: Iterable[str]) -> Callable[[Any], dict[str, float]]:
    return lambda figures: {name: getattr(figures, name) for name in names}


def _stages(what: str) -> Callable[[Any], dict[str, float]]:
    return lambda feed: {name: getattr(figures, what) for name, figures in feed.stages.items()}


def _crossed(way: str) -> Callable[[Any], dict[str, float]]:
    return lambda feed: {name: counts[way] for name, counts in feed.lines.items()}


def _admissions(figures: BatchMetrics) -> dict[str, float]:
    refused = _of(REFUSALS)(figures)
    return {"admitted": figures.submitted - sum(refused.values())} | refused


def _sizes(figures: BatchMetrics) -> tuple[Sequence[int], float]:
    counts = [0] * len(SIZES)
    for size, n in figures.batch_sizes.items():
        counts[next(i for i, bound in enumerate(SIZES) if size <= bound)] += n
    return counts, float(sum(size * n for size, n in figures.batch_sizes.items()))


FEEDS: Final = (
    _read("reflex_feed_up", "1 while the feed is running", lambda f: f.state == "running"),
    _read("reflex_feed_frames_total", "Frames read from the source", lambda f: f.frames),
    _read("reflex_feed_frames_processed_total", "Frames answered and through every stage", lambda f: f.processed),
    _read("reflex_feed_drops_total", "Frames that left unanswered, by reason", lambda f: f.drops, "reason"),
    _read("reflex_feed_waiting", "Frames read and not yet answered or dropped", lambda f: f.waiting),
    _read("reflex_feed_in_flight", "Of these, at the processor", lambda f: f.in_flight),
    _read("reflex_feed_fps", "Answers a second, over the last two seconds", lambda f: f.fps),
    _read("reflex_feed_age_seconds", "Age of the last answered frame", lambda f: f.age),
    _timing("reflex_feed_latency_seconds", "From the capture of a frame to its answer", lambda f: f.latency),
    _read("reflex_feed_restarts_total", "Times the source was opened again", lambda f: f.restarts),
    _read("reflex_feed_sink_errors_total", "Results on which a sink failed", lambda f: f.sink_errors),
    _read("reflex_feed_corrupt_total", "Pictures damaged or missing", lambda f: f.corrupt),
    _read("reflex_feed_stage_runs_total", "Frames that a stage got", _stages("runs"), "stage"),
    _read("reflex_feed_stage_errors_total", "Frames on which a stage failed", _stages("errors"), "stage"),
    _read("reflex_feed_stage_seconds_total", "Time in a stage", _stages("seconds"), "stage"),
    _read("reflex_feed_zone_count", "Boxes in a zone, in the last frame", lambda f: f.zones, "zone"),
    _read("reflex_feed_line_in_total", "Objects that crossed a line to its left", _crossed("in"), "line"),
    _read("reflex_feed_line_out_total", "Objects that crossed it the other way", _crossed("out"), "line"),
)
COORDINATORS: Final = (
    _read("reflex_feed_batch_submissions_total", "Submissions, admitted or refused", _admissions, "outcome"),
    _read("reflex_feed_batch_items_total", "Admitted items: processed, failed, dropped", _of(ENDS), "outcome"),
    _read("reflex_feed_batch_timeouts_total", "Callers that stopped waiting", lambda m: m.timed_out),
    _read("reflex_feed_batch_pending", "Items admitted and not ended", lambda m: m.pending),
    _read("reflex_feed_batches_total", "Batches formed", lambda m: m.batches_dispatched),
    _read("reflex_feed_batch_size", "Frames in a batch", _sizes, bounds=SIZES),
    _read("reflex_feed_batch_fill_ratio", "Frames over the places of their batches", lambda m: m.fill_ratio),
    _timing("reflex_feed_batch_formation_seconds", "Oldest frame's arrival to its batch", lambda m: m.formation),
    _timing("reflex_feed_batch_processing_seconds", "Time in the processor of a batch", lambda m: m.processing),
    _read(
        "reflex_feed_batch_consecutive_errors", "Batches in a row without any answer",
        lambda m: m.consecutive_errors,
    ),
)  # fmt: skip
OUTPUTS: Final = (
    _read("reflex_feed_output_up", "1 while the receiver takes results", lambda o: o.state == "connected"),
    _read("reflex_feed_output_results_total", "Results that were given to the output", lambda o: o.taken),
    _read("reflex_feed_output_sent_total", "Results that arrived at the receiver", lambda o: o.sent),
    _read("reflex_feed_output_drops_total", "Results that did not arrive, by reason", lambda o: o.drops, "reason"),
    _read("reflex_feed_output_waiting", "Results that wait to be sent", lambda o: o.waiting),
    _read("reflex_feed_output_retries_total", "Times that the output tried again", lambda o: o.retries),
)
FEEDS_AT_COORDINATORS: Final = (  # of each feed at each coordinator
    _read("reflex_feed_submissions_total", "Submissions by how they ended", _of((*REFUSALS, *ENDS)), "outcome"),
    _read("reflex_feed_timeouts_total", "Times that the feed stopped waiting", lambda s: s.timed_out),
    _read("reflex_feed_pending", "Frames admitted and not ended", lambda s: s.pending),
    _timing("reflex_feed_answer_seconds", "From submission to answer", lambda s: s.latency),
)

# -- the series of a policy server ------------------------------------------------------------------------------------

OUTCOMES = ("ok", "cancelled", "rejected", "expired", "shed", "superseded", "drained", "failed", "client_error")
WARNINGS = ("instruction_ignored", "instruction_unknown", "instruction_cut")
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """A sink that counts every series of a policy server.

    Of a chunk of actions it reads `value.cache` and `value.denoising_steps`, and from the notes of its batch `on_loop`,
    `clamped`, `held`, `refused`, `rtc`, `steps_spared` and `injected_ms`.
    """

    events = frozenset({BatchScheduled, BatchFinished, RequestAnswered})

    def __init__(self, several: bool = False) -> None:
        """several: whether there are several policies; then their name is a label."""
        self.registry = CollectorRegistry()
        labels = ("embodiment", "policy_slot", *(["policy"] if several else []))
        self.series = SeriesSet(POLICIES, self.registry, labels)
        self.slots: dict[str, SlotSeries] = {}
        self._recording: tuple[Callable[[], float], CounterChild] | None = None

    def add_slot(
        self,
        slot: str,
        embodiment: str,
        queue_depth: Callable[[], float],
        in_flight: Callable[[], float],
        backlog: Callable[[], float],
        wires: Iterable[str] = ("",),
        policy: str = "",
    ) -> None:
        """Create the slot's series; the three callables are read at scrape time. wires: that its requests come on.

        policy: its name where there are several; `slot` is NAME.SLOT then, as in events.
        """
        labels = (embodiment, slot.removeprefix(f"{policy}."), policy) if policy else (embodiment, slot)
        self.series.gauge("reflex_policy_runtime_queue_depth", *labels).set_function(queue_depth)
        self.series.gauge("reflex_in_flight_requests", *labels).set_function(in_flight)
        self.series.gauge("reflex_backlog_seconds", *labels).set_function(backlog)
        if not self.slots:
            self.series.counter("reflex_recording_dropped_total", *labels)
            self.series.gauge("reflex_recording_failed", *labels)
        self.slots[slot] = SlotSeries(self.series, labels, wires)

    def add_recording(self, dropped: Callable[[], float], failed: Callable[[], bool]) -> None:
        """Add the recording's series, read at scrape time. All slots share a file: the label is of the first slot."""
        labels = next(iter(self.slots.values())).labels
        self._recording = dropped, self.series.counter("reflex_recording_dropped_total", *labels)
        self.series.gauge("reflex_recording_failed", *labels).set_function(failed)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestAnswered):  # most of them are
            self.slots[event.slot].answered(event)
        elif isinstance(event, BatchScheduled):
            self.slots[event.batch.group].scheduled(event)
        elif isinstance(event, BatchFinished):
            self.slots[event.batch.group].finished(event)

    def render(self) -> bytes:
        if self._recording is not None:
            dropped, series = self._recording
            series.value = float(dropped())
        return generate_latest(self.registry)


class SlotSeries:
    """The series of one slot. Looked up once, because a look-up costs more than an observation."""

    def __init__(self, series: SeriesSet, labels: tuple[str, ...], wires: Iterable[str]) -> None:
        def counter(name: str, *more: str) -> CounterChild:
            return series.counter(name, *labels, *more)

        def histogram(name: str, *more: str) -> HistogramChild:
            return series.histogram(name, *labels, *more)

        self.labels, self._counter = labels, counter
        self.cost = histogram("reflex_batch_cost_per_flush_ms")
        self.size = histogram("reflex_batch_size_per_flush")
        self.flush = {cause: counter("reflex_batch_flush_total", cause.reason.value, cause.value) for cause in Cause}
        self.graph = series.gauge("reflex_captured_graph_hit_rate", *labels)
        self.wait = histogram("reflex_queue_wait_seconds")
        self.prepare = histogram("reflex_prepare_seconds")
        self._latency = {o: histogram("reflex_request_latency_seconds", o) for o in OUTCOMES}
        self.answers = {(o, wire): self._answers(o, wire) for o in OUTCOMES for wire in wires}
        self.act = histogram("reflex_act_latency_seconds")
        self.warnings = {kind: counter("reflex_request_warnings_total", kind) for kind in WARNINGS}
        self.error = histogram("reflex_batch_cost_error_ratio")
        self.busy = counter("reflex_device_busy_seconds_total")
        self.hit = counter("reflex_cache_hit_total")
        self.miss = counter("reflex_cache_miss_total")
        self.steps = counter("reflex_denoise_steps_total")
        self.noted = {name: counter("reflex_guard_total", name) for name in ("clamped", "held", "refused")} | {
            "on_loop": counter("reflex_batch_on_loop_total"),
            "rtc": counter("reflex_rtc_total"),
            "steps_spared": counter("reflex_denoise_steps_spared_total"),
        }
        self.injected = counter("reflex_injected_latency_seconds_total")
        self.episodes = {ok: counter("reflex_episode_outcomes_total", str(ok).lower()) for ok in (True, False)}
        if labels[1] == "shadow":
            self.delay = histogram("reflex_shadow_delay_seconds")
            self.divergence = histogram("reflex_shadow_divergence")
        self._captured: deque[bool] = deque(maxlen=100)

    def _answers(self, outcome: str, wire: str) -> tuple[CounterChild, HistogramChild]:
        return self._counter("reflex_requests_total", outcome, wire), self._latency[outcome]

    def scheduled(self, event: BatchScheduled) -> None:
        """A flush is counted once per admission group."""
        batch = event.batch
        if not batch.admitted:
            return
        self.cost.observe(batch.cost * 1e3)
        self.size.observe(len(batch.admitted))
        self.flush[batch.cause].inc()
        for ticket in batch.admitted:
            self.wait.observe(batch.scheduled_at - ticket.arrived)

    def finished(self, event: BatchFinished) -> None:
        batch = event.batch
        self.busy.inc(max(0.0, event.elapsed))
        if batch.predicted > 0.0 and event.elapsed > 0.0 and not event.crashed and not event.apart:
            self.error.observe(batch.predicted / event.elapsed)
        if "captured" in batch.notes:
            self._captured.append(bool(batch.notes["captured"]))
            self.graph.set(sum(self._captured) / len(self._captured))
        if batch.stage == "denoise" and not event.crashed and not event.apart:  # a call that failed took no step
            self.steps.inc(len(batch))
        if notes := batch.notes:
            for name, series in self.noted.items():
                if name in notes:
                    series.inc(notes[name])
            if "injected_ms" in notes:
                self.injected.inc(notes["injected_ms"] / 1e3)

    def answered(self, event: RequestAnswered) -> None:
        key = event.outcome, event.wire
        requests, latency = self.answers.get(key) or self.answers.setdefault(key, self._answers(*key))
        requests.value += 1.0
        latency.observe(event.latency)
        ticket = event.ticket
        if ticket is None or not isinstance(ticket.outcome, Done):
            return
        self.act.observe(event.at - ticket.arrived)
        value = ticket.outcome.value
        if ticket.request.stage == "":  # in one call: its steps were not separate batches
            self.steps.inc(getattr(value, "denoising_steps", 0))
        cache = getattr(value, "cache", "off")
        if cache == "miss":
            self.miss.inc()
        elif cache != "off":
            self.hit.inc()
