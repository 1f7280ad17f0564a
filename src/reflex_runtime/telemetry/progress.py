"""How many tokens each request had computed, and knew, before a batch.

A fold over events: a sink may lag behind the scheduler, whose counters have moved on by then.
"""

from __future__ import annotations

from typing import NamedTuple

from reflex_runtime.core.batch import Batch


class Progress(NamedTuple):
    """Of one member before its batch, in tokens; None where its beginning was not seen.

    computed: in the cache, those found there included. known: prompt and outputs. cached: found in the prefix cache on
    entering with this batch; None when it found nothing or did not enter.
    """

    computed: float | None
    known: float | None
    cached: float | None


class ProgressFold:
    """Counts computed and known tokens of every request that has run and has not ended. A preempted request starts over
    when it enters again; what it knew stays known.

    False while there is none: events of other work cost one test each.
    """

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}  # seq → computed, known
        self._guessed: dict[int, bool] = {}  # seq, where the last batch had guesses → whether its first token has come

    def __bool__(self) -> bool:
        return bool(self._counts)

    def ran(self, batch: Batch, failed: bool = False) -> list[Progress]:
        """What the members of a finished batch had before it, in the order of its grants. failed: the call failed, and
        they run again."""
        entered, counts = set(batch.admitted), self._counts
        found = []
        self._guessed = dict.fromkeys([ticket.seq for ticket in batch.extra], False)
        for ticket, units in batch.grants.items():
            cached = None
            if ticket in entered:
                cached = batch.cached.get(ticket)
                known = counts[ticket.seq][1] if ticket.seq in counts else ticket.request.wants
                counts[ticket.seq] = (cached or 0.0, known)
            before = counts.get(ticket.seq)
            if before is None:
                found.append(Progress(None, None, None))
                continue
            found.append(Progress(*before, cached))
            if not failed:
                counts[ticket.seq] = (before[0] + units - batch.extra.get(ticket, 0.0), before[1])
        return found

    def answered(self, seq: int) -> None:
        """Count one more known token. The one before it was computed with it, if it is not the first of its batch."""
        if seq in self._counts:
            computed, known = self._counts[seq]
            self._counts[seq] = (computed + self._guessed.get(seq, False), known + 1.0)
            if seq in self._guessed:
                self._guessed[seq] = True

    def ended(self, seq: int) -> None:
        self._counts.pop(seq, None)
