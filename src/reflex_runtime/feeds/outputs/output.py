"""Sends results to a receiver that may be slow or away: a bounded queue, a thread, figures, a bounded end."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.outputs.json_lines import line_of
from reflex_runtime.feeds.runtime.health import OUTPUT_DROPS, OutputSnapshot
from reflex_runtime.feeds.runtime.pipeline import Result
from reflex_runtime.feeds.sources.video import without_secrets
from reflex_runtime.pacing import Throttle
from reflex_runtime.run.modules import in_one_line
from reflex_runtime.run.processor import WALL
from reflex_runtime.settings.declare import one_line

log = logging.getLogger("reflex.feeds.outputs")

WAITING: Final = 1024  # results that wait in an output
GRACE_S: Final = 1.0  # for a thread to end after its time is over
SELDOM: Final = 30.0  # seconds between two log lines on failures
LONGEST: Final = 2000  # characters of an address


class ResultLine(NamedTuple):
    """A result as its line, without the picture, which a waiting result must not keep."""

    feed: str
    data: bytes


class ResultOutput:
    """Sends results to one receiver, on its own thread. Every result is counted in exactly one place.

    name: in metrics and logs. where: the receiver, without secrets. capacity: results that may wait; with more the
    oldest is dropped. take: the sink for feeds, any number of them. news: notified when a result comes, when no more
    are taken, and by the output when `ready` of `_next` may have changed. A `Runtime` starts and stops it.
    """

    kind: ClassVar[str]

    def __init__(self, where: str, capacity: int = WAITING, name: str = "") -> None:
        self.name, self.where = name or self.kind, where
        self.take = self._take  # one object: a shared sink is recognised by its identity
        self.news = threading.Condition()
        self._capacity = capacity
        self._waiting: deque[ResultLine] = deque()
        self._in_hand = 0  # results that `_next` returned and that are neither sent nor dropped yet
        self._taken = self._sent_count = 0
        self._drops = dict.fromkeys(OUTPUT_DROPS, 0)
        self._until: float | None = None  # end of the time for sending what waits, once no more results are taken
        self._over = False  # everything is counted
        self._state = "connecting"
        self._error: str | None = None
        self._retries = 0
        self._trouble = Throttle(SELDOM)
        self._thread = threading.Thread(target=self._run, name=f"reflex-{self.name}", daemon=True)

    def start(self) -> None:
        """Start its thread."""
        self._thread.start()

    def signal(self, timeout: float) -> None:
        """Take no more results, and send those that wait within `timeout` seconds. The earliest end counts."""
        with self.news:
            until = time.monotonic() + timeout
            self._until = until if self._until is None else min(until, self._until)
            self.news.notify_all()

    def join(self) -> bool:
        """After `signal`: wait for its end, and count what was not sent. Returns whether the thread ended."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, self.time_left or 0.0) + GRACE_S)
        with self.news:
            left = 0 if self._over else len(self._waiting) + self._in_hand
            self._over, self._in_hand, self._state = True, 0, "closed"
            self._waiting.clear()
            self._drops["unsent"] += left
        if left:
            log.warning("%s: %d results were not sent before the end", self.where, left)
        return not self._thread.is_alive()

    @property
    def time_left(self) -> float | None:
        """Seconds for sending what waits, after `signal`; None before."""
        return None if self._until is None else self._until - time.monotonic()

    def snapshot(self) -> OutputSnapshot:
        """Its figures, all of one moment."""
        with self.news:
            return OutputSnapshot(
                name=self.name,
                where=self.where,
                state=self._state,
                taken=self._taken,
                sent=self._sent_count,
                waiting=len(self._waiting) + self._in_hand,
                drops=dict(self._drops),
                retries=self._retries,
                error=self._error,
            )

    def _take(self, result: Result) -> None:
        """Queue a result, without waiting. If there is no room, the oldest one is dropped."""
        line, fault = b"", None
        try:
            with WALL:
                line = line_of(result)
        except Exception as error:  # from a method of the value's class
            fault = f"a result of {result.feed} cannot be written as JSON: {type(error).__name__}: {error}"
        with self.news:
            self._taken += 1
            if fault is not None:
                self._drops["refused"] += 1
                self._failed(fault)
            elif self._until is not None:
                self._drops["unsent"] += 1
            else:
                self._waiting.append(ResultLine(result.feed, line))
                self._trim()
                self.news.notify_all()

    # -- on the output's thread ----------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Send results until there are no more. Called once."""
        raise NotImplementedError

    def _next(self, most: int, size: float = inf, ready: Callable[[], bool] = lambda: True) -> list[ResultLine]:
        """Wait until there are results and `ready()`. Returns the oldest, at most `most`, and adds none once they have
        `size` bytes; an empty list at the end."""
        with self.news:
            while not (ready() and self._waiting):
                left = self.time_left
                if left is not None and (left <= 0.0 or not self._waiting):
                    return []
                self.news.wait(left)
            found: list[ResultLine] = []
            if (left := self.time_left) is None or left > 0.0:
                while self._waiting and len(found) < most and size > 0:
                    found.append(self._waiting.popleft())
                    size -= len(found[-1].data)
            self._in_hand += len(found)
            return found

    def _sent(self, count: int = 1) -> None:
        """Count results in hand that arrived."""
        with self.news:
            if self._settle(count):
                self._sent_count += count

    def _drop(self, reason: str, count: int = 1) -> None:
        """Count results in hand that are given up. reason: one of `OUTPUT_DROPS`."""
        with self.news:
            if self._settle(count):
                self._drops[reason] += count

    def _back(self, lines: Sequence[ResultLine]) -> None:
        """Put results in hand back, as the oldest that wait."""
        with self.news:
            if self._settle(len(lines)):
                self._waiting.extendleft(reversed(lines))
                self._trim()

    def _pause(self, seconds: float) -> None:
        """Wait so many seconds, or until `signal`."""
        with self.news:
            self.news.wait_for(lambda: self._until is not None, seconds)

    def _set_connected(self) -> None:
        """The receiver takes results."""
        if self._state != "connected":
            log.info("%s: connected", self.where)
        self._state = "connected"

    def _set_away(self, why: object, again: bool = True) -> None:
        """The receiver is away or refuses. again: it is tried again."""
        self._state = "away"
        self._retries += again
        self._failed(why, again)

    def _failed(self, why: object, again: bool = False) -> None:
        """Log a failure, at most one in `SELDOM` seconds."""
        self._error = in_one_line(why)
        if count := self._trouble.count(time.monotonic()):
            times = f" ({count} times)" if count > 1 else ""
            log.warning("%s: %s%s%s", self.where, self._error, "; trying again" if again else "; dropped", times)

    def _settle(self, count: int) -> bool:
        """Take results out of hand. Returns whether they are still to be counted: `join` has counted what was left."""
        self._in_hand -= 0 if self._over else count
        self.news.notify_all()
        return not self._over

    def _trim(self) -> None:
        while len(self._waiting) > self._capacity:
            self._waiting.popleft()
            self._drops["overrun"] += 1

    def _run(self) -> None:
        try:
            self._send_all()
        except BaseException as died:
            self._error = in_one_line(f"{type(died).__name__}: {died}")
            log.exception("%s: the output died", self.where)
        finally:
            self._state = "closed"
            self.signal(0.0)


def unreachable(error: BaseException | None) -> str:
    """Why a receiver cannot be reached, in words."""
    return f"cannot be reached: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}"


@dataclass(frozen=True, slots=True)
class ReceiverAddress:
    """Where a receiver is. secure: over TLS. path: with the leading slash, and with the query of a web server.

    shown: for people, without user, password and query.
    """

    secure: bool
    host: str
    port: int | None
    path: str
    shown: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)


def address_of(text: str, scheme: str, expected: str, query: bool = False) -> ReceiverAddress:
    """The address SCHEME://[user:password@]host[:port]/path; over TLS the scheme ends in s. query: whether it may have
    one. Raises a ConfigError without secrets."""
    shown = one_line(without_secrets(text))
    wrong = ConfigError(f"{shown}: must be {expected}")
    if not text.isascii() or not text.isprintable() or " " in text or len(text) > LONGEST:
        raise wrong
    try:
        found = urlsplit(text)
        port = found.port
    except ValueError:  # a wrong port or address
        raise wrong from None
    if found.scheme not in (scheme, f"{scheme}s") or not found.hostname or port == 0 or found.fragment:
        raise wrong
    if found.query and not query:
        raise wrong
    path = (found.path or "/") + (f"?{found.query}" if found.query else "")
    user, password = (None if part is None else unquote(part) for part in (found.username, found.password))
    return ReceiverAddress(found.scheme != scheme, found.hostname, port, path, shown, user, password)
