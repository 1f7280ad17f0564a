"""gRPC on a listener of its own: calls in, an answer or a status to each, on the event loop.

Messages are bytes here, so that they are counted and bounded before a wire parses them. A call is counted, its key
checked, and its bytes held among the request bodies, until it is answered; one that its caller cancels ends as a
cancelled coroutine.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from reflex_runtime.core.errors import Closed, ConfigError, ReflexError
from reflex_runtime.settings import ServeConfig
from reflex_runtime.web.access import keys_in
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import BodyTooLarge, ClientError, Reported, TooSlow, Unauthorized, describe_error, known

OVER: Final = 1.0  # seconds that callers have at the end to take their answers
_STATUS: Final = grpc.StatusCode
_BY_CODE: Final = {
    "queue_full": _STATUS.RESOURCE_EXHAUSTED,
    "superseded": _STATUS.ABORTED,
    "deadline_unreachable": _STATUS.DEADLINE_EXCEEDED,
}
_BY_STATUS: Final = {
    400: _STATUS.INVALID_ARGUMENT,
    401: _STATUS.UNAUTHENTICATED,
    403: _STATUS.PERMISSION_DENIED,
    404: _STATUS.NOT_FOUND,
    408: _STATUS.DEADLINE_EXCEEDED,
    409: _STATUS.FAILED_PRECONDITION,
    413: _STATUS.RESOURCE_EXHAUSTED,
    422: _STATUS.INVALID_ARGUMENT,
    429: _STATUS.RESOURCE_EXHAUSTED,
    499: _STATUS.CANCELLED,
    503: _STATUS.UNAVAILABLE,
    504: _STATUS.DEADLINE_EXCEEDED,
}


class GrpcCall:
    """One call. method: its name. id: made by the server, unique. peer: of its connection. started: when it came
    (`time.monotonic`). left_ms: how long its caller waits from then on; None without limit. held: bytes of it that
    `Bodies` counts."""

    __slots__ = ("_context", "held", "id", "left_ms", "method", "peer", "started")

    def __init__(self, method: str, id: str, context: Any) -> None:
        self._context, self.method, self.id, self.peer = context, method, id, str(context.peer())
        self.started = time.monotonic()
        left = context.time_remaining()
        self.left_ms = None if left is None else max(float(left) * 1e3, 0.001)
        self.held = 0

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Its metadata: names in lower case."""
        sent = self._context.invocation_metadata() or ()
        return {name.encode(): value.encode() if isinstance(value, str) else value for name, value in sent}


def parse(kind: Any, data: bytes) -> Any:
    """A message of a generated class; ClientError if the bytes are none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        wrong = f"the message is no {kind.DESCRIPTOR.name}: it breaks off, or a text in it is not UTF-8"
        raise ClientError(wrong) from None


def serialize(message: Any) -> bytes:
    """The bytes of a message."""
    data: bytes = message.SerializeToString()
    return data


Method = Callable[[GrpcCall, bytes], Awaitable[bytes]]
"""Answers one message with one."""
StreamMethod = Callable[[GrpcCall, AsyncIterator[bytes]], Awaitable[bytes]]
"""Answers several messages with one."""


def check_free(address: str) -> None:
    """OSError where an address is taken or may not be used. gRPC would log that in a line of its own."""
    host, _, port = address.rpartition(":")
    for family, kind, _, _, place in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(place)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    raise  # anything else is of one of several addresses, such as IPv6 where there is none


class GrpcListener:
    """A gRPC server on an address. Nothing is answered before `serve`."""

    def __init__(self, app: App, flag: str, address: str, settings: ServeConfig) -> None:
        """flag: the option that gave the address."""
        self._app, self._key = app, settings.api_key.encode()
        self._most, self._body_timeout_s = settings.max_body_bytes, settings.body_timeout_s
        self._failed: Callable[[GrpcCall, ReflexError], None] = lambda call, error: None
        self._server = grpc.aio.server(
            options=(("grpc.max_receive_message_length", self._most), ("grpc.so_reuseport", 0)),
            maximum_concurrent_rpcs=settings.max_connections,
        )
        try:
            check_free(address)
            port = self._server.add_insecure_port(address)
        except (OSError, RuntimeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is it in use?"
            raise ConfigError(f"{flag}={address}: cannot be bound: {why}; choose another address or port") from None
        self.address = f"{address.rpartition(':')[0]}:{port}"

    def serve(
        self,
        service: str,
        methods: Mapping[str, Method],
        streams: Mapping[str, StreamMethod],
        failed: Callable[[GrpcCall, ReflexError], None],
    ) -> None:
        """Answer the methods of a service. failed: called with each error that is not `Reported`."""
        self._failed = failed
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        handlers = {name: unary(partial(self._unary, name, method)) for name, method in methods.items()}
        handlers |= {name: stream(partial(self._stream, name, method)) for name, method in streams.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self._starting = asyncio.get_running_loop().create_task(self._server.start())

    async def close(self) -> None:
        """Close, after giving callers a moment to read their answers."""
        await self._server.stop(OVER)

    async def _unary(self, name: str, method: Method, data: bytes, context: Any) -> bytes:
        async def answer(call: GrpcCall) -> bytes:
            self._app.bodies.take(call, len(data))
            return await method(call, data)

        return await self._answer(name, answer, context)

    async def _stream(self, name: str, method: StreamMethod, parts: AsyncIterator[bytes], context: Any) -> bytes:
        return await self._answer(name, lambda call: method(call, self._within(call, parts)), context)

    async def _within(self, call: GrpcCall, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The parts of a message, within its size and its time."""
        try:
            async with asyncio.timeout(self._body_timeout_s):
                async for part in parts:
                    if call.held + len(part) > self._most:
                        raise BodyTooLarge(f"the message has over {self._most} bytes")
                    self._app.bodies.take(call, len(part))
                    yield part
        except TimeoutError:
            raise TooSlow(f"the message did not come within {self._body_timeout_s:g} s") from None

    async def _answer(self, name: str, answer: Callable[[GrpcCall], Awaitable[bytes]], context: Any) -> bytes:
        call = GrpcCall(name, self._app.asks(), context)
        try:
            try:
                self._check(call)
                return await answer(call)
            except Reported as reported:
                error, request_id = reported.error, reported.request_id
            except Exception as failure:
                error, request_id = known(failure, call.id), call.id
                self._failed(call, error)
                error.__traceback__ = None  # its frames hold the message until it is answered
            code = _BY_CODE.get(error.code) or _BY_STATUS.get(error.http_status, _STATUS.INTERNAL)
            told = (("reflex-error", json.dumps(describe_error(error, request_id))),)
            await context.abort(code, error.message, told)
            raise AssertionError("abort raises")
        finally:
            self._app.bodies.release(call)
            self._app.answered()

    def _check(self, call: GrpcCall) -> None:
        if self._app.closing:
            raise Closed("the server is shutting down", retry_after=1.0)
        if self._key:
            plain, borne = keys_in(call.headers)
            if not (hmac.compare_digest(plain, self._key) | hmac.compare_digest(borne, self._key)):
                raise Unauthorized("send the key as metadata: authorization: Bearer KEY, or x-reflex-key")
