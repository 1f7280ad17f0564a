"""`python -m bench.sim compare | ablation | stages | fleet`: research on the scheduler in virtual time.

    python -m bench.sim compare --duration-s 20            the rules against each other
    python -m bench.sim ablation                           what each rule brings: each switched off, over 40 loads
    python -m bench.sim ablation --rules evidence drift+gathering          some of them; + for several at once
    python -m bench.sim stages                             joins at denoise steps against whole chunks
    python -m bench.sim stages --ratios 3,30               the same for prefixes as long as 3 and 30 steps
    python -m bench.sim fleet --robots 1000                how many devices a thousand robots need
    python -m bench.sim fleet --robots 100 --replicas 3 --fail 0@20-40     one of three is lost from second 20 to 40

The device takes fixed + marginal x n milliseconds for n requests. docs/simulator.md and docs/capacity.md explain the
figures.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

from bench.sim import ablation, compare, stages
from bench.sim.fleet import FleetPlan, Outage, in_words, run_fleet, size_fleet
from bench.sim.picture import draw_overload
from bench.sim.rules import DEVICE, Setting
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings import ServeConfig
from reflex_runtime.sim import Affine


def main(argv: list[str] | None = None) -> int:
    """Run a study and print its table; 2 for what cannot be run."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except ConfigError as error:
        print(f"bench.sim: {error.message}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    studies = parser.add_subparsers(required=True, metavar="STUDY")
    for name, run in (("compare", _compare), ("ablation", _ablation), ("stages", _stages), ("fleet", _fleet)):
        study = studies.add_parser(name, help=run.__doc__)
        study.set_defaults(run=run)
        add = study.add_argument
        add("--duration-s", type=float, default=60.0, help="virtual seconds (60)")
        if name == "ablation":
            add("--seeds", type=int, default=1, help="runs of which the means are shown (1)")
            add("--rules", nargs="+", default=list(ablation.rules()), metavar="RULE", help="instead of each: A or A+B")
            continue
        add("--warmup-s", type=float, default=2.0, help="of these, how many the figures leave out (2)")
        add("--noise", type=float, default=0.05, help="relative spread of batch times (0.05)")
        add("--seed", type=int, default=0, help="same seed, same run")
        add("--batch-timeout-ms", type=float, help="longest hold (as long as a batch may take)")
        if name == "stages":
            add("--ratios", default="", metavar="N,N", help="prefixes of so many times a step, a table of 8 rows each")
            continue
        add("--fixed-ms", type=float, default=20.0, help="what a batch costs before its first request (20)")
        add("--marginal-ms", type=float, default=2.0, help="what each request adds to its batch (2)")
        add("--slo-ms", type=float, default=100.0, help="time limit of every request (100)")
        add("--max-batch-cost-ms", type=float, default=100.0, help="ceiling on a batch's predicted time (100)")
        if name == "compare":
            add("--picture", metavar="PATH", type=Path, help="draw PATH.svg and PATH.png")
            continue
        add("--robots", type=int, required=True, help="robots, each bound to a replica by a hash of its name")
        add("--chunk-ms", type=float, default=500.0, help="how long a robot executes an answer, ± 5 % (500)")
        add("--replicas", default="auto", help="how many; auto: the fewest of which even the busiest reaches --target")
        add("--target", type=float, default=0.99, help="share of requests to be answered within --slo-ms (0.99)")
        add("--fail", default="", metavar="N@S-S", help="a replica dies and comes back: 0@20-40")
    return parser


def _compare(args: argparse.Namespace) -> None:
    """the rules against each other"""
    if args.slo_ms <= args.fixed_ms + args.marginal_ms:
        raise ConfigError(f"--slo-ms={args.slo_ms:g}: a single request takes {args.fixed_ms + args.marginal_ms:g} ms")
    bench = _bench(args, Affine(args.fixed_ms / 1e3, args.marginal_ms / 1e3), args.slo_ms, args.max_batch_cost_ms)
    overload = compare.overload(bench, _progress)
    _show(compare.overload_table(overload, compare.overload_bounds(bench, _progress)) + "\n")
    _show(compare.closed_table(compare.closed_loop(bench, _progress)) + "\n")
    _show(compare.returning_table(compare.returning(bench, _progress)) + "\n")
    _show(compare.feeds_table(compare.feeds(bench, _progress)) + "\n")
    _show(compare.fairness_table(compare.fairness(bench, _progress)) + "\n")
    _show(compare.priority_table(compare.priority(bench, _progress)))
    if args.picture:
        draw_overload(overload, args.picture, bench.slo)


def _ablation(args: argparse.Namespace) -> None:
    """what each adaptive rule brings"""
    unknown = {name for rule in args.rules for name in rule.split("+")} - ablation.rules().keys()
    if unknown:
        raise ConfigError(f"--rules={min(unknown)}: must be of {', '.join(ablation.rules())}")
    table, whole = ablation.whole_table(args.duration_s, args.seeds, _progress)
    _show(table + "\n")
    for rule in args.rules:
        _show(ablation.rule_row(rule, whole, args.duration_s, args.seeds, _progress))


def _stages(args: argparse.Namespace) -> None:
    """joins at denoise steps against whole chunks"""
    cases: Sequence[stages.Case] = stages.CASES
    if args.ratios:
        try:
            ratios = [float(one) for one in args.ratios.split(",")]
        except ValueError:
            ratios = []
        if not ratios or len(set(ratios)) < len(ratios) or not all(0.1 <= one <= 1000.0 for one in ratios):
            raise ConfigError(f"--ratios={args.ratios}: must be different numbers in [0.1, 1000], such as 1,10,30")
        cases = stages.ratio_cases(ratios)
    _show(stages.stages_table(stages.stages(_bench(args), _progress, cases)))


def _fleet(args: argparse.Namespace) -> None:
    """how many devices some robots need, and what is lost with one"""
    plan = FleetPlan(
        args.robots, args.chunk_ms / 1e3, args.slo_ms / 1e3, Affine(args.fixed_ms / 1e3, args.marginal_ms / 1e3),
        args.noise, args.max_batch_cost_ms / 1e3,
        inf if args.batch_timeout_ms is None else args.batch_timeout_ms / 1e3, args.target, args.duration_s,
        args.warmup_s, args.seed,
    )  # fmt: skip
    outages = _outages(args.fail, args.duration_s)
    sizing = size_fleet(plan, _progress) if args.replicas == "auto" else None
    replicas = int(args.replicas) if sizing is None else sizing.needed
    if outages and replicas == 1:
        raise ConfigError(f"--fail={args.fail}: the only replica; nothing would answer. Give --replicas 2 or more")
    _progress(f"{args.robots} robots on {replicas} replicas")
    _show(in_words(plan, run_fleet(plan, replicas, outages), sizing, outages))


def _outages(text: str, duration: float) -> list[Outage]:
    """Read --fail."""
    if not text:
        return []
    found = re.fullmatch(r"(\d{1,5})@(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)", text)
    if found is None or not float(found[2]) < float(found[3]) <= duration:
        raise ConfigError(f"--fail={text}: must be NUMBER@SECONDS-SECONDS, such as 0@20-40, within --duration-s")
    return [Outage(int(found[1]), float(found[2]), float(found[3]))]


def _bench(
    args: argparse.Namespace, device: Affine = DEVICE, slo_ms: float = 100.0, max_batch_cost_ms: float = 100.0
) -> compare.Bench:
    serve = ServeConfig(max_batch_cost_ms=max_batch_cost_ms, batch_timeout_ms=args.batch_timeout_ms)
    setting = Setting(serve)
    if args.batch_timeout_ms is not None:
        setting = Setting(serve, args.batch_timeout_ms / 1e3)
    return compare.Bench(device, args.noise, slo_ms / 1e3, args.duration_s, args.warmup_s, args.seed, setting)


def _progress(what: str) -> None:
    """A line of progress that overwrites itself; only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)


def _show(table: str) -> None:
    _progress("")
    print(table, flush=True)


if __name__ == "__main__":
    sys.exit(main())
