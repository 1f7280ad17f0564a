"""Both ends of a connection in one process, over a real socket pair: a scripted runtime, and a client as small as the
batcher needs it. Nothing sleeps: `round` is one question through the connection and its answer, and whatever was said
before it has been heard by then."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import msgspec

from ipc.virtual import VirtualLoop
from reflex_runtime.core.errors import Cancelled, ReflexError, Rejected
from reflex_runtime.ipc.frames import RpcError, RpcMessage
from reflex_runtime.ipc.generate_batcher import GenerateBatcher, GenerateBatcherConfig
from reflex_runtime.ipc.messages import CANCEL, CHUNK, CREDIT, EVENT, STATS, GenerateParams
from reflex_runtime.ipc.peer import ConnectionLost, Peer
from reflex_runtime.ipc.streams import StreamRegistry

T = TypeVar("T")
PATIENCE = 60.0  # seconds until a test that waits is broken
PING = "ping"


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time, of which it takes no more than PATIENCE."""

    async def limited() -> T:
        async with asyncio.timeout(PATIENCE):
            return await main

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(limited())


def decoded(raw: Any) -> Any:
    return msgspec.json.decode(raw)


class Runtime:
    """The other process. Answers at once, unless `gated`: then calls wait in `calls` for `answer`.

    refusing: errors by stream id. wrong: how many results too many a batch gets. messages: (method, params of its
    requests) of every generate message. live: streams that began and have not ended. obeys: whether a stream that is
    cancelled ends. brief: whether every stream ends as soon as it began. cancels, credits: what it was told.
    """

    def __init__(self, gated: bool = False) -> None:
        self.gated = gated
        self.refusing: dict[str, RpcError] = {}
        self.wrong = 0
        self.obeys, self.brief = True, False
        self.messages: list[tuple[str, list[dict[str, Any]]]] = []
        self.calls: list[RpcMessage] = []
        self.live: dict[str, None] = {}
        self.cancels: list[str] = []
        self.credits: Counter[str] = Counter()
        self.peer: Peer | None = None
        self._news = asyncio.Event()

    # -- its script ----------------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> list[int]:
        return [len(requests) for _, requests in self.messages]

    @property
    def ids(self) -> list[str]:
        """Streams that were asked for, in order."""
        return [one["stream_id"] for _, requests in self.messages for one in requests]

    async def until(self, what: Callable[[], object]) -> None:
        while not what():
            self._news.clear()
            await self._news.wait()

    def answer(self, index: int = 0) -> None:
        """Answer one of the calls that wait."""
        request = self.calls.pop(index)
        assert self.peer is not None
        params = request.params
        if request.method == "generate":
            error = self._begin(params)
            if error is not None:
                self.peer.refuse(request, error)
            else:
                self.peer.respond(request, {"stream_id": params["stream_id"], "prompt_tokens": 3})
            return
        results: list[Any] = []
        for one in params["requests"]:
            error = self._begin(one)
            began = {"stream_id": one["stream_id"], "prompt_tokens": 3}
            results.append({"success": error is None, "result": None if error else began, "error": error})
        results += [results[0]] * self.wrong if self.wrong >= 0 else []
        self.peer.respond(request, {"results": results[: len(results) + min(0, self.wrong)]})

    def fail(self, error: ReflexError | RpcError, index: int = 0) -> None:
        assert self.peer is not None
        self.peer.refuse(self.calls.pop(index), error)

    def chunk(self, id: str, n: int = 1, final: bool = False) -> None:
        tokens = [{"text": f"t{i}", "token_id": i} for i in range(n)]
        self.say(CHUNK, {"stream_id": id, "tokens": tokens, "is_final": final})

    def end(self, id: str, event: str = "completed", error: RpcError | None = None) -> None:
        self.live.pop(id, None)
        said = {"stream_id": id, "event": event}
        self.say(EVENT, said if error is None else {**said, "error": error})

    def stats(self, id: str, prompt: int, output: int) -> None:
        said = {"stream_id": id, "prompt_tokens": prompt, "output_tokens": output, "ttft_ms": 1.5, "duration_ms": 2.0}
        self.say(STATS, {**said, "cached_tokens": 2})

    def say(self, method: str, params: Any) -> None:
        assert self.peer is not None
        self.peer.notify(method, params)

    def die(self) -> None:
        assert self.peer is not None
        self.peer.abort()
        self.calls.clear()
        self.live.clear()

    def _begin(self, params: dict[str, Any]) -> RpcError | None:
        id = params["stream_id"]
        error = self.refusing.pop(id, None)
        if error is None:
            self.live[id] = None
            if self.brief:
                self.end(id)
            elif id in self.cancels and self.obeys:
                self.end(id, "cancelled")
        return error

    # -- its peer's handler --------------------------------------------------------------------------------------------

    def called(self, peer: Peer, request: RpcMessage) -> None:
        if request.method == PING:
            peer.respond(request, None)
            return
        request.params = decoded(request.params)
        several = request.params["requests"] if request.method == "batch_generate" else [request.params]
        self.messages.append((request.method, several))
        self.calls.append(request)
        if not self.gated:
            self.answer(-1)
        self._news.set()

    def notified(self, peer: Peer, note: RpcMessage) -> None:
        params = decoded(note.params)
        id = params["stream_id"]
        if note.method == CREDIT:
            self.credits[id] += params["tokens"]
        elif note.method == CANCEL:
            self.cancels.append(id)
            if id in self.live and self.obeys:
                self.end(id, "cancelled")
        self._news.set()

    def lost(self, peer: Peer, error: Exception | None) -> None:
        self._news.set()


class Unavailable(Rejected):
    code = "worker_unavailable"


class Client:
    """What the batcher needs of a `RuntimeClient`."""

    def __init__(self, registry: StreamRegistry) -> None:
        self.registry = registry
        self.capabilities = frozenset({"batch_generate"})
        self.peer: Peer | None = None
        self.gone = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self.peer is not None

    def call(self, method: str, params: Any) -> asyncio.Future[msgspec.Raw]:
        if self.peer is None:
            raise self.unavailable()
        return self.peer.call(method, params)

    def notify(self, method: str, params: Any) -> None:
        if self.peer is not None:
            self.peer.notify(method, params)

    def flush(self) -> None:
        if self.peer is not None:
            self.peer.flush()

    def unavailable(self) -> ReflexError:
        return Unavailable("there is no runtime process", retry_after=1.0)

    def called(self, peer: Peer, request: RpcMessage) -> None:
        raise AssertionError("nobody calls the front")

    def notified(self, peer: Peer, note: RpcMessage) -> None:
        self.registry.note(note)

    def lost(self, peer: Peer, error: Exception | None) -> None:
        self.peer = None
        self.gone.set()
        self.registry.lost(ConnectionLost("the runtime process is gone"))


class World:
    """A batcher, its registry, a client and a runtime, in virtual time."""

    def __init__(self, registry: StreamRegistry, gated: bool) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop, self.clock = loop, loop.time
        self.registry = registry
        self.client = Client(registry)
        self.runtime = Runtime(gated)
        self.batcher: GenerateBatcher
        self._ends: list[Peer] = []

    async def later(self, seconds: float) -> None:
        """So much time has gone by, and what was due within it has happened."""
        self.passes(seconds)
        await self.round()

    def passes(self, seconds: float) -> None:
        self._loop.now += seconds

    async def connect(self) -> None:
        """A new connection, as after a restart."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        runtime, client = self.runtime, self.client
        _, runtime.peer = await loop.create_connection(lambda: Peer(runtime), sock=theirs)
        _, client.peer = await loop.create_connection(lambda: Peer(client), sock=ours)
        self._ends = [runtime.peer, client.peer]
        client.gone.clear()

    async def round(self) -> None:
        """Everything that was said on either side has been heard, and what that settled is settled."""
        for _ in range(3):
            await asyncio.sleep(0)
        if self.client.peer is not None:
            with suppress(ConnectionLost):
                await self.client.peer.call(PING, {})
        for _ in range(4):
            await asyncio.sleep(0)

    def ask(self, id: str | None = None, priority: str = "default", **options: Any) -> asyncio.Task[dict[str, Any]]:
        """A caller, whose stream is registered unless it is. options: of `enqueue`, and of the request."""
        own = {name: options.pop(name) for name in ("cancel", "timeout_ms", "telemetry") if name in options}
        params = GenerateParams(**{"prompt": "hello", **options})
        handle = self.registry.find(id or "") or self.registry.register(id)
        params = msgspec.structs.replace(params, stream_id=handle.id)
        return asyncio.ensure_future(self.batcher.enqueue(params, priority, **own))

    async def end(self) -> None:
        for peer in self._ends:
            peer.abort()
        for _ in range(3):
            await asyncio.sleep(0)


@asynccontextmanager
async def world(
    config: GenerateBatcherConfig | None = None, gated: bool = False, window: int = 64, **options: Any
) -> AsyncIterator[World]:
    config = config or GenerateBatcherConfig()
    made = World(StreamRegistry(config.stream_limit, window), gated)
    made.batcher = GenerateBatcher(made.client, made.registry, config, clock=made.clock, **options)
    await made.connect()
    try:
        yield made
    finally:
        await made.batcher.close(drain=False)
        await made.end()


async def outcome(task: asyncio.Future[Any]) -> Any:
    """What a caller got: its answer or its error."""
    try:
        return await task
    except ReflexError as error:
        return error
    except asyncio.CancelledError:
        return Cancelled("its task")
