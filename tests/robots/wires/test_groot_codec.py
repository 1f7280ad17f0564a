"""The messages of GR00T: golden bytes, broken ones, and bounds."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots import Export
from reflex_runtime.robots.serving.question import ObservationReader
from reflex_runtime.robots.wires.groot import GrootObservation, decode, encode, modality_config
from reflex_runtime.web.errors import ClientError
from robots.tiny import write_export
from robots.wires.broken import FRESH, check
from robots.wires.groot_clients import as_nd, as_npy, read

ARRAYS: dict[str, Any] = {
    "image": np.arange(4 * 6 * 3, dtype=np.uint8).reshape(1, 4, 6, 3),
    "state": np.linspace(-1, 1, 8),
    "columns": np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3)),
    "words": np.array(["pick", "up"]),
    "single": np.array(0.5, np.float32),
    "none": np.zeros((0, 3), np.float32),
}
NPY = (
    b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }" + b" " * 60 + b"\n"
    b"\x00\x00\x80?\x00\x00\x00@"
)
GOLDEN = b"\x81\xa1a\x82\xb1__ndarray_class__\xc3\xa6as_npy\xc4\x88" + NPY
ND = b"\x81\xa1a\x85\xc4\x02nd\xc3\xc4\x04type\xa3<f4\xc4\x04kind\xc4\x00\xc4\x05shape\x91\x02\xc4\x04data\xc4\x08"
ND += NPY[-8:]


def same(found: Any, wanted: Any) -> bool:
    return found.dtype == wanted.dtype and found.shape == wanted.shape and bool((found == wanted).all())


@pytest.mark.parametrize("write", [as_npy, as_nd, msgpack_numpy.encode])
def test_w30_arrays_of_all_releases_are_read_as_they_were(write: Any) -> None:
    found = decode(msgpack.packb(ARRAYS, default=write))
    assert all(same(found[name], array) for name, array in ARRAYS.items())
    assert not found["image"].flags.owndata
    scalars = {"a": np.float32(0.25), "b": np.bool_(True), "c": np.int64(-3)}
    assert {name: float(value) for name, value in decode(msgpack.packb(scalars, default=write)).items()} == {
        "a": 0.25, "b": 1.0, "c": -3.0,
    }  # fmt: skip


def test_w30_golden_bytes() -> None:
    array = np.array([1, 2], np.float32)
    assert encode({"a": array}) == GOLDEN
    assert same(read(GOLDEN)["a"], array)
    for frame in (GOLDEN, ND, ND.replace(b"\xc4\x02nd", b"\xa2nd")):
        assert same(decode(frame)["a"], array)
    assert encode(modality_config(["x"], 2, False)) == (
        b"\x82\xb8__ModalityConfig_class__\xc3\xa7as_json\x82\xaddelta_indices\x92\x00\x01\xadmodality_keys\x91\xa1x"
    )
    text = modality_config(["video.x"], 1, True)["as_json"]
    assert text == '{"delta_indices":[0],"modality_keys":["video.x"]}'


def npy(data: bytes) -> bytes:
    packed: bytes = msgpack.packb({"a": {"__ndarray_class__": True, "as_npy": data}})
    return packed


def nd(**more: Any) -> bytes:
    found = {"nd": True, "type": "<f4", "kind": b"", "shape": [1], "data": b"\0" * 4} | more
    packed: bytes = msgpack.packb({"a": found})
    return packed


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (nd(kind=b"O", type="|O"), "kind O or V"),
        (nd(kind="O", nd=False), "kind O or V"),
        (nd(kind=b"V", type=[["a", "<f4"]]), "kind O or V"),
        (nd(kind=None), "kind O or V"),
        (nd(type="|O"), "dtype"),
        (nd(type=[["a", "<f4"]]), "dtype"),
        (nd(shape=[2]), "4 bytes do not make"),
        (nd(shape=[2**62, 2**62, 0], data=b""), "no array"),
        (nd(shape=[-1]), "shape"),
        (nd(data="text"), "data"),
        (nd(nd=False, data=b"\0"), "scalar"),
        (nd(nd=False, data=1), "scalar"),
        (npy(b""), "no file"),
        (npy(NPY[:6]), "no file"),
        (npy(b"\x92" + NPY[1:]), "no file"),
        (npy(NPY[:6] + b"\x09" + NPY[7:]), "no file"),
        (npy(NPY[:8] + b"\xff\xff" + NPY[10:]), "header"),
        (npy(NPY[:8] + b"\x00\x08" + NPY[10:-9] + b" " * 1930 + NPY[-9:]), "no file"),
        (npy(NPY.replace(b"(2,)", b"(-2)")), "no file"),
        (npy(NPY.replace(b"'<f4'", b"'|O' ")), "dtype"),
        (npy(NPY.replace(b"'<f4', ", b"'|O',  ")), "dtype"),
        (npy(NPY.replace(b"'<f4'", b"'|O8'")), "dtype"),
        (npy(NPY.replace(b"'<f4'", b"'<c4'")), "dtype"),
        (npy(NPY.replace(b"(2,)", b"(3,)")), "8 bytes do not make"),
        (npy(NPY.replace(b"(2,)", b"(,2)")), "header"),
        (npy(NPY + b"\0"), "9 bytes do not make"),
        (msgpack.packb({"a": {"__ndarray_class__": True, "as_npy": "text"}}), "no file"),
        (msgpack.packb({"a": {"__ndarray_class__": True}}), "no file"),
        (msgpack.packb([1]), "must be a map"),
        (b"\x81\xa1a\xc7\x00\x01", "extension"),
    ],
)
def test_w33_what_is_no_message_is_refused_and_says_why(frame: bytes, why: str) -> None:
    with pytest.raises(ClientError, match=why):
        decode(frame)


def test_w34_nothing_is_made_beyond_the_bytes_that_came() -> None:
    frame = msgpack.packb({"state.x": ["x" * 10_000, *[1] * 3_000]})  # as an array of texts 120 MB
    tracemalloc.start()
    with pytest.raises(ReflexError, match="must be an array of numbers"):
        GrootObservation(decode(frame))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    big = msgpack.packb({"video.x": np.zeros((1000, 1000, 3), np.uint8)}, default=as_npy)
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    decode(big)
    assert tracemalloc.get_traced_memory()[1] - before < 3_100_000  # the bytes, once
    tracemalloc.stop()


@FRESH
def test_w33_broken_messages_raise_nothing_but_our_errors(tmp_path: Any, count: int) -> None:
    reading = ObservationReader(Export.load(write_export(tmp_path / "e")), None)
    good = {
        "video": {"front": np.zeros((2, 1, 4, 6, 3), np.uint8)},
        "state": {"joints": np.zeros((2, 1, 2))},
        "language": {"task": [["open"], ["close"]]},
    }
    flat = {"video.front": np.zeros((1, 4, 6, 3), np.uint8), "state.joints": [[0.0, 1.0]], "annotation.x": ["open"]}
    seeds = [msgpack.packb(value, default=write) for value in (good, flat) for write in (as_npy, as_nd)]

    def ask(frame: bytes) -> None:
        for row in GrootObservation(decode(frame)).rows(reading):
            reading.read(row)

    for seed in seeds:
        ask(seed)
    assert check("groot", seeds, ask, count) > 0.01
