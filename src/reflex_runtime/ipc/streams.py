"""Streams of tokens between a runtime process and its front: one credit scheme, both its ends.

The front (`StreamRegistry`) registers a stream before its request is queued, so that no early notification is lost. It
takes one of `limit` places when its request is put into a message: requests that wait hold none, and an urgent one gets
the next free place. The place is held until the terminal event of the stream, also when its reader left before: only
the runtime knows when the place is free. A reader that takes tokens grants as many more.

The runtime process (`Outlets`) sends each stream's tokens within its credits. An engine sets the bell of a stream that
has new tokens; at the end of that turn of the loop the tokens of all such streams are sent together, so that a step is
one write. Tokens of a stream without credits stay with its engine, which holds that stream alone. What a model says of
a prompt is sent before, a part in each turn of the loop, so that it delays no other stream's tokens.
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
    Notification,
    ProtocolError,
    Reader,
    error_of,
    raised,
)
from reflex_runtime.ipc.peer import Peer
from reflex_runtime.run.audience import Idle

log = logging.getLogger("reflex.ipc")

WINDOWS = 4  # that may be unread; a runtime that keeps to its credits stays within one
MOST_STREAMS = 10_000  # live at a time in a runtime process
SCORES_A_TURN = 4096  # numbers that are told of prompts in one turn of the loop: some 60 KB


_CLOSED = "closed before all of it was read"


class OutputStream:
    """One request's tokens, made in this process or in another: an async iterator for one reader. Producers push on the
    event loop and never wait. A subclass bounds the memory: its hooks are called when outputs were pushed and when they
    were taken, and it holds the producer of this stream alone.

    One that ends with an error raises it here, after what had come until then. A reader that stops before the end calls
    `close`. bell: set whenever there is something to read, for a reader of several streams. ended: whether no more will
    come; what came may still be unread.

    prompt_tokens, cached_tokens: of the prompt, and how many of them the prefix cache had; known once it has begun.
    prompt_scores: what the model says of the prompt's tokens from the second on, where that was asked for; complete
    before there is output. completion_tokens: so far. held: whether its engine makes no more until some are taken.
    """

    __slots__ = (
        "_bell", "_closed", "_error", "_outputs", "cached_tokens", "completion_tokens", "ended", "held",
        "prompt_scores", "prompt_tokens",
    )  # fmt: skip

    def __init__(self, bell: asyncio.Event | None, prompt_tokens: int = 0) -> None:
        self._bell = bell or asyncio.Event()
        self._outputs: deque[wire.TokenOutput] = deque()
        self._error: ReflexError | None = None
        self._closed = self.ended = False
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
        """Everything that has come, at least one output; empty at the end."""
        return self.take() if self._outputs or await self._more() else []

    def take(self, most: int | None = None) -> list[wire.TokenOutput]:
        """What has come, at most so many, without waiting. Raises the error of a stream that ended with one and is
        read."""
        if not self._outputs and self._error is not None:
            raise copy.copy(self._error)  # the traceback of a raised error holds this stream: avoid a reference cycle
        if most is None or most >= len(self._outputs):
            outputs = list(self._outputs)
            self._outputs.clear()
        else:
            outputs = [self._outputs.popleft() for _ in range(most)]
        if outputs:
            self._taken(len(outputs))
        return outputs

    def close(self) -> None:
        """Take the request back unless it has ended. Reading afterwards raises `Cancelled`, so a truncated answer does
        not pass for a complete one."""
        if self._closed:
            return
        self._closed = True
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
        """Outputs came. Dropped after `close`."""
        if not self._closed:
            self._outputs += outputs
            self._bell.set()
            self._pushed(len(outputs))

    def end(self, error: ReflexError | None = None) -> None:
        """It has ended; called exactly once."""
        assert not self.ended
        self.ended = True
        if error is not None and self._error is None:
            self._error = error
        self._bell.set()

    # -- hooks of a subclass that bounds it ----------------------------------------------------------------------------

    def _pushed(self, n: int) -> None:
        """So many outputs came."""

    def _taken(self, n: int) -> None:
        """So many outputs were read."""

    def _left(self) -> None:
        """The reader closed it before its end."""


async def merged(
    streams: Sequence[OutputStream], bell: asyncio.Event
) -> AsyncIterator[tuple[int, list[wire.TokenOutput]]]:
    """What the streams say, as (number of the stream, its new outputs). bell: the one they were submitted with.

    Raises the first error that one of them ends with.
    """
    still = dict(enumerate(streams))
    while still:
        bell.clear()
        for number, stream in list(still.items()):
            ended = stream.ended  # asked first: what comes later rings again
            outputs = stream.take()
            if outputs:
                yield number, outputs
            if ended:
                stream.take()
                del still[number]
        if still:
            await bell.wait()


class StreamHandle(OutputStream):
    """One stream, for its one reader. See `OutputStream`; made by `StreamRegistry.register`.

    ttft_ms: final, as what `OutputStream` has, once it has ended. scores_left: numbers that may still come of
    `prompt_scores`, 0 where nothing was asked for. reserved: whether
    it holds a place. window: tokens that the runtime may be ahead of the reader. token_s: seconds from one token to the
    next, once it has ended. For the batcher: partition; on_left: called when its reader leaves before it ended; on_end:
    called once, when it ends.
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
        self._owed = 0  # read, and not granted again

    @property
    def closed(self) -> bool:
        """Whether its reader has left."""
        return self._closed

    def _taken(self, n: int) -> None:
        self._owed += n
        if 2 * self._owed >= self.window and self.reserved and not self.ended:
            self._registry.say(wire.CREDIT, wire.Credit(self.id, self._owed))
            self._owed = 0

    def _left(self) -> None:
        self._registry._left(self)


class StreamRegistry:
    """The streams towards one runtime process. Only on the loop.

    limit: streams that may hold a place at a time. window: see `StreamHandle.window`.
    say: sends the runtime a notification. on_room: called when the number of free places may have changed.
    on_event: called with every `backpressure` and `slowConsumer` of a stream that holds a place. on_tokens: called
    when tokens of a stream come. on_completed: called with every stream that completes while it is read.
    stray: notifications that were dropped, by reason: unknown or ended streams, unknown methods, malformed ones.
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
        self._streams: dict[str, StreamHandle] = {}  # registered and not ended, or ended for its reader alone
        self._holders: dict[StreamHandle, None] = {}  # of a place
        self._idle = Idle(lambda: not self._holders)
        self._prefix, self._number = secrets.token_hex(4), 0
        self._notes: dict[str, tuple[Reader, Callable[[StreamHandle, Any], None]]] = {
            wire.CHUNK: (Reader(wire.StreamChunk), self._chunk), wire.PROMPT: (Reader(wire.StreamPrompt), self._prompt),
            wire.STATS: (Reader(wire.StreamStats), self._stats), wire.EVENT: (Reader(wire.StreamEvent), self._event),
        }  # fmt: skip

    # -- for the batcher -----------------------------------------------------------------------------------------------

    def register(
        self, stream_id: str | None = None, partition: Hashable = None, bell: asyncio.Event | None = None
    ) -> StreamHandle:
        """A stream that holds no place yet. Close it, or read it to its end.

        stream_id: 1 to 200 printable characters; None makes one up. Raises ConfigError.
        """
        if stream_id is None:
            self._number += 1
            stream_id = f"{self._prefix}-{self._number}"
        elif not wire.is_id(stream_id):
            raise ConfigError(f"stream_id={stream_id!r:.220}: must be 1 to {wire.LONGEST_ID} printable characters")
        if stream_id in self._streams:
            raise ConfigError(f"stream_id={stream_id!r}: in use by a stream that has not ended")
        handle = self._streams[stream_id] = StreamHandle(self, stream_id, partition, bell)
        return handle

    def find(self, stream_id: str) -> StreamHandle | None:
        """The stream of that name that has not ended."""
        return self._streams.get(stream_id)

    def active_count(self) -> int:
        """Streams that hold a place."""
        return len(self._holders)

    def capacity(self) -> tuple[int, int]:
        """(places taken, places)."""
        return len(self._holders), self.limit

    @property
    def unfinished(self) -> int:
        """Streams that are registered and have not ended."""
        return len(self._streams)

    async def wait_idle(self, timeout: float) -> bool:
        """Until no stream holds a place, `timeout` seconds at most; whether none does."""
        return await self._idle.wait(timeout)

    def reserve(self, handle: StreamHandle) -> None:
        """Its request is put into a message: it holds a place until its terminal event, or `release`."""
        assert not handle.reserved, handle.id
        assert self._streams.get(handle.id) is handle, handle.id
        handle.reserved = True
        self._holders[handle] = None
        self.on_room()

    def release(self, handle: StreamHandle, error: ReflexError | None = None) -> None:
        """The runtime does not have it: its place is free, and it ends with `error`. Nothing when it has ended."""
        if self._streams.get(handle.id) is handle:
            self._end(handle, error)

    def abandon(self, handle: StreamHandle, error: ReflexError) -> None:
        """It is not known whether the runtime has it: it is cancelled there, and its place is free at once."""
        if handle.reserved:
            self.say(wire.CANCEL, wire.StreamId(handle.id))
        self.release(handle, error)

    def give_up(self, handle: StreamHandle, error: ReflexError) -> None:
        """It ends with `error` for its reader and is cancelled at the runtime, which frees its place. Nothing when it
        has ended."""
        if handle.ended or self._streams.get(handle.id) is not handle:
            return
        if not handle.closed:
            self.say(wire.CANCEL, wire.StreamId(handle.id))
        handle.end(error)
        self._ended(handle)

    # -- from the client -----------------------------------------------------------------------------------------------

    def note(self, note: Notification) -> None:
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
        """The runtime process was lost: streams that hold a place end with `error`. Requests that wait go to the next
        process."""
        for handle in [handle for handle in self._streams.values() if handle.reserved]:
            self._end(handle, error)

    def snapshot(self) -> dict[str, Any]:
        return {
            "active": len(self._holders),
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
            self.give_up(handle, ProtocolError(f"the runtime is over {WINDOWS} windows ahead of the reader"))
        elif chunk.tokens:
            handle.push(chunk.tokens)

    def _prompt(self, handle: StreamHandle, said: wire.StreamPrompt) -> None:
        handle.scores_left -= sum(1 + len(token.top) for token in said.tokens)
        if handle.ended:
            self.stray["after_the_end"] += 1
        elif handle.scores_left < 0:
            told = f"not asked for, or more than {wire.MOST_SCORES} numbers"
            self.give_up(handle, ProtocolError(f"{wire.PROMPT}: {told}"))
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
            self._end(handle, Cancelled("it was cancelled"))
        elif said.error is None:
            self._end(handle, ProcessorError("the runtime ended it and did not say why"))
        else:
            self._end(handle, raised(said.error))

    def _malformed(self, note: Notification, error: ProtocolError) -> None:
        """Tokens are missing now: the stream ends with an error, so that a part does not pass for a whole answer."""
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
        """Its reader closed it before it ended."""
        if handle.reserved:
            self.say(wire.CANCEL, wire.StreamId(handle.id))
        if handle.on_left is not None:
            handle.on_left()
        elif not handle.reserved:
            self._end(handle, None)

    def _end(self, handle: StreamHandle, error: ReflexError | None) -> None:
        """The runtime does not have the stream (any more): end it, and free its place."""
        del self._streams[handle.id]
        if not handle.ended:
            handle.end(error)
            self._ended(handle)
        if handle.reserved:
            handle.reserved = False
            del self._holders[handle]
            self._idle.look()
            self.on_room()

    @staticmethod
    def _ended(handle: StreamHandle) -> None:
        on_end, handle.on_end, handle.on_left = handle.on_end, None, None  # they may hold it: break the reference cycle
        if on_end is not None:
            on_end()


_ID = Reader(wire.StreamId)


def _dropped(*told: object) -> None:
    """A hook before there is a batcher."""


# -- in the runtime process --------------------------------------------------------------------------------------------


class Outlet:
    """A stream from its request to its terminal event.

    leader: a stream asked for before it, with the same prompt. stream: None until the engine has taken it. gone: why it
    will not begin. begun: set when that is decided. told: tokens of its prompt that were told of, None where that is
    not asked for. first_told: a leader that is not told of yet; behind: the streams that wait for this one so.
    """

    __slots__ = (
        "arrived", "begun", "behind", "bell", "credits", "final", "first", "first_told", "gone", "id",
        "leader", "stalled", "stream", "told",
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
        self.told: int | None = None if params.prompt_logprobs is None else 0
        self.behind: list[Outlet] = []
        self.first_told = leader if leader is not None and leader.told is not None else None
        if self.first_told is not None:
            self.first_told.behind.append(self)


class _Bell(asyncio.Event):
    """Calls `rang` with its outlet in place of waking a waiter."""

    def __init__(self, outlet: Outlet, rang: Callable[[Outlet], None]) -> None:
        super().__init__()
        self._outlet, self._rang = outlet, rang

    def set(self) -> None:
        self._rang(self._outlet)


class Outlets:
    """The live streams of a process, by id. Everything happens on the loop; nothing waits but `emptied`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.live: dict[str, Outlet] = {}
        self.peer: Peer | None = None
        self._clock = clock
        self._news: dict[Outlet, None] = {}
        self._asked = False
        self._scores = 0  # numbers of prompts that may still be told in this turn
        self._empty = asyncio.Event()
        self._empty.set()

    # -- beginning -----------------------------------------------------------------------------------------------------

    def add(self, params: wire.GenerateParams) -> Outlet:
        """A stream was asked for. Raises ProtocolError (−32602) for an id that cannot be or is live, QueueFull."""
        id = params.stream_id
        if not wire.is_id(id):
            rule = f"must be 1 to {wire.LONGEST_ID} printable characters"
            raise ProtocolError(f"stream_id={id[:50]!r}: {rule}", INVALID_PARAMS)
        if id in self.live:
            raise ProtocolError(f"stream_id={id!r}: a stream of that name has not ended", INVALID_PARAMS)
        if len(self.live) >= MOST_STREAMS:
            raise QueueFull(f"{MOST_STREAMS} streams are live")
        leader = self.live.get(params.follows) if params.follows else None
        self.live[id] = outlet = Outlet(params, leader, self._clock(), self._rang)
        self._empty.clear()
        return outlet

    def begin(self, outlet: Outlet, stream: OutputStream) -> None:
        """Its engine has started it: from now on its tokens are sent. Raises the error if it was taken back before."""
        if outlet.gone is not None:
            _close(stream)
            raise outlet.gone
        outlet.stream = stream
        outlet.begun.set()
        self._rang(outlet)

    def drop(self, outlet: Outlet) -> None:
        """The stream does not begin: its request is answered with an error, and no notification is sent."""
        outlet.begun.set()
        self._forget(outlet)

    # -- the reader's --------------------------------------------------------------------------------------------------

    def credit(self, given: wire.Credit) -> None:
        """So many more tokens may be sent. Ignored for a stream that has ended."""
        if not 1 <= given.tokens <= wire.MOST_CREDITS:
            raise ProtocolError(f"tokens={given.tokens}: must be in [1, {wire.MOST_CREDITS}]", INVALID_PARAMS)
        outlet = self.live.get(given.stream_id)
        if outlet is not None:
            outlet.credits += given.tokens
            self._rang(outlet)

    def cancel(self, id: str) -> bool:
        """Take a stream back: it ends with the event `cancelled`, or its request with that error if it has not begun.
        Whether there was such a stream."""
        outlet = self.live.get(id)
        if outlet is None:
            return False
        if outlet.stream is None:
            outlet.gone = outlet.gone or Cancelled("cancelled before it began")
        else:
            self._end(outlet, "cancelled")
        return True

    # -- the engine's --------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Send the new tokens of all streams."""
        self._asked = False
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
        """End every stream with an error. Those that have not begun never will."""
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
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self.forward)

    def _send(self, peer: Peer, outlet: Outlet, stream: OutputStream) -> None:
        unread = stream.unread
        if unread and not self._told(peer, outlet, stream):
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
        elif not outlet.stalled:  # it has no credits; one event for each time that its engine holds it
            outlet.stalled = True
            peer.notify(wire.EVENT, wire.StreamEvent(outlet.id, "backpressure"))

    def _told(self, peer: Peer, outlet: Outlet, stream: OutputStream) -> bool:
        """Tell of its prompt, as much as this turn has room for. Whether its tokens may be sent: all was told, also by
        the stream that it follows."""
        if outlet.told is not None:
            begin = end = outlet.told
            scores = stream.prompt_scores
            while end < len(scores) and self._scores > 0:
                self._scores -= 1 + len(scores[end].top)
                end += 1
            if end > begin:
                peer.notify(wire.PROMPT, wire.StreamPrompt(outlet.id, scores[begin:end]))
            outlet.told = end
            if end < len(scores):
                self._rang(outlet)  # the rest in the next turn
                return False
            outlet.told = None
            self._go_on(outlet)
        return outlet.first_told is None

    def _go_on(self, outlet: Outlet) -> None:
        """Those that follow it wait no longer."""
        behind, outlet.behind = outlet.behind, []
        for follower in behind:
            follower.first_told = None
            self._rang(follower)

    def _failed(self, peer: Peer, outlet: Outlet, error: ReflexError) -> None:
        if isinstance(error, Cancelled):  # by its engine, which has held it too long
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
        self._go_on(outlet)
        if not self.live:
            self._empty.set()


def _close(stream: OutputStream) -> None:
    try:
        stream.close()
    except Exception:
        log.exception("a stream could not be closed")
