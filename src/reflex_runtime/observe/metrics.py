"""Prometheus metrics: a fold over the event stream, in a registry of its own.

Every series carries `embodiment` and `policy_slot`, and `policy` where several are served. Gauges are read live at
scrape time. The page `docs/metrics.md` lists them; a test fails on a series that it does not move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from reflex_runtime.core.batch import Cause, Done
from reflex_runtime.core.events import BatchFinished, BatchScheduled, Event, RequestAnswered
from reflex_runtime.observe.series import POLICIES, CounterChild, HistogramChild, SeriesSet

OUTCOMES = ("ok", "cancelled", "rejected", "expired", "shed", "superseded", "drained", "failed", "client_error")
WARNINGS = ("instruction_ignored", "instruction_unknown")
CONTENT_TYPE = CONTENT_TYPE_LATEST


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
        labels = ("embodiment", "policy_slot", *(["policy"] if several else []))
        self.series = SeriesSet(POLICIES, self.registry, labels)
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
        self.series.gauge("reflex_policy_runtime_queue_depth", *labels).set_function(queue_depth)
        self.series.gauge("reflex_in_flight_requests", *labels).set_function(in_flight)
        self.series.gauge("reflex_backlog_seconds", *labels).set_function(backlog)
        if not self._slots:
            self.series.counter("reflex_recording_dropped_total", *labels)
            self.series.gauge("reflex_recording_failed", *labels)
        self._slots[slot] = _Slot(self.series, labels, wires)

    def add_verdict(self, slot: str, drained: Callable[[], bool]) -> None:
        """Whether the slot is drained, read at scrape time."""
        self.series.gauge("reflex_slot_drained", *self._slots[slot].labels).set_function(drained)

    def add_recording(self, dropped: Callable[[], float], failed: Callable[[], bool]) -> None:
        """The recording's series, read at scrape time. One file serves all slots: they carry the label of the first."""
        labels = next(iter(self._slots.values())).labels
        self._recording = dropped, self.series.counter("reflex_recording_dropped_total", *labels)
        self.series.gauge("reflex_recording_failed", *labels).set_function(failed)

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

    def render(self) -> bytes:
        if self._recording is not None:
            dropped, told = self._recording
            told.value = float(dropped())
        return generate_latest(self.registry)


class _Slot:
    """The series of one slot, looked up once: that costs more than the observation."""

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
        latency = {o: histogram("reflex_request_latency_seconds", o) for o in OUTCOMES}
        self._latency = latency
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
            self.apart = histogram("reflex_shadow_divergence")
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
        key = event.outcome, event.wire
        found = self.answers.get(key)
        if found is None:  # a wire of the program's own
            found = self.answers[key] = self._answers(*key)
        requests, latency = found
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
