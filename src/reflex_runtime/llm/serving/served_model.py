"""The model of `reflex serve MODEL_DIR`: its state, settings and series, in this process or others.

States: initializing → loading → warming → ready; `warmup_failed`; `degraded` while a step hangs; `restarting` while no
runtime process is there; `draining`. The object exists, and has a state, before the model is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest

from reflex_runtime.config import LLMServeConfig
from reflex_runtime.core.errors import Closed, ConfigError
from reflex_runtime.drivers.audience import Sink
from reflex_runtime.drivers.in_thread import in_thread
from reflex_runtime.llm.sampling_defaults import SamplingDefaults
from reflex_runtime.llm.serving.generation import Generator
from reflex_runtime.llm.serving.requests.refusals import ModelNotFound
from reflex_runtime.telemetry.processes import LiveProcess
from reflex_runtime.telemetry.series import Counter
from reflex_runtime.telemetry.tracing import StepSpans, spans_of
from reflex_runtime.web.errors import NotReady
from reflex_runtime.web.json import printable

if TYPE_CHECKING:  # a runtime process loads this module and serves no HTTP
    from reflex_runtime.web.supervisor import Lives
    from reflex_runtime.web.watchers import Fold

log = logging.getLogger("reflex.server")

UNTOLD = 1.0  # seconds at the end in which answers that are made are sent


class ModelHost(Protocol):
    """Where a model runs: in this process (`LocalModel`), or in runtime processes (`Workers`)."""

    @property
    def generator(self) -> Generator[Any]: ...

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

    config: LLMServeConfig
    name: str
    registry: CollectorRegistry

    def reached(self, state: str) -> None:
        """It is `loading`, or `warming`."""

    def lost(self) -> None:
        """The model is lost for good."""


Open = Callable[[Opening], Awaitable[ModelHost]]


class ServedModel:
    """One model. `start` returns when it is ready or has failed.

    name: by which clients ask for it. open: makes the host, called once; what it raises means that the model could not
    be loaded. on_fatal: called on the loop when the model is lost for good. lives: what the server's supervisor knows,
    where there is one. defaults: how it is sampled where a request does not say it.
    """

    def __init__(
        self,
        config: LLMServeConfig,
        name: str,
        open: Open,
        on_fatal: Callable[[], None] | None = None,
        lives: Lives | None = None,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        self.config, self.name, self.lives = config, name, lives
        self.defaults = defaults or SamplingDefaults()
        self.created = int(time.time())
        self.error = ""
        self.unusable = False  # the directory or an option is wrong: there is nothing to wait for
        self.registry = CollectorRegistry()
        self.host: ModelHost | None = None
        self.on_drain: list[Callable[[], None]] = []
        self.spans = spans_of(config.otel, config.otel_sample, self.registry, StepSpans)
        self._sinks: list[Sink] = [] if self.spans is None else [self.spans]
        self._open, self._on_fatal = open, on_fatal
        self._state = "initializing"
        self._clean = True
        self._answers = Counter(
            "reflex_openai_requests_total", "Answers over HTTP", ("path", "status"), registry=self.registry
        )

    @property
    def state(self) -> str:
        return self.host.state if self._state == "ready" and self.host is not None else self._state

    @property
    def generator(self) -> Generator[Any]:
        """The generator. Raises if there is none, or if it accepts no more requests."""
        if self._state == "draining":
            raise Closed("the server is shutting down", retry_after=1.0)
        if self._state == "warmup_failed":
            raise NotReady(f"the model could not be loaded: {self.error}", state=self._state)
        if self.host is None or self._state != "ready":
            raise NotReady(f"the server is {self._state}", retry_after=1.0, state=self._state)
        return self.host.generator

    async def start(self) -> None:
        """Load, warm up, serve. A failure ends in the state `warmup_failed`, with its error.

        Cancelling does not end the thread that loads: reading a model cannot be interrupted.
        """
        self._clean = False
        try:
            self.host = await self._open(self)
        except Exception as error:
            self._state = "warmup_failed"
            self.unusable = isinstance(error, ConfigError)  # the message says what to mend, so no stack is logged
            self.error = str(error) if self.unusable else f"{type(error).__name__}: {error}"
            if not self.unusable:
                log.exception("the model could not be started")
        else:
            self._state = "ready"
            for sink in self._sinks:
                self.host.add_sink(sink)
        self._clean = True

    def add_sink(self, sink: Sink) -> None:
        """Call it with the events of the model's batches, from now on or from its start on."""
        self._sinks.append(sink)
        if self.host is not None:
            self.host.add_sink(sink)

    def remove_sink(self, sink: Sink) -> None:
        """It gets no more events."""
        self._sinks.remove(sink)
        if self.host is not None:
            self.host.remove_sink(sink)

    def reached(self, state: str) -> None:
        """How far the host has come."""
        self._state = state

    def lost(self) -> None:
        """The host is lost for good."""
        if self._on_fatal is not None:
            self._on_fatal()

    @property
    def writes_files(self) -> bool:
        """Whether it writes a trace."""
        return bool(self.config.trace)

    def turn_files(self) -> None:
        """See `ModelHost.turn`."""
        if self.host is not None:
            self.host.turn()

    def drain(self) -> None:
        """The server is ending: refuse new requests."""
        if self._state != "warmup_failed":
            self._state = "draining"
        for tell in self.on_drain:
            tell()

    async def stop(self, until: float, answered: Callable[[], Awaitable[None]]) -> bool:
        """Finish open requests until then, end the rest. Returns whether nothing is left running."""
        if self.host is not None:
            self._clean = await self.host.close(max(0.0, until - asyncio.get_running_loop().time()))
        if self.spans is not None:
            with suppress(TimeoutError):  # a span ends with its answer
                async with asyncio.timeout(UNTOLD):
                    await answered()
            await in_thread(self.spans.close)
        return self._clean

    # -- what is asked of it -------------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        state = self.state
        body: dict[str, Any] = {
            "status": "ok" if state == "ready" else state,
            "state": state,
            "model": self.name,
            "model_loaded": self.host is not None and self._state in ("ready", "draining"),
        }
        if self.host is not None:
            body |= self.host.health()
        if self.lives is not None:
            body |= {"restarts": self.lives.restarts, "last_exit": self.lives.last_exit}
        if self.error:
            body["error"] = self.error
        return body

    async def status(self) -> dict[str, Any]:
        """The body of /status: that of /health, and the state of the requests."""
        return self.health() | (await self.host.status() if self.host is not None else {})

    def check_name(self, name: str) -> None:
        """Raises ModelNotFound where a request asks for another model."""
        if name != self.name:
            raise ModelNotFound(printable(f"the model {name[:200]!r} does not exist; {self.name!r} does"))

    def card(self) -> dict[str, Any]:
        """The model as /v1/models tells it."""
        card: dict[str, Any] = {"id": self.name, "object": "model", "created": self.created, "owned_by": "reflex"}
        if self.host is not None:
            card["max_model_len"] = self.host.generator.limits.max_model_len
            card["sampling_defaults"] = asdict(self.defaults)
        return card

    async def metrics(self) -> bytes:
        """Prometheus text."""
        more = await self.host.metrics() if self.host is not None else b""
        return generate_latest(self.registry) + more

    def answered(self, path: str, status: int) -> None:
        """The server answered a request. path: of a known endpoint, so that there are few."""
        self._answers.labels(path, str(status)).inc()
