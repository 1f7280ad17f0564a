"""What a request changes about the logits before its next token is chosen: penalties, a bias, no early end, a form.

A sequence has a `Shaping` only where its parameters ask for one; others pay nothing. It is read when a token is chosen
and changed when that token is kept: a step that fails in between leaves no trace.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.ipc.messages import SamplingParams
from reflex_runtime.llm.engine.constraint import Matcher

Row = npt.NDArray[np.float32]
_ROOM = 64  # different tokens that are counted before the arrays grow


class _Counts:
    """Tokens and how often each came, as arrays: what numpy needs to change a row of logits at once."""

    __slots__ = ("_at", "_ids", "_times")

    def __init__(self, tokens: Seq[int] = ()) -> None:
        """tokens: each came once."""
        first = list(dict.fromkeys(tokens))
        self._at = {token: at for at, token in enumerate(first)}
        self._ids = np.array([*first, *[0] * _ROOM], np.int64)
        self._times = np.ones(len(self._ids), np.float32)
        self._times[len(first) :] = 0.0

    def add(self, token: int) -> None:
        """It came once more."""
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._ids):
            self._ids, self._times = np.resize(self._ids, 2 * at), np.append(self._times, np.zeros(at, np.float32))
        self._ids[at] = token
        self._times[at] += 1.0

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: len(self._at)]

    @property
    def times(self) -> npt.NDArray[np.float32]:
        return self._times[: len(self._at)]


class Shaping:
    """What one sequence changes. Made by `shaping_of`."""

    __slots__ = ("_bias", "_biased", "_ends", "_known", "_output", "_params", "_sampled", "matcher")

    def __init__(
        self, params: SamplingParams, prompt: Seq[int], ends: Collection[int], matcher: Matcher | None = None
    ) -> None:
        self._params, self.matcher = params, matcher
        self._biased = np.array([token for token, _ in params.logit_bias], np.int64)
        self._bias = np.array([by for _, by in params.logit_bias], np.float32)
        self._ends = np.array(sorted(ends), np.int64)
        self._known = _Counts(prompt) if params.repetition_penalty != 1.0 else None
        self._output = _Counts() if params.presence_penalty or params.frequency_penalty else None
        self._sampled = 0

    def shape(self, row: Row) -> None:
        """Change the logits [vocab_size] of the next token, in place. Raises ProcessorError when none is left."""
        params, known, output = self._params, self._known, self._output
        if known is not None:
            own, by = row[known.ids], params.repetition_penalty
            row[known.ids] = np.where(own > 0.0, own / by, own * by)
        if output is not None:
            row[output.ids] -= params.frequency_penalty * output.times + params.presence_penalty
        if len(self._biased):
            row[self._biased] += self._bias
        early = self._sampled < params.min_tokens
        if early:
            row[self._ends] = -np.inf
        if self.matcher is not None:
            penalty = self.matcher.penalty()
            n = min(len(row), len(penalty))  # a model may have more rows than its tokenizer has tokens, or fewer
            row[:n] += penalty[:n]
            row[n:] = -np.inf
        if (early or self.matcher is not None) and row.max() == -np.inf:
            raise ProcessorError("no token is left: min_tokens forbids the end, the form of the output all others")

    @property
    def complete(self) -> bool:
        """Whether the output has its form, and nothing can follow."""
        return self.matcher is not None and self.matcher.complete

    def sampled(self, token: int) -> None:
        """The sequence has a new token. Raises ProcessorError for one that its form does not allow."""
        self._sampled += 1
        if self.matcher is not None:
            self.matcher.sampled(token)
        for counts in (self._known, self._output):
            if counts is not None:
                counts.add(token)


def shaping_of(
    params: SamplingParams, prompt: Seq[int], ends: Collection[int], matcher: Matcher | None = None
) -> Shaping | None:
    """What a sequence with this prompt changes; None: nothing. ends: tokens that end it. matcher: of its constraint."""
    asks = (
        matcher is not None
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or (params.min_tokens and ends)
    )
    return Shaping(params, prompt, ends, matcher) if asks else None
