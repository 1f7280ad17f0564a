"""Which block is forgotten first (contract L5): the one that was free longest, shared beginnings apart."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from llm.steps import faults
from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.ipc.messages import SamplingParams
from reflex_runtime.llm.engine import blocks
from reflex_runtime.llm.engine.blocks import BlockPool, FreeBlocks
from reflex_runtime.llm.engine.sequence import Sequence
from reflex_runtime.llm.engine.toy import ByteTokenizer

SIZE = 4


def ask(pool: BlockPool, tokens: list[int]) -> int:
    """A prompt is computed and its request ends; returns how many of its blocks were found."""
    sequence = Sequence(tokens, SamplingParams(1), ByteTokenizer())
    ticket = Ticket(Request(sequence, wants=float(len(tokens))), 0, 0.0)
    found = int(pool.begin(ticket)) // SIZE
    assert pool.reserve(ticket, len(tokens) - found * SIZE)
    sequence.num_computed_tokens = len(tokens)
    pool.commit(Batch(1, "default", "", "", Cause.IDLE, 0.0, 0.0, 0.0, {ticket: 1.0}))
    pool.release(ticket)
    assert faults(pool) == []
    return found


class Texts:
    """Texts of so many blocks, none of which begins like another."""

    def __init__(self) -> None:
        self.made = 0

    def new(self, blocks: int) -> list[int]:
        self.made += 1
        return [self.made * 1000 + i for i in range(blocks * SIZE)]


def test_l5_a_shared_beginning_outlives_prompts_that_never_come_back() -> None:
    pool, texts = BlockPool(40, SIZE), Texts()
    system = texts.new(6)
    found = []
    for _ in range(60):
        found.append(ask(pool, system + texts.new(1)))
        for _ in range(12):
            ask(pool, texts.new(4))  # 48 blocks: more than there are
    assert found[:3] == [0, 0, 0]
    assert found[-20:] == [6] * 20


def test_l5_shared_beginnings_that_do_not_come_back_go_before_conversations_that_do() -> None:
    pool, texts = BlockPool(60, SIZE), Texts()
    talks = [texts.new(5) for _ in range(6)]
    found = []
    for turn in range(120):
        i = turn % len(talks)
        found.append(ask(pool, [*talks[i], 0]) == 5)
        document = texts.new(6)
        for _ in range(2):
            ask(pool, document + texts.new(1))  # after the second, its six blocks are shared, and of no use
    assert not any(found[:8])
    assert all(found[-4 * len(talks) :])


def test_l5_who_shares_nothing_has_the_oldest_forgotten_whatever_was_learned() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        pool, texts = BlockPool(24, SIZE), Texts()
        pool._free.weight = rng.choice((0.1, 1.0, 10.0))
        talks = [texts.new(2)[:-1] for _ in range(8)]
        kept: OrderedDict[tuple[int, int], None] = OrderedDict()  # (its text, its place); the next to go comes first
        for _ in range(150):
            i = rng.randrange(len(talks))
            wanted = [(talks[i][0], place) for place in range(len(talks[i]) // SIZE)]
            known = [block in kept for block in wanted]
            assert ask(pool, talks[i]) == (known.index(False) if False in known else len(wanted))
            for block in wanted:
                kept.pop(block, None)
            while len(kept) + len(wanted) + 1 > pool.num_blocks:  # and the block that is not full
                kept.popitem(last=False)
            kept.update(dict.fromkeys(reversed(wanted)))
            talks[i] = talks[i] + texts.new(1) if len(talks[i]) < 9 * SIZE else texts.new(2)[:-1]


def test_l5_what_was_learned_stays_within_its_bounds_and_what_is_remembered_within_the_pool() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        free = FreeBlocks(8)
        names = [bytes((i,)) for i in range(30)]
        for _ in range(2000):
            name, shared = rng.choice(names), rng.random() < (0.1 if seed % 2 else 0.9)
            if rng.random() < 0.5 and name not in free._forgotten:
                free.forgot(name, blocks._FORKED if shared else None)
            else:
                free.published(name)
            assert free._forgotten_shared == [*free._forgotten.values()].count(blocks._FORKED)
            assert len(free._forgotten) <= 8
            assert 1 / 16 <= free.weight <= 16


@pytest.mark.parametrize(("shared", "more"), [(True, True), (False, False)])
def test_l5_a_mistake_moves_the_weight_to_its_kind(shared: bool, more: bool) -> None:
    free = FreeBlocks(100)
    free.published(b"other")
    assert free.weight == 1.0
    free.forgot(b"it", blocks._FORKED if shared else b"next")
    assert free.published(b"it") == (blocks._FORKED if shared else b"next")
    assert (free.weight > 1.0) is more
    before = free.weight
    free.published(b"it")  # nobody forgot it since
    assert free.weight == before


def test_l5_shared_is_what_stands_before_a_fork() -> None:
    pool, texts = BlockPool(40, SIZE), Texts()
    begin, middle = texts.new(2), texts.new(2)
    for tokens in (begin + middle + texts.new(1), begin + middle + texts.new(1)):
        ask(pool, tokens)
    assert pool._next_of.count(blocks._FORKED) == 4
    ask(pool, begin + texts.new(3))
    assert pool._next_of.count(blocks._FORKED) == 4
    ask(pool, texts.new(39))  # everything but one block is forgotten
    assert pool._next_of.count(blocks._FORKED) <= 1


def touched(pool: BlockPool) -> int:
    """Blocks that have memory: those that were ever handed out."""
    return pool._free._fresh


def test_l5_prompts_that_never_come_back_take_little_memory_of_a_large_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_FEW", 16)
    pool, texts = BlockPool(480, SIZE), Texts()
    for _ in range(300):
        assert ask(pool, texts.new(4)) == 0
    assert touched(pool) == 16
    ask(pool, texts.new(400))
    assert touched(pool) >= 400, "what is held at a time has the memory that it needs"


@pytest.mark.timing  # memory
def test_l5_memory_of_a_large_cache_is_that_of_the_first_minute() -> None:
    pool, texts = BlockPool(4096, SIZE), Texts()
    seen = []
    for _ in range(300):
        ask(pool, texts.new(1 + texts.made % 12))
        seen.append(touched(pool))
    assert seen[50] == seen[-1] == 256


def test_l5_prompts_that_come_back_after_long_get_the_memory_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_FEW", 16)
    pool, texts = BlockPool(480, SIZE), Texts()
    talks = [[*texts.new(5), 0] for _ in range(40)]
    found = [[ask(pool, talk) for talk in talks] for _ in range(6)]
    assert found[-1] == [5] * 40
    assert sum(some.count(5) < 40 for some in found) <= 3
    assert touched(pool) <= 16 + 240
