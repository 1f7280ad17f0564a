"""From rows of logits to tokens.

A draw depends only on the sequence's seed and the number of its sampled tokens, not on the rest of the batch, nor on
earlier tries of the step. One argmax serves all greedy rows; the others are transformed together and drawn one by one.
A row that a request changes first (`Shaping`) is copied, because reported log probabilities are the model's own.
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
_PART = 64  # numbers of a row in a part; `likeliest` first compares the largest of each part
_NEVER = -9999.0  # in place of minus infinity, which is no JSON, as in the OpenAI API
_COLDEST = 1e-30  # smallest temperature: a smaller one may be 0 in float32


def sample(
    logits: Logits,
    sequences: Seq[Sequence],
    rows: Seq[int] | None = None,
    best: npt.NDArray[np.intp] | None = None,
) -> list[ScoredToken | ProcessorError]:
    """The next token of each sequence from its row of logits [n, vocab_size].

    rows: the row of each; None: in order. best: the argmax of every row, so that callers that sample from the same
    logits several times compute it once.

    If the best value of a row is not finite, or the request allows no token, only this sequence fails: a ProcessorError
    takes the place of its token.
    """
    at = np.arange(len(sequences)) if rows is None else np.array(rows, np.intp)
    best = (logits.argmax(axis=1) if best is None else best)[at]  # argmax finds a NaN, too
    finite = np.isfinite(logits[at, best]).tolist()
    tokens: list[int | ProcessorError] = best.tolist()
    changed: dict[int, Logits] = {}
    for i, sequence in enumerate(sequences):
        if not finite[i]:
            tokens[i] = ProcessorError(f"the model's logits are not finite after {sequence.num_tokens} tokens")
        elif sequence.shaping is not None:
            row = logits[at[i]].copy()
            try:
                sequence.shaping.shape(row)
                changed[i], tokens[i] = row, int(row.argmax())
            except ProcessorError as error:
                tokens[i] = error
    drawing = [i for i, s in enumerate(sequences) if s.params.temperature > 0.0 and isinstance(tokens[i], int)]
    if drawing:
        drawn = logits[at[drawing]]
        for place, i in enumerate(drawing):
            if i in changed:
                drawn[place] = changed[i]
        for i, token in zip(drawing, _draw(drawn, [sequences[i] for i in drawing]), strict=True):
            tokens[i] = token
    found: list[ScoredToken | ProcessorError] = []
    for i, (sequence, chosen) in enumerate(zip(sequences, tokens, strict=True)):
        if isinstance(chosen, ProcessorError):
            found.append(chosen)
        elif sequence.params.logprobs is None:
            found.append(ScoredToken(chosen))
        else:
            found.append(explain(logits[at[i]], chosen, sequence.params.logprobs))
    return found


def _draw(logits: Logits, sequences: Seq[Sequence]) -> list[int]:
    heat = np.array([max(_COLDEST, s.params.temperature) for s in sequences], np.float32)
    weights = logits - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # to minus infinity: a tiny temperature leaves the likeliest alone
        weights /= heat[:, None]
    np.exp(weights, out=weights)
    return [_pick(row, s) for row, s in zip(weights, sequences, strict=True)]


def _pick(weights: npt.NDArray[np.float32], sequence: Sequence) -> int:
    """Draw a token by weight (the likeliest has 1) from those that min_p, top_k and top_p leave."""
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
    """The fewest likeliest tokens that together have probability top_p. Sorts 256, then more, as long as needed."""
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
    """A token with its log probability in a row of logits. alternatives: how many of the likeliest tokens to report."""
    highest = row.max()
    total = float(highest) + float(np.log(np.exp(row - highest).sum(dtype=np.float64)))
    ids = likeliest(row, alternatives) if alternatives else ()
    top = tuple((int(i), max(_NEVER, float(row[i]) - total)) for i in ids)
    return ScoredToken(token, max(_NEVER, float(row[token]) - total), top)


def likeliest(row: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """The ids of the `count` largest numbers in descending order; of equal ones the lower id first."""
    count = min(count, len(row))
    parts = len(row) // _PART
    if parts < count:
        return np.lexsort((np.arange(len(row)), -row))[:count]
    largest = row[: parts * _PART].reshape(parts, _PART).max(axis=1)
    least = np.partition(largest, -count)[-count]  # at least `count` numbers are no smaller
    ids = np.flatnonzero(row >= least)
    return ids[np.lexsort((ids, -row[ids]))[:count]]
