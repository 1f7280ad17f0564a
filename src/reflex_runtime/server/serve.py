"""Runs the server: opens the port, starts the runtime, drains on SIGTERM or SIGINT, and says how it ended.

uvicorn speaks HTTP; signals are ours, because a drain has to finish what was received before a connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import uvicorn
from prometheus_client import disable_created_metrics

from reflex_runtime.config import ServeConfig
from reflex_runtime.policies import Export
from reflex_runtime.server.app import App
from reflex_runtime.server.http import HttpProtocol
from reflex_runtime.server.listen import BACKLOG
from reflex_runtime.server.runtime import PolicyRuntime
from reflex_runtime.server.supervisor import Parent
from reflex_runtime.telemetry.lines import turn_all

log = logging.getLogger("reflex.server")

EXIT_OK, EXIT_FAILED, EXIT_UNUSABLE = 0, 1, 2
READING_GRACE = 1.0  # seconds that a caller has after the signal to send the rest of its request
ARRIVED = 0.5  # seconds at most to accept and read what has reached this machine
_TURNS = 8  # of the loop in which nothing new was seen: accept, read, start the task, and some to spare


class Door(Protocol):
    """What counts the requests of an application."""

    @property
    def asked(self) -> int: ...
    @property
    def active(self) -> int: ...


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listening(app: Any, protocol: type[asyncio.Protocol]) -> uvicorn.Server:
    """uvicorn for an application of ours. protocol: what speaks HTTP on a connection."""
    return _Uvicorn(
        uvicorn.Config(
            app,
            http=protocol,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,  # for connections that do not read their answer
            backlog=BACKLOG,
        )
    )


def loop_factory() -> asyncio.AbstractEventLoop:
    """uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def serve(
    config: ServeConfig,
    exports: Mapping[str, Export],
    sock: socket.socket,
    on_listening: Callable[[], None] | None = None,
    on_ready: Callable[[PolicyRuntime], None] | None = None,
    parent: Parent | None = None,
) -> tuple[int, bool]:
    """Serve until a signal. Returns the exit status, and whether every thread ended.

    When one did not, it is stuck in a model: leave with `os._exit`, an interpreter that shuts down around it may crash.
    exports: by slot, see `PolicyRuntime`. on_listening: called on the loop once the port answers; on_ready: once the
    policies are warm or have failed. parent: the supervisor, where there is one.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the page and say nothing
    gc.set_threshold(50_000, 20, 100)  # requests make few cycles; a young collection each 700 objects is pure tail
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_serve(config, exports, sock, on_listening, on_ready, parent))


async def _serve(
    config: ServeConfig,
    exports: Mapping[str, Export],
    sock: socket.socket,
    on_listening: Callable[[], None] | None,
    on_ready: Callable[[PolicyRuntime], None] | None,
    parent: Parent | None,
) -> tuple[int, bool]:
    stop = asyncio.Event()
    fatal = False

    def give_up() -> None:
        nonlocal fatal
        fatal = True
        log.error("the device was lost twice; answering what is left and leaving")
        stop.set()

    runtime = PolicyRuntime(config, exports, give_up)
    runtime.lives = None if parent is None else parent.lives
    app = App(runtime)
    server = listening(app, HttpProtocol)
    loop = asyncio.get_running_loop()
    stop_on_signals(loop, stop)
    if config.trace or config.record:
        loop.add_signal_handler(signal.SIGHUP, turn_all)
    sock.listen(server.config.backlog)  # connections wait from now on; nobody is refused
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    if parent is not None:
        parent.accepts()
    if on_listening is not None:
        on_listening()
    starting = asyncio.create_task(runtime.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
        if parent is not None and runtime.state == "ready":
            parent.ready()
        if on_ready is not None:
            on_ready(runtime)
        if runtime.unusable:
            stop.set()
    else:
        starting.cancel()
    await stopping
    clean = await _drain(config, runtime, app, server)
    if parent is not None:
        parent.leaves()
    server.should_exit = True
    await serving
    if runtime.unusable:
        return EXIT_UNUSABLE, clean
    return EXIT_FAILED if fatal or runtime.state == "warmup_failed" else EXIT_OK, clean


async def _drain(config: ServeConfig, runtime: PolicyRuntime, app: App, server: uvicorn.Server) -> bool:
    """Refuse what is new, finish what was received, answer the rest, and only then let connections close.

    Returns whether every thread of the runtime ended.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + config.drain_timeout_s
    await read_what_arrived(server, app.door)  # what had reached this machine when the signal came counts as received
    app.close()
    runtime.drain()
    log.info("draining: %d requests are being answered", app.door.active)
    if not await until_set(app.door.idle, min(until, loop.time() + READING_GRACE)):
        app.give_up_reading()
        await until_set(app.door.idle, until)
    clean = await runtime.stop(max(0.0, until - loop.time()))
    await until_set(app.door.idle, loop.time() + 1.0)  # their futures are settled: what is left is writing the answers
    await read_what_arrived(server, app.door)
    app.door.bodies.close()
    return clean


def stop_on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """SIGTERM or SIGINT sets `stop`. A SIGINT after that ends the process at once: its user has no more patience."""

    def signalled(number: int) -> None:
        if stop.is_set() and number == signal.SIGINT:
            log.warning("interrupted again: leaving without waiting for what is left")
            logging.shutdown()
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)


async def read_what_arrived(server: uvicorn.Server, door: Door) -> None:
    """Let the loop accept and read until it finds nothing new; it takes one connection a turn."""
    loop = asyncio.get_running_loop()
    until = loop.time() + ARRIVED
    seen, quiet = (-1, -1, -1), 0
    while quiet < _TURNS and loop.time() < until:
        found = (len(server.server_state.connections), door.asked, door.active)
        quiet = quiet + 1 if found == seen else 0
        seen = found
        await asyncio.sleep(0)


async def until_set(event: asyncio.Event, until: float) -> bool:
    """Wait until it is set; False when that took too long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            await event.wait()
    return event.is_set()
