"""A second processor for parts of what the first one answered, such as a classifier for the boxes of a detector.

A frame is answered once, when all of its parts are. Parts are requests of a group of their own: they share batches with
the parts of other frames, their times are learned apart, and they have what is left of the frame's time limit. Those of
a whole batch of frames are submitted before the next batch is formed, so they meet without a hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, Protocol

from reflex_runtime.core.batch import Done, Failed
from reflex_runtime.core.errors import Expired, ProcessorError, Rejected
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.drivers.batch_processor import BatchConfig, BatchProcessor
from reflex_runtime.drivers.device import Clock
from reflex_runtime.drivers.submitted_frame import GivenFrame, SubmittedFrame

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
            self._end(Done(self._join(self._answers)))
        except Exception as error:
            self._end(self._fault("join", error))

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
