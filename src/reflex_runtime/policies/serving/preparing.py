"""Decodes pictures after admission: on a few threads, in fair order, within limits.

A request is admitted first: it has its place, counts for its client's cap, and its deadline runs (`Scheduler.submit`
with ready=False). Then it waits here for a thread, while batches run. The headers of its images give the number of
pixels:

- few (`LIGHT_PIXELS`): they are decoded at once, on any thread;
- many: the request waits again, by its size, and at least one thread never decodes large pictures. These waiting
  pixels are limited; beyond the limit the request that would be decoded last is refused.

A request that settles while it waits is not decoded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final

from reflex_runtime.core.errors import QueueFull, ReflexError
from reflex_runtime.core.order import LazyHeap
from reflex_runtime.core.request import Priority
from reflex_runtime.policies.policy.observation import MAX_IMAGE_PIXELS

log = logging.getLogger("reflex.server")

LIGHT_PIXELS: Final = 1 << 20
"""Up to so many pixels a request is decoded on any thread: as PNG they take 10 to 30 ms."""
WAITING_PIXELS: Final = 16 * MAX_IMAGE_PIXELS
"""Of larger requests, so many pixels may wait: some seconds of decoding."""
LOOK_PIXELS: Final = 1 << 14  # cost of reading the headers, in decoded pixels
SHARES: Final = {Priority.URGENT: 10.0, Priority.DEFAULT: 1.0, Priority.BACKGROUND: 0.1}

AT_ONCE: Final = 16
"""Most requests that one turn of the event loop is told of."""

SHADOW_SHARE: Final = 0.01
SHADOW_CLIENT: Final = ("shadow",)

Done = Callable[[Any, Exception | None], None]


class Job:
    """One request's pictures.

    client: the client whose share of decoding it uses. share: the weight of that share.
    look: returns its number of pixels, or raises; reads headers only. make: returns the value. Both are called on a
    thread. done: called on the loop with the value or the error, once; not after `discard`.
    """

    __slots__ = ("client", "done", "gone", "look", "make", "pixels", "share", "tag")

    def __init__(
        self, client: Hashable, share: float, look: Callable[[], int], make: Callable[[], Any], done: Done
    ) -> None:
        self.client, self.share, self.look, self.make, self.done = client, share, look, make, done
        self.pixels = -1  # not looked at yet
        self.tag = 0.0
        self.gone = False

    def forget(self) -> None:
        """Drop its functions, because its request may keep the job for longer."""
        self.gone = True
        self.look, self.make, self.done = _nothing, _nothing, _heard


def _nothing() -> int:
    return 0


def _heard(value: Any, error: Exception | None) -> None:
    return


class DecodeOrder:
    """The order of decoding: self-clocked fair queueing, in pixels.

    A job's tag is the virtual time at which its client's share would have decoded it, and the smallest goes next:
    between clients with equal shares pixels are shared evenly, and a small request of a client with nothing else here
    goes before large ones. Virtual time is the tag of the job taken last, so it passes every tag: no job starves.
    """

    def __init__(self, most: float = WAITING_PIXELS) -> None:
        self.most = most
        self._light: LazyHeap[Job, float] = LazyHeap()  # and those not looked at yet
        self._large: LazyHeap[Job, float] = LazyHeap()
        self._now = 0.0
        self._ends: dict[Hashable, float] = {}  # tag of each client's last job
        self.waiting_pixels = 0  # of the large ones

    def __len__(self) -> int:
        return len(self._light) + len(self._large)

    def push(self, job: Job) -> Job | None:
        """Add a waiting job. Returns the job that must be refused for it, perhaps itself, or None."""
        large = job.pixels > LIGHT_PIXELS
        self._charge(job, job.pixels if large else LOOK_PIXELS)
        if not large:
            self._light.push(job.tag, job)
            return None
        self._large.push(job.tag, job)
        self.waiting_pixels += job.pixels
        if self.waiting_pixels <= self.most or len(self._large) == 1:
            return None
        last = max(self._large.ascending(), key=lambda waiting: waiting.tag)
        self.discard(last)
        return last

    def decoded(self, job: Job) -> None:
        """Charge the client for a light job, which was decoded directly after `look`."""
        self._charge(job, job.pixels)

    def take(self, light: bool) -> Job | None:
        """The next job; light: only of those that may be light."""
        tops = [top for heap in (self._light, self._large)[: 1 if light else 2] if (top := heap.first()) is not None]
        if not tops:
            return None
        tag, job = min(tops, key=lambda top: top[0])
        self.discard(job)
        self._now = max(self._now, tag)
        return job

    def discard(self, job: Job) -> None:
        """The job does not wait any more."""
        if job in self._large:
            self.waiting_pixels -= job.pixels
        self._large.discard(job)
        self._light.discard(job)

    def _charge(self, job: Job, pixels: float) -> None:
        job.tag = max(self._now, self._ends.get(job.client, 0.0)) + pixels / job.share
        self._ends[job.client] = job.tag
        if len(self._ends) > 64 + 2 * len(self):  # those that virtual time has passed have nothing to pay
            self._ends = {client: end for client, end in self._ends.items() if end > self._now}


class _Worker:
    def __init__(self, light: bool) -> None:
        self.light = light
        self.bell: SimpleQueue[None] = SimpleQueue()


class Preparing:
    """The threads that decode, and what waits for them. `add`, `discard` and `close` on one event loop only.

    workers: threads, at least two; half of them decode large requests. They start with the first job and end with the
    process: a shutdown does not wait for a picture that is being decoded.
    """

    def __init__(self, workers: int = 0, most: float = WAITING_PIXELS) -> None:
        self._count = workers or max(2, min(4, os.cpu_count() or 2))
        self._turns = DecodeOrder(most)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._made: deque[tuple[Job, Any, Exception | None]] = deque()  # what the loop is to be told
        self._telling = threading.Lock()  # taken last: a refusal is told with the other one held
        self._pace = 0.0  # seconds per pixel of large requests, a slow mean
        self._closed = False

    def add(self, job: Job) -> None:
        """The job waits for its turn."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for i in range(self._count):
                worker = _Worker(light=i >= self._count // 2)
                threading.Thread(target=self._work, args=(worker,), name=f"reflex-decode-{i}", daemon=True).start()
        with self._lock:
            self._turns.push(job)
            self._ring(light=True)

    def discard(self, job: Job) -> None:
        """The job is not needed any more: drop it, or its result if it runs."""
        job.forget()
        with self._lock:
            self._turns.discard(job)

    def close(self) -> None:
        """End the threads after their present jobs; waiting jobs are not done."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().bell.put(None)

    @property
    def waiting(self) -> int:
        """Jobs that no thread has taken."""
        return len(self._turns)

    # -- threads -------------------------------------------------------------------------------------------------------

    def _ring(self, light: bool) -> None:
        """Wake a thread that may take it, if one is idle. The lock is held."""
        for worker in reversed(self._idle):
            if light or not worker.light:
                self._idle.remove(worker)
                worker.bell.put(None)
                return

    def _work(self, worker: _Worker) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                job = self._turns.take(worker.light)
                if job is None:
                    self._idle.append(worker)
            if job is None:
                worker.bell.get()
            else:
                self._run(job)

    def _run(self, job: Job) -> None:
        try:
            if job.pixels < 0:
                job.pixels = job.look()
                with self._lock:
                    if job.pixels > LIGHT_PIXELS:
                        refused = self._turns.push(job)
                        self._ring(light=False)
                        if refused is not None:
                            self._tell(refused, None, self._full())
                        return
                    self._turns.decoded(job)
            began = time.perf_counter()
            value = job.make()
            if job.pixels > LIGHT_PIXELS:
                pace = (time.perf_counter() - began) / job.pixels
                self._pace = pace if self._pace == 0.0 else self._pace + 0.1 * (pace - self._pace)
        except Exception as error:
            self._tell(job, None, error)
        else:
            self._tell(job, value, None)

    def _full(self) -> ReflexError:
        waiting = self._turns.waiting_pixels
        return QueueFull(
            "too many large pictures wait to be decoded",
            retry_after=max(1.0, waiting * self._pace),
            waiting_pixels=waiting,
            max_waiting_pixels=self._turns.most,
        )

    def _tell(self, job: Job, value: Any, error: Exception | None) -> None:
        """Tell the loop. It is woken once for all that are made until it comes to them: each time is a system call."""
        assert self._loop is not None
        with self._telling:
            sleeps = not self._made
            self._made.append((job, value, error))
        if sleeps:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """On the loop: those that are made, and the rest of many in its next turn."""
        assert self._loop is not None
        with self._telling:
            told = [self._made.popleft() for _ in range(min(AT_ONCE, len(self._made)))]
            if self._made:
                self._loop.call_soon(self._deliver)
        for job, value, error in told:
            if not job.gone:
                done = job.done
                job.forget()
                try:
                    done(value, error)
                except Exception:
                    log.exception("a request whose pictures were decoded could not go on")
