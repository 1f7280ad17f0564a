"""The comparisons to print before and after every change to the scheduler: fixed cases, seeds and rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.sim import rules
from bench.sim.clairvoyant import most_on_time
from bench.sim.loads import Camera, Every
from bench.sim.rivals import WholeGroup
from bench.sim.rules import DEVICE, Rule, Setting
from reflex_runtime.core.request import Priority, Request
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

Progress = Callable[[str], None]
ROBOTS = 40  # in the loads of `overload`
Results = dict[str, dict[str, Report]]  # case or rule → column → report

OVERLOAD_RULES = (
    rules.COUNT_8,
    rules.COUNT_32,
    rules.BY_COST,
    replace(rules.GREEDY, build=lambda s: rules.GREEDY.build(replace(s, max_batch_size=64))),
    rules.EARLY_DROP,
    rules.MARGINAL_WAIT,
    rules.UNPLANNED,
    rules.WINDOW,
)
CLOSED_RULES = (rules.UNHELD, rules.HOLD_ALWAYS, rules.WINDOW)
RETURN_RULES = (rules.UNHELD, rules.WINDOW_3, rules.WINDOW)
FEED_RULES = (rules.BY_SIZE, rules.GREEDY, rules.FEEDS)
FAIR_RULES = (rules.GREEDY, rules.ONE_IN_FLIGHT, rules.UNPLANNED, rules.WINDOW)
PRIORITY_RULES = (rules.GREEDY, rules.UNPLANNED, rules.WINDOW)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases share. slo: seconds; noise: relative; duration, warmup: seconds."""

    device: Affine = DEVICE
    noise: float = 0.05
    slo: float = 0.100
    duration: float = 60.0
    warmup: float = 2.0
    seed: int = 0
    setting: Setting = field(default_factory=Setting)

    @property
    def lossless(self) -> float:
        """(1 − 2a/D)/b requests a second: evenly spaced, all can be on time up to this rate; above it some cannot."""
        fixed, marginal = self.device.fixed, self.device.marginal
        return max((1.0 - 2.0 * fixed / self.slo) / marginal, 0.25 * (1.0 - fixed / self.slo) / marginal)

    @property
    def warmed_at(self) -> float:
        """Seconds from which on requests count."""
        return min(self.warmup, self.duration / 2.0)

    def run(self, rule: Rule, workload: Sequence[WorkloadPart], noise: float | None = None) -> Report:
        """One rule on one workload."""
        service: Service = Noisy(self.device, self.noise if noise is None else noise)
        setting = replace(self.setting, device=self.device, goal=self.slo)
        run = simulate(
            rule.make(setting),
            workload,
            service,
            duration=self.duration,
            warmup=self.warmed_at,
            seed=self.seed,
        )
        return Report.of(run)


def overload(
    bench: Bench, progress: Progress = lambda _: None, only: Collection[str] = (), ruled: Collection[str] = ()
) -> Results:
    """On-time share by rule and load. only, ruled: names of loads and of rules, all of them when empty."""
    loads = {name: load for name, load in loads_of(bench).items() if not only or name in only}
    results: Results = {}
    for rule in (rule for rule in OVERLOAD_RULES if not ruled or rule.name in ruled):
        for name, workload in loads.items():
            progress(f"overload: {rule.name}, {name}")
            results.setdefault(rule.name, {})[name] = bench.run(rule, workload)
    return results


def overload_bounds(bench: Bench, progress: Progress = lambda _: None) -> dict[str, float]:
    """On-time shares by load that no rule could exceed, on a device without noise."""
    bounds = {}
    for name, (source,) in loads_of(bench).items():
        progress(f"overload: clairvoyant, {name}")
        arrivals = [at for at in _arrivals(source, f"{bench.seed}/0", bench.duration) if at >= bench.warmed_at]
        bounds[name] = most_on_time(arrivals, bench.slo, bench.device.fixed, bench.device.marginal) / len(arrivals)
    return bounds


def _arrivals(source: WorkloadPart, seed: str, duration: float) -> Iterator[float]:
    """Arrivals of a source that does not wait for answers."""
    (stream,) = source.streams(seed)
    while (arrival := stream.next(0.0)) is not None and arrival.at < duration:
        yield arrival.at


def loads_of(bench: Bench) -> dict[str, tuple[Open]]:
    """Forty robots: Poisson arrivals at 5/6, 1, 4/3 and 2 times the lossless rate, and other arrivals at 5/6 of it."""
    robots = [Request(client=i, time_limit=bench.slo) for i in range(ROBOTS)]
    rate, usual = bench.lossless, bench.lossless * 5 / 6
    loads: dict[str, Arrivals] = {f"{rate * f:.0f}/s": Poisson(rate * f) for f in (5 / 6, 1.0, 4 / 3, 2.0)}
    loads |= {"bursty": Bursty(usual), "diurnal": Diurnal(usual), "heavy": Heavy(usual)}
    return {name: (Open(arrivals, robots),) for name, arrivals in loads.items()}


def closed_loop(bench: Bench, progress: Progress = lambda _: None) -> Results:
    """Callers that ask, think and ask again, under rules that wait for them or do not."""
    ms, fast, slow = 0.001, Fixed(0.001), Fixed(0.300)
    cases: list[tuple[str, list[tuple[int, Think]]]] = [
        ("8, 1 ms fixed", [(8, fast)]),
        ("8, exponential 5 ms", [(8, Exponential(5 * ms))]),
        ("8, half 1 ms, half 300 ms", [(4, fast), (4, slow)]),
        ("8, robots 100 ± 5 ms", [(8, Around(100 * ms, 5 * ms))]),
        ("32, 1 ms fixed", [(32, fast)]),
        ("32, half 1 ms, half 300 ms", [(16, fast), (16, slow)]),
        ("32, exponential 50 ms", [(32, Exponential(50 * ms))]),
        ("32, exponential 1 ms", [(32, Exponential(1 * ms))]),
    ]
    results: Results = {}
    for name, callers in cases:
        workload = [Callers(n, think, name=f"{name}/{i}") for i, (n, think) in enumerate(callers)]
        for rule in CLOSED_RULES:
            progress(f"closed loop: {name}, {rule.name}")
            results.setdefault(name, {})[rule.name] = bench.run(rule, workload, noise=min(bench.noise, 0.03))
    return results


def returning(bench: Bench, progress: Progress = lambda _: None) -> Results:
    """Callers that ask again at once, or some time after their answer, also with a picture that is decoded first, one
    after the other: against rules that do not know when they come, and one that knows their number."""
    ms = 0.001
    cases: list[tuple[int, float, float]] = [
        (n, think * ms, decoding * ms)
        for n in (8, 32)
        for think, decoding in ((0.3, 0.0), (9.0, 0.0), (15.0, 0.0), (30.0, 0.0), (0.3, 0.3), (0.3, 1.0), (0.3, 1.5))
    ]
    results: Results = {}
    for n, think, decoding in cases:
        name = f"{n}, after {think / ms:g} ms" + (f", {decoding / ms:g} ms a picture" if decoding else "")
        workload = [Callers(n, Around(think, 0.1 * think), prepared_in=decoding)]
        whole = Rule("whole group", lambda s, n=n: WholeGroup(n))  # type: ignore[misc]
        for rule in (*RETURN_RULES, whole):
            progress(f"returns: {name}, {rule.name}")
            results.setdefault(name, {})[rule.name] = bench.run(rule, workload, noise=min(bench.noise, 0.03))
    return results


def feeds(
    bench: Bench, progress: Progress = lambda _: None, only: Collection[str] = (), ruled: Collection[str] = ()
) -> Results:
    """Cameras of equal and of different rates, and files that ask at once, on one processor; holds up to 50 ms.

    Batches of at most 8, of 16 for files. Each camera keeps its newest frame. only, ruled: as of `overload`.
    """
    ms, usual = 0.001, Affine(0.005, 0.001)
    in_step = [Camera(Every(1.0 / 30.0, phase=c * ms), Request(client=c)) for c in range(4)]
    cases: list[tuple[str, Affine, Sequence[WorkloadPart]]] = [
        ("30 + 10 fps, 5 + 1n ms", usual, _cameras((1, 30.0), (1, 10.0))),
        ("30 + 30 + 10 + 5 fps, 5 + 1n ms", usual, _cameras((2, 30.0), (1, 10.0), (1, 5.0))),
        ("30 + 1 fps, 5 + 1n ms", usual, _cameras((1, 30.0), (1, 1.0))),
        (
            "60 + 25 + 12 fps with jitter, 6 + 2n ms",
            Affine(6 * ms, 2 * ms),
            _cameras((1, 60.0), (1, 25.0), (1, 12.0), jitter=0.1),
        ),
        ("4 × 30 fps, 10 + 2n ms", Affine(10 * ms, 2 * ms), _cameras((4, 30.0))),
        ("4 × 30 fps in step, 10 + 2n ms", Affine(10 * ms, 2 * ms), in_step),
        ("12 × 5 fps, 30 + 3n ms", Affine(30 * ms, 3 * ms), _cameras((12, 5.0))),
        ("16 files, 120 ms whatever n", Affine(120 * ms, 0.0), [Callers(16, Around(3 * ms, 1 * ms))]),
    ]
    results: Results = {}
    for name, device, workload in (case for case in cases if not only or case[0] in only):
        size = 16 if "files" in name else 8
        setting = replace(bench.setting, batch_timeout=0.050, max_batch_size=size)
        here = replace(bench, device=device, setting=setting)
        for rule in (rule for rule in FEED_RULES if not ruled or rule.name in ruled):
            progress(f"feeds: {name}, {rule.name}")
            results.setdefault(name, {})[rule.name] = here.run(rule, workload, noise=min(bench.noise, 0.03))
    return results


def _cameras(*kinds: tuple[int, float], jitter: float = 0.0) -> list[WorkloadPart]:
    """So many cameras of so many frames a second, in phases of their own. jitter: as a share of the period."""
    return [
        Camera(Every(1.0 / fps, jitter / fps), Request(client=(i, k)))
        for k, (count, fps) in enumerate(kinds)
        for i in range(count)
    ]


def fairness(bench: Bench, progress: Progress = lambda _: None) -> Results:
    """One greedy feed of twice the lossless rate beside seven modest ones of 1/15 of it; time limit 1.5 × the SLO."""
    limit = 1.5 * bench.slo
    rates = {"greedy": 2.0 * bench.lossless, **{f"modest-{i}": bench.lossless / 15.0 for i in range(7)}}
    workload = [Open(Poisson(r), (Request(client=c, time_limit=limit),)) for c, r in rates.items()]
    budget = ServeConfig(max_batch_cost_ms=1e3 * max(limit, bench.setting.max_batch_cost))
    longer = replace(bench, setting=replace(bench.setting, serve=budget))
    results: Results = {}
    for rule in FAIR_RULES:
        progress(f"fairness: {rule.name}")
        results[rule.name] = {"": longer.run(rule, workload)}
    return results


def priority(bench: Bench, progress: Progress = lambda _: None) -> Results:
    """Urgent requests with half the time limit, a tenth of 2.6 times the lossless rate."""
    rate = 2.6 * bench.lossless
    urgent = Request(client="urgent", priority=Priority.URGENT, time_limit=bench.slo / 2.0)
    usual = Request(client="usual", time_limit=bench.slo)
    workload = [Open(Poisson(0.1 * rate), (urgent,)), Open(Poisson(0.9 * rate), (usual,))]
    results: Results = {}
    for rule in PRIORITY_RULES:
        progress(f"priority: {rule.name}")
        results[rule.name] = {"": bench.run(rule, workload)}
    return results


# -- as tables ---------------------------------------------------------------------------------------------------------


def overload_table(results: Results, bounds: Mapping[str, float]) -> str:
    """On-time shares, and what is possible at most."""
    header = ["on time, offered", *next(iter(results.values()))]
    rows = [[rule, *(f"{r.on_time or 0.0:.3f}" for r in by_load.values())] for rule, by_load in results.items()]
    rows.append(["clairvoyant", *(f"{share:.3f}" for share in bounds.values())])
    return columns(header, rows)


def closed_table(results: Results) -> str:
    """Throughput · median · 99th percentile."""
    header = ["requests/s · p50 · p99 ms", *next(iter(results.values()))]
    rows = [[case, *(_closed_cell(r) for r in by_rule.values())] for case, by_rule in results.items()]
    return columns(header, rows)


def returning_table(results: Results) -> str:
    """Mean batch · throughput · median · 99th percentile."""
    header = ["batch · requests/s · p50 · p99 ms", *next(iter(results.values()))]
    rows = [[case, *(_returning_cell(r) for r in by_rule.values())] for case, by_rule in results.items()]
    return columns(header, rows)


def feeds_table(results: Results) -> str:
    """Frames lost · 95th percentile of the frames' age · share of the time the processor ran · mean batch."""
    header = ["lost · p95 ms · busy · batch", *next(iter(results.values()))]
    rows = [[case, *(_feeds_cell(r) for r in by_rule.values())] for case, by_rule in results.items()]
    return columns(header, rows)


def fairness_table(results: Results) -> str:
    """On time per second, Jain's index, and the on-time share of each kind of feed."""
    header = ["one greedy feed, seven modest", "on time/s", "Jain", "greedy on time", "modest on time"]
    rows = []
    for rule, by in results.items():
        report = by[""]
        made, good = report.clients["greedy"]
        modest = [v for c, v in report.clients.items() if c != "greedy"]
        share = sum(g for _, g in modest) / sum(m for m, _ in modest)
        index = "–" if report.fairness is None else f"{report.fairness:.3f}"
        rows.append([rule, f"{report.goodput:.0f}", index, f"{good / made:.3f}", f"{share:.3f}"])
    return columns(header, rows)


def priority_table(results: Results) -> str:
    shares = {rule: by[""].on_time_by for rule, by in results.items()}
    rows = [[rule, f"{by['urgent']:.3f}", f"{by['default']:.3f}"] for rule, by in shares.items()]
    return columns(["urgent in overload", "urgent on time", "default on time"], rows)


def _returning_cell(report: Report) -> str:
    return f"{report.batch_size or 0.0:.1f} · {_closed_cell(report)}"


def _feeds_cell(report: Report) -> str:
    lost = report.outcomes.get("overrun", 0) / sum(report.outcomes.values())
    age, size = (report.p95 or 0.0) * 1e3, report.batch_size or 0.0
    return f"{lost:.1%} · {age:.0f} · {report.busy:.2f} · {size:.1f}"


def _closed_cell(report: Report) -> str:
    return f"{report.throughput:.0f} · {(report.p50 or 0.0) * 1e3:.0f} · {(report.p99 or 0.0) * 1e3:.0f}"
