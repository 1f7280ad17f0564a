"""The Open Inference Protocol, version 2 (KServe, Triton), over HTTP; `grpc_listener` serves the same over gRPC.

A body becomes an `InferRequest`, which the product's `OipModel` answers. The binary tensor extension: the header
`Inference-Header-Content-Length` is the length of the JSON; the tensors with a `binary_data_size` follow it, in order,
little-endian. Answers have this form if the request asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.version import __version__
from reflex_runtime.web.arrays import MAX_DIMENSIONS, array_in, check_json
from reflex_runtime.web.batch_server import HasHeaders
from reflex_runtime.web.errors import ClientError, HttpResponse, NotFound, Reported, describe_error, known
from reflex_runtime.web.fields import client_errors, encode, invalid_input, printable
from reflex_runtime.web.openapi import OBJECT, Operation, content
from reflex_runtime.web.request import LARGE, Handler, HttpRequest, Route

# -- tensors -----------------------------------------------------------------------------------------------------------

MAX_TEXTS: Final = 4096  # elements of a tensor of BYTES
BYTES: Final = "BYTES"
_DTYPES: Final = {
    "BOOL": "|b1", "UINT8": "|u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "|i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", BYTES: "|O",
}  # fmt: skip
# The Python types of values in JSON, by the kind of the dtype; int for kinds not listed.
_KINDS: Final[Mapping[str, set[type]]] = {"b": {bool}, "f": {int, float}, "O": {str, bytes}}


class Tensor(NamedTuple):
    """One input or output. values: an array; the elements of BYTES are objects of `bytes`."""

    name: str
    datatype: str
    values: NDArray[Any]

    def row(self, row: int) -> Any:
        """One row, an array; of a BYTES tensor its only element."""
        value = self.values[row]
        if self.datatype != BYTES:
            return value
        if np.size(value) != 1:
            raise invalid_input(self.name, "must have one element in each row")
        return value.item() if isinstance(value, np.ndarray) else value


def tensor_of_bytes(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Tensor:
    """A tensor from raw little-endian bytes; each element of BYTES follows its length in four bytes."""
    dtype = _dtype(name, datatype, shape)
    if datatype == BYTES:
        return tensor_of_values(name, datatype, shape, _texts(name, prod(shape), memoryview(data)))
    try:
        return Tensor(name, datatype, array_in(data, dtype, list(shape)))
    except ClientError as error:
        raise invalid_input(name, error.message) from None


def tensor_of_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> Tensor:
    """A tensor from a list of numbers or texts in C order, flat or nested."""
    dtype, flat = np.dtype(_dtype(name, datatype, shape)), values
    if not isinstance(flat, list):
        raise invalid_input(name, "its data must be a list")
    for _ in range(MAX_DIMENSIONS):
        if not flat or not all(isinstance(value, list) for value in flat):
            break
        flat = [value for part in flat for value in part]
    if not set(map(type, flat)) <= _KINDS.get(dtype.kind, {int}):
        raise invalid_input(name, f"a value is not of datatype {datatype}")
    if datatype == BYTES:
        flat = [value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value for value in flat]
    try:
        with np.errstate(over="raise"):  # else 1e39 would be infinity in FP32
            return Tensor(name, datatype, np.array(flat, dtype).reshape(shape))
    except (OverflowError, FloatingPointError):
        raise invalid_input(name, f"holds numbers too large for {datatype}") from None
    except ValueError:  # an empty tensor may claim a shape beyond numpy's limits
        raise invalid_input(name, f"{len(flat)} values do not make {datatype} of shape {list(shape)}") from None


def _dtype(name: str, datatype: str, shape: Sequence[int]) -> str:
    """numpy's name of the type; 422 for an unknown datatype or an invalid shape."""
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
        raise invalid_input(name, f"shape must have at most {MAX_DIMENSIONS} whole numbers")
    if datatype not in _DTYPES:
        raise invalid_input(name, f"datatype {datatype[:40]!r} is not one of {', '.join(_DTYPES)}")
    if datatype == BYTES and prod(shape) > MAX_TEXTS:
        raise invalid_input(name, f"has {prod(shape)} BYTES, at most {MAX_TEXTS} are read")
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
    if at != len(data):
        raise invalid_input(name, f"{len(data)} bytes do not make {size} BYTES with lengths")
    return found


def tensor_out(name: str, rows: Sequence[Any]) -> Tensor:
    """An output of one value a row: arrays, numbers, texts or bytes. ValueError if they make no tensor."""
    if all(isinstance(row, str | bytes) for row in rows):
        texts = [row.encode() if isinstance(row, str) else row for row in rows]  # also subclasses, such as np.str_
        return Tensor(name, BYTES, np.array(texts, object).reshape(-1, 1))
    array = np.stack([np.asarray(row) for row in rows])
    array = array.reshape(-1, 1) if array.ndim == 1 else array
    return Tensor(name, datatype_of(array.dtype), array)


def datatype_of(dtype: Any) -> str:
    """The protocol's name of a numpy type; ValueError if it has none."""
    kind = np.dtype(dtype).newbyteorder("<")
    found = next((name for name, known in _DTYPES.items() if name != BYTES and np.dtype(known) == kind), None)
    if found is None:
        raise ValueError(f"{kind.name} is no type of tensors")
    return found


def bytes_of(tensor: Tensor) -> bytes:
    """The values of a tensor as raw bytes; see `tensor_of_bytes`."""
    if tensor.datatype == BYTES:
        return b"".join(len(text).to_bytes(4, "little") + text for text in tensor.values.flat)
    return np.ascontiguousarray(tensor.values, _DTYPES[tensor.datatype]).tobytes()


# -- requests and answers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OipAnswer:
    """The outputs of all rows, and the answer's parameters."""

    outputs: Sequence[Tensor]
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A decoded request. outputs: names of the outputs to send, empty for all. id: the caller's, or "". binary: the
    tensors of the answer are to be raw bytes."""

    inputs: Sequence[Tensor]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    id: str = ""
    binary: bool = False

    def rows(self, inputs: Collection[str], optional: Collection[str], outputs: Collection[str], most: int) -> int:
        """The number of rows: the first dimension of every input. 422 for an input that is missing, unknown or given
        twice, and for an unknown output. inputs, outputs: names that the model has. most: rows."""
        given = [tensor.name for tensor in self.inputs]
        all_of = f"came: {', '.join(given) or 'nothing'}; expected: {', '.join(inputs)}"
        for name in given:
            if name not in inputs:
                raise invalid_input(name, f"no such input; {all_of}")
        for name in inputs:
            if name not in given and name not in optional:
                raise invalid_input(name, f"missing; {all_of}")
        if len(set(given)) != len(given):
            raise invalid_input("inputs", f"one is given twice; {all_of}")
        for name in self.outputs:
            if name not in outputs:
                raise invalid_input(name, f"no such output; there is {', '.join(outputs)}")
        shapes = [tensor.values.shape for tensor in self.inputs] or [(1,)]
        for name, shape in zip(given, shapes, strict=False):
            if not 0 < (shape or (0,))[0] <= most or shape[0] != shapes[0][0]:
                why = f"has shape {list(shape)}; its first number must be 1 to {most}, the same in all inputs"
                raise invalid_input(name, why)
        return int(shapes[0][0])


P = TypeVar("P", bound="InferParameters")
Level = Literal["urgent", "default", "background"]
_LEVELS: Final[Mapping[int, Level]] = {0: "default", 1: "urgent", 2: "default"}


class InferParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The parameters of a request that every model takes. timeout: microseconds, at most 600 s; 0 for none."""

    priority: int | Level | None = None
    timeout: Annotated[int, Meta(ge=0, le=600_000_000)] = 0
    binary_data_output: bool = False

    @classmethod
    def of(cls: type[P], sent: InferRequest) -> P:
        """The parameters of a request; the 422 names a wrong one."""
        with client_errors(cls):
            return msgspec.convert(sent.parameters, cls)

    @property
    def level(self) -> Level:
        """The name of the priority. Of numbers 1 is urgent, 0 and 2 are default, larger ones background."""
        if isinstance(self.priority, str):
            return self.priority
        return _LEVELS.get(max(self.priority or 0, 0), "background")

    def deadline_ms(self, left_ms: float | None) -> float | None:
        """The shorter of `timeout` and `left_ms`, the caller's own limit; None without either."""
        return min((limit for limit in (self.timeout / 1e3, left_ms) if limit), default=None)


# -- bodies ------------------------------------------------------------------------------------------------------------

VERSION: Final = "1"
ROOT: Final = "/v2"
MODELS: Final = "/v2/models/"
MODEL: Final = MODELS + "{model}"
OF_VERSION: Final = "/versions/{version}"
HEAD: Final = b"inference-header-content-length"
BINARY: Final = b"application/octet-stream"
_SIZE: Final = "binary_data_size"


class OutputTensor(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class InputTensor(OutputTensor, kw_only=True):
    name: Annotated[str, Meta(description="as the model's metadata has it")]
    datatype: str
    shape: list[int]
    parameters: Annotated[dict[str, Any], Meta(description="binary_data_size: its bytes follow the JSON")] = {}
    data: Annotated[Any, Meta(description="the values in C order, without binary_data_size")] = msgspec.UNSET


class InferBody(msgspec.Struct):
    inputs: Annotated[list[InputTensor], Meta(description="one tensor for each input")]
    id: Annotated[str, Meta(description="of the request")] = ""
    parameters: Annotated[dict[str, Any], Meta(description="robot_id, sequence_id, priority, timeout …")] = {}
    outputs: list[OutputTensor] = []


_json = msgspec.json.Decoder(InferBody)


def decode(body: bytes, head: int | None = None) -> InferRequest:
    """Decode a body; 400 or 422 if it is wrong. head: length of the JSON in bytes, if raw tensors follow it."""
    if head is not None and head > len(body):
        raise ClientError(f"Inference-Header-Content-Length is {head}, and the body has {len(body)} bytes")
    text = body if head is None else body[:head]
    check_json(text)
    with client_errors():
        sent = _json.decode(text)
    binary = sent.parameters.get("binary_data_output") is True
    for output in sent.outputs:
        binary = output.parameters.get("binary_data", binary) is True
    parts: list[OutputTensor] = [*sent.inputs, *sent.outputs]
    for part in parts:
        for parameter in {"shared_memory_region", "classification"} & part.parameters.keys():
            raise invalid_input(part.name, f"{parameter} is not served")
    inputs, raw = [], memoryview(body)[len(text) :]
    for tensor in sent.inputs:
        size = tensor.parameters.get(_SIZE)
        inputs.append(_tensor(tensor, size, raw))
        raw = raw[size or 0 :]
    if raw:
        raise ClientError(f"{len(raw)} bytes follow the last tensor")
    return InferRequest(inputs, sent.parameters, [output.name for output in sent.outputs], sent.id, binary)


def _tensor(tensor: InputTensor, size: Any, raw: memoryview) -> Tensor:
    name, has_data = tensor.name, tensor.data is not msgspec.UNSET
    if size is not None and (type(size) is not int or size < 0):
        raise invalid_input(name, f"{_SIZE} must be a whole number")
    if size is not None and size > len(raw):
        raise invalid_input(name, f"{_SIZE} is {size}, and {len(raw)} bytes are left")
    if has_data is (size is not None):
        raise invalid_input(name, f"needs either data or {_SIZE}")
    if size is None:
        return tensor_of_values(name, tensor.datatype, tensor.shape, tensor.data)
    return tensor_of_bytes(name, tensor.datatype, tensor.shape, raw[:size])


def encode_answer(model: str, sent: InferRequest, answer: OipAnswer) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON if raw tensors follow it."""
    outputs, raw = [], []
    for tensor in answer.outputs:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.values.shape}
        if sent.binary:
            raw.append(bytes_of(tensor))
            output["parameters"] = {_SIZE: len(raw[-1])}
        else:
            data = tensor.values.ravel().tolist()
            output["data"] = [text.decode("utf-8", "replace") for text in data] if tensor.datatype == BYTES else data
        outputs.append(output)
    fields: dict[str, Any] = {"model_name": model, "model_version": VERSION}
    fields |= {"parameters": answer.parameters} if answer.parameters else {}
    fields |= {"id": sent.id} if sent.id else {}
    head = encode(fields | {"outputs": outputs})
    return (head + b"".join(raw), len(head)) if sent.binary else (head, None)


# -- models ------------------------------------------------------------------------------------------------------------


class OipCall(HasHeaders, Protocol):
    """A request for inference: an `HttpRequest` or a `GrpcCall`. left_ms: milliseconds until its deadline, or None."""

    client: Any
    request_id: str
    started: float
    received: float
    left_ms: float | None


Described = tuple[str, str, Sequence[int]]
"""Name, datatype and shape of an input or output."""


class OipModel(Protocol):
    """One model. names: callers may use any; answers have the first. inputs, outputs: in shapes -1 is any size."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def ready(self) -> bool: ...
    @property
    def inputs(self) -> Sequence[Described]: ...
    @property
    def outputs(self) -> Sequence[Described]: ...

    async def infer(self, call: OipCall, sent: InferRequest) -> OipAnswer:
        """The answer. Errors of admitted requests are counted, and raised as `Reported`."""

    def refused(self, call: OipCall, error: ReflexError) -> None:
        """Count a request that was not admitted."""


@dataclass(frozen=True, slots=True)
class OipModels:
    """The models of a server. extensions: those of the protocol that it implements."""

    models: Sequence[OipModel]
    extensions: Sequence[str]

    @property
    def ready(self) -> bool:
        return any(model.ready for model in self.models)

    def find(self, name: str, version: str) -> OipModel:
        """404 for a model or a version that is not served."""
        found = next((model for model in self.models if name in model.names), None)
        if found is None:
            there = ", ".join(model.names[0] for model in self.models)
            raise NotFound(printable(f"model {name[:200]!r} is not served, only {there}"))
        if version not in ("", VERSION):
            raise NotFound(printable(f"model {name[:200]!r} has version {VERSION}, not {version[:40]!r}"))
        return found

    def refused(self, call: OipCall, error: ReflexError) -> None:
        """Count a request that cannot be read."""
        self.models[0].refused(call, error)

    def metadata(self) -> dict[str, Any]:
        return {"name": "reflex", "version": __version__, "extensions": list(self.extensions)}


def metadata_of(model: OipModel) -> dict[str, Any]:
    """The answer to ModelMetadata."""
    ports_of = {
        which: [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in ports]
        for which, ports in (("inputs", model.inputs), ("outputs", model.outputs))
    }
    return {"name": model.names[0], "versions": [VERSION], "platform": "reflex", **ports_of}


CALLS: Final[Mapping[str, tuple[str, Callable[[OipModels, str, str], Mapping[str, Any]]]]] = {
    "ServerMetadata": (ROOT, lambda models, name, version: models.metadata()),
    "ServerLive": ("/v2/health/live", lambda models, name, version: {"live": True}),
    "ServerReady": ("/v2/health/ready", lambda models, name, version: {"ready": models.ready}),
    "ModelMetadata": (MODEL, lambda models, name, version: metadata_of(models.find(name, version))),
    "ModelReady": (f"{MODEL}/ready", lambda models, name, version: {"ready": models.find(name, version).ready}),
}
"""The other calls of the protocol, by their names in gRPC: the path, and a function that makes the answer."""


# -- HTTP --------------------------------------------------------------------------------------------------------------


def _refuse(error: ReflexError, request_id: str, packed: bool) -> HttpResponse:
    return HttpResponse(
        error.http_status, encode(describe_error(error, request_id) | {"error": error.message, "code": error.code})
    )


FORM: Final = _refuse
"""Our form of errors with the message in `error`, which clients of this protocol show, and the code in `code`."""


def oip_routes(models: OipModels, most: int, prefix: str = "") -> list[Route]:
    """The routes of the protocol. most: bytes of a body. prefix: of the paths."""

    def named_in(request: HttpRequest) -> tuple[str, str]:
        """Model and version in the path; names may contain slashes."""
        name = request.path.removeprefix(prefix)[len(MODELS) :]
        if name.endswith(("/infer", "/ready")):
            name = name.rpartition("/")[0]
        before, versions, version = name.rpartition("/versions/")
        return (before, version) if versions and "/" not in version else (name, "")

    def answering(fields: Callable[[OipModels, str, str], Mapping[str, Any]]) -> Handler:
        async def run(request: HttpRequest) -> HttpResponse:
            found = fields(models, *named_in(request))
            return HttpResponse(200 if found.get("ready", True) else 503, encode(found))

        return run

    async def infer(request: HttpRequest) -> HttpResponse:
        try:
            model = models.find(*named_in(request))
            sent = await _read(request)
            request.refuse_query()
            answer = await model.infer(request, sent)
        except Reported as reported:
            request.request_id = reported.request_id
            return request.app.refuse(request, reported.error)
        except Exception as failure:
            error = known(failure, request.request_id)
            models.refused(request, error)
            raise error from None
        request.request_id = sent.id or request.request_id
        body, head = encode_answer(model.names[0], sent, answer)
        if head is None:
            return HttpResponse(200, body)
        return HttpResponse(200, body, BINARY, [(HEAD, b"%d" % head)])

    return [
        *(
            Route(own, answering(fields), open="/health/" in path, form=FORM)
            for path, fields in CALLS.values()
            for own in dict.fromkeys((path, path.replace(MODEL, MODEL + OF_VERSION)))
        ),
        *(
            Route(f"{path}/infer", infer, "POST", most=most, form=FORM, refused=models.refused)
            for path in (MODEL, MODEL + OF_VERSION)
        ),
    ]


async def _read(request: HttpRequest) -> InferRequest:
    length = request.headers.get(HEAD)
    if length is not None and not (length.isdigit() and len(length) < 12):
        raise ClientError("Inference-Header-Content-Length must be a whole number")
    head = None if length is None else int(length)
    body = await request.body()
    if (len(body) if head is None else head) > LARGE:
        return await request.app.bodies.beside(decode, body, head)
    return decode(body, head)


# -- the document ------------------------------------------------------------------------------------------------------


def operations(models: Sequence[str], codes: Sequence[str], body: Mapping[str, Any]) -> dict[str, Operation]:
    """The operations of these paths. models: names. codes, body: of inference, the error statuses and the schema."""
    raw = content({}, BINARY.decode())
    ready = Operation("OIP: 200 when requests are answered, else 503", unready=True)
    found = {
        ROOT: Operation("OIP: name and version of the server"),
        "/v2/health/live": Operation("OIP: 200"),
        "/v2/health/ready": ready,
    }
    for path, version in ((MODEL, {}), (MODEL + OF_VERSION, {"version": {"enum": [VERSION]}})):
        named = {"model": {"enum": list(models)}, **version}
        found |= {
            path: Operation("OIP: its inputs and outputs, see docs/wires.md", codes=("404",), parameters=named),
            f"{path}/ready": ready._replace(codes=("404",), parameters=named),
            f"{path}/infer": Operation(
                "OIP: tensors in, tensors out; each row is a request",
                OBJECT | raw,
                (*codes, "404"),
                request=content(body) | raw,
                description="The header Inference-Header-Content-Length is the length of the JSON where raw tensors "
                "follow it.",
                parameters=named,
            ),
        }
    return found
