"""Protocol buffers as tables: against the real package in test_oip_grpc.py, broken ones here."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from reflex_runtime.policies.wires.protobuf import MAX_NUMBERS, Field, Message, parse, serialize
from reflex_runtime.web.errors import ClientError

INNER: Message = {1: Field("word", "text"), 2: Field("data", "bytes")}
OUTER: Message = {
    1: Field("yes", "bool"), 2: Field("small", "int"), 3: Field("large", "uint"), 4: Field("half", "float"),
    5: Field("whole", "double"), 6: Field("inner", INNER), 7: Field("words", "text", many=True),
    8: Field("parts", INNER, many=True), 9: Field("ints", "int", many=True), 10: Field("uints", "uint", many=True),
    11: Field("floats", "float", many=True), 12: Field("bools", "bool", many=True),
}  # fmt: skip
VALUES = {
    "yes": True, "small": -3, "large": 2**64 - 1, "half": 0.5, "whole": 0.1, "inner": {"word": "é", "data": b"\0\1"},
    "words": ["a", ""], "parts": [{"word": "b"}, {"data": b"c"}],
}  # fmt: skip


def test_w49_what_is_written_is_read() -> None:
    found = parse(serialize(VALUES, OUTER), OUTER)
    assert {name: found[name] for name in VALUES} == VALUES
    assert [found[name].tolist() for name in ("ints", "uints", "floats", "bools")] == [[], [], [], []]
    assert parse(b"\xa8\6\1\x08\0\x08\1", OUTER)["yes"] is True  # an unknown field, and one that came twice


def test_w49_numbers_come_packed_or_one_by_one() -> None:
    packed = b"\x4a\x0c\5" + b"\xff" * 9 + b"\1\0"
    assert parse(packed + b"\x48\x07", OUTER)["ints"].tolist() == [5, -1, 0, 7]
    many = [(5 - i) * 7**i for i in range(20)]
    assert parse(serialize({"ints": many}, {9: Field("ints", "int", many=True)}), OUTER)["ints"].tolist() == many
    data = b"".join(serialize({"x": i}, {1: Field("x", "int")})[1:] for i in many)
    assert parse(b"\x4a" + bytes([len(data) & 0x7F | 0x80, len(data) >> 7]) + data, OUTER)["ints"].tolist() == many
    assert parse(b"\x52\3\xac\2\1", OUTER)["uints"].tolist() == [300, 1]
    assert parse(b"\x5a\x08" + np.float32([0.5, 2]).tobytes(), OUTER)["floats"].tolist() == [0.5, 2]
    assert parse(b"\x62\2\1\0", OUTER)["bools"].tolist() == [True, False]


@pytest.mark.parametrize(
    "data",
    [
        b"\x08", b"\x32\5a", b"\x32\2\x0a\5", b"\x0a\1a", b"\x25\0\0\0", b"\x3a\1\xff", b"\x0b", b"\x4a\1\x80",
        b"\x08" + b"\x80" * 10 + b"\1", b"\x4a\x0b" + b"\x80" * 10 + b"\1", b"\x5a\3abc", b"\x08\1" * 20_001,
        b"\x52\x80\x80\x80\x01" + bytes(2**21), b"\x4a\x28" + b"\x80" * 40,
        b"\x4a\x28" + bytes(20) + b"\x80" * 19 + b"\1",
    ],
)  # fmt: skip
def test_w49_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ClientError):
        parse(data, OUTER)


def test_w49_numbers_are_bounded() -> None:
    data = b"\x52\x81\x80\x40" + bytes(MAX_NUMBERS + 1)
    tracemalloc.start()
    with pytest.raises(ClientError, match="send tensors as raw bytes"):
        parse(data, OUTER)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_w49_thirty_thousand_broken_messages_raise_nothing_but_ours() -> None:
    rng = random.Random(1)
    whole = serialize(VALUES, OUTER) + b"\x4a\x0c\5" + b"\xff" * 9 + b"\1\0" + b"\x5a\x08" + bytes(8)
    read = 0
    for _ in range(30_000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(data))
            if rng.randrange(2):
                data[at] = rng.randrange(256)
            else:
                del data[at : at + rng.randrange(5)]
        try:
            parse(bytes(data), OUTER)
            read += 1
        except ClientError:
            pass
    assert 0 < read < 27_000
