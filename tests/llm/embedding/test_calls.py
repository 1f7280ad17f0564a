"""L9: how a batch of texts is cut into calls: nothing is cheaper, and everything is computed once."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.llm.embedding.calls import MOST_TEXTS, calls_of
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.embedding.processor import EmbeddingProcessor
from reflex_runtime.llm.serving.embedding_runtime import TextTokens

from .directories import write_graph


def cost(calls: list[list[int]], lengths: list[int], fixed: float) -> float:
    return sum(fixed + len(call) * max(lengths[i] for i in call) for call in calls)


@pytest.mark.parametrize("fixed", [0.0, 3.0, 20.0, 1000.0])
def test_l9_no_other_cut_of_the_sorted_texts_costs_less(fixed: float) -> None:
    rng = random.Random(2)
    for _ in range(30):
        lengths = [rng.randrange(1, 60) for _ in range(rng.randrange(1, 9))]
        calls = calls_of(lengths, float, fixed)
        assert sorted(place for call in calls for place in call) == list(range(len(lengths)))
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        every = (
            [order[a:b] for a, b in pairwise([0, *cuts, len(order)])]
            for n in range(len(order))
            for cuts in combinations(range(1, len(order)), n)
        )
        assert cost(calls, lengths, fixed) == pytest.approx(min(cost(other, lengths, fixed) for other in every))


def test_l9_a_call_is_bounded_in_places_and_texts() -> None:
    calls = calls_of([100] * 10, float, 1e9, most=250)
    assert [len(call) for call in calls] == [2] * 5
    assert calls_of([300], float, 1.0, most=250) == [[0]]  # one text may have any length
    assert [len(call) for call in calls_of([10] * 6, float, 1e9, pairs=250)] == [2, 2, 2]
    assert max(map(len, calls_of([1] * 1000, float, 1e9))) == MOST_TEXTS


def test_l9_the_calls_of_a_batch_keep_the_memory_of_attention(tmp_path: Path) -> None:
    class Zeros:
        name = "zeros"

        def states(self, ids: Any, mask: Any) -> Any:
            shapes.append(ids.shape)
            return np.zeros((*ids.shape, model.width), np.float32)

        def close(self) -> None:
            return

    shapes: list[tuple[int, int]] = []
    model = replace(EmbeddingModel.open(write_graph(tmp_path / "model")), pairs=2 * 3**2)
    processor = EmbeddingProcessor(
        model, Zeros(), [((size,), 1.0 + 0.001 * size) for size in (2, 4, 8)], max_batch_cost=10.0
    )
    scheduler = Scheduler([processor.group])
    for _ in range(5):
        scheduler.submit(Request(TextTokens([5] * 3), wants=3.0), 0.0)
    batch = scheduler.next_batch(0.0)
    assert batch is not None
    assert len(processor.run(batch)) == len(batch) == 5
    assert sorted(shapes) == [(1, 3), (2, 3), (2, 3)]  # and not the five in one, which would cost less
