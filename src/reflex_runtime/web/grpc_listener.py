"""A listener for gRPC: one answer or status to each call, on the event loop; and the Open Inference Protocol over it.

Messages are bytes here, counted and bounded before a wire parses them. A call is counted, its key is checked, and its
bytes count among the request bodies until it is answered. When the caller cancels, the coroutine is cancelled.

gRPC's core owns its sockets and reads them on its own threads, so its limits are set at the start:

- The listener may have a quarter of the connections that HTTP has left. The core closes further ones at once.
- To the core every method is a stream: it reads WINDOW bytes of a call, and the rest only when a message is read. So
  the key is checked before the message is read. As many calls run as windows fit into --max-bodies-mb.
- The core allocates a whole message before its size can be checked: few are read at a time, see `Reading`.
- The core does not show its connections: only those with a call count in --max-connections-per-address.
- Connections without a call end after --idle-timeout-s, and so do those whose peer does not read or is gone.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.settings import FunctionsConfig, ServeConfig, ServerConfig
from reflex_runtime.web import messages, oip
from reflex_runtime.web.access import check_known, check_once
from reflex_runtime.web.app import App
from reflex_runtime.web.connections import HEAD_S, most_connections
from reflex_runtime.web.errors import BodyTooLarge, ClientError, Reported, TooSlow, Unauthorized, describe_error, known
from reflex_runtime.web.oip import Tensor, tensor_of_bytes, tensor_of_values

MOST_S: Final = 600.0  # seconds; a later deadline counts as none
UNREAD: Final = 1.0  # seconds at the end for callers to read their last answers
WINDOW: Final = 1 << 17  # bytes of a call that the core reads ahead
STREAMS: Final = 128  # calls of one connection at a time
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
    """One call. method: its name. request_id: made by the server, unique. client: its connection. metadata: with names
    in lower case; headers: the same by name. started: when it began; received: when all of it was read, 0.0 until then
    (`time.monotonic`). left_ms: milliseconds from its start to its deadline, or None. held: its bytes in `Bodies`."""

    __slots__ = ("client", "headers", "held", "left_ms", "metadata", "method", "received", "request_id", "started")

    def __init__(self, method: str, request_id: str, context: Any) -> None:
        self.method, self.request_id, self.client = method, request_id, str(context.peer())
        sent = context.invocation_metadata() or ()
        self.metadata = [(name.encode(), value.encode() if isinstance(value, str) else value) for name, value in sent]
        self.headers: Mapping[bytes, bytes] = dict(self.metadata)
        self.started, self.received = time.monotonic(), 0.0
        left = context.time_remaining()
        self.left_ms = None if left is None or left > MOST_S else max(float(left) * 1e3, 0.001)
        self.held = 0


def parse(kind: Any, data: bytes) -> Any:
    """The message of this class in the bytes; ClientError if there is none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        wrong = f"the message is no {kind.DESCRIPTOR.name}: it is incomplete, or a text in it is not UTF-8"
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
    """OSError for an address that is in use or not allowed. gRPC would only log it."""
    host, _, port = address.rpartition(":")
    for family, kind, _, _, place in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(place)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    raise  # anything else is of one of several addresses, such as IPv6 where there is none


def _add_port(server: Any, address: str, settings: ServerConfig) -> Any:
    """Bind the address, with the TLS of HTTP. Returns the port."""
    if not settings.ssl_certfile:
        return server.add_insecure_port(address)
    certificates = Path(settings.ssl_certfile).read_bytes()
    key = Path(settings.ssl_keyfile or settings.ssl_certfile).read_bytes()
    return server.add_secure_port(address, grpc.ssl_server_credentials(((key, certificates),)))


class GrpcListener:
    """A gRPC server on an address. It answers once `serve` was called."""

    def __init__(self, app: App, flag: str, address: str, settings: ServerConfig) -> None:
        """flag: the option that gave the address."""
        self._app, self._most, self._body_timeout_s = app, settings.max_body_bytes, settings.body_timeout_s
        self._failed: Callable[[GrpcCall, ReflexError], None] = lambda call, error: None
        self._calls = Counter[str]()  # by peer, that is by connection
        idle_ms = round(1e3 * settings.idle_timeout_s)
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_allowed_incoming_connections", app.give_apart(most_connections(settings.max_connections))),
                ("grpc.max_concurrent_streams", STREAMS),
                ("grpc.max_receive_message_length", self._most),
                ("grpc.http2.lookahead_bytes", WINDOW),
                ("grpc.http2.bdp_probe", 0),  # or the window grows with what comes
                ("grpc.server_handshake_timeout_ms", round(1e3 * min(HEAD_S, settings.body_timeout_s))),
                ("grpc.max_connection_idle_ms", idle_ms),
                ("grpc.keepalive_time_ms", idle_ms),
            ),
            maximum_concurrent_rpcs=min(settings.max_connections, max(1, app.bodies.most // WINDOW)),
        )
        try:
            check_free(address)
            port = _add_port(self._server, address, settings)
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
        """Answer the methods of a service from now on. failed: called with each error that is not `Reported`."""
        self._failed = failed
        stream = grpc.stream_unary_rpc_method_handler
        handlers = {name: stream(partial(self._unary, name, method)) for name, method in methods.items()}
        handlers |= {name: stream(partial(self._stream, name, method)) for name, method in streams.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self._starting = asyncio.get_running_loop().create_task(self._server.start())

    async def close(self) -> None:
        """Close, after giving callers a moment to read their answers."""
        await self._server.stop(UNREAD)

    async def _unary(self, name: str, method: Method, unread: object, context: Any) -> bytes:
        async def answer(call: GrpcCall) -> bytes:
            async for data in self._parts(call, context):
                return await method(call, data)
            raise ClientError("the call has no message")

        return await self._answer(name, answer, context)

    async def _stream(self, name: str, method: StreamMethod, unread: object, context: Any) -> bytes:
        return await self._answer(name, lambda call: method(call, self._parts(call, context)), context)

    async def _parts(self, call: GrpcCall, context: Any) -> AsyncIterator[bytes]:
        """The messages of a call, within the limits of size and time. (gRPC's own iterator, if not read to its end,
        keeps its last message until the next collection.)"""
        until = asyncio.get_running_loop().time() + self._body_timeout_s
        while True:
            try:
                async with self._app.reading.one(until):
                    part = await context.read()
            except TimeoutError:
                raise TooSlow("the message did not come in time, or came slowly while others waited") from None
            if part is grpc.aio.EOF:
                return
            if call.held + len(part) > self._most:
                raise BodyTooLarge(f"the message has over {self._most} bytes")
            self._app.bodies.take(call, len(part))
            yield part

    async def _answer(self, name: str, answer: Callable[[GrpcCall], Awaitable[bytes]], context: Any) -> bytes:
        call = GrpcCall(name, self._app.enter(), context)
        try:
            try:
                self._check(call)
                with self._counted(call.client):
                    return await answer(call)
            except Reported as reported:
                error, request_id = reported.error, reported.request_id
            except Exception as failure:
                error, request_id = known(failure, call.request_id), call.request_id
                self._failed(call, error)
            # The traceback refers to the message. (No abort: gRPC would keep its exception with the call.)
            error.__traceback__ = error.__context__ = None
            context.set_code(_BY_CODE.get(error.code) or _BY_STATUS.get(error.http_status, _STATUS.INTERNAL))
            context.set_details(error.message)
            context.set_trailing_metadata((("reflex-error", json.dumps(describe_error(error, request_id))),))
            return b""
        finally:
            self._app.bodies.release(call)
            self._app.leave()

    def _check(self, call: GrpcCall) -> None:
        self._app.check_open()
        check_once(call.metadata)
        keys = self._app.keys
        if keys.callers and not keys.sent(call.headers, keys.callers):
            how = "authorization: Bearer KEY, or x-reflex-key"
            raise Unauthorized(f"the key is missing or wrong; send it as metadata: {how}")
        check_known(call.headers, [b"x-reflex-robot"])

    @contextmanager
    def _counted(self, peer: str) -> Iterator[None]:
        """Count a connection among those of its address, from its first call to the end of its last one."""
        shares, client = self._app.shares, (unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]"), 0)
        if not self._calls[peer]:
            shares.opened(client)
        self._calls[peer] += 1
        try:
            if self._calls[peer] == 1 and shares.over(client) > 0:
                raise shares.refused(client)
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]
                shares.closed(client)


# -- the Open Inference Protocol ---------------------------------------------------------------------------------------

SERVICE: Final = "inference.GRPCInferenceService"
MAX_FIELDS: Final = 4096  # of a request
MAX_OTHER: Final = 1 << 20  # bytes of a request that are not raw tensors
_RAW: Final = 7 << 3 | 2  # tag of the field raw_input_contents
_CONTENTS: Final = {  # field of the values of a datatype
    "BOOL": "bool", "INT8": "int", "INT16": "int", "INT32": "int", "INT64": "int64", "UINT8": "uint",
    "UINT16": "uint", "UINT32": "uint", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64", oip.BYTES: "bytes",
}  # fmt: skip


def decode(data: bytes) -> tuple[str, str, oip.InferRequest]:
    """(model, version, request) of a ModelInferRequest; ClientError if it is wrong."""
    fields, raw = _split(data)
    sent = parse(messages.ModelInferRequest, fields)
    if raw and len(raw) != len(sent.inputs):
        raise ClientError(f"raw_input_contents: has {len(raw)} elements, and there are {len(sent.inputs)} inputs")
    inputs = [_tensor(tensor, raw[place] if raw else None) for place, tensor in enumerate(sent.inputs)]
    parameters = {name: _parameter(value) for name, value in sent.parameters.items()}
    asked = oip.InferRequest(inputs, parameters, [output.name for output in sent.outputs], sent.id)
    return sent.model_name, sent.model_version, asked


def encode(model: str, sent_id: str, told: oip.OipAnswer) -> bytes:
    """The bytes of a ModelInferResponse."""
    answer = messages.ModelInferResponse(model_name=model, model_version=oip.VERSION, id=sent_id)
    for name, value in told.parameters.items():
        answer.parameters[name].string_param = value
    for tensor in told.outputs:
        answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.values.shape)
        answer.raw_output_contents.append(oip.bytes_of(tensor))
    return serialize(answer)


def _split(data: bytes) -> tuple[bytes, list[memoryview]]:
    """The fields of a request that protobuf parses, and its raw tensors as views. Their number is bounded before that:
    two bytes can be an empty tensor, which takes a hundred once it is parsed."""
    view, at, size = memoryview(data), 0, 0
    parsed: list[memoryview] = []
    raw: list[memoryview] = []
    try:
        while at < len(data):
            begin = at
            tag, at = _varint(data, at)
            if tag & 7 == 0:
                _, at = _varint(data, at)
            else:  # the protocol has no groups
                length, at = _varint(data, at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
                at += length
            if at > len(data):
                raise IndexError
            if tag == _RAW:
                raw.append(view[at - length : at])
            else:
                parsed.append(view[begin:at])
                size += at - begin
            if len(parsed) + len(raw) > MAX_FIELDS or size > MAX_OTHER:
                wrong = f"over {MAX_FIELDS} fields, or over {MAX_OTHER} bytes beside raw_input_contents"
                raise ClientError(f"the request has {wrong}: send tensors as raw bytes")
    except (IndexError, KeyError):
        raise ClientError("the message is no ModelInferRequest: it is incomplete, or of another protocol") from None
    return b"".join(parsed), raw


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value % 2**64, at
    raise IndexError


def _tensor(sent: Any, raw: memoryview | None) -> Tensor:
    if raw is not None:
        return tensor_of_bytes(sent.name, sent.datatype, list(sent.shape), raw)
    field = _CONTENTS.get(sent.datatype)
    values = list(getattr(sent.contents, f"{field}_contents")) if field else []
    return tensor_of_values(sent.name, sent.datatype, list(sent.shape), values)


def _parameter(sent: Any) -> Any:
    field = sent.WhichOneof("value")
    return getattr(sent, field) if field else None


def oip_listener(app: App, config: ServeConfig | FunctionsConfig, models: oip.OipModels) -> GrpcListener:
    """A listener at `--oip-grpc` that serves these models."""

    def answering(kind: Any, fields: Callable[[oip.OipModels, str, str], Mapping[str, Any]]) -> Method:
        async def method(call: GrpcCall, data: bytes) -> bytes:
            sent = parse(messages.ModelRequest, data)  # empty in calls about the server
            return serialize(kind(**fields(models, sent.name, sent.version)))

        return method

    async def infer(call: GrpcCall, data: bytes) -> bytes:
        name, version, sent = decode(data)
        model = models.find(name, version)
        return encode(model.names[0], sent.id, await model.infer(call, sent))

    def failed(call: GrpcCall, error: ReflexError) -> None:
        if call.method == "ModelInfer":
            models.refused(call, error)

    listener = GrpcListener(app, "--oip-grpc", config.oip_grpc, config)
    methods = {name: answering(getattr(messages, f"{name}Response"), fields) for name, (_, fields) in oip.CALLS.items()}
    methods["ModelInfer"] = infer
    listener.serve(SERVICE, methods, {}, failed)
    return listener
