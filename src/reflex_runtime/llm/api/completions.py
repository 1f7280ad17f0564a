"""From the body of a request to its answer: read, tokenise, queue, write.

A stream begins with its first token, so that an earlier error has its own status. When a caller leaves, its request is
cancelled. Spans have no text; they follow OpenTelemetry's https://opentelemetry.io/docs/specs/semconv/gen-ai/.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec.structs import replace as changed

from reflex_runtime.core.batch import RequestAnswered
from reflex_runtime.core.errors import ConfigError, Expired, ReflexError, TooLarge
from reflex_runtime.ipc.messages import MOST_SCORES, GenerateParams, ScoredToken
from reflex_runtime.ipc.streams import OutputStream, merged
from reflex_runtime.llm.api import requests as wire
from reflex_runtime.llm.api.answers import ModelApi, ReplyContext, Writer
from reflex_runtime.llm.api.fields import BadRequest, too_deep
from reflex_runtime.llm.engine.logits_processors import Matcher
from reflex_runtime.llm.engine.output_parsers import PartReader, ThoughtParser
from reflex_runtime.llm.engine.tokenizer import Tokenizer, in_thought
from reflex_runtime.llm.server.lifecycle import ServerState
from reflex_runtime.observe.tracing import follow
from reflex_runtime.run.audience import SLICE
from reflex_runtime.settings import LLMServeConfig
from reflex_runtime.web.app import cancelled_by
from reflex_runtime.web.errors import Headers, known
from reflex_runtime.web.request import HttpRequest, HttpResponse

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from reflex_runtime.llm.server.lifecycle import ModelHost
    from reflex_runtime.observe.spans import Spans

log = logging.getLogger("reflex.server")

T = TypeVar("T")
LARGE: Final = 128 * 1024
"""Bytes of a body; a larger one is parsed in a thread: its messages take 100 ms of Python a megabyte."""
_STREAM: Final[Headers] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # for proxies that buffer answers
]
IGNORED: Final = b"x-reflex-ignored"
MOST_NAMED: Final = 50  # hints in the header
_PLACE: Final = re.compile(r"\[\d+\]")
WIRE: Final = "openai"
FIRST_TOKEN: Final = "gen_ai.first_token"  # an event of the span
_PROVIDER: Final = "reflex"


class CompletionHandler:
    """Answers requests of all dialects."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self._logged: set[str] = set()

    async def complete(self, dialect: ModelApi, request: HttpRequest) -> None:
        span, reply = self._span(request), None
        if span is not None:
            follow(span.span.get_span_context())
        try:
            host = self.state.ready()  # first: a drain that begins from now on waits for this request
            request.preparing = True
            asked = await read_body(request, lambda body: dialect.read(body, self.state.plan.defaults))
            adapter = self.state.adapter(asked.model)  # before the span is named: it gets no unknown name
            if span is not None:
                span.note_request(asked)
            hints = self.hint_header(dialect.path, asked.ignored, host)
            bell, parent = asyncio.Event(), "" if span is None else span.traceparent
            reply = await queued(host, asked, self.state.plan.config, request, adapter, parent, bell)
            del asked  # frees the texts of the prompts
            try:
                request.preparing = False
                request.app.bodies.release(request)
                answer = dialect.write(reply)
                await _answer(request, reply, answer, bell, hints, span)
            finally:
                for stream in reply.streams:
                    stream.close()
        except (Exception, asyncio.CancelledError) as failure:
            error = cancelled_by(failure) if isinstance(failure, asyncio.CancelledError) else failure
            if span is not None:
                span.ended(known(error, request.request_id), reply)
            raise
        if span is not None:
            span.ended(None, reply, answer)

    def hint_header(self, path: str, ignored: Sequence[str], host: ModelHost) -> Headers:
        """The header that names hints without effect, if there are any. Each hint is logged once."""
        if host.texts.tokenizer.takes_effort:
            ignored = [name for name in ignored if name not in wire.EFFORTS]
        names = {_PLACE.sub("[]", f"{path}: {name}") for name in ignored} - self._logged
        for name in sorted(names):
            log.info("%s is a hint without effect here; answers name it in %s", name, IGNORED.decode())
        self._logged |= names
        return [(IGNORED, ", ".join(ignored[:MOST_NAMED]).encode())] if ignored else []

    def refused(self, request: HttpRequest, error: ReflexError) -> None:
        """Make the span of a request that was refused before its body was read."""
        span = self._span(request)
        if span is not None:
            span.ended(error)

    def _span(self, request: HttpRequest) -> GenerationSpan | None:
        spans = self.state.spans
        return None if spans is None else GenerationSpan(spans, self.state.plan.name, request)


async def read_body(request: HttpRequest, read: Callable[[bytes], T]) -> T:
    """What `read` makes of the body; a large body is parsed in a thread."""
    body = await request.body()
    try:
        return read(body) if len(body) <= LARGE else await request.app.bodies.beside(read, body)
    except RecursionError:
        raise too_deep() from None


async def _answer(
    request: HttpRequest, reply: ReplyContext, answer: Writer, bell: asyncio.Event, hints: Headers,
    span: GenerationSpan | None,
) -> None:  # fmt: skip
    """Write the answer: events as outputs come, or one body at the end."""
    params, stream = reply.asked.params, reply.asked.stream
    async for index, outputs in merged(reply.streams, bell):
        if span is not None:
            span.part()
        events = await _written(params.prompt_logprobs is not None, partial(answer.add, index, outputs))
        if stream and not request.begun:
            await request.begin(200, [*_STREAM, *hints], answer.failed)
        if events:
            await request.write(events)
    last = await _written(params.logprobs is not None and not stream, answer.end)
    if stream:
        await request.end(last)
    else:
        await request.answer(HttpResponse(200, last, headers=hints))


async def _written(scored: bool, write: Callable[[], bytes]) -> bytes:
    """What `write` returns. scored: call it in a thread, because scores of thousands of tokens take seconds."""
    return await asyncio.to_thread(write) if scored else write()


class GenerationSpan:
    """The span of one request."""

    def __init__(self, spans: Spans, model: str, request: HttpRequest) -> None:
        self._spans, self._request = spans, request
        route = "" if request.route is None else request.route.path
        operation = "text_completion" if route == "/v1/completions" else "chat"
        self.span = spans.begin(f"{operation} {model}", request.headers, request.started)
        self._operation, self._model, self._first_token = operation, model, 0.0
        self._spans.note(self.span, {
            "http.request.method": request.method,
            "http.route": route,
            "reflex.wire": WIRE,
            "reflex.request.id": request.request_id,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.response.model": model,
        })

    @property
    def traceparent(self) -> str:
        """The header that makes this span the parent of the steps' spans; "" if it is not recorded."""
        return self._spans.traceparent(self.span)

    def note_request(self, asked: wire.GenerationRequest) -> None:
        """Add the request's parameters, without texts."""
        params = asked.params
        self._model = asked.model
        self.span.update_name(f"{self._operation} {asked.model}")
        seed = params.seed
        found: dict[str, AttributeValue | None] = {
            "model": asked.model,
            "stream": asked.stream,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or None,
            "max_tokens": asked.max_tokens,
            "seed": seed if seed is not None and -(1 << 63) <= seed < 1 << 63 else None,  # 64 bits, signed
            "choice.count": asked.n if asked.n > 1 else None,
        }
        given = {f"gen_ai.request.{name}": value for name, value in found.items() if value is not None}
        self._spans.note(self.span, given | {"gen_ai.response.model": asked.model})

    def part(self) -> None:
        """Note the time of the first output."""
        if not self._first_token:
            self._first_token = time.monotonic()
            self._spans.moment(self.span, FIRST_TOKEN, self._first_token)

    def ended(self, error: ReflexError | None, reply: ReplyContext | None = None, answer: Writer | None = None) -> None:
        """End the span. reply: of a request that was queued. answer: of one that was answered in full."""
        now, request = time.monotonic(), self._request
        found: dict[str, AttributeValue] = {}
        if reply is not None:
            usage = reply.usage()
            found["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            found["gen_ai.usage.output_tokens"] = usage.completion_tokens
            found["gen_ai.usage.cache_read.input_tokens"] = usage.prompt_tokens_details.cached_tokens
        if self._first_token:
            found["gen_ai.response.time_to_first_chunk"] = self._first_token - request.started
        if answer is not None:
            found["gen_ai.response.id"] = answer.id
            found["gen_ai.response.finish_reasons"] = answer.finish_reasons
        outcome, status = ("ok", 200) if error is None else (error.outcome, error.http_status)
        self._spans.note(self.span, found | {"http.response.status_code": 200 if request.begun else status})
        received = request.received or now
        fields = now, self._model, outcome, status, now - request.started, None, None, now - received, WIRE, error
        self._spans(RequestAnswered(*fields, self.span))


# -- from texts to requests of the engine ------------------------------------------------------------------------------


FEW: Final = 1000  # tokens; more are decoded in a thread
_CHECKED: Final = 256  # tokens of a prompt that take as long to check and copy as the rest of its request


async def queued(
    runtime: ModelHost,
    asked: wire.GenerationRequest,
    config: LLMServeConfig,
    request: HttpRequest,
    adapter: str,
    traceparent: str,
    bell: asyncio.Event,
) -> ReplyContext:
    """Queue all choices of a request, or none. adapter: "" for none. bell: see `OutputStream`. Raises BadRequest,
    Expired, `Rejected`."""
    tokenizer, streams = runtime.texts.tokenizer, list[OutputStream]()
    asked, prompts = await tokenised(runtime, asked, config)
    matcher = await matcher_of(runtime, asked)
    params = served(asked, request, adapter, config.default_tiers, traceparent)
    made = (requests_of(runtime, asked, i, ids, params, matcher) for i, ids in enumerate(prompts))
    groups = [await each for each in made]  # all before one is queued: a request that can never run is refused
    begins = await echoes(asked, tokenizer)
    many, turn = asked.n * len(groups) > SLICE, max(1, SLICE // asked.n)
    try:
        # requests with many choices take turns: if two did not fit together, both would be refused
        async with runtime.queueing if many else nullcontext():
            for i, group in enumerate(groups):
                if i and i % turn == 0:
                    await asyncio.sleep(0)  # other work of the loop
                for queued_stream in runtime.submit_alike(group, bell):
                    streams.append(queued_stream)  # one by one: if a later one is refused, all are closed
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    reader = PartReader if asked.conversation is None else reader_of(asked, tokenizer, prompts[0])
    firsts = [] if params.prompt_logprobs is None else [ScoredToken(ids[0]) for ids in prompts]
    asked = replace(asked, prompts=[], conversation=None)  # the texts are not kept while it is generated
    return ReplyContext(request.number, asked, streams, tokenizer, reader, begins, firsts)


async def tokenised(
    runtime: ModelHost, asked: wire.GenerationRequest, config: LLMServeConfig
) -> tuple[wire.GenerationRequest, list[list[int]]]:
    """The request, with the constraint of a forced call added, and the tokens of its prompts. Raises BadRequest."""
    choices, most = asked.n * max(1, len(asked.prompts)), config.max_queue
    if choices > most:  # all of them are queued at once
        raise BadRequest(f"n: asks for {choices} choices of all prompts, at most {most} may wait (--max-queue)", "n")
    if asked.tools.tools:
        constraint = asked.tools.constraint(runtime.texts.tokenizer.tool_format)
        if constraint is not None:
            asked = replace(asked, params=changed(asked.params, constraint=constraint))
    texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]  # all prompts are texts, or none
    prompts = [prompt for prompt in asked.prompts if not isinstance(prompt, str)]
    prompts = prompts or await wire.tokens_of(runtime.texts, asked.conversation or texts, asked.prompt_field)
    _check_tokens(asked, prompts, config)
    return asked, prompts


async def matcher_of(runtime: ModelHost, asked: wire.GenerationRequest) -> Matcher | None:
    """The compiled form of the answer; None without a form, and if another process compiles it. Raises BadRequest."""
    try:
        return await runtime.compiled(asked.params.constraint)
    except ConfigError as error:
        field, told, form = "tools" if asked.tools.forced else asked.form_field, error.message, asked.params.constraint
        if asked.tools.forced and form and (line := re.match(r"grammar: at (\d+)\S* (?:.* schema: )?", told)):
            rule = re.match(r"[a-z]+_(\d+)", form.text.splitlines()[int(line[1]) - 1])
            told = f"{asked.tools.tools[int(rule[1])].name!r}: parameters: {told[line.end() :]}" if rule else told
        raise BadRequest(f"{field}: {told}", field) from None


def _check_tokens(asked: wire.GenerationRequest, prompts: list[list[int]], config: LLMServeConfig) -> None:
    """Raise BadRequest if the prompts of all choices have more tokens than may wait, or more scores than an answer may
    have. A single choice may have any length."""
    tokens, most = asked.n * sum(map(len, prompts)), config.max_queued_tokens
    if tokens > most and asked.n * len(prompts) > 1:
        name = "n" if asked.n > 1 else asked.prompt_field
        what = f"all choices have {tokens} prompt tokens, at most {most} may wait (--max-queued-tokens)"
        raise BadRequest(f"{name}: {what}", name)
    scores = 0 if asked.params.prompt_logprobs is None else tokens * (1 + asked.params.prompt_logprobs)
    if scores > MOST_SCORES:
        what = f"the answer would have {scores} numbers of the prompts' tokens, at most {MOST_SCORES} are allowed"
        raise BadRequest(f"echo: {what}; ask for fewer alternatives, choices or prompts", "echo")


async def echoes(asked: wire.GenerationRequest, tokenizer: Tokenizer) -> list[str]:
    """The text with which each choice begins; empty without `echo`. Token ids of prompts must have been checked."""
    if not asked.echo:
        return []
    ids = sum(len(prompt) for prompt in asked.prompts if not isinstance(prompt, str))
    decode = partial(tokenizer.decode, whole=asked.params.prompt_only)  # else a character at the end is completed

    def made() -> list[str]:
        return [p if isinstance(p, str) else decode(p) for p in asked.prompts]

    texts = made() if ids <= FEW else await asyncio.to_thread(made)
    return [text for text in texts for _ in range(asked.n)]


def served(
    asked: wire.GenerationRequest, request: HttpRequest, adapter: str, by_kind: bool, traceparent: str
) -> GenerateParams:
    """The parameters for the engine, with the client and what is left of the time limit, which counts from the
    request's arrival. by_kind: see `GenerationRequest.tier`. Raises Expired."""
    left, peer = asked.params.timeout_ms, request.client
    if left is not None:
        left -= 1e3 * (time.monotonic() - request.started)
        if left <= 0.0:
            raise Expired("its deadline passed while it was read")
    return changed(
        asked.params,
        request_id=request.request_id,
        priority=asked.tier(by_kind),
        client=asked.params.client or (f"@{peer[0]}" if peer else ""),
        timeout_ms=left,
        traceparent=traceparent,
        adapter=adapter,
    )


async def requests_of(
    runtime: ModelHost,
    asked: wire.GenerationRequest,
    number: int,
    ids: list[int],
    params: GenerateParams,
    matcher: Matcher | None,
) -> list[Any]:
    """The engine's requests for one prompt, one for each choice. Only the first scores the prompt. number: of the
    prompt, from 0. Raises BadRequest for a request that can never run."""
    turn = max(1, SLICE // (1 + len(ids) // _CHECKED))
    room = runtime.limits.room(len(ids))
    if asked.max_tokens is None or (asked.cut and asked.max_tokens > room):  # the context is filled
        if params.min_tokens > room:
            raise BadRequest(f"min_tokens={params.min_tokens}: there is room for {room} tokens", "min_tokens")
        params = changed(params, max_tokens=room)
    found = []
    for i in range(asked.n):
        index = number * asked.n + i
        if index and index % turn == 0:
            await asyncio.sleep(0)  # let other work of the loop run
        name = params.request_id + (f"#{index}" if index or asked.n > 1 or len(asked.prompts) > 1 else "")
        own = params if name == params.request_id else changed(params, request_id=name)
        if i:
            seed = None if params.seed is None else (params.seed + i) % (1 << 64)
            own = changed(own, seed=seed, prompt_logprobs=None)
        try:
            found.append(runtime.request(ids, own, matcher))
        except (ConfigError, TooLarge) as error:
            raise wire.refused(error, asked.place(number)) from None
    return found


def reader_of(asked: wire.GenerationRequest, tokenizer: Tokenizer, prompt: list[int]) -> Callable[[], PartReader]:
    """A function that makes the reader of a choice's text. A form applies from the first token on, so an answer with
    one has no thought."""
    form = tokenizer.tool_format if asked.tools.tools else None
    thinks = tokenizer.reasons and asked.params.constraint is None
    begun = thinks and in_thought(tokenizer, prompt)

    def made() -> PartReader:
        tools = None if form is None else asked.tools.parser(form)
        return PartReader(ThoughtParser(begun, tokenizer.thought) if thinks else None, tools)

    return made
