"""Frames as bytes: torn, several, wrong, hostile. No socket."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflex_runtime.core import errors
from reflex_runtime.core.errors import ConfigError, Expired, QueueFull, ReflexError
from reflex_runtime.ipc.frames import (
    APPLICATION_ERROR,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    MAX_MESSAGES,
    PARSE_ERROR,
    SALVAGED,
    Codec,
    ErrorResponse,
    FrameDecoder,
    Message,
    Notification,
    OversizeFrame,
    ProtocolError,
    Reader,
    Response,
    RpcError,
    RpcRequest,
    encode,
    error_of,
    raised,
)
from reflex_runtime.ipc.messages import GenerateParams
from reflex_runtime.ipc.peer import ConnectionLost

ANY = Reader(Any)
BOTH = pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.label)


def frame(body: bytes, kind: bytes = b"J") -> bytes:
    return kind + struct.pack(">I", len(body)) + body


def body(codec: Codec, value: Any) -> bytes:
    return frame(msgspec.json.encode(value) if codec is Codec.JSON else msgspec.msgpack.encode(value), bytes([codec]))


def plain(message: Message, codec: Codec) -> Message:
    """With its parts read."""
    for name in ("params", "result"):
        raw = getattr(message, name, None)
        if isinstance(raw, msgspec.Raw):
            setattr(message, name, ANY.read(raw, codec))
    return message


def read(decoder: FrameDecoder) -> list[Any]:
    """Everything that is there, errors among it."""
    found: list[Any] = []
    while True:
        try:
            for codec, messages in decoder:
                found += [plain(message, codec) for message in messages]
        except ProtocolError as error:
            found.append(error)
        else:
            return found
        if decoder.broken:
            return found


def decoded(data: bytes) -> list[Any]:
    decoder = FrameDecoder()
    decoder.feed(data)
    return read(decoder)


MESSAGES: list[Message] = [
    RpcRequest(1, "generate", {"stream_id": "s", "prompt": "für 猫"}),
    Notification("stream.chunk", {"tokens": [1, 2.5, None, True]}),
    Response("seven", {"ok": []}),
    Response(2, None),
    ErrorResponse(None, RpcError(PARSE_ERROR, "no")),
    ErrorResponse(3, RpcError(APPLICATION_ERROR, "full", {"type": "QueueFull"})),
]


# -- torn and together -------------------------------------------------------------------------------------------------


@BOTH
def test_a_frame_may_be_torn_at_every_byte(codec: Codec) -> None:
    data = encode(MESSAGES, codec)
    for at in range(len(data) + 1):
        decoder = FrameDecoder()
        decoder.feed(data[:at])
        found = read(decoder)
        assert decoder.pending == (at if at < len(data) else 0)
        decoder.feed(data[at:])
        assert found + read(decoder) == MESSAGES
        assert decoder.pending == 0


@BOTH
def test_bytes_may_come_one_by_one_and_frames_many_at_a_time(codec: Codec) -> None:
    data = b"".join(encode([message], codec) for message in MESSAGES)
    assert decoded(data) == MESSAGES
    decoder, found = FrameDecoder(), []
    for n in range(len(data)):
        decoder.feed(data[n : n + 1])
        found += read(decoder)
    assert found == MESSAGES


def test_every_frame_names_its_own_codec() -> None:
    data = encode(MESSAGES[:2], Codec.JSON) + encode(MESSAGES[2:], Codec.MSGPACK)
    decoder = FrameDecoder()
    decoder.feed(data)
    assert [codec for codec, _ in decoder] == [Codec.JSON, Codec.MSGPACK]


def test_a_json_body_is_what_the_page_says() -> None:
    data = encode([RpcRequest(1, "generate", {"a": 1})], Codec.JSON)
    assert data[:5] == b"J" + len(data[5:]).to_bytes(4, "big")
    assert json.loads(data[5:]) == {"jsonrpc": "2.0", "id": 1, "method": "generate", "params": {"a": 1}}
    assert json.loads(encode([Notification("x")], Codec.JSON)[5:]) == {"jsonrpc": "2.0", "method": "x"}
    assert json.loads(encode(MESSAGES, Codec.JSON)[5:])[3] == {"jsonrpc": "2.0", "id": 2, "result": None}


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x00\x02{}", b"{", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_frame_of_no_codec_breaks_the_connection(data: bytes) -> None:
    decoder = FrameDecoder()
    decoder.feed(data if len(data) >= 5 else data * 5)
    [error] = read(decoder)
    assert (error.rpc_code, decoder.broken) == (PARSE_ERROR, True)
    decoder.feed(b"x" * 1_000_000)
    assert list(decoder) == []
    assert decoder.pending == 0  # and nothing is kept


def test_a_frame_that_is_too_large_breaks_the_connection_before_its_body_came() -> None:
    decoder = FrameDecoder(most=100)
    decoder.feed(frame(b" " * 95 + b"{}"))
    assert read(decoder)[0].rpc_code == INVALID_REQUEST  # 97 bytes are read
    decoder.feed(b"J" + struct.pack(">I", 101))
    with pytest.raises(OversizeFrame, match="101 bytes; at most 100"):
        list(decoder)
    assert decoder.broken


def test_what_is_sent_is_bounded_alike() -> None:
    with pytest.raises(OversizeFrame, match="at most 100 are sent"):
        encode([Notification("x", "y" * 100)], Codec.JSON, most=100)


@pytest.mark.parametrize("value", [object(), "\ud800", {1j: 2}])
@BOTH
def test_what_cannot_be_written_is_a_protocol_error(codec: Codec, value: Any) -> None:
    with pytest.raises(ProtocolError, match="cannot be written") as caught:
        encode([Notification("x", value)], codec)
    assert caught.value.rpc_code == INTERNAL_ERROR


@pytest.mark.parametrize("data", [b"", b"{", b"nonsense", b'{"jsonrpc":"2.0","method":"\xff"}', b'{"a":"\\ud800"}'])
def test_what_is_not_json_is_a_parse_error_and_the_next_frame_is_read(data: bytes) -> None:
    found = decoded(frame(data) + encode(MESSAGES[:1], Codec.JSON))
    assert found[0].rpc_code == PARSE_ERROR
    assert found[1:] == MESSAGES[:1]


NO_MESSAGE: list[Any] = [
    1,
    None,
    "x",
    {},
    [],
    [[]],
    {"method": "x"},  # no version
    {"jsonrpc": "1.0", "method": "x"},
    {"jsonrpc": "2.0"},
    {"jsonrpc": "2.0", "id": 1},
    {"jsonrpc": "2.0", "id": 1, "error": None},
    {"jsonrpc": "2.0", "result": 1},
    {"jsonrpc": "2.0", "method": 1},
    {"jsonrpc": "2.0", "method": "x" * 201},
    {"jsonrpc": "2.0", "method": "x", "id": 1.5},
    {"jsonrpc": "2.0", "method": "x", "id": True},
    {"jsonrpc": "2.0", "method": "x", "id": {}},
    {"jsonrpc": "2.0", "method": "x", "id": "x" * 201},
    {"jsonrpc": "2.0", "id": 1, "error": {"code": "x", "message": "y"}},
    {"jsonrpc": "2.0", "id": 1, "error": {"code": 1}},
]


@pytest.mark.parametrize("value", NO_MESSAGE, ids=str)
@BOTH
def test_what_is_no_message_is_an_invalid_request_and_the_next_frame_is_read(codec: Codec, value: Any) -> None:
    found = decoded(body(codec, value) + encode(MESSAGES[:1], codec))
    assert [error.rpc_code for error in found[:-1]] == [INVALID_REQUEST]
    assert found[-1:] == MESSAGES[:1]


def test_an_id_is_one_that_either_codec_can_write() -> None:
    huge = b'{"jsonrpc":"2.0","method":"x","id":%d}'
    assert decoded(frame(huge % (2**63 - 1)))[0].id == 2**63 - 1
    assert decoded(frame(huge % 2**64))[0].rpc_code == INVALID_REQUEST
    assert decoded(frame(b'{"jsonrpc":"2.0","method":"x","id":' + b"9" * 5000 + b"}"))[0].rpc_code == INVALID_REQUEST


@BOTH
def test_of_an_array_the_good_messages_are_read_and_the_others_told_once(codec: Codec) -> None:
    good = {"jsonrpc": "2.0", "id": 1, "method": "x"}
    found = decoded(body(codec, [good, 7, {"jsonrpc": "2.0"}, [good], good | {"id": 2}]))
    assert [message.id for message in found[:2]] == [1, 2]
    [error] = found[2:]
    assert error.rpc_code == INVALID_REQUEST
    assert "3 of the 5" in error.message


def test_in_a_large_frame_nothing_is_salvaged() -> None:
    good = {"jsonrpc": "2.0", "id": 1, "method": "x"}
    [error] = decoded(body(Codec.JSON, [good, "x" * SALVAGED]))
    assert error.rpc_code == INVALID_REQUEST


def test_messages_in_a_frame_are_bounded() -> None:
    one = b'{"jsonrpc":"2.0","method":"x"}'
    assert len(decoded(frame(b"[" + b",".join([one] * MAX_MESSAGES) + b"]"))) == MAX_MESSAGES
    [error] = decoded(frame(b"[" + b",".join([one] * (MAX_MESSAGES + 1)) + b"]"))
    assert f"{MAX_MESSAGES + 1} messages" in error.message


DEEP = 100_000


@pytest.mark.parametrize(
    "data",
    [
        frame(b"[" * DEEP + b"]" * DEEP),
        frame(b'{"jsonrpc":"2.0","method":"x","params":' + b"[" * DEEP + b"]" * DEEP + b"}"),
        frame(b'{"jsonrpc":"2.0","method":"x","y":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}"),
        frame(b"\x91" * DEEP, b"M"),
        frame(b"\x82\xa7jsonrpc\xa32.0\xa6params" + b"\x91" * DEEP + b"\xc0", b"M"),
        frame(b"\xdd\xff\xff\xff\xff" * 3, b"M"),
        frame(b"\xdf\xff\xff\xff\xff", b"M"),
    ],
)
def test_deep_nesting_and_lengths_that_lie_are_errors_like_others(data: bytes) -> None:
    found = decoded(data + encode(MESSAGES[:1], Codec.JSON))
    assert isinstance(found[0], ProtocolError)
    assert found[1:] == MESSAGES[:1]


# -- whatever comes ----------------------------------------------------------------------------------------------------

values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
ids = st.integers(-(2**63), 2**63 - 1) | st.text(max_size=200)
names = st.text(max_size=50)
some_errors = st.builds(RpcError, st.integers(-40_000, 0), st.text(), values)
messages = (
    st.builds(RpcRequest, ids | st.none(), names, values)
    | st.builds(Notification, names, values)
    | st.builds(Response, ids | st.none(), values)
    | st.builds(ErrorResponse, ids | st.none(), some_errors)
)


@settings(deadline=None, max_examples=40)
@given(st.lists(messages, min_size=1, max_size=5), st.sampled_from(Codec), st.data())
def test_what_is_encoded_is_decoded_however_torn(several: list[Message], codec: Codec, data: st.DataObject) -> None:
    sent = encode(several, codec)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=5)))
    decoder, found = FrameDecoder(), []
    for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        decoder.feed(sent[begin:end])
        found += read(decoder)
    assert found == several


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60) | st.binary(max_size=60).map(frame) | values.map(lambda v: body(Codec.JSON, v))))
def test_garbage_is_a_protocol_error_and_nothing_else(pieces: list[bytes]) -> None:
    decoder, fed = FrameDecoder(most=1000), 0
    for piece in pieces:
        decoder.feed(piece)
        fed += len(piece)
        assert all(isinstance(one, Message | ProtocolError) for one in read(decoder))
        assert decoder.pending <= min(fed, 1005)


@settings(deadline=None)
@given(st.binary(max_size=60), st.sampled_from(Codec))
def test_garbage_in_params_is_invalid_params_and_nothing_else(raw: bytes, codec: Codec) -> None:
    for reader in (Reader(GenerateParams), ANY):
        with contextlib.suppress(ProtocolError):
            reader.read(msgspec.Raw(raw), codec)


# -- params ------------------------------------------------------------------------------------------------------------


@BOTH
def test_params_that_are_wrong_name_the_field(codec: Codec) -> None:
    reader = Reader(GenerateParams)
    [note] = decoded(encode([Notification("x", {"stream_id": "s", "max_tokens": 3, "newer": 1})], codec))
    assert note.params["max_tokens"] == 3
    write = msgspec.json.encode if codec is Codec.JSON else msgspec.msgpack.encode
    with pytest.raises(ProtocolError, match="max_tokens") as caught:
        reader.read(msgspec.Raw(write({"max_tokens": "3"})), codec)
    assert caught.value.rpc_code == INVALID_PARAMS
    with pytest.raises(ConfigError, match="top_p=7"):  # of the type, and out of its range
        reader.read(msgspec.Raw(write({"top_p": 7.0})), codec)


@BOTH
def test_params_that_were_left_out_are_an_empty_object(codec: Codec) -> None:
    decoder = FrameDecoder()
    decoder.feed(encode([RpcRequest(1, "x")], codec))
    [(_, [request])] = list(decoder)
    assert isinstance(request, RpcRequest)
    assert ANY.read(request.params, codec) == {}


# -- errors ------------------------------------------------------------------------------------------------------------

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ReflexError)]


def across(error: ReflexError, codec: Codec) -> tuple[RpcError, ReflexError]:
    [answer] = decoded(encode([ErrorResponse(1, error_of(error))], codec))
    return answer.error, raised(answer.error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@BOTH
def test_every_error_is_the_same_on_the_other_side(codec: Codec, kind: type[ReflexError]) -> None:
    told, found = across(kind("what went wrong", retry_after=1.5, limit=3, name="x", message_=None), codec)
    assert type(found) is kind
    assert (found.message, found.retry_after) == ("what went wrong", 1.5)
    assert dict(found.details) == {"limit": 3, "name": "x", "message_": None}
    wanted = {ConfigError: INVALID_PARAMS, ReflexError: INTERNAL_ERROR}
    assert told.code == wanted.get(kind, APPLICATION_ERROR)


@BOTH
def test_a_protocol_error_keeps_its_number(codec: Codec) -> None:
    told, found = across(ProtocolError("no stream_id", INVALID_PARAMS), codec)
    assert (told.code, told.data) == (INVALID_PARAMS, None)
    assert isinstance(found, ProtocolError)
    assert found.rpc_code == INVALID_PARAMS


def test_an_error_of_our_own_is_told_as_what_the_other_end_knows() -> None:
    class Busy(QueueFull):
        pass

    assert type(across(Busy("x"), Codec.JSON)[1]) is QueueFull
    told, found = across(ConnectionLost("gone"), Codec.JSON)
    assert (type(found), told.code) == (ReflexError, APPLICATION_ERROR)


@pytest.mark.parametrize("after", [float("nan"), float("inf"), -1.0, "soon", [1]])
@BOTH
def test_hostile_errors_are_errors_all_the_same(codec: Codec, after: Any) -> None:
    details = {"self": 1, "message": 2, "retry_after": 3, "deep": [1], "x": 4}
    error = RpcError(1, "m" * 100_000, {"type": "Expired", "retry_after": after, "details": details})
    [answer] = decoded(encode([ErrorResponse(1, error)], codec))
    found = raised(answer.error)
    assert isinstance(found, Expired)
    assert found.retry_after is None
    assert dict(found.details) == {"self": 1, "message": 2, "retry_after": 3, "x": 4}
    assert len(found.message) == 10_000


@pytest.mark.parametrize("data", [None, "text", 3, [], {}, {"type": "Exception"}, {"type": ["x"]}, {"type": "JSON"}])
def test_an_error_of_nobody_we_know_is_a_protocol_error(data: Any) -> None:
    found = across_raw(RpcError(-32001, "x" * 5000, data))
    assert isinstance(found, ProtocolError)
    assert (found.rpc_code, len(found.message)) == (-32001, 1000)


def across_raw(error: RpcError) -> ReflexError:
    [answer] = decoded(encode([ErrorResponse(1, error)], Codec.JSON))
    return raised(answer.error)
