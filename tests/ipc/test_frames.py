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

from ipc.rpc import answer, call, note, refusal
from reflex_runtime.core import errors
from reflex_runtime.core.errors import ConfigError, Expired, QueueFull, ReflexError
from reflex_runtime.ipc.frames import (
    APPLICATION_ERROR,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    PARSE_ERROR,
    FrameDecoder,
    ProtocolError,
    Reader,
    RpcError,
    RpcMessage,
    encode,
    error_of,
    raised,
)
from reflex_runtime.ipc.messages import GenerateParams
from reflex_runtime.ipc.peer import ConnectionLost

ANY = Reader(Any)
REPEATABLE = settings(deadline=None, derandomize=True, database=None)


def frame(body: bytes, kind: bytes = b"J") -> bytes:
    return kind + struct.pack(">I", len(body)) + body


def body(value: Any) -> bytes:
    return frame(msgspec.json.encode(value))


def plain(message: RpcMessage) -> RpcMessage:
    """With its parts read."""
    for name in ("params", "result"):
        raw = getattr(message, name, None)
        if isinstance(raw, msgspec.Raw):
            setattr(message, name, ANY.read(raw))
    return message


def read(decoder: FrameDecoder) -> list[Any]:
    """Everything that is there, the error at its end among it."""
    found: list[Any] = []
    try:
        for messages in decoder:
            found += map(plain, messages)
    except ProtocolError as error:
        found.append(error)
    return found


def decoded(data: bytes) -> list[Any]:
    decoder = FrameDecoder()
    decoder.feed(data)
    return read(decoder)


MESSAGES: list[RpcMessage] = [
    call(1, "generate", {"stream_id": "s", "prompt": "für 猫"}),
    note("stream.chunk", {"tokens": [1, 2.5, None, True]}),
    answer("seven", {"ok": []}),
    answer(2, None),
    refusal(None, RpcError(PARSE_ERROR, "no")),
    refusal(3, RpcError(APPLICATION_ERROR, "full", {"type": "QueueFull"})),
]


# -- torn and together -------------------------------------------------------------------------------------------------


def test_a_frame_may_be_torn_at_every_byte() -> None:
    data = encode(MESSAGES)
    for at in range(len(data) + 1):
        decoder = FrameDecoder()
        decoder.feed(data[:at])
        found = read(decoder)
        assert decoder.pending == (at if at < len(data) else 0)
        decoder.feed(data[at:])
        assert found + read(decoder) == MESSAGES
        assert decoder.pending == 0


def test_bytes_may_come_one_by_one_and_frames_many_at_a_time() -> None:
    data = b"".join(encode([message]) for message in MESSAGES)
    assert decoded(data) == MESSAGES
    decoder, found = FrameDecoder(), []
    for n in range(len(data)):
        decoder.feed(data[n : n + 1])
        found += read(decoder)
    assert found == MESSAGES


def test_a_frame_is_what_the_page_says() -> None:
    data = encode([call(1, "generate", {"a": 1})])
    assert data[:5] == b"J" + len(data[5:]).to_bytes(4, "big")
    assert json.loads(data[5:]) == {"jsonrpc": "2.0", "id": 1, "method": "generate", "params": {"a": 1}}
    assert json.loads(encode([note("x")])[5:]) == {"jsonrpc": "2.0", "method": "x"}
    assert json.loads(encode(MESSAGES)[5:])[3] == {"jsonrpc": "2.0", "id": 2, "result": None}


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x00\x02{}", b"{    ", b"GET / HTTP/1.1\r\n\r\n", b"M\x00\x00\x00\x01"])
def test_what_is_no_frame_is_told_before_its_body_came(data: bytes) -> None:
    [error] = decoded(data)
    assert error.rpc_code == PARSE_ERROR


def test_a_frame_that_is_too_large_is_told_before_its_body_came() -> None:
    decoder = FrameDecoder(most=100)
    decoder.feed(body({"jsonrpc": "2.0", "method": "x" * 60}))
    assert len(read(decoder)) == 1
    decoder.feed(b"J" + struct.pack(">I", 101))
    with pytest.raises(ProtocolError, match="101 bytes; at most 100"):
        list(decoder)


def test_what_is_sent_is_bounded_alike() -> None:
    with pytest.raises(ProtocolError, match="at most 100 are sent"):
        encode([note("x", "y" * 100)], most=100)


@pytest.mark.parametrize("value", [object(), "\ud800", {1j: 2}])
def test_what_cannot_be_written_is_a_protocol_error(value: Any) -> None:
    with pytest.raises(ProtocolError, match="cannot be written") as caught:
        encode([note("x", value)])
    assert caught.value.rpc_code == INTERNAL_ERROR


@pytest.mark.parametrize("data", [b"", b"{", b"nonsense", b'{"jsonrpc":"2.0","method":"\xff"}', b'{"a":"\\ud800"}'])
def test_what_is_not_json_is_a_parse_error(data: bytes) -> None:
    found = decoded(encode(MESSAGES[:1]) + frame(data))
    assert found[:-1] == MESSAGES[:1]
    assert found[-1].rpc_code == PARSE_ERROR


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
def test_what_is_no_message_is_an_invalid_request(value: Any) -> None:
    good = {"jsonrpc": "2.0", "id": 1, "method": "x"}
    for wrong in (value, [good, value]):
        [error] = decoded(body(wrong))  # nothing of its frame is read
        assert error.rpc_code == INVALID_REQUEST


def test_an_id_has_64_bits() -> None:
    huge = b'{"jsonrpc":"2.0","method":"x","id":%d}'
    assert decoded(frame(huge % (2**63 - 1)))[0].id == 2**63 - 1
    assert decoded(frame(huge % 2**64))[0].rpc_code == INVALID_REQUEST
    assert decoded(frame(b'{"jsonrpc":"2.0","method":"x","id":' + b"9" * 5000 + b"}"))[0].rpc_code == INVALID_REQUEST


DEEP = 100_000


@pytest.mark.parametrize(
    "data",
    [
        frame(b"[" * DEEP + b"]" * DEEP),
        frame(b'{"jsonrpc":"2.0","method":"x","params":' + b"[" * DEEP + b"]" * DEEP + b"}"),
        frame(b'{"jsonrpc":"2.0","method":"x","y":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}"),
    ],
)
def test_deep_nesting_is_an_error_like_others(data: bytes) -> None:
    """Or it is skipped in a field without a meaning: on Python 3.14."""
    [found] = decoded(data)
    assert isinstance(found, ProtocolError) or found == note("x")


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
    st.builds(call, ids | st.none(), names, values)
    | st.builds(note, names, values)
    | st.builds(answer, ids | st.none(), values)
    | st.builds(refusal, ids | st.none(), some_errors)
)


@settings(REPEATABLE, max_examples=40)
@given(st.lists(messages, min_size=1, max_size=5), st.data())
def test_what_is_encoded_is_decoded_however_torn(several: list[RpcMessage], data: st.DataObject) -> None:
    sent = encode(several)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=5)))
    decoder, found = FrameDecoder(), []
    for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        decoder.feed(sent[begin:end])
        found += read(decoder)
    assert found == several


@REPEATABLE
@given(st.lists(st.binary(max_size=60) | st.binary(max_size=60).map(frame) | values.map(body)))
def test_garbage_is_a_protocol_error_and_nothing_else(pieces: list[bytes]) -> None:
    decoder, fed = FrameDecoder(most=1000), 0
    for piece in pieces:
        decoder.feed(piece)
        fed += len(piece)
        found = read(decoder)
        assert all(isinstance(one, RpcMessage | ProtocolError) for one in found)
        assert decoder.pending <= fed
        if found and isinstance(found[-1], ProtocolError):
            return  # nothing is read after it


@REPEATABLE
@given(st.binary(max_size=60))
def test_garbage_in_params_is_invalid_params_and_nothing_else(raw: bytes) -> None:
    for reader in (Reader(GenerateParams), ANY):
        with contextlib.suppress(ProtocolError):
            reader.read(msgspec.Raw(raw))


# -- params ------------------------------------------------------------------------------------------------------------


def test_params_that_are_wrong_name_the_field() -> None:
    reader = Reader(GenerateParams)
    [found] = decoded(encode([note("x", {"stream_id": "s", "max_tokens": 3, "newer": 1})]))
    assert found.params["max_tokens"] == 3
    write = msgspec.json.encode
    with pytest.raises(ProtocolError, match="max_tokens") as caught:
        reader.read(msgspec.Raw(write({"max_tokens": "3"})))
    assert caught.value.rpc_code == INVALID_PARAMS
    with pytest.raises(ConfigError, match="top_p=7"):  # of the type, and out of its range
        reader.read(msgspec.Raw(write({"top_p": 7.0})))


def test_params_that_were_left_out_are_an_empty_object() -> None:
    decoder = FrameDecoder()
    decoder.feed(encode([call(1, "x")]))
    [[request]] = list(decoder)
    assert isinstance(request, RpcMessage)
    assert ANY.read(request.params) == {}


# -- errors ------------------------------------------------------------------------------------------------------------

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ReflexError)]


def across(error: ReflexError) -> tuple[RpcError, ReflexError]:
    [answer] = decoded(encode([refusal(1, error_of(error))]))
    return answer.error, raised(answer.error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_the_same_on_the_other_side(kind: type[ReflexError]) -> None:
    told, found = across(kind("what went wrong", retry_after=1.5, limit=3, name="x", message_=None))
    assert type(found) is kind
    assert (found.message, found.retry_after) == ("what went wrong", 1.5)
    assert dict(found.details) == {"limit": 3, "name": "x", "message_": None}
    wanted = {ConfigError: INVALID_PARAMS, ReflexError: INTERNAL_ERROR}
    assert told.code == wanted.get(kind, APPLICATION_ERROR)


def test_a_protocol_error_keeps_its_number() -> None:
    told, found = across(ProtocolError("no stream_id", INVALID_PARAMS))
    assert (told.code, told.data) == (INVALID_PARAMS, None)
    assert isinstance(found, ProtocolError)
    assert found.rpc_code == INVALID_PARAMS


def test_an_error_of_our_own_is_told_as_what_the_other_end_knows() -> None:
    class Busy(QueueFull):
        pass

    assert type(across(Busy("x"))[1]) is QueueFull
    told, found = across(ConnectionLost("gone"))
    assert (type(found), told.code) == (ReflexError, APPLICATION_ERROR)


@pytest.mark.parametrize("after", [float("nan"), float("inf"), -1.0, "soon", [1]])
def test_hostile_errors_are_errors_all_the_same(after: Any) -> None:
    details = {"self": 1, "message": 2, "retry_after": 3, "deep": [1], "x": 4}
    error = RpcError(1, "m" * 100_000, {"type": "Expired", "retry_after": after, "details": details})
    [answer] = decoded(encode([refusal(1, error)]))
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
    [answer] = decoded(encode([refusal(1, error)]))
    return raised(answer.error)
