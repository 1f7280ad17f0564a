"""The application of functions: POST /predict, and the pages that every server has.

A request takes one way, `Predict.run`: read the item, submit it, await its batch, write the result. What is not the
item (deadline, priority, client, id) stands in the query or in headers, so that the body is the caller's own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Literal

import msgspec

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import Expired, ReflexError
from reflex_runtime.core.events import RequestAnswered
from reflex_runtime.core.request import PRIORITIES, Request, Ticket
from reflex_runtime.functions.openapi import document
from reflex_runtime.functions.server import FunctionServer
from reflex_runtime.functions.source import ServedFunction
from reflex_runtime.functions.values import encode
from reflex_runtime.observe.journal_writer import RequestRecord
from reflex_runtime.observe.metrics import CONTENT_TYPE
from reflex_runtime.settings import FunctionsConfig
from reflex_runtime.settings.declare import did_you_mean
from reflex_runtime.web.app import App, cancelled_by
from reflex_runtime.web.bodies import LARGE
from reflex_runtime.web.dashboard import dashboard_routes
from reflex_runtime.web.errors import JSON, PLAIN, known
from reflex_runtime.web.fields import check_id, invalid, invalid_field
from reflex_runtime.web.fields import encode as encode_json
from reflex_runtime.web.openapi import document_routes
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route
from reflex_runtime.web.serve import Make
from reflex_runtime.web.supervisor import Parent

PREDICT: Final = "/predict"
WIRE: Final = "predict"
EVENTS: Final = b"text/event-stream"
UNREAD: Final = 64  # parts of a stream that may wait for its reader before it is held


def serving(config: FunctionsConfig, functions: Sequence[ServedFunction]) -> Make:
    """What `web.serve` makes to serve functions."""

    def make(on_lost: Callable[[], None], parent: Parent | None) -> tuple[App, FunctionServer]:
        server = FunctionServer(config, functions, on_lost, parent)
        return application(server), server

    return make


def application(server: FunctionServer) -> App:
    """The application around a server of functions: a route for each, and /predict for the only one."""
    config, most = server.config, server.config.max_body_bytes
    of = {name: Predict(server, served) for name, served in server.functions.items()}
    paths = {f"{PREDICT}/{name}": one for name, one in of.items()}
    if len(of) == 1:
        paths[PREDICT] = next(iter(of.values()))
    questions = [Route(path, one.run, "POST", most=most, refused=one.refused) for path, one in paths.items()]

    async def health(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200 if server.state == "ready" else 503, encode_json(server.health()))

    async def metrics(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, server.metrics(), CONTENT_TYPE.encode())

    routes = [
        *questions,
        Route("/health", health, open=True),
        Route("/metrics", metrics, open=True),
        *document_routes(lambda request: document(routes, server, app.keys)),
        *dashboard_routes(server.watchers),
    ]

    def missing(path: str) -> str:
        name = path.removeprefix(f"{PREDICT}/") if path.startswith(f"{PREDICT}/") else ""
        there = ", ".join(f"{PREDICT}/{one}" for one in of)
        return f"{path[:200]}: not found; there are {there}{did_you_mean(name, of)}"

    app = App(config, {route.path: route for route in routes}, PLAIN, missing=missing, cors=config.cors)
    return app


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """What a request says beside its item, in the query, or in a header X-Reflex-NAME."""

    deadline_ms: float | None = None
    priority: Literal["urgent", "default", "background"] = "default"
    client: str | None = None
    request_id: str | None = None


_HEADERS: Final = {f"x-reflex-{name.replace('_', '-')}".encode(): name for name in Asked.__struct_fields__}


def asked_in(request: HttpRequest) -> Asked | None:
    """What the query and the headers say; None for nothing. 422 names the field."""
    said = {name: request.headers[key].decode("latin-1") for key, name in _HEADERS.items() if key in request.headers}
    if request.query_string:
        query = request.query
        if not query:
            raise invalid("query", "query: must be NAME=VALUE, joined by &")
        said |= query
    if not said:
        return None
    try:
        asked = msgspec.convert(said, Asked, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error, Asked) from None
    if asked.deadline_ms is not None and not 0.0 < asked.deadline_ms <= 600_000.0:
        raise invalid("deadline_ms", "deadline_ms: must be over 0 and at most 600000")
    for name in ("client", "request_id"):
        if (value := getattr(asked, name)) is not None:
            check_id(name, value)
    return asked


class Prediction:
    """One request that is being answered: a context that counts it, and publishes how it ended."""

    __slots__ = ("_name", "_server", "request", "span", "ticket")

    def __init__(self, server: FunctionServer, name: str, request: HttpRequest) -> None:
        self._server, self._name, self.request = server, name, request
        self.ticket: Ticket | None = None
        self.span = None if server.spans is None else server.spans.begin(f"predict {name}", request.headers)

    def __enter__(self) -> Prediction:
        self._server.active += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.active -= 1
        if error is None:
            self.publish("ok", 200, None)
            return
        if isinstance(error, asyncio.CancelledError):
            told: ReflexError = cancelled_by(error)
        elif isinstance(error, Exception):
            told = known(error, self.request.request_id)
        else:
            told = ReflexError("the process ends")
        self.publish(told.outcome, told.http_status, told)
        error.__traceback__ = None  # its frames hold the batch, the batch this ticket, the ticket the error
        if told is not error and not isinstance(error, asyncio.CancelledError):
            raise told from None

    def publish(self, outcome: str, status: int, error: ReflexError | None) -> None:
        now, request, ticket = time.monotonic(), self.request, self.ticket
        took = now - (request.received or now)
        detail = self._record(now, took, error) if self._server.journals else None
        fields = (
            now, self._name, outcome, status, now - request.started, ticket, detail, took, WIRE, error, self.span,
        )  # fmt: skip
        self._server.audience.publish(tuple.__new__(RequestAnswered, fields))

    def _record(self, now: float, took: float, error: ReflexError | None) -> RequestRecord:
        found = RequestRecord(self.request.request_id, slot=self._name, total_s=took, arrived=self.request.received)
        if (ticket := self.ticket) is not None:
            started = ticket.started
            found.arrived, found.batch, found.measured_ms = ticket.arrived, ticket.admission, ticket.shared * 1e3
            found.queue_s = (now if started is None else started) - ticket.arrived
            found.batch_s = 0.0 if started is None else now - started
        if error is not None:
            found.error = (error.code, error.message)
        return found


class Predict:
    """The requests for one function."""

    def __init__(self, server: FunctionServer, served: ServedFunction) -> None:
        self._server, self._served = server, served

    def refused(self, request: HttpRequest, error: ReflexError) -> None:
        """Count a request that may not be asked."""
        call = Prediction(self._server, self._served.name, request)
        call.publish(error.outcome, error.http_status, error)

    async def run(self, request: HttpRequest) -> HttpResponse | None:
        with Prediction(self._server, self._served.name, request) as call:
            self._server.check_open()
            asked = asked_in(request)
            if asked is not None and asked.request_id:
                request.request_id = asked.request_id
            made = self._request(request, asked, await self._read(request))
            if self._served.streams:
                return await self._stream(call, made)
            ticket = call.ticket = self._server.batcher.submit(made)
            if call.span is not None:
                self._server.spans.joined(ticket, call.span)  # type: ignore[union-attr]
            try:
                value = await (waiter := ticket.waiter)
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    waiter.exception()  # it failed in the same turn, and nobody else looks
                self._server.batcher.cancel(ticket)
                raise
            finally:
                ticket.waiter = waiter = None
            body, kind = encode(value, request.wants_msgpack)
            return HttpResponse(200, body, kind, _told(ticket))

    async def _read(self, request: HttpRequest) -> Any:
        """The item; of large bodies and of pictures decoded beside the loop."""
        body, items = await request.body(), self._served.items
        kind = request.headers.get(b"content-type", b"")
        if len(body) <= LARGE and not items.slow:
            return items.decode(body, kind)
        request.preparing = True
        item = await request.app.bodies.beside(items.decode, body, kind)
        request.preparing = False  # it is queued in this turn
        return item

    def _request(self, request: HttpRequest, asked: Asked | None, item: Any) -> Request:
        served, config = self._served, self._server.config
        limit_ms = (None if asked is None else asked.deadline_ms) or config.deadline_ms
        limit = None
        if limit_ms:
            limit = limit_ms / 1e3 - (time.monotonic() - request.started)
            if limit <= 0.0:
                raise Expired("its deadline passed while it was read")
        return Request(
            item,
            id=request.request_id,
            group=served.name,
            partition=tuple(array.shape for array in item.values()) if served.shaped else "",
            client=request.client if asked is None or asked.client is None else asked.client,
            priority=PRIORITIES["default" if asked is None else asked.priority],
            time_limit=limit,
            streams=served.streams,
        )

    # -- parts ---------------------------------------------------------------------------------------------------------

    async def _stream(self, call: Prediction, made: Request) -> HttpResponse | None:
        """Answer with a part a time, as server-sent events; or with all of them, if JSON is all that the caller
        reads."""
        request, batcher = call.request, self._server.batcher
        parts = Parts(self._server)
        ticket = call.ticket = parts.ticket = batcher.submit(made, parts.settled)
        self._server.streams[ticket] = parts
        if call.span is not None:
            self._server.spans.joined(ticket, call.span)  # type: ignore[union-attr]
        try:
            if request.headers.get(b"accept", b"").startswith(JSON):
                whole = [part async for part in parts]
                return HttpResponse(200, encode(whole, False)[0], JSON, _told(ticket))
            count = 0
            async for part in parts:
                if not count:  # what fails before the first part has a status of its own
                    await request.begin(200, [(b"content-type", EVENTS), (b"cache-control", b"no-store")], _failed)
                count += 1
                await request.write(b"data: %b\n\n" % encode_json_value(part))
            if not count:
                await request.begin(200, [(b"content-type", EVENTS), (b"cache-control", b"no-store")], _failed)
            await request.end(b'event: end\ndata: {"parts": %d}\n\n' % count)
            return None
        finally:
            self._server.streams.pop(ticket, None)
            if not parts.ended:
                batcher.cancel(ticket)


class Parts:
    """The parts of one stream, for its reader. A reader that falls behind has its item held at the scheduler."""

    def __init__(self, server: FunctionServer) -> None:
        self._server = server
        self.ticket: Ticket | None = None
        self._unread: deque[Any] = deque()
        self._news = asyncio.Event()
        self._held = self.ended = False
        self._error: ReflexError | None = None

    def said(self, part: Any) -> None:
        if part is None:
            return
        self._unread.append(part)
        self._news.set()
        if not self._held and len(self._unread) >= UNREAD:
            self._hold(True)

    def settled(self, ticket: Ticket) -> None:
        self.ended = True
        if not isinstance(ticket.outcome, Done):
            assert ticket.outcome is not None
            self._error = known(ticket.outcome.error, ticket.request.id)
        self._news.set()

    def __aiter__(self) -> Parts:
        return self

    async def __anext__(self) -> Any:
        while not self._unread:
            if self.ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        if self._held and len(self._unread) <= UNREAD // 2:
            self._hold(False)
        return self._unread.popleft()

    def _hold(self, held: bool) -> None:
        self._held, ticket = held, self.ticket
        if ticket is not None and not self.ended:
            self._server.batcher.device.input(
                lambda scheduler, now: (scheduler.hold if held else scheduler.resume)(ticket, now)
            )


def encode_json_value(part: Any) -> bytes:
    """A part as the data of an event: JSON in one line."""
    return encode(part, False)[0] if not isinstance(part, bytes) else encode_json(part)


def _failed(error: ReflexError) -> bytes:
    """The last event of a stream that fails."""
    return b"event: error\ndata: " + PLAIN.refuse(error, "", False).body + b"\n\n"


def _told(ticket: Ticket) -> list[tuple[bytes, bytes]]:
    """What the headers tell of the batch."""
    admission, started = ticket.admission, ticket.started
    if admission is None or started is None:
        return []
    return [
        (b"x-reflex-batch-size", b"%d" % admission.size),
        (b"x-reflex-queue-ms", b"%.3f" % ((started - ticket.arrived) * 1e3)),
    ]
