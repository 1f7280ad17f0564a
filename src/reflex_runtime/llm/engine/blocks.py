"""The paged cache: which sequence holds which block, which blocks are free, which contain a known prefix.

`BlockPool` is the core's `Resources`. A sequence holds a table of blocks. A full block is identified by the digest of
all tokens up to its end (the digest of the block before it, and its own tokens), so a sequence with the same beginning
and the same adapter finds and shares it. A free block keeps its content until it is needed; which one is needed first,
`FreeBlocks` decides.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as Seq
from hashlib import blake2b
from math import exp, inf
from typing import Final, NamedTuple

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.llm.engine.sequence import Sequence

_STEP: Final = 1.6  # of the logarithm of the weight, when as many mistakes were made as there are blocks
_MOST: Final = 16.0  # times as long that one kind stays than the other
_FEW, _PART = 256, 64  # so many blocks, or this part of all, get memory before a cached one is forgotten
_MORE: Final = 8  # that get it with each one that was forgotten and has to be computed again
_RARE: Final = 16.0  # times that a mistake counts of a kind that is rarely forgotten


class BlockPool:
    """num_blocks blocks of block_size tokens each. prefix_caching: whether full blocks are found again by content.

    Every method is O(blocks it hands out or takes back). Called by the scheduler only, under its driver's lock.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        if not num_blocks >= 1:
            raise ConfigError(f"BlockPool.num_blocks={num_blocks!r}: must be >= 1")
        if not block_size >= 1:
            raise ConfigError(f"BlockPool.block_size={block_size!r}: must be >= 1 token")
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self._holders = [0] * num_blocks
        self._free = FreeBlocks(num_blocks)
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._next_of: list[bytes | None] = [None] * num_blocks  # the digest of the first block that followed it
        self._shared = [False] * num_blocks  # whether different blocks followed it, or one behind it
        self._block_of: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks without a holder, including those that still cache a prefix."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that is held, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens of one sequence take."""
        return -(-tokens // self.block_size)

    # -- Resources -----------------------------------------------------------------------------------------------------

    def fits(self, request: Request) -> bool:
        """Whether the sequence at its longest could be held if it were alone. Its last token is never stored."""
        sequence: Sequence = request.payload
        longest = sequence.num_prompt_tokens + sequence.params.max_tokens - 1
        return self.blocks_for(longest) <= self.num_blocks

    def begin(self, ticket: Ticket) -> float:
        """Give the sequence the blocks of its longest known prefix; returns the tokens they hold.

        One token is always left to compute: it is what the next one is sampled from. So are all tokens of a prompt that
        are still to be scored.
        """
        sequence: Sequence = ticket.request.payload
        if not self.prefix_caching:
            return 0.0
        wanted = sequence.num_tokens - 1 if sequence.scores_from is None else sequence.scores_from
        full = wanted // self.block_size
        self._extend_digests(sequence, full)
        for digest in sequence.digests[:full]:
            block = self._block_of.get(digest)
            if block is None:
                break
            if self._holders[block] == 0:
                self._free.remove(block)
            self._holders[block] += 1
            sequence.blocks.append(block)
        sequence.published = len(sequence.blocks)
        sequence.num_computed_tokens = len(sequence.blocks) * self.block_size
        return float(sequence.num_computed_tokens)

    def reserve(self, ticket: Ticket, units: float) -> bool:
        """Blocks for `units` more tokens; their old content is forgotten. False, without any change, if too few are
        free."""
        sequence: Sequence = ticket.request.payload
        held = len(sequence.blocks)
        if sequence.num_computed_tokens + units <= held * self.block_size:
            return True
        more = self.blocks_for(sequence.num_computed_tokens + int(units)) - held
        if more > len(self._free):
            return False
        for _ in range(more):
            block = self._free.take()
            digest = self._digest_of[block]
            if digest is not None:
                self._forget(block, digest)
            self._holders[block] = 1
            sequence.blocks.append(block)
        return True

    def extend(self, ticket: Ticket, units: float, more: float) -> float:
        """See `Resources.extend`."""
        sequence: Sequence = ticket.request.payload
        room = (len(sequence.blocks) + len(self._free)) * self.block_size - sequence.num_computed_tokens
        more = min(more, room - units)
        return more if more > 0.0 and self.reserve(ticket, units + more) else 0.0

    def would_fit(self, ticket: Ticket, units: float, released: Collection[Ticket]) -> bool:
        """Whether `reserve` would succeed after these other sequences were released."""
        sequence: Sequence = ticket.request.payload
        short = self.blocks_for(sequence.num_computed_tokens + int(units)) - len(sequence.blocks) - len(self._free)
        if short <= 0:
            return True
        given: Counter[int] = Counter()
        for other in released:  # the first of many are usually enough
            for block in other.request.payload.blocks:
                given[block] += 1
                short -= given[block] == self._holders[block]
            if short <= 0:
                return True
        return False

    def commit(self, batch: Batch) -> None:
        """Publish the blocks that the step filled, so that prompts that begin alike find them. Failed sequences counted
        nothing as computed, so nothing of theirs is published."""
        if self.prefix_caching:
            for ticket in batch.grants:
                self._publish(ticket.request.payload)
        self._trim(batch)

    def rollback(self, batch: Batch) -> None:
        """Only `commit` publishes blocks, and a crashed step's tickets are released; what they got for guesses is not
        kept for the next try."""
        self._trim(batch)

    def _trim(self, batch: Batch) -> None:
        """Take back the blocks that only wrong guesses needed."""
        for ticket in batch.extra:
            sequence: Sequence = ticket.request.payload
            needed = self.blocks_for(sequence.num_computed_tokens)
            self._give_back(sequence.blocks[needed:])
            del sequence.blocks[needed:]

    def release(self, ticket: Ticket) -> None:
        """Take the sequence's blocks back. Blocks without a known prefix are handed out next; of its others the far end
        before its beginning."""
        sequence: Sequence = ticket.request.payload
        self._give_back(sequence.blocks)
        sequence.blocks.clear()
        sequence.num_computed_tokens = 0

    def _give_back(self, blocks: Seq[int]) -> None:
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.add(block, self._digest_of[block] is not None, self._shared[block])

    # -- the prefix cache ----------------------------------------------------------------------------------------------

    def _publish(self, sequence: Sequence) -> None:
        full = min(sequence.num_computed_tokens // self.block_size, len(sequence.blocks))
        if full <= sequence.published:
            return
        self._extend_digests(sequence, full)
        for i in range(sequence.published, full):
            block, digest = sequence.blocks[i], sequence.digests[i]
            if digest not in self._block_of:  # else the same step computed it twice: one is enough
                self._block_of[digest] = block
                self._digest_of[block] = digest
                past = self._free.published(digest)
                if past is not None:
                    self._shared[block], self._next_of[block] = past
                if i:
                    self._follows(sequence.digests, i)
        sequence.published = full

    def _follows(self, digests: Seq[bytes], place: int) -> None:
        """A block is known that follows the one before it. Where another one did already, they share all before."""
        before = self._block_of.get(digests[place - 1])
        if before is None:
            return
        if self._next_of[before] is None:
            self._next_of[before] = digests[place]
        elif self._next_of[before] != digests[place]:
            for digest in reversed(digests[:place]):
                block = self._block_of.get(digest)
                if block is None or self._shared[block]:  # then all before it are shared already
                    break
                self._shared[block] = True

    def _forget(self, block: int, digest: bytes) -> None:
        del self._block_of[digest]
        self._free.forgot(digest, self._shared[block], self._next_of[block])
        self._digest_of[block], self._next_of[block], self._shared[block] = None, None, False

    def _extend_digests(self, sequence: Sequence, full: int) -> None:
        size, digests, tokens = self.block_size, sequence.digests, sequence.tokens
        for i in range(len(digests), full):
            before = digests[-1] if digests else _seed(sequence)
            own = array("q", tokens[i * size : (i + 1) * size]).tobytes()
            digests.append(blake2b(before + own, digest_size=16).digest())


def _seed(sequence: Sequence) -> bytes:
    """What the digests of a sequence begin with: keys and values of another adapter are others."""
    return sequence.adapter.to_bytes(2, "little") if sequence.adapter else b""


class Past(NamedTuple):
    """What is remembered of a block that was forgotten. next: the prefix that followed it first."""

    shared: bool
    next: bytes | None


class FreeBlocks:
    """The free ones of num_blocks blocks, and which of them is handed out next, so that what it knows is forgotten. All
    are free, and know nothing, at first.

    Blocks that know nothing go first, but those that were never handed out have no memory yet. Beyond a few they get it
    only when all others are held, and as many times as forgotten blocks come back. So a server whose prompts do not
    come back takes little memory, all of it soon, however large its cache may be.

    Of those that know a prefix the one that was free longest goes, as conversations come back soon or not at all; but
    beginnings that several prompts share (a system prompt, a document) are a list of their own. How long they stay,
    compared with all others, is learned from mistakes: what was forgotten and had to be computed again. Everything
    counts in published blocks, so there is no clock, and every method is O(1).

    weight: how many times as long shared beginnings stay free, before they are handed out, as other blocks do.
    """

    def __init__(self, num_blocks: int) -> None:
        self.weight = 1.0
        self._num_blocks = num_blocks
        self._blank: list[int] = []  # that were handed out and know nothing
        self._fresh = 0  # this one and all above it were never handed out
        self._wanted = max(_FEW, num_blocks // _PART)  # that are handed out before a cached one is forgotten
        self._known: tuple[OrderedDict[int, int], OrderedDict[int, int]] = (OrderedDict(), OrderedDict())
        self._published = 0
        self._forgotten: OrderedDict[bytes, bytes | None] = OrderedDict()  # see `Past.next`; the oldest first
        self._were_shared: set[bytes] = set()  # those of them that were

    def __len__(self) -> int:
        own, shared = self._known
        return self._num_blocks - self._fresh + len(self._blank) + len(own) + len(shared)

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
        if self._fresh < self._num_blocks and (self._fresh < self._wanted or not (own or shared)):
            self._fresh += 1
            return self._fresh - 1
        age_own, age_shared = (self._published - next(iter(some.values()), inf) for some in (own, shared))
        return (shared if age_shared > age_own * self.weight else own).popitem(last=False)[0]

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
        self._wanted = max(self._wanted, self._fresh) + _MORE
        shared, count = prefix in self._were_shared, len(self._were_shared)
        rare = min(_RARE, len(self._forgotten) / (count if shared else len(self._forgotten) - count))
        changed = self.weight * exp((_STEP if shared else -_STEP) * rare / self._num_blocks)
        self.weight = min(_MOST, max(1.0 / _MOST, changed))
        self._were_shared.discard(prefix)
        return Past(shared, self._forgotten.pop(prefix))
