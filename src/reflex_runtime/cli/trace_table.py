"""The table of a trace: a row a batch, and the lines under it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import mean, median

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from reflex_runtime.core.statistics import percentile
from reflex_runtime.observe.colours import Colours, client_name, ink, plain, request_name
from reflex_runtime.observe.journal import BatchLine, Member
from reflex_runtime.observe.journal_reader import Journal

ROWS = 40  # a longer table shows a part, unless --last or --from asked for its rows
NAMES = 8  # members named in a row
NARROW = 120  # with fewer columns than this, everything but the members is cut short
LEAST = 12  # columns for the members, whatever else there is
PLACE = ("slot", "partition", "stage")


def place_of(batch: BatchLine) -> tuple[str, str, str]:
    """Where a batch ran; see `PLACE`."""
    return batch.group, batch.partition, batch.stage


def vary(batches: Sequence[BatchLine], name: str) -> bool:
    """Whether the batches differ in this part of their place."""
    return len({place_of(b)[PLACE.index(name)] for b in batches}) > 1


def batch_table(
    trace: Journal, batches: Sequence[BatchLine], rows: Sequence[BatchLine], width: int, gap_after: int = 0
) -> Table:
    """gap_after: after so many rows, say how many batches were left out."""
    colours = Colours.of(trace, batches)
    narrow = width < NARROW
    columns = _columns(trace, batches, rows, narrow)
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


def _columns(
    trace: Journal, batches: Sequence[BatchLine], rows: Sequence[BatchLine], narrow: bool
) -> list[tuple[str, list[str]]]:
    """Header and cells of every column but `who`; what is the same in each row, or zero, is no column."""
    varying = [name for name in PLACE if vary(batches, name)]
    share = (16 - len(varying) + 1) // max(1, len(varying)) if narrow else 18
    columns = [
        ("id", [str(b.id) for b in rows]),
        ("at s", [f"{trace.seconds(b):.3f}" for b in rows]),
    ]
    if varying:
        places = [[p for n, p in zip(PLACE, place_of(b), strict=True) if n in varying and p] for b in rows]
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


def _waited(batch: BatchLine, narrow: bool) -> list[str]:
    """Shortest, median and longest of those that entered; one value where one entered or there is room for one."""
    waits = sorted(m.age for m in batch.entered)
    if narrow or len(waits) < 2:
        return [_ms(w) for w in waits[-1:]]
    return [_ms(w) for w in (waits[0], median(waits), waits[-1])]


def _who(batch: BatchLine, colours: Colours, room: int, narrow: bool) -> Text:
    """Members in their colours, with the units granted where those differ from one request."""
    clients = Counter(m.client for m in batch.members)
    counted = batch.unit != "seconds" and batch.unit != "requests"
    pad = "" if narrow else " "

    def face(member: Member) -> Text:
        colour = colours.hex(member)
        mark, units = "▸" if member.state == "waiting" else "", f" {member.units:g}" if counted else ""
        name = member_name(member, colours.by, clients)
        return Text(f"{pad}{mark}{name}{units}{pad}", style=f"{ink(colour)} on {colour}")

    return chips(batch, face, room, len(batch.members) if narrow else NAMES)


def chips(batch: BatchLine, face: Callable[[Member], Text], room: int, most: int) -> Text:
    """Each member's face and what befell it; as many as there is room for, at most `most`, and how many more."""
    text = Text(no_wrap=True)
    for number, member in enumerate(batch.members):
        chip = face(member)
        if member.outcome not in ("done", "more", None):
            chip = Text.assemble(chip, (f" {member.outcome}", "bold red"))
        behind = batch.size - number - 1
        more = f" …+{behind}" if behind else ""
        if number == 0:
            chip.truncate(max(1, room - len(more)), overflow="ellipsis")
        elif text.cell_len + 1 + chip.cell_len + len(more) > room or number == most:
            text.append(f" …+{behind + 1}", style="dim")
            break
        else:
            text.append(" ")
        text.append_text(chip)
    return text


def member_name(member: Member, by: str, clients: Counter[str]) -> str:
    """What a member is called where colours are `by` client or request. clients: how often each is in the batch."""
    if by == "request":
        return request_name(member)
    client = client_name(member)
    return client if clients[member.client] == 1 else f"{client}/{request_name(member)}"


def summary(trace: Journal, batches: Sequence[BatchLine]) -> list[Text]:
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
        spread = f"p10 {percentile(ratios, 0.1):.2f}, p90 {percentile(ratios, 0.9):.2f}"
        lines.append(f"predicted ÷ measured: median {median(ratios):.2f}, {spread}, over {len(ratios):,} batches")
    else:
        lines.append(f"measured: mean {mean(b.elapsed for b in batches) * 1e3:.1f} ms a batch; nothing was predicted")
    waits = sorted(m.age * 1e3 for b in batches for m in b.entered)
    if waits:
        ranks = ", ".join(f"p{q} {percentile(waits, q / 100):.1f}" for q in (50, 90, 99))
        lines.append(f"wait ms: {ranks}, longest {waits[-1]:.1f}, over {len(waits):,} that entered")
    outcomes = Counter(m.outcome for b in batches for m in b.members if m.outcome not in ("done", "more", None))
    if outcomes:
        lines.append(f"not answered: {', '.join(f'{o} {n:,}' for o, n in outcomes.most_common())}")
    return [*map(Text, lines), *whole(trace)]


def whole(trace: Journal) -> list[Text]:
    """Warnings about what is missing from the file."""
    shown: list[Text] = []
    if trace.footer is None:
        cut = " and its last line is cut off" if trace.torn else ""
        shown.append(Text(f"the trace has no footer{cut}: still being written, or the writer was stopped", "yellow"))
    elif trace.footer.dropped:
        lost = f"{trace.footer.dropped:,} lines were not written: the writer could not keep up"
        shown.append(Text(lost, "yellow"))
    return shown
