"""One websocket that is one robot: how its messages are read, answered and counted, whatever their codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.serving.handler import RequestHandler
from reflex_runtime.robots.serving.pending import PendingRequest
from reflex_runtime.robots.serving.question import ActAnswer, Question
from reflex_runtime.robots.wires.common import socket_limits
from reflex_runtime.web.errors import NotFound, Reported, known
from reflex_runtime.web.request import (
    INTERNAL,
    UNSUPPORTED,
    HttpRequest,
    HttpResponse,
    Route,
    SocketMessage,
    WebSocket,
)

Frame = str | bytes


def socket_route(
    path: str, serve: Callable[[RequestHandler, WebSocket], Coroutine[Any, Any, None]], handler: RequestHandler
) -> Route:
    """The route of a wire's websocket."""
    return Route(path, _websocket_only, most=handler.config.max_body_bytes, socket=partial(serve, handler))


async def _websocket_only(request: HttpRequest) -> HttpResponse:
    """What answers a plain request on the path of a websocket."""
    raise NotFound(f"{request.path} is for websockets; docs/wires.md says which protocol it speaks")


class MessageSession(ABC):
    """The base of a wire's session. Clients send one request at a time.

    robot: its name. said: limits of the URL's query. first: `hello` is sent before anything came; else it answers the
    client's own.
    """

    first: ClassVar = False

    def __init__(self, wire: str, handler: RequestHandler, socket: WebSocket) -> None:
        self.said = socket_limits(socket.query)
        self.handler, self.socket = handler.one(self.said.policy), socket
        self.robot = self.said.robot_id or f"ws-{socket.id}"
        self._wire = wire

    @abstractmethod
    def read(self, frame: bytes) -> None:
        """Decode a message for `take` and `error`."""

    @abstractmethod
    async def take(self, message: SocketMessage) -> Frame | None:
        """The frame that answers the decoded message, or None. Exceptions are answered as errors."""

    @abstractmethod
    def hello(self) -> bytes:
        """The frame that tells what is served."""

    @abstractmethod
    def answered(self, answer: ActAnswer) -> bytes:
        """The frame for an answer of the policy."""

    @abstractmethod
    def error(self, error: ReflexError, request_id: str) -> Frame:
        """The frame for an error."""

    async def run(self) -> None:
        """Answer messages until the peer leaves."""
        await self.socket.accept()
        if self.first:
            hello = await self.greet()
            if hello is None:
                return
            await self.socket.send(hello)
        async for message in self.socket:
            if isinstance(message.data, str):
                await self.socket.close(UNSUPPORTED, "messages are binary frames")
                return
            frame = await self.answer(message, message.data)
            if frame is not None:
                await self.socket.send(frame)

    async def answer(self, message: SocketMessage, data: bytes) -> Frame | None:
        """The frame that answers a message."""
        try:
            if message.error is None:
                self.read(data)
            self.socket.refuse_message(message)
            return await self.take(message)
        except Reported as reported:
            return self.error(reported.error, reported.request_id)
        except Exception as failure:
            error = known(failure, message.id)
            self.handler.refused(self.pending(message), error)
            return self.error(error, message.id)

    async def greet(self) -> bytes | None:
        """`hello`, once a policy is ready."""
        if await self.handler.runtime.wait_started():
            return self.hello()
        await self.socket.close(INTERNAL, "the policy could not be started")
        return None

    async def infer(self, message: SocketMessage, question: Callable[[], Question]) -> bytes:
        """The frame for the policy's answer. question: made of the message once it is admitted."""
        return self.answered(await self.handler.infer_row(self.pending(message), 0, question, message.received))

    def pending(self, message: SocketMessage) -> PendingRequest:
        return PendingRequest(self._wire, message.id, self.robot, message.started, self.socket)

    def report(self, episode: str, result: dict[str, Any], robot: str) -> None:
        """Count the success of a robot's ended episode, if the result reports it and the policy answered in it."""
        success = _success_in(result)
        if success is not None and self.socket.may_change:
            with suppress(NotFound):
                self.handler.served.ended(episode, success, robot)


def _success_in(result: dict[str, Any]) -> bool | None:
    """The success in the result of an episode; None if it is not reported."""
    for found in (result.get("metrics"), result.get("result"), result):
        success = found.get("success") if isinstance(found, dict) else None
        if isinstance(success, (bool, int, float)) and success in (0, 1):
            return bool(success)
    return None
