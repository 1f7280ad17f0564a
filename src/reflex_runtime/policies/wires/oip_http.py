"""The Open Inference Protocol over HTTP: JSON, with the tensors in it or as raw bytes behind it.

The binary tensor extension: the header `Inference-Header-Content-Length` says how long the JSON is. Behind it are the
tensors that have a `binary_data_size`, in their order, little-endian. Answers are written in the same way when asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.policies.serving.handler import RequestHandler
from reflex_runtime.policies.serving.pending import PendingRequest
from reflex_runtime.policies.serving.question import ActAnswer
from reflex_runtime.policies.serving.wire_names import OIP
from reflex_runtime.policies.wires import oip
from reflex_runtime.policies.wires.oip_tensors import Tensor, tensor_of_bytes, tensor_of_values
from reflex_runtime.web.bodies import LARGE
from reflex_runtime.web.errors import ClientError, InvalidJson, Reported, describe_error, known
from reflex_runtime.web.fields import invalid, invalid_field
from reflex_runtime.web.form import ErrorForm, Refusal
from reflex_runtime.web.json import MAX_VALUES, encode, printable
from reflex_runtime.web.request import Handler, HttpRequest, HttpResponse, Route

ROOT: Final = "/v2"
MODELS: Final = "/v2/models/"
HEAD: Final = b"inference-header-content-length"
BINARY: Final = b"application/octet-stream"
_SIZE: Final = "binary_data_size"


class OipBody(NamedTuple):
    """A decoded body. binary: the caller wants the answer's tensor as raw bytes."""

    asked: oip.InferRequest
    binary: bool


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: Any = msgspec.UNSET


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Body(msgspec.Struct):
    inputs: list[_Tensor]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[_Output] = []


_json = msgspec.json.Decoder(_Body)


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
    return OipBody(oip.InferRequest(inputs, said.parameters, outputs, said.id), binary)


def encode_answer(model: str, sent: OipBody, answers: Sequence[ActAnswer]) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON if raw actions follow it."""
    actions = oip.actions_of(answers)
    output: dict[str, Any] = {"name": oip.ACTIONS, "datatype": "FP32", "shape": actions.shape}
    if sent.binary:
        output["parameters"] = {_SIZE: actions.nbytes}
    else:
        output["data"] = actions.ravel().tolist()
    told = {"model_name": model, "model_version": oip.VERSION, "parameters": {"reflex": oip.details_of(answers)}}
    told |= {"id": sent.asked.id} if sent.asked.id else {}
    head = encode(told | {"outputs": [output]})
    return (head + np.ascontiguousarray(actions, "<f4").tobytes(), len(head)) if sent.binary else (head, None)


def _parse(text: bytes) -> _Body:
    if text.count(b",") > MAX_VALUES:
        raise ClientError(f"the JSON holds over {MAX_VALUES} values: send tensors as binary data")
    try:
        return _json.decode(text)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the body is not JSON: {error}") from None


def _tensor(tensor: _Tensor, rest: memoryview, size: int | None) -> Tensor:
    name, has_data = tensor.name, tensor.data is not msgspec.UNSET
    _check_parameters(name, tensor.parameters)
    if has_data is (size is not None):
        raise invalid(printable(name), printable(f"{name}: needs either data or {_SIZE}"))
    if size is None:
        return tensor_of_values(name, tensor.datatype, tensor.shape, tensor.data)
    if size > len(rest):
        raise invalid(printable(name), printable(f"{name}: {_SIZE} is {size}, and {len(rest)} bytes are left"))
    return tensor_of_bytes(name, tensor.datatype, tensor.shape, rest[:size])


def _binary_size(tensor: _Tensor) -> int | None:
    size = tensor.parameters.get(_SIZE)
    if size is not None and (type(size) is not int or size < 0):
        raise invalid(printable(tensor.name), printable(f"{tensor.name}: {_SIZE} must be a whole number"))
    return size


def _check_parameters(name: str, parameters: Mapping[str, Any]) -> None:
    for parameter in ("shared_memory_region", "classification"):
        if parameter in parameters:
            raise invalid(printable(name), printable(f"{name}: {parameter} is not served"))


# -- HTTP --------------------------------------------------------------------------------------------------------------


def _refuse(error: ReflexError, request_id: str, packed: bool) -> Refusal:
    return Refusal(
        error.http_status, encode(describe_error(error, request_id) | {"error": error.message, "code": error.code})
    )


FORM: Final = ErrorForm(_refuse)
"""Our form of errors, but `error` is the message, because clients of this protocol show it; `code` is the code."""


class OipHttp:
    """The routes of the protocol."""

    def __init__(self, handler: RequestHandler, most: int, sequences: oip.Sequences) -> None:
        """most: bytes that a body may have."""
        self._handler, self._runtime = handler, handler.runtime
        self._sequences = sequences
        fixed: dict[str, tuple[Handler, bool]] = {
            ROOT: (self.server, False),
            "/v2/health/live": (self.live, True),
            "/v2/health/ready": (self.ready, True),
        }
        self.routes = [Route(path, run, open=open, form=FORM) for path, (run, open) in fixed.items()]
        self._model = Route("/v2/models/{model}", self.model, form=FORM)
        self._ready = Route("/v2/models/{model}/ready", self.model_ready, form=FORM)
        self._infer = Route(
            "/v2/models/{model}/infer", self.infer, "POST", most=most, form=FORM, refused=self.refused
        )

    def find(self, path: str) -> Route | None:
        """The route of a path with the name of a model in it."""
        if not path.startswith(MODELS):
            return None
        return {"infer": self._infer, "ready": self._ready}.get(_what(path)[2], self._model)

    # -- metadata and health -------------------------------------------------------------------------------------------

    async def server(self, request: HttpRequest) -> HttpResponse:
        """Server metadata."""
        return HttpResponse(200, encode(oip.server_metadata()))

    async def live(self, request: HttpRequest) -> HttpResponse:
        """200 while the server runs."""
        return HttpResponse(200, encode({"live": True}))

    async def ready(self, request: HttpRequest) -> HttpResponse:
        """200 if requests can be answered, otherwise 503."""
        return _ready(self._handler.served.health if self._handler.prefix else self._runtime.health)

    async def model(self, request: HttpRequest) -> HttpResponse:
        """Inputs and outputs of the model."""
        handler, name = self._model_of(request)
        return HttpResponse(200, encode(oip.model_metadata(handler.served.spec, name)))

    async def model_ready(self, request: HttpRequest) -> HttpResponse:
        """Like `ready`, for one model."""
        return _ready(self._model_of(request)[0].served.health)

    def _model_of(self, request: HttpRequest) -> tuple[RequestHandler, str]:
        name, version, _ = _what(request.path.removeprefix(self._handler.prefix))
        return oip.model_of(self._handler, name, version)

    # -- infer ---------------------------------------------------------------------------------------------------------

    async def infer(self, request: HttpRequest) -> HttpResponse:
        try:
            handler, name = self._model_of(request)
            sent = await _read(request)
            questions = oip.questions(handler.served.spec, self._sequences, sent.asked)
        except Exception as failure:
            error = known(failure, request.request_id)
            self.refused(request, error)
            raise error from None
        try:
            answers = await oip.infer(
                handler, request.request_id, request.client, questions, request.started, request, request.received
            )
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
        self._handler.refused(
            PendingRequest(OIP, request.request_id, request.client, request.started, request), error
        )


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
