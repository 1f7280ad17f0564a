"""An HTTP application: routes, the key, and the common state of its requests. It does not depend on a product.

A product gives a `Route` for each path, the form of its errors, and a `Host` (see `web.serve`). Each request takes the
same way: `open` when its head is there, `run` when its body is, and `Exchange.answer` or `fail` at any later time. None
of these is a coroutine, because each layer costs time on the hot path; a route that needs one calls `spawn`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final, Protocol

from reflex_runtime.core.errors import Closed
from reflex_runtime.web.bodies import Bodies
from reflex_runtime.web.connections import ConnectionSettings, Seldom, connections_of
from reflex_runtime.web.cors import Cors, answer_preflight, is_preflight
from reflex_runtime.web.errors import MethodNotAllowed, NotFound, Unauthorized, known
from reflex_runtime.web.exchange import BODIES, Exchange, Route, too_large
from reflex_runtime.web.form import ErrorForm, Headers
from reflex_runtime.web.json import printable
from reflex_runtime.web.trust import Trust, check_direct, keys_in

log = logging.getLogger("reflex.server")


SCRATCH: Final = 64 * 1024  # bytes read at once


class WebSettings(ConnectionSettings, Protocol):
    """The settings that every server needs."""

    @property
    def host(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def allow_host(self) -> tuple[str, ...]: ...
    @property
    def max_bodies_mb(self) -> float: ...


class LinedUp(Protocol):
    """A connection on which something has come."""

    def parse(self) -> bool:
        """Parse what has come. Returns whether `go_on` is to follow."""

    def go_on(self) -> None:
        """Hand over the requests that were parsed."""

    def abort(self) -> None:
        """Close it."""


class Listener(Protocol):
    """A listener for another protocol than HTTP."""

    async def close(self) -> None:
        """Close, after giving callers a moment to read their answers."""


class App:
    """The application of one server.

    routes: by path; `find` returns the route of any other path. form: of errors. on_answer: called with each
    exchange and its status. missing: what to say of a path that has no route. cors: sites
    whose pages may read answers. elsewhere: set it to find the route of
    requests that another process answers; it comes first.

    asked: requests so far. active: those not answered yet. entering: those whose body is still arriving, or that are
    not queued yet. closing: refuse POSTs, and close connections after their next answer. listeners: other than that of
    HTTP; they are closed last. scratch: what websockets are read into; it is used up before the next
    is read. marks: headers of every answer.
    """

    def __init__(
        self,
        settings: WebSettings,
        routes: Mapping[str, Route],
        form: ErrorForm,
        find: Callable[[str], Route | None] = lambda path: None,
        on_answer: Callable[[Exchange, int], None] | None = None,
        missing: Callable[[str], str] = lambda path: f"no such path: {path[:200]}",
        cors: Collection[str] = (),
    ) -> None:
        self.routes, self.form, self._find, self._on_answer = dict(routes), form, find, on_answer
        self._missing = missing
        self.elsewhere: Callable[[Exchange], Route | None] | None = None
        self.connections = connections_of(settings, self.read)
        self.bodies = Bodies(int(settings.max_bodies_mb * 1e6), self.connections)
        self.scratch = memoryview(bytearray(SCRATCH))
        self.asked = self.active = 0
        self.entering: set[Exchange] = set()
        self.closing = False
        self.listeners: list[Listener] = []
        self.marks: Headers = []
        self._lined: list[LinedUp] = []
        self._key = settings.api_key.encode()
        self._cors = Cors(cors)
        self._trust = Trust(settings.host, settings.allow_host)
        self._prefix = secrets.token_hex(6)
        self._refused: defaultdict[int, Seldom] = defaultdict(Seldom)  # websockets, by status
        self._all_entered, self._all_answered = asyncio.Event(), asyncio.Event()  # called once it is closing

    @property
    def has_key(self) -> bool:
        """Whether callers need a key."""
        return bool(self._key)

    # -- reading -------------------------------------------------------------------------------------------------------

    def line_up(self, connection: LinedUp, loop: asyncio.AbstractEventLoop) -> None:
        """Something has come on a connection: `read` it at the end of this turn of the loop."""
        if not self._lined:
            loop.call_soon(self.read)
        self._lined.append(connection)

    def read(self) -> None:
        """Read what has come: parse all of it, then hand over the requests. Each step's code stays in the caches."""
        lined, self._lined = self._lined, []
        for connection in [one for one in lined if _read(one, one.parse)]:
            _read(connection, connection.go_on)

    # -- a request -----------------------------------------------------------------------------------------------------

    def open(self, exchange: Exchange) -> bool:
        """The head of a request has arrived. Returns whether to read its body; if not, it is answered or will be."""
        exchange.number = exchange.request_id = self.asks()
        self.entering.add(exchange)
        if self.form.keeps_id:
            exchange.request_id = self.form.own_id(exchange.headers.get(b"x-request-id", b"")) or exchange.number
        try:
            elsewhere = None if self.elsewhere is None else self.elsewhere(exchange)
            found = elsewhere or self.routes.get(exchange.path) or self._find(exchange.path)
            route = exchange.route = found.of(exchange.method) if found is not None and found.others else found
            crosses = self._cors.admits(exchange, route)
            if crosses and route is not None and is_preflight(exchange):
                if not self._key:
                    self._trust.check("GET", exchange.headers)
                answer_preflight(exchange, route)
                return False
            if route is None or route.checked:
                self._check_caller(exchange, route, crosses)
            if exchange.upgrades and route is not None and route.socket is not None:
                if self.closing:
                    raise Closed("the server is shutting down", retry_after=1.0)
                return True
            if route is None:
                raise NotFound(printable(self._missing(exchange.path)))
            if exchange.method != route.method and (exchange.method, route.method) != ("HEAD", "GET"):
                methods = route.methods
                raise MethodNotAllowed(printable(f"{exchange.path[:200]} takes {methods}"), allow=methods)
            if route.method != "GET" and self.closing:
                raise Closed("the server is shutting down", retry_after=1.0)
            if route.method in BODIES:
                if route.enter is not None:
                    route.enter(exchange)
                too_large(exchange.headers, route.most)
                return not exchange.done
            route.run(exchange, b"")
        except Exception as error:
            self.fail(exchange, error)
        return False

    def asks(self) -> str:
        """Count a new request. Returns its id."""
        self.asked += 1
        self.active += 1
        return f"{self._prefix}-{self.asked:x}"

    def answered(self) -> None:
        """A request has its whole answer."""
        self.active -= 1
        if self.closing:
            self._tell()

    def run(self, exchange: Exchange, body: bytes) -> None:
        exchange.received = time.monotonic()
        assert exchange.route is not None
        try:
            exchange.route.run(exchange, body)
        except Exception as error:
            self.fail(exchange, error)
        if exchange.task is None:
            self.entered(exchange)

    def spawn(self, exchange: Exchange, answering: Coroutine[Any, Any, None]) -> None:
        """Answer the request by a coroutine. Until that calls `entered`, a shutdown gives the request up early."""
        exchange.task = asyncio.get_running_loop().create_task(self._answering(exchange, answering))

    async def _answering(self, exchange: Exchange, answering: Coroutine[Any, Any, None]) -> None:
        try:
            await answering
        except asyncio.CancelledError:
            if exchange in self.entering:
                self.fail(exchange, _incomplete())
                return
            log.warning("request %s: its client does not read, and the time to shut down is over", exchange.request_id)
            exchange.carrier.abort()
            self.leave(exchange)
        except Exception as error:
            self.fail(exchange, error)

    def fail(self, exchange: Exchange, error: Exception) -> None:
        """Answer with an error. Unexpected exceptions are logged and answered as a 500 without their text."""
        if exchange.done:
            return
        told = known(error, exchange.request_id)
        if exchange.upgrades and self._refused[told.http_status].first():  # its client may show the status only
            why = printable(told.message)
            log.warning("a websocket was refused: %d %s: %s (repeats are not logged)", told.http_status, told.code, why)
        if exchange.route is not None and exchange.route.fail is not None:
            exchange.route.fail(exchange, told)
        else:
            exchange.fail(told)

    def entered(self, exchange: Exchange) -> None:
        """The request is queued or answered."""
        self.entering.discard(exchange)
        if self.closing:
            self._tell()

    def answers(self, exchange: Exchange, status: int) -> None:
        """The head of the answer is being sent."""
        if self._on_answer is not None:
            self._on_answer(exchange, status)

    def leave(self, exchange: Exchange) -> None:
        """The request has its whole answer."""
        if not exchange.done:
            exchange.done, exchange.on_left = True, None
            self.bodies.release(exchange)
            self.entering.discard(exchange)
            self.answered()

    def _check_caller(self, exchange: Exchange, route: Route | None, crosses: bool) -> None:
        """crosses: it is from a page of another site that may ask this."""
        if not self._key:
            guarded = exchange.upgrades or (route is not None and route.own_pages)
            self._trust.check("POST" if guarded else "GET" if crosses else exchange.method, exchange.headers)
            if route is not None and route.changes and exchange.method == route.method:
                check_direct(exchange.client, exchange.headers)
        elif (route is None or not route.open) and not self.knows(exchange):
            raise Unauthorized("send the key as Authorization: Bearer KEY, X-Reflex-Key or x-api-key")

    def knows(self, exchange: Exchange) -> bool:
        """Whether this caller sent the key, or none is needed; for paths that tell more to those who have it."""
        plain, borne = keys_in(exchange.headers)
        return not self._key or hmac.compare_digest(plain, self._key) | hmac.compare_digest(borne, self._key)

    def may_change(self, exchange: Exchange) -> bool:
        """Whether this caller may change state; for paths that do not always change it."""
        if not self._key:
            try:
                check_direct(exchange.client, exchange.headers)
            except Unauthorized:
                return False
        return True

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """From now on refuse POSTs, and close every connection after its next answer."""
        self.read()  # what came before is not refused
        self.closing = True
        self._tell()

    async def wait_entered(self) -> None:
        """Wait, after `close`, until every request is queued or answered."""
        await self._all_entered.wait()

    async def wait_idle(self) -> None:
        """Wait, after `close`, until every request is answered."""
        await self._all_answered.wait()

    def give_up_entering(self) -> None:
        """Answer the requests that are still arriving, or that are not queued yet."""
        for exchange in list(self.entering):
            if exchange.task is not None:
                exchange.task.cancel()
            else:
                self.fail(exchange, _incomplete())

    def _tell(self) -> None:
        if not self.entering:
            self._all_entered.set()
        if not self.active:
            self._all_answered.set()


def _read(connection: LinedUp, step: Callable[[], bool | None]) -> bool | None:
    """A step of reading a connection; one that fails ends the connection, and no other."""
    try:
        return step()
    except Exception:
        log.exception("a connection could not be read, and is closed")
        connection.abort()
        return False


def _incomplete() -> Closed:
    return Closed("the server is shutting down, and the request was not complete", retry_after=1.0)
