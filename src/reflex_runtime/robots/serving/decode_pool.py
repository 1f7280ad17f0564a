"""Decodes pictures after admission: small ones on the event loop, large ones on a few threads, both in fair order.

A request is admitted first: it has its place, counts for its client's cap, and its deadline runs (`Scheduler.submit`
with ready=False). Then its pictures are decoded here, while batches run.

- A request that takes about as long to decode as to hand over to a thread and back is decoded on the loop, for a few
  milliseconds a turn, so that other work gets its turns.
- A larger one waits for a thread. The pixels that wait are limited; beyond the limit the request that would be decoded
  last is refused.

A request that settles while it waits is not decoded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any, Final, Unpack

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import QueueFull, ReflexError
from reflex_runtime.core.order import LazyHeap
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.robots.policy.base import Policy, Terms
from reflex_runtime.robots.policy.observation import Observation, Sent, names_of
from reflex_runtime.robots.policy.spec import PolicySpec
from reflex_runtime.robots.serving.question import Array, Image, Question, array_of
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.processor import WALL
from reflex_runtime.web.errors import Overloaded, known
from reflex_runtime.web.fields import invalid, printable
from reflex_runtime.web.pictures import MAX_IMAGE_PIXELS, picture_bytes

log = logging.getLogger("reflex.server")

LIGHT_S: Final = 0.002  # seconds of decoding up to which a request is decoded on the loop
LIGHT_BYTES: Final = 1 << 18  # up to which the headers of a request's pictures are read on the loop
TURN_S: Final = 0.004  # seconds of decoding in one turn of the loop
AHEAD_S: Final = 0.01  # seconds of decoding up to which a request may wait at a busy thread
FIRST_PACE: Final = 2e-8  # seconds for a pixel of a PNG, until it is measured
WAITING_PIXELS: Final = 16 * MAX_IMAGE_PIXELS  # of large requests that wait: some seconds of decoding
LOOK_PIXELS: Final = 1 << 14  # cost of reading the headers of a request, in decoded pixels
SHARES: Final = {Priority.URGENT: 10.0, Priority.DEFAULT: 1.0, Priority.BACKGROUND: 0.1}

Done = Callable[[Any, Exception | None], None]


class Job:
    """One request's pictures.

    client: owner of the share of decoding that it uses. share: weight of that share. size: bytes received. look:
    returns the number of pixels, or raises; reads headers only. make: returns the value. Both are called on the loop or
    on a thread. done: called once on the loop, with the value or the error; not after `discard`. It may be set after
    the job is made.
    """

    __slots__ = ("client", "done", "look", "make", "pixels", "share", "size", "tag")

    def __init__(
        self, client: Hashable, share: float, size: int, look: Callable[[], int], make: Callable[[], Any],
        done: Done | None = None,
    ) -> None:  # fmt: skip
        self.client, self.share, self.size, self.look, self.make = client, share, size, look, make
        self.done = done  # None once it is over
        self.pixels = -1  # not looked at yet
        self.tag = 0.0

    def forget(self) -> None:
        """Drop its functions, and with them the pictures: the request may keep the job longer."""
        self.look = self.make = int
        self.done = None


class DecodeOrder:
    """The order of decoding: fair by pixels between clients, in virtual time. most: waiting pixels."""

    def __init__(self, most: float = inf) -> None:
        self.most = most
        self._waiting: LazyHeap[Job, float] = LazyHeap()
        self._now = 0.0
        self._ends: dict[Hashable, float] = {}  # tag of each client's last job
        self.waiting_pixels = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, job: Job, pixels: int) -> Job | None:
        """Add a job. Returns the job that must be refused for lack of room, which may be the same one, or None."""
        job.pixels = pixels
        job.tag = max(self._now, self._ends.get(job.client, 0.0)) + pixels / job.share
        self._ends[job.client] = job.tag
        if len(self._ends) > 64 + 2 * len(self._waiting):  # those that virtual time has passed have nothing to pay
            self._ends = {client: end for client, end in self._ends.items() if end > self._now}
        self._waiting.push(job.tag, job)
        self.waiting_pixels += pixels
        if self.waiting_pixels <= self.most or len(self) == 1:
            return None
        last = max(self._waiting, key=lambda waiting: waiting.tag)
        self.discard(last)
        return last

    def take(self, most: float = inf) -> Job | None:
        """The next job, if it has at most `most` pixels."""
        top = self._waiting.first()
        if top is None or top[1].pixels > most:
            return None
        tag, job = top
        self.waiting_pixels -= job.pixels
        self._waiting.discard(job)
        self._now = max(self._now, tag)
        return job

    def discard(self, job: Job) -> None:
        """Remove a job if it waits."""
        if job in self._waiting:
            self.waiting_pixels -= job.pixels
            self._waiting.discard(job)


class DecodePool:
    """Decodes pictures of small requests on the event loop, of large ones on threads. Only `_run` and `_work` run on
    those threads.

    decoded: called for each request that `submit` has prepared, with its group and the seconds since its admission.
    workers: threads, at most; by default as many as cores but one, and four. They end with the process: a shutdown does
    not wait for a picture that is being decoded. most: pixels of large requests that may wait.
    """

    def __init__(
        self,
        decoded: Callable[[str, float], None] = lambda group, seconds: None,
        workers: int = 0,
        most: float = WAITING_PIXELS,
    ) -> None:
        self._observe = decoded
        self._count = workers or max(1, min(4, (os.cpu_count() or 2) - 1))
        self._light, self._large = DecodeOrder(), DecodeOrder(most)
        self._turn_due = self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: list[threading.Thread] = []
        self._handed: SimpleQueue[Job | None] = SimpleQueue()  # large ones, for the threads; None ends one
        self._busy = 0  # jobs that are handed over
        self._pace = FIRST_PACE  # seconds per pixel, a slow mean

    def submit(
        self, batcher: Batcher, policy: Policy, question: Question, request_id: str, received: float, share: float,
        settled: Callable[[Ticket], None] | None = None, **terms: Unpack[Terms],
    ) -> tuple[Ticket, Job | None]:  # fmt: skip
        """Submit a question. Where it has pictures, the ticket is a reservation until they are decoded."""
        if not question.images:
            request = policy.request(observe(policy, request_id, question, received), **terms)
            return batcher.submit(request, settled), None
        job = job_of(policy, request_id, question, received, terms["client"], share)
        reserved = policy.reservation(job, request_id, question.episode, **terms)
        ticket = batcher.submit(reserved, settled, ready=False)
        job.done = partial(self._decoded, batcher, policy, ticket)
        self.add(job)
        return ticket, job

    def _decoded(
        self, batcher: Batcher, policy: Policy, ticket: Ticket, observation: Observation, error: Exception | None
    ) -> None:
        """Make the ticket ready, or end it with the error."""
        admitted = ticket.request
        made: Request | ReflexError
        try:
            if error is not None:
                raise error
            made = policy.request(observation, client=admitted.client, priority=admitted.priority)
            self._observe(admitted.group, time.monotonic() - ticket.arrived)
        except Exception as failure:  # without an outcome the ticket would wait for ever
            made = known(failure, ticket.id)
        batcher.prepared(ticket, made)

    def add(self, job: Job) -> None:
        """Queue a job."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        if job.size > LIGHT_BYTES:  # a thread reads its headers too
            self._add_large(job, max(LOOK_PIXELS, job.size))
        else:
            self._light.push(job, max(LOOK_PIXELS, job.size))
            if not self._turn_due:
                self._turn_due = True
                self._loop.call_soon(self._turn)

    def discard(self, job: Job) -> None:
        """Drop a job; if it is being decoded, its result."""
        job.forget()
        self._light.discard(job)
        self._large.discard(job)

    def close(self) -> None:
        """End the threads after their present jobs; other jobs are not decoded."""
        self._closed = True
        for _ in self._threads:
            self._handed.put(None)

    def _turn(self) -> None:
        """Decode small requests for a few milliseconds; the rest in the next turn."""
        assert self._loop is not None
        until = time.perf_counter() + TURN_S
        while time.perf_counter() < until and (job := self._light.take()) is not None:
            try:
                with WALL:
                    pixels = job.look()
                    if pixels * self._pace > LIGHT_S:
                        job.look = partial(int, pixels)  # its base64 is read, too
                        self._add_large(job, pixels)
                        continue
                    value = self._decode(job, pixels)
            except Exception as error:
                _deliver(job, None, error)
            else:
                _deliver(job, value, None)
        self._turn_due = self._light.waiting_pixels > 0
        if self._turn_due:
            self._loop.call_soon(self._turn)

    def _decode(self, job: Job, pixels: int) -> Any:
        began = time.thread_time()  # a batch that runs on the same core makes no picture large
        value = job.make()
        if pixels > LOOK_PIXELS:
            self._pace += 0.1 * ((time.thread_time() - began) / pixels - self._pace)
        return value

    def _add_large(self, job: Job, pixels: int) -> None:
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name="reflex-decode", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # this machine or container has no more threads
                if not self._threads:
                    _deliver(job, None, Overloaded(f"no thread to decode a large picture: {error}", retry_after=1.0))
                    return
            else:
                self._threads.append(thread)
        refused = self._large.push(job, pixels)
        self._hand_over()
        if refused is not None:
            waiting = self._large.waiting_pixels
            full = QueueFull(
                "too many large pictures wait to be decoded",
                retry_after=max(1.0, waiting * self._pace),
                waiting_pixels=waiting,
                max_waiting_pixels=self._large.most,
            )
            _deliver(refused, None, full)

    def _hand_over(self) -> None:
        """Give each thread a job, and one short job more, so that it need not wait for a turn of the loop. (An urgent
        request that comes later waits for both.)"""
        while self._busy < 2 * self._count and not self._closed:
            job = self._large.take(inf if self._busy < self._count else AHEAD_S / self._pace)
            if job is None:
                return
            self._busy += 1
            self._handed.put(job)

    def _run(self) -> None:
        """The loop of a thread."""
        while (job := self._handed.get()) is not None and not self._closed:
            self._work(job)

    def _work(self, job: Job) -> None:
        assert self._loop is not None
        value, failure, pixels = None, None, 0
        try:
            with WALL:
                pixels = job.look()
                if pixels <= job.pixels:
                    value = self._decode(job, pixels)
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._worked, job, pixels, value, failure)

    def _worked(self, job: Job, pixels: int, value: Any, error: Exception | None) -> None:
        self._busy -= 1
        if error is None and pixels > job.pixels:  # it waited by its bytes
            self._add_large(job, pixels)
        else:
            self._hand_over()
            _deliver(job, value, error)


def _deliver(job: Job, value: Any, error: Exception | None) -> None:
    if (done := job.done) is not None:
        job.forget()
        try:
            done(value, error)
        except Exception:
            log.exception("a request whose pictures were decoded could not go on")


# -- the pictures of a request: base64 text, PNG or JPEG bytes, raw arrays ---------------------------------------------


def check_names(question: Question, known: AbstractSet[str]) -> None:
    """422 for an image whose name no served policy reads, or that came before."""
    seen = set()
    for name, field, _ in question.images:
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise invalid(field, printable(f"{field}: no policy here has such a camera (there are: {there})"))
        if name in seen:
            raise invalid(field, f"{field}: given twice")
        seen.add(name)


def cameras_of(specs: Iterable[PolicySpec]) -> set[str]:
    """The camera names that requests to these policies may use."""
    return {name for spec in specs for name in names_of(spec)}


def _sent(image: Image, field: str) -> Sent:
    if isinstance(image, Array):
        return array_of(image, field)
    if isinstance(image, np.ndarray):
        return pixels_in(image, field)
    return picture_bytes(image, field) if isinstance(image, str) else image


def pixels_in(image: NDArray[Any], field: str) -> NDArray[Any]:
    """A picture in an array; floats in [0, 1] become uint8."""
    if image.dtype.kind != "f":
        return image
    if not ((image >= 0.0) & (image <= 1.0)).all():
        raise invalid(field, printable(f"{field}: a picture of floats must be within [0, 1]"))
    pixels: NDArray[np.uint8] = (image * image.dtype.type(255)).astype(np.uint8)
    return pixels


def job_of(
    policy: Policy, request_id: str, question: Question, received: float, client: Hashable, share: float
) -> Job:
    """The job that decodes a question's pictures. Its value is the observation."""
    sent: dict[str, Sent] = {}  # PNG or JPEG bytes, or arrays, of the cameras that the policy reads

    def look() -> int:
        """The number of pixels to decode; 422 for what is wrong without decoding."""
        fields = policy.fields
        sent.update({name: _sent(image, field) for name, field, image in question.images if name in fields.names})
        return fields.look(sent)

    make = partial(observe, policy, request_id, question, received, sent)
    data = [image.data if isinstance(image, Array) else image for _, _, image in question.images]
    size = sum([one.nbytes if isinstance(one, np.ndarray) else len(one) for one in data])
    return Job(client, share, size, look, make)


def observe(
    policy: Policy, request_id: str, question: Question, received: float, pictures: Mapping[str, Sent] | None = None
) -> Observation:
    """The policy's observation of a question and its pictures.

    A caller that gives a seed wants the same answer again, whatever the time that the last chunk took.
    """
    delay = 0 if question.delay is None and question.seed is not None else question.delay
    return policy.prepare(
        images=pictures,
        instruction=question.instruction,
        state=question.state_vector(),
        episode_id=question.episode,
        request_id=request_id,
        seed=question.seed,
        executed=question.executed,
        delay=delay,
        received=received,
    )
