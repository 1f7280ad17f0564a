"""How fast requests arrive: exponentially decayed counts."""

from __future__ import annotations

from math import exp, inf, log


class Rate:
    """Arrivals per second, over a time constant in seconds. last: when the last one came; 0.0 before the first."""

    __slots__ = ("_count", "_since", "_tau", "last")

    def __init__(self, tau: float = 0.5) -> None:
        self._tau = tau
        self._count = self.last = 0.0
        self._since: float | None = None

    def arrive(self, now: float) -> None:
        if self._since is None:
            self._since = self.last = now
        if now > self.last:  # many come at one time
            self._count *= exp((self.last - now) / self._tau)
            self.last = now
        self._count += 1.0

    def falls_to(self, rate: float) -> float:
        """The time at which it falls to `rate` (> 0) without further arrivals; -inf if it is not above."""
        above = self._count / (self._tau * rate)
        return -inf if above <= 0.0 else self.last + self._tau * log(above)

    def value(self, now: float) -> float:
        """The present rate."""
        if self._since is None:
            return 0.0
        count = self._count * exp((self.last - now) / self._tau)
        return count / max(self._tau * (1.0 - exp((self._since - now) / self._tau)), 0.001)
