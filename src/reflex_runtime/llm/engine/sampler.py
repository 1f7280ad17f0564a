"""From rows of logits to tokens.

A draw depends on the sequence's seed and on how many tokens it has sampled, on nothing else: not on the rest of the
batch, and not on whether the step was tried before. Greedy rows are one argmax for all; the others are transformed
together and drawn one by one. Rows that a request changes first (`Shaping`) are copied: what is reported about a
token is the model's own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.ipc.messages import ScoredToken
from reflex_runtime.llm.engine.sequence import Sequence

Logits = npt.NDArray[np.float32]
_PART = 64  # of a row whose largest number is looked at first
_NEVER = -9999.0  # minus infinity, which is no JSON, as the OpenAI API says it
_COLDEST = 1e-30  # temperature; what is below may be nothing in float32, and the likeliest has 0 / it


def sample(
    logits: Logits,
    sequences: Seq[Sequence],
    rows: Seq[int] | None = None,
    best: npt.NDArray[np.intp] | None = None,
) -> list[ScoredToken | ProcessorError]:
    """The next token of each sequence from its row of logits [n, vocab_size].

    rows: which row is whose; None: they are in order. best: the place of the largest number of each row of the logits,
    where a caller that samples from them several times has looked already. Neither copies a row.

    A row without a finite best value, or of which the request's own form leaves nothing, fails that sequence alone: a
    ProcessorError takes the place of its token.
    """
    at = np.arange(len(sequences)) if rows is None else np.array(rows, np.intp)
    best = (logits.argmax(axis=1) if best is None else best)[at]  # a NaN counts as the largest: it is found here too
    finite = np.isfinite(logits[at, best])
    shaped = [i for i, s in enumerate(sequences) if s.shaping is not None and finite[i]]
    own, failed = _shaped(logits[at[shaped]], [sequences[i] for i in shaped]) if shaped else (logits[:0], {})
    if shaped:
        best[shaped] = own.argmax(axis=1)
    tokens = best.tolist()
    drawing = [i for i, s in enumerate(sequences) if s.params.temperature > 0.0 and finite[i]]
    if drawing:
        drawn, place = logits[at[drawing]], {i: n for n, i in enumerate(drawing)}
        for i, row in zip(shaped, own, strict=True):
            if i in place:
                drawn[place[i]] = row
        for i, token in zip(drawing, _draw(drawn, [sequences[i] for i in drawing]), strict=True):
            tokens[i] = token
    found: list[ScoredToken | ProcessorError] = []
    errors = {shaped[n]: error for n, error in failed.items()}
    for i, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
        if i in errors:
            found.append(errors[i])
        elif not finite[i]:
            found.append(ProcessorError(f"the model's logits are not finite after {sequence.num_tokens} tokens"))
        elif sequence.params.logprobs is None:
            found.append(ScoredToken(token))
        else:
            found.append(explain(logits[at[i]], token, sequence.params.logprobs))
    return found


def _shaped(rows: Logits, sequences: Seq[Sequence]) -> tuple[Logits, dict[int, ProcessorError]]:
    """The rows as their sequences change them, in place, and the errors of those that could not."""
    errors: dict[int, ProcessorError] = {}
    for at, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        try:
            if sequence.shaping is not None:
                sequence.shaping.shape(row)
        except ProcessorError as error:
            errors[at], row[:] = error, 0.0
    return rows, errors


def _draw(logits: Logits, sequences: Seq[Sequence]) -> list[int]:
    heat = np.array([max(_COLDEST, s.params.temperature) for s in sequences], np.float32)
    weights = logits - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # to minus infinity: next to no temperature leaves nothing but the likeliest
        weights /= heat[:, None]
    np.exp(weights, out=weights)
    return [_pick(row, s) for row, s in zip(weights, sequences, strict=True)]


def _pick(weights: npt.NDArray[np.float32], sequence: Sequence) -> int:
    """One token by its weight (the likeliest has 1), among those that min_p, top_k and top_p leave."""
    params = sequence.params
    ids: npt.NDArray[np.intp] | None = None
    if params.min_p > 0.0:
        ids = np.flatnonzero(weights >= params.min_p)
        weights = weights[ids]
    if 0 < params.top_k < len(weights):
        kept = np.argpartition(weights, -params.top_k)[-params.top_k :]
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    sums = weights.cumsum(dtype=np.float64)
    at = int(np.searchsorted(sums, uniform(sequence.seed, sequence.num_output_tokens) * sums[-1], side="right"))
    at = min(at, len(sums) - 1)
    return at if ids is None else int(ids[at])


def _nucleus(weights: npt.NDArray[np.float32], top_p: float) -> npt.NDArray[np.intp]:
    """The likeliest tokens that together have probability top_p, at least one. Sorts a few before it sorts all."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    few = min(256, len(weights))
    while True:
        some = np.argpartition(weights, -few)[-few:] if few < len(weights) else np.arange(len(weights))
        some = some[np.argsort(-weights[some], kind="stable")]
        sums = weights[some].cumsum(dtype=np.float64)
        if sums[-1] >= wanted or few == len(weights):
            return some[: int(np.searchsorted(sums, wanted)) + 1]
        few = min(8 * few, len(weights))


def uniform(seed: int, index: int) -> float:
    """The draw of a sequence's index-th token, in [0, 1)."""
    digest = blake2b(struct.pack("<QQ", seed, index), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) / (1 << 53)


def explain(row: npt.NDArray[np.float32], token: int, alternatives: int) -> ScoredToken:
    """What the model says of a token by its row of logits. alternatives: the likeliest to report beside it."""
    most = row.max()
    total = float(most) + float(np.log(np.exp(row - most).sum(dtype=np.float64)))
    ids = likeliest(row, alternatives) if alternatives else ()
    top = tuple((int(i), max(_NEVER, float(row[i]) - total)) for i in ids)
    return ScoredToken(token, max(_NEVER, float(row[token]) - total), top)


def likeliest(row: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """The ids of so many of the largest numbers, the largest first; of equal ones the lower id first."""
    count = min(count, len(row))
    parts = len(row) // _PART
    if parts < count:
        return np.lexsort((np.arange(len(row)), -row))[:count]
    largest = row[: parts * _PART].reshape(parts, _PART).max(axis=1)
    least = np.partition(largest, -count)[-count]  # so many numbers are no smaller
    ids = np.flatnonzero(row >= least)
    return ids[np.lexsort((ids, -row[ids]))[:count]]
