"""The decision to ask again, pure, so that it can be read and tested without a server or a clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from reflex_runtime.client.errors import ClientError, ServerError
from reflex_runtime.pacing import doubled

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between attempts where the server names none, doubling


@dataclass(slots=True)
class Retries:
    """Whether and when to ask again. Pure: times are passed in.

    most: further attempts. until: the next attempt must begin by then. spread: a random number in [0, 1); up to a tenth
    is added to each pause, so that robots that were refused together do not return together.

    Only requests that cannot run twice (`retry_safe`) are repeated, and not those that were late or that a newer
    request replaced. The pause is at least Retry-After, else 0.1 s, doubling to 2 s.
    """

    most: int
    until: float
    spread: Callable[[], float] = random.random
    made: int = 0

    def after(self, error: ClientError, now: float) -> float | None:
        """Seconds to wait before the next attempt, or None to give up."""
        if not error.retry_safe or self.made >= self.most or (isinstance(error, ServerError) and error.stale):
            return None
        pause = error.retry_after
        if pause is None:
            pause = doubled(FIRST_PAUSE, LONGEST_PAUSE, self.made)
        pause *= 1.0 + 0.1 * self.spread()
        if now + pause >= self.until:
            return None
        self.made += 1
        return pause
