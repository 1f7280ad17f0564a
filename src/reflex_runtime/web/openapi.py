"""/openapi.json of every server, and /docs, a page of it that loads nothing from other sites."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from reflex_runtime.version import __version__
from reflex_runtime.web.access import Keys
from reflex_runtime.web.errors import JSON
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route

JSON_TYPE: Final = JSON.decode()
_HOST: Final = re.compile(rb"[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?|\[[0-9a-fA-F:.]{2,45}\](:[0-9]{1,5})?")


# -- JSON Schema in a few words ----------------------------------------------------------------------------------------


NULL: Final = {"type": "null"}


def closed(fields: dict[str, Any], *required: str) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def within(low: int, high: int) -> dict[str, Any]:
    """A whole number in these bounds."""
    return {"type": "integer", "minimum": low, "maximum": high}


def ref(kind: type) -> dict[str, Any]:
    """The schema of this class, which stands under its name."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def schemas_of(*kinds: type) -> dict[str, dict[str, Any]]:
    """The schemas of these structs and of what they refer to, by name. `Whole` is what it means: an integer."""
    _, found = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in found.values():
        for field in schema["properties"].values():
            arms = field.get("anyOf", [])
            if {"type": "integer"} in arms and {"type": "number"} in arms:
                arms.remove({"type": "number"})
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
    """A path in the document. answer: its content, with 200, and where it is `unready`, with 503. codes: of
    errors, beside those of every request. request: the content of its body, which may be left out if `optional`;
    example: of it. parameters, query: the schemas of those in the path, and in the query. error: the schema of
    errors."""

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


def described(
    title: str,
    routes: Iterable[Route],
    operations: Mapping[str, Operation],
    schemas: Mapping[str, Any],
    errors: Mapping[str, str],
    keys: Keys,
    always: Sequence[str] = ("401", "403", "405", "408"),
) -> bytes:
    """The document of these routes; KeyError where one has no description, but for the files of /dashboard and for
    websockets, which OpenAPI does not have.

    operations: by path. errors: what each status means. keys: which routes need one. always:
    statuses of every request.
    """
    paths: dict[str, Any] = {}
    for route in routes:
        page = route.path.startswith("/dashboard/") and "." in route.path
        if page or (route.socket is not None and route.path not in operations):
            continue
        told = operations[route.path]
        guarded = bool(keys.of(route))
        codes = {*always, *told.codes} - ({"503"} if told.unready else set())
        if route.method == "GET" and not guarded:
            codes.discard("401")
        paths[route.path] = {route.method.lower(): _operation(told, sorted(codes), errors, guarded)}
        if told.parameters:
            paths[route.path]["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": schema}
                for name, schema in told.parameters.items()
            ]
    components: dict[str, Any] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-Reflex-Key"},
        }
    info = {"title": title, "version": __version__}
    return json.dumps({"openapi": "3.1.0", "info": info, "paths": paths, "components": components}, indent=1).encode()


def _operation(told: Operation, codes: Iterable[str], errors: Mapping[str, str], guarded: bool) -> dict[str, Any]:
    failed = content({"$ref": f"#/components/schemas/{told.error}"})
    done = {"200": "OK"} | ({"503": "not ready"} if told.unready else {})
    said: dict[str, Any] = {"summary": told.summary}
    if told.description:
        said["description"] = told.description
    if told.query:
        said["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in told.query.items()]
    if told.request is not None:
        body = dict(told.request)
        if told.example is not None:
            body[JSON_TYPE] = {**body[JSON_TYPE], "example": told.example}
        said["requestBody"] = {"required": not told.optional, "content": body}
    said["responses"] = {code: {"description": text, "content": told.answer} for code, text in done.items()}
    said["responses"] |= {code: {"description": errors[code], "content": failed} for code in codes}
    return said | ({"security": [{"bearer": []}, {"key": []}]} if guarded else {})


def document_routes(write: Callable[[HttpRequest], bytes]) -> list[Route]:
    """/openapi.json, /docs, and / that lists what is there. write: the document for a request."""

    async def document(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, write(request))

    async def docs(request: HttpRequest) -> HttpResponse:
        shown = page(write(request), request.headers.get(b"host", b""))
        return HttpResponse(200, shown, b"text/html; charset=utf-8")

    async def index(request: HttpRequest) -> HttpResponse:
        told = json.loads(write(request))
        paths = {
            f"{method.upper()} {path}": spec["summary"]
            for path, methods in told["paths"].items()
            for method, spec in methods.items()
            if method != "parameters"
        }
        if b"text/html" not in request.headers.get(b"accept", b""):
            return HttpResponse(200, json.dumps({"server": told["info"]["title"], "paths": paths}, indent=1).encode())
        rows = "".join(f"<tr><td>{_linked(name)}<td>{html.escape(text)}" for name, text in paths.items())
        return HttpResponse(200, _page(told, f"<table>{rows}</table>"), b"text/html; charset=utf-8")

    found = (("/", index), ("/openapi.json", document), ("/docs", docs))
    return [Route(path, run, open=True) for path, run in found]


def _linked(name: str) -> str:
    """A method and its path: a link where a browser can follow it, relative, as the server may stand below a path."""
    path = html.escape(name.partition(" ")[2])
    plain = name.startswith("GET ") and "{" not in name
    shown = f"<code>{html.escape(name)}</code>"
    return f'<a href=".{path}">{shown}</a>' if plain else shown


def page(described: bytes, host: bytes = b"") -> bytes:
    """A page for people: every path, its fields, its answers, and an example where the document has one.

    host: of the request, for the examples.
    """
    address = host.decode() if _HOST.fullmatch(host) else "127.0.0.1:8000"
    doc = json.loads(described)
    parts: list[str] = []
    failures: dict[str, str] = {}
    for path, methods in doc["paths"].items():
        for method, spec in methods.items():
            if method == "parameters":
                continue
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(spec['summary'])}</p>")
            if "description" in spec:
                parts.append(f"<p>{html.escape(spec['description'])}</p>")
            bodies = spec.get("requestBody", {}).get("content", {})
            content = bodies.get(JSON_TYPE, {})
            parts += _fields("Field", content.get("schema", {}), doc)
            if "example" in content:
                parts.append(_example(f"{address}{path}", content["example"], "security" in spec))
            parts += _also_said(spec, bodies)
            failed = {code: told["description"] for code, told in spec["responses"].items() if code != "200"}
            failures |= failed
            parts.append(f"<p class=codes>Errors: {html.escape(', '.join(sorted(failed)) or 'none')}</p>")
    parts.append("<h2>Errors</h2>" + _table("Status", dict(sorted(failures.items()))))
    return _page(doc, "<p>Machine-readable: <a href=/openapi.json>/openapi.json</a></p>" + "".join(parts))


def _page(doc: Mapping[str, Any], body: str) -> bytes:
    """A page about a server, under its name."""
    frame = Template((Path(__file__).parent / "dashboard" / "docs.html").read_text("utf-8"))
    title, version = html.escape(doc["info"]["title"]), html.escape(__version__)
    return frame.substitute(title=title, version=version, body=body).encode()


def _example(url: str, body: Any, key: bool) -> str:
    """A command that sends a body, to be pasted into a shell."""
    words = ["curl", shlex.quote(url), "-H 'Content-Type: application/json'"]
    words += ["-H 'Authorization: Bearer KEY'"] * key
    command = f"{' '.join(words)} \\\n  -d {shlex.quote(json.dumps(body))}"
    return f"<p>Example</p><pre><code>{html.escape(command)}</code></pre>"


def _fields(title: str, schema: Mapping[str, Any], doc: Mapping[str, Any]) -> list[str]:
    """A table of the fields of an object; of another value a line with its type."""
    name = schema.get("$ref", "").rpartition("/")[2]
    schema = doc["components"]["schemas"][name] if name else schema
    required = schema.get("required", ())
    rows = {
        field: f"{_field(told)}{' (required)' if field in required else ''}"
        for field, told in sorted(schema.get("properties", {}).items())
    }
    if rows:
        return [_table(title, rows)]
    return [f"<p>The body: {html.escape(_field(dict(schema)))}</p>"] if schema.keys() - {"title"} else []


def _also_said(spec: Mapping[str, Any], bodies: Mapping[str, Any]) -> Iterator[str]:
    """Fields of the query, and what else the body may be."""
    query = {told["name"]: _field(told["schema"]) for told in spec.get("parameters", ()) if told["in"] == "query"}
    if query:
        yield _table("Query", query)
    if others := [kind for kind in bodies if kind != JSON_TYPE]:
        yield f"<p>Or as {html.escape(', '.join(others))}</p>"


def _field(schema: dict[str, Any]) -> str:
    return f"{_type(schema)}: {schema['description']}" if "description" in schema else _type(schema)


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(s) for s in schema["anyOf"] if s.get("type") != "null")
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(v) for v in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    kind = str(schema.get("type", "any"))
    return "mapping" if kind == "object" else kind


def _table(title: str, rows: dict[str, str]) -> str:
    cells = "".join(f"<tr><td><code>{html.escape(k)}</code><td>{html.escape(v)}" for k, v in rows.items())
    return f"<table><tr><th>{title}<th>{cells}</table>"
