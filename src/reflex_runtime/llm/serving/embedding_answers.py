"""From the body of POST /v1/embeddings to its answer: read, tokenised, queued, and written.

All texts of a request are queued or none; they may run in several batches. If the caller disconnects, they are
cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from reflex_runtime.core.errors import ConfigError, Expired, TooLarge
from reflex_runtime.core.request import Request
from reflex_runtime.drivers.slices import in_order
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.embedding.pooling import Vectors, normalised
from reflex_runtime.llm.serving.answers.embeddings import written
from reflex_runtime.llm.serving.embedding_runtime import EmbeddingRuntime, EmbeddingWait
from reflex_runtime.llm.serving.model_runtime import ModelRuntime
from reflex_runtime.llm.serving.requests.embeddings import EmbeddingRequest, embedding
from reflex_runtime.llm.serving.requests.reading import refused
from reflex_runtime.llm.serving.requests.refusals import BadRequest, too_deep
from reflex_runtime.llm.serving.served_model import ServedEmbedding, counted
from reflex_runtime.llm.serving.spans import GenerationSpans
from reflex_runtime.llm.serving.tokens import beside
from reflex_runtime.telemetry.tracing import RequestSpan
from reflex_runtime.web.app import App
from reflex_runtime.web.bodies import LARGE
from reflex_runtime.web.errors import CallerLeft
from reflex_runtime.web.exchange import Exchange


class EmbeddingAnswers:
    """Answers what is asked of the embedding models. app: reads bodies and carries answers. spans: None without
    tracing."""

    def __init__(self, models: ModelRuntime, app: App, spans: GenerationSpans | None) -> None:
        self.models, self.app, self._spans = models, app, spans

    async def answer(self, exchange: Exchange, body: bytes) -> None:
        host: Any = exchange.ask  # what was ready when it entered answers it, also in a drain
        span = None if self._spans is None else self._spans.begin(exchange)
        try:
            asked = embedding(body) if len(body) <= LARGE else await self.app.bodies.beside(embedding, body)
        except RecursionError:
            raise too_deep() from None
        del body  # what it says is decoded
        model = counted(exchange, self.models.embedding(asked.model))
        _check(asked, model)
        runtime: EmbeddingRuntime = host.embedder(model.name)
        wait = EmbeddingWait(runtime.batcher)
        exchange.on_left = wait.take_back
        texts = await _tokens(runtime, asked, model)
        tokens = sum(map(len, texts))
        if span is not None:
            span.name = f"embeddings {model.name}"
            span.attributes |= {"gen_ai.request.model": asked.model, "gen_ai.usage.input_tokens": tokens}
            span.attributes["gen_ai.response.model"] = model.name
        await _queue(exchange, runtime, wait, asked, texts, span)
        self.app.entered(exchange)
        self.app.bodies.release(exchange)
        rows: Sequence[Vectors] = await wait.rows()
        if asked.dimensions is not None and asked.dimensions < model.model.dimensions:
            rows = await beside(len(rows), partial(_cut, rows, asked.dimensions))
        exchange.answer(200, await written(rows, asked.base64, asked.model, tokens))
        if self._spans is not None:
            self._spans.answered(exchange)


async def _queue(
    exchange: Exchange,
    runtime: EmbeddingRuntime,
    wait: EmbeddingWait,
    asked: EmbeddingRequest,
    texts: Sequence[Sequence[int]],
    span: RequestSpan | None,
) -> None:
    peer = exchange.client
    client = asked.client if asked.client is not None else f"@{peer[0]}" if peer else ""
    recorded = None if span is None or not span.context.sampled else span.context
    several = len(texts) > 1

    def made() -> Iterator[Request]:
        for place, text in enumerate(texts):
            limit = asked.time_limit
            if limit is not None:  # it counts from when the request reached this machine
                limit -= time.monotonic() - exchange.started
                if limit <= 0.0:
                    raise Expired("its deadline passed before all of it was queued")
            yield runtime.request(
                text, id=exchange.request_id + (f"#{place}" if several else ""), priority=asked.priority,
                client=client, time_limit=limit, span=recorded,
            )  # fmt: skip

    async with in_order(runtime.queueing, len(texts)):
        if exchange.left:
            raise CallerLeft("the caller left before its request was queued")
        await wait.submit(made(), len(texts))


def _check(asked: EmbeddingRequest, served: ServedEmbedding) -> None:
    """Refuse what can be refused before it is tokenised."""
    count, most = len(asked.texts), served.config.max_queue
    if count > most:
        raise BadRequest(f"input: holds {count} texts, at most {most} may wait (--max-queue)", "input")
    if asked.dimensions is not None:
        _check_dimensions(asked.dimensions, served.model)
    longest = served.model.max_model_len
    if asked.truncate is not None and asked.truncate > longest:
        name = "truncate_prompt_tokens"
        raise BadRequest(f"{name}={asked.truncate}: must be at most {longest}, what the model takes", name)


async def _tokens(
    runtime: EmbeddingRuntime, asked: EmbeddingRequest, served: ServedEmbedding
) -> list[list[int]]:
    """The tokens of each text, checked."""
    longest, truncate = served.model.max_model_len, asked.truncate
    most = longest if truncate == -1 else truncate
    strings = [text for text in asked.texts if isinstance(text, str)]  # all of them are, or none
    try:
        if strings:
            texts = await runtime.encode(strings, most)
        else:
            ids = [text for text in asked.texts if not isinstance(text, str)]
            texts = ids if most is None else [text[:most] for text in ids]
    except TooLarge:
        told = f"a text has more than the {longest} tokens that the model takes; truncate_prompt_tokens cuts it"
        raise BadRequest(f"input: {told}", "input", "context_length_exceeded") from None
    except ConfigError as error:
        raise refused(error, "input") from None
    total, allowed = sum(map(len, texts)), served.config.max_queued_tokens
    await beside(total, lambda: _check_tokens(texts, longest, served.model.vocab_size))
    if total > allowed and len(texts) > 1:
        told = f"all texts have {total} tokens, at most {allowed} may wait (--max-queued-tokens)"
        raise BadRequest(f"input: {told}", "input")
    return texts


def _check_tokens(texts: Sequence[Sequence[int]], longest: int, vocabulary: int) -> None:
    """BadRequest for a text that has none, too many, or others than the model's."""
    for place, text in enumerate(texts):
        where = "input" if len(texts) == 1 else f"input[{place}]"
        if not text:
            raise BadRequest(f"{where}: has no tokens", "input")
        if len(text) > longest:
            told = f"has {len(text)} tokens, and the model takes {longest}; truncate_prompt_tokens cuts it"
            raise BadRequest(f"{where}: {told}", "input", "context_length_exceeded")
        if not 0 <= min(text) <= max(text) < vocabulary:
            raise BadRequest(f"{where}: token ids must be in [0, {vocabulary - 1}]", "input")


def _cut(rows: Sequence[Vectors], dimensions: int) -> Sequence[Vectors]:
    """Matryoshka vectors: their first numbers, at length 1."""
    return list(normalised(np.stack(rows)[:, :dimensions]))


def _check_dimensions(asked: int, model: EmbeddingModel) -> None:
    whole, known = model.dimensions, model.matryoshka
    if asked == whole:
        return
    if known is None:
        why = f"vectors of this model have {whole}; its config.json does not say that they may be cut (is_matryoshka)"
        raise BadRequest(f"dimensions={asked}: {why}; leave it out", "dimensions")
    if asked > whole or (known and asked not in known):
        can = f"one of {', '.join(map(str, known))}" if known else f"from 1 to {whole}"
        raise BadRequest(f"dimensions={asked}: must be {can}", "dimensions")
