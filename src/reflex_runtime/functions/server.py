"""The life of a server of functions: load, serve, drain, and the events that everything it shows is made of.

States: initializing → loading → ready; `warmup_failed`; `draining`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest

from reflex_runtime.core.errors import Closed, ConfigError
from reflex_runtime.core.events import BatchFinished, BatchScheduled, Event, RequestAnswered, RequestProgressed
from reflex_runtime.core.request import Ticket
from reflex_runtime.functions.source import ServedFunction
from reflex_runtime.observe.journal_writer import JournalWriter, Recording, hardware, turn_all
from reflex_runtime.observe.live import Live, own_process
from reflex_runtime.observe.logs import FailureLog, leave_stuck
from reflex_runtime.observe.series import FUNCTIONS, SeriesSet
from reflex_runtime.observe.spans import spans_of
from reflex_runtime.run.audience import Audience
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.modules import made
from reflex_runtime.run.process import in_thread
from reflex_runtime.settings import FunctionsConfig
from reflex_runtime.version import __version__
from reflex_runtime.web.errors import NotReady, TooManyRequests
from reflex_runtime.web.supervisor import Parent
from reflex_runtime.web.watchers import Watchers

log = logging.getLogger("reflex.server")


class FunctionServer:
    """The `Host` of functions. active: requests that have entered and are not answered."""

    writes_files: bool

    def __init__(
        self,
        config: FunctionsConfig,
        functions: Sequence[ServedFunction],
        on_lost: Callable[[], None],
        parent: Parent | None,
    ) -> None:
        self.config, self.parent = config, parent
        self.functions = {served.name: served for served in functions}
        self.state, self.error, self.unusable = "initializing", "", False
        self.writes_files = bool(config.trace or config.record)
        self.active = 0
        self.listening: dict[str, str] = {}  # addresses of other listeners, by their settings
        self.series = FunctionSeries(list(self.functions))
        self.spans = spans_of(config.otel, self.series.registry)
        self.audience = Audience([self.series, FailureLog(), *([] if self.spans is None else [self.spans])])
        alone = len(functions) == 1
        self.groups = [config.group(served.name, served.weight, alone) for served in functions]
        self.batcher = Batcher(
            {served.name: served.processor for served in functions}, self.groups, self.audience, config.watchdog_s,
            on_fatal=on_lost, brief=config.brief_ms / 1e3, on_stuck=leave_stuck,
        )  # fmt: skip
        self.journals: list[JournalWriter] = []
        self.watchers = Watchers(Live, self.audience.add, self.audience.remove, self._shown)
        self.streams: dict[Ticket, PartsReader] = {}  # readers of parts, by ticket
        if any(served.streams for served in functions):
            self.audience.add(ProgressSink(self.streams))
        self._loaded = False

    # -- its life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the files, and start the device thread, on which functions load."""
        self.state = "loading"
        try:
            self._open_journals()
            await self.batcher.start(self._load)
        except Exception as error:
            self.state, self.error = "warmup_failed", str(error)
            self.unusable = isinstance(error, ConfigError)
            if not self.unusable:
                log.exception("the functions could not be started")
            await self.batcher.close(drain=False)
            return
        self._loaded, self.state = True, "ready"

    def _load(self) -> None:
        """On the device thread, as everything that a function does. Devices call `start` again, when it is done."""
        for served in self.functions.values():
            made(served.processor.load, served.source, "setup")

    def drain(self) -> None:
        if self.state != "warmup_failed":
            self.state = "draining"
        self.watchers.close()

    async def stop(self, until: float, answered: Callable[[], Awaitable[None]]) -> bool:
        clean = True
        if self._loaded:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await answered()
            left = max(0.0, until - asyncio.get_running_loop().time())
            clean = await self.batcher.close(drain=True, timeout=left) and not self.batcher.device.hung
        for journal in self.journals:
            journal.close()
        if self.spans is not None:
            await in_thread(self.spans.close)
        return clean

    def turn_files(self) -> None:
        turn_all()

    def check_open(self) -> None:
        """Raise where no request may enter now. The one that asks counts as active already."""
        limit = self.config.max_concurrent
        if limit and self.active > limit:
            many = f"{self.active - 1} requests are being answered, at most {limit} may be"
            raise TooManyRequests(many, retry_after=1.0, concurrent_requests=self.active - 1, max_concurrent=limit)
        if self.state == "ready":
            return
        if self.state == "draining":
            raise Closed("the server is shutting down", retry_after=1.0)
        if self.state == "warmup_failed":  # waiting does not help
            raise NotReady(f"the functions could not be started: {self.error}", state=self.state)
        raise NotReady(f"the server is {self.state}", retry_after=1.0, state=self.state)

    def _open_journals(self) -> None:
        names = ", ".join(self.functions)
        header: Mapping[str, Any] = {"model_type": "function", "export_dir": names, "hardware": hardware()}
        if self.config.trace:
            self.journals.append(JournalWriter(self.config.trace, self.groups, header=header))
        if self.config.record:
            to = Recording(self.config.record, images="none")
            self.journals.append(JournalWriter(to, self.groups, header={"model_hash": "function", **header}))
        for journal in self.journals:
            self.audience.add(journal)

    # -- what it shows -------------------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """The body of /health."""
        told: dict[str, Any] = {
            "status": "ok" if self.state == "ready" else self.state,
            "state": self.state,
            "functions": {served.name: served.source for served in self.functions.values()},
            **({"listening": self.listening} if self.listening else {}),
            "hung_batches": self.batcher.device.hung,
        }
        told |= {"error": self.error} if self.error else {}
        if self.parent is not None:
            told |= {"restarts": self.parent.lives.restarts, "last_exit": self.parent.lives.last_exit}
            if self.parent.own_urls:
                told |= {"worker": self.parent.number, "workers": self.parent.own_urls}
        if failed := next((journal.error for journal in self.journals if journal.error is not None), None):
            told["recording_error"] = str(failed)
        return told

    def metrics(self) -> bytes:
        """Prometheus text."""
        self.batcher.flush()
        for name, queue in self._queues().items():
            self.series.look(name, queue["queued"], queue["unsettled"])
        return generate_latest(self.series.registry)

    def _shown(self) -> dict[str, Any]:
        """What a snapshot tells of the server itself."""
        self.batcher.flush()
        queues = self._queues()
        waiting = sum(queue["queued"] for queue in queues.values())
        running = sum(queue["unsettled"] for queue in queues.values()) - waiting
        lives = None if self.parent is None else self.parent.lives
        return {
            "product": "functions",
            "version": __version__,
            "state": self.state,
            "error": self.error,
            "unit": "affine",
            "queues": queues,
            "processes": [own_process(self.state, lives, running, waiting, self.error)],
        }

    def _queues(self) -> dict[str, Any]:
        return self.batcher.device.input(lambda scheduler, _: scheduler.snapshot()["groups"]) if self._loaded else {}


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
