"""From the body of a request to its answer: read, tokenised, queued, and written as its API's clients know it.

A stream begins with its first token, so that an error before it has its own status. If a caller disconnects, streaming
or not, its request is cancelled. Spans follow the GenAI conventions of OpenTelemetry
(https://opentelemetry.io/docs/specs/semconv/gen-ai/); prompts and completions are never in a span.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.events import RequestAnswered
from reflex_runtime.ipc.engine import OutputStream
from reflex_runtime.ipc.messages import ScoredToken
from reflex_runtime.llm.api import requests as wire
from reflex_runtime.llm.api.errors import too_deep
from reflex_runtime.llm.api.expand import aged, echoes, matcher_of, options_of, reader_of, requests_of, tokenised
from reflex_runtime.llm.api.replies import Cached, ModelApi, ReplyContext, Usage, Writer
from reflex_runtime.llm.engine.generation import Generator, merged
from reflex_runtime.llm.engine.output_parsers import PartReader
from reflex_runtime.llm.server.lifecycle import ServerState
from reflex_runtime.observe.spans import Spans
from reflex_runtime.observe.trace_context import Attribute, follow
from reflex_runtime.run.audience import Slices, in_order
from reflex_runtime.settings import LLMServeConfig
from reflex_runtime.web.app import cancelled_by
from reflex_runtime.web.errors import Headers, known
from reflex_runtime.web.request import HttpRequest, HttpResponse

log = logging.getLogger("reflex.server")

T = TypeVar("T")
LARGE: Final = 128 * 1024
"""Bytes of a body; what is larger is read beside the loop: what its messages become is Python's, 100 ms a megabyte."""
_STREAM: Final[Headers] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # some proxies buffer answers; this header forbids it
]
IGNORED: Final = b"x-reflex-ignored"
MOST_TOLD: Final = 50  # hints that the header names
_PLACE: Final = re.compile(r"\[\d+\]")
WIRE: Final = "openai"
FIRST_TOKEN: Final = "gen_ai.first_token"  # a moment
_PROVIDER: Final = "reflex"


class CompletionHandler:
    """Answers what is asked of the model."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self._told: set[str] = set()

    async def complete(self, dialect: ModelApi, request: HttpRequest) -> None:
        span = self._span(request)
        if span is not None:
            follow(span.span.context)
        try:
            host = self.state.ready()  # what is ready now answers it, also in a drain
            request.preparing = True
            asked = await read_body(request, lambda body: dialect.read(body, self.state.defaults))
            if span is not None:
                span.asked(asked)
            adapter = self.state.adapter(asked.model)
            hints = self.told(dialect.path, asked.ignored, host)
            underway = PendingCompletion(request, host, asked, self.state.plan.config, adapter, span, hints)
            del asked  # once it is queued, its texts are not kept
            try:
                await underway.queue()
                request.preparing = False
                request.app.bodies.release(request)
                answer = dialect.write(underway.answering())
                try:
                    await underway.send(answer)
                finally:
                    if span is not None:
                        span.used(underway.usage())
            finally:
                underway.close()
        except (Exception, asyncio.CancelledError) as failure:
            error = cancelled_by(failure) if isinstance(failure, asyncio.CancelledError) else failure
            if span is not None:
                span.ended(known(error, request.request_id))
            raise
        if span is not None:
            span.answered(answer)

    def told(self, path: str, ignored: Sequence[str], host: Generator[Any]) -> Headers:
        """The header that names hints that nothing follows, where there are some. They are logged, the same ones
        once."""
        if host.texts.tokenizer.takes_effort:
            ignored = [name for name in ignored if name not in wire.EFFORTS]
        names = {_PLACE.sub("[]", f"{path}: {name}") for name in ignored} - self._told
        for name in sorted(names):
            log.info("%s is a hint that nothing here follows; answers name it in %s", name, IGNORED.decode())
        self._told |= names
        return [(IGNORED, ", ".join(ignored[:MOST_TOLD]).encode())] if ignored else []

    def refused(self, request: HttpRequest, error: ReflexError) -> None:
        """It was refused before it was read."""
        span = self._span(request)
        if span is not None:
            span.ended(error)

    def _span(self, request: HttpRequest) -> GenerationSpan | None:
        spans = self.state.spans
        return None if spans is None else GenerationSpan(spans, self.state.plan.name, request)


async def read_body(request: HttpRequest, read: Callable[[bytes], T]) -> T:
    """What the body says; a large one is read beside the loop."""
    body = await request.body()
    try:
        return read(body) if len(body) <= LARGE else await request.app.bodies.beside(read, body)
    except RecursionError:
        raise too_deep() from None


class PendingCompletion:
    """A request on its way to the model and back: `queue`, `answering`, `send`, and `close` in any case. runtime: has
    the model. adapter: that it asks for, or "". span: None without tracing. hints: the header that tells of some."""

    def __init__(
        self,
        request: HttpRequest,
        runtime: Generator[Any],
        asked: wire.CompletionRequest,
        config: LLMServeConfig,
        adapter: str,
        span: GenerationSpan | None,
        hints: Headers,
    ) -> None:
        self._request, self._runtime, self._asked, self._span = request, runtime, asked, span
        self._hints = hints
        self._config, self._adapter = config, adapter
        self._bell = asyncio.Event()
        self._streams: list[OutputStream] = []
        self._echoes: list[str] = []
        self._reader: Callable[[], PartReader] | None = None
        self._scores: Callable[[int], Sequence[ScoredToken]] | None = None

    async def queue(self) -> None:
        """Queue all its choices, or none: where one is refused, `close` takes back those before it. Raises BadRequest,
        Rejected."""
        request, runtime, config = self._request, self._runtime, self._config
        asked, prompts = await tokenised(runtime, self._asked, config)
        matcher = await matcher_of(runtime, asked)
        asked = aged(asked, request)
        span = None if self._span is None else self._span.span
        options = options_of(asked, self._adapter, config.default_tiers, request, span)
        slices = Slices()
        made = (requests_of(runtime, asked, i, ids, options, matcher, slices) for i, ids in enumerate(prompts))
        groups = [await each for each in made]  # all of them before one is queued: what could never run is refused
        self._echoes = await echoes(asked, runtime.texts.tokenizer)
        async with in_order(runtime.queueing, asked.n * len(groups)):
            for group in groups:
                await slices.next(asked.n)
                self._streams += runtime.submit_alike(group, self._bell)
        if asked.conversation is not None:
            self._reader = reader_of(asked, runtime.texts.tokenizer, prompts[0])
        if asked.prompt_logprobs is not None:
            firsts = [ScoredToken(ids[0]) for ids in prompts]
            self._scores = partial(_prompt_tokens, firsts, self._streams, asked.n)
        self._asked = replace(asked, prompts=[], conversation=None)

    def answering(self) -> ReplyContext:
        """What its answer is made from."""
        asked, tokenizer, choices = self._asked, self._runtime.texts.tokenizer, len(self._streams)
        number, echoes = self._request.number, self._echoes
        return ReplyContext(number, asked, choices, tokenizer, self.usage, self._reader, echoes, self._scores)

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, whatever the number of its choices."""
        firsts = self._streams[:: self._asked.n]
        prompt = sum(s.prompt_tokens for s in firsts)
        made = 0 if self._asked.prompt_only else sum(s.completion_tokens for s in self._streams)
        return Usage(prompt, made, prompt + made, Cached(sum(s.cached_tokens for s in firsts)))

    async def send(self, answer: Writer) -> None:
        """Send its answer as it was asked for: whole, or as a stream."""
        await (self._stream(answer) if self._asked.stream else self._whole(answer))

    def close(self) -> None:
        """Cancel the generation."""
        for stream in self._streams:
            stream.close()

    async def _whole(self, answer: Writer) -> None:
        async for index, outputs in merged(self._streams, self._bell):
            self._noted()
            answer.add(index, outputs)
        told = self._asked.prompt_logprobs is not None or self._asked.params.logprobs is not None
        await self._request.answer(HttpResponse(200, await _made(told, answer.whole), headers=self._hints))

    def _noted(self) -> None:
        if self._span is not None:
            self._span.part()

    async def _stream(self, answer: Writer) -> None:
        request = self._request
        async for index, outputs in merged(self._streams, self._bell):
            events = await _made(self._asked.prompt_logprobs is not None, partial(answer.chunk, index, outputs))
            if not request.begun:
                self._noted()
                await request.begin(200, [*_STREAM, *self._hints], answer.failed)
            if events:
                await request.write(events)
        await request.end(answer.end())


async def _made(long: bool, write: Callable[[], bytes]) -> bytes:
    """What it writes. long: in a thread, because what the model says of thousands of tokens takes seconds."""
    if not long:
        return write()
    return await asyncio.get_running_loop().run_in_executor(None, write)


def _prompt_tokens(
    firsts: Sequence[ScoredToken], streams: Sequence[OutputStream], n: int, index: int
) -> list[ScoredToken]:
    """The prompt of a choice. firsts: the first token of each prompt; its first choice tells the others."""
    return [firsts[index // n], *streams[index // n * n].prompt_scores]


class GenerationSpan:
    """The span of one request to the model of that name. All of it happens on the event loop."""

    def __init__(self, spans: Spans, model: str, request: HttpRequest) -> None:
        self._spans, self._request = spans, request
        route = "" if request.route is None else request.route.path
        operation = "text_completion" if route == "/v1/completions" else "chat"
        self.span = spans.begin(f"{operation} {model}", request.headers)
        self.span.attributes |= {
            "http.request.method": request.method,
            "http.route": route,
            "reflex.wire": WIRE,
            "reflex.request.id": request.request_id,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.response.model": model,
        }

    def asked(self, asked: wire.CompletionRequest) -> None:
        """What it asks for, without its texts."""
        params = asked.params
        self.span.name = f"{self.span.attributes['gen_ai.operation.name']} {asked.model}"
        self.span.attributes["gen_ai.response.model"] = asked.model
        found: dict[str, Attribute] = {
            "model": asked.model,
            "stream": asked.stream,
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        if asked.max_tokens is not None:
            found["max_tokens"] = asked.max_tokens
        if params.top_k:
            found["top_k"] = params.top_k
        if params.seed is not None and -(1 << 63) <= params.seed < 1 << 63:  # what an attribute can have
            found["seed"] = params.seed
        if asked.n > 1:
            found["choice.count"] = asked.n
        self.span.attributes |= {f"gen_ai.request.{name}": value for name, value in found.items()}

    def part(self) -> None:
        """A part of the answer has come; the first one is noted."""
        if not self.span.moments:
            self.span.moments = ((FIRST_TOKEN, time.monotonic()),)

    def used(self, usage: Usage) -> None:
        """What it took, also of a request that failed."""
        self.span.attributes |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
        }
        if self.span.moments:
            waited = self.span.moments[0][1] - self._request.started
            self.span.attributes["gen_ai.response.time_to_first_chunk"] = waited

    def answered(self, answer: Writer) -> None:
        """It has its whole answer."""
        told: dict[str, Attribute] = {"id": answer.id, "finish_reasons": answer.finish_reasons}
        self.span.attributes |= {f"gen_ai.response.{name}": value for name, value in told.items()}
        self.ended(None)

    def ended(self, error: ReflexError | None) -> None:
        """It has its answer, or an error."""
        now, request = time.monotonic(), self._request
        outcome, status = ("ok", 200) if error is None else (error.outcome, error.http_status)
        self.span.attributes["http.response.status_code"] = 200 if request.begun else status
        received = request.received or now
        model, latency = str(self.span.attributes["gen_ai.response.model"]), now - request.started
        self._spans(
            RequestAnswered(now, model, outcome, status, latency, None, None, now - received, WIRE, error, self.span)
        )
