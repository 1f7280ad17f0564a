"""The forms of outputs that exporters of detectors write, one by one: what is known finds its box, what is not is
refused with what was seen.

Shapes, order and units are those of ultralytics, YOLOX, RF-DETR and D-FINE as their public repositories write them, and
of YOLOv5, YOLOv6, YOLOv7, DETR and torchvision as users report them. Every graph says the same of all pictures, also of
a blank one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from feeds.test_onnx_frames import entries, started
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.recognise import PIXELS, SHARES, unit_of

Arrays = Mapping[str, Any]  # output → its array [1, …]
Size = tuple[int, int]  # width and height

BOX, MIDDLE = (16, 16, 48, 40), (32, 28, 32, 24)
NAMES = "{0: 'red', 1: 'green', 2: 'blue'}"
GAPS = "{1: 'red', 3: 'blue'}"
RFDETR = '{"class_names": ["red", "blue"], "class_id_to_name": {"1": "red", "3": "blue"}, "num_classes": 4}'
POSE, MASKS, OBB = {"task": "pose", "kpt_shape": "[2, 3]"}, {"task": "segment"}, {"task": "obb"}


def head(size: Size, behind: Any, strides: Any = (8, 16, 32), boxes: int = 1) -> Any:
    """[k, 4 + columns]: the thing at its place, a box of 9 × 9 that is nothing at all others. behind: what the thing
    has after its box, and everything else has not."""
    parts = []
    for stride in strides:
        rows, across = np.indices((-(-size[1] // stride), -(-size[0] // stride))).reshape(2, -1) * stride + stride / 2
        parts += [np.stack([across, rows, np.full_like(rows, 9), np.full_like(rows, 9)], axis=1)] * boxes
    places = np.concatenate(parts).astype(np.float32)
    array = np.hstack([places, np.zeros((len(places), len(behind)), np.float32)])
    array[np.abs(places[:, :2] - MIDDLE[:2]).sum(axis=1).argmin()] = [*MIDDLE, *behind]
    return array


def raw(*behind: float, **more: Any) -> Callable[[Size], Arrays]:
    """One column a place, as ultralytics writes it."""
    return lambda size: {"output0": head(size, behind, **more).T[None]}


def rows(*behind: float, box: Any = BOX, more: int = 299) -> Callable[[Size], Arrays]:
    """One row a box; those that are not filled are 0."""
    return lambda size: {"output0": np.pad(np.array([[[*box, *behind]]], np.float32), ((0, 0), (0, more), (0, 0)))}


def objectness(*behind: float, boxes: int = 3, known: bool = False) -> Callable[[Size], Arrays]:
    def made(size: Size) -> Arrays:
        array = head(size, behind, boxes=boxes)
        array[:, 4] = 1 if known else np.maximum(array[:, 4], 0.01)
        return {"output": array[None]}

    return made


def offsets(size: Size) -> Arrays:
    """As YOLOX without `--decode_in_inference`."""
    array = objectness(0.9, 0, 0, 1, boxes=1)(size)["output"][0]
    cells = head(size, ())
    side = np.concatenate([[s] * (-(-size[1] // s) * -(-size[0] // s)) for s in (8, 16, 32)])[:, None]
    own = np.abs(cells[:, :2] - MIDDLE[:2]).sum(axis=1).argmin()
    cells[own, :2] = head(size, (), strides=(8, 16, 32))[own, :2]
    corner = head_cells(size) - side / 2
    array[:, :2] = (array[:, :2] - corner) / side
    array[:, 2:4] = np.log(array[:, 2:4] / side)
    return {"output": array[None]}


def head_cells(size: Size) -> Any:
    parts = [np.indices((-(-size[1] // s), -(-size[0] // s)))[::-1].reshape(2, -1).T * s + s / 2 for s in (8, 16, 32)]
    return np.concatenate(parts)


def shares(size: Size) -> Any:
    """The thing's box, and one in the upper left, in shares of the picture."""
    return np.array([[MIDDLE, (5, 6, 7, 8)]], np.float32) / [*size, *size]


def queries(boxes: str, logits: str, thing: Any, nothing: Any, **more: Any) -> Callable[[Size], Arrays]:
    return lambda size: {boxes: shares(size), logits: np.array([[thing, nothing]], np.float32), **more}


def in_shares(*behind: float) -> Callable[[Size], Arrays]:
    """[n, 2, 4 + …], the boxes in shares."""
    return lambda size: {"output0": np.dstack([shares(size), np.array([[behind, [0.01] * len(behind)]])])}


def named(size: Size) -> Arrays:
    return {
        "labels": np.array([[2, 0]]),
        "boxes": np.array([[BOX, (0, 0, 9, 9)]], np.float32),
        "scores": np.array([[0.9, 0.1]]),
    }


def counted(size: Size) -> Arrays:
    """As TensorRT's EfficientNMS."""
    words = {"labels": "det_classes", "boxes": "det_boxes", "scores": "det_scores"}
    return {words[name]: array for name, array in named(size).items()} | {"num_dets": np.array([[1]])}


def spread(size: Size) -> Arrays:
    """A head that is not overlapping anything: rows of the best places."""
    places = head(size, ())
    corners = np.hstack([places[:, :2] - 4, places[:, :2] + 4])
    array = np.hstack([corners, np.full((len(places), 1), 0.001), np.zeros((len(places), 1))])
    return {"output0": np.concatenate([[[*BOX, 0.9, 2]], array])[None, :30]}


def with_masks(made: Callable[[Size], Arrays], name: str, count: int) -> Callable[[Size], Arrays]:
    return lambda size: {**made(size), name: np.ones((1, count, size[1] // 4, size[0] // 4), np.float32)}


def graph(path: Path, arrays: Arrays, size: Size, form: str, metadata: Mapping[str, str], sized: bool = False) -> Path:
    """form: "" or half, int8 (weights and activations, as onnxruntime quantises them), fixed or open (any size)."""
    kind = TensorProto.FLOAT16 if form == "half" else TensorProto.FLOAT
    batch: Any = 1 if form == "fixed" else "batch"
    sides: Any = ("height", "width") if form == "open" else (size[1], size[0])
    nodes = [helper.make_node("Cast", ["images"], ["wide"], to=TensorProto.FLOAT)]
    if form == "int8":
        nodes += [
            helper.make_node("QuantizeLinear", ["wide", "scale", "middle"], ["bytes"]),
            helper.make_node("DequantizeLinear", ["bytes", "scale", "middle"], ["read"]),
        ]
    seen = "read" if form == "int8" else "wide"
    nodes += [
        helper.make_node("ReduceMean", [seen, "axes"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
    ]
    constants: dict[str, Any] = {"axes": np.array([1, 2, 3]), "zero": np.float32(0)}
    constants |= {"scale": np.float32(1 / 255), "middle": np.uint8(0)} if form == "int8" else {}
    outputs = []
    for name, array in arrays.items():
        whole = array.dtype.kind in "iu"
        own = helper.np_dtype_to_tensor_dtype(array.dtype) if whole else kind
        constants |= {f"{name}_is": array.astype(np.float32), f"{name}_as": np.array([-1] + [1] * (array.ndim - 1))}
        nodes += [
            helper.make_node("Reshape", ["nothing", f"{name}_as"], [f"{name}_none"]),
            helper.make_node("Add", [f"{name}_none", f"{name}_is"], [f"{name}_wide"]),
            helper.make_node("Cast", [f"{name}_wide"], [name], to=own),
        ]
        leading = batch
        if len(array) != 1:  # as many rows as were found, which only a run shows
            nodes[-1].output[0], leading = f"{name}_all", f"{name}_k"
            constants |= {"first": np.array([0]), f"{name}_rows": np.array([len(array)], np.float32)}
            nodes += [
                helper.make_node("Add", ["nothing", f"{name}_rows"], [f"{name}_count"]),
                helper.make_node("Cast", [f"{name}_count"], [f"{name}_end"], to=TensorProto.INT64),
                helper.make_node("Slice", [f"{name}_all", "first", f"{name}_end", "first"], [name]),
            ]
        outputs.append(helper.make_tensor_value_info(name, own, [leading, *array.shape[1:]]))
    inputs = [helper.make_tensor_value_info("images", kind, [batch, 3, *sides])]
    inputs += [helper.make_tensor_value_info("orig_target_sizes", TensorProto.INT64, [batch, 2])] if sized else []
    known = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, known), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    )
    helper.set_model_props(model, {"imgsz": str([size[1], size[0]]), **metadata})
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


KNOWN: dict[str, tuple[Callable[[Size], Arrays], Mapping[str, str], str]] = {
    "ultralytics": (raw(0, 0, 0.9), {"names": NAMES}, "raw head"),
    "ultralytics, names with a gap": (raw(0, 0, 0, 0.9), {"names": GAPS}, "raw head"),
    "ultralytics, no names": (raw(0, 0, 0.9), {}, "raw head"),
    "ultralytics, one class": (raw(0.9), {"names": "['blue']"}, "raw head"),
    "ultralytics, two classes": (raw(0, 0.9), {"names": "['red', 'blue']"}, "raw head"),
    "ultralytics P2": (raw(0, 0, 0.9, strides=(4, 8, 16, 32)), {"names": NAMES}, "raw head"),
    "ultralytics P6": (raw(0, 0, 0.9, strides=(8, 16, 32, 64)), {"names": NAMES}, "raw head"),
    "ultralytics nms": (rows(0.9, 2), {"names": NAMES}, "rows without overlaps"),
    "ultralytics end2end": (spread, {"names": NAMES}, "rows without overlaps"),
    "ultralytics pose": (raw(0, 0, 0.9, 16, 16, 1, 48, 40, 1), {"names": NAMES, **POSE}, "raw head"),
    "ultralytics pose nms": (rows(0.9, 2, 16, 16, 1, 48, 40, 1), {"names": NAMES, **POSE}, "rows without overlaps"),
    "ultralytics segment": (with_masks(raw(0, 0, 0.9, -3, 5), "output1", 2), {"names": NAMES, **MASKS}, "raw head"),
    "ultralytics segment nms": (
        with_masks(rows(0.9, 2, -3, 5), "output1", 2),
        {"names": NAMES, **MASKS},
        "rows without overlaps",
    ),
    "ultralytics obb": (raw(0, 0, 0.9, 0), {"names": NAMES, **OBB}, "raw head"),
    "ultralytics obb nms": (rows(0.9, 2, 0, box=MIDDLE), {"names": NAMES, **OBB}, "rows without overlaps"),
    "ultralytics RT-DETR": (in_shares(0, 0, 0.9), {"names": NAMES}, "queries"),
    "ultralytics RT-DETR, two classes": (in_shares(0, 0.9), {"names": "['red', 'blue']"}, "queries"),
    "ultralytics RT-DETR, best": (
        lambda size: {"output0": np.dstack([shares(size), np.array([[(0.9, 2), (0.1, 0)]])])},
        {"names": NAMES, "head": "RTDETRDecoder"},
        "queries",
    ),
    "YOLOv5": (objectness(1, 0, 0, 0.9), {"names": NAMES}, "raw head"),
    "YOLOv5, no names": (objectness(1, 0, 0, 0.9), {}, "raw head"),
    "YOLOv6": (objectness(1, 0, 0, 0.9, boxes=1, known=True), {"names": NAMES}, "raw head"),
    "YOLOX": (offsets, {"names": NAMES}, "raw head of YOLOX"),
    "YOLOX, decoded": (objectness(0.9, 0, 0, 1, boxes=1), {"names": NAMES}, "raw head of YOLOX"),
    "D-FINE": (named, {"names": NAMES}, "boxes, scores and labels"),
    "EfficientNMS": (counted, {"names": NAMES}, "boxes, scores and labels"),
    "RF-DETR, numbers with gaps": (
        queries("dets", "labels", (-9, -9, -9, 4), (-9, -9, -9, -9)),
        {"names": GAPS},
        "queries",
    ),
    "RF-DETR, its own metadata": (
        queries("dets", "labels", (-9, -9, -9, 4), (-9, -9, -9, -9)),
        {"rfdetr_inference": RFDETR},
        "queries",
    ),
    "RF-DETR, a class for nothing": (
        queries("dets", "labels", (-9, -9, 4, 5), (-9, -9, -9, 5)),
        {"names": NAMES},
        "queries",
    ),
    "RF-DETR, one class, no names": (queries("dets", "labels", [4], [-4]), {}, "queries"),
    "RF-DETR segmentation": (
        lambda size: queries(
            "dets", "labels", (-9, -9, 4, -9), (-9, -9, -9, 9), masks=np.ones((1, 2, 16, 16), np.float32)
        )(size),
        {"names": NAMES},
        "queries",
    ),
    "DETR": (queries("pred_boxes", "logits", (-9, -9, 4, -9), (-9, -9, -9, 9)), {"names": NAMES}, "queries"),
    "RT-DETR of transformers": (
        queries("pred_boxes", "logits", (-9, -9, 4), (-9, -9, -9)),
        {"names": NAMES},
        "queries",
    ),
}


@pytest.mark.parametrize("form", ["", "half", "int8", "fixed", "open"])
@pytest.mark.parametrize("kind", KNOWN)
def test_f14_what_exporters_write_finds_its_box(tmp_path: Path, kind: str, form: str) -> None:
    made, metadata, dialect = KNOWN[kind]
    size = (96, 64)
    path = graph(tmp_path / "g.onnx", made(size), size, form, metadata, sized=kind == "D-FINE")
    processor = started(path)
    assert processor.dialect is not None
    assert processor.dialect.name == dialect
    found = processor.process(entries(*[np.zeros((64, 96, 3), np.uint8)] * 2))
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0]["boxes"][:1], [BOX], atol=0.1)
    assert len(found[0]["boxes"]) == 1
    assert found[0]["labels"][0] in ("blue", 2, 0 if "one class" in kind else "blue")
    for part, wanted in {"pose": "keypoints", "segment": "masks", "obb": "polygons"}.items():
        assert (wanted in found[0]) == (part in kind)


def quantised(size: Size) -> Arrays:
    return {"output0": (head(size, (0, 0, 255)).T[None]).clip(0, 255).astype(np.uint8)}


def scaled(by: float, **more: Any) -> Callable[[Size], Arrays]:
    def made(size: Size) -> Arrays:
        array = raw(0, 0, 0.9, **more)(size)["output0"]
        array[:, :4] *= np.array([by / size[0], by / size[1]] * 2)[None, :, None]
        return {"output0": array}

    return made


def corners(size: Size) -> Arrays:
    array = raw(0, 0, 0.9)(size)["output0"]
    array[:, :2], array[:, 2:4] = array[:, :2] - array[:, 2:4] / 2, array[:, :2] + array[:, 2:4] / 2
    return {"output0": array}


def exchanged(size: Size) -> Arrays:
    array = raw(0, 0, 0.9)(size)["output0"]
    return {"output0": array[:, [1, 0, 3, 2, 4, 5, 6]]}


def flat(count: int, *names: str) -> Arrays:
    """Boxes, labels and scores of one picture, as torchvision's models return them: [k, 4], [k] and [k]."""
    arrays = (np.array([BOX] * count, np.float32), np.array([2] * count), np.array([0.9] * count, np.float32))
    return dict(zip(names, (a.reshape(count, 4) if not i else a for i, a in enumerate(arrays)), strict=True))


REFUSED: dict[str, tuple[Callable[[Size], Arrays], Mapping[str, str], str]] = {
    "in shares": (scaled(1), {"names": NAMES}, "not in pixels of the input but in shares of the picture"),
    "in shares beyond 1.5": (
        lambda size: {"output0": scaled(1)(size)["output0"] * np.array([1, 1, 99, 99, 1, 1, 1])[None, :, None]},
        {"names": NAMES},
        "not in pixels of the input but in shares of the picture",
    ),
    "not decoded": (
        lambda size: {"output0": raw(0, 0, 0.9)(size)["output0"] % np.array([1, 1, 10, 10, 2, 2, 2])[None, :, None]},
        {"names": NAMES},
        "not in pixels of the input but not decoded",
    ),
    "corners at places": (corners, {"names": NAMES}, "its boxes are corners, expected middles and sizes"),
    "height before width": (exchanged, {"names": NAMES}, "but in other places than their own"),
    "YOLOX, height before width": (
        lambda size: {"output": objectness(0.9, 0, 0, 1, boxes=1)(size)["output"][..., [1, 0, 3, 2, 4, 5, 6, 7]]},
        {"names": NAMES},
        "not in pixels of the input but in other places than their own",
    ),
    "classes that are no shares": (raw(-3, -3, 4), {"names": NAMES}, "would score between -3 and 4, expected 0 … 1"),
    "pose without its task": (raw(0.9, 16, 16, 1, 48, 40, 1), {}, "would score between 0 and 48.*has no task"),
    "obb without its task": (raw(0.9, -0.7), {}, "would score between -0.7 and 0.9"),
    "more classes than names": (raw(0, 0, 0.9, 0, 0), {"names": NAMES}, "5 classes, but its metadata has 3 names"),
    "a class that has no name": (raw(0, 0.9), {"names": GAPS}, "2 classes, but .* 2 names, up to number 3"),
    "a row of no such class": (rows(0.9, 7), {"names": NAMES}, "a class number 7, but its metadata has 3 names"),
    "rows in shares": (rows(0.9, 2, box=(0.1, 0.1, 0.9, 0.9)), {"names": NAMES}, "in shares of the picture"),
    "rows in shares beyond 1.5": (rows(0.9, 2, box=(0.1, 0.1, 1.9, 0.9)), {"names": NAMES}, "in shares of the picture"),
    "named boxes in shares": (
        lambda size: {**named(size), "boxes": np.array([[(0.1, 0.1, 0.9, 0.9), (0, 0, 1, 1)]])},
        {"names": NAMES},
        "not in pixels of the input but in shares of the picture",
    ),
    "named boxes of no such class": (
        lambda size: {**named(size), "labels": np.array([[90, 0]])},
        {"names": NAMES},
        "a class number 90, but its metadata has 3 names",
    ),
    "queries in pixels": (
        lambda size: {
            **queries("pred_boxes", "logits", (-9, -9, 4), (-9, -9, -9))(size),
            "pred_boxes": np.array([[MIDDLE] * 2], np.float32),
        },
        {"names": NAMES},
        "its boxes are not in shares of the picture but in pixels of the input",
    ),
    "RF-DETR, classes of another training": (
        queries("dets", "labels", [4] * 6, [-4] * 6),
        {"names": NAMES},
        "'labels' has 6 classes, one of which may mean no object: its metadata has 3 names",
    ),
    "RF-DETR keypoints": (
        lambda size: {**queries("dets", "labels", (-9, -9, 4), (-9, -9, -9))(size), "keypoints": np.ones((1, 2, 34))},
        {"names": NAMES},
        "its outputs are not known: 'dets' .*'keypoints'",
    ),
    "bytes": (quantised, {"names": NAMES}, "its boxes are uint8. Export it with floating outputs"),
    "a classifier of other names": (
        lambda size: {"output0": np.array([[0.1, 0.9]])},
        {"names": NAMES, "task": "classify"},
        "2 classes, but its metadata has 3 names",
    ),
    "strides that are not known": (lambda size: {"output0": np.zeros((1, 7, 91))}, {"names": NAMES}, "not known"),
    "torchvision": (lambda size: flat(5, "boxes", "labels", "scores"), {}, "leading axis: found ., expected 1"),
    "torchvision, numbers": (lambda size: flat(5, "a", "b", "c"), {}, "leading axis: found ., expected 1"),
    "torchvision, nothing found": (lambda size: flat(0, "a", "b", "c"), {}, "leading axis: found ., expected 1"),
    "YOLOv7 with NMS": (
        lambda size: {"output": np.zeros((3, 7), np.float32)},
        {"names": NAMES},
        "leading axis: found ., expected 1",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_f14_what_is_not_known_is_refused_with_what_was_seen(tmp_path: Path, kind: str) -> None:
    made, metadata, said = REFUSED[kind]
    arrays = {
        name: array if array.dtype.kind in "iu" else array.astype(np.float32) for name, array in made((96, 64)).items()
    }
    with pytest.raises(ConfigError, match=said) as refused:
        started(graph(tmp_path / "g.onnx", arrays, (96, 64), "fixed", metadata))
    assert len(str(refused.value)) < 1000


def test_f14_what_boxes_without_a_place_are_in_by_hand() -> None:
    """A small box in the corner is in pixels; one that goes beyond the picture may be in shares."""
    size = (640, 640)
    assert unit_of(np.array([[2, 3, 20, 18], [0, 0, 0, 0]], float), size) == PIXELS
    assert unit_of(np.array([[0.1, 0.1, 1.8, 0.9], [np.nan, 0, 9, 9]], float), size) == SHARES
    assert unit_of(np.zeros((300, 4)), size) is None


def test_f14_yolox_gets_blue_first_and_whole_numbers(tmp_path: Path) -> None:
    processor = started(graph(tmp_path / "g.onnx", offsets((96, 64)), (96, 64), "", {"names": NAMES}))
    loaded = processor._loaded
    assert loaded is not None
    frame = np.zeros((64, 96, 3), np.uint8) + np.array([250, 120, 3], np.uint8)
    (pixels,) = loaded.input.tensors([loaded.fitted(frame)], loaded.dialect)["images"]
    np.testing.assert_allclose(pixels[:, 5, 5], [3, 120, 250], rtol=1e-6)


def test_f14_yolox_gets_the_frame_in_its_corner_and_others_in_the_middle(tmp_path: Path) -> None:
    frame = np.full((64, 64, 3), 250, np.uint8)
    for kind, left in {"YOLOX": 0, "YOLOX, decoded": 0, "YOLOv5": 16, "ultralytics": 16}.items():
        made, metadata, _ = KNOWN[kind]
        processor = started(graph(tmp_path / "g.onnx", made((96, 64)), (96, 64), "", metadata))
        fitted = processor.prepare(frame)
        assert fitted is not None
        assert (fitted.pixels[:, :, left : left + 64] == 250).all()
        assert (np.delete(fitted.pixels, np.s_[left : left + 64], axis=2) == 114).all()
        found = processor.process(entries(frame))[0]["boxes"]
        np.testing.assert_allclose(found[:1], [[16 - left, 16, 48 - left, 40]], atol=0.1)
