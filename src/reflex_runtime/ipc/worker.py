"""The runtime process: models on one side, a connection to the front on the other.

The front sends requests, engines compute, and `outlet.py` sends their tokens. Engines are made by the `load` that this
process was given. When the connection ends, every stream is closed, and the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from math import isfinite
from typing import Any

import msgspec

from reflex_runtime.core.errors import ConfigError, Drained, ProcessorError, ReflexError, TooLarge
from reflex_runtime.ipc.frames import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    Codec,
    Notification,
    ProtocolError,
    Reader,
    RpcError,
    RpcRequest,
    error_of,
)
from reflex_runtime.ipc.messages import (
    BATCH_GENERATE,
    CANCEL,
    CHECK_DRAFT,
    CREDIT,
    DRAFT,
    GENERATE,
    GUIDANCE,
    INFO,
    LIVE,
    LOAD,
    METRICS,
    PROTOCOL,
    SHUTDOWN,
    STATE,
    TOKENIZE,
    UNLOAD,
    BatchGenerate,
    BatchResult,
    CheckDraft,
    CheckedDraft,
    Credit,
    GenerateParams,
    Info,
    Item,
    LoadModel,
    Shutdown,
    Started,
    StreamId,
    Tokenize,
    UnloadModel,
)
from reflex_runtime.ipc.models import Load, Models
from reflex_runtime.ipc.outlet import Outlet, Outlets
from reflex_runtime.ipc.peer import Peer
from reflex_runtime.run.wall import ASYNC_WALL
from reflex_runtime.version import __version__

log = logging.getLogger("reflex.ipc")

MOST_REQUESTS = 1024  # in a batch
LONGEST_DRAIN = 3600  # seconds
GRACE = 5.0  # seconds that work may take beyond its time limit


_PARAMS, _BATCH = Reader(GenerateParams), Reader(BatchGenerate)
_LOAD, _UNLOAD = Reader(LoadModel), Reader(UnloadModel)
_TOKENIZE = Reader(Tokenize)
_CHECK_DRAFT = Reader(CheckDraft)
_STREAM_ID, _CREDIT, _SHUTDOWN = Reader(StreamId), Reader(Credit), Reader(Shutdown)


class Worker:
    """Answers the calls of the front; the handler of one peer.

    capabilities: advertised; `batch_generate`, drafts and guidance are refused without theirs. grace: seconds
    beyond its time that work may take to end, before this process ends without it.
    """

    def __init__(
        self,
        load: Load,
        *,
        capabilities: Collection[str] = (BATCH_GENERATE,),
        name: str = "reflex",
        version: str = __version__,
        grace: float = GRACE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._grace = clock, grace
        self.capabilities = frozenset(capabilities)
        self._name, self._version = name, version
        self._outlets = Outlets(clock)
        self._models = Models(load, self._outlets.end, grace)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Task[bool] | None = None
        self._over, self.told_to_stop = asyncio.Event(), False  # whether `shutdown` was called
        self._batches, self._batched, self._last = 0, 0, BatchResult([])
        self._methods: dict[str, Callable[[Any, Codec], Any]] = {
            INFO: self._info, STATE: self._state, METRICS: self._metrics, LIVE: self._live,
            LOAD: self._load, UNLOAD: self._unload, TOKENIZE: self._tokenize,
            GENERATE: self._generate, CANCEL: self._cancel, SHUTDOWN: self._shutdown, CHECK_DRAFT: self._check_draft,
        }  # fmt: skip
        if BATCH_GENERATE in self.capabilities:
            self._methods[BATCH_GENERATE] = self._batch_generate

    async def run(self, peer: Peer) -> bool:
        """Serve until `shutdown`, or until the connection ends. Every stream and engine is closed when it returns;
        whether no thread is at work any more, so that the process can exit in the usual way."""
        self._meet(peer)
        await self._over.wait()
        stopping = self._stop(False, self._grace)
        await asyncio.wait([stopping], timeout=2 * self._grace)
        clean = stopping.done() and stopping.result() and not self._models.loading
        if self._tasks:  # calls that are not answered yet
            _, late = await asyncio.wait(self._tasks, timeout=self._grace)
            for task in late:
                task.cancel()
            if late:
                clean = False
                await asyncio.wait(late, timeout=self._grace)
        peer.close()
        return clean

    # -- handler -------------------------------------------------------------------------------------------------------

    def called(self, peer: Peer, request: RpcRequest, codec: Codec) -> None:
        """A call came: answer at once, or when its coroutine is done."""
        self._meet(peer)
        peer.codec = codec
        method = self._methods.get(request.method)
        if method is None:
            peer.refuse(request, RpcError(METHOD_NOT_FOUND, f"{request.method[:100]!r}: there is no such method"))
            return
        result = method(request.params, codec)
        if not isinstance(result, Coroutine):
            peer.respond(request, result)
            return
        task = asyncio.get_running_loop().create_task(_answer(peer, request, result))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def notified(self, peer: Peer, note: Notification, codec: Codec) -> None:
        self._meet(peer)
        peer.codec = codec
        if note.method == CREDIT:
            given = _CREDIT.read(note.params, codec)
            self._outlets.credit(given.stream_id, given.tokens)
        elif note.method == CANCEL:
            self._cancel(note.params, codec)
        elif note.method == SHUTDOWN:
            self._told_to_stop(note.params, codec)
        else:
            log.debug("unknown notification %r", note.method)

    def lost(self, peer: Peer, error: Exception | None) -> None:
        """The connection has ended: end every stream and task."""
        if error is not None:
            log.warning("the connection ended: %s", error)
        self._outlets.end(Drained("the connection ended"))
        for task in self._tasks:  # after their first step: the coroutines that they hold must have begun
            asyncio.get_running_loop().call_soon(task.cancel)
        self._over.set()

    def _meet(self, peer: Peer) -> None:
        if self._outlets.peer is None:
            self._outlets.peer = peer
            peer.on_relief = self._outlets.forward

    # -- the process ---------------------------------------------------------------------------------------------------

    def _info(self, params: Any, codec: Codec) -> Info:
        models = {model.id: model.engine.info() for model in self._models if model.closing is None}
        codecs = [codec.label for codec in Codec]
        return Info(self._name, self._version, PROTOCOL, os.getpid(), codecs, sorted(self.capabilities), models)

    def _state(self, params: Any, codec: Codec) -> dict[str, Any]:
        live, last = self._outlets.live.values(), self._last
        beginning = sum(outlet.stream is None for outlet in live)
        return {
            "models": {model.id: model.engine.state() for model in self._models},
            "loading": sorted(self._models.loading),
            "closing": self._stopping is not None,
            "streams": {"live": len(live) - beginning, "beginning": beginning},
            "batches": {
                "count": self._batches, "requests": self._batched,
                "last": {"size": last.size, "groups": last.groups, "duration_ms": last.duration_ms},
            },
        }  # fmt: skip

    def _metrics(self, params: Any, codec: Codec) -> dict[str, str]:
        return {"text": "".join(model.engine.metrics() for model in self._models)}

    def _live(self, params: Any, codec: Codec) -> dict[str, Any]:
        return {model.id: model.engine.live() for model in self._models}

    def _shutdown(self, params: Any, codec: Codec) -> Coroutine[Any, Any, dict[str, bool]]:
        return _clean(self._told_to_stop(params, codec))

    def _told_to_stop(self, params: Any, codec: Codec) -> asyncio.Task[bool]:
        """The first call decides; later ones are answered when it is done."""
        asked = _SHUTDOWN.read(params, codec)
        if not (isfinite(asked.timeout_s) and 0 <= asked.timeout_s <= LONGEST_DRAIN):
            raise ConfigError(f"shutdown: timeout_s={asked.timeout_s}: must be in [0, {LONGEST_DRAIN}] seconds")
        self.told_to_stop = True
        return self._stop(asked.drain, asked.timeout_s)

    def _stop(self, drain: bool, timeout: float) -> asyncio.Task[bool]:
        if self._stopping is None:
            self._models.shut = True
            self._stopping = asyncio.get_running_loop().create_task(self._stopped(drain, timeout))
        return self._stopping

    async def _stopped(self, drain: bool, timeout: float) -> bool:
        """End every stream: with `drain` they may finish within `timeout` seconds, else they end with an error."""
        end = self._clock() + timeout
        if drain:
            beginning = [outlet.begun.wait() for outlet in self._outlets.live.values()]
            await _within(end - self._clock(), asyncio.gather(*beginning))
        else:
            self._outlets.end(Drained("the runtime process shuts down"))
        clean = await self._models.close(drain, max(0.0, end - self._clock()))
        if drain:
            await _within(end - self._clock(), asyncio.ensure_future(self._outlets.emptied()))
        self._outlets.end(Drained("the runtime process shuts down"))
        self._over.set()
        return clean

    # -- models --------------------------------------------------------------------------------------------------------

    def _load(self, params: Any, codec: Codec) -> Coroutine[Any, Any, dict[str, Any]]:
        return self._models.load(_LOAD.read(params, codec))

    def _unload(self, params: Any, codec: Codec) -> Coroutine[Any, Any, dict[str, bool]]:
        return self._models.unload(_UNLOAD.read(params, codec).model_id)

    async def _tokenize(self, params: Any, codec: Codec) -> dict[str, list[int]]:
        asked = _TOKENIZE.read(params, codec)
        if (asked.text is None) == (asked.messages is None):
            raise ConfigError("tokenize: needs either text or messages")
        ids = await self._models.get(asked.model_id).engine.tokenize(asked)
        if asked.most is not None and len(ids) > asked.most:
            raise TooLarge(f"{len(ids)} tokens, not more than {asked.most}", tokens=len(ids), most=asked.most)
        return {"token_ids": ids}

    def _check_draft(self, params: Any, codec: Codec) -> Coroutine[Any, Any, CheckedDraft]:
        if DRAFT not in self.capabilities:
            raise ProtocolError("check_draft: this runtime has no drafts", INVALID_PARAMS)
        asked = _CHECK_DRAFT.read(params, codec)
        return self._models.get(asked.model_id).engine.check_draft(asked)

    # -- streams -------------------------------------------------------------------------------------------------------

    def _cancel(self, params: Any, codec: Codec) -> dict[str, bool]:
        return {"cancelled": self._outlets.cancel(_STREAM_ID.read(params, codec).stream_id)}

    def _generate(self, params: Any, codec: Codec) -> Coroutine[Any, Any, Started]:
        asked: GenerateParams = _PARAMS.read(params, codec)
        return self._begin(asked, self._accept(asked))

    def _batch_generate(self, params: Any, codec: Codec) -> Coroutine[Any, Any, BatchResult]:
        """All requests are accepted here, in order; the task starts them."""
        arrived = self._clock()
        requests = _BATCH.read(params, codec).requests
        if len(requests) > MOST_REQUESTS:
            raise ProtocolError(f"requests: {len(requests)} of them; at most {MOST_REQUESTS}", INVALID_PARAMS)
        groups: Counter[str] = Counter()
        seen: set[str] = set()
        accepted: list[tuple[GenerateParams, Outlet] | ReflexError] = []
        for raw in requests:
            try:
                asked = _PARAMS.read(raw, codec)
                groups["+".join(filter(None, (asked.model_id, asked.draft_model)))] += 1
                if asked.stream_id in seen:
                    raise ProtocolError(f"stream_id={asked.stream_id[:200]!r}: twice in a batch", INVALID_PARAMS)
                seen.add(asked.stream_id)
                accepted.append((asked, self._accept(asked)))
            except ReflexError as error:
                accepted.append(error)
        return self._begin_all(accepted, dict(groups), arrived)

    async def _begin_all(
        self, accepted: list[tuple[GenerateParams, Outlet] | ReflexError], groups: dict[str, int], arrived: float
    ) -> BatchResult:
        items = await asyncio.gather(*(self._item(one) for one in accepted))
        self._batches, self._batched = self._batches + 1, self._batched + len(items)
        result = BatchResult(list(items), len(items), groups, (self._clock() - arrived) * 1e3)
        self._last = msgspec.structs.replace(result, results=[])
        return result

    async def _item(self, asked: tuple[GenerateParams, Outlet] | ReflexError) -> Item:
        try:
            if isinstance(asked, ReflexError):
                raise asked
            return Item(True, await self._begin(*asked))
        except ReflexError as error:
            return Item(False, error=error_of(error))

    def _accept(self, params: GenerateParams) -> Outlet:
        """Check what needs no engine. After this its stream is live and can be cancelled."""
        draft = params.draft_token_ids if params.draft_model is None else params.draft_model
        wants = {DRAFT: draft, GUIDANCE: params.guidance}
        for name in wants.keys() - self.capabilities:
            if wants[name] is not None:
                raise ProtocolError(f"this runtime does not advertise {name!r}", INVALID_PARAMS)
        return self._outlets.add(params, self._models.get(params.model_id).engine)

    async def _begin(self, params: GenerateParams, outlet: Outlet) -> Started:
        leader, outlet.leader = outlet.leader, None
        try:
            if leader is not None:
                await leader.begun.wait()
            if outlet.gone is not None:
                raise outlet.gone
            first = leader.stream if leader is not None else None
            if first is not None and (first.ended or first.completion_tokens):  # nothing to wait for
                first = None
            stream = await outlet.engine.submit(params, outlet.bell, first)
            self._outlets.begin(outlet, stream)
        except BaseException as error:
            self._outlets.drop(outlet)
            if isinstance(error, ReflexError) or not isinstance(error, Exception):
                raise
            log.exception("stream %r could not begin", outlet.id)
            raise ProcessorError(f"{type(error).__name__}: {error}") from error
        return Started(outlet.id, stream.prompt_tokens)


async def serve(load: Load) -> tuple[int, bool]:
    """Run a runtime process on the connection that its parent gave it: see `inherited`.

    Returns the exit status (0: told to shut down; 1: the connection ended) and whether no thread is at work any more;
    else the process has to leave by `os._exit`.
    """
    worker = Worker(load, capabilities=(BATCH_GENERATE, DRAFT, GUIDANCE))
    _, peer = await asyncio.get_running_loop().connect_accepted_socket(lambda: Peer(worker), inherited())
    clean = await worker.run(peer)
    return 0 if worker.told_to_stop else 1, clean


def inherited() -> socket.socket:
    """The socket that is the standard input of this process. From here on stdin is empty, so that nothing else reads
    the connection. Raises ConfigError where stdin is no socket."""
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        raise ConfigError("a runtime process needs a socket as its standard input, and is started by its front")
    sock = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sock.setblocking(False)
    return sock


async def _answer(peer: Peer, request: RpcRequest, work: Coroutine[Any, Any, Any]) -> None:
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
    """Wait for it at most this long, then cancel it."""
    await asyncio.wait([waiting], timeout=max(0.0, seconds))
    waiting.cancel()
