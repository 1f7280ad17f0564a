"""Compares joins at step boundaries with whole chunks, for robots on a policy with a prefix and denoise steps.

These are the rows of `python -m bench.sim stages`, for one device or for several ratios of prefix to step. *Whole
chunks* and *rule* are the real scheduler, with one-shot work and with work in stages. *Always join* runs the prefix of
new requests before the residents' next step at any cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from bench.sim.compare import Bench, Progress, Results
from bench.sim.rivals import AlwaysJoin
from bench.sim.rules import Decider
from reflex_runtime.core.batch import Batch, Done, More, Outcome
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.sim.report import Report, columns
from reflex_runtime.sim.run import Affine, Noisy, Service, simulate
from reflex_runtime.sim.workload import Callers, Exponential, Think

STAGES = PREFIX, DENOISE = "prefix", "denoise"
BUDGET = 10.0  # seconds: far above every chunk here, so that the budget decides nothing


@dataclass(frozen=True, slots=True)
class Staged:
    """A device on which every stage takes its own time."""

    stages: Mapping[str, Service]

    def seconds(self, batch: Batch, now: float, rng: Random) -> float:
        return self.stages[batch.stage].seconds(batch, now, rng)


@dataclass(frozen=True, slots=True)
class Normal:
    """Normally distributed, and never below 0."""

    mean: float
    sigma: float

    def draw(self, rng: Random) -> float:
        return max(0.0, rng.gauss(self.mean, self.sigma))


@dataclass(frozen=True, slots=True)
class StagedDevice:
    """Seconds of a prefix and of a denoise step, and how many steps an answer takes."""

    prefix: Affine
    step: Affine
    steps: int = 10

    @property
    def chunk(self) -> Affine:
        """A prefix and all steps in one call."""
        fixed = self.prefix.fixed + self.steps * self.step.fixed
        return Affine(fixed, self.prefix.marginal + self.steps * self.step.marginal)


    def with_ratio(self, ratio: float) -> StagedDevice:
        """The same, but a prefix for one takes `ratio` times as long as a step for one. An answer for one takes as long
        as before; the shares of fixed and marginal time in each call stay."""
        step = self.chunk.of(1) / (ratio + self.steps)
        return StagedDevice(_scaled(self.prefix, ratio * step), _scaled(self.step, step), self.steps)


def _scaled(line: Affine, one: float) -> Affine:
    """The line that takes `one` seconds for one request."""
    factor = one / line.of(1)
    return Affine(line.fixed * factor, line.marginal * factor)


LARGE = StagedDevice(Affine(0.012, 0.0045), Affine(0.0055, 0.0006))
SMALL = StagedDevice(Affine(0.008, 0.002), Affine(0.003, 0.0002))
EXP_500, EXP_150, PERIODIC = Exponential(0.500), Exponential(0.150), Normal(0.500, 0.025)
QUICK, SLOW = Normal(0.250, 0.012), Normal(1.0, 0.010)


@dataclass(frozen=True, slots=True)
class Case:
    """A row: a number of robots with their think times, on one device."""

    name: str
    robots: int
    think: Think
    device: StagedDevice = LARGE


CASES = (
    Case("8 robots, exp 500", 8, EXP_500),
    Case("8 robots, 500 ± 25", 8, PERIODIC),
    Case("8 robots, exp 150", 8, EXP_150),
    Case("16 robots, exp 500", 16, EXP_500),
    Case("16 robots, 500 ± 25", 16, PERIODIC),
    Case("32 robots, 500 ± 25", 32, PERIODIC),
    Case("32 robots, exp 150", 32, EXP_150),
    Case("small model, 8 robots, 500 ± 25", 8, PERIODIC, SMALL),
    Case("small model, 16 robots, 500 ± 25", 16, PERIODIC, SMALL),
    Case("small model, 32 robots, 500 ± 25", 32, PERIODIC, SMALL),
    Case("4 robots, 250 ± 12", 4, QUICK),
    Case("8 robots, 250 ± 12", 8, QUICK),
    Case("16 robots, 250 ± 12", 16, QUICK),
    Case("8 robots, 1000 ± 10", 8, SLOW),
    Case("16 robots, 1000 ± 10", 16, SLOW),
)


def ratio_cases(ratios: Sequence[float]) -> list[Case]:
    """Rows for each ratio of prefix to step: periodic robots, and such with exponential think times."""
    return [
        Case(f"{ratio:g}:1, {robots} robots, {name}", robots, think, LARGE.with_ratio(ratio))
        for ratio in ratios
        for name, think in (("500 ± 25", PERIODIC), ("exp 500", EXP_500))
        for robots in (4, 8, 16, 32)
    ]


def _scheduler(cost: Callable[[], TimeCost], batch_timeout: float) -> Scheduler:
    return Scheduler([GroupConfig(flush=FlushPolicy.window(BUDGET, batch_timeout), cost=cost)])


def _staged(device: StagedDevice) -> Service:
    return Staged({PREFIX: device.prefix, DENOISE: device.step})


@dataclass(frozen=True, slots=True)
class Plan:
    """A column: how requests of a device are scheduled. staged: whether its calls are single stages or whole chunks."""

    name: str
    make: Callable[[float], Decider]
    staged: bool = True

    def service(self, device: StagedDevice) -> Service:
        """The service model of the device under this plan."""
        return _staged(device) if self.staged else device.chunk

    def request(self, device: StagedDevice) -> Request:
        """What a robot asks for: the prefix and then each step, or all of them in one call."""
        return Request(stage=PREFIX, wants=1.0 + device.steps) if self.staged else Request()


WHOLE = Plan("whole chunks", partial(_scheduler, TimeCost), staged=False)
ALWAYS = Plan("always join", lambda _: AlwaysJoin())
RULE = Plan("rule", partial(_scheduler, lambda: TimeCost(STAGES)))
PLANS = (WHOLE, ALWAYS, RULE)


def run_case(case: Case, plan: Plan, bench: Bench) -> Report:
    """One cell. Of the bench: noise (of every call), duration, warmup, seed and the timeout."""
    run = simulate(
        plan.make(bench.setting.batch_timeout),
        Callers(case.robots, case.think, plan.request(case.device)),
        Noisy(plan.service(case.device), bench.noise),
        duration=bench.duration,
        warmup=min(bench.warmup, bench.duration / 2.0),
        seed=bench.seed,
        outcome=denoised,
    )
    return Report.of(run)


def denoised(ticket: Ticket, units: float) -> Outcome:
    """The processor's answer: the next step, or the end."""
    left = ticket.wants - units
    return More(wants=left, stage=DENOISE) if left > 0.0 else Done()


def stages(bench: Bench, progress: Progress = lambda _: None, cases: Sequence[Case] = CASES) -> Results:
    """Every case under every plan."""
    results: Results = {}
    for case in cases:
        for plan in PLANS:
            progress(f"stages: {case.name}, {plan.name}")
            results.setdefault(case.name, {})[plan.name] = run_case(case, plan, bench)
    return results


def stages_table(results: Results) -> str:
    """Mean / 99th percentile in ms, by case and plan."""
    header = ["mean / p99 ms", *next(iter(results.values()))]
    return columns(header, [[case, *map(_cell, by.values())] for case, by in results.items()])


def _cell(report: Report) -> str:
    return f"{1e3 * (report.mean or 0.0):.0f} / {1e3 * (report.p99 or 0.0):.0f}"
