"""The Open Inference Protocol, version 2 (KServe, Triton), over HTTP; `oip_grpc` reads its own bytes with this.

A body becomes an `InferRequest`, each row of its tensors a question, and the actions of all rows one tensor. The binary
tensor extension: the header `Inference-Header-Content-Length` says how long the JSON is. Behind it are the tensors that
have a `binary_data_size`, in their order, little-endian. Answers are written in the same way when asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.policy.spec import PolicySpec
from reflex_runtime.robots.serving.handler import RequestHandler
from reflex_runtime.robots.serving.observation_reader import MAX_ROWS, invalid_input
from reflex_runtime.robots.serving.pending import PendingRequest
from reflex_runtime.robots.serving.question import OIP, ActAnswer, Question
from reflex_runtime.robots.wires.common import (
    MAX_DIMENSIONS,
    Episodes,
    answer_details,
    array_in,
    check_json,
    limits_of,
    question_of,
)
from reflex_runtime.version import __version__
from reflex_runtime.web.bodies import LARGE
from reflex_runtime.web.errors import (
    ClientError,
    ErrorForm,
    InvalidJson,
    NotFound,
    Refusal,
    Reported,
    describe_error,
    known,
)
from reflex_runtime.web.fields import check_id, encode, invalid_field, printable
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route

MAX_TEXTS: Final = 4096  # elements of a tensor of BYTES
MAX_SEQUENCES: Final = 4096
VERSION: Final = "1"
ACTIONS: Final = "actions"
EXTENSIONS: Final = ("binary_tensor_data", "sequence", "schedule_policy")
_STATE, _INSTRUCTION, _SEED = "state", "instruction", "seed"
_LEVELS: Final = {1: "urgent", 2: "default"}  # 0 is default as well; larger numbers are background
_DTYPES: Final = {
    "BOOL": "|b1", "UINT8": "|u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "|i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip

# -- tensors -----------------------------------------------------------------------------------------------------------

Values = NDArray[Any] | list[bytes]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input. values: an array of `shape`, or of BYTES each element in C order."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Values


def tensor_of_bytes(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Tensor:
    """A tensor from raw little-endian bytes; elements of BYTES have a length prefix."""
    size = _size(name, datatype, shape)
    if datatype == "BYTES":
        return Tensor(name, datatype, tuple(shape), _texts(name, size, memoryview(data)))
    try:
        values = array_in(data, _dtype(name, datatype), list(shape))
    except ClientError as error:
        raise invalid_input(name, error.message) from None
    return Tensor(name, datatype, tuple(shape), values)


def tensor_of_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> Tensor:
    """A tensor from numbers or texts in C order: a list, which may be nested."""
    size = _size(name, datatype, shape)
    flat = _flat(name, values)
    if len(flat) != size:
        raise invalid_input(name, f"{len(flat)} values do not make shape {list(shape)}")
    if datatype == "BYTES":
        if not all(isinstance(value, (str, bytes)) for value in flat):
            raise invalid_input(name, "BYTES must be texts")
        texts = [value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value for value in flat]
        return Tensor(name, datatype, tuple(shape), texts)
    dtype = np.dtype(_dtype(name, datatype))
    try:
        return Tensor(name, datatype, tuple(shape), _array(name, datatype, flat, dtype).reshape(shape))
    except ValueError:  # an empty tensor may claim a shape beyond numpy's limits
        raise invalid_input(name, f"shape {list(shape)} is no array") from None


def _array(name: str, datatype: str, flat: list[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    kinds = {bool} if dtype.kind == "b" else {int, float} if dtype.kind == "f" else {int}
    if set(map(type, flat)) <= kinds:
        with suppress(OverflowError):
            return np.array(flat, dtype)
    raise invalid_input(name, f"holds what is no {datatype}")


def _flat(name: str, values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise invalid_input(name, "its data must be a list")
    flat: list[Any] = values
    for _ in range(MAX_DIMENSIONS):
        if not flat or not all(isinstance(value, list) for value in flat):
            break
        flat = [value for part in flat for value in part]
    return flat


def _size(name: str, datatype: str, shape: Sequence[int]) -> int:
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
        raise invalid_input(name, f"shape must have at most {MAX_DIMENSIONS} whole numbers")
    size = prod(shape)
    if datatype == "BYTES" and size > MAX_TEXTS:
        raise invalid_input(name, f"has {size} BYTES, at most {MAX_TEXTS} are read")
    return size


def _dtype(name: str, datatype: str) -> str:
    if datatype not in _DTYPES:
        known = ", ".join((*_DTYPES, "BYTES"))
        raise invalid_input(name, f"datatype {datatype[:40]!r} is not one of {known}")
    return _DTYPES[datatype]


def _texts(name: str, size: int, data: memoryview) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    while at + 4 <= len(data) and len(found) < size:
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data):
            break
        found.append(bytes(data[at + 4 : end]))
        at = end
    if at != len(data) or len(found) != size:
        raise invalid_input(name, f"{len(data)} bytes do not make {size} BYTES with lengths")
    return found


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A decoded request. outputs: wanted names; empty means all. id: the caller's, or an empty text."""

    inputs: Sequence[Tensor]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    id: str = ""


# -- the model ---------------------------------------------------------------------------------------------------------


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


# -- rows --------------------------------------------------------------------------------------------------------------


class Sequences:
    """Episodes of sequence ids. An id begins a new episode after `sequence_end`, and with `sequence_start`."""

    def __init__(self) -> None:
        self._episodes: OrderedDict[str, Episodes] = OrderedDict()  # least recently used first

    def episode(self, parameters: Mapping[str, Any]) -> str | None:
        """The episode that a request belongs to; None where it names no sequence."""
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
        episodes = self._episodes.setdefault(name, Episodes(name))
        self._episodes.move_to_end(name)
        if len(self._episodes) > MAX_SEQUENCES:
            self._episodes.popitem(last=False)
        if start and known:
            episodes.reset()
        episode = episodes.of(None, None)
        if end:
            episodes.reset()
        return episode


PARAMETERS: Final = {
    "robot_id", "episode_id", "executed", "delay", "priority", "timeout", "sequence_id", "sequence_start",
    "sequence_end", "binary_data_output",
}  # fmt: skip


def questions(
    spec: PolicySpec, sequences: Sequences, sent: InferRequest, most_ms: float | None = None
) -> list[Question]:
    """A question for each row; 422 names what is wrong. most_ms: the longest time that the caller waits."""
    expected = [item["name"] for item in model_metadata(spec)["inputs"]]
    given = {tensor.name: tensor for tensor in sent.inputs}
    prompted = {_INSTRUCTION} if spec.default_prompt is not None else set()
    _check_names(sent, list(given), expected, {_SEED, *spec.optional_images, *prompted})
    rows = _rows(list(given.values()))
    limits = limits_of(_said(sent.parameters, most_ms))
    robot, episode = limits.robot_id, limits.episode_id or sequences.episode(sent.parameters)
    found = []
    for row in range(rows):
        part = f"/{row}" if rows > 1 else ""
        images = tuple((name, name, _picture(given[name], row)) for name in spec.images if name in given)
        state = _state(given[_STATE], row) if spec.takes_state else None
        instruction = _text(given[_INSTRUCTION], row) if _INSTRUCTION in given else None
        own = msgspec.structs.replace(
            limits,
            robot_id=robot + part if robot else None,
            request_id=sent.id + part if sent.id else None,
            seed=_seed(given[_SEED], row) if _SEED in given else None,
        )
        found.append(question_of((images, state, instruction), own, None, episode + part if episode else None))
    return found


def _check_names(sent: InferRequest, given: Sequence[str], expected: Sequence[str], optional: Collection[str]) -> None:
    all_of = f"came: {', '.join(given) or 'nothing'}; expected: {', '.join(expected)}"
    for name in given:
        if name not in expected:
            raise invalid_input(name, f"no such input; {all_of}")
    for name in expected:
        if name not in given and name not in optional:
            raise invalid_input(name, f"missing; {all_of}")
    if len(given) != len(sent.inputs):
        raise invalid_input("inputs", f"one is given twice; {all_of}")
    for name in sent.outputs:
        if name != ACTIONS:
            raise invalid_input(name, f"no such output; there is {ACTIONS}")


def _rows(given: Sequence[Tensor]) -> int:
    """The number of rows: the first dimension, which all inputs share."""
    for tensor in given:
        if not tensor.shape or not 0 < tensor.shape[0] <= MAX_ROWS or tensor.shape[0] != given[0].shape[0]:
            why = f"has shape {list(tensor.shape)}; its first number must be 1 to {MAX_ROWS}, the same in all inputs"
            raise invalid_input(tensor.name, why)
    return given[0].shape[0] if given else 1


def _said(parameters: Mapping[str, Any], most_ms: float | None) -> dict[str, Any]:
    for name in parameters.keys() - PARAMETERS:
        raise invalid_input(name, f"no such parameter; there are {', '.join(sorted(PARAMETERS))}")
    own = ("robot_id", "episode_id", "executed", "delay", "priority")
    said = {name: parameters[name] for name in own if name in parameters}
    level = said.get("priority")
    if type(level) is int:
        said["priority"] = _LEVELS.get(level, "background") if level > 0 else "default"
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise invalid_input("timeout", "must be a whole number of microseconds")
    limits = ([timeout / 1e3] if timeout else []) + ([most_ms] if most_ms is not None else [])
    return said | ({"deadline_ms": min(limits)} if limits else {})


def _picture(tensor: Tensor, row: int) -> NDArray[Any] | bytes:
    """A picture, or a PNG or JPEG in BYTES."""
    if isinstance(tensor.values, list):
        return _element(tensor, row)
    if len(tensor.shape) != 4:
        raise invalid_input(tensor.name, f"has shape {list(tensor.shape)}, must be [n, height, width, 3]")
    picture: NDArray[Any] = tensor.values[row]
    return picture


def _state(tensor: Tensor, row: int) -> NDArray[Any]:
    if isinstance(tensor.values, list) or tensor.values.dtype.kind not in "iuf" or len(tensor.shape) != 2:
        raise invalid_input(tensor.name, "must be FP32 of shape [n, dim]")
    state: NDArray[Any] = tensor.values[row]
    return state


def _text(tensor: Tensor, row: int) -> str:
    try:
        return _element(tensor, row).decode()
    except UnicodeDecodeError:
        raise invalid_input(tensor.name, "is not UTF-8") from None


def _element(tensor: Tensor, row: int) -> bytes:
    if not isinstance(tensor.values, list) or len(tensor.values) != tensor.shape[0]:
        raise invalid_input(tensor.name, "must be BYTES of shape [n] or [n, 1]")
    return tensor.values[row]


def _seed(tensor: Tensor, row: int) -> int:
    if isinstance(tensor.values, list) or tensor.values.dtype.kind not in "iu" or tensor.values.size != tensor.shape[0]:
        raise invalid_input(tensor.name, "must be INT64 of shape [n] or [n, 1]")
    return int(tensor.values.flat[row])


def actions_of(answers: Sequence[ActAnswer]) -> NDArray[np.float32]:
    """The output tensor: [n, actions, dim]."""
    return np.stack([np.asarray(answer.actions, "<f4") for answer in answers])


def details_of(answers: Sequence[ActAnswer]) -> str:
    """The parameter `reflex` of an answer: for each row the other fields of an answer of /act, as JSON."""
    return encode([answer_details(answer) for answer in answers]).decode()


# -- bodies ------------------------------------------------------------------------------------------------------------


ROOT: Final = "/v2"
MODELS: Final = "/v2/models/"
MODEL: Final = MODELS + "{model}"
OF_VERSION: Final = "/versions/{version}"
HEAD: Final = b"inference-header-content-length"
BINARY: Final = b"application/octet-stream"
_SIZE: Final = "binary_data_size"


class OipBody(NamedTuple):
    """A decoded body. binary: the caller wants the answer's tensor as raw bytes."""

    asked: InferRequest
    binary: bool


class InputTensor(msgspec.Struct):
    name: Annotated[str, Meta(description="as the model's metadata has it")]
    datatype: str
    shape: list[int]
    parameters: Annotated[dict[str, Any], Meta(description="binary_data_size: its bytes follow the JSON")] = {}
    data: Annotated[Any, Meta(description="the values in C order, without binary_data_size")] = msgspec.UNSET


class OutputTensor(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class InferBody(msgspec.Struct):
    inputs: Annotated[list[InputTensor], Meta(description="one tensor for each input")]
    id: Annotated[str, Meta(description="of the request")] = ""
    parameters: Annotated[dict[str, Any], Meta(description="robot_id, sequence_id, priority, timeout …")] = {}
    outputs: list[OutputTensor] = []


_json = msgspec.json.Decoder(InferBody)


def decode(body: bytes, head: int | None = None) -> OipBody:
    """Decode a body; 400 or 422 names what is wrong. head: bytes of JSON, if raw tensors follow it."""
    if head is not None and head > len(body):
        raise ClientError(f"Inference-Header-Content-Length is {head}, and the body has {len(body)} bytes")
    said = _parse(body if head is None else body[:head])
    inputs, at = [], len(body) if head is None else head
    for tensor in said.inputs:
        size = _binary_size(tensor)
        inputs.append(_tensor(tensor, memoryview(body)[at:], size))
        at += size or 0
    if at != len(body):
        raise ClientError(f"{len(body) - at} bytes are left behind the tensors")
    outputs = [output.name for output in said.outputs]
    binary = said.parameters.get("binary_data_output") is True
    for output in said.outputs:
        _check_parameters(output.name, output.parameters)
        binary = output.parameters.get("binary_data", binary) is True
    return OipBody(InferRequest(inputs, said.parameters, outputs, said.id), binary)


def encode_answer(model: str, sent: OipBody, answers: Sequence[ActAnswer]) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON if raw actions follow it."""
    actions = actions_of(answers)
    output: dict[str, Any] = {"name": ACTIONS, "datatype": "FP32", "shape": actions.shape}
    if sent.binary:
        output["parameters"] = {_SIZE: actions.nbytes}
    else:
        output["data"] = actions.ravel().tolist()
    told = {"model_name": model, "model_version": VERSION, "parameters": {"reflex": details_of(answers)}}
    told |= {"id": sent.asked.id} if sent.asked.id else {}
    head = encode(told | {"outputs": [output]})
    return (head + np.ascontiguousarray(actions, "<f4").tobytes(), len(head)) if sent.binary else (head, None)


def _parse(text: bytes) -> InferBody:
    check_json(text)
    try:
        return _json.decode(text)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the body is not JSON: {error}") from None


def _tensor(tensor: InputTensor, rest: memoryview, size: int | None) -> Tensor:
    name, has_data = tensor.name, tensor.data is not msgspec.UNSET
    _check_parameters(name, tensor.parameters)
    if has_data is (size is not None):
        raise invalid_input(name, f"needs either data or {_SIZE}")
    if size is None:
        return tensor_of_values(name, tensor.datatype, tensor.shape, tensor.data)
    if size > len(rest):
        raise invalid_input(name, f"{_SIZE} is {size}, and {len(rest)} bytes are left")
    return tensor_of_bytes(name, tensor.datatype, tensor.shape, rest[:size])


def _binary_size(tensor: InputTensor) -> int | None:
    size = tensor.parameters.get(_SIZE)
    if size is not None and (type(size) is not int or size < 0):
        raise invalid_input(tensor.name, f"{_SIZE} must be a whole number")
    return size


def _check_parameters(name: str, parameters: Mapping[str, Any]) -> None:
    for parameter in ("shared_memory_region", "classification"):
        if parameter in parameters:
            raise invalid_input(name, f"{parameter} is not served")


# -- HTTP --------------------------------------------------------------------------------------------------------------


def _refuse(error: ReflexError, request_id: str, packed: bool) -> Refusal:
    return Refusal(
        error.http_status, encode(describe_error(error, request_id) | {"error": error.message, "code": error.code})
    )


FORM: Final = ErrorForm(_refuse)
"""Our form of errors, but `error` is the message, because clients of this protocol show it; `code` is the code."""


class OipHttp:
    """The routes of the protocol."""

    def __init__(self, handler: RequestHandler, most: int, sequences: Sequences) -> None:
        """most: bytes that a body may have."""
        self._handler, self._runtime = handler, handler.runtime
        self._sequences = sequences
        self.routes = [
            Route(ROOT, self.server, form=FORM),
            Route("/v2/health/live", self.live, open=True, form=FORM),
            Route("/v2/health/ready", self.ready, open=True, form=FORM),
        ]
        self._of_models: dict[tuple[bool, str], Route] = {}  # by whether the path names a version, and its end
        for path in (MODEL, MODEL + OF_VERSION):
            self._of_models |= {
                (path != MODEL, ""): Route(path, self.model, form=FORM),
                (path != MODEL, "ready"): Route(f"{path}/ready", self.model_ready, form=FORM),
                (path != MODEL, "infer"): Route(
                    f"{path}/infer", self.infer, "POST", most=most, form=FORM, refused=self.refused
                ),
            }
        self.routes += self._of_models.values()

    def find(self, path: str) -> Route | None:
        """The route of a path with the name of a model in it."""
        if not path.startswith(MODELS):
            return None
        _, version, what = _what(path)
        return self._of_models[bool(version), what]

    # -- metadata and health -------------------------------------------------------------------------------------------

    async def server(self, request: HttpRequest) -> HttpResponse:
        """Server metadata."""
        return HttpResponse(200, encode(server_metadata()))

    async def live(self, request: HttpRequest) -> HttpResponse:
        """200 while the server runs."""
        return HttpResponse(200, encode({"live": True}))

    async def ready(self, request: HttpRequest) -> HttpResponse:
        """200 if requests can be answered, otherwise 503."""
        return _ready(self._handler.served.health if self._handler.prefix else self._runtime.health)

    async def model(self, request: HttpRequest) -> HttpResponse:
        """Inputs and outputs of the model."""
        handler, name = self._model_of(request)
        return HttpResponse(200, encode(model_metadata(handler.served.spec, name)))

    async def model_ready(self, request: HttpRequest) -> HttpResponse:
        """Like `ready`, for one model."""
        return _ready(self._model_of(request)[0].served.health)

    def _model_of(self, request: HttpRequest) -> tuple[RequestHandler, str]:
        name, version, _ = _what(request.path.removeprefix(self._handler.prefix))
        return model_of(self._handler, name, version)

    # -- infer ---------------------------------------------------------------------------------------------------------

    async def infer(self, request: HttpRequest) -> HttpResponse:
        try:
            handler, name = self._model_of(request)
            sent = await _read(request)
            request.refuse_query()
            rows = questions(handler.served.spec, self._sequences, sent.asked)
        except Exception as failure:
            error = known(failure, request.request_id)
            self.refused(request, error)
            raise error from None
        try:
            answers = await handler.infer_all(_pending(request), rows, request.received)
        except Reported as reported:
            request.request_id = reported.request_id
            return request.app.refuse(request, reported.error)
        request.request_id = sent.asked.id or request.request_id
        body, head = encode_answer(name, sent, answers)
        if head is None:
            return HttpResponse(200, body)
        return HttpResponse(200, body, BINARY, [(HEAD, b"%d" % head)])

    def refused(self, request: HttpRequest, error: ReflexError) -> None:
        """Count a request that cannot be read, or must not be asked."""
        self._handler.refused(_pending(request), error)


def _pending(request: HttpRequest) -> PendingRequest:
    return PendingRequest(OIP, request.request_id, request.client, request.started, request)


async def _read(request: HttpRequest) -> OipBody:
    if request.headers.get(b"content-encoding", b"identity") != b"identity":
        raise ClientError("compressed bodies are not read")
    length = request.headers.get(HEAD)
    if length is not None and not (length.isdigit() and len(length) < 12):
        raise ClientError("Inference-Header-Content-Length must be a whole number")
    head = None if length is None else int(length)
    body = await request.body()
    if (len(body) if head is None else head) > LARGE:
        return await request.app.bodies.beside(decode, body, head)
    return decode(body, head)


def _ready(health: str) -> HttpResponse:
    ready = health == "ready"
    return HttpResponse(200 if ready else 503, encode({"ready": ready}))


def _what(path: str) -> tuple[str, str, str]:
    """Model, version and rest of a path. Model names may contain slashes."""
    name, what = path[len(MODELS) :], ""
    if name.endswith(("/infer", "/ready")):
        name, _, what = name.rpartition("/")
    before, versions, version = name.rpartition("/versions/")
    return (before, version, what) if versions and "/" not in version else (name, "", what)
