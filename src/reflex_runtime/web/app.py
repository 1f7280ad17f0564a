"""The ASGI application of every server: routes, keys, and the state that requests share.

A product brings a `Route` for each path, the form of its errors, and a `Host` (see `web.serve`). `_route` finds the
route of a request and checks the caller; the route's coroutine answers, and its exceptions become errors in the
product's form. Any ASGI server can run the application; `web.serve` runs it on uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from math import inf
from typing import Any, NamedTuple, Protocol

from reflex_runtime.core.errors import Closed, ReflexError
from reflex_runtime.run.processor import ASYNC_WALL
from reflex_runtime.settings import ServerConfig
from reflex_runtime.web import access, errors
from reflex_runtime.web.fields import printable
from reflex_runtime.web.request import (
    CLOSE,
    INTERNAL,
    POLICY,
    STALLED,
    TRY_LATER,
    Bodies,
    HttpRequest,
    HttpResponse,
    Reading,
    Receive,
    Route,
    Scope,
    Seldom,
    Send,
    WebSocket,
    own_id,
    retry_headers,
)

log = logging.getLogger("reflex.server")


class Lifespan(Protocol):
    """What ASGI's lifespan calls; see `web.serve`."""

    async def begin(self) -> None: ...
    async def end(self) -> None: ...


class ConnectionLimits(NamedTuple):
    """most: open connections. idle: seconds without a request. head, body: seconds to receive those of a request."""

    most: int
    idle: float
    head: float
    body: float


class Listener(Protocol):
    """A listener for another protocol than HTTP."""

    async def close(self) -> None:
        """Close, after giving callers a moment to read their answers."""


class App:
    """The application of one server.

    routes: by path; `find` returns the route of any other path. form: of errors. on_answer: called with each request
    and the status of its answer. missing: returns the error text for a path without a route.

    asked: number of requests so far. active: number of those that are being answered; both count messages of other
    protocols too. closing: POSTs are refused, and connections close after their next answer. listeners: for other
    protocols; closed last. apart: number of connections that they may have. shares: connections of each address.
    reading: limits how many messages of unknown size are read at a time. all_left: set in a drain when no connection is
    left. life: called by ASGI's lifespan.
    """

    def __init__(
        self,
        settings: ServerConfig,
        routes: Mapping[str, Route],
        form: errors.ErrorForm,
        find: Callable[[str], Route | None] = lambda path: None,
        on_answer: Callable[[HttpRequest, int], None] | None = None,
        missing: Callable[[str], str] = lambda path: f"no such path: {path[:200]}; /docs has all paths",
    ) -> None:
        self.routes, self.form, self._find, self._on_answer = dict(routes), form, find, on_answer
        self._missing = missing
        self.bodies = Bodies(int(settings.max_bodies_mb * 1e6), self._cut_stalled)
        self.reading = Reading(max(1, self.bodies.most // settings.max_body_bytes))
        self.shares = access.AddressShares(settings.max_connections_per_address)
        self.asked = self.active = self.apart = 0
        self.closing = False
        self.listeners: list[Listener] = []
        self.life: Lifespan | None = None
        self.limits = ConnectionLimits(0, inf, inf, inf)  # set by the server
        self.requests: set[HttpRequest] = set()  # of HTTP, that are being answered
        self.keys = access.Keys(settings.api_key, settings.admin_key)
        self._cors = access.Cors(settings.cors)
        self._trust = access.Trust(settings.host, settings.allow_host)
        self._prefix = secrets.token_hex(6)
        self._refused: defaultdict[int, Seldom] = defaultdict(Seldom)  # websockets, by status
        self._beside: set[asyncio.Task[None]] = set()
        self._all_answered, self.all_left = asyncio.Event(), asyncio.Event()  # set once it is closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(HttpRequest(self, scope, receive, send))
        elif scope["type"] == "websocket":
            await self._connect(WebSocket(self, scope, receive, send))
        else:
            await self._lifespan(receive, send)

    # -- a request -----------------------------------------------------------------------------------------------------

    async def _answer(self, request: HttpRequest) -> None:
        self._begin(request)
        self.requests.add(request)
        try:
            response = await self._respond(request)
        except asyncio.CancelledError:
            response = None  # the caller left while an error was sent
        except Exception:
            response = None
            log.exception("request %s: its answer could not be sent", request.request_id)
        finally:
            self.bodies.release(request)
            self.requests.discard(request)
            self.leave()
        try:
            if response is not None:  # no drain waits until the caller reads it
                await request.answer(response)
        except asyncio.CancelledError:
            return  # the caller left while the answer was sent
        finally:
            request.left()

    def _begin(self, request: HttpRequest) -> None:
        """Count the request and set its id: the one in X-Request-Id, or a new one."""
        request.number = request.request_id = self.enter()
        request.task = asyncio.current_task()
        if (sent := request.headers.get(b"x-request-id")) is not None:
            request.request_id = own_id(sent) or request.number

    async def _respond(self, request: HttpRequest) -> HttpResponse | None:
        """The answer to send; None if it was sent in parts, or if the caller has left."""
        route = None
        try:
            route = self._route(request)
            with ASYNC_WALL:
                return await route.run(request)
        except asyncio.CancelledError as cancelled:
            return await self._failed(request, cancelled_by(cancelled))
        except Exception as failure:
            error = errors.known(failure, request.request_id)
            if route is None and request.route is not None and request.route.refused is not None:
                request.route.refused(request, error)
            return await self._failed(request, error)

    async def _failed(self, request: HttpRequest, error: ReflexError) -> HttpResponse | None:
        if isinstance(error, errors.CallerLeft):
            request.ended = True
            return None
        if request.begun:
            await request.fail(error)
            return None
        return self.refuse(request, error)

    def _route(self, request: HttpRequest) -> Route:
        """The route of a request. Raises the error of a request that is refused."""
        path = request.path
        route = request.route = self.routes.get(path) or self._find(path) or self.routes.get(path.rstrip("/"))
        socket = isinstance(request, WebSocket)
        if len(request.headers) < len(request.scope["headers"]):  # a name comes twice
            access.check_once(request.scope["headers"])
        crosses = self._cors.admits(request, route)
        if crosses and route is not None and access.is_preflight(request):
            if not self.keys.callers:
                self._trust.check("GET", request.headers)
            return Route(route.path, access.answer_preflight(route))
        self._check_caller(request, route, crosses)
        if route is None:
            raise errors.NotFound(printable(self._missing(request.path)))
        if socket or route.method != "GET":
            self.check_open()
            access.check_known(request.headers, route.headers)
        if socket:
            if route.socket is None:
                raise errors.NotFound(printable(f"{request.path[:200]} has no websocket"))
        elif request.method != route.method and (request.method, route.method) != ("HEAD", "GET"):
            raise errors.MethodNotAllowed(printable(f"{request.path[:200]} takes {route.method}"), allow=route.method)
        return route

    def refuse(self, request: HttpRequest, failure: Exception, extra: errors.Headers | None = None) -> HttpResponse:
        """The answer for an error. Unexpected exceptions are logged, and answered as a 500 without their text."""
        error = errors.known(failure, request.request_id)
        form = (request.route.form if request.route is not None else None) or self.form
        response = form(error, request.request_id, request.wants_msgpack)
        response.headers = [*(extra or ()), *response.headers, *retry_headers(error), *getattr(error, "headers", ())]
        return response

    def refuse_bytes(self, error: ReflexError) -> bytes:
        """The bytes of the answer for input that is no request; then the connection closes."""
        request_id = self.enter()
        self.leave()
        response = self.form(error, request_id, False)
        lines = [b"HTTP/1.1 %d %b" % (response.status, HTTPStatus(response.status).phrase.encode())]
        headers = [(b"content-type", response.content_type), (b"content-length", b"%d" % len(response.body))]
        headers += [(b"x-request-id", request_id.encode()), *response.headers, *retry_headers(error), CLOSE]
        return b"\r\n".join([*lines, *(b"%b: %b" % header for header in headers), b"", response.body])

    def check_open(self) -> None:
        """Raise Closed in a drain."""
        if self.closing:
            raise Closed("the server is shutting down", retry_after=1.0)

    def enter(self) -> str:
        """Count a new request. Returns its id."""
        self.asked += 1
        self.active += 1
        return f"{self._prefix}-{self.asked:x}"

    def leave(self) -> None:
        """Count the end of a request: its answer is made, and may not be written yet."""
        self.active -= 1
        if self.closing and not self.active:
            self._all_answered.set()

    def answers(self, request: HttpRequest, status: int) -> None:
        """The head of an answer is being sent."""
        if self._on_answer is not None:
            self._on_answer(request, status)

    def _check_caller(self, request: HttpRequest, route: Route | None, crosses: bool) -> None:
        """Raise if the caller may not use the route. crosses: an admitted page of another site sent the request."""
        keys = self.keys
        socket = isinstance(request, WebSocket)
        if needed := keys.of(route, socket):
            if not keys.sent(request.headers, needed):
                which = "the key of operators (--admin-key)" if needed is keys.operators else "the key"
                how = "Authorization: Bearer KEY, X-Reflex-Key or x-api-key"
                raise errors.Unauthorized(f"{which} is missing or wrong; send it as {how}")
        elif not keys.callers:
            guarded = socket or (route is not None and route.own_pages)
            self._trust.check("POST" if guarded else "GET" if crosses else request.method, request.headers)
        if route is None or not route.changes or request.method != route.method:
            return
        if not (keys.operators if route.operators else keys.callers) and not self._is_operator(request):
            access.check_direct(request.client, request.headers, "--admin-key" if route.operators else "--api-key")

    def _is_operator(self, request: HttpRequest) -> bool:
        """Whether this caller sent the operators' key, which opens every path."""
        return bool(self.keys.operators) and self.keys.sent(request.headers, self.keys.operators)

    def knows(self, request: HttpRequest) -> bool:
        """Whether this caller sent the key, or there is none; for paths that show more to callers with the key."""
        return not self.keys.callers or self.keys.sent(request.headers, self.keys.callers)

    def may_change(self, request: HttpRequest) -> bool:
        """Whether this caller may change state; for paths where only some requests do."""
        if not self.keys.callers and not self._is_operator(request):
            try:
                access.check_direct(request.client, request.headers, "--api-key")
            except errors.Unauthorized:
                return False
        return True

    def _cut_stalled(self, now: float) -> None:
        """End the request whose body has stalled longest, if there is one, to free its memory."""
        stalled = [r for r in self.requests if r.held and not r.received and r.heard <= now - STALLED]
        if stalled:
            oldest = min(stalled, key=lambda request: request.heard)
            self.bodies.release(oldest)
            if oldest.task is not None:
                oldest.task.cancel(errors.TooSlow("the request stopped coming, and others need its memory"))

    # -- a websocket ---------------------------------------------------------------------------------------------------

    async def _connect(self, socket: WebSocket) -> None:
        """Serve a websocket. The route's session accepts it; an exception before that refuses it."""
        self._begin(socket)
        try:
            await socket.connecting()
            route = self._route(socket)
            assert route.socket is not None
            with ASYNC_WALL:
                await route.socket(socket)
            await socket.close()
        except asyncio.CancelledError:
            return  # the peer left
        except Exception as failure:
            error = errors.known(failure, socket.request_id)
            if isinstance(error, errors.CallerLeft):
                return
            if socket.accepted:
                await socket.close({500: INTERNAL, 503: TRY_LATER}.get(error.http_status, POLICY), error.code)
                return
            if self._refused[error.http_status].first():  # many clients show only the status
                why, status = printable(error.message), error.http_status
                log.warning("a websocket was refused: %d %s: %s (repeats are not logged)", status, error.code, why)
            await socket.deny(self.refuse(socket, error))
        finally:
            socket.left()
            socket.done()
            if not socket.accepted:
                self.leave()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task beside the requests, until the server ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """ASGI's lifespan. At the start the host begins to load; requests get 503 until it is ready. Then it drains."""
        await receive()
        if self.life is not None:
            await self.life.begin()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self.life is not None:
            await self.life.end()
        await send({"type": "lifespan.shutdown.complete"})

    def give_apart(self, most: int) -> int:
        """Reserve connections for one more listener: a quarter of those that HTTP has left of `most`."""
        given = max(1, (most - self.apart) // 4)
        self.apart += given
        return given

    def close(self) -> None:
        """Refuse POSTs from now on, and close every connection after its next answer."""
        self.closing = True
        if not self.active:
            self._all_answered.set()

    @property
    def entering(self) -> list[HttpRequest]:
        """Requests whose body is incomplete, or that are not queued yet."""
        posted = [request for request in self.requests if request.method == "POST"]
        return [request for request in posted if request.preparing or not request.received]

    def left(self, connections: int) -> None:
        """Note that a connection closed, and how many are left."""
        if self.closing and not connections:
            self.all_left.set()

    async def wait_idle(self) -> None:
        """Wait, after `close`, until every request is answered."""
        await self._all_answered.wait()

    def give_up_entering(self) -> None:
        """Answer incomplete requests with an error."""
        for request in self.entering:
            if request.task is not None:
                incomplete = Closed("the server is shutting down, and the request was not complete", retry_after=1.0)
                request.task.cancel(incomplete)


def cancelled_by(cancelled: asyncio.CancelledError) -> ReflexError:
    """The error that a request's coroutine was cancelled with; without one, its caller left."""
    why: Any = cancelled.args[0] if cancelled.args else None
    return why if isinstance(why, ReflexError) else errors.CallerLeft("the caller left")
