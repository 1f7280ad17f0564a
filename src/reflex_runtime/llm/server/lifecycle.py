"""The state of `reflex serve MODEL_DIR`: names, states and series of its model. It exists before the model is loaded.

States: initializing → loading → warming → ready; `warmup_failed`; `degraded` while a step hangs; `restarting` while
there is no runtime process; `draining`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest

from reflex_runtime.llm.engine.load import AUTHORS_SAY
from reflex_runtime.llm.server.model_host import ModelPlan, Open
from reflex_runtime.observe.live import Live, own_process
from reflex_runtime.observe.metrics import MODEL_SERVER, SeriesSet
from reflex_runtime.observe.tracing import spans_of
from reflex_runtime.run.audience import Sink
from reflex_runtime.run.process import in_thread
from reflex_runtime.version import __version__
from reflex_runtime.web.errors import NotFound
from reflex_runtime.web.fields import printable
from reflex_runtime.web.serve import Host
from reflex_runtime.web.supervisor import Parent
from reflex_runtime.web.watchers import Fold, Watchers

if TYPE_CHECKING:
    from reflex_runtime.llm.server.local_model import LocalModel
    from reflex_runtime.llm.server.workers import Workers

    ModelHost: TypeAlias = LocalModel | Workers  # generates tokens in this process, or in runtime processes

log = logging.getLogger("reflex.server")

NAMED = 20  # most names of models in an error
UNSENT = 1.0  # seconds to send the last answers; each ends its span


class ModelNotFound(NotFound):
    """No model of that name is served."""


class ServerState(Host):
    """The model of one server.

    open: loads the model; called once, and raises if the model cannot be loaded. parent: the supervisor, if there is
    one.
    """

    def __init__(self, plan: ModelPlan, open: Open, parent: Parent | None = None) -> None:
        super().__init__()
        self.plan, self.parent = plan, parent
        self.registry = CollectorRegistry()
        self.host: ModelHost | None = None
        self.spans = spans_of(plan.config.otel, self.registry, "steps")
        self._sinks: list[Sink] = [] if self.spans is None else [self.spans]
        self._adapters = {plan.name: "", **{f"{plan.name}:{adapter}": adapter for adapter in plan.adapters}}
        self._created = int(time.time())
        self._open = open
        self._answers = SeriesSet(MODEL_SERVER, self.registry)
        fold: Callable[[float], Fold] = Live
        if plan.config.workers:
            from reflex_runtime.llm.server.workers import WorkersLive

            fold = partial(WorkersLive, lambda: getattr(self.host, "lines", ()))
        self.watchers = Watchers(fold, self.add_sink, self.remove_sink, self.shown)
        self.on_drain.append(self.watchers.close)

    # -- names ---------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names that requests may use: the model's, and MODEL:ADAPTER for each adapter."""
        return list(self._adapters)

    def adapter(self, name: str) -> str:
        """The adapter of this name, "" for the model itself. Raises ModelNotFound."""
        found = self._adapters.get(name)
        if found is None:
            verb = "does" if len(self._adapters) == 1 else "do"
            names = ", ".join(map(repr, self.names[:NAMED])) + (", …" if len(self._adapters) > NAMED else "")
            raise ModelNotFound(printable(f"the model {name[:200]!r} does not exist; {names} {verb}"))
        return found

    def card(self, name: str) -> dict[str, Any]:
        """The entry of /v1/models for this name. Raises ModelNotFound."""
        card: dict[str, Any] = {"id": name, "object": "model", "created": self._created, "owned_by": "reflex"}
        card |= {"root": self.plan.name, "parent": self.plan.name if self.adapter(name) else None}
        if self.host is not None:
            card["max_model_len"] = self.host.limits.longest
            card["sampling_defaults"] = {name: getattr(self.plan.defaults, name) for name in AUTHORS_SAY}
        return card

    # -- states --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return self.host.state if self._state == "ready" and self.host is not None else self._state

    def ready(self) -> ModelHost:
        """The model for a new request. Raises NotReady before it is loaded, and in a drain."""
        if self.host is None or self._state != "ready":
            raise self.unready()
        return self.host

    async def load(self) -> None:
        self.host = await self._open(self.plan, self.registry, self.give_up, self._reached)
        for sink in self._sinks:
            self.host.add_sink(sink)

    def add_sink(self, sink: Sink) -> None:
        """Call the sink with the events of the model's batches, also before the model is loaded."""
        self._sinks.append(sink)
        if self.host is not None:
            self.host.add_sink(sink)

    def remove_sink(self, sink: Sink) -> None:
        """Stop calling the sink."""
        self._sinks.remove(sink)
        if self.host is not None:
            self.host.remove_sink(sink)

    def _reached(self, state: str) -> None:
        self._state = state

    @property
    def writes_files(self) -> bool:
        return bool(self.plan.config.trace)

    def turn_files(self) -> None:
        if self.host is not None:
            self.host.turn()

    async def stop(self, until: float, answered: Callable[[], Awaitable[None]]) -> bool:
        if self.host is not None:
            self.clean = await self.host.close(True, max(0.0, until - asyncio.get_running_loop().time()))
        if not (self.clean or self.plan.config.workers):  # runtime processes have ended
            log.warning("the model is still at work; leaving without it")
        if self.spans is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(UNSENT):
                    await answered()
            await in_thread(self.spans.close)
        return self.clean

    # -- pages ---------------------------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        state = self.state
        body: dict[str, Any] = {
            "status": "ok" if state == "ready" else state,
            "state": state,
            "model": self.plan.name,
            "model_loaded": self.host is not None and self._state in ("ready", "draining"),
        }
        if self.host is not None:
            body |= self.host.health()
        if self.parent is not None:
            body |= {"restarts": self.parent.restarts, "last_exit": self.parent.last_exit}
        if self.error:
            body["error"] = self.error
        return body

    async def status(self) -> dict[str, Any]:
        """The body of /status: the body of /health, and statistics of runtime processes."""
        return self.health() | (await self.host.status() if self.host is not None else {})

    async def metrics(self) -> bytes:
        """Prometheus text of the server and of its runtime processes."""
        more = await self.host.metrics() if self.host is not None else b""
        return generate_latest(self.registry) + more

    def answered(self, path: str, status: int) -> None:
        """Count an answer. path: an endpoint's, or "other": a label may not have many values."""
        self._answers.counter("reflex_openai_requests_total", path, str(status)).inc()

    def shown(self) -> dict[str, Any]:
        """The server's own part of the live view."""
        health = self.health()
        workers = [] if self.host is None else self.host.processes()
        running, waiting = (None, None) if workers else (health.get("running", 0), health.get("waiting", 0))
        return {
            "product": "llm",
            "version": __version__,
            "state": self.state,
            "error": self.error,
            "unit": "tokens",
            "queues": {} if self.host is None else self.host.queues(),
            "model": health,
            "processes": [own_process(self.state, self.parent, running, waiting, self.error), *workers],
        }
