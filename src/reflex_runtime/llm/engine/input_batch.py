"""The sequences of a step: laid out behind one another for the runner, and their rows of logits found again.

A lane is a sequence and how many of its tokens the step computes: known ones, and behind them those of its draft. It
gets logits after its last known token, if that is in the step, and after each of the draft. A sequence whose prompt is
scored gets them after each token of the prompt, too (`Sequence.scores_from`).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from reflex_runtime.llm.engine.sampler import Logits, explain
from reflex_runtime.llm.engine.sequence import Choice, Sequence
from reflex_runtime.llm.runners.runner import Step

Lane = tuple[Sequence, int]


def flatten(lanes: Seq[Lane]) -> Step:
    """The next `n` tokens of each sequence, behind one another."""
    ids: list[int] = []
    positions: list[int] = []
    past: list[int] = []
    begins, blocks, block_begins = [0], [], [0]  # type: tuple[list[int], list[int], list[int]]
    adapters = [sequence.adapter for sequence, _ in lanes]
    several = False
    for sequence, n in lanes:
        done = sequence.num_computed_tokens
        if n == 1:
            ids.append(sequence.tokens[done])
            positions.append(done)
        else:
            ids += sequence.tokens[done : done + n]
            positions += range(done, done + n)
            if done + n > len(sequence.tokens):
                ids += sequence.draft[: done + n - len(sequence.tokens)]
                several = True
        past.append(done)
        begins.append(len(ids))
        blocks += sequence.blocks
        block_begins.append(len(blocks))
        several = several or sequence.scores_from is not None
    return Step(
        np.array(ids, np.int64),
        np.array(positions, np.int64),
        np.array(past, np.int32),
        np.array(begins, np.int32),
        np.array(blocks, np.int32),
        np.array(block_begins, np.int32),
        _rows(lanes, begins) if several else None,
        np.array(adapters, np.int32) if any(adapters) else None,
    )


def num_rows(sequence: Sequence, n: int) -> int:
    """After how many of the lane's tokens logits are wanted: the last ones."""
    done, first = sequence.num_computed_tokens, sequence.num_tokens - 1
    if sequence.scores_from is not None:
        first = min(first, sequence.scores_from)
    return max(0, done + n - max(done, first))


@contextmanager
def unchanged_if_it_fails(lanes: Seq[Lane]) -> Iterator[None]:
    """A call that raises leaves these sequences as they were, also where a part of them was computed and scored."""
    scoring = [sequence for sequence, _ in lanes if sequence.scores_from is not None]
    before = [(s.num_computed_tokens, len(s.prompt_choices), s.scores_from, s.cached_tokens) for s in scoring]
    try:
        yield
    except BaseException:
        for sequence, (computed, scored, first, cached) in zip(scoring, before, strict=True):
            sequence.num_computed_tokens, sequence.scores_from, sequence.cached_tokens = computed, first, cached
            del sequence.prompt_choices[scored:]
        raise


def scores(lanes: Seq[Lane], logits: Logits) -> dict[Sequence, list[Choice]]:
    """The prompt tokens that a step with `rows` scored. logits: of those rows."""
    found: dict[Sequence, list[Choice]] = {}
    begin = 0
    for sequence, n in lanes:
        count = num_rows(sequence, n)
        if sequence.scores_from is not None and count:
            first = sequence.num_computed_tokens + n - count  # the token at the position behind is what a row predicts
            told = sequence.tokens[first + 1 : min(first + count + 1, sequence.num_prompt_tokens)]
            found[sequence] = explain(logits[begin : begin + len(told)], told, sequence.alternatives)
        begin += count
    return found


def drafted(sequence: Sequence, n: int) -> int:
    """How many of the lane's tokens are guesses."""
    return max(0, sequence.num_computed_tokens + n - sequence.num_tokens)


def next_rows(lanes: Seq[Lane]) -> list[int]:
    """Where, among the rows of a step that has them, the one after each lane's last known token is."""
    ends = accumulate(num_rows(*lane) for lane in lanes)
    return [end - 1 - drafted(*lane) for end, lane in zip(ends, lanes, strict=True)]


def _rows(lanes: Seq[Lane], begins: Seq[int]) -> npt.NDArray[np.int64] | None:
    """See `Step.rows`; None if no token of the step is one, because a runner computes at least one row."""
    rows: list[int] = []
    for (sequence, n), end in zip(lanes, begins[1:], strict=True):
        rows += range(end - num_rows(sequence, n), end)
    return np.array(rows, np.int64) if rows else None
