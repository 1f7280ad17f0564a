"""The wires over gRPC: OIP as Triton's client speaks it, and LeRobot's asynchronous inference."""

from __future__ import annotations

import json
import pickle
import pickletools
import secrets
import struct
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from bench.load.wires.expected import Expected, Observed
from bench.load.wires.oip import TYPES, OipCaller
from bench.load.wires.target import Target
from reflex_runtime.client.errors import BadAnswer, ClientError, NotFound, ServerError, TimedOut, Unreachable
from reflex_runtime.client.exchange import Reply, refused
from reflex_runtime.robots.wires import messages_pb2 as messages

_BEGIN, _MIDDLE, _END = 1, 2, 3
_SIZE: Final = 2 << 20  # bytes of a part
_HELPERS: Final = "lerobot.async_inference.helpers"
_NAMES: Final = {4: "deadline_exceeded", 5: "not_found", 12: "not_found", 14: "unreachable", 16: "unauthorized"}


class _GrpcCaller:
    """A caller with its own channel. gRPC lets those of a process share a connection: metadata say whose a call is."""

    schemes: ClassVar[tuple[str, ...]] = ("http", "https", "grpc")
    service: ClassVar[str]

    def __init__(self, target: Target) -> None:
        self.announced: Mapping[str, Any] = {}
        self._target = target
        self._channel: Any = None
        self._metadata = (("x-reflex-robot", secrets.token_hex(8)),)
        self._metadata += (("authorization", f"Bearer {target.key}"),) if target.key else ()

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _call(self, method: str, sent: bytes | list[bytes]) -> bytes:
        """One call. A list is sent as a stream."""
        try:
            import grpc.aio
        except ImportError:
            raise BadAnswer("grpcio is not installed: in a clone, pip install '.[grpc]'") from None
        target = self._target
        if self._channel is None:
            options = (("grpc.max_receive_message_length", -1),)
            self._channel = grpc.aio.insecure_channel(target.address.netloc, options)
        path = f"/{self.service}/{method}"
        try:
            if isinstance(sent, bytes):
                return bytes(
                    await self._channel.unary_unary(path)(sent, metadata=self._metadata, timeout=target.timeout)
                )
            return bytes(
                await self._channel.stream_unary(path)(iter(sent), metadata=self._metadata, timeout=target.timeout)
            )
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    def _error(self, error: Any) -> ClientError:
        for name, told in error.trailing_metadata() or ():
            if name == "reflex-error":
                return refused(Reply(0, {}, told if isinstance(told, bytes) else told.encode()))
        number, where = error.code().value[0], self._target.address.netloc
        if number == 4:
            return TimedOut(f"no answer from grpc://{where} within {self._target.timeout:g} s")
        message = f"{error.code().name}: {error.details()}"[:300]
        if number == 14:
            return Unreachable(f"cannot ask grpc://{where}: {message}")
        return (NotFound if number in (5, 12) else ServerError)(message, code=_NAMES.get(number, "server_error"))


class OipGrpcCaller(_GrpcCaller):
    """OIP: ModelMetadata once, then ModelInfer."""

    config: ClassVar[str] = "oip"
    setting: ClassVar[str] = "oip_grpc"
    service: ClassVar[str] = "inference.GRPCInferenceService"
    expected = OipCaller.expected

    async def connect(self) -> None:
        """Read the inputs of the model."""
        if not self._target.model:
            raise NotFound("the model's name is not known: give the server's http:// URL", code="not_found")
        asked = messages.ModelRequest(name=self._target.model).SerializeToString()
        model = messages.ModelMetadataResponse.FromString(await self._call("ModelMetadata", asked))
        self.announced = {"inputs": [
            {"name": item.name, "datatype": item.datatype, "shape": list(item.shape)} for item in model.inputs
        ]}  # fmt: skip

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """A request with one row and raw contents."""
        sent = messages.ModelInferRequest(model_name=self._target.model)
        if deadline_ms:
            sent.parameters["timeout"].int64_param = round(1e3 * deadline_ms)
        for name, value in observed.items():
            if isinstance(value, str):
                data, kind, shape = struct.pack("<I", len(value.encode())) + value.encode(), "BYTES", [1, 1]
            else:
                data, kind, shape = value.tobytes(), TYPES[str(value.dtype)], [1, *value.shape]
            sent.inputs.add(name=name, datatype=kind, shape=shape)
            sent.raw_input_contents.append(data)
        return bytes(sent.SerializeToString())

    async def ask(self, frame: bytes) -> int:
        """Send it."""
        answer = messages.ModelInferResponse.FromString(await self._call("ModelInfer", frame))
        told = answer.parameters["reflex"].string_param if "reflex" in answer.parameters else "[{}]"
        try:
            batch = json.loads(told)[0].get("batch", {})
            return int(batch.get("size", 0)) if answer.outputs[0].shape else 0
        except (ValueError, IndexError, AttributeError) as error:
            raise BadAnswer(f"no outputs in the answer: {error!r}") from None


class LerobotCaller(_GrpcCaller):
    """LeRobot: the setup, then each observation in one call and its actions in another. Pickles are written without
    LeRobot's package, and answers are counted without loading them."""

    config: ClassVar[str] = "lerobot"
    setting: ClassVar[str] = "lerobot"
    service: ClassVar[str] = "transport.AsyncInference"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._set = b""  # the last setup

    async def connect(self) -> None:
        """Begin an episode. The server announces nothing."""
        await self._call("Ready", b"")
        if self._set:
            await self._call("SendPolicyInstructions", self._set)

    def expected(self) -> Expected | None:
        return None

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """The setup for this observation, followed by the observation. Motors of a state are called m0, m1 …"""
        features: dict[str, Any] = {}
        seen: dict[str, Any] = {}
        for name, value in observed.items():
            plain = name.removeprefix("observation.images.").removeprefix("observation.")
            if isinstance(value, str):
                seen["task"] = value
            elif value.ndim == 3:
                features[f"observation.images.{plain}"] = {"dtype": "image", "shape": value.shape, "names": None}
                seen[plain] = value
            else:
                motors = [f"{plain}.m{i}" for i in range(value.size)]
                features[f"observation.{plain}"] = {"dtype": "float32", "shape": value.shape, "names": motors}
                seen |= dict(zip(motors, value.tolist(), strict=True))
        policy: dict[str, Any] = {
            "policy_type": "act",
            "pretrained_name_or_path": "reflex",
            "lerobot_features": features,
        }
        policy |= {"actions_per_chunk": 1000, "device": "cpu", "rename_map": {}}
        setup = bytes(messages.Pickle(data=_pickled("RemotePolicyConfig", policy)).SerializeToString())
        observation = {"timestamp": 0.0, "timestep": 0, "observation": seen, "must_go": True}
        return struct.pack("<I", len(setup)) + setup + _pickled("TimedObservation", observation)

    async def ask(self, frame: bytes) -> int:
        """Send the setup if it changed, then the observation, and wait for the actions."""
        (length,) = struct.unpack_from("<I", frame)
        setup, data = frame[4 : 4 + length], frame[4 + length :]
        if setup != self._set:
            await self._call("SendPolicyInstructions", setup)
            self._set = setup
        await self._call("SendObservations", _parts(data))
        answer = messages.Pickle.FromString(await self._call("GetActions", b"")).data
        steps = [opcode.name for opcode, _, _ in pickletools.genops(answer)] if answer else []
        count = steps.count("NEWOBJ") or steps.count("TUPLE3")  # opcodes of LeRobot's own servers, or of ours
        if not count:
            raise BadAnswer("no actions came for the observation")
        return 0


def _pickled(name: str, fields: Mapping[str, Any]) -> bytes:
    """The pickle of an object of LeRobot's class `name` with these fields."""
    state = pickle.dumps(dict(fields), 3)
    return b"\x80\x03c" + f"{_HELPERS}\n{name}\n".encode() + b")\x81" + state[2:-1] + b"b."


def _parts(data: bytes) -> list[bytes]:
    found = []
    for at in range(0, len(data), _SIZE):
        state = _END if at + _SIZE >= len(data) else _BEGIN if at == 0 else _MIDDLE
        part = messages.ObservationPart(transfer_state=state, data=data[at : at + _SIZE])
        found.append(bytes(part.SerializeToString()))
    return found
