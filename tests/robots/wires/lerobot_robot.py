"""LeRobot's client as far as bytes go: its classes under their own names, and its four calls over real gRPC.

As a program it runs with the real torch: `python lerobot_robot.py ADDRESS` drives a robot and prints what came.
"""

from __future__ import annotations

import json
import pickle
import struct
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

CHUNK = 2 * 1024 * 1024
HELPERS = "lerobot.async_inference.helpers"
_CLASSES = """
from dataclasses import dataclass, field
from typing import Any

@dataclass
class TimedData:
    timestamp: float
    timestep: int

@dataclass
class TimedAction(TimedData):
    action: Any

@dataclass
class TimedObservation(TimedData):
    observation: dict
    must_go: bool = False

@dataclass
class RemotePolicyConfig:
    policy_type: str
    pretrained_name_or_path: str
    lerobot_features: dict
    actions_per_chunk: int
    device: str = "cpu"
    rename_map: dict = field(default_factory=dict)
"""


def lerobot() -> Any:
    """Its module of messages, imported under its own name."""
    if HELPERS not in sys.modules:
        for name in ("lerobot", "lerobot.async_inference", HELPERS):
            sys.modules[name] = types.ModuleType(name)
        exec(_CLASSES, sys.modules[HELPERS].__dict__)
    return sys.modules[HELPERS]


def features(cameras: tuple[str, ...] = (), motors: tuple[str, ...] = ("shoulder.pos", "elbow.pos")) -> dict[str, Any]:
    """What its robots say of their observations."""
    found: dict[str, Any] = {"observation.state": {"dtype": "float32", "shape": (len(motors),), "names": list(motors)}}
    for camera in cameras:
        names = ["height", "width", "channels"]
        found[f"observation.images.{camera}"] = {"dtype": "image", "shape": (6, 8, 3), "names": names}
    return found


def message(data: bytes) -> bytes:
    """A message with `bytes data = 1`."""
    return b"" if not data else b"\x0a" + _varint(len(data)) + data


def data_of(sent: bytes) -> bytes:
    """That field of a message."""
    if not sent:
        return b""
    assert sent[0] == 0x0A
    at, shift, size = 1, 0, 0
    while True:
        size |= (sent[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if sent[at - 1] < 0x80:
            return sent[at : at + size]


def parts(data: bytes) -> Iterator[bytes]:
    """An observation in the parts that its client makes."""
    for at in range(0, len(data), CHUNK):
        state = 3 if at + CHUNK >= len(data) else 1 if at == 0 else 2
        part = data[at : at + CHUNK]
        yield b"\x08" + bytes([state]) + b"\x12" + _varint(len(part)) + part


def _varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found += struct.pack("B", value & 0x7F | 0x80)
        value >>= 7
    return found + struct.pack("B", value)


class Robot:
    """One client. key, name: sent with every call.

    Robots of a process share a connection, as LeRobot's do: only a name, or a connection of its own, tells them apart.
    """

    def __init__(self, address: str, key: str = "", name: str = "", own_connection: bool = False) -> None:
        self._channel = grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),) * own_connection)
        self._metadata = ((("authorization", f"Bearer {key}"),) if key else ()) + (
            (("x-reflex-robot", name),) if name else ()
        )

    def close(self) -> None:
        self._channel.close()

    def call(self, name: str, data: bytes = b"") -> bytes:
        method = self._channel.unary_unary(f"/transport.AsyncInference/{name}")
        return bytes(method(data, metadata=self._metadata, timeout=60))

    def begin(self, name: str, data: bytes = b"") -> Any:
        """The same without waiting for its end."""
        return self._channel.unary_unary(f"/transport.AsyncInference/{name}").future(data, metadata=self._metadata)

    def start(self, policy_type: str = "act", steps: int = 50, checkpoint: Any = "lab/checkpoint", **more: Any) -> None:
        """What it does first."""
        self.call("Ready")
        own = more.pop("features", features())
        setup = lerobot().RemotePolicyConfig(policy_type, checkpoint, own, steps, **more)
        self.call("SendPolicyInstructions", message(pickle.dumps(setup)))

    def see(self, state: list[float], timestep: int = 0, must_go: bool = False, **more: Any) -> None:
        """Send an observation. more: None leaves a name out."""
        seen = {"shoulder.pos": state[0], "elbow.pos": state[1], "task": "go"} | more
        seen = {name: value for name, value in seen.items() if value is not None}
        self.send(pickle.dumps(lerobot().TimedObservation(1000.0 + timestep, timestep, seen, must_go)))

    def send(self, data: bytes | Iterator[bytes]) -> None:
        method = self._channel.stream_unary("/transport.AsyncInference/SendObservations")
        method(data if isinstance(data, Iterator) else parts(data), metadata=self._metadata, timeout=60)

    def act(self) -> list[Any]:
        """The actions for it."""
        return load(self.call("GetActions"))


def load(answer: bytes) -> list[Any]:
    """TimedActions as its client loads them."""
    lerobot()
    data = data_of(answer)
    return pickle.loads(data) if data else []


def main(address: str) -> None:
    robot, chunks = Robot(address), []
    robot.start(features=features(("front",)), steps=2)
    stop, come = threading.Event(), threading.Semaphore(0)

    def receive() -> None:
        while not stop.is_set():
            actions = robot.act()
            if actions:
                chunks.append(actions)
                come.release()

    thread = threading.Thread(target=receive)
    thread.start()
    for step in range(3):
        robot.see([0.1 * step, 0.2], step, must_go=True, front=np.full((6, 8, 3), step, np.uint8))
        come.acquire()
    stop.set()
    thread.join()
    told = [[(a.timestamp, a.timestep, str(a.action.dtype), a.action.tolist()) for a in chunk] for chunk in chunks]
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
