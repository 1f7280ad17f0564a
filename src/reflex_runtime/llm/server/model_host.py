"""What runs the model of a server: what it is given, and what the server asks of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry

from reflex_runtime.llm.engine.generation import Generator
from reflex_runtime.llm.engine.generation_options import SamplingDefaults
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
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


class ModelHost(Protocol):
    """Where the model runs: in this process (`LocalModel`), or in runtime processes (`Workers`)."""

    @property
    def generator(self) -> Generator[Any]:
        """What generates."""

    @property
    def state(self) -> str:
        """`ready`, or the state that keeps it from answering."""

    def health(self) -> dict[str, Any]:
        """Its part of /health."""

    async def status(self) -> dict[str, Any]:
        """Its part of /status: waiting and running requests, their places, and statistics of batches."""

    async def metrics(self) -> bytes:
        """Prometheus text of its series that are not in the registry given at `open`."""

    def add_sink(self, sink: Sink) -> None:
        """Call it with the events of its batches from now on."""

    def remove_sink(self, sink: Sink) -> None:
        """It gets no more events."""

    def fold(self) -> Fold | None:
        """What shows its batches to those who watch, where their events are not those that its sinks get."""

    def processes(self) -> list[LiveProcess]:
        """Processes beside the server's own."""

    def queues(self) -> dict[str, Any]:
        """What waits and runs, by group, as the scheduler's snapshot tells it."""

    def turn(self) -> None:
        """Go on in a new trace file; the old one is kept as FILE.1."""

    async def close(self, timeout: float) -> bool:
        """Finish open requests within `timeout` seconds, end the rest. Returns whether nothing is left running."""


class Opening(Protocol):
    """What a host gets when it is opened. registry: for its series."""

    plan: ModelPlan
    registry: CollectorRegistry

    def reached(self, state: str) -> None:
        """It is `loading`, or `warming`."""

    def lost(self) -> None:
        """The model is lost for good."""


Open = Callable[[Opening], Awaitable[ModelHost]]
