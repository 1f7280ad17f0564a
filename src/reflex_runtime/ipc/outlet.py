"""How tokens leave a runtime process: each stream within the credits of its reader.

An engine sets the bell of a stream that has new tokens. At the end of that turn of the loop the tokens of all such
streams are sent together, so that a step is one write. Tokens of a stream without credits stay with its engine, which
holds that stream alone. What a model says of a prompt is sent before, a part in each turn of the loop, so that it
delays no other stream's tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from reflex_runtime.core.errors import Cancelled, ProcessorError, QueueFull, ReflexError
from reflex_runtime.ipc import messages as wire
from reflex_runtime.ipc.engine import OutputStream
from reflex_runtime.ipc.frames import INVALID_PARAMS, ProtocolError, error_of
from reflex_runtime.ipc.peer import Peer

log = logging.getLogger("reflex.ipc")

MOST_STREAMS = 10_000  # live at a time
SCORES_A_TURN = 4096  # numbers that are told of prompts in one turn of the loop: some 60 KB


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
