"""A journal's own inputs given to the scheduler at their own instants: it must form the batches that were recorded.

So the journal holds everything that decides a schedule, and the scheduler depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from reflex_runtime.core.batch import Apart, Batch, Cause, Done, Failed, Outcome
from reflex_runtime.core.errors import ProcessorError, Rejected
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.observe.journal import BatchLine, Journal, RequestLine, SchedulerRequest
from reflex_runtime.sim.recorded import RecordedSteps, came_as, request_of, scheduler_of


@dataclass(frozen=True, slots=True)
class Again:
    """One recorded batch and what the scheduler formed in its place: tickets as recorded, None when it formed none.

    late: seconds after the recorded instant at which it would have sent it (it was still holding).
    """

    recorded: BatchLine
    members: tuple[int, ...] | None
    stage: str
    cause: str
    late: float

    @property
    def same(self) -> bool:
        """Whether the same requests ran together in the same stage."""
        return self.members == tuple(self.recorded.seqs) and self.stage == self.recorded.stage


@dataclass(slots=True)
class MeasuredReplay:
    """Every recorded batch, formed again.

    early: times at which the scheduler would have sent a batch although it recorded that it waited.
    unknown: batches of requests that are not in the file (a shadow's); they are skipped.
    """

    batches: list[Again] = field(default_factory=list)
    early: int = 0
    unknown: int = 0

    @property
    def same(self) -> int:
        """Batches with the same members and stage."""
        return sum(b.same for b in self.batches)

    @property
    def same_cause(self) -> int:
        """Those of them that also left for the same reason."""
        return sum(b.same and b.cause == b.recorded.cause for b in self.batches)

    @property
    def late(self) -> float:
        """The longest of `Again.late`, in seconds."""
        return max((b.late for b in self.batches), default=0.0)

    @property
    def first_difference(self) -> Again | None:
        """The first batch that is not the same."""
        return next((b for b in self.batches if not b.same), None)


def replay_measured(recording: Journal) -> MeasuredReplay:
    """Give the scheduler its recorded inputs at the recorded instants, and compare the batches it forms.

    Needs the recorded settings and requests (`scheduler_of`). Requests that are missing in the file, because their
    lines were dropped or the process was killed, show as differences.
    """
    return _Measured(recording).run()


_Action = Callable[[float, bool], None]  # (now, whether a batch runs)


class _Measured:
    def __init__(self, recording: Journal) -> None:
        self._scheduler = scheduler_of(recording)
        self._steps = RecordedSteps(recording)
        self._slots = recording.slots
        self._batches = sorted(recording.batches, key=lambda b: b.at)
        self._tickets: dict[int, Ticket] = {}
        self._seqs: dict[Ticket, int] = {}
        self._last = {seq: b.id for b in self._batches for seq in b.seqs}
        self._ended = {e.ticket: e for e in recording.ended}
        self._expired = {e.at for e in recording.ended if e.outcome == "expired"}
        self._inputs = self._in_order(recording)
        self._known = {r.schedule.ticket for r in recording.requests if r.schedule is not None}
        self._done = 0

    def run(self) -> MeasuredReplay:
        """Walk through the recorded batches."""
        replay = MeasuredReplay()
        draining = False
        for recorded in self._batches:
            if not self._known.intersection(recorded.seqs):
                replay.unknown += 1
                continue
            for at in recorded.looked:
                self._apply(at, busy=False)
                replay.early += self._look(at) is not None
            self._apply(recorded.at, busy=False)
            if recorded.cause == Cause.DRAIN and not draining:
                draining = True
                self._scheduler.close(recorded.at, drain=True)
            batch, late = self._form(recorded.at)
            if batch is None:
                replay.batches.append(Again(recorded, None, "", "", late))
                continue
            members = tuple(self._seqs[t] for t in batch.grants)
            replay.batches.append(Again(recorded, members, batch.stage, batch.cause.value, late))
            self._apply(recorded.finished, busy=True)
            outcomes = [self._outcome(recorded, t, units) for t, units in batch.grants.items()]
            self._scheduler.complete(batch, outcomes, recorded.elapsed, recorded.finished)
            self._scheduler.take_events()
        return replay

    def _look(self, at: float) -> Batch | None:
        """The batch at a recorded look, which found none when it was recorded.

        The input before the look may be missing in the file, such as a request whose picture was not decoded yet.
        """
        if self._scheduler.decision_current and at not in self._expired:
            self._scheduler.set_room(self._slots[0], None, at)  # an input that changes nothing
        return self._scheduler.next_batch(at)

    def _form(self, at: float) -> tuple[Batch | None, float]:
        """The batch at this time, and the seconds that it would still be held; a held batch is formed, too."""
        batch = self._scheduler.next_batch(at)
        wake = self._scheduler.wake_at()
        if batch is not None or wake == inf:
            return batch, 0.0
        return self._scheduler.next_batch(max(at, wake)), max(0.0, wake - at)

    def _in_order(self, recording: Journal) -> list[tuple[float, int, float, _Action]]:
        """(time, rank, order, action): cancellations before what ends at the same instant, requests as they came."""
        found: list[tuple[float, int, float, _Action]] = []
        for line in recording.requests:
            asked = line.schedule
            if asked is not None:
                order = inf if asked.ticket is None else float(asked.ticket)
                request, came = came_as(line, asked)
                seq = -1 - line.seq if asked.ticket is None else asked.ticket  # admitted here, refused there
                ready = asked.admitted is None and asked.ready
                if asked.ticket is not None and (made := self._made(line, asked)) is not None:
                    found.append((made[0], 1, order, partial(self._prepare, asked.ticket, made[1])))
                    request = replace(request, shape="")  # what it costs was known when it had been prepared
                    if isinstance(made[1], ProcessorError):
                        request = replace(request, time_limit=None)
                found.append((came, 1, order, partial(self._submit, request, seq, ready)))
        for end in recording.ended:
            if end.ticket is None:
                continue
            if end.outcome == "cancelled":
                found.append((end.at, 0, end.ticket, partial(self._cancel, end.ticket)))
            elif end.outcome == "expired":
                found.append((end.at, 2, end.ticket, self._expire))
        found.sort(key=lambda entry: entry[:3])
        return found

    def _submit(self, request: Request, seq: int, ready: bool, now: float, busy: bool) -> None:
        try:
            ticket = self._scheduler.submit(request, now, ready)
        except Rejected:
            return
        self._tickets[seq] = ticket
        self._seqs[ticket] = seq

    def _made(self, line: RequestLine, asked: SchedulerRequest) -> tuple[float, Request | ProcessorError] | None:
        """When it had been prepared, and to what; None if it was not."""
        if asked.admitted is not None:
            return asked.arrived, request_of(line)
        end = None if asked.ticket is None else self._ended.get(asked.ticket)
        if asked.ready or end is None or end.outcome in ("cancelled", "expired"):
            return None
        return end.at, ProcessorError("it could not be prepared when it was recorded")

    def _prepare(self, seq: int, made: Request | ProcessorError, now: float, busy: bool) -> None:
        if seq in self._tickets:
            self._scheduler.prepared(self._tickets[seq], made, now)

    def _cancel(self, seq: int, now: float, busy: bool) -> None:
        if seq in self._tickets:
            self._scheduler.cancel(self._tickets[seq], now)

    def _expire(self, now: float, busy: bool) -> None:
        if busy:
            self._scheduler.next_batch(now)  # forms nothing while a batch runs; what is due takes effect

    def _apply(self, until: float, busy: bool) -> None:
        while self._done < len(self._inputs) and self._inputs[self._done][0] <= until:
            at, _, _, action = self._inputs[self._done]
            action(at, busy)
            self._done += 1

    def _outcome(self, recorded: BatchLine, ticket: Ticket, units: float) -> Outcome:
        seq = self._seqs[ticket]
        if recorded.apart:
            return Apart(ProcessorError("its call failed when it was recorded"))
        if recorded.crashed and recorded.cause != Cause.APART:
            return Failed(ProcessorError("it failed when it was recorded"))
        if self._last.get(seq) == recorded.id:
            end = self._ended.get(seq)
            if end is None:
                return Done()
            if end.outcome == "failed":
                return Failed(ProcessorError("it failed when it was recorded"))
        return self._steps(ticket, units)
