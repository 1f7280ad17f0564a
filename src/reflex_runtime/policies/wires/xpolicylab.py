"""XPolicyLab's websocket: an evaluation sends a hello, resets a trial, and gets a chunk for each observation.

An action is a map of groups, as `arm_joint_state` and `ee_joint_state`. The export names them; without that, they are
those of the observation's state where they fit. docs/wires.md has what an evaluation may send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.policies.policy.robot import WireMap
from reflex_runtime.policies.policy.spec import PolicySpec
from reflex_runtime.policies.serving.handler import RequestHandler
from reflex_runtime.policies.serving.question import ActAnswer, Question
from reflex_runtime.policies.serving.wire_names import XPOLICYLAB
from reflex_runtime.policies.wires.common import (
    ObservationReader,
    WireObservation,
    answer_details,
    limits_in,
    question_of,
)
from reflex_runtime.policies.wires.message_session import MessageSession
from reflex_runtime.policies.wires.xpolicylab_codec import LabFrame, decode, encode
from reflex_runtime.web.errors import ClientError, describe_error
from reflex_runtime.web.fields import invalid
from reflex_runtime.web.json import printable
from reflex_runtime.web.request import SocketMessage, WebSocket

PATH: Final = "/xpolicylab"
JOINTS: Final = tuple(
    f"{arm}{part}" for arm in ("", "left_", "right_") for part in ("arm_joint_state", "ee_joint_state")
)
_ACKS: Final = {
    "prepare_case": "prepare_case_ack",
    "reset": "reset_result",
    "trial_end": "trial_end_ack",
    "heartbeat": "heartbeat_ack",
}

_NONE: Final = LabFrame("", {"message_id": "", "evaluation_id": ""})  # answers messages that cannot be decoded

Groups = tuple[tuple[str, int], ...]


async def serve(handler: RequestHandler, socket: WebSocket) -> None:
    """One websocket."""
    await XPolicyLabSession(handler, socket).run()


class XPolicyLabSession(MessageSession):
    """One websocket, and the trial it is in."""

    def __init__(self, handler: RequestHandler, socket: WebSocket) -> None:
        super().__init__(XPOLICYLAB, handler, socket)
        self._sent = _NONE
        self._hello: dict[str, Any] = {}
        self._groups: Groups = ()  # of the actions of the outstanding request
        self._trial = ""
        self._resets = 0  # of this trial, without the first

    def read(self, frame: bytes) -> None:
        self._sent = _NONE
        self._sent = decode(frame)

    async def take(self, message: SocketMessage) -> bytes | None:
        sent = self._sent
        self._sent = replace(sent, payload={})  # drop the reference to the pictures
        if sent.type == "infer":
            return await self.infer(message, partial(self._question, sent))
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
        told = {"model_id": spec.model_id, "model_hash": spec.model_hash, **self.readings.now.describe()}
        return encode(LabFrame("hello_ack", self._hello, {"ok": True, "server": "reflex", "reflex": told}))

    def answered(self, answer: ActAnswer) -> bytes:
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
            self.report(self._episode(trial), sent.payload)

    def _episode(self, trial: str) -> str:
        if trial != self._trial:
            self._trial, self._resets = trial, 0
        return f"{trial}#{self._resets}" if self._resets else trial

    def _question(self, sent: LabFrame) -> Question:
        observation = sent.payload.get("observation")
        if not isinstance(observation, dict):
            raise ClientError("infer needs an observation, which must be a map")
        limits, row = limits_in(observation), _row(observation)
        observed, self._groups = read(self.handler.served.spec, self.readings.map, observation)
        episode = limits.episode_id or self._episode(_trial_of(sent)) + row
        return question_of(observed, limits, self.said, self.robot + row, episode)


def read(spec: PolicySpec, wire: WireMap, observation: Mapping[str, Any]) -> tuple[WireObservation, Groups]:
    """Decode an observation; also the groups of the actions that will answer it."""
    state = observation.get("state")
    state = state if isinstance(state, dict) else {}
    names = wire.state or tuple(f"state/{name}" for name in JOINTS if name in state)
    observed = ObservationReader(spec, replace(wire, state=names)).read(_plain(observation))
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


def _plain(observation: Mapping[str, Any]) -> dict[str, Any]:
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
    groups = tuple((name, _size(state.get(name))) for name in plain)
    if sum(size for _, size in groups) != dim:
        came = ", ".join(f"{name} {size}" for name, size in groups) or "none"
        message = f"state: its groups ({came}) do not make the {dim} numbers of an action"
        raise invalid("state", printable(f"{message}: name the groups in the export's wires.xpolicylab.actions"))
    return groups


def _size(value: Any) -> int:
    return value.size if isinstance(value, np.ndarray) else len(value) if isinstance(value, list) else 1


def _split(action: NDArray[np.float32], groups: Groups) -> Iterator[tuple[str, NDArray[np.float32]]]:
    at = 0
    for name, size in groups:
        yield name, action[at : at + size]
        at += size
