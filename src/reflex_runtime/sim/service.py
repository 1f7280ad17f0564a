"""Service models: how long the simulated device takes for a batch.

A model returns the seconds of a batch that starts at a given time. Models wrap each other:
`Noisy(Drifting(Affine(...)))`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
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
    """fixed + marginal · n seconds.

    by_class: marginal seconds of the cost classes that differ. by_shape: fixed seconds of the shapes that differ.
    """

    fixed: float
    marginal: float
    by_class: Mapping[Hashable, float] = field(default_factory=dict)
    by_shape: Mapping[Hashable, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("fixed", self.fixed), ("marginal", self.marginal)):
            if not value >= 0.0:
                raise ConfigError(f"Affine.{name}={value!r}: must be >= 0 seconds")
        if not self.fixed + self.marginal > 0.0:
            raise ConfigError("Affine.fixed=0.0: fixed + marginal must be > 0 seconds")

    def seconds(self, batch: Batch, now: float, rng: Random) -> float:
        marginal, by_class = self.marginal, self.by_class
        shape = next(iter(batch.grants)).request.shape
        total = self.by_shape.get(shape, self.fixed)
        if not by_class:
            return total + marginal * len(batch.grants)
        return total + sum(by_class.get(t.request.cost_class, marginal) for t in batch.grants)

    def of(self, n: int) -> float:
        """Seconds of n requests of the usual shape and class."""
        return self.fixed + self.marginal * n


@dataclass(frozen=True, slots=True)
class Table:
    """Measured seconds per batch size, straight lines between them and beyond the last two."""

    measured: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.measured or any(n < 1 or not s > 0.0 for n, s in self.measured.items()):
            raise ConfigError(f"Table.measured={dict(self.measured)!r}: needs sizes >= 1 with seconds > 0")

    def seconds(self, batch: Batch, now: float, rng: Random) -> float:
        return self.of(len(batch.grants))

    def of(self, n: int) -> float:
        """Seconds of n requests."""
        sizes = sorted(self.measured)
        if n <= sizes[0] or len(sizes) == 1:
            return self.measured[sizes[0]]
        right = min(bisect_right(sizes, n), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        slope = (self.measured[high] - self.measured[low]) / (high - low)
        return self.measured[low] + slope * (n - low)


@dataclass(frozen=True, slots=True)
class Staged:
    """A device on which every stage takes its own time."""

    stages: Mapping[str, Service]

    def seconds(self, batch: Batch, now: float, rng: Random) -> float:
        return self.stages[batch.stage].seconds(batch, now, rng)


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
