"""The frames of vla-eval, against the codec of its stock client."""

from __future__ import annotations

import io
import time
from typing import Any

import msgpack
import numpy as np
import PIL.Image
import pytest
from vla_eval.protocol import messages as stock
from vla_eval.protocol.numpy_codec import set_image_format

from reflex_runtime.robots import Export
from reflex_runtime.robots.serving.question import ObservationReader
from reflex_runtime.robots.wires.vla_eval import EvalMessage, decode, encode
from reflex_runtime.web.errors import ClientError
from robots.tiny import write_export
from robots.wires.broken import FRESH, check

PICTURE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
OBSERVATION: dict[str, Any] = {"images": {"front": PICTURE}, "states": np.zeros(2), "task_description": "open"}


def packed(payload: Any, kind: str = "observation", seq: int = 7) -> bytes:
    return stock.pack_message(stock.Message(stock.MessageType(kind), payload, seq, 1.5))


def test_w21_what_the_stock_client_sends_is_read_as_it_was() -> None:
    more = {"n": np.float32(0.25), "deep": {"a": [1, None, True, "ä"]}, "wide": np.linspace(0, 1, 3, dtype=">f4")}
    found = decode(packed(OBSERVATION | more))
    assert (found.type, found.seq) == ("observation", 7)
    assert (found.payload["states"] == 0).all()
    assert (found.payload["n"], found.payload["deep"]) == (0.25, {"a": [1, None, True, "ä"]})
    assert found.payload["wide"].tolist() == [0.0, 0.5, 1.0]
    picture = PIL.Image.open(io.BytesIO(found.payload["images"]["front"]))
    assert picture.format == "PNG"
    assert (np.asarray(picture) == PICTURE).all()
    set_image_format("raw")
    try:
        raw = decode(packed({"image": PICTURE})).payload["image"]
        assert (raw == PICTURE).all()
        image = {"__image__": True, "format": "raw", "data": PICTURE.tobytes(), "dtype": "|u1", "shape": [4, 6, 3]}
        assert (decode(packed({"image": image})).payload["image"] == PICTURE).all()
    finally:
        set_image_format("png")


def test_w21_what_is_written_is_what_the_stock_client_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.5)
    message = stock.unpack_message(encode(EvalMessage("action", {"actions": np.array([1, 2], np.float32)}, 9)))
    assert (message.type, message.seq) == (stock.MessageType.ACTION, 9)
    assert message.payload["actions"].tolist() == [1.0, 2.0]
    assert message.timestamp == 1.5


def image(**more: Any) -> bytes:
    return packed({"a": {"__image__": True, "format": "png", "data": b"x", "shape": [1, 1, 3]} | more})


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (packed({"a": {"__ndarray__": True, "data": b"\x80\x04N.", "dtype": "|O", "shape": [1]}}), "dtype"),
        (packed({"a": {"__ndarray__": True, "data": b"1234", "dtype": "<f4", "shape": [2]}}), "4 bytes do not make"),
        (image(format="gif"), "png, jpeg or raw"),
        (image(format=None), "png, jpeg or raw"),
        (image(data="text"), "needs data"),
        (image(format="raw"), "dtype"),
        (image(format="raw", dtype="|u1"), "1 bytes do not make"),
        (packed({"__ndarray__": True, "data": b"1234", "dtype": "<f4", "shape": [1]}), "found an array for a map"),
        (msgpack.packb([1]), "must be a map"),
        (msgpack.packb({"type": "hello", "payload": {}}), "`seq`"),
        (msgpack.packb({"type": "hello", "payload": {}, "seq": True}), r"\$\.seq"),
        (msgpack.packb({"type": "hello", "payload": [], "seq": 1}), r"\$\.payload"),
        (msgpack.packb({"type": 3, "payload": {}, "seq": 1}), r"\$\.type"),
        (b"", "incomplete input"),
    ],
)
def test_w21_what_is_no_message_is_refused_and_says_why(frame: bytes, why: str) -> None:
    with pytest.raises(ClientError, match=why):
        decode(frame)


@FRESH
def test_w21_broken_frames_raise_nothing_but_our_errors(tmp_path: Any, count: int) -> None:
    reading = ObservationReader(Export.load(write_export(tmp_path / "e")), None)
    seeds = [packed(OBSERVATION), packed(OBSERVATION | {"images": {"front": PICTURE.astype(np.float32) / 255}})]
    seeds.append(packed({"recording": {"eid": "e"}}, "episode_start"))
    seeds.append(packed({"metrics": {"success": True}}, "episode_end"))
    assert check("vla_eval", seeds, lambda frame: reading.read(decode(frame).payload), count) > 0.01
