"""Service models: how long the simulated device takes for a batch.

A model returns the seconds of a batch that starts at a given time. Models wrap each other:
`Noisy(Drifting(Affine(...)))`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, inf
from random import Random
from typing import Protocol

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ConfigError


class Service(Protocol):
    """A device."""

    def seconds(self, batch: Batch, now: float, rng: Random) -> float:
        """Seconds the batch takes if it starts now."""


def line_through(points: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """(fixed, slope) of the straight line of least squares through (x, y, weight), neither of them negative."""
    known = list(points)
    total = sum(w for _, _, w in known)
    mx, my = sum(w * x for x, _, w in known) / total, sum(w * y for _, y, w in known) / total
    spread = sum(w * (x - mx) ** 2 for x, _, w in known)
    if spread <= 0.0:
        return my, 0.0
    slope = max(0.0, sum(w * (x - mx) * (y - my) for x, y, w in known) / spread)
    if my >= slope * mx:
        return my - slope * mx, slope
    return 0.0, sum(w * x * y for x, y, w in known) / sum(w * x * x for x, _, w in known)


@dataclass(frozen=True, slots=True)
class Affine:
    """fixed + marginal · n seconds."""

    fixed: float
    marginal: float

    def __post_init__(self) -> None:
        for name, value in (("fixed", self.fixed), ("marginal", self.marginal)):
            if not value >= 0.0:
                raise ConfigError(f"Affine.{name}={value!r}: must be >= 0 seconds")
        if not self.fixed + self.marginal > 0.0:
            raise ConfigError("Affine.fixed=0.0: fixed + marginal must be > 0 seconds")

    def seconds(self, batch: Batch, now: float, rng: Random) -> float:
        return self.of(len(batch.grants))

    def of(self, n: int) -> float:
        """Seconds of n requests."""
        return self.fixed + self.marginal * n


@dataclass(frozen=True, slots=True)
class Drifting:
    """A device that becomes `factor` times as slow: at once at `at` seconds, or gradually over `over` seconds.

    until: when batches that start take their usual time again.
    """

    inner: Service
    factor: float
    at: float
    over: float = 0.0
    until: float = inf

    def seconds(self, batch: Batch, now: float, rng: Random) -> float:
        if not self.at <= now < self.until:
            done = 0.0
        else:
            done = 1.0 if self.over <= 0.0 else min(1.0, (now - self.at) / self.over)
        return self.inner.seconds(batch, now, rng) * (1.0 + (self.factor - 1.0) * done)


@dataclass(frozen=True, slots=True)
class Noisy:
    """Multiplies by exp(N(0, sigma)): sigma 0.05 is 5 % noise.

    stalls: share of batches that take `stall` times as long.
    """

    inner: Service
    sigma: float
    stalls: float = 0.0
    stall: float = 10.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.sigma <= 2.0:
            raise ConfigError(f"Noisy.sigma={self.sigma!r}: must be in [0, 2]")

    def seconds(self, batch: Batch, now: float, rng: Random) -> float:
        taken = self.inner.seconds(batch, now, rng) * exp(rng.gauss(0.0, self.sigma))
        return taken * self.stall if self.stalls and rng.random() < self.stalls else taken
