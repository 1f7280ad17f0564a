"""The APIs of served models, of any kind: their routes, and what is answered without a model.

Every answer has `X-Request-Id`, the caller's own where it sent one; every error has its API's body, and says in
`X-Should-Retry` whether a retry is safe.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar
from urllib.parse import unquote

from reflex_runtime.config import EmbeddingServeConfig, LLMServeConfig
from reflex_runtime.llm.serving import tokens
from reflex_runtime.llm.serving.answers.completions import Answer
from reflex_runtime.llm.serving.answers.messages import FORM, MessageAnswer
from reflex_runtime.llm.serving.answers.replies import ModelApi
from reflex_runtime.llm.serving.answers.responses import ResponseAnswer
from reflex_runtime.llm.serving.completing import Completing
from reflex_runtime.llm.serving.embedding_answers import EmbeddingAnswers
from reflex_runtime.llm.serving.model_host import EmbeddingPlan, ModelPlan, Open
from reflex_runtime.llm.serving.model_runtime import ModelRuntime
from reflex_runtime.llm.serving.openapi.document import Described, document
from reflex_runtime.llm.serving.openapi.embeddings import DescribedEmbeddings
from reflex_runtime.llm.serving.pages import MODELS, ServingPages
from reflex_runtime.llm.serving.requests import messages, responses
from reflex_runtime.llm.serving.requests import reading as wire
from reflex_runtime.llm.serving.requests.embeddings import PATH as EMBEDDINGS
from reflex_runtime.llm.serving.requests.refusals import BadRequest
from reflex_runtime.llm.serving.served_model import UNKNOWN, ServedEmbedding, ServedModel, counted
from reflex_runtime.llm.serving.spans import GenerationSpans
from reflex_runtime.web.app import App
from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.json import encode
from reflex_runtime.web.serve import Make
from reflex_runtime.web.supervisor import Lives

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
F = TypeVar("F", tokens.TextAsked, tokens.IdsAsked)


DIALECTS: Final = (
    ModelApi(COMPLETIONS, wire.completion, partial(Answer, chat=False)),
    ModelApi(CHAT, wire.chat, partial(Answer, chat=True)),
    ModelApi(responses.PATH, responses.response, ResponseAnswer),
    ModelApi(messages.PATH, messages.message, MessageAnswer, FORM),
)


_OTHERS: Final = ("/v1/audio/transcriptions", "/v1/images/generations", "/v1/batches")


class ModelServer:
    """The APIs of the models. app: the application that carries them."""

    def __init__(self, models: ModelRuntime) -> None:
        self.models = models
        only = models.all[0].name if len(models.all) == 1 else ""
        kinds = {COMPLETIONS: "text_completion", EMBEDDINGS: "embeddings"}
        self._spans = None if models.spans is None else GenerationSpans(models.spans, only, kinds)
        most = models.config.max_body_bytes
        routes = [
            Route(MODELS, self._cards),
            Route(TOKENIZE, self._tokenize, "POST", most=most, enter=self._enter),
            Route(DETOKENIZE, self._detokenize, "POST", most=most, enter=self._enter),
        ]
        if models.models:
            count = Route(messages.COUNT, self._count_tokens, "POST", most=most, enter=self._enter, form=FORM)
            routes += [*map(self._generating, DIALECTS), count]
        if models.embedding_models:
            failed = None if self._spans is None else self._spans.failed
            routes.append(Route(EMBEDDINGS, self._embed, "POST", most=most, enter=self._enter, fail=failed))
        pages = ServingPages(models, self._described)
        card = Route(MODELS + "/{id}", self._card)
        self.app = pages.app(models.config, models.config.cors, routes, card, self._missing)
        self._completing = Completing(models, self.app, self._spans)
        self._embedding = EmbeddingAnswers(models, self.app, self._spans)

    def _generating(self, dialect: ModelApi) -> Route:
        def run(exchange: Exchange, body: bytes) -> None:
            self.app.spawn(exchange, self._completing.complete(exchange, body, dialect))

        failed, most = None if self._spans is None else self._spans.failed, self.models.config.max_body_bytes
        return Route(dialect.path, run, "POST", most=most, enter=self._enter, fail=failed, form=dialect.form)

    def _embed(self, exchange: Exchange, body: bytes) -> None:
        self.app.spawn(exchange, self._embedding.answer(exchange, body))

    def _enter(self, exchange: Exchange) -> None:
        exchange.about = UNKNOWN
        exchange.ask = self.models.ready()  # also of a request that is read while the server drains

    def _missing(self, path: str) -> str:
        """What is said of a path that is not served."""
        known = path.rstrip("/")
        why = "no such path" if known else "there is no page here; look at /docs and /dashboard"
        if not self.models.models and known in (messages.COUNT, *(dialect.path for dialect in DIALECTS)):
            why = f"this server's models make vectors of texts, and generate none; ask {EMBEDDINGS}"
        elif known == EMBEDDINGS:
            why = "is not served here: this server's models generate text; serve an embedding model beside them for it"
        elif known in _OTHERS:
            why = "is not served here"
        return f"{path[:200]}: {why}"

    # -- questions that are answered without the model -----------------------------------------------------------------

    def _tokenize(self, exchange: Exchange, body: bytes) -> None:
        self.app.spawn(exchange, self._of_tokens(exchange, body, tokens.tokenize_fields, tokens.tokenized))

    def _detokenize(self, exchange: Exchange, body: bytes) -> None:
        self.app.spawn(exchange, self._of_tokens(exchange, body, tokens.detokenize_fields, tokens.detokenized))

    def _count_tokens(self, exchange: Exchange, body: bytes) -> None:
        async def count() -> None:
            name, conversation = await self._completing.decoded(messages.counted, body)
            generator = exchange.ask.generator(counted(exchange, self.models.generating(name)).plan.name)
            ids = await tokens.of_conversation(conversation, generator)
            exchange.answer(200, encode(messages.InputTokens(len(ids))))

        self.app.spawn(exchange, count())

    async def _of_tokens(
        self,
        exchange: Exchange,
        body: bytes,
        read: Callable[[bytes], F],
        answer: Callable[[F, tokens.TextReader], Awaitable[bytes]],
    ) -> None:
        """Answer what only the tokenizer is asked for."""
        fields = await self._completing.decoded(read, body)
        if fields.model is None and len(self.models.all) > 1:
            raise BadRequest(f"model: is missing; there are {', '.join(self.models.names)}", "model")
        model = self.models.all[0] if fields.model is None else self.models.find(fields.model)
        counted(exchange, model)
        of_kind = exchange.ask.generator if isinstance(model, ServedModel) else exchange.ask.embedder
        exchange.answer(200, await answer(fields, of_kind(model.plan.name)))

    def _cards(self, exchange: Exchange, _: bytes) -> None:
        exchange.answer(200, encode({"object": "list", "data": list(map(self.models.card, self.models.names))}))

    def _card(self, exchange: Exchange, _: bytes) -> None:
        exchange.answer(200, encode(self.models.card(unquote(exchange.path[len(MODELS) + 1 :]))))

    def _described(self, open_paths: tuple[str, ...] | None, named: bool) -> bytes:
        models, host = self.models, self.models.host
        limits = [] if host is None else [host.generator(model.name).limits for model in models.models]
        return document(
            Described(models.names_of(ServedModel), [model.config.max_queue for model in models.models], limits),
            DescribedEmbeddings(
                models.names_of(ServedEmbedding),
                [model.config.max_queue for model in models.embedding_models],
                [model.model for model in models.embedding_models],
            ),
            open_paths,
            named,
        )


def serving(
    config: LLMServeConfig | EmbeddingServeConfig,
    plans: Sequence[ModelPlan],
    open: Open,
    embeddings: Sequence[EmbeddingPlan] = (),
) -> Make:
    """What `web.serve` makes to serve models. plans, open, embeddings: see `ModelRuntime`."""

    def make(on_lost: Callable[[], None], lives: Lives | None) -> tuple[App, ModelRuntime]:
        models = ModelRuntime(config, plans, open, on_lost, lives, embeddings)
        return ModelServer(models).app, models

    return make
