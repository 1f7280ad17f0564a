"""From the body of a request to its answer: read, tokenised, queued, and written as its API's clients know it.

A stream begins with its first token, so that an error before it has its own status. If a caller disconnects, streaming
or not, its request is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from msgspec.structs import replace as changed

from reflex_runtime.config import LLMServeConfig
from reflex_runtime.core.errors import ConfigError, Expired, ReflexError, TooLarge
from reflex_runtime.drivers.stream import Bell
from reflex_runtime.ipc.engine import OutputStream, ScoredToken
from reflex_runtime.llm.constraint import Matcher
from reflex_runtime.llm.reasoning import ThoughtParser, in_thought
from reflex_runtime.llm.sequence import Choice
from reflex_runtime.llm.serving.answers.replies import Answering, Cached, ModelApi, PartReader, Usage, Writer
from reflex_runtime.llm.serving.generation import Generator, merged
from reflex_runtime.llm.serving.model_host import ModelHost
from reflex_runtime.llm.serving.model_runtime import ModelRuntime
from reflex_runtime.llm.serving.requests import reading as wire
from reflex_runtime.llm.serving.requests.refusals import BadRequest, too_deep
from reflex_runtime.llm.serving.served_model import ServedModel
from reflex_runtime.llm.serving.spans import GenerationSpans, asked_in, first_token
from reflex_runtime.llm.serving.tokens import beside
from reflex_runtime.llm.terms import Terms
from reflex_runtime.llm.tokenizer import Tokenizer
from reflex_runtime.llm.tools import ToolFormat
from reflex_runtime.telemetry.tracing import RequestSpan
from reflex_runtime.web.app import App
from reflex_runtime.web.bodies import LARGE
from reflex_runtime.web.errors import CallerLeft
from reflex_runtime.web.exchange import Exchange
from reflex_runtime.web.form import Headers

T = TypeVar("T")
MOST_SCORES: Final = 1 << 19  # numbers that one answer tells of its prompts: some 40 MB of JSON
_STREAM: Final[Headers] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # some proxies buffer answers; this header forbids it
]


class Completing:
    """Answers what is asked of the models. app: reads bodies and carries answers. spans: None without tracing."""

    def __init__(self, models: ModelRuntime, app: App, spans: GenerationSpans | None) -> None:
        self.models = models
        self.app = app
        self._spans = spans

    async def complete(self, exchange: Exchange, body: bytes, dialect: ModelApi) -> None:
        host: ModelHost = exchange.ask  # what was ready when it entered answers it, also in a drain
        streams: list[OutputStream] = []
        exchange.on_left = partial(_take_back, streams)
        span = None if self._spans is None else self._spans.begin(exchange)
        try:
            bell = Bell()
            asked = await self.decoded(lambda body: dialect.read(body, self.models.defaults_of), body)
            del body  # what it says is decoded
            model = self.models.find(asked.model)
            if span is not None:
                asked_in(span, asked, model.name)
            runtime = host.generator(model.plan.name)
            queued = await self._queue(exchange, model, runtime, asked, streams, bell, span)
            self.app.entered(exchange)
            usage, token = partial(_usage, streams, asked), runtime.tokenizer.token
            asked = queued.asked
            reply = Answering(
                exchange.number, asked, len(streams), token, usage, queued.reader, queued.echoes, queued.scores
            )
            await self._answer(exchange, streams, dialect.write(reply), asked, bell, span)
        finally:
            _take_back(streams)

    async def _answer(
        self,
        exchange: Exchange,
        streams: list[OutputStream],
        answer: Writer,
        asked: wire.CompletionRequest,
        bell: Bell,
        span: RequestSpan | None,
    ) -> None:
        send = _stream if asked.stream else _whole
        if self._spans is None or span is None:
            await send(exchange, streams, answer, asked, bell)
            return
        try:
            await send(exchange, streams, answer, asked, bell, span)
        finally:
            self._spans.used(span, exchange, _usage(streams, asked))
        self._spans.answered(exchange, answer)

    async def _queue(
        self,
        exchange: Exchange,
        model: ServedModel,
        runtime: Generator[Any],
        asked: wire.CompletionRequest,
        streams: list[OutputStream],
        bell: Bell,
        span: RequestSpan | None,
    ) -> Queued:
        """Queue all its choices, or none."""
        _check_choices(asked, model.config)
        if asked.prompt_logprobs is not None and not runtime.scores:
            name = "echo" if asked.echo else "prompt_logprobs"
            raise BadRequest(f"{name}: what the model says of a prompt is not told with --workers", name)
        try:
            asked = _with_tools(asked, runtime.tokenizer.tool_format)
            prompts = await self._tokens(runtime, asked)
        except RecursionError:  # the decoder allows a few levels more than others do
            raise too_deep() from None
        _check_tokens(asked, prompts, model.config)
        _check_scores(asked, prompts)
        try:
            matcher = await runtime.compiled(asked.params.constraint)
        except ConfigError as error:
            field = "tools" if asked.tools.forced else asked.form_field
            raise BadRequest(f"{field}: {error.message}", field) from None
        asked = _aged(asked, exchange)
        made = partial(_requests, runtime, model.adapter, asked, matcher=matcher, exchange=exchange, span=span)
        groups = [made(i, ids) for i, ids in enumerate(prompts)]
        echoes = await _echoes(asked, runtime.tokenizer) if asked.echo else []
        if exchange.left:
            raise CallerLeft("the caller left before its request was queued")
        for group in groups:  # without an await in between, so that all are queued or none
            streams += runtime.submit_alike(group, bell)
        self.app.bodies.release(exchange)
        reader = None if asked.conversation is None else _reader(asked, runtime.tokenizer, prompts[0])
        scores = None
        if asked.prompt_logprobs is not None:
            firsts = [Choice(ids[0]) for ids in prompts for _ in range(asked.n)]
            told = [runtime.prompt_scores(request) for group in groups for request in group]
            scores = partial(_prompt_tokens, firsts, told)
        return Queued(replace(asked, prompts=[], conversation=None), echoes, reader, scores)

    @staticmethod
    async def _tokens(runtime: Generator[Any], asked: wire.CompletionRequest) -> list[list[int]]:
        try:
            if asked.conversation is not None:
                return [await runtime.encode_chat(asked.conversation)]
            texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]  # all of them are, or none
            return await runtime.encode(texts) if texts else [p for p in asked.prompts if not isinstance(p, str)]
        except ConfigError as error:
            raise wire.refused(error, asked.field) from None

    async def decoded(self, read: Callable[[bytes], T], body: bytes) -> T:
        try:
            return read(body) if len(body) <= LARGE else await self.app.bodies.beside(read, body)
        except RecursionError:
            raise too_deep() from None


class Queued(NamedTuple):
    """A request whose choices are queued, without its texts. echoes, reader, scores: see `Answering`."""

    asked: wire.CompletionRequest
    echoes: list[str]
    reader: Callable[[], PartReader] | None
    scores: Callable[[int], Sequence[ScoredToken]] | None


def _prompt_tokens(
    firsts: Sequence[ScoredToken], scores: Sequence[Sequence[ScoredToken]], index: int
) -> list[ScoredToken]:
    return [firsts[index], *scores[index]]


def _reader(
    asked: wire.CompletionRequest, tokenizer: Tokenizer, prompt: list[int]
) -> Callable[[], PartReader] | None:
    """What reads the text of an answer; None where it has no parts. A form holds from the first token on, so that an
    answer that has one thinks nothing."""
    form = tokenizer.tool_format if asked.tools.tools else None
    thinks = tokenizer.reasons and asked.params.constraint is None
    if form is None and not thinks:
        return None
    begun = thinks and in_thought(tokenizer, prompt)

    def made() -> PartReader:
        tools = None if form is None else asked.tools.parser(form)
        return PartReader(ThoughtParser(begun) if thinks else None, tools)

    return made


def _check_choices(asked: wire.CompletionRequest, config: LLMServeConfig) -> None:
    """Refuse more choices than may ever wait, because they are queued together."""
    choices, most = asked.n * max(1, len(asked.prompts)), config.max_queue
    if choices > most:
        raise BadRequest(f"n: asks for {choices} choices of all prompts, at most {most} may wait (--max-queue)", "n")


def _check_tokens(asked: wire.CompletionRequest, prompts: list[list[int]], config: LLMServeConfig) -> None:
    """The same for their tokens. A single choice may have any length."""
    tokens, most = asked.n * sum(map(len, prompts)), config.max_queued_tokens
    if tokens > most and asked.n * len(prompts) > 1:
        name = "n" if asked.n > 1 else asked.field
        what = f"all choices have {tokens} prompt tokens, at most {most} may wait (--max-queued-tokens)"
        raise BadRequest(f"{name}: {what}", name)


def _check_scores(asked: wire.CompletionRequest, prompts: list[list[int]]) -> None:
    """Refuse more numbers of the prompts' own tokens than one answer may hold."""
    if asked.prompt_logprobs is None:
        return
    told = asked.n * sum(map(len, prompts)) * (1 + asked.prompt_logprobs)
    if told > MOST_SCORES:
        name = "echo" if asked.told_of_prompt is None else "prompt_logprobs"
        what = f"{told} numbers of the prompts' tokens would be told, at most {MOST_SCORES} are"
        raise BadRequest(f"{name}: {what}; ask for fewer alternatives, choices or prompts", name)


async def _echoes(asked: wire.CompletionRequest, tokenizer: Tokenizer) -> list[str]:
    """The text with which each choice begins. Its token ids are known to be the model's."""
    ids = sum(len(prompt) for prompt in asked.prompts if not isinstance(prompt, str))
    texts = await beside(ids, lambda: [p if isinstance(p, str) else tokenizer.decode(p) for p in asked.prompts])
    return [text for text in texts for _ in range(asked.n)]


def _take_back(streams: list[OutputStream]) -> None:
    """Cancel the generation."""
    for stream in streams:
        stream.close()


def _with_tools(asked: wire.CompletionRequest, form: ToolFormat | None) -> wire.CompletionRequest:
    """The request, its answer forced to be a call where that is demanded. BadRequest when the model knows no tools."""
    if not asked.tools.tools:
        return asked
    constraint = asked.tools.constraint(form)
    return asked if constraint is None else replace(asked, params=changed(asked.params, constraint=constraint))


def _aged(asked: wire.CompletionRequest, exchange: Exchange) -> wire.CompletionRequest:
    """With the rest of its time limit: it counts from when the request reached this machine."""
    if asked.time_limit is None:
        return asked
    left = asked.time_limit - (time.monotonic() - exchange.started)
    if left <= 0.0:
        raise Expired("its deadline passed while it was read")
    return replace(asked, time_limit=left)


def _requests(
    runtime: Generator[Any],
    adapter: str,
    asked: wire.CompletionRequest,
    number: int,
    ids: list[int],
    matcher: Matcher | None,
    exchange: Exchange,
    span: RequestSpan | None,
) -> list[Any]:
    """The requests of one prompt, one for each choice. Raises BadRequest where they could never run."""
    params = asked.params
    if asked.max_tokens is None:  # as many as there is room for
        room = runtime.limits.room(len(ids))
        if params.min_tokens > room:
            raise BadRequest(f"min_tokens={params.min_tokens}: there is room for {room} tokens", "min_tokens")
        params = changed(params, max_tokens=room)
    peer = exchange.client
    terms = Terms(
        priority=asked.priority,
        client=asked.client if asked.client is not None else f"@{peer[0]}" if peer else "",
        time_limit=asked.time_limit,
        max_gap=asked.max_gap,
        span=None if span is None or not span.context.sampled else span.context,
        adapter=adapter,
        prompt_logprobs=asked.prompt_logprobs,
    )
    found = []
    for i in range(asked.n):
        index = number * asked.n + i
        seeded = params if params.seed is None or not i else changed(params, seed=(params.seed + i) % (1 << 64))
        name = exchange.request_id + (f"#{index}" if index or asked.n > 1 or len(asked.prompts) > 1 else "")
        try:
            found.append(runtime.request(ids, seeded, replace(terms, id=name), matcher))
        except TooLarge as error:
            raise BadRequest(error.message, asked.field, "context_length_exceeded") from None
        except ConfigError as error:
            raise wire.refused(error, asked.field) from None
    return found


async def _whole(
    exchange: Exchange,
    streams: list[OutputStream],
    answer: Writer,
    asked: wire.CompletionRequest,
    bell: Bell,
    span: RequestSpan | None = None,
) -> None:
    async for index, outputs in merged(streams, bell):
        first_token(span)
        answer.add(index, outputs)
    told = asked.prompt_logprobs is not None or asked.params.logprobs is not None
    exchange.answer(200, await _made(told, answer.whole))


async def _stream(
    exchange: Exchange,
    streams: list[OutputStream],
    answer: Writer,
    asked: wire.CompletionRequest,
    bell: Bell,
    span: RequestSpan | None = None,
) -> None:
    aside = partial(_pass_on, exchange, streams[0], answer) if len(streams) == 1 else None
    async for index, outputs in merged(streams, bell, aside):
        events = await _made(asked.prompt_logprobs is not None, partial(answer.chunk, index, outputs))
        if not exchange.begun:
            first_token(span)
            exchange.begin(200, _STREAM, answer.failed)
        if events:
            await exchange.drained()
            exchange.write(events)
    await exchange.drained()
    exchange.write(answer.end())
    exchange.end()


async def _made(long: bool, write: Callable[[], bytes]) -> bytes:
    """What it writes. long: in a thread, because what the model says of thousands of tokens takes seconds."""
    if not long:
        return write()
    return await asyncio.get_running_loop().run_in_executor(None, write)


def _pass_on(exchange: Exchange, stream: OutputStream, answer: Writer) -> bool:
    """Write the next outputs at once, without waking a task for each token. False when a task is needed: nothing was
    sent yet, the reader is slow, the stream has ended or failed."""
    if not exchange.begun or stream.ended or not exchange.writable:
        return False
    try:
        events = answer.chunk(0, stream.take())
    except ReflexError:
        return False  # it is raised again for the task
    if events:
        exchange.write(events)
    return True


def _usage(streams: list[OutputStream], asked: wire.CompletionRequest) -> Usage:
    """A prompt counts once, whatever the number of its choices."""
    firsts = streams[:: asked.n]
    prompt = sum(s.prompt_tokens for s in firsts)
    made = 0 if asked.prompt_only else sum(s.completion_tokens for s in streams)
    return Usage(prompt, made, prompt + made, Cached(sum(s.cached_tokens for s in firsts)))
