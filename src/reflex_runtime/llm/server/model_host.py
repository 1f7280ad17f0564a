"""What runs the model of a server: what it is given, and what the server asks of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry

from reflex_runtime.ipc.engine import OutputStream
from reflex_runtime.ipc.messages import Constraint, GenerateParams, SamplingParams
from reflex_runtime.llm.engine.limits import Limits
from reflex_runtime.llm.engine.logits_processors import Matcher
from reflex_runtime.llm.engine.tokenizer import Texts
from reflex_runtime.observe.journal_writer import turn_all
from reflex_runtime.observe.live import LiveProcess
from reflex_runtime.run.audience import Sink
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
