"""A clock that jumps: simulated hours pass as fast as the decisions in them can be made.

Code that reads the time takes a `Clock`; only the owner of a `JumpingClock` can move it, and never back.
"""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """A source of the time, in seconds."""

    def now(self) -> float:
        """The present time. Never goes back."""


class JumpingClock:
    """A clock that stands still until `jump`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The time of the last jump."""
        return self._now

    def jump(self, to: float) -> None:
        """Set the time to `to`. Raises ValueError if that is in the past."""
        if not to >= self._now:
            raise ValueError(f"JumpingClock.jump: to={to!r}: must be >= {self._now!r}, time does not go back")
        self._now = to
