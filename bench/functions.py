"""A function behind HTTP: `reflex serve python:…`, LitServe, mosec and a queue and task by hand, asked in turns.

    python -m bench.functions [--peers PYTHON] [--rounds N] [--callers 1 8 32 128] [--only load bad start]
    python -m bench.functions --settings --peers PYTHON
    python -m bench.functions --only load --json bench/functions.json --peers PYTHON

LitServe and mosec run in an environment of their own, whose interpreter `--peers` names; without it they are left out.
Every server has the same core, all of its processes together, and the load generator the other. One function costs
2 ms and 0.1 ms an item, slept: a stand-in for a device, so that what a server computes beside it counts. The other
costs nothing. Ratios are taken round by round. `--settings` finds the best settings of the others. `--json FILE` puts
the rows into a file, in place of rows of the same cases: a long run can be made in parts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil

from bench.load.wires.connection import Connection, reply_of, request
from bench.load.wires.target import Target
from bench.machine import describe
from bench.report import Row, as_json, row, say, table
from bench.servers import Server, reserved, running
from bench.serving import figures, over, turns
from reflex_runtime.client.errors import ClientError

OURS, HAND, LITSERVE, MOSEC = "reflex", "by hand", "LitServe", "mosec"
SLOW, FREE = "slow_roots", "roots"
COSTS = {SLOW: "2 ms + 0.1 ms an item", FREE: "a function that costs nothing"}
PATH, ITEM = "/predict", {"x": 4.0}
ASKED, BAD, AT_ONCE = 2000, 16, 32  # requests, of which one in so many is bad, by so many callers
BEST = {HAND: ("0",), LITSERVE: ("0", "5"), MOSEC: ("1",)}  # milliseconds of waiting for others, see `--settings`
TRIED = {HAND: ("0", "1", "3"), LITSERVE: ("0", "1", "5", "20"), MOSEC: ("1", "2", "5", "10")}
BARS: dict[tuple[str, str, str], dict[str, float]] = {  # function, other, figure
    (SLOW, LITSERVE, "answers a second"): {"least": 1.2},
    (SLOW, LITSERVE, "p99"): {"most": 1.0},
    (FREE, LITSERVE, "answers a second"): {"least": 1.2},
    (FREE, LITSERVE, "p99"): {"most": 1.0},
    (SLOW, MOSEC, "answers a second"): {"least": 1.0},
    (FREE, MOSEC, "CPU a request"): {"most": 3.0},
    (SLOW, HAND, "answers a second"): {"least": 0.97},
}


@dataclass(frozen=True)
class Kind:
    """A server that can be started. wait: milliseconds that a batch waits for others, where it has such a setting;
    python: the interpreter that has it."""

    name: str
    label: str
    wait: str = ""
    python: str = sys.executable

    def command(self, function: str) -> list[str]:
        """Of its interpreter; PORT is its port."""
        if self.name == OURS:
            return ["-m", "reflex_runtime", "serve", f"python:bench.apps.function:{function}", "--port", "PORT"]
        module = {HAND: "by_hand", LITSERVE: "litserve", MOSEC: "mosec"}[self.name]
        return ["-m", f"bench.apps.function_{module}", function, "PORT", self.wait]

    def start(self, function: str) -> Server:
        # as the others, ours runs without a supervisor: the processes are those that serve
        more = ["--no-supervise"] if self.name == OURS else []
        command = [*self.command(function), *more]
        return Server(self.label, command, PATH, ready=dict(ITEM), python=self.python)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.functions", description=__doc__)
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter that has litserve and mosec")
    parser.add_argument("--servers", nargs="+", choices=(OURS, HAND, LITSERVE, MOSEC), help="only these")
    parser.add_argument("--rounds", type=int, default=6, metavar="N")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of a round")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 32, 128], metavar="N")
    parser.add_argument("--functions", nargs="+", choices=COSTS, default=list(COSTS))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--settings", action="store_true", help="the others with several settings, none of ours")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the rows there too")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server stays behind
    load = Load(args.functions, args.callers, args.rounds, args.seconds)
    about = describe()
    print(f"{about['processor']}, {about['cores']} cores, Python {about['python']}, {about['commit']}\n")
    if args.settings:
        kinds = [kind for kind in _kinds(args.peers, args.servers, TRIED) if kind.name != OURS]
        print(table(loaded(kinds, load)))
        return 0
    kinds = list(_kinds(args.peers, args.servers, BEST))
    for case in args.only:
        rows = CASES[case](kinds, load)
        print(table(rows), flush=True)
        if args.json is not None:
            _keep(rows, args.json)
    return 0


def _keep(rows: Sequence[Row], file: Path) -> None:
    """Replace the rows of the same cases in a file, and say when they were measured, and on what."""
    found = json.loads(file.read_text()) if file.exists() else {"rows": []}
    measured = {one.case for one in rows}
    kept = [one for one in found["rows"] if one["case"] not in measured]
    about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": describe()}
    lines = ",\n".join(json.dumps(one) for one in kept + as_json(rows))  # a row a line, so that changes can be read
    file.write_text(f'{json.dumps(about)[:-1]}, "rows": [\n{lines}\n]}}\n')


def _kinds(peers: str | None, only: Sequence[str] | None, waits: dict[str, tuple[str, ...]]) -> Iterator[Kind]:
    for name in only or (OURS, HAND, LITSERVE, MOSEC):
        if name in (LITSERVE, MOSEC) and peers is None:
            say(f"  {name} is left out: --peers names no interpreter that has it")
            continue
        python = peers if name in (LITSERVE, MOSEC) and peers else sys.executable
        for wait in waits.get(name, ("",)):
            label = f"{name}, {wait} ms" if len(waits.get(name, ())) > 1 else name
            yield Kind(name, label, wait, python)


@dataclass(frozen=True)
class Load:
    """How it is asked. seconds: of a round; half as long before it does not count."""

    functions: Sequence[str]
    callers: Sequence[int]
    rounds: int
    seconds: float


# -- answers a second, latency, CPU ------------------------------------------------------------------------------------


def loaded(kinds: Sequence[Kind], load: Load) -> list[Row]:
    """Callers in a closed loop."""
    rows: list[Row] = []
    for function in load.functions:
        with running(*(kind.start(function) for kind in kinds)) as servers:
            for callers in load.callers:
                case = f"{COSTS[function]}, {callers} callers"
                found = turns(
                    case, servers, load.rounds, callers, load.seconds, alone=True, warm=load.seconds / 2, body=ITEM
                )
                for kind in kinds:
                    rows += figures(case, kind.label, found[kind.label])
                for kind in kinds if OURS in found else ():
                    if kind.name != OURS:
                        bars = _bars(function, kind.name, callers)
                        rows += over(case, found[OURS], kind.label, found[kind.label], bars)
    return rows


def _bars(function: str, other: str, callers: int) -> dict[str, dict[str, float]]:
    if other == HAND and callers == 1:  # nothing to batch
        return {}
    return {what: bar for (costs, name, what), bar in BARS.items() if (costs, name) == (function, other)}


# -- one bad item in sixteen -------------------------------------------------------------------------------------------


@dataclass
class Ends:
    """How requests ended. right: innocent ones with the right answer; lost: innocent ones without it; wrong: an answer
    that is not theirs, or one to a bad item."""

    right: int = 0
    lost: int = 0
    wrong: int = 0
    statuses: dict[int, int] = field(default_factory=dict)


def bad(kinds: Sequence[Kind], load: Load) -> list[Row]:
    """One item in sixteen makes the function fail; how many of the others are answered, and rightly."""
    rows: list[Row] = []
    innocent = ASKED - ASKED // BAD
    case = f"{ASKED} requests, one in {BAD} bad"
    for kind in kinds:
        with running(kind.start(SLOW)) as (server,):
            ends = asyncio.run(_ask_all(server.port))
        least = {"least": float(innocent)} if kind.name == OURS else {}
        rows.append(row(case, f"right answers of {innocent} innocent ones, {kind.label}", [ends.right], "", **least))
        most = {"most": 0.0} if kind.name == OURS else {}
        rows.append(row(case, f"wrong answers, {kind.label}", [ends.wrong], "", **most))
        say(f"  {case}, {kind.label}: {ends}")
    return rows


async def _ask_all(port: int) -> Ends:
    ends, items = Ends(), iter(range(ASKED))

    async def caller() -> None:
        connection = Connection(Target.of(f"http://127.0.0.1:{port}"))
        for i in items:
            x = -1.0 if i % BAD == BAD // 2 else float(i)
            body = json.dumps({"x": x}).encode()
            headers = {"Host": "localhost", "Content-Type": "application/json"}
            try:
                reply = reply_of(await connection.exchange(request("POST", PATH, headers, body)))
            except ClientError:
                ends.lost += x >= 0
                continue
            ends.statuses[reply.status] = ends.statuses.get(reply.status, 0) + 1
            if reply.status != 200:
                ends.lost += x >= 0
            elif x >= 0 and json.loads(reply.body)["y"] == math.sqrt(x):
                ends.right += 1
            else:
                ends.wrong += 1
        connection.close()

    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    return ends


# -- start and memory --------------------------------------------------------------------------------------------------


def start(kinds: Sequence[Kind], load: Load) -> list[Row]:
    """From the command to the first right answer, and the memory of all its processes then."""
    rows: list[Row] = []
    for kind in kinds:
        found = [_started(kind) for _ in range(load.rounds)]
        ours = kind.name == OURS
        seconds, resident, shared = zip(*found, strict=True)
        case = "start of a function without a model"
        rows.append(row(case, f"to the first answer, {kind.label}", seconds, "s", most=0.6 if ours else None))
        rows.append(row(case, f"RSS of the largest process, {kind.label}", resident, "MB", most=60 if ours else None))
        rows.append(row(case, f"memory of all its processes (PSS), {kind.label}", shared, "MB"))
    return rows


def _started(kind: Kind) -> tuple[float, float, float]:
    """Seconds; MB of the largest process and of all of them, what they share counted once. With every default."""
    with reserved() as port:
        return _started_at(kind, port)


def _started_at(kind: Kind, port: int) -> tuple[float, float, float]:
    command = [kind.python, *(part.replace("PORT", str(port)) for part in kind.command(FREE))]
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        while not _answers(port):
            if process.poll() is not None or time.perf_counter() - began > 60.0:
                raise RuntimeError(f"{kind.label} did not start")
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        top = psutil.Process(process.pid)
        memory = [one.memory_full_info() for one in (top, *top.children(recursive=True))]
        return seconds, max(one.rss for one in memory) / 1e6, sum(one.pss for one in memory) / 1e6
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", PATH, json.dumps(ITEM), {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


CASES: dict[str, Callable[[Sequence[Kind], Load], list[Row]]] = {"load": loaded, "bad": bad, "start": start}

if __name__ == "__main__":
    sys.exit(main())
