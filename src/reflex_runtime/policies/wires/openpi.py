"""openpi's websocket: the metadata first, then an answer for each observation. One socket is one robot.

An error is a text frame with our JSON; stock clients raise it and may go on. An observation `{"batch": [...]}` is as
many requests, each with its own answer or error. docs/wires.md has what a caller may send.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.policies.serving.ask import Ask
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.policies.serving.question import ActAnswer, Question
from reflex_runtime.policies.serving.wire_names import OPENPI
from reflex_runtime.policies.wires.limits import limits_in, limits_of, question_of, socket_limits
from reflex_runtime.policies.wires.observations import text_of
from reflex_runtime.policies.wires.openpi_codec import decode, encode
from reflex_runtime.web.errors import ClientError, describe_error
from reflex_runtime.web.fields import check_id
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.websocket import INTERNAL, UNSUPPORTED, SocketMessage, WebSocket

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


class OpenpiSession:
    """One websocket: its episodes, and the requests of the current message."""

    def __init__(self, asking: Asking, socket: WebSocket) -> None:
        self._said = socket_limits(socket.query)
        self._asking, self._socket = asking.one(self._said.policy), socket
        self._robot = self._said.robot_id or f"ws-{socket.id}"
        self._episodes: dict[str, Episodes] = {}  # by position in a batch
        self._asks: list[Ask] = []
        self._results: list[dict[str, Any] | None] = []
        self._batched = False
        self._spent: float | None = None  # milliseconds until the last answer
        self._readings = self._asking.readings(OPENPI)

    # -- the websocket -------------------------------------------------------------------------------------------------

    def opened(self) -> None:
        """Send the metadata once a policy is ready. Clients wait for it without a limit."""
        self._socket.owe(True)
        self._asking.runtime.when_started(self._announce)

    def asked(self, message: SocketMessage) -> None:
        """An observation, or a batch of them."""
        if isinstance(message.data, str):
            self._socket.close(UNSUPPORTED, "observations are binary frames")
            self._socket.answer()
            return
        sent = decode(message.data)
        if self._readings.map.dialect == "roboarena" and sent.get("endpoint") == "reset":
            for episodes in self._episodes.values():
                episodes.reset()
            self._socket.answer(RESET)
            return
        self._batched = "batch" in sent
        observations = _batch_of(sent) if self._batched else [sent]
        self._results = [None] * len(observations)
        self._asks = [self._begin(message, place) for place in range(len(observations))]
        rows = list(zip(self._asks, observations, strict=True))
        for ask, _ in rows:
            self._asking.enter(ask)
        self._read(rows, 0, message.received)

    def _read(self, rows: list[tuple[Ask, Any]], begin: int, received: float) -> None:
        """Submit `ROWS` rows in each turn of the loop."""
        for place, (ask, observation) in enumerate(rows[begin : begin + ROWS], begin):
            part = f"/{place}" if self._batched else ""
            self._asking.read(ask, partial(self._question, observation, part), received)
        if begin + ROWS < len(rows):
            asyncio.get_running_loop().call_soon(self._read, rows, begin + ROWS, received)

    def failed(self, message: SocketMessage, error: ReflexError) -> str:
        """Count an error and return the frame for it."""
        ask = Ask(OPENPI, message.id, self._robot, lambda result: None, message.started, self._socket)
        self._asking.fail(ask, error)
        return _text(error, message.id)

    def left(self) -> None:
        """Cancel the outstanding requests."""
        self._asking.runtime.forget(self._announce)
        for ask in list(self._asks):
            self._asking.leave(ask)

    def _announce(self) -> None:
        if not self._asking.runtime.loaded:
            self._socket.close(INTERNAL, "the policy could not be started")
            return
        self._socket.owe(False)
        own = {} if self._readings.map.dialect == "roboarena" else {"reflex": self._described()}
        self._socket.send(encode({**self._readings.map.metadata, **own}))

    def _described(self) -> dict[str, Any]:
        spec = self._asking.served.spec
        return {
            "model_id": spec.model_id,
            "model_hash": spec.model_hash,
            "actions": [spec.chunk_size, spec.action_dim],
            **self._readings.now.describe(),
        }

    # -- requests ------------------------------------------------------------------------------------------------------

    def _begin(self, message: SocketMessage, place: int) -> Ask:
        request_id = f"{message.id}.{place}" if self._batched else message.id
        return Ask(OPENPI, request_id, self._robot, partial(self._settled, place), message.started, self._socket)

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

    # -- answers -------------------------------------------------------------------------------------------------------

    def _settled(self, place: int, result: ActAnswer | ReflexError) -> None:
        if isinstance(result, ReflexError):
            self._results[place] = {"error": describe_error(result, self._asks[place].request_id)}
        else:
            self._results[place] = self._answer(result)
        if None in self._results:
            return
        results, self._results, asks, self._asks = self._results, [], self._asks, []
        if self._batched:
            self._socket.answer(encode({"batch": results}))
        elif isinstance(result, ReflexError):
            self._socket.answer(_text(result, asks[0].request_id))
        else:
            self._socket.answer(encode(results[0]))

    def _answer(self, answer: ActAnswer) -> dict[str, Any]:
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
