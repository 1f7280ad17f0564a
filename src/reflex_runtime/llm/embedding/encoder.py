"""What computes the states of texts' tokens: the interface, and how a batch of texts is laid out for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Encoder(Protocol):
    """Computes states. name: of what runs it, for people."""

    name: str

    def states(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """[texts, places, width] of ids and mask [texts, places]; valid until the next call. Called by one thread."""

    def close(self) -> None:
        """Let its memory go."""


def laid_out(texts: Sequence[Sequence[int]], pad: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(ids, mask) of these texts' tokens, padded behind them to the longest."""
    places = max(map(len, texts))
    ids = np.full((len(texts), places), pad, np.int64)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(texts):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    return ids, mask
