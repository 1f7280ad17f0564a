"""Engines for runs of the same prompts: on the machine's clock, or in virtual time.

In virtual time the clock moves only by a step's predicted time, so that a run is the same on every machine, and many
runs take no longer than their scheduling decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.events import Event
from reflex_runtime.llm.engine.llm_engine import LLMEngine

if TYPE_CHECKING:
    from reflex_runtime.llm.engine.tokenizer import Tokenizer
    from reflex_runtime.llm.runners.runner import Runner, Step

StepSeconds = Callable[[float], float]  # of a step with so many tokens


class Mute:
    """A runner without a model, for runs in which only the schedule matters: its answer is always token 0."""

    def __init__(self, like: Runner) -> None:
        self.vocab_size, self.block_size, self.num_blocks = like.vocab_size, like.block_size, like.num_blocks
        self.max_model_len, self.name, self.adapters = like.max_model_len, "mute", like.adapters
        self._logits = np.zeros((0, 2), np.float32)

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        n = len(step.past_lens if step.rows is None else step.rows)
        if len(self._logits) < n:
            self._logits = np.zeros((n, 2), np.float32)
        return self._logits[:n]

    def close(self) -> None:
        return


class Kept:
    """A runner that several engines use one after the other: closing an engine leaves it open."""

    def __init__(self, runner: Runner) -> None:
        self.vocab_size, self.block_size, self.num_blocks = runner.vocab_size, runner.block_size, runner.num_blocks
        self.max_model_len, self.name, self.forward = runner.max_model_len, runner.name, runner.forward
        self.adapters = runner.adapters

    def close(self) -> None:
        return


class Paced(Kept):
    """A kept runner in virtual time: `now` moves by the predicted seconds of each step."""

    def __init__(self, runner: Runner, takes: StepSeconds) -> None:
        super().__init__(runner)
        self._runner, self._takes, self._now = runner, takes, 0.0
        self.forward = self._paced

    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def _paced(self, step: Step) -> npt.NDArray[np.float32]:
        logits = self._runner.forward(step)
        self._now += self._takes(len(step.token_ids))
        return logits


@dataclass(frozen=True, slots=True)
class Engines:
    """Starts engines on one runner, one after the other.

    takes: predicted seconds of a step with so many tokens; None measures. settings: keywords of `LLMEngine`.
    """

    runner: Runner
    tokenizer: Tokenizer
    takes: StepSeconds | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, sinks: Iterable[Callable[[Event], object]] = (), **changes: Any
    ) -> tuple[LLMEngine, Callable[[], float]]:
        """An engine and its clock, in seconds. changes: settings that differ in this engine. Raises ConfigError."""
        settings = {**self.settings, **changes}
        if self.takes is None:
            return LLMEngine(Kept(self.runner), self.tokenizer, sinks=sinks, **settings), time.monotonic
        paced = Paced(self.runner, self.takes)
        return LLMEngine(paced, self.tokenizer, sinks=sinks, clock=paced.now, **settings), paced.now

    def mute(self, takes: StepSeconds) -> Engines:
        """The same in virtual time and without a model: the schedule depends on lengths and prefixes alone."""
        return replace(self, runner=Mute(self.runner), takes=takes)
