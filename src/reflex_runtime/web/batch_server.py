"""The common part of servers of policies and of functions: batcher, requests, journals, snapshots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from reflex_runtime.core.batch import RequestAnswered
from reflex_runtime.core.errors import Expired, ReflexError
from reflex_runtime.core.request import Ticket
from reflex_runtime.observe.journal_writer import JournalWriter, LineTarget, Recording, RequestRecord, turn_all
from reflex_runtime.observe.live import Live, own_process
from reflex_runtime.observe.logs import FailureLog
from reflex_runtime.observe.tracing import spans_of, within
from reflex_runtime.run.audience import Audience, Sink
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.process import in_thread
from reflex_runtime.settings import DeviceConfig
from reflex_runtime.version import __version__
from reflex_runtime.web.app import cancelled_by
from reflex_runtime.web.errors import TooManyRequests, known
from reflex_runtime.web.serve import DRAINING, Host
from reflex_runtime.web.supervisor import Parent
from reflex_runtime.web.watchers import JournalStreams, Watchers, dashboard_routes

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger("reflex.server")

T = TypeVar("T")


class BatchServer(Host):
    """A `Host` that batches on one device.

    active: number of requests that have entered and not ended. loaded: the product is loaded, and its device runs.
    batcher: set by `load`. journals: a trace, a recording, and those that are sent to callers. pages: routes of the
    live view. listening: by setting, the addresses of wires with their own ports.
    """

    product: ClassVar[str]
    batcher: Batcher

    def __init__(self, config: DeviceConfig, metrics: Sink, registry: CollectorRegistry, parent: Parent | None) -> None:
        super().__init__()
        self._config, self.parent = config, parent
        self.active = 0
        self.loaded = False
        self.listening: dict[str, str] = {}
        self.trace: JournalWriter | None = None
        self.recorder: JournalWriter | None = None
        self.journals: list[JournalWriter] = []
        self.spans = spans_of(config.otel, registry)
        self.audience = Audience([metrics, FailureLog(), *([] if self.spans is None else [self.spans])])
        self.watchers = Watchers(Live, self.audience.add, self.audience.remove, self.shown)
        journals = JournalStreams(self.journaled, self.forget_journal)
        self.on_drain += [self.watchers.close, journals.close]
        self.pages = [*dashboard_routes(self.watchers), journals.route]
        self._journal: Callable[[str | Recording | LineTarget], JournalWriter] = JournalWriter

    # -- its life ------------------------------------------------------------------------------------------------------

    def still_loading(self) -> str:
        """What is still being loaded in a ready server, for the log; "" for nothing."""
        return ""

    def close(self) -> None:
        """Release what requests use: none are left."""

    async def start(self) -> None:
        await super().start()
        self.loaded = self.state == "ready"

    async def not_loaded(self) -> None:
        if hasattr(self, "batcher"):  # `load` may have failed earlier
            await self.batcher.close(drain=False)

    async def stop(self, until: float, answered: Callable[[], Awaitable[None]]) -> bool:
        running = "" if self.clean else f"{self.what} is still being loaded or warmed up"
        if self.loaded:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await answered()
            left = max(0.0, until - asyncio.get_running_loop().time())
            ended = await self.batcher.close(drain=True, timeout=left)
            running = self.still_loading() if ended and not self.batcher.device.hung else "a batch is still running"
        for journal in self.journals:
            journal.close()
        self.close()
        if self.spans is not None:
            await in_thread(self.spans.close)
        if running:
            log.warning("%s; leaving without it", running)
        return not running

    def need_loaded(self) -> None:
        """Raise unless the product is loaded."""
        if not self.loaded:
            raise self.unready()

    def check_open(self) -> None:
        """Raise if the request that enters now must be refused. It counts as active already."""
        limit, others = self._config.max_concurrent, self.active - 1
        if limit and others >= limit:
            many = f"{others} requests are being answered, at most {limit} may be"
            raise TooManyRequests(many, retry_after=1.0, concurrent_requests=others, max_concurrent=limit)
        if not self.loaded or self._state == DRAINING:
            raise self.unready()

    # -- journals ------------------------------------------------------------------------------------------------------

    @property
    def writes_files(self) -> bool:
        """Whether it writes a trace or a recording."""
        return bool(self._config.trace or self._config.record)

    def turn_files(self) -> None:
        """Continue in new files."""
        turn_all()

    def open_journals(self, recording: Recording | None) -> None:
        """Open the trace and the recording of the settings."""
        if self._config.trace:
            self.trace = self.add_journal(self._config.trace)
        if recording is not None:
            self.recorder = self.add_journal(recording)

    def add_journal(self, to: str | Recording | LineTarget) -> JournalWriter:
        """A further journal from now on."""
        journal = self._journal(to)
        self.journals.append(journal)
        self.audience.add(journal)
        return journal

    def journaled(self, to: LineTarget) -> JournalWriter:
        """A further journal of a running server, until `forget_journal`."""
        self.need_loaded()
        self.batcher.flush()  # earlier events are not in it
        return self.add_journal(to)

    def forget_journal(self, writer: JournalWriter) -> None:
        """Send a journal no more events; the caller closes it."""
        self.batcher.flush()
        self.audience.remove(writer)
        self.journals.remove(writer)

    # -- the live view -------------------------------------------------------------------------------------------------

    @property
    def health(self) -> str:
        """The state in /health and in snapshots."""
        return self.state

    def process_health(self) -> dict[str, Any]:
        """The fields of /health about the process, its files and its device."""
        found: dict[str, Any] = {"error": self.error} if self.error else {}
        if (parent := self.parent) is not None:
            found |= {"restarts": parent.restarts, "last_exit": parent.last_exit}
            if parent.own_urls:
                found |= {"worker": parent.number, "workers": parent.own_urls}
        if self.loaded:
            found["hung_batches"] = self.batcher.device.hung
        if (recorder := self.recorder) is not None:
            found["recording"] = {
                "recorded": recorder.recorded,
                "dropped": recorder.dropped,
                "cpu_s": round(recorder.cpu, 6),
                "file": None if recorder.path is None else str(recorder.path),
                "error": None if recorder.error is None else str(recorder.error),
            }
        if self.trace is not None and self.trace.error is not None:
            found["trace_error"] = str(self.trace.error)
        return found

    def queues(self) -> dict[str, Any]:
        """The state of each group of the scheduler. Delivers pending events first."""
        if not self.loaded:
            return {}
        self.batcher.flush()
        found: dict[str, Any] = self.batcher.device.input(lambda scheduler, _: scheduler.snapshot()["groups"])
        return found

    def shown(self) -> dict[str, Any]:
        """The server's own fields of a snapshot."""
        queues = self.queues()
        waiting = sum(queue["queued"] for queue in queues.values())
        running = sum(queue["unsettled"] for queue in queues.values()) - waiting
        return {
            "product": self.product,
            "version": __version__,
            "state": self.health,
            "error": self.error,
            "unit": "affine",
            "queues": queues,
            "processes": [own_process(self.health, self.parent, running, waiting, self.error)],
        }


class HasHeaders(Protocol):
    """An HTTP request, a gRPC call, or a websocket. headers: names in lower case."""

    @property
    def headers(self) -> Mapping[bytes, bytes]: ...


class RequestScope:
    """One request on any wire: a context manager that counts it and publishes its end.

    client: owner of the fair share that it uses. Times are of `time.monotonic`: started: it reached this machine;
    received: all of it was read; answered: its answer was made; the last two are 0.0 until then. source: has its
    headers; None on a wire without headers. span: None if the server makes none. ticket: None until it is submitted.
    """

    __slots__ = (
        "answered", "client", "received", "request_id", "server", "source", "span", "started", "ticket", "wire",
    )  # fmt: skip
    server: BatchServer

    def __init__(
        self, wire: str, request_id: str, client: Hashable, started: float | None = None,
        source: HasHeaders | None = None,
    ) -> None:  # fmt: skip
        self.wire, self.request_id, self.client, self.source = wire, request_id, client, source
        self.started = time.monotonic() if started is None else started
        self.received = self.answered = 0.0
        self.span: Span | None = None
        self.ticket: Ticket | None = None

    @property
    def group(self) -> str:
        """The scheduler's group, for metrics."""
        raise NotImplementedError

    @property
    def span_name(self) -> str:
        raise NotImplementedError

    def record(self, error: ReflexError | None) -> RequestRecord | None:
        """Its record for journals; None if it has none."""
        raise NotImplementedError

    def ended(self, error: ReflexError | None) -> None:
        """Publish the end of a request that had entered."""
        if error is None:
            self.publish(None)
        else:
            self.refuse(error)

    def begin_span(self) -> Span | None:
        """Its span, made at the first call."""
        if self.span is None and self.server.spans is not None:
            headers = {} if self.source is None else self.source.headers
            self.span = self.server.spans.begin(self.span_name, headers, self.started)
        return self.span

    def __enter__(self) -> None:
        server = self.server
        server.active += 1
        if server.spans is not None:
            self.begin_span()
        try:
            server.check_open()
        except ReflexError as error:
            self._leave(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._leave(None)
        elif isinstance(error, asyncio.CancelledError):
            self._leave(cancelled_by(error))
        elif isinstance(error, Exception):
            reported = known(error, self.request_id)
            self._leave(reported)
            _forget_frames(error)
            if reported is not error:
                raise reported from None
        else:
            self._leave(ReflexError("the process ends"))

    def _leave(self, error: ReflexError | None) -> None:
        try:
            self.ended(error)
        except Exception:
            log.exception("request %s: its end could not be counted", self.request_id)
        self.server.active -= 1

    def publish(self, error: ReflexError | None) -> None:
        """Count its end: with an answer, or with this error. Also for a request that was refused before it entered."""
        server = self.server
        now = self.answered if error is None and self.answered else time.monotonic()
        detail = None
        if server.journals:
            try:
                detail = self.record(error)
            except Exception:  # the caller still gets the answer
                log.exception("request %s could not be recorded", self.request_id)
        outcome, status = ("ok", 200) if error is None else (error.outcome, error.http_status)
        age, took = now - self.started, now - (self.received or now)
        fields = now, self.group, outcome, status, age, self.ticket, detail, took, self.wire, error, self.span
        server.audience.publish(tuple.__new__(RequestAnswered, fields))  # its own constructor takes twice the time

    def time_limit(self, limit_ms: float | None, default_ms: float) -> float | None:
        """Seconds until its deadline, None without one. default_ms: for requests without a limit; 0 is no limit."""
        limit = limit_ms or default_ms
        if not limit:
            return None
        left = limit / 1e3 - (time.monotonic() - self.started)
        if left <= 0.0:
            raise Expired("its deadline passed while it was read")
        return left

    def refuse(self, error: ReflexError) -> None:
        """Count a request that failed or was refused."""
        span = self.begin_span()
        traced: AbstractContextManager[object] = nullcontext() if span is None else within(span.get_span_context())
        with traced:  # so that log lines name its trace
            self.publish(error)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of several coroutines, at least one. The first error cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and its causes: a frame refers to the batch, that to the ticket, and that to the
    error. With 20 % bad requests, collecting these cycles took 5 % of the server's time."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
