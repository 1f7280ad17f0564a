"""How tokens leave a runtime process: each stream within the credits that its reader has given.

An engine rings the bell of a stream that has news. At the end of that turn of the loop everything that rang is passed
on at once, so that a step is one write. A stream without credits leaves its tokens with its engine, which holds it
alone: nothing is kept here. What is done for a token costs a few microseconds; nothing is done for one that has none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from reflex_runtime.core.errors import Cancelled, ProcessorError, QueueFull, ReflexError
from reflex_runtime.ipc.engine import Engine, EngineStream
from reflex_runtime.ipc.frames import INVALID_PARAMS, ProtocolError, error_of
from reflex_runtime.ipc.messages import (
    CHUNK,
    EVENT,
    MOST_CREDITS,
    STATS,
    EventName,
    GenerateParams,
    StreamChunk,
    StreamEvent,
    StreamStats,
    Token,
)
from reflex_runtime.ipc.peer import Peer

log = logging.getLogger("reflex.ipc")

MOST_STREAMS = 10_000  # live at a time
LONGEST_ID = 200  # characters


class Outlet:
    """A stream from its request to its terminal event.

    leader: a stream asked for before it, with the same prompt. stream: None until its engine has taken it. gone: why it
    will not begin. begun: set when that is decided.
    """

    __slots__ = (
        "arrived", "begun", "bell", "credits", "engine", "final", "first", "gone", "id", "leader", "stalled", "stream",
    )  # fmt: skip

    def __init__(
        self, params: GenerateParams, engine: Engine, leader: Outlet | None, arrived: float,
        rang: Callable[[Outlet], None],
    ) -> None:  # fmt: skip
        self.id, self.credits = params.stream_id, params.credits
        self.engine, self.leader, self.arrived = engine, leader, arrived
        self.bell = _Bell(self, rang)
        self.begun = asyncio.Event()
        self.stream: EngineStream | None = None
        self.gone: ReflexError | None = None
        self.first: float | None = None  # when its first token was passed on
        self.stalled = self.final = False


class _Bell(asyncio.Event):
    """Says whose it is when it rings. Nobody waits for it."""

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
        self._empty = asyncio.Event()
        self._empty.set()

    # -- beginning -----------------------------------------------------------------------------------------------------

    def add(self, params: GenerateParams, engine: Engine) -> Outlet:
        """A stream was asked for. Raises ProtocolError (−32602) for an id that cannot be or is live, QueueFull."""
        id = params.stream_id
        if not (0 < len(id) <= LONGEST_ID and id.isprintable()):
            rule = f"must be 1 to {LONGEST_ID} printable characters"
            raise ProtocolError(f"stream_id={id[:50]!r}: {rule}", INVALID_PARAMS)
        if id in self.live:
            raise ProtocolError(f"stream_id={id!r}: a stream of that name has not ended", INVALID_PARAMS)
        if len(self.live) >= MOST_STREAMS:
            raise QueueFull(f"{MOST_STREAMS} streams are live")
        leader = self.live.get(params.follows) if params.follows else None
        if leader is not None and leader.engine is not engine:
            leader = None
        self.live[id] = outlet = Outlet(params, engine, leader, self._clock(), self._rang)
        self._empty.clear()
        return outlet

    def begin(self, outlet: Outlet, stream: EngineStream) -> None:
        """Its engine has taken it: from now on its tokens are passed on. Raises why it is not wanted any more."""
        if outlet.gone is not None:
            _close(stream)
            raise outlet.gone
        outlet.stream = stream
        outlet.begun.set()
        self._rang(outlet)

    def drop(self, outlet: Outlet) -> None:
        """It does not begin: whoever asked for it is told in the answer, and nothing is said of it here."""
        outlet.begun.set()
        self._forget(outlet)

    # -- the reader's --------------------------------------------------------------------------------------------------

    def credit(self, id: str, tokens: int) -> None:
        """So many more may be sent. Of a stream that has ended: nothing."""
        if not 1 <= tokens <= MOST_CREDITS:
            raise ProtocolError(f"tokens={tokens}: must be in [1, {MOST_CREDITS}]", INVALID_PARAMS)
        outlet = self.live.get(id)
        if outlet is not None:
            outlet.credits += tokens
            self._rang(outlet)

    def cancel(self, id: str) -> bool:
        """Take a stream back: event `cancelled`, or an answer that says so when it has not begun. Whether there was
        such a stream."""
        outlet = self.live.get(id)
        if outlet is None:
            return False
        if outlet.stream is None:
            outlet.gone = outlet.gone or Cancelled("cancelled before it began")
        else:
            self._end(outlet, "cancelled")
        return True

    # -- the engines' --------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Pass on what there is."""
        self._asked = False
        peer = self.peer
        if peer is None or peer.congested:
            return  # asked again by its relief
        news, self._news = self._news, {}
        for outlet in news:
            if outlet.stream is not None:
                try:
                    self._pass_on(peer, outlet, outlet.stream)
                except ReflexError as error:
                    self._failed(peer, outlet, error)
                except Exception as error:
                    log.exception("stream %r: its engine failed", outlet.id)
                    self._failed(peer, outlet, ProcessorError(f"{type(error).__name__}: {error}"))
        peer.flush()

    def end(self, error: ReflexError, engine: Engine | None = None) -> None:
        """End every stream, or every one of an engine, with an error. Those that have not begun never will."""
        for outlet in list(self.live.values()):
            if engine is None or outlet.engine is engine:
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

    def _pass_on(self, peer: Peer, outlet: Outlet, stream: EngineStream) -> None:
        unread = stream.unread
        if unread and outlet.credits:
            outputs = stream.take(min(unread, outlet.credits))
            outlet.credits -= len(outputs)
            if outlet.first is None:
                outlet.first = self._clock()
            outlet.final = outputs[-1].finish is not None
            tokens = [Token(o.text, o.token_id, o.logprob, o.top, o.held, o.finish) for o in outputs]
            peer.notify(CHUNK, StreamChunk(outlet.id, tokens, outlet.final))
            unread = stream.unread
        if not unread:
            outlet.stalled = False
            if stream.ended:
                stream.take(1)  # raises the error that it ended with
                if not outlet.final:
                    peer.notify(CHUNK, StreamChunk(outlet.id, [], True))
                self._end(outlet, "completed")
        elif not stream.held:
            outlet.stalled = False
        elif not outlet.stalled:  # without credits, then; one stall lasts until its engine goes on with it
            outlet.stalled = True
            peer.notify(EVENT, StreamEvent(outlet.id, "backpressure"))

    def _failed(self, peer: Peer, outlet: Outlet, error: ReflexError) -> None:
        if isinstance(error, Cancelled):  # nobody did here: its engine has waited long enough for a reader
            peer.notify(EVENT, StreamEvent(outlet.id, "slowConsumer"))
        self._end(outlet, "error", error)

    def _end(self, outlet: Outlet, event: EventName, error: ReflexError | None = None) -> None:
        """The last that is said of a stream."""
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
        self.peer.notify(STATS, StreamStats(outlet.id, prompt, output, ttft, took, cached))
        self.peer.notify(EVENT, StreamEvent(outlet.id, event, None if error is None else error_of(error)))

    def _forget(self, outlet: Outlet) -> None:
        self.live.pop(outlet.id, None)
        self._news.pop(outlet, None)
        if not self.live:
            self._empty.set()


def _close(stream: EngineStream) -> None:
    try:
        stream.close()
    except Exception:
        log.exception("a stream could not be closed")
