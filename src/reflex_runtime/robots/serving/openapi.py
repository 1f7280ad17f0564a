"""/openapi.json of a policy server from the types that validate and the exports that are served, and a page of it that
needs nothing from outside.

The schema is as strict as the server is with these exports: what fits it is taken, and every status has its place. Two
things JSON Schema cannot say: a text of format `image` is a PNG or JPEG in base64 (a data URL will do), and an id has
at most 256 bytes, which are up to 256 characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, get_args

from reflex_runtime.robots import PolicySpec
from reflex_runtime.robots.policy.faults import FaultKind
from reflex_runtime.robots.serving import admin
from reflex_runtime.robots.serving import fields as act
from reflex_runtime.robots.serving.images import cameras_of
from reflex_runtime.robots.serving.question import LARGEST, MAX_INSTRUCTION
from reflex_runtime.robots.serving.slots import SHADOW
from reflex_runtime.robots.wires.oip import VERSION, model_name
from reflex_runtime.settings import DEFAULT_POLICY
from reflex_runtime.web.fields import MAX_ID_BYTES
from reflex_runtime.web.json import JSON_TYPE
from reflex_runtime.web.openapi import failures, finished

ERRORS = {
    "400": "invalid_json, invalid_request: the body is not JSON or msgpack, or the request is not HTTP",
    "401": "unauthorized: a key is set and was not sent",
    "403": "forbidden: without a key, it was not asked from this machine, or by a page of another site",
    "404": "not_found: no such path, slot, episode, model or directory",
    "405": "method_not_allowed: the header Allow has the right method",
    "408": "request_timeout: the head or the body did not come in time",
    "409": "superseded: a newer request of the same robot replaced it; invalid_request: it does not fit the state of "
    "the server",
    "413": "too_large: the body exceeds --max-body-bytes",
    "422": "invalid_request: `field` names what is wrong",
    "429": "client_at_capacity, too_many_requests: try again after Retry-After",
    "500": "processor_failed, processor_hung: it ran and failed",
    "503": "queue_full, deadline_unreachable, shutting_down, degraded, slo_violated, not_ready: "
    "try again after Retry-After",
    "504": "deadline_exceeded: the deadline passed before it ran",
}
_ALWAYS = ("400", "401", "403", "405", "408", "413", "503")  # of whatever is asked
_ERROR = {
    "type": "object",
    "required": ["error", "message", "request_id", "retry_safe"],
    "properties": {
        "error": {"type": "string"},
        "message": {"type": "string"},
        "request_id": {"type": "string"},
        "retry_safe": {"type": "boolean", "description": "whether sending it again cannot run it twice"},
    },
}
_OBJECT = {JSON_TYPE: {"schema": {"type": "object"}}}
_PRINTABLE = r"^[^\u0000-\u001f\u007f-\u009f]*$"
_ID = {"type": "string", "maxLength": MAX_ID_BYTES, "pattern": _PRINTABLE}
_NULL = {"type": "null"}
_PICTURE = (  # a PNG of 8 x 8 pixels
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAFUlEQVR42mNMaFjAgA0wMeAAg1MCAC/XAZAAI3yiAAAAAElFTkSuQmCC"
)
_IMAGE = {"type": "string", "format": "image", "contentEncoding": "base64"}


def document(specs: Mapping[str, PolicySpec], key: bool, policy: str = DEFAULT_POLICY, prefix: str = "") -> bytes:
    """The OpenAPI 3.1 document of one policy. specs: by slot, of what is served. key: whether one is needed.

    policy: its name. prefix: of its paths.
    """
    paths, components = _paths_of(specs, policy)
    under = {prefix + path: methods for path, methods in paths.items()}
    return finished("Reflex", under, components, [prefix + path for path in _OPEN] if key else None)


def document_of_several(policies: Mapping[str, Mapping[str, PolicySpec]], key: bool) -> bytes:
    """The document of a server with several policies: what is of the server, and every policy below its path."""
    paths: dict[str, Any] = {}
    components: dict[str, Any] = {}
    for name, specs in policies.items():
        of_policy, components = _paths_of(specs, name)
        if not paths:
            paths = {path: of_policy[path] for path in (*_OF_SERVER, *(p for p in of_policy if _MODEL in p))}
            paths = deepcopy(paths)
        paths |= {f"/policies/{name}{path}": methods for path, methods in of_policy.items()}
    for path, methods in paths.items():
        if path.startswith(_MODEL):
            methods["parameters"][0]["schema"] = {"enum": list(policies)}
    open = [*_OPEN, *(f"/policies/{name}{path}" for name in policies for path in _OPEN)]
    return finished("Reflex", paths, components, open if key else None)


def _paths_of(specs: Mapping[str, PolicySpec], policy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The paths of one policy, and the schemas that they refer to."""
    served = [spec for slot, spec in specs.items() if slot != SHADOW]
    answer, components = act.answer_schema()
    paths: dict[str, Any] = {"/act": {"post": _act(act_request(served, policy), act_example(served), answer)}}
    for path, (summary, codes, content) in _GETS.items():
        done = {code: {"description": "OK" if code == "200" else "not ready", "content": content} for code in codes}
        found = ("404",) if path == "/diagnostics/shadow" or _MODEL in path else ()
        more = failures(ERRORS, "401", "403", "405", "408", *found, "503", but=codes)
        paths[path] = {"get": {"summary": summary, "responses": done | more}}
    for path in (f"{_MODEL}/infer", f"{_MODEL}{_VERSION}/infer"):
        paths[path] = {"post": dict(_INFER)}  # what is done to it later is of this document
    named = {"model": {"enum": [model_name(served[0])]}, "version": {"enum": [VERSION]}}
    for path, methods in paths.items():
        given = [name for name in named if f"{{{name}}}" in path]
        if given:
            methods["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": named[name]} for name in given
            ]
    for path, (summary, schema) in _posts(list(specs)).items():
        paths[path] = {"post": _post(summary, schema, path == "/admin/rollback")}
    done = {"200": {"description": "an empty object", "content": _OBJECT}}
    summary = "for clients of GR00T, which ask it before an episode; it changes nothing"
    paths["/reset"] = {"post": {"summary": summary, "responses": done | failures(ERRORS, *_ALWAYS)}}
    paths["/episodes/{id}/outcome"]["parameters"] = [
        {"name": "id", "in": "path", "required": True, "schema": _ID | {"minLength": 1}}
    ]
    return paths, {"Error": _ERROR} | components


def act_request(specs: Sequence[PolicySpec], policy: str = DEFAULT_POLICY) -> dict[str, Any]:
    """The schema of a JSON body that every one of these versions takes. policy: their name."""
    schema = act.request_schema()
    fields = schema["properties"]
    for name in ("episode_id", "request_id", "robot_id"):
        fields[name] = _or_null(_ID, fields[name])
    fields["policy"] = _or_null({"enum": [policy]}, fields["policy"])
    fields["seed"] = _or_null({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, fields["seed"])
    fields["executed"] = _or_null({"type": "integer", "minimum": 0, "maximum": 1_000_000}, fields["executed"])
    limit = {"type": "number", "exclusiveMinimum": 0, "maximum": 600_000}
    fields["deadline_ms"] = _or_null(limit, fields["deadline_ms"])
    text: dict[str, Any] = {"type": "string", "maxLength": MAX_INSTRUCTION}
    reads = any(spec.takes_text for spec in specs)
    numbers = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}
    dim = specs[0].state_dim
    state = {"type": "array", "items": numbers, "minItems": dim, "maxItems": dim}
    needs_state = any(spec.takes_state for spec in specs)
    needed = {"instruction": (text | {"pattern": r"\S"} if reads else text, reads), "state": (state, needs_state)}
    for name, (of, must) in needed.items():
        fields[name] = of | {"description": fields[name]["description"]} if must else _or_null(of, fields[name])
    schema["required"] = [name for name, (_, must) in needed.items() if must]
    steps = max(spec.observation_steps for spec in specs)
    if steps > 1:
        fields["episode_id"]["description"] += f"; the policy sees its last {steps} observations together"
    _cameras(schema, specs)
    return schema


def act_example(specs: Sequence[PolicySpec]) -> dict[str, Any]:
    """A JSON body that every one of these policies takes: a small grey-blue picture for each camera."""
    body: dict[str, Any] = {}
    if any(spec.takes_text for spec in specs):
        body["instruction"] = "open the door"
    if any(spec.takes_state for spec in specs):
        body["state"] = [0.1] * specs[0].state_dim
    for spec in specs:
        for name in spec.images:
            if name in ("image", "image_wrist"):
                body[name] = _PICTURE
            elif len(spec.images) == 1:
                body["image"] = _PICTURE
            else:
                body.setdefault("images", {})[name] = _PICTURE
    return body


def _cameras(schema: dict[str, Any], specs: Sequence[PolicySpec]) -> None:
    """Which images may be sent, and which must be."""
    fields, known = schema["properties"], cameras_of(specs)
    for name in ("image", "image_wrist"):
        unknown = _NULL | {"description": "leave it out: no policy served here has this camera"}
        fields[name] = _or_null(_IMAGE, fields[name]) if name in known else unknown
    further = {name: _IMAGE for name in sorted(known) if name not in ("image", "image_wrist")}
    images = {"type": "object", "properties": further, "additionalProperties": False}
    fields["images"] = _or_null(images, fields["images"])
    ways = []
    for spec in specs:
        for name in [name for name in spec.images if name not in spec.optional_images]:
            here = {"required": ["images"], "properties": {"images": {"type": "object", "required": [name]}}}
            top = "image" if len(spec.images) == 1 else name
            ways.append({"anyOf": [{"required": [top], "properties": {top: {"type": "string"}}}, here]}
                        if top in ("image", "image_wrist") else here)  # fmt: skip
            if name in ("image", "image_wrist"):
                ways[-1] = {"required": [name], "properties": {name: {"type": "string"}}}
    if ways:
        schema["allOf"] = ways


def _or_null(schema: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    told = {"description": described["description"]} if "description" in described else {}
    return {"anyOf": [dict(schema), _NULL], "default": None} | told


_TEXT = {"text/plain": {"schema": {"type": "string"}}}
_MODEL, _VERSION = "/v2/models/{model}", "/versions/{version}"
_INPUTS = "OIP: inputs and outputs of the model, see docs/wires.md"
_MODEL_READY = "OIP: 200 when requests are answered, else 503"
_GETS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "/health": ("200 only when ready, else 503; answers while batches run", ("200", "503"), _OBJECT),
    "/healthz": ("OK when ready, else 503; what clients of openpi ask", ("200", "503"), _TEXT),
    "/config": ("the export's configuration and the settings in force", ("200",), _OBJECT),
    "/metrics": ("Prometheus text", ("200",), _TEXT),
    "/diagnostics/cost-model": ("what the cost model learned, per key", ("200",), _OBJECT),
    "/diagnostics/rollout": (
        "split, verdicts, outcomes, the comparison of a and b, the ramp, and what has changed", ("200",), _OBJECT,
    ),
    "/diagnostics/shadow": ("how far the shadow's actions are from the served; 404 without one", ("200",), _OBJECT),
    "/v2": ("the server, as the Open Inference Protocol asks for it", ("200",), _OBJECT),
    "/v2/health/live": ("OIP: 200", ("200",), _OBJECT),
    "/v2/health/ready": (_MODEL_READY, ("200", "503"), _OBJECT),
    _MODEL: (_INPUTS, ("200",), _OBJECT),
    f"{_MODEL}/ready": (_MODEL_READY, ("200", "503"), _OBJECT),
    f"{_MODEL}{_VERSION}": (_INPUTS, ("200",), _OBJECT),
    f"{_MODEL}{_VERSION}/ready": (_MODEL_READY, ("200", "503"), _OBJECT),
    "/openapi.json": ("this document", ("200",), _OBJECT),
    "/docs": ("this document for people", ("200",), {"text/html": {"schema": {"type": "string"}}}),
}  # fmt: skip
_OPEN = ("/health", "/healthz", "/metrics", "/openapi.json", "/docs", "/v2/health/live", "/v2/health/ready")
_OF_SERVER = (*_OPEN, "/config", "/v2")
_TENSOR = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"type": "string", "description": "as the model's metadata has it"},
        "datatype": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "data": {"type": "array", "description": "the values in C order, without binary_data_size"},
        "parameters": {"type": "object", "description": "binary_data_size: its bytes follow the JSON"},
    },
}
_INFER = {
    "summary": "OIP: tensors of observations in, actions out; each row is a request",
    "description": "The header Inference-Header-Content-Length is the length of the JSON where raw tensors follow it.",
    "requestBody": {
        "required": True,
        "content": {
            JSON_TYPE: {
                "schema": {
                    "type": "object",
                    "required": ["inputs"],
                    "properties": {
                        "inputs": {"type": "array", "items": _TENSOR, "description": "one tensor for each input"},
                        "id": {"type": "string", "description": "of the request"},
                        "parameters": {"type": "object", "description": "robot_id, sequence_id, priority, timeout …"},
                        "outputs": {"type": "array", "items": {"type": "object"}, "description": "actions"},
                    },
                }
            },
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    },
    "responses": {
        "200": {"description": "the actions", "content": _OBJECT | {"application/octet-stream": {"schema": {}}}},
        **failures(ERRORS, *_ALWAYS, "404", "409", "422", "429", "500", "504"),
    },
}


def _posts(slots: Sequence[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Summary and body of every other POST."""
    split = act.schema_of(admin.Split)
    split["properties"]["split"] = {"type": "integer", "minimum": 0, "maximum": 100}
    name, load = act.schema_of(admin.SlotName), act.schema_of(admin.Load)
    name["properties"]["slot"] = load["properties"]["slot"] = {"type": "string", "enum": list(slots)}
    load["properties"]["path"] |= {"minLength": 1, "pattern": r"^[^\u0000]*$"}
    faults = act.schema_of(admin.Faults)
    rate, kinds = r"(0(\.[0-9]{1,6})?|1(\.0{1,6})?)", "|".join(get_args(FaultKind))
    fault = {"type": "string", "pattern": f"^({'|'.join(slots)}):({kinds}):{rate}$"}
    faults["properties"]["faults"] |= {"maxItems": admin.MAX_FAULTS, "items": fault}
    return {
        "/admin/split": ("a's percent of new episodes; those that have started stay", split),
        "/admin/rollback": ("everything to a at once, running episodes too", act.schema_of(admin.Nothing)),
        "/admin/reset": ("forget a slot's crashes", name),
        "/admin/load": ("put another export into a slot: loaded beside, warmed, switched, the old one let go", load),
        "/admin/faults": ("the faults of a drill, as --inject-fault takes them; an empty list ends it", faults),
        "/episodes/{id}/outcome": ("how an episode ended", act.schema_of(admin.Outcome)),
    }


def _post(summary: str, schema: dict[str, Any], optional: bool) -> dict[str, Any]:
    done = {"200": {"description": "done, and what came of it", "content": _OBJECT}}
    return {
        "summary": summary,
        "requestBody": {"required": not optional, "content": {JSON_TYPE: {"schema": schema}}},
        "responses": done | failures(ERRORS, *_ALWAYS, "404", "409", "422", "500"),
    }


def _act(request: dict[str, Any], example: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    done = {"200": {"description": "a chunk of actions", "content": {JSON_TYPE: {"schema": answer}}}}
    return {
        "summary": "One observation in, one chunk of actions out",
        "description": "What the policies served here need is required; 422 names what is missing or wrong. As "
        "application/msgpack, images are PNG/JPEG bytes or arrays, and arrays are {dtype, shape, data}; the answer "
        "then is msgpack too, unless another type is accepted.",
        "requestBody": {"required": True, "content": {JSON_TYPE: {"schema": request, "example": example}}},
        "responses": done | failures(ERRORS, *_ALWAYS, "409", "422", "429", "500", "504"),
    }
