"""/openapi.json of the port of `reflex feeds`, and /docs, its page."""

from __future__ import annotations

from typing import Any, Final

from reflex_runtime.web.json import JSON_TYPE
from reflex_runtime.web.openapi import failures, finished, page
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route

OPEN: Final = ("/metrics", "/health", "/dashboard", "/feeds", "/openapi.json", "/docs")
ERRORS: Final = {
    "401": "the key is missing or wrong",
    "403": "without a key: a host name that is not this server's, or a page of another site",
    "404": "no such feed",
    "422": "too many feeds are asked for",
    "429": "too many watch",
}


def described_routes(key: bool) -> list[Route]:
    """The document and its page. key: whether the server has one."""
    document = _document(key)

    async def described(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, document)

    async def docs(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, page(document, request.headers.get(b"host", b"")), b"text/html; charset=utf-8")

    return [Route("/openapi.json", described, open=True), Route("/docs", docs, open=True)]


def _document(key: bool) -> bytes:
    name = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    several = "multipart/x-mixed-replace"
    paths: dict[str, Any] = {
        "/feeds": {"get": _get("The page of all feeds", "text/html")},
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


def _get(summary: str, kind: str, *codes: str) -> dict[str, Any]:
    done = {"200": {"description": "as asked", "content": {kind: {}}}}
    return {"summary": summary, "responses": done | failures(ERRORS, "401", "403", *codes)}


def _done() -> dict[str, Any]:
    return {"description": "done, and what came of it", "content": {JSON_TYPE: {"schema": {"type": "object"}}}}
