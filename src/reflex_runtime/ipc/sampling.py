"""How output is sampled: declared once for the wire (`GenerateParams`) and for the engine (`Sequence`)."""

from __future__ import annotations

from math import isfinite
from typing import Any, Self

import msgspec

from reflex_runtime.core.errors import ConfigError

MOST_LOGPROBS = 20
MOST_STOPS = 16


class SamplingParams(msgspec.Struct, frozen=True):
    """How output is sampled, and when it ends. Raises ConfigError that names the field, its value and its range.

    max_tokens: most tokens of output. temperature: 0 takes the likeliest token. top_p: sample from the likeliest tokens
    that together have this probability. top_k: from the k likeliest; 0 is off. seed: same seed, same draws; None draws
    one. stop: texts before which the output ends. stop_token_ids: ids with which it ends. ignore_eos: go on after the
    model's own end. logprobs: how many alternatives to report for each token; None reports nothing, 0 the token's own.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "must be >= 1 token")
        temperature = self.temperature
        _check("temperature", temperature, isfinite(temperature) and 0.0 <= temperature <= 2.0, "must be in [0, 2]")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "must be in (0, 1]")
        _check("top_k", self.top_k, self.top_k >= 0, "must be >= 0, where 0 is off")
        _check("seed", self.seed, self.seed is None or -(1 << 63) <= self.seed < 1 << 64, "must fit 64 bits")
        well = len(self.stop) <= MOST_STOPS and all(0 < len(text) <= 1000 for text in self.stop)
        _check("stop", self.stop, well, f"must be at most {MOST_STOPS} texts of 1 to 1000 characters")
        logprobs = self.logprobs
        well = logprobs is None or 0 <= logprobs <= MOST_LOGPROBS
        _check("logprobs", logprobs, well, f"must be in [0, {MOST_LOGPROBS}]")

    @classmethod
    def greedy(cls, max_tokens: int = 16, **more: Any) -> Self:
        """Always the likeliest token."""
        return cls(max_tokens=max_tokens, temperature=0.0, **more)


def _check(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(f"SamplingParams.{name}={value!r}: {rule}")
