"""Which batches are brief enough to run on the event loop, without a hand-over to the device thread.

A hand-over there and back costs more than a small model. But while a batch runs on the loop nothing else does, so a
kind of batch runs there only after many of them in a row were brief, and the first long one sends it back.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import inf
from typing import Final

from reflex_runtime.core.batch import Batch
from reflex_runtime.processors.base import Processor, may_run_anywhere

BRIEF: Final = 0.0003  # seconds; a hand-over costs 0.05 to 0.15 ms of them
PROOF: Final = 32  # batches in a row that must be brief
MOST_PROOF: Final = 4096  # after long ones that came soon, at most so many
KINDS: Final = 256  # kinds that are measured; with more of them all are measured anew


class _Proof:
    """Batches of one group, partition and stage.

    proof: how many must be brief in a row. brief: how many have been. size, seconds: of the largest among them.
    """

    __slots__ = ("brief", "proof", "seconds", "size")

    def __init__(self) -> None:
        self.brief, self.proof = 0, PROOF
        self.size, self.seconds = 0, inf


class BriefBatches:
    """Measures every batch, and answers where the next one runs.

    limit: the longest that a brief batch takes, in seconds; 0: none is brief. processors: by group; those with
    `any_thread` may run on the loop.
    """

    def __init__(self, limit: float, processors: Mapping[str, Processor]) -> None:
        self.limit, self._processors = limit, processors
        self._kinds: dict[tuple[str, Hashable, str], _Proof] = {}
        self._proven: dict[str, int] = {}  # kinds that are, by group

    def group(self, name: str) -> bool:
        """Whether any batch of the group may run on the loop."""
        return self._proven.get(name, 0) > 0 and may_run_anywhere(self._processors[name])

    def fits(self, batch: Batch) -> bool:
        """Whether this batch may run on the loop: many of its kind were brief, and it is predicted to be.

        One larger than they were is predicted to take longer in proportion.
        """
        kind = self._kinds.get((batch.group, batch.partition, batch.stage))
        if kind is None or kind.brief < kind.proof:
            return False
        return kind.seconds * max(1.0, len(batch) / kind.size) <= self.limit

    def ran(self, batch: Batch, seconds: float, failed: bool = False) -> None:
        """A batch came back after so many seconds, on the loop or on the device thread. One that failed proves nothing,
        unless it was long."""
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
            self._was_long(batch.group, kind)
            return
        if failed:
            return
        if len(batch) >= kind.size:
            kind.size, kind.seconds = len(batch), seconds
        kind.brief += 1
        if kind.brief == kind.proof:
            self._proven[batch.group] = self._proven.get(batch.group, 0) + 1

    def _was_long(self, group: str, kind: _Proof) -> None:
        if kind.brief >= kind.proof:
            self._proven[group] -= 1
            soon = kind.brief < 2 * kind.proof
            kind.proof = min(2 * kind.proof, MOST_PROOF) if soon else PROOF
        kind.brief, kind.size, kind.seconds = 0, 0, inf
