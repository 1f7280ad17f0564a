"""Start and end of a server on uvicorn: accept, load, serve until a signal, drain. A drain refuses new requests,
finishes those received, and only then closes connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from email.utils import formatdate
from functools import partial
from typing import Any, ClassVar, Final

import uvicorn
from prometheus_client import disable_created_metrics

from reflex_runtime.core.errors import Closed, ConfigError, ReflexError
from reflex_runtime.observe.logs import leave
from reflex_runtime.run.process import freed_memory, freeze_loaded, give_back_when_idle
from reflex_runtime.settings import FunctionsConfig, LLMServeConfig, ServeConfig, ServerConfig
from reflex_runtime.web.app import App, ConnectionLimits
from reflex_runtime.web.connections import HEAD_S, HttpConnection, SocketConnection, most_connections
from reflex_runtime.web.errors import NotReady
from reflex_runtime.web.supervisor import BACKLOG, ENDS, TURNS, Parent

log = logging.getLogger("reflex.server")

DRAINING: Final = "draining"
EXIT_OK, EXIT_FAILED, EXIT_UNUSABLE = 0, 1, 2
READING_GRACE: Final = 1.0  # seconds after the signal for callers to send the rest of their requests
ARRIVED: Final = 0.5  # seconds of this thread, at most, to accept and read what has reached this machine
UNREAD: Final = 2.0  # seconds at the end for callers to read their last answers
LOG_EVERY: Final = 5.0  # seconds between two log lines while it starts
_TURNS: Final = 8  # turns of the loop with nothing new: accept, read, start the task, and some to spare


class Host:
    """The product of a server (policies, a model, functions), from loading to the drain. ASGI's lifespan calls `begin`
    and `end`.

    what: its name in messages. state: as in /health: initializing → loading (→ warming) → ready; `warmup_failed`;
    `draining`. error: why it could not be started. unusable: its directory or a setting is wrong: a restart does not
    help. on_drain: called when a drain begins. writes_files: whether SIGHUP and SIGUSR1 call `turn_files`. app,
    drain_s: the application and the seconds for a drain, see `attach`. stopping: set to end the server. on_lost: ends
    an ASGI server other than `ReflexServer`. lost: the device is lost. clean: no thread is left that loads or runs.
    """

    what: ClassVar[str] = "the model"
    app: App
    drain_s: float

    def __init__(self, state: str = "initializing") -> None:
        self._state, self.error, self.unusable = state, "", False
        self.on_drain: list[Callable[[], None]] = []
        self.stopping = asyncio.Event()
        self.on_lost: Callable[[], object] | None = None
        self.lost, self.clean = False, True
        self._started = asyncio.Event()  # `start` has returned
        self._starting: asyncio.Future[None] | None = None
        self._drained = False

    @property
    def state(self) -> str:
        return self._state

    @property
    def writes_files(self) -> bool:
        return False

    def attach(self, app: App, drain_s: float) -> None:
        """Set the application, whose lifespan calls `begin` and `end`. drain_s: seconds for a drain."""
        self.app, self.drain_s = app, drain_s
        app.life = self

    # -- the product ---------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Load and warm up. ConfigError names a wrong directory or setting."""

    async def not_loaded(self) -> None:
        """Release what a failed `load` began."""

    async def start(self) -> None:
        """Load, and set the state: `ready`, or `warmup_failed` and `error`. Cancelling does not end the thread that
        loads: the reading of a model file cannot be interrupted."""
        self._state, self.clean = "loading", False
        try:
            await self.load()
        except Exception as error:
            self._state = "warmup_failed"
            self.unusable = isinstance(error, ConfigError)  # the message is enough: no stack is logged
            self.error = str(error) if self.unusable else f"{type(error).__name__}: {error}"
            if not self.unusable:
                log.exception("%s could not be started", self.what)
            await self.not_loaded()
        else:
            self._state = "ready"
        self.clean = True
        self._started.set()

    async def wait_started(self) -> bool:
        """Wait until `start` has returned. Returns whether it is ready."""
        await self._started.wait()
        return self._state == "ready"

    def unready(self) -> ReflexError:
        """The error of requests in this state."""
        if self._state == DRAINING:
            return Closed("the server is shutting down", retry_after=1.0)
        if self._state == "warmup_failed":  # waiting does not help
            return NotReady(f"{self.what} could not be started: {self.error}", state=self._state)
        return NotReady(f"the server is {self._state}", retry_after=1.0, state=self._state)

    def give_up(self) -> None:
        """The device is lost for good: end the server."""
        self.lost = True
        log.error("the device is lost; answering what is left and leaving")
        (self.on_lost or self.stopping.set)()

    def drain(self) -> None:
        """Begin the end of the server: no new requests come."""
        if self._state != "warmup_failed":
            self._state = DRAINING
        for begins in self.on_drain:
            begins()

    async def stop(self, until: float, answered: Callable[[], Awaitable[None]]) -> bool:
        """Finish requests until `until`, by the loop's clock, and end the rest. Returns whether no thread is left.
        answered: to be awaited: returns when every request has its answer."""
        return self.clean

    def turn_files(self) -> None:
        """Continue recordings in new files. The old ones stay."""

    # -- its life ------------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Begin to load; requests are answered `not_ready` until it has."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the page
        self._starting = asyncio.ensure_future(self.start())

    async def begun(self) -> bool:
        """Wait until it is ready or has failed, with log lines meanwhile. False if the server must stop earlier."""
        assert self._starting is not None
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        stopping = asyncio.ensure_future(self.stopping.wait())
        waits: set[asyncio.Future[Any]] = {self._starting, stopping}
        while not (self._starting.done() or stopping.done()):
            await asyncio.wait(waits, timeout=LOG_EVERY, return_when=asyncio.FIRST_COMPLETED)
            if not (self._starting.done() or stopping.done()):
                log.info("%s (%.0f s)", self.state, loop.time() - began)
        stopping.cancel()
        if self._starting.done():
            self._starting.result()
        return self._starting.done()

    async def finish(self) -> None:
        """Refuse new requests, finish those received, answer the rest."""
        if self._drained:
            return
        self._drained = True
        loop, app = asyncio.get_running_loop(), self.app
        until = loop.time() + self.drain_s
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait({self._starting})  # it ends the processes that it was starting
        await _read_what_arrived(app)  # requests that had reached this machine at the signal count as received
        app.close()
        self.drain()
        if app.active:
            log.info("draining: %d requests are being answered", app.active)
        if entering := [request.task for request in app.entering if request.task is not None]:
            await asyncio.wait(entering, timeout=min(self.drain_s, READING_GRACE))
        app.give_up_entering()
        self.clean = await self.stop(until, app.wait_idle)
        await _within(app.wait_idle, loop.time() + 1.0)  # all have ended, and their answers are written
        await _read_what_arrived(app)
        app.bodies.close()

    async def end(self) -> None:
        await self.finish()
        for listener in self.app.listeners:
            await listener.close()


async def _read_what_arrived(app: App) -> None:
    """Let the loop accept and read, one connection a turn, until it finds nothing new."""
    until, seen, quiet = time.thread_time() + ARRIVED, (-1, -1), 0  # a pause of the process takes no time of it
    while quiet < _TURNS and time.thread_time() < until:
        found = (app.asked, app.active)
        quiet = quiet + 1 if found == seen else 0
        seen = found
        await asyncio.sleep(0)


class ReflexServer(uvicorn.Server):
    """uvicorn without polling: an event ends it, and a drain comes before connections close."""

    def __init__(self, config: uvicorn.Config, host: Host, parent: Parent | None = None) -> None:
        super().__init__(config)
        self.host, self._parent = host, parent
        self.on_listening: Callable[[], None] | None = None
        self.on_ready: Callable[[Any], None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """`handle_signals` handles them on the loop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to load, and accept from these sockets. A handshake of TLS has the time of a head, not a minute."""
        await self.lifespan.startup()
        tls, limits, loop = self.config.ssl, self.host.app.limits, asyncio.get_running_loop()
        make = partial(
            HttpConnection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        time = limits.head if tls else None
        self.servers = [
            await loop.create_server(make, sock=sock, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=time)
            for sock in sockets or ()
        ]
        self.started = True

    async def main_loop(self) -> None:
        host, parent = self.host, self._parent
        self._date(asyncio.get_running_loop())
        if parent is not None:
            parent.beat(asyncio.get_running_loop())
        if self.on_listening is not None:
            self.on_listening()
        if await host.begun():
            freeze_loaded()
            if parent is not None and host.state == "ready":
                parent.ready()
            if self.on_ready is not None:
                self.on_ready(host)
            if not host.unusable:
                freed = freed_memory()
                idle = freed and asyncio.create_task(give_back_when_idle(lambda: host.app.asked, freed))
                await host.stopping.wait()
                if idle:
                    idle.cancel()

    def _date(self, loop: asyncio.AbstractEventLoop) -> None:
        """Renew the header Date of all answers once a second."""
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        loop.call_later(1.0, self._date, loop)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.host.finish()
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.connections:
            await _within(self.host.app.all_left.wait, asyncio.get_running_loop().time() + UNREAD)
        for connection in list(self.server_state.connections):
            log.warning("a client does not read its answer, and the time to shut down is over")
            connection.transport.abort()
        await self.lifespan.shutdown()


Make = Callable[[Parent | None], tuple[App, Host]]  # the argument is the link to the supervisor, if there is one


async def serve(
    make: Make,
    sockets: Sequence[socket.socket],
    settings: ServeConfig | LLMServeConfig | FunctionsConfig,
    on_listening: Callable[[], None] | None = None,
    on_ready: Callable[[Any], None] | None = None,
    parent: Parent | None = None,
    stop: asyncio.Event | None = None,
) -> tuple[int, bool]:
    """Serve until a signal, or until `stop` is set. Returns the exit status, and whether every thread ended. One that
    did not hangs in a model: leave with `os._exit`, because an interpreter that shuts down around it may crash.

    sockets: bound. on_listening: called once the port answers; on_ready: with the host, once it is ready or has failed.
    """
    app, host = make(parent)
    host.attach(app, settings.drain_timeout_s)
    if stop is None:
        handle_signals(asyncio.get_running_loop(), host.stopping, host.turn_files if host.writes_files else None)
    else:
        host.stopping = stop
    server = ReflexServer(uvicorn_config(app, settings), host, parent)
    server.on_listening, server.on_ready = on_listening, on_ready
    await server.serve(list(sockets))
    if host.unusable:
        return EXIT_UNUSABLE, host.clean
    return EXIT_FAILED if host.lost or host.error else EXIT_OK, host.clean


def uvicorn_config(app: App, settings: ServerConfig) -> uvicorn.Config:
    """The settings in uvicorn's form. Sets the limits of the application too."""
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # it logs every websocket and bad request
    app.limits = ConnectionLimits(
        max(1, most_connections(settings.max_connections) - app.apart),
        settings.idle_timeout_s,
        min(HEAD_S, settings.body_timeout_s),
        settings.body_timeout_s,
    )
    return uvicorn.Config(
        app, http=HttpConnection, ws=SocketConnection, lifespan="on", interface="asgi3",
        log_config=None, access_log=False, proxy_headers=False, server_header=False, date_header=False,
        ws_max_size=settings.max_body_bytes, ws_ping_timeout=None, ws_per_message_deflate=False,
        ssl_certfile=settings.ssl_certfile or None,
        ssl_keyfile=(settings.ssl_certfile and settings.ssl_keyfile) or None,
    )  # fmt: skip


def handle_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, turn: Callable[[], None] | None) -> None:
    """SIGTERM, SIGINT and SIGQUIT set `stop`; a SIGINT after that ends the process at once.

    SIGHUP and SIGUSR1 call `turn`. Without it they are ignored, but a SIGHUP ends a server in a terminal, which was
    closed. SIGUSR2 is ignored.
    """

    def signalled(number: int) -> None:
        if stop.is_set() and number == signal.SIGINT:
            log.warning("interrupted again: leaving at once")
            leave(128 + number)
        stop.set()

    for number in ENDS:
        loop.add_signal_handler(number, signalled, number)
    for number in TURNS:
        if turn is not None:
            loop.add_signal_handler(number, turn)
        elif number == signal.SIGHUP and os.isatty(0):  # nohup gives it another standard input
            loop.add_signal_handler(number, signalled, number)
        else:
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


async def _within(wait: Callable[[], Awaitable[object]], until: float) -> None:
    """Wait, at most until this time of the loop's clock."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            await wait()
