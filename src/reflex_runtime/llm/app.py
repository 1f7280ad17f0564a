"""The application of a model server: the APIs of its model, and its pages.

Every answer has `X-Request-Id`, the caller's own if sent; every error has the form of its API, and `X-Should-Retry`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final
from urllib.parse import unquote

from reflex_runtime.llm.api import messages, responses, tokenize
from reflex_runtime.llm.api import requests as wire
from reflex_runtime.llm.api.answers import Answer, ModelApi
from reflex_runtime.llm.api.completions import CompletionHandler, read_body
from reflex_runtime.llm.api.fields import error_body, error_form
from reflex_runtime.llm.api.messages import FORM, MessageAnswer
from reflex_runtime.llm.api.openapi import document
from reflex_runtime.llm.api.responses import ResponseAnswer
from reflex_runtime.llm.server.lifecycle import ServerState
from reflex_runtime.llm.server.model_host import ModelPlan, Open
from reflex_runtime.observe import metrics
from reflex_runtime.version import __version__
from reflex_runtime.web.app import App
from reflex_runtime.web.fields import encode
from reflex_runtime.web.openapi import document_routes
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route
from reflex_runtime.web.supervisor import Parent
from reflex_runtime.web.watchers import dashboard_routes

MODELS: Final = "/v1/models"
DIALECTS: Final = (
    ModelApi("/v1/completions", wire.completion, partial(Answer, chat=False)),
    ModelApi("/v1/chat/completions", wire.chat, partial(Answer, chat=True)),
    ModelApi(responses.PATH, responses.response, ResponseAnswer),
    ModelApi(messages.PATH, messages.message, MessageAnswer, FORM),
)


class ModelServer:
    """The routes of a model server. app: the application that serves them."""

    def __init__(self, state: ServerState) -> None:
        self.state, config = state, state.plan.config
        handler = self._handler = CompletionHandler(state)
        most = config.max_body_bytes
        endpoints = [
            Route(
                api.path, partial(handler.complete, api), "POST",
                most=most, form=api.form, refused=handler.refused,
            )
            for api in DIALECTS
        ]  # fmt: skip
        endpoints += [
            Route(path, partial(self._answer_tokenizer, path, read), "POST", most=most, form=form)
            for path, read, form in (
                ("/tokenize", tokenize.tokenize, None),
                ("/detokenize", tokenize.detokenize, None),
                (messages.COUNT, tokenize.count_tokens, FORM),
            )
        ]
        pages = [
            Route(MODELS, self._list_models),
            Route("/health", self._health, open=True),
            Route("/metrics", self._metrics, open=True),
            Route("/version", self._version, open=True),
            *document_routes(self._document),
            Route("/status", self._status, operators=True),
            *dashboard_routes(state.watchers),
        ]
        model_route = self._model_route = Route(MODELS + "/{id}", self._show_model)
        self.app = App(
            config,
            {route.path: route for route in [*endpoints, *pages]},
            error_form(lambda error, _: error_body(error)),
            find=lambda path: model_route if path.startswith(MODELS + "/") else None,
            on_answer=self._count,
        )

    def _count(self, request: HttpRequest, status: int) -> None:
        self.state.answered("other" if request.route is None else request.route.path, status)

    async def _answer_tokenizer(
        self, path: str, read: Callable[[bytes], tokenize.TokenizerCall], request: HttpRequest
    ) -> HttpResponse:
        """Answer a request that needs only the tokenizer."""
        host = self.state.ready()
        name, hints, answer = await read_body(request, read)
        if name is not None:
            self.state.adapter(name)
        return HttpResponse(200, await answer(host), headers=self._handler.hint_header(path, hints, host))

    # -- pages ---------------------------------------------------------------------------------------------------------

    async def _list_models(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, encode({"object": "list", "data": list(map(self.state.card, self.state.names))}))

    async def _show_model(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, encode(self.state.card(unquote(request.path[len(MODELS) + 1 :]))))

    async def _health(self, request: HttpRequest) -> HttpResponse:
        body = self.state.health()
        return HttpResponse(200 if body["status"] == "ok" else 503, encode(body))

    async def _metrics(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, await self.state.metrics(), metrics.CONTENT_TYPE.encode())

    async def _status(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, encode(await self.state.status()))

    async def _version(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, encode({"version": __version__}))

    def _document(self, request: HttpRequest) -> bytes:
        """/openapi.json: only callers with the key get the model's name."""
        app = self.app
        return document([*app.routes.values(), self._model_route], self.state.names, app.keys, app.knows(request))


def serving(plan: ModelPlan, open: Open, parent: Parent | None) -> tuple[App, ServerState]:
    """The application of a model, and its state. open, parent: see `ServerState`."""
    state = ServerState(plan, open, parent)
    return ModelServer(state).app, state
