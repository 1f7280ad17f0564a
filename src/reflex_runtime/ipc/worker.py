"""The runtime process: it has a model, and a connection to the server.

The server sends requests, the engine computes, and `Outlets` sends the tokens. A process loads only one model. When the
connection ends, every stream is closed, and the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from reflex_runtime.core.errors import Closed, ConfigError, Drained, ProcessorError, ReflexError
from reflex_runtime.ipc import frames
from reflex_runtime.ipc import messages as wire
from reflex_runtime.ipc.peer import Peer
from reflex_runtime.ipc.streams import Outlet, Outlets, OutputStream
from reflex_runtime.run.processor import ASYNC_WALL
from reflex_runtime.version import __version__

log = logging.getLogger("reflex.ipc")

GRACE = 5.0  # seconds that work may take beyond its time limit; then the process ends without it

_KINDS = {
    wire.LOAD: wire.LoadModel, wire.GENERATE: wire.GenerateParams, wire.BATCH_GENERATE: wire.BatchGenerate,
    wire.CREDIT: wire.Credit, wire.CANCEL: wire.StreamId, wire.SHUTDOWN: wire.Shutdown,
}  # fmt: skip
_READERS = {method: frames.Reader(kind) for method, kind in _KINDS.items()}  # other methods have no params


class Engine(Protocol):
    """A loaded model. Called only on the loop."""

    def info(self) -> dict[str, Any]:
        """The result of `load_model`; JSON-safe."""

    async def close(self, drain: bool, timeout: float) -> bool:
        """Admit nothing more, and end every stream. drain: let them finish within `timeout` seconds. Returns whether no
        thread is at work."""

    def state(self) -> dict[str, Any]:
        """The `model` of `runtime/state`; JSON-safe."""
        return {"state": "ready"}

    async def metrics(self) -> str:
        """Prometheus text, or ""."""
        return ""

    def live(self) -> Any:
        """A `LiveSnapshot` of the time since the last call, or None."""
        return None

    async def submit(self, params: wire.GenerateParams, bell: asyncio.Event, leader: Any) -> OutputStream:
        """Queue a request. bell: see `OutputStream`. leader: None, or a stream of this engine with the same prompt and
        no output yet; the new one waits for it. Raises ReflexError."""


Load = Callable[[wire.LoadModel], Awaitable[Engine]]
_Accepted = tuple[wire.GenerateParams, Engine, Outlet]


class Worker:
    """Answers the calls of the server; the handler of one peer. grace: see GRACE."""

    def __init__(self, load: Load, *, grace: float = GRACE, clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._clock, self._grace = load, clock, grace
        self._outlets = Outlets(clock)
        self._engine: Engine | None = None
        self._model_id, self._loading = "", False
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Task[bool] | None = None
        self._over, self.shutdown_called = asyncio.Event(), False
        self._methods: dict[str, Callable[..., Any]] = {
            wire.INFO: self._info, wire.STATE: self._state, wire.METRICS: self._metrics, wire.LIVE: self._live,
            wire.LOAD: self._load, wire.CHECK_DRAFT: _no_drafts, wire.GENERATE: self._generate,
            wire.BATCH_GENERATE: self._batch_generate, wire.CANCEL: self._cancel, wire.SHUTDOWN: self._shutdown,
        }  # fmt: skip
        self._notes: dict[str, Callable[[Any], object]] = {wire.CREDIT: self._outlets.credit, wire.CANCEL: self._cancel}

    async def run(self, peer: Peer) -> bool:
        """Serve until `shutdown`, or until the connection ends; then close every stream and the engine. Returns whether
        no thread is at work, so that the process can exit normally."""
        self._set_peer(peer)
        await self._over.wait()
        stopping = self._stop(False, self._grace)
        await asyncio.wait([stopping], timeout=2 * self._grace)
        clean = stopping.done() and stopping.result() and not self._loading
        if self._tasks:  # unanswered calls
            _, late = await asyncio.wait(self._tasks, timeout=self._grace)
            for task in late:
                task.cancel()
            if late:
                clean = False
                await asyncio.wait(late, timeout=self._grace)
        peer.close()
        return clean

    # -- handler -------------------------------------------------------------------------------------------------------

    def called(self, peer: Peer, request: frames.RpcMessage) -> None:
        """Answer a call at once, or when its coroutine is done."""
        self._set_peer(peer)
        method, reader = self._methods.get(request.method), _READERS.get(request.method)
        if method is None:
            why = f"{request.method[:100]!r}: there is no such method"
            peer.refuse(request, frames.RpcError(frames.METHOD_NOT_FOUND, why))
            return
        result = method() if reader is None else method(reader.read(request.params))
        if not isinstance(result, Coroutine):
            peer.respond(request, result)
            return
        task = asyncio.get_running_loop().create_task(_answer(peer, request, result))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def notified(self, peer: Peer, note: frames.RpcMessage) -> None:
        self._set_peer(peer)
        if act := self._notes.get(note.method):
            act(_READERS[note.method].read(note.params))
        else:
            log.debug("unknown notification %r", note.method)

    def lost(self, peer: Peer, error: Exception | None) -> None:
        """End every stream and task."""
        if error is not None:
            log.warning("the connection ended: %s", error)
        self._outlets.end(Drained("the connection ended"))
        for task in self._tasks:  # in the next turn: a coroutine that has not begun could not handle its cancellation
            asyncio.get_running_loop().call_soon(task.cancel)
        self._over.set()

    def _set_peer(self, peer: Peer) -> None:
        if self._outlets.peer is None:
            self._outlets.peer = peer
            peer.on_relief = self._outlets.forward

    # -- the process ---------------------------------------------------------------------------------------------------

    def _info(self) -> wire.Info:
        return wire.Info("reflex", __version__, wire.PROTOCOL, os.getpid(), [wire.BATCH_GENERATE])

    def _state(self) -> dict[str, Any]:
        live = self._outlets.live.values()
        beginning = sum(outlet.stream is None for outlet in live)
        return {
            "model": None if self._engine is None else self._engine.state(),
            "loading": self._loading,
            "closing": self._stopping is not None,
            "streams": {"live": len(live) - beginning, "beginning": beginning},
        }

    async def _metrics(self) -> dict[str, str]:
        return {"text": "" if self._engine is None else await self._engine.metrics()}

    def _live(self) -> Any:
        return None if self._engine is None else self._engine.live()

    def _shutdown(self, params: wire.Shutdown) -> Coroutine[Any, Any, dict[str, bool]]:
        """Only the params of the first call count; later calls get the same answer."""
        self.shutdown_called = True
        return _clean(self._stop(params.drain, params.timeout_s))

    def _stop(self, drain: bool, timeout: float) -> asyncio.Task[bool]:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stopped(drain, timeout))
        return self._stopping

    async def _stopped(self, drain: bool, timeout: float) -> bool:
        """End every stream. drain: they may finish within `timeout` seconds, else they end with an error."""
        end = self._clock() + timeout
        if drain:
            beginning = [outlet.begun.wait() for outlet in self._outlets.live.values()]
            await _within(end - self._clock(), asyncio.gather(*beginning))
        else:
            self._outlets.end(Drained("the runtime process shuts down"))
        clean = self._engine is None or await self._closed(self._engine, drain, max(0.0, end - self._clock()))
        if drain:
            await _within(end - self._clock(), asyncio.ensure_future(self._outlets.emptied()))
        self._outlets.end(Drained("the runtime process shuts down"))
        self._over.set()
        return clean

    def _check_open(self) -> None:
        if self._stopping is not None:
            raise Closed("the runtime process shuts down")

    # -- the model -----------------------------------------------------------------------------------------------------

    def _load(self, params: wire.LoadModel) -> Coroutine[Any, Any, dict[str, Any]]:
        """Check the params at once, so that the next `load_model` is refused; the coroutine loads."""
        wire.check_name("load_model: model_id", params.model_id)
        self._check_open()
        if self._engine is not None or self._loading:
            why = f"a process has one model, and {self._model_id!r} is loaded"
            raise ConfigError(f"load_model: model_id={params.model_id!r}: {why}")
        self._model_id, self._loading = params.model_id, True
        return self._loaded(params)

    async def _loaded(self, params: wire.LoadModel) -> dict[str, Any]:
        try:
            engine = await self._make(params)
        except Exception:
            self._loading = False
            raise
        self._loading = False  # but not after a cancellation: a thread may still be loading
        if self._stopping is not None:
            await self._closed(engine, False, self._grace)
            self._check_open()
        self._engine = engine
        return engine.info()

    async def _closed(self, engine: Engine, drain: bool, timeout: float) -> bool:
        """Close an engine. Returns False if it does not close in time, or if one of its threads is at work."""
        closing = asyncio.ensure_future(engine.close(drain, timeout))
        await asyncio.wait([closing], timeout=timeout + self._grace)
        if not closing.done():
            log.error("the model does not close in time")
        elif (error := closing.exception()) is not None:
            log.error("the model could not be closed", exc_info=error)
        else:
            return closing.result()
        return False

    def _model(self, id: str) -> Engine:
        """The model of this name, or "". Raises ConfigError, Closed."""
        self._check_open()
        if self._engine is None or id not in ("", self._model_id):
            there = "no model" if self._engine is None else repr(self._model_id)
            raise ConfigError(f"model_id={id[:220]!r}: is not loaded here; {there} is")
        return self._engine

    # -- streams -------------------------------------------------------------------------------------------------------

    def _cancel(self, params: wire.StreamId) -> dict[str, bool]:
        return {"cancelled": self._outlets.cancel(params.stream_id)}

    def _generate(self, params: wire.GenerateParams) -> Coroutine[Any, Any, wire.Started]:
        return self._begin(*self._accept(params))

    def _batch_generate(self, params: wire.BatchGenerate) -> Coroutine[Any, Any, wire.BatchResult]:
        """Accept all requests, in order; the coroutine starts them."""
        arrived, requests = self._clock(), params.requests
        groups: Counter[str] = Counter()
        seen: set[str] = set()
        accepted: list[_Accepted | ReflexError] = []
        for raw in requests:
            try:
                one: wire.GenerateParams = _READERS[wire.GENERATE].read(raw)
                groups["+".join(filter(None, (one.model_id, one.draft_model)))] += 1
                if one.stream_id in seen:
                    why = f"stream_id={one.stream_id[:200]!r}: twice in a batch"
                    raise frames.ProtocolError(why, frames.INVALID_PARAMS)
                seen.add(one.stream_id)
                accepted.append(self._accept(one))
            except ReflexError as error:
                accepted.append(error)
        return self._begin_all(accepted, dict(groups), arrived)

    async def _begin_all(
        self, accepted: list[_Accepted | ReflexError], groups: dict[str, int], arrived: float
    ) -> wire.BatchResult:
        items = await asyncio.gather(*(self._item(one) for one in accepted))
        return wire.BatchResult(list(items), len(items), groups, (self._clock() - arrived) * 1e3)

    async def _item(self, one: _Accepted | ReflexError) -> wire.Item:
        try:
            if isinstance(one, ReflexError):
                raise one
            return wire.Item(True, await self._begin(*one))
        except ReflexError as error:
            return wire.Item(False, error=frames.error_of(error))

    def _accept(self, params: wire.GenerateParams) -> _Accepted:
        """Check what needs no engine, and add the request's stream, which can be cancelled from now on."""
        for name in ("draft_model", "guidance"):
            if getattr(params, name) is not None:
                raise frames.ProtocolError(f"{name}: is not supported by this runtime", frames.INVALID_PARAMS)
        return params, self._model(params.model_id), self._outlets.add(params)

    async def _begin(self, params: wire.GenerateParams, engine: Engine, outlet: Outlet) -> wire.Started:
        leader, outlet.leader = outlet.leader, None
        try:
            if leader is not None:
                await leader.begun.wait()
            if outlet.gone is not None:
                raise outlet.gone
            first = leader.stream if leader is not None else None
            if first is not None and (first.ended or first.completion_tokens):
                first = None
            stream = await engine.submit(params, outlet.bell, first)
            self._outlets.begin(outlet, stream)
        except BaseException as error:
            self._outlets.drop(outlet)
            if isinstance(error, ReflexError) or not isinstance(error, Exception):
                raise
            log.exception("stream %r could not begin", outlet.id)
            raise ProcessorError(f"{type(error).__name__}: {error}") from error
        return wire.Started(outlet.id, stream.prompt_tokens)


async def serve(load: Load) -> tuple[int, bool]:
    """Run a runtime process on its standard input (`inherited`).

    Returns the exit status (0: `shutdown`; 1: the connection ended), and whether no thread is at work; if one is, the
    process must end by `os._exit`.
    """
    worker = Worker(load)
    _, peer = await asyncio.get_running_loop().connect_accepted_socket(lambda: Peer(worker), inherited())
    clean = await worker.run(peer)
    return 0 if worker.shutdown_called else 1, clean


def inherited() -> socket.socket:
    """The socket that is the standard input of this process. Stdin becomes empty, so that nothing else reads the
    connection. Raises ConfigError if stdin is no socket."""
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        raise ConfigError("stdin is no socket: a runtime process is started by its server, not from a shell")
    sock = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sock.setblocking(False)
    return sock


def _no_drafts() -> None:
    raise frames.ProtocolError("check_draft: this runtime has no draft models", frames.INVALID_PARAMS)


async def _answer(peer: Peer, request: frames.RpcMessage, work: Coroutine[Any, Any, Any]) -> None:
    """Answer a call with its result or its error."""
    try:
        with ASYNC_WALL:
            result = await work
    except ReflexError as error:
        peer.refuse(request, error)
    except asyncio.CancelledError:
        peer.refuse(request, Drained("the runtime process shuts down"))
        raise
    except Exception as error:
        log.exception("%s failed", request.method[:100])
        peer.refuse(request, ProcessorError(f"{type(error).__name__}: {error}"))
    else:
        peer.respond(request, result)


async def _clean(stopping: asyncio.Task[bool]) -> dict[str, bool]:
    return {"clean": await asyncio.shield(stopping)}


async def _within(seconds: float, waiting: asyncio.Future[Any]) -> None:
    """Wait for a future at most this long, then cancel it."""
    await asyncio.wait([waiting], timeout=max(0.0, seconds))
    waiting.cancel()
