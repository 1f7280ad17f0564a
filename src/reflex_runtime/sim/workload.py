"""Workloads: open arrivals that do not depend on answers, and callers that wait for theirs.

A workload is one part or several. Each part makes streams, and each stream has its own random numbers, so that the same
seed gives the same arrivals with every scheduler, in whatever order answers come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf, pi, sin
from random import Random
from typing import NamedTuple, Protocol

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request


class Arrival(NamedTuple):
    """A request and the time at which it is sent, in seconds.

    since: from when its latency counts, if that is earlier. overrun: older frames that it replaced before they were
    sent. prepared_in: seconds of preparation before it can run; requests are prepared one after the other.
    """

    at: float
    request: Request
    since: float | None = None
    overrun: int = 0
    prepared_in: float = 0.0


class RequestStream(NamedTuple):
    """The requests of one feed or one caller, one after another.

    waits: whether the next request follows the answer to the last one. next: the next arrival, not before the given
    time: 0 at the start, then that of the last answer, or of the last arrival if it does not wait; None at the end.
    """

    waits: bool
    next: Callable[[float], Arrival | None]


class WorkloadPart(Protocol):
    """A part of a workload."""

    def streams(self, seed: str) -> Sequence[RequestStream]:
        """Its streams; the same seed gives the same streams."""


# -- when: arrival processes -------------------------------------------------------------------------------------------


class Arrivals(Protocol):
    """A point process."""

    def times(self, rng: Random) -> Iterator[float]:
        """Ascending times in seconds; may be endless."""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals at `rate` per second."""

    rate: float

    def __post_init__(self) -> None:
        _positive("Poisson.rate", self.rate)

    def times(self, rng: Random) -> Iterator[float]:
        at = 0.0
        while True:
            at += rng.expovariate(self.rate)
            yield at


@dataclass(frozen=True, slots=True)
class Bursty:
    """A Poisson process whose rate switches between quiet and burst (two-state Markov-modulated).

    rate: mean arrivals per second. peak: rate in a burst, as a multiple of the mean. share: part of the time spent in
    bursts. length: mean seconds of a burst.
    """

    rate: float
    peak: float = 3.0
    share: float = 0.2
    length: float = 0.5

    def __post_init__(self) -> None:
        _positive("Bursty.rate", self.rate)
        _positive("Bursty.length", self.length)
        if not 0.0 < self.share < 1.0:
            raise ConfigError(f"Bursty.share={self.share!r}: must be in (0, 1)")
        if not 1.0 <= self.peak <= 1.0 / self.share:
            raise ConfigError(f"Bursty.peak={self.peak!r}: must be in [1, 1 / share]")

    def times(self, rng: Random) -> Iterator[float]:
        quiet = self.rate * (1.0 - self.share * self.peak) / (1.0 - self.share)
        states = ((quiet, self.length * (1.0 - self.share) / self.share), (self.rate * self.peak, self.length))
        bursting = rng.random() < self.share
        at = 0.0
        while True:
            rate, length = states[bursting]
            until = at + rng.expovariate(1.0 / length)
            while rate > 0.0 and (at := at + rng.expovariate(rate)) < until:
                yield at
            at, bursting = until, not bursting  # memoryless: the gap across the switch may be drawn again


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A Poisson process whose rate swings as over a day: rate · (1 + swing · sin(2π t / period))."""

    rate: float
    swing: float = 0.8
    period: float = 20.0

    def __post_init__(self) -> None:
        _positive("Diurnal.rate", self.rate)
        _positive("Diurnal.period", self.period)
        if not 0.0 <= self.swing <= 1.0:
            raise ConfigError(f"Diurnal.swing={self.swing!r}: must be in [0, 1]")

    def times(self, rng: Random) -> Iterator[float]:
        highest = 1.0 + self.swing
        for at in Poisson(self.rate * highest).times(rng):  # of which the rate's share is taken
            if rng.random() * highest < 1.0 + self.swing * sin(2.0 * pi * at / self.period):
                yield at


@dataclass(frozen=True, slots=True)
class Heavy:
    """Gaps with a Pareto tail of index alpha: clumps and long silences. Variance is infinite for alpha <= 2."""

    rate: float
    alpha: float = 1.7

    def __post_init__(self) -> None:
        _positive("Heavy.rate", self.rate)
        if not self.alpha > 1.0:
            raise ConfigError(f"Heavy.alpha={self.alpha!r}: must be > 1, else there is no mean")

    def times(self, rng: Random) -> Iterator[float]:
        shortest = (self.alpha - 1.0) / (self.alpha * self.rate)
        at = 0.0
        while True:
            at += shortest * rng.paretovariate(self.alpha)
            yield at


# -- how long a caller thinks ------------------------------------------------------------------------------------------


class Think(Protocol):
    """Seconds between an answer and the same caller's next request."""

    def draw(self, rng: Random) -> float:
        """One think time."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    seconds: float

    def draw(self, rng: Random) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Exponential:
    """Memoryless, with this mean."""

    mean: float

    def __post_init__(self) -> None:
        _positive("Exponential.mean", self.mean)

    def draw(self, rng: Random) -> float:
        return rng.expovariate(1.0 / self.mean)


@dataclass(frozen=True, slots=True)
class Around:
    """Uniform within `spread` of the middle, like a robot that executes its chunk in 100 ± 5 ms."""

    middle: float
    spread: float

    def draw(self, rng: Random) -> float:
        return max(0.0, self.middle + self.spread * (2.0 * rng.random() - 1.0))


@dataclass(frozen=True, slots=True)
class Mixture:
    """One of several, drawn each time. parts: (share, think) pairs."""

    parts: tuple[tuple[float, Think], ...]

    def draw(self, rng: Random) -> float:
        return rng.choices([think for _, think in self.parts], [share for share, _ in self.parts])[0].draw(rng)


# -- sources -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Requests that arrive whether or not earlier ones were answered.

    requests: one of them is drawn for each arrival, in proportion to `shares` (equal if empty).
    strangers: each request has its own client.
    """

    arrivals: Arrivals
    requests: Sequence[Request] = (Request(),)
    shares: Sequence[float] = ()
    strangers: bool = False

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError("Open.requests=(): needs at least one request")
        if self.shares and len(self.shares) != len(self.requests):
            raise ConfigError(f"Open.shares={self.shares!r}: must have one share per request ({len(self.requests)})")

    def streams(self, seed: str) -> Sequence[RequestStream]:
        rng, requests, numbers = Random(seed), self.requests, count()
        times = self.arrivals.times(rng)

        def arrival(now: float) -> Arrival | None:
            at = next(times, inf)
            if at == inf:
                return None
            request = requests[0] if len(requests) == 1 else rng.choices(requests, self.shares or None)[0]
            return Arrival(at, replace(request, client=(seed, next(numbers))) if self.strangers else request)

        return (RequestStream(False, arrival),)


@dataclass(frozen=True, slots=True)
class Callers:
    """`count` callers, each its own client, that send a request, wait for the answer, think, and send the next.

    The first requests are spread over one think time. prepared_in: seconds before each can run, see `Arrival`.
    """

    count: int
    think: Think
    request: Request = field(default_factory=Request)
    name: str = "caller"
    prepared_in: float = 0.0

    def __post_init__(self) -> None:
        if not self.count >= 1:
            raise ConfigError(f"Callers.count={self.count!r}: must be >= 1")

    def streams(self, seed: str) -> Sequence[RequestStream]:
        return [self._stream(i, Random(f"{seed}/{i}")) for i in range(self.count)]

    def _stream(self, number: int, rng: Random) -> RequestStream:
        request, begun = replace(self.request, client=f"{self.name}-{number}"), False

        def arrival(now: float) -> Arrival:
            nonlocal begun
            after = self.think.draw(rng)
            if not begun:
                begun = True
                after *= rng.random()
            return Arrival(now + after, request, prepared_in=self.prepared_in)

        return RequestStream(True, arrival)


@dataclass(frozen=True, slots=True)
class RecordedArrivals:
    """Recorded arrivals, whose requests are sent again at the same times."""

    arrivals: Sequence[Arrival]

    def streams(self, seed: str) -> Sequence[RequestStream]:
        rest = iter(sorted(self.arrivals, key=lambda a: a.at))
        return (RequestStream(False, lambda now: next(rest, None)),)


def _positive(name: str, value: float) -> None:
    if not 0.0 < value < inf:
        raise ConfigError(f"{name}={value!r}: must be finite and > 0")
