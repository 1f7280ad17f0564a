"""`reflex simulate`: what a batching rule would do to a load, in virtual time, without a model or a server."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.options import add_options, did_you_mean, one_line, option, validate, whole
from reflex_runtime.sources import load

if TYPE_CHECKING:
    from reflex_runtime.sim import Callers, Setting, Think, WorkloadPart
    from reflex_runtime.sim.compare import Bench
    from reflex_runtime.sim.fleet import Outage

_EPILOG = """\
examples:
  reflex simulate --rate 300 --slo-ms 100                         Poisson arrivals at 300/s
  reflex simulate --rate 300 --arrivals bursty --policy by_size   the same load in bursts, under another rule
  reflex simulate --arrivals closed --callers 8 --think around:100,5    eight robots that act for 100 ± 5 ms
  reflex simulate --compare --duration-s 20                       the rules against each other
  reflex simulate --stages                                        joins at denoise steps against whole chunks
  reflex simulate --stages --ratios 25                            the same for prefixes as long as 25 steps
  reflex simulate --robots 1000 --replicas auto                   how many devices a thousand robots need
  reflex simulate --robots 100 --replicas 3 --fail 0@20-40        one of three is lost from second 20 to 40

The device takes fixed + marginal x n milliseconds for n requests. docs/simulator.md explains every figure.
"""


@dataclass(frozen=True, slots=True)
class SimulateConfig:
    """The settings of `reflex simulate`."""

    rate: float = option(
        200.0, "requests offered per second", low=0.001, high=100_000, unit="1/s",
        unless="compare|stages|robots|arrivals=closed",
    )
    arrivals: str = option(
        "poisson",
        "pattern of arrivals; closed: callers that wait for their answer, see --callers and --think",
        choices=("poisson", "bursty", "diurnal", "heavy", "closed"),
        unless="compare|stages|robots",
    )
    callers: int = option(
        8, "callers, with --arrivals closed", low=1, high=10_000, needs="arrivals=closed", unless="compare|stages"
    )
    think: str = option(
        "1",
        "ms between an answer and the caller's next request: 5 | exp:5 | around:100,5 | mix:1,300 (drawn each "
        "time) | half:1,300 (half the callers each)",
        metavar="THINK",
        needs="arrivals=closed",
        unless="compare|stages",
    )
    fixed_ms: float = option(
        20.0, "what a batch costs before its first request", low=0, high=60_000, unit="ms", unless="stages"
    )
    marginal_ms: float = option(
        2.0, "what each request adds to its batch", low=0.001, high=60_000, unit="ms", unless="stages"
    )
    noise: float = option(0.05, "relative spread of batch times", low=0, high=2, metavar="SHARE")
    slo_ms: float = option(
        100.0,
        "time limit of every request; 0 is none (then no request is late and none is shed)",
        low=0,
        high=600_000,
        unit="ms",
        unless="stages",
    )
    max_batch_cost_ms: float = option(
        100.0,
        "ceiling on a batch's predicted time (window, by_cost)",
        low=10,
        high=10_000,
        unit="ms",
        needs="policy=window|policy=by_cost|compare",
        unless="stages",
    )
    batch_timeout_ms: float | None = option(
        None,
        "longest hold; for window only when callers are expected back, and by default as long as a batch may take; 5 "
        "for the other rules",
        low=0,
        high=1000,
        unit="ms",
        needs="policy=window|policy=by_cost|policy=by_size|compare|stages",
    )
    max_batch_size: int = option(
        32, "most requests in a batch (by_size, greedy)", low=1, high=100_000, needs="policy=by_size|policy=greedy",
        unless="stages",
    )
    duration_s: float = option(60.0, "virtual seconds", low=0.1, high=86_400, unit="s")
    warmup_s: float = option(2.0, "virtual seconds at the start that the figures leave out", low=0, high=3600, unit="s")
    seed: int = option(0, "same seed, same run", low=0, high=2**31)
    policy: str = option(
        "window", "the rule", choices=("window", "by_cost", "by_size", "greedy"), unless="compare|stages|robots")
    robots: int = option(
        0, "robots on several replicas, each a device of its own; see docs/capacity.md", low=0, high=100_000,
        unless="compare|stages",
    )
    chunk_ms: float = option(
        500.0, "how long a robot executes an answer before it asks again, ± 5 %", low=1, high=600_000, unit="ms",
        needs="robots",
    )
    replicas: str = option(
        "auto", "how many replicas, or auto: the fewest of which even the busiest reaches --target", metavar="N|auto",
        needs="robots",
    )
    target: float = option(
        0.99, "with --replicas auto: share of requests to be answered within --slo-ms", low=0.5, high=0.9999,
        metavar="SHARE", needs="replicas=auto",
    )
    fail: str = option(
        "", "a replica dies and comes back: NUMBER@SECONDS-SECONDS, such as 0@20-40", metavar="OUTAGE", needs="robots",
    )
    compare: bool = option(
        False, "print the comparison tables instead"
    )
    stages: bool = option(
        False,
        "print the table of joins at step boundaries against whole chunks instead",
    )
    ratios: str = option(
        "",
        "with --stages: prefixes of 1, 10 and 30 times a step (such as 1,10,30), a table of 8 rows for each",
        metavar="N,N",
        needs="stages",
    )
    picture: str = option("", "draw the run into PATH.svg and PATH.png", metavar="PATH")

    def __post_init__(self) -> None:
        validate(self)
        if self.warmup_s >= self.duration_s:
            raise ConfigError(
                f"--warmup-s={self.warmup_s:g}: must be in [0, {self.duration_s:g}) s, below --duration-s"
            )
        if self.stages and (self.compare or self.picture):
            other = "--compare" if self.compare else "--picture"
            raise ConfigError(f"--stages with {other}: leave out one of them; --stages prints one table, draws nothing")
        if self.replicas != "auto":
            whole("--replicas", self.replicas, 1, 10_000)
        single = self.fixed_ms + self.marginal_ms
        if self.compare and self.slo_ms <= single:
            raise ConfigError(
                f"--slo-ms={self.slo_ms:g}: must be in ({single:g}, 600000] ms with --compare: a single "
                "request takes that long"
            )


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "simulate",
        description="Run the real scheduler on a simulated load and device in virtual time, and report the result.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, SimulateConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate one rule, or compare them."""
    config = load(SimulateConfig, "simulate", None, {}, vars(args))
    if config.picture:
        try:  # now, not after minutes
            Path(config.picture).absolute().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = f"--picture={one_line(config.picture)}"
            raise ConfigError(f"{where}: cannot make its directory: {error.strerror}") from None
    if config.stages:
        return _stages(config)
    if config.robots:
        return _fleet(config)
    return _compare(config) if config.compare else _one(config)


def _one(config: SimulateConfig) -> int:
    from reflex_runtime.sim import RULES, Affine, Noisy, Report, simulate

    device = Affine(config.fixed_ms / 1e3, config.marginal_ms / 1e3)
    slo = config.slo_ms / 1e3
    setting = replace(_setting(config), goal=slo or 1.0, device=device, max_batch_size=config.max_batch_size)
    rule = RULES[config.policy]
    done = simulate(
        rule.make(setting),
        _workload(config),
        Noisy(device, config.noise),
        duration=config.duration_s,
        warmup=config.warmup_s,
        seed=config.seed,
        blind=rule.blind,
    )
    print(Report.of(done).text())
    if config.picture:
        from reflex_runtime.sim.picture import draw_run

        _drawn(draw_run(done, Path(config.picture), f"{config.policy}, {config.arrivals}"))
    return 0


def _compare(config: SimulateConfig) -> int:
    from reflex_runtime.sim import compare

    bench = _bench(config)
    overload = compare.overload(bench, _progress)
    _show(compare.overload_table(overload, compare.overload_bounds(bench, _progress)) + "\n")
    _show(compare.closed_table(compare.closed_loop(bench, _progress)) + "\n")
    _show(compare.returning_table(compare.returning(bench, _progress)) + "\n")
    _show(compare.feeds_table(compare.feeds(bench, _progress)) + "\n")
    _show(compare.fairness_table(compare.fairness(bench, _progress)) + "\n")
    _show(compare.priority_table(compare.priority(bench, _progress)))
    if config.picture:
        from reflex_runtime.sim.picture import draw_overload

        _drawn(draw_overload(overload, Path(config.picture), bench.slo))
    return 0


def _stages(config: SimulateConfig) -> int:
    from reflex_runtime.sim import stages

    cases = stages.ratio_cases(_ratios(config.ratios)) if config.ratios else stages.CASES
    _show(stages.stages_table(stages.stages(_bench(config), _progress, cases)))
    return 0


def _fleet(config: SimulateConfig) -> int:
    from reflex_runtime.sim import Affine
    from reflex_runtime.sim.fleet import FleetPlan, in_words, run_fleet, size_fleet

    plan = FleetPlan(
        config.robots, config.chunk_ms / 1e3, config.slo_ms / 1e3,
        Affine(config.fixed_ms / 1e3, config.marginal_ms / 1e3), config.noise, config.max_batch_cost_ms / 1e3,
        inf if config.batch_timeout_ms is None else config.batch_timeout_ms / 1e3, config.target,
        config.duration_s, config.warmup_s, config.seed,
    )  # fmt: skip
    outages = _outages(config)
    sizing = size_fleet(plan, _progress) if config.replicas == "auto" else None
    replicas = int(config.replicas) if sizing is None else sizing.needed
    if outages and outages[0].replica >= replicas:
        raise ConfigError(f"--fail={config.fail}: there are {replicas} replicas, from 0 to {replicas - 1}")
    if outages and replicas == 1:
        raise ConfigError(f"--fail={config.fail}: the only replica; nothing would answer. Give --replicas 2 or more")
    _progress(f"{config.robots} robots on {replicas} replicas")
    found = run_fleet(plan, replicas, outages)
    _show(in_words(plan, found, sizing, outages))
    if config.picture:
        from reflex_runtime.sim.picture import draw_run

        _drawn(draw_run(found.run, Path(config.picture), f"{config.robots} robots, {replicas} replicas"))
    return 0


def _outages(config: SimulateConfig) -> list[Outage]:
    """Read --fail."""
    from reflex_runtime.sim.fleet import Outage

    if not config.fail:
        return []
    found = re.fullmatch(r"(\d{1,5})@(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)", config.fail)
    outage = None if found is None else Outage(int(found[1]), float(found[2]), float(found[3]))
    if outage is None or not outage.at < outage.until <= config.duration_s:
        raise ConfigError(
            f"--fail={one_line(config.fail)}: must be NUMBER@SECONDS-SECONDS, such as 0@20-40, within --duration-s"
        )
    return [outage]


def _ratios(text: str) -> list[float]:
    """Read --ratios."""
    try:
        found = [float(one) for one in text.split(",")] if text else []
        if len(found) > 16 or len(set(found)) < len(found) or not all(0.1 <= one <= 1000.0 for one in found):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--ratios={one_line(text)}: must be up to 16 different numbers in [0.1, 1000], such as 1,10,30"
        ) from None
    return found


def _bench(config: SimulateConfig) -> Bench:
    from reflex_runtime.sim import Affine, compare

    return compare.Bench(
        device=Affine(config.fixed_ms / 1e3, config.marginal_ms / 1e3),
        noise=config.noise,
        slo=config.slo_ms / 1e3,
        duration=config.duration_s,
        warmup=config.warmup_s,
        seed=config.seed,
        setting=_setting(config),
    )


def _setting(config: SimulateConfig) -> Setting:
    from reflex_runtime.sim import Setting

    if config.batch_timeout_ms is None:
        return Setting(config.max_batch_cost_ms / 1e3)
    hold = config.batch_timeout_ms / 1e3
    return Setting(config.max_batch_cost_ms / 1e3, hold, hold=hold)


def _progress(what: str) -> None:
    """A line of progress that overwrites itself; only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)


def _show(table: str) -> None:
    _progress("")
    print(table, flush=True)


def _drawn(paths: list[Path]) -> None:
    print(f"wrote {' and '.join(str(p) for p in paths)}", file=sys.stderr)


def _workload(config: SimulateConfig) -> list[WorkloadPart]:
    from reflex_runtime.core.request import Request
    from reflex_runtime.sim import Bursty, Diurnal, Heavy, Open, Poisson

    request = Request(time_limit=config.slo_ms / 1e3 or None)
    if config.arrivals == "closed":
        callers = _callers(config.think, config.callers)
        return [replace(part, request=request) for part in callers]
    process = {"poisson": Poisson, "bursty": Bursty, "diurnal": Diurnal, "heavy": Heavy}[config.arrivals]
    return [Open(process(config.rate), (request,))]


def _callers(think: str, count: int) -> list[Callers]:
    """Read --think."""
    from reflex_runtime.sim import Around, Callers, Exponential, Fixed, Mixture

    kind, colon, numbers = think.partition(":")
    kinds: dict[str, tuple[int, Any]] = {
        "exp": (1, Exponential),
        "around": (2, Around),
        "mix": (2, lambda a, b: Mixture(((0.5, Fixed(a)), (0.5, Fixed(b))))),
        "half": (2, lambda a, b: (Fixed(a), Fixed(b))),
    }
    if not colon:
        kind, numbers, kinds = "", think, {"": (1, Fixed)}
    try:
        values = [float(n.removesuffix("ms")) / 1e3 for n in numbers.split(",")]
        wanted, make = kinds[kind]
        if len(values) != wanted or not all(0.0 <= v <= 3600.0 for v in values):
            raise ValueError
        made: Think | tuple[Think, Think] = make(*values)
    except (KeyError, ValueError):
        forms = "MS, exp:MS, around:MS,MS, mix:MS,MS or half:MS,MS with MS in [0, 3600000]"
        near = did_you_mean(kind, kinds) if colon else ""
        raise ConfigError(f"--think={one_line(think)}: must be {forms}{near}") from None
    if not isinstance(made, tuple):
        return [Callers(count, made)]
    first = count // 2
    parts = [(first, made[0], "first"), (count - first, made[1], "second")]
    return [Callers(n, t, name=name) for n, t, name in parts if n]
