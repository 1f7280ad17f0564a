"""A frame from its submission to its answer: what the processor gets of it, and what its caller can still do."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple, TypedDict

from reflex_runtime.core.batch import Done, Failed
from reflex_runtime.core.request import Ticket
from reflex_runtime.drivers.batch_processor import BatchEntry

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
