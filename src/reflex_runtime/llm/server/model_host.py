"""What runs the model of a server: what it is given, what the server asks of it, and the model in this process.

`reflex serve` has a `LocalModel` when it runs without workers, and every runtime process has one behind its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from prometheus_client import CollectorRegistry

from reflex_runtime.ipc.engine import OutputStream
from reflex_runtime.ipc.messages import Constraint, GenerateParams, SamplingParams
from reflex_runtime.llm.engine.generation import GenerationRuntime
from reflex_runtime.llm.engine.limits import Limits
from reflex_runtime.llm.engine.logits_processors import Matcher
from reflex_runtime.llm.engine.processor import EngineConfig, LLMProcessor
from reflex_runtime.llm.engine.series import EngineSeries
from reflex_runtime.llm.engine.tokenizer import Texts, Tokenizer
from reflex_runtime.llm.runners.runner import Runner, Step
from reflex_runtime.observe.journal_writer import JournalWriter, turn_all
from reflex_runtime.observe.live import LiveProcess
from reflex_runtime.observe.series import STREAMS, SeriesSet
from reflex_runtime.run.audience import Sink
from reflex_runtime.run.process import in_thread
from reflex_runtime.settings import LLMServeConfig

if TYPE_CHECKING:  # a runtime process loads this module and serves no HTTP
    from reflex_runtime.web.watchers import Fold


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The model that is to be served.

    name: by which clients ask for it. directory: of its files. adapters: names of its LoRA adapters. defaults: how it
    is sampled where a request does not say it.
    """

    name: str
    config: LLMServeConfig
    directory: Path = Path()
    adapters: tuple[str, ...] = ()
    defaults: SamplingParams = field(default_factory=SamplingParams)


class ModelHost(Protocol):
    """Generates tokens where the model runs: in this process (`LocalModel`), or in runtime processes (`Workers`).
    texts: tokenises prompts. queueing: see `in_order`. What stands here is so where nothing runs elsewhere."""

    texts: Texts
    queueing: asyncio.Lock

    @property
    def limits(self) -> Limits:
        """Those of the model, by which requests are checked."""

    async def compiled(self, constraint: Constraint | None) -> Matcher | None:
        """For `request`; None where there is no constraint, or it is compiled elsewhere. ConfigError for one that is
        none."""

    def request(self, prompt: Sequence[int], params: GenerateParams, matcher: Matcher | None = None) -> Any:
        """A request for `submit_alike`. matcher: what `compiled` returned for its constraint. Raises TooLarge,
        ConfigError."""

    def submit_alike(self, requests: Sequence[Any], bell: asyncio.Event) -> Sequence[OutputStream]:
        """Admit requests with the same prompt, which is computed once: all of them or none. Raises `Rejected`; where
        they are made elsewhere, their streams may end with it. bell: set whenever there is something to read."""

    @property
    def state(self) -> str:
        """`ready`, or the state that keeps it from answering."""

    def health(self) -> dict[str, Any]:
        """Its part of /health."""

    async def status(self) -> dict[str, Any]:
        """What /status has beyond /health."""
        return {}

    async def metrics(self) -> bytes:
        """Prometheus text of its series that are not in the registry given at `open`."""

    def add_sink(self, sink: Sink) -> None:
        """Call it with the events of its batches from now on."""

    def remove_sink(self, sink: Sink) -> None:
        """It gets no more events."""

    def fold(self) -> Fold | None:
        """What shows its batches to those who watch, where their events are not those that its sinks get."""
        return None

    def processes(self) -> list[LiveProcess]:
        """Processes beside the server's own."""
        return []

    def queues(self) -> dict[str, Any]:
        """What waits and runs, by group, as the scheduler's snapshot tells it."""

    def turn(self) -> None:
        """Go on in a new trace file; the old one is kept as FILE.1."""
        turn_all()

    async def close(self, drain: bool, timeout: float) -> bool:
        """Finish open requests within `timeout` seconds, end the rest. Returns whether nothing is left running."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a host gets when it is opened. registry: for its series. lost: called when the model is lost for good.
    reached: called with `loading`, and with `warming`."""

    plan: ModelPlan
    registry: CollectorRegistry
    lost: Callable[[], None] | None
    reached: Callable[[str], None] = lambda state: None


Open = Callable[[Opening], Awaitable[ModelHost]]
Load = Callable[[ModelPlan], tuple[Runner, Tokenizer]]


class LocalModel(GenerationRuntime, ModelHost):
    """The model in this process. Made by `opened`."""

    def __init__(self, processor: LLMProcessor, opening: Opening) -> None:
        super().__init__(processor, watchdog=opening.plan.config.watchdog_s, on_fatal=opening.lost)
        trace = opening.plan.config.trace
        self.trace = JournalWriter(trace, [processor.group]) if trace else None
        if self.trace is not None:
            self.add_sink(self.trace)
        self._holds = SeriesSet(STREAMS, opening.registry).counter("reflex_stream_holds_total")
        self.add_sink(EngineSeries(processor, lambda: self.waiting, opening.registry))

    @property
    def state(self) -> str:
        """degraded while a step hangs."""
        return "degraded" if self.hangs else "ready"

    def health(self) -> dict[str, Any]:
        processor, limits = self.processor, self.limits
        body = {
            "runner": processor.runner.name,
            "max_model_len": limits.max_model_len,
            "running": self.running,
            "waiting": self.waiting,
            "kv_cache_usage": round(processor.pool.usage, 6),
            "kv_cache_tokens": limits.cache_tokens,
            "hung_steps": self.batcher.device.hung,
        }
        if processor.config.speculate != "off" or processor.drafted:
            body["speculation"] = {"draft_tokens": processor.drafted, "accepted_tokens": processor.accepted}
        if self.trace is not None and self.trace.error is not None:
            body["trace_error"] = str(self.trace.error)
        return body

    def add_sink(self, sink: Sink) -> None:
        self.batcher.add_sink(sink)

    def remove_sink(self, sink: Sink) -> None:
        self.batcher.remove_sink(sink)

    def queues(self) -> dict[str, Any]:
        """Events without an answer are delivered first."""
        self.batcher.flush()
        groups: dict[str, Any] = self.batcher.device.input(lambda scheduler, _: scheduler.snapshot()["groups"])
        return groups

    def refresh(self) -> None:
        """Bring the series up to date."""
        self.batcher.flush()
        self._holds.value = float(self.holds)

    async def metrics(self) -> bytes:
        """Nothing beyond what is in the registry."""
        self.refresh()
        return b""

    async def close(self, drain: bool = True, timeout: float = 10.0) -> bool:
        clean = await super().close(drain, timeout)
        if self.trace is not None:
            self.trace.close()
        return clean


def opened(load: Load) -> Callable[[Opening], Awaitable[LocalModel]]:
    """How to open the model that `load` makes of its plan, in a thread of its own."""

    async def open(opening: Opening) -> LocalModel:
        opening.reached("loading")
        plan = opening.plan
        runner, tokenizer = await in_thread(partial(load, plan))
        same = {f.name: getattr(plan.config, f.name) for f in fields(EngineConfig) if f.name != "enable_prefix_caching"}
        config = EngineConfig(enable_prefix_caching=plan.config.prefix_caching, **same)
        processor = LLMProcessor(runner, tokenizer, config)
        opening.reached("warming")
        model = LocalModel(processor, opening)
        try:
            await model.start(lambda: warm_up(runner))
        except Exception:
            await model.close(False, 0.0)
            raise
        return model

    return open


def warm_up(runner: Runner) -> None:
    """Run steps of a few shapes, so that the first request does not wait for one-off work.

    They write to block 0, whose rows are written again before they are read.
    """
    whole = min(runner.block_size, runner.max_model_len)
    for past, new in ((0, whole - 1), (whole - 1, 1)):
        if new:
            ids, positions = np.zeros(new, np.int64), np.arange(past, past + new, dtype=np.int64)
            begins, table = np.array([0, new], np.int32), np.zeros(1, np.int32)
            runner.forward(Step(ids, positions, np.array([past], np.int32), begins, table, np.array([0, 1], np.int32)))
