"""The model in this process, under the asyncio driver: requests in, streams of tokens out.

A server without workers has one, and every runtime process has one (`WorkerEngine`). The device thread runs steps and
does not wait for readers: tokens wait in their stream. The scheduler holds a stream that is read slowly, and only that
one, so that its memory is bounded. Everything in this module runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
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
from reflex_runtime.llm.server.model_host import Lost, ModelPlan, Reached
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

UNREAD = 64  # unread outputs of a stream before it is held
PATIENCE = 120.0  # seconds that a stream may be held; then it is cancelled, because it occupies a place and blocks


class GenerationStream(OutputStream):
    """The tokens of a request in this process. scores: its prompt is scored. held: its reader is slow, or it follows a
    stream that still computes the same prompt."""

    __slots__ = ("_held_until", "_runtime", "_ticket", "followers", "scores")

    def __init__(self, runtime: LocalModel, bell: asyncio.Event | None, sequence: Sequence) -> None:
        super().__init__(bell, sequence.num_prompt_tokens)
        self._runtime = runtime
        self._ticket: Ticket | None = None  # None before it is submitted, and after it was closed or has ended
        self.followers: list[GenerationStream] = []  # held until this one has its first token, or has ended
        self._held_until: asyncio.TimerHandle | None = None  # closes it when it was held too long
        self.prompt_scores, self.scores = sequence.prompt_choices, sequence.scores_from is not None

    def add(self, output: TokenOutput) -> None:
        if self._ticket is not None:  # not closed while the step ran
            self.completion_tokens += 1
            self.push([output])

    def settled(self, ticket: Ticket) -> None:
        """Its request has ended; called once."""
        self.cached_tokens = ticket.request.payload.cached_tokens or 0
        outcome, wanted = ticket.outcome, self._ticket is not None
        self._ticket = None  # first: `_pushed` must not hold it any more
        if isinstance(outcome, Done) and wanted:
            self.completion_tokens += 1
            self.push([outcome.value])
        if self._held_until is not None:
            self._held_until.cancel()
        self._resume_followers()
        self.end(None if isinstance(outcome, Done) else outcome.error)

    def _pushed(self, n: int) -> None:
        if self.followers:
            self._resume_followers()
        if not self.held and self.unread >= self._runtime.unread and self._ticket is not None:
            self._runtime.hold(self)

    def _taken(self, n: int) -> None:
        if self.held and self.unread <= self._runtime.unread // 2:
            self._runtime.resume(self)

    def _left(self) -> None:
        """Cancel the request: its blocks are free at the next step at the latest."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._runtime.batcher.cancel(ticket)

    def _resume_followers(self) -> None:
        followers, self.followers = self.followers, []
        for stream in followers:
            self._runtime.resume(stream)


class LocalModel:
    """The model in this process, for the requests of one event loop. Made by `open_model`.

    processor: stopped with the model. registry: for its series. trace: the file of its journal, "" for none. watchdog:
    seconds for a step until its callers get an error; after twice that time the model is lost (`on_fatal`, called once,
    on the loop). unread: see UNREAD. patience: see PATIENCE.
    """

    events = frozenset({BatchFinished, RequestProgressed})  # for itself as a sink; a callback tells the end of a stream

    def __init__(
        self,
        processor: LLMProcessor,
        registry: CollectorRegistry | None = None,
        *,
        trace: str = "",
        watchdog: float = 60.0,
        on_fatal: Callable[[], None] | None = None,
        unread: int = UNREAD,
        patience: float = PATIENCE,
    ) -> None:
        self.processor, self.unread, self._patience = processor, unread, patience
        # A step that hangs may still write to the cache: no other step may run before it returns.
        self.batcher = Batcher(
            {processor.name: processor}, [processor.group], [self], watchdog, on_fatal=self._given_up, one_thread=True
        )
        self.queueing = asyncio.Lock()
        self._watchdog, self._on_fatal = watchdog, on_fatal
        self._hung: asyncio.TimerHandle | None = None
        self._streams: dict[Ticket, GenerationStream] = {}
        self.texts = Texts(processor.tokenizer, most=processor.limits.max_model_len)
        self.trace = JournalWriter(trace, [processor.group]) if trace else None
        if self.trace is not None:
            self.add_sink(self.trace)
        self.registry = registry = registry or CollectorRegistry()
        self._holds = SeriesSet(STREAMS, registry).counter("reflex_stream_holds_total")
        self.add_sink(EngineSeries(processor, lambda: self.waiting, registry))

    async def start(self, prepare: Callable[[], object] | None = None) -> None:
        """Start the device thread. prepare: see `Batcher.start`."""
        await self.batcher.start(prepare)

    async def close(self, drain: bool = True, timeout: float = 10.0) -> bool:
        """Admit nothing more. drain: finish requests within `timeout` seconds; the others end with an error. When it
        returns every stream has ended; returns whether the device thread has, too."""
        ended = await self.batcher.close(drain, timeout)
        if self._hung is not None:
            self._hung.cancel()
        self.texts.close()
        if self.trace is not None:
            self.trace.close()
        return ended and not self.batcher.device.busy

    @property
    def hangs(self) -> bool:
        """Whether a step that timed out still runs."""
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
        """Queue a request that `request` made. Raises `Rejected`.

        bell: see `OutputStream`. first: a stream with the same prompt. The new one waits until that has computed the
        prompt, and finds it in the prefix cache; so scores of the prompt are complete before the new one has a token.
        """
        stream = GenerationStream(self, bell, request.payload)
        waits = first is not None and self._computes(first)
        stream._ticket = ticket = self.batcher.submit(request, self._settled, held=waits)
        self._streams[ticket] = stream
        if first is not None and waits:
            stream.held = True
            first.followers.append(stream)
        return stream

    def submit_alike(self, requests: Seq[Request], bell: asyncio.Event | None = None) -> Iterator[GenerationStream]:
        """Queue requests with the same prompt, in order. If one raises `Rejected`, the streams before it go on."""
        first = None
        for request in requests:
            stream = self.submit(request, bell, first)
            first = first or stream
            yield stream

    def _computes(self, first: GenerationStream) -> bool:
        """Whether it still computes its prompt, and others that wait for it save work or need its scores."""
        pool = self.processor.pool
        cached = pool.prefix_caching and first.prompt_tokens > pool.block_size
        return not (first.ended or first.completion_tokens) and (cached or first.scores)

    @property
    def waiting(self) -> int:
        """Requests without a place."""
        return self.batcher.scheduler.queued(self.processor.name)

    @property
    def running(self) -> int:
        """Requests with a place."""
        return self.batcher.scheduler.unsettled(self.processor.name) - self.waiting

    # -- streams -------------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """A sink: push tokens to their streams, and watch a step that timed out."""
        if isinstance(event, RequestProgressed):
            if event.value is not None:  # a chunk of a prompt gives no token
                self._streams[event.ticket].add(event.value)
        elif isinstance(event, BatchFinished) and event.crashed and self.hangs and self._hung is None:
            loop, count = asyncio.get_running_loop(), self.batcher.device.hung
            self._hung = loop.call_later(self._watchdog, self._still_hangs, count)

    def hold(self, stream: GenerationStream) -> None:
        """Let the scheduler grant a stream with a slow reader no tokens until `resume`."""
        self._holds.inc()
        stream._held_until = asyncio.get_running_loop().call_later(self._patience, stream.close)
        stream.held = True
        ticket = stream._ticket
        if ticket is not None:
            self.batcher.device.input(lambda scheduler, now: scheduler.hold(ticket, now))

    def resume(self, stream: GenerationStream) -> None:
        stream.held = False
        if stream._held_until is not None:
            stream._held_until.cancel()
            stream._held_until = None
        ticket = stream._ticket
        if ticket is not None and not stream.ended:
            self.batcher.device.input(lambda scheduler, now: scheduler.resume(ticket, now))

    def _settled(self, ticket: Ticket) -> None:
        self._streams.pop(ticket).settled(ticket)

    # -- a step that hangs ---------------------------------------------------------------------------------------------

    def _still_hangs(self, count: int) -> None:
        """Called one time limit after a step timed out: if it still runs, the model is lost."""
        self._hung = None
        if self.hangs and self.batcher.device.hung == count:
            log.error("a step has not returned in %g s: the model is given up", 2 * self._watchdog)
            while self.batcher.device.close(drain=False):
                pass
            self._given_up()

    def _given_up(self) -> None:
        on_fatal, self._on_fatal = self._on_fatal, None
        if on_fatal is not None:
            on_fatal()

    # -- pages ---------------------------------------------------------------------------------------------------------

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
        """/status has nothing beyond /health."""
        return {}

    def processes(self) -> list[LiveProcess]:
        """There are none besides the server."""
        return []

    def turn(self) -> None:
        """Start a new trace file; the old one becomes FILE.1."""
        turn_all()

    def add_sink(self, sink: Sink) -> None:
        self.batcher.add_sink(sink)

    def remove_sink(self, sink: Sink) -> None:
        self.batcher.remove_sink(sink)

    def queues(self) -> dict[str, Any]:
        self.batcher.flush()
        groups: dict[str, Any] = self.batcher.device.input(lambda scheduler, _: scheduler.snapshot()["groups"])
        return groups

    async def metrics(self) -> bytes:
        """Update the series in the registry. Returns nothing, because there are no others."""
        self.batcher.flush()
        return b""


async def open_model(
    load: Load, plan: ModelPlan, registry: CollectorRegistry, lost: Lost | None = None,
    reached: Reached = lambda state: None,
) -> LocalModel:  # fmt: skip
    """See `Open`. load: called in a thread."""
    reached("loading")
    runner, tokenizer = await in_thread(partial(load, plan))
    settings = plan.config
    same = {f.name: getattr(settings, f.name) for f in fields(EngineConfig) if f.name != "enable_prefix_caching"}
    processor = LLMProcessor(
        runner, tokenizer, EngineConfig(enable_prefix_caching=settings.prefix_caching, **same)
    )
    reached("warming")
    model = LocalModel(processor, registry, trace=settings.trace, watchdog=settings.watchdog_s, on_fatal=lost)
    try:
        await model.start(lambda: warm_up(runner))
    except Exception:
        await model.close(False, 0.0)
        raise
    return model


def warm_up(runner: Runner) -> None:
    """Run steps of two shapes, so that the first request does not wait for one-off work. They write to block 0, whose
    rows are written again before they are read."""
    whole = min(runner.block_size, runner.max_model_len)
    for past, new in ((0, whole - 1), (whole - 1, 1)):
        if new:
            ids, positions = np.zeros(new, np.int64), np.arange(past, past + new, dtype=np.int64)
            begins, table = np.array([0, new], np.int32), np.zeros(1, np.int32)
            runner.forward(Step(ids, positions, np.array([past], np.int32), begins, table, np.array([0, 1], np.int32)))


# -- in a runtime process ----------------------------------------------------------------------------------------------


class WorkerEngine(Engine):
    """The model of a runtime process. spans: of its steps; closed with the engine."""

    def __init__(self, model: LocalModel, spans: Spans | None = None) -> None:
        self._model, self._spans = model, spans
        shown = lambda: {"queues": model.queues()} | model.health()  # noqa: E731  # queues first: it delivers events
        self._live = OnDemandLive(model.add_sink, model.remove_sink, shown)
        if spans is not None:
            model.add_sink(spans)

    def info(self) -> dict[str, Any]:
        """The limits, with which the server checks requests, and the runner's name."""
        return asdict(self._model.limits) | {"runner": self._model.processor.runner.name}

    def state(self) -> dict[str, Any]:
        """The same fields as /health of a server without workers."""
        return {"state": self._model.state} | self._model.health()

    async def metrics(self) -> str:
        await self._model.metrics()
        return generate_latest(self._model.registry).decode()

    def live(self) -> LiveSnapshot:
        return self._live.snapshot()

    async def submit(
        self, params: wire.GenerateParams, bell: asyncio.Event, leader: GenerationStream | None
    ) -> GenerationStream:
        model, prompt = self._model, params.prompt_token_ids
        given = [p for p in (params.prompt, prompt, params.messages) if p is not None]
        if len(given) != 1:
            raise ConfigError(f"prompt: give one of prompt, prompt_token_ids and messages, not {len(given)}")
        if params.prompt is not None:
            prompt = (await model.texts.encode([params.prompt]))[0]
        elif prompt is None:
            prompt = await model.texts.encode_chat(Conversation(params.messages or []))
        matcher = await model.compiled(params.constraint)
        scores = 0 if params.prompt_logprobs is None else len(prompt) * (1 + params.prompt_logprobs)
        if scores > (most := wire.MOST_SCORES):  # a client would refuse more
            raise ConfigError(f"prompt_logprobs: {scores} numbers of the prompt are too many, at most {most} are sent")
        params = msgspec.structs.replace(params, prompt=None, prompt_token_ids=None, messages=None)  # frees them
        return model.submit(model.request(prompt, params, matcher), bell, leader)

    async def close(self, drain: bool, timeout: float) -> bool:
        self._live.close()
        closed = await self._model.close(drain, timeout)
        if self._spans is not None:
            await in_thread(self._spans.close)
        return closed


def loading(load: Load, lost: Lost) -> LoadEngine:
    """The function that answers `load_model` in a runtime process. lost: called on the loop when the model is lost.

    It raises ConfigError for options that `reflex serve MODEL_DIR` does not have, and for a directory without a model.
    """

    async def loaded(params: wire.LoadModel) -> WorkerEngine:
        if not params.path:
            raise ConfigError("load_model: needs path, the directory of the model")
        plan = ModelPlan(params.model_id, _config(params.options), Path(params.path))
        registry = CollectorRegistry()
        spans = spans_of(plan.config.otel, registry, "steps")
        model = await open_model(load, plan, registry, lost)
        freeze_loaded()
        return WorkerEngine(model, spans)

    return loaded


def _config(options: dict[str, Any]) -> LLMServeConfig:
    hints = hints_of(LLMServeConfig)
    unknown = next((name for name in options if name not in hints), None)
    if unknown is not None:
        raise ConfigError(f"load_model: options.{unknown[:100]}: no such setting")
    return LLMServeConfig(
        **{name: convert(value, hints[name], f"load_model: options.{name}") for name, value in options.items()}
    )
