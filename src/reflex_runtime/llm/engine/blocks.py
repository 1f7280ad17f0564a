"""The paged cache: the blocks of each sequence, the free blocks, and the blocks with a known prefix.

`BlockPool` is the core's `Resources`. A sequence holds a table of blocks. A full block is identified by the digest of
all tokens up to its end (the digest of the block before it, and its own tokens), so a sequence with the same beginning
and the same adapter finds and shares it. A free block keeps its content until `FreeBlocks` hands it out again.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as Seq
from hashlib import blake2b
from math import exp, inf
from typing import Final

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.llm.engine.sequence import Sequence

_STEP: Final = 1.6  # change of the weight's logarithm by as many mistakes as there are blocks
_MOST: Final = 16.0  # the largest weight; the smallest is 1 / 16
_FEW, _PART = 256, 64  # 256 blocks or 1/64 of all, the more of both, get memory before a cached one is forgotten
_MORE: Final = 8  # blocks that get memory with each forgotten one that has to be computed again
_RARE: Final = 16.0  # how much a mistake counts at most, if its kind is rarely forgotten
_FORKED: Final = b""  # in place of a digest: different blocks followed


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
        self._next_of: list[bytes | None] = [None] * num_blocks  # the digest that followed it, or `_FORKED`
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

        At least one token is left to compute, because the next one is sampled from its logits. All tokens of a prompt
        that must still be scored are left, too.
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
        """Publish the blocks that the step filled, so that prompts with the same beginning find them. A failed sequence
        counted nothing as computed, so none of its blocks is published."""
        if self.prefix_caching:
            for ticket in batch.grants:
                self._publish(ticket.request.payload)
        self._trim(batch)

    def rollback(self, batch: Batch) -> None:
        """Take back the blocks for guesses. Nothing else is to do: only `commit` publishes blocks, and the scheduler
        releases the tickets of a crashed step."""
        self._trim(batch)

    def _trim(self, batch: Batch) -> None:
        """Take back the blocks that only wrong guesses needed."""
        for ticket in batch.extra:
            sequence: Sequence = ticket.request.payload
            needed = self.blocks_for(sequence.num_computed_tokens)
            self._give_back(sequence.blocks[needed:])
            del sequence.blocks[needed:]

    def release(self, ticket: Ticket) -> None:
        """Take the sequence's blocks back. Those without a known prefix are handed out next; of the others, the last
        before the first."""
        sequence: Sequence = ticket.request.payload
        self._give_back(sequence.blocks)
        sequence.blocks.clear()
        sequence.num_computed_tokens = 0

    def _give_back(self, blocks: Seq[int]) -> None:
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.add(block, self._digest_of[block] is not None, self._next_of[block] == _FORKED)

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
                self._next_of[block] = self._free.published(digest)
                if i:
                    self._follows(sequence.digests, i)
        sequence.published = full

    def _follows(self, digests: Seq[bytes], place: int) -> None:
        """Note that this block follows the one before it. If another one does, too, all blocks before are shared."""
        before = self._block_of.get(digests[place - 1])
        if before is None:
            return
        if self._next_of[before] is None:
            self._next_of[before] = digests[place]
        elif self._next_of[before] != digests[place]:
            for digest in reversed(digests[:place]):
                block = self._block_of.get(digest)
                if block is None or self._next_of[block] == _FORKED:  # then all before it are
                    break
                self._next_of[block] = _FORKED

    def _forget(self, block: int, digest: bytes) -> None:
        del self._block_of[digest]
        self._free.forgot(digest, self._next_of[block])
        self._digest_of[block] = self._next_of[block] = None

    def _extend_digests(self, sequence: Sequence, full: int) -> None:
        size, digests, tokens = self.block_size, sequence.digests, sequence.tokens
        for i in range(len(digests), full):
            # the first digest depends on the adapter: keys and values do
            before = digests[-1] if digests else sequence.adapter.to_bytes(2, "little") if sequence.adapter else b""
            own = array("q", tokens[i * size : (i + 1) * size]).tobytes()
            digests.append(blake2b(before + own, digest_size=16).digest())


class FreeBlocks:
    """The free ones of num_blocks blocks, and the order in which they are handed out. At first all are free.

    Blocks without a known prefix go first. But a block that was never handed out has no memory yet: beyond a few, such
    blocks are used only when all others are held, and `_MORE` of them for each forgotten block that is computed again.
    So a server whose prompts do not come back soon stops growing, at little memory, however large its cache is.

    Of blocks with a known prefix the one that was free longest goes, as conversations come back soon or not at all; but
    beginnings that several prompts share (a system prompt, a document) are a list of their own. How long they stay,
    compared with all others, is learned from mistakes: forgotten blocks that are computed again. That saves up to 18 %
    of the work that LRU leaves (`bench --only cached`). Time is counted in published blocks; every method is O(1).

    weight: shared beginnings stay free this many times as long as others before they are handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        self.weight = 1.0
        self._num_blocks = num_blocks
        self._blank: list[int] = []  # handed out before, without a known prefix
        self._fresh = 0  # this block and all above it were never handed out
        self._wanted = max(_FEW, num_blocks // _PART)  # blocks to hand out before a cached one is forgotten
        self._known: tuple[OrderedDict[int, int], OrderedDict[int, int]] = (OrderedDict(), OrderedDict())  # own, shared
        self._published = 0
        self._forgotten: OrderedDict[bytes, bytes | None] = OrderedDict()  # the digest that followed; oldest first
        self._forgotten_shared = 0

    def __len__(self) -> int:
        own, shared = self._known
        return self._num_blocks - self._fresh + len(self._blank) + len(own) + len(shared)

    def add(self, block: int, known: bool, shared: bool) -> None:
        """The block lost its last holder. known: it has a known prefix. The blocks of a sequence come last to first."""
        if known:
            self._known[shared][block] = self._published
        else:
            self._blank.append(block)

    def remove(self, block: int) -> None:
        """The prefix of the block was found: it is held again."""
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

    def forgot(self, prefix: bytes, next: bytes | None) -> None:
        """A block with this prefix was handed out. next: the digest that followed it, or `_FORKED`."""
        self._forgotten[prefix] = next
        self._forgotten_shared += next == _FORKED
        if len(self._forgotten) > self._num_blocks:
            self._forgotten_shared -= self._forgotten.popitem(last=False)[1] == _FORKED

    def published(self, prefix: bytes) -> bytes | None:
        """A block has this prefix from now on. If it was forgotten, its kind should have stayed longer; then returns
        what followed it, so that a beginning counts as shared even if it is forgotten between any two uses."""
        self._published += 1
        if prefix not in self._forgotten:
            return None
        next = self._forgotten[prefix]
        shared = next == _FORKED
        self._wanted = max(self._wanted, self._fresh) + _MORE
        total, count = len(self._forgotten), self._forgotten_shared
        rare = min(_RARE, total / (count if shared else total - count))
        changed = self.weight * exp((_STEP if shared else -_STEP) * rare / self._num_blocks)
        self.weight = min(_MOST, max(1.0 / _MOST, changed))
        del self._forgotten[prefix]
        self._forgotten_shared -= shared
        return next
