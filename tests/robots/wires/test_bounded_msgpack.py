"""msgpack read within bounds, against the library."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import msgpack
import pytest

from reflex_runtime.robots.wires.common import FRAME_VALUES, unpack
from reflex_runtime.web.errors import ClientError


def same(value: dict[str, Any]) -> Any:
    return value


def float32(value: float) -> float:
    return float(struct.unpack(">f", struct.pack(">f", value))[0])


LISTS = {
    "floats": [0.5, -1.0, math.inf, 1e30] * 8,
    "whole numbers": [*range(129), -1, -33, 2**31, -(2**31), 2**64 - 1, -(2**63)],
    "lists": [[1.0, 2.0]] * 20,
    "others": [1, 1.0, "x", None, True, {}],
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("single", [False, True])
def test_w6_lists_are_read_as_they_were(name: str, single: bool) -> None:
    sent = {"before": 1, "list": LISTS[name], "behind": "x"}
    frame = msgpack.packb(sent, use_single_float=single)
    found = unpack(frame, same)
    assert found == msgpack.unpackb(frame)
    kinds = [type(value) for value in LISTS[name]]
    assert [type(value) for value in found["list"]] == kinds


@pytest.mark.parametrize("value", [math.nan, 0.1])
def test_w6_single_floats_are_what_they_are(value: float) -> None:
    found = unpack(msgpack.packb([value] * 20, use_single_float=True), same)
    assert str(found) == str([float32(value)] * 20)


@pytest.mark.parametrize("name", LISTS)
def test_w6_a_list_that_breaks_off_is_refused_wherever_it_does(name: str) -> None:
    frame = msgpack.packb({"list": LISTS[name]})
    for size in range(len(frame)):
        with pytest.raises(ClientError, match=r"incomplete input|exceeds max_"):
            unpack(frame[:size], same)
    with pytest.raises(ClientError, match="extra data"):
        unpack(frame + b"\x00", same)


def test_w6_values_are_bounded() -> None:
    assert len(unpack(msgpack.packb([0.5] * FRAME_VALUES), same)) == FRAME_VALUES
    with pytest.raises(ClientError, match=f"{FRAME_VALUES} values"):
        unpack(msgpack.packb([1] * (FRAME_VALUES + 1)), same)


def test_w6_random_values_are_read_as_the_library_reads_them() -> None:
    rng = random.Random(3)

    def value(depth: int) -> Any:
        kind = rng.randrange(9 if depth < 4 else 7)
        if kind == 7:
            return [value(depth + 1) for _ in range(rng.choice([0, 1, 3, 15, 16, 20]))]
        if kind == 8:
            return {f"k{i}": value(depth + 1) for i in range(rng.choice([0, 1, 3, 16]))}
        large, small = rng.randrange(-(2**63), 2**64), rng.randrange(-40, 140)
        text, data = "é" * rng.randrange(40), rng.randbytes(rng.choice([0, 3, 300]))
        return (None, True, large, small, rng.random(), text, data)[kind]

    for _ in range(300):
        frame = msgpack.packb(value(1))
        assert unpack(frame, same) == msgpack.unpackb(frame)
