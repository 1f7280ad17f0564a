"""A discrete-event loop around the real scheduler, with a simulated device.

Like a driver it calls `next_batch`, completes batches and wakes at `wake_at`, on a clock that jumps from one event to
the next. It calls `next_batch` after every single input, also if several come at the same instant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp, inf
from random import Random
from typing import NamedTuple, Protocol

from reflex_runtime.core.batch import Batch, Done, Event, Failed, More, Outcome, RequestSettled
from reflex_runtime.core.errors import ConfigError, Drained, ReflexError, Rejected
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.sim.workload import Arrival, RequestStream, WorkloadPart

RETRY = 0.001  # least seconds until a refused caller retries: without them virtual time could stand still


# -- times of the simulated device -------------------------------------------------------------------------------------


class Service(Protocol):
    """A simulated device."""

    def seconds(self, batch: Batch, now: float, rng: Random) -> float:
        """Seconds that the batch takes if it starts now."""


def line_through(points: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """(fixed, slope), both at least 0, of the line of least squares through points (x, y, weight)."""
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
    """A batch of n requests takes fixed + marginal · n seconds."""

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
        seconds = self.inner.seconds(batch, now, rng) * exp(rng.gauss(0.0, self.sigma))
        return seconds * self.stall if self.stalls and rng.random() < self.stalls else seconds


# -- what happened -----------------------------------------------------------------------------------------------------


class RequestEnd(NamedTuple):
    """How one request ended.

    arrived, ended: seconds. outcome: ok, overrun, or the outcome of its error (rejected, expired, shed, …).
    limit: its time limit in seconds, inf for none.
    device: its share of the measured device seconds.
    """

    request: Request
    arrived: float
    ended: float
    outcome: str
    limit: float
    device: float

    @property
    def latency(self) -> float:
        """Seconds from arrival to the end."""
        return self.ended - self.arrived

    @property
    def on_time(self) -> bool:
        """Answered within the limit."""
        return self.outcome == "ok" and self.ended - self.arrived <= self.limit


class Ran(NamedTuple):
    """One batch: start and length in seconds, number of members, predicted seconds (0 if unknown), why it was sent."""

    started: float
    seconds: float
    size: int
    expected: float
    cause: str


@dataclass(slots=True)
class Run:
    """The ends of all requests and all batches. Reports cover the seconds from `warmup` to `duration`."""

    warmup: float
    duration: float
    answers: list[RequestEnd] = field(default_factory=list)
    batches: list[Ran] = field(default_factory=list)


def simulate(
    scheduler: Scheduler,
    workload: WorkloadPart | Iterable[WorkloadPart],
    service: Service,
    *,
    duration: float = 60.0,
    warmup: float = 0.0,
    seed: int = 0,
    sinks: Sequence[Callable[[Event], None]] = (),
    outcome: Callable[[Ticket, float], Outcome] | None = None,
    between: float = 0.0,
) -> Run:
    """Run a workload through a scheduler in virtual time. Same arguments, same result, byte for byte.

    duration: seconds during which requests are made; those in the system at its end still run to their end.
    warmup: seconds at the start that reports leave out.
    sinks: called with every event of the scheduler.
    outcome: the processor's answer for a ticket and its granted units; by default Done if the ticket wanted no more
    units, else another step of the same stage.
    between: seconds before each batch in which the driver completes the last batch and forms this one.
    """
    noise, done = Random(f"{seed}/device"), Run(warmup, duration)
    loop = _Loop(scheduler, service, done, seed, sinks, outcome or _outcome, between, noise)
    return loop.run(workload)


@dataclass(slots=True)
class _Loop:
    """One simulation. now: virtual seconds. agenda: (time, number, action). pending: requests that have not ended."""

    scheduler: Scheduler
    service: Service
    done: Run
    seed: int
    sinks: Sequence[Callable[[Event], None]]
    outcome: Callable[[Ticket, float], Outcome]
    between: float
    noise: Random
    now: float = 0.0
    entries: int = 0
    agenda: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    prepared_at: float = 0.0  # when the last request is prepared
    pending: dict[Ticket, tuple[RequestStream, Arrival]] = field(default_factory=dict)

    def run(self, workload: WorkloadPart | Iterable[WorkloadPart]) -> Run:
        sources = workload if isinstance(workload, Iterable) else (workload,)
        for i, source in enumerate(sources):
            for stream in source.streams(f"{self.seed}/{i}"):
                self._plan(stream, stream.next(0.0))
        scheduler, agenda = self.scheduler, self.agenda
        idle_wakes = 0
        while True:
            batch = scheduler.next_batch(self.now)
            if batch is not None:
                self._start(batch)
            if self._take_events() or batch is not None:
                idle_wakes = 0
            wake = scheduler.wake_at()
            at = min(wake, agenda[0][0] if agenda else inf)
            if at == inf:
                return self.done
            self.now = max(at, self.now)
            if agenda and agenda[0][0] <= self.now:
                heappop(agenda)[2]()
                idle_wakes = 0
            else:
                idle_wakes += 1
                if idle_wakes > 1000:
                    raise RuntimeError(f"the scheduler's wake_at() is {wake!r} again and again, but it does nothing")

    # -- events --------------------------------------------------------------------------------------------------------

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self.entries += 1
        heappush(self.agenda, (time, self.entries, action))

    def _plan(self, stream: RequestStream, arrival: Arrival | None) -> None:
        if arrival is not None and arrival.at < self.done.duration:
            self._at(arrival.at, lambda: self._arrive(stream, arrival))

    def _arrive(self, stream: RequestStream, arrival: Arrival) -> None:
        now, request = self.now, arrival.request
        for _ in range(arrival.overrun):
            self._ended(arrival, now, "overrun", 0.0)
        try:
            ticket = self.scheduler.submit(request, now, arrival.prepared_in <= 0.0)
        except Rejected as error:
            self._answered(arrival, now, error, 0.0)
            if stream.waits:
                self._plan(stream, stream.next(now + max(RETRY, error.retry_after or 0.0)))
        else:
            self.pending[ticket] = (stream, arrival)
            if arrival.prepared_in > 0.0:
                self.prepared_at = max(self.prepared_at, now) + arrival.prepared_in
                self._at(self.prepared_at, lambda: self.scheduler.prepared(ticket, ticket.request, self.now))
        if not stream.waits:
            self._plan(stream, stream.next(now))

    def _start(self, batch: Batch) -> None:
        now = self.now + self.between
        seconds = self.service.seconds(batch, now, self.noise)
        self._at(now + seconds, lambda: self._finish(batch, now, seconds))

    def _finish(self, batch: Batch, started: float, seconds: float) -> None:
        outcomes = [self.outcome(ticket, units) for ticket, units in batch.grants.items()]
        self.scheduler.complete(batch, outcomes, seconds, self.now)
        self.done.batches.append(Ran(started, seconds, len(batch), batch.predicted, batch.cause.value))

    def _take_events(self) -> bool:
        events = self.scheduler.take_events()
        for event in events:
            for sink in self.sinks:
                sink(event)
            if isinstance(event, RequestSettled):
                stream, arrival = self.pending.pop(event.ticket)
                outcome = event.ticket.outcome
                error = outcome.error if isinstance(outcome, Failed) else None
                self._answered(arrival, event.at, error, event.ticket.shared)
                if not stream.waits:
                    continue
                if isinstance(error, Drained):  # its replica died: the caller retries on another one at once
                    self._plan(stream, Arrival(event.at + RETRY, arrival.request, prepared_in=arrival.prepared_in))
                else:
                    self._plan(stream, stream.next(event.at))
        return bool(events)

    # -- results -------------------------------------------------------------------------------------------------------

    def _answered(self, arrival: Arrival, now: float, error: BaseException | None, device: float) -> None:
        if error is None:
            outcome = "ok"
        else:
            outcome = error.outcome if isinstance(error, ReflexError) else "failed"
        self._ended(arrival, now, outcome, device)

    def _ended(self, arrival: Arrival, now: float, outcome: str, device: float) -> None:
        limit = inf if arrival.request.time_limit is None else arrival.request.time_limit
        since = arrival.at if arrival.since is None else arrival.since
        self.done.answers.append(RequestEnd(arrival.request, since, now, outcome, limit, device))


def _outcome(ticket: Ticket, units: float) -> Outcome:
    """Done if the ticket was granted all the units that it wanted, else another step."""
    left = ticket.wants - units
    return Done() if left <= 1e-9 else More(wants=left)
