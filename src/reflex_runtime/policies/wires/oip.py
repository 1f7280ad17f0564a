"""The Open Inference Protocol, version 2 (KServe, Triton): tensors to requests, and actions to a tensor.

HTTP and gRPC share this. Each of them reads its bytes into an `InferRequest` and writes the actions as it answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.request import PRIORITIES
from reflex_runtime.policies.policy.spec import PolicySpec
from reflex_runtime.policies.serving.handler import RequestHandler
from reflex_runtime.policies.serving.pending import HasHeaders, PendingRequest
from reflex_runtime.policies.serving.question import ActAnswer, Question
from reflex_runtime.policies.serving.wire_names import OIP
from reflex_runtime.policies.wires.limits import limits_of
from reflex_runtime.policies.wires.oip_tensors import Tensor
from reflex_runtime.version import __version__
from reflex_runtime.web.errors import NotFound
from reflex_runtime.web.fields import check_id, invalid
from reflex_runtime.web.json import encode, printable

MAX_ROWS: Final = 256
MAX_SEQUENCES: Final = 4096
VERSION: Final = "1"
ACTIONS: Final = "actions"
EXTENSIONS: Final = ("binary_tensor_data", "sequence", "schedule_policy")
_STATE, _INSTRUCTION, _SEED = "state", "instruction", "seed"
_SENT: Final = ("request_id", "timing", "batch", "cache", "guard", "rtc", "model_hash", "policy_changed", "warnings")
_LEVELS: Final = {1: "urgent", 2: "default"}  # 0 is default as well; larger numbers are background


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A decoded request. outputs: wanted names; empty means all. id: the caller's, or an empty text."""

    inputs: Sequence[Tensor]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    id: str = ""


# -- what the model is -------------------------------------------------------------------------------------------------


def model_name(spec: PolicySpec) -> str:
    """The name of the model: the last part of its id, so that it needs no quoting in a path."""
    return spec.model_id.rpartition("/")[2]


def model_of(handler: RequestHandler, name: str, version: str = "") -> tuple[RequestHandler, str]:
    """What takes requests for a model, and the name it answers with; 404 for a model that is not served.

    Several policies are models by their own names. The only policy, or the one that the path names, is called as its
    model is.
    """
    policies = handler.runtime.policies
    if len(policies) == 1 or handler.prefix:
        check_model(handler.served.spec, name, version)
        return handler, model_name(handler.served.spec)
    if name not in policies:
        raise NotFound(printable(f"model {name[:200]!r} is not served; there are {', '.join(policies)}"))
    _check_version(name, version)
    return handler.one(name), name


def check_model(spec: PolicySpec, name: str, version: str = "") -> None:
    """404 for a model that is not served."""
    if name not in (model_name(spec), spec.model_id):
        raise NotFound(printable(f"model {name[:200]!r} is not served; {model_name(spec)!r} is"))
    _check_version(name, version)


def _check_version(name: str, version: str) -> None:
    if version not in ("", VERSION):
        raise NotFound(printable(f"model {name[:200]!r} has version {VERSION}, not {version[:40]!r}"))


def server_metadata() -> dict[str, Any]:
    """Name, version and extensions of the server."""
    return {"name": "reflex", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(spec: PolicySpec, name: str = "") -> dict[str, Any]:
    """Inputs and outputs of the model; -1 is any size. name: where it is not called as its model."""
    inputs = [(camera, "UINT8", [-1, *size, 3]) for camera, size in spec.images.items()]
    if spec.takes_state:
        inputs.append((_STATE, "FP32", [-1, spec.state_dim]))
    if spec.takes_text:
        inputs.append((_INSTRUCTION, "BYTES", [-1, 1]))
    inputs.append((_SEED, "INT64", [-1, 1]))
    outputs = [(ACTIONS, "FP32", [-1, spec.chunk_size, spec.action_dim])]
    return {
        "name": name or model_name(spec),
        "versions": [VERSION],
        "platform": "reflex",
        "inputs": [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in inputs],
        "outputs": [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in outputs],
    }


# -- requests ----------------------------------------------------------------------------------------------------------


class Sequences:
    """Episodes of sequence ids. An id begins a new episode after `sequence_end`, and with `sequence_start`."""

    def __init__(self) -> None:
        self._epochs: OrderedDict[str, int] = OrderedDict()  # least recently used first; 0 is the first episode

    def episode(self, parameters: Mapping[str, Any]) -> str | None:
        """The episode that a request belongs to; None where it names no sequence."""
        sequence, start = parameters.get("sequence_id"), parameters.get("sequence_start") is True
        if sequence in (None, 0, ""):
            return None
        if not isinstance(sequence, (str, int)) or isinstance(sequence, bool):
            raise invalid("sequence_id", "sequence_id: must be a whole number or a text")
        name = str(sequence)
        check_id("sequence_id", name)
        known = name in self._epochs
        epoch = self._epochs.pop(name, 0) + (known and start)
        self._epochs[name] = epoch + (parameters.get("sequence_end") is True)
        if len(self._epochs) > MAX_SEQUENCES:
            self._epochs.popitem(last=False)
        return f"{name}#{epoch}" if epoch else name


def questions(
    spec: PolicySpec, sequences: Sequences, sent: InferRequest, most_ms: float | None = None
) -> list[Question]:
    """A question for each row; 422 names what is wrong. most_ms: the longest time that the caller waits."""
    expected = [item["name"] for item in model_metadata(spec)["inputs"]]
    given = {tensor.name: tensor for tensor in sent.inputs}
    _check_names(sent, list(given), expected, {_SEED, *spec.optional_images})
    rows = _rows(list(given.values()))
    limits = limits_of(_said(sent.parameters, most_ms))
    robot, episode = limits.robot_id, limits.episode_id or sequences.episode(sent.parameters)
    found = []
    for row in range(rows):
        of_row = partial(_part, f"/{row}" if rows > 1 else "")
        found.append(
            Question(
                images=tuple((name, name, _picture(given[name], row)) for name in spec.images if name in given),
                state=_state(given[_STATE], row) if spec.takes_state else None,
                instruction=_text(given[_INSTRUCTION], row) if spec.takes_text else None,
                robot_id=of_row(robot),
                episode_id=of_row(episode),
                request_id=of_row(sent.id),
                seed=_seed(given[_SEED], row) if _SEED in given else None,
                executed=limits.executed,
                priority=PRIORITIES[limits.priority or "default"],
                deadline_ms=limits.deadline_ms,
            )
        )
    return found


def _part(part: str, name: str | None) -> str | None:
    return name + part if name else None


def _check_names(
    sent: InferRequest, given: Sequence[str], expected: Sequence[str], optional: Collection[str]
) -> None:
    all_of = f"came: {', '.join(given) or 'nothing'}; expected: {', '.join(expected)}"
    for name in given:
        if name not in expected:
            raise invalid(printable(name), printable(f"{name}: no such input; {all_of}"))
    for name in expected:
        if name not in given and name not in optional:
            raise invalid(name, printable(f"{name}: missing; {all_of}"))
    if len(given) != len(sent.inputs):
        raise invalid("inputs", printable(f"inputs: one is given twice; {all_of}"))
    for name in sent.outputs:
        if name != ACTIONS:
            raise invalid(printable(name), printable(f"{name}: no such output; there is {ACTIONS}"))


def _rows(given: Sequence[Tensor]) -> int:
    """The number of rows: the first dimension, which all inputs share."""
    for tensor in given:
        if not tensor.shape or not 0 < tensor.shape[0] <= MAX_ROWS or tensor.shape[0] != given[0].shape[0]:
            wrong = f"{tensor.name}: has shape {list(tensor.shape)}"
            raise invalid(tensor.name, f"{wrong}; its first number must be 1 to {MAX_ROWS}, the same in all inputs")
    return given[0].shape[0] if given else 1


def _said(parameters: Mapping[str, Any], most_ms: float | None) -> dict[str, Any]:
    said = {name: parameters[name] for name in ("robot_id", "episode_id", "executed", "priority") if name in parameters}
    level = said.get("priority")
    if type(level) is int:
        said["priority"] = _LEVELS.get(level, "background") if level > 0 else "default"
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise invalid("timeout", "timeout: must be a whole number of microseconds")
    limits = ([timeout / 1e3] if timeout else []) + ([most_ms] if most_ms is not None else [])
    return said | ({"deadline_ms": min(limits)} if limits else {})


def _picture(tensor: Tensor, row: int) -> NDArray[Any] | bytes:
    """A picture, or a PNG or JPEG in BYTES."""
    if isinstance(tensor.values, list):
        return _element(tensor, row)
    if len(tensor.shape) != 4:
        raise invalid(tensor.name, f"{tensor.name}: has shape {list(tensor.shape)}, must be [n, height, width, 3]")
    picture: NDArray[Any] = tensor.values[row]
    return picture


def _state(tensor: Tensor, row: int) -> NDArray[Any]:
    if isinstance(tensor.values, list) or tensor.values.dtype.kind not in "iuf" or len(tensor.shape) != 2:
        raise invalid(tensor.name, f"{tensor.name}: must be FP32 of shape [n, dim]")
    state: NDArray[Any] = tensor.values[row]
    return state


def _text(tensor: Tensor, row: int) -> str:
    try:
        return _element(tensor, row).decode()
    except UnicodeDecodeError:
        raise invalid(tensor.name, f"{tensor.name}: is not UTF-8") from None


def _element(tensor: Tensor, row: int) -> bytes:
    if not isinstance(tensor.values, list) or len(tensor.values) != tensor.shape[0]:
        raise invalid(tensor.name, f"{tensor.name}: must be BYTES of shape [n] or [n, 1]")
    return tensor.values[row]


def _seed(tensor: Tensor, row: int) -> int:
    if isinstance(tensor.values, list) or tensor.values.dtype.kind not in "iu" or tensor.values.size != tensor.shape[0]:
        raise invalid(tensor.name, f"{tensor.name}: must be INT64 of shape [n] or [n, 1]")
    return int(tensor.values.flat[row])


async def infer(
    handler: RequestHandler,
    request_id: str,
    client: Hashable,
    questions: Sequence[Question],
    started: float,
    source: HasHeaders,
    received: float | None = None,
) -> list[ActAnswer]:
    """The answers of all rows; the first error, as Reported. request_id: if the caller names none."""
    many = len(questions) > 1
    ids = [f"{request_id}/{row}" if many else request_id for row in range(len(questions))]
    rows = [PendingRequest(OIP, own, client, started, source) for own in ids]
    return await handler.infer_all(rows, questions, received)


def actions_of(answers: Sequence[ActAnswer]) -> NDArray[np.float32]:
    """The output tensor: [n, actions, dim]."""
    return np.stack([np.asarray(answer.actions, "<f4") for answer in answers])


def details_of(answers: Sequence[ActAnswer]) -> str:
    """The parameter `reflex` of an answer: for each row the other fields of an answer of /act, as JSON."""
    return encode([{name: getattr(answer, name) for name in _SENT} for answer in answers]).decode()
