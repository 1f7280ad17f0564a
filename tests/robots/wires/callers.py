"""One caller for each wire, for `test_matrix`: it connects, asks for one robot, and is answered or refused.

To add a wire: a class here, and its name in `CALLERS`.
"""

from __future__ import annotations

import http.client
import json
import sys
import types
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any, ClassVar

import grpc
import json_numpy
import msgpack
import numpy as np
import pytest
from openpi_client import msgpack_numpy
from tritonclient.grpc import service_pb2, service_pb2_grpc
from vla_eval.protocol.messages import Message, MessageType, make_hello_payload, pack_message, unpack_message
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from serving.harness import PATIENCE, Server

from .groot_clients import GrootRobot, port_of
from .lerobot_robot import Robot, load


class Refused(Exception):
    """The answer was an error. code: ours, or that with which the connection was closed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


class Caller(ABC):
    """One connection.

    wire: as metrics name it. options: of the server that serves it. lacks: cells that the protocol has no such thing
    for, with the reason. names: what an error calls the state. ignores: names that the server does not know are no
    error. too_large: what a message over the limit is answered with. prompt: the instruction; None to send
    none.
    """

    wire: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    lacks: ClassVar[dict[str, str]] = {}
    names: ClassVar[str] = "state"
    ignores: ClassVar[bool] = False
    too_large: ClassVar[str] = "too_large"
    prompt: str | None = None

    def worded(self, name: str) -> dict[str, Any]:
        """The instruction under this name, if there is one."""
        return {} if self.prompt is None else {name: self.prompt}

    @abstractmethod
    def __init__(self, server: Server) -> None: ...

    @abstractmethod
    def send(self, state: list[float], **fields: Any) -> None:
        """Ask. fields: deadline_ms; `nonsense`, which nothing knows; `more`, bytes that make it large."""

    @abstractmethod
    def answer(self) -> Any:
        """The actions, [steps, joints]: some clients get the first step alone. Raises Refused."""

    @abstractmethod
    def leave(self) -> None: ...

    def reset(self) -> None:
        """Begin another episode."""
        raise NotImplementedError

    def ask(self, state: list[float], **fields: Any) -> Any:
        self.send(state, **fields)
        return self.answer()


class _Http(Caller):
    """A connection that stays. headers: of the request that is being written, beside the form of its body."""

    form = "application/json"
    path = "/act"

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        self._connection.connect()
        self._episode = 0
        self.headers: dict[str, str] = {}

    @abstractmethod
    def write(self, asked: dict[str, Any]) -> bytes: ...

    @abstractmethod
    def read(self, body: bytes) -> Any: ...

    def send(self, state: list[float], **fields: Any) -> None:
        more = {"episode_id": f"{self.wire} {self._episode}"} if self._episode else {}
        body = self.write({"state": state, **more, **fields})
        headers = {"Content-Type": self.form, "Accept": self.form}
        self._connection.request("POST", self.path, body, headers | self.headers)

    def answer(self) -> Any:
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise self.refused(body)
        return self.read(body)

    def refused(self, body: bytes) -> Refused:
        error = msgpack.unpackb(body) if self.form.endswith("msgpack") else json.loads(body)
        return Refused(error["error"], error["message"])

    def leave(self) -> None:
        self._connection.close()

    def reset(self) -> None:
        self._episode += 1


class ActJson(_Http):
    wire = "act"
    prompt = "go"

    def write(self, asked: dict[str, Any]) -> bytes:
        asked |= {name: text + asked.pop("more", b"").decode() for name, text in self.worded("instruction").items()}
        return json.dumps(asked).encode()

    def read(self, body: bytes) -> Any:
        return np.array(json.loads(body)["actions"])


class ActMsgpack(_Http):
    wire = "act"
    form = "application/msgpack"

    def write(self, asked: dict[str, Any]) -> bytes:
        more = {"image": asked.pop("more")} if "more" in asked else {}
        return bytes(msgpack.packb(asked | more | self.worded("instruction")))

    def read(self, body: bytes) -> Any:
        array = msgpack.unpackb(body)["actions"]
        return np.frombuffer(array["data"], array["dtype"]).reshape(array["shape"])


class JsonNumpyCaller(_Http):
    """As OpenVLA-OFT's robots: all actions of the chunk."""

    wire = "json-numpy"
    ignores = True
    prompt = "go"

    def write(self, asked: dict[str, Any]) -> bytes:
        asked["state"] = np.array(asked["state"])
        asked |= {name: text + asked.pop("more", b"").decode() for name, text in self.worded("instruction").items()}
        return bytes(json_numpy.dumps({"full_image": np.zeros((2, 2, 3), np.uint8)} | asked).encode())

    def read(self, body: bytes) -> Any:
        return np.stack(json_numpy.loads(body))


class _Socket(Caller):
    """A websocket."""

    too_large = "1009"
    path = "/"

    def __init__(self, server: Server) -> None:
        self._stack = ExitStack()
        url = f"ws://127.0.0.1:{server.port}{self.path}"
        self._socket: ClientConnection = self._stack.enter_context(connect(url, compression=None, max_size=None))

    def _receive(self) -> bytes | str:
        try:
            return self._socket.recv(PATIENCE)
        except ConnectionClosed as closed:
            code = "" if closed.rcvd is None else str(closed.rcvd.code)
            raise Refused(code, str(closed)) from None

    def leave(self) -> None:
        self._stack.close()


class Openpi(_Socket):
    wire = "openpi"
    prompt = "go"

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._socket.recv(PATIENCE)
        self._resets = False

    def send(self, state: list[float], **fields: Any) -> None:
        more = {"more": fields.pop("more", b""), "reset": self._resets}
        own = {f"reflex/{name}": value for name, value in fields.items()}
        self._resets = False
        seen = {"observation/state": np.array(state)} | self.worded("prompt")
        self._socket.send(msgpack_numpy.packb(seen | more | own))

    def answer(self) -> Any:
        answer = self._receive()
        if isinstance(answer, str):
            error = json.loads(answer)
            raise Refused(error["error"], error["message"])
        return msgpack_numpy.unpackb(answer)["actions"]

    def reset(self) -> None:
        self._resets = True


class VlaEval(_Socket):
    """One step of the chunk for each observation; the export says that no more are executed."""

    wire = "vla-eval"
    path = "/vla-eval"
    prompt = "go"

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._seq = 0
        self._say(MessageType.HELLO, make_hello_payload())
        assert self._hear().type is MessageType.HELLO
        self.reset()

    def _say(self, kind: MessageType, payload: dict[str, Any]) -> None:
        self._seq += 1
        self._socket.send(pack_message(Message(kind, payload, self._seq)))

    def _hear(self) -> Message:
        data = self._receive()
        assert isinstance(data, bytes)
        return unpack_message(data)

    def send(self, state: list[float], **fields: Any) -> None:
        more = {"more": fields.pop("more", b"")}
        own = {f"reflex/{name}": value for name, value in fields.items()}
        seen = {"states": np.array(state)} | self.worded("task_description")
        self._say(MessageType.OBSERVATION, seen | more | own)

    def answer(self) -> Any:
        message = self._hear()
        if message.type is MessageType.ERROR:
            raise Refused(message.payload["error"], message.payload["message"])
        return message.payload["actions"][None]

    def reset(self) -> None:
        self._say(MessageType.EPISODE_START, {"task": {"name": "t"}})


LONG = {"deadline_ms": 60_000.0}  # GR00T's own default is 15 s: sixteen clients of a busy machine may take longer


class Groot(Caller):
    """As clients of N1.6."""

    wire = "gr00t"
    options = ("--gr00t", "tcp://127.0.0.1:0")
    lacks: ClassVar = dict.fromkeys(("leaves queued", "leaves running"), "ZeroMQ does not say that a client has left")

    def __init__(self, server: Server) -> None:
        self._robot = GrootRobot(port_of(server))

    def send(self, state: list[float], **fields: Any) -> None:
        seen: dict[str, Any] = {"state": {"all": np.array([[state]])}, "more": {"x": fields.pop("more", b"")}}
        if self.prompt is not None:
            seen["language"] = {"task": [[self.prompt]]}
        self._robot.send("get_action", {"observation": seen, "options": LONG | fields})

    def answer(self) -> Any:
        answer = self._robot.answer()
        if isinstance(answer, dict):
            raise Refused(answer["code"], answer["error"])
        return answer[0]["actions"][0]

    def leave(self) -> None:
        self._robot.__exit__()

    def reset(self) -> None:
        self._robot.call("reset", {"options": None})


class OipHttp(_Http):
    """As the client of Triton: tensors as bytes behind the JSON."""

    wire = "oip"
    path = "/v2/models/tiny/infer"

    def write(self, asked: dict[str, Any]) -> bytes:
        values, more = np.array(asked["state"], "<f4"), asked.get("more", b"")
        size = {"binary_data_size": values.nbytes}
        inputs = [{"name": "state", "datatype": "FP32", "shape": [1, len(values)], "parameters": size}]
        if "nonsense" in asked:
            inputs.append({"name": "nonsense", "datatype": "FP32", "shape": [1, 1], "data": [asked["nonsense"]]})
        if self.prompt is not None:
            inputs.append({"name": "instruction", "datatype": "BYTES", "shape": [1, 1], "data": [self.prompt]})
        parameters = {"sequence_id": 5, "sequence_start": self._starts}
        self._starts = False
        if "deadline_ms" in asked:
            parameters["timeout"] = 1000 * asked["deadline_ms"]
        head = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
        self.headers = {"Inference-Header-Content-Length": str(len(head))}
        return head + values.tobytes() + more

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._starts = False

    def read(self, body: bytes) -> Any:
        (output,) = json.loads(body)["outputs"]
        return np.reshape(output["data"], output["shape"])[0]

    def refused(self, body: bytes) -> Refused:
        error = json.loads(body)
        return Refused(error["code"], error["error"])

    def reset(self) -> None:
        self._starts = True


def refused_by_grpc(error: Any) -> Refused:
    told = dict(error.trailing_metadata()).get("reflex-error")
    if told is None:  # gRPC's own answer
        return Refused(error.code().name, error.details())
    found = json.loads(told)
    return Refused(found["error"], found["message"])


class OipGrpc(Caller):
    wire = "oip"
    options = ("--oip-grpc", "127.0.0.1:0")
    too_large = "RESOURCE_EXHAUSTED"

    def __init__(self, server: Server) -> None:
        address = server.wait_log("clients of OIP over gRPC: ").rpartition(" ")[2]
        self._channel = grpc.insecure_channel(address)
        self._infer = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelInfer
        self._waiting: Any = None
        self._starts = False

    def send(self, state: list[float], **fields: Any) -> None:
        sent = service_pb2.ModelInferRequest(model_name="tiny")
        sent.inputs.add(name="state", datatype="FP32", shape=[1, len(state)])
        sent.raw_input_contents.append(np.array(state, "<f4").tobytes())
        texts = {name: fields[name] if name == "more" else b"1" for name in {"nonsense", "more"} & set(fields)}
        texts |= {name: text.encode() for name, text in self.worded("instruction").items()}
        for name, data in texts.items():
            sent.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
            sent.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
        if "deadline_ms" in fields:
            sent.parameters["timeout"].int64_param = 1000 * fields["deadline_ms"]
        sent.parameters["sequence_id"].int64_param = 6
        sent.parameters["sequence_start"].bool_param = self._starts
        self._starts = False
        self._waiting = self._infer.future(sent)

    def answer(self) -> Any:
        try:
            found = self._waiting.result(PATIENCE)
        except grpc.RpcError as error:
            raise refused_by_grpc(error) from None
        return np.frombuffer(found.raw_output_contents[0], "<f4").reshape(found.outputs[0].shape)[0]

    def leave(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._channel.close()

    def reset(self) -> None:
        self._starts = True


class Lerobot(Caller):
    """The asynchronous client: observations and actions are calls of their own."""

    wire = "lerobot"
    options = ("--lerobot", "127.0.0.1:0")
    lacks: ClassVar = dict.fromkeys(("expired", "shed"), "it has no field for a deadline: --deadline-ms holds")
    ignores = True
    too_large = "RESOURCE_EXHAUSTED"
    names = "elbow.pos"
    prompt = "go"

    def __init__(self, server: Server) -> None:
        self._robot = Robot(server.wait_log("clients of LeRobot: ").rpartition(" ")[2], name=f"robot-{id(self)}")
        self._robot.start()
        self._step = 0
        self._waiting: Any = None

    def send(self, state: list[float], **fields: Any) -> None:
        self._step += 1
        more = {"elbow.pos": np.array(state[1:])} if len(state) > 2 else {}
        try:
            self._robot.see(state, self._step, task=self.prompt, **fields, **more)
        except grpc.RpcError as error:
            raise refused_by_grpc(error) from None
        self._waiting = self._robot.begin("GetActions")

    def answer(self) -> Any:
        torch = types.ModuleType("torch")
        torch.tensor = lambda values: np.array(values, np.float32)  # type: ignore[attr-defined]
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(sys.modules, "torch", torch)
                return np.stack([step.action for step in load(self._waiting.result(PATIENCE))])
        except grpc.RpcError as error:
            raise refused_by_grpc(error) from None

    def leave(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._robot.close()

    def reset(self) -> None:
        self._robot.call("Ready")


CALLERS: dict[str, type[Caller]] = {
    "/act JSON": ActJson,
    "/act msgpack": ActMsgpack,
    "json-numpy": JsonNumpyCaller,
    "openpi": Openpi,
    "vla-eval": VlaEval,
    "GR00T": Groot,
    "OIP HTTP": OipHttp,
    "OIP gRPC": OipGrpc,
    "LeRobot": Lerobot,
}
