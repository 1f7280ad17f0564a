"""What every output has: a queue, a thread, figures, and an end that takes a bounded time."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, ClassVar, Final, Generic

from reflex_runtime.feeds.outputs.outbox import Item, Outbox, OutputSnapshot
from reflex_runtime.feeds.pipeline import Result
from reflex_runtime.feeds.record import ResultRecord
from reflex_runtime.feeds.words import in_one_line
from reflex_runtime.pacing import Throttle

log = logging.getLogger("reflex.feeds.outputs")

WAITING: Final = 1024  # results that wait in an output
GRACE_S: Final = 1.0  # that a thread has to end after its time is over
SELDOM: Final = 30.0  # seconds between two lines on the same trouble


class ResultOutput(Generic[Item]):
    """Results on their way out. `take` is the sink that feeds get; one output may be shared by any number of feeds.

    name: in metrics and logs. where: the receiver, without secrets. capacity: results that wait; then the oldest is
    dropped. A runtime starts and closes it; see `Runtime.output`.
    """

    kind: ClassVar[str]

    def __init__(self, where: str, capacity: int = WAITING, name: str = "") -> None:
        self.name, self.where = name or self.kind, where
        self.box: Outbox[Item] = Outbox(capacity)
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
        return OutputSnapshot(
            name=self.name,
            where=self.where,
            state=self._state,
            retries=self._retries,
            error=self._error,
            **self.box.figures(),
        )

    # -- for the outputs -----------------------------------------------------------------------------------------------

    def _item(self, result: Result) -> Item:
        """What is kept of a result. Called on the feed's thread, so it is quick."""
        raise NotImplementedError

    def _send_all(self) -> None:
        """Take and send until nothing more comes. Called once, on the output's thread."""
        raise NotImplementedError

    def _well(self) -> None:
        """The receiver takes results."""
        if self._state != "connected":
            log.info("%s: connected", self.where)
        self._state = "connected"

    def _unwell(self, why: object, again: bool = True) -> None:
        """The receiver is away, or refuses; the log says it seldom. again: whether it is tried again."""
        self._state = "away"
        self._retries += again
        self._unsuited(why, again)

    def _line(self, record: ResultRecord) -> bytes | None:
        """One line, without its end, of a result in hand; None if it cannot be written: it alone is refused."""
        try:
            return record.as_json().encode("utf-8", "replace")
        except Exception as error:  # of the value's own class
            self.box.drop("refused")
            self._unsuited(f"a result of {record.feed} cannot be written as JSON: {type(error).__name__}: {error}")
            return None

    def _unsuited(self, why: object, again: bool = False) -> None:
        """A result cannot be sent, though the receiver is there; the log says it seldom."""
        self._error = in_one_line(why)
        count = self._trouble.count(time.monotonic())
        if count:
            times = f" ({count} times)" if count > 1 else ""
            log.warning("%s: %s%s%s", self.where, self._error, "; trying again" if again else "", times)

    # -- within --------------------------------------------------------------------------------------------------------

    def _take(self, result: Result) -> None:
        self.box.put(self._item(result))

    def _run(self) -> None:
        try:
            self._send_all()
        except BaseException as died:
            self._error = in_one_line(f"{type(died).__name__}: {died}")
            log.exception("%s: the output died", self.where)
        finally:
            self._state = "closed"
            self.box.close(0.0)


AnyOutput = ResultOutput[Any]
