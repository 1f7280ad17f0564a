"""The server of an embedding model: its life, /v1/embeddings, and what is answered without the model.

All texts of a request are queued or none; they may run in several batches. If the caller disconnects, they are
cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import numpy as np

from reflex_runtime.config import EmbeddingServeConfig
from reflex_runtime.core.errors import ConfigError, Expired, TooLarge
from reflex_runtime.core.request import Request
from reflex_runtime.drivers.in_thread import in_thread
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.embedding.load import LoadedEncoder
from reflex_runtime.llm.embedding.pooling import Vectors, normalised
from reflex_runtime.llm.embedding.processor import EmbeddingProcessor, measure
from reflex_runtime.llm.serving.answers.embeddings import written
from reflex_runtime.llm.serving.life import ServingLife
from reflex_runtime.llm.serving.local_embeddings import EmbeddingWait, LocalEmbeddings, text_request
from reflex_runtime.llm.serving.model_device import ModelDevice
from reflex_runtime.llm.serving.openapi.embeddings import document
from reflex_runtime.llm.serving.pages import MODELS, ServingPages
from reflex_runtime.llm.serving.requests.embeddings import PATH, EmbeddingRequest, embedding
from reflex_runtime.llm.serving.requests.reading import refused
from reflex_runtime.llm.serving.requests.refusals import BadRequest, ModelNotFound, too_deep
from reflex_runtime.llm.serving.spans import GenerationSpans
from reflex_runtime.llm.serving.tokens import beside
from reflex_runtime.telemetry.tracing import RequestSpan
from reflex_runtime.web.app import App
from reflex_runtime.web.bodies import LARGE
from reflex_runtime.web.errors import CallerLeft
from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.json import encode, printable
from reflex_runtime.web.serve import Make
from reflex_runtime.web.supervisor import Lives

Load = Callable[[], LoadedEncoder]
_OTHERS: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


class EmbeddingService(ServingLife[LocalEmbeddings]):
    """The life of one embedding model. name: by which clients ask for it. model: its directory. load: called once, in a
    thread."""

    def __init__(
        self,
        config: EmbeddingServeConfig,
        name: str,
        model: EmbeddingModel,
        load: Load,
        on_fatal: Callable[[], None] | None = None,
        lives: Lives | None = None,
    ) -> None:
        super().__init__(config, name, on_fatal, lives)
        self.config, self.name, self.model = config, name, model
        self.created = int(time.time())
        self._load = load

    async def open(self) -> LocalEmbeddings:
        """Load it, and measure what its calls take."""
        self.reached("loading")
        loaded = await in_thread(self._load)
        self.reached("warming")
        try:
            measured = await in_thread(lambda: measure(loaded.model, loaded.encoder))
        except Exception:
            loaded.encoder.close()
            raise
        config = self.config
        processor = EmbeddingProcessor(
            loaded.model, loaded.encoder, measured, max_batch_cost=config.max_batch_cost_ms / 1e3,
            capacity=config.max_queue, max_queued_tokens=config.max_queued_tokens,
        )  # fmt: skip
        device = ModelDevice([processor], watchdog=config.watchdog_s, on_fatal=self.lost)
        host = LocalEmbeddings(loaded, device, config.trace, self.registry)
        try:
            await device.start()
        except Exception:
            await host.close(0.0, drain=False)
            raise
        return host

    def card(self) -> dict[str, Any]:
        """The model as /v1/models tells it."""
        model = self.model
        told = {"id": self.name, "object": "model", "created": self.created, "owned_by": "reflex", "root": self.name}
        told |= {"parent": None, "max_model_len": model.max_model_len, "dimensions": model.dimensions}
        return told | {"pooling": list(model.pooling), "normalised": model.normalise}


class EmbeddingServer:
    """The API of one embedding model. app: the application that carries it."""

    def __init__(self, service: EmbeddingService) -> None:
        self.service = service
        config, spans = service.config, service.spans
        self._spans = None if spans is None else GenerationSpans(spans, service.name, {PATH: "embeddings"})
        failed = None if self._spans is None else self._spans.failed
        routes = [
            Route(MODELS, self._cards),
            Route(PATH, self._embed, "POST", most=config.max_body_bytes, enter=self._enter, fail=failed),
        ]
        pages = ServingPages(service, self._described)
        self.app: App = pages.app(config, config.cors, routes, Route(MODELS + "/{id}", self._card), _missing)

    def _enter(self, exchange: Exchange) -> None:
        exchange.ask = self.service.ready()  # also of a request that is read while the server drains

    def _cards(self, exchange: Exchange, _: bytes) -> None:
        exchange.answer(200, encode({"object": "list", "data": [self.service.card()]}))

    def _card(self, exchange: Exchange, _: bytes) -> None:
        self._check_name(unquote(exchange.path[len(MODELS) + 1 :]))
        exchange.answer(200, encode(self.service.card()))

    def _described(self, open_paths: tuple[str, ...] | None) -> bytes:
        return document(self.service.name, self.service.model, self.service.config.max_queue, open_paths)

    def _embed(self, exchange: Exchange, body: bytes) -> None:
        self.app.spawn(exchange, self._answer(exchange, body))

    async def _answer(self, exchange: Exchange, body: bytes) -> None:
        host: LocalEmbeddings = exchange.ask
        wait = EmbeddingWait(host.device.batcher)
        exchange.on_left = wait.take_back
        span = None if self._spans is None else self._spans.begin(exchange)
        try:
            asked = embedding(body) if len(body) <= LARGE else await self.app.bodies.beside(embedding, body)
        except RecursionError:
            raise too_deep() from None
        del body  # what it says is decoded
        self._check(asked)
        texts = await self._tokens(host, asked)
        tokens = sum(map(len, texts))
        if span is not None:
            span.attributes |= {"gen_ai.request.model": asked.model, "gen_ai.usage.input_tokens": tokens}
        await self._queue(exchange, wait, asked, texts, span)
        self.app.entered(exchange)
        self.app.bodies.release(exchange)
        rows: Sequence[Vectors] = await wait.rows()
        if asked.dimensions is not None and asked.dimensions < self.service.model.dimensions:
            rows = await beside(len(rows), partial(_cut, rows, asked.dimensions))
        exchange.answer(200, await written(rows, asked.base64, self.service.name, tokens))
        if self._spans is not None:
            self._spans.answered(exchange)

    async def _queue(
        self,
        exchange: Exchange,
        wait: EmbeddingWait,
        asked: EmbeddingRequest,
        texts: Sequence[Sequence[int]],
        span: RequestSpan | None,
    ) -> None:
        if exchange.left:
            raise CallerLeft("the caller left before its request was queued")
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
                yield text_request(
                    text, id=exchange.request_id + (f"#{place}" if several else ""), priority=asked.priority,
                    client=client, time_limit=limit, span=recorded,
                )  # fmt: skip

        await wait.submit(made(), len(texts))

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_name(self, name: str) -> None:
        if name != self.service.name:
            raise ModelNotFound(printable(f"the model {name[:200]!r} does not exist; {self.service.name!r} does"))

    def _check(self, asked: EmbeddingRequest) -> None:
        """Refuse what can be refused before it is tokenised."""
        self._check_name(asked.model)
        count, most = len(asked.texts), self.service.config.max_queue
        if count > most:
            raise BadRequest(f"input: holds {count} texts, at most {most} may wait (--max-queue)", "input")
        if asked.dimensions is not None:
            _check_dimensions(asked.dimensions, self.service.model)
        longest = self.service.model.max_model_len
        if asked.truncate is not None and asked.truncate > longest:
            name = "truncate_prompt_tokens"
            raise BadRequest(f"{name}={asked.truncate}: must be at most {longest}, what the model takes", name)

    async def _tokens(self, host: LocalEmbeddings, asked: EmbeddingRequest) -> list[list[int]]:
        """The tokens of each text, checked."""
        longest, truncate = self.service.model.max_model_len, asked.truncate
        most = longest if truncate == -1 else truncate
        strings = [text for text in asked.texts if isinstance(text, str)]  # all of them are, or none
        try:
            if strings:
                texts = await host.encode(strings, most)
            else:
                ids = [text for text in asked.texts if not isinstance(text, str)]
                texts = ids if most is None else [text[:most] for text in ids]
        except TooLarge:
            told = f"a text has more than the {longest} tokens that the model takes; truncate_prompt_tokens cuts it"
            raise BadRequest(f"input: {told}", "input", "context_length_exceeded") from None
        except ConfigError as error:
            raise refused(error, "input") from None
        total, allowed = sum(map(len, texts)), self.service.config.max_queued_tokens
        await beside(total, lambda: _check_tokens(texts, longest, self.service.model.vocab_size))
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


def _missing(path: str) -> str:
    """What is said of a path that is not served."""
    if path.rstrip("/") in _OTHERS:
        return f"{path[:200]}: this model makes vectors of texts, and generates none; ask {PATH}"
    return f"{path[:200]}: no such path"


def serving_embeddings(config: EmbeddingServeConfig, name: str, model: EmbeddingModel, load: Load) -> Make:
    """What `web.serve` makes to serve an embedding model: see `EmbeddingService`."""

    def make(on_lost: Callable[[], None], lives: Lives | None) -> tuple[App, EmbeddingService]:
        service = EmbeddingService(config, name, model, load, on_lost, lives)
        return EmbeddingServer(service).app, service

    return make
