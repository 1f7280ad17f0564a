"""The server of functions, and the series of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest

from reflex_runtime.core.events import BatchFinished, BatchScheduled, Event, RequestAnswered, RequestProgressed
from reflex_runtime.core.request import Ticket
from reflex_runtime.functions.source import ServedFunction
from reflex_runtime.observe.journal_writer import JournalWriter, Recording, hardware
from reflex_runtime.observe.logs import leave_stuck
from reflex_runtime.observe.series import FUNCTIONS, SeriesSet
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.modules import made
from reflex_runtime.settings import FunctionsConfig
from reflex_runtime.web.batch_server import BatchServer
from reflex_runtime.web.supervisor import Parent


class FunctionServer(BatchServer):
    """The functions of one server. streams: readers of parts, by ticket."""

    what, product = "the function", "functions"

    def __init__(
        self,
        config: FunctionsConfig,
        functions: Sequence[ServedFunction],
        on_lost: Callable[[], None],
        parent: Parent | None,
    ) -> None:
        self.config = config
        self.functions = {served.name: served for served in functions}
        self.series = FunctionSeries(list(self.functions))
        super().__init__(config, self.series, self.series.registry, parent)
        alone = len(functions) == 1
        groups = [config.group(served.name, served.weight, alone) for served in functions]
        self.batcher = Batcher(
            {served.name: served.processor for served in functions}, groups, self.audience, config.watchdog_s,
            on_fatal=on_lost, brief=config.brief_ms / 1e3, on_stuck=leave_stuck,
        )  # fmt: skip
        header = {"model_hash": "function", "model_type": "function", "export_dir": ", ".join(self.functions)}
        self._journal = partial(JournalWriter, groups=groups, header=header | {"hardware": hardware()})
        self.streams: dict[Ticket, PartsReader] = {}
        if any(served.streams for served in functions):
            self.audience.add(ProgressSink(self.streams))

    async def load(self) -> None:
        self.open_journals(Recording(self.config.record, images="none") if self.config.record else None)
        await self.batcher.start(self._load)

    def _load(self) -> None:
        """On the device thread, as everything that a function does. Devices call `start` again, when it is done."""
        for served in self.functions.values():
            made(served.processor.load, served.source, "setup")

    def health_body(self) -> dict[str, Any]:
        """The body of /health."""
        return {
            "status": "ok" if self.state == "ready" else self.state,
            "state": self.state,
            "functions": {served.name: served.source for served in self.functions.values()},
            **({"listening": self.listening} if self.listening else {}),
            **self.process_health(),
        }

    def metrics(self) -> bytes:
        """Prometheus text."""
        for name, queue in self.queues().items():
            self.series.look(name, queue["queued"], queue["unsettled"])
        return generate_latest(self.series.registry)


class PartsReader(Protocol):
    """The reader of one stream."""

    def said(self, part: Any) -> None: ...


class ProgressSink:
    """A sink that hands each part to its reader."""

    events = frozenset({RequestProgressed})

    def __init__(self, readers: Mapping[Ticket, PartsReader]) -> None:
        self._readers = readers

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestProgressed) and (reader := self._readers.get(event.ticket)) is not None:
            reader.said(event.value)


class FunctionSeries:
    """A sink that keeps the series of /metrics, each with the label `function`."""

    events = frozenset({BatchScheduled, BatchFinished, RequestAnswered})

    def __init__(self, names: Sequence[str]) -> None:
        self.registry = CollectorRegistry()
        self._series = SeriesSet(FUNCTIONS, self.registry, ("function",))
        for name in names:
            self.look(name, 0, 0)

    def look(self, name: str, queued: int, unsettled: int) -> None:
        """What waits, and what is not answered, now."""
        self._series.gauge("reflex_function_waiting", name).set(queued)
        self._series.gauge("reflex_function_in_flight", name).set(unsettled)

    def __call__(self, event: Event) -> None:
        series = self._series
        if isinstance(event, RequestAnswered):
            series.counter("reflex_function_requests_total", event.slot, event.outcome, event.wire).inc()
            series.histogram("reflex_function_latency_seconds", event.slot, event.outcome).observe(event.latency)
        elif isinstance(event, BatchScheduled):
            batch = event.batch
            series.counter("reflex_function_batches_total", batch.group, batch.cause.value).inc()
            series.histogram("reflex_function_batch_size", batch.group).observe(len(batch))
            wait = series.histogram("reflex_function_queue_wait_seconds", batch.group)
            for ticket in batch.admitted:
                wait.observe(batch.scheduled_at - ticket.arrived)
        elif isinstance(event, BatchFinished):
            series.counter("reflex_function_busy_seconds_total", event.batch.group).inc(max(0.0, event.elapsed))
