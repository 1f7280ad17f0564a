"""What tables and pictures of a journal share: colours and names of requests, which waited and why, their course.

Folds over the batches as read, so that a table, a picture and a test see the same."""

from __future__ import annotations

import re
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from reflex_runtime.observe.journal import BatchLine, Member
from reflex_runtime.observe.journal_reader import Journal

# Paul Tol's "muted" scheme, safe for colour-blind readers; beyond it the colours repeat under a hatching.
PALETTE = (
    "#88CCEE", "#CC6677", "#117733", "#DDCC77", "#332288", "#AA4499", "#44AA99", "#882255", "#999933",
)  # fmt: skip
HATCHES = ("", "////", "\\\\\\\\", "xxxx")  # lines only: a hatching of dots weighs megabytes in an SVG
INK, FAINT, RULE = "#222222", "#6B7280", "#E5E7EB"
DPI = 200  # of a PNG

_CONNECTION = re.compile(r"""[(\[](['"])([^'"]+)\1, (\d+)[)\]]""")


@dataclass(frozen=True, slots=True)
class Colours:
    """One colour per client, or per request where all are of one client. by: `client` or `request`."""

    by: str
    names: tuple[str, ...]
    _index: dict[Hashable, int]

    @classmethod
    def of(cls, trace: Journal, batches: Sequence[BatchLine]) -> Colours:
        """In order of appearance: clients in the trace, so that a window of it shows the same colours; requests in the
        batches shown, so that few of them need no hatching."""
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


def client_label(client: str, width: int = 18) -> str:
    """The client; one known only by its connection is `host #number`, which a server writes as the repr of a pair.
    width: characters of a name."""
    connection = _CONNECTION.fullmatch(client)
    if connection is None:
        return plain(client or "no client", width)
    name = plain(" #".join(connection.group(2, 3)), 99)
    return name if len(name) <= 21 else "…" + name[-20:]  # two of them differ in the number


def plain(text: str, width: int = 18) -> str:
    """A caller's text on one line: unprintable characters become dots, and a long text is cut with an ellipsis."""
    shown = "".join(c if c.isprintable() else "·" for c in text)
    return shown if len(shown) <= width else shown[: width - 1] + "…"


def ink(face: str) -> str:
    """Dark or white, whichever reads better on a colour."""
    r, g, b = (int(face[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#FFFFFF" if 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.45 else INK


def pale(face: str) -> str:
    """A colour mixed with white: for requests that get one token."""
    parts = (int(face[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 * 0.62 + part * 0.38):02X}" for part in parts)


def fill(colour: int, light: bool = False) -> dict[str, Any]:
    """Face, hatching and a white edge that separates neighbours. light: pale, and outlined in the colour itself."""
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


def is_tokens(batches: Sequence[BatchLine]) -> bool:
    """Whether all are steps over tokens whose members say what they had computed."""
    return bool(batches) and all(b.unit == "tokens" and any(m.known is not None for m in b.members) for b in batches)


def is_decode(member: Member) -> bool:
    """Whether the batch computed its newest token alone, to sample the next from; all else is prefill."""
    if member.computed is None or member.known is None or member.units - (member.guessed or 0.0) != 1.0:
        return False
    return member.known > member.asked and member.computed == member.known - 1.0


def unused(member: Member) -> float:
    """Its guessed tokens that turned out wrong: they were computed for nothing."""
    return (member.guessed or 0.0) - max(0, (member.outputs or 1) - 1)


def samples(member: Member) -> bool:
    """Whether the batch computed all it knew, so that a token was sampled."""
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

    scheduled: granted in all; cached: found in the prefix cache, at every entry; recomputed: computed and lost to
    preemption; unused: guesses that were wrong. first_step: id of the batch that sampled its first token; first_token:
    seconds from its arrival to the end of that batch. gaps: seconds between its tokens. ended: how it ended, None if
    the trace does not show that.
    """

    member: Member
    entered_step: int
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
            course = found.setdefault(m.seq, Course(m, batch.id))
            course.scheduled += m.units
            course.cached += m.cached or 0.0
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
