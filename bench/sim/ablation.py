"""What each adaptive rule of the scheduler brings: each switched off over the same loads, in virtual time.

A cell is what the rule's absence costs in that load, in percent: the worst of the share on time (of urgent requests
where there are any), the rate, Jain's index and, where all are on time, the mean latency; p99 follows where it is worse
by a tenth. A rule stays if it brings 3 % somewhere. The first table has the figures of the whole scheduler, and the
clairvoyant's share on time where the bound exists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

from bench.sim import stages
from bench.sim.clairvoyant import most_on_time
from bench.sim.compare import Progress
from bench.sim.loads import Camera, Drifting, Every
from bench.sim.rules import DEVICE
from reflex_runtime.core import cost, flush, forming, holding, order
from reflex_runtime.core.batch import Apart, Batch, Failed, Offenders, Outcome
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.flush import FlushPolicy, Planner
from reflex_runtime.core.group import Group, GroupConfig
from reflex_runtime.core.holding import NO_HOLD, Hold, ThinkTimes
from reflex_runtime.core.request import Priority, Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.core.statistics import AffineFit
from reflex_runtime.run.coordinator import BatchConfig
from reflex_runtime.settings import ServeConfig
from reflex_runtime.sim.report import Report, columns
from reflex_runtime.sim.run import Affine, Noisy, Service, simulate
from reflex_runtime.sim.workload import (
    Around,
    Arrivals,
    Bursty,
    Callers,
    Diurnal,
    Exponential,
    Fixed,
    Heavy,
    Open,
    Poisson,
    Think,
    WorkloadPart,
)

NOISE, WARM_UP = 0.03, 1.0
WORTH, TAIL = 0.03, 0.10  # what is shown of a cell: a cost from here on, and of p99
SATURATED = 437.0  # requests a second of `DEVICE` in batches of eight fixed parts
QUICK, BEHIND = Affine(0.016, 0.0012), Priority.BACKGROUND

Switch = tuple[Any, str, Any]  # an object, a name of it, and what stands there while the rule is off


# -- loads -------------------------------------------------------------------------------------------------------------


def served(**settings: Any) -> list[GroupConfig]:
    """What `reflex serve` schedules by."""
    return [ServeConfig(**settings).group("default")]


def short(budget_ms: float = 100.0) -> list[GroupConfig]:
    return served(max_batch_cost_ms=budget_ms)


def in_stages() -> list[GroupConfig]:
    return [GroupConfig(flush=FlushPolicy.window(stages.BUDGET), cost=partial(TimeCost, stages.STAGES))]


def of_feeds() -> list[GroupConfig]:
    return [BatchConfig(max_batch_size=8, max_latency=0.050).group("default")]


def of_tenants() -> list[GroupConfig]:
    return [ServeConfig().group(name, tenant=name) for name in ("one", "two")]


@dataclass(frozen=True, slots=True)
class Load:
    """A column. bounded: whether the clairvoyant's share exists. poison: whether requests may be bad."""

    name: str
    parts: Sequence[WorkloadPart]
    device: Service = DEVICE
    groups: Callable[[], list[GroupConfig]] = served
    bounded: bool = False
    poison: bool = False
    outcome: Callable[..., Outcome] | None = None

    def run(self, duration: float, seed: int) -> Report:
        scheduler = (Poisoned if self.poison else Scheduler)(self.groups())
        device = Noisy(self.device, NOISE)
        done = simulate(
            scheduler, self.parts, device, duration=duration, warmup=WARM_UP, seed=seed, outcome=self.outcome
        )
        return Report.of(done)

    def bound(self, duration: float, seed: int) -> float:
        """The clairvoyant's share on time, on a device without noise."""
        ((stream,),) = [part.streams(f"{seed}/0") for part in self.parts]
        times: list[float] = []
        while (arrival := stream.next(0.0)) is not None and arrival.at < duration:
            times += [arrival.at] if arrival.at >= WARM_UP else []
        return most_on_time(times, 0.100, DEVICE.fixed, DEVICE.marginal) / len(times)


class Poisoned(Scheduler):
    """One whose batches fail as a whole if one of their requests is bad."""

    def complete(self, batch: Batch, outcomes: Sequence[Outcome], elapsed: float, now: float) -> None:
        if any(ticket.request.payload == "bad" for ticket in batch.grants):
            error = ProcessorError("a bad request")
            outcomes = [Failed(error)] if len(batch) == 1 else [Apart(error)] * len(batch)
        super().complete(batch, outcomes, elapsed, now)


@dataclass(frozen=True, slots=True)
class Slowed:
    """A device whose batches take `added` seconds more from the third second on."""

    inner: Service
    added: float

    def seconds(self, batch: Batch, now: float, rng: Random) -> float:
        return self.inner.seconds(batch, now, rng) + (self.added if now >= 3.0 else 0.0)


def once(arrivals: Arrivals, limit: float | None = None, **more: Any) -> Open:
    """Each request is of a client of its own."""
    return Open(arrivals, (Request(time_limit=limit, **more),), strangers=True)


def several(arrivals: Arrivals, *limits: float) -> Open:
    """The same with several time limits."""
    return Open(arrivals, [Request(time_limit=limit) for limit in limits], strangers=True)


def robots(rate: float, count: int, limit: float | None = None, **more: Any) -> Open:
    name = more.get("payload", "robot")
    return Open(Poisson(rate), [Request(client=(name, i), time_limit=limit, **more) for i in range(count)])


def cameras(*rates: float, jitter: float = 0.0) -> list[WorkloadPart]:
    return [Camera(Every(1.0 / rate, jitter / rate), Request(client=i)) for i, rate in enumerate(rates)]


def steps(name: str, count: int, think: Think) -> Load:
    plan = stages.RULE
    callers = Callers(count, think, plan.request(stages.LARGE))
    return Load(name, [callers], plan.service(stages.LARGE), in_stages, outcome=stages.denoised)


def one_by_one(count: int) -> list[WorkloadPart]:
    """Callers whose answers are written, and next requests read, one by one."""
    return [Callers(1, Fixed(0.0003 + 0.00015 * i), name=str(i)) for i in range(count)]


def loads() -> list[Load]:
    soon, urgent = Around(0.008, 0.003), Priority.URGENT
    late = [
        Open(Poisson(8.0), [Request(client=("t", i), partition=i, shape=i, time_limit=0.12)]) for i in range(3)
    ]
    waiting = [Callers(4, Exponential(0.02), Request(partition=i, shape=i), name=str(i)) for i in (10, 11, 12)]
    three = [
        Callers(24, Around(0.02, 0.005), name="usual"),
        Callers(8, Exponential(0.05), Request(priority=urgent), "urgent"),
        Callers(8, Exponential(0.1), Request(priority=BEHIND), "behind"),
    ]
    two = [
        Callers(32, Fixed(0.001), Request(group="one"), "many"),
        Callers(4, Around(0.05, 0.01), Request(group="two"), "few"),
    ]
    greedy = Open(Poisson(600.0), [Request(client="greedy", time_limit=0.150)])
    modest = [Open(Poisson(20.0), [Request(client=i, time_limit=0.150)]) for i in range(7)]
    limited = [
        Load("300/s", [once(Poisson(300.0), 0.1)]),
        Load("400/s", [once(Poisson(400.0), 0.1)]),
        Load("600/s", [once(Poisson(600.0), 0.1)]),
        Load("bursts", [once(Bursty(250.0), 0.1)]),
        Load("diurnal", [once(Diurnal(250.0, period=8.0), 0.1)]),
        Load("heavy tails", [once(Heavy(250.0), 0.1)]),
    ]
    return [
        *[Load(f"Poisson {share:.0%}", [once(Poisson(SATURATED * share))]) for share in (0.5, 0.8, 0.9, 0.95)],
        *[replace(load, groups=short, bounded=True) for load in limited],
        Load("bursts, 3 limits", [several(Bursty(250.0), 0.06, 0.1, 0.3)], groups=short),
        Load("1 caller", [Callers(1, soon)], QUICK),
        Load("8 callers", [Callers(8, soon)], QUICK),
        Load("8, half 300 ms", [Callers(4, Fixed(0.001), name="a"), Callers(4, Fixed(0.3), name="b")]),
        Load("8, 100 ± 5 ms", [Callers(8, Around(0.1, 0.005))]),
        Load("16, 60 + n ms", [Callers(16, Around(0.02, 0.01))], Affine(0.06, 0.001)),
        Load("32 callers", [Callers(32, soon)], QUICK),
        Load("32, pictures", [Callers(32, Around(0.0003, 0.0001), prepared_in=0.0003)], QUICK),
        Load("128 callers", [Callers(128, Around(0.010, 0.005))], QUICK),
        Load("128, after 1 ms", [Callers(128, Fixed(0.001))], QUICK),
        Load("128, 119 fit", [Callers(128, Fixed(0.002))], Affine(0.0355, 0.00445)),
        Load("250, 119 fit", [Callers(250, Fixed(0.002))], Affine(0.0355, 0.00445)),
        Load("32, one by one", one_by_one(32), Affine(0.002, 0.0001)),
        Load("cameras 60 25 12", cameras(60.0, 25.0, 12.0, jitter=0.1), Affine(0.006, 0.002), of_feeds),
        Load("cameras 4 × 30", cameras(*[30.0] * 4), Affine(0.010, 0.002), of_feeds),
        steps("4 robots, steps", 4, stages.QUICK),
        steps("16 robots, steps", 16, stages.PERIODIC),
        steps("8 robots, steps", 8, stages.EXP_500),
        steps("8 robots, 1 s", 8, stages.Normal(1.0, 0.010)),
        Load("slow spell × 8", [robots(150.0, 20, 0.25)], Drifting(DEVICE, 8.0, 3.0, until=6.0)),
        Load("slow spell × 20", [robots(100.0, 20, 0.1)], Drifting(DEVICE, 20.0, 3.0, until=5.0)),
        Load("× 3 for good", [robots(150.0, 20, 0.2)], Drifting(DEVICE, 3.0, 3.0)),
        Load("+ 60 ms", [Callers(8, soon)], Slowed(QUICK, 0.060)),
        Load("20 % poison", [robots(120.0, 16), robots(30.0, 4, payload="bad")], poison=True),
        Load("poison, once", [once(Poisson(100.0)), once(Poisson(25.0), payload="bad")], poison=True),
        Load("greedy and 7", [greedy, *modest], groups=partial(short, 150.0)),
        Load("urgent", [robots(78.0, 4, 0.050, priority=urgent), robots(702.0, 40, 0.100)], groups=short),
        Load("3 tiers", three),
        Load("6 shapes", [*late, *waiting]),
        Load("2 tenants", two, groups=of_tenants),
    ]


# -- rules -------------------------------------------------------------------------------------------------------------


def _no_plan(self: Any, base: FlushPolicy, a: float, b: float, sigma: float) -> float:
    if b <= 0.0 or base.max_batch_cost == inf or not self._demand:
        return base.max_batch_cost
    return float(self._longest(base, a, b))


def _by_gain(whole: Callable[..., tuple[Hold, Hold]], self: ThinkTimes, *args: Any) -> tuple[Hold, Hold]:
    return whole(self, *args)[0], NO_HOLD


def _thinks_only(self: Any, now: float) -> None:
    self.answered = self.since = now
    self.ordered = self.thinks.ordered


def rules() -> dict[str, Switch]:
    """Each rule, and what is there without it."""
    ungathered = ThinkTimes.hold
    return {
        "returns": (holding.Holding, "_for_returns", lambda *_: NO_HOLD),
        "gathering": (ThinkTimes, "hold", lambda self, *args: _by_gain(ungathered, self, *args)),
        "even parts": (holding, "_even_part", lambda found, queued, most: most),
        "gaps": (holding._Client, "answer", _thinks_only),
        "pace of preparing": (ThinkTimes, "_ready_soon", lambda *_: []),
        "a long fixed part": (Planner, "_longest", lambda self, base, a, b: base.max_batch_cost),
        "planned batches": (Planner, "_plan", _no_plan),
        "urgent ones together": (forming.Former, "_for_urgent", lambda self, policy, head: policy),
        "who cannot wait": (forming, "LATER", -inf),
        "greedy clients": (flush._Demand, "exceeds", lambda self, fair: False),
        "value of a batch": (forming, "at_risk", lambda *_: False),
        "prices": (Group, "steady_price", lambda self, kind, cost: cost),
        "evidence": (cost.Evidence, "refuses", lambda *_: True),
        "laxity of partitions": (order.Turns, "_at_risk", lambda *_: []),
        "offenders": (Offenders, "failed", lambda *_: None),
        "size by poison": (Offenders, "limit", property(lambda self: inf)),
        "joining": (forming.Former, "_enters", lambda *_: False),
        "joining in turns": (ThinkTimes, "in_turns", lambda *_: inf),
        "drift": (AffineFit, "_drifted", lambda *_: False),
        "nearly free": (cost, "NEARLY_FREE", 1.0),
    }


@contextmanager
def without(names: Collection[str]) -> Iterator[None]:
    """The scheduler without these rules."""
    with ExitStack() as stack:
        for of, name, other in [rules()[rule] for rule in names]:
            stack.enter_context(patch.object(of, name, other))
        yield


# -- the table ---------------------------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """Means over the seeds. Seconds, and a second."""

    on_time: float
    mean: float
    p99: float
    rate: float
    jain: float

    @classmethod
    def of(cls, load: Load, duration: float, seeds: int) -> Figures:
        rows = []
        for seed in range(seeds):
            found = load.run(duration, seed)
            on_time = found.on_time_by.get("urgent", found.on_time)
            jain = 1.0 if found.fairness is None else found.fairness
            rows.append((on_time or 0.0, found.mean or 0.0, found.p99 or 0.0, found.throughput, jain))
        return cls(*(sum(values) / seeds for values in zip(*rows, strict=True)))

    def cost(self, whole: Figures) -> tuple[float, float]:
        """What is worse than with the whole scheduler, as shares: the worst of all but p99, and p99."""
        worse = [1.0 - mine / its for mine, its in zip(self[3:], whole[3:], strict=True)]
        worse.append(1.0 - self.on_time / whole.on_time)
        if whole.on_time > 0.9999:
            worse.append(self.mean / whole.mean - 1.0)
        return max(worse), self.p99 / whole.p99 - 1.0


def whole_table(duration: float, seeds: int, progress: Progress) -> tuple[str, dict[str, Figures]]:
    """The whole scheduler, load by load."""
    found, rows = {}, []
    for load in loads():
        progress(f"ablation: {load.name}")
        one = found[load.name] = Figures.of(load, duration, seeds)
        bound = sum(load.bound(duration, seed) for seed in range(seeds)) / seeds if load.bounded else None
        best = "" if bound is None else f"{bound:.1%}"
        times = f"{one.mean * 1e3:.0f}", f"{one.p99 * 1e3:.0f}", f"{one.rate:.0f}", f"{one.jain:.2f}"
        rows.append([load.name, f"{one.on_time:.1%}", best, *times])
    return columns(["load", "on time", "clairvoyant", "mean ms", "p99 ms", "answers/s", "Jain"], rows), found


def rule_row(rule: str, whole: dict[str, Figures], duration: float, seeds: int, progress: Progress) -> str:
    """Where the rule's absence costs something, the most first; several rules are joined by +."""
    found = []
    with without(rule.split("+")):
        for load in loads():
            progress(f"ablation: without {rule}, {load.name}")
            found.append((*Figures.of(load, duration, seeds).cost(whole[load.name]), load.name))
    dear = [
        f"{name} {cost:.0%}" + (f" (p99 {tail:.0%})" if tail >= TAIL else "")
        for cost, tail, name in sorted(found, reverse=True)
        if cost >= WORTH or tail >= TAIL
    ]
    return f"{rule}: {', '.join(dear) or f'nothing above {max(found)[0]:.1%}'}"
