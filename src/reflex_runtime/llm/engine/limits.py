"""What a model can hold: what a request is measured against before it is queued, here or in another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reflex_runtime.core.errors import ConfigError, TooLarge
from reflex_runtime.ipc.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """vocab_size: ids below it are tokens. max_model_len: tokens of one request. num_blocks of block_size tokens: the
    cache."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.num_blocks * self.block_size

    def room(self, prompt_tokens: int) -> int:
        """Most tokens of output behind a prompt of this length; at least 1, which may still not fit."""
        return max(1, min(self.max_model_len, self.cache_tokens + 1) - prompt_tokens)

    def check(self, ids: Sequence[int], max_tokens: int) -> None:
        """Raises TooLarge for what could never run, naming the limit; ConfigError for a prompt that is none."""
        if not ids:
            raise ConfigError("prompt: is empty; at least one token is needed")
        told = {"prompt_tokens": len(ids), "max_tokens": max_tokens}
        asked = f"{len(ids)} prompt tokens and max_tokens={max_tokens}"
        if len(ids) + max_tokens > self.max_model_len:
            longest = self.max_model_len
            raise TooLarge(f"the model's context holds {longest} tokens, not {asked}", max_model_len=longest, **told)
        blocks = -(-(len(ids) + max_tokens - 1) // self.block_size)
        if blocks > self.num_blocks:
            size, there = self.block_size, self.num_blocks
            raise TooLarge(
                f"{asked} take {blocks} blocks of {size}, the cache has {there}", cache_tokens=there * size, **told
            )
        if not (min(ids) >= 0 and max(ids) < self.vocab_size):  # last: it looks at each
            bounds = f"[0, {self.vocab_size - 1}]"
            raise ConfigError(f"prompt: token ids must be in {bounds}, not {min(ids)} to {max(ids)}")

    def check_draft(self, ids: Sequence[int]) -> None:
        """Raises ConfigError for a draft that no output of this model can be.

        Its tokens do not count among those that may wait (`max_queued_tokens`): they are no work by themselves, and
        what is computed of them is bounded step by step. Their memory, some 40 bytes a token, is bounded by this check
        and by the requests that may wait.
        """
        if len(ids) > self.max_model_len:
            raise ConfigError(f"draft_token_ids: {len(ids)} tokens; the model's context holds {self.max_model_len}")
        if not (min(ids) >= 0 and max(ids) < self.vocab_size):
            bounds = f"[0, {self.vocab_size - 1}]"
            raise ConfigError(f"draft_token_ids: must be in {bounds}, not {min(ids)} to {max(ids)}")

    def check_sampling(self, params: SamplingParams) -> None:
        """Raises ConfigError for a token id among the parameters that the model does not have."""
        named = ("stop_token_ids", params.stop_token_ids), ("logit_bias", [token for token, _ in params.logit_bias])
        for name, ids in named:
            if ids and max(ids) >= self.vocab_size:
                raise ConfigError(f"{name}: token ids must be in [0, {self.vocab_size - 1}], not {max(ids)}")
