"""JSON-RPC 2.0 in frames: from bytes to messages and back, without sockets, clocks or tasks.

A frame is the byte `J`, the length of its body in four bytes, big-endian, and the body in JSON: one message, or an
array of the messages of one turn of the loop.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import isfinite
from typing import Annotated, Any, Final, Literal

import msgspec

from reflex_runtime.core import errors
from reflex_runtime.core.errors import ConfigError, ReflexError

MAX_FRAME = 64 * 2**20  # bytes of a body: a list of 4 MiB of token ids takes a third of it

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
APPLICATION_ERROR = -32000  # an error of the runtime: see `RpcError.data`

_HEADER = struct.Struct(">cI")
_JSON = b"J"


class ProtocolError(ReflexError):
    """The other end broke the protocol. rpc_code: of the error that answers it."""

    code, http_status = "protocol_error", 502

    def __init__(self, message: str, rpc_code: int = INVALID_REQUEST) -> None:
        super().__init__(message, rpc_code=rpc_code)
        self.rpc_code = rpc_code

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.rpc_code)


class RpcError(msgspec.Struct, omit_defaults=True):
    """The error of a call. data: made by `error_of` of a runtime error, to raise it at the other end."""

    code: int
    message: str
    data: Any = None


ABSENT: Any = msgspec.UNSET
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Name = Annotated[str, msgspec.Meta(max_length=200)]


class RpcMessage(msgspec.Struct):
    """A call has a method and an id, and gets exactly one answer; a notification has a method but no id. An answer has
    the id of its call (None: not known), and a result or an error.

    params, result: raw in a message that was read, since the method determines their type.
    """

    jsonrpc: Literal["2.0"]
    method: _Name = ABSENT
    params: msgspec.Raw = ABSENT
    id: _Number | _Name | msgspec.UnsetType | None = msgspec.UNSET
    result: msgspec.Raw = ABSENT
    error: RpcError | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.method is ABSENT and (self.id is ABSENT or (self.result is ABSENT and not self.error)):
            raise ValueError("it needs a method, or the id of a call with its result or its error")


VERSION: Final = "2.0"
_DECODE = msgspec.json.Decoder(RpcMessage | Annotated[list[RpcMessage], msgspec.Meta(min_length=1)]).decode
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what decoders raise on invalid bytes


def encode(messages: list[RpcMessage], most: int = MAX_FRAME) -> bytes:
    """A frame of these messages, at least one. Raises ProtocolError if its body has more than `most` bytes, or if a
    value cannot be written as JSON."""
    try:
        body = msgspec.json.encode(messages[0] if len(messages) == 1 else messages)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"cannot be written as JSON: {error}", INTERNAL_ERROR) from None
    if len(body) > most:
        raise ProtocolError(f"a frame of {len(body)} bytes; at most {most} are sent")
    return _HEADER.pack(_JSON, len(body)) + body


class FrameDecoder:
    """Splits a stream of bytes, in pieces of any size, into frames.

        decoder.feed(data)
        for messages in decoder: ...

    Raises ProtocolError for a frame that holds no messages, or more than `most` bytes. Read nothing after that: the
    frame is missing, and a part must not pass for the whole answer.
    """

    def __init__(self, most: int = MAX_FRAME) -> None:
        self._most, self._data, self._at = most, bytearray(), 0

    def feed(self, data: bytes) -> None:
        if self._at:  # bytes that were read are removed here, not after each frame
            del self._data[: self._at]
            self._at = 0
        self._data += data

    @property
    def pending(self) -> int:
        """Bytes that were fed and not read: between two iterations those of an incomplete frame."""
        return len(self._data) - self._at

    def __iter__(self) -> Iterator[list[RpcMessage]]:
        while self.pending >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._data, self._at)
            if kind != _JSON:
                raise ProtocolError(f"a frame begins with J, not with the byte {kind[0]}", PARSE_ERROR)
            if length > self._most:
                raise ProtocolError(f"a frame of {length} bytes; at most {self._most} are read")
            begin = self._at + _HEADER.size
            if len(self._data) < begin + length:
                return
            self._at = begin + length
            yield _messages(bytes(memoryview(self._data)[begin : self._at]))


def _messages(body: bytes) -> list[RpcMessage]:
    try:
        found = _DECODE(body)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"not a JSON-RPC 2.0 message: {error}") from None
    except _NOT_JSON as error:
        raise ProtocolError(f"a frame that is not JSON: {error}", PARSE_ERROR) from None
    return found if isinstance(found, list) else [found]


# -- parts of messages -------------------------------------------------------------------------------------------------


class Reader:
    """Decodes params or results of one type. `read` raises ProtocolError (−32602) that names the field, and ConfigError
    for a value out of its range."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.json.Decoder(kind).decode

    def read(self, raw: msgspec.Raw) -> Any:
        """The params or result; absent means an empty object."""
        try:
            return self._decode(raw or b"{}")
        except _NOT_JSON as error:
            if isinstance(error.__cause__, ReflexError):  # a value out of its range
                raise error.__cause__ from None
            raise ProtocolError(str(error), INVALID_PARAMS) from None


_KINDS: dict[str, type[ReflexError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ReflexError)
}


def error_of(error: ReflexError) -> RpcError:
    """An error of the runtime as a message has it; `raised` is the inverse."""
    if isinstance(error, ProtocolError):
        return RpcError(error.rpc_code, error.message)
    known = next(kind.__name__ for kind in type(error).__mro__ if _KINDS.get(kind.__name__) is kind)
    data = {"type": known, "code": error.code, "retry_after": error.retry_after, "details": dict(error.details)}
    code = INTERNAL_ERROR if error.code == ReflexError.code else APPLICATION_ERROR
    return RpcError(INVALID_PARAMS if isinstance(error, ConfigError) else code, error.message, data)


def raised(error: RpcError) -> ReflexError:
    """The error that the other end gave to `error_of`; a ProtocolError if its type is unknown."""
    data = error.data if isinstance(error.data, dict) else {}
    kind, details, after = _KINDS.get(str(data.get("type"))), data.get("details"), data.get("retry_after")
    if kind is None:
        return ProtocolError(error.message[:1000], error.code)
    hint = float(after) if isinstance(after, int | float) and isfinite(after) and after >= 0 else None
    made = kind(error.message[:10_000], retry_after=hint)
    details = details if isinstance(details, dict) else {}
    made.details = {str(k): v for k, v in details.items() if v is None or isinstance(v, str | int | float | bool)}
    return made
