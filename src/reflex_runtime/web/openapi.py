"""/openapi.json of every server, made from its routes and the schemas of its bodies; /docs, a page that shows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from reflex_runtime.version import __version__
from reflex_runtime.web.access import Keys
from reflex_runtime.web.errors import JSON
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route

JSON_TYPE: Final = JSON.decode()


# -- JSON Schema -------------------------------------------------------------------------------------------------------

NULL: Final = {"type": "null"}


def closed(fields: dict[str, Any], *required: str) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def within(low: int, high: int) -> dict[str, Any]:
    """A whole number in these bounds."""
    return {"type": "integer", "minimum": low, "maximum": high}


def ref(kind: type) -> dict[str, Any]:
    """A reference to the schema of this class."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def schemas_of(*kinds: type) -> dict[str, dict[str, Any]]:
    """The schemas of these structs and of those that they refer to, by name. `Whole` becomes an integer."""
    _, found = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in found.values():
        for field in schema["properties"].values():
            arms = field.get("anyOf", [])
            if {"type": "integer"} in arms and {"type": "number"} in arms:
                arms.remove({"type": "number"})
            if "pattern" in field:
                field["pattern"] = field["pattern"].replace(r"\Z", "$")  # \Z is Python's alone
    return found


def content(schema: Mapping[str, Any], kind: str = JSON_TYPE) -> dict[str, Any]:
    """A body of that media type."""
    return {kind: {"schema": dict(schema)}}


OBJECT: Final = content({"type": "object"})
TEXT: Final = content({"type": "string"}, "text/plain")
HTML: Final = content({"type": "string"}, "text/html")


# -- the document ------------------------------------------------------------------------------------------------------


class PlainError(msgspec.Struct):
    """The body of an error, beside its details; see `describe_error`."""

    error: str
    message: str
    request_id: str
    retry_safe: Annotated[bool, msgspec.Meta(description="whether sending it again cannot run it twice")]


PLAIN_ERROR: Final = {"Error": schemas_of(PlainError)["PlainError"]}


class Operation(NamedTuple):
    """A path in the document. answer: the content with status 200, and with 503 if `unready`. codes: its statuses of
    errors. request: the content of the body; optional: it may be left out; example: of the body. parameters, query: the
    schemas of the parameters in the path and in the query. error: name of the schema of errors."""

    summary: str
    answer: Mapping[str, Any] = OBJECT
    codes: Sequence[str] = ()
    unready: bool = False
    request: Mapping[str, Any] | None = None
    optional: bool = False
    example: Any = None
    description: str = ""
    parameters: Mapping[str, Any] = {}
    query: Mapping[str, Any] = {}
    error: str = "Error"


PAGES: Final = {  # of every server
    "/": Operation("what is here, for programs; for browsers a page", OBJECT | HTML),
    "/openapi.json": Operation("this document"),
    "/docs": Operation("this document for people", HTML),
    "/dashboard": Operation("the page that shows the server while it runs", HTML),
    "/dashboard/stream": Operation("snapshots until you leave", content({}, "application/x-ndjson"), ("429",)),
    "/diagnostics/journal": Operation(
        "the journal of the next 30 seconds, or of ?seconds=N", content({}, "application/x-ndjson"), ("422", "429")
    ),
}

ERRORS: Final = {
    "400": "invalid_json, invalid_request: the body cannot be read, or the request is not HTTP",
    "401": "unauthorized: a key is set and was not sent",
    "403": "forbidden: without a key, a host name that is not this server's, another machine, or another site's page",
    "404": "not_found: nothing of this name is here",
    "405": "method_not_allowed: the header Allow names the right method",
    "408": "request_timeout: the head or the body did not arrive in time",
    "409": "superseded: a newer request of the same client replaced it; invalid_request: it does not fit the state of "
    "the server",
    "413": "too_large: the body exceeds --max-body-bytes",
    "415": "unsupported_encoding, unsupported_media_type: the body is compressed, or of a type that is not read",
    "422": "invalid_request: `field` names what is wrong",
    "429": "client_at_capacity, too_many_requests: try again after Retry-After",
    "500": "processor_failed, processor_hung: it ran and failed",
    "503": "queue_full, deadline_unreachable, shutting_down, degraded, slo_violated, not_ready: "
    "try again after Retry-After",
    "504": "deadline_exceeded: the deadline passed before it ran",
}
"""The meaning of each status."""


def described(
    title: str, routes: Iterable[Route], operations: Mapping[str, Operation], schemas: Mapping[str, Any], keys: Keys,
    always: Sequence[str] = ("401", "403", "405", "408"), errors: Mapping[str, str] = ERRORS,
) -> bytes:  # fmt: skip
    """The document of these routes. KeyError for a route without an operation; files of /dashboard need none, nor do
    websockets, which OpenAPI lacks. operations: by path. always: statuses of every request. errors: the meaning of each
    status."""
    paths: dict[str, Any] = {}
    for route in routes:
        page = route.path.startswith("/dashboard/") and "." in route.path
        if page or (route.socket is not None and route.path not in operations):
            continue
        operation = operations[route.path]
        guarded = bool(keys.of(route))
        codes = {*always, *operation.codes} - ({"503"} if operation.unready else set())
        if route.method == "GET" and not guarded:
            codes.discard("401")
        paths[route.path] = {route.method.lower(): _operation(operation, sorted(codes), errors, guarded)}
        if operation.parameters:
            paths[route.path]["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": schema}
                for name, schema in operation.parameters.items()
            ]
    components: dict[str, Any] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-Reflex-Key"},
        }
    info = {"title": title, "version": __version__}
    return json.dumps({"openapi": "3.1.0", "info": info, "paths": paths, "components": components}, indent=1).encode()


def _operation(one: Operation, codes: Iterable[str], errors: Mapping[str, str], guarded: bool) -> dict[str, Any]:
    failed = content({"$ref": f"#/components/schemas/{one.error}"})
    done = {"200": "OK"} | ({"503": "not ready"} if one.unready else {})
    found: dict[str, Any] = {"summary": one.summary}
    if one.description:
        found["description"] = one.description
    if one.query:
        found["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in one.query.items()]
    if one.request is not None:
        body = dict(one.request)
        if one.example is not None:
            body[JSON_TYPE] = {**body[JSON_TYPE], "example": one.example}
        found["requestBody"] = {"required": not one.optional, "content": body}
    found["responses"] = {code: {"description": text, "content": one.answer} for code, text in done.items()}
    found["responses"] |= {code: {"description": errors[code], "content": failed} for code in codes}
    return found | ({"security": [{"bearer": []}, {"key": []}]} if guarded else {})


_PAGE: Final = Path(__file__).parent / "dashboard" / "docs.html"


def document_routes(write: Callable[[HttpRequest], bytes]) -> list[Route]:
    """/openapi.json; /docs, the page; and /, which is the page for browsers and lists the paths for programs. write:
    makes the document for a request."""

    async def openapi(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, write(request))

    async def docs(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, _PAGE.read_bytes(), b"text/html; charset=utf-8")

    async def index(request: HttpRequest) -> HttpResponse:
        if b"text/html" in request.headers.get(b"accept", b""):
            return await docs(request)
        document = json.loads(write(request))
        paths = {
            f"{method.upper()} {path}": spec["summary"]
            for path, methods in document["paths"].items()
            for method, spec in methods.items()
            if method != "parameters"
        }
        return HttpResponse(200, json.dumps({"server": document["info"]["title"], "paths": paths}, indent=1).encode())

    return [Route(path, run, open=True) for path, run in (("/", index), ("/openapi.json", openapi), ("/docs", docs))]
