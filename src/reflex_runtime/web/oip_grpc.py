"""The Open Inference Protocol over gRPC: its messages within bounds, and the service."""

from __future__ import annotations

from typing import Any, Final

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.settings import FunctionsConfig, ServeConfig
from reflex_runtime.web import messages_pb2 as messages
from reflex_runtime.web import oip
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.grpc_listener import GrpcCall, GrpcListener, parse, serialize
from reflex_runtime.web.oip import Tensor, tensor_of_bytes, tensor_of_values

SERVICE: Final = "inference.GRPCInferenceService"
MAX_FIELDS: Final = 4096  # of a request
MAX_OTHER: Final = 1 << 20  # bytes of a request that are not raw tensors
_RAW: Final = 7 << 3 | 2  # tag of the field raw_input_contents
_CONTENTS: Final = {  # field of the values of a datatype
    "BOOL": "bool", "INT8": "int", "INT16": "int", "INT32": "int", "INT64": "int64", "UINT8": "uint",
    "UINT16": "uint", "UINT32": "uint", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64", "BYTES": "bytes",
}  # fmt: skip


def decode(data: bytes) -> tuple[str, str, oip.InferRequest]:
    """(model, version, request); ClientError names what is wrong."""
    fields, raw = _split(data)
    sent = parse(messages.ModelInferRequest, fields)
    if raw and len(raw) != len(sent.inputs):
        raise ClientError(f"raw_input_contents: has {len(raw)} elements, and there are {len(sent.inputs)} inputs")
    inputs = [_tensor(tensor, raw[place] if raw else None) for place, tensor in enumerate(sent.inputs)]
    parameters = {name: _parameter(value) for name, value in sent.parameters.items()}
    asked = oip.InferRequest(inputs, parameters, [output.name for output in sent.outputs], sent.id)
    return sent.model_name, sent.model_version, asked


def encode(model: str, sent_id: str, told: oip.OipAnswer) -> bytes:
    """The answer to an infer request."""
    answer = messages.ModelInferResponse(model_name=model, model_version=oip.VERSION, id=sent_id)
    for name, value in told.parameters.items():
        answer.parameters[name].string_param = value
    for tensor in told.outputs:
        answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        answer.raw_output_contents.append(oip.bytes_of(tensor))
    return serialize(answer)


def _split(data: bytes) -> tuple[bytes, list[memoryview]]:
    """The fields of a request that are parsed, and its raw tensors as views.

    What is parsed is bounded before: two bytes can be a tensor without any field, and take a hundred.
    """
    view, at, size = memoryview(data), 0, 0
    parsed: list[memoryview] = []
    raw: list[memoryview] = []
    try:
        while at < len(data):
            begin = at
            tag, at = _varint(data, at)
            if tag & 7 == 0:
                _, at = _varint(data, at)
            else:  # groups are none of this protocol
                length, at = _varint(data, at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
                at += length
            if at > len(data):
                raise IndexError
            if tag == _RAW:
                raw.append(view[at - length : at])
            else:
                parsed.append(view[begin:at])
                size += at - begin
            if len(parsed) + len(raw) > MAX_FIELDS or size > MAX_OTHER:
                wrong = f"over {MAX_FIELDS} fields, or over {MAX_OTHER} bytes beside raw_input_contents"
                raise ClientError(f"the request has {wrong}: send tensors as raw bytes")
    except (IndexError, KeyError):
        raise ClientError("the message is no ModelInferRequest: it breaks off, or is of another protocol") from None
    return b"".join(parsed), raw


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value % 2**64, at
    raise IndexError


def _tensor(sent: Any, raw: memoryview | None) -> Tensor:
    if raw is not None:
        return tensor_of_bytes(sent.name, sent.datatype, list(sent.shape), raw)
    field = _CONTENTS.get(sent.datatype)
    values = list(getattr(sent.contents, f"{field}_contents")) if field else []
    return tensor_of_values(sent.name, sent.datatype, list(sent.shape), values)


def _parameter(sent: Any) -> Any:
    field = sent.WhichOneof("value")
    return getattr(sent, field) if field else None


def oip_listener(app: App, config: ServeConfig | FunctionsConfig, models: oip.OipModels) -> GrpcListener:
    """These models at `--oip-grpc`."""
    service, listener = OipService(models), GrpcListener(app, "--oip-grpc", config.oip_grpc, config)
    listener.serve(SERVICE, service.methods, {}, service.failed)
    return listener


class OipService:
    """The gRPC calls of a listener."""

    def __init__(self, models: oip.OipModels) -> None:
        self._models = models
        self.methods = {
            "ServerLive": self.live,
            "ServerReady": self.ready,
            "ServerMetadata": self.server,
            "ModelReady": self.model_ready,
            "ModelMetadata": self.model,
            "ModelInfer": self.infer,
        }

    def failed(self, call: GrpcCall, error: ReflexError) -> None:
        """Count the error of a request."""
        if call.method == "ModelInfer":
            self._models.refused(call, error)

    async def live(self, call: GrpcCall, data: bytes) -> bytes:
        return serialize(messages.ServerLiveResponse(live=True))

    async def ready(self, call: GrpcCall, data: bytes) -> bytes:
        return serialize(messages.ServerReadyResponse(ready=self._models.ready))

    async def server(self, call: GrpcCall, data: bytes) -> bytes:
        return serialize(messages.ServerMetadataResponse(**self._models.metadata()))

    async def model_ready(self, call: GrpcCall, data: bytes) -> bytes:
        return serialize(messages.ModelReadyResponse(ready=self._model_of(data).ready))

    async def model(self, call: GrpcCall, data: bytes) -> bytes:
        return serialize(messages.ModelMetadataResponse(**oip.metadata_of(self._model_of(data))))

    async def infer(self, call: GrpcCall, data: bytes) -> bytes:
        name, version, sent = decode(data)
        model = self._models.find(name, version)
        return encode(model.names[0], sent.id, await model.infer(call, sent))

    def _model_of(self, data: bytes) -> oip.OipModel:
        sent = parse(messages.ModelRequest, data)
        return self._models.find(sent.name, sent.version)
