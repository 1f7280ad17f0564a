"""openpi's websocket: the metadata first, then an answer for each observation. One socket is one robot.

An error is a text frame with our JSON; stock clients raise it and may go on. `{"batch": [...]}` has many observations,
each answered or refused by itself. docs/wires.md lists what a caller may send. Frames are msgpack. Arrays of an answer
have the form of those in the request: openpi's own (see `common.array_of_map`) or msgpack-numpy's; openpi's if the
request has both. Their keys are bytes, which stock clients need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.policy.episodes import Lru
from reflex_runtime.robots.serving.handler import Asked, RequestHandler
from reflex_runtime.robots.serving.question import MAX_ROWS, OPENPI, ActAnswer, Question, text_of
from reflex_runtime.robots.wires.common import (
    Episodes,
    Frame,
    MessageSession,
    answer_details,
    array_of_map,
    limits_in,
    limits_of,
    packer,
    question_of,
    socket_route,
    unpack,
)
from reflex_runtime.web.errors import PLAIN, ClientError, Reported, describe_error
from reflex_runtime.web.fields import invalid_input
from reflex_runtime.web.request import Route, SocketMessage, WebSocket

# -- frames ------------------------------------------------------------------------------------------------------------


def decode(frame: bytes) -> dict[str, Any]:
    """The map in a frame, arrays as read-only views of it; ClientError when there is none."""
    return decode_form(frame)[0]


def decode_form(frame: bytes) -> tuple[dict[str, Any], bool]:
    """The map in a frame, and whether all its arrays have the form of msgpack-numpy."""
    forms: set[bool] = set()

    def array(found: dict[str, Any]) -> Any:
        value = array_of_map(found)
        if value is not found:
            forms.add("nd" in found)
        return value

    value = unpack(frame, array)
    if not isinstance(value, dict):
        raise ClientError("the frame must be a map (an observation)")
    return value, forms == {True}


def encode(value: Any, packaged: bool = False) -> bytes:
    """The frame of a value. packaged: with arrays in the form of msgpack-numpy."""
    return (_packaged if packaged else _plain)(value)


_plain = packer(lambda a: {b"__ndarray__": True, b"data": a.tobytes(), b"dtype": a.dtype.str, b"shape": a.shape})
_packaged = packer(lambda a: {b"nd": True, b"type": a.dtype.str, b"kind": b"", b"shape": a.shape, b"data": a.tobytes()})


# -- the websocket -----------------------------------------------------------------------------------------------------


PATHS: Final = ("/", "/openpi/policy", "/v1/realtime/robot/openpi")
MAX_EPISODES: Final = 4 * MAX_ROWS  # kept of one socket
RESET: Final = "reset successful"  # RoboArena's answer to reset: the only text frame that is not an error


def routes(handler: RequestHandler) -> list[Route]:
    return [socket_route(path, OpenpiSession, handler) for path in PATHS]


class OpenpiSession(MessageSession):
    """One websocket, and the episodes of its robots. Clients wait for the metadata without a time limit."""

    first = True

    def __init__(self, handler: RequestHandler, socket: WebSocket) -> None:
        super().__init__(OPENPI, handler, socket)
        self._packaged = False  # form of arrays in the next answer
        self._episodes: Lru[str, Episodes] = Lru(MAX_EPISODES)  # by the suffix of a robot's name
        self._spent: float | None = None  # milliseconds that the last answer took

    def read(self, frame: bytes) -> dict[str, Any]:
        sent, self._packaged = decode_form(frame)
        return sent

    def hello(self) -> bytes:
        """The metadata."""
        reading = self.handler.reading(OPENPI)
        if reading.wire.dialect == "roboarena":
            return encode(dict(reading.wire.metadata))
        spec = self.handler.served.spec
        own = {
            "model_id": spec.model_id,
            "model_hash": spec.model_hash,
            "actions": [spec.chunk_size, spec.action_dim],
            **reading.describe(),
        }
        return encode({**reading.wire.metadata, "reflex": own})

    async def take(self, message: SocketMessage, sent: dict[str, Any]) -> Frame:
        endpoint = text_of(sent.get("endpoint", "infer"))
        if not isinstance(endpoint, str) or endpoint not in ("infer", "reset"):
            raise invalid_input("endpoint", "must be infer or reset")
        if endpoint == "reset":
            for episodes in self._episodes.values():
                episodes.reset()
            return RESET
        apart = "batch" in sent
        seen = _batch_of(sent) if apart else self.handler.reading(OPENPI).split(sent)
        if seen is None:
            answer = await self.infer(message, partial(self._question, sent, ""))
            return encode(self._told(answer), self._packaged)
        questions = [partial(self._question, one, f"/{part}") for part, one in seen.items()]
        if apart:
            return encode({"batch": await self._each(message, questions)}, self._packaged)
        answers = await self.handler.infer_all(self.pending(message), questions, message.received)
        actions = np.stack([answer.actions for answer in answers])
        told = {"actions": actions, **self._timing(answers), "reflex": [answer_details(answer) for answer in answers]}
        return encode(told, self._packaged)

    def error(self, error: ReflexError, request_id: str) -> str:
        return PLAIN(error, request_id, False).body.decode()

    async def _each(self, message: SocketMessage, questions: Sequence[Asked]) -> list[dict[str, Any]]:
        """The answer or the error of each observation of a batch."""
        rows, received = self.pending(message).rows(len(questions)), message.received
        asked = [self.handler.infer_row(rows[row], row, question, received) for row, question in enumerate(questions)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [self._told(one) if isinstance(one, ActAnswer) else _error_in(one) for one in found]

    def _question(self, observation: Any, part: str) -> Question:
        """The question of one observation. part: suffix of the robot's name, if a message has several."""
        if not isinstance(observation, dict):
            raise ClientError("an observation must be a map")
        limits = limits_in(observation)
        for name in ("episode_id", "session_id"):
            if name in observation and limits.episode_id is None:
                limits.episode_id = limits_of({"episode_id": text_of(observation[name])}).episode_id
        observed = self.handler.reading(OPENPI).read(observation)
        own = (self.said.episode_id or f"ws-{self.socket.id}") + part
        episodes = self._episodes.use(part, partial(Episodes, own))
        reset = observation.get("reset")
        if not isinstance(reset, bool | None):
            raise invalid_input("reset", "must be true or false")
        if reset:
            episodes.reset()
        episode = episodes.of(limits.episode_id, observed[2])
        return question_of(observed, limits, self.robot + part, episode, self.said)

    def _told(self, answer: ActAnswer) -> dict[str, Any]:
        return {"actions": answer.actions, **self._timing([answer]), **answer_details(answer)}

    def _timing(self, answers: Sequence[ActAnswer]) -> dict[str, Any]:
        timing = {"infer_ms": max(answer.timing.total_ms for answer in answers)}
        if self._spent is not None:
            timing["prev_total_ms"] = self._spent
        self._spent = max(answer.timing.age_ms for answer in answers)
        spent = max(answer.timing.batch_ms for answer in answers)
        return {"policy_timing": {"infer_ms": spent}, "server_timing": timing}


def _error_in(raised: BaseException) -> dict[str, Any]:
    """The part of an answer for an observation that failed."""
    if not isinstance(raised, Reported):
        raise raised
    return {"error": describe_error(raised.error, raised.request_id)}


def _batch_of(sent: dict[str, Any]) -> dict[str, Any]:
    batch = sent["batch"]
    if len(sent) > 1 or not isinstance(batch, list) or not 0 < len(batch) <= MAX_ROWS:
        raise ClientError(f"batch: must be a list of 1 to {MAX_ROWS} observations, without other keys beside it")
    return {str(row): observation for row, observation in enumerate(batch)}
