"""Which cached blocks to keep: traces of conversations through the real pool of blocks, in virtual time.

Every way to choose the block that is forgotten sees the same requests and the same size of cache. `found` is the share
of the prompts' tokens that needed no computing; `cost` is what the others took, as a model of half a billion parameters
takes it on two cores: 4.5 ms a token, and 1.5 µs for each token before it (`core/token_budget.py`). Nothing is measured
but decisions: every row is the same on every machine.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from bench.conversations import TRACES, Asked, trace
from bench.report import Row, row, say
from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.ipc.messages import SamplingParams
from reflex_runtime.llm.engine.blocks import BlockPool
from reflex_runtime.llm.engine.sequence import Sequence
from reflex_runtime.llm.engine.toy import ByteTokenizer

BLOCK = 64  # tokens
SIZES = (0.1, 0.2, 0.4, 0.8)  # of the working set
TOKEN, PAIR = 0.0045, 1.5e-6  # seconds
LEAST = 150  # blocks: the longest request, and another
SEED = 1


def cost(place: int) -> float:
    """Seconds that the block at this place takes."""
    return BLOCK * (TOKEN + PAIR * BLOCK * (place + 0.5))


class Replayed:
    """A request whose blocks have names instead of tokens."""

    def __init__(self, asked: Asked, number: int) -> None:
        self.asked, self.number = asked, number
        names, begin = [], 0
        for name, tokens in asked.texts:
            length = tokens or asked.prompt + asked.answer - begin
            names.append((begin + length, name))
            begin += length
        self.blocks, at = list[bytes](), 0
        told = ""
        for place in range((asked.prompt + asked.answer - 1) // BLOCK):
            while names[at][0] < (place + 1) * BLOCK:  # a block with two texts has both names
                told += f"{names[at][1]}|"
                at += 1
            self.blocks.append(f"{told}{names[at][1]}#{place}".encode())

    @property
    def wanted(self) -> list[bytes]:
        """The blocks that its prompt can find."""
        return self.blocks[: (self.asked.prompt - 1) // BLOCK]

    def ticket(self) -> Ticket:
        total = self.asked.prompt + self.asked.answer
        sequence = Sequence(range(self.asked.prompt), SamplingParams(max_tokens=self.asked.answer), ByteTokenizer())
        sequence.digests = list(self.blocks)
        return Ticket(Request(sequence, wants=float(total)), self.number, self.asked.at)


def working_set(replayed: list[Replayed]) -> int:
    """The most blocks at one moment that were computed, and will be wanted again."""
    first, last = dict[bytes, int](), dict[bytes, int]()
    for i, one in enumerate(replayed):
        for name in one.blocks:
            first.setdefault(name, i)
        for name in one.wanted:
            if first[name] < i:
                last[name] = i
    change = [0] * len(replayed)
    for name, i in last.items():
        change[first[name]] += 1
        change[i] -= 1
    most = count = 0
    for by in change:
        count += by
        most = max(most, count)
    return most


# -- the replay --------------------------------------------------------------------------------------------------------


def replay(replayed: list[Replayed], pool: BlockPool, order: Other | None = None) -> tuple[float, float]:
    """The share of the prompts' tokens that was found, and the seconds that the others took. order: what the pool's
    choice is replaced by. A request that finds no room waits for the next one that ends; those behind it, too."""
    if order is not None:
        pool._free = order  # type: ignore[assignment]
    running, waiting = list[tuple[float, int, Ticket]](), deque[Replayed]()
    tokens = found = seconds = 0.0
    come = deque(replayed)
    while come or running or waiting:
        if running and (not come or running[0][0] <= come[0].asked.at):
            ended, _, ticket = heapq.heappop(running)
            if order is not None:
                order.releases(ticket)
            pool.release(ticket)
        else:
            waiting.append(come.popleft())
            ended = waiting[-1].asked.at
        while waiting:
            one = waiting[0]
            ticket = one.ticket()
            sequence: Sequence = ticket.request.payload
            cached = pool.begin(ticket)
            if not pool.reserve(ticket, one.asked.prompt + one.asked.answer - 1 - cached):
                pool.release(ticket)
                break
            waiting.popleft()
            if order is not None:
                order.came(one, len(sequence.blocks[: int(cached) // BLOCK]))
            sequence.num_computed_tokens = one.asked.prompt + one.asked.answer - 1
            pool.commit(Batch(1, "default", "", "", Cause.IDLE, 0.0, 0.0, 0.0, {ticket: 1.0}))
            heapq.heappush(running, (ended + one.asked.ends - one.asked.at, one.number, ticket))
            tokens, found = tokens + one.asked.prompt, found + cached
            seconds += sum(map(cost, range(int(cached) // BLOCK, one.asked.prompt // BLOCK)))
    return found / tokens, seconds


def cached(scale: float) -> list[Row]:
    """Rows of each trace, over the sizes: the share that each way found, and what it saves of LRU's cost."""
    rows = []
    for name in TRACES:
        replayed = [Replayed(asked, i) for i, asked in enumerate(trace(name, SEED))]
        uses = defaultdict[bytes, list[int]](list)
        for one in reversed(replayed):
            for block in one.wanted:
                uses[block].append(one.number)
        found, saved = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        sizes = {max(LEAST, round(part * working_set(replayed))) for part in SIZES}
        for size in sorted(sizes)[: None if scale == 1.0 else 2]:
            say(f"  {name}, {size} blocks")
            seconds = {}
            for way, make in WAYS.items():
                pool = BlockPool(size, BLOCK)
                share, seconds[way] = replay(replayed, pool, None if make is None else make(pool, uses))
                found[way].append(100.0 * share)
            for way, took in seconds.items():
                saved[way].append(100.0 * (1.0 - took / seconds["LRU"]))
        rows.append(row("cached", f"{name}, LRU: found", found["LRU"], "%"))
        for way in list(WAYS)[1:]:
            rows.append(row("cached", f"{name}, {way}: found", found[way], "%"))
            rows.append(row("cached", f"{name}, {way}: cost saved", saved[way], "%"))
    return rows


# -- other ways to choose ----------------------------------------------------------------------------------------------


class Other:
    """What `FreeBlocks` does, in another order. Subclasses keep blocks that know a prefix."""

    def __init__(self, pool: BlockPool, uses: dict[bytes, list[int]]) -> None:
        """uses: of each block, the numbers of the requests that want it, the last one first."""
        self.pool, self.uses = pool, uses
        self.now = self.released = 0  # numbers of the last request, and of the last release
        self._blank = list(range(pool.num_blocks))[::-1]

    def __len__(self) -> int:
        return len(self._blank) + self.known

    def add(self, block: int, known: bool, shared: bool) -> None:
        name = self.pool._digest_of[block]
        if name is None:
            self._blank.append(block)
        else:
            self.keep(block, name)

    def take(self) -> int:
        return self._blank.pop() if self._blank else self.choose()

    def came(self, one: Replayed, found: int) -> None:
        self.now = one.number

    def releases(self, ticket: Ticket) -> None:
        self.released += 1

    def forgot(self, prefix: bytes, next: bytes | None) -> None:
        return

    def published(self, prefix: bytes) -> None:
        return

    @property
    def known(self) -> int:
        raise NotImplementedError

    def keep(self, block: int, name: bytes) -> None:
        raise NotImplementedError

    def remove(self, block: int) -> None:
        raise NotImplementedError

    def choose(self) -> int:
        raise NotImplementedError


class Lists(Other):
    """LRU lists, one for each kind of block. This one has one, and is LRU: of a sequence the far end goes first."""

    kinds = 1

    def __init__(self, pool: BlockPool, uses: dict[bytes, list[int]]) -> None:
        super().__init__(pool, uses)
        self.lists = [OrderedDict[int, bytes]() for _ in range(self.kinds)]
        self.kind_of = [0] * pool.num_blocks

    @property
    def known(self) -> int:
        return sum(map(len, self.lists))

    def keep(self, block: int, name: bytes) -> None:
        self.kind_of[block] = kind = self.kind(name)
        self.lists[kind][block] = name

    def remove(self, block: int) -> None:
        del self.lists[self.kind_of[block]][block]

    def choose(self) -> int:
        return self.lists[self.next_kind()].popitem(last=False)[0]

    def kind(self, name: bytes) -> int:
        return 0

    def next_kind(self) -> int:
        return 0


class Segmented(Lists):
    """Blocks that were found again go after all others; they may take four fifths of the cache."""

    kinds = 2

    def __init__(self, pool: BlockPool, uses: dict[bytes, list[int]]) -> None:
        super().__init__(pool, uses)
        self._again = set[bytes]()

    def came(self, one: Replayed, found: int) -> None:
        self._again.update(one.blocks[:found])

    def forgot(self, prefix: bytes, next: bytes | None) -> None:
        self._again.discard(prefix)

    def kind(self, name: bytes) -> int:
        return int(name in self._again)

    def next_kind(self) -> int:
        once, again = self.lists
        while len(again) > 0.8 * self.pool.num_blocks:
            block, name = again.popitem(last=False)
            once[block], self.kind_of[block] = name, 0
            self._again.discard(name)
        return 0 if once else 1


class Heap(Other):
    """The block of the least key goes first; `key` is asked when it becomes free."""

    def __init__(self, pool: BlockPool, uses: dict[bytes, list[int]]) -> None:
        super().__init__(pool, uses)
        self._heap, self._live, self._count = list[tuple[Any, int, int]](), dict[int, int](), 0

    @property
    def known(self) -> int:
        return len(self._live)

    def keep(self, block: int, name: bytes) -> None:
        self._count += 1
        self._live[block] = self._count
        heapq.heappush(self._heap, (self.key(name), self._count, block))

    def remove(self, block: int) -> None:
        del self._live[block]

    def choose(self) -> int:
        while True:
            self.least, count, block = heapq.heappop(self._heap)
            if self._live.get(block) == count:
                del self._live[block]
                return block

    least: Any = 0.0

    def key(self, name: bytes) -> Any:
        raise NotImplementedError


class BeginningsFirst(Heap):
    """LRU, but of a sequence the beginning goes first."""

    def key(self, name: bytes) -> tuple[int, int]:
        return self.released, _place(name)


class Frequency(Heap):
    """GDSF: how often it was found times its cost, on top of what the last one had that went."""

    def __init__(self, pool: BlockPool, uses: dict[bytes, list[int]]) -> None:
        super().__init__(pool, uses)
        self._times, self._highest = defaultdict[bytes, int](int), 0.0

    def came(self, one: Replayed, found: int) -> None:
        for name in one.blocks[:found]:
            self._times[name] += 1

    def releases(self, ticket: Ticket) -> None:
        self._highest = 0.0

    def forgot(self, prefix: bytes, next: bytes | None) -> None:
        self._times.pop(prefix, None)

    def key(self, name: bytes) -> float:
        value = (1 + self._times[name]) * cost(_place(name)) / cost(0)
        self._highest = max(self._highest, value)  # a beginning is worth what is behind it
        return float(self.least) + self._highest


class Foreseen(Heap):
    """Belady: what is wanted last of all goes first. No choice that does not know the future finds more."""

    def key(self, name: bytes) -> tuple[float, int]:
        uses = self.uses.get(name, [])
        while uses and uses[-1] <= self.now:
            uses.pop()
        return (-uses[-1] if uses else -1e18), -_place(name)


def _place(name: bytes) -> int:
    return int(name.rpartition(b"#")[2])


OURS = "shared beginnings apart"
WAYS: dict[str, Callable[[BlockPool, dict[bytes, list[int]]], Other] | None] = {
    "LRU": Lists,
    "LRU, beginnings first": BeginningsFirst,
    "segmented": Segmented,
    "frequency": Frequency,
    OURS: None,
    "foreseen": lambda pool, uses: Foreseen(pool, {name: list(numbers) for name, numbers in uses.items()}),
}
