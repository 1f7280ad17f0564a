"""How output is sampled: declared once for the wire (`GenerateParams`) and for the engine (`Sequence`)."""

from __future__ import annotations

from math import isfinite
from typing import Any, Literal, Self

import msgspec

from reflex_runtime.core.errors import ConfigError

MOST_LOGPROBS = 20
MOST_STOPS = 16
MOST_STOP_IDS = 256
MOST_BIASED = 1024
MOST_FORM = 200_000  # characters of a schema, expression or grammar


class Constraint(msgspec.Struct, frozen=True):
    """The form that an output must have. text: a JSON Schema, a regular expression, a JSON list of texts of which it is
    one, or a grammar in Lark's notation."""

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str

    def __post_init__(self) -> None:
        if not 0 < len(self.text) <= MOST_FORM:
            raise ConfigError(f"{self.kind}: has {len(self.text)} characters, must have 1 to {MOST_FORM}")


class SamplingParams(msgspec.Struct, frozen=True):
    """How output is sampled, and when it ends. Raises ConfigError that names the field, its value and its range.

    max_tokens: most tokens of output. temperature: 0 takes the likeliest token. top_p: sample from the likeliest tokens
    that together have this probability. top_k: from the k likeliest; 0 is off. min_p: from those that are at least this
    share as likely as the likeliest. seed: same seed, same draws; None draws one. stop: texts before which the output
    ends. include_stop: the output ends with the stop text, not before it. stop_token_ids: ids with which it ends.
    min_tokens: no end before so many tokens. ignore_eos: go on after the model's own end. logprobs: how many
    alternatives to report for each token, of the model's own distribution; None reports nothing, 0 the token's own.

    What changes the logits before a token is chosen: repetition_penalty divides those of tokens in the prompt or the
    output (multiplies, where negative); frequency_penalty is taken from those in the output once for each time,
    presence_penalty once; logit_bias, pairs of (id, number), is added. constraint: only tokens that fit remain.
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
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    constraint: Constraint | None = None

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
        _check("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "must be in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2.0 <= value <= 2.0, "must be in [-2, 2]")
        repetition = self.repetition_penalty
        _check("repetition_penalty", repetition, 0.01 <= repetition <= 100.0, "must be in [0.01, 100], where 1 is off")
        least, most = self.min_tokens, self.max_tokens
        _check("min_tokens", least, 0 <= least <= most, f"must be in [0, max_tokens={most}]")
        self._check_ids()

    def _check_ids(self) -> None:
        """Token ids are checked against a vocabulary where a model is known."""
        well = len(self.stop_token_ids) <= MOST_STOP_IDS and all(0 <= token < 1 << 31 for token in self.stop_token_ids)
        _check("stop_token_ids", self.stop_token_ids, well, f"must be at most {MOST_STOP_IDS} token ids")
        bias = self.logit_bias
        well = len(bias) <= MOST_BIASED and all(0 <= token < 1 << 31 and -100.0 <= by <= 100.0 for token, by in bias)
        _check("logit_bias", bias, well, f"must be at most {MOST_BIASED} token ids, each with a number in [-100, 100]")

    @classmethod
    def greedy(cls, max_tokens: int = 16, **more: Any) -> Self:
        """Always the likeliest token."""
        return cls(max_tokens=max_tokens, temperature=0.0, **more)


def _check(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(f"SamplingParams.{name}={value!r:.200}: {rule}")
