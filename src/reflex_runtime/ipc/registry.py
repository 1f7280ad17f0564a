"""The front's side of the streams of one runtime process, and the places that they hold there.

A stream is registered before its request is queued, so that no early notification is lost. It takes one of `limit`
places when its request is put into a message: requests that wait hold none, and an urgent one gets the next free place.
The place is held until the terminal event of the stream, also when its reader left before: only the runtime knows when
the place is free.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from reflex_runtime.core.errors import Cancelled, ConfigError, ProcessorError, ReflexError
from reflex_runtime.ipc import messages as wire
from reflex_runtime.ipc.engine import OutputStream
from reflex_runtime.ipc.frames import INVALID_REQUEST, Notification, ProtocolError, Reader, raised
from reflex_runtime.run.audience import Idle

log = logging.getLogger("reflex.ipc")

WINDOWS = 4  # that may be unread; a runtime that keeps to its credits stays within one


class StreamHandle(OutputStream):
    """One stream, for its one reader. See `Stream`; made by `StreamRegistry.register`.

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
