"""/openapi.json from the same types that validate requests, and a page of it that needs nothing from outside."""

from __future__ import annotations

import functools
import html
import json
from typing import Any

from reflex_runtime.server import admin
from reflex_runtime.server.wire import act
from reflex_runtime.server.wire.act import schema_of
from reflex_runtime.version import __version__

_ERRORS = {
    "400": "invalid_json, invalid_request: the body is not JSON or msgpack",
    "401": "unauthorized: a key is set and was not sent",
    "403": "forbidden: without a key, not under a name of this server, or from the page of another site",
    "408": "request_timeout: it did not come in time",
    "409": "superseded: a newer request of the same robot replaced it",
    "413": "too_large: the body exceeds --max-body-bytes",
    "422": "invalid_request: `field` names what is wrong",
    "429": "client_at_capacity, too_many_requests: try again after Retry-After",
    "500": "processor_failed, processor_hung: it ran and failed",
    "503": "queue_full, deadline_unreachable, shutting_down, degraded, slo_violated, not_ready, overloaded: "
    "try again after Retry-After",
    "504": "deadline_exceeded: the deadline passed before it ran",
}


_POSTS: dict[str, tuple[str, type]] = {
    "/admin/split": ("a's percent of new episodes; those that have started stay", admin.Split),
    "/admin/rollback": ("everything to a at once, running episodes too", admin.Nothing),
    "/admin/reset": ("forget a slot's crashes", admin.SlotName),
    "/admin/load": ("put another export into a slot: loaded beside, warmed, switched, the old one let go", admin.Load),
    "/admin/faults": ("the faults of a drill, as --inject-fault takes them; an empty list ends it", admin.Faults),
    "/episodes/{id}/outcome": ("how an episode ended", admin.Outcome),
}


@functools.cache
def document() -> bytes:
    """The OpenAPI 3.1 document."""
    request, answer = act.json_schema()
    error = {
        "type": "object",
        "required": ["error", "message", "request_id", "retry_safe"],
        "properties": {
            "error": {"type": "string"},
            "message": {"type": "string"},
            "request_id": {"type": "string"},
            "retry_safe": {"type": "boolean", "description": "whether sending it again cannot run it twice"},
        },
    }
    paths: dict[str, Any] = {"/act": {"post": _act(request, answer)}}
    for path, summary in {
        "/health": "200 only when ready, else 503; answers while batches run",
        "/config": "the export's configuration and the settings in force",
        "/metrics": "Prometheus text",
        "/diagnostics/cost-model": "what the cost model learned, per key",
        "/diagnostics/rollout": "split, verdicts, outcomes, the comparison of a and b, the ramp, and what has changed",
        "/diagnostics/shadow": "how far the shadow's actions are from the served ones; 404 without a shadow",
    }.items():
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": "OK"}}}}
    for path, (summary, kind) in _POSTS.items():
        paths[path] = {"post": _post(summary, schema_of(kind))}
    body = {
        "openapi": "3.1.0",
        "info": {"title": "Reflex", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": error},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Reflex-Key"},
            },
        },
    }
    return json.dumps(body, indent=1).encode()


def _post(summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": {"content": {act.JSON_TYPE: {"schema": schema}}},
        "responses": {
            "200": {"description": "done, and what came of it"},
            "401": {"description": _ERRORS["401"] + "; without a key, it was not asked from this machine"},
            "403": {"description": _ERRORS["403"]},
            "404": {"description": "not_found: no such slot or episode"},
            "409": {"description": "invalid_request: it does not fit the state the server is in"},
            "422": {"description": _ERRORS["422"]},
        },
    }


def _act(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {
        "200": {"description": "a chunk of actions", "content": {act.JSON_TYPE: {"schema": answer}}}
    }
    responses |= {code: {"description": text, "content": failure} for code, text in _ERRORS.items()}
    return {
        "summary": "One observation in, one chunk of actions out",
        "description": "All fields are optional here; the policy decides which it needs (422 names a missing one). "
        "As application/msgpack, images are PNG/JPEG bytes or arrays, and arrays are {dtype, shape, data}.",
        "requestBody": {"content": {act.JSON_TYPE: {"schema": request}, act.MSGPACK_TYPE: {"schema": {}}}},
        "responses": responses,
    }


@functools.cache
def page() -> bytes:
    """A page for people: every path, its fields and its answers."""
    doc = json.loads(document())
    parts = []
    for path, methods in doc["paths"].items():
        for method, spec in methods.items():
            parts.append(f"<h2><code>{method.upper()} {path}</code></h2><p>{html.escape(spec['summary'])}</p>")
            if "description" in spec:
                parts.append(f"<p>{html.escape(spec['description'])}</p>")
            schema = spec.get("requestBody", {}).get("content", {}).get(act.JSON_TYPE, {}).get("schema", {})
            if schema.get("properties"):
                parts.append(_table("Field", {k: _field(v) for k, v in sorted(schema["properties"].items())}))
            parts.append(_table("Status", {k: v["description"] for k, v in spec["responses"].items()}))
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#1c2733}"
        "table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}td,th{border-bottom:1px solid #d8dee6;"
        "padding:.35rem .6rem;text-align:left;vertical-align:top}code{background:#f1f4f8;padding:.1rem .3rem;"
        "border-radius:4px}h2{margin-top:2.5rem}"
    )
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>Reflex API</title><style>{style}</style>"
    intro = f"<h1>Reflex {html.escape(__version__)}</h1>"
    intro += "<p>Machine-readable: <a href=/openapi.json>/openapi.json</a></p>"
    return (head + intro + "".join(parts) + "</html>").encode()


def _field(schema: dict[str, Any]) -> str:
    return f"{_type(schema)}: {schema['description']}" if "description" in schema else _type(schema)


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(s) for s in schema["anyOf"] if s.get("type") != "null")
    if "enum" in schema:
        return " | ".join(str(v) for v in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    kind = str(schema.get("type", "any"))
    return "mapping" if kind == "object" else kind


def _table(title: str, rows: dict[str, str]) -> str:
    cells = "".join(f"<tr><td><code>{html.escape(k)}</code><td>{html.escape(v)}" for k, v in rows.items())
    return f"<table><tr><th>{title}<th>{cells}</table>"
