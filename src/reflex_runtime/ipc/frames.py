"""JSON-RPC 2.0 in length-prefixed frames: bytes in, messages out, and back. No socket, no clock, no task.

A frame is one byte for the codec (`J`: JSON, `M`: msgpack), the length of its body in four bytes, big-endian, and the
body: one JSON-RPC message, or an array of those that were sent in the same turn of the loop. Every frame has its own
codec: both ends may change theirs at any time, to one that the other end has said it reads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from math import isfinite
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from reflex_runtime.core import errors
from reflex_runtime.core.errors import ConfigError, ReflexError

T = TypeVar("T")
Id = int | str | None

MAX_FRAME = 64 * 2**20  # bytes of a body: a list of 4 MiB of token ids takes a fifth of it
MAX_MESSAGES = 100_000  # in one frame
SALVAGED = 2**20  # bytes of a body up to which its valid messages are read although others are not

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
APPLICATION_ERROR = -32000  # an error of the runtime; `data` says which

_HEADER = struct.Struct(">BI")


class Codec(IntEnum):
    """How a body is written; the value is the first byte of its frame."""

    JSON = ord("J")
    MSGPACK = ord("M")

    @property
    def label(self) -> str:
        """As capabilities name it."""
        return self.name.lower()


class ProtocolError(ReflexError):
    """The other end broke the protocol. `rpc_code` is the code of the error that it gets."""

    code, http_status = "protocol_error", 502

    def __init__(self, message: str, rpc_code: int = INVALID_REQUEST) -> None:
        super().__init__(message, rpc_code=rpc_code)
        self.rpc_code = rpc_code

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.rpc_code)


class OversizeFrame(ProtocolError):
    """A frame larger than this end reads. The next frame cannot be found: the connection ends."""


class RpcError(msgspec.Struct, omit_defaults=True):
    """Why a call failed. data: of errors of the runtime, to raise the same error at the other end: see `error_of`."""

    code: int
    message: str
    data: Any = None


class RpcRequest(msgspec.Struct):
    """A call: it gets exactly one response."""

    id: Id
    method: str
    params: Any = msgspec.UNSET
    jsonrpc: Literal["2.0"] = "2.0"


class Notification(msgspec.Struct):
    """A message without an answer."""

    method: str
    params: Any = msgspec.UNSET
    jsonrpc: Literal["2.0"] = "2.0"


class Response(msgspec.Struct):
    """The result of a call."""

    id: Id
    result: Any = None
    jsonrpc: Literal["2.0"] = "2.0"


class ErrorResponse(msgspec.Struct):
    """A call failed; id None: it is not known which."""

    id: Id
    error: RpcError
    jsonrpc: Literal["2.0"] = "2.0"


Message = RpcRequest | Notification | Response | ErrorResponse
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # that either codec can write
_Name = Annotated[str, msgspec.Meta(max_length=200)]
_NOTHING = msgspec.Raw(b"")


class _Any(msgspec.Struct):
    """Any of the four kinds. Params and results stay raw: their type depends on the method."""

    jsonrpc: Literal["2.0"]
    method: _Name | None = None
    params: msgspec.Raw = _NOTHING
    id: _Number | _Name | msgspec.UnsetType | None = msgspec.UNSET
    result: msgspec.Raw = _NOTHING
    error: RpcError | None = None

    def message(self) -> Message:
        if self.method is not None:
            if self.id is msgspec.UNSET:
                return Notification(self.method, self.params)
            return RpcRequest(self.id, self.method, self.params)
        if self.id is msgspec.UNSET:
            raise ProtocolError("a message needs a method, or the id of the call that it answers")
        if self.error is not None:
            return ErrorResponse(self.id, self.error)
        if not self.result:
            raise ProtocolError(f"the answer to call {self.id!r} has neither a result nor an error")
        return Response(self.id, self.result)


_ENCODE: dict[Codec, Callable[[Any], bytes]] = {
    Codec.JSON: msgspec.json.Encoder().encode,
    Codec.MSGPACK: msgspec.msgpack.Encoder().encode,
}
_DECODE: dict[Codec, Callable[[Any], Any]] = {
    Codec.JSON: msgspec.json.Decoder(_Any | list[_Any]).decode,
    Codec.MSGPACK: msgspec.msgpack.Decoder(_Any | list[_Any]).decode,
}


_DECODE_PARTS: dict[Codec, Callable[[Any], list[msgspec.Raw]]] = {
    Codec.JSON: msgspec.json.Decoder(list[msgspec.Raw]).decode,
    Codec.MSGPACK: msgspec.msgpack.Decoder(list[msgspec.Raw]).decode,
}
_NOT_IT = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what decoders raise on invalid bytes


def encode(messages: list[Message], codec: Codec, most: int = MAX_FRAME) -> bytes:
    """One frame of at least one message. Raises OversizeFrame beyond `most` bytes, and ProtocolError for a value that
    the codec cannot write."""
    try:
        body = _ENCODE[codec](messages[0] if len(messages) == 1 else messages)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"cannot be written as {codec.label}: {error}", INTERNAL_ERROR) from None
    if len(body) > most:
        raise OversizeFrame(f"a frame of {len(body)} bytes; at most {most} are sent")
    return _HEADER.pack(codec, len(body)) + body


class FrameDecoder:
    """Finds the frames in a stream of bytes that come in pieces of any size.

        decoder.feed(data)
        for codec, messages in decoder: ...

    A body that is no message raises ProtocolError, once, and the frames after it are read. Of an array with invalid
    messages the valid ones come first. A frame beyond `most` bytes raises OversizeFrame, and a first byte that is no
    codec ProtocolError; both set `broken`: nothing after them can be read.
    """

    def __init__(self, most: int = MAX_FRAME) -> None:
        self.most, self.broken = most, False
        self._data = bytearray()
        self._at = 0

    def feed(self, data: bytes) -> None:
        if self.broken:
            return
        if self._at:  # what was read is removed when more comes, not after each frame
            del self._data[: self._at]
            self._at = 0
        self._data += data

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._data) - self._at

    def __iter__(self) -> Iterator[tuple[Codec, list[Message]]]:
        while (frame := self._frame()) is not None:
            messages, wrong = _read(*frame)
            if messages:
                yield frame[0], messages
            if wrong is not None:
                raise wrong

    def _frame(self) -> tuple[Codec, bytes] | None:
        if self.broken or self.pending < _HEADER.size:
            return None
        kind, length = _HEADER.unpack_from(self._data, self._at)
        if kind not in (Codec.JSON, Codec.MSGPACK):
            self._break()
            raise ProtocolError(f"a frame begins with J or M, not with the byte {kind}", PARSE_ERROR)
        if length > self.most:
            self._break()
            raise OversizeFrame(f"a frame of {length} bytes; at most {self.most} are read")
        begin = self._at + _HEADER.size
        if len(self._data) < begin + length:
            return None
        self._at = begin + length
        return Codec(kind), bytes(memoryview(self._data)[begin : self._at])

    def _break(self) -> None:
        self.broken, self._at = True, 0
        self._data.clear()


def _read(codec: Codec, body: bytes) -> tuple[list[Message], ProtocolError | None]:
    """The messages of a body, and the error in it."""
    try:
        found = _DECODE[codec](body)
        several = found if isinstance(found, list) else [found]
    except msgspec.ValidationError as error:
        wrong = ProtocolError(f"not a JSON-RPC 2.0 message: {error}")
        try:
            several = _DECODE_PARTS[codec](body) if len(body) <= SALVAGED else []
        except _NOT_IT:  # one message, not an array
            several = []
        if not several:
            return [], wrong
    except _NOT_IT as error:
        return [], ProtocolError(f"a frame that is not {codec.label}: {error}", PARSE_ERROR)
    if not 0 < len(several) <= MAX_MESSAGES:
        return [], ProtocolError(f"{len(several)} messages in a frame: must be 1 to {MAX_MESSAGES}")
    return _sorted(several, codec)


def _sorted(several: list[Any], codec: Codec) -> tuple[list[Message], ProtocolError | None]:
    """The valid messages, and the errors of the others."""
    messages: list[Message] = []
    first, wrong = "", 0
    for one in several:
        try:
            known = _DECODE[codec](one) if isinstance(one, msgspec.Raw) else one
            if isinstance(known, list):
                raise ProtocolError("an array in an array")
            messages.append(known.message())
        except (*_NOT_IT, ProtocolError) as error:
            first, wrong = first or str(error), wrong + 1
    if not wrong:
        return messages, None
    which = "" if len(several) == 1 else f" ({wrong} of the {len(several)} in a frame)"
    return messages, ProtocolError(f"not a JSON-RPC 2.0 message{which}: {first}")


# -- parts of messages -------------------------------------------------------------------------------------------------


class Reader:
    """Decodes the params or results of one type, in either codec. Raises ProtocolError (−32602) that names the field,
    and ConfigError for a value out of its range."""

    def __init__(self, kind: Any) -> None:
        self._decode: dict[Codec, Callable[[Any], Any]] = {
            Codec.JSON: msgspec.json.Decoder(kind).decode,
            Codec.MSGPACK: msgspec.msgpack.Decoder(kind).decode,
        }

    def read(self, raw: msgspec.Raw, codec: Codec) -> Any:
        """The params or result; left out, an empty object."""
        try:
            return self._decode[codec](raw or _EMPTY[codec])
        except _NOT_IT as error:
            if isinstance(error.__cause__, ReflexError):  # a value out of its range
                raise error.__cause__ from None
            raise ProtocolError(str(error), INVALID_PARAMS) from None


_EMPTY = {Codec.JSON: msgspec.Raw(b"{}"), Codec.MSGPACK: msgspec.Raw(b"\x80")}

_KINDS: dict[str, type[ReflexError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ReflexError)
}


def error_of(error: ReflexError) -> RpcError:
    """An error of the runtime on the wire; `raised` makes the same error of it."""
    if isinstance(error, ProtocolError):
        return RpcError(error.rpc_code, error.message)
    known = next(kind.__name__ for kind in type(error).__mro__ if _KINDS.get(kind.__name__) is kind)
    data = {"type": known, "code": error.code, "retry_after": error.retry_after, "details": dict(error.details)}
    told = INTERNAL_ERROR if error.code == ReflexError.code else APPLICATION_ERROR
    return RpcError(INVALID_PARAMS if isinstance(error, ConfigError) else told, error.message, data)


def raised(error: RpcError) -> ReflexError:
    """The error that `error_of` was given at the other end."""
    data = error.data if isinstance(error.data, dict) else {}
    kind, details, after = _KINDS.get(str(data.get("type"))), data.get("details"), data.get("retry_after")
    if kind is None:
        return ProtocolError(error.message[:1000], error.code)
    hint = float(after) if isinstance(after, int | float) and isfinite(after) and after >= 0 else None
    made = kind(error.message[:10_000], retry_after=hint)
    details = details if isinstance(details, dict) else {}
    made.details = {str(k): v for k, v in details.items() if v is None or isinstance(v, str | int | float | bool)}
    return made
