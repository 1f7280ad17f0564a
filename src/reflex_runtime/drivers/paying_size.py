"""Whether calls of several frames pay. On a CPU they often take longer than as many calls of one frame, and then frames
run alone: more of them are answered, and each sooner.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from math import inf
from statistics import median
from typing import Final

from reflex_runtime.core.flush import Affine, FlushPolicy
from reflex_runtime.core.request import Ticket

log = logging.getLogger("reflex.coordinator")

KEPT: Final = 15  # newest calls of each kind whose median is compared
LEAST: Final = 3  # calls of a kind before it is compared, and in a trial
FORMING: Final = 0.0003  # seconds to form a batch and to answer it, which a call of several frames needs once
FIRST: Final = 16  # calls until the other kind is tried; eight times as many each time that this changes nothing
LAST: Final = 4096
RESTED: Final = 0.001  # seconds between calls, beside a twentieth of the second one, of a processor that never rests


class PayingSize:
    """A controller for one processor: batches as large as they may be, or of one frame.

    It compares the times of calls. While the processor never rests, the kind that does not run is tried now and then,
    with `LEAST` calls. `ran` is called by the thread that runs the batches, everything else on any thread.
    name: of the processor, for the log. at_once: how many frames a call computes whatever it is given; None: any.
    """

    def __init__(self, name: str, at_once: Callable[[], int | None]) -> None:
        self._name, self._at_once = name, at_once
        self._policies: dict[tuple[FlushPolicy, int], FlushPolicy] = {}
        self._begin()

    def forget(self) -> None:
        """The processor takes other times from now on."""
        self._forgotten = True

    def _begin(self) -> None:
        self._forgotten = False
        self._alone = self._trying = False
        self._times: dict[bool, deque[float]] = {alone: deque(maxlen=KEPT) for alone in (True, False)}
        self._calls, self._pause, self._ended = 0, FIRST, -inf

    @property
    def alone(self) -> bool:
        """Whether the next batch has one frame only."""
        return not self._forgotten and self._alone != self._trying

    def arrived(self, ticket: Ticket, now: float, others: int) -> None:
        return

    def policy(self, base: FlushPolicy, affine: Affine, now: float, partition: Hashable) -> FlushPolicy:
        size = 1 if self.alone else min(self._at_once() or base.max_batch_size, base.max_batch_size)
        if size == base.max_batch_size:
            return base
        if (base, size) not in self._policies:
            self._policies[base, size] = replace(base, max_batch_size=size)
        return self._policies[base, size]

    def ran(self, frames: int, began: float, ended: float) -> None:
        """A call came back with results. began, ended: seconds of one clock."""
        if self._forgotten:  # here, because another thread must not change what is compared
            self._begin()
        seconds, rested, self._ended = ended - began, began - self._ended, ended
        self._times[frames == 1].append(seconds / frames)
        if self._trying:
            if len(self._times[not self._alone]) >= LEAST:
                self._compare()
            return
        self._calls += rested <= RESTED + 0.05 * seconds  # otherwise it is fast enough as it is
        if self._calls >= self._pause and len(self._times[self._alone]) >= LEAST:
            self._times[not self._alone].clear()
            self._trying = True

    def _compare(self) -> None:
        one, several = (median(self._times[alone]) for alone in (True, False))
        alone = one + FORMING <= several
        changed, self._alone, self._trying, self._calls = alone != self._alone, alone, False, 0
        self._pause = FIRST if changed else min(LAST, 8 * self._pause)
        if changed:
            what = "frames run alone" if alone else "frames share calls"
            log.info(
                "%s: a call of one frame takes %.1f ms, of several %.1f ms a frame: %s from now on",
                self._name,
                1e3 * one,
                1e3 * several,
                what,
            )
