"""Steps laid out by hand: what the engine does for a runner, in the few lines a runner's test needs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reflex_runtime.llm.engine.blocks import BlockPool
from reflex_runtime.llm.runners.runner import Runner, Step


class Lane:
    """One sequence: its tokens, how many of them are in the cache, and its block table."""

    def __init__(self, tokens: Sequence[int], computed: int = 0, blocks: Sequence[int] = ()) -> None:
        self.tokens, self.computed, self.blocks = list(tokens), computed, list(blocks)


def shuffled(count: int, seed: int = 0) -> list[int]:
    """Free blocks in an order that no table is contiguous in."""
    free = list(range(count))
    random.Random(seed).shuffle(free)
    return free


def step(lanes: Sequence[Lane], grants: Sequence[int], block_size: int, free: list[int]) -> Step:
    """The step that computes the next grants[i] tokens of lanes[i]; missing blocks are taken from the end of `free`.

    The lanes count as computed afterwards. A grant is at least 1 and at most what is left of the lane's tokens.
    """
    ids: list[int] = []
    positions: list[int] = []
    past, begins, blocks, block_begins = [], [0], [], [0]
    for lane, grant in zip(lanes, grants, strict=True):
        end = lane.computed + grant
        assert lane.computed < end <= len(lane.tokens)
        while len(lane.blocks) * block_size < end:
            lane.blocks.append(free.pop())
        ids += lane.tokens[lane.computed : end]
        positions += range(lane.computed, end)
        past.append(lane.computed)
        begins.append(len(ids))
        blocks += lane.blocks[: -(-end // block_size)]
        block_begins.append(len(blocks))
        lane.computed = end
    i32, i64 = (lambda values: np.array(values, np.int32)), (lambda values: np.array(values, np.int64))
    return Step(i64(ids), i64(positions), i32(past), i32(begins), i32(blocks), i32(block_begins))


def prefill(runner: Runner, lane: Lane, chunk: int, free: list[int]) -> npt.NDArray[np.float32]:
    """Compute all of a lane's tokens, `chunk` at a time; the logits [vocab] after the last one."""
    while True:
        grant = min(chunk, len(lane.tokens) - lane.computed)
        row = runner.forward(step([lane], [grant], runner.block_size, free))[0].copy()
        if lane.computed == len(lane.tokens):
            return row


def greedy(
    runner: Runner,
    lanes: Sequence[Lane],
    count: int,
    free: list[int],
    chunk: Callable[[], int] = lambda: 1 << 30,
) -> list[list[tuple[int, npt.NDArray[np.float32]]]]:
    """Run the lanes together until each has `count` more tokens: (token, its logits) for each; chunk() caps a grant."""
    made: list[list[tuple[int, npt.NDArray[np.float32]]]] = [[] for _ in lanes]
    while any(len(row) < count for row in made):
        live = [i for i in range(len(lanes)) if len(made[i]) < count]
        grants = [min(chunk(), len(lanes[i].tokens) - lanes[i].computed) for i in live]
        logits = runner.forward(step([lanes[i] for i in live], grants, runner.block_size, free))
        for row, i in enumerate(live):
            if lanes[i].computed == len(lanes[i].tokens):
                token = int(logits[row].argmax())
                made[i].append((token, logits[row].copy()))
                lanes[i].tokens.append(token)
    return made


def faults(pool: BlockPool, sequences: Sequence[Any] = ()) -> list[str]:
    """Errors in the pool, given that these sequences hold all held blocks; empty if there are none."""
    own, shared = pool._free._known
    held = Counter(block for sequence in sequences for block in sequence.blocks)
    free = Counter([*pool._free._blank, *range(pool._free._fresh, pool.num_blocks), *own, *shared])
    wrong = [f"block {block}: free {times} times" for block, times in free.items() if times > 1]
    for block, (counted, digest) in enumerate(zip(pool._holders, pool._digest_of, strict=True)):
        if counted != held[block]:
            wrong.append(f"block {block}: {counted} holders counted, {held[block]} found")
        if bool(held[block]) == (block in free):
            wrong.append(f"block {block}: {'held and free' if held[block] else 'neither held nor free'}")
        if digest is None and pool._next_of[block] is not None:
            wrong.append(f"block {block}: knows nothing, and what follows it")
        if digest is not None and pool._block_of.get(digest) != block:
            wrong.append(f"block {block}: what it knows leads to block {pool._block_of.get(digest)}")
    if len(pool._block_of) != sum(digest is not None for digest in pool._digest_of):
        wrong.append("a digest leads to a block that does not know it")
    return wrong
