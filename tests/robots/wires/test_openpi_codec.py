"""The frames of openpi, against the codec of its stock client."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack_numpy as package
import numpy as np
import pytest
from openpi_client import msgpack_numpy as stock

from reflex_runtime.robots import Export
from reflex_runtime.robots.serving.question import ObservationReader
from reflex_runtime.robots.wires.common import FRAME_VALUES
from reflex_runtime.robots.wires.openpi import decode, decode_form, encode
from reflex_runtime.web.errors import ClientError
from robots.tiny import write_export
from robots.wires.broken import FRESH, check

OBSERVATION: dict[str, Any] = {
    "observation/image": np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3),
    "observation/state": np.linspace(-1, 1, 8),
    "observation/gripper": np.array(0.5),
    "nested": {"list": [1, -1, 200, -200, 70_000, -70_000, 2**40, -(2**40), None, True, False, 1.5, "ä"], "b": b"\x00"},
    "scalar": np.float32(0.25),
    "flag": np.bool_(True),
    "words": np.array(["pick", "up"]),
    "big": np.array([1.0, 2.0], ">f8"),
    "none": np.zeros((0, 3), np.float32),
    "prompt": "pick up the cup",
}
GOLDEN = (
    b"\x81\xa1a\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x08\x00\x00\x80?\x00\x00\x00@"
    b"\xc4\x05dtype\xa3<f4\xc4\x05shape\x91\x02"
)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return set(found) == set(wanted) and all(same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, np.ndarray):
        return found.dtype == wanted.dtype and found.shape == wanted.shape and bool((found == wanted).all())
    return bool(found == wanted)


def test_w6_what_the_stock_client_sends_is_read_as_it_was() -> None:
    assert same(decode(stock.packb(OBSERVATION)), OBSERVATION)


def test_w6_arrays_are_written_with_keys_of_bytes_as_the_stock_client_reads_them() -> None:
    value = {"a": np.array([1, 2], np.float32)}
    assert encode(value) == GOLDEN == stock.packb(value)
    answer = {"actions": np.ones((3, 2), np.float32), "timing": {"total_ms": 1.5}, "guard": None, "warnings": ["x"]}
    assert same(stock.unpackb(encode(answer)), answer)


def test_w6_keys_may_be_text_too() -> None:
    text = GOLDEN.replace(b"\xc4\x0b__nd", b"\xab__nd").replace(b"\xc4\x04data", b"\xa4data")
    assert same(decode(text), {"a": np.array([1, 2], np.float32)})
    assert decode(b"\x81\xc4\x01a\xa1b") == {"a": "b"}


def test_w6_arrays_are_views_of_the_bytes_that_came() -> None:
    frame = stock.packb(OBSERVATION)
    tracemalloc.start()
    found = decode(frame)
    assert not found["observation/image"].flags.owndata
    assert not found["observation/image"].flags.writeable
    big = stock.packb({"image": np.zeros((1000, 1000, 3), np.uint8)})
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    decode(big)
    assert tracemalloc.get_traced_memory()[1] - before < 3_100_000  # the bytes, once
    tracemalloc.stop()


def test_w6_arrays_of_msgpack_numpy_are_read_and_answered_in_its_form() -> None:
    own: Any = package.packb
    found, packaged = decode_form(own(OBSERVATION))
    assert packaged
    assert same(found, OBSERVATION)
    assert decode_form(stock.packb(OBSERVATION))[1] is False
    assert decode_form(stock.packb({"prompt": "no array"}))[1] is False
    both = stock.packb({"a": np.zeros(2)})[1:] + own({"b": np.zeros(2)})[1:]
    assert decode_form(b"\x82" + both)[1] is False
    answer = {"actions": np.ones((3, 2), np.float32), "warnings": ["x"]}
    assert same(package.unpackb(encode(answer, packaged)), answer)
    assert encode(answer, packaged) == own(answer)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ({b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": b"\x80\x04N."}, "kind O or V"),
        ({b"nd": True, b"type": [["x", "<f4"]], b"kind": b"V", b"shape": [1], b"data": b"\0" * 4}, "kind O or V"),
        ({b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2**40], b"data": b"\0" * 4}, "4 bytes do not make"),
        ({b"nd": True, b"type": "<c8", b"kind": b"", b"shape": [1], b"data": b"\0" * 8}, "dtype"),
        ({b"nd": False, b"type": "<f4", b"data": b"\0" * 8}, "as many bytes"),
        ({b"nd": False, b"type": None, b"data": b""}, "dtype"),
        ({b"nd": False, b"type": "<f4", b"data": b"\0" * 4, b"order": "F"}, "no 'order': it has nd, type, kind"),
        ({b"__ndarray__": True, b"data": b"", b"dtype": "<f4", b"shape": [0], b"order": "F"}, "no 'order'"),
        ({b"__npgeneric__": True, b"data": 1, b"dtype": "<f4", b"shape": [1]}, "no 'shape'"),
        ({b"__ndarray_class__": True, b"as_npy": b"", b"more": 1}, "no 'more'"),
        ({b"__image__": True, b"format": "png", b"data": b"", b"mode": "RGB"}, "no 'mode'"),
    ],
)
def test_w6_no_array_of_msgpack_numpy_is_unpickled_or_larger_than_it_came(sent: Any, why: str) -> None:
    with pytest.raises(ClientError, match=why):
        decode(stock.packb({"a": sent}))


def array(dtype: Any, data: Any = b"", shape: Any = (0,)) -> bytes:
    packed: bytes = stock.packb({"a": {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}})
    return packed


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (array("|O", b"\x80\x04N."), "dtype"),
        (array("|V8"), "dtype"),
        (array("<c8"), "dtype"),
        (array("<M8[ns]"), "dtype"),
        (array("f4,f4"), "dtype"),
        (array("(3,)f4"), "dtype"),
        (array("<f4" * 100), "dtype"),
        (array("nonsense"), "dtype"),
        (array(None), "dtype"),
        (array("<f4", b"\0" * 4, [2]), "4 bytes do not make"),
        (array("<f4", b"", [-1]), "shape"),
        (array("<f4", b"", [2**62, 2**62, 0]), "no array"),
        (array("<f4", b"", [0] * 9), "shape"),
        (array("<f4", b"", [1.0]), "shape"),
        (array("<f4", "text", [1]), "data"),
        (array("<f4", b"", None), "shape"),
        (stock.packb({"a": {b"__npgeneric__": True, b"data": [1], b"dtype": "<f4"}}), "scalar"),
        (stock.packb({"a": {b"__npgeneric__": True, b"data": 1, b"dtype": "|O"}}), "dtype"),
        (stock.packb([1, 2]), "must be a map"),
        (stock.packb({1: 2}), "keys are not texts"),
        (b"", "incomplete input|within the bounds"),
        (b"\x81\xa1a", "incomplete input|within the bounds"),
        (b"\x81\xa1a\xc6\xff\xff\xff\xff", "incomplete input|within the bounds"),
        (b"\x81\xa1a\xa1\xff", "utf-8"),
        (stock.packb({"a": "é" * 40_000}), "max_str_len"),
        (b"\x81\xa1a\xc1", "extension"),
        (b"\x81\xa1a\xd6\xff\0\0\0\0", "extension"),
        (b"\x80\x80", "extra data"),
    ],
)
def test_w6_what_is_no_observation_is_refused_and_says_why(frame: bytes, why: str) -> None:
    with pytest.raises(ClientError, match=why):
        decode(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a" + b"\xdc\xff\xff" * 1000,
        b"\x91" * 2000 + b"\x80",
        b"".join(b"\xdc" + (2000).to_bytes(2, "big") for _ in range(1000)),
        b"\x81\xa1a\xdd" + (1_000_000).to_bytes(4, "big") + b"\x80" * 1_000_000,
        b"\x81\xa1a\xdd" + (FRAME_VALUES + 1).to_bytes(4, "big") + b"\x01" * (FRAME_VALUES + 1),
    ],
)
def test_w6_no_frame_makes_more_values_than_the_bound(frame: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(ClientError, match=r"values|nested"):
        decode(frame)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


@FRESH
def test_w6_broken_frames_raise_nothing_but_our_errors(tmp_path: Any, count: int) -> None:
    reading = ObservationReader(Export.load(write_export(tmp_path / "e")), None)
    good = {"observation/front": np.zeros((4, 6, 3), np.uint8), "observation/state": np.zeros(2), "prompt": "open"}
    seeds = [stock.packb(good), stock.packb(OBSERVATION), stock.packb({"batch": [good]}), GOLDEN]
    seeds.append(package.packb(OBSERVATION))
    share = check("openpi", seeds, lambda frame: reading.read(decode(frame)), count)
    assert share > 0.01  # what is hit is often a pixel
