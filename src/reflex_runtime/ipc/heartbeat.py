"""Notices a runtime process that hangs: asks it again and again, and ends its connection when it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from reflex_runtime.core.errors import ProcessorHung
from reflex_runtime.ipc.frames import ProtocolError, Reader
from reflex_runtime.ipc.messages import INFO, Info
from reflex_runtime.ipc.peer import Peer, RawAnswer
from reflex_runtime.pacing import Pulse

_INFO = Reader(Info)


class Heartbeat:
    """Begins at once. every: seconds between two questions, 0 for none. limit: seconds that one may stay unanswered.
    told: gets what the process says of itself."""

    def __init__(self, peer: Peer, every: float, limit: float, told: Callable[[Info], None]) -> None:
        self._peer, self._told, self._limit = peer, told, limit
        self._pulse = Pulse(every, limit)
        self._timer: asyncio.TimerHandle | None = None
        if every > 0:
            self._ask()

    @property
    def hung(self) -> bool:
        """Whether it has ended the connection."""
        return self._pulse.over

    def stop(self) -> None:
        """The connection has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def _ask(self) -> None:
        answer = self._peer.call(INFO, {})
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # `_tick` looks at it
        self._wait(answer)

    def _wait(self, answer: asyncio.Future[RawAnswer]) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._pulse.next(loop.time()), self._tick, answer)

    def _tick(self, answer: asyncio.Future[RawAnswer]) -> None:
        if not self._pulse.tick(answer.done(), asyncio.get_running_loop().time()):
            self._peer.abort(ProcessorHung(f"nothing was answered for {self._limit:g} s"))
        elif not answer.done():
            self._wait(answer)
        else:
            if answer.exception() is None:
                with contextlib.suppress(ProtocolError):  # any answer shows that it is alive
                    self._told(_INFO.read(answer.result().raw, answer.result().codec))
            self._ask()
