"""Limits on the connections of a server: their number, and the time for each phase.

A connection waits for a request (idle), receives a request's head or body, does not read its answer (slow), or is being
answered, which is limited elsewhere. A connection that takes too long is closed. If there are too many, the one that
has been idle for longest is closed, then one that sends slowly; if there is neither, the new one is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Protocol

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.drivers.oldest import Oldest
from reflex_runtime.web.errors import Overloaded, TooSlow

log = logging.getLogger("reflex.server")

STALLED = 1.0  # seconds without a byte after which a body may be given up for others
CLOSES = 5.0  # seconds that the other side may take to close a connection
UNREAD = 180.0  # seconds that an answer may wait for its client to read
RESERVE = 64  # file descriptors left to models, recordings and the like
LEAST = 16  # connections, even with very few descriptors
_TICK = 0.01  # seconds; loops count in milliseconds, and an early timer would be set again at once


class Phase(Enum):
    """What a connection is doing; each phase has a time limit. CLOSING: it waits for the other side to close. ANSWERED:
    its request is being answered."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    SLOW = "slow"
    CLOSING = "closing"
    ANSWERED = "answered"

    __hash__ = object.__hash__  # Enum's own is a Python function, and every request looks phases up


# Every request names these: in CPython 3.11 looking a member up on its enum takes 75 ns.
IDLE, HEAD, BODY, SLOW, CLOSING, ANSWERED = Phase


class Connection(Protocol):
    """phase: set by `Connections`. heard: when its last byte came, by the loop's clock."""

    phase: Phase

    @property
    def heard(self) -> float: ...

    def cut(self, error: ReflexError) -> None:
        """End the connection. error: the answer, if a request has begun to arrive."""

    def shutdown(self) -> None:
        """Close after the answer in progress."""

    def give_up(self) -> asyncio.Task[None] | None:
        """Close without sending waiting data. Returns the requests that still run for it."""


class Seldom:
    """Limits repeated log lines: True for an event if none came in the minute before it."""

    QUIET = 60.0

    def __init__(self) -> None:
        self._last = -inf

    def first(self) -> bool:
        now = time.monotonic()
        before, self._last = self._last, now
        return now - before > self.QUIET


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """most: connections. The others are seconds: idle between requests, and for a request's head and body."""

    most: int
    idle: float
    head: float
    body: float


def _nothing() -> None:
    return


class Connections:
    """The connections of one server, on its loop.

    read: called before connections are closed because they wait: something may have come on one of them.
    """

    def __init__(self, limits: ConnectionLimits, read: Callable[[], None] = _nothing) -> None:
        self.limits, self.read = limits, read
        self._loop: asyncio.AbstractEventLoop | None = None
        self._all: set[Connection] = set()
        self._in: dict[Phase, Oldest[Connection]] = {phase: Oldest() for phase in Phase if phase is not ANSWERED}
        self._most = {
            IDLE: limits.idle, HEAD: limits.head, BODY: limits.body, SLOW: UNREAD, CLOSING: CLOSES,
        }  # fmt: skip
        self._timer: asyncio.TimerHandle | None = None
        self._full, self._late = Seldom(), Seldom()
        self._emptied: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._all)

    def all(self) -> list[Connection]:
        return list(self._all)

    def enter(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """Add a connection, on the server's loop. Raises Overloaded if there is no room and all are being answered."""
        self._loop = loop
        connection.phase = ANSWERED
        if len(self._all) >= self.limits.most:
            self._make_room()
        self._all.add(connection)
        self.move(connection, IDLE)

    def move(self, connection: Connection, phase: Phase) -> None:
        """Begin another phase of the connection, or the same one again."""
        if connection not in self._all:
            return
        before = connection.phase
        if before is not phase and before is not ANSWERED:
            self._in[before].drop(connection)
        connection.phase = phase
        if phase is not ANSWERED:
            now = self._time()
            self._in[phase].put(connection, now)
            self._arm(now + self._most[phase])

    def leave(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection.phase is not ANSWERED:
            self._in[connection.phase].drop(connection)
        if not self._all and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._all and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    async def wait_empty(self) -> None:
        """Wait until none is left."""
        if self._all:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

    def cut_stalled(self) -> None:
        """End the oldest of the stalled bodies, if there is one."""
        until = self._time() - STALLED
        stalled = self._in[BODY].first(lambda connection: connection.heard <= until)
        if stalled is not None:
            self._cut(stalled, TooSlow("the request stopped coming, and others need its memory"))

    def _make_room(self) -> None:
        self.read()
        if len(self._all) < self.limits.most:
            return
        waiting = (self._in[phase].first() for phase in (CLOSING, IDLE, HEAD, BODY, SLOW))
        oldest = next((connection for connection in waiting if connection is not None), None)
        most = self.limits.most
        if self._full.first():
            log.warning(
                "%d connections are open, as many as there may be (--max-connections): from now on %s",
                most, "new ones are refused" if oldest is None else "those that have been idle for longest are closed",
            )  # fmt: skip
        if oldest is None:
            raise Overloaded(f"{most} connections are open and all of them are being answered", retry_after=1.0)
        self._cut(oldest, Overloaded(f"{most} connections are open, and this one was slow", retry_after=1.0))

    def _cut(self, connection: Connection, error: ReflexError) -> None:
        """Close a connection. It no longer counts, even if closing takes a while."""
        self.leave(connection)
        connection.cut(error)

    def _time(self) -> float:
        return 0.0 if self._loop is None else self._loop.time()

    # -- time ----------------------------------------------------------------------------------------------------------

    def _arm(self, at: float) -> None:
        """Set the one timer of all connections to the next time limit."""
        if self._timer is None or at < self._timer.when() - _TICK:
            if self._timer is not None:
                self._timer.cancel()
            assert self._loop is not None
            self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        self.read()
        now = self._time()
        for phase, waiting in self._in.items():
            for connection in waiting.due(now - self._most[phase] + _TICK):
                self._end(connection, phase)
        dues = [since + self._most[phase] for phase, w in self._in.items() if (since := w.since) is not None]
        if dues:
            self._arm(min(dues))

    def _end(self, connection: Connection, phase: Phase) -> None:
        seconds = self._most[phase]
        if phase not in (IDLE, CLOSING) and self._late.first():
            told = "a connection was too slow (%s, %g s) and is closed (repeats are not logged)"
            log.warning(told, phase.value, seconds)
        self._cut(connection, TooSlow(f"the {phase.value} of the request did not come within {seconds:g} s"))


class ConnectionSettings(Protocol):
    """The settings that bound connections."""

    @property
    def max_connections(self) -> int: ...
    @property
    def idle_timeout_s(self) -> float: ...
    @property
    def head_timeout_s(self) -> float: ...
    @property
    def body_timeout_s(self) -> float: ...


def connections_of(config: ConnectionSettings, read: Callable[[], None] = _nothing) -> Connections:
    """Those of a server with these settings. read: see `Connections`."""
    most = most_connections(config.max_connections)
    limits = ConnectionLimits(most, config.idle_timeout_s, config.head_timeout_s, config.body_timeout_s)
    return Connections(limits, read)


def most_connections(asked: int) -> int:
    """The setting, or fewer if the process has fewer file descriptors."""
    try:
        import resource

        allowed, taken = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/dev/fd"))
    except (ImportError, OSError):
        return asked
    if allowed == resource.RLIM_INFINITY or asked <= allowed - taken - RESERVE:
        return asked
    most = max(LEAST, allowed - taken - RESERVE)
    log.warning("--max-connections=%d: the process may have %d open files, so it is %d", asked, allowed, most)
    return most
