"""`python -m bench.soak [--minutes 10] [--only PART …]`: prints what held, writes `bench-out/soak.json`.

Mixed traffic runs on servers of its own, in a process beside the others, for all of the time: meanwhile faults, hostile
inputs and greedy callers take turns. Status 1 if a bar is not met.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench import machine
from bench.report import Row, as_json, row, say, table
from bench.soak.faults import FAULTS, survive
from bench.soak.hostile import hostile
from bench.soak.neighbours import neighbours
from bench.soak.traffic import traffic

PARTS = ("traffic", "faults", "hostile", "neighbours")
BARS = {  # by what their rows say
    "kinds of faults survived": "survived",
    "hostile inputs that did harm": "with a wrong answer, a stop over 250 ms or growth over 64 MB",
    "requests under faults without one right answer, a refusal or a closed connection": (
        "requests without one right answer, a refusal or a closed connection"
    ),
    "MB that a product grew by after minute two": "growth after the first fifth",
    "times that p99 is beside a greedy caller over that alone": "p99 over that alone",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="of mixed traffic (10)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("bench-out"), metavar="DIR")
    args = parser.parse_args()
    about, began = machine.describe(), time.monotonic()
    rows: list[Row] = []
    details: dict[str, list[str]] = {}
    # a process of its own: its callers do not wait for the interpreter of the others
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool, tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        beside = pool.submit(traffic, args.minutes) if "traffic" in args.only else None
        if "faults" in args.only:
            rows += _faults(args.minutes, root, details)
        if "hostile" in args.only:
            rows += _hostile(root, details)
        if "neighbours" in args.only:
            say("greedy callers:")
            rows += neighbours(root, max(2.0, args.minutes))
        if beside is not None:
            rows += beside.result()
    print(table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    seconds = round(time.monotonic() - began, 1)
    result = {"machine": about, "minutes": args.minutes, "seconds": seconds, "rows": as_json(rows), "details": details}
    (args.out / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    print("", *bars(rows), f"{seconds} s", sep="\n")
    return 1 if any(r.met is False for r in rows) else 0


def bars(rows: list[Row]) -> Iterator[str]:
    """A line for each bar: whether it is met, and the figures of its rows."""
    for name, what in BARS.items():
        some = [r for r in rows if r.what.endswith(what)]
        verdicts = {r.met for r in some}
        short = "not judged" if some else "not run"  # a product still warms up in less than ten minutes
        verdict = "NOT MET" if False in verdicts else short if None in verdicts or not some else "met"
        figures = ", ".join(f"{r.value:.4g}" for r in some)
        yield f"{verdict:<10}  {name}: {figures or '-'}" + (f" ({some[0].bar})" if some and some[0].bar else "")


def _faults(minutes: float, root: Path, details: dict[str, list[str]]) -> list[Row]:
    say("faults:")
    found = [survive(fault, min(4.0, max(1.0, minutes / 3)), root) for fault in FAULTS]
    lost = {one.fault: one.why for one in found if one.why or one.wrong}
    details["faults not survived"] = [f"{name}: {why or 'wrong answers'}" for name, why in lost.items()]
    wrong = [f"{one.fault}: {told}" for one in found for told in one.wrong]
    details["wrong under faults"] = wrong[:100]
    case = f"{len(found)} kinds of faults"
    return [
        row(case, "survived", [len(found) - len(lost)], "", least=len(found)),
        row(case, "requests", [sum(one.asked for one in found)], ""),
        row(case, "requests without one right answer, a refusal or a closed connection", [len(wrong)], "", most=0),
    ]


def _hostile(root: Path, details: dict[str, list[str]]) -> list[Row]:
    say("hostile inputs:")
    found = hostile(root)
    harmful = [one for one in found if not one.harmless]
    details["hostile inputs"] = [
        f"{one.name}: /health {one.stop:.2f} s, memory {one.grew:+.0f} MB {one.wrong}" for one in harmful
    ]
    case = f"{len(found)} hostile inputs"
    return [
        row(case, "with a wrong answer, a stop over 250 ms or growth over 64 MB", [len(harmful)], "", most=0),
        row(case, "/health longest, of each", [one.stop * 1e3 for one in found], "ms"),
        row(case, "memory that stayed, of each", [one.grew for one in found], "MB"),
    ]


if __name__ == "__main__":
    sys.exit(main())
