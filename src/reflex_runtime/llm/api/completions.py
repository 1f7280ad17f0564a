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
from functools import partial
from typing import Final, TypeVar

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.events import RequestAnswered
from reflex_runtime.ipc.streams import merged
from reflex_runtime.llm.api import requests as wire
from reflex_runtime.llm.api.errors import too_deep
from reflex_runtime.llm.api.expand import queued
from reflex_runtime.llm.api.replies import ModelApi, ReplyContext, Usage, Writer
from reflex_runtime.llm.server.lifecycle import ServerState
from reflex_runtime.llm.server.model_host import ModelHost
from reflex_runtime.observe.spans import Spans
from reflex_runtime.observe.trace_context import Attribute, follow
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
            bell, of = asyncio.Event(), None if span is None else span.span
            reply = await queued(host, asked, self.state.plan.config, request, adapter, of, bell)
            del asked  # and its texts
            try:
                request.preparing = False
                request.app.bodies.release(request)
                answer = dialect.write(reply)
                send = _stream if reply.asked.stream else _whole
                try:
                    await send(request, reply, answer, bell, hints, span)
                finally:
                    if span is not None:
                        span.used(reply.usage())
            finally:
                for stream in reply.streams:
                    stream.close()
        except (Exception, asyncio.CancelledError) as failure:
            error = cancelled_by(failure) if isinstance(failure, asyncio.CancelledError) else failure
            if span is not None:
                span.ended(known(error, request.request_id))
            raise
        if span is not None:
            span.answered(answer)

    def told(self, path: str, ignored: Sequence[str], host: ModelHost) -> Headers:
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


async def _whole(
    request: HttpRequest, reply: ReplyContext, answer: Writer, bell: asyncio.Event, hints: Headers,
    span: GenerationSpan | None,
) -> None:  # fmt: skip
    async for index, outputs in merged(reply.streams, bell):
        if span is not None:
            span.part()
        answer.add(index, outputs)
    params = reply.asked.params
    told = params.prompt_logprobs is not None or params.logprobs is not None
    await request.answer(HttpResponse(200, await _made(told, answer.whole), headers=hints))


async def _stream(
    request: HttpRequest, reply: ReplyContext, answer: Writer, bell: asyncio.Event, hints: Headers,
    span: GenerationSpan | None,
) -> None:  # fmt: skip
    scored = reply.asked.params.prompt_logprobs is not None
    async for index, outputs in merged(reply.streams, bell):
        events = await _made(scored, partial(answer.chunk, index, outputs))
        if not request.begun:
            if span is not None:
                span.part()
            await request.begin(200, [*_STREAM, *hints], answer.failed)
        if events:
            await request.write(events)
    await request.end(answer.end())


async def _made(long: bool, write: Callable[[], bytes]) -> bytes:
    """What it writes. long: in a thread, because what the model says of thousands of tokens takes seconds."""
    if not long:
        return write()
    return await asyncio.get_running_loop().run_in_executor(None, write)


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
