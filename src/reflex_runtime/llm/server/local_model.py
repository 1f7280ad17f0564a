"""The model in this process, under the asyncio driver: requests go in, streams of tokens come out.

`reflex serve` has one when it runs without workers, and every runtime process has one behind its connection. The device
thread runs steps and does not depend on readers: tokens wait in their stream. A stream that is read slowly is held at
the scheduler, and no other: its memory here is bounded. Everything in this module happens on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from reflex_runtime.core.batch import BatchFinished, Done, Event, RequestProgressed
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.ipc import messages as wire
from reflex_runtime.ipc.messages import Constraint, GenerateParams, TokenOutput
from reflex_runtime.ipc.streams import OutputStream
from reflex_runtime.ipc.worker import Engine
from reflex_runtime.ipc.worker import Load as LoadEngine
from reflex_runtime.llm.engine.logits_processors import Matcher
from reflex_runtime.llm.engine.processor import EngineConfig, EngineSeries, LLMProcessor
from reflex_runtime.llm.engine.sequence import Limits, Sequence
from reflex_runtime.llm.engine.tokenizer import Conversation, Texts, Tokenizer
from reflex_runtime.llm.runners.runner import Runner, Step
from reflex_runtime.llm.server.model_host import ModelPlan, Opening
from reflex_runtime.observe.journal_writer import JournalWriter, turn_all
from reflex_runtime.observe.live import LiveProcess, LiveSnapshot, OnDemandLive
from reflex_runtime.observe.metrics import STREAMS, SeriesSet
from reflex_runtime.observe.tracing import spans_of
from reflex_runtime.run.audience import Sink
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.process import freeze_loaded, in_thread
from reflex_runtime.settings import LLMServeConfig
from reflex_runtime.settings.declare import convert, hints_of

if TYPE_CHECKING:
    from reflex_runtime.observe.spans import Spans

log = logging.getLogger("reflex.server")

Load = Callable[[ModelPlan], tuple[Runner, Tokenizer]]

UNREAD = 64  # outputs of a stream that may wait for its reader before it is held
PATIENCE = 120.0  # seconds that a held stream may wait for its reader: it occupies a place and blocks


class GenerationStream(OutputStream):
    """A request's tokens in this process. scores: whether its prompt is scored. held: also until the request that it
    follows has begun."""

    __slots__ = ("_followers", "_runtime", "_stalls", "_ticket", "scores")

    def __init__(self, runtime: LocalModel, bell: asyncio.Event | None, sequence: Sequence) -> None:
        super().__init__(bell, sequence.num_prompt_tokens)
        self._runtime = runtime
        self._ticket: Ticket | None = None  # None before it is submitted, and once it is not wanted
        self._followers: tuple[GenerationStream, ...] = ()
        self._stalls: asyncio.TimerHandle | None = None
        self.prompt_scores, self.scores = sequence.prompt_choices, sequence.scores_from is not None

    # -- the runtime's -------------------------------------------------------------------------------------------------

    def said(self, output: TokenOutput) -> None:
        if self._ticket is not None:  # not closed while it was being made
            self.completion_tokens += 1
            self.push([output])

    def settled(self, ticket: Ticket) -> None:
        """It has ended; called exactly once."""
        self.cached_tokens = ticket.request.payload.cached_tokens or 0
        outcome, wanted = ticket.outcome, self._ticket is not None
        self._ticket = None  # first: nothing is held any more
        if isinstance(outcome, Done) and wanted:
            self.completion_tokens += 1
            self.push([outcome.value])
        if self._stalls is not None:
            self._stalls.cancel()
        self._go_on()
        self.end(None if isinstance(outcome, Done) else outcome.error)

    def follow(self, others: Iterable[GenerationStream]) -> None:
        """Hold these streams until this one has its first token, or has ended."""
        self._followers += tuple(others)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _pushed(self, n: int) -> None:
        if self._followers:
            self._go_on()
        if not self.held and self.unread >= self._runtime.unread and self._ticket is not None:
            self._runtime.hold(self)

    def _taken(self, n: int) -> None:
        if self.held and self.unread <= self._runtime.unread // 2:
            self._runtime.resume(self)

    def _left(self) -> None:
        """Its blocks are free at the next step at the latest."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._runtime.batcher.cancel(ticket)

    def _go_on(self) -> None:
        followers, self._followers = self._followers, ()
        for stream in followers:
            self._runtime.resume(stream)


class LocalModel:
    """The model in this process, for the requests of one event loop. Its steps run in a thread. Made by `opened`.

    processor: taken over; closed with the model. registry: for its series. trace: its journal, "" for none. watchdog:
    seconds that a step may take until its callers are told; a model that has not come back in twice that time is given
    up (`on_fatal`, on the loop, once). sinks: see `Batcher`. unread: outputs of a stream that may wait for its reader.
    patience: seconds that a stream is held for a reader that takes nothing; then it is taken back. holds: how often a
    stream was held for its reader.
    """

    events = frozenset({BatchFinished, RequestProgressed})  # as a sink; ends come to each stream's own callback

    def __init__(
        self,
        processor: LLMProcessor,
        registry: CollectorRegistry | None = None,
        *,
        trace: str = "",
        watchdog: float = 60.0,
        sinks: Iterable[Sink] = (),
        on_fatal: Callable[[], None] | None = None,
        unread: int = UNREAD,
        patience: float = PATIENCE,
    ) -> None:
        self.processor, self.unread, self._patience = processor, unread, patience
        # A step that hangs may still write to the cache: no other step may run before it has returned.
        self.batcher = Batcher(
            {processor.name: processor}, [processor.group], [self, *sinks], watchdog,
            on_fatal=self._given_up, one_thread=True,
        )  # fmt: skip
        self.holds = 0
        self.queueing = asyncio.Lock()
        self._watchdog, self._on_fatal = watchdog, on_fatal
        self._hung: asyncio.TimerHandle | None = None
        self._streams: dict[Ticket, GenerationStream] = {}
        self.texts = Texts(processor.tokenizer, most=processor.limits.max_model_len)
        self.trace = JournalWriter(trace, [processor.group]) if trace else None
        if self.trace is not None:
            self.add_sink(self.trace)
        registry = registry or CollectorRegistry()
        self._holds = SeriesSet(STREAMS, registry).counter("reflex_stream_holds_total")
        self.add_sink(EngineSeries(processor, lambda: self.waiting, registry))

    async def start(self, prepare: Callable[[], object] | None = None) -> None:
        """Start the thread. prepare: see `Batcher.start`."""
        await self.batcher.start(prepare)

    async def close(self, drain: bool = True, timeout: float = 10.0) -> bool:
        """Refuse new requests, finish those accepted within `timeout` seconds, end the rest with an error.

        Every stream has ended when it returns. Returns whether the thread has, too.
        """
        ended = await self.batcher.close(drain, timeout)
        if self._hung is not None:
            self._hung.cancel()
        self.texts.close()
        if self.trace is not None:
            self.trace.close()
        return ended and not self.batcher.device.busy

    @property
    def hangs(self) -> bool:
        """Whether a step was given up and has not come back."""
        device = self.batcher.device
        return device.busy and device.running_since is None

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        return self.processor.limits

    def request(self, prompt: Seq[int], params: GenerateParams, matcher: Matcher | None = None) -> Request:
        return self.processor.request(prompt, params, matcher)

    async def compiled(self, constraint: Constraint | None) -> Matcher | None:
        if constraint is None:
            return None
        return await self.texts.compiled(self.processor.constraints.compile, constraint)

    def submit(
        self, request: Request, bell: asyncio.Event | None = None, first: GenerationStream | None = None
    ) -> GenerationStream:
        """Admit a request that `request` made. Raises `Rejected`.

        bell: set whenever there is something to read, for a reader of several streams. first: one with the same prompt.
        This one waits until that has computed it, and finds it in the prefix cache; where that is asked what the model
        says of the prompt, it is known before this one has a token.
        """
        stream = GenerationStream(self, bell, request.payload)
        waits = first is not None and self._computes(first)
        stream._ticket = ticket = self.batcher.submit(request, self._settled, held=waits)
        self._streams[ticket] = stream
        if first is not None and waits:
            stream.held = True
            first.follow([stream])
        return stream

    def submit_alike(self, requests: Seq[Request], bell: asyncio.Event | None = None) -> list[GenerationStream]:
        """Admit requests with the same prompt: all of them or none. Raises `Rejected`."""
        streams: list[GenerationStream] = []
        try:
            for request in requests:
                streams.append(self.submit(request, bell, streams[0] if streams else None))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    def _computes(self, first: GenerationStream) -> bool:
        """Whether it is to compute its prompt still, and others have something of that."""
        pool = self.processor.pool
        cached = pool.prefix_caching and first.prompt_tokens > pool.block_size
        return not (first.ended or first.completion_tokens) and (cached or first.scores)

    @property
    def waiting(self) -> int:
        """Requests that hold no place."""
        return self.batcher.scheduler.queued(self.processor.name)

    @property
    def running(self) -> int:
        """Requests that hold a place."""
        return self.batcher.scheduler.unsettled(self.processor.name) - self.waiting

    # -- streams -------------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """A sink: hand a token to its stream, and watch a step that was given up."""
        if isinstance(event, RequestProgressed):
            if event.value is not None:  # a chunk of a prompt gives no token
                self._streams[event.ticket].said(event.value)
        elif isinstance(event, BatchFinished) and event.crashed and self.hangs and self._hung is None:
            loop, count = asyncio.get_running_loop(), self.batcher.device.hung
            self._hung = loop.call_later(self._watchdog, self._still_hangs, count)

    def hold(self, stream: GenerationStream) -> None:
        """Its reader is slow: grant it no more tokens until `resume`."""
        self.holds += 1
        stream._stalls = asyncio.get_running_loop().call_later(self._patience, stream.close)
        stream.held = True
        ticket = stream._ticket
        if ticket is not None:
            self.batcher.device.input(lambda scheduler, now: scheduler.hold(ticket, now))

    def resume(self, stream: GenerationStream) -> None:
        stream.held = False
        if stream._stalls is not None:
            stream._stalls.cancel()
            stream._stalls = None
        ticket = stream._ticket
        if ticket is not None and not stream.ended:
            self.batcher.device.input(lambda scheduler, now: scheduler.resume(ticket, now))

    def _settled(self, ticket: Ticket) -> None:
        self._streams.pop(ticket).settled(ticket)

    # -- a step that hangs ---------------------------------------------------------------------------------------------

    def _still_hangs(self, count: int) -> None:
        """Called one time limit after a step was given up: if it has not returned by then, the model is lost."""
        self._hung = None
        if self.hangs and self.batcher.device.hung == count:
            log.error("a step has not come back in %g s: the model is given up", 2 * self._watchdog)
            while self.batcher.device.input(lambda scheduler, now: scheduler.close(now, drain=False)):
                pass
            self._given_up()

    def _given_up(self) -> None:
        on_fatal, self._on_fatal = self._on_fatal, None
        if on_fatal is not None:
            on_fatal()

    # -- what the server asks ------------------------------------------------------------------------------------------

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
        if processor.config.speculate != "off":
            body["speculation"] = {"draft_tokens": processor.drafted, "accepted_tokens": processor.accepted}
        if self.trace is not None and self.trace.error is not None:
            body["trace_error"] = str(self.trace.error)
        return body

    async def status(self) -> dict[str, Any]:
        """What /status has beyond /health: nothing."""
        return {}

    def processes(self) -> list[LiveProcess]:
        """Processes beside the server's own: none."""
        return []

    def turn(self) -> None:
        """Go on in a new trace file; the old one is kept as FILE.1."""
        turn_all()

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


def opened(load: Load) -> Callable[[Opening], Awaitable[LocalModel]]:
    """How to open the model that `load` makes of its plan, in a thread of its own."""

    async def open(opening: Opening) -> LocalModel:
        opening.reached("loading")
        runner, tokenizer = await in_thread(partial(load, opening.plan))
        said = opening.plan.config
        same = {f.name: getattr(said, f.name) for f in fields(EngineConfig) if f.name != "enable_prefix_caching"}
        config = EngineConfig(enable_prefix_caching=said.prefix_caching, **same)
        processor = LLMProcessor(runner, tokenizer, config)
        opening.reached("warming")
        model = LocalModel(
            processor, opening.registry, trace=said.trace, watchdog=said.watchdog_s, on_fatal=opening.lost
        )
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


# -- in a runtime process ----------------------------------------------------------------------------------------------


class WorkerEngine(Engine):
    """The model of a runtime process."""

    def __init__(self, model: LocalModel, registry: CollectorRegistry, spans: Spans | None = None) -> None:
        """spans: of its steps; closed with the engine."""
        self._model, self._registry, self._spans = model, registry, spans
        self._live = OnDemandLive(model.batcher.add_sink, model.batcher.remove_sink, self._told)
        if spans is not None:
            model.batcher.add_sink(spans)

    def info(self) -> dict[str, Any]:
        """The limits, by which a front checks requests, and the runner's name."""
        return asdict(self._model.limits) | {"runner": self._model.processor.runner.name}

    def state(self) -> dict[str, Any]:
        """As /health of a server without workers."""
        return {"state": self._model.state} | self._model.health()

    def metrics(self) -> str:
        """Prometheus text."""
        self._model.refresh()
        return generate_latest(self._registry).decode()

    def live(self) -> LiveSnapshot:
        """See `Engine.live`."""
        return self._live.snapshot()

    def _told(self) -> dict[str, Any]:
        return {"queues": self._model.queues()} | self._model.health()  # the first has events delivered

    async def tokenize(self, params: wire.Tokenize) -> list[int]:
        """A text, or a conversation in the model's own form."""
        texts = self._model.texts
        if params.text is not None:
            return (await texts.encode([params.text]))[0]
        return await texts.encode_chat(Conversation(params.messages or [], params.tools, params.template_kwargs))

    async def submit(
        self, params: wire.GenerateParams, bell: asyncio.Event, leader: GenerationStream | None
    ) -> GenerationStream:
        """Queue a request. leader: a stream with the same prompt: this one waits until that has computed it."""
        model = self._model
        prompt, matcher = await self._prompt(params), await model.compiled(params.constraint)
        _check_scores(params, prompt)
        params = msgspec.structs.replace(params, prompt=None, prompt_token_ids=None, messages=None)  # they are large
        return model.submit(model.request(prompt, params, matcher), bell, leader)

    async def close(self, drain: bool, timeout: float) -> bool:
        """Every stream has ended when it returns; whether the device thread has, too."""
        self._live.close()
        closed = await self._model.close(drain, timeout)
        if self._spans is not None:
            await in_thread(self._spans.close)
        return closed

    async def _prompt(self, params: wire.GenerateParams) -> list[int]:
        given = [p for p in (params.prompt, params.prompt_token_ids, params.messages) if p is not None]
        if len(given) != 1:
            raise ConfigError(f"prompt: give one of prompt, prompt_token_ids and messages, not {len(given)}")
        if params.prompt_token_ids is not None:
            return params.prompt_token_ids
        return await self.tokenize(wire.Tokenize(params.model_id, params.prompt, params.messages))


def _check_scores(params: wire.GenerateParams, prompt: Seq[int]) -> None:
    """Raises ConfigError where more would be told of the prompt than a front takes."""
    told = 0 if params.prompt_logprobs is None else len(prompt) * (1 + params.prompt_logprobs)
    if told > (most := wire.MOST_SCORES):
        raise ConfigError(f"prompt_logprobs: {told} numbers of the prompt would be told, at most {most} are")


def loading(make: Callable[[Path, LLMServeConfig], tuple[Runner, Tokenizer]], lost: Callable[[], None]) -> LoadEngine:
    """The `Load` of a runtime process: `make` loads a model. lost: called on the loop when it is lost for good.

    It raises ConfigError for options that `reflex serve MODEL_DIR` does not have, and for a directory without a model.
    """

    async def load(asked: wire.LoadModel) -> WorkerEngine:
        if not asked.path:
            raise ConfigError("load_model: needs path, the directory of the model")
        plan = ModelPlan(asked.model_id, _config(asked.options), Path(asked.path))
        registry = CollectorRegistry()
        spans = spans_of(plan.config.otel, registry, "steps")
        model = await opened(lambda plan: make(plan.directory, plan.config))(Opening(plan, registry, lost))
        freeze_loaded()
        return WorkerEngine(model, registry, spans)

    return load


def _config(options: dict[str, Any]) -> LLMServeConfig:
    hints = hints_of(LLMServeConfig)
    unknown = next((name for name in options if name not in hints), None)
    if unknown is not None:
        raise ConfigError(f"load_model: options.{unknown[:100]}: no such setting")
    return LLMServeConfig(
        **{name: convert(value, hints[name], f"load_model: options.{name}") for name, value in options.items()}
    )
