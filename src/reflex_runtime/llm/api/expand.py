"""The choices that a request asks for: from its texts to requests of the engine, or the error that says why not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from msgspec.structs import replace as changed

from reflex_runtime.core.errors import ConfigError, Expired, TooLarge
from reflex_runtime.ipc.messages import MOST_SCORES, GenerateParams, ScoredToken
from reflex_runtime.ipc.streams import OutputStream
from reflex_runtime.llm.api import requests as wire
from reflex_runtime.llm.api.errors import BadRequest, too_deep
from reflex_runtime.llm.api.replies import ReplyContext
from reflex_runtime.llm.engine.logits_processors import Matcher
from reflex_runtime.llm.engine.output_parsers import PartReader, ThoughtParser
from reflex_runtime.llm.engine.tokenizer import Tokenizer, in_thought
from reflex_runtime.llm.server.model_host import ModelHost
from reflex_runtime.observe.spans import RequestSpan
from reflex_runtime.run.audience import SLICE
from reflex_runtime.settings import LLMServeConfig
from reflex_runtime.web.request import HttpRequest

FEW: Final = 1000  # tokens; the texts of more are made beside the loop
_LOOKED_AT: Final = 256  # tokens of a prompt that take as long as the rest of its request: they are checked and copied


class Slices:
    """Of one caller that makes or queues its requests one after the other."""

    def __init__(self) -> None:
        self._done = 0  # in this turn of the loop

    async def next(self, count: int = 1) -> bool:
        """So many requests are next: in this turn of the loop, or in the next one where it has a slice of them. Whether
        others had their turn."""
        full = self._done > 0 and self._done + count > SLICE
        if full:
            self._done = 0
            await asyncio.sleep(0)
        self._done += count
        return full


def in_order(lock: asyncio.Lock, count: int) -> AbstractAsyncContextManager[None]:
    """While it is open, so many requests are queued. Of those with more than a slice one goes after the other, or two
    that do not fit together would both be refused. lock: of the queue."""
    return lock if count > SLICE else nullcontext()


async def queued(
    runtime: ModelHost,
    asked: wire.CompletionRequest,
    config: LLMServeConfig,
    request: HttpRequest,
    adapter: str,
    span: RequestSpan | None,
    bell: asyncio.Event,
) -> ReplyContext:
    """All choices of a request are queued, or none. Returns what its answer is made from. adapter: that it asks for, or
    "". bell: set whenever there is something to read. Raises BadRequest, Rejected."""
    tokenizer, slices, streams = runtime.texts.tokenizer, Slices(), list[OutputStream]()
    asked, prompts = await tokenised(runtime, asked, config)
    matcher = await matcher_of(runtime, asked)
    params = served(asked, request, adapter, config.default_tiers, span)
    made = (requests_of(runtime, asked, i, ids, params, matcher, slices) for i, ids in enumerate(prompts))
    groups = [await each for each in made]  # all of them before one is queued: what could never run is refused
    begins = await echoes(asked, tokenizer)
    try:
        async with in_order(runtime.queueing, asked.n * len(groups)):
            for group in groups:
                await slices.next(asked.n)
                streams += runtime.submit_alike(group, bell)
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    reader = None if asked.conversation is None else reader_of(asked, tokenizer, prompts[0])
    firsts = [] if params.prompt_logprobs is None else [ScoredToken(ids[0]) for ids in prompts]
    asked = replace(asked, prompts=[], conversation=None)  # once it is queued, its texts are not kept
    return ReplyContext(request.number, asked, streams, tokenizer, reader, begins, firsts)


async def tokenised(
    runtime: ModelHost, asked: wire.CompletionRequest, config: LLMServeConfig
) -> tuple[wire.CompletionRequest, list[list[int]]]:
    """The request, a call forced where it demands one, and the tokens of its prompts. Raises BadRequest."""
    _check_choices(asked, config)
    try:
        if asked.tools.tools:
            constraint = asked.tools.constraint(runtime.texts.tokenizer.tool_format)
            if constraint is not None:
                asked = replace(asked, params=changed(asked.params, constraint=constraint))
        prompts = await _tokens(runtime, asked)
    except RecursionError:  # the decoder allows a few levels more than others do
        raise too_deep() from None
    _check_tokens(asked, prompts, config)
    _check_scores(asked, prompts)
    return asked, prompts


async def _tokens(runtime: ModelHost, asked: wire.CompletionRequest) -> list[list[int]]:
    try:
        if asked.conversation is not None:
            return [await runtime.texts.encode_chat(asked.conversation)]
        texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]  # all of them are, or none
        if not texts:
            return [p for p in asked.prompts if not isinstance(p, str)]
        if len(texts) > 1:
            with suppress(ConfigError, TooLarge):  # then one of them is named
                return await runtime.texts.encode(texts)
        return [await _one(runtime, text, asked.place(i)) for i, text in enumerate(texts)]
    except ConfigError as error:
        raise wire.refused(error, asked.field) from None


async def _one(runtime: ModelHost, text: str, place: str) -> list[int]:
    """The tokens of one of several texts, of which one cannot be tokenised."""
    try:
        return (await runtime.texts.encode([text]))[0]
    except TooLarge as error:
        raise BadRequest(f"{place}: {error.message}", place, "context_length_exceeded") from None
    except ConfigError as error:
        raise wire.refused(error, place) from None


async def matcher_of(runtime: ModelHost, asked: wire.CompletionRequest) -> Matcher | None:
    """What holds the answer to the form that was asked for. Raises BadRequest."""
    try:
        return await runtime.compiled(asked.params.constraint)
    except ConfigError as error:
        field = "tools" if asked.tools.forced else asked.form_field
        raise BadRequest(f"{field}: {error.message}", field) from None


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
    if asked.params.prompt_logprobs is None:
        return
    told = asked.n * sum(map(len, prompts)) * (1 + asked.params.prompt_logprobs)
    if told > MOST_SCORES:
        what = f"{told} numbers of the prompts' tokens would be told, at most {MOST_SCORES} are"
        raise BadRequest(f"echo: {what}; ask for fewer alternatives, choices or prompts", "echo")


async def echoes(asked: wire.CompletionRequest, tokenizer: Tokenizer) -> list[str]:
    """The text with which each choice begins, where that was asked for. Its token ids are known to be the model's."""
    if not asked.echo:
        return []
    ids = sum(len(prompt) for prompt in asked.prompts if not isinstance(prompt, str))
    decode = partial(tokenizer.decode, whole=asked.prompt_only)  # a character that it begins is the answer's

    def made() -> list[str]:
        return [p if isinstance(p, str) else decode(p) for p in asked.prompts]

    texts = made() if ids <= FEW else await asyncio.get_running_loop().run_in_executor(None, made)
    return [text for text in texts for _ in range(asked.n)]


def served(
    asked: wire.CompletionRequest, request: HttpRequest, adapter: str, by_kind: bool, span: RequestSpan | None
) -> GenerateParams:
    """Its parameters, with who asks and the rest of its time limit: that counts from when the request reached this
    machine. by_kind: see `CompletionRequest.tier`."""
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
        traceparent="" if span is None or not span.context.sampled else span.context.traceparent,
        adapter=adapter,
    )


async def requests_of(
    runtime: ModelHost,
    asked: wire.CompletionRequest,
    number: int,
    ids: list[int],
    params: GenerateParams,
    matcher: Matcher | None,
    slices: Slices,
) -> list[Any]:
    """The requests of the prompt of that number, one for each choice; the first is asked what the model says of the
    prompt. slices: of all prompts, since thousands are made. Raises BadRequest where they could never run."""
    room = runtime.limits.room(len(ids))
    if asked.max_tokens is None or (asked.cut and asked.max_tokens > room):  # as many as there is room for
        if params.min_tokens > room:
            raise BadRequest(f"min_tokens={params.min_tokens}: there is room for {room} tokens", "min_tokens")
        params = changed(params, max_tokens=room)
    found = []
    for i in range(asked.n):
        await slices.next(1 + len(ids) // _LOOKED_AT)
        index = number * asked.n + i
        name = params.request_id + (f"#{index}" if index or asked.n > 1 or len(asked.prompts) > 1 else "")
        own = params if name == params.request_id else changed(params, request_id=name)
        if i:
            seed = None if params.seed is None else (params.seed + i) % (1 << 64)
            own = changed(own, seed=seed, prompt_logprobs=None)
        try:
            found.append(runtime.request(ids, own, matcher))
        except TooLarge as error:
            place = asked.place(number)
            told = error.message if place == asked.field else f"{place}: {error.message}"
            raise BadRequest(told, place, "context_length_exceeded") from None
        except ConfigError as error:
            raise wire.refused(error, asked.place(number)) from None
    return found


def reader_of(
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
        return PartReader(ThoughtParser(begun, tokenizer.thought) if thinks else None, tools)

    return made
