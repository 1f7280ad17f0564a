"""Detectors whose boxes are turned by an angle: recognised, which boxes stay, and where they are in the frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

from feeds.graphs import found_in
from feeds.test_detectors import LIMITS, entries, in_pixels, started, trial
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors import heads
from reflex_runtime.feeds.detectors.heads import DetectionLimits, Extras, RawHead, Rows, kept_obb, polygons_of
from reflex_runtime.feeds.detectors.recognise import dialect_of
from reflex_runtime.feeds.outputs.annotated import annotated
from reflex_runtime.feeds.pictures import PictureSize, jpeg_of
from reflex_runtime.feeds.runtime.pipeline import Frame, Result

ANGLE = Extras(angle=True)
QUARTER = np.pi / 4


def test_f14_turned_boxes_are_told_by_the_task_and_the_number_of_columns() -> None:
    assert dialect_of(trial(names=2, task="obb", o=in_pixels(7))) == RawHead("o", 2, extras=ANGLE)
    assert dialect_of(trial(task="obb", o=in_pixels(20))) == RawHead("o", 15, extras=ANGLE)
    assert dialect_of(trial(names=2, task="obb", o=(1, 300, 7))) == Rows("o", ANGLE)
    with pytest.raises(ConfigError, match="3 classes, but its metadata has 2 names; give --names FILE"):
        dialect_of(trial(names=2, task="obb", o=in_pixels(8)))
    with pytest.raises(ConfigError, match="not known"):
        dialect_of(trial(names=2, task="obb", o=(1, 7, 90)))


def test_f14_corners_go_around_the_box_by_hand() -> None:
    boxes = [[10, 20, 6, 2, 0], [10, 20, 6, 2, np.pi / 2], [0, 0, 2, 2, QUARTER]]
    upright, lying, tilted = polygons_of(np.array(boxes))
    np.testing.assert_allclose(upright, [[13, 21], [13, 19], [7, 19], [7, 21]])
    np.testing.assert_allclose(lying, [[9, 23], [11, 23], [11, 17], [9, 17]], atol=1e-9)
    np.testing.assert_allclose(np.abs(tilted).max(axis=0), [2**0.5, 2**0.5])


def head_of(*boxes: tuple[float, ...]) -> Any:
    """A raw head [1, 4 + 2 + 1, 84] with these columns: x, y, w, h, score of either class, angle."""
    head = np.zeros((1, 7, 84), np.float32)
    for place, box in enumerate(boxes):
        head[0, :, place] = box
    return head


def test_f14_of_turned_boxes_alike_the_better_one_stays_by_hand() -> None:
    first, turned_away = (30, 30, 20, 4, 0.9, 0, 0.1), (30, 30, 20, 4, 0.8, 0, 1.6)
    alike, other_class, weak = (30, 30, 20, 4, 0.7, 0, 0.11), (30, 30, 20, 4, 0, 0.6, 0.1), (9, 9, 9, 9, 0.2, 0, 0)
    head = head_of(weak, alike, first, other_class, turned_away)
    (found,) = found_in(RawHead("o", 2, extras=ANGLE), {"o": head}, LIMITS)
    np.testing.assert_allclose(found.scores, [0.9, 0.8, 0.6], rtol=1e-6)
    assert found.labels.tolist() == [0, 0, 1]
    assert found.boxes is not None
    assert found.polygons is not None
    np.testing.assert_allclose(found.boxes[:, :2], found.polygons.min(axis=1))
    np.testing.assert_allclose(found.boxes[:, 2:], found.polygons.max(axis=1))
    (few,) = found_in(RawHead("o", 2, extras=ANGLE), {"o": head}, DetectionLimits(0.25, 0.7, 2, {0}))
    assert few.labels.tolist() == [0, 0]
    (none,) = found_in(RawHead("o", 2, extras=ANGLE), {"o": head}, DetectionLimits(0.95, 0.7, 2))
    assert none.labels.tolist() == []


def test_f14_how_alike_two_turned_boxes_are_by_hand() -> None:
    """Equal ones: 1. Two of the same form at a distance: e to the power of -d²/(8·w²/12) of the distance along it."""
    boxes = np.array([[0, 0, 12, 12, 0], [0, 0, 12, 12, 0], [6, 0, 12, 12, 0]], np.float32)
    pair = heads._alike(boxes, heads._extents(boxes), np.arange(3), np.arange(3))
    expected = 1 - np.sqrt(1 - np.exp(-(6**2) / (8 * 12**2 / 12)))
    np.testing.assert_allclose(pair[0], [1, 1, expected], atol=1e-3)
    for angle in (0.0, 0.5):  # across each other: covariances 12 and 0.75, exchanged
        crossed = np.array([[0, 0, 12, 3, angle], [0, 0, 12, 3, angle + np.pi / 2]], np.float32)
        pair = heads._alike(crossed, heads._extents(crossed), np.arange(2), np.arange(2))
        assert pair[0, 1] == pytest.approx(1 - np.sqrt(1 - 36**0.5 / 12.75), abs=1e-3)


def test_f14_blocks_of_turned_boxes_do_not_change_which_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    lows, highs = [0, 0, 2, 2, 0], [60, 60, 30, 30, 3]
    boxes = random.uniform(lows, highs, (300, 5))
    scores, labels = random.choice([0.3, 0.5, 0.7, 0.9], 300), random.integers(0, 3, 300)
    whole = kept_obb(boxes, scores, labels, 0.5, 300)
    assert 20 < len(whole) < 290
    alike = heads._alike(boxes, heads._extents(boxes), np.arange(300), np.arange(300))
    order = np.argsort(-scores, kind="stable").tolist()
    stays = [b for k, b in enumerate(order) if not any(labels[a] == labels[b] and alike[a, b] > 0.5 for a in order[:k])]
    assert whole.tolist() == stays
    monkeypatch.setattr(heads, "AT_ONCE", 7)
    assert kept_obb(boxes, scores, labels, 0.5, 300).tolist() == stays
    assert kept_obb(boxes, scores, labels, 0.5, 10).tolist() == stays[:10]


def test_f14_turned_rows_and_numbers_that_are_none_by_hand() -> None:
    row = [30, 30, 20, 4, 0.9, 1, QUARTER]
    rows = np.array([[row, [*row[:6], np.nan], [*row[:5], np.nan, 0], [*row[:4], 0, 0, 0]]], np.float32)
    (found,) = found_in(Rows("o", ANGLE), {"o": rows}, LIMITS)
    assert found.labels.tolist() == [1]
    reach = 12 / 2**0.5
    assert found.boxes is not None
    np.testing.assert_allclose(found.boxes, [[30 - reach, 30 - reach, 30 + reach, 30 + reach]], rtol=1e-5)


def test_f14_a_graph_of_turned_boxes_gives_polygons_in_the_frames_own_pixels(tmp_path: Path) -> None:
    """[n, 300, 7], the same row for every picture: in the middle of 64 × 64, 40 long and 10 high."""
    rows = np.zeros((1, 300, 7), np.float32)
    rows[0, 0] = (32, 32, 40, 10, 0.9, 1, 0.0)
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[n, 3, 64, 64] images) => (float[n, 300, 7] output0) {
        mean = ReduceMean<keepdims=1>(images, pixels)
        flat = Reshape(mean, places)
        nothing = Mul(flat, zero)
        output0 = Add(nothing, rows)
    }"""
    model = parser.parse_model(text)
    constants = {"pixels": np.array([1, 2, 3]), "places": np.array([-1, 1, 1]), "zero": np.float32(0), "rows": rows}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items())
    helper.set_model_props(model, {"names": "{0: 'a', 1: 'ship'}", "task": "obb", "imgsz": "[64, 64]"})
    onnx.save(model, tmp_path / "turned.onnx")
    wide = np.zeros((160, 320, 3), np.uint8)  # a fifth of it, 64 × 32, in the middle of the input
    (value, _) = started(tmp_path / "turned.onnx").process(entries(wide, wide))
    assert (value["labels"], value["boxes"]) == (["ship"], [[60, 55, 260, 105]])
    assert value["polygons"] == [[[260, 105], [260, 55], [60, 55], [60, 105]]]


def test_polygons_are_drawn_in_place_of_boxes() -> None:
    image = np.zeros((40, 40, 3), np.uint8)
    value = {"boxes": [[5, 5, 35, 35]], "labels": ["a"], "polygons": [[[20, 5], [35, 20], [20, 35], [5, 20]]]}
    drawn = annotated(image, {k: v for k, v in value.items() if k != "labels"})
    assert drawn[5, 20].any(), "a corner of the polygon"
    assert not drawn[5, 8].any(), "an edge of the box"
    for odd in (None, "x", [], [[[1, 2]]], [[[1, 2], [3, 4], [np.nan, 1]]], [[[1, 2], [3, 4], [1e9, 1]]]):
        assert annotated(image, {**value, "polygons": odd})[5, 30].any(), odd
    result = Result(Frame(np.zeros((80, 80, 3), np.uint8), 0, None, 0.0), "cam", value, 0.0)
    half = {"boxes": [[2.5, 2.5, 17.5, 17.5]], "labels": ["a"], "polygons": np.array(value["polygons"]) / 2}
    small = Result(Frame(np.zeros((40, 40, 3), np.uint8), 0, None, 0.0), "cam", half, 0.0)
    size = PictureSize(40, 1.0, 90, ("labels",))
    assert jpeg_of(result, size) == jpeg_of(small, size)


def test_in_pixels_is_what_other_heads_need() -> None:
    """A raw head without the task is read as it was."""
    assert type(dialect_of(trial(names=3, o=in_pixels(7)))).__name__ == "RawHead"
