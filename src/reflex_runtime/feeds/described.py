"""/openapi.json of the port of `reflex feeds`, and /docs, its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from reflex_runtime.config import FeedsConfig
from reflex_runtime.feeds.fleet import OF_DETECTOR, OF_RATE
from reflex_runtime.feeds.fresh import ADDED_NAME, LONGEST
from reflex_runtime.feeds.spec import PER_FEED
from reflex_runtime.options import hints_of
from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.json import JSON_TYPE
from reflex_runtime.web.openapi import failures, finished, page

OPEN: Final = ("/metrics", "/health", "/dashboard", "/feeds", "/openapi.json", "/docs")
ERRORS: Final = {
    "400": "the body is not JSON",
    "401": "the key is missing or wrong; without a key, a change that was not asked from this machine",
    "403": "without a key: a host name that is not this server's, or a page of another site",
    "404": "no such feed",
    "409": "the name is taken, there are 256 feeds, or 16 changes wait",
    "413": "the body is too large",
    "422": "a field is wrong; `field` names it, and nothing has changed",
    "429": "too many watch",
    "503": "the run is stopping, or has not started",
}
_TYPES: Final = {bool: "boolean", int: "integer", float: "number", float | None: "number", str: "string"}
_NAMES: Final = {"type": "array", "items": {"type": ["string", "integer"]}, "description": "names or numbers"}
_LIMITS: Final = {
    "score": {"type": ["number", "null"], "minimum": 0, "maximum": 1, "description": "what scores less is left out"},
    "classes": {**_NAMES, "type": ["array", "null"]},
}


def described_routes(key: bool) -> list[Route]:
    """The document and its page. key: whether the server has one."""
    document = _document(key)

    def docs(exchange: Exchange, _: bytes) -> None:
        exchange.answer(200, page(document, exchange.headers.get(b"host", b"")), b"text/html; charset=utf-8")

    return [
        Route("/openapi.json", lambda exchange, _: exchange.answer(200, document), open=True),
        Route("/docs", docs, open=True),
    ]


def _document(key: bool) -> bytes:
    name = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    several = "multipart/x-mixed-replace"
    source = {"type": "string", "minLength": 1, "maxLength": LONGEST}
    added = {"name": {"type": "string", "pattern": ADDED_NAME}, "source": source}
    new = {**added, **_settings(PER_FEED), **_LIMITS}
    example = {"name": "door", "source": "rtsp://10.0.0.7/live", "max_age_ms": 300, "score": 0.6}
    file = {"type": "string", "minLength": 1, "description": "an ONNX file on the server"}
    load = {"path": file, **_settings(OF_DETECTOR)}
    paths: dict[str, Any] = {
        "/feeds": {
            "get": _get("The page of all feeds", "text/html"),
            "post": _change("Add a feed and start it", new, ("name", "source"), "201", example),
        },
        "/feeds/{name}": {
            "get": {**_get("A feed: source, state, figures, settings", JSON_TYPE, "404"), "parameters": name},
            "patch": {
                **_change("What is reported of a feed, and its rate", {**_LIMITS, **_settings(OF_RATE)}, ()),
                "parameters": name,
            },
            "delete": {
                "summary": "Stop a feed and forget it",
                "parameters": name,
                "responses": {"200": _done()} | failures(ERRORS, "401", "403", "404", "409", "503"),
            },
        },
        "/admin/load": {
            "post": _change("Another detector for all feeds, between two batches", load, ("path",)),
        },
        "/feeds/{name}.jpg": {"get": {**_get("The next frame, small", "image/jpeg", "404"), "parameters": name}},
        "/feeds/{name}.mjpeg": {
            "get": {**_get("Frames until you leave", several, "404", "429"), "parameters": name}
        },
        "/feeds.mjpeg": {
            "get": _get("The same of several feeds: ?feed=A&feed=B", several, "404", "422", "429")
        },
        "/status": {"get": _get("Every figure", JSON_TYPE)},
        "/dashboard": {"get": _get("The page of batches", "text/html")},
        "/dashboard/stream": {"get": _get("Snapshots until you leave", "application/x-ndjson", "429")},
        "/health": {
            "get": {"summary": "Whether every feed is well", "responses": {"200": _done(), "503": _done()}},
        },
        "/metrics": {"get": _get("Prometheus series", "text/plain")},
    }
    error = {
        "type": "object",
        "required": ["error", "message", "request_id", "retry_safe"],
        "properties": {
            "error": {"type": "string"}, "message": {"type": "string"}, "request_id": {"type": "string"},
            "retry_safe": {"type": "boolean"}, "field": {"type": "string"},
        },
    }  # fmt: skip
    return finished("Reflex feeds", paths, {"Error": error}, OPEN if key else None)


def _settings(names: Sequence[str]) -> dict[str, Any]:
    """The fields of these settings, with their ranges."""
    hints, found = hints_of(FeedsConfig), {}
    for f in fields(FeedsConfig):
        if f.name not in names:
            continue
        kind, meta = hints[f.name], f.metadata
        schema: dict[str, Any] = dict(_NAMES) if kind not in _TYPES else {"type": _TYPES[kind]}
        schema["description"] = str(meta["help"])
        if meta["low"] is not None and kind in _TYPES:
            schema["exclusiveMinimum" if meta["above"] else "minimum"] = meta["low"]
        if meta["high"] is not None and kind in _TYPES:
            schema["maximum"] = meta["high"]
        if meta["choices"]:
            schema["enum"] = [int(c) if kind is int else c for c in meta["choices"]]
        found[f.name] = schema
    return found


def _get(summary: str, kind: str, *codes: str) -> dict[str, Any]:
    done = {"200": {"description": "as asked", "content": {kind: {}}}}
    return {"summary": summary, "responses": done | failures(ERRORS, "401", "403", *codes)}


def _done() -> dict[str, Any]:
    return {"description": "done, and what came of it", "content": {JSON_TYPE: {"schema": {"type": "object"}}}}


def _change(
    summary: str, properties: dict[str, Any], required: Sequence[str], code: str = "200", example: Any = None
) -> dict[str, Any]:
    schema = {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}
    content = {"schema": schema} | ({} if example is None else {"example": example})
    errors = failures(ERRORS, "400", "401", "403", "404", "409", "413", "422", "503")
    return {
        "summary": summary,
        "requestBody": {"required": bool(required), "content": {JSON_TYPE: content}},
        "responses": {code: _done()} | {c: told for c, told in errors.items() if c != "404" or not required},
    }
