"""A real coordinator, its own thread and lock included, on a clock that jumps: the test moves on once the device thread
sleeps or is inside the processor, and to the next thing that happens. Nothing waits for real time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from math import inf
from typing import Any

from reflex_runtime.run.coordinator import BatchConfig, BatchCoordinator, BatchEntry
from reflex_runtime.sim import Arrival, RequestStream, WorkloadPart
from run.helpers import PATIENCE


class VirtualTime:
    """What the clock, the device thread's sleep and the processor share. state: what the device thread is at."""

    def __init__(self) -> None:
        self.now = 64.0
        self.state = "deciding"
        self.until = inf  # when it wakes up or the batch ends
        self.rung = False
        self.over = False  # batches take no time any more
        self.changed = threading.Condition()

    def __call__(self) -> float:
        return self.now

    def settle(self) -> None:
        """Returns once the device thread can do nothing more at this instant."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.state != "deciding", PATIENCE)

    def jump(self, to: float) -> None:
        with self.changed:
            self.now = max(self.now, to)
            if self.until <= self.now:
                self.go_on()

    def go_on(self) -> None:
        """The lock is held."""
        self.state, self.until = "deciding", inf
        self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self.over = True
            if self.state == "busy":
                self.go_on()

    def rest(self, state: str, until: float) -> None:
        """Stop the calling thread until `go_on`. The lock is held."""
        if self.over and state == "busy":
            return
        self.state, self.until = state, until
        self.changed.notify_all()
        assert self.changed.wait_for(lambda: self.state == "deciding", PATIENCE)


class Bell:
    """Instead of the lock by which a device is woken up."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time

    def acquire(self, timeout: float = -1.0) -> bool:
        time = self._time
        with time.changed:
            if not time.rung:
                time.rest("asleep", inf if timeout < 0.0 else time.now + timeout)
            rung, time.rung = time.rung, False
            return rung

    def release(self) -> None:
        with self._time.changed:
            self._time.rung = True
            if self._time.state == "asleep":
                self._time.go_on()


class Timed:
    """A processor that declares how long it takes. sizes: of its calls so far."""

    def __init__(self, time: VirtualTime, seconds: Callable[[int], float]) -> None:
        self.id = "timed"
        self._time, self._seconds = time, seconds
        self.sizes: list[int] = []

    def on_start(self) -> None:
        pass

    def process(self, entries: Sequence[BatchEntry]) -> Sequence[Any]:
        self.sizes.append(len(entries))
        with self._time.changed:
            self._time.rest("busy", self._time.now + self._seconds(len(entries)))
        return [entry.frame for entry in entries]

    def on_stop(self) -> None:
        pass


class Outcome:
    """What became of a run. lost: frames that a newer one replaced. sizes: of the calls in its second half."""

    def __init__(self) -> None:
        self.answered = self.lost = 0
        self.ages: list[float] = []
        self.sizes: list[int] = []


def played(
    feeds: Iterable[WorkloadPart], seconds: Callable[[int], float], config: BatchConfig, duration: float
) -> Outcome:
    """Feeds of the simulator, each with one frame in flight, on a real coordinator for so many virtual seconds."""
    time, outcome = VirtualTime(), Outcome()
    processor = Timed(time, seconds)
    coordinator = BatchCoordinator(processor, config, clock=time)
    coordinator.device._bell._rung = Bell(time)  # type: ignore[assignment]
    streams = [stream for i, source in enumerate(feeds) for stream in source.streams(f"seed {i}")]
    due = [(time.now, stream.next(0.0), stream) for stream in streams]
    out: list[tuple[Future[Any], Arrival, RequestStream]] = []
    origin = time.now
    handle = coordinator.start()
    try:
        while time.now < origin + duration:
            time.settle()
            back = [entry for entry in out if entry[0].done()]
            out = [entry for entry in out if not entry[0].done()]
            for future, arrival, stream in back:
                future.result()
                outcome.answered += 1
                outcome.ages.append(time.now - origin - (arrival.at if arrival.since is None else arrival.since))
                due.append((time.now, stream.next(time.now - origin), stream))
            ready = [entry for entry in due if entry[1] is not None and origin + entry[1].at <= time.now]
            due = [entry for entry in due if entry not in ready]
            for _, arrival, stream in ready:  # type: ignore[assignment]
                outcome.lost += arrival.overrun
                out.append((handle.submit(f"feed {streams.index(stream)}", "frame"), arrival, stream))
            if ready:
                continue
            if time.now < origin + duration / 2.0:
                outcome.sizes = []
                warm = len(processor.sizes)
            time.settle()
            time.jump(min([time.until, *(origin + arrival.at for _, arrival, _ in due if arrival is not None)]))
    finally:
        time.end()
        coordinator.stop()
    outcome.sizes = processor.sizes[warm:]
    return outcome
