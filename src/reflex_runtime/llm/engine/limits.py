"""The limits of a model, which a request is measured against before it is queued, and the sampling that the model's
authors chose for what a request does not say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reflex_runtime.core.errors import ConfigError, TooLarge
from reflex_runtime.ipc.messages import SamplingParams
from reflex_runtime.run.model_files import read_object

GENERATION_FILE: Final = "generation_config.json"


AUTHORS_SAY: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's authors may say of how it is sampled, for requests that do not; else it is the OpenAI API's own."""


def authors_said(defaults: SamplingParams) -> str:
    """Those that differ from the API's own."""
    plain = SamplingParams()
    said = ((name, getattr(defaults, name)) for name in AUTHORS_SAY)
    return ", ".join(f"{name} {value:g}" for name, value in said if value != getattr(plain, name))


def sampling_defaults(directory: Path | str) -> SamplingParams:
    """Of a model directory. ConfigError that names the file, the key and the range for a value that cannot be.

    `do_sample` and `max_new_tokens` are for other programs: in the OpenAI API a request says both.
    """
    file = Path(directory) / GENERATION_FILE
    said = read_object(file) if file.is_file() else {}
    found = {name: said[name] for name in AUTHORS_SAY if said.get(name) is not None}
    for name, value in found.items():
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ConfigError(f"{file}: {name}={value!r:.200}: must be a {'whole ' if whole else ''}number")
    if found.get("top_k", 0) < 0:  # -1 is off, too, in some files
        found["top_k"] = 0
    found |= {name: float(value) for name, value in found.items() if name != "top_k"}
    try:
        return SamplingParams(**found)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message.removeprefix('SamplingParams.')}") from None


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

    @property
    def longest(self) -> int:
        """Most tokens of a request, as the model and the cache allow."""
        return min(self.max_model_len, self.cache_tokens + 1)  # the last token is not kept

    def room(self, prompt_tokens: int) -> int:
        """Most tokens of output behind a prompt of this length; at least 1, which may still not fit."""
        return max(1, self.longest - prompt_tokens)

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
        self._check_ids("prompt: token ids", ids)  # last: it looks at each

    def check_sampling(self, params: SamplingParams) -> None:
        """Raises ConfigError for a token id among the parameters that the model does not have."""
        self._check_ids("stop_token_ids: token ids", params.stop_token_ids)
        self._check_ids("logit_bias: token ids", [token for token, _ in params.logit_bias])

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            bounds = f"[0, {self.vocab_size - 1}]"
            raise ConfigError(f"{what} must be in {bounds}, not {min(ids)} to {max(ids)}")
