"""Runs of prompts for `reflex trace`: the real engine and scheduler, on the toy, on a model, or on no model at all.

Times are a model's or the machine's. With a step-time model the clock stands still but for a step's predicted time, so
that a run is the same on every machine, and a search over settings takes no longer than deciding them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reflex_runtime.config import one_line
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.events import BatchFinished, BatchScheduled, Event, RequestProgressed, RequestSettled
from reflex_runtime.core.request import Priority
from reflex_runtime.llm.engine import LLMEngine
from reflex_runtime.llm.sequence import RequestOutput, SamplingParams
from reflex_runtime.llm.toy import ByteTokenizer, ToyRunner
from reflex_runtime.sim.clock import JumpingClock

if TYPE_CHECKING:
    from reflex_runtime.llm.runner import Runner, Step
    from reflex_runtime.llm.tokenizer import Tokenizer

Sink = Callable[[Event], object]


class Prompt(NamedTuple):
    """What is asked, and when. max_tokens: of output, exactly. arrives: steps made before."""

    name: str
    text: str
    max_tokens: int
    arrives: int = 0
    priority: Priority = Priority.DEFAULT


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds that a step takes: a fixed part, and one for each of its tokens."""

    fixed: float
    per_token: float

    def __call__(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens

    def __str__(self) -> str:
        return f"{self.fixed * 1e3:.4g} ms + {self.per_token * 1e3:.4g} ms a token"

    @classmethod
    def parse(cls, text: str) -> StepTime:
        """Read `--step-ms`: A or A+B, milliseconds."""
        found = re.fullmatch(r"([0-9]*\.?[0-9]+)(?:\+([0-9]*\.?[0-9]+)(?:\*tokens)?)?", text.replace(" ", ""))
        if found is not None:
            fixed, per_token = float(found[1]), float(found[2] or 0.0)
            if fixed + per_token > 0.0 and max(fixed, per_token) <= 60_000.0:
                return cls(fixed / 1e3, per_token / 1e3)
        raise ConfigError(
            f"--step-ms={one_line(text)}: must be A, A+B or `measured`: A ms a step, B ms a token, each in [0, 60000] "
            "and not both 0"
        )

    @classmethod
    def fit(cls, steps: Iterable[tuple[float, float]]) -> StepTime:
        """Through measured (tokens, seconds), by least squares; neither part is negative."""
        tokens, seconds = np.array(list(steps), dtype=np.float64).T
        spread = tokens - tokens.mean()
        slope = float((spread * seconds).sum() / (spread**2).sum()) if spread.any() else 0.0
        slope = max(0.0, slope)
        fixed = float(seconds.mean() - slope * tokens.mean())
        if fixed < 0.0:
            fixed, slope = 0.0, float((tokens * seconds).sum() / (tokens**2).sum())
        return cls(fixed, slope)


class Mute:
    """A runner without a model, for runs in which only the schedule matters: whatever it is given, it says token 0."""

    def __init__(self, like: Runner) -> None:
        self.vocab_size, self.block_size, self.num_blocks = like.vocab_size, like.block_size, like.num_blocks
        self.max_model_len, self.name = like.max_model_len, "mute"
        self._logits = np.zeros((0, 2), np.float32)

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        n = len(step.past_lens)
        if len(self._logits) < n:
            self._logits = np.zeros((n, 2), np.float32)
        return self._logits[:n]

    def close(self) -> None:
        return


class Paced:
    """A runner whose steps take the time of a model on a clock that jumps. It does not close what it wraps."""

    def __init__(self, runner: Runner, clock: JumpingClock, takes: StepTime) -> None:
        self.vocab_size, self.block_size, self.num_blocks = runner.vocab_size, runner.block_size, runner.num_blocks
        self.max_model_len, self.name = runner.max_model_len, runner.name
        self._runner, self._clock, self._takes = runner, clock, takes

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        logits = self._runner.forward(step)
        self._clock.jump(self._clock.now() + self._takes(len(step.token_ids)))
        return logits

    def close(self) -> None:
        return


class Kept:
    """A runner that several engines use one after the other: closing an engine leaves it open."""

    def __init__(self, runner: Runner) -> None:
        self.vocab_size, self.block_size, self.num_blocks = runner.vocab_size, runner.block_size, runner.num_blocks
        self.max_model_len, self.name, self.forward = runner.max_model_len, runner.name, runner.forward

    def close(self) -> None:
        return


def load_runner(model: str, **cache: Any) -> tuple[Runner, Tokenizer]:
    """The toy, or what a model directory holds. cache: block_size, num_blocks, where they were asked for."""
    if not model:
        return ToyRunner(max_model_len=1 << 20, **cache), ByteTokenizer()
    from reflex_runtime.demo.scribe import model_directory
    from reflex_runtime.llm.load import load

    return load(model_directory(model), **cache)


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a run needs but the budget. takes: None measures. settings: further keywords of the engine."""

    runner: Runner
    tokenizer: Tokenizer
    prompts: Sequence[Prompt]
    takes: StepTime | None
    settings: dict[str, Any]

    def engine(self, sinks: Iterable[Sink] = (), **changes: Any) -> tuple[LLMEngine, Callable[[], float]]:
        """An engine, and its clock."""
        settings = self.settings | changes
        if self.takes is None:
            return LLMEngine(Kept(self.runner), self.tokenizer, sinks=sinks, **settings), time.monotonic
        clock = JumpingClock()
        paced = Paced(self.runner, clock, self.takes)
        return LLMEngine(paced, self.tokenizer, sinks=sinks, clock=clock.now, **settings), clock.now

    def mute(self, takes: StepTime) -> Setup:
        """The same without a model: the schedule is a matter of lengths and prefixes alone."""
        return Setup(Mute(self.runner), self.tokenizer, self.prompts, takes, self.settings)

    def drive(self, engine: LLMEngine) -> dict[str, RequestOutput]:
        """Run all prompts, each arriving when its step has come; their outputs by name."""
        todo = sorted(self.prompts, key=lambda p: p.arrives)[::-1]
        outputs: dict[str, RequestOutput] = {}
        made = 0
        while todo or engine.unfinished:
            if not engine.unfinished:
                made = max(made, todo[-1].arrives)  # nothing to run until the next one comes
            while todo and todo[-1].arrives <= made:
                prompt = todo.pop()
                params = SamplingParams.greedy(prompt.max_tokens, ignore_eos=True)
                engine.add_request(prompt.text, params, request_id=prompt.name, priority=prompt.priority)
            for output in engine.step():
                outputs[output.request_id] = output
            made += 1
        engine.close()
        return outputs


class Measured(NamedTuple):
    """One run in figures. Tokens per step; by request the step of its first token (from 1), seconds to it and the
    longest gap between its tokens; seconds in all."""

    budget: float
    tokens: list[int]
    first_step: list[int]
    first_token: list[float]
    gap: list[float]
    seconds: float
    elapsed: list[float]

    @property
    def wasted(self) -> float:
        """Share of the budget that no step used, 0 to 1."""
        return 1.0 - sum(self.tokens) / (self.budget * len(self.tokens))


def measure(setup: Setup, budget: int, **changes: Any) -> Measured:
    """Run the prompts under a budget and look at every event."""
    tokens: list[int] = []
    elapsed: list[float] = []
    newest: dict[str, float] = {}
    first: dict[str, tuple[int, float]] = {}
    gaps: dict[str, float] = {}

    def watch(event: Event) -> None:
        if isinstance(event, BatchScheduled):
            tokens.append(int(sum(event.batch.grants.values())))
        elif isinstance(event, BatchFinished):
            elapsed.append(event.elapsed)
        elif isinstance(event, RequestSettled) or (isinstance(event, RequestProgressed) and event.value is not None):
            name = event.ticket.id
            if name in first:
                gaps[name] = max(gaps[name], event.at - newest[name])
            else:
                first[name], gaps[name] = (len(tokens), event.at - event.ticket.arrived), 0.0
            newest[name] = event.at

    engine, clock = setup.engine([watch], max_num_batched_tokens=budget, **changes)
    started = clock()
    setup.drive(engine)
    names = [p.name for p in setup.prompts]
    return Measured(
        budget if budget < inf else sum(tokens),
        tokens,
        [first[n][0] for n in names],
        [first[n][1] for n in names],
        [gaps[n] for n in names],
        clock() - started,
        elapsed,
    )
