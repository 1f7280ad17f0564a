"""Runs the server of a model: opens the port, loads, drains on SIGTERM or SIGINT, and says how it ended."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from prometheus_client import disable_created_metrics
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from reflex_runtime.config import LLMServeConfig
from reflex_runtime.server.http import HttpProtocol
from reflex_runtime.server.openai import GONE, PART, OpenAIApp
from reflex_runtime.server.serve import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNUSABLE,
    READING_GRACE,
    listening,
    loop_factory,
    read_what_arrived,
    stop_on_signals,
    until_set,
)
from reflex_runtime.server.served_model import Open, ServedModel
from reflex_runtime.server.supervisor import Parent

log = logging.getLogger("reflex.server")

TOLD_EVERY = 5.0  # seconds between lines while the model is being loaded


class _Part:
    """A part of a body, past ASGI, which takes two coroutines and a mapping for each."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        cycle = self._cycle
        over = cycle.disconnected or cycle.response_complete or cycle.flow.write_paused
        return bool(cycle.chunked_encoding) and cycle.response_started and not over

    def write(self, data: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        self._cycle.transport.abort()


class StreamingProtocol(HttpProtocol):
    """One connection. Every request goes the way of ASGI: an answer that comes in parts needs it."""

    def _start(self) -> None:
        cycle, self._come = self._come, None
        if cycle is not None and not cycle.disconnected:
            scope: Any = cycle.scope
            scope[PART] = _Part(cycle)
            self._read_on()
            HttpToolsProtocol._start_asgi_task(self, cycle, self.app)

    def _left(self) -> None:
        cycle = self._asking
        if cycle is not None:
            scope: Any = cycle.scope
            scope[GONE] = True  # its task may not have begun
        super()._left()


def serve(
    config: LLMServeConfig,
    name: str,
    open: Open,
    sock: socket.socket,
    on_listening: Callable[[], None] | None = None,
    on_ready: Callable[[ServedModel], None] | None = None,
    parent: Parent | None = None,
) -> tuple[int, bool]:
    """Serve until a signal. Returns the exit status, and whether every thread ended.

    When one did not, it is stuck in a model: leave with `os._exit`, an interpreter that shuts down around it may crash.
    name, open: see `ServedModel`. on_listening: called on the loop once the port answers; on_ready: once the model is
    warm or has failed. parent: the supervisor, where there is one.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the page and say nothing
    gc.set_threshold(50_000, 20, 100)  # a young collection each 700 objects is pure tail

    def ready(model: ServedModel) -> None:
        if config.trace:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, model.turn)
        gc.collect()
        gc.freeze()  # what is loaded stays: the collector need not look at it again
        if on_ready is not None:
            on_ready(model)

    async def main() -> tuple[int, bool]:
        stop = asyncio.Event()
        stop_on_signals(asyncio.get_running_loop(), stop)
        if config.trace:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a trace
        return await serving(config, name, open, sock, stop, on_listening, ready, parent)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


async def serving(
    config: LLMServeConfig,
    name: str,
    open: Open,
    sock: socket.socket,
    stop: asyncio.Event,
    on_listening: Callable[[], None] | None = None,
    on_ready: Callable[[ServedModel], None] | None = None,
    parent: Parent | None = None,
) -> tuple[int, bool]:
    """Serve until `stop` is set; see `serve`."""
    lost = False

    def give_up() -> None:
        nonlocal lost
        lost = True
        log.error("the model is lost; answering what is left and leaving")
        stop.set()

    model = ServedModel(config, name, open, give_up, None if parent is None else parent.lives)
    app = OpenAIApp(model)
    server = listening(app, StreamingProtocol)
    sock.listen(server.config.backlog)  # connections wait from now on; nobody is refused
    running = asyncio.create_task(server.serve(sockets=[sock]))
    if parent is not None:
        parent.accepts()
    if on_listening is not None:
        on_listening()
    stopping = asyncio.create_task(stop.wait())
    await _started(model, stopping)
    if parent is not None and model.state == "ready":
        parent.ready()
    if on_ready is not None and model.state in ("ready", "warmup_failed"):
        on_ready(model)
    if not model.unusable:
        await stopping
    stopping.cancel()
    clean = await _drain(config, model, app, server)
    if parent is not None:
        parent.leaves()
    server.should_exit = True
    await running
    if model.unusable:
        return EXIT_UNUSABLE, clean
    return EXIT_FAILED if lost or model.error else EXIT_OK, clean


async def _started(model: ServedModel, stopping: asyncio.Task[bool]) -> None:
    """Load the model, saying now and then that it still does; given up when the server is to stop."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    starting = asyncio.create_task(model.start())
    while not (starting.done() or stopping.done()):
        await asyncio.wait({starting, stopping}, timeout=TOLD_EVERY, return_when=asyncio.FIRST_COMPLETED)
        if not (starting.done() or stopping.done()):
            log.info("%s (%.0f s)", model.state, loop.time() - began)
    if starting.done():
        starting.result()
    else:
        starting.cancel()
        await asyncio.wait({starting})  # runtime processes that were being started are ended


async def _drain(config: LLMServeConfig, model: ServedModel, app: OpenAIApp, server: uvicorn.Server) -> bool:
    """Refuse what is new, finish what was received, end the rest, and only then let connections close.

    Returns whether every thread of the model ended.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + config.drain_timeout_s
    await read_what_arrived(server, app)  # what had reached this machine when the signal came counts as received
    app.closing = True
    log.info("draining: %d requests are being answered", app.active)
    if not await until_set(app.entered, min(until, loop.time() + READING_GRACE)):
        app.give_up_entering()
        await until_set(app.entered, until)
    model.drain()
    clean = await model.stop(max(0.0, until - loop.time()))
    await until_set(app.idle, loop.time() + 1.0)  # their streams have ended: what is left is writing the answers
    await read_what_arrived(server, app)
    app.bodies.close()
    return clean
