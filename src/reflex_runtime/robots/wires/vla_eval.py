"""vla-eval's websocket: a benchmark sends a hello, begins an episode, and gets one action for each observation.

The policy answers with chunks. A session keeps the rest of the last chunk and answers the next observations with it; a
new episode drops it. docs/wires.md lists what a benchmark may send. Frames are msgpack maps
{type, payload, seq, timestamp}, with arrays and pictures in the forms of `common.array_of_map`.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Any, Final

import msgspec

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.serving.handler import RequestHandler
from reflex_runtime.robots.serving.question import PROMPTS, VLA_EVAL, Question, text_of
from reflex_runtime.robots.wires.common import MessageSession, limits_in, packer, question_of, socket_route, unpack
from reflex_runtime.version import __version__
from reflex_runtime.web.errors import ClientError, describe_error
from reflex_runtime.web.fields import check_id, printable
from reflex_runtime.web.request import Route, SocketMessage, WebSocket

# -- frames ------------------------------------------------------------------------------------------------------------


class EvalMessage(msgspec.Struct, frozen=True):
    """One message. seq: the sender's number of it, which the answer repeats."""

    type: str
    payload: dict[str, Any]
    seq: int


def decode(frame: bytes) -> EvalMessage:
    """The message in a frame, with arrays as views of the frame; ClientError if it is wrong. Pictures stay encoded."""
    try:
        return msgspec.convert(unpack(frame), EvalMessage)
    except msgspec.ValidationError as error:
        raise ClientError(printable(f"the frame must be a map with type, payload and seq: {error}")) from None
    except AttributeError:  # msgspec raises it for an array in the place of a map
        raise ClientError("the frame must be a map with type, payload and seq: found an array for a map") from None


def encode(message: EvalMessage) -> bytes:
    """A frame."""
    value = {"type": message.type, "payload": message.payload, "seq": message.seq, "timestamp": time.time()}
    return _packed(value)


_packed = packer(lambda a: {"__ndarray__": True, "data": a.tobytes(), "dtype": a.dtype.str, "shape": a.shape})


# -- the websocket -----------------------------------------------------------------------------------------------------


PATH: Final = "/vla-eval"
PROTOCOL: Final = 1
PLACES: Final = ("reflex/episode_id", "reflex/robot_id")
TYPES: Final = ("hello", "episode_start", "observation", "episode_end", "error")


def routes(handler: RequestHandler) -> list[Route]:
    return [socket_route(PATH, VlaEvalSession, handler)]


class VlaEvalSession(MessageSession):
    """One websocket: its episode, and the remaining actions of the last chunk."""

    def __init__(self, handler: RequestHandler, socket: WebSocket) -> None:
        super().__init__(VLA_EVAL, handler, socket)
        self._own = self._episode = self.said.episode_id or f"ws-{socket.id}"
        self._asked_as = self.robot  # the robot of the last observation
        self._episodes = 0
        self._left: deque[Any] = deque()  # actions of the last chunk
        self._executed: int | None = None  # actions of the episode's last chunk that were sent
        self._told: tuple[Any, ...] = ()  # texts and ids of the observation that the last chunk was made for
        self._seq = self._hello = 0  # numbers of the present message and of the hello

    def read(self, frame: bytes) -> EvalMessage:
        self._seq = 0
        sent = decode(frame)
        self._seq = sent.seq
        return sent

    async def take(self, message: SocketMessage, sent: EvalMessage) -> bytes | None:
        if sent.type not in TYPES:
            raise ClientError(printable(f"type {sent.type[:40]!r}: must be one of {', '.join(TYPES)}"))
        if sent.type == "observation":
            return await self._observed(message, sent.payload)
        if sent.type == "hello":
            self._hello = sent.seq
            return await self.greet()
        if sent.type == "episode_start":
            self._begin(sent.payload)
        elif sent.type == "episode_end":
            self.report(self._episode, sent.payload, self._asked_as)
        return None

    def hello(self) -> bytes:
        spec = self.handler.served.spec
        wanted = {"send_state": spec.takes_state, "send_wrist_image": len(spec.images) > 1}
        told = {
            "observation_params": {name: True for name, wants in wanted.items() if wants},
            **self.handler.reading(VLA_EVAL).wire.metadata,
            "harness_version": f"reflex {__version__}",
            "protocol_version": PROTOCOL,
            "model_server": spec.model_id,
            "capabilities": {},
        }
        return encode(EvalMessage("hello", told, self._hello))

    def error(self, error: ReflexError, request_id: str) -> bytes:
        return encode(EvalMessage("error", describe_error(error, request_id), self._seq))

    def _begin(self, payload: dict[str, Any]) -> None:
        recording = payload.get("recording")
        named = recording.get("eid") if isinstance(recording, dict) else None
        self._left.clear()
        self._executed = None
        self._episodes += 1
        self._episode = f"{self._own}#{self._episodes}"
        if named is not None:
            if not isinstance(named, str):
                raise ClientError("recording.eid: must be a text")
            check_id("recording.eid", named)
            self._episode = named

    async def _observed(self, message: SocketMessage, observation: dict[str, Any]) -> bytes:
        texts = (text_of(observation.get(name)) for name in (*PROMPTS, *PLACES))
        told = tuple(text if isinstance(text, str) else None for text in texts)
        if self._left and told == self._told:
            return self._action()
        if self._executed is not None:
            self._executed -= len(self._left)
        self._left.clear()
        self._told = told
        answer = await self.infer(message, partial(self._question, observation))
        self._left.extend(answer.actions[: self.handler.reading(VLA_EVAL).wire.execute or answer.num_actions])
        self._executed = len(self._left)
        return self._action()

    def _question(self, observation: dict[str, Any]) -> Question:
        limits = limits_in(observation)
        if limits.executed is None:
            limits.executed = self._executed
        episode, self._asked_as = limits.episode_id or self._episode, limits.robot_id or self.robot
        return question_of(self.handler.reading(VLA_EVAL).read(observation), limits, self.robot, episode, self.said)

    def _action(self) -> bytes:
        return encode(EvalMessage("action", {"actions": self._left.popleft()}, self._seq))
