"""The server of functions, and its requests: each is one coroutine, from the item to the result.

The options of a request (deadline, priority, client, id) are in the query or in headers, so that the body is the item.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from reflex_runtime.core.batch import BatchFinished, BatchScheduled, Done, Event, RequestAnswered, RequestProgressed
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.request import PRIORITIES, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.functions.source import ServedFunction
from reflex_runtime.functions.values import encode, encode_text
from reflex_runtime.observe.journal_writer import JournalWriter, Recording, RequestRecord, hardware
from reflex_runtime.observe.logs import leave_stuck
from reflex_runtime.observe.metrics import FUNCTIONS, SeriesSet
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.modules import made
from reflex_runtime.settings import FunctionsConfig
from reflex_runtime.web.batch_server import BatchServer, HasHeaders, RequestScope
from reflex_runtime.web.errors import JSON, MSGPACK, PLAIN, known
from reflex_runtime.web.fields import check_id, client_errors
from reflex_runtime.web.request import LARGE, HttpRequest, HttpResponse
from reflex_runtime.web.supervisor import Parent

WIRE: Final = "predict"
EVENTS: Final = b"text/event-stream"
UNREAD: Final = 64  # parts of a stream that may wait for its reader before it is held


class FunctionServer(BatchServer):
    """The functions of one server."""

    what, product = "the function", "functions"

    def __init__(self, config: FunctionsConfig, functions: Sequence[ServedFunction], parent: Parent | None) -> None:
        self.config = config
        self.functions = {served.name: served for served in functions}
        self.series = FunctionSeries(list(self.functions))
        super().__init__(config, self.series, self.series.registry, parent)
        alone = len(functions) == 1
        groups = [
            config.group(served.name, weight=served.weight, tenant="" if alone else served.name) for served in functions
        ]
        self.batcher = Batcher(
            {served.name: served.processor for served in functions}, groups, self.audience, config.watchdog_s,
            on_fatal=self.give_up, brief=config.brief_ms / 1e3, on_stuck=leave_stuck,
        )  # fmt: skip
        header = {"model_hash": "function", "model_type": "function", "export_dir": ", ".join(self.functions)}
        self._journal = partial(JournalWriter, groups=groups, header=header | {"hardware": hardware()})
        if any(served.streams for served in functions):
            self.audience.add(PartsSink())

    async def load(self) -> None:
        self.open_journals(Recording(self.config.record, images="none") if self.config.record else None)
        await self.batcher.start(self._load)

    def _load(self) -> None:
        """Load all functions; called on the device thread, on which they run."""
        for served in self.functions.values():
            made(served.processor.load, served.source, "setup")

    def health_body(self) -> dict[str, Any]:
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
            self.series.set_gauges(name, queue["queued"], queue["unsettled"])
        return generate_latest(self.series.registry)


class FunctionSeries:
    """A sink that updates the series of /metrics, each with the label `function`."""

    events = frozenset({BatchScheduled, BatchFinished, RequestAnswered})

    def __init__(self, names: Sequence[str]) -> None:
        self.registry = CollectorRegistry()
        self._series = SeriesSet(FUNCTIONS, self.registry, ("function",))
        for name in names:
            self.set_gauges(name, 0, 0)

    def set_gauges(self, name: str, queued: int, unsettled: int) -> None:
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


# -- requests ----------------------------------------------------------------------------------------------------------


class PredictOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a request, in the query or in a header X-Reflex-NAME."""

    deadline_ms: Annotated[float, msgspec.Meta(gt=0.0, le=600_000.0)] | None = None
    priority: Literal["urgent", "default", "background"] = "default"
    client: str | None = None
    request_id: str | None = None


_DEFAULTS: Final = PredictOptions()
HEADERS: Final = {f"x-reflex-{name.replace('_', '-')}".encode(): name for name in PredictOptions.__struct_fields__}


def options_in(request: HttpRequest) -> PredictOptions:
    """The options in query and headers; the query's count. Raises the 422 that names the field."""
    texts = {name: request.headers[key].decode("latin-1") for key, name in HEADERS.items() if key in request.headers}
    texts |= request.query
    return options_of(texts) if texts else _DEFAULTS


def options_of(texts: Mapping[str, Any]) -> PredictOptions:
    """Options from texts or values. Raises the 422 that names the field."""
    with client_errors(PredictOptions):
        options = msgspec.convert(texts, PredictOptions, strict=False)
    for name in ("client", "request_id"):
        if (value := getattr(options, name)) is not None:
            check_id(name, value)
    return options


class Prediction(RequestScope):
    """One item in flight, on any wire. group: that of its function."""

    __slots__ = ("_name",)

    def __init__(
        self, server: FunctionServer, name: str, wire: str, id: str, client: Hashable, started: float,
        source: HasHeaders | None = None,
    ) -> None:  # fmt: skip
        super().__init__(wire, id, client, started, source)
        self.server, self._name = server, name

    @property
    def group(self) -> str:
        return self._name

    @property
    def span_name(self) -> str:
        return f"predict {self._name}"

    def record(self, error: ReflexError | None) -> RequestRecord:
        return RequestRecord(self.request_id)


class Predict:
    """Handles the requests for one function."""

    def __init__(self, server: FunctionServer, served: ServedFunction) -> None:
        self.server, self.served = server, served

    def refused(self, request: HttpRequest, error: ReflexError) -> None:
        """Count a request that was refused before `run`."""
        self._of(request).refuse(error)

    async def run(self, request: HttpRequest) -> HttpResponse | None:
        """POST /predict."""
        prediction = self._of(request)
        with prediction:
            options = options_in(request)
            if options.request_id:
                request.request_id = prediction.request_id = options.request_id
            item = await self._read(request)
            prediction.received = request.received
            if self.served.streams:
                return await self._stream(request, prediction, item, options)
            value = await self.value(prediction, item, options)
            body, kind = encode(value, request.wants_msgpack, self.served.name)
            return HttpResponse(200, body, kind, _batch_headers(prediction.ticket))

    async def value(self, prediction: Prediction, item: Any, options: PredictOptions) -> Any:
        """The result of one item. A caller that leaves cancels it."""
        return await self.server.batcher.value(self._submit(prediction, item, options, None))

    def _of(self, request: HttpRequest) -> Prediction:
        return Prediction(
            self.server, self.served.name, WIRE, request.request_id, request.client, request.started, request
        )

    async def _read(self, request: HttpRequest) -> Any:
        """The item. Large bodies and pictures are decoded in a thread."""
        body, items = await request.body(), self.served.items
        kind = request.headers.get(b"content-type", b"")
        if len(body) <= LARGE and not items.slow:
            return items.decode(body, kind)
        request.preparing = True
        item = await request.app.bodies.beside(items.decode, body, kind)
        request.preparing = False  # the item is queued in this turn of the loop
        return item

    def _submit(
        self, prediction: Prediction, item: Any, options: PredictOptions, settled: Callable[[Ticket], None] | None
    ) -> Ticket:
        served, server = self.served, self.server
        limit = prediction.time_limit(options.deadline_ms, server.config.deadline_ms)
        made = Request(
            item,
            id=prediction.request_id,
            group=served.name,
            partition=tuple(array.shape for array in item.values()) if served.shaped else "",
            client=prediction.client if options.client is None else options.client,
            priority=PRIORITIES[options.priority],
            time_limit=limit,
            streams=served.streams,
        )
        ticket = prediction.ticket = server.batcher.submit(made, settled)
        if server.spans is not None and prediction.span is not None:
            server.spans.joined(ticket, prediction.span)
        return ticket

    # -- parts ---------------------------------------------------------------------------------------------------------

    async def _stream(
        self, request: HttpRequest, prediction: Prediction, item: Any, options: PredictOptions
    ) -> HttpResponse | None:
        """Answer with server-sent events, one for each part; or with a list, if the caller accepts JSON or msgpack."""
        server, parts = self.server, Parts(self.server)
        ticket = parts.ticket = self._submit(prediction, item, options, parts)
        head = [(b"content-type", EVENTS), (b"cache-control", b"no-store")]
        failed, name = partial(_failed, prediction.request_id), self.served.name
        try:
            if request.headers.get(b"accept", b"").startswith((JSON, MSGPACK)):
                body, kind = encode([part async for part in parts], request.wants_msgpack, name)
                return HttpResponse(200, body, kind, _batch_headers(ticket))
            count = 0
            async for part in parts:
                if not count:  # so that an error before the first part has its own status
                    await request.begin(200, head, failed)
                count += 1
                await request.write(b"data: %b\n\n" % encode_text(part, name))
            if not count:
                await request.begin(200, head, failed)
            await request.end(b'event: end\ndata: {"parts": %d}\n\n' % count)
            return None
        finally:
            if ticket.outcome is None:
                server.batcher.cancel(ticket)


class Parts:
    """The parts of one stream, for its reader; the waiter of its ticket. If the reader falls behind, the scheduler
    holds the item."""

    def __init__(self, server: FunctionServer) -> None:
        self._server = server
        self.ticket: Ticket | None = None
        self._unread: asyncio.Queue[Any] = asyncio.Queue()  # parts, and at their end the ticket
        self._held = False

    def put(self, part: Any) -> None:
        if part is not None:
            self._unread.put_nowait(part)
            if not self._held and self._unread.qsize() >= UNREAD:
                self._hold(True)

    def __call__(self, ticket: Ticket) -> None:
        """The ticket settled."""
        self._unread.put_nowait(ticket)

    def __aiter__(self) -> Parts:
        return self

    async def __anext__(self) -> Any:
        part = await self._unread.get()
        if isinstance(part, Ticket):
            assert part.outcome is not None
            raise StopAsyncIteration if isinstance(part.outcome, Done) else known(part.outcome.error, part.request.id)
        if self._held and self._unread.qsize() < UNREAD // 2:
            self._hold(False)
        return part

    def _hold(self, held: bool) -> None:
        self._held, ticket = held, self.ticket

        def hold(scheduler: Scheduler, now: float) -> None:
            if ticket is not None and ticket.outcome is None:
                (scheduler.hold if held else scheduler.resume)(ticket, now)

        self._server.batcher.device.input(hold)


class PartsSink:
    """A sink that puts each part into its stream."""

    events = frozenset({RequestProgressed})

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestProgressed) and isinstance(event.ticket.waiter, Parts):
            event.ticket.waiter.put(event.value)


def _failed(request_id: str, error: ReflexError) -> bytes:
    """The last event of a stream that fails."""
    return b"event: error\ndata: " + PLAIN(error, request_id, False).body + b"\n\n"


def _batch_headers(ticket: Ticket | None) -> list[tuple[bytes, bytes]]:
    """Headers with the batch's size and the time in the queue."""
    if ticket is None or (admission := ticket.admission) is None or (started := ticket.started) is None:
        return []
    return [
        (b"x-reflex-batch-size", b"%d" % admission.size),
        (b"x-reflex-queue-ms", b"%.3f" % ((started - ticket.arrived) * 1e3)),
    ]
