"""The wires over gRPC: OIP as Triton's client speaks it, and LeRobot's asynchronous inference."""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from bench.load.wires.expected import Expected, Observed
from bench.load.wires.oip import TYPES, OipCaller
from bench.load.wires.target import Target
from reflex_runtime.client.errors import BadAnswer, ClientError, NotFound, ServerError, TimedOut, Unreachable
from reflex_runtime.client.exchange import Reply, refused
from reflex_runtime.robots.wires.lerobot import SERVICE, sent_by_robot, shape_of
from reflex_runtime.web import messages

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
    """LeRobot: the setup, then each observation in one call and its actions in another."""

    config: ClassVar[str] = "lerobot"
    setting: ClassVar[str] = "lerobot"
    service: ClassVar[str] = SERVICE

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
        """The setup for this observation, and its parts."""
        return msgspec.msgpack.encode(sent_by_robot(observed, self._target.policy_type))

    async def ask(self, frame: bytes) -> int:
        """Send the setup if it changed, then the observation, and wait for the actions."""
        setup, parts = msgspec.msgpack.decode(frame)
        if setup != self._set:
            await self._call("SendPolicyInstructions", setup)
            self._set = setup
        await self._call("SendObservations", parts)
        try:
            shape = shape_of(await self._call("GetActions", b""))
        except ValueError as error:
            raise BadAnswer(str(error)) from None
        if not shape:
            raise BadAnswer("no actions came for the observation")
        return 0
