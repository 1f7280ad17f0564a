"""The OpenAPI document of functions: their items and results are the schemas, with an example that can be sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from reflex_runtime.functions.server import FunctionServer
from reflex_runtime.functions.source import ServedFunction
from reflex_runtime.functions.values import BYTES, FORM, PNG
from reflex_runtime.web import oip
from reflex_runtime.web.access import Keys
from reflex_runtime.web.errors import MSGPACK
from reflex_runtime.web.fields import ID
from reflex_runtime.web.openapi import PAGES, PLAIN_ERROR, TEXT, Operation, content, described, schemas_of
from reflex_runtime.web.request import Route

ERRORS: Final = {
    "400": "the body cannot be read", "401": "the key is missing or wrong", "403": "a web page of another site",
    "404": "no such function", "405": "another method", "408": "the request did not come in time", "409": "superseded",
    "413": "the body is too large", "415": "the body's Content-Type is not read", "422": "a field is wrong",
    "429": "too many requests of this client, or at all", "499": "the caller left",
    "500": "the function failed on this item", "503": "not ready, or the queue is full: Retry-After says when",
    "504": "its deadline passed",
}  # fmt: skip
_CODES: Final = ("400", "413", "415", "422", "429", "500", "503", "504")
_QUERY: Final = {
    "deadline_ms": {
        "type": "number", "exclusiveMinimum": 0, "maximum": 600_000,
        "description": "an answer has no use after so many milliseconds",
    },
    "priority": {"enum": ["urgent", "default", "background"]},
    "client": ID | {"description": "whose fair share it takes; by default the connection's"},
    "request_id": ID,
}  # fmt: skip


def document(routes: Iterable[Route], server: FunctionServer, keys: Keys) -> bytes:
    """The document of these routes."""
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
    return described("Reflex functions", routes, operations, schemas | infer, ERRORS, keys)


def _operation(served: ServedFunction) -> Operation:
    items = served.items.schema
    request = content(items) | content(items, MSGPACK.decode()) | content(items, FORM.decode())
    for kind in served.items.raw:
        request |= content({"type": "string", "format": "binary"}, kind.decode())
    answer = content(served.results.schema)
    for kind in served.results.raw:
        if kind in (BYTES, PNG):  # what `values.encode` writes as it is
            answer = content({"type": "string", "format": "binary"}, kind.decode())
    if served.streams:
        answer = content(served.results.schema, "text/event-stream")
    return Operation(
        served.description or f"a result of {served.name} for one item", answer, _CODES, request=request,
        example=served.example, query=_QUERY,
    )  # fmt: skip
