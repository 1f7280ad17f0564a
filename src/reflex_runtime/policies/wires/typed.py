"""Base of websocket sessions whose messages have a type.

The client sends a hello, which is answered once a policy is ready, and then one request at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.policies.serving.ask import Ask
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.policies.serving.question import ActAnswer, Question
from reflex_runtime.policies.wires.limits import socket_limits
from reflex_runtime.web.errors import NotFound
from reflex_runtime.web.websocket import INTERNAL, UNSUPPORTED, SocketMessage, WebSocket


class TypedSession(ABC):
    """One websocket, which is one robot. robot: its name. said: fields of the URL's query."""

    def __init__(self, wire: str, asking: Asking, socket: WebSocket) -> None:
        self.said = socket_limits(socket.query)
        self.asking, self.socket = asking.one(self.said.policy), socket
        self.robot = self.said.robot_id or f"ws-{socket.id}"
        self.readings = self.asking.readings(wire)
        self._wire = wire
        self._ask: Ask | None = None
        self._read = ""  # id of the last decoded message

    @abstractmethod
    def read(self, frame: bytes) -> None:
        """Decode a message for `take` and `error`."""

    @abstractmethod
    def take(self, message: SocketMessage) -> None:
        """Answer the decoded message, or `ask` the policy. Exceptions are answered as errors."""

    @abstractmethod
    def hello(self) -> bytes:
        """The frame that answers a hello."""

    @abstractmethod
    def answered(self, answer: ActAnswer) -> bytes:
        """The frame for an answer of the policy."""

    @abstractmethod
    def error(self, error: ReflexError, request_id: str) -> bytes:
        """The frame for an error."""

    # -- the websocket -------------------------------------------------------------------------------------------------

    def opened(self) -> None:  # noqa: B027
        """Nothing: the client speaks first."""

    def asked(self, message: SocketMessage) -> None:
        """Decode and handle a message."""
        if isinstance(message.data, str):
            self.socket.close(UNSUPPORTED, "messages are binary frames")
            self.socket.answer()
            return
        self._read = message.id
        self.read(message.data)
        self.take(message)

    def failed(self, message: SocketMessage, error: ReflexError) -> bytes:
        """Count an error and return the frame for it."""
        if self._read != message.id and isinstance(message.data, bytes):  # refused before it was decoded
            with suppress(ReflexError):
                self.read(message.data)
        ask = Ask(self._wire, message.id, self.robot, lambda result: None, message.started, self.socket)
        self.asking.fail(ask, error)
        return self.error(error, message.id)

    def left(self) -> None:
        """Cancel the outstanding request."""
        self.asking.runtime.forget(self._greet)
        if self._ask is not None:
            self.asking.leave(self._ask)

    # -- answers -------------------------------------------------------------------------------------------------------

    def greet(self) -> None:
        """Send `hello` once a policy is ready."""
        self.socket.owe(True)
        self.socket.answer()
        self.asking.runtime.when_started(self._greet)

    def ask(self, message: SocketMessage, read: Callable[[], Question]) -> None:
        """Ask the policy. read: builds the question from the message."""
        self._ask = Ask(self._wire, message.id, self.robot, self._settled, message.started, self.socket)
        self.asking.take(self._ask, read, message.received)

    def report(self, episode: str, result: dict[str, Any]) -> None:
        """Count the success of an ended episode, if the result reports it and the policy answered in that episode."""
        success = _success_in(result)
        if success is not None and self.socket.may_change:
            with suppress(NotFound):
                self.asking.served.ended(episode, success)

    def _greet(self) -> None:
        if not self.asking.runtime.loaded:
            self.socket.close(INTERNAL, "the policy could not be started")
            return
        self.socket.owe(False)
        self.socket.send(self.hello())

    def _settled(self, result: ActAnswer | ReflexError) -> None:
        ask, self._ask = self._ask, None  # it refers to the pictures
        assert ask is not None
        if isinstance(result, ReflexError):
            self.socket.answer(self.error(result, ask.request_id))
        else:
            self.socket.answer(self.answered(result))


def _success_in(result: dict[str, Any]) -> bool | None:
    """The success in the result of an episode; None if it is not reported."""
    for found in (result.get("metrics"), result.get("result"), result):
        success = found.get("success") if isinstance(found, dict) else None
        if isinstance(success, (bool, int, float)) and success in (0, 1):
            return bool(success)
    return None
