"""Policies as models of the Open Inference Protocol: each row of the inputs is a question and a row of the actions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.policy.episodes import Lru
from reflex_runtime.robots.policy.spec import PolicySpec, WireMap
from reflex_runtime.robots.serving.handler import PendingRequest, RequestHandler
from reflex_runtime.robots.serving.question import MAX_ROWS, OIP, ObservationReader, Question, RequestLimits
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.robots.wires.common import Episodes, answer_details, question_of
from reflex_runtime.web.fields import Whole, check_id, encode, invalid_input
from reflex_runtime.web.oip import (
    BYTES,
    Described,
    InferParameters,
    InferRequest,
    OipAnswer,
    OipCall,
    OipModels,
    Tensor,
    oip_routes,
)
from reflex_runtime.web.request import Route

if TYPE_CHECKING:
    from reflex_runtime.web.app import App
    from reflex_runtime.web.grpc_listener import GrpcListener

MAX_SEQUENCES: Final = 4096
ACTIONS: Final = "actions"
_STATE, _INSTRUCTION, _SEED = "state", "instruction", "seed"


def routes(handler: RequestHandler) -> list[Route]:
    return oip_routes(models(handler), handler.config.max_body_bytes, handler.prefix)


def listener(app: App, handler: RequestHandler) -> GrpcListener:
    from reflex_runtime.web.grpc_listener import oip_listener

    return oip_listener(app, handler.config, models(handler))


# -- the models --------------------------------------------------------------------------------------------------------


def models(handler: RequestHandler) -> OipModels:
    """The policies of a handler as models. If there are several, a model has the name of its policy. An only policy, or
    the one that the path names, has the name of its model."""
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
    """One policy as a model. name: "" for the name of its model."""

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
        """The actions of all rows, and the parameter `reflex`: the other fields of each row's answer, as JSON."""
        asked = questions(self._handler.served.spec, self._sequences, sent, call.left_ms)
        answers = await self._handler.infer_all(_pending(call), asked, call.received or None)
        actions = np.stack([np.asarray(answer.actions, "<f4") for answer in answers])
        details = encode([answer_details(answer) for answer in answers]).decode()
        return OipAnswer([Tensor(ACTIONS, "FP32", actions)], {"reflex": details})

    def refused(self, call: OipCall, error: ReflexError) -> None:
        self._handler.refused(_pending(call), error)


def _pending(call: OipCall) -> PendingRequest:
    return PendingRequest(OIP, call.request_id, call.client, call.started, call)


def inputs_of(spec: PolicySpec) -> list[Described]:
    """The inputs of a policy: its cameras, the state, the instruction and the seed."""
    inputs: list[Described] = [(camera, "UINT8", [-1, *size, 3]) for camera, size in spec.images.items()]
    if spec.takes_state:
        inputs.append((_STATE, "FP32", [-1, spec.state_dim]))
    if spec.takes_text:
        inputs.append((_INSTRUCTION, BYTES, [-1, 1]))
    return [*inputs, (_SEED, "INT64", [-1, 1])]


# -- rows --------------------------------------------------------------------------------------------------------------


class PolicyParameters(InferParameters, kw_only=True):
    """The parameters of an inference by a policy."""

    robot_id: str | None = None
    episode_id: str | None = None
    executed: Whole | None = None
    delay: Whole | None = None
    sequence_id: int | str | None = None
    sequence_start: bool = False
    sequence_end: bool = False


class Sequences:
    """The episodes of sequence ids, for all clients of a server. A new episode begins with `sequence_start`, and with
    the next request after `sequence_end`."""

    def __init__(self) -> None:
        self._episodes: Lru[str, Episodes] = Lru(MAX_SEQUENCES)

    def episode(self, said: PolicyParameters) -> str | None:
        """The episode of a request; None without a sequence."""
        if not said.sequence_id:
            return None
        name = str(said.sequence_id)
        check_id("sequence_id", name)
        known = name in self._episodes
        episodes = self._episodes.use(name, partial(Episodes, name))
        if said.sequence_start and known:
            episodes.reset()
        episode = episodes.of(None, None)
        if said.sequence_end:
            episodes.reset()
        return episode


_SEQUENCES: Final[WeakKeyDictionary[PolicyRuntime, Sequences]] = WeakKeyDictionary()


def questions(
    spec: PolicySpec, sequences: Sequences, sent: InferRequest, most_ms: float | None = None
) -> list[Question]:
    """A question for each row; the 422 names a wrong field. most_ms: milliseconds that the caller waits, or None."""
    prompted = {_INSTRUCTION} if spec.default_prompt is not None else set()
    optional = {_SEED, *spec.optional_images, *prompted}
    rows = sent.rows([name for name, _, _ in inputs_of(spec)], optional, [ACTIONS], MAX_ROWS)
    said = PolicyParameters.of(sent)
    episode = said.episode_id or sequences.episode(said)
    reading, found = ObservationReader(spec, WireMap(prompt=_INSTRUCTION)), []
    for row in range(rows):
        part = f"/{row}" if rows > 1 else ""
        seen = {tensor.name: tensor.row(row) for tensor in sent.inputs}
        limits = RequestLimits(
            robot_id=said.robot_id + part if said.robot_id else None,
            request_id=sent.id + part if sent.id else None,
            seed=_seed(seen.pop(_SEED)) if _SEED in seen else None,
            priority=said.level,
            deadline_ms=said.deadline_ms(most_ms),
            executed=said.executed,
            delay=said.delay,
        )
        found.append(question_of(reading.read(seen), limits, None, episode + part if episode else None))
    return found


def _seed(value: Any) -> int:
    number = np.asarray(value)
    if number.dtype.kind not in "iu" or number.size != 1:
        raise invalid_input(_SEED, "must be INT64 of shape [n] or [n, 1]")
    return int(number.item())
