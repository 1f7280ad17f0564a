"""Clients of GR00T, written from what is known of their bytes, and what they see. One REQ socket each."""

from __future__ import annotations

import io
from typing import Any, Self

import msgpack
import numpy as np
import zmq

from serving.exports import expected
from serving.harness import PATIENCE, Server

PICTURE = np.full((6, 8, 3), 7, np.uint8)
BLOCK = {
    "images": {"image": "ego_view"},
    "state": [["arm", 1], ["gripper", 1]],
    "actions": [["arm", 1], ["gripper", 1]],
    "prompt": "annotation.human.task_description",
}


def nested(*rows: int, **more: Any) -> dict[str, Any]:
    """What N1.6 and N1.7 send of these robots."""
    return {
        "video": {"ego_view": np.stack([[PICTURE, PICTURE]] * len(rows))},
        "state": {
            "gripper": np.array([[[-0.1 * i]] for i in rows], np.float32),
            "arm": np.array([[[0.1 * i]] for i in rows], np.float32),
        },
        "language": {"task": [["open the door"]] * len(rows)},
    } | more


def want(i: int, seed: int) -> Any:
    return expected([0.1 * i, -0.1 * i], seed)


def as_npy(value: Any) -> Any:
    """N1.5 and N1.6."""
    if isinstance(value, (np.ndarray, np.generic)):
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return {"__ndarray_class__": True, "as_npy": file.getvalue()}
    raise TypeError(value)


def as_nd(value: Any) -> Any:
    """N1.7: msgpack-numpy."""
    if isinstance(value, np.ndarray):
        data = value.tobytes()
        return {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape, b"data": data}
    if isinstance(value, np.generic):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    raise TypeError(value)


def read(answer: bytes) -> Any:
    def made(found: dict[Any, Any]) -> Any:
        if "__ndarray_class__" in found:
            return np.load(io.BytesIO(found["as_npy"]), allow_pickle=False)
        return found

    return msgpack.unpackb(answer, object_hook=made)


class GrootRobot:
    """One client. write: how it sends arrays."""

    def __init__(self, port: int, write: Any = as_npy, token: str = "") -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1e3))
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self._write, self._token = write, token

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.destroy(linger=0)

    def send(self, endpoint: str | None = None, data: Any = None) -> None:
        sent = {} if endpoint is None else {"endpoint": endpoint}
        sent |= {} if data is None else {"data": data}
        sent |= {"api_token": self._token} if self._token else {}
        self.socket.send(msgpack.packb(sent, default=self._write))

    def answer(self) -> Any:
        return read(self.socket.recv())

    def call(self, endpoint: str | None = None, data: Any = None) -> Any:
        self.send(endpoint, data)
        return self.answer()

    def act(self, observation: dict[str, Any], **options: Any) -> Any:
        """As N1.6 and N1.7 ask."""
        return self.call("get_action", {"observation": observation, "options": options or None})

    def act_flat(self, observation: dict[str, Any]) -> Any:
        """As N1.5 asks."""
        return self.call("get_action", observation)

    def raw(self, *frames: bytes) -> Any:
        self.socket.send_multipart(frames)
        return self.answer()


def port_of(server: Server) -> int:
    """Where a server with --gr00t tcp://127.0.0.1:0 listens."""
    return int(server.wait_log("clients of GR00T: tcp://").rpartition(":")[2])
