"""The thread that takes a feed's frames through its pipeline, and its results to the sinks, in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import inf
from typing import Any, TypeVar

from reflex_runtime.core.errors import (
    Closed,
    CutShort,
    Displaced,
    Drained,
    Expired,
    InFlightCapReached,
    QueueFull,
    ReflexError,
    Shed,
    Superseded,
    TooLate,
    WaitTimeout,
)
from reflex_runtime.feeds.runtime.capture import FeedContext
from reflex_runtime.feeds.runtime.health import FeedFrozen, FeedStageError
from reflex_runtime.feeds.runtime.pipeline import Frame, Pipeline, Result, name_of
from reflex_runtime.pacing import Throttle
from reflex_runtime.run.coordinator import BatchHandle
from reflex_runtime.run.submitted_frame import NewestFrame
from reflex_runtime.run.wall import WALL, place_of

log = logging.getLogger("reflex.feeds")

Sink = Callable[[Result], Any]
T = TypeVar("T")

RETRY_S, RETRY_MOST_S = 0.005, 0.100  # a file feed's pauses before it asks again

_RETRIED = (QueueFull, Displaced, InFlightCapReached, WaitTimeout)  # by a file feed, which loses nothing
_REASONS: tuple[tuple[type[ReflexError] | tuple[type[ReflexError], ...], str], ...] = (
    ((QueueFull, Displaced), "queue_full"),
    (InFlightCapReached, "in_flight"),
    (WaitTimeout, "timeout"),
    ((Expired, Shed, Superseded, TooLate), "stale"),
    ((Closed, Drained, CutShort), "closed"),
)


def reason_of(error: Exception) -> str:
    """The reason in `DROPS` for a frame with this error at the batch point."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "failed")


class StageFailed(ReflexError):
    """A stage of a feed failed on a frame."""

    code = "stage_failed"


class _Out(Exception):
    """The frame in hand goes no further; `reason` is one of `DROPS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CurrentFrame:
    """The frame that a feed works on. While it waits for the processor, a newer one takes its place when its batch
    begins.

    frame: as it was read. made: what the stages before the batch point made of it. replaced: whether it is a newer one
    than that which was submitted. begun: whether those stages are over. answer: that of a file's frame, which was
    submitted before the one that comes before it had its own.
    """

    def __init__(self, frame: Frame, pipeline: Pipeline, feed: FeedContext) -> None:
        self.frame = self.made = frame
        self.replaced = self.begun = False
        self.answer: Future[Any] | None = None
        self._pipeline, self._feed = pipeline, feed
        self._view: Any = None
        self._waits = True  # for its batch; then no frame is taken any more
        self._guard = threading.Lock()  # of these

    def view(self) -> Any:
        """What goes with it to the processor, made once."""
        if self._view is None:
            self._view = self._pipeline.view_of(self.made)
        return self._view

    def newest(self) -> NewestFrame:
        """What its batch computes: the newest frame of the queue, else this one. The one that it replaces is dropped.

        Called by the coordinator. Raises `Expired` if it is too old, or what a preparation raises.
        """
        with self._guard:
            newer = self._feed.queue.get(0.0) if self._waits else None
            self._waits = False
            if newer is not None:
                self._feed.ledger.overrun()
                self.frame = self.made = newer
                self.replaced, self._view = True, None
        max_age = inf if self._feed.config.max_age is None else self._feed.config.max_age
        if self.frame.captured + max_age <= self._feed.clock():
            raise Expired(f"older than max_age={max_age:g} s when its batch began")
        frame = self.made
        return NewestFrame(self._pipeline.part(frame.image), self.view(), frame.sequence, frame.pts)

    def leave(self) -> None:
        """It waits no more: from now on it stays the same, also if its batch begins."""
        with self._guard:
            self._waits = False


class Consumer:
    """Takes frames from the queue until it is closed and empty. See `Feed` for what live and file feeds do differently.

    silent: whether the source sends nothing. in_flight: frames at the batch point. There a camera's frame makes way for
    a newer one until its batch begins, unless stages run before: those run on this thread. A file has as many frames
    there as a batch can hold, since it waits for them anyway.
    """

    def __init__(
        self, feed: FeedContext, pipeline: Pipeline, sinks: Sequence[Sink], silent: Callable[[], bool]
    ) -> None:
        self._feed, self._pipeline, self._sinks, self._silent = feed, pipeline, sinks, silent
        self._max_age = feed.config.max_age if feed.live else None
        self._frozen_after = feed.config.frozen_after if feed.live else None
        self._handle = None if pipeline.batch is None else pipeline.batch.handle
        plain = not pipeline.before and pipeline.view is None
        self._newest = feed.live and (feed.config.queue or 1) == 1 and plain
        self._most = 1 if feed.live else getattr(self._handle, "ahead", 1)  # frames at the batch point
        self._replaced = False  # whether a newer frame took the place of the last one
        self._lost: Exception | None = None
        self._throttle = Throttle()
        self._failure = ""  # what the last stage or sink said that failed
        self.in_flight = 0
        self.abandoned = False  # `stop` no longer waits for this thread: further results are discarded
        self._at: Sink | None = None  # the sink that has a result in hand
        self._guard = threading.Lock()  # of these two

    def run(self) -> Exception | None:
        """Returns None when there is nothing more to take, or the error for which the feed cannot go on."""
        patience, queue = self._frozen_after, self._feed.queue
        asked: deque[CurrentFrame] = deque()  # they end in this order
        try:
            while self._lost is None or asked:
                room = self._lost is None and len(asked) < self._most
                frame = queue.get(0.0 if asked else patience) if room else None
                if frame is not None:
                    patience = self._frozen_after
                    hand = CurrentFrame(frame, self._pipeline, self._feed)
                    if self._most == 1:
                        self._take(hand)
                    elif self._counted(self._submitted, hand):
                        asked.append(hand)
                elif asked:
                    self._take(asked.popleft())
                elif queue.closed and not len(queue):
                    break
                elif self._silent():
                    patience = None  # reported once for each gap
                    self._feed.emit(FeedFrozen(self._feed.clock(), self._feed.name))
            return self._lost
        finally:
            for hand in asked:  # the thread died of another
                if hand.answer is not None:
                    hand.answer.cancel()
                    self.in_flight -= 1
                self._feed.ledger.drop("stopped")
            self._tell(self._throttle.flush(self._feed.clock()))

    def abandon(self) -> Sink | None:
        """From now on no sink gets anything. Returns the one that the thread is inside of, which may be stuck."""
        with self._guard:
            self.abandoned = True
            return self._at

    def _counted(self, step: Callable[[CurrentFrame], T], hand: CurrentFrame) -> T | None:
        """What a step makes of a frame. None for one that goes no further; it is counted, also when the thread dies of
        it."""
        reason: str | None = "failed"
        try:
            made = step(hand)
            reason = None
            return made
        except _Out as out:
            reason = out.reason
        except Exception as error:
            self._failed(error)
        finally:
            if reason is not None:
                self._feed.ledger.drop(reason)
        return None

    def _take(self, hand: CurrentFrame) -> None:
        """A frame to its end, from the queue or from the batch point."""
        found = self._counted(self._result, hand)
        if found is None:
            return
        answered, result = found
        self._feed.ledger.answered(hand.frame, answered)
        if (result is None or self._give(result)) and self._throttle.held:
            self._tell(self._throttle.recover(self._feed.clock()))

    def _result(self, hand: CurrentFrame) -> tuple[float, Result | None]:
        """When it was answered, and what the sinks get, None for nothing. Raises _Out, or what a stage raised."""
        self._begin(hand)
        value = None
        if self._handle is not None:
            value = self._pipeline.placed(self._ask(self._handle, hand))
        if self.abandoned:
            raise _Out("stopped")
        answered = self._feed.clock()
        result: Result | None = Result(hand.made, self._feed.name, value, answered - hand.frame.captured)
        for after in self._pipeline.after:
            if result is not None:
                result = self._staged(after, result, Result)
        return answered, result

    def _begin(self, hand: CurrentFrame) -> None:
        """Run the stages before the batch point, if they have not run. Raises as `_result` does."""
        if hand.begun:
            return
        hand.begun = True
        self._time_left(hand)
        for before in self._pipeline.before:
            stepped = self._staged(before, hand.made, Frame)
            if stepped is None:
                raise _Out("skipped")
            hand.made = stepped

    def _submitted(self, hand: CurrentFrame) -> bool:
        """Submit a file's frame without a wait for its answer. One that is refused is asked again when it is its turn.
        Raises as `_result` does."""
        assert self._handle is not None
        self._begin(hand)
        image, view, frame = self._pipeline.part(hand.made.image), hand.view(), hand.frame
        try:
            hand.answer = self._handle.submit(
                self._feed.name, image, view, sequence=frame.sequence, pts=frame.pts, time_limit=None
            )
        except ReflexError:
            return True
        self.in_flight += 1
        return True

    def _staged(self, stage: Callable[[Any], Any], item: Any, kind: type[Any]) -> Any:
        """What a stage makes of an item. Its time and its failures are counted; its error names it."""
        name, began, failed = name_of(stage), self._feed.clock(), True
        self._feed.ledger.stage_begins()
        try:
            with WALL:
                made = stage(item)
            if made is not None and not isinstance(made, kind):
                raise TypeError(f"returned {type(made).__name__}, must return a {kind.__name__} or None")
            failed = False
        except Exception as error:
            fault = StageFailed(f"stage {name}: {type(error).__name__}: {error}")
            fault.place = place_of(error)
            raise fault from error
        finally:
            self._feed.ledger.stage_ended(name, self._feed.clock() - began, failed)
        return made

    def _time_left(self, hand: CurrentFrame) -> float | None:
        """Seconds until it is too old, None without a limit. Raises _Out if it is."""
        if self._max_age is None:
            return None
        left = hand.frame.captured + self._max_age - self._feed.clock()
        if left <= 0.0:
            raise _Out("stale")
        return left

    # -- the batch point -----------------------------------------------------------------------------------------------

    def _ask(self, handle: BatchHandle, hand: CurrentFrame) -> Any:
        """The processor's answer, or _Out."""
        image = view = newest = None
        if self._newest:
            newest = hand.newest
            if not self._replaced:  # of an overloaded processor it is likely to be again: then it is not prepared
                hand.view()
        else:
            image, view = self._pipeline.part(hand.made.image), hand.view()
        pause, timeouts = RETRY_S, 0
        while True:
            limit = None if self._newest else self._time_left(hand)
            answer, hand.answer = hand.answer, None
            self.in_flight += answer is None
            try:
                if answer is not None:
                    return _answer(answer, handle.patience)
                return handle.submit_and_wait(
                    self._feed.name,
                    image,
                    view,
                    sequence=hand.frame.sequence,
                    pts=hand.frame.pts,
                    time_limit=limit,
                    newest=newest,
                )
            except ReflexError as error:
                self._feed.ledger.note(str(error))
                self._look_for_the_end(handle, error)
                timeouts += isinstance(error, WaitTimeout)
                self._give_up_on(error, timeouts)
            finally:
                self.in_flight -= 1
                hand.leave()
                self._replaced = hand.replaced
            if self._feed.pause(self._feed.stop, pause):
                raise _Out("stopped")
            pause = min(RETRY_MOST_S, 2.0 * pause)

    def _give_up_on(self, error: ReflexError, timeouts: int) -> None:
        """Raise _Out, unless the frame is worth another attempt: a file feed's, which found no room or no answer."""
        if self._feed.live or not isinstance(error, _RETRIED):
            raise _Out(reason_of(error)) from error
        if timeouts > self._feed.config.retries:
            self._failed(error)
            raise _Out("failed") from error

    def _look_for_the_end(self, handle: BatchHandle, error: ReflexError) -> None:
        """Whether the coordinator no longer answers: expected at a stop, otherwise the end of the feed.

        The coordinator's health events report the loss, once for each feed; here it only ends the feed.
        """
        if self._feed.stop.is_set():
            return
        if handle.lost is not None:
            self._lost = handle.lost
        elif isinstance(error, (Closed, Drained, CutShort)):
            self._lost = error

    # -- sinks and failures --------------------------------------------------------------------------------------------

    def _give(self, result: Result) -> bool:
        """Give it to every sink, even if one fails, until the thread is abandoned. Returns whether all took it."""
        failed = False
        for sink in self._sinks:
            with self._guard:
                if self.abandoned:  # they may be closed
                    return False
                self._at = sink
            try:
                with WALL:
                    sink(result)
            except Exception as error:
                failed = True
                self._feed.ledger.sink_failed()
                self._failed(error)
            finally:
                self._at = None
        return not failed

    def _failed(self, error: Exception) -> None:
        """Report a failed stage or sink: at once, then at most once a second with the count."""
        if not self._throttle.held:
            log.debug("%s: a stage or sink failed", self._feed.name, exc_info=error)
        self._failure = error.logged() if isinstance(error, ReflexError) else f"{type(error).__name__}: {error}"
        self._feed.ledger.note(self._failure)
        self._tell(self._throttle.count(self._feed.clock()))

    def _tell(self, count: int) -> None:
        if count:
            self._feed.emit(FeedStageError(self._feed.clock(), self._feed.name, self._failure, count=count))


def _answer(answer: Future[Any], patience: float) -> Any:
    """The answer of a frame that was submitted before; `WaitTimeout` if none comes."""
    try:
        return answer.result(patience)
    except TimeoutError:
        answer.cancel()
        raise WaitTimeout(f"no answer within {patience:g} s") from None
