"""Prometheus metrics: a fold over the event stream, in a registry of its own.

Every series carries `embodiment` and `policy_slot`, and `policy` where several are served. Gauges are read live at
scrape time. The page `docs/metrics.md` lists them; a test fails on a series that it does not move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from reflex_runtime.core.batch import Cause, Done
from reflex_runtime.core.events import BatchFinished, BatchScheduled, Event, RequestAnswered
from reflex_runtime.telemetry.series import Counter, CounterChild, Histogram

OUTCOMES = ("ok", "cancelled", "rejected", "expired", "shed", "superseded", "drained", "failed", "client_error")
WARNINGS = ("instruction_ignored", "instruction_unknown")
CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """A sink that keeps every series of the contract.

    Chunks of actions give their cache outcome and steps through `value.cache` and `value.denoising_steps`. What was
    done to them is in their batch's notes: `on_loop`, `clamped`, `held`, `refused`, `rtc`, `steps_spared`,
    `injected_ms`.
    """

    events = frozenset({BatchScheduled, BatchFinished, RequestAnswered})

    def __init__(self, several: bool = False) -> None:
        """several: whether there are several policies, whose name is a label then."""
        self.registry = CollectorRegistry()
        r = self.registry
        labels = ("embodiment", "policy_slot", *(["policy"] if several else []))
        self._cost = Histogram(
            "reflex_batch_cost_per_flush_ms", "Estimated device ms of each flushed batch", labels,
            buckets=(10, 25, 50, 100, 200, 500, 1000, 2000, 5000), registry=r,
        )
        self._size = Histogram(
            "reflex_batch_size_per_flush", "Requests per flush", labels, buckets=(1, 2, 4, 8, 16, 32), registry=r
        )
        self._flush = Counter(
            "reflex_batch_flush_total", "Flushes by reason and finer cause", (*labels, "reason", "cause"), registry=r
        )
        self._graph = Gauge(
            "reflex_captured_graph_hit_rate", "Share of the last 100 batches of captured stages at a captured size",
            labels, registry=r,
        )
        self._depth = Gauge("reflex_policy_runtime_queue_depth", "Waiting requests, now", labels, registry=r)
        self._backlog = Gauge("reflex_backlog_seconds", "Predicted device seconds of waiting work", labels, registry=r)
        self._busy = Counter(
            "reflex_device_busy_seconds_total", "Seconds that the device computed", labels, registry=r
        )
        self._in_flight = Gauge("reflex_in_flight_requests", "Requests being answered, now", labels, registry=r)
        self._drained = Gauge("reflex_slot_drained", "1 while the slot is drained or probed", labels, registry=r)
        self._wait = Histogram(
            "reflex_queue_wait_seconds", "Ready to the first batch", labels, buckets=_SECONDS, registry=r
        )
        self._prepare = Histogram(
            "reflex_prepare_seconds", "Arrival to pictures decoded, of requests that have any", labels,
            buckets=_SECONDS, registry=r,
        )
        self._latency = Histogram(
            "reflex_request_latency_seconds", "Every answer, end to end", (*labels, "outcome"), buckets=_SECONDS,
            registry=r,
        )
        self._act = Histogram(
            "reflex_act_latency_seconds", "Served answers, queue and model", labels, buckets=_SECONDS, registry=r
        )
        self._requests = Counter(
            "reflex_requests_total", "Answers by outcome and wire", (*labels, "outcome", "wire"), registry=r
        )
        self._warnings = Counter(
            "reflex_request_warnings_total", "Answers that warn of something in the request", (*labels, "kind"),
            registry=r,
        )
        self._on_loop = Counter(
            "reflex_batch_on_loop_total", "Batches that ran on the event loop, as they are brief", labels, registry=r
        )
        self._error = Histogram(
            "reflex_batch_cost_error_ratio", "Predicted over measured batch time", labels,
            buckets=(0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0), registry=r,
        )
        self._hit = Counter("reflex_cache_hit_total", "Prefix cache hits", labels, registry=r)
        self._miss = Counter("reflex_cache_miss_total", "Prefix cache misses", labels, registry=r)
        self._steps = Counter("reflex_denoise_steps_total", "Denoise steps, summed over requests", labels, registry=r)
        self._spared = Counter(
            "reflex_denoise_steps_spared_total", "Denoise steps that --adaptive-steps left out", labels, registry=r
        )
        self._guard = Counter(
            "reflex_guard_total", "Chunks the action guard changed or refused", (*labels, "result"), registry=r
        )
        self._rtc = Counter("reflex_rtc_total", "Chunks that continued their episode's last one", labels, registry=r)
        self._injected = Counter(
            "reflex_injected_latency_seconds_total", "Seconds that --inject-latency-ms added", labels, registry=r
        )
        self._unrecorded = Counter(
            "reflex_recording_dropped_total", "Lines missing from the recording, of all slots", labels, registry=r
        )
        self._stopped = Gauge(
            "reflex_recording_failed", "1 when a disk error ended the recording, of all slots", labels, registry=r
        )
        self._episodes = Counter(
            "reflex_episode_outcomes_total", "Episodes by how they ended", (*labels, "success"), registry=r
        )
        self._delay = Histogram(
            "reflex_shadow_delay_seconds", "What served requests waited for a shadow step that ran when they came",
            labels, buckets=_SECONDS, registry=r,
        )
        self._apart = Histogram(
            "reflex_shadow_divergence", "Mean absolute difference between served and shadow actions", labels,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0), registry=r,
        )
        self._slots: dict[str, _Slot] = {}
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
        self._depth.labels(*labels).set_function(queue_depth)
        self._in_flight.labels(*labels).set_function(in_flight)
        self._backlog.labels(*labels).set_function(backlog)
        if not self._slots:
            self._unrecorded.labels(*labels)
            self._stopped.labels(*labels)
        self._slots[slot] = _Slot(self, labels, wires)

    def add_verdict(self, slot: str, drained: Callable[[], bool]) -> None:
        """Whether the slot is drained, read at scrape time."""
        self._drained.labels(*self._slots[slot].labels).set_function(drained)

    def add_recording(self, dropped: Callable[[], float], failed: Callable[[], bool]) -> None:
        """The recording's series, read at scrape time. One file serves all slots: they carry the label of the first."""
        labels = next(iter(self._slots.values())).labels
        self._recording = (dropped, self._unrecorded.labels(*labels))
        self._stopped.labels(*labels).set_function(failed)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestAnswered):  # most of them are
            self._slots[event.slot].answered(event)
        elif isinstance(event, BatchScheduled):
            self._slots[event.batch.group].scheduled(event)
        elif isinstance(event, BatchFinished):
            self._slots[event.batch.group].finished(event)

    def ended(self, slot: str, success: bool) -> None:
        """An episode of the slot ended."""
        self._slots[slot].episodes[success].inc()

    def warned(self, slot: str, kind: str) -> None:
        """An answer of the slot carries a warning, one of `WARNINGS`."""
        self._slots[slot].warnings[kind].inc()

    def prepared(self, slot: str, seconds: float) -> None:
        """Seconds from the admission of a request of the slot until it was ready to run."""
        self._slots[slot].prepare.observe(seconds)

    def delayed(self, slot: str, seconds: float) -> None:
        """Seconds that a served request waited for a step of the shadow."""
        self._slots[slot].delay.observe(seconds)

    def diverged(self, slot: str, mean: float) -> None:
        """A shadow chunk was compared: the mean absolute difference, in the robot's units."""
        self._slots[slot].apart.observe(mean)

    @property
    def busy_seconds(self) -> float:
        """Seconds that the device computed, for all slots."""
        return sum(slot.busy.value for slot in self._slots.values())

    def render(self) -> bytes:
        if self._recording is not None:
            dropped, told = self._recording
            told.value = float(dropped())
        return generate_latest(self.registry)


class _Slot:
    """The children of one slot, looked up once: `labels()` costs more than the observation."""

    def __init__(self, metrics: Metrics, labels: tuple[str, ...], wires: Iterable[str]) -> None:
        self.labels = labels
        self.cost = metrics._cost.labels(*labels)
        self.size = metrics._size.labels(*labels)
        self.flush = {cause: metrics._flush.labels(*labels, cause.reason.value, cause.value) for cause in Cause}
        self.graph = metrics._graph.labels(*labels)
        self.wait = metrics._wait.labels(*labels)
        self.prepare = metrics._prepare.labels(*labels)
        latency = {o: metrics._latency.labels(*labels, o) for o in OUTCOMES}
        self.answers = {
            (o, wire): (metrics._requests.labels(*labels, o, wire), latency[o]) for o in OUTCOMES for wire in wires
        }
        self.act = metrics._act.labels(*labels)
        self.warnings = {kind: metrics._warnings.labels(*labels, kind) for kind in WARNINGS}
        self.error = metrics._error.labels(*labels)
        self.busy = metrics._busy.labels(*labels)
        self.hit = metrics._hit.labels(*labels)
        self.miss = metrics._miss.labels(*labels)
        self.steps = metrics._steps.labels(*labels)
        self.noted = {name: metrics._guard.labels(*labels, name) for name in ("clamped", "held", "refused")} | {
            "on_loop": metrics._on_loop.labels(*labels),
            "rtc": metrics._rtc.labels(*labels),
            "steps_spared": metrics._spared.labels(*labels),
        }
        self.injected = metrics._injected.labels(*labels)
        self.episodes = {ok: metrics._episodes.labels(*labels, "true" if ok else "false") for ok in (True, False)}
        if labels[1] == "shadow":
            self.delay = metrics._delay.labels(*labels)
            self.apart = metrics._apart.labels(*labels)
        self._captured: deque[bool] = deque(maxlen=100)

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
        if batch.expected > 0.0 and event.elapsed > 0.0 and not event.crashed and not event.apart:
            self.error.observe(batch.expected / event.elapsed)
        if "captured" in batch.notes:
            self._captured.append(bool(batch.notes["captured"]))
            self.graph.set(sum(self._captured) / len(self._captured))
        if batch.stage == "denoise":
            self.steps.inc(len(batch))
        if batch.notes:
            self._noted(batch.notes)

    def _noted(self, notes: Mapping[str, Any]) -> None:
        for name, series in self.noted.items():
            if name in notes:
                series.inc(notes[name])
        if "injected_ms" in notes:
            self.injected.inc(notes["injected_ms"] / 1e3)

    def answered(self, event: RequestAnswered) -> None:
        requests, latency = self.answers[event.outcome, event.wire]
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
