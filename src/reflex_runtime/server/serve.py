"""Runs the server: binds the port, starts the runtime, drains on SIGTERM or SIGINT, and says how it ended.

uvicorn speaks HTTP; signals are ours, because a drain has to finish what was received before a connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from reflex_runtime.config import ServeConfig
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.policies import Export
from reflex_runtime.server.app import App
from reflex_runtime.server.runtime import Runtime

log = logging.getLogger("reflex.server")

EXIT_OK, EXIT_FAILED = 0, 1


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; ConfigError when the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        raise ConfigError(f"--host={host} --port={port}: cannot be bound: {error.strerror or error}") from error
    sock.set_inheritable(True)
    return sock


def loop_factory() -> asyncio.AbstractEventLoop:
    """uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def serve(
    config: ServeConfig, export: Export, sock: socket.socket, on_ready: Callable[[Runtime], None] | None = None
) -> int:
    """Serve until a signal; returns the exit status. on_ready: called on the loop once the policy is warm or failed."""
    gc.set_threshold(50_000, 20, 100)  # requests make few cycles; a young collection each 700 objects is pure tail
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_serve(config, export, sock, on_ready))


async def _serve(
    config: ServeConfig, export: Export, sock: socket.socket, on_ready: Callable[[Runtime], None] | None
) -> int:
    stop = asyncio.Event()
    fatal = False

    def give_up() -> None:
        nonlocal fatal
        fatal = True
        log.error("the device was lost twice; answering what is left and leaving")
        stop.set()

    runtime = Runtime(config, export, give_up)
    app = App(runtime)
    server = _Uvicorn(
        uvicorn.Config(
            app,
            http="httptools",
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,
            backlog=4096,
        )
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    await runtime.start()
    if on_ready is not None:
        on_ready(runtime)
    await stop.wait()
    await _drain(config, runtime, app)
    server.should_exit = True
    await serving
    return EXIT_FAILED if fatal or runtime.state == "warmup_failed" else EXIT_OK


async def _drain(config: ServeConfig, runtime: Runtime, app: App) -> None:
    """Refuse what is new, finish what was received, answer the rest, and only then let connections close."""
    loop = asyncio.get_running_loop()
    until = loop.time() + config.drain_timeout_s
    if runtime.state != "warmup_failed":
        runtime.state = "draining"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            await app.idle.wait()
    await runtime.stop(max(0.0, until - loop.time()))
    with contextlib.suppress(TimeoutError):  # their futures are settled: what is left is writing the answers
        async with asyncio.timeout(1.0):
            await app.idle.wait()
