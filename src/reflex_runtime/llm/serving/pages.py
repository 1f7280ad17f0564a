"""The pages of a model server that say how it is and what it takes: /health, /metrics, /status, /docs and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.llm.serving.answers.errors import error_body, told
from reflex_runtime.llm.serving.lifecycle import ServerState
from reflex_runtime.llm.serving.live_view import watchers_of
from reflex_runtime.observe import metrics
from reflex_runtime.version import __version__
from reflex_runtime.web.app import App, WebSettings
from reflex_runtime.web.dashboard import dashboard_routes
from reflex_runtime.web.form import JSON, ErrorForm, Refusal
from reflex_runtime.web.json import encode
from reflex_runtime.web.openapi import page
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route

OPEN_PATHS: Final = ("/health", "/metrics", "/version", "/openapi.json", "/docs")
MODELS: Final = "/v1/models"


def _refuse(error: ReflexError, request_id: str, packed: bool) -> Refusal:
    retry = (b"x-should-retry", b"true" if error.retry_safe else b"false")
    return Refusal(told(error).status, error_body(error), JSON, [retry])


class ServingPages:
    """The application of one model server.

    described: makes the OpenAPI document, of the paths that need no key (None: all), and with the model's name or not.
    """

    def __init__(self, state: ServerState, described: Callable[[tuple[str, ...] | None, bool], bytes]) -> None:
        self._state, self._described = state, described

    def app(
        self,
        settings: WebSettings,
        cors: tuple[str, ...],
        routes: list[Route],
        card: Route,
        missing: Callable[[str], str],
    ) -> App:
        """The application: these pages, the dashboard, and `routes`. card: the route of one model, by its path.
        missing: what is said of a path that is not served."""
        pages = [
            Route("/health", self._health, open=True),
            Route("/metrics", self._metrics, open=True),
            Route("/version", self._version, open=True),
            Route("/openapi.json", self._openapi, open=True),
            Route("/docs", self._docs, open=True),
            Route("/status", self._status),
        ]
        self._app = App(
            settings,
            {route.path: route for route in [*pages, *routes, *dashboard_routes(watchers_of(self._state))]},
            ErrorForm(_refuse, keeps_id=True),
            find=lambda path: card if path.startswith(MODELS + "/") else None,
            on_answer=self._count,
            missing=missing,
            cors=cors,
        )
        return self._app

    def _count(self, request: HttpRequest, status: int) -> None:
        self._state.answered("other" if request.route is None else request.route.path, status)

    async def _health(self, request: HttpRequest) -> HttpResponse:
        body = self._state.health()
        return HttpResponse(200 if body["status"] == "ok" else 503, encode(body))

    async def _metrics(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, await self._state.metrics(), metrics.CONTENT_TYPE.encode())

    async def _status(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, encode(await self._state.status()))

    async def _version(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, encode({"version": __version__}))

    async def _openapi(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, self._document(request))

    async def _docs(self, request: HttpRequest) -> HttpResponse:
        shown = page(self._document(request), request.headers.get(b"host", b""))
        return HttpResponse(200, shown, b"text/html; charset=utf-8")

    def _document(self, request: HttpRequest) -> bytes:
        """The model is named to those who may ask /v1/models."""
        return self._described(OPEN_PATHS if self._app.has_key else None, self._app.knows(request))
