"""The APIs of the served model: their routes, and what is answered without the model.

Every answer has `X-Request-Id`, the caller's own where it sent one; every error has its API's body, and says in
`X-Should-Retry` whether a retry is safe.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from reflex_runtime.llm.engine.generation import Generator
from reflex_runtime.llm.serving import tokens
from reflex_runtime.llm.serving.answers.completions import Answer
from reflex_runtime.llm.serving.answers.messages import FORM, MessageAnswer
from reflex_runtime.llm.serving.answers.replies import ModelApi
from reflex_runtime.llm.serving.answers.responses import ResponseAnswer
from reflex_runtime.llm.serving.completing import Completing
from reflex_runtime.llm.serving.lifecycle import ServerState
from reflex_runtime.llm.serving.model_host import ModelPlan, Open
from reflex_runtime.llm.serving.openapi.document import document
from reflex_runtime.llm.serving.pages import MODELS, ServingPages
from reflex_runtime.llm.serving.requests import messages, responses
from reflex_runtime.llm.serving.requests import reading as wire
from reflex_runtime.llm.serving.spans import GenerationSpans
from reflex_runtime.web.app import App
from reflex_runtime.web.json import encode
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route
from reflex_runtime.web.serve import Make
from reflex_runtime.web.supervisor import Parent

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
F = TypeVar("F", tokens.TextAsked, tokens.IdsAsked)


DIALECTS: Final = (
    ModelApi(COMPLETIONS, wire.completion, partial(Answer, chat=False)),
    ModelApi(CHAT, wire.chat, partial(Answer, chat=True)),
    ModelApi(responses.PATH, responses.response, ResponseAnswer),
    ModelApi(messages.PATH, messages.message, MessageAnswer, FORM),
)


_OTHERS: Final = ("/v1/embeddings", "/v1/audio/transcriptions", "/v1/images/generations", "/v1/batches")


class ModelServer:
    """The APIs of the model. app: the application that carries them."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        config = state.plan.config
        self._spans = None if state.spans is None else GenerationSpans(state.spans, state.plan.name)
        self._completing = Completing(state, self._spans)
        most = config.max_body_bytes
        routes = [
            Route(MODELS, self._cards),
            Route(TOKENIZE, self._tokenize, "POST", most=most),
            Route(DETOKENIZE, self._detokenize, "POST", most=most),
            Route(messages.COUNT, self._count_tokens, "POST", most=most, form=FORM),
            *map(self._generating, DIALECTS),
        ]
        pages = ServingPages(state, self._described)
        card = Route(MODELS + "/{id}", self._card)
        self.app = pages.app(config, config.cors, routes, card, _missing)

    def _generating(self, dialect: ModelApi) -> Route:
        failed, most = None if self._spans is None else self._spans.failed, self.state.plan.config.max_body_bytes
        run = partial(self._completing.complete, dialect)
        return Route(dialect.path, run, "POST", most=most, form=dialect.form, refused=failed)

    # -- questions that are answered without the model -----------------------------------------------------------------

    async def _tokenize(self, request: HttpRequest) -> HttpResponse:
        return await self._of_tokens(request, tokens.tokenize_fields, tokens.tokenized)

    async def _detokenize(self, request: HttpRequest) -> HttpResponse:
        return await self._of_tokens(request, tokens.detokenize_fields, tokens.detokenized)

    async def _count_tokens(self, request: HttpRequest) -> HttpResponse:
        host = self.state.ready()
        name, conversation = await self._completing.read(request, messages.counted)
        self.state.adapter(name)
        ids = await tokens.of_conversation(conversation, host.generator)
        return HttpResponse(200, encode(messages.InputTokens(len(ids))))

    async def _of_tokens(
        self,
        request: HttpRequest,
        read: Callable[[bytes], F],
        answer: Callable[[F, Generator[Any]], Awaitable[bytes]],
    ) -> HttpResponse:
        """What only the tokenizer is asked for."""
        host = self.state.ready()
        fields = await self._completing.read(request, read)
        if fields.model is not None:
            self.state.adapter(fields.model)
        return HttpResponse(200, await answer(fields, host.generator))

    async def _cards(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, encode({"object": "list", "data": list(map(self.state.card, self.state.names))}))

    async def _card(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, encode(self.state.card(unquote(request.path[len(MODELS) + 1 :]))))

    def _described(self, open_paths: tuple[str, ...] | None, named: bool) -> bytes:
        state = self.state
        limits = None if state.host is None else state.host.generator.limits
        return document(state.names, state.plan.config.max_queue, limits, open_paths, named)


def _missing(path: str) -> str:
    """What is said of a path that is not served."""
    known = path.rstrip("/")
    why = "no such path" if known else "there is no page here; look at /docs and /dashboard"
    return f"{path[:200]}: {'is not served here' if known in _OTHERS else why}"


def serving(plan: ModelPlan, open: Open) -> Make:
    """What `web.serve` makes to serve a model. open: see `ServerState`."""

    def make(on_lost: Callable[[], None], parent: Parent | None) -> tuple[App, ServerState]:
        state = ServerState(plan, open, on_lost, None if parent is None else parent.lives)
        return ModelServer(state).app, state

    return make
