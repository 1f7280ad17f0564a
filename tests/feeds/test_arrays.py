"""Results as supervision's Detections, from real graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feeds.graphs import RED, bright_graph, lit
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds import to_supervision
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.runtime.pipeline import Frame, Result
from reflex_runtime.run.coordinator import BatchEntry

PLACE = (16, 8, 48, 56)


def detected(folder: Path, form: str, size: tuple[int, int] = (128, 64), **metadata: str) -> Result:
    """What a graph of this form finds in a picture with one red rectangle."""
    detector = OnnxFrames(bright_graph(folder / "m.onnx", form, metadata=metadata))
    detector.on_start()
    image = lit(PLACE, RED, size)
    (value,) = detector.process([BatchEntry("a", image, None, 0, 0.0, 0.0)])
    return Result(Frame(image, 0, 0.0, 0.0), "a", value, 0.0)


def made(value: Any) -> Result:
    return Result(Frame(np.zeros((64, 64, 3), np.uint8), 0, 0.0, 0.0), "a", value, 0.0)


def test_f14_boxes_scores_and_names_as_arrays_and_detections(tmp_path: Path) -> None:
    result = detected(tmp_path, "raw", (64, 64))
    detections = to_supervision(result, ["blue", "red"])
    assert detections.xyxy.tolist() == result.value["boxes"] == [[*map(float, PLACE)]]
    assert detections.class_id.tolist() == [1]
    assert detections.confidence.tolist() == [1.0]
    assert detections.data["class_name"].tolist() == ["red"]
    assert (detections.tracker_id, detections.mask, len(detections)) == (None, None, 1)


def test_f14_masks_cover_what_was_lit_in_pixels_of_the_frame(tmp_path: Path) -> None:
    result = detected(tmp_path, "segment", task="segment")
    masks = to_supervision(result).mask
    assert masks.shape == (1, 64, 128)
    there = result.frame.image[:, :, 0] > 0
    assert (masks[0] & there).sum() / (masks[0] | there).sum() > 0.75, "to a cell of the mask, eight pixels"
    assert to_supervision(result, masks=False).mask is None


def test_f14_tracker_ids_are_minus_one_where_there_is_none_and_empty_is_empty() -> None:
    boxes = [[0, 0, 9, 9], [1, 1, 8, 8]]
    found = to_supervision(made({"boxes": boxes, "labels": [7, "x"], "tracker_ids": [None, 3]}))
    assert found.tracker_id.tolist() == [-1, 3]
    assert found.class_id.tolist()[0] == 7
    assert found.confidence.tolist() == [1.0, 1.0]
    again = to_supervision(made({"boxes": boxes, "labels": ["x", "y"]})).class_id.tolist()
    assert again[0] == found.class_id.tolist()[1] != again[1], "the same number for a name in every result"
    assert len(to_supervision(made({"boxes": [], "scores": [], "labels": [], "tracker_ids": []}))) == 0


@pytest.mark.parametrize(
    "value",
    [None, "text", {"labels": ["cat"]}, {"boxes": [[1, 2, 3]]}, {"boxes": [[1, 2, 3, 4]], "labels": []},
     {"boxes": [[1, 2, 3, 4]], "scores": [1, 2]}, {"boxes": "x"}, {"boxes": [[1, 2, 3, 4]], "tracker_ids": ["a"]},
     {"boxes": [[1, 2, 3, 4]], "masks": []}, {"boxes": [[1, 2, 3, 4]], "masks": 7}],
)  # fmt: skip
def test_what_has_no_detections_is_an_error(value: Any) -> None:
    with pytest.raises(ConfigError, match="a result of 'a' has no"):
        to_supervision(made(value))


def test_a_mask_without_a_place_in_the_picture_is_empty() -> None:
    full = {"size": [1, 1], "counts": [0, 1]}
    masks = [full, {**full, "box": [2, 3, 6, 8]}, {**full, "box": [3e9, 0, 3e9 + 9, 9]}]
    found = to_supervision(made({"boxes": [[0, 0, 9, 9], [2, 3, 6, 8], [0, 0, 9, 9]], "masks": masks})).mask
    assert found.sum(axis=(1, 2)).tolist() == [0, 20, 0]
    assert found[1, 3:8, 2:6].all()
