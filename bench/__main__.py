"""`python -m bench [--quick] [--only CASE …]`: measure, print a table, write `bench-out/results.json`.

Progress goes to standard error. Absolute times depend on the machine and its neighbours; the ratios come from rounds
that take turns within one run, and the spread is printed beside each. A bar that is not met says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import (
    adapters,
    ahead,
    cached,
    cameras,
    capacity,
    core,
    detectors,
    feeds,
    forms,
    from_python,
    gaps,
    ipc,
    llm,
    machine,
    models,
    serving,
    speculation,
    tiers,
    torch_policies,
    tune,
    versions,
    wires,
)
from bench.report import Row, as_json, say, table
from bench.soak.traffic import memory

CASES = ("core", "scaling", "ahead", "library", "feeds", "llm", "workers", "callers", "small", "alone", "closed")
CASES += ("arriving", "closed-pictures", "arriving-pictures", "capacity", "memory")
CASES += ("versions", "wires", "torch", "tune", "tune-pinned")
CASES += ("detectors", "cameras", "forms", "gaps", "tiers", "adapters", "speculation", "cached")
USUAL = CASES[:11]  # the others are asked for by name


def main() -> int:
    """Run the cases; 0 even when a bar is missed: what it says is for people."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: to see that it works")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), metavar="DIR")
    args = parser.parse_args()
    scale = 0.2 if args.quick else 1.0
    about = machine.describe()
    where = "server and load generator pinned to different cores" if about["pinned"] else "nothing pinned to a core"
    print(f"{about['processor']}, {about['cores']} cores, {about['system']}, Python {about['python']}; {where}")
    print(", ".join(f"{name} {version}" for name, version in about["packages"].items()) + f"; {about['commit']}\n")
    rows: list[Row] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reflex-bench-") as root:
        tiny = models.write_export(Path(root, "tiny"), heavy=False)
        heavy = models.write_export(Path(root, "heavy"), heavy=True)
        cases: dict[str, Callable[[], list[Row]]] = {
            "core": lambda: core.core(scale),
            "scaling": lambda: core.scaling(scale),
            "library": lambda: from_python.from_python(scale),
            "ahead": lambda: ahead.ahead(scale),
            "feeds": lambda: feeds.feeds(scale),
            "detectors": lambda: detectors.detectors(scale),
            "cameras": lambda: cameras.cameras(scale),
            "llm": lambda: llm.llm(Path(root, "llm"), args.out, scale),
            "gaps": lambda: gaps.gaps(scale),
            "cached": lambda: cached.cached(scale),
            "tiers": lambda: tiers.tiers(scale),
            "adapters": lambda: adapters.adapters(Path(root, "adapters"), scale),
            "forms": lambda: forms.forms(Path(root, "forms"), scale),
            "speculation": lambda: speculation.speculation(Path(root, "speculation"), scale),
            "workers": lambda: ipc.workers(Path(root), scale),
            "callers": lambda: ipc.closed_loops(scale),
            "small": lambda: serving.small(tiny, scale),
            "alone": lambda: serving.alone(heavy, scale),
            "closed": lambda: serving.closed(heavy, scale),
            "arriving": lambda: serving.arriving(heavy, scale),
            "closed-pictures": lambda: serving.closed_pictures(Path(root), scale),
            "arriving-pictures": lambda: serving.arriving_pictures(Path(root), heavy, scale),
            "capacity": lambda: capacity.capacity(Path(root), heavy, scale),
            "memory": lambda: memory(scale),
            "versions": lambda: versions.versions(tiny, heavy, scale),
            "wires": lambda: wires.wires(Path(root), scale),
            "tune": lambda: tune.tune(heavy, scale),
            "tune-pinned": lambda: tune.tune(heavy, scale, pinned=True),
            "torch": lambda: torch_policies.torch_policies(scale),
        }
        for name in args.only or USUAL:
            say(f"{name}:")
            rows += cases[name]()
    print(table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    seconds = round(time.monotonic() - began, 1)
    result = {"machine": about, "quick": args.quick, "seconds": seconds, "rows": as_json(rows)}
    (args.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    missed = sum(r.met is False for r in rows)
    print(f"\n{sum(r.met is True for r in rows)} bars met, {missed} not met; {seconds} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
