"""Derived from a journal of tokens: which requests waited at each step and why, prefill, the course of requests.

Folds over the batches as read, so that a table, a picture and a test see the same.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from reflex_runtime.observe.journal import BatchLine, Member

Units = Literal["grants", "ms", "requests"]  # what the height of a bar of batches counts
UNITS: tuple[Units, ...] = ("grants", "ms", "requests")
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
