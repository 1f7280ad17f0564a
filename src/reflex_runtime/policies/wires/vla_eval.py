"""vla-eval's websocket: a benchmark says hello, begins an episode, and gets one action for each observation.

The policy answers chunks. A session keeps the rest of the last one, and answers the next observations out of it without
asking the policy. A new episode drops it. docs/wires.md has what a benchmark may send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.policies.serving.ask import VLA_EVAL, Ask
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.policies.serving.question import ActAnswer, Question
from reflex_runtime.policies.wires.limits import limits_in, question_of, socket_limits
from reflex_runtime.policies.wires.observations import Readings
from reflex_runtime.policies.wires.vla_eval_codec import EvalMessage, decode, encode
from reflex_runtime.version import __version__
from reflex_runtime.web.errors import ClientError, NotFound, describe_error
from reflex_runtime.web.fields import check_id
from reflex_runtime.web.json import printable
from reflex_runtime.web.websocket import INTERNAL, UNSUPPORTED, SocketMessage, WebSocket

PATH: Final = "/vla-eval"
PROTOCOL: Final = 1


class VlaEvalSession:
    """One websocket: a robot, the episode it is in, and what is left of its chunk."""

    def __init__(self, asking: Asking, socket: WebSocket) -> None:
        self._asking, self._socket = asking, socket
        self._said = socket_limits(socket.query)
        self._own = self._said.episode_id or f"ws-{socket.id}"
        self._robot = self._said.robot_id or f"ws-{socket.id}"
        self._readings = Readings(asking.runtime, VLA_EVAL)
        self._episode = self._own
        self._episodes = 0
        self._left: deque[Any] = deque()  # actions
        self._executed: int | None = None  # actions of the episode's last chunk
        self._ask: Ask | None = None
        self._seq = self._hello = 0
        self._takes: dict[str, Callable[[dict[str, Any], SocketMessage], None]] = {
            "hello": self._greeted,
            "episode_start": self._began,
            "observation": self._observed,
            "episode_end": self._ended,
            "error": self._ignored,
        }

    # -- the websocket -------------------------------------------------------------------------------------------------

    def opened(self) -> None:
        """The client speaks first."""

    def asked(self, message: SocketMessage) -> None:
        """Any message of the protocol."""
        self._seq = 0
        if isinstance(message.data, str):
            self._socket.close(UNSUPPORTED, "messages are binary frames")
            self._socket.answer()
            return
        sent = decode(message.data)
        self._seq = sent.seq
        if sent.type not in self._takes:
            raise ClientError(printable(f"type {sent.type[:40]!r}: must be one of {', '.join(self._takes)}"))
        self._takes[sent.type](sent.payload, message)

    def failed(self, message: SocketMessage, error: ReflexError) -> bytes:
        """Count an error, and make a frame of it."""
        self._asking.fail(Ask(VLA_EVAL, message.id, self._robot, lambda result: None, message.started), error)
        return self._error(error, message.id)

    def left(self) -> None:
        """Take back what it waits for."""
        self._asking.runtime.forget(self._greet)
        if self._ask is not None:
            self._asking.leave(self._ask)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _greeted(self, _: dict[str, Any], message: SocketMessage) -> None:
        """Answered once there is a policy."""
        self._hello = self._seq
        self._socket.owe(True)
        self._socket.answer()
        self._asking.runtime.when_started(self._greet)

    def _greet(self) -> None:
        if not self._asking.runtime.loaded:
            self._socket.close(INTERNAL, "the policy could not be started")
            return
        self._socket.owe(False)
        export = self._asking.runtime.export
        wanted = {"send_state": export.takes_state, "send_wrist_image": len(export.images) > 1}
        told = {
            "observation_params": {name: True for name, wants in wanted.items() if wants},
            **self._readings.map.metadata,
            "harness_version": f"reflex {__version__}",
            "protocol_version": PROTOCOL,
            "model_server": export.model_id,
            "capabilities": {},
        }
        self._socket.send(encode(EvalMessage("hello", told, self._hello)))

    def _began(self, payload: dict[str, Any], _: SocketMessage) -> None:
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
        self._socket.answer()

    def _observed(self, payload: dict[str, Any], message: SocketMessage) -> None:
        if self._left:
            self._act()
            return
        self._ask = Ask(VLA_EVAL, message.id, self._robot, self._settled, message.started)
        self._asking.take(self._ask, partial(self._question, payload), message.received)

    def _ended(self, payload: dict[str, Any], _: SocketMessage) -> None:
        """A benchmark tells how it went; where no policy answered in the episode there is nothing to count."""
        success = _success_in(payload)
        if success is not None:
            with suppress(NotFound):
                self._asking.runtime.ended(self._episode, success)
        self._socket.answer()

    def _ignored(self, _: dict[str, Any], message: SocketMessage) -> None:
        self._socket.answer()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _question(self, observation: dict[str, Any]) -> Question:
        limits = limits_in(observation)
        if limits.executed is None:
            limits.executed = self._executed
        episode = limits.episode_id or self._episode
        return question_of(self._readings.now.read(observation), limits, self._said, self._robot, episode)

    def _settled(self, result: ActAnswer | ReflexError) -> None:
        if isinstance(result, ReflexError):
            assert self._ask is not None
            self._socket.answer(self._error(result, self._ask.request_id))
            return
        steps = self._readings.map.execute or result.num_actions
        self._left.extend(result.actions[:steps])
        self._executed = len(self._left)
        self._act()

    def _act(self) -> None:
        self._socket.answer(encode(EvalMessage("action", {"actions": self._left.popleft()}, self._seq)))

    def _error(self, error: ReflexError, request_id: str) -> bytes:
        return encode(EvalMessage("error", describe_error(error, request_id), self._seq))


def _success_in(result: dict[str, Any]) -> bool | None:
    """What a result says of success; None where it says nothing."""
    metrics = result.get("metrics")
    for found in (metrics if isinstance(metrics, dict) else {}, result):
        success = found.get("success")
        if isinstance(success, (bool, int, float)) and success in (0, 1):
            return bool(success)
    return None
