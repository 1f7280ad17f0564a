"""Paged blocks: who holds them, what they know, in which order they are given away (contract L5, L6)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from llm.steps import faults
from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.ipc.messages import SamplingParams
from reflex_runtime.llm.engine.blocks import BlockPool
from reflex_runtime.llm.engine.sequence import Sequence
from reflex_runtime.llm.engine.toy import ByteTokenizer


def ticket(tokens: list[int] | str, max_tokens: int = 8) -> Ticket:
    ids = list(tokens.encode()) if isinstance(tokens, str) else tokens
    sequence = Sequence(ids, SamplingParams(max_tokens), ByteTokenizer())
    return Ticket(Request(sequence, wants=float(len(ids))), 0, 0.0)


def seq(ticket: Ticket) -> Sequence:
    found: Sequence = ticket.request.payload
    return found


def compute(pool: BlockPool, ticket: Ticket, tokens: int | None = None) -> float:
    """Enter, reserve and commit; returns what was cached."""
    s = seq(ticket)
    cached = 0.0 if s.blocks else pool.begin(ticket)
    n = s.num_tokens - s.num_computed_tokens if tokens is None else tokens
    assert pool.reserve(ticket, n)
    s.num_computed_tokens += n
    pool.commit(Batch(1, "default", "", "", Cause.IDLE, 0.0, 0.0, 0.0, {ticket: float(n)}))
    return cached


def test_l5_a_sequence_holds_as_many_blocks_as_its_tokens_take() -> None:
    pool = BlockPool(10, 4)
    a = ticket("abcdefghi")
    compute(pool, a, 5)
    assert (len(seq(a).blocks), pool.free_blocks) == (2, 8)
    compute(pool, a, 3)
    assert len(seq(a).blocks) == 2
    compute(pool, a, 1)
    assert len(seq(a).blocks) == 3
    assert pool.usage == pytest.approx(0.3)
    pool.release(a)
    assert (seq(a).blocks, seq(a).num_computed_tokens, pool.free_blocks) == ([], 0, 10)


def test_l5_a_reservation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(2, 4)
    a, b = ticket("abcd"), ticket("wxyz12345")
    compute(pool, a)
    assert not pool.reserve(b, 9)
    assert (seq(b).blocks, pool.free_blocks) == ([], 1)
    assert faults(pool, [seq(a), seq(b)]) == []


def test_l5_whether_it_would_fit_is_known_as_soon_as_enough_would_be_free() -> None:
    pool = BlockPool(20, 4, prefix_caching=False)
    residents = [ticket([i] * 36) for i in range(2)]
    for resident in residents:
        compute(pool, resident)
    asks = ticket("x" * 12)

    class Released(list[Ticket]):
        looked = 0

        def __iter__(self) -> Iterator[Ticket]:
            for one in super().__iter__():
                self.looked += 1
                yield one

    for units, looked in ((4.0, 0), (8.0, 0), (12.0, 1), (48.0, 2)):
        released = Released(residents)
        assert pool.would_fit(asks, units, released)
        assert released.looked == looked


def test_l5_whether_it_would_fit_is_told_to_the_block() -> None:
    pool = BlockPool(6, 4)
    a, b, c = ticket("abcdefghi"), ticket("abcdefghj"), ticket("x" * 30)
    compute(pool, a)
    compute(pool, b)  # shares two of its three blocks with a
    assert pool.free_blocks == 2
    for released, blocks in (((), 2), ((a,), 3), ((b,), 3), ((a, b), 6)):
        assert pool.would_fit(c, 4.0 * blocks, released)
        assert not pool.would_fit(c, 4.0 * blocks + 1, released)
    pool.release(a)
    pool.release(b)
    assert pool.reserve(c, 24)


def test_l6_who_begins_alike_shares_full_blocks_and_computes_at_least_one_token() -> None:
    pool = BlockPool(20, 4)
    a, b, c = ticket("abcdefgh"), ticket("abcdefgh"), ticket("abcdefghi")
    assert compute(pool, a) == 0.0
    assert compute(pool, b) == 4.0  # its last token is left to compute
    assert compute(pool, c) == 8.0
    assert seq(c).blocks[:2] == seq(a).blocks
    assert seq(b).blocks[0] == seq(a).blocks[0]
    assert seq(b).blocks[1] != seq(a).blocks[1]
    assert faults(pool, [seq(a), seq(b), seq(c)]) == []


def test_l5_a_block_is_known_by_everything_before_it_too() -> None:
    pool = BlockPool(20, 4)
    compute(pool, ticket("aaaabbbb"))
    assert compute(pool, ticket("ccccbbbbd")) == 0.0
    assert compute(pool, ticket("aaaacccc")) == 4.0


def test_l5_shared_blocks_are_free_when_the_last_holder_left() -> None:
    pool = BlockPool(20, 4)
    a, b = ticket("abcdefghi"), ticket("abcdefghj")
    compute(pool, a)
    compute(pool, b)
    pool.release(a)
    assert pool.free_blocks == 17
    pool.release(b)
    assert pool.free_blocks == 20
    assert compute(pool, ticket("abcdefghk")) == 8.0  # free blocks still know it


def test_l5_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(20, 4, prefix_caching=False)
    compute(pool, ticket("abcdefghi"))
    assert compute(pool, ticket("abcdefghi")) == 0.0
    assert len(pool._block_of) == 0


def test_l5_blocks_that_know_nothing_are_given_away_first_then_the_longest_unused_prefix() -> None:
    pool = BlockPool(4, 2)
    old, new = ticket("aab"), ticket("ccd")  # one full block each, and one that knows nothing
    compute(pool, old)
    compute(pool, new)
    full = {seq(old).blocks[0]: "old", seq(new).blocks[0]: "new"}
    partial = {seq(old).blocks[1], seq(new).blocks[1]}
    pool.release(old)
    pool.release(new)
    taker = ticket("123456")
    assert pool.reserve(taker, 4)
    assert set(seq(taker).blocks) == partial
    assert len(pool._block_of) == 2
    assert pool.reserve(taker, 6)
    assert full[seq(taker).blocks[2]] == "old"
    assert (len(pool._block_of), pool.begin(ticket("cc!"))) == (1, 2.0)


def test_l5_of_one_prefix_the_far_end_is_given_away_before_its_beginning() -> None:
    pool = BlockPool(3, 2)
    a = ticket("aabbcc")
    compute(pool, a)
    pool.release(a)
    taker = ticket("1")
    assert pool.reserve(taker, 1)
    assert pool.begin(ticket("aabbcc!")) == 4.0


def test_l5_what_failed_is_not_shown_to_anybody() -> None:
    pool = BlockPool(8, 4)
    a = ticket("abcdefgh")
    pool.begin(a)
    assert pool.reserve(a, 8)
    pool.commit(Batch(1, "default", "", "", Cause.IDLE, 0.0, 0.0, 0.0, {a: 8.0}))  # the processor counted nothing
    pool.release(a)
    assert compute(pool, ticket("abcdefghi")) == 0.0


def test_l5_outputs_are_found_again_after_preemption() -> None:
    pool = BlockPool(8, 4)
    a = ticket("abcd")
    compute(pool, a)
    seq(a).tokens += [1, 2, 3, 4, 5]
    compute(pool, a)
    pool.release(a)
    assert pool.begin(a) == 8.0


def test_l5_a_sequence_that_knows_all_its_own_blocks_still_has_a_token_to_compute() -> None:
    pool = BlockPool(8, 4)
    a = ticket("abcdefgh")
    compute(pool, a)
    pool.release(a)
    assert pool.begin(a) == 4.0


def test_a_request_fits_when_its_longest_form_does_alone() -> None:
    pool = BlockPool(2, 4)
    assert pool.fits(ticket("abcd", max_tokens=5).request)  # the last token is never stored
    assert not pool.fits(ticket("abcd", max_tokens=6).request)


def test_random_use_keeps_the_pool_whole_and_prefixes_true() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        pool = BlockPool(rng.randint(4, 24), rng.choice((1, 2, 4)), prefix_caching=rng.random() < 0.8)
        content: dict[int, tuple[int, ...]] = {}  # block -> every token up to its end, as its holder saw it
        held: list[Ticket] = []
        for _ in range(120):
            if held and rng.random() < 0.45:
                gone = held.pop(rng.randrange(len(held)))
                pool.release(gone)
            else:
                t = ticket([rng.randrange(2) for _ in range(rng.randint(1, 12))])
                cached = int(pool.begin(t))
                s = seq(t)
                for i in range(cached // pool.block_size):
                    assert content[s.blocks[i]] == tuple(s.tokens[: (i + 1) * pool.block_size])
                if not pool.reserve(t, s.num_tokens - cached):
                    pool.release(t)
                else:
                    s.num_computed_tokens = s.num_tokens
                    for i in range(s.num_tokens // pool.block_size):
                        content[s.blocks[i]] = tuple(s.tokens[: (i + 1) * pool.block_size])
                    pool.commit(Batch(1, "default", "", "", Cause.IDLE, 0.0, 0.0, 0.0, {t: 1.0}))
                    held.append(t)
            assert faults(pool, [seq(t) for t in held]) == []
        for t in held:
            pool.release(t)
        assert pool.free_blocks == pool.num_blocks


def test_check_finds_what_is_wrong() -> None:
    pool = BlockPool(4, 2)
    a = ticket("abc")
    compute(pool, a)
    assert any("neither held nor free" in wrong for wrong in faults(pool))
    assert any("holders" in wrong for wrong in faults(pool, [seq(a), seq(a)]))


@pytest.mark.parametrize(("blocks", "size", "name"), [(0, 4, "num_blocks"), (4, 0, "block_size")])
def test_a_pool_without_room_is_refused(blocks: int, size: int, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"BlockPool\.{name}=0"):
        BlockPool(blocks, size)
