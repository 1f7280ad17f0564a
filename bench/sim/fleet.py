"""Many replicas in virtual time: each runs the shipped scheduler on a device of its own, and owns its robots by hash.

A robot belongs to the live replica that `rendezvous.owner` names, as on a real server. A replica that dies loses what
it ran and what waited there: those robots ask again at once, and it owns none until it is back. The others do not
notice, except that they own its robots meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from heapq import heappop, heappush
from math import ceil, inf
from typing import NamedTuple

from bench.sim.rendezvous import owner
from reflex_runtime.core.batch import Batch, Event, Failed, Outcome
from reflex_runtime.core.errors import ConfigError, Drained, ReflexError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.core.statistics import percentile
from reflex_runtime.observe.journal import WarmUpLine
from reflex_runtime.settings.policies import ServeConfig
from reflex_runtime.sim.recorded import teach
from reflex_runtime.sim.report import Report
from reflex_runtime.sim.run import Affine, Noisy, Run, simulate
from reflex_runtime.sim.workload import Around, Callers

SPREAD = 0.05  # of the time a robot executes a chunk, to both sides
MOST_REPLICAS = 10_000


class Outage(NamedTuple):
    """A replica that dies, and when it is back; seconds."""

    replica: int
    at: float
    until: float


class Fleet:
    """A `Decider` over several schedulers, each made by `make`, on as many devices.

    busy: seconds that each device ran. asked: requests that each replica got.
    """

    def __init__(self, replicas: int, make: Callable[[], Scheduler], outages: Sequence[Outage] = ()) -> None:
        if not 1 <= replicas <= MOST_REPLICAS:
            raise ConfigError(f"Fleet.replicas={replicas!r}: must be in [1, {MOST_REPLICAS}]")
        for outage in outages:
            if not (0 <= outage.replica < replicas and 0.0 <= outage.at < outage.until):
                raise ConfigError(f"Fleet.outages: {outage}: needs a replica in [0, {replicas}) and at < until")
        self.busy = [0.0] * replicas
        self.asked = [0] * replicas
        self._make = make
        self._schedulers = {name_of(i): make() for i in range(replicas)}
        self._numbers = {name_of(i): i for i in range(replicas)}
        self._live = set(self._schedulers)
        self._owners: dict[Hashable, str] = {}
        self._of_ticket: dict[Ticket, str] = {}
        self._of_batch: dict[Batch, tuple[str, float]] = {}  # that run, and since when
        self._touched: dict[str, None] = dict.fromkeys(self._schedulers)
        self._wakes: list[tuple[float, str]] = []  # a heap; also of times that are not valid any more
        self._wake_of: dict[str, float] = {}
        self._events: list[Event] = []
        changes = [(o.at, name_of(o.replica), False) for o in outages]
        changes += [(o.until, name_of(o.replica), True) for o in outages]
        self._changes = sorted(changes, reverse=True)

    def submit(self, request: Request, now: float, ready: bool = True) -> Ticket:
        self._apply(now)
        name = self._owner(request.client)
        self._touched[name] = None
        self.asked[self._numbers[name]] += 1
        ticket = self._schedulers[name].submit(request, now, ready)
        if not ready:
            self._of_ticket[ticket] = name
        return ticket

    def prepared(self, ticket: Ticket, made: Request | ReflexError, now: float) -> None:
        name = self._of_ticket.pop(ticket)
        self._touched[name] = None
        self._schedulers[name].prepared(ticket, made, now)

    def next_batch(self, now: float) -> Batch | None:
        self._apply(now)
        while self._wakes and self._wakes[0][0] <= now:
            at, name = heappop(self._wakes)
            if self._wake_of.get(name) == at:
                self._touched[name] = None
        while self._touched:
            name = next(iter(self._touched))
            batch = self._schedulers[name].next_batch(now)
            if batch is not None:
                self._of_batch[batch] = (name, now)
                return batch  # it may have another
            del self._touched[name]
            self._events += self._schedulers[name].take_events()
            wake = self._wake_of[name] = self._schedulers[name].wake_at()
            if wake < inf:
                heappush(self._wakes, (wake, name))
        return None

    def complete(self, batch: Batch, outcomes: Sequence[Outcome], elapsed: float, now: float) -> None:
        self._apply(now)
        name, _ = self._of_batch.pop(batch, ("", 0.0))
        if name:  # else its replica died
            self.busy[self._numbers[name]] += elapsed
            self._touched[name] = None
            self._schedulers[name].complete(batch, outcomes, elapsed, now)

    def wake_at(self) -> float:
        while self._wakes and self._wake_of.get(self._wakes[0][1]) != self._wakes[0][0]:
            heappop(self._wakes)
        change = self._changes[-1][0] if self._changes else inf
        return min(change, self._wakes[0][0] if self._wakes else inf)

    def take_events(self) -> list[Event]:
        for name in self._touched:
            self._events += self._schedulers[name].take_events()
        events, self._events = self._events, []
        return events

    # -- who owns whom, and what dies ----------------------------------------------------------------------------------

    def _owner(self, client: Hashable) -> str:
        found = self._owners.get(client)
        if found is None:
            named = owner(str(client), self._live)
            if named is None:
                raise ConfigError("Fleet.outages: no replica is left at some time")
            found = self._owners[client] = named
        return found

    def _apply(self, now: float) -> None:
        while self._changes and self._changes[-1][0] <= now:
            _, name, back = self._changes.pop()
            if back:
                self._schedulers[name] = self._make()
                self._live.add(name)
            else:
                self._live.discard(name)
                self._die(name, now)
            self._touched[name] = None
            self._owners.clear()

    def _die(self, name: str, now: float) -> None:
        """What runs there is lost at once, and so is what waits."""
        scheduler = self._schedulers[name]
        for batch, (of, since) in list(self._of_batch.items()):
            if of == name:
                del self._of_batch[batch]
                self.busy[self._numbers[name]] += now - since
                lost = [Failed(Drained("its replica died")) for _ in batch.grants]
                scheduler.complete(batch, lost, now - since, now)
        while scheduler.close(now, drain=False):
            pass
        scheduler.next_batch(now)
        self._events += scheduler.take_events()


def name_of(replica: int) -> str:
    """The name by which robots are hashed."""
    return f"replica-{replica}"


class FleetPlan(NamedTuple):
    """What a fleet is to serve. Seconds. chunk: from an answer to the robot's next request. target: share of requests
    to be answered within the limit, which may be 0 for none."""

    robots: int
    chunk: float
    slo: float
    device: Affine
    noise: float
    max_batch_cost: float = 0.100
    hold: float = inf
    target: float = 0.99
    duration: float = 20.0
    warmup: float = 2.0
    seed: int = 0


class FleetRun(NamedTuple):
    """A simulated fleet. busy, busiest: mean share of the time that a device ran, and that of the busiest. robots: of
    the replica that owns most."""

    replicas: int
    report: Report
    busy: float
    busiest: float
    robots: int
    run: Run


def run_fleet(plan: FleetPlan, replicas: int, outages: Sequence[Outage] = ()) -> FleetRun:
    """Simulate all robots on all replicas."""
    fleet = Fleet(replicas, lambda: _scheduler(plan), outages)
    run = _simulated(plan, fleet, plan.robots, plan.seed)
    shares = [busy / plan.duration for busy in fleet.busy]
    owned = _owned(plan.robots, replicas)
    mean = min(1.0, sum(shares) / replicas)
    return FleetRun(replicas, Report.of(run), mean, min(1.0, max(shares)), max(owned.values()), run)


class Sizing(NamedTuple):
    """How many replicas: without a failure, and so that one may fail. on_time: of the busiest replica at `needed`.
    at_least: replicas that the mere device time takes."""

    needed: int
    with_one_failed: int
    on_time: float
    at_least: int


def size_fleet(plan: FleetPlan, progress: Callable[[str], None] = lambda _: None) -> Sizing:
    """The fewest replicas of which even the busiest reaches the target.

    A robot is bound to its replica, so the replica that owns most robots decides; it alone is simulated. ConfigError
    when a single request of one robot takes longer than the limit.
    """
    if plan.slo and plan.device.of(1) > plan.slo:
        raise ConfigError(
            f"--slo-ms={plan.slo * 1e3:g}: a single request takes {plan.device.of(1) * 1e3:g} ms; no number of "
            "replicas answers it in time"
        )
    known: dict[int, float] = {}

    def enough(robots: int) -> bool:
        if robots not in known:
            progress(f"a replica with {robots} robots")
            run = _simulated(plan, _scheduler(plan), robots, plan.seed)
            known[robots] = (Report.of(run).on_time or 0.0) if robots else 1.0
        return known[robots] >= plan.target

    most = _most(plan.robots, enough)
    if most == 0:
        raise ConfigError(f"--target={plan.target:g}: even one robot alone is answered in time less often")
    needed = _fewest(plan.robots, most)
    busiest = max(_owned(plan.robots, needed).values())
    enough(busiest)
    spare = max(needed + 1, _spare(plan.robots, needed, most))
    each = plan.robots / (plan.chunk + plan.device.of(1))
    return Sizing(needed, spare, known[busiest], max(1, ceil(each * plan.device.marginal)))


def _most(robots: int, enough: Callable[[int], bool]) -> int:
    """The most robots that one replica serves well, at most all of them; by doubling, then halving."""
    low, high = 0, 1
    while high < robots and enough(high):
        low, high = high, 2 * high
    high = min(high, robots)
    if enough(high):
        return high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def _fewest(robots: int, most: int) -> int:
    """The fewest replicas of which none owns more than `most` robots."""
    replicas = max(1, ceil(robots / most))
    while max(_owned(robots, replicas).values()) > most:
        replicas += max(1, replicas // 100)
    return replicas


def _spare(robots: int, needed: int, most: int) -> int:
    """The fewest replicas of which, if one dies, none owns more than `most`: whichever dies."""
    replicas = needed + 1
    while True:
        owned = _owned(robots, replicas)
        # Of those that die, the one with most robots hands most on; each goes to another by hash.
        dying = max(owned, key=lambda name: (owned[name], name))
        left = [name_of(i) for i in range(replicas) if name_of(i) != dying]
        if max(_owners(robots, left).values()) <= most:
            return replicas
        replicas += max(1, replicas // 100)


def _owned(robots: int, replicas: int) -> Counter[str]:
    return _owners(robots, [name_of(i) for i in range(replicas)])


def _owners(robots: int, names: Sequence[str]) -> Counter[str]:
    """How many robots each replica owns; of many robots it is computed with their names, as on a server."""
    return Counter(owner(f"caller-{i}", names) or "" for i in range(robots))


def _scheduler(plan: FleetPlan) -> Scheduler:
    hold = None if plan.hold == inf else plan.hold * 1e3
    serve = ServeConfig(max_batch_cost_ms=plan.max_batch_cost * 1e3, batch_timeout_ms=hold)
    scheduler = Scheduler([serve.group("default")])
    sizes = [("", n, plan.device.of(n)) for n in (1, 2, 4)] * 3
    warm = WarmUpLine("default", "", "", 1.0, sizes, [])  # as a server warms up
    teach(scheduler.cost_model("default"), "default", warm)
    return scheduler


def _simulated(plan: FleetPlan, scheduler: Fleet | Scheduler, robots: int, seed: int) -> Run:
    request = Request(time_limit=plan.slo or None)
    load = Callers(robots, Around(plan.chunk, SPREAD * plan.chunk), request)
    device = Noisy(plan.device, plan.noise)
    return simulate(scheduler, load, device, duration=plan.duration, warmup=plan.warmup, seed=seed)


def in_words(plan: FleetPlan, found: FleetRun, sizing: Sizing | None, outages: Sequence[Outage] = ()) -> str:
    """A run for people."""
    report, count = found.report, found.replicas
    asks = f"{plan.robots}, which ask {plan.chunk * 1e3:g} ms after each answer"
    rows = [("robots", f"{asks}; the busiest replica owns {found.robots}")]
    if sizing is not None:
        rows.append(("replicas", f"{sizing.needed}; {sizing.with_one_failed} so that one may fail"))
        rows.append(("why", f"the busiest of them answers {sizing.on_time:.2%} in time, asked for {plan.target:.2%}"))
    else:
        rows.append(("replicas", str(count)))
    rows += [
        ("answered", f"{report.throughput:.1f} /s of {report.offered:.1f} /s, {report.goodput:.1f} /s on time"),
        ("on time", "–" if report.on_time is None else f"{report.on_time:.2%}"),
        ("latency", f"p50 {_ms(report.p50)}, p95 {_ms(report.p95)}, p99 {_ms(report.p99)} ms"),
        ("devices", f"busy {found.busy:.1%}, the busiest {found.busiest:.1%}"),
        ("outcomes", ", ".join(f"{name} {n}" for name, n in report.outcomes.items()) or "–"),
    ]
    for outage in outages:
        for what, first, last in (
            ("before", plan.warmup, outage.at), ("during", outage.at, outage.until),
            ("after", outage.until, plan.duration),
        ):  # fmt: skip
            if last > first:
                rows.append((f"{what} the loss", _part(found.run, first, last)))
    return "\n".join(f"{name:<17}{value}" for name, value in rows)


def _part(run: Run, first: float, last: float) -> str:
    """A part of a run, of requests that came in it."""
    answers = [a for a in run.answers if first <= a.arrived < last]
    good = sorted(a.latency for a in answers if a.outcome == "ok")
    missed = sum(not a.on_time for a in answers)
    p99 = _ms(percentile(good, 0.99)) if good else "–"
    return f"{first:g} to {last:g} s: p99 {p99} ms, {missed} of {len(answers)} not in time"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"
