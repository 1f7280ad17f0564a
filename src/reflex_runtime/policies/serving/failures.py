"""Says in the log what failed and for whom: the first at once, then at most one line a second with the count."""

from __future__ import annotations

import logging

from reflex_runtime.core.batch import Failed
from reflex_runtime.core.events import Event, RequestAnswered

log = logging.getLogger("reflex.server")


class FailureLog:
    """A sink that tells failed requests of callers. Not for client errors, overload or cancellations.

    Those are in the metrics.
    """

    events = frozenset({RequestAnswered})

    PERIOD = 1.0  # seconds between lines

    def __init__(self) -> None:
        self._told = float("-inf")
        self._silent = 0

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RequestAnswered) or event.outcome != "failed" or event.served_in is None:
            return
        if event.ticket is not None and isinstance(event.ticket.outcome, Failed):
            self.tell(event.at, event.ticket.id, event.ticket.outcome.error)

    def tell(self, now: float, request_id: str, error: BaseException) -> None:
        """One request failed. now: seconds."""
        if now - self._told < self.PERIOD:
            self._silent += 1
            return
        more = f" ({self._silent} more since the last line)" if self._silent else ""
        log.error("request %s failed: %s%s", request_id, error, more)
        self._told, self._silent = now, 0
