"""An engine that does what a test tells it, a front that remembers what it was told, and a connection between them.

As a program it is a runtime process: python engines.py. There an engine answers prompts that are programs of
their own: see `Talker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from reflex_runtime.core.errors import Cancelled, Drained, ReflexError
from reflex_runtime.ipc.frames import Reader, RpcMessage
from reflex_runtime.ipc.messages import (
    BATCH_GENERATE,
    CHUNK,
    EVENT,
    LOAD,
    PROMPT,
    STATS,
    TERMINAL,
    BatchResult,
    GenerateParams,
    LoadModel,
    StreamChunk,
    StreamEvent,
    StreamPrompt,
    StreamStats,
    TokenOutput,
)
from reflex_runtime.ipc.peer import Peer
from reflex_runtime.ipc.streams import OutputStream
from reflex_runtime.ipc.worker import Engine, Worker, serve

PATIENCE = 60.0  # seconds until a test that waits is broken
_KINDS = {CHUNK: StreamChunk, PROMPT: StreamPrompt, STATS: StreamStats, EVENT: StreamEvent}
_READERS: dict[str, Reader[Any]] = {method: Reader(kind) for method, kind in _KINDS.items()}
_ANY, _BATCH = Reader(Any), Reader(BatchResult)


class StubStream(OutputStream):
    """Says what a test says. Held, as those of a model are, while `most` outputs are unread."""

    def __init__(self, params: GenerateParams, bell: asyncio.Event, leader: Any, most: int) -> None:
        super().__init__(bell, 3)
        self.params, self.leader, self._most = params, leader, most
        self.cached_tokens, self.closed = 1, False

    def say(self, *texts: str, finish: str | None = None) -> None:
        """A token for each text. finish: of the last, which ends it."""
        for text in texts:
            last = text is texts[-1]
            self.completion_tokens += 1
            if last and finish is not None:
                self.push([TokenOutput(text, self.completion_tokens, finish=finish)])
                self.end()
            else:
                self.push([TokenOutput(text, self.completion_tokens)])

    def _pushed(self, n: int) -> None:
        self.held = self.held or self.unread >= self._most

    def _taken(self, n: int) -> None:
        self.held = self.held and self.unread > self._most // 2

    def _left(self) -> None:
        self.closed = True


class StubEngine(Engine):
    """gates: ids whose submission waits for the event. faults: ids whose submission fails. most: see `StubStream`.

    asked: ids, in the order in which they came here. streams: by id. closes: (drain, timeout) of each `close`.
    """

    def __init__(self, model: LoadModel | None = None, most: int = 8) -> None:
        self.model, self.most = model, most
        self.gates: dict[str, asyncio.Event] = {}
        self.faults: dict[str, Exception] = {}
        self.asked: list[str] = []
        self.streams: dict[str, StubStream] = {}
        self.closes: list[tuple[bool, float]] = []
        self.close_gate: asyncio.Event | None = None
        self.clean = True

    def info(self) -> dict[str, Any]:
        return {"context": 128, "options": {} if self.model is None else self.model.options}

    async def metrics(self) -> str:
        return f"streams {len(self.streams)}\n"

    async def submit(self, params: GenerateParams, bell: asyncio.Event, leader: Any) -> StubStream:
        self.asked.append(params.stream_id)
        if params.stream_id in self.gates:
            await self.gates[params.stream_id].wait()
        if params.stream_id in self.faults:
            raise self.faults[params.stream_id]
        self.streams[params.stream_id] = stream = StubStream(params, bell, leader, self.most)
        return stream

    async def close(self, drain: bool, timeout: float) -> bool:
        self.closes.append((drain, timeout))
        if self.close_gate is not None:
            await self.close_gate.wait()
        for stream in self.streams.values():
            if not stream.ended and not drain:
                stream.end(Drained("the engine closes"))
        return self.clean


class Front:
    """The handler of the front's peer. said: (method, params) of every notification, decoded."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []
        self.lost_with: list[Exception | None] = []
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def called(self, peer: Peer, request: RpcMessage) -> None:
        raise AssertionError(request)

    def notified(self, peer: Peer, note: RpcMessage) -> None:
        self.said.append((note.method, _READERS[note.method].read(note.params)))
        self._look()

    def lost(self, peer: Peer, error: Exception | None) -> None:
        self.lost_with.append(error)
        self._look()

    def of(self, stream_id: str) -> list[Any]:
        """What was said of a stream, as short words: how many tokens of its prompt were told of, its tokens' texts, `|`
        for is_final, stats, events."""
        found: list[Any] = []
        for method, params in self.said:
            if params.stream_id == stream_id:
                if method == PROMPT:
                    found.append(len(params.tokens))
                elif method == CHUNK:
                    found += [token.text for token in params.tokens] + ["|"] * params.is_final
                else:
                    found.append("stats" if method == STATS else f"<{params.event}>")
        return found

    def last(self, method: str, stream_id: str) -> Any:
        return [params for name, params in self.said if name == method and params.stream_id == stream_id][-1]

    def ended(self, *ids: str) -> bool:
        over = {params.stream_id for name, params in self.said if name == EVENT and params.event in TERMINAL}
        return over >= set(ids)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until it does; looked at whenever something was said."""
        if not holds():
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append((holds, waiting))
            await waiting

    def _look(self) -> None:
        for holds, waiting in self._waiting:
            if not waiting.done() and holds():
                waiting.set_result(None)


@dataclass
class Ends:
    """Both ends of a connection in one loop. engine: once it is there. loading: until it is set the model is loaded."""

    worker: Worker
    peer: Peer
    front: Front
    run: asyncio.Task[bool]
    theirs: Peer
    loading: asyncio.Event = field(default_factory=asyncio.Event)
    engine: StubEngine = field(default_factory=StubEngine)

    async def call(self, method: str, params: Any) -> Any:
        answer = await self.peer.call(method, params)
        return _ANY.read(answer)

    async def batch(self, *requests: Any) -> BatchResult:
        answer = await self.peer.call(BATCH_GENERATE, {"requests": list(requests)})
        result = _BATCH.read(answer)
        assert isinstance(result, BatchResult)
        return result

    async def settled(self) -> None:
        """Everything that was said until now has been read and answered."""
        await self.call("runtime/info", {})


@contextlib.asynccontextmanager
async def ends(loaded: bool = True, **more: Any) -> AsyncIterator[Ends]:
    """A worker with a model, m, on a socketpair. Whatever a test did, `run` comes back."""
    loop = asyncio.get_running_loop()

    async def load(asked: LoadModel) -> StubEngine:
        await both.loading.wait()
        if asked.path == "nowhere":
            raise FileNotFoundError("nowhere")
        both.engine = StubEngine(asked)
        return both.engine

    worker = Worker(load, **more)
    front = Front()
    ours, theirs = socket.socketpair()
    _, peer = await loop.create_connection(lambda: Peer(front), sock=ours)
    _, far = await loop.create_connection(lambda: Peer(worker), sock=theirs)
    run = loop.create_task(worker.run(far))
    both = Ends(worker, peer, front, run, far)
    try:
        async with asyncio.timeout(PATIENCE):
            if loaded:
                both.loading.set()
                await both.call(LOAD, LoadModel("m"))
            yield both
    finally:
        peer.abort()
        async with asyncio.timeout(PATIENCE):
            await run


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def params(stream_id: str, **more: Any) -> dict[str, Any]:
    return {"stream_id": stream_id, "model_id": "m", "prompt": "hello", **more}


# -- a process ---------------------------------------------------------------------------------------------------------


class Talker(StubEngine):
    """Prompt "3 words": so many tokens, then the end. "print": writes to stdout and reads stdin. "wait": says nothing.
    "leave": gives its reader up.
    """

    async def submit(self, params: GenerateParams, bell: asyncio.Event, leader: Any) -> StubStream:
        stream = await super().submit(params, bell, leader)
        prompt = params.prompt or ""
        if "print" in prompt:
            print("a library says hello", flush=True)
            os.write(1, b"and so does its C code\n")
            print(f"it reads {os.read(0, 1)!r}", flush=True)
        if prompt.endswith("words"):
            stream.say(*(f"w{n}" for n in range(int(prompt.split()[0]))), finish="stop")
        elif prompt == "leave":
            stream.end(Cancelled("for its reader"))
        return stream


def _main() -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)

    async def load(asked: LoadModel) -> Talker:
        print("loading", flush=True)
        if asked.path:
            raise ReflexError(f"no model at {asked.path}")
        return Talker(asked, most=1000)

    status, clean = asyncio.run(serve(load))
    return status if clean else 99


if __name__ == "__main__":
    sys.exit(_main())
