"""A frame from its submission to its answer: what the processor gets of it, and what its caller can still do.

A second processor may run on parts of what the first one answered, as a classifier on a detector's boxes. A frame is
answered once, when all of its parts are. Parts are requests of a group of their own: they share batches with the parts
of other frames, their times are learned apart, and they have what is left of the frame's time limit. Those of a whole
batch of frames are submitted before the next batch is formed, so they meet without a hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol, TypedDict

from reflex_runtime.core.batch import Done, Failed
from reflex_runtime.core.errors import Expired, ProcessorError, Rejected
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.run.batch_processor import BatchConfig, BatchEntry, BatchProcessor
from reflex_runtime.run.device import Clock
from reflex_runtime.run.wall import WALL

_entry = tuple.__new__  # a NamedTuple's own constructor is a Python function around this


class FrameOptions(TypedDict, total=False):
    """What may be said of a frame that is submitted.

    sequence: its number in its feed; counted if not given. pts: seconds in its stream. time_limit: seconds from now
    after which it is not worth computing.
    """

    sequence: int | None
    pts: float | None
    time_limit: float | None


class NewestFrame(NamedTuple):
    """What is computed in place of a frame that waited. deadline: monotonic seconds, for a second model's answers."""

    frame: Any
    view: Any
    sequence: int
    pts: float | None
    deadline: float = inf


class GivenFrame:
    """What a request for the frame of a feed carries.

    newest: called once, when its batch begins, on the thread that runs it: what to compute instead. What it raises is
    this frame's error, and its neighbours run without it.
    """

    __slots__ = ("_fault", "_newest", "deadline", "feed_id", "frame", "pts", "sequence", "time_limit", "view")

    def __init__(
        self,
        feed_id: str,
        frame: Any,
        view: Any = None,
        newest: Callable[[], NewestFrame] | None = None,
        /,
        *,
        sequence: int | None = None,
        pts: float | None = None,
        time_limit: float | None = None,
    ) -> None:
        self.feed_id, self.frame, self.view, self.sequence, self.pts = feed_id, frame, view, sequence, pts
        self.time_limit, self.deadline = time_limit, inf
        self._newest = newest
        self._fault: Exception | None = None

    def entry(self, arrived: float) -> BatchEntry:
        """What the processor gets; the same again if its call is repeated. arrived: of the request."""
        if self._newest is not None:
            self._bind()
        if self._fault is not None:
            raise self._fault
        return _entry(BatchEntry, (self.feed_id, self.frame, self.view, self.sequence, self.pts, arrived))

    def _bind(self) -> None:
        newest, self._newest = self._newest, None
        assert newest is not None
        try:
            with WALL:
                self.frame, self.view, self.sequence, self.pts, self.deadline = newest()
        except Exception as error:
            self._fault = error


class SubmittedFrame:
    """A frame that was submitted, for the caller who waits for it. feed_id: whose it is.

    settled: called once, at its end, with this object, by the thread that delivers answers.
    """

    def __init__(self, feed_id: str, settled: Callable[[SubmittedFrame], None]) -> None:
        self.feed_id = feed_id
        self._settled = settled
        self._ticket: Ticket | None = None

    @property
    def outcome(self) -> Done | Failed | None:
        """Its end; None until it is answered."""
        outcome: Done | Failed | None = None if self._ticket is None else self._ticket.outcome
        return outcome

    def admitted(self, ticket: Ticket) -> None:
        """It waits, or is answered already."""
        self._ticket = ticket

    def answered(self, ticket: Ticket) -> None:
        """The processor has answered."""
        self._ticket = ticket
        self._settled(self)

    def cancel(self, cancel: Callable[[Ticket], None]) -> None:
        """Give it up for its caller. cancel: what of it still runs or waits. On any thread."""
        assert self._ticket is not None
        cancel(self._ticket)

    def abandon(self, abandon: Callable[[Ticket], bool]) -> bool:
        """Its caller stops waiting. Returns whether the answer is there after all. On any thread.

        abandon: gives up what of it still runs or waits, and returns whether that has an answer.
        """
        assert self._ticket is not None
        return abandon(self._ticket)


# -- a second processor ------------------------------------------------------------------------------------------------


log = logging.getLogger("reflex.coordinator")

Join = Callable[[Sequence[Done | Failed]], Any]


class FollowUp(Protocol):
    """What a coordinator asks a second processor. `parts` is called on its threads and must be quick.

    processor: the second one, run on the same thread as the first. config: of its batches.
    """

    processor: BatchProcessor
    config: BatchConfig

    def parts(self, frame: Any, value: Any) -> tuple[Sequence[Any], Join]:
        """What the second processor is asked about a frame, and what makes the frame's result of the answers.

        value: what the first one answered. The join gets an answer for each part, in order; a `Failed` says why one has
        none. It is as quick, and knows which parts were asked: what decides on them may have changed meanwhile.
        """


class FrameParts(SubmittedFrame):
    """A frame on its way through both processors. given: what the first one gets of it.

    admit: submits a part, or raises Rejected. Everything but `cancel` and `abandon` is called by the thread that
    delivers answers.
    """

    def __init__(
        self,
        follow: FollowUp,
        given: GivenFrame,
        admit: Callable[[Request, Callable[[Ticket], None]], Ticket],
        settled: Callable[[SubmittedFrame], None],
        clock: Clock,
    ) -> None:
        super().__init__(given.feed_id, settled)
        self._given = given
        self._outcome: Done | Failed | None = None
        self._open: list[Ticket] = []  # of the frame, then of its parts
        self._follow, self._admit, self._clock = follow, admit, clock
        self._join: Join = tuple
        self._answers: list[Done | Failed] = []
        self._left = 0  # parts without an answer
        self._gone = False

    @property
    def outcome(self) -> Done | Failed | None:
        return self._outcome

    def admitted(self, ticket: Ticket) -> None:
        self._open.append(ticket)

    def cancel(self, cancel: Callable[[Ticket], None]) -> None:
        self._gone = True
        for ticket in tuple(self._open):
            cancel(ticket)

    def abandon(self, abandon: Callable[[Ticket], bool]) -> bool:
        if self._outcome is not None:
            return True
        self._gone = True
        for ticket in tuple(self._open):
            abandon(ticket)
        return False  # what comes now comes because the caller has left

    def answered(self, ticket: Ticket) -> None:
        """The first processor has answered."""
        outcome = ticket.outcome
        if not isinstance(outcome, Done):
            self._end(outcome)
            return
        try:
            with WALL:
                parts, self._join = self._follow.parts(self._given.frame, outcome.value)
        except Exception as error:
            self._end(self._fault("parts", error))
            return
        self._left = len(parts) + 1  # one for this loop: the last part may be refused in it
        self._answers = [Failed(Expired())] * len(parts)
        deadline = min(ticket.deadline, self._given.deadline)
        for number, part in enumerate(parts):
            self._submit(number, part, deadline)
        self._count()

    def _submit(self, number: int, part: Any, deadline: float) -> None:
        limit = None if deadline == inf else deadline - self._clock()
        if self._gone or (limit is not None and limit <= 0.0):
            self._count()
            return
        given, group = self._given, self._follow.processor.id
        payload = GivenFrame(given.feed_id, part, sequence=given.sequence, pts=given.pts)
        request = Request(payload, group=group, client=given.feed_id, time_limit=limit)
        try:
            ticket = self._admit(request, partial(self._part, number))
        except Rejected as error:
            self._answers[number] = Failed(error)
            self._count()
        else:
            self._open.append(ticket)

    def _part(self, number: int, ticket: Ticket) -> None:
        assert ticket.outcome is not None
        self._answers[number] = ticket.outcome
        self._count()

    def _count(self) -> None:
        self._left -= 1
        if self._left:
            return
        try:
            with WALL:
                joined = self._join(self._answers)
        except Exception as error:
            self._end(self._fault("join", error))
        else:
            self._end(Done(joined))

    def _fault(self, step: str, error: Exception) -> Failed:
        log.exception("%s: %s failed", type(self._follow).__name__, step)
        return Failed(ProcessorError(f"{type(self._follow).__name__}.{step}: {type(error).__name__}: {error}"))

    def _end(self, outcome: Any) -> None:
        settled, self._settled = self._settled, _ignore  # it holds the caller, and the caller this
        self._open, self._answers, self._join = [], [], tuple
        self._outcome = outcome
        settled(self)


def _ignore(answered: SubmittedFrame) -> None:
    pass
