"""One request's tokens: known, computed, and ready to send; and the limits of a request.

Two counters are the whole state: `num_tokens` tokens are known (the prompt's and the sampled ones), and the cache has
keys and values of the first `num_computed_tokens`. Prefill and decode are no states: a step computes some of the
difference, and when all are computed the sequence gets a new token. Preemption sets the second counter to 0; the known
tokens stay.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from reflex_runtime.core.errors import ConfigError, ReflexError, TooLarge
from reflex_runtime.ipc.messages import MOST_LOGPROBS, SamplingParams, ScoredToken, TokenOutput
from reflex_runtime.llm.engine.detokenizer import Detokenizer
from reflex_runtime.llm.engine.logits_processors import Matcher, Shaping
from reflex_runtime.llm.engine.ngram_proposer import Lookup, Rates

STOP, LENGTH = "stop", "length"


@dataclass(frozen=True, slots=True)
class Limits:
    """vocab_size: ids below it are tokens. max_model_len: most tokens of a request in the model's context. The cache
    has num_blocks blocks of block_size tokens."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.num_blocks * self.block_size

    @property
    def longest(self) -> int:
        """Most tokens of a request that the model and the cache allow."""
        return min(self.max_model_len, self.cache_tokens + 1)  # the last token is never stored

    def room(self, prompt_tokens: int) -> int:
        """Most output tokens for a prompt of this length; at least 1, even if that does not fit."""
        return max(1, self.longest - prompt_tokens)

    def check(self, ids: Seq[int], max_tokens: int) -> None:
        """Raises TooLarge, with the limit, for a request that can never run; ConfigError for an invalid prompt."""
        if not ids:
            raise ConfigError("prompt: is empty; at least one token is needed")
        details = {"prompt_tokens": len(ids), "max_tokens": max_tokens}
        size = f"{len(ids)} prompt tokens and {max_tokens} of the answer"
        if len(ids) + max_tokens > self.max_model_len:
            longest = self.max_model_len
            raise TooLarge(f"the model's context holds {longest} tokens, not {size}", max_model_len=longest, **details)
        blocks = -(-(len(ids) + max_tokens - 1) // self.block_size)
        if blocks > self.num_blocks:
            why = f"{size} take {blocks} blocks of {self.block_size}, the cache has {self.num_blocks}"
            raise TooLarge(why, cache_tokens=self.cache_tokens, **details)
        self._check_ids("prompt", ids)  # last, because it compares each id

    def check_sampling(self, params: SamplingParams) -> None:
        """Raises ConfigError for a token id among the parameters that the model does not have."""
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", [token for token, _ in params.logit_bias])

    def _check_ids(self, what: str, ids: Seq[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(one for one in ids if not 0 <= one < self.vocab_size)
            raise ConfigError(f"{what}: token id {wrong}: must be in [0, {self.vocab_size - 1}]")


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of a request. finish_reason: `stop`, `length`, or the code of `error`. cached_tokens: prompt tokens
    found in the prefix cache. error: why it ended without a full answer; the tokens until then are included.
    logprobs: those of the output's tokens, if requested; prompt_logprobs: those of the prompt's from the second on."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[ScoredToken, ...]
    cached_tokens: int
    error: ReflexError | None = None
    prompt_logprobs: tuple[ScoredToken, ...] = ()


class Sequence:
    """The payload of a request: its tokens, its blocks, its text.

    Between steps `BlockPool` changes it, during a step `LLMProcessor`. The driver orders the two, so no lock is needed.
    traceparent: of the request's span, "" if that is not recorded. draft: guesses of the next tokens from `lookup`; a
    step may compute some of them after the last known token.
    """

    __slots__ = (
        "_longest", "_pieces", "_stream", "adapter", "alternatives", "blocks", "cached_tokens", "choices",
        "digests", "draft", "eos", "finish_reason", "lookup", "num_computed_tokens", "num_prompt_tokens", "params",
        "prompt_choices", "published", "scores_from", "seed", "shaping", "tokens", "traceparent",
    )  # fmt: skip

    def __init__(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        detokenizer: Detokenizer,
        eos: frozenset[int] = frozenset(),
        matcher: Matcher | None = None,
        rates: Rates | None = None,
    ) -> None:
        """matcher: of the constraint in params. rates: of the guesses of all sequences; None: no guesses."""
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(self.tokens)
        self._longest = self.num_prompt_tokens + params.max_tokens
        self.num_computed_tokens = 0
        self.cached_tokens: int | None = None  # set in its first step, not again after a preemption
        self.params = params
        self.eos = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        self.seed = secrets.randbits(64) if params.seed is None else params.seed % (1 << 64)
        changes = (
            matcher is not None
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or params.logit_bias
            or (params.min_tokens and self.eos)
        )
        self.shaping = Shaping(params, self.tokens, self.eos, matcher) if changes else None
        self.blocks: list[int] = []
        self.digests: list[bytes] = []  # of its full blocks, each computed from the one before; grows with `tokens`
        self.published = 0  # blocks of `blocks` in the prefix cache
        self.choices: list[ScoredToken] = []  # its output tokens, if logprobs are requested
        self.scores_from: int | None = None  # the position before the next token to be scored; see `score`
        self.alternatives = 0
        self.prompt_choices: list[ScoredToken] = []  # of the prompt's tokens from the second on, so far
        self.finish_reason: str | None = None
        self.traceparent = ""
        self.adapter = 0  # the number of its adapter, 0 for none
        self.draft: list[int] = []
        self.lookup = None if rates is None else Lookup(self.tokens, rates)
        self._stream = detokenizer.stream(self.tokens, params.stop, params.include_stop)
        self._pieces: list[str] = []

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the output."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.num_prompt_tokens :])

    @property
    def text(self) -> str:
        """The output text that is ready to send."""
        return "".join(self._pieces)

    def score(self, alternatives: int = 0) -> None:
        """Report log probabilities of the prompt's own tokens, each with so many of the likeliest. Raises ConfigError
        for more than an output may have.

        Call it before the sequence runs. The sequence then uses no cached blocks, because they have no logits.
        """
        if not 0 <= alternatives <= MOST_LOGPROBS:
            raise ConfigError(f"prompt_logprobs={alternatives!r}: must be in [0, {MOST_LOGPROBS}]")
        self.scores_from, self.alternatives = (0 if self.num_prompt_tokens > 1 else None), alternatives

    def scored(self, choices: Seq[ScoredToken]) -> None:
        """Add the next tokens of the prompt that a step has scored."""
        self.prompt_choices += choices
        done = len(self.prompt_choices)
        self.scores_from = done if done < self.num_prompt_tokens - 1 else None

    def append(self, choice: ScoredToken) -> TokenOutput:
        """Add a sampled token; the sequence may end with it."""
        token, stream = choice.token_id, self._stream
        held = stream.held
        if self.shaping is not None:
            self.shaping.sampled(token)
        self.tokens.append(token)
        if self.lookup is not None:
            self.lookup.follow(token)
        if self.params.logprobs is not None:
            self.choices.append(choice)
        if token in self.eos:
            self.finish_reason, shown = STOP, stream.end()
        else:
            shown = stream.feed(token, self.num_output_tokens >= self.params.min_tokens)
            if stream.stopped:
                self.finish_reason = STOP
            elif self.shaping is not None and self.shaping.complete:
                self.finish_reason, shown = STOP, shown + stream.end()
            elif len(self.tokens) >= self._longest:
                self.finish_reason, shown = LENGTH, shown + stream.end()
        if shown:
            self._pieces.append(shown)
        return TokenOutput(shown, token, choice.logprob, choice.top, held, self.finish_reason)

    def computed(self, tokens: int) -> None:
        """Count known tokens that a step has computed."""
        self.num_computed_tokens += tokens
        if self.lookup is not None and self.num_output_tokens == 0:
            self.lookup.learn(min(self.num_computed_tokens, self.num_prompt_tokens))

    def guess(self) -> tuple[float, ...]:
        """Set `draft` to guesses; returns for each the chance that it and all before it are right. max_tokens bounds
        them: the very last token is never computed."""
        if self.lookup is None:
            return ()
        self.draft, chances = self.lookup.guess(self._longest - len(self.tokens) - 1)
        return chances
