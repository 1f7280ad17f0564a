"""Free blocks, and which of them is handed out next, so that what it knows is forgotten.

Blocks that know nothing go first. Of those that know a prefix the one that was free longest goes, as conversations come
back soon or not at all; but beginnings that several prompts share (a system prompt, a document) are a list of their
own. How long they stay, compared with all others, is learned from mistakes: what was forgotten and had to be computed
again. Everything counts in published blocks, so there is no clock, and every method is O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp
from typing import Final, NamedTuple

_STEP: Final = 1.6  # of the logarithm of the weight, when as many mistakes were made as there are blocks
_MOST: Final = 16.0  # times as long that one kind stays than the other
_RARE: Final = 16.0  # times that a mistake counts of a kind that is rarely forgotten


class Past(NamedTuple):
    """What is remembered of a block that was forgotten. next: the prefix that followed it first."""

    shared: bool
    next: bytes | None


class FreeBlocks:
    """The free ones of num_blocks blocks; all are, and know nothing, at first.

    weight: how many times as long shared beginnings stay free, before they are handed out, as other blocks do.
    """

    def __init__(self, num_blocks: int) -> None:
        self.weight = 1.0
        self._num_blocks = num_blocks
        self._blank = list(range(num_blocks))[::-1]
        self._known: tuple[OrderedDict[int, int], OrderedDict[int, int]] = (OrderedDict(), OrderedDict())
        self._published = 0
        self._forgotten: OrderedDict[bytes, bytes | None] = OrderedDict()  # see `Past.next`; the oldest first
        self._were_shared: set[bytes] = set()  # those of them that were

    def __len__(self) -> int:
        own, shared = self._known
        return len(self._blank) + len(own) + len(shared)

    def blocks(self) -> list[int]:
        """All of them. O(blocks): for tests and debugging."""
        own, shared = self._known
        return [*self._blank, *own, *shared]

    def add(self, block: int, known: bool, shared: bool) -> None:
        """The block lost its last holder. known: it contains a known prefix. Of a sequence the far end comes first."""
        if known:
            self._known[shared][block] = self._published
        else:
            self._blank.append(block)

    def remove(self, block: int) -> None:
        """What the block knows was found: it is held again."""
        own, shared = self._known
        if own.pop(block, None) is None:
            del shared[block]

    def take(self) -> int:
        """The block to hand out next. There must be one."""
        if self._blank:
            return self._blank.pop()
        own, shared = self._known
        if own and shared:
            age_own = self._published - next(iter(own.values()))
            age_shared = self._published - next(iter(shared.values()))
            oldest = shared if age_shared > age_own * self.weight else own
        else:
            oldest = own or shared
        return oldest.popitem(last=False)[0]

    def forgot(self, prefix: bytes, shared: bool, next: bytes | None) -> None:
        """A block that was handed out knew this prefix; see `Past` for next."""
        self._forgotten[prefix] = next
        if shared:
            self._were_shared.add(prefix)
        if len(self._forgotten) > self._num_blocks:
            oldest, _ = self._forgotten.popitem(last=False)
            self._were_shared.discard(oldest)

    def published(self, prefix: bytes) -> Past | None:
        """A block contains this prefix from now on. Returns what is remembered if it was forgotten before: then its
        kind should have stayed longer."""
        self._published += 1
        if prefix not in self._forgotten:
            return None
        shared, count = prefix in self._were_shared, len(self._were_shared)
        rare = min(_RARE, len(self._forgotten) / (count if shared else len(self._forgotten) - count))
        changed = self.weight * exp((_STEP if shared else -_STEP) * rare / self._num_blocks)
        self.weight = min(_MOST, max(1.0 / _MOST, changed))
        self._were_shared.discard(prefix)
        return Past(shared, self._forgotten.pop(prefix))
