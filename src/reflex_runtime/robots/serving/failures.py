"""The log of failed requests: the first at once, then at most one line a second with the count."""

from __future__ import annotations

import logging

from reflex_runtime.core.batch import Failed
from reflex_runtime.core.events import Event, RequestAnswered
from reflex_runtime.pacing import Throttle

log = logging.getLogger("reflex.server")


class FailureLog:
    """A sink that logs failed requests. Client errors, overload and cancellations are only in the metrics."""

    events = frozenset({RequestAnswered})

    def __init__(self) -> None:
        self._throttle = Throttle()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RequestAnswered) or event.outcome != "failed" or event.served_in is None:
            return
        if event.ticket is not None and isinstance(event.ticket.outcome, Failed):
            self.tell(event.at, event.ticket.id, event.ticket.outcome.error)

    def tell(self, now: float, request_id: str, error: BaseException) -> None:
        """One request failed. now: seconds."""
        if count := self._throttle.count(now):
            more = f" ({count - 1} more since the last line)" if count > 1 else ""
            log.error("request %s failed: %s%s", request_id, error, more)
