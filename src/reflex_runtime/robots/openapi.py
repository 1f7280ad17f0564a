"""The OpenAPI document of a policy server: its routes, the structs that decode their bodies, and the policies.

The schema is as strict as the server with these policies: it describes every accepted body and every status. JSON
Schema lacks two things: a text of format `image` is a PNG or JPEG in base64 (or a data URL), and an id has at most 256
bytes, which are up to 256 characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, get_args

from reflex_runtime.robots.policy.processors import FaultKind
from reflex_runtime.robots.policy.spec import PolicySpec
from reflex_runtime.robots.serving.decode_pool import cameras_of
from reflex_runtime.robots.serving.endpoints import BODIES, OUTCOME
from reflex_runtime.robots.serving.question import ActAnswer
from reflex_runtime.robots.versions.slots import SHADOW
from reflex_runtime.robots.wires import oip as policy_models
from reflex_runtime.robots.wires.act import ActJson
from reflex_runtime.settings import DEFAULT_POLICY
from reflex_runtime.web import oip
from reflex_runtime.web.access import Keys
from reflex_runtime.web.fields import ID
from reflex_runtime.web.openapi import (
    NULL,
    OBJECT,
    PAGES,
    PLAIN_ERROR,
    TEXT,
    Operation,
    content,
    described,
    ref,
    schemas_of,
)
from reflex_runtime.web.request import Route

POLICIES: Final = "/policies/"  # NAME and the paths of a server of this policy follow
_ALWAYS: Final = ("401", "403", "405", "408", "503")
_CHANGED: Final = ("400", "404", "409", "413", "415", "422", "500")
_INFERRED: Final = ("400", "409", "413", "415", "422", "429", "500", "504")
_PICTURE: Final = (  # a PNG of 8 x 8 pixels
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAFUlEQVR42mNMaFjAgA0wMeAAg1MCAC/XAZAAI3yiAAAAAElFTkSuQmCC"
)
_FIXED: Final = PAGES | {  # whatever is served
    "/health": Operation("200 only when ready, else 503; answers while batches run", unready=True),
    "/healthz": Operation("OK when ready, else 503; for clients of openpi", TEXT, unready=True),
    "/config": Operation("the export's configuration and the settings in force"),
    "/metrics": Operation("Prometheus text", TEXT),
    "/diagnostics/cost-model": Operation("what the cost model has learned, per key"),
    "/diagnostics/rollout": Operation("split, verdicts, outcomes, the comparison of a and b, the ramp, and changes"),
    "/diagnostics/shadow": Operation("how far the shadow's actions are from the served", codes=("404",)),
    "/reset": Operation(
        "for clients of GR00T, which send it before an episode; it changes nothing", codes=("400", "413", "415")
    ),
}  # fmt: skip


def document(routes: Iterable[Route], policies: Mapping[str, Mapping[str, PolicySpec]], keys: Keys) -> bytes:
    """The OpenAPI 3.1 document of these routes. policies: by name, the slots of each. keys: of the server."""
    first, *others = policies
    operations = _operations(policies[first], first, list(policies) if others else None)
    for name, specs in policies.items():
        operations |= {f"{POLICIES}{name}{path}": told for path, told in _operations(specs, name).items()}
    schemas = schemas_of(ActAnswer, oip.InferBody) | PLAIN_ERROR
    return described("Reflex", routes, operations, schemas, keys, _ALWAYS)


def _operations(
    slots: Mapping[str, PolicySpec], policy: str, models: Sequence[str] | None = None
) -> dict[str, Operation]:
    """The operations of one policy. models: names in OIP, where the operations are a server's of several."""
    served = [spec for slot, spec in slots.items() if slot != SHADOW]
    bodies = schemas_of(oip.InferBody, *BODIES)
    slot, rate = {"enum": list(slots)}, r"(0(\.[0-9]{1,6})?|1(\.0{1,6})?)"
    bodies["SlotName"]["properties"]["slot"] = bodies["Load"]["properties"]["slot"] = slot
    fault = f"^({'|'.join(slots)}):({'|'.join(get_args(FaultKind))}):{rate}$"
    bodies["Faults"]["properties"]["faults"]["items"] |= {"pattern": fault}

    def change(summary: str, body: str) -> Operation:
        return Operation(summary, OBJECT, _CHANGED, request=content(bodies[body]), optional=body == "Nothing")

    found = _FIXED | {
        "/act": Operation(
            "One observation in, one chunk of actions out",
            content(ref(ActAnswer)),
            _INFERRED,
            request=content(act_request(served, policy)),
            example=act_example(served),
            description="Inputs that the policies need are required; 422 names a missing or wrong field. In "
            "application/msgpack, images are PNG/JPEG bytes or arrays, and arrays are {dtype, shape, data}; the answer "
            "then is msgpack too, unless the request accepts another type.",
        ),
        "/admin/split": change("a's percent of new episodes; those that have started stay", "Split"),
        "/admin/rollback": change("everything to a at once, running episodes too", "Nothing"),
        "/admin/reset": change("forget a slot's crashes", "SlotName"),
        "/admin/load": change(
            "put another export into a slot: loaded beside, warmed, switched, the old one let go", "Load"
        ),
        "/admin/faults": change("the faults of a drill, as --inject-fault takes them; an empty list ends it", "Faults"),
        OUTCOME: change("how an episode ended", "Outcome")._replace(parameters={"id": ID | {"minLength": 1}}),
    }
    return found | oip.operations(models or [policy_models.model_name(served[0])], _INFERRED, bodies["InferBody"])


def act_request(specs: Sequence[PolicySpec], policy: str = DEFAULT_POLICY) -> dict[str, Any]:
    """The schema of a JSON body that all these versions accept. policy: their name."""
    schema = schemas_of(ActJson)[ActJson.__name__]
    fields = schema["properties"]
    values: dict[str, list[dict[str, Any]]]  # each a type, or null
    values = {name: field["anyOf"] for name, field in fields.items() if "anyOf" in field}
    values["policy"][0] = {"enum": [policy]}
    values["state"][0] |= {"minItems": specs[0].state_dim, "maxItems": specs[0].state_dim}
    reads = any(spec.takes_text and spec.default_prompt is None for spec in specs)
    needed = schema["required"] = ["instruction"] * reads + ["state"] * any(spec.takes_state for spec in specs)
    for name in needed:
        fields[name] = values[name][0] | {"description": fields[name]["description"]}
    steps = max(spec.observation_steps for spec in specs)
    if steps > 1:
        fields["episode_id"]["description"] += f"; the policy sees its last {steps} observations together"
    _cameras(schema, specs)
    return schema


def _cameras(schema: dict[str, Any], specs: Sequence[PolicySpec]) -> None:
    """Describe the accepted and the required images."""
    fields, known = schema["properties"], cameras_of(specs)
    picture, images = fields["image"]["anyOf"][0], fields["images"]["anyOf"][0]
    for name in {"image", "image_wrist"} - known:
        fields[name] = NULL | {"description": "leave it out: no policy served here has this camera"}
    further = sorted(known - {"image", "image_wrist"})
    images |= {"properties": dict.fromkeys(further, picture), "additionalProperties": False}
    ways = []
    for spec in specs:
        needed = [_sends(spec, name) for name in spec.images if name not in spec.optional_images]
        ways += needed or ([{"anyOf": [_sends(spec, name) for name in spec.images]}] if spec.images else [])
    if ways:
        schema["allOf"] = ways


def _sends(spec: PolicySpec, name: str) -> dict[str, Any]:
    """The schema of a body that sends an image, under one of its names."""
    top = "image" if len(spec.images) == 1 else name
    ways: list[dict[str, Any]] = []
    if top in ("image", "image_wrist"):
        ways.append({"required": [top], "properties": {top: {"type": "string"}}})
    for own in dict.fromkeys((name, spec.other_names.get(name, name))):
        if own not in ("image", "image_wrist"):
            within = {"type": "object", "required": [own]}
            ways.append({"required": ["images"], "properties": {"images": within}})
    return ways[0] if len(ways) == 1 else {"anyOf": ways}


def act_example(specs: Sequence[PolicySpec]) -> dict[str, Any]:
    """A JSON body that all these policies accept: a small grey-blue picture for each camera."""
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
