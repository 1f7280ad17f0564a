"""Streams of tokens from a runtime process to its front: both ends of their credit scheme.

The front (`StreamRegistry`) registers a stream before its request is queued, so that no early notification is lost. A
request takes one of `limit` places when it is put into a message: requests that wait have none, and an urgent one gets
the next free place. A stream keeps its place until its terminal event, even if its reader has closed it: only the
runtime can free it. A reader that takes tokens grants as many more credits.

The runtime process (`Outlets`) sends the tokens of each stream within its credits. The engine sets the bell of a stream
that has new tokens; at the end of that turn of the loop the tokens of all such streams are sent together: one write for
a step. Tokens without credits stay in the engine, which then holds only that stream. Scores of a prompt are sent first,
a bounded number in each turn of the loop, so that they do not delay other streams.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any, Self

from reflex_runtime.core.errors import Cancelled, ConfigError, ProcessorError, QueueFull, ReflexError
from reflex_runtime.ipc import messages as wire
from reflex_runtime.ipc.frames import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    ProtocolError,
    Reader,
    RpcMessage,
    error_of,
    raised,
)
from reflex_runtime.ipc.peer import Peer
from reflex_runtime.run.audience import Idle

log = logging.getLogger("reflex.ipc")

WINDOWS = 4  # windows of tokens that may be unread; a runtime that obeys its credits stays within one
MOST_STREAMS = 10_000  # live at a time in a runtime process
SCORES_A_TURN = 4096  # numbers for tokens of prompts that are sent in one turn of the loop: about 60 KB
_CLOSED = "the stream was closed before all of it was read"


class OutputStream:
    """The tokens of one request, from this process or another: an async iterator for one reader.

    Producers push on the event loop and never wait. A subclass bounds the memory with the hooks `_pushed` and `_taken`.
    An error is raised after the outputs before it. A reader that stops before the end must call `close`.

    bell: set whenever there is something to read; several streams may share one. ended: no more outputs will come; some
    may be unread. closed: by its reader. held: its engine computes nothing for it. prompt_tokens: known from
    the first output on; cached_tokens, among them: at the end. prompt_scores: of the prompt's tokens from the second
    on, if requested; complete before the first output.
    """

    __slots__ = (
        "_bell", "_error", "_outputs", "cached_tokens", "closed", "completion_tokens", "ended", "held",
        "prompt_scores", "prompt_tokens",
    )  # fmt: skip

    def __init__(self, bell: asyncio.Event | None, prompt_tokens: int = 0) -> None:
        self._bell = bell or asyncio.Event()
        self._outputs: deque[wire.TokenOutput] = deque()
        self._error: ReflexError | None = None
        self.closed = self.ended = False
        self.prompt_tokens, self.cached_tokens, self.completion_tokens = prompt_tokens, 0, 0
        self.prompt_scores: list[wire.ScoredToken] = []
        self.held = False

    # -- for the reader ------------------------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Outputs that wait for the reader."""
        return len(self._outputs)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> wire.TokenOutput:
        if not self._outputs and not await self._more():
            raise StopAsyncIteration
        output = self._outputs.popleft()
        self._taken(1)
        return output

    async def read(self) -> list[wire.TokenOutput]:
        """Wait for outputs and take all unread ones; empty at the end."""
        return self.take() if self._outputs or await self._more() else []

    def take(self, most: int | None = None) -> list[wire.TokenOutput]:
        """Take unread outputs, at most `most`, without waiting. Raises the stream's error once all are taken."""
        if not self._outputs and self._error is not None:
            raise copy.copy(self._error)  # the traceback of a raised error refers to this stream: avoid a cycle
        if most is None or most >= len(self._outputs):
            outputs = list(self._outputs)
            self._outputs.clear()
        else:
            outputs = [self._outputs.popleft() for _ in range(most)]
        if outputs:
            self._taken(len(outputs))
        return outputs

    def close(self) -> None:
        """Cancel the request unless it has ended. Reading then raises `Cancelled` if outputs were left, so that a part
        does not pass for the whole answer."""
        if self.closed:
            return
        self.closed = True
        if self._error is None and (self._outputs or not self.ended):
            self._error = Cancelled(_CLOSED)
        self._outputs.clear()
        if not self.ended:
            self._left()
        self._bell.set()

    async def _more(self) -> bool:
        """Wait for an output; False at the end."""
        while not self._outputs:
            if self._error is not None:
                raise copy.copy(self._error)
            if self.ended:
                return False
            self._bell.clear()
            await self._bell.wait()
        return True

    # -- for the producer ----------------------------------------------------------------------------------------------

    def push(self, outputs: list[wire.TokenOutput]) -> None:
        """Add outputs; they are dropped after `close`."""
        if not self.closed:
            self._outputs += outputs
            self._bell.set()
            self._pushed(len(outputs))

    def end(self, error: ReflexError | None = None) -> None:
        """End the stream; called once."""
        assert not self.ended
        self.ended = True
        if error is not None and self._error is None:
            self._error = error
        self._bell.set()

    # -- hooks of a subclass that bounds it ----------------------------------------------------------------------------

    def _pushed(self, n: int) -> None:
        """Hook: n outputs were pushed."""

    def _taken(self, n: int) -> None:
        """Hook: n outputs were read."""

    def _left(self) -> None:
        """The reader closed it before its end."""


async def merged(
    streams: Sequence[OutputStream], bell: asyncio.Event
) -> AsyncIterator[tuple[int, list[wire.TokenOutput]]]:
    """(index of the stream, its new outputs), as they come. bell: of all the streams. Raises the first error."""
    still = dict(enumerate(streams))
    while still:
        bell.clear()
        for number, stream in list(still.items()):
            ended = stream.ended  # read before the yield, during which more outputs may come
            outputs = stream.take()
            if outputs:
                yield number, outputs
            if ended:
                stream.take()
                del still[number]
        if still:
            await bell.wait()


class StreamHandle(OutputStream):
    """A stream from a runtime process. Made by `StreamRegistry.register`.

    ttft_ms: time to the first token; token_s: mean seconds between two; known at the end. scores_left: numbers for the
    prompt's tokens that may still come. reserved: it holds a place. window: tokens that the runtime may be ahead of the
    reader. For the batcher: partition; on_left: called when the reader closes the stream before its end; on_end: called
    once, at its end.
    """

    __slots__ = (
        "_owed", "_registry", "id", "on_end", "on_left", "partition", "reserved", "scores_left", "token_s",
        "ttft_ms", "window",
    )  # fmt: skip

    def __init__(self, registry: StreamRegistry, id: str, partition: Hashable, bell: asyncio.Event | None) -> None:
        super().__init__(bell)
        self.id, self.partition, self.window = id, partition, registry.window
        self.ttft_ms: float | None = None
        self.scores_left, self.token_s = 0, 0.0
        self.reserved = False
        self.on_left: Callable[[], None] | None = None
        self.on_end: Callable[[], object] | None = None
        self._registry = registry
        self._owed = 0  # tokens that were read, but not granted again

    def _taken(self, n: int) -> None:
        self._owed += n
        if 2 * self._owed >= self.window and self.reserved and not self.ended:
            self._registry.say(wire.CREDIT, wire.Credit(self.id, self._owed))
            self._owed = 0

    def _left(self) -> None:
        self._registry._left(self)


class StreamRegistry:
    """The streams of one runtime process. Only on the loop.

    limit: number of places. window: see `StreamHandle.window`. stray: dropped notifications, by reason. The batcher
    sets the hooks: say: sends a notification to the runtime. on_room: the number of free places may have changed.
    on_event: `backpressure` or `slowConsumer` of a stream. on_tokens: tokens of any stream came. on_completed: a stream
    completed that its reader had not closed, and that was not given up.
    """

    def __init__(self, limit: int = 64, window: int = wire.WINDOW) -> None:
        if not 1 <= limit <= 1_000_000:
            raise ConfigError(f"StreamRegistry.limit={limit!r}: must be in [1, 1000000] streams")
        if not 1 <= window <= 1_000_000:
            raise ConfigError(f"StreamRegistry.window={window!r}: must be in [1, 1000000] tokens")
        self.limit, self.window = limit, window
        self.on_room: Callable[[], object] = _dropped
        self.on_event: Callable[[StreamHandle, str], object] = _dropped
        self.on_tokens: Callable[[], object] = _dropped
        self.on_completed: Callable[[StreamHandle], object] = _dropped
        self.say: Callable[[str, Any], object] = _dropped
        self.stray: Counter[str] = Counter()
        self._streams: dict[str, StreamHandle] = {}  # registered; until the runtime, too, has ended them
        self._active = 0  # streams with a place
        self._idle = Idle(lambda: not self._active)
        self._prefix, self._number = secrets.token_hex(4), 0
        self._notes: dict[str, tuple[Reader, Callable[[StreamHandle, Any], None]]] = {
            wire.CHUNK: (Reader(wire.StreamChunk), self._chunk), wire.PROMPT: (Reader(wire.StreamPrompt), self._prompt),
            wire.STATS: (Reader(wire.StreamStats), self._stats), wire.EVENT: (Reader(wire.StreamEvent), self._event),
        }  # fmt: skip

    # -- for the batcher -----------------------------------------------------------------------------------------------

    def register(
        self, stream_id: str | None = None, partition: Hashable = None, bell: asyncio.Event | None = None
    ) -> StreamHandle:
        """A new stream, which holds no place yet. Close it, or read it to its end.

        stream_id: 1 to 200 printable characters; None makes one. Raises ConfigError.
        """
        if stream_id is None:
            self._number += 1
            stream_id = f"{self._prefix}-{self._number}"
        wire.check_name("stream_id", stream_id)
        if stream_id in self._streams:
            raise ConfigError(f"stream_id={stream_id!r}: in use by a stream that has not ended")
        handle = self._streams[stream_id] = StreamHandle(self, stream_id, partition, bell)
        return handle

    def find(self, stream_id: str) -> StreamHandle | None:
        """The registered stream of that id."""
        return self._streams.get(stream_id)

    def active_count(self) -> int:
        """Streams that hold a place."""
        return self._active

    def capacity(self) -> tuple[int, int]:
        """(places taken, places)."""
        return self._active, self.limit

    @property
    def unfinished(self) -> int:
        """Registered streams that have not ended."""
        return len(self._streams)

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no stream has a place, at most `timeout` seconds. Returns whether none has."""
        return await self._idle.wait(timeout)

    def reserve(self, handle: StreamHandle) -> None:
        """Give the stream a place, because its request is put into a message."""
        assert not handle.reserved, handle.id
        assert self._streams.get(handle.id) is handle, handle.id
        handle.reserved = True
        self._active += 1
        self.on_room()

    def release(self, handle: StreamHandle, error: ReflexError | None = None) -> None:
        """End a stream that the runtime does not have, and free its place. Nothing if that has been done."""
        if self._streams.get(handle.id) is handle:
            self._end(handle, error)

    def abandon(self, handle: StreamHandle, error: ReflexError) -> None:
        """End a stream that the runtime may have: cancel it there, and free its place at once."""
        if handle.reserved:
            self.say(wire.CANCEL, wire.StreamId(handle.id))
        self.release(handle, error)

    def give_up(self, handle: StreamHandle, error: ReflexError) -> None:
        """End the stream for its reader, and cancel it at the runtime, whose terminal event frees the place. Nothing if
        it has ended."""
        if handle.ended or self._streams.get(handle.id) is not handle:
            return
        if not handle.closed:
            self.say(wire.CANCEL, wire.StreamId(handle.id))
        handle.end(error)
        self._ended(handle)

    # -- from the client -----------------------------------------------------------------------------------------------

    def note(self, note: RpcMessage) -> None:
        if note.method not in self._notes:
            self.stray["unknown_method"] += 1
            return
        reader, take = self._notes[note.method]
        try:
            said = reader.read(note.params)
        except ProtocolError as error:
            self._malformed(note, error)
            return
        handle = self._streams.get(said.stream_id)
        if handle is None or not handle.reserved:
            self.stray["unknown_stream"] += 1
            return
        take(handle, said)

    def lost(self, error: ReflexError) -> None:
        """The runtime process was lost: end the streams with a place. Waiting requests go to the next process."""
        for handle in [handle for handle in self._streams.values() if handle.reserved]:
            self._end(handle, error)

    def snapshot(self) -> dict[str, Any]:
        return {
            "active": self._active,
            "limit": self.limit,
            "registered": len(self._streams),
            "unread_tokens": sum(handle.unread for handle in self._streams.values()),
            "stray_notifications": dict(self.stray),
        }

    # -- inside --------------------------------------------------------------------------------------------------------

    def _chunk(self, handle: StreamHandle, chunk: wire.StreamChunk) -> None:
        if handle.ended:
            self.stray["after_the_end"] += 1
            return
        self.on_tokens()
        handle.completion_tokens += len(chunk.tokens)
        if handle.unread + len(chunk.tokens) > WINDOWS * handle.window:
            self.give_up(handle, ProtocolError(f"the runtime is more than {WINDOWS} windows ahead of the reader"))
        elif chunk.tokens:
            handle.push(chunk.tokens)

    def _prompt(self, handle: StreamHandle, said: wire.StreamPrompt) -> None:
        handle.scores_left -= sum(1 + len(token.top) for token in said.tokens)
        if handle.ended:
            self.stray["after_the_end"] += 1
        elif handle.scores_left < 0:
            why = f"was not requested, or has more than {wire.MOST_SCORES} numbers"
            self.give_up(handle, ProtocolError(f"{wire.PROMPT}: {why}"))
        else:
            handle.prompt_scores += said.tokens

    def _stats(self, handle: StreamHandle, stats: wire.StreamStats) -> None:
        handle.prompt_tokens, handle.cached_tokens = stats.prompt_tokens, stats.cached_tokens
        handle.completion_tokens, handle.ttft_ms = stats.output_tokens, stats.ttft_ms
        if stats.ttft_ms is not None and stats.output_tokens > 1:
            handle.token_s = (stats.duration_ms - stats.ttft_ms) / (stats.output_tokens - 1) / 1000.0

    def _event(self, handle: StreamHandle, said: wire.StreamEvent) -> None:
        if said.event not in wire.TERMINAL:
            self.on_event(handle, said.event)
        elif said.event == "completed":
            if not handle.ended:
                self.on_completed(handle)
            self._end(handle, None)
        elif said.event == "cancelled":
            self._end(handle, Cancelled("the runtime cancelled the stream"))
        elif said.error is None:
            self._end(handle, ProcessorError("the runtime ended the stream without a reason"))
        else:
            self._end(handle, raised(said.error))

    def _malformed(self, note: RpcMessage, error: ProtocolError) -> None:
        """Tokens are missing: end the stream with an error, so that a part does not pass for the whole answer."""
        self.stray["malformed"] += 1
        log.warning("%s: %s", note.method, error.message)
        try:
            stream_id = _ID.read(note.params).stream_id
        except ProtocolError:
            return
        handle = self._streams.get(stream_id)
        if handle is not None and handle.reserved:
            self.give_up(handle, ProtocolError(f"{note.method}: {error.message}", INVALID_REQUEST))

    def _left(self, handle: StreamHandle) -> None:
        """The reader closed the stream before its end."""
        if handle.reserved:
            self.say(wire.CANCEL, wire.StreamId(handle.id))
        if handle.on_left is not None:
            handle.on_left()
        elif not handle.reserved:
            self._end(handle, None)

    def _end(self, handle: StreamHandle, error: ReflexError | None) -> None:
        """End a stream that the runtime does not have, or no longer, and free its place."""
        del self._streams[handle.id]
        if not handle.ended:
            handle.end(error)
            self._ended(handle)
        if handle.reserved:
            handle.reserved = False
            self._active -= 1
            self._idle.look()
            self.on_room()

    @staticmethod
    def _ended(handle: StreamHandle) -> None:
        on_end, handle.on_end, handle.on_left = handle.on_end, None, None  # the hooks may refer to it: break the cycle
        if on_end is not None:
            on_end()


_ID = Reader(wire.StreamId)


def _dropped(*ignored: object) -> None:
    """Does nothing: the hooks before a batcher sets them."""


# -- in the runtime process --------------------------------------------------------------------------------------------


class Outlet:
    """A stream of this process from its request to its terminal event.

    leader: an earlier stream with the same prompt. stream: None before the engine has it, and after its end. gone: why
    it will not begin. begun: set when the engine has it, or when it will not begin. scored: number of its prompt's
    scores that were sent; None: not requested, or all sent. awaited: a leader, all of whose scores must be sent before
    this stream's tokens. final: its last token was sent. stalled: `backpressure` was sent.
    """

    __slots__ = (
        "arrived", "awaited", "begun", "bell", "credits", "final", "first", "gone", "id", "leader", "scored", "stalled",
        "stream",
    )  # fmt: skip

    def __init__(
        self, params: wire.GenerateParams, leader: Outlet | None, arrived: float, rang: Callable[[Outlet], None]
    ) -> None:
        self.id, self.credits, self.leader, self.arrived = params.stream_id, params.credits, leader, arrived
        self.bell = _Bell(self, rang)
        self.begun = asyncio.Event()
        self.stream: OutputStream | None = None
        self.gone: ReflexError | None = None
        self.first: float | None = None  # when its first token was sent
        self.stalled = self.final = False
        self.scored: int | None = None if params.prompt_logprobs is None else 0
        self.awaited = leader if leader is not None and leader.scored is not None else None


class _Bell(asyncio.Event):
    """Calls `rang` instead of waking a waiter."""

    def __init__(self, outlet: Outlet, rang: Callable[[Outlet], None]) -> None:
        super().__init__()
        self._outlet, self._rang = outlet, rang

    def set(self) -> None:
        self._rang(self._outlet)


class Outlets:
    """The live streams of a process, by id. Only on the loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.live: dict[str, Outlet] = {}
        self.peer: Peer | None = None
        self._clock = clock
        self._news: dict[Outlet, None] = {}  # those that may have something to send, in order
        self._due = False  # whether `forward` is scheduled
        self._scores = 0  # numbers for tokens of prompts that may still be sent in this turn
        self._empty = asyncio.Event()
        self._empty.set()

    # -- beginning -----------------------------------------------------------------------------------------------------

    def add(self, params: wire.GenerateParams) -> Outlet:
        """A stream for this request. Raises ConfigError for a wrong id, ProtocolError (−32602) for one that is live,
        QueueFull if there are too many."""
        id = params.stream_id
        wire.check_name("stream_id", id)
        if id in self.live:
            raise ProtocolError(f"stream_id={id!r}: a stream of that name has not ended", INVALID_PARAMS)
        if len(self.live) >= MOST_STREAMS:
            raise QueueFull(f"{MOST_STREAMS} streams are live")
        leader = self.live.get(params.follows) if params.follows else None
        self.live[id] = outlet = Outlet(params, leader, self._clock(), self._rang)
        self._empty.clear()
        return outlet

    def begin(self, outlet: Outlet, stream: OutputStream) -> None:
        """Send the tokens of a stream from now on. If it was cancelled before, closes it and raises its error."""
        if outlet.gone is not None:
            _close(stream)
            raise outlet.gone
        outlet.stream = stream
        outlet.begun.set()
        self._rang(outlet)

    def drop(self, outlet: Outlet) -> None:
        """Forget a stream that does not begin. No notification is sent."""
        outlet.begun.set()
        self._forget(outlet)

    # -- for the reader ------------------------------------------------------------------------------------------------

    def credit(self, given: wire.Credit) -> None:
        """Add to a stream's credits; nothing if it has ended."""
        outlet = self.live.get(given.stream_id)
        if outlet is not None:
            outlet.credits += given.tokens
            self._rang(outlet)

    def cancel(self, id: str) -> bool:
        """Cancel a stream: it ends with the event `cancelled`, or if it has not begun, its request fails. Returns
        whether there was such a stream."""
        outlet = self.live.get(id)
        if outlet is None:
            return False
        if outlet.stream is None:
            outlet.gone = outlet.gone or Cancelled("cancelled before it began")
        else:
            self._end(outlet, "cancelled")
        return True

    # -- for the engine ------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Send the new tokens of all streams."""
        self._due = False
        peer = self.peer
        if peer is None or peer.congested:
            return  # `on_relief` calls it again
        news, self._news, self._scores = self._news, {}, SCORES_A_TURN
        for outlet in news:
            if outlet.stream is not None:
                try:
                    self._send(peer, outlet, outlet.stream)
                except ReflexError as error:
                    self._failed(peer, outlet, error)
                except Exception as error:
                    log.exception("stream %r: its engine failed", outlet.id)
                    self._failed(peer, outlet, ProcessorError(f"{type(error).__name__}: {error}"))
        peer.flush()

    def end(self, error: ReflexError) -> None:
        """End every stream with an error, also those that have not begun."""
        for outlet in list(self.live.values()):
            if outlet.stream is None:
                outlet.gone = outlet.gone or error
            else:
                self._end(outlet, "error", error)

    async def emptied(self) -> None:
        """Wait until no stream is live."""
        await self._empty.wait()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _rang(self, outlet: Outlet) -> None:
        if outlet.stream is None:
            return
        self._news[outlet] = None
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.forward)

    def _send(self, peer: Peer, outlet: Outlet, stream: OutputStream) -> None:
        unread = stream.unread
        if unread and not self._send_scores(peer, outlet, stream):
            return
        if unread and outlet.credits:
            outputs = stream.take(min(unread, outlet.credits))
            outlet.credits -= len(outputs)
            if outlet.first is None:
                outlet.first = self._clock()
            outlet.final = outputs[-1].finish is not None
            peer.notify(wire.CHUNK, wire.StreamChunk(outlet.id, outputs, outlet.final))
            unread = stream.unread
        if not unread:
            outlet.stalled = False
            if stream.ended:
                stream.take(1)  # raises the error that it ended with
                if not outlet.final:
                    peer.notify(wire.CHUNK, wire.StreamChunk(outlet.id, [], True))
                self._end(outlet, "completed")
        elif not stream.held:
            outlet.stalled = False
        elif not outlet.stalled:  # it has no credits; one event is sent each time that its engine holds it
            outlet.stalled = True
            peer.notify(wire.EVENT, wire.StreamEvent(outlet.id, "backpressure"))

    def _send_scores(self, peer: Peer, outlet: Outlet, stream: OutputStream) -> bool:
        """Send as many scores of its prompt as this turn has room for. Returns whether its tokens may be sent: its own
        scores and those of its leader are."""
        if outlet.scored is not None:
            begin = end = outlet.scored
            scores = stream.prompt_scores
            while end < len(scores) and self._scores > 0:
                self._scores -= 1 + len(scores[end].top)
                end += 1
            if end > begin:
                peer.notify(wire.PROMPT, wire.StreamPrompt(outlet.id, scores[begin:end]))
            outlet.scored = end
            if end < len(scores):
                self._rang(outlet)  # the rest in the next turn
                return False
            self._all_scored(outlet)
        return outlet.awaited is None

    def _all_scored(self, outlet: Outlet) -> None:
        """All scores of the stream were sent, or it has ended: its followers may send tokens."""
        outlet.scored = None
        for follower in [one for one in self.live.values() if one.awaited is outlet]:
            follower.awaited = None
            self._rang(follower)

    def _failed(self, peer: Peer, outlet: Outlet, error: ReflexError) -> None:
        if isinstance(error, Cancelled):  # the engine cancelled it because it was held too long
            peer.notify(wire.EVENT, wire.StreamEvent(outlet.id, "slowConsumer"))
        self._end(outlet, "error", error)

    def _end(self, outlet: Outlet, event: wire.EventName, error: ReflexError | None = None) -> None:
        """Send the last messages of a stream."""
        stream, outlet.stream = outlet.stream, None
        self._forget(outlet)
        if stream is None:
            return
        if not stream.ended:
            _close(stream)
        if self.peer is None:
            return
        ttft = None if outlet.first is None else (outlet.first - outlet.arrived) * 1e3
        took = (self._clock() - outlet.arrived) * 1e3
        prompt, output, cached = stream.prompt_tokens, stream.completion_tokens, stream.cached_tokens
        self.peer.notify(wire.STATS, wire.StreamStats(outlet.id, prompt, output, ttft, took, cached))
        self.peer.notify(wire.EVENT, wire.StreamEvent(outlet.id, event, None if error is None else error_of(error)))

    def _forget(self, outlet: Outlet) -> None:
        self.live.pop(outlet.id, None)
        self._news.pop(outlet, None)
        if outlet.scored is not None:
            self._all_scored(outlet)
        if not self.live:
            self._empty.set()


def _close(stream: OutputStream) -> None:
    try:
        stream.close()
    except Exception:
        log.exception("a stream could not be closed")
