"""Who is about: clients that asked or were answered a moment ago, so that nobody is waited for who is not coming.

A hold for company is pointless once everybody who could join is in the batch. With cameras that is the usual case:
each has one frame in flight, so a batch with a frame of every live one cannot grow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from math import inf


class Live:
    """The clients of a group by when they were last seen. span: seconds for which that counts; 0 keeps no account."""

    def __init__(self, span: float) -> None:
        self._span = span
        self._seen: OrderedDict[Hashable, float] = OrderedDict()  # the most recent last

    def seen(self, client: Hashable, now: float) -> None:
        """The client asked, or got an answer."""
        if self._span <= 0.0:
            return
        self._seen[client] = now
        self._seen.move_to_end(client)
        while next(iter(self._seen.values())) + self._span <= now:  # its own entry never is
            self._seen.popitem(last=False)

    def others_until(self, members: Collection[Hashable]) -> float:
        """Until when somebody who is not among `members` counts as live; in the past when nobody does."""
        return next((at + self._span for c, at in reversed(self._seen.items()) if c not in members), -inf)
