"""Detectors in the forms that exporters write: recognised, and their boxes in the pixels of each frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from feeds.graphs import BLUE, GREEN, RED, bright_graph, elsewhere_of, found_in, lit
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors import heads
from reflex_runtime.feeds.detectors.heads import (
    AT_ONCE,
    IMAGENET,
    Classes,
    DetectionLimits,
    Extras,
    Found,
    NamedBoxes,
    Queries,
    RawHead,
    Rows,
    YoloxHead,
    kept_of,
)
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.detectors.picture_input import GREY, cropped, letterboxed, result_of, stretched
from reflex_runtime.feeds.detectors.recognise import GraphFacts, Trial, dialect_of, facts_of, names_of_file
from reflex_runtime.feeds.stages import cells_of
from reflex_runtime.run.coordinator import BatchEntry

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
    assert dark == {"boxes": [], "scores": [], "labels": [], "model": wide["model"]}


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
    assert dark == {"boxes": [], "scores": [], "labels": [], "keypoints": [], "model": found["model"]}


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
    assert (cells == (frame[32:64, 32:96, 1][::each, ::each] > 0)).all()
    assert sum(mask["counts"]) == cells.size


def test_f14_keypoints_and_masks_behind_rows_by_hand() -> None:
    row = [2.0, 2.0, 6.0, 6.0, 0.9, 1.0, 3.0, 4.0, 0.8, -1.0]
    outputs = {"rows": np.array([[row, [0.0] * 10]], np.float32), "masks": np.full((1, 1, 2, 2), -1.0, np.float32)}
    head = Rows("rows", Extras(points=1, prototypes="masks", coefficients=1))
    (found,) = found_in(head, outputs, DetectionLimits(0.25, 0.7, 9))
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


@pytest.mark.parametrize("open_size", [False, True])
def test_f14_width_and_height_are_not_exchanged(tmp_path: Path, open_size: bool) -> None:
    frame = lit((30, 10, 60, 40), RED, (96, 64))
    for form, more in (("raw", False), ("named", True)):
        path = bright_graph(tmp_path / f"{form}.onnx", form, (96, 64), open_size=open_size, wants_size=more)
        (found,) = started(path).process(entries(frame))
        assert found["boxes"] == [[30, 10, 60, 40]]


def test_f14_a_graph_with_one_side_open_takes_the_metadatas_other(tmp_path: Path) -> None:
    path = bright_graph(tmp_path / "g.onnx", "named", (64, 64), metadata={"imgsz": "[32, 99]"}, open_size="h, 64")
    (found,) = started(path).process(entries(lit((30, 10, 60, 40), RED, (128, 64))))
    assert found["boxes"] == [[30, 10, 60, 40]]


def test_f14_options_that_would_have_no_effect_are_refused(tmp_path: Path) -> None:
    path = bright_graph(tmp_path / "g.onnx", "classes", metadata={"names": ""})
    for none in ((), []):  # the command line gives a list
        found = started(path, classes=none).process(entries(lit(BOX, RED, (320, 240))))
        assert set(found[0]) == {"output0", "model"}
    for name, value in {"score": 0.5, "iou": 0.5, "max_detections": 3, "classes": (1,)}.items():
        with pytest.raises(ConfigError, match=f"{name} has no effect: the graph's outputs are passed on"):
            started(path, **{name: value})
    named = bright_graph(tmp_path / "named.onnx", "classes", metadata={"task": "classify"})
    for graph in (path, named):
        with pytest.raises(ConfigError, match="zone has no effect: the graph gives no boxes"):
            started(graph, stages=("zone", "line"))


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
        ("pair", {"names": {}}, "3 classes, one of which may mean no object"),
        ("rows", {"iou": 0.5}, "iou has no effect"),
        ("raw", {"classes": ("gren",)}, "classes=gren: the graph has 3 classes; did you mean green"),
        ("raw", {"classes": (3,)}, "classes=3: the graph has 3 classes: red, green, blue"),
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
        if tensor.name in ("to_middle", "elsewhere"):
            small = numpy_helper.to_array(tensor) / 64
            tensor.CopyFrom(numpy_helper.from_array(small.astype(np.float32), tensor.name))
        if tensor.name == "nudge":
            tensor.CopyFrom(numpy_helper.from_array(np.zeros((1, 7, 1), np.float32), "nudge"))
    onnx.save(model, path)
    with pytest.raises(
        ConfigError,
        match=r"not in pixels of the input but in shares of the picture, between 0.06.* Export it with decoded",
    ):
        started(path)


def test_f14_resize_may_be_the_graphs_own_word(tmp_path: Path) -> None:
    frame = lit((40, 58, 120, 120), RED, (320, 160))
    tops = {}
    for how in ("letterbox", "stretch", ""):
        path = bright_graph(tmp_path / f"{how}.onnx", metadata={"resize": how})
        tops[how] = started(path).process(entries(frame))[0]["boxes"][0][1]
    assert tops == {"letterbox": 60, "stretch": 57.5, "": 60}
    with pytest.raises(ConfigError, match="metadata resize=pad: must be one of letterbox, corner, stretch, crop"):
        started(bright_graph(tmp_path / "odd.onnx", metadata={"resize": "pad"}))


# -- by hand -----------------------------------------------------------------------------------------------------------


LIMITS = DetectionLimits(0.25, 0.7, 300)


def trial(names: int = 0, size: tuple[int, int] = (64, 64), task: str = "", **outputs: Any) -> Trial:
    """Outputs by name, as shapes of zeros or as arrays."""
    arrays = {name: np.zeros(a, np.float32) if isinstance(a, tuple) else a for name, a in outputs.items()}
    return Trial(arrays, GraphFacts({i: str(i) for i in range(names)}, task=task), size)


def in_pixels(columns: int, axis: int = 1, boxes: int = 1) -> Any:
    """A raw head for 64 × 64 that finds nothing. axis: along which a place's numbers lie."""
    return np.moveaxis(elsewhere_of((64, 64), columns, boxes), 1, axis)


def test_f14_a_head_with_objectness_multiplies_by_hand() -> None:
    row = [10.0, 10, 4, 4, 0.5, 0.2, 0.9]
    unlikely = [30.0, 30, 4, 4, 0.3, 0.2, 0.8]  # 0.24
    head = RawHead("o", 2, rows=True, objectness=True)
    (found,) = found_in(head, {"o": np.array([[row, unlikely]], np.float32)}, LIMITS)
    np.testing.assert_allclose(found.scores, [0.45], rtol=1e-6)
    assert found.labels.tolist() == [1]
    assert found.boxes is not None
    np.testing.assert_allclose(found.boxes, [[8, 8, 12, 12]])


def test_f14_a_head_without_names_is_told_by_its_places_alone() -> None:
    assert dialect_of(trial(o=in_pixels(9))) == RawHead("o", 5)
    assert dialect_of(trial(o=in_pixels(9, axis=2, boxes=3))) == RawHead("o", 4, rows=True, objectness=True)
    assert dialect_of(trial(names=4, o=in_pixels(9, axis=2))) == YoloxHead("o", 4, rows=True, objectness=True)
    assert dialect_of(trial(names=5, o=in_pixels(9, axis=2))) == RawHead("o", 5, rows=True)
    with pytest.raises(ConfigError, match="--names FILE"):
        dialect_of(trial(o=in_pixels(9, axis=2)))


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"o": (1, 2049)}, "not known: 'o' .n, 2049. for a picture of 64 × 64"),
        ({"o": (1, 3, 64, 64)}, "not known: 'o' .n, 3, 64, 64."),
        ({"a": (1, 7, 84), "b": (1, 7, 84)}, "not known: 'a' .n, 7, 84., 'b'"),
        ({"boxes": (1, 5, 4), "scores": (1, 6), "labels": (1, 5)}, "output 'scores': expected .n, 5.; found 'boxes'"),
        ({"pred_boxes": (1, 5, 4), "logits": (1, 6, 3)}, "output 'logits': expected .n, 5, classes.; found"),
    ],
)
def test_f14_outputs_that_mean_nothing_known_by_hand(outputs: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        dialect_of(trial(**outputs))


def test_f14_small_vectors_are_passed_on() -> None:
    assert dialect_of(trial(o=(1, 2048))) is None
    assert dialect_of(trial(names=7, o=(1, 8), p=(1,))) is None


def test_f14_queries_with_softmax_leave_out_the_last_class_by_hand() -> None:
    logits = np.log(np.array([[[0.7, 0.1, 0.2], [0.1, 0.3, 0.6], [0.05, 0.05, 0.9]]]))
    boxes = np.tile(np.array([0.5, 0.5, 0.2, 0.1], np.float32), (1, 3, 1))
    found_by = dialect_of(trial(names=2, pred_boxes=boxes, logits=logits))
    assert isinstance(found_by, Queries)
    assert (found_by.form, found_by.mean, found_by.std) == ("softmax", *IMAGENET)
    (found,) = found_in(found_by, {"pred_boxes": boxes, "logits": logits}, LIMITS)
    np.testing.assert_allclose(found.scores, [0.7, 0.3], rtol=1e-5)
    assert found.labels.tolist() == [0, 1]
    assert found.boxes is not None
    np.testing.assert_allclose(found.boxes[0], [25.6, 28.8, 38.4, 35.2], rtol=1e-6)


def test_f14_only_filled_rows_count_and_numbers_that_are_none_are_left_out() -> None:
    box = [[0.0, 0, 40, 40]]
    boxes = np.array([box * 5, box * 5], np.float32)
    boxes[0, 1, 2], boxes[0, 2, 0] = np.inf, np.nan
    scores = np.array([[0.9, 0.9, 0.9, np.inf, 0.9], [0.9] * 5], np.float32)
    labels = np.array([[0, 1, 2, 3, np.nan], [0, 1, 2, 3, 4]], np.float32)
    named = {"det_boxes": boxes, "det_scores": scores, "det_classes": labels, "num_dets": np.array([[5], [2]])}
    head = dialect_of(trial(**{name: array[:1] for name, array in named.items()}))
    assert head is not None
    odd, few = found_in(head, named, LIMITS)
    assert odd.labels.tolist() == [0]
    assert few.labels.tolist() == [0, 1]
    rows = np.concatenate([boxes, scores[..., None], labels[..., None]], axis=2)
    first, second = found_in(Rows("rows"), {"rows": rows}, LIMITS)
    assert first.labels.tolist() == [0]
    assert second.labels.tolist() == [0, 1, 2, 3, 4]
    classes = np.full((2, 5), -1000.0)
    classes[0, 2] = np.nan
    assert found_in(Classes("o", logits=False), {"o": classes}, LIMITS)[0].labels.tolist() == []


def test_f14_counts_and_keypoints_that_are_no_numbers_fail_nothing() -> None:
    limits = DetectionLimits(0.25, 0.7, 9)
    one = {"boxes": np.ones((3, 2, 4)), "scores": np.ones((3, 2)), "labels": np.ones((3, 2))}
    counts = {"count": np.array([[np.nan], [np.inf], [-1.0]])}
    found = found_in(NamedBoxes(count="count"), one | counts, limits)
    assert [len(picture.scores) for picture in found] == [0, 2, 0]
    row = [2.0, 2.0, 6.0, 6.0, 0.9, 1.0, np.nan, 4.0, 0.8, 3.0, 4.0, 0.7]
    (picture,) = found_in(Rows("rows", Extras(points=2)), {"rows": np.array([[row]])}, limits)
    assert picture.points is not None
    np.testing.assert_allclose(picture.points, [[[0, 0, 0], [3, 4, 0.7]]], rtol=1e-6)


def test_f14_of_too_many_places_the_best_ones_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MOST_CANDIDATES", 50)
    head = np.zeros((1, 5, 60), np.float32)
    head[0, 0] = np.arange(60) * 10
    head[0, 2:4], head[0, 4] = 5, np.linspace(0.3, 0.9, 60)
    (found,) = found_in(RawHead("o", 1), {"o": head}, LIMITS)
    assert found.scores.tolist() == head[0, 4, 10:][::-1].tolist()


def test_f14_boxes_outside_of_the_frame_are_left_out_by_hand() -> None:
    place = np.zeros((64, 64, 3), np.uint8)
    fit = letterboxed(np.zeros((50, 100, 3), np.uint8), place)  # rows 16 to 48
    boxes = np.array([[0.0, 0, 64, 10], [0, 8, 32, 24], [10, 20, 10, 30]])
    masks = np.ones((3, 16, 16), np.bool_)  # cells of 4 pixels
    masks[1, 4, 3] = False
    found = Found(boxes, np.array([0.9, 0.8, 0.7]), np.array([0, 1, 2]), masks=masks)
    result = result_of(found, fit, {1: "one"}, (64, 64))
    assert result == {
        "boxes": [[0, 0, 50, 12.5]],
        "scores": [0.8],
        "labels": ["one"],
        "masks": [{"box": [0, 0, 50, 12.5], "size": [2, 8], "counts": [0, 3, 1, 12]}],
    }
    inside = Found(np.array([[1.0, 17, 6, 23]]), np.ones(1), np.ones(1, np.int64), masks=masks[:1])
    (mask,) = result_of(inside, fit, {}, (64, 64))["masks"]
    assert mask["box"] == [0, 0, 12.5, 12.5], "whole cells"
    odd = letterboxed(np.zeros((46, 100, 3), np.uint8), place)  # its last row of cells goes beyond the frame
    low = Found(np.array([[0.0, 17, 64, 47]]), np.ones(1), np.ones(1, np.int64), masks=masks[:1])
    (mask,) = result_of(low, odd, {}, (64, 64))["masks"]
    assert mask["box"][1] < 0
    assert mask["box"][3] > 46


def test_f14_metadata_that_means_nothing_is_as_if_it_were_not_there() -> None:
    assert facts_of({}) == GraphFacts({})
    odd = {"imgsz": "[0, 640]", "kpt_shape": "[1e9, 3]", "args": "nms", "batch": "-1"}
    assert facts_of({**odd, "names": "x" * 9}) == GraphFacts({})
    assert facts_of({"imgsz": "[480, 640]"}) == GraphFacts({}, size=(640, 480))
    assert facts_of({"names": "['" + "a" * 10**6 + "']"}).names == {}


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
    assert facts_of({"names": "{0: 'person', 15: 'cat'}"}).names == {0: "person", 15: "cat"}
    assert facts_of({"names": "['a', 'b']"}).names == {0: "a", 1: "b"} == facts_of({"names": '["a", "b"]'}).names
    for wrong in ("", "7", "{'a': 'b'}", "__import__('os')", "[" * 10_000, "{0: 'a'", "[0]" * 400_000):
        assert facts_of({"names": wrong}).names == {}
    file = tmp_path / "names"
    for text in ("a\nb b\n", "['a', 'b b']", '{"0": "a", "1": "b b"}'):
        file.write_text(text, encoding="utf-8")
        assert names_of_file(file) == {0: "a", 1: "b b"}
    wrong_form = "must be a name"
    for content, said in ((b"", wrong_form), (b"\xff", "no UTF-8"), (b"{1", wrong_form), (b"a" * 10**6, "")):
        file.write_bytes(content)
        if said:
            with pytest.raises(ConfigError, match=said):
                names_of_file(file)
    file.write_bytes(b"a" * (10**6 + 1))
    with pytest.raises(ConfigError, match="at most 1000000 characters"):
        names_of_file(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        names_of_file(tmp_path / "none")
