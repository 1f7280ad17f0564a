"""Loads and devices that only comparisons and tests need: cameras, and devices that become slower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request
from reflex_runtime.sim.run import Service
from reflex_runtime.sim.workload import Arrival, Arrivals, RequestStream


@dataclass(frozen=True, slots=True)
class Every:
    """A camera: one arrival per period, each late by up to `jitter` seconds.

    phase: when the first is due, in seconds; None: drawn from the period.
    """

    period: float
    jitter: float = 0.0
    phase: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.period < inf:
            raise ConfigError(f"Every.period={self.period!r}: must be finite and > 0")
        if not 0.0 <= self.jitter <= self.period:
            raise ConfigError(f"Every.jitter={self.jitter!r}: must be in [0, period] seconds")

    def times(self, rng: Random) -> Iterator[float]:
        tick = rng.random() * self.period if self.phase is None else self.phase
        while True:
            yield tick + rng.random() * self.jitter
            tick += self.period


@dataclass(frozen=True, slots=True)
class Camera:
    """A feed with one frame in flight that keeps its newest: of the frames made before the answer, the last is sent
    next and the others count as overrun. Latency counts from when a frame was made."""

    frames: Arrivals
    request: Request = field(default_factory=Request)

    def streams(self, seed: str) -> Sequence[RequestStream]:
        times = self.frames.times(Random(seed))
        coming = next(times, inf)

        def arrival(now: float) -> Arrival | None:
            nonlocal coming
            since, made = inf, 0
            while coming <= now or made == 0:
                since, coming = coming, next(times, inf)
                made += 1
            return None if since == inf else Arrival(max(since, now), self.request, since, made - 1)

        return (RequestStream(True, arrival),)


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
