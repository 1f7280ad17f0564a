"""A new wire in one file: XPolicyLab's websocket, beside everything that a server of Reflex answers.

    cd examples/wires
    REFLEX_SOURCE=../../my-export uvicorn --factory xpolicylab:create

An evaluation sends a hello, resets a trial, and gets a chunk for each observation. Frames are msgpack maps with an
envelope and a payload, arrays as msgpack-numpy writes them:

    {message_type, message_id, evaluation_id, action_case_id, trial_id, repeat_index, step, sent_at, payload}
    {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [8], b"data": bytes}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.app import create_app
from reflex_runtime.robots.policy.spec import PolicySpec, WireMap
from reflex_runtime.robots.serving.handler import RequestHandler
from reflex_runtime.robots.serving.question import ActAnswer, ObservationReader, Question, WireObservation
from reflex_runtime.robots.wires.common import (
    MessageSession,
    answer_details,
    limits_in,
    packer,
    question_of,
    socket_route,
    unpack,
)
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import ClientError, describe_error
from reflex_runtime.web.fields import invalid, printable
from reflex_runtime.web.request import SocketMessage, WebSocket

NAME: Final = "xpolicylab"  # in metrics and recordings
PATH: Final = "/xpolicylab"
NAMES: Final = WireMap()
"""Where an observation has what the policy needs; what is not here is found by name. For a robot of your own:

    WireMap(images={"image": "vision/cam_head"}, state=("state/arm_joint_state", "state/ee_joint_state"),
            actions=(("arm_joint_state", 6), ("ee_joint_state", 1)))
"""


def create() -> App:
    """The application of the policy in REFLEX_SOURCE with this wire, for any ASGI server."""
    app, runtime = create_app()
    app.routes[PATH] = socket_route(PATH, XPolicyLabSession, RequestHandler(runtime))
    return app


# -- frames ------------------------------------------------------------------------------------------------------------

_ENVELOPE: Final = ("message_id", "evaluation_id", "action_case_id", "trial_id", "repeat_index", "step")


@dataclass(frozen=True, slots=True)
class LabFrame:
    """One message. envelope: what it belongs to; an answer repeats it."""

    type: str
    envelope: dict[str, Any]
    payload: dict[str, Any] = field(default_factory=dict)


def decode(data: bytes) -> LabFrame:
    """The message in a frame, arrays as read-only views of it; ClientError when there is none."""
    value = unpack(data)
    if not isinstance(value, dict):
        raise ClientError("the frame must be a map with message_type, message_id and payload")
    kind, payload = value.get("message_type"), value.get("payload") or {}
    if not isinstance(kind, str) or not isinstance(payload, dict):
        raise ClientError("the frame needs message_type, a text, and a payload that is a map")
    envelope = {name: value.get(name) for name in _ENVELOPE} | {"step": value.get("step", 0)}
    for name, found in envelope.items():
        if found is None and name in ("message_id", "evaluation_id"):
            raise ClientError(f"the frame needs {name}")
        if found is not None and type(found) not in (str, int):
            raise ClientError(f"{name} must be a text or a whole number")
    return LabFrame(kind, envelope, payload)


def encode(frame: LabFrame) -> bytes:
    """A frame."""
    sent_at = datetime.now(UTC).isoformat()
    value = {"message_type": frame.type, **frame.envelope, "sent_at": sent_at, "payload": frame.payload}
    return _packed(value)


_packed = packer(
    lambda a: {b"nd": True, b"type": a.dtype.str, b"kind": b"", b"shape": a.shape, b"data": a.tobytes()}
)


# -- the websocket -----------------------------------------------------------------------------------------------------

_ACKS: Final = {
    "prepare_case": "prepare_case_ack",
    "reset": "reset_result",
    "trial_end": "trial_end_ack",
    "heartbeat": "heartbeat_ack",
}
_NONE: Final = LabFrame("", {"message_id": "", "evaluation_id": ""})  # answers messages that cannot be decoded


class XPolicyLabSession(MessageSession):
    """One websocket, and the trial it is in."""

    def __init__(self, handler: RequestHandler, socket: WebSocket) -> None:
        super().__init__(NAME, handler, socket)
        self._sent = _NONE
        self._hello: dict[str, Any] = {}
        self._groups: Groups = ()  # of the actions of the outstanding request
        self._trial = ""
        self._resets = 0  # of this trial, without the first

    def read(self, frame: bytes) -> LabFrame:
        self._sent = _NONE
        sent = decode(frame)
        self._sent = replace(sent, payload={})  # for answers; without the pictures
        return sent

    async def take(self, message: SocketMessage, sent: LabFrame) -> bytes | None:
        if sent.type == "infer":
            return self._answered(await self.infer(message, partial(self._question, sent)))
        if sent.type == "hello":
            self._hello = sent.envelope
            return await self.greet()
        if sent.type in _ACKS:
            self._told(sent)
            return self._reply(_ACKS[sent.type], {"ok": True})
        if sent.type not in ("close", "error"):
            known = ", ".join(("hello", *_ACKS, "infer", "close"))
            raise ClientError(printable(f"message_type {sent.type[:40]!r}: must be one of {known}"))
        if sent.type == "close":
            await self.socket.close()
        return None

    def hello(self) -> bytes:
        spec = self.handler.served.spec
        told = {"model_id": spec.model_id, "model_hash": spec.model_hash, **ObservationReader(spec, NAMES).describe()}
        return encode(LabFrame("hello_ack", self._hello, {"ok": True, "server": "reflex", "reflex": told}))

    def _answered(self, answer: ActAnswer) -> bytes:
        steps = [dict(_split(action, self._groups)) for action in answer.actions]
        told = answer_details(answer)
        return self._reply("infer_result", {"actions": steps, "latency_ms": answer.timing.total_ms, "reflex": told})

    def error(self, error: ReflexError, request_id: str) -> bytes:
        code = "infer_failed" if self._sent.type == "infer" else "invalid_frame"
        told = {"code": code, "message": error.message, "details": describe_error(error, request_id)}
        return self._reply("error", told)

    def _reply(self, kind: str, payload: dict[str, Any]) -> bytes:
        return encode(LabFrame(kind, self._sent.envelope, payload))

    def _told(self, sent: LabFrame) -> None:
        """A reset begins another episode; the end of a trial tells how it went."""
        trial = _trial_of(sent)
        if sent.type == "reset":
            self._resets = self._resets + 1 if trial == self._trial else 0
            self._trial = trial
        elif sent.type == "trial_end":
            self.report(self._episode(trial), sent.payload, self.robot)

    def _episode(self, trial: str) -> str:
        if trial != self._trial:
            self._trial, self._resets = trial, 0
        return f"{trial}#{self._resets}" if self._resets else trial

    def _question(self, sent: LabFrame) -> Question:
        observation = sent.payload.get("observation")
        if not isinstance(observation, dict):
            raise ClientError("infer needs an observation, which must be a map")
        limits, row = limits_in(observation), _row(observation)
        observed, self._groups = read(self.handler.served.spec, NAMES, observation)
        episode = limits.episode_id or self._episode(_trial_of(sent)) + row
        return question_of(observed, limits, self.robot + row, episode, self.said)


# -- observations and actions ------------------------------------------------------------------------------------------

Groups = tuple[tuple[str, int], ...]
JOINTS: Final = tuple(
    f"{arm}{part}" for arm in ("", "left_", "right_") for part in ("arm_joint_state", "ee_joint_state")
)


def read(spec: PolicySpec, wire: WireMap, observation: Mapping[str, Any]) -> tuple[WireObservation, Groups]:
    """Decode an observation; also the groups of the actions that will answer it.

    Without names, the state is made of the joints that came, and an action has the same groups if they fit.
    """
    state = observation.get("state")
    state = state if isinstance(state, dict) else {}
    names = wire.state or tuple(f"state/{name}" for name in JOINTS if name in state)
    observed = ObservationReader(spec, replace(wire, state=names)).read(_flattened(observation))
    return observed, wire.actions or _like_state(state, names, spec.action_dim)


def _trial_of(sent: LabFrame) -> str:
    """The name of a trial: the ids of its envelope that are set."""
    names = ("evaluation_id", "action_case_id", "trial_id", "repeat_index")
    return "/".join(str(sent.envelope[name]) for name in names if sent.envelope.get(name) is not None)


def _row(observation: Mapping[str, Any]) -> str:
    """Where several environments share a websocket, each is a robot of its own."""
    row = observation.get("env_idx", 0)
    if type(row) is not int or not 0 <= row < 2**31:
        raise invalid("env_idx", "env_idx: must be a whole number")
    return f"/{row}" if row else ""


def _flattened(observation: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each slot by its colour picture, and `instructions` by its first."""
    seen, vision = dict(observation), observation.get("vision")
    if isinstance(vision, dict):
        seen["vision"] = {slot: of.get("color") if isinstance(of, dict) else of for slot, of in vision.items()}
    several = seen.get("instructions")
    if "instruction" not in seen and isinstance(several, list) and several:
        seen["instruction"] = several[0]
    return seen


def _like_state(state: Mapping[str, Any], names: Sequence[str], dim: int) -> Groups:
    """Groups of actions like those of the state, for policies that command joints."""
    plain = [name.removeprefix("state/") for name in names]
    groups = tuple((name, int(np.size(np.asarray(state.get(name))))) for name in plain)
    if sum(size for _, size in groups) != dim:
        came = ", ".join(f"{name} {size}" for name, size in groups) or "none"
        message = f"state: its groups ({came}) do not make the {dim} numbers of an action: name the groups in NAMES"
        raise invalid("state", printable(message))
    return groups


def _split(action: NDArray[np.float32], groups: Groups) -> Iterator[tuple[str, NDArray[np.float32]]]:
    at = 0
    for name, size in groups:
        yield name, action[at : at + size]
        at += size
