"""`reflex trace`: show what a trace holds, as a table in colour and as a picture, so that a bad batch is seen."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.telemetry.picture import (
    UNITS,
    Colours,
    Units,
    client_name,
    ink,
    plain,
    request_name,
    write_pictures,
)
from reflex_runtime.telemetry.trace import Member, Trace, TracedBatch, TraceError, read_trace

ROWS = 40  # a table longer than this shows its two ends, unless --last or --from asked for its rows
NAMES = 8  # members named in a row
WIDE = 160  # columns where the output is no terminal and COLUMNS does not say
NARROW = 120  # with fewer columns than this, everything but the members is cut short
LEAST = 12  # columns for the members, whatever else there is
PLACE = ("slot", "partition", "stage")

_DESCRIPTION = """\
Show a trace of batches, as written by `reflex serve --trace FILE`.

One row per batch: when it left, where (slot, partition, stage), why (the reason, and the finer cause), who was in it
with how many units, predicted and measured time, how long those that entered had waited, and how many still queued
behind it. `▸` marks a member that entered from the queue with this batch; the others stayed from an earlier step, and
`…+3` stands for three more. What is the same in every batch stands once above the table, and a column of nothing but
zeros is left out. In under 120 columns `why` is the cause alone and `wait` the longest wait alone.
"""

_EPILOG = """\
examples:
  reflex trace run.jsonl                         table, summary, run.svg and run.png
  reflex trace run.jsonl.gz --last 50            the last 50 batches
  reflex trace run.jsonl --from 120 --to 180     a window, by batch id
  reflex trace run.jsonl --group a --units ms    slot a; bars are estimated milliseconds

exit codes: 0 fine, 1 the trace cannot be read (file and line are named), 2 bad arguments
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb `trace`."""
    parser = subparsers.add_parser(
        "trace",
        help="show a trace of batches as a table and a picture",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="the trace, .jsonl or .jsonl.gz")
    add("--out", type=Path, metavar="PREFIX", help="write PREFIX.svg and PREFIX.png (default: FILE without its suffix)")
    add("--last", metavar="N", help="only the last N batches, N >= 1")
    add("--from", dest="first", metavar="ID", help="only batches from this id on")
    add("--to", dest="final", metavar="ID", help="only batches up to this id")
    add("--group", metavar="SLOT", help="only batches of this group (a slot, a tenant or a workload)")
    add(
        "--units",
        default="grants",
        metavar="|".join(UNITS),
        help="height of the bars: units granted (default), estimated milliseconds, or requests",
    )
    add("--no-picture", action="store_true", help="the table only")
    add("--no-color", action="store_true", help="no colours in the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the trace; returns the exit code."""
    try:
        units = _units(args.units)
        last = _at_least("--last", args.last, 1)
        first, final = _at_least("--from", args.first, 0), _at_least("--to", args.final, 0)
        if first is not None and final is not None and first > final:
            raise ConfigError(f"--to={final}: must be >= --from, which is {first}")
        trace = read_trace(args.file)
        batches = _select(trace, args.group, first, final, last)
        pictures: Sequence[Path] = ()
        if batches and not args.no_picture:
            pictures = write_pictures(trace, batches, args.out or _prefix(args.file), units)
    except TraceError as error:
        print(f"reflex trace: {error}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(f"reflex trace: {error}", file=sys.stderr)
        return 2
    told = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    console = Console(no_color=args.no_color, highlight=False, width=None if told else WIDE)
    _show(console, trace, batches, whole=last is not None or first is not None)
    for path in pictures:
        console.print(Text(f"wrote {path}"), soft_wrap=True)
    return 0


# -- arguments ---------------------------------------------------------------------------------------------------------


def _units(text: str) -> Units:
    for units in UNITS:
        if text == units:
            return units
    raise ConfigError(f"--units={text}: must be one of {', '.join(UNITS)}")


def _at_least(flag: str, text: str | None, low: int) -> int | None:
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise ConfigError(f"{flag}={text}: must be a whole number >= {low}")
    return value


def _select(
    trace: Trace, group: str | None, first: int | None, final: int | None, last: int | None
) -> list[TracedBatch]:
    batches = trace.batches
    if group is not None:
        known = sorted({*trace.groups, *(b.group for b in batches)})
        if group not in known:
            raise ConfigError(f"--group={group}: not in this trace, which has {', '.join(known) or 'no groups'}")
        batches = [b for b in batches if b.group == group]
    low, high = first or 0, float("inf") if final is None else final
    found = [b for b in batches if low <= b.id <= high]
    if batches and not found:
        flag, value = ("--from", first) if first is not None else ("--to", final)
        ids = [b.id for b in batches]
        raise ConfigError(f"{flag}={value}: leaves no batch; ids here are in [{min(ids)}, {max(ids)}]")
    return found if last is None else found[-last:]


def _prefix(file: Path) -> Path:
    name = file.name.removesuffix(".gz").removesuffix(".jsonl")
    return file.with_name(name or "trace")


# -- output ------------------------------------------------------------------------------------------------------------


def _show(console: Console, trace: Trace, batches: Sequence[TracedBatch], whole: bool) -> None:
    console.print(Text(_origin(trace)), style="dim", soft_wrap=True)
    if not batches:
        console.print("no batches")
        return
    same = [
        f"{name} {plain(value, 200)}"
        for name, value in zip(PLACE, _place(batches[0]), strict=True)
        if value and not _vary(batches, name)
    ]
    if same:
        console.print(Text(f"every batch: {', '.join(same)}"), style="dim", soft_wrap=True)
    if whole or len(batches) <= ROWS:
        console.print(_table(trace, batches, batches, console.width))
    else:
        half = ROWS // 2
        console.print(_table(trace, batches, [*batches[:half], *batches[-half:]], console.width, gap_after=half))
        console.print(Text("--last N, or --from ID --to ID, shows those left out", style="dim"))
    for line in _summary(trace, batches):
        console.print(line, soft_wrap=True)


def _origin(trace: Trace) -> str:
    header = trace.header
    groups = []
    for name, info in header.groups.items():
        budget = info.budget
        told = "no budget" if budget is None else f"budget {budget:g} {info.unit}"
        groups.append(f"{plain(name)}: {told}, at most {info.max_size} requests")
    return "; ".join([f"{trace.path}: started {header.started_at}, reflex {header.reflex_version}", *groups])


def _place(batch: TracedBatch) -> tuple[str, str, str]:
    return batch.group, batch.partition, batch.stage


def _vary(batches: Sequence[TracedBatch], name: str) -> bool:
    return len({_place(b)[PLACE.index(name)] for b in batches}) > 1


def _table(
    trace: Trace, batches: Sequence[TracedBatch], rows: Sequence[TracedBatch], width: int, gap_after: int = 0
) -> Table:
    """gap_after: after so many rows, say how many batches were left out."""
    colours = Colours.of(trace, batches)
    narrow = width < NARROW
    columns = _columns(batches, rows, narrow)
    gap = 1 if narrow else 2
    taken = (max(map(cell_len, [*name.split("\n"), *cells])) for name, cells in columns)
    room = max(LEAST, width - sum(n + gap for n in taken) - gap)
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    place = [name for name, _ in columns].index("n") + 1  # the members stand behind their number
    left = {"where", "why", *PLACE}
    for i, (name, _) in enumerate(columns):
        if i == place:
            table.add_column("who", no_wrap=True)
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    if place == len(columns):
        table.add_column("who", no_wrap=True)
    for number, batch in enumerate(rows):
        if gap_after and number == gap_after:
            text = f"… {len(batches) - len(rows):,} batches left out …"
            table.add_row(*[""] * place, Text(text, style="dim", no_wrap=False, overflow="fold"))
        cells = [Text(column[number]) for _, column in columns]
        if batch.crashed:
            cells[[name for name, _ in columns].index("why")].stylize("bold red")
        cells.insert(place, _who(batch, colours, room, narrow))
        table.add_row(*cells)
    return table


def _columns(batches: Sequence[TracedBatch], rows: Sequence[TracedBatch], narrow: bool) -> list[tuple[str, list[str]]]:
    """Header and cells of every column but `who`; what is the same in each row, or zero, is no column."""
    varying = [name for name in PLACE if _vary(batches, name)]
    share = (16 - len(varying) + 1) // max(1, len(varying)) if narrow else 18
    columns = [
        ("id", [str(b.id) for b in rows]),
        ("at s", [f"{b.scheduled_at:.3f}" for b in rows]),
    ]
    if varying:
        places = [[p for n, p in zip(PLACE, _place(b), strict=True) if n in varying and p] for b in rows]
        told = varying[0] if len(varying) == 1 else "where"
        columns.append((told, ["/".join(plain(p, share) for p in place) for place in places]))
    columns.append(("why", [b.cause if narrow or b.cause == b.reason else f"{b.reason}: {b.cause}" for b in rows]))
    columns.append(("n", [str(b.size) for b in rows]))
    measured = [_ms(b.elapsed) for b in rows]
    if any(b.expected is not None for b in rows):
        predicted = ["–" if b.expected is None else _ms(b.expected) for b in rows]
        name = "pred.\n/meas. ms" if narrow else "predicted\n/measured ms"
        columns.append((name, [f"{p}/{m}" for p, m in zip(predicted, measured, strict=True)]))
    else:
        columns.append(("measured\nms" if narrow else "measured ms", measured))
    waits = [_waited(b, narrow) for b in rows]
    if any(float(w) for told in waits for w in told):
        columns.append(("longest\nwait ms" if narrow else "wait ms", [" / ".join(told) for told in waits]))
    if any(b.queued for b in rows):
        columns.append(("queued", ["" if b.queued is None else str(b.queued) for b in rows]))
    return columns


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.9995 else f"{seconds * 1e3:.0f}"


def _waited(batch: TracedBatch, narrow: bool) -> list[str]:
    """Shortest, median and longest of those that entered; one value where one entered or there is room for one."""
    waits = sorted(m.age for m in batch.entered)
    if narrow or len(waits) < 2:
        return [_ms(w) for w in waits[-1:]]
    return [_ms(w) for w in (waits[0], median(waits), waits[-1])]


def _who(batch: TracedBatch, colours: Colours, room: int, narrow: bool) -> Text:
    """Members in their colours, with the units granted where those differ from one request, and what befell them; as
    many as there is room for, and how many more."""
    clients = Counter(m.client for m in batch.members)
    counted = batch.unit != "seconds" and batch.unit != "requests"
    text = Text(no_wrap=True)
    for number, member in enumerate(batch.members):
        face = colours.hex(member)
        mark, units = "▸" if member.state == "waiting" else "", f" {member.units:g}" if counted else ""
        pad = "" if narrow else " "
        chip = Text(f"{pad}{mark}{_name(member, colours.by, clients)}{units}{pad}", style=f"{ink(face)} on {face}")
        if member.outcome not in ("done", "more", None):
            chip = Text.assemble(chip, (f" {member.outcome}", "bold red"))
        behind = batch.size - number - 1
        more = f" …+{behind}" if behind else ""
        if number == 0:
            chip.truncate(max(1, room - len(more)), overflow="ellipsis")
        elif text.cell_len + 1 + chip.cell_len + len(more) > room or (number == NAMES and not narrow):
            text.append(f" …+{behind + 1}", style="dim")
            break
        else:
            text.append(" ")
        text.append_text(chip)
    return text


def _name(member: Member, by: str, clients: Counter[str]) -> str:
    if by == "request":
        return request_name(member)
    client = client_name(member)
    return client if clients[member.client] == 1 else f"{client}/{request_name(member)}"


def _summary(trace: Trace, batches: Sequence[TracedBatch]) -> list[Text]:
    reasons = Counter(b.reason for b in batches)
    lines = [f"{len(batches):,} batches, {sum(b.size for b in batches) / len(batches):.2f} members each on average"]
    told = []
    for reason, count in reasons.most_common():
        causes = Counter(b.cause for b in batches if b.reason == reason)
        finer = "" if set(causes) == {reason} else f" ({', '.join(f'{c} {n:,}' for c, n in causes.most_common())})"
        told.append(f"{reason} {count:,}{finer}")
    lines.append(f"why: {'; '.join(told)}")
    ratios = sorted(b.expected / b.elapsed for b in batches if b.expected and b.elapsed > 0.0 and not b.crashed)
    if ratios:
        spread = f"p10 {_rank(ratios, 10):.2f}, p90 {_rank(ratios, 90):.2f}"
        lines.append(f"predicted ÷ measured: median {median(ratios):.2f}, {spread}, over {len(ratios):,} batches")
    else:
        lines.append(f"measured: mean {mean(b.elapsed for b in batches) * 1e3:.1f} ms a batch; nothing was predicted")
    waits = sorted(m.age * 1e3 for b in batches for m in b.entered)
    if waits:
        ranks = ", ".join(f"p{q} {_rank(waits, q):.1f}" for q in (50, 90, 99))
        lines.append(f"wait ms: {ranks}, longest {waits[-1]:.1f}, over {len(waits):,} that entered")
    outcomes = Counter(m.outcome for b in batches for m in b.members if m.outcome not in ("done", "more", None))
    if outcomes:
        lines.append(f"not answered: {', '.join(f'{o} {n:,}' for o, n in outcomes.most_common())}")
    shown = [Text(line) for line in lines]
    if trace.footer is None:
        cut = " and its last line is cut off" if trace.torn else ""
        shown.append(Text(f"the trace has no footer{cut}: still being written, or the writer was stopped", "yellow"))
    elif trace.footer.dropped:
        lost = f"{trace.footer.dropped:,} batches ran and were not written: the writer could not keep up"
        shown.append(Text(lost, "yellow"))
    return shown


def _rank(ordered: Sequence[float], percent: int) -> float:
    """Nearest-rank percentile: a value that occurred."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
