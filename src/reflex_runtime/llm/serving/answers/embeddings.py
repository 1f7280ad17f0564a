"""Answers of /v1/embeddings, as clients of the OpenAI API expect them."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from reflex_runtime.web.json import encode

_AT_ONCE: Final = 20_000  # numbers that are written on the loop; more in a thread


class EmbeddingUsage(msgspec.Struct):
    """Tokens that a request had."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(msgspec.Struct):
    """A text's vector: numbers, or their float32 bytes in base64. index: the text's place in `input`."""

    embedding: list[float] | str
    index: int
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    """What /v1/embeddings answers."""

    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


async def written(rows: Sequence[npt.NDArray[np.float32]], base64: bool, model: str, tokens: int) -> bytes:
    """The body of an answer. rows: the vector of each text."""
    write = partial(_written, rows, base64, model, tokens)
    if len(rows) * len(rows[0]) <= _AT_ONCE:
        return write()
    return await asyncio.get_running_loop().run_in_executor(None, write)


def _written(rows: Sequence[npt.NDArray[np.float32]], base64: bool, model: str, tokens: int) -> bytes:
    head, _, tail = encode(EmbeddingList([], model, EmbeddingUsage(tokens, tokens))).partition(b"[]")
    parts = b",".join([_part(row, index, base64) for index, row in enumerate(rows)])  # joining lets others run, too
    return b"".join([head, b"[", parts, b"]", tail])


def _part(row: npt.NDArray[np.float32], index: int, base64: bool) -> bytes:
    told: Any = b64encode(row.astype("<f4").tobytes()).decode() if base64 else row.tolist()
    return encode(EmbeddingObject(told, index))
