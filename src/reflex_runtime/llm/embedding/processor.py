"""Runs batches of texts: cuts a batch into calls of the model, and gives each text its vector."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from reflex_runtime.core.batch import Batch, Failed
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.sized_cost import SizedCost
from reflex_runtime.llm.embedding.calls import calls_of
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.embedding.encoder import Encoder, laid_out
from reflex_runtime.llm.embedding.pooling import Vectors, vectors
from reflex_runtime.processors.base import BaseProcessor

Measured = tuple[tuple[int, ...], float]  # (tokens of each text of a call, its seconds)
MOST_TEXTS = 4096  # of a batch: a bound on what forming it takes, far above what a budget lets in
_ROUNDS = 3  # of each size that is measured; the least counts


class EmbeddingProcessor(BaseProcessor):
    """A `GroupProcessor` whose payloads are texts' tokens, and whose values their vectors, float32.

    encoder: taken over. max_batch_cost: predicted seconds of a batch. capacity, max_queued_tokens: of texts that wait.
    measured: calls that ran before, from which the costs are known from the first batch on; see `measure`. name,
    weight: of its group.
    """

    def __init__(
        self,
        model: EmbeddingModel,
        encoder: Encoder,
        measured: Sequence[Measured],
        *,
        max_batch_cost: float = 0.1,
        capacity: int = 4096,
        max_queued_tokens: int = 1_000_000,
        name: str = "default",
        weight: float = 1.0,
    ) -> None:
        self.model, self.encoder, self.name = model, encoder, name
        self._measured = measured
        known = self._cost()
        self._work = known.work
        self._call = known.fixed_seconds / max(known.seconds(1.0) / known.work(1.0), 1e-12)  # in units of work
        self.group = GroupConfig(
            name=name,
            weight=weight,
            flush=FlushPolicy.window(max_batch_cost, 0.0, MOST_TEXTS),
            capacity=capacity,
            max_queued_units=float(max_queued_tokens),
            cost=self._cost,
        )

    def _cost(self) -> SizedCost:
        return SizedCost(self.model.curve, self._measured)

    def run(self, batch: Batch) -> Sequence[Any]:
        texts: list[Sequence[int]] = [ticket.request.payload.tokens for ticket in batch.grants]
        lengths = [len(text) for text in texts]
        found: list[Any] = [None] * len(texts)
        calls = calls_of(lengths, self._work, self._call, pairs=self.model.pairs)
        for call in calls:
            rows = embedded(self.model, self.encoder, [texts[place] for place in call])
            for place, row in zip(call, rows, strict=True):
                sound = np.isfinite(row).all()
                found[place] = row if sound else Failed(ProcessorError("the model's vector is not finite"))
        padded = sum(len(call) * lengths[call[0]] for call in calls)
        batch.notes |= {"calls": len(calls), "padding": padded - sum(lengths)}
        return found

    def stop(self) -> None:
        self.encoder.close()


def embedded(model: EmbeddingModel, encoder: Encoder, texts: Sequence[Sequence[int]]) -> Vectors:
    """The vectors of these texts, by one call of the model."""
    states = encoder.states(*laid_out(texts, model.pad_id))
    return vectors(model, states, [len(text) for text in texts])


def measure(model: EmbeddingModel, encoder: Encoder) -> list[Measured]:
    """Run calls of a few sizes, so that no request waits for one-off work, and say what they took."""
    found: list[Measured] = []
    most = min(model.max_model_len, 128)
    for texts, tokens in ((1, min(8, most)), (4, min(8, most)), (1, most), (1, max(1, most // 4))):
        given = [[5] * tokens] * texts
        taken = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            embedded(model, encoder, given)
            taken.append(time.perf_counter() - began)
        found.append(((tokens,) * texts, min(taken)))
    return found
