"""One device: a scheduler, the lock that guards it, and the thread that runs its batches.

The device thread completes a batch and takes the next one while it holds the lock once; other threads submit, cancel
and wake it. It sleeps, without polling. Drivers deliver the results.

- A thread that hangs in a processor, or ends with an exception, is given up: its batch fails at once, and one
  replacement is started. The second time, or if a GPU is lost, the device itself is given up (`on_fatal`): open
  requests are answered with errors, and none is admitted. A thread that an expendable group hangs or ends stops that
  group only; if the thread comes back, the group runs again after a rest. With `one_thread` there is no replacement:
  the device waits for a thread that hangs, and ends with one that ends.
- `FormingAhead`: a second thread forms a full batch shortly before the running one ends.
- `BriefBatches`: batches that take less than a hand-over to a thread run on the event loop, in `turn`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass
from math import inf
from typing import Any, Final, cast

from reflex_runtime.core.batch import Apart, Batch, Cause, Done, Event, Failed, Outcome
from reflex_runtime.core.errors import ConfigError, CutShort, GpuLost, ProcessorError, ProcessorHung, ReflexError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.process import ForkedLock, tell_of_forks
from reflex_runtime.run.processor import Processor, may_run_anywhere, run_batch

log = logging.getLogger("reflex.device")

Clock = Callable[[], float]


def complete(scheduler: Scheduler, batch: Batch, outcomes: Sequence[Outcome], elapsed: float, now: float) -> None:
    """Complete a batch that took `elapsed` seconds. An error of the cost model is logged, and the batch fails with a
    ProcessorError."""
    try:
        scheduler.complete(batch, outcomes, elapsed, now)
    except Exception as error:  # the batch is still in flight, see `Scheduler.complete`
        log.exception("batch %d could not be completed", batch.id)
        failed = Failed(ProcessorError(f"its batch could not be completed: {type(error).__name__}: {error}"))
        scheduler.complete(batch, [failed] * len(batch), elapsed, now)


# -- a thread that others wake -----------------------------------------------------------------------------------------


class Wakeable:
    """One thread that sleeps. threading.Condition has a lock and a queue per sleep, which took 30 us on a cold cache.

    lock: guards the sleeper's state, and is held at every call. waiting: whether the thread sleeps; until: when it
    wakes by itself.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._rung = threading.Lock()  # locked, except between a ring and the moment when the thread wakes up
        self._rung.acquire()
        self.waiting = False
        self.until = inf

    def ring(self) -> None:
        """Wake the thread if it sleeps."""
        if self.waiting:
            self.waiting = False
            self._rung.release()

    def wait(self, delay: float, until: float) -> None:
        """Sleep until a ring, for `delay` seconds at most, which end at `until`. The lock is released meanwhile."""
        if delay <= 0.0:
            return
        self.waiting, self.until = True, until
        self._lock.release()
        try:
            rung = self._rung.acquire(timeout=-1.0 if delay == inf else min(delay, threading.TIMEOUT_MAX))
        finally:
            self._lock.acquire()
        if not rung and not self.waiting:  # it was woken just as the time ran out
            self._rung.acquire()
        self.waiting = False


# -- the thread that forms the next batch ------------------------------------------------------------------------------


WAKING = 0.0002  # seconds from the end of a thread's sleep until it has the interpreter's lock
SLACK = 0.0002  # seconds by which it may form too early, rather than sleep once more
ERROR = 0.05  # relative error of a predicted time
PAYS = 0.01  # least share of a batch's time that forming must take, to form ahead
FULL = frozenset({Cause.SIZE, Cause.FULL})


class FormingAhead:
    """Forms the next batch on a thread of its own, shortly before the running one is predicted to end.

    Only while a full one runs: after others the next one is formed when the device is free.
    lock: guards the scheduler, and is held at every call. settle: completes what has ended, before a batch is formed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        lock: threading.Lock,
        clock: Callable[[], float],
        settle: Callable[[], None],
        name: str,
    ) -> None:
        self._scheduler, self._lock, self._clock, self._settle = scheduler, lock, clock, settle
        self._name = name
        self._bell = Wakeable(lock)
        self._thread: threading.Thread | None = None
        self._at = inf  # when to form
        self._next = inf  # when the thread will probably be needed next
        self._takes = 0.0
        self._ends = False

    def formed(self, batch: Batch, seconds: float) -> None:
        """Note how many seconds the device thread took to form a batch itself."""
        if batch.cause in FULL:
            self._took(seconds)

    def began(self, batch: Batch, now: float) -> None:
        """A batch was started: plan the next one, if forming it ahead may pay."""
        expected = batch.expected
        if batch.cause not in FULL or self._ends or not expected * PAYS < self._takes:
            self._at = inf
            return
        self._at = now + expected - (WAKING + 2.0 * self._takes + ERROR * expected)
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: batches are formed when the device is free
                log.exception("no batch is formed ahead")
                self.end()
        elif self._bell.waiting and self._at < self._bell.until:
            self._bell.ring()

    def rest(self) -> None:
        """Form nothing before the next `began`: nothing runs on the device thread."""
        self._at = inf

    def end(self) -> None:
        """The thread ends soon."""
        self._ends = True
        self._bell.ring()

    def _took(self, seconds: float) -> None:
        self._takes = seconds if self._takes == 0.0 else self._takes + 0.1 * (seconds - self._takes)

    def _main(self) -> None:
        with self._lock:
            while not self._ends:
                now = self._clock()
                if self._at <= now + SLACK:
                    try:
                        self._form(now)
                    except Exception:  # of a cost model: the device forms the batch itself, and fails too
                        log.exception("a batch could not be formed ahead")
                    continue
                until = min(self._at, self._next if self._next > now else inf)
                self._bell.wait(until - now, until)

    def _form(self, now: float) -> None:
        planned, self._at, self._next = self._at, inf, inf
        self._settle()
        batch = self._scheduler.form_ahead(now)
        if batch is not None:
            self._took(self._clock() - now)
            # The thread is needed again when this batch is about to end. It wakes by itself, so no other must wake it.
            self._next = planned + batch.expected


# -- brief batches run on the event loop -------------------------------------------------------------------------------

# A hand-over to a thread and back costs more than a small model. But a batch on the loop blocks everything else, so a
# kind of batch runs there only after many in a row were brief; after the first long one it runs on the thread again.

BRIEF: Final = 0.0003  # seconds of a batch; a hand-over takes 0.05 to 0.15 ms
PROOF: Final = 32  # batches in a row that must be brief
MOST_PROOF: Final = 4096  # the most that are needed; each long batch that comes soon doubles the number
KINDS: Final = 256  # kinds that are measured; with more of them all are measured anew


@dataclass(slots=True)
class _Proof:
    """Batches of one group, partition and stage.

    proof: how many must be brief in a row. brief: how many have been. size, seconds: of the largest among them.
    """

    proof: int = PROOF
    brief: int = 0
    size: int = 0
    seconds: float = inf


class BriefBatches:
    """Measures every batch, and decides where the next one runs.

    limit: the longest that a brief batch takes, in seconds; 0: none is brief. processors: by group; those with
    `any_thread` may run on the loop.
    """

    def __init__(self, limit: float, processors: Mapping[str, Processor]) -> None:
        self.limit, self._processors = limit, processors
        self._kinds: dict[tuple[str, Hashable, str], _Proof] = {}
        self._proven: set[str] = set()  # groups with a kind that is

    def group(self, name: str) -> bool:
        """Whether any batch of the group may run on the loop."""
        return name in self._proven and may_run_anywhere(self._processors[name])

    def fits(self, batch: Batch) -> bool:
        """Whether this batch may run on the loop: many of its kind were brief, and it is predicted to be.

        One larger than they were is predicted to take longer in proportion.
        """
        kind = self._kinds.get((batch.group, batch.partition, batch.stage))
        if kind is None or kind.brief < kind.proof:
            return False
        return kind.seconds * max(1.0, len(batch) / kind.size) <= self.limit

    def ran(self, batch: Batch, seconds: float, failed: bool = False) -> None:
        """Measure a batch that ran, on any thread. One that failed counts only if it was long."""
        if self.limit <= 0.0:
            return
        key = (batch.group, batch.partition, batch.stage)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) == KINDS:
                self._kinds.clear()
                self._proven.clear()
            kind = self._kinds[key] = _Proof()
        if seconds > self.limit:
            proof = kind.proof
            if kind.brief >= 2 * proof:  # the first long one in a long time
                proof = PROOF
            elif kind.brief >= proof:
                proof = min(2 * proof, MOST_PROOF)
            self._kinds[key] = _Proof(proof)
            self._proven.discard(batch.group)  # until a batch of another kind that is proven comes back
        elif not failed:
            if len(batch) >= kind.size:
                kind.size, kind.seconds = len(batch), seconds
            kind.brief += 1
            if kind.brief >= kind.proof:
                self._proven.add(batch.group)


# -- the device --------------------------------------------------------------------------------------------------------


BETWEEN: Final = 0.0001  # seconds for which the lock is free between two slices of requests that leave: a thread that
# waits for it needs that long to wake up


def _run_into(future: Future[object], action: Callable[[], object]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)


class Device:
    """Runs a scheduler's batches on processors, one per group, on one thread.

    notify: called when an answer is among the events, without the lock, on any thread. Take the events in one place,
        so that they stay in order. Events that answer nothing (a request queued, a batch scheduled) come with the next
        answer.
    on_fatal: called once, on any thread, when the device is given up. watchdog: seconds after which a batch hangs.
    expendable: groups whose answers no caller waits for. Their batches are given up much earlier (see `limit`). A
        thread lost to one is replaced without being counted, and the group is paused: until its thread comes back and
        `REST` times its time has passed, or until `resume`.
    one_thread: no other thread may ever call the processors. A batch that hangs is still answered with an error, and
        its late results are dropped.
    ahead: whether a full batch is formed while the one before runs (`FormingAhead`); that is completed while the next
        one runs. For a driver that takes the events on another thread.
    brief: seconds up to which batches may run on the thread that calls `turn`; 0: none do.
    on_stuck: called on the device thread, once in each `watchdog` seconds, while a batch in `turn` takes longer than
        that: the thread that could answer is blocked.
    hung: batches given up for their time. lost: why the device was given up, if it was.
    """

    RESTARTS = 1
    EXPENDABLE_S = 1.0  # seconds that a batch of an expendable group may take, whatever its prediction
    REST = 60.0  # times its lateness; so a late group takes at most 1/60 of the time from the others

    def __init__(
        self,
        scheduler: Scheduler,
        processors: Mapping[str, Processor],
        notify: Callable[[], None],
        clock: Clock = time.monotonic,
        on_fatal: Callable[[], None] | None = None,
        name: str = "reflex-device",
        watchdog: float = inf,
        expendable: Collection[str] = (),
        one_thread: bool = False,
        ahead: bool = False,
        brief: float = 0.0,
        on_stuck: Callable[[], None] | None = None,
    ) -> None:
        self.scheduler, self.clock = scheduler, clock
        self._processors = processors
        self._notify = notify
        self._on_fatal = on_fatal
        self._name = name
        self.watchdog = watchdog
        self.expendable = frozenset(expendable)
        self._late_threads: dict[int, tuple[str, float]] = {}  # by thread: its expendable group, and since when
        self._overrun = 0.0  # seconds that batches of other groups lately took beyond their prediction
        self._lock = threading.Lock()
        self._bell = Wakeable(self._lock)
        self._stopping = False
        self.thread: threading.Thread | None = None  # the one in charge, or the last one
        self._ended = threading.Event()  # the thread in charge has left its loop, or there is none any more
        self._generation = 0
        self._restarts = 0
        self._one_thread = one_thread
        self._late = False  # the thread still runs a batch that was answered for already
        self._running: tuple[Batch, float] | None = None
        self._returned: tuple[Batch, Sequence[Outcome], float, float] | None = None  # to be completed: elapsed, at
        self._ahead = FormingAhead(scheduler, self._lock, clock, self._settle, f"{name}-ahead") if ahead else None
        self._brief = BriefBatches(0.0 if one_thread else brief, processors)
        self._context = Context()  # of batches in `turn`: as a thread has one, not that of the caller who woke the loop
        self._here = False  # the batch that runs is in `turn`
        self._on_stuck = on_stuck
        self.hung = 0
        self.lost: ProcessorError | None = None

    # -- callers -------------------------------------------------------------------------------------------------------

    def start(self, prepare: Callable[[], object] | None = None) -> Future[object]:
        """Start the device thread. prepare: called on it first, but not on a replacement.

        Returns a future of its result or exception. The thread goes on after an exception, too.
        """
        prepared: Future[object] = Future()
        with self._lock:
            if self.thread is not None and self.thread.ident is not None:
                raise ConfigError("Device.start: already started")
            self._spawn(lambda: _run_into(prepared, prepare or (lambda: None)))
        tell_of_forks(self)
        return prepared

    def forked(self) -> None:
        self._lock = cast(threading.Lock, ForkedLock(self._name))

    def submit(
        self, request: Request, waiter: Any = None, wake: bool = True, ready: bool = True, held: bool = False
    ) -> Ticket:
        """Admit a request; its end is an event. Raises `Rejected`, which is an event too.

        wake: False leaves it to a later `wake`, so that requests that come together wake the device once.
        ready: False if no batch may take it before `prepared`. held: it gets nothing until `Scheduler.resume`.
        """
        with self._lock:
            settled = self.scheduler.settled
            ticket = self.scheduler.submit(request, self.clock(), ready, held)
            ticket.waiter = waiter
            if wake and self._bell.waiting and self._has_news():
                self._bell.ring()
            settles = self.scheduler.settled != settled  # another request had to make room for it
        if settles:
            self._notify()
        return ticket

    def prepared(self, ticket: Ticket, made: Request | ReflexError) -> None:
        """As `Scheduler.prepared`; wakes nothing."""
        with self._lock:
            self.scheduler.prepared(ticket, made, self.clock())

    def wake(self) -> None:
        """Wake a free device if it has something new to decide."""
        if self._bell.waiting:
            with self._lock:
                if self._has_news():
                    self._bell.ring()

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request for its caller."""
        self.input(lambda scheduler, now: scheduler.cancel(ticket, now))

    def abandon(self, ticket: Ticket) -> bool:
        """The caller stops waiting. Returns whether the ticket has settled after all."""

        def leave(scheduler: Scheduler, now: float) -> bool:
            if ticket.outcome is None:
                scheduler.abandon(ticket, now)
            return ticket.outcome is not None

        return bool(self.input(leave))

    def input(self, action: Callable[[Scheduler, float], Any]) -> Any:
        """Any other input to the scheduler, under the lock; returns the result of `action(scheduler, now)`."""
        with self._lock:
            self._settle()
            result = action(self.scheduler, self.clock())
            self._bell.ring()
        self._notify()
        return result

    def close(self, drain: bool) -> bool:
        """As `Scheduler.close`: admit nothing more. Returns whether another call has more to settle."""
        return bool(self.input(lambda scheduler, now: scheduler.close(now, drain)))

    def look(self) -> float:
        """For a driver's timer: expire requests while the device is busy (a free one does so itself), and give up a
        batch that has run for its `limit`. Returns when to look again: `look_at`."""
        with self._lock:
            if self.busy:
                self.scheduler.expire(self.clock())
            hangs = self._running is not None and self.clock() - self._running[1] >= self.limit
            if hangs:
                self._give_up_hung()
        if hangs:
            self._tell_lost()
        return self.look_at()

    @property
    def soonest(self) -> float:
        """Seconds after which a batch that starts now may hang."""
        return min(self.watchdog, self.EXPENDABLE_S) if self.expendable and self.watchdog < inf else self.watchdog

    def look_at(self) -> float:
        """When a driver must `look`: at the next deadline, or when the running batch reaches its limit."""
        with self._lock:
            if self._running is not None:
                return min(self.scheduler.wake_at(), self._running[1] + self.limit)
            at = self.scheduler.expires_at() if self._late else inf
            return at if self.scheduler.idle else min(at, self.clock() + self.soonest)

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        with self._lock:
            self._settle()
            return self.scheduler.take_events()

    @property
    def running_since(self) -> float | None:
        """When the batch now running was started; None when the device is free."""
        running = self._running
        return None if running is None else running[1]

    @property
    def busy(self) -> bool:
        """Whether a batch runs, given up or not."""
        return self._running is not None or self._late

    @property
    def current(self) -> bool:
        """Whether the caller is the device thread, which must not wait for an answer."""
        return threading.current_thread() is self.thread

    @property
    def limit(self) -> float:
        """Seconds that the running batch may take. In an expendable group the longest of: a second, ten times its
        prediction, twice the time that other batches lately took beyond their predictions on this machine."""
        running, watchdog = self._running, self.watchdog
        if running is None or running[0].group not in self.expendable or watchdog == inf:
            return watchdog
        return min(watchdog, max(self.EXPENDABLE_S, 10.0 * running[0].expected, 2.0 * self._overrun))

    def resume(self, group: str) -> None:
        """Let a paused expendable group run again."""

        def again(scheduler: Scheduler, now: float) -> None:
            self._late_threads = {thread: lost for thread, lost in self._late_threads.items() if lost[0] != group}
            scheduler.pause(group, now, now)

        self.input(again)

    def stop(self, timeout: float = 5.0) -> bool:
        """Run the batches that the scheduler still forms, settle the rest, stop the thread. Returns whether it ended in
        `timeout` seconds.

        A draining scheduler forms all queued requests, one that was closed otherwise none. Requests left after the
        timeout settle here, those of a running batch with CutShort.
        """
        until = time.monotonic() + timeout
        with self._lock:
            self._stopping = True
            self._bell.ring()
            if self._ahead is not None:
                self._ahead.end()
            thread, waits = self.thread, not self.current
        ended = thread is None or not waits or (self._ended.wait(timeout) and self.lost is None)
        while self.close(drain=False):
            time.sleep(BETWEEN)
        with self._lock:
            if waits:
                self._cut_short(CutShort("the device is stopping, and the batch did not end in time"))
        self._notify()
        if ended and waits and thread is not None:
            thread.join(max(0.0, until - time.monotonic()))  # it still calls the processors' own `stop`
        return ended

    # -- brief batches, on the event loop's thread ---------------------------------------------------------------------

    def turn(self) -> bool:
        """Let a free device take its next batch: here, if it is brief, else on the device thread.

        Returns whether a batch ran here; take its events. Always called on the same thread.
        """
        if not self._bell.waiting:
            return False
        with self._lock:
            settled = self.scheduler.settled
            try:
                batch = self._form_here() if self._has_news() else None
            except BaseException:  # it will fail on the device thread too, which then gives up the device
                self._bell.ring()
                raise
            news = settled != self.scheduler.settled
        if batch is None:
            if news:  # some were shed
                self._notify()
            return False
        try:
            outcomes = self._context.run(run_batch, self._processors[batch.group], batch)
        except BaseException:  # the caller does not go on
            error = Failed(ProcessorError("the thread that ran it was interrupted"))
            self._came_back(batch, [error] * len(batch), ring=True)
            self._notify()
            raise
        self._came_back(batch, outcomes, ring=False)
        return True

    def _form_here(self) -> Batch | None:
        """The batch to run on the calling thread; otherwise the device thread is woken. The lock is held."""
        busy = [group for group in self._processors if self.scheduler.unsettled(group)]
        if not self._bell.waiting or self._stopping or not all(map(self._brief.group, busy)):
            self._bell.ring()
            return None
        self._settle()
        if self._ahead is not None:
            self._ahead.rest()
        batch = self.scheduler.next_batch(self.clock())
        if batch is None:  # the thread sleeps until the end of a hold
            self._bell.ring()
            return None
        if not self._brief.fits(batch):
            self._start(batch, self.clock())
            self._bell.ring()
            return None
        self._running, self._here = (batch, self.clock()), True
        batch.notes["on_loop"] = True
        return batch

    def _came_back(self, batch: Batch, outcomes: Sequence[Outcome], ring: bool) -> None:
        with self._lock:
            self._here = False
            if self._running is not None and self._running[0] is batch:  # it was not given up meanwhile
                self._complete(outcomes, self.clock())
                self._settle()
            dropped = not all(isinstance(outcome, Done) for outcome in outcomes) and self.scheduler.idle
            if self._stopping or ring or dropped:  # the thread drops residents that no next batch names
                self._bell.ring()

    def _look_here(self, now: float) -> None:
        """The device thread watches a batch that runs in `turn`. The lock is held."""
        self.scheduler.expire(now)
        if self._running is None or now - self._running[1] < self.watchdog:
            return
        batch, since = self._running
        log.error("batch %d has run for %.0f s on the event loop, which is blocked", batch.id, now - since)
        if self._on_stuck is not None:
            self._on_stuck()

    # -- device thread -------------------------------------------------------------------------------------------------

    def _spawn(self, prepare: Callable[[], None] | None = None) -> None:
        self._generation += 1
        self.thread = threading.Thread(
            target=self._main, args=(self._generation, prepare), name=f"{self._name}-{self._generation}", daemon=True
        )
        self.thread.start()

    def _main(self, generation: int, prepare: Callable[[], None] | None) -> None:
        try:
            if prepare is not None:
                prepare()
            for processor in self._processors.values():
                processor.start()
            outcomes: list[Outcome] = []
            while (batch := self._next(generation, outcomes)) is not None:
                outcomes = run_batch(self._processors[batch.group], batch)
                del batch  # while this thread sleeps it keeps nothing of the batch alive
        except BaseException as error:  # the thread ends: its batch is answered first
            self._died(generation, error)
            return
        with self._lock:
            if generation != self._generation:
                return  # given up: another thread owns the processors now
            self._ended.set()
        for processor in self._processors.values():
            try:
                processor.stop()
            except Exception:
                log.exception("a processor could not be stopped")

    def _next(self, generation: int, outcomes: list[Outcome]) -> Batch | None:
        """Complete the batch that ran and wait for the next; None when the device stops or this thread was given up.

        outcomes: of the batch that ran; none before the first. They are cleared, so that a sleeping thread keeps
        nothing of them alive.
        """
        while True:
            with self._lock:
                now = self.clock()
                if generation != self._generation:
                    self._back_late(generation, now)
                    break
                news = bool(outcomes)
                if outcomes:
                    self._complete(outcomes, now)
                    outcomes.clear()
                settled = self.scheduler.settled
                found, gone = self._take(now)
                news = news or settled != self.scheduler.settled
            if news:
                self._notify()
            if found is not None:
                return found
            self._drop(gone)
            del gone
            if self.scheduler.behind:
                time.sleep(BETWEEN)
            with self._lock:
                if generation != self._generation:
                    return None
                if self._stopping and not self._has_work():
                    return None
                self._wait()
        self._notify()
        return None

    def _back_late(self, thread: int, now: float) -> None:
        """A thread that was given up has come back: let its expendable group run again, after a rest. The lock is
        held."""
        group, since = self._late_threads.pop(thread, ("", now))
        if group and self.lost is None and all(group != other for other, _ in self._late_threads.values()):
            self.scheduler.pause(group, now + self.REST * (now - since), now)
            self._bell.ring()

    def _take(self, now: float) -> tuple[Batch | None, Sequence[tuple[Processor, tuple[Ticket, ...]]]]:
        """The batch to run now, and residents to drop where there is none. The lock is held."""
        if self._here:
            self._look_here(now)
            return None, ()
        if self._running is not None:  # formed in `turn`, for this thread to run
            return self._running[0], ()
        batch = self.scheduler.start_ahead(now) if self._ahead is not None else None
        if batch is None:
            self._settle()
            began = self.clock()
            batch = self.scheduler.next_batch(now)
            now = self.clock()
            if batch is not None and self._ahead is not None:
                self._ahead.formed(batch, now - began)
        if batch is not None:
            self._start(batch, now)
            return batch, ()
        return None, [(p, left) for name, p in self._processors.items() if (left := self.scheduler.take_left(name))]

    def _complete(self, outcomes: Sequence[Outcome], now: float) -> None:
        """The running batch came back; `_settle` completes it, once the next one runs. The lock is held."""
        if self._late:  # it was given up and answered meanwhile
            self._late = False
            return
        assert self._running is not None
        batch, since = self._running
        self._running = None
        self._brief.ran(batch, now - since, failed=isinstance(outcomes[0], Failed | Apart))
        self._settle()
        self._returned = batch, tuple(outcomes), now - since, now

    def _start(self, batch: Batch, now: float) -> None:
        self._running = (batch, now)
        if self._ahead is not None:
            self._ahead.began(batch, now)

    def _settle(self) -> None:
        """Complete the batch that came back. The lock is held."""
        returned, self._returned = self._returned, None
        if returned is not None:
            batch, _, elapsed, _ = returned
            if batch.group not in self.expendable:
                self._overrun = max(0.99 * self._overrun, elapsed - batch.expected)
            complete(self.scheduler, *returned)

    def _has_news(self) -> bool:
        """Whether an input may change when the sleeping thread wakes up. The lock is held."""
        return not self.scheduler.decision_current or self.scheduler.expires_at() < self._bell.until

    def _has_work(self) -> bool:
        """Whether something is due now. The lock is held."""
        return self._here or self.scheduler.wake_at() <= self.clock()

    def _wait(self) -> None:
        """Sleep until an input or until the scheduler has something to do; where batches run in `turn`, for a watchdog
        at most. The lock is held, not while it sleeps."""
        wake = self.scheduler.wake_at()
        self._bell.wait(min(wake - self.clock(), self.watchdog if self._brief.limit else inf), wake)

    @staticmethod
    def _drop(gone: Sequence[tuple[Processor, tuple[Ticket, ...]]]) -> None:
        for processor, tickets in gone:
            try:
                processor.drop(tickets)
            except Exception:
                log.exception("a processor could not drop its residents")

    # -- a lost thread -------------------------------------------------------------------------------------------------

    def _died(self, generation: int, error: BaseException) -> None:
        log.error("the device thread died", exc_info=error)
        with self._lock:
            if generation != self._generation:
                self._late_threads.pop(generation, None)
                return
            self._restarts += 2 * isinstance(error, GpuLost)  # no other thread could reach it, whatever the group
            self._lose(ProcessorError(f"the device thread died: {type(error).__name__}: {error}"))
        self._tell_lost()

    def _lose(self, error: ProcessorError) -> None:
        """Fail the batch of a lost thread and replace the thread once. The lock is held; `_tell_lost` follows without
        it."""
        self._bell.waiting = False
        group = "" if self._running is None else self._running[0].group
        self._cut_short(error)
        if group in self.expendable:
            self.scheduler.pause(group, inf, self.clock())
            self._restarts -= 1
        if self._restarts < self.RESTARTS and not self._one_thread:
            self._restarts += 1
            try:
                self._spawn()
                return
            except RuntimeError:
                log.exception("the device thread could not be replaced")
        self._generation += 1
        if self._ahead is not None:
            self._ahead.end()
        self.lost, self._late = error, False
        while self.scheduler.close(self.clock(), drain=False):
            pass
        self._ended.set()

    def _give_up_hung(self) -> None:
        """Give up the running batch. The lock is held; `_tell_lost` follows without it."""
        assert self._running is not None
        (batch, since), limit = self._running, self.limit
        self.hung += 1
        error = ProcessorHung(f"{batch.group}: the processor did not come back within {limit:g} s", limit_s=limit)
        if self._one_thread:
            self._cut_short(error)
            return
        if batch.group in self.expendable:
            self._late_threads[self._generation] = (batch.group, since)
        self._lose(error)

    def _tell_lost(self) -> None:
        self._notify()
        if self.lost is not None and self._on_fatal is not None:
            on_fatal, self._on_fatal = self._on_fatal, None
            on_fatal()

    def _cut_short(self, error: ProcessorError) -> None:
        """Fail the running batch, if there is one, and give up its thread. The lock is held."""
        self._settle()
        if self._running is None:
            return
        (batch, since), now = self._running, self.clock()
        self._running = None
        self._late = self._one_thread  # its thread stays in charge
        self._generation += not self._one_thread
        try:
            self.scheduler.complete(batch, [Failed(error)] * len(batch), now - since, now)
        except ValueError:  # the thread died while it completed the batch
            log.exception("batch %d was completed in part", batch.id)
