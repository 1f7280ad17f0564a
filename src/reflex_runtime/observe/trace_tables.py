"""The tables of a trace, with a row for each batch or step of tokens, and the lines under them.

Pictures use the same colours, names, waiting requests and courses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.statistics import percentile
from reflex_runtime.observe.journal import BatchLine, Journal, Member, client_label, plain

# -- what tables and pictures share: folds over the batches as read, so that a table, a picture and a test see the same

# Paul Tol's "muted" scheme, safe for colour-blind readers; beyond it the colours repeat under a hatching.
PALETTE = (
    "#88CCEE", "#CC6677", "#117733", "#DDCC77", "#332288", "#AA4499", "#44AA99", "#882255", "#999933",
)  # fmt: skip
HATCHES = ("", "////", "\\\\\\\\", "xxxx")  # lines only: a hatching of dots weighs megabytes in an SVG
INK, FAINT, RULE = "#222222", "#6B7280", "#E5E7EB"
DPI = 200  # of a PNG


@dataclass(frozen=True, slots=True)
class Colours:
    """One colour per client, or per request where all are of one client. by: `client` or `request`."""

    by: str
    names: tuple[str, ...]
    _index: dict[Hashable, int]

    @classmethod
    def of(cls, trace: Journal, batches: Sequence[BatchLine]) -> Colours:
        """Colours in order of appearance: of clients in the whole trace, so that they are the same in a part of it; of
        requests in the shown batches, so that few of them need no hatching."""
        by = "client" if len({m.client for b in trace.batches for m in b.members}) > 1 else "request"
        index: dict[Hashable, int] = {}
        names = []
        for batch in trace.batches if by == "client" else batches:
            for m in batch.members:
                key: Hashable = m.client if by == "client" else m.seq
                if key not in index:
                    index[key] = len(index)
                    names.append(client_label(m.client) if by == "client" else request_name(m))
        return cls(by, tuple(names), index)

    def index(self, member: Member) -> int:
        """Number of the member's colour."""
        return self._index[member.client if self.by == "client" else member.seq]

    def knows(self, member: Member) -> bool:
        """Whether it has a colour, because it is in the shown part."""
        return (member.client if self.by == "client" else member.seq) in self._index

    def hex(self, member: Member) -> str:
        """The member's colour, without its hatching."""
        return PALETTE[self.index(member) % len(PALETTE)]


def request_name(member: Member) -> str:
    """The request's id, or the number of its arrival when it has none."""
    return plain(member.id) if member.id else f"#{member.seq}"


def ink(face: str) -> str:
    """Dark or white, whichever reads better on a colour."""
    r, g, b = (int(face[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#FFFFFF" if 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.45 else INK


def pale(face: str) -> str:
    """A colour mixed with white: for requests that get one token."""
    parts = (int(face[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 * 0.62 + part * 0.38):02X}" for part in parts)


def fill(colour: int, light: bool = False) -> dict[str, Any]:
    """The style of a segment: face, hatching, a white edge between neighbours. light: pale, with a coloured edge."""
    face, hatch = PALETTE[colour % len(PALETTE)], HATCHES[colour // len(PALETTE) % len(HATCHES)]
    if light:
        return {"facecolor": pale(face), "hatch": hatch, "edgecolor": face, "linewidth": 0.8}
    return {"facecolor": face, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}


WHY_WAITING = {
    "budget": "budget spent",
    "places": "no place (max_num_seqs)",
    "memory": "no blocks free",
    "share": "client's share taken",
    "room": "no room in the partition",
}
_SAME = 1.5e-6  # seconds; times in a trace are rounded to microseconds


def why_waiting(batch: BatchLine) -> str:
    """In words, the limit that kept the others out of the batch; empty if the journal does not have it."""
    return WHY_WAITING.get(batch.short_of, batch.short_of)


def count_of(count: int, what: str) -> str:
    """A number with its noun: `1 batch`, `2 batches`."""
    return f"{count:,} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"


def unit_of(batch: BatchLine) -> str:
    """The unit of a group's grants: requests if costs are seconds; "units" if the writer did not know the group."""
    plain = batch.unit == "seconds" or (batch.unit is None and all(m.units == 1.0 for m in batch.members))
    return "requests" if plain else batch.unit or "units"


def is_tokens(batches: Sequence[BatchLine]) -> bool:
    """Whether all are steps over tokens whose members record how much was computed."""
    return bool(batches) and all(b.unit == "tokens" and any(m.known is not None for m in b.members) for b in batches)


def is_decode(member: Member) -> bool:
    """Whether the batch computed only its newest token, to sample the next; everything else is prefill."""
    if member.computed is None or member.known is None or member.units - (member.guessed or 0.0) != 1.0:
        return False
    return member.known > member.asked and member.computed == member.known - 1.0


def unused(member: Member) -> float:
    """The wrong guesses of a member: tokens that were computed for nothing."""
    return (member.guessed or 0.0) - max(0, (member.outputs or 1) - 1)


def samples(member: Member) -> bool:
    """Whether the batch computed all its known tokens, so that a token was sampled."""
    if member.computed is None or member.known is None or member.outcome not in ("more", "done"):
        return False
    return member.computed + member.units >= member.known


# -- waiting requests --------------------------------------------------------------------------------------------------


class Waiter(NamedTuple):
    """A request that a batch left out. state: `queued` has not entered yet, `preempted` waits to come back, `resident`
    holds its place and was granted nothing."""

    member: Member
    state: Literal["queued", "preempted", "resident"]


def who_waited(batches: Sequence[BatchLine], ids: Container[int] | None = None) -> dict[int, tuple[Waiter, ...]]:
    """By batch id, the requests that waited while it ran, in order of arrival; only of `ids` if given.

    A request arrived at `at` less `age` of any of its batches, and waits from then
    until it enters, from `left` until it enters again, and in every batch between its own. Requests that never ran are
    in no batch, and one that is preempted and then dropped is taken for gone; `queued` counts both.
    """
    found: dict[int, tuple[Waiter, ...]] = {}
    for group in dict.fromkeys(b.group for b in batches):
        _waited_in([b for b in batches if b.group == group], ids, found)
    return found


def _waited_in(batches: list[BatchLine], ids: Container[int] | None, found: dict[int, tuple[Waiter, ...]]) -> None:
    first: dict[int, tuple[float, Member]] = {}
    final: dict[int, int] = {}  # seq → the last batch that has it
    for batch in batches:
        for m in batch.members:
            first.setdefault(m.seq, (batch.at - m.age, m))
            final[m.seq] = batch.id
    arriving = sorted(first.values(), key=lambda a: (-a[0], -a[1].seq))
    live: dict[int, Waiter] = {}
    for batch in batches:
        while arriving and arriving[-1][0] <= batch.at + _SAME:
            member = arriving.pop()[1]
            live[member.seq] = Waiter(member, "queued")
        for seq in batch.left:
            gone = live.pop(seq, None)
            if gone is not None and final[seq] >= batch.id:
                live[seq] = Waiter(gone.member, "preempted")
        inside = {m.seq for m in batch.members}
        if ids is None or batch.id in ids:
            found[batch.id] = tuple(live[seq] for seq in sorted(live.keys() - inside))
        for m in batch.members:
            live.pop(m.seq, None)
            if m.outcome in ("more", "apart", None) and final[m.seq] > batch.id:
                live[m.seq] = Waiter(m, "resident")


# -- how each request went ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Course:
    """One request through all its batches, in tokens and seconds.

    scheduled: granted in all; cached: found in the prefix cache, at every entry; recomputed: lost to preemption or to a
    call that failed as a whole; unused: guesses that were wrong. first_step: id of the batch that sampled its first
    token; first_token: seconds from its arrival to the end of that batch. gaps: seconds between its tokens. ended: how
    it ended, None if the trace does not show that.
    """

    member: Member
    outputs: int = 0
    scheduled: float = 0.0
    cached: float = 0.0
    recomputed: float = 0.0
    unused: float = 0.0
    preemptions: int = 0
    first_step: int | None = None
    first_token: float | None = None
    gaps: list[float] = field(default_factory=list)
    ended: str | None = None

    @property
    def conserved(self) -> bool:
        """Whether Σ scheduled − recomputed − unused = prompt + outputs − 1 − cached, as it must once it is done."""
        return self.scheduled - self.recomputed - self.unused == self.member.asked + self.outputs - 1 - self.cached


def courses(batches: Sequence[BatchLine]) -> list[Course]:
    """Every request of batches of tokens, in order of arrival; of some of the batches, what those show."""
    found: dict[int, Course] = {}
    final = {m.seq: batch.id for batch in batches for m in batch.members}
    computed: dict[int, float] = {}
    newest: dict[int, float] = {}  # seq → when its last token came
    for batch in batches:
        end = batch.at + batch.elapsed
        for seq in batch.left:
            if seq in found and final[seq] >= batch.id:
                found[seq].recomputed += computed.pop(seq, 0.0)
                found[seq].preemptions += 1
        for m in batch.members:
            course = found.setdefault(m.seq, Course(m))
            course.scheduled += m.units
            course.cached += m.cached or 0.0
            if m.outcome == "apart":  # the call failed: all of it is computed again
                course.recomputed += m.units
                continue
            course.unused += unused(m)
            computed[m.seq] = (m.computed or 0.0) + m.units - unused(m)
            if samples(m):
                course.outputs += m.outputs or 1
                if course.first_token is None:
                    course.first_step, course.first_token = batch.id, end - (batch.at - m.age)
                else:
                    course.gaps.append(end - newest[m.seq])
                course.gaps += [0.0] * ((m.outputs or 1) - 1)  # they come together
                newest[m.seq] = end
            if m.outcome not in ("more", "apart", None):
                course.ended = m.outcome
    return [found[seq] for seq in sorted(found)]


# -- tables -----------------------------------------------------------------------------------------------------------

ROWS = 40  # of a table; a longer one is shortened, unless --last or --from is given
LEAST = 12  # columns for the members, whatever else there is
PLACE = ("group", "partition", "stage")


def place_of(batch: BatchLine) -> tuple[str, str, str]:
    """Where a batch ran; see `PLACE`."""
    return batch.group, batch.partition, batch.stage


def vary(batches: Sequence[BatchLine], name: str) -> bool:
    """Whether the batches differ in this part of their place."""
    return len({place_of(b)[PLACE.index(name)] for b in batches}) > 1


def selected(
    trace: Journal, group: str | None, first: int | None, final: int | None, last: int | None
) -> list[BatchLine]:
    """The batches of that group and of those ids. ConfigError where there is none."""
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


def show_batches(console: Console, trace: Journal, batches: Sequence[BatchLine], everything: bool, name: str) -> None:
    """Print the table of a trace, and the lines above and below it. everything: all rows. name: the name of the
    trace."""
    console.print(Text(_origin(trace, name)), style="dim", soft_wrap=True)
    if not batches:
        console.print("no batches")
        return
    same = [
        f"{name} {plain(value, 200)}"
        for name, value in zip(PLACE, place_of(batches[0]), strict=True)
        if value and not vary(batches, name)
    ]
    steps = is_tokens(batches)
    if same and not steps:
        console.print(Text(f"every batch: {', '.join(same)}"), style="dim", soft_wrap=True)
    if everything or len(batches) <= ROWS:
        console.print(_table(trace, batches, batches, steps, console.width))
    else:
        half = ROWS // 2
        console.print(_table(trace, batches, [*batches[:half], *batches[-half:]], steps, console.width, gap_after=half))
        console.print(Text("--last N, or --from ID --to ID, shows those left out", style="dim"))
    if steps:
        console.print(Text(step_key(trace, batches), style="dim"))
    for line in (step_summary if steps else summary)(trace, batches):
        console.print(line, soft_wrap=True)


def _origin(trace: Journal, file: str) -> str:
    header = trace.header
    groups: dict[str, list[str]] = {}  # by their ceilings
    for name, info in header.groups.items():
        budget = info.budget
        ceiling = "no budget" if budget is None else f"budget {budget:g} {info.unit}{info.or_times_fixed}"
        groups.setdefault(f"{ceiling}, at most {info.max_size} requests", []).append(plain(name))
    told = (f"{', '.join(names)}: {ceilings}" for ceilings, names in groups.items())
    return "; ".join([f"{file}: started {header.started_at}, reflex {header.reflex_version}", *told])


_Column = tuple[str, list[Text], bool]  # its name, its cells, and whether they stand right


def _table(
    trace: Journal, batches: Sequence[BatchLine], rows: Sequence[BatchLine], steps: bool, width: int, gap_after: int = 0
) -> Table:
    """A row for each batch; `who` gets the room that other columns leave. gap_after: rows before the line that counts
    the batches left out; 0 for none."""
    colours = Colours.of(trace, batches)
    before, behind = _step_columns(trace, rows, colours, width) if steps else _columns(trace, batches, rows)
    gap = 1 if width < 120 else 2
    around = (*before, *behind)
    taken = (max(map(cell_len, [*name.split("\n"), *(c.plain for c in cells)])) for name, cells, _ in around)
    room = max(LEAST, width - sum(n + gap for n in taken) - gap)
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    for name, _, right in (*before, ("who", [], False), *behind):
        table.add_column(name, justify="right" if right else "left", no_wrap=True, vertical="bottom")
    for number, batch in enumerate(rows):
        if gap_after and number == gap_after:
            left_out = f"… {len(batches) - len(rows):,} {'steps' if steps else 'batches'} left out …"
            table.add_row(*[""] * len(before), Text(left_out, style="dim", no_wrap=False, overflow="fold"))
        faces = _step_faces(batch, colours, room) if steps else _faces(batch, colours)
        cells = (*(c[number] for _, c, _ in before), _chips(batch, faces, room), *(c[number] for _, c, _ in behind))
        table.add_row(*cells)
    return table


def _columns(
    trace: Journal, batches: Sequence[BatchLine], rows: Sequence[BatchLine]
) -> tuple[list[_Column], list[_Column]]:
    """The columns before `who` and behind it. A column that is the same or zero in all rows is left out."""
    varying = [name for name in PLACE if vary(batches, name)]
    share = (16 - len(varying) + 1) // max(1, len(varying))
    before: list[_Column] = [
        ("id", [Text(str(b.id)) for b in rows], True),
        ("at s", [Text(f"{trace.seconds(b):.3f}") for b in rows], True),
    ]
    if varying:
        places = [[p for n, p in zip(PLACE, place_of(b), strict=True) if n in varying and p] for b in rows]
        title = varying[0] if len(varying) == 1 else "where"
        before.append((title, [Text("/".join(plain(p, share) for p in place)) for place in places], False))
    before.append(("why", [Text(b.cause, "bold red" if b.crashed else "") for b in rows], False))
    before.append(("n", [Text(str(b.size)) for b in rows], True))
    measured = [_ms(b.elapsed) for b in rows]
    behind: list[_Column] = [("measured\nms", list(map(Text, measured)), True)]
    if any(b.expected is not None for b in rows):
        predicted = ["–" if b.expected is None else _ms(b.expected) for b in rows]
        behind = [("pred.\n/meas. ms", [Text(f"{p}/{m}") for p, m in zip(predicted, measured, strict=True)], True)]
    waits = [max((m.age for m in b.entered), default=None) for b in rows]
    if any(waits):
        behind.append(("longest\nwait ms", [Text("" if wait is None else _ms(wait)) for wait in waits], True))
    if any(b.queued for b in rows):
        behind.append(("queued", [Text("" if b.queued is None else str(b.queued)) for b in rows], True))
    return before, behind


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.9995 else f"{seconds * 1e3:.0f}"


def _faces(batch: BatchLine, colours: Colours) -> list[Text]:
    """Members in their colours, with the units granted if those are not requests."""
    clients = Counter(m.client for m in batch.members)
    counted = unit_of(batch) != "requests"
    faces = []
    for member in batch.members:
        colour, name = colours.hex(member), request_name(member)
        if colours.by == "client":
            client = client_label(member.client)
            name = client if clients[member.client] == 1 else f"{client}/{name}"
        mark, units = "▸" if member.state == "waiting" else "", f" {member.units:g}" if counted else ""
        faces.append(Text(f"{mark}{name}{units}", style=f"{ink(colour)} on {colour}"))
    return faces


def _step_faces(batch: BatchLine, colours: Colours, room: int) -> list[Text]:
    """Members of a step, written in the longest form in which the row has room for all of them."""
    forms: list[list[str]] = [[], [], []]
    styles = []
    for m in batch.members:
        decode, face = is_decode(m), colours.hex(m)
        face = pale(face) if decode else face
        styles.append(f"{ink(face)} on {face}")
        name = f"{'▸' if m.state == 'waiting' else ''}{request_name(m)}"
        done = "" if m.computed is None or m.known is None else f"{m.computed:g}/{m.known:g}"
        guessed = f" +{m.guessed:g} guessed" if m.guessed else ""
        kind = f"decode{guessed}" if decode else f"prefill {m.units:g}"
        tiny = f"{name} {'d' if decode else f'p{m.units:g}'}"
        for form, words in zip(forms, (f"{name} {kind} · {done}", f"{tiny} {done}", tiny), strict=True):
            form.append(words.removesuffix(" · ").rstrip())
    shown = next((form for form in forms[:2] if sum(cell_len(face) + 3 for face in form) - 1 <= room), forms[2])
    return [Text(f" {words} ", style=style) for words, style in zip(shown, styles, strict=True)]


def _chips(batch: BatchLine, faces: Sequence[Text], room: int) -> Text:
    """The face and the failure of each member, as many as fit, and the number of the others."""
    text = Text(no_wrap=True)
    for number, (member, chip) in enumerate(zip(batch.members, faces, strict=True)):
        if member.outcome not in ("done", "more", None):
            chip = Text.assemble(chip, (f" {member.outcome}", "bold red"))
        behind = batch.size - number - 1
        more = f" …+{behind}" if behind else ""
        if number == 0:
            chip.truncate(max(1, room - len(more)), overflow="ellipsis")
        elif text.cell_len + 1 + chip.cell_len + len(more) > room:
            text.append(f" …+{behind + 1}", style="dim")
            break
        else:
            text.append(" ")
        text.append_text(chip)
    return text


def summary(trace: Journal, batches: Sequence[BatchLine]) -> list[Text]:
    size = sum(b.size for b in batches) / len(batches)
    lines = [f"{count_of(len(batches), 'batch')}, {size:.2f} members each on average"]
    causes = Counter(b.cause for b in batches)
    lines.append(f"why: {', '.join(f'{cause} {n:,}' for cause, n in causes.most_common())}")
    whole_calls = [b for b in batches if not b.crashed and not b.apart]
    ratios = sorted(b.expected / b.elapsed for b in whole_calls if b.expected and b.elapsed > 0.0)
    if ratios:
        spread = f"median {median(ratios):.2f}, p10 {percentile(ratios, 0.1):.2f}, p90 {percentile(ratios, 0.9):.2f}"
        lines.append(f"predicted ÷ measured: {spread}, over {count_of(len(ratios), 'batch')}")
    else:
        lines.append(f"measured: mean {mean(b.elapsed for b in batches) * 1e3:.1f} ms a batch; nothing was predicted")
    if waits := sorted(m.age * 1e3 for b in batches for m in b.entered):
        ranks = ", ".join(f"p{q} {percentile(waits, q / 100):.1f}" for q in (50, 90, 99))
        lines.append(f"wait ms: {ranks}, longest {waits[-1]:.1f}, over {len(waits):,} that entered")
    went = ("done", "more", "apart", None)
    outcomes = Counter(m.outcome for b in batches for m in b.members if m.outcome not in went)
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
        shown.append(Text(f"{trace.footer.dropped:,} lines were not written: the writer could not keep up", "yellow"))
    return shown


# -- steps of tokens ---------------------------------------------------------------------------------------------------

WAITERS = 3  # named in a row
NARROW_STEPS = 90  # with fewer columns than this, cache and times are left out
MARKS = {"queued": "", "preempted": "↩", "resident": "‖"}


def step_key(trace: Journal, batches: Sequence[BatchLine]) -> str:
    """A key to the marks that are in the table."""
    marks = ["prefill (p) dark, decode (d) pale", "8/11: computed/known before the step", "▸ entered"]
    states = {w.state for waiters in who_waited(trace.batches, {b.id for b in batches}).values() for w in waiters}
    marks += ["↩ preempted, waits to come back"] * ("preempted" in states)
    marks += ["‖ resident, granted nothing"] * ("resident" in states)
    return "; ".join(marks)


def _step_columns(
    trace: Journal, rows: Sequence[BatchLine], colours: Colours, width: int
) -> tuple[list[_Column], list[_Column]]:
    """The columns before `who` and behind it. A column without an event is left out."""

    def budget(batch: BatchLine) -> str:
        info = trace.groups.get(batch.group)
        return "" if info is None or info.budget is None else f"/{info.budget:g}"

    before: list[_Column] = [
        ("step", [Text(str(b.id)) for b in rows], True),
        ("tokens", [Text(f"{sum(m.units for m in b.members):g}{budget(b)}") for b in rows], True),
    ]
    if len({b.group for b in rows}) > 1:
        before.insert(1, ("model", [Text(plain(b.group)) for b in rows], False))
    waited = who_waited(trace.batches, {b.id for b in rows})
    members = {m.seq: m for b in trace.batches for m in b.members}
    ever = {m.seq: b.id for b in trace.batches for m in b.members}
    behind: list[_Column] = []
    waiting = [_waiting(waited.get(b.id, ()), b, colours) for b in rows]
    if any(waiting):
        behind.append(("waited: why", waiting, False))
    thrown = [[members[seq] for seq in b.left if seq in members and ever[seq] >= b.id] for b in rows]
    if any(thrown):
        behind.append(("preempted", [_names(m, colours) for m in thrown], False))
    hits = [[m for m in b.members if m.cached] for b in rows]
    if any(hits):
        behind.append(("cache hits", [_names(m, colours, lambda m: f" {m.cached:g}") for m in hits], False))
    if width >= NARROW_STEPS:
        totals = {str(b.notes.get("num_blocks", "?")) for b in rows if "blocks_used" in b.notes}
        if len(totals) == 1:
            used = [Text(str(b.notes.get("blocks_used", ""))) for b in rows]
            behind.append((f"blocks\nof {totals.pop()}", used, True))
        name = "modelled\nms" if all("modelled" in b.notes for b in rows) else "measured\nms"
        behind.append((name, [Text(f"{b.elapsed * 1e3:.2f}") for b in rows], True))
    return before, behind


# -- who not -----------------------------------------------------------------------------------------------------------


def _waiting(waiters: Sequence[Waiter], batch: BatchLine, colours: Colours) -> Text:
    """Names, and the reason in words."""
    marks = {waiter.member.seq: MARKS[waiter.state] for waiter in waiters}
    text = _names([waiter.member for waiter in waiters], colours, mark=lambda m: marks[m.seq])
    if waiters and batch.short_of:
        text.append(f": {why_waiting(batch)}")
    return text


def _names(
    members: Sequence[Member],
    colours: Colours,
    more: Callable[[Member], str] = lambda _: "",
    mark: Callable[[Member], str] = lambda _: "",
) -> Text:
    text = Text(no_wrap=True)
    for i, m in enumerate(members[:WAITERS]):
        text.append(" " if i else "")
        style = f"{ink(colours.hex(m))} on {colours.hex(m)}" if colours.knows(m) else ""
        text.append(mark(m) + request_name(m) + more(m), style=style)
    if len(members) > WAITERS:
        text.append(f" +{len(members) - WAITERS}", style="dim")
    return text


# -- under the table ---------------------------------------------------------------------------------------------------


def step_summary(trace: Journal, batches: Sequence[BatchLine]) -> list[Text]:
    """Lines under the table: how full the steps were, tokens computed twice or found in the cache, and times."""
    tokens = [sum(m.units for m in b.members) for b in batches]
    info = trace.groups.get(batches[0].group)
    used = ""
    if info is not None and info.budget and len({b.group for b in batches}) == 1:
        used = f"; {sum(tokens) / (len(batches) * info.budget):.0%} of the budget of {info.budget:g}"
    each = sum(tokens) / len(batches)
    steps = count_of(len(batches), "step")
    lines = [f"{steps}, {sum(tokens):,.0f} tokens: mean {each:.1f} a step, peak {max(tokens):g}{used}"]
    decoded = sum(is_decode(m) for b in batches for m in b.members)
    went = courses(batches)
    cached, lost = sum(c.cached for c in went), sum(c.recomputed for c in went)
    events = ((sum(c.preemptions for c in went), "preemption"), (sum(b.apart for b in batches), "failed call"))
    causes = " and ".join(count_of(n, what) for n, what in events if n)
    again = f", {lost:g} lost to {causes}" if causes else ""
    found = f"; {cached:g} more found in the prefix cache" if cached else ""
    guesses = sum(m.guessed or 0.0 for b in batches for m in b.members)
    right = guesses - sum(unused(m) for b in batches for m in b.members)
    guessed = f", {guesses:g} guessed, of which {right:g} were right" if guesses else ""
    lines.append(f"{sum(tokens) - decoded - guesses:g} of them prefill, {decoded} decode{guessed}{again}{found}")
    waited = who_waited(trace.batches, {b.id for b in batches})
    why = Counter(why_waiting(b) or "unknown" for b in batches if waited.get(b.id))
    if why:
        counts = ", ".join(f"{name} {n:,}" for name, n in why.most_common())
        lines.append(f"requests waited in {count_of(why.total(), 'step')}: {counts}")
    lines += _pace(batches)
    shown = list(map(Text, lines))
    if len(batches) == len(trace.batches):
        shown += _conservation(trace)
    outcomes = Counter(c.ended for c in went if c.ended not in ("done", None))
    if outcomes:
        shown.append(Text(f"not answered: {', '.join(f'{o} {n:,}' for o, n in outcomes.most_common())}"))
    return [*shown, *whole(trace)]


def _pace(batches: Sequence[BatchLine]) -> list[str]:
    went = courses(batches)
    first = sorted(c.first_token * 1e3 for c in went if c.first_token is not None)
    gaps = sorted(gap * 1e3 for c in went for gap in c.gaps)
    parts = []
    if first:
        parts.append(f"first token after p50 {percentile(first, 0.5):.1f} ms, longest {first[-1]:.1f} ms")
    if gaps:
        parts.append(f"gap between tokens p50 {percentile(gaps, 0.5):.1f} ms, longest {gaps[-1]:.1f} ms")
    modelled = {str(b.notes["modelled"]) for b in batches if "modelled" in b.notes}
    by = f" (modelled: a step takes {plain(modelled.pop(), 60)})" if len(modelled) == 1 else ""
    return ["; ".join(parts) + by] if parts else []


def _conservation(trace: Journal) -> list[Text]:
    done = [c for c in courses(trace.batches) if c.ended == "done"]
    if not done or trace.torn or (trace.footer is not None and trace.footer.dropped):
        return []
    wrong = [c for c in done if not c.conserved]
    rule = "scheduled − recomputed = prompt + outputs − 1 − cached"
    if wrong:
        names = ", ".join(request_name(c.member) for c in wrong[:8])
        return [Text(f"{rule}: violated by {len(wrong)} of {len(done)} requests: {names}", style="bold red")]
    return [Text(f"{rule}: holds for all {count_of(len(done), 'request')}")]
