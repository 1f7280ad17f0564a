"""The application of functions: POST /predict, and the pages that every server has.

A request takes one way, `Predict.run`: read the item, submit it, await its batch, write the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from reflex_runtime.functions.oip import FunctionAsModel
from reflex_runtime.functions.openapi import document
from reflex_runtime.functions.predict import Predict
from reflex_runtime.functions.server import FunctionServer
from reflex_runtime.functions.source import ServedFunction
from reflex_runtime.observe.metrics import CONTENT_TYPE
from reflex_runtime.settings import FunctionsConfig
from reflex_runtime.settings.declare import did_you_mean
from reflex_runtime.web.app import App
from reflex_runtime.web.dashboard import dashboard_routes
from reflex_runtime.web.errors import PLAIN
from reflex_runtime.web.fields import encode as encode_json
from reflex_runtime.web.journal_stream import JournalStreams
from reflex_runtime.web.oip import OipHttp, OipModels
from reflex_runtime.web.openapi import document_routes
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route, named_in
from reflex_runtime.web.serve import Make
from reflex_runtime.web.supervisor import Parent

PREDICT: Final = "/predict"
log = logging.getLogger("reflex.server")


def serving(config: FunctionsConfig, functions: Sequence[ServedFunction]) -> Make:
    """What `web.serve` makes to serve functions."""

    def make(on_lost: Callable[[], None], parent: Parent | None) -> tuple[App, FunctionServer]:
        server = FunctionServer(config, functions, on_lost, parent)
        return application(server), server

    return make


def application(server: FunctionServer) -> App:
    """The application around a server of functions: a route for each, and /predict for the only one."""
    config, most = server.config, server.config.max_body_bytes
    of = {name: Predict(server, served) for name, served in server.functions.items()}
    paths = {f"{PREDICT}/{name}": one for name, one in of.items()}
    if len(of) == 1:
        paths[PREDICT] = next(iter(of.values()))
    questions = [Route(path, one.run, "POST", most=most, refused=one.refused) for path, one in paths.items()]

    async def health(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200 if server.state == "ready" else 503, encode_json(server.health_body()))

    async def metrics(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, server.metrics(), CONTENT_TYPE.encode())

    models = OipModels([FunctionAsModel(one) for one in of.values()], ("binary_tensor_data", "schedule_policy"))
    routes = [
        *questions,
        *OipHttp(models, most).routes,
        Route("/health", health, open=True),
        Route("/metrics", metrics, open=True),
        *document_routes(lambda request: document(routes, server, app.keys)),
        *dashboard_routes(server.watchers),
        JournalStreams(server).route,
    ]

    def missing(path: str) -> str:
        name = path.removeprefix(f"{PREDICT}/") if path.startswith(f"{PREDICT}/") else ""
        there = ", ".join(f"{PREDICT}/{one}" for one in of)
        return f"{path[:200]}: not found{did_you_mean(name, of)}; there are {there}"

    by_path = {route.path: route for route in routes}
    app = App(config, by_path, PLAIN, named_in(routes), missing=missing, cors=config.cors)
    if config.oip_grpc:
        from reflex_runtime.web.oip_grpc import oip_listener

        listener = oip_listener(app, config, models)
        app.listeners.append(listener)
        server.listening["oip_grpc"] = listener.address
        log.info("clients of OIP over gRPC: %s", listener.address)
    return app
