"""Policies as models of the Open Inference Protocol: each row of the inputs is a question, and the actions of all rows
are one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.policy.episodes import Lru
from reflex_runtime.robots.policy.spec import PolicySpec, WireMap
from reflex_runtime.robots.serving.handler import PendingRequest, RequestHandler
from reflex_runtime.robots.serving.question import MAX_ROWS, OIP, ObservationReader, Question
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.robots.wires.common import Episodes, answer_details, limits_of, question_of
from reflex_runtime.web.fields import check_id, encode, invalid_input
from reflex_runtime.web.oip import (
    Described,
    InferRequest,
    OipAnswer,
    OipCall,
    OipModels,
    Tensor,
    check_names,
    limits_in,
    oip_routes,
    rows_of,
)
from reflex_runtime.web.request import Route

if TYPE_CHECKING:
    from reflex_runtime.web.app import App
    from reflex_runtime.web.grpc_listener import GrpcListener

MAX_SEQUENCES: Final = 4096
ACTIONS: Final = "actions"
_STATE, _INSTRUCTION, _SEED = "state", "instruction", "seed"
_LIMITS: Final = ("robot_id", "episode_id", "executed", "delay", "priority")
_SEQUENCE: Final = ("sequence_id", "sequence_start", "sequence_end")


def routes(handler: RequestHandler) -> list[Route]:
    return oip_routes(models(handler), handler.config.max_body_bytes, handler.prefix)


def listener(app: App, handler: RequestHandler) -> GrpcListener:
    from reflex_runtime.web.grpc_listener import oip_listener

    return oip_listener(app, handler.config, models(handler))


# -- the models --------------------------------------------------------------------------------------------------------


def models(handler: RequestHandler) -> OipModels:
    """The policies of a handler as models. Several have their own names; the only policy, or the one that the path
    names, has the name of its model."""
    runtime = handler.runtime
    sequences = _SEQUENCES.setdefault(runtime, Sequences())
    if len(runtime.policies) == 1 or handler.prefix:
        found = [PolicyAsModel(handler, "", sequences)]
    else:
        found = [PolicyAsModel(handler.one(name), name, sequences) for name in runtime.policies]
    return OipModels(found, ("binary_tensor_data", "sequence", "schedule_policy"))


def model_name(spec: PolicySpec) -> str:
    """The last part of the model's id, which needs no quoting in a path."""
    return spec.model_id.rpartition("/")[2]


class PolicyAsModel:
    """One policy. name: "" for that of its model."""

    def __init__(self, handler: RequestHandler, name: str, sequences: Sequences) -> None:
        self._handler, self._name, self._sequences = handler, name, sequences

    @property
    def names(self) -> Sequence[str]:
        spec = self._handler.served.spec
        return [self._name] if self._name else [model_name(spec), spec.model_id]

    @property
    def ready(self) -> bool:
        return self._handler.served.health == "ready"

    @property
    def inputs(self) -> list[Described]:
        return inputs_of(self._handler.served.spec)

    @property
    def outputs(self) -> list[Described]:
        spec = self._handler.served.spec
        return [(ACTIONS, "FP32", [-1, spec.chunk_size, spec.action_dim])]

    async def infer(self, call: OipCall, sent: InferRequest) -> OipAnswer:
        """Actions, and the parameter `reflex`: for each row the other fields of an answer of /act, as JSON."""
        asked = questions(self._handler.served.spec, self._sequences, sent, call.left_ms)
        answers = await self._handler.infer_all(_pending(call), asked, call.received or None)
        actions = np.stack([np.asarray(answer.actions, "<f4") for answer in answers])
        details = encode([answer_details(answer) for answer in answers]).decode()
        return OipAnswer([Tensor(ACTIONS, "FP32", actions.shape, actions)], {"reflex": details})

    def refused(self, call: OipCall, error: ReflexError) -> None:
        self._handler.refused(_pending(call), error)


def _pending(call: OipCall) -> PendingRequest:
    return PendingRequest(OIP, call.request_id, call.client, call.started, call)


def inputs_of(spec: PolicySpec) -> list[Described]:
    """Tensors of the cameras, the state, the instruction and the seed."""
    inputs: list[Described] = [(camera, "UINT8", [-1, *size, 3]) for camera, size in spec.images.items()]
    if spec.takes_state:
        inputs.append((_STATE, "FP32", [-1, spec.state_dim]))
    if spec.takes_text:
        inputs.append((_INSTRUCTION, "BYTES", [-1, 1]))
    return [*inputs, (_SEED, "INT64", [-1, 1])]


# -- rows --------------------------------------------------------------------------------------------------------------


class Sequences:
    """Episodes of sequence ids, for all clients of a server. `sequence_start` begins a new one, and so does the next
    request after `sequence_end`."""

    def __init__(self) -> None:
        self._episodes: Lru[str, Episodes] = Lru(MAX_SEQUENCES)

    def episode(self, parameters: Mapping[str, Any]) -> str | None:
        """The episode of a request; None without a sequence."""
        sequence = parameters.get("sequence_id")
        start, end = (parameters.get(name, False) for name in ("sequence_start", "sequence_end"))
        if not isinstance(start, bool) or not isinstance(end, bool):
            raise invalid_input("sequence_start, sequence_end", "must be true or false")
        if sequence in (None, 0, ""):
            return None
        if not isinstance(sequence, (str, int)) or isinstance(sequence, bool):
            raise invalid_input("sequence_id", "must be a whole number or a text")
        name = str(sequence)
        check_id("sequence_id", name)
        known = name in self._episodes
        episodes = self._episodes.use(name, partial(Episodes, name))
        if start and known:
            episodes.reset()
        episode = episodes.of(None, None)
        if end:
            episodes.reset()
        return episode


_SEQUENCES: Final[WeakKeyDictionary[PolicyRuntime, Sequences]] = WeakKeyDictionary()


def questions(
    spec: PolicySpec, sequences: Sequences, sent: InferRequest, most_ms: float | None = None
) -> list[Question]:
    """A question for each row; the 422 names a wrong field. most_ms: the longest time that the caller waits."""
    expected = [name for name, _, _ in inputs_of(spec)]
    prompted = {_INSTRUCTION} if spec.default_prompt is not None else set()
    check_names(sent, expected, {_SEED, *spec.optional_images, *prompted}, [ACTIONS])
    rows = rows_of(sent.inputs, MAX_ROWS)
    limits = limits_of(limits_in(sent.parameters, _LIMITS, _SEQUENCE, most_ms))
    robot, episode = limits.robot_id, limits.episode_id or sequences.episode(sent.parameters)
    reading, found = ObservationReader(spec, WireMap(prompt=_INSTRUCTION)), []
    for row in range(rows):
        part = f"/{row}" if rows > 1 else ""
        seen = {tensor.name: _row(tensor, row) for tensor in sent.inputs}
        own = msgspec.structs.replace(
            limits,
            robot_id=robot + part if robot else None,
            request_id=sent.id + part if sent.id else None,
            seed=_seed(seen.pop(_SEED)) if _SEED in seen else None,
        )
        found.append(question_of(reading.read(seen), own, None, episode + part if episode else None))
    return found


def _row(tensor: Tensor, row: int) -> NDArray[Any] | bytes:
    """One picture, state, text or seed; a picture may be a PNG or JPEG in BYTES."""
    if isinstance(tensor.values, list) and len(tensor.values) != tensor.shape[0]:
        raise invalid_input(tensor.name, "must be BYTES of shape [n] or [n, 1]")
    value: NDArray[Any] | bytes = tensor.values[row]
    return value


def _seed(value: NDArray[Any] | bytes) -> int:
    number = np.asarray(value)
    if number.dtype.kind not in "iu" or number.size != 1:
        raise invalid_input(_SEED, "must be INT64 of shape [n] or [n, 1]")
    return int(number.item())
