"""The stock clients as one kind of thing, for `test_stock_clients`: observations go in, the actions for each come out.

openpi-client, json-numpy, tritonclient and vla-eval are the packages themselves. GR00T's and LeRobot's are their bytes,
by `groot_clients` and `lerobot_robot`: neither installs here. `tests/lerobot` drives LeRobot's own.
"""

from __future__ import annotations

import asyncio
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import gevent
import grpc
import json_numpy
import numpy as np
import PIL.Image
import requests
import tritonclient.grpc
import tritonclient.http
import zmq
from geventhttpclient.response import HTTPConnectionClosed
from numpy.typing import NDArray
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from vla_eval.connection import Connection
from websockets.exceptions import WebSocketException

from serving.harness import PATIENCE

from .groot_clients import GrootRobot, as_nd, as_npy
from .lerobot_robot import Robot, features

GIVES_UP = 2.0  # seconds until clients that can take an answer for lost


class Lost(Exception):
    """The connection ended, or no answer came; the client may ask anew."""


class Refused(Exception):
    """The server said no."""

    def __init__(self, error: Any) -> None:
        super().__init__(str(error))
        self.retry_safe = bool(error["retry_safe"])


@dataclass(frozen=True)
class Seen:
    """An observation. picture: of one brightness; sides: its height and width."""

    state: tuple[float, float, float]
    grey: int
    sides: tuple[int, int]
    text: str

    @property
    def picture(self) -> NDArray[np.uint8]:
        return np.full((*self.sides, 3), self.grey, np.uint8)

    @property
    def png(self) -> bytes:
        file = io.BytesIO()
        PIL.Image.fromarray(self.picture).save(file, "PNG")
        return file.getvalue()

    @property
    def action(self) -> list[float]:
        """What `echo_policy` answers."""
        return [*self.state, self.grey, len(self.text)]


@dataclass
class Doors:
    """Where a server listens: HOST:PORT each."""

    http: str
    groot: str
    oip: str
    lerobot: str


class Client(ABC):
    """One client. rows: observations that a message may hold. one_size: of all pictures in a message. lost: what it
    raises when a connection ends."""

    rows: ClassVar[int] = 1
    one_size: ClassVar[bool] = False
    lost: ClassVar[tuple[type[BaseException], ...]] = (OSError, EOFError)

    def __init__(self, doors: Doors) -> None:
        self.doors = doors
        self.asked = 0
        with self.losing():
            self.open()

    def ask(self, seen: Sequence[Seen]) -> list[Any]:
        """The actions for each, [steps, 5] or [5]. Lost or Refused."""
        self.asked += 1
        with self.losing():
            return self.act(seen)

    def losing(self) -> Any:
        return _Losing(self.lost)

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def act(self, seen: Sequence[Seen]) -> list[Any]: ...

    @abstractmethod
    def close(self) -> None: ...

    @property
    def turn(self) -> int:
        """Which of its forms it uses next."""
        return self.asked


class _Losing:
    """What a client raises when its connection ends becomes Lost."""

    def __init__(self, lost: tuple[type[BaseException], ...]) -> None:
        self._lost = lost

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, self._lost) and not isinstance(error, Refused):
            raise Lost(f"{type(error).__name__}: {error}") from error


class Openpi(Client):
    """One observation, or several in `batch` or with a leading axis; pictures as arrays, CHW, floats, or PNG."""

    rows = 3
    lost = (OSError, EOFError, WebSocketException)

    def open(self) -> None:
        self._policy = WebsocketClientPolicy(f"ws://{self.doors.http}")

    def act(self, seen: Sequence[Seen]) -> list[Any]:
        rows = [self._observation(one) for one in seen]
        try:
            if len(rows) == 1:
                return [self._policy.infer(rows[0])["actions"]]
            if self.turn % 2 and len({one.sides for one in seen}) == 1:
                pictures, states = np.stack([one.picture for one in seen]), np.float32([one.state for one in seen])
                axis = {
                    "observation/front": pictures,
                    "observation/state": states,
                    "prompt": [one.text for one in seen],
                }
                return list(self._policy.infer(axis)["actions"])
            answers = self._policy.infer({"batch": rows})["batch"]
        except RuntimeError as error:
            raise Refused(json.loads(str(error).partition("\n")[2])) from None
        for one in answers:
            if "error" in one:
                raise Refused(one["error"])
        return [one["actions"] for one in answers]

    def _observation(self, seen: Seen) -> dict[str, Any]:
        picture = seen.picture
        forms = (picture, picture.transpose(2, 0, 1), np.float32(picture) / 255, seen.png)
        kind = (np.float32, np.float64, list)[self.turn % 3]
        return {
            "observation/front": forms[self.turn % 4],
            "observation/state": kind(seen.state),
            "prompt": seen.text,
        }

    def close(self) -> None:
        self._policy._ws.close()


class JsonNumpy(Client):
    """As OpenVLA's robots, and OFT's; as JSON, or JSON in JSON; several with a leading axis."""

    rows = 3
    one_size = True
    lost = (OSError, requests.RequestException)

    def open(self) -> None:
        self._session = requests.Session()
        self._session.trust_env = False

    def act(self, seen: Sequence[Seen]) -> list[Any]:
        every = self.turn % 2
        pictures, states = np.stack([one.picture for one in seen]), np.array([one.state for one in seen])
        texts = [one.text for one in seen]
        if len(seen) == 1:
            (pictures,), (states,), (texts,) = pictures, states, texts
        picture = "full_image" if every else "image"
        said = json_numpy.dumps({picture: pictures, "state": states, "instruction": texts})
        quoted = self.turn % 3 == 0
        body = json.dumps({"encoded": said}) if quoted else said
        answer = self._session.post(
            f"http://{self.doors.http}/act", body, headers={"Content-Type": "application/json"}, timeout=GIVES_UP
        )
        if answer.status_code != 200:
            raise Refused(answer.json())
        text = json.loads(answer.text) if quoted else answer.text
        actions = np.asarray(json_numpy.loads(text))
        return [actions] if len(seen) == 1 else list(actions.swapaxes(0, 1) if every else actions)

    def close(self) -> None:
        self._session.close()


class Triton(Client):
    """Rows in one call; pictures as tensors or PNG."""

    rows = 4
    kind: ClassVar[Any]

    def act(self, seen: Sequence[Seen]) -> list[Any]:
        same = len({one.sides for one in seen}) == 1 and self.turn % 2
        pictures = np.stack([one.picture for one in seen]) if same else _texts([one.png for one in seen])
        states = np.float32([one.state for one in seen])
        texts = _texts([one.text.encode() for one in seen])
        named = (("front", pictures), ("state", states), ("instruction", texts))
        inputs = []
        for name, values in named:
            tensor = self.kind.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
            tensor.set_data_from_numpy(values)
            inputs.append(tensor)
        return list(self.infer(inputs).as_numpy("actions"))

    @abstractmethod
    def infer(self, inputs: Any) -> Any: ...


def _texts(values: Sequence[bytes]) -> NDArray[Any]:
    return np.array(values, object)[:, None]


class TritonHttp(Triton):
    kind = tritonclient.http
    lost = (OSError, EOFError, gevent.Timeout, HTTPConnectionClosed)

    def open(self) -> None:
        self._client = self.kind.InferenceServerClient(self.doors.http, network_timeout=GIVES_UP)

    def infer(self, inputs: Any) -> Any:
        try:
            return self._client.infer("echo", inputs)
        except InferenceServerException as error:
            if error.status() is None:
                raise ConnectionError(str(error)) from None
            raise Refused({"retry_safe": error.status() == "503", "message": str(error)}) from None

    def close(self) -> None:
        self._client.close()


class TritonGrpc(Triton):
    kind = tritonclient.grpc

    def open(self) -> None:
        self._client = self.kind.InferenceServerClient(self.doors.oip)

    def infer(self, inputs: Any) -> Any:
        try:
            return self._client.infer("echo", inputs, client_timeout=GIVES_UP)
        except InferenceServerException as error:
            if error.status() in {"StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED", "StatusCode.CANCELLED"}:
                raise ConnectionError(str(error)) from None
            raise

    def close(self) -> None:
        self._client.close()


class VlaEval(Client):
    """Connects again by itself. Its next episode begins where its last connection ended."""

    lost = (OSError, EOFError, WebSocketException, TimeoutError)

    def open(self) -> None:
        self._loop = asyncio.new_event_loop()
        url = f"ws://{self.doors.http}/vla-eval"
        self._connection = Connection(url, timeout=PATIENCE, max_retries=2, backoff_base=0.01)
        try:
            self._do(self._connection.connect())
            self._do(self._connection.start_episode({"task": {"name": "t"}}))
        except BaseException:
            self.close()
            raise

    def _do(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def act(self, seen: Sequence[Seen]) -> list[Any]:
        (one,) = seen
        said = {"images": {"front": one.picture}, "states": np.array(one.state), "task_description": one.text}
        if self.turn % 5 == 0:
            self._do(self._connection.end_episode({"metrics": {"success": True}}))
            self._do(self._connection.start_episode({"task": {"name": "t"}}))
        try:
            return [self._do(self._connection.act(said))["actions"]]
        except RuntimeError as error:
            found = str(error)
            raise Refused({"retry_safe": "'retry_safe': True" in found, "message": found}) from None

    def close(self) -> None:
        try:
            self._do(self._connection.close())
        finally:
            self._loop.close()


class Groot(Client):
    """As N1.5, N1.6 and N1.7: rows and steps; it gives up a socket whose answer does not come, as theirs do."""

    rows = 4
    one_size = True
    lost = (zmq.ZMQError,)

    def open(self) -> None:
        write = (as_npy, as_nd)[id(self) // 64 % 2]
        self._robot = GrootRobot(int(self.doors.groot.rpartition(":")[2]), write)
        self._robot.socket.setsockopt(zmq.RCVTIMEO, int(1e3 * GIVES_UP))

    def act(self, seen: Sequence[Seen]) -> list[Any]:
        steps = self.turn % 2 + 1
        if len(seen) == 1 and self.turn % 3 == 0:
            (one,) = seen
            told = self._robot.act_flat(
                {
                    "video.front": np.stack([one.picture] * steps),
                    "state.all": np.float32([one.state] * steps),
                    "annotation.human.task_description": [one.text],
                }
            )
            return [self._said(told)["action.actions" if "action.actions" in told else "actions"]]
        answer = self._robot.act(
            {
                "video": {"front": np.stack([[one.picture] * steps for one in seen])},
                "state": {"all": np.float32([[one.state] * steps for one in seen])},
                "language": {"task": [[one.text] for one in seen]},
            }
        )
        return list(self._said(answer)[0]["actions"])

    @staticmethod
    def _said(answer: Any) -> Any:
        if isinstance(answer, dict) and "error" in answer:
            raise Refused(answer)
        return answer

    def close(self) -> None:
        self._robot.__exit__()


class Lerobot(Client):
    """The client itself stays whatever happens to its connection, and sends no instructions again."""

    lost = (grpc.RpcError,)

    def open(self) -> None:
        self._robot = Robot(self.doors.lerobot, own_connection=True)
        self._robot.start(
            features=features(("front",), tuple(f"{name}.pos" for name in ("shoulder", "elbow", "wrist")))
        )

    def act(self, seen: Sequence[Seen]) -> list[Any]:
        (one,) = seen
        try:
            self._robot.see(
                list(one.state), self.asked, **{"wrist.pos": one.state[2]}, front=one.picture, task=one.text
            )
            actions = self._robot.act()
        except grpc.RpcError as error:
            said = dict(error.trailing_metadata() or ()).get("reflex-error")  # type: ignore[attr-defined]
            if said is not None:
                raise Refused(json.loads(said)) from None
            raise
        if not actions:
            raise Lost("the observation went with its connection")
        assert actions[0].timestep == self.asked
        return [np.stack([action.action.numpy() for action in actions])]

    def close(self) -> None:
        with suppress(grpc.RpcError):
            self._robot.close()


KINDS = (Openpi, JsonNumpy, TritonHttp, TritonGrpc, VlaEval, Groot, Lerobot)
