"""From the states of a text's tokens to its vector, by the formulas of sentence-transformers. Pure: numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from reflex_runtime.llm.embedding.directory import EmbeddingModel

Vectors = npt.NDArray[np.float32]
_LEAST: Final = 1e-12  # what a vector's length counts for at least, as in PyTorch


def vectors(model: EmbeddingModel, states: Vectors, lengths: Sequence[int]) -> Vectors:
    """[texts, dimensions] of states [texts, places, width], of which the first `lengths` are the texts' tokens."""
    counts = np.asarray(lengths)
    pooled: Vectors = np.concatenate([_pooled(way, states, counts) for way in model.pooling], axis=1)
    for layer in model.dense:
        pooled = pooled @ layer.weight.T
        if layer.bias is not None:
            pooled = pooled + layer.bias
        if layer.tanh:
            pooled = np.tanh(pooled)
    return normalised(pooled) if model.normalise else pooled


def normalised(rows: Vectors) -> Vectors:
    """Each row at length 1."""
    found: Vectors = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _LEAST)
    return found


def _pooled(way: str, states: Vectors, counts: npt.NDArray[np.int64]) -> Vectors:
    if way == "cls":
        first: Vectors = states[:, 0]
        return first
    if way == "last":
        last: Vectors = states[np.arange(len(counts)), counts - 1]
        return last
    inside = np.arange(states.shape[1]) < counts[:, None]
    if way == "max":
        most: Vectors = np.where(inside[:, :, None], states, np.float32(-np.inf)).max(axis=1)
        return most
    weights = inside.astype(np.float32)
    if way == "weightedmean":
        weights *= np.arange(1, states.shape[1] + 1, dtype=np.float32)
    summed: Vectors = np.einsum("nlw,nl->nw", states, weights)
    total = weights.sum(axis=1, keepdims=True)
    summed /= np.sqrt(total) if way == "mean_sqrt_len" else total
    return summed
