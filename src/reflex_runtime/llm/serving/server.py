"""The APIs of a served language model: their routes, and what is answered without the model.

Every answer has `X-Request-Id`, the caller's own where it sent one; every error has its API's body, and says in
`X-Should-Retry` whether a retry is safe.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from reflex_runtime.config import LLMServeConfig
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.llm.sampling_defaults import SamplingDefaults
from reflex_runtime.llm.serving import tokens
from reflex_runtime.llm.serving.answers.completions import Answer, error_body, told
from reflex_runtime.llm.serving.answers.messages import FORM, MessageAnswer
from reflex_runtime.llm.serving.answers.replies import ModelApi
from reflex_runtime.llm.serving.answers.responses import ResponseAnswer
from reflex_runtime.llm.serving.completing import Completing
from reflex_runtime.llm.serving.generation import Generator
from reflex_runtime.llm.serving.openapi.document import document
from reflex_runtime.llm.serving.requests import messages, responses
from reflex_runtime.llm.serving.requests import reading as wire
from reflex_runtime.llm.serving.served_model import Open, ServedModel
from reflex_runtime.llm.serving.spans import GenerationSpans
from reflex_runtime.llm.serving.watching import watchers_of
from reflex_runtime.telemetry import metrics
from reflex_runtime.version import __version__
from reflex_runtime.web.app import App
from reflex_runtime.web.dashboard import dashboard_routes
from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.form import JSON, ErrorForm, Refusal
from reflex_runtime.web.json import encode
from reflex_runtime.web.openapi import page
from reflex_runtime.web.serve import Make
from reflex_runtime.web.supervisor import Lives

STATUS, MODELS, COMPLETIONS, CHAT = "/status", "/v1/models", "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
OPEN_PATHS: Final = ("/health", "/metrics", "/version", "/openapi.json", "/docs")
F = TypeVar("F", tokens.TextAsked, tokens.IdsAsked)


def _refuse(error: ReflexError, request_id: str, packed: bool) -> Refusal:
    retry = (b"x-should-retry", b"true" if error.retry_safe else b"false")
    return Refusal(told(error).status, error_body(error), JSON, [retry])


def _missing(path: str) -> str:
    """What is said of a path that is not served."""
    known = path.rstrip("/") in ("/v1/embeddings", "/v1/audio/transcriptions", "/v1/images/generations", "/v1/batches")
    why = "is not served here: this model generates text" if known else "no such path"
    return f"{path[:200]}: {why}"


DIALECTS: Final = (
    ModelApi(COMPLETIONS, wire.completion, partial(Answer, chat=False)),
    ModelApi(CHAT, wire.chat, partial(Answer, chat=True)),
    ModelApi(responses.PATH, responses.response, ResponseAnswer),
    ModelApi(messages.PATH, messages.message, MessageAnswer, FORM),
)


class ModelServer:
    """The APIs of one model. app: the application that carries them."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._spans = None if model.spans is None else GenerationSpans(model.spans, model.name, COMPLETIONS)
        most = model.config.max_body_bytes
        name = Route(MODELS + "/{id}", self._card)
        routes = [
            Route("/health", self._health, open=True),
            Route("/metrics", partial(self._later, self._metrics), open=True),
            Route("/version", self._version, open=True),
            Route("/openapi.json", self._openapi, open=True),
            Route("/docs", self._docs, open=True),
            Route(STATUS, partial(self._later, self._status)),
            Route(MODELS, self._models),
            *map(self._generating, DIALECTS),
            Route(messages.COUNT, self._count_tokens, "POST", most=most, enter=self._enter, form=FORM),
            Route(TOKENIZE, self._tokenize, "POST", most=most, enter=self._enter),
            Route(DETOKENIZE, self._detokenize, "POST", most=most, enter=self._enter),
        ]
        self.app = App(
            model.config,
            {route.path: route for route in [*routes, *dashboard_routes(watchers_of(model))]},
            ErrorForm(_refuse, keeps_id=True),
            find=lambda path: name if path.startswith(MODELS + "/") else None,
            on_answer=self._count,
            missing=_missing,
            cors=model.config.cors,
        )
        self._completing = Completing(model, self.app, self._spans)

    def _generating(self, dialect: ModelApi) -> Route:
        def run(exchange: Exchange, body: bytes) -> None:
            self.app.spawn(exchange, self._completing.complete(exchange, body, dialect))

        failed, most = None if self._spans is None else self._spans.failed, self.model.config.max_body_bytes
        return Route(dialect.path, run, "POST", most=most, enter=self._enter, fail=failed, form=dialect.form)

    def _enter(self, exchange: Exchange) -> None:
        exchange.ask = self.model.generator

    def _count(self, exchange: Exchange, status: int) -> None:
        self.model.answered("other" if exchange.route is None else exchange.route.path, status)

    # -- questions that are answered without the model -----------------------------------------------------------------

    def _health(self, exchange: Exchange, _: bytes) -> None:
        body = self.model.health()
        exchange.answer(200 if body["status"] == "ok" else 503, encode(body))

    async def _metrics(self, exchange: Exchange) -> None:
        exchange.answer(200, await self.model.metrics(), metrics.CONTENT_TYPE.encode())

    async def _status(self, exchange: Exchange) -> None:
        exchange.answer(200, encode(await self.model.status()))

    def _later(self, answer: Any, exchange: Exchange, _: bytes) -> None:
        answering: Coroutine[Any, Any, None] = answer(exchange)
        self.app.spawn(exchange, answering)

    def _version(self, exchange: Exchange, _: bytes) -> None:
        exchange.answer(200, encode({"version": __version__}))

    def _tokenize(self, exchange: Exchange, body: bytes) -> None:
        self.app.spawn(exchange, self._of_tokens(exchange, body, tokens.tokenize_fields, tokens.tokenized))

    def _detokenize(self, exchange: Exchange, body: bytes) -> None:
        self.app.spawn(exchange, self._of_tokens(exchange, body, tokens.detokenize_fields, tokens.detokenized))

    def _count_tokens(self, exchange: Exchange, body: bytes) -> None:
        async def count() -> None:
            name, conversation = await self._completing.decoded(messages.counted, body)
            self.model.check_name(name)
            ids = await tokens.of_conversation(conversation, exchange.ask)
            exchange.answer(200, encode(messages.InputTokens(len(ids))))

        self.app.spawn(exchange, count())

    async def _of_tokens(
        self,
        exchange: Exchange,
        body: bytes,
        read: Callable[[bytes], F],
        answer: Callable[[F, Generator[Any]], Awaitable[bytes]],
    ) -> None:
        """Answer what only the tokenizer is asked for."""
        fields = await self._completing.decoded(read, body)
        if fields.model is not None:
            self.model.check_name(fields.model)
        exchange.answer(200, await answer(fields, exchange.ask))

    def _openapi(self, exchange: Exchange, _: bytes) -> None:
        exchange.answer(200, self._described())

    def _docs(self, exchange: Exchange, _: bytes) -> None:
        exchange.answer(200, page(self._described(), exchange.headers.get(b"host", b"")), b"text/html; charset=utf-8")

    def _models(self, exchange: Exchange, _: bytes) -> None:
        exchange.answer(200, encode({"object": "list", "data": [self.model.card()]}))

    def _card(self, exchange: Exchange, _: bytes) -> None:
        self.model.check_name(unquote(exchange.path[len(MODELS) + 1 :]))
        exchange.answer(200, encode(self.model.card()))

    def _described(self) -> bytes:
        limits = None if self.model.host is None else self.model.host.generator.limits
        open_paths = OPEN_PATHS if self.app.has_key else None
        return document(self.model.name, limits, self.model.config.max_queue, open_paths)


def serving(config: LLMServeConfig, name: str, open: Open, defaults: SamplingDefaults | None = None) -> Make:
    """What `web.serve` makes to serve a model. name, open, defaults: see `ServedModel`."""

    def make(on_lost: Callable[[], None], lives: Lives | None) -> tuple[App, ServedModel]:
        model = ServedModel(config, name, open, on_lost, lives, defaults)
        return ModelServer(model).app, model

    return make
