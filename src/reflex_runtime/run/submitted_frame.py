"""A frame that is submitted: what may be said of it, and what the processor gets of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

from reflex_runtime.run.batch_processor import BatchEntry
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
    """What is computed in place of a frame that waited."""

    frame: Any
    view: Any
    sequence: int
    pts: float | None


class GivenFrame:
    """What a request for the frame of a feed carries.

    newest: called once, when its batch begins, on the thread that runs it: what to compute instead. What it raises is
    this frame's error, and its neighbours run without it.
    """

    __slots__ = ("_fault", "_newest", "feed_id", "frame", "pts", "sequence", "time_limit", "view")

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
        self.time_limit = time_limit
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
                self.frame, self.view, self.sequence, self.pts = newest()
        except Exception as error:
            self._fault = error
