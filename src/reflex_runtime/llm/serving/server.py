"""The APIs of served language models: their routes, and what is answered without a model.

Every answer has `X-Request-Id`, the caller's own where it sent one; every error has its API's body, and says in
`X-Should-Retry` whether a retry is safe.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from reflex_runtime.config import LLMServeConfig
from reflex_runtime.llm.serving import tokens
from reflex_runtime.llm.serving.answers.completions import Answer
from reflex_runtime.llm.serving.answers.messages import FORM, MessageAnswer
from reflex_runtime.llm.serving.answers.replies import ModelApi
from reflex_runtime.llm.serving.answers.responses import ResponseAnswer
from reflex_runtime.llm.serving.completing import Completing
from reflex_runtime.llm.serving.generation import Generator
from reflex_runtime.llm.serving.model_host import ModelPlan, Open
from reflex_runtime.llm.serving.model_runtime import ModelRuntime
from reflex_runtime.llm.serving.openapi.document import document
from reflex_runtime.llm.serving.pages import MODELS, ServingPages
from reflex_runtime.llm.serving.requests import messages, responses
from reflex_runtime.llm.serving.requests import reading as wire
from reflex_runtime.llm.serving.requests.refusals import BadRequest
from reflex_runtime.llm.serving.spans import GenerationSpans
from reflex_runtime.web.app import App
from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.json import encode
from reflex_runtime.web.serve import Make
from reflex_runtime.web.supervisor import Lives

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
F = TypeVar("F", tokens.TextAsked, tokens.IdsAsked)


_OTHERS: Final = ("/v1/audio/transcriptions", "/v1/images/generations", "/v1/batches")


def _missing(path: str) -> str:
    """What is said of a path that is not served."""
    known, why = path.rstrip("/"), "no such path"
    if known == "/v1/embeddings":
        why = "is not served here: this model generates text; reflex serve the directory of an embedding model for it"
    elif known in _OTHERS:
        why = "is not served here: this model generates text"
    return f"{path[:200]}: {why}"


DIALECTS: Final = (
    ModelApi(COMPLETIONS, wire.completion, partial(Answer, chat=False)),
    ModelApi(CHAT, wire.chat, partial(Answer, chat=True)),
    ModelApi(responses.PATH, responses.response, ResponseAnswer),
    ModelApi(messages.PATH, messages.message, MessageAnswer, FORM),
)


class ModelServer:
    """The APIs of the models. app: the application that carries them."""

    def __init__(self, models: ModelRuntime) -> None:
        self.models = models
        only = models.models[0].name if len(models.models) == 1 else ""
        kinds = {COMPLETIONS: "text_completion"}
        self._spans = None if models.spans is None else GenerationSpans(models.spans, only, kinds)
        most = models.config.max_body_bytes
        routes = [
            Route(MODELS, self._cards),
            *map(self._generating, DIALECTS),
            Route(messages.COUNT, self._count_tokens, "POST", most=most, enter=self._enter, form=FORM),
            Route(TOKENIZE, self._tokenize, "POST", most=most, enter=self._enter),
            Route(DETOKENIZE, self._detokenize, "POST", most=most, enter=self._enter),
        ]
        pages = ServingPages(models, self._described)
        card = Route(MODELS + "/{id}", self._card)
        self.app = pages.app(models.config, models.config.cors, routes, card, _missing)
        self._completing = Completing(models, self.app, self._spans)

    def _generating(self, dialect: ModelApi) -> Route:
        def run(exchange: Exchange, body: bytes) -> None:
            self.app.spawn(exchange, self._completing.complete(exchange, body, dialect))

        failed, most = None if self._spans is None else self._spans.failed, self.models.config.max_body_bytes
        return Route(dialect.path, run, "POST", most=most, enter=self._enter, fail=failed, form=dialect.form)

    def _enter(self, exchange: Exchange) -> None:
        exchange.ask = self.models.ready()

    # -- questions that are answered without the model -----------------------------------------------------------------

    def _tokenize(self, exchange: Exchange, body: bytes) -> None:
        self.app.spawn(exchange, self._of_tokens(exchange, body, tokens.tokenize_fields, tokens.tokenized))

    def _detokenize(self, exchange: Exchange, body: bytes) -> None:
        self.app.spawn(exchange, self._of_tokens(exchange, body, tokens.detokenize_fields, tokens.detokenized))

    def _count_tokens(self, exchange: Exchange, body: bytes) -> None:
        async def count() -> None:
            name, conversation = await self._completing.decoded(messages.counted, body)
            ids = await tokens.of_conversation(conversation, exchange.ask.generator(self.models.find(name).plan.name))
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
        if fields.model is None and len(self.models.models) > 1:
            raise BadRequest(f"model: is missing; there are {', '.join(self.models.names)}", "model")
        model = self.models.models[0] if fields.model is None else self.models.find(fields.model)
        exchange.answer(200, await answer(fields, exchange.ask.generator(model.plan.name)))

    def _cards(self, exchange: Exchange, _: bytes) -> None:
        exchange.answer(200, encode({"object": "list", "data": list(map(self.models.card, self.models.names))}))

    def _card(self, exchange: Exchange, _: bytes) -> None:
        exchange.answer(200, encode(self.models.card(unquote(exchange.path[len(MODELS) + 1 :]))))

    def _described(self, open_paths: tuple[str, ...] | None) -> bytes:
        host = self.models.host
        limits = [] if host is None else [host.generator(model.name).limits for model in self.models.models]
        most = min(model.config.max_queue for model in self.models.models)
        return document(self.models.names, limits, most, open_paths)


def serving(config: LLMServeConfig, plans: Sequence[ModelPlan], open: Open) -> Make:
    """What `web.serve` makes to serve models. plans, open: see `ModelRuntime`."""

    def make(on_lost: Callable[[], None], lives: Lives | None) -> tuple[App, ModelRuntime]:
        models = ModelRuntime(config, plans, open, on_lost, lives)
        return ModelServer(models).app, models

    return make
