"""Results on their way to a receiver that may be slow or away: a bounded queue, a thread, figures, a bounded end."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.outputs.json_lines import ResultRecord, record_of
from reflex_runtime.feeds.runtime.health import OUTPUT_DROPS, OutputSnapshot
from reflex_runtime.feeds.runtime.pipeline import Result
from reflex_runtime.feeds.sources.video import without_secrets
from reflex_runtime.pacing import Throttle
from reflex_runtime.run.device import Clock
from reflex_runtime.run.modules import in_one_line
from reflex_runtime.run.processor import WALL
from reflex_runtime.settings.declare import one_line

log = logging.getLogger("reflex.feeds.outputs")

WAITING: Final = 1024  # results that wait in an output
GRACE_S: Final = 1.0  # that a thread has to end after its time is over
SELDOM: Final = 30.0  # seconds between two lines on the same trouble
LONGEST: Final = 2000  # characters of an address
LONGEST_TOPIC: Final = 200
_PORTS: Final = {"mqtt": 1883, "mqtts": 8883, "http": 80, "https": 443}

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """Items between the feeds' threads, which `put`, and the thread of an output, which takes and settles them. Every
    item is counted in exactly one place.

    capacity: items that wait; those that are taken and not settled yet come on top.
    news: notified when something comes, at the close, and by the output when `ready` may have changed.
    """

    def __init__(self, capacity: int, clock: Clock = time.monotonic) -> None:
        self.news = threading.Condition()
        self._capacity, self._clock = capacity, clock
        self._items: deque[Item] = deque()
        self._in_hand = 0  # taken, neither sent nor dropped
        self._taken = self._sent = 0
        self._drops = dict.fromkeys(OUTPUT_DROPS, 0)
        self._until: float | None = None  # once it closes: when its time is over
        self._over = False  # everything is counted

    def put(self, item: Item) -> None:
        """Never waits. The oldest item is dropped where there is no room."""
        with self.news:
            self._taken += 1
            if self._until is not None:
                self._drops["unsent"] += 1
                return
            self._items.append(item)
            self._cut()
            self.news.notify_all()

    def take(self, most: int, ready: Callable[[], bool] = lambda: True) -> list[Item]:
        """Up to so many, the oldest first; waits for one, and until it is `ready`. Empty at the end."""
        with self.news:
            while not (self._items and ready()):
                left = self.time_left
                if left is not None and (left <= 0.0 or not self._items):
                    return []
                self.news.wait(left)
            if self._until is not None and self._until <= self._clock():
                return []
            taken = [self._items.popleft() for _ in range(min(most, len(self._items)))]
            self._in_hand += len(taken)
            return taken

    def sent(self, count: int = 1) -> None:
        """Items in hand arrived."""
        with self.news:
            if self._settle(count):
                self._sent += count

    def drop(self, reason: str, count: int = 1) -> None:
        """Items in hand are given up, for one of `OUTPUT_DROPS`."""
        with self.news:
            if self._settle(count):
                self._drops[reason] += count

    def back(self, items: Sequence[Item]) -> None:
        """Items in hand wait again, as the oldest ones."""
        with self.news:
            if self._settle(len(items)):
                self._items.extendleft(reversed(items))
                self._cut()

    def pause(self, seconds: float) -> bool:
        """Wait, until it closes at most. Returns whether it closes."""
        with self.news:
            return self.news.wait_for(lambda: self._until is not None, seconds)

    def close(self, timeout: float) -> None:
        """Take nothing more; what waits may be sent for so many seconds. The earlier end counts."""
        with self.news:
            until = self._clock() + timeout
            self._until = until if self._until is None else min(until, self._until)
            self.news.notify_all()

    def end(self) -> int:
        """Count what is left as unsent; how many that are. Later calls of the output's thread count nothing."""
        with self.news:
            left = 0 if self._over else len(self._items) + self._in_hand
            self._over, self._in_hand = True, 0
            self._items.clear()
            self._drops["unsent"] += left
            return left

    @property
    def time_left(self) -> float | None:
        """Seconds for what waits once it closes; None before."""
        return None if self._until is None else self._until - self._clock()

    def figures(self) -> dict[str, Any]:
        """Its part of an `OutputSnapshot`, all of one moment."""
        with self.news:
            waiting = len(self._items) + self._in_hand
            return {"taken": self._taken, "sent": self._sent, "waiting": waiting, "drops": dict(self._drops)}

    def _settle(self, count: int) -> bool:
        """Whether these items still count."""
        self._in_hand -= 0 if self._over else count
        self.news.notify_all()
        return not self._over

    def _cut(self) -> None:
        while len(self._items) > self._capacity:
            self._items.popleft()
            self._drops["overrun"] += 1


class ResultOutput:
    """Results on their way out. `take` is the sink that feeds get; one output may be shared by any number of feeds.

    name: in metrics and logs. where: the receiver, without secrets. capacity: results that wait; then the oldest is
    dropped. A runtime starts and closes it; see `Runtime.output`.
    """

    kind: ClassVar[str]

    def __init__(self, where: str, capacity: int = WAITING, name: str = "") -> None:
        self.name, self.where = name or self.kind, where
        self.box: Outbox[ResultRecord] = Outbox(capacity)
        self.take = self._take  # one object: feeds that share a sink know it by its identity
        self._state = "connecting"
        self._error: str | None = None
        self._retries = 0
        self._trouble = Throttle(SELDOM)
        self._thread = threading.Thread(target=self._run, name=f"reflex-{self.name}", daemon=True)

    def start(self) -> None:
        """Start its thread."""
        self._thread.start()

    def signal(self, timeout: float) -> None:
        """Take nothing more, and send what waits within so many seconds."""
        self.box.close(timeout)

    def join(self) -> bool:
        """After `signal`: wait until its time is over, and count what was not sent. Returns whether it ended."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, self.box.time_left or 0.0) + GRACE_S)
        left = self.box.end()
        self._state = "closed"
        if left:
            log.warning("%s: %d results were not sent before the end", self.where, left)
        return not self._thread.is_alive()

    def snapshot(self) -> OutputSnapshot:
        """Its figures now."""
        state, retries, error = self._state, self._retries, self._error
        return OutputSnapshot(
            name=self.name, where=self.where, state=state, retries=retries, error=error, **self.box.figures()
        )

    # -- for the outputs -----------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Take and send until nothing more comes. Called once, on the output's thread."""
        raise NotImplementedError

    def _well(self) -> None:
        """The receiver takes results."""
        if self._state != "connected":
            log.info("%s: connected", self.where)
        self._state = "connected"

    def _unwell(self, why: object, again: bool = True) -> None:
        """The receiver is away, or refuses: logged seldom. again: whether it is tried again."""
        self._state = "away"
        self._retries += again
        self._unsuited(why, again)

    def _line(self, record: ResultRecord) -> bytes | None:
        """One line, without its end, of a result in hand; None if it cannot be written: it alone is refused."""
        try:
            with WALL:
                return record.as_json()
        except Exception as error:  # of the value's own class
            self.box.drop("refused")
            self._unsuited(f"a result of {record.feed} cannot be written as JSON: {type(error).__name__}: {error}")
            return None

    def _unsuited(self, why: object, again: bool = False) -> None:
        """A result cannot be sent, though the receiver is there: logged seldom."""
        self._error = in_one_line(why)
        count = self._trouble.count(time.monotonic())
        if count:
            times = f" ({count} times)" if count > 1 else ""
            log.warning("%s: %s%s%s", self.where, self._error, "; trying again" if again else "", times)

    # -- within --------------------------------------------------------------------------------------------------------

    def _take(self, result: Result) -> None:
        self.box.put(record_of(result))

    def _run(self) -> None:
        try:
            self._send_all()
        except BaseException as died:
            self._error = in_one_line(f"{type(died).__name__}: {died}")
            log.exception("%s: the output died", self.where)
        finally:
            self._state = "closed"
            self.box.close(0.0)


@dataclass(frozen=True, slots=True)
class ReceiverAddress:
    """secure: over TLS. path: with the leading slash; of a web server as it is written, with the query. user, password:
    None without; they appear in no error, log or figure, nor in `shown`."""

    secure: bool
    host: str
    port: int
    path: str
    shown: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)


def mqtt_address(text: str) -> ReceiverAddress:
    """mqtt://[user:password@]host[:port]/topic, or mqtts for TLS. Raises ConfigError without secrets."""
    address = _address(text, ("mqtt", "mqtts"), "mqtt://HOST/TOPIC, or mqtts://HOST/TOPIC over TLS")
    topic = unquote(address.path[1:])
    if not 0 < len(topic) <= LONGEST_TOPIC or set(topic) & set("+#\0") or topic[0] in "$/" or topic[-1] == "/":
        what = f"a topic of 1 to {LONGEST_TOPIC} characters, without + and #, and no / or $ at its ends"
        raise ConfigError(f"{address.shown}: the path must be {what}")
    return replace(address, path=f"/{topic}")


def webhook_address(text: str) -> ReceiverAddress:
    """http(s)://[user:password@]host[:port]/path?query. Raises ConfigError without secrets."""
    return _address(text, ("http", "https"), "http://HOST/PATH or https://HOST/PATH")


def _address(text: str, schemes: tuple[str, str], expected: str) -> ReceiverAddress:
    shown = one_line(without_secrets(text))
    wrong = ConfigError(f"{shown}: must be {expected}")
    if not text.isascii() or not text.isprintable() or " " in text or len(text) > LONGEST:
        raise wrong
    try:
        found = urlsplit(text)
        port = found.port
    except ValueError:  # a wrong port or address
        raise wrong from None
    query = found.query if schemes[0] == "http" else ""
    if found.scheme not in schemes or not found.hostname or port == 0 or found.fragment or query != found.query:
        raise wrong
    return ReceiverAddress(
        secure=found.scheme == schemes[1],
        host=found.hostname,
        port=port or _PORTS[found.scheme],
        path=(found.path or "/") + (f"?{query}" if query else ""),
        shown=shown,
        user=None if found.username is None else unquote(found.username),
        password=None if found.password is None else unquote(found.password),
    )
