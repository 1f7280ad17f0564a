"""`reflex tune`: which settings suit the load of a server or of a journal, and what they would bring."""

from __future__ import annotations

import argparse
import http.client
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reflex_runtime.cli.console import ProgressLine
from reflex_runtime.cli.server_address import PATIENCE, STREAM, ServerAddress, add_key, key_of, snapshot_of
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.observe.journal import JournalError
from reflex_runtime.observe.journal_reader import Journal, read_journal

if TYPE_CHECKING:
    from reflex_runtime.sim.search import TunedFigures, Tuning

JOURNAL: Final = "/diagnostics/journal"
LEAST: Final = 1.0  # seconds, as the server takes them
LONGEST: Final = 600.0
MOST: Final = 256 << 20  # bytes; what follows is not read
_AT_ONCE: Final = 1 << 16
_OTHERS: Final = {
    "llm": "serves a language model, whose budget is one of tokens: reflex trace --prompts @FILE --sweep shows what "
    "each buys, see docs/continuous-batching.md",
    "feeds": "is reflex feeds, whose frames have no journal of requests; tune reads policy servers",
}

_EPILOG = """\
examples:
  reflex tune http://127.0.0.1:8000            watch a policy server for 30 s
  reflex tune http://127.0.0.1:8000 --seconds 120 --api-key KEY
  reflex tune run.jsonl                        a file of reflex serve --trace FILE or --record DIR
  reflex tune run.jsonl --aim p99              what lowers the slowest answers

The load and the device's times are taken from the recording, and the scheduler runs in virtual time with some fifty
settings. docs/tuning.md says how, and how near the predictions were in a benchmark.

exit codes: 0 done, also if nothing would help; 1 the journal cannot be read; 2 bad arguments, or a server
that cannot be watched
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "tune",
        description="Find the budget, hold and size of batches that suit a recorded load, and predict what they bring.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("source", metavar="URL|JOURNAL", help="a policy server, http://…, or a journal, .jsonl or .jsonl.gz")
    add(
        "--seconds", type=float, default=30.0, metavar="N",
        help="how long a server is watched, 1 to 600 (default %(default)g); without effect on a journal",
    )  # fmt: skip
    add_key(parser)
    add(
        "--aim", choices=("p50", "p95", "p99", "throughput", "on-time"), metavar="WHAT",
        help="what to improve: p50, p95, p99 (of latency), throughput or on-time; by default on-time if more than "
        "one request in a hundred is not answered in time, else p95",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tune; returns the exit code."""
    from reflex_runtime.sim.search import Tuner

    journals: AbstractContextManager[Journal] = (
        watched_journal(args.source, args.seconds, key_of(args))
        if args.source.startswith(("http://", "https://"))
        else nullcontext(read_journal(args.source, images=False))
    )
    with journals as journal:
        tuner = Tuner(journal, ProgressLine("simulated runs"))
        tuning = tuner.tune(args.aim)
    print(told(tuning, tuner.present.in_words(), args.source))
    return 0


def told(tuning: Tuning, present: str, source: str) -> str:
    """The result as text."""
    from reflex_runtime.sim.report import columns

    load, before, after = tuning.load, tuning.before, tuning.after
    lines = [
        f"{source}: {len(load.requests)} requests in {load.span:.1f} s",
        f"load      {load.text()}",
        f"now       {present}",
        f"aim       {tuning.aim}",
    ]
    if tuning.doubt:
        lines.append(f"warning   {tuning.doubt}")
    rows = _rows({"measured": tuning.measured, "simulated": before.figures})
    if tuning.why:
        lines += ["", columns(rows[0], rows[1:]), "", f"Nothing to change: {tuning.why}."]
        return "\n".join(lines)
    simulated = {"simulated now": before.figures, "simulated then": after.figures}
    rows = _rows({"measured": tuning.measured, "predicted": tuning.predicted} | simulated)
    flags = after.knobs.flags(before.knobs)
    if after.knobs.hold != before.knobs.hold and after.knobs.hold == float("inf"):
        flags.append("and no --batch-timeout-ms")
    lines += [f"set       {' '.join(flags)}", "", columns(rows[0], rows[1:])]
    return "\n".join(lines)


def _rows(found: dict[str, TunedFigures]) -> list[list[str]]:
    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.1f}"

    cells: list[tuple[str, Callable[[TunedFigures], str]]]
    cells = [("latency p50, ms", lambda f: ms(f.p50)), ("latency p95, ms", lambda f: ms(f.p95))]
    cells += [("latency p99, ms", lambda f: ms(f.p99)), ("answers/s", lambda f: f"{f.throughput:.1f}")]
    cells += [("not answered in time", lambda f: f"{1.0 - f.on_time:.1%}"), ("batch size", lambda f: f"{f.batch:.1f}")]
    cells += [("device busy", lambda f: f"{f.busy:.0%}")]
    return [["", *found], *([name, *(cell(figures) for figures in found.values())] for name, cell in cells)]


# -- a server that is watched ------------------------------------------------------------------------------------------


@contextmanager
def watched_journal(url: str, seconds: float, key: str = "") -> Iterator[Journal]:
    """Watch a server, then read what it did. An error in the `with` names the server instead of the file.

    ConfigError for an address or a time that cannot be, ReflexError for a server that has no such journal.
    """
    if not LEAST <= seconds <= LONGEST:
        raise ConfigError(f"--seconds={seconds:g}: must be from {LEAST:g} to {LONGEST:g}")
    address = ServerAddress.of(url)
    with tempfile.TemporaryDirectory(prefix="reflex-tune-") as folder:
        file = Path(folder, "watched.jsonl")
        with address.answer(f"{JOURNAL}?seconds={seconds:g}", key) as response:
            if response.status == 404 and (why := _OTHERS.get(_product(address, key))):
                raise ReflexError(f"{url}: {why}")
            if response.status != 200:
                raise address.refusal(response, JOURNAL, key)
            _read(response, file, seconds, url)
        try:
            yield read_journal(file)
        except (JournalError, ConfigError) as error:
            error.message = error.message.replace(str(file), url)
            raise


def _read(response: http.client.HTTPResponse, file: Path, seconds: float, url: str) -> None:
    """Into the file, as it comes: lines, and a blank one every second. ReflexError if the server is lost meanwhile."""
    progress, began, passed, size = ProgressLine("seconds watched"), time.monotonic(), 0.0, 0
    until = seconds + PATIENCE  # what a slow network takes; a journal may have no end
    with file.open("wb") as out:
        try:
            while size < MOST and passed <= until and (data := response.read1(_AT_ONCE)):
                out.write(data)
                size, passed = size + len(data), time.monotonic() - began
                progress(int(passed), int(seconds) + 1)
        except (http.client.IncompleteRead, ConnectionError):
            why = f"ended its answer after {passed:.0f} of {seconds:g} s; is the server still there?"
            raise ReflexError(f"{url}: {why}") from None
    progress(1, 1)


def _product(address: ServerAddress, key: str) -> str:
    """What the server is; "" where it does not say."""
    with address.answer(STREAM, key) as response:
        if response.status != 200:
            return ""
        return str(snapshot_of(response.readline(16 << 20), address.url).server.get("product", ""))
