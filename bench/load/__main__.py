"""`python -m bench.load URL`: load on a running server, and on a second one in turns with it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.load.figures import Figures, figures, generator, ratios
from bench.load.generator import BenchSide, LoadJob, LoadLine, LoadRound
from bench.load.wires.meet import CALLERS
from bench.load.wires.target import Target
from reflex_runtime.cli.probe import read_observation
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.observe.files import replace
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.settings.declare import add_options, one_line, one_of, option, settings, validate
from reflex_runtime.settings.read import load
from reflex_runtime.version import __version__

MOST = 2_000_000  # requests of a run
WIDE = 120  # columns where the output is no terminal and COLUMNS does not say

_EPILOG = """\
examples:
  python -m bench.load http://127.0.0.1:8000 --wire openpi --robots 16   each asks again when it is answered
  python -m bench.load http://127.0.0.1:8000 --robots 8 --rate-hz 10 --deadline-ms 100        a control rate of 10 Hz
  python -m bench.load http://127.0.0.1:8000 --arrivals poisson --rate 200  requests come whether answers do or not
  python -m bench.load http://127.0.0.1:8000 http://10.0.0.7:8000        two servers in turns, and their ratio
  python -m bench.load http://127.0.0.1:8000 --beside-wire openpi        two wires of one server
  python -m bench.load http://127.0.0.1:8000 --replay recording.jsonl.gz requests at the times of a recording

A latency counts from when its request was to be sent. docs/measure.md explains every figure.
Exit status: 0 when requests were answered, 1 when none was, 2 when the server cannot be asked or the command is wrong.
"""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to load a server with."""

    wire: str = option("act-msgpack", "how the server is asked", metavar="NAME")
    beside_wire: str = option(
        "", "how the second server is asked, or the same server a second time (default as --wire)", metavar="NAME"
    )
    robots: int = option(
        8, "connections, each with at most one request on its way; in an open loop as many as may be needed", (1, 2000)
    )
    think_ms: float = option(
        0.0,
        "time between an answer and the robot's next request",
        (0, 600_000, "ms"),
        needs="arrivals=closed",
        unless="rate_hz|replay",
    )
    rate_hz: float = option(
        0.0,
        "control rate: each robot is to ask so often, whether its last answer is there or not; 0 is off",
        (0, 1000, "Hz"),
        needs="arrivals=closed",
        unless="replay",
    )
    arrivals: str = option(
        "closed",
        "closed: robots wait for their answer; the others: an open loop at --rate",
        choices=("closed", "constant", "poisson", "bursts"),
        unless="replay",
    )
    rate: float = option(
        0.0,
        "requests a second in an open loop, all robots together",
        (0, 10_000, "1/s"),
        needs="arrivals=constant|arrivals=poisson|arrivals=bursts",
    )
    replay: str = option("", "an open loop at the arrival times of a recording or trace", metavar="FILE")
    deadline_ms: float = option(
        0.0,
        "later answers count as missed; sent along where the wire has a place for it; 0 is none",
        (0, 600_000, "ms"),
    )
    rounds: int = option(5, "rounds on each server; two servers take turns", (1, 100))
    round_s: float = option(
        2.0, "measured seconds of a round; with --replay as long as the recording", (0.1, 600, "s"), unless="replay"
    )
    warmup_s: float = option(0.5, "seconds at the start of a round that do not count", (0, 60, "s"), unless="replay")
    timeout_s: float = option(10.0, "longest wait for an answer", (0.1, 600, "s"))
    observation: str = option("", "an .npz file with the names of the wire, sent instead of a made one", metavar="FILE")
    seed: int = option(0, "same seed, same arrival times", (0, 2**31))
    api_key: str = option("", "of the server; also from the environment, REFLEX_API_KEY", metavar="KEY", secret=True)
    out: str = option("", "write DIR/bench.json, DIR/bench.svg and DIR/bench.png", metavar="DIR")

    def __post_init__(self) -> None:
        validate(self)
        if self.arrivals != "closed" and not self.rate:
            raise ConfigError(f"--arrivals={self.arrivals} needs --rate: requests per second in all, such as --rate 20")
        if self.rate * (self.round_s + self.warmup_s) * self.rounds > MOST:
            raise ConfigError(
                f"--rate={self.rate:g}: over {MOST:,} requests in all; lower it, --round-s or --rounds"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.load",
        description="Load a running server as robots do, and measure latency, throughput and batches.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("urls", metavar="URL", nargs="+", help="where the server is; a second one is measured in turns")
    add_options(parser, BenchConfig)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_intermixed_args(argv)
    try:
        return run(args)
    except ReflexError as error:
        print(f"bench.load: {error.message}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    config = load(BenchConfig, "bench", None, {}, vars(args))
    job = _job(config, *_two(args.urls))
    out = Path(config.out) if config.out else None
    if out is not None:
        _made(out)
    rounds = played(job)
    found = _result(config, job, rounds)
    names = [f"{side.wire} at {side.url}" for side in job.sides]
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        show(names, found)
    if out is not None:
        _written(out, found, rounds, names, job.deadline)
    return 0 if all(side["answers"] for side in found["servers"]) else 1


def _two(urls: Sequence[str]) -> tuple[str, str | None]:
    if len(urls) > 2:
        raise ConfigError(f"{one_line(urls[2])}: at most two servers are measured in turns")
    return urls[0], urls[1] if len(urls) > 1 else None


def _job(config: BenchConfig, url: str, beside: str | None) -> LoadJob:


    key = config.api_key or os.environ.get("REFLEX_API_KEY", "")
    sides = [BenchSide(url, config.wire)]
    if beside is not None or config.beside_wire:
        sides.append(BenchSide(beside or url, config.beside_wire or config.wire))
    for side, name in zip(sides, ("--wire", "--beside-wire"), strict=False):
        if side.wire not in CALLERS:
            raise ConfigError(f"{name}={one_line(side.wire)}: {one_of(side.wire, CALLERS)}")
        if (scheme := Target.of(side.url, key).address.scheme) not in CALLERS[side.wire].schemes:
            known = ", ".join(f"{known}://" for known in CALLERS[side.wire].schemes)
            raise ConfigError(f"{name}={side.wire}: not at {scheme}://; give the URL as {known}")
    if config.observation:
        read_observation(config.observation)
    arrivals = _recorded(config.replay) if config.replay else []
    loop = "replay" if config.replay else "paced" if config.rate_hz else config.arrivals
    return LoadJob(
        sides=sides,
        loop=loop,  # type: ignore[arg-type]  # one of those that BenchConfig checks
        robots=config.robots,
        rounds=config.rounds,
        seconds=arrivals[-1] + 1e-3 if arrivals else config.round_s,
        warmup=0.0 if arrivals else config.warmup_s,
        rate=config.rate_hz or config.rate,
        think=config.think_ms / 1e3,
        deadline=config.deadline_ms / 1e3,
        timeout=config.timeout_s,
        seed=config.seed,
        key=key,
        observation=config.observation,
        arrivals=arrivals,
    )


def _recorded(file: str) -> list[float]:
    """When the requests of a journal came, in seconds from the first."""
    times = sorted(line.arrival for line in read_journal(file, images=False).requests)
    if not times:
        raise ConfigError(f"--replay={one_line(file)}: no requests in it; record some with reflex serve --trace FILE")
    if len(times) > MOST:
        raise ConfigError(f"--replay={one_line(file)}: has {len(times):,} requests; at most {MOST:,} can be sent")
    return [at - times[0] for at in times]


# -- the load generator's process --------------------------------------------------------------------------------------


def played(job: LoadJob) -> list[LoadRound]:
    """Run the job in a process of its own, and show its progress."""
    command = [sys.executable, "-m", "bench.load.process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        try:
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
            for text in process.stdout:
                if not text.endswith(b"\n"):
                    ended = f"status {process.wait()}"
                    raise ReflexError(f"the load generator ended in the middle of its result ({ended}); run it again")
                line = msgspec.json.decode(text, type=LoadLine)
                _progress(line.told)
                if line.error:
                    raise ReflexError(line.error)
                if line.rounds is not None:
                    return line.rounds
        except BrokenPipeError:
            pass
        finally:
            process.kill()
            _progress("")
    raise ReflexError("the load generator ended without a result; what it said stands above")


def _progress(told: str) -> None:
    """A line that overwrites itself on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{told}", end="", file=sys.stderr, flush=True)


# -- what came out -----------------------------------------------------------------------------------------------------


def _result(config: BenchConfig, job: LoadJob, rounds: Sequence[LoadRound]) -> dict[str, Any]:


    sides: list[Figures] = [figures([r for r in rounds if r.side == i], job.deadline) for i in range(len(job.sides))]
    found: dict[str, Any] = {
        "reflex_version": __version__,
        "settings": settings(config),
        "servers": [
            {"url": side.url, "wire": side.wire} | asdict(own) for side, own in zip(job.sides, sides, strict=True)
        ],
        "generator": generator(rounds),
    }
    if len(sides) == 2:
        found["ratio"] = ratios(*sides)
    return found


def show(names: Sequence[str], found: Mapping[str, Any]) -> None:
    """A column for each server, their ratio, and what to know of the figures."""

    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE, highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    ratio = found.get("ratio")
    if ratio is not None:
        table.add_column("first ÷ second", justify="right", no_wrap=True)
    columns = [_rows(server) for server in found["servers"]]
    keys = {"answers a second": "per_second", "latency p50": "p50_ms", "latency p99": "p99_ms"}
    for row in dict.fromkeys(row for column in columns for row in column):
        cells = [column.get(row, "–") for column in columns]
        table.add_row(row, *cells, *([_ratio(ratio.get(keys.get(row, "")))] if ratio is not None else []))
    console.print(table)
    generator = found["generator"]
    lag, share = generator["lag_ms"]["p99"], 100 * generator["cpu"]
    told = f"the load generator: late by {lag:.1f} ms at p99, {share:.0f} % of a core"
    if generator["limits"]:
        told += "; that is too much, and part of these figures. Ask with fewer robots, or from another machine"
    console.print(Text(told, "bold yellow" if generator["limits"] else ""))


def _rows(server: Mapping[str, Any]) -> dict[str, str]:
    """Name → value of every row that the server has."""
    rows = {"requests": f"{server['requests']:,}", "answers a second": f"{server['per_second']:.1f}"}
    for share, value in (server["latency_ms"] or {}).items():
        rows[f"latency {share}"] = f"{value:.1f} ms"
    for share, value in (server["service_ms"] or {}).items():
        if share in ("p50", "p99"):
            rows[f"since it was sent, {share}"] = f"{value:.1f} ms"
    if server["missed"] is not None:
        rows["deadline missed"] = f"{100 * server['missed']:.2f} %"
    for kind, count in server["errors"].items():
        rows[f"error {kind}"] = f"{count:,}"
    batches = server["batches"]
    if "mean_of_answers" in batches:
        rows["requests in a batch, by the answers"] = f"{batches['mean_of_answers']:.2f}"
    if "server_mean" in batches:
        rows["requests in a batch, by /metrics"] = f"{batches['server_mean']:.2f}"
        rows["batches"] = f"{batches['server_batches']:,}"
        rows["why they left"] = ", ".join(f"{cause} {count:,}" for cause, count in batches["causes"].items())
    return rows


def _ratio(found: Mapping[str, float] | None) -> str:
    return f"{found['median']:.3f} ({found['least']:.3f}…{found['most']:.3f})" if found else ""


def _made(out: Path) -> None:
    try:  # now, not after minutes
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out={one_line(out)}: cannot make this directory: {error.strerror}") from None


def _written(
    out: Path, found: Mapping[str, Any], rounds: Sequence[LoadRound], names: Sequence[str], deadline: float
) -> None:
    from bench.load.picture import draw

    replace(out / "bench.json", json.dumps(found, indent=1).encode() + b"\n")
    drawn = draw(rounds, names, out / "bench", deadline)
    print(f"wrote {', '.join(str(path) for path in (out / 'bench.json', *drawn))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
