"""A model in runtime processes: the server parses and tokenises, the processes compute.

Each process has its own copy of the model, its own queue and its own places. A request goes to the process with the
fewest unfinished requests, and stays there. When a process dies its requests fail at once and it is started again; the
others go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec
from prometheus_client import Gauge
from prometheus_client.parser import text_string_to_metric_families

from reflex_runtime.core.errors import Cancelled, ReflexError
from reflex_runtime.drivers.audience import Sink
from reflex_runtime.ipc.client import ClientConfig, RuntimeClient, start_all
from reflex_runtime.ipc.engine import ScoredToken
from reflex_runtime.ipc.generate_batcher import GenerateBatcher
from reflex_runtime.ipc.generate_config import GenerateBatcherConfig
from reflex_runtime.ipc.messages import LOAD, METRICS, STATE, GenerateParams, LoadModel
from reflex_runtime.ipc.registry import StreamHandle, StreamRegistry
from reflex_runtime.ipc.sampling import Constraint, SamplingParams
from reflex_runtime.ipc.spawn import Opener
from reflex_runtime.llm.constraint import Matcher, check_constraint
from reflex_runtime.llm.labelled_series import labelled
from reflex_runtime.llm.limits import Limits
from reflex_runtime.llm.serving.model_host import Open, Opening
from reflex_runtime.llm.serving.requests.texts import Texts
from reflex_runtime.llm.terms import Terms
from reflex_runtime.llm.tokenizer import Conversation, Tokenizer
from reflex_runtime.llm.workers.tokenizer_process import TokenizerProcess
from reflex_runtime.llm.workers.watching import WorkersLive
from reflex_runtime.telemetry.processes import LiveProcess, live_process
from reflex_runtime.telemetry.series import Counter

log = logging.getLogger("reflex.server")

ASKED_WITHIN = 2.0  # seconds for an answer for /status or /metrics; a process that takes longer is left out
ENDS_WITHIN, AT_LEAST = 10.0, 2.0  # seconds for a process to exit: at most, of the time that is left, and at least


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """count: processes. spawn: starts one, by its number. path: of the model. batcher, client: settings of each line.
    options: settings of `reflex serve MODEL_DIR` for a process, by its number and its restarts."""

    count: int
    spawn: Callable[[int], Opener]
    path: str
    options: Callable[[int, int], dict[str, Any]]
    batcher: GenerateBatcherConfig = field(default_factory=GenerateBatcherConfig)
    client: ClientConfig = field(default_factory=ClientConfig)


class Line:
    """One runtime process with its client, streams and batcher."""

    def __init__(self, number: int, config: WorkersConfig, opening: Opening) -> None:
        self.name = f"worker-{number}"
        self.limits: Limits | None = None
        self.about: dict[str, Any] = {}
        self._load: Callable[[int], LoadModel] = lambda restarts: LoadModel(
            opening.plans[0].name, config.path, config.options(number, restarts)
        )
        self.registry = StreamRegistry(config.batcher.stream_limit)
        self.client = RuntimeClient(
            config.spawn(number), config.client, name=self.name, prepare=self._prepare,
            on_note=self.registry.note, on_lost=self.registry.lost,
        )  # fmt: skip
        self.registry.say = self.client.notify
        self.batcher = GenerateBatcher(self.client, self.registry, config.batcher, registry_of_series=opening.registry)

    @property
    def unfinished(self) -> int:
        """Its requests that have not ended."""
        return self.registry.unfinished

    async def _prepare(self, client: RuntimeClient) -> None:
        """Load the model: after every start of the process."""
        about = await client.request(LOAD, self._load(client.restarts), timeout=None)
        names = Limits.__dataclass_fields__
        self.limits = Limits(**{name: about.pop(name) for name in names})
        self.about = about

    async def ask(self, method: str) -> Any:
        """The result of a call without params; None when the process does not answer."""
        try:
            return await self.client.request(method, {}, timeout=ASKED_WITHIN) if self.client.ready else None
        except ReflexError:
            return None

    def health(self) -> dict[str, Any]:
        client = self.client
        found = {"name": self.name, "state": client.state, "pid": client.pid, "restarts": client.restarts}
        active = self.registry.active_count()
        found |= {"running": active, "waiting": self.unfinished - active}
        return found | ({"last_error": client.last_error} if client.last_error else {})

    def process(self) -> LiveProcess:
        client, running = self.client, self.registry.active_count()
        state, why = client.state, client.last_error or ""
        return live_process(self.name, client.pid, state, client.restarts, running, self.unfinished - running, why)


class Workers:
    """A `ModelHost` of runtime processes, and the `Generator` in front of them. Made by `opened`."""

    scores = False  # what a model says of prompts does not travel

    def __init__(self, config: WorkersConfig, tokenizer: Tokenizer, opening: Opening) -> None:
        self._opening, self._name = opening, opening.plans[0].name
        self._tokenizing = TokenizerProcess(config.spawn(config.count), config.client, self._name, config.path)
        self._texts = Texts(tokenizer, lambda what: self._tokenizing.tokenize(what, self.limits.max_model_len))
        self._sending: set[asyncio.Task[None]] = set()
        self.lines = [Line(number, config, opening) for number in range(config.count)]
        self._ready = Gauge(
            "reflex_worker_ready", "Whether the runtime process takes requests", ["worker"], registry=opening.registry
        )
        self._restarts = Counter(
            "reflex_worker_restarts_total", "Times it was started again", ("worker",), registry=opening.registry
        )
        self._refresh()

    async def start(self) -> None:
        """Start all processes; returns when every one has loaded the model. Raises the error of the first that
        fails."""
        self._opening.reached("loading")
        clients = [*(line.client for line in self.lines), self._tokenizing.client]
        try:
            await start_all(clients)
        except BaseException:
            await self.close(0.0)
            raise
        self._texts.most = self.limits.max_model_len

    # -- the host ------------------------------------------------------------------------------------------------------

    def generator(self, name: str) -> Workers:
        """See `ModelHost.generator`: the processes have one model."""
        return self

    @property
    def state(self) -> str:
        """ready while one of the processes is."""
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
            "tokenizer": {"state": self._tokenizing.client.state, "restarts": self._tokenizing.client.restarts},
        }

    async def status(self) -> dict[str, Any]:
        """The statistics of each line, and the state that its process reports."""
        states = await asyncio.gather(*(line.ask(STATE) for line in self.lines))
        return {
            "lines": [
                {
                    "name": line.name,
                    "client": line.client.stats(),
                    "streams": line.registry.snapshot(),
                    "generate": line.batcher.get_stats(),
                    "engine": state,
                }
                for line, state in zip(self.lines, states, strict=True)
            ]
        }

    def get_batch_stats(self) -> dict[str, Any]:
        """`generate`: `GenerateBatcher.get_stats` of each process."""
        return {"generate": {line.name: line.batcher.get_stats() for line in self.lines}}

    def _refresh(self) -> None:
        """Update the series in the registry."""
        for line in self.lines:
            self._ready.labels(line.name).set(line.client.ready)
            self._restarts.labels(line.name).value = float(line.client.restarts)

    async def metrics(self) -> bytes:
        """The pages of the processes that answer, as one."""
        self._refresh()
        answers = await asyncio.gather(*(line.ask(METRICS) for line in self.lines))
        pages = {
            line.name: answer["text"] for line, answer in zip(self.lines, answers, strict=True) if answer is not None
        }
        return await asyncio.get_running_loop().run_in_executor(None, _page, pages)

    def add_sink(self, sink: Sink) -> None:
        """See `ModelHost.add_sink`: the batches are messages to the processes."""
        for line in self.lines:
            line.batcher.add_sink(sink)

    def remove_sink(self, sink: Sink) -> None:
        """See `ModelHost.remove_sink`."""
        for line in self.lines:
            line.batcher.remove_sink(sink)

    def fold(self) -> WorkersLive:
        """See `ModelHost.fold`: the steps of the processes."""
        return WorkersLive(self.lines)

    def processes(self) -> list[LiveProcess]:
        """The runtime processes, and that which tokenises long prompts."""
        tokenizing = self._tokenizing.client
        told = live_process("tokenizer", tokenizing.pid, tokenizing.state, tokenizing.restarts, None, None)
        return [*(line.process() for line in self.lines), told]

    def queues(self) -> dict[str, Any]:
        """What waits for each process."""
        return {line.name: line.batcher.queue() for line in self.lines}

    def turn(self) -> None:
        """See `ModelHost.turn`."""
        for line in self.lines:
            if line.client.ready and line.client.pid is not None:  # before that the signal would end it
                with suppress(ProcessLookupError):
                    os.kill(line.client.pid, signal.SIGHUP)

    async def close(self, timeout: float) -> bool:
        """See `ModelHost.close`. No process is left."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        await asyncio.gather(*(line.batcher.close(timeout > 0, timeout) for line in self.lines))
        done = await asyncio.gather(*(line.registry.wait_idle(max(0.0, until - loop.time())) for line in self.lines))
        within = min(ENDS_WITHIN, max(AT_LEAST, until - loop.time()))
        closing = [line.client.close(within, idle) for line, idle in zip(self.lines, done, strict=True)]
        await asyncio.gather(*closing, self._tokenizing.client.close(within))
        self._texts.close()
        return True

    # -- the generator -------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The server's own: tokenising here delays no step."""
        return self._texts.tokenizer

    @property
    def limits(self) -> Limits:
        """Those of the model in every process."""
        found = self.lines[0].limits
        assert found is not None, "Workers.start was not awaited"
        return found

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each prompt."""
        return await self._texts.encode(texts)

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """The tokens of a conversation in the model's own form. ConfigError when it has none."""
        return await self._texts.encode_chat(conversation)

    async def compiled(self, constraint: Constraint | None) -> None:
        """See `Generator.compiled`: checked here, compiled in the process that generates."""
        if constraint is not None:
            await self._texts.compiled(check_constraint, constraint)

    def request(
        self, prompt: Sequence[int], params: SamplingParams, terms: Terms, matcher: Matcher | None = None
    ) -> GenerateParams:
        """See `Generator.request`: checked here, so that a request that can never run is not sent."""
        assert terms.prompt_logprobs is None  # it does not score
        self.limits.check(prompt, params.max_tokens)
        self.limits.check_sampling(params)
        sampling = {name: getattr(params, name) for name in SamplingParams.__struct_fields__}
        ids = prompt if isinstance(prompt, list) else list(prompt)  # not a copy for each choice
        return GenerateParams(
            **sampling, model_id=self._name, adapter=terms.adapter, prompt_token_ids=ids,
            priority=terms.priority.name.lower(), client=str(terms.client), request_id=terms.id,
            timeout_ms=None if terms.time_limit is None else terms.time_limit * 1e3,
            max_gap_ms=None if terms.max_gap is None else terms.max_gap * 1e3,
            traceparent="" if terms.span is None else terms.span.traceparent,
        )  # fmt: skip

    def prompt_scores(self, request: GenerateParams) -> Sequence[ScoredToken]:
        """Nothing: it does not score."""
        return ()

    def submit_alike(self, requests: Sequence[GenerateParams], bell: asyncio.Event) -> list[StreamHandle]:
        """See `Generator.submit_alike`. All go to the same process, whose cache then has their prompt."""
        line = self._line()
        handles: list[StreamHandle] = []
        for request in requests:
            handle = line.registry.register(bell=bell)
            follows = handles[0].id if handles else None
            handles.append(handle)
            params = msgspec.structs.replace(request, stream_id=handle.id, follows=follows)
            task = asyncio.create_task(self._send(line, handle, params))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        return handles

    def _line(self) -> Line:
        """The ready line with the fewest unfinished requests."""
        ready = [line for line in self.lines if line.client.ready]
        if not ready:
            raise min((line.client.unavailable() for line in self.lines), key=_soonest)
        return min(ready, key=lambda line: line.unfinished)

    @staticmethod
    async def _send(line: Line, handle: StreamHandle, params: GenerateParams) -> None:
        """Send a request; an error before it begins ends its stream."""
        if handle.closed:  # its reader left before this task began
            return
        try:
            await line.batcher.enqueue(params, params.priority)
        except Cancelled:
            pass  # its reader left
        except ReflexError as error:
            if not handle.ended:
                line.registry.release(handle, error)


def _page(pages: Mapping[str, str]) -> bytes:
    """The Prometheus pages of the processes as one."""
    return labelled("worker", {name: text_string_to_metric_families(text) for name, text in pages.items()})


def _soonest(error: ReflexError) -> float:
    return inf if error.retry_after is None else error.retry_after


def opened(config: WorkersConfig, tokenizer: Tokenizer) -> Open:
    """How to open a model in runtime processes."""

    async def open(opening: Opening) -> Workers:
        workers = Workers(config, tokenizer, opening)
        await workers.start()
        return workers

    return open
