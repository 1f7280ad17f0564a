"""Who hears of events on a loop: sinks, and the callers whose tickets settled."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from reflex_runtime.core.batch import Done
from reflex_runtime.core.events import Event, RequestSettled
from reflex_runtime.core.request import Ticket
from reflex_runtime.drivers.slices import SLICE

log = logging.getLogger("reflex.batcher")

Sink = Callable[[Event], None]


class Audience:
    """Tells every event, in order, to the sinks that want it, and settles whoever waits for a ticket.

    sinks: one with an attribute `events` (a set of event types) gets those only. One that raises is logged and called
    again with the next event. No sink may depend on the order of sinks, and none publishes an event itself.
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks: list[Sink] = list(sinks)
        self._sinks_of: dict[type[Any], list[Sink]] = {}
        self._untold: deque[Event] = deque()

    def add(self, sink: Sink) -> None:
        """One more sink, for the events from now on."""
        self._sinks.append(sink)
        self._sinks_of.clear()

    def tell(self, events: Iterable[Event], all: bool = False) -> bool:
        """Call the sinks and resolve `ticket.waiter`: a future, or a function of the settled ticket.

        Without `all` it tells as many events as one turn of the loop has time for. Returns whether some are left, which
        the next call tells first.
        """
        self._untold.extend(events)
        while self._untold:
            for event in self._slice():
                self.publish(event)
            if not all:
                break
        return bool(self._untold)

    def _slice(self) -> Iterator[Event]:
        """The next events of one turn: answers cost much more than others."""
        answers = 0
        for _ in range(16 * SLICE):
            if not self._untold or answers == SLICE:
                return
            event = self._untold.popleft()
            answers += isinstance(event, RequestSettled)
            yield event

    def publish(self, event: Event) -> None:
        """Call the sinks with one event now, ahead of those that `tell` still keeps. For servers; not from a sink."""
        kind = type(event)
        sinks = self._sinks_of.get(kind)
        if sinks is None:
            sinks = self._listening(kind)
        for sink in sinks:
            try:
                sink(event)
            except Exception:
                log.exception("a sink failed on %s", kind.__name__)
        if isinstance(event, RequestSettled):
            resolve(event.ticket)

    def _listening(self, kind: type[Any]) -> list[Sink]:
        found = [s for s in self._sinks if (wanted := getattr(s, "events", None)) is None or kind in wanted]
        self._sinks_of[kind] = found
        return found


def resolve(ticket: Ticket) -> None:
    """Hand a settled ticket to whoever waits for it."""
    waiter, outcome = ticket.waiter, ticket.outcome
    if isinstance(waiter, asyncio.Future):
        if waiter.done():
            return
        if isinstance(outcome, Done):
            waiter.set_result(outcome.value)
        else:
            waiter.set_exception(outcome.error)
    elif waiter is not None:
        ticket.waiter = None  # it may hold the ticket: this breaks the circle
        try:
            waiter(ticket)
        except Exception:
            log.exception("nobody answered request %s", ticket.id)
