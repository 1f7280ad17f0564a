"""What /openapi.json says of a model server beside its questions: errors, and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reflex_runtime.web.json import JSON_TYPE
from reflex_runtime.web.openapi import failures

ERRORS = {
    "400": "invalid_request, invalid_json, context_length_exceeded: `param` names what is wrong",
    "401": "invalid_api_key: a key is set and was not sent",
    "403": "forbidden: without a key, a page of another site or a proxy asked",
    "404": "model_not_found, not_found: no such model, no such path",
    "405": "method_not_allowed: the header Allow has the right method",
    "408": "request_timeout: the head or the body did not come in time",
    "413": "too_large: the body exceeds --max-body-bytes",
    "429": "queue_full, client_at_capacity: try again after Retry-After",
    "500": "processor_failed, processor_hung: it ran and failed",
    "503": "deadline_unreachable, not_ready, shutting_down: try again after Retry-After",
    "504": "deadline_exceeded: the deadline passed before the first token",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_OBJECT = {JSON_TYPE: {"schema": {"type": "object"}}}
_GETS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "/v1/models": ("the model that is served, and its adapters", ("200",), _OBJECT),
    "/health": ("200 only when ready, else 503", ("200", "503"), _OBJECT),
    "/status": ("requests that wait and run, and how batches were formed", ("200",), _OBJECT),
    "/metrics": ("Prometheus text", ("200",), {"text/plain": {"schema": {"type": "string"}}}),
    "/version": ("the server's version", ("200",), _OBJECT),
    "/openapi.json": ("this document", ("200",), _OBJECT),
    "/docs": ("this document for people", ("200",), {"text/html": {"schema": {"type": "string"}}}),
}


def page_paths() -> dict[str, Any]:
    """The paths of the pages."""
    paths: dict[str, Any] = {}
    for path, (summary, codes, content) in _GETS.items():
        done = {code: {"description": "OK" if code == "200" else "not ready", "content": content} for code in codes}
        more = failures_of("401", "403", "405", "408", but=codes)
        paths[path] = {"get": {"summary": summary, "responses": done | more}}
    paths["/v1/models/{id}"] = {
        "get": {
            "summary": "the model of this name",
            "responses": {"200": {"description": "OK", "content": _OBJECT}}
            | failures_of("400", "401", "403", "404", "405", "408"),
        },
        "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}],
    }
    return paths


def failures_of(*codes: str, but: Sequence[str] = (), error: str = "Error") -> dict[str, Any]:
    """Responses of these statuses, but for some. error: name of the schema of their body."""
    return failures(ERRORS, *codes, but=but, error=error)
