"""openpi's websocket: the metadata first, then an answer for each observation. One socket is one robot.

An error is a text frame with our JSON; stock clients raise it and may go on. An observation `{"batch": [...]}` is as
many requests, each with its own answer or error. docs/wires.md has what a caller may send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.policies.serving.handler import RequestHandler
from reflex_runtime.policies.serving.pending import PendingRequest
from reflex_runtime.policies.serving.question import ActAnswer, Question
from reflex_runtime.policies.serving.wire_names import OPENPI
from reflex_runtime.policies.wires.limits import limits_in, limits_of, question_of, socket_limits
from reflex_runtime.policies.wires.observations import text_of
from reflex_runtime.policies.wires.openpi_codec import decode, encode
from reflex_runtime.web.errors import ClientError, describe_error, known
from reflex_runtime.web.fields import check_id
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.request import INTERNAL, UNSUPPORTED, SocketMessage, WebSocket

PATHS: Final = ("/", "/openpi/policy", "/v1/realtime/robot/openpi")
MAX_BATCH: Final = 256  # observations in a frame
ROWS: Final = 16  # observations submitted in one turn of the loop; each takes 0.2 ms
RESET: Final = "reset successful"  # RoboArena's answer to reset: the only text frame that is not an error
_SENT: Final = ("request_id", "timing", "batch", "cache", "guard", "rtc", "model_hash", "policy_changed", "warnings")


class Episodes:
    """Names the episodes of one robot. A reset begins a new one; so does a new instruction if the caller names none."""

    def __init__(self, own: str) -> None:
        """own: the name of the episode if the caller gives none."""
        self._own = self._name = own
        self._epoch = 0
        self._prompt: int | None = None

    def reset(self) -> None:
        """Begin a new episode with the next observation."""
        self._epoch += 1

    def of(self, name: str | None, prompt: str | None) -> str:
        """The episode of an observation. name: the caller's, if it gave one."""
        if name is not None:
            check_id("episode_id", name)
        seen = None if prompt is None else hash(prompt)  # not the text, which may have thousands of characters
        if (name or self._own) != self._name:
            self._name, self._epoch = name or self._own, 0
        elif name is None and self._prompt is not None and seen != self._prompt:
            self._epoch += 1
        self._prompt = seen
        return f"{self._name}#{self._epoch}" if self._epoch else self._name


async def serve(handler: RequestHandler, socket: WebSocket) -> None:
    """One websocket. Clients wait for the metadata without a limit."""
    robot = OpenpiRobot(handler, socket)
    if not await handler.runtime.wait_started():
        await socket.close(INTERNAL, "the policy could not be started")
        return
    await socket.send(encode(robot.metadata()))
    async for message in socket:
        if isinstance(message.data, str):
            await socket.close(UNSUPPORTED, "observations are binary frames")
            return
        await socket.send(await robot.answer(message, message.data))


class OpenpiRobot:
    """The robot of one websocket, and its episodes."""

    def __init__(self, handler: RequestHandler, socket: WebSocket) -> None:
        self._said = socket_limits(socket.query)
        self._handler, self._socket = handler.one(self._said.policy), socket
        self._robot = self._said.robot_id or f"ws-{socket.id}"
        self._episodes: dict[str, Episodes] = {}  # by position in a batch
        self._spent: float | None = None  # milliseconds until the last answer
        self._readings = self._handler.readings(OPENPI)

    def metadata(self) -> dict[str, Any]:
        """The first frame."""
        if self._readings.map.dialect == "roboarena":
            return dict(self._readings.map.metadata)
        spec = self._handler.served.spec
        own = {
            "model_id": spec.model_id,
            "model_hash": spec.model_hash,
            "actions": [spec.chunk_size, spec.action_dim],
            **self._readings.now.describe(),
        }
        return {**self._readings.map.metadata, "reflex": own}

    async def answer(self, message: SocketMessage, data: bytes) -> str | bytes:
        """The frame that answers a message."""
        try:
            self._socket.refuse_if_closing()
            sent = decode(data)
            if self._readings.map.dialect == "roboarena" and sent.get("endpoint") == "reset":
                for episodes in self._episodes.values():
                    episodes.reset()
                return RESET
            observations = _batch_of(sent) if "batch" in sent else None
        except Exception as failure:
            error = known(failure, message.id)
            self._handler.refused(self._pending(message, message.id), error)
            return _text(error, message.id)
        if observations is not None:
            return encode({"batch": await self._all(message, observations)})
        pending = self._pending(message, message.id)
        answer = await self._infer(pending, sent, "", message.received)
        return _text(answer, pending.request_id) if isinstance(answer, ReflexError) else encode(self._told(answer))

    async def _all(self, message: SocketMessage, observations: Sequence[Any]) -> list[dict[str, Any]]:
        """The answers or errors of a batch: each row is a robot of its own."""
        rows = [self._pending(message, f"{message.id}.{place}") for place in range(len(observations))]
        async with asyncio.TaskGroup() as group:
            tasks = []
            for place, (row, observation) in enumerate(zip(rows, observations, strict=True)):
                tasks.append(group.create_task(self._infer(row, observation, f"/{place}", message.received)))
                if (place + 1) % ROWS == 0:
                    await asyncio.sleep(0)
        found = zip(rows, [task.result() for task in tasks], strict=True)
        return [
            {"error": describe_error(answer, row.request_id)} if isinstance(answer, ReflexError) else self._told(answer)
            for row, answer in found
        ]

    async def _infer(
        self, pending: PendingRequest, observation: Any, part: str, received: float
    ) -> ActAnswer | ReflexError:
        try:
            with self._handler.admit(pending):
                return await self._handler.infer(pending, self._question(observation, part), received)
        except ReflexError as error:
            return error

    def _pending(self, message: SocketMessage, request_id: str) -> PendingRequest:
        return PendingRequest(OPENPI, request_id, self._robot, message.started, self._socket)

    def _question(self, observation: Any, part: str) -> Question:
        """part: position in a batch; each position is a separate robot."""
        if not isinstance(observation, dict):
            raise ClientError("an observation must be a map")
        limits, said = limits_in(observation), self._said
        for name in ("episode_id", "session_id"):
            if name in observation and limits.episode_id is None:
                limits.episode_id = limits_of({"episode_id": text_of(observation[name])}).episode_id
        observed = self._readings.now.read(observation)
        episodes = self._episodes.setdefault(part, Episodes((said.episode_id or f"ws-{self._socket.id}") + part))
        if observation.get("reset") is True:
            episodes.reset()
        episode = episodes.of(limits.episode_id, observed[2])
        return question_of(observed, limits, said, self._robot + part, episode)

    def _told(self, answer: ActAnswer) -> dict[str, Any]:
        timing = {"infer_ms": answer.timing.total_ms}
        if self._spent is not None:
            timing["prev_total_ms"] = self._spent
        self._spent = answer.timing.age_ms
        return {
            "actions": answer.actions,
            "policy_timing": {"infer_ms": answer.timing.batch_ms},
            "server_timing": timing,
            **{name: getattr(answer, name) for name in _SENT},
        }


def _text(error: ReflexError, request_id: str) -> str:
    return PLAIN.refuse(error, request_id, False).body.decode()


def _batch_of(sent: dict[str, Any]) -> list[Any]:
    batch = sent["batch"]
    if len(sent) > 1 or not isinstance(batch, list) or not 0 < len(batch) <= MAX_BATCH:
        raise ClientError(f"batch: must be a list of 1 to {MAX_BATCH} observations, and alone")
    return batch
