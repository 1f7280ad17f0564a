"""The events of one group, for a sink that counts what has a single meaning there."""

from __future__ import annotations

from collections.abc import Callable

from reflex_runtime.core.events import Event


class OneGroup:
    """A sink that passes on the events of one group, and those that belong to none."""

    def __init__(self, sink: Callable[[Event], None], group: str) -> None:
        self._sink, self._group = sink, group
        self.events = getattr(sink, "events", None)

    def __call__(self, event: Event) -> None:
        ticket = getattr(event, "ticket", None)
        about = ticket.request if ticket is not None else getattr(event, "request", getattr(event, "batch", None))
        if about is None or about.group == self._group:
            self._sink(event)
