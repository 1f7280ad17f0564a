"""Detectors in the forms that exporters write: recognised, and their boxes in the pixels of each frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from feeds.graphs import BLUE, GREEN, RED, bright_graph, lit
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.drivers.batch_processor import BatchEntry
from reflex_runtime.feeds.detectors.facts import names_in, names_of_file
from reflex_runtime.feeds.detectors.fitting import GREY, cropped, letterboxed, stretched
from reflex_runtime.feeds.detectors.found import DetectionLimits
from reflex_runtime.feeds.detectors.heads import Extras, Rows
from reflex_runtime.feeds.detectors.overlap import AT_ONCE, kept_of
from reflex_runtime.feeds.draw import cells_of
from reflex_runtime.feeds.onnx import OnnxFrames

BOX = (120, 40, 240, 160)
FORMS = {
    "raw": "raw head",
    "raw rows": "raw head",
    "objectness": "raw head",
    "rows": "rows without overlaps",
    "pair": "queries",
    "named": "boxes, scores and labels",
}


def started(path: Path, **options: Any) -> OnnxFrames:
    processor = OnnxFrames(path, **options)
    processor.on_start()
    return processor


def entries(*frames: Any) -> list[BatchEntry]:
    return [BatchEntry("cam", frame, None, i, None, 0.0) for i, frame in enumerate(frames)]


@pytest.mark.parametrize("form", FORMS)
def test_f14_every_form_is_recognised_and_finds_each_thing_once_in_the_frames_own_pixels(
    tmp_path: Path, form: str
) -> None:
    processor = started(bright_graph(tmp_path / "g.onnx", form))
    assert processor.dialect is not None
    assert processor.dialect.name == FORMS[form]
    frames = [lit(BOX, RED, (320, 240)), lit((10, 20, 30, 60), BLUE, (64, 64)), lit((0, 0, 0, 0), RED, (90, 200))]
    wide, same, dark = processor.process(entries(*frames))
    assert wide["labels"] == ["red"]
    np.testing.assert_allclose(wide["boxes"], [BOX], atol=5.1)  # a pixel of the input is five of the frame
    assert wide["scores"][0] > 0.8
    assert (same["boxes"], same["labels"]) == ([[10, 20, 30, 60]], ["blue"])
    assert dark == {"boxes": [], "scores": [], "labels": []}


def test_f14_boxes_of_a_graph_that_wants_the_frames_size_are_in_the_frames_pixels(tmp_path: Path) -> None:
    processor = started(bright_graph(tmp_path / "g.onnx", "named", wants_size=True))
    (found,) = processor.process(entries(lit(BOX, GREEN, (320, 240))))
    np.testing.assert_allclose(found["boxes"], [BOX], atol=5.1)
    assert found["labels"] == ["green"]


def test_f14_keypoints_are_in_the_frames_pixels(tmp_path: Path) -> None:
    path = bright_graph(tmp_path / "g.onnx", "pose", metadata={"task": "pose", "kpt_shape": "[2, 3]"})
    found, dark = started(path).process(entries(lit((100, 40, 200, 120), RED, (320, 320)), lit((0,) * 4, RED, (9, 9))))
    assert found["labels"] == ["red"]
    first, last = found["keypoints"][0]
    assert first == [*found["boxes"][0][:2], 0.9]
    assert last == pytest.approx([*found["boxes"][0][2:], 0.2], abs=1e-4)
    assert dark == {"boxes": [], "scores": [], "labels": [], "keypoints": []}


@pytest.mark.parametrize("size", [(128, 128), (256, 128)])
def test_f14_a_mask_covers_what_is_lit_in_the_frames_pixels(tmp_path: Path, size: tuple[int, int]) -> None:
    """A cell is 8 pixels of the one frame, 16 of the other."""
    path = bright_graph(tmp_path / "g.onnx", "segment", metadata={"task": "segment"})
    frame = lit((32, 32, 96, 64), GREEN, size)
    frame[32:48, 64:96] = 0  # an L
    (found,) = started(path).process(entries(frame))
    (mask,) = found["masks"]
    cells = cells_of(mask)
    assert cells is not None
    assert mask["box"] == [32, 32, 96, 64]
    each = size[0] // 16
    assert cells.shape == (32 // each, 64 // each)
    assert (cells == (frame[32:64, 32:96, 1][:: each, :: each] > 0)).all()
    assert sum(mask["counts"]) == cells.size


def test_f14_keypoints_and_masks_behind_rows_by_hand() -> None:
    row = [2.0, 2.0, 6.0, 6.0, 0.9, 1.0, 3.0, 4.0, 0.8, -1.0]
    outputs = {"rows": np.array([[row, [0.0] * 10]], np.float32), "masks": np.full((1, 1, 2, 2), -1.0, np.float32)}
    head = Rows("rows", Extras(points=1, prototypes="masks", coefficients=1))
    (found,) = head.found(outputs, DetectionLimits(0.25, 0.7, 9))
    assert found.points is not None
    assert found.masks is not None
    np.testing.assert_allclose(found.points, [[[3, 4, 0.8]]], rtol=1e-6)
    assert found.masks.all(), "minus one times minus one is above zero"


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_f14_a_fixed_batch_is_padded_and_half_precision_is_read(tmp_path: Path, batch: int, dtype: str) -> None:
    processor = started(bright_graph(tmp_path / "g.onnx", batch=batch, dtype=dtype))
    assert processor.batch_size == batch
    found = processor.process(entries(*(lit((10 + k, 20, 40 + k, 50), RED, (64, 64)) for k in range(5))))
    for k, one in enumerate(found):
        np.testing.assert_allclose(one["boxes"], [[10 + k, 20, 40 + k, 50]], atol=0.05)
        assert one["labels"] == ["red"]


def test_f14_a_graph_whose_nms_sees_the_first_picture_alone_gets_one_at_a_time(tmp_path: Path) -> None:
    """As ultralytics writes it with nms=True and dynamic=True; the results of all other pictures are empty."""
    said = {"args": "{'batch': 1, 'nms': True, 'dynamic': True}", "batch": "1"}
    processor = started(bright_graph(tmp_path / "g.onnx", "rows of the first", metadata=said))
    assert processor.batch_size == 1
    found = processor.process(entries(*(lit((10, 10, 30, 30), colour, (64, 64)) for colour in (RED, BLUE))))
    assert [one["labels"] for one in found] == [["red"], ["blue"]]
    assert started(bright_graph(tmp_path / "n.onnx", "rows", metadata={**said, "batch": "8"})).batch_size == 8
    assert started(bright_graph(tmp_path / "r.onnx", metadata={"args": "{'nms': None}"})).batch_size is None


def test_f14_rows_in_shares_of_the_picture_need_the_word_of_the_exporter(tmp_path: Path) -> None:
    path = bright_graph(tmp_path / "g.onnx", "rows of shares", metadata={"head": "RTDETRDecoder"})
    processor = started(path)
    assert processor.dialect is not None
    assert (processor.dialect.name, processor.dialect.resize) == ("queries", "stretch")
    (found,) = processor.process(entries(lit(BOX, BLUE, (320, 240))))
    np.testing.assert_allclose(found["boxes"], [BOX], atol=5.1)
    assert found["labels"] == ["blue"]
    with pytest.raises(ConfigError, match="not in pixels of the input"):
        started(bright_graph(tmp_path / "g.onnx", "rows of shares"))


def test_f14_a_classifier_names_its_best_classes(tmp_path: Path) -> None:
    path = bright_graph(tmp_path / "g.onnx", "classes", metadata={"task": "classify"})
    frame = lit((100, 100, 200, 200), GREEN, (320, 240))
    (found,) = started(path).process(entries(frame))
    assert found["labels"][0] == "green"
    assert len(found["labels"]) == 3
    assert sum(found["scores"]) == pytest.approx(1.0, abs=1e-5), "its outputs were no shares: softmax"
    assert found["text"] == f"green {found['scores'][0]:.2f}"
    (one,) = started(path, max_detections=1, classes=("blue", "red")).process(entries(frame))
    assert one["labels"] in (["blue"], ["red"])
    corner = lit((0, 0, 30, 240), GREEN, (320, 240))  # outside of the middle of the frame
    (cropped,), (whole,) = (started(path, resize=how).process(entries(corner)) for how in (None, "stretch"))
    assert cropped["scores"] == pytest.approx([1 / 3] * 3, abs=1e-5)
    assert whole["labels"][0] == "green"


@pytest.mark.parametrize(
    ("form", "options", "said"),
    [
        ("raw", {"names": {0: "a", 1: "b"}}, r"3 classes, but .* 2 names"),
        ("raw rows", {"names": {}}, r"not known: 'output0' \[n, 84, 7\] .* 64 × 64; .* no names.*--names FILE"),
        ("pair", {"names": {}}, "3 classes, with or without one for nothing"),
        ("rows", {"iou": 0.5}, "iou has no effect"),
        ("raw", {"classes": ("gren",)}, "classes=gren: the graph has 3 classes; did you mean green"),
        ("raw", {"classes": (3,)}, "classes=3: the graph has 3 classes"),
    ],
)
def test_f14_what_is_not_known_is_refused_at_the_start_with_outputs_shapes_and_what_to_do(
    tmp_path: Path, form: str, options: dict[str, Any], said: str
) -> None:
    path = bright_graph(tmp_path / "g.onnx", form)
    with pytest.raises(ConfigError, match=said) as refused:
        started(path, **options)
    assert len(str(refused.value)) < 1000


def test_f14_a_raw_head_in_shares_of_the_picture_is_refused(tmp_path: Path) -> None:
    path = bright_graph(tmp_path / "g.onnx", "raw")
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name == "to_middle":
            small = numpy_helper.to_array(tensor) / 64
            tensor.CopyFrom(numpy_helper.from_array(small.astype(np.float32), "to_middle"))
        if tensor.name == "nudge":
            tensor.CopyFrom(numpy_helper.from_array(np.zeros((1, 7, 1), np.float32), "nudge"))
    onnx.save(model, path)
    with pytest.raises(ConfigError, match=r"not in pixels of the input but between 0 and 1\. Export it with decoded"):
        started(path)


def test_f14_resize_may_be_the_graphs_own_word(tmp_path: Path) -> None:
    frame = lit((40, 58, 120, 120), RED, (320, 160))
    tops = {}
    for how in ("letterbox", "stretch", ""):
        path = bright_graph(tmp_path / f"{how}.onnx", metadata={"resize": how})
        tops[how] = started(path).process(entries(frame))[0]["boxes"][0][1]
    assert tops == {"letterbox": 60, "stretch": 57.5, "": 60}
    with pytest.raises(ConfigError, match="metadata resize=pad: must be one of letterbox, stretch, crop"):
        started(bright_graph(tmp_path / "odd.onnx", metadata={"resize": "pad"}))


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_f14_letterbox_and_its_way_back_by_hand() -> None:
    place = np.zeros((64, 64, 3), np.uint8)
    fit = letterboxed(np.full((50, 100, 3), 200, np.uint8), place)
    assert (fit.across, fit.down, fit.left, fit.top) == (0.64, 0.64, 0, 16)
    assert (place[:16] == GREY).all()
    assert (place[16:48] == 200).all()
    assert (place[48:] == GREY).all()
    assert fit.back(np.array([[0.0, 16.0, 64.0, 48.0], [-9.0, 0.0, 32.0, 99.0]])).tolist() == [
        [0, 0, 100, 50],
        [0, 0, 50, 50],
    ]


def test_f14_stretch_and_crop_and_their_way_back_by_hand() -> None:
    frame = np.zeros((50, 100, 3), np.uint8)
    frame[:, 50:] = 200
    place = np.zeros((20, 20, 3), np.uint8)
    fit = stretched(frame, place)
    assert fit.back(np.array([10.0, 0.0, 20.0, 20.0])).tolist() == [50, 0, 100, 50]
    fit = cropped(frame, place)
    assert (fit.left, fit.top) == (-10, 0)
    assert (place[:, :8] == 0).all()
    assert (place[:, 12:] == 200).all()
    assert fit.back(np.array([10.0, 0.0, 20.0, 20.0])).tolist() == [50, 0, 75, 50]


def test_f14_overlapping_boxes_of_a_class_by_hand() -> None:
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 5], [0, 0, 10, 6], [50, 50, 60, 60], [0, 0, 10, 10]], float)
    scores = np.array([0.9, 0.8, 0.7, 0.95, 0.6])
    labels = np.array([0, 0, 0, 0, 1])
    assert kept_of(boxes, scores, labels, 0.5, 9).tolist() == [3, 0, 1, 4], "half of the union is not more than half"
    assert kept_of(boxes, scores, labels, 0.49, 9).tolist() == [3, 0, 4]
    assert kept_of(boxes, scores, labels, 1.0, 9).tolist() == [3, 0, 1, 2, 4]
    assert kept_of(boxes, scores, labels, 0.0, 2).tolist() == [3, 0]
    assert kept_of(boxes[:0], scores[:0], labels[:0], 0.5, 9).tolist() == []


def test_f14_overlaps_are_those_of_every_pair_compared() -> None:
    random = np.random.default_rng(7)
    for n in (1, 2, 80, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE + 7):  # in one step, and in several
        corner = random.uniform(0, 60, (n, 2))
        boxes = np.hstack([corner, corner + random.uniform(1, 30, (n, 2))])
        scores, labels = random.random(n), random.integers(0, 3, n)
        kept: list[int] = []
        for i in np.argsort(-scores):
            if not any(labels[i] == labels[j] and share(boxes[i], boxes[j]) > 0.4 for j in kept):
                kept.append(int(i))
        assert kept_of(boxes, scores, labels, 0.4, n).tolist() == kept
        assert kept_of(boxes, scores, labels, 0.4, 5).tolist() == kept[:5]


def share(a: Any, b: Any) -> float:
    """Of the union of two boxes, what is common."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    common = max(0.0, width) * max(0.0, height)
    return float(common / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common))


def test_f14_names_from_literals_and_files(tmp_path: Path) -> None:
    assert names_in("{0: 'person', 15: 'cat'}") == {0: "person", 15: "cat"}
    assert names_in("['a', 'b']") == {0: "a", 1: "b"} == names_in('["a", "b"]')
    for wrong in ("", "7", "{'a': 'b'}", "__import__('os')", "[" * 10_000, "{0: 'a'", "[0]" * 400_000):
        assert names_in(wrong) is None
    file = tmp_path / "names"
    for text in ("a\nb b\n", "['a', 'b b']", '{"0": "a", "1": "b b"}'):
        file.write_text(text, encoding="utf-8")
        assert names_of_file(file) == {0: "a", 1: "b b"}
    for content, said in ((b"", "no names"), (b"\xff", "no UTF-8"), (b"{1", "must be a list"), (b"a" * 10**6, "")):
        file.write_bytes(content)
        if said:
            with pytest.raises(ConfigError, match=said):
                names_of_file(file)
    file.write_bytes(b"a" * (10**6 + 1))
    with pytest.raises(ConfigError, match="longer than"):
        names_of_file(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        names_of_file(tmp_path / "none")
