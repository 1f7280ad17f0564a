"""The model in runtime processes: the server parses and tokenises, the processes compute.

Each process has its own copy of the model and its own queue. A request goes to the process with the fewest unfinished
requests, and stays there. When a process dies its requests fail at once, and it is started again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from reflex_runtime.core.batch import Event
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.ipc import messages as wire
from reflex_runtime.ipc.client import ClientConfig, RuntimeClient
from reflex_runtime.ipc.generate_batcher import GenerateBatcher, GenerateBatcherConfig
from reflex_runtime.ipc.messages import GenerateParams
from reflex_runtime.ipc.spawn import Opener
from reflex_runtime.ipc.streams import StreamHandle, StreamRegistry
from reflex_runtime.llm.engine.logits_processors import Matcher, check_constraint
from reflex_runtime.llm.engine.sequence import Limits
from reflex_runtime.llm.engine.tokenizer import Texts, Tokenizer
from reflex_runtime.llm.server.model_host import Lost, ModelPlan, Reached
from reflex_runtime.observe.live import LiveParts, LiveProcess, LiveSnapshot, added, live_process
from reflex_runtime.observe.metrics import GENERATE_BATCHER, WORKERS, SeriesSet, rendered
from reflex_runtime.run.audience import Sink
from reflex_runtime.settings import LLMServeConfig

ANSWER_S: Final = 2.0  # for a process to answer about itself; a slower one is left out
MOST_EXIT_S, LEAST_EXIT_S = 10.0, 2.0  # for a process to exit


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """spawn: starts the process of this number. options: its settings of `reflex serve MODEL_DIR`, by its number and
    its restarts. batcher, client: settings for each process."""

    spawn: Callable[[int], Opener]
    options: Callable[[LLMServeConfig, int, int], dict[str, Any]]
    batcher: GenerateBatcherConfig = field(default_factory=GenerateBatcherConfig)
    client: ClientConfig = field(default_factory=ClientConfig)


def one_bound(config: LLMServeConfig, batcher: GenerateBatcherConfig) -> tuple[LLMServeConfig, GenerateBatcherConfig]:
    """Both, with the smaller of their two bounds of the queue."""
    requests = min(config.max_queue, batcher.max_pending)
    tokens = min(config.max_queued_tokens, batcher.max_pending_tokens)
    return (
        replace(config, max_queue=requests, max_queued_tokens=tokens),
        replace(batcher, max_pending=requests, max_pending_tokens=tokens),
    )


class Line:
    """One runtime process: its client, streams and batcher. limits, about: of its model; until it is loaded, None and
    empty."""

    def __init__(self, number: int, config: WorkersConfig, plan: ModelPlan, series: SeriesSet) -> None:
        self.name = f"worker-{number}"
        self.limits: Limits | None = None
        self.about: dict[str, Any] = {}
        self._plan, self._options, self._number = plan, config.options, number
        batcher = one_bound(plan.config, config.batcher)[1]
        self.registry = StreamRegistry(batcher.stream_limit)
        self.client = RuntimeClient(
            config.spawn(number), config.client, name=self.name, prepare=self._prepare,
            on_note=self.registry.note, on_lost=self.registry.lost,
        )  # fmt: skip
        self.batcher = GenerateBatcher(self.client, self.registry, batcher, series=series)

    async def _prepare(self, client: RuntimeClient) -> None:
        """Load the model. Called after every start of the process."""
        plan = self._plan
        options = self._options(plan.config, self._number, client.restarts)
        load = wire.LoadModel(plan.name, str(plan.directory.resolve()), options)
        self.about = await client.request(wire.LOAD, load)
        self.limits = Limits(**{name: self.about[name] for name in Limits.__dataclass_fields__})

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return self.registry.unfinished

    @property
    def running(self) -> int:
        """Requests that run."""
        return self.registry.active_count()

    async def ask(self, method: str, kind: Any = Any) -> Any:
        """The result of a call without params, as a `kind`; None if the process does not answer."""
        try:
            return await self.client.request(method, {}, kind, ANSWER_S) if self.client.ready else None
        except ReflexError:
            return None

    def health(self) -> dict[str, Any]:
        client = self.client
        found = {"name": self.name, "state": client.state, "pid": client.pid, "restarts": client.restarts}
        found |= {"running": self.running, "waiting": self.unfinished - self.running}
        return found | ({"last_error": client.last_error} if client.last_error else {})

    def process(self) -> LiveProcess:
        client, running = self.client, self.running
        state, why = client.state, client.last_error or ""
        return live_process(self.name, client.pid, state, client.restarts, running, self.unfinished - running, why)


class Workers:
    """The model in runtime processes. Made by `open_workers`. texts: tokenises in the server, so that no step waits."""

    def __init__(
        self, config: WorkersConfig, tokenizer: Tokenizer, plan: ModelPlan, registry: CollectorRegistry
    ) -> None:
        self._plan, self.queueing, self.texts = plan, asyncio.Lock(), Texts(tokenizer)
        series = SeriesSet(GENERATE_BATCHER, registry)
        self.lines = [Line(number, config, plan, series) for number in range(plan.config.workers)]
        self._series = SeriesSet(WORKERS, registry)
        self._refresh()

    async def start(self) -> None:
        """Start all processes; returns when all have loaded the model. If one fails, ends all and raises its error."""
        try:
            await asyncio.gather(*(line.client.start() for line in self.lines))
        except BaseException:
            await self.close(False, 0.0)
            raise
        self.texts.most = self.limits.max_model_len

    # -- generating ----------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """The limits of the model, which are the same in every process."""
        found = self.lines[0].limits
        assert found is not None, "Workers.start was not awaited"
        return found

    async def compiled(self, constraint: wire.Constraint | None) -> None:
        """Check the form; the process that generates compiles it."""
        if constraint is not None:
            await self.texts.compiled(check_constraint, constraint)

    def request(self, prompt: Sequence[int], params: GenerateParams, matcher: Matcher | None = None) -> GenerateParams:
        """A checked request: one that can never run is not sent."""
        self.limits.check(prompt, params.max_tokens - params.prompt_only)
        self.limits.check_sampling(params)
        ids = prompt if isinstance(prompt, list) else list(prompt)  # one list for all choices
        return msgspec.structs.replace(params, model_id=self._plan.name, prompt_token_ids=ids)

    def submit_alike(self, requests: Sequence[GenerateParams], bell: asyncio.Event) -> Iterator[StreamHandle]:
        """Queue requests with the same prompt in one process, so that its cache has the prompt. If one raises
        `Rejected`, the streams before it go on."""
        line, first = self._line(), None
        for request in requests:
            handle = line.registry.register(bell=bell)
            params = msgspec.structs.replace(request, stream_id=handle.id, follows=first)
            line.batcher.submit(params, params.priority)
            first = first or handle.id
            yield handle

    def _line(self) -> Line:
        """The ready process with the fewest unfinished requests."""
        ready = [line for line in self.lines if line.client.ready]
        if not ready:
            errors = [line.client.unavailable() for line in self.lines]
            raise min(errors, key=lambda error: inf if error.retry_after is None else error.retry_after)
        return min(ready, key=lambda line: line.unfinished)

    # -- pages ---------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """ready while any process is ready."""
        return "ready" if any(line.client.ready for line in self.lines) else "restarting"

    def health(self) -> dict[str, Any]:
        workers = [line.health() for line in self.lines]
        return {
            "runner": self.lines[0].about.get("runner", ""),
            "max_model_len": self.limits.max_model_len,
            "running": sum(worker["running"] for worker in workers),
            "waiting": sum(worker["waiting"] for worker in workers),
            "model_loaded": self.state == "ready",
            "workers": workers,
        }

    async def status(self) -> dict[str, Any]:
        """Statistics of each process, on this side and on its own."""
        states = await asyncio.gather(*(line.ask(wire.STATE) for line in self.lines))
        lines = [
            {
                "name": line.name,
                "client": line.client.stats(),
                "streams": line.registry.snapshot(),
                "generate": line.batcher.get_stats(),
                "engine": state,
            }
            for line, state in zip(self.lines, states, strict=True)
        ]
        return {"lines": lines}

    def _refresh(self) -> None:
        """Update the series in the registry."""
        for line in self.lines:
            self._series.gauge("reflex_worker_ready", line.name).set(line.client.ready)
            self._series.counter("reflex_worker_restarts_total", line.name).value = float(line.client.restarts)

    async def metrics(self) -> bytes:
        """The series of all processes that answer, as one page."""
        self._refresh()
        answers = await asyncio.gather(*(line.ask(wire.METRICS) for line in self.lines))
        pages = {
            line.name: answer["text"] for line, answer in zip(self.lines, answers, strict=True) if answer is not None
        }
        return await asyncio.to_thread(labelled, "worker", pages)

    def add_sink(self, sink: Sink) -> None:
        """Call the sink with the events of message batches to the processes."""
        for line in self.lines:
            line.batcher.add_sink(sink)

    def remove_sink(self, sink: Sink) -> None:
        for line in self.lines:
            line.batcher.remove_sink(sink)

    def processes(self) -> list[LiveProcess]:
        return [line.process() for line in self.lines]

    def queues(self) -> dict[str, Any]:
        """The requests that wait for each process."""
        return {line.name: line.batcher.queue() for line in self.lines}

    def turn(self) -> None:
        for line in self.lines:
            if line.client.ready and line.client.pid is not None:  # a process that still starts would die of the signal
                with suppress(ProcessLookupError):
                    os.kill(line.client.pid, signal.SIGHUP)

    async def close(self, drain: bool, timeout: float) -> bool:
        """Admit nothing more, and end the processes. drain: first finish requests, within `timeout` seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        await asyncio.gather(*(line.batcher.close(drain and timeout > 0, timeout) for line in self.lines))
        await asyncio.gather(*(line.registry.wait_idle(max(0.0, until - loop.time())) for line in self.lines))
        within = min(MOST_EXIT_S, max(LEAST_EXIT_S, until - loop.time()))
        await asyncio.gather(*(line.client.close(within, line.running == 0) for line in self.lines))
        self.texts.close()
        return True


async def open_workers(
    config: WorkersConfig, tokenizer: Tokenizer, plan: ModelPlan, registry: CollectorRegistry, lost: Lost | None,
    reached: Reached,
) -> Workers:  # fmt: skip
    """See `Open`. lost is never called: a process that dies is started again."""
    reached("loading")
    workers = Workers(config, tokenizer, plan, registry)
    await workers.start()
    return workers


def labelled(label: str, pages: Mapping[str, str]) -> bytes:
    """Several pages of Prometheus text as one. Each sample gets the name of its page as the value of this label."""
    families: dict[str, Metric] = {}
    for name, page in pages.items():
        for family in text_string_to_metric_families(page):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [
                Sample(s.name, {**s.labels, label: name}, s.value, s.timestamp, s.exemplar) for s in family.samples
            ]
    return rendered(families.values())


class WorkersLive:
    """The live view of runtime processes, folded from their own snapshots."""

    events: frozenset[type[Event]] = frozenset()

    def __init__(self, lines: Callable[[], Sequence[Line]], now: float) -> None:
        self._lines = lines
        self._parts = LiveParts()
        self._asking: dict[str, asyncio.Task[None]] = {}

    def __call__(self, event: Event) -> None:
        """Nothing: the processes count their own events."""

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        """The view from the processes' latest answers. Calls each process again for its next."""
        for line in self._lines():
            if line.name not in self._asking:
                task = self._asking[line.name] = asyncio.get_running_loop().create_task(self._ask(line))
                task.add_done_callback(lambda _, name=line.name: self._asking.pop(name))  # type: ignore[misc]
        return self._parts.snapshot(now, {**server, **self._merged(server)})

    async def _ask(self, line: Line) -> None:
        shown: LiveSnapshot | None = await line.ask(wire.LIVE, LiveSnapshot | None)
        if shown is None:
            self._parts.forget(line.name)
        else:
            self._parts.take(line.name, shown)

    def _merged(self, server: Mapping[str, Any]) -> dict[str, Any]:
        """The queues of all engines added up, together with those of messages, and the usage of the fullest cache."""
        engines = [snapshot.server for snapshot in self._parts.newest.values()]
        queues: dict[str, Any] = {}
        for engine in engines:
            for group, queue in engine["queues"].items():
                queues[group] = added(queues[group], queue) if group in queues else queue
        usage = max((engine["kv_cache_usage"] for engine in engines), default=None)
        model = {**server.get("model", {}), **({} if usage is None else {"kv_cache_usage": usage})}
        return {"queues": {**queues, **server.get("queues", {})}, "model": model}
