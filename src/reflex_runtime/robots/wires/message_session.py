"""Base of websocket sessions whose messages have a type.

The client sends a hello, which is answered once a policy is ready, and then one request at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.serving.handler import RequestHandler
from reflex_runtime.robots.serving.pending import PendingRequest
from reflex_runtime.robots.serving.question import ActAnswer, Question
from reflex_runtime.robots.wires.common import socket_limits
from reflex_runtime.web.errors import NotFound, Reported, known
from reflex_runtime.web.request import INTERNAL, UNSUPPORTED, SocketMessage, WebSocket


class MessageSession(ABC):
    """One websocket, which is one robot. robot: its name. said: fields of the URL's query."""

    def __init__(self, wire: str, handler: RequestHandler, socket: WebSocket) -> None:
        self.said = socket_limits(socket.query)
        self.handler, self.socket = handler.one(self.said.policy), socket
        self.robot = self.said.robot_id or f"ws-{socket.id}"
        self.readings = self.handler.readings(wire)
        self._wire = wire

    @abstractmethod
    def read(self, frame: bytes) -> None:
        """Decode a message for `take` and `error`."""

    @abstractmethod
    async def take(self, message: SocketMessage) -> bytes | None:
        """The frame that answers the decoded message, or None. Exceptions are answered as errors."""

    @abstractmethod
    def hello(self) -> bytes:
        """The frame that answers a hello."""

    @abstractmethod
    def answered(self, answer: ActAnswer) -> bytes:
        """The frame for an answer of the policy."""

    @abstractmethod
    def error(self, error: ReflexError, request_id: str) -> bytes:
        """The frame for an error."""

    async def run(self) -> None:
        """Answer messages until the peer leaves. It speaks first."""
        await self.socket.accept()
        async for message in self.socket:
            if isinstance(message.data, str):
                await self.socket.close(UNSUPPORTED, "messages are binary frames")
                return
            try:
                self.read(message.data)
                self.socket.refuse_if_closing()
                frame = await self.take(message)
            except Reported as reported:
                frame = self.error(reported.error, reported.request_id)
            except Exception as failure:
                error = known(failure, message.id)
                self.handler.refused(self._pending(message), error)
                frame = self.error(error, message.id)
            if frame is not None:
                await self.socket.send(frame)

    async def greet(self) -> bytes | None:
        """`hello`, once a policy is ready."""
        if await self.handler.runtime.wait_started():
            return self.hello()
        await self.socket.close(INTERNAL, "the policy could not be started")
        return None

    async def infer(self, message: SocketMessage, question: Callable[[], Question]) -> bytes:
        """The frame for the policy's answer. question: made of the message once it is admitted."""
        pending = self._pending(message)
        try:
            with self.handler.admit(pending):
                answer = await self.handler.infer(pending, question(), message.received)
        except ReflexError as error:
            raise Reported(error, pending.request_id) from None
        return self.answered(answer)

    def _pending(self, message: SocketMessage) -> PendingRequest:
        return PendingRequest(self._wire, message.id, self.robot, message.started, self.socket)

    def report(self, episode: str, result: dict[str, Any]) -> None:
        """Count the success of an ended episode, if the result reports it and the policy answered in that episode."""
        success = _success_in(result)
        if success is not None and self.socket.may_change:
            with suppress(NotFound):
                self.handler.served.ended(episode, success)


def _success_in(result: dict[str, Any]) -> bool | None:
    """The success in the result of an episode; None if it is not reported."""
    for found in (result.get("metrics"), result.get("result"), result):
        success = found.get("success") if isinstance(found, dict) else None
        if isinstance(success, (bool, int, float)) and success in (0, 1):
            return bool(success)
    return None
