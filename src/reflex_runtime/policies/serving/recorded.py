"""What the recorder is handed for one request: references to what was asked and answered, made on the event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from reflex_runtime.config import ServeConfig
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.policies import ActionChunk, InvalidRequest, Observation, seed_of
from reflex_runtime.policies.serving import fields as wire
from reflex_runtime.policies.serving.slots import Slot
from reflex_runtime.telemetry.recording import Answered, SentImage, hardware, settings_of

if TYPE_CHECKING:
    from reflex_runtime.policies.serving.asking import Ask


def asked_and_answered(
    ask: Ask,
    slot: str,
    now: float,
    answer: wire.ActAnswer | None,
    chunk: ActionChunk | None,
    error: ReflexError | None,
    deadline_ms: float,
) -> Answered:
    """One request whose fields were understood. answer, chunk: of a 200; error: of anything else.

    deadline_ms: what requests are given that bring none; 0 is none.
    """
    fields, ticket, placement = ask.fields, ask.ticket, ask.placement
    assert fields is not None
    found = Answered(
        ask.request_id,
        fields.episode_id,
        fields.robot_id,
        fields.instruction,
        _state(fields),
        _seed(ask, fields),
        _images(fields),
        ask.received,
        fields.deadline_ms if fields.deadline_ms is not None else deadline_ms or None,
        fields.executed,
        slot=slot,
        total_s=now - ask.received,
    )
    if ask.version is not None:
        found.model_hash = ask.version.policy.export.model_hash
    if ticket is not None:
        started = ticket.started
        found.arrived = ticket.arrived
        found.queue_s = (now if started is None else started) - ticket.arrived
        found.batch_s = 0.0 if started is None else now - started
        found.measured_ms = ticket.shared * 1e3
        found.batch = ticket.admission
    if answer is not None and chunk is not None:
        found.actions, found.denoising_steps = chunk.actions, chunk.denoising_steps
        found.inference_mode, found.cache, found.guard = answer.inference_mode, answer.cache, answer.guard
        found.rtc = None if answer.rtc is None else dict(answer.rtc)
    if error is not None:
        found.error = (error.code, error.message)
    if placement is not None and placement.routing is not None:
        r = placement.routing
        found.routing = {"slot": placement.slot, "routing_key": r.key, "degraded": r.degraded, "cached": r.cached}
    return found


def header_of(config: ServeConfig, slots: Mapping[str, Slot], groups: Sequence[GroupConfig]) -> dict[str, Any]:
    """The recording's first line."""
    first = next(iter(slots.values())).policy
    export = first.export
    policies = [
        {"slot": name, "model_id": slot.policy.export.model_id, "model_hash": slot.policy.export.model_hash}
        for name, slot in slots.items()
    ]
    return {
        "model_hash": export.model_hash,
        "config_hash": export.config_hash,
        "export_dir": str(export.path),
        "model_type": export.config.get("model_type", ""),
        "export_kind": export.export_kind,
        "embodiment": export.embodiment.name,
        "hardware": hardware(),
        "providers": [first.describe()["provider"]],
        "policies": policies if len(slots) > 1 else None,
        "split": config.split if "b" in slots else None,
        "groups": {group.name: settings_of(group) for group in groups},
        "warm": {},
    }


def _seed(ask: Ask, fields: wire.ActFields) -> int:
    if fields.seed is not None:
        return fields.seed
    seen = None if ask.ticket is None else ask.ticket.request.payload
    if isinstance(seen, Observation):  # worked out already
        return seen.seed
    return seed_of(ask.request_id)


def _state(fields: wire.ActFields) -> Any:
    state = fields.state
    return _array(state, "state") if isinstance(state, wire.Array) else state


def _array(sent: wire.Array, name: str) -> NDArray[Any] | None:
    """None when it is none: that is why it was refused."""
    try:
        return wire.array_of(sent, name)
    except InvalidRequest:
        return None


def _images(fields: wire.ActFields) -> Mapping[str, SentImage]:
    if fields.image is None and fields.image_wrist is None and not fields.images:
        return {}
    found: dict[str, SentImage] = {}
    sent = {"image": fields.image, "image_wrist": fields.image_wrist, **(fields.images or {})}
    for name, image in sent.items():
        sent_image = _array(image, name) if isinstance(image, wire.Array) else image
        if sent_image is not None:
            found[name] = sent_image
    return found
