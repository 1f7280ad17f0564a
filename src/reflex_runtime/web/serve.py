"""The life of every server: accept, start, serve until a signal, drain, end.

A drain refuses new requests, finishes those received, and only then closes connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final, Protocol

from prometheus_client import disable_created_metrics

from reflex_runtime.drivers.loop import loop_factory
from reflex_runtime.drivers.process_memory import freed_memory, freeze_loaded, give_back_when_idle, prepare_memory
from reflex_runtime.web.app import App
from reflex_runtime.web.connection import HttpConnection
from reflex_runtime.web.listen import BACKLOG
from reflex_runtime.web.supervisor import Lives, Parent

log = logging.getLogger("reflex.server")

EXIT_OK, EXIT_FAILED, EXIT_UNUSABLE = 0, 1, 2
READING_GRACE: Final = 1.0  # seconds that a caller has after the signal to send the rest of its request
ARRIVED: Final = 0.5  # seconds at most to accept and read what has reached this machine
UNREAD: Final = 2.0  # seconds that callers have at the end to take their answers
TOLD_EVERY: Final = 5.0  # seconds between lines in the log while it starts
_TURNS: Final = 8  # of the loop in which nothing new was seen: accept, read, start the task, and some to spare


class Door(Protocol):
    """Where connections come from."""

    async def open(self, app: App) -> None:
        """From now on connections come."""

    def close(self) -> None:
        """No more of them."""


class ListeningPort:
    """The `Door` of a listening socket. kind: makes what takes each connection, of an application."""

    def __init__(self, sock: socket.socket, kind: Callable[[App], asyncio.BaseProtocol] = HttpConnection) -> None:
        self._sock, self._kind = sock, kind
        self._server: asyncio.Server | None = None

    async def open(self, app: App) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(partial(self._kind, app), sock=self._sock, backlog=BACKLOG)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class Host(Protocol):
    """The product of a server, policies or a model: start, drain, stop.

    state: the word in /health. error: why it could not be started. unusable: its directory or a setting is wrong, so
    that a restart cannot help. writes_files: whether SIGHUP calls `turn_files`.
    """

    @property
    def state(self) -> str: ...
    @property
    def error(self) -> str: ...
    @property
    def unusable(self) -> bool: ...
    @property
    def writes_files(self) -> bool: ...

    async def start(self) -> None:
        """Load and warm up. Returns when it is ready or has failed; cancelled when the server is to end."""

    def drain(self) -> None:
        """The server ends: no new requests will come."""

    async def stop(self, until: float, answered: Callable[[], Awaitable[None]]) -> bool:
        """Finish what was asked until `until`, by the loop's clock, and end the rest. Returns whether no thread is left
        running. answered: returns when every request has its answer."""

    def turn_files(self) -> None:
        """Continue its recordings in new files; the old ones are kept."""


Made = tuple[App, Host]
Make = Callable[[Callable[[], None], Lives | None], Made]


def serve(
    make: Make,
    door: socket.socket | Door,
    drain_s: float,
    on_listening: Callable[[], None] | None = None,
    on_ready: Callable[[Any], None] | None = None,
    parent: Parent | None = None,
) -> tuple[int, bool]:
    """Serve until a signal. Returns the exit status, and whether every thread ended.

    A thread that did not end hangs in a model: leave with `os._exit`, because an interpreter that shuts down around it
    may crash. make: called on the loop, makes the application and its host. Its first argument is a function to call
    when the device is lost for good; its second is the supervisor's state, if there is one.
    door: a listening socket, or another way in. drain_s: seconds that the end may take. on_listening: called on the
    loop once the port answers; on_ready: called with the host once it is ready or has failed. parent: the supervisor,
    if there is one.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the page and say nothing
    prepare_memory()

    def made(on_lost: Callable[[], None], lives: Lives | None) -> Made:
        app, host = make(on_lost, lives)
        if host.writes_files:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, host.turn_files)
        return app, host

    def ready(host: Any) -> None:
        freeze_loaded()
        if on_ready is not None:
            on_ready(host)

    async def main() -> tuple[int, bool]:
        stop = asyncio.Event()
        stop_on_signals(asyncio.get_running_loop(), stop)
        return await serving(made, door, drain_s, stop, on_listening, ready, parent)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


async def serving(
    make: Make,
    door: socket.socket | Door,
    drain_s: float,
    stop: asyncio.Event,
    on_listening: Callable[[], None] | None = None,
    on_ready: Callable[[Any], None] | None = None,
    parent: Parent | None = None,
) -> tuple[int, bool]:
    """Serve until `stop` is set; see `serve`."""
    loop = asyncio.get_running_loop()
    lost = False

    def give_up() -> None:
        nonlocal lost
        lost = True
        log.error("the device is lost; answering what is left and leaving")
        stop.set()

    app, host = make(give_up, None if parent is None else parent.lives)
    door = ListeningPort(door) if isinstance(door, socket.socket) else door
    await door.open(app)
    if parent is not None:
        parent.accepts()
    if on_listening is not None:
        on_listening()
    stopping = asyncio.create_task(stop.wait())
    if await _started(host, stopping):
        if parent is not None and host.state == "ready":
            parent.ready()
        if on_ready is not None:
            on_ready(host)
        if not host.unusable:
            with _giving_back(app):
                await stopping
    stopping.cancel()
    clean = await drain(app, host, loop.time() + drain_s)
    if parent is not None:
        parent.leaves()
    door.close()
    await close_connections(app)
    for listener in app.listeners:
        await listener.close()
    if host.unusable:
        return EXIT_UNUSABLE, clean
    return EXIT_FAILED if lost or host.error else EXIT_OK, clean


@contextlib.contextmanager
def _giving_back(app: App) -> Iterator[None]:
    """Freed memory goes back while nobody asks."""
    freed = freed_memory()
    if freed is None:
        yield
        return
    task = asyncio.create_task(give_back_when_idle(lambda: app.asked, freed))
    try:
        yield
    finally:
        task.cancel()


async def _started(host: Host, stopping: asyncio.Task[Any]) -> bool:
    """Start the host, with a log line now and then. False if the server must stop before it has started."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    starting = asyncio.create_task(host.start())
    while not (starting.done() or stopping.done()):
        await asyncio.wait({starting, stopping}, timeout=TOLD_EVERY, return_when=asyncio.FIRST_COMPLETED)
        if not (starting.done() or stopping.done()):
            log.info("%s (%.0f s)", host.state, loop.time() - began)
    if starting.done():
        starting.result()
        return True
    starting.cancel()
    await asyncio.wait({starting})  # processes that were being started are ended
    return False


async def drain(app: App, host: Host, until: float) -> bool:
    """Refuse new requests, finish those received, answer the rest. Returns whether every thread ended."""
    loop = asyncio.get_running_loop()
    await _read_what_arrived(app)  # what had reached this machine when the signal came counts as received
    app.close()
    host.drain()
    log.info("draining: %d requests are being answered", app.active)
    if not await _within(app.wait_entered, min(until, loop.time() + READING_GRACE)):
        app.give_up_entering()
        await _within(app.wait_entered, until)
    clean = await host.stop(until, app.wait_idle)
    await _within(app.wait_idle, loop.time() + 1.0)  # all have ended: what is left is writing the answers
    await _read_what_arrived(app)
    app.bodies.close()
    return clean


async def close_connections(app: App) -> None:
    """Close every connection once its answer was read, and after a while the others too."""
    for connection in app.connections.all():
        connection.shutdown()
    if not await _within(app.connections.wait_empty, asyncio.get_running_loop().time() + UNREAD):
        given_up = [connection.give_up() for connection in app.connections.all()]
        running = [task for task in given_up if task is not None]
        if running:
            await asyncio.wait(running)


def stop_on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """SIGTERM or SIGINT sets `stop`. A SIGINT after that ends the process at once."""

    def signalled(number: int) -> None:
        if stop.is_set() and number == signal.SIGINT:
            log.warning("interrupted again: leaving without waiting for what is left")
            logging.shutdown()
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)


async def _read_what_arrived(app: App) -> None:
    """Let the loop accept and read until it finds nothing new; it takes one connection a turn."""
    loop = asyncio.get_running_loop()
    until = loop.time() + ARRIVED
    seen, quiet = (-1, -1, -1), 0
    while quiet < _TURNS and loop.time() < until:
        found = (len(app.connections), app.asked, app.active)
        quiet = quiet + 1 if found == seen else 0
        seen = found
        await asyncio.sleep(0)


async def _within(wait: Callable[[], Awaitable[None]], until: float) -> bool:
    """Wait; False when it takes longer than until then."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            await wait()
            return True
    return False
