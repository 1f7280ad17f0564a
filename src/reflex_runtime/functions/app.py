"""The application of functions: POST /predict, and the pages of every server.

`Predict.run` handles a request: it reads the item, submits it, awaits its batch, and writes the result. The OpenAPI
document has the schemas of items and results, with an example to send.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

from reflex_runtime.functions.oip import FunctionAsModel
from reflex_runtime.functions.server import HEADERS, FunctionServer, Predict
from reflex_runtime.functions.source import ServedFunction
from reflex_runtime.functions.values import BYTES, FORM, PNG
from reflex_runtime.observe.metrics import CONTENT_TYPE
from reflex_runtime.settings import FunctionsConfig
from reflex_runtime.settings.declare import did_you_mean
from reflex_runtime.web import oip
from reflex_runtime.web.access import Keys
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import MSGPACK, PLAIN
from reflex_runtime.web.fields import ID
from reflex_runtime.web.fields import encode as encode_json
from reflex_runtime.web.openapi import (
    PAGES,
    PLAIN_ERROR,
    TEXT,
    Operation,
    content,
    described,
    document_routes,
    schemas_of,
)
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route, named_in
from reflex_runtime.web.supervisor import Parent

PREDICT: Final = "/predict"
log = logging.getLogger("reflex.server")


def serving(
    config: FunctionsConfig, functions: Sequence[ServedFunction], parent: Parent | None
) -> tuple[App, FunctionServer]:
    """The application of these functions, and its host."""
    server = FunctionServer(config, functions, parent)
    return application(server), server


def application(server: FunctionServer) -> App:
    """The application around a server of functions: a route for each, and /predict for the only one."""
    config, most = server.config, server.config.max_body_bytes
    handlers = {name: Predict(server, served) for name, served in server.functions.items()}
    paths = {f"{PREDICT}/{name}": one for name, one in handlers.items()}
    if len(handlers) == 1:
        paths[PREDICT] = next(iter(handlers.values()))
    endpoints = [
        Route(path, to.run, "POST", most=most, refused=to.refused, headers=tuple(HEADERS)) for path, to in paths.items()
    ]

    async def health(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200 if server.state == "ready" else 503, encode_json(server.health_body()))

    async def metrics(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, server.metrics(), CONTENT_TYPE.encode())

    found = [FunctionAsModel(one) for one in handlers.values()]
    models = oip.OipModels(found, ("binary_tensor_data", "schedule_policy"))
    routes = [
        *endpoints,
        *oip.oip_routes(models, most),
        Route("/health", health, open=True),
        Route("/metrics", metrics, open=True),
        *document_routes(lambda request: document(routes, server, app.keys)),
        *server.pages,
    ]

    def missing(path: str) -> str:
        name = path.removeprefix(f"{PREDICT}/") if path.startswith(f"{PREDICT}/") else ""
        there = ", ".join(f"{PREDICT}/{one}" for one in handlers)
        return f"{path[:200]}: not found{did_you_mean(name, handlers)}; served: {there}"

    by_path = {route.path: route for route in routes}
    app = App(config, by_path, PLAIN, named_in(routes), missing=missing)
    if config.oip_grpc:
        from reflex_runtime.web.grpc_listener import oip_listener

        listener = oip_listener(app, config, models)
        app.listeners.append(listener)
        server.listening["oip_grpc"] = listener.address
        log.info("clients of OIP over gRPC: %s", listener.address)
    return app


# -- the document ------------------------------------------------------------------------------------------------------

_CODES: Final = ("400", "413", "415", "422", "429", "500", "503", "504")
_QUERY: Final = {
    "deadline_ms": {
        "type": "number", "exclusiveMinimum": 0, "maximum": 600_000,
        "description": "milliseconds after which an answer has no use",
    },
    "priority": {"enum": ["urgent", "default", "background"]},
    "client": ID | {"description": "whose fair share it takes; by default the connection's"},
    "request_id": ID,
}  # fmt: skip


def document(routes: Iterable[Route], server: FunctionServer, keys: Keys) -> bytes:
    """The OpenAPI document of these routes."""
    operations = PAGES | {
        "/health": Operation("200 only when ready, else 503", unready=True),
        "/metrics": Operation("Prometheus text", TEXT),
    }
    schemas: dict[str, Any] = dict(PLAIN_ERROR)
    for name, served in server.functions.items():
        schemas |= served.items.parts | served.results.parts
        operations[f"/predict/{name}"] = operations["/predict"] = _operation(served)
    infer = schemas_of(oip.InferBody)
    operations |= oip.operations(list(server.functions), _CODES, infer["InferBody"])
    return described("Reflex functions", routes, operations, schemas | infer, keys)


def _operation(served: ServedFunction) -> Operation:
    items = served.items.schema
    request = content(items) | content(items, MSGPACK.decode()) | content(items, FORM.decode())
    for kind in served.items.raw:
        request |= content({"type": "string", "format": "binary"}, kind.decode())
    answer = content(served.results.schema)
    for kind in served.results.raw:
        if kind in (BYTES, PNG):  # `values.encode` writes these as they are
            answer = content({"type": "string", "format": "binary"}, kind.decode())
    if served.streams:
        answer = content(served.results.schema, "text/event-stream")
    return Operation(
        served.description or f"a result of {served.name} for one item", answer, _CODES, request=request,
        example=served.example, query=_QUERY,
    )  # fmt: skip
