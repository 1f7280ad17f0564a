"""The Open Inference Protocol over gRPC: its messages, and the service."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.policies.serving.ask import Ask
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.policies.serving.question import ActAnswer
from reflex_runtime.policies.serving.wire_names import OIP
from reflex_runtime.policies.wires import oip
from reflex_runtime.policies.wires.oip_tensors import Tensor, tensor_of_bytes, tensor_of_values
from reflex_runtime.policies.wires.protobuf import Field, Message, parse, serialize
from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.grpc_listener import GrpcCall, Reported, settle

SERVICE: Final = "inference.GRPCInferenceService"
MOST_MS: Final = 600_000.0  # a longer deadline counts as none
_PARAMETER: Final[Message] = {
    1: Field("bool", "bool"), 2: Field("int", "int"), 3: Field("text", "text"), 4: Field("double", "double"),
    5: Field("uint", "uint"),
}  # fmt: skip
_PARAMETERS: Final = Field("parameters", {1: Field("key", "text"), 2: Field("value", _PARAMETER)}, many=True)
_NAMED: Final[Message] = {1: Field("name", "text"), 2: Field("version", "text")}
_LIVE: Final[Message] = {1: Field("live", "bool")}
_READY: Final[Message] = {1: Field("ready", "bool")}
_SERVER: Final[Message] = {
    1: Field("name", "text"), 2: Field("version", "text"), 3: Field("extensions", "text", many=True)
}  # fmt: skip
_PORT: Final[Message] = {
    1: Field("name", "text"), 2: Field("datatype", "text"), 3: Field("shape", "int", many=True)
}  # fmt: skip
_MODEL: Final[Message] = {
    1: Field("name", "text"), 2: Field("versions", "text", many=True), 3: Field("platform", "text"),
    4: Field("inputs", _PORT, many=True), 5: Field("outputs", _PORT, many=True),
}  # fmt: skip
_CONTENTS: Final[Message] = {
    1: Field("BOOL", "bool", many=True), 2: Field("INT32", "int", many=True), 3: Field("INT64", "int", many=True),
    4: Field("UINT32", "uint", many=True), 5: Field("UINT64", "uint", many=True), 6: Field("FP32", "float", many=True),
    7: Field("FP64", "double", many=True), 8: Field("BYTES", "bytes", many=True),
}  # fmt: skip
_WIDER: Final = {"INT8": "INT32", "INT16": "INT32", "UINT8": "UINT32", "UINT16": "UINT32"}  # field of their values
_TENSOR: Final[Message] = {**_PORT, 4: _PARAMETERS, 5: Field("contents", _CONTENTS)}
_REQUEST: Final[Message] = {
    1: Field("model_name", "text"), 2: Field("model_version", "text"), 3: Field("id", "text"), 4: _PARAMETERS,
    5: Field("inputs", _TENSOR, many=True), 6: Field("outputs", {1: Field("name", "text")}, many=True),
    7: Field("raw", "bytes", many=True),
}  # fmt: skip
_ANSWER: Final[Message] = {
    1: Field("model_name", "text"), 2: Field("model_version", "text"), 3: Field("id", "text"), 4: _PARAMETERS,
    5: Field("outputs", _PORT, many=True), 6: Field("raw", "bytes", many=True),
}  # fmt: skip


def decode(data: bytes) -> tuple[str, str, oip.InferRequest]:
    """(model, version, request); ClientError names what is wrong."""
    sent = parse(data, _REQUEST)
    raw = sent["raw"]
    if raw and len(raw) != len(sent["inputs"]):
        raise ClientError(f"raw_input_contents: has {len(raw)} elements, and there are {len(sent['inputs'])} inputs")
    inputs = [_tensor(tensor, raw[place] if raw else None) for place, tensor in enumerate(sent["inputs"])]
    outputs = [output.get("name", "") for output in sent["outputs"]]
    asked = oip.InferRequest(inputs, _parameters(sent["parameters"]), outputs, sent.get("id", ""))
    return sent.get("model_name", ""), sent.get("model_version", ""), asked


def encode(model: str, sent_id: str, answers: Sequence[ActAnswer]) -> bytes:
    """The answer to an infer request."""
    actions = oip.actions_of(answers)
    told = {
        "model_name": model,
        "model_version": oip.VERSION,
        "id": sent_id,
        "parameters": [{"key": "reflex", "value": {"text": oip.details_of(answers)}}],
        "outputs": [{"name": oip.ACTIONS, "datatype": "FP32", "shape": actions.shape}],
        "raw": [actions.tobytes()],
    }
    return serialize(told, _ANSWER)


def _tensor(sent: Mapping[str, Any], raw: memoryview | None) -> Tensor:
    name, datatype, shape = sent.get("name", ""), sent.get("datatype", ""), sent["shape"].tolist()
    if raw is not None:
        return tensor_of_bytes(name, datatype, shape, raw)
    return tensor_of_values(name, datatype, shape, sent.get("contents", {}).get(_WIDER.get(datatype, datatype), []))


def _parameters(sent: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {entry.get("key", ""): next(iter(entry.get("value", {}).values()), None) for entry in sent}


class OipService:
    """The gRPC calls of a listener."""

    def __init__(self, asking: Asking, sequences: oip.Sequences) -> None:
        self._asking, self._runtime, self._sequences = asking, asking.runtime, sequences
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
            self._asking.fail(Ask(OIP, call.id, call.peer, lambda result: None, call.started, call), error)

    async def live(self, call: GrpcCall, data: bytes) -> bytes:
        return serialize({"live": True}, _LIVE)

    async def ready(self, call: GrpcCall, data: bytes) -> bytes:
        return serialize({"ready": self._runtime.health == "ready"}, _READY)

    async def server(self, call: GrpcCall, data: bytes) -> bytes:
        return serialize(oip.server_metadata(), _SERVER)

    async def model_ready(self, call: GrpcCall, data: bytes) -> bytes:
        asking, _ = self._model_of(data)
        return serialize({"ready": asking.served.health == "ready"}, _READY)

    async def model(self, call: GrpcCall, data: bytes) -> bytes:
        asking, name = self._model_of(data)
        return serialize(oip.model_metadata(asking.served.spec, name), _MODEL)

    async def infer(self, call: GrpcCall, data: bytes) -> bytes:
        model, version, sent = decode(data)
        asking, name = oip.model_of(self._asking, model, version)
        most_ms = call.left_ms if call.left_ms is None or call.left_ms <= MOST_MS else None
        asked = oip.questions(asking.served.spec, self._sequences, sent, most_ms)
        settled: asyncio.Future[list[ActAnswer] | ReflexError] = asyncio.get_running_loop().create_future()
        infer = oip.Infer(asking, call.id, call.peer, partial(settle, settled), call.started, call)
        infer.ask(asked)
        try:
            result = await settled
        except asyncio.CancelledError:
            infer.leave()
            raise
        if isinstance(result, ReflexError):
            raise Reported(result, infer.request_id)
        return encode(name, sent.id, result)

    def _model_of(self, data: bytes) -> tuple[Asking, str]:
        sent = parse(data, _NAMED)
        return oip.model_of(self._asking, sent.get("name", ""), sent.get("version", ""))
