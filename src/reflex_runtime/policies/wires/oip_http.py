"""The Open Inference Protocol over HTTP: JSON, with the tensors in it or as raw bytes behind it.

The binary tensor extension: the header `Inference-Header-Content-Length` says how long the JSON is. Behind it are the
tensors that have a `binary_data_size`, in their order, little-endian. Answers are written in the same way when asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from reflex_runtime.core.errors import Closed, ReflexError
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.policies.serving.question import ActAnswer
from reflex_runtime.policies.wires import oip
from reflex_runtime.policies.wires.oip_tensors import Tensor, tensor_of_bytes, tensor_of_values
from reflex_runtime.web.bodies import LARGE
from reflex_runtime.web.errors import CallerLeft, ClientError, InvalidJson, describe_error, known
from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.fields import invalid, invalid_field
from reflex_runtime.web.form import JSON, ErrorForm, Headers, Refusal
from reflex_runtime.web.json import MAX_VALUES, encode, printable

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

    def __init__(self, asking: Asking, most: int, sequences: oip.Sequences) -> None:
        """most: bytes that a body may have."""
        self._asking, self._runtime = asking, asking.runtime
        self._sequences = sequences
        fixed: dict[str, tuple[Callable[[Exchange, bytes], None], bool]] = {
            ROOT: (self.server, False),
            "/v2/health/live": (self.live, True),
            "/v2/health/ready": (self.ready, True),
        }
        self.routes = [Route(path, run, open=open, form=FORM) for path, (run, open) in fixed.items()]
        self._model = Route("/v2/models/{model}", self.model, form=FORM)
        self._ready = Route("/v2/models/{model}/ready", self.model_ready, form=FORM)
        self._infer = Route(
            "/v2/models/{model}/infer", self.infer, "POST", most=most, enter=self.enter, fail=self.fail, form=FORM
        )

    def find(self, path: str) -> Route | None:
        """The route of a path with the name of a model in it."""
        if not path.startswith(MODELS):
            return None
        return {"infer": self._infer, "ready": self._ready}.get(_what(path)[2], self._model)

    # -- metadata and health -------------------------------------------------------------------------------------------

    def server(self, exchange: Exchange, _: bytes) -> None:
        """Server metadata."""
        exchange.answer(200, encode(oip.server_metadata()))

    def live(self, exchange: Exchange, _: bytes) -> None:
        """200 while the server runs."""
        exchange.answer(200, encode({"live": True}))

    def ready(self, exchange: Exchange, _: bytes) -> None:
        """200 if requests can be answered, otherwise 503."""
        _answer_ready(exchange, self._asking.served.health if self._asking.prefix else self._runtime.health)

    def model(self, exchange: Exchange, _: bytes) -> None:
        """Inputs and outputs of the model."""
        asking, name = self._model_of(exchange)
        exchange.answer(200, encode(oip.model_metadata(asking.served.spec, name)))

    def model_ready(self, exchange: Exchange, _: bytes) -> None:
        """Like `ready`, for one model."""
        _answer_ready(exchange, self._model_of(exchange)[0].served.health)

    def _model_of(self, exchange: Exchange) -> tuple[Asking, str]:
        name, version, _ = _what(exchange.path.removeprefix(self._asking.prefix))
        return oip.model_of(self._asking, name, version)

    # -- infer ---------------------------------------------------------------------------------------------------------

    def enter(self, exchange: Exchange) -> None:
        """The head of a request has arrived."""
        self._model_of(exchange)
        if exchange.headers.get(b"content-encoding", b"identity") != b"identity":
            raise ClientError("compressed bodies are not read")

    def infer(self, exchange: Exchange, body: bytes) -> None:
        """The body has arrived."""
        length = exchange.headers.get(HEAD)
        if length is not None and not (length.isdigit() and len(length) < 12):
            raise ClientError("Inference-Header-Content-Length must be a whole number")
        head = None if length is None else int(length)
        if (len(body) if head is None else head) > LARGE:
            decoding = exchange.app.bodies.beside(decode, body, head)
            decoding.add_done_callback(partial(self._decoded, exchange))
        else:
            self._ask(exchange, decode(body, head))

    def fail(self, exchange: Exchange, error: ReflexError) -> None:
        """Answer a request that is refused before it is submitted."""
        (exchange.ask or self._begin(exchange)).fail(error)

    def _decoded(self, exchange: Exchange, decoding: asyncio.Future[OipBody]) -> None:
        if exchange.done:
            return
        try:
            if decoding.cancelled():
                raise Closed("the server is shutting down", retry_after=1.0)
            self._ask(exchange, decoding.result())
        except Exception as error:
            self.fail(exchange, known(error, exchange.request_id))

    def _ask(self, exchange: Exchange, sent: OipBody) -> None:
        asking, _ = self._model_of(exchange)
        asked = oip.questions(asking.served.spec, self._sequences, sent.asked)
        infer = self._begin(exchange, sent)
        if exchange.left:
            raise CallerLeft("the caller left")
        exchange.on_left = infer.leave
        infer.ask(asked, exchange.received)

    def _begin(self, exchange: Exchange, sent: OipBody | None = None) -> oip.Infer:
        done = partial(self._settle, exchange, sent)
        asking = self._asking if sent is None else self._model_of(exchange)[0]
        infer = exchange.ask = oip.Infer(
            asking, exchange.request_id, exchange.client, done, exchange.started, exchange
        )
        return infer

    def _settle(self, exchange: Exchange, sent: OipBody | None, result: list[ActAnswer] | ReflexError) -> None:
        infer: oip.Infer = exchange.ask
        if isinstance(result, ReflexError):
            exchange.request_id = infer.request_id
            exchange.fail(result)
        else:
            assert sent is not None
            exchange.request_id = sent.asked.id or exchange.request_id
            body, head = encode_answer(self._model_of(exchange)[1], sent, result)
            more: Headers | None = None if head is None else [(HEAD, b"%d" % head)]
            exchange.answer(200, body, JSON if head is None else BINARY, more)
        exchange.ask = None  # break the reference cycle


def _answer_ready(exchange: Exchange, health: str) -> None:
    ready = health == "ready"
    exchange.answer(200 if ready else 503, encode({"ready": ready}))


def _what(path: str) -> tuple[str, str, str]:
    """Model, version and rest of a path. Model names may contain slashes."""
    name, what = path[len(MODELS) :], ""
    if name.endswith(("/infer", "/ready")):
        name, _, what = name.rpartition("/")
    before, versions, version = name.rpartition("/versions/")
    return (before, version, what) if versions and "/" not in version else (name, "", what)
