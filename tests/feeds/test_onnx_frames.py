"""Any image model on batches of camera pictures: sizes, types, order of axes, detections in the frame's own pixels."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import reflex_runtime.feeds.detectors.picture_input as fitting
from feeds.fakes import PATIENCE
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.feeds.detectors.heads import Queries
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.run.coordinator import BatchConfig, BatchCoordinator, BatchEntry
from reflex_runtime.run.onnx_session import OnnxSession

Dim = str | int
LAST: tuple[Dim, ...] = ("n", 6, 8, 3)  # [n, h, w, 3]
FIRST: tuple[Dim, ...] = ("n", 3, 6, 8)
UINT8, FLOAT, HALF = TensorProto.UINT8, TensorProto.FLOAT, TensorProto.FLOAT16


def save(path: Path, nodes: list[Any], dims: Sequence[Dim], dtype: int, outputs: list[Any], **constants: Any) -> Path:
    image = helper.make_tensor_value_info("image", dtype, dims)
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "test", [image], outputs, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path


def mean_model(root: Path, dims: Sequence[Dim] = LAST, dtype: int = UINT8) -> Path:
    """`mean`: the mean of what the graph was given, per picture and channel, [n, 3]; float32."""
    axes = [1, 2] if dims[3] == 3 else [2, 3]
    nodes = [
        helper.make_node("Cast", ["image"], ["x"], to=FLOAT),
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=0),
    ]
    output = helper.make_tensor_value_info("mean", FLOAT, (dims[0], 3))
    return save(root / "mean.onnx", nodes, dims, dtype, [output], axes=np.array(axes, np.int64))


BOXES = [[1.0, 2.0, 5.0, 4.0], [0.0, 0.0, 8.0, 6.0]]


def detector_model(root: Path, names: str | None = None) -> Path:
    """Two boxes on every picture, in pixels of 8 × 6; the first as sure as its mean is bright, the second 0.9."""
    nodes = [
        helper.make_node("Cast", ["image"], ["x"], to=FLOAT),
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=0),  # [n]
        helper.make_node("Div", ["mean", "white"], ["bright"]),
        helper.make_node("Unsqueeze", ["bright", "one"], ["column"]),  # [n, 1]
        helper.make_node("Mul", ["column", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "second"], ["other"]),
        helper.make_node("Concat", ["column", "other"], ["scores"], axis=1),
        helper.make_node("Unsqueeze", ["nothing", "one"], ["nothings"]),  # [n, 1, 1]
        helper.make_node("Add", ["nothings", "fixed"], ["boxes"]),
        helper.make_node("Add", ["nothing", "numbers"], ["label_values"]),
        helper.make_node("Cast", ["label_values"], ["labels"], to=TensorProto.INT64),
    ]
    outputs = [
        helper.make_tensor_value_info("boxes", FLOAT, ("n", 2, 4)),
        helper.make_tensor_value_info("scores", FLOAT, ("n", 2)),
        helper.make_tensor_value_info("labels", TensorProto.INT64, ("n", 2)),
    ]
    f = np.float32
    constants = {
        "axes": np.array([1, 2, 3], np.int64),
        "white": f(255),
        "one": np.array([1], np.int64),
        "zero": f(0),
        "second": f(0.9),
        "fixed": np.array([BOXES], f),
        "numbers": np.array([[1, 2]], f),
    }
    path = save(root / "detector.onnx", nodes, LAST, UINT8, outputs, **constants)
    if names is not None:
        model = onnx.load(path)
        helper.set_model_props(model, {"names": names})
        onnx.save(model, path)
    return path


def plain(value: int, height: int = 6, width: int = 8) -> NDArray[np.uint8]:
    return np.full((height, width, 3), value, np.uint8)


def entries(*frames: Any) -> list[BatchEntry]:
    return [BatchEntry("cam", frame, None, i, None, 0.0) for i, frame in enumerate(frames)]


def started(path: Path, **options: Any) -> OnnxFrames:
    processor = OnnxFrames(path, **options)
    processor.on_start()
    return processor


def calls_of(processor: OnnxFrames, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call of the graph itself."""
    calls: list[int] = []
    assert processor._loaded is not None
    session = processor._loaded.session
    whole = session.call
    monkeypatch.setattr(session, "call", lambda rows: (calls.append(len(rows["image"])), whole(rows))[1])
    return calls


@pytest.mark.parametrize("dims", [LAST, FIRST])
@pytest.mark.parametrize(("dtype", "scale"), [(UINT8, 1.0), (FLOAT, 255.0), (HALF, 255.0)])
def test_either_order_of_axes_and_every_type_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dims: Sequence[Dim], dtype: int, scale: float
) -> None:
    processor = started(mean_model(tmp_path, dims, dtype))
    calls = calls_of(processor, monkeypatch)
    coloured = plain(0) + np.array([10, 20, 30], np.uint8)
    results = processor.process(entries(coloured, plain(255)))
    np.testing.assert_allclose(results[0]["mean"], np.array([10, 20, 30]) / scale, rtol=2e-3)
    np.testing.assert_allclose(results[1]["mean"], np.array([255, 255, 255]) / scale, rtol=2e-3)
    assert calls == [2]


@pytest.mark.parametrize("dims", [("n", 6, 8, 3), ("n", 3, 6, 8)])
def test_mean_and_std_are_per_channel_of_the_scaled_pixel(dims: Sequence[Dim]) -> None:
    taken = fitting.PictureInput("image", np.dtype(np.float32), dims[1] != 3, (8, 6), sizes=False)
    dialect = Queries("b", "l", "sigmoid", (8, 6), mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))
    (row,) = taken.tensors([taken.fitted(plain(51), "stretch")], dialect)["image"]
    np.testing.assert_allclose(row[0, 0] if taken.last else row[:, 0, 0], [0.2, 0.0, -0.05], atol=1e-6)


def test_pictures_of_many_sizes_share_a_batch_and_boxes_come_back_in_each_ones_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = started(detector_model(tmp_path))
    calls = calls_of(processor, monkeypatch)
    results = processor.process(entries(plain(255), plain(255, 60, 16), plain(255, 3, 4)))
    assert [r["boxes"][0] for r in results] == [[1, 2, 5, 4], [2, 20, 10, 40], [0.5, 1, 2.5, 2]]
    assert [r["boxes"][1] for r in results] == [[0, 0, 8, 6], [0, 0, 16, 60], [0, 0, 4, 3]]
    assert calls == [3]


def test_detections_below_the_score_are_left_out_with_their_boxes_and_labels(tmp_path: Path) -> None:
    processor = started(detector_model(tmp_path), score=0.5)
    bright, dark = processor.process(entries(plain(204), plain(51)))
    assert bright["labels"] == [1, 2]
    assert bright["scores"] == pytest.approx([0.8, 0.9])
    assert (dark["labels"], dark["boxes"]) == ([2], [BOXES[1]])
    assert dark["scores"] == pytest.approx([0.9])
    assert json.loads(json.dumps([bright, dark])) == [bright, dark]


@pytest.mark.parametrize("names", ['["none", "cat", "dog"]', '{"1": "cat", "2": "dog"}', "{1: 'cat', 2: 'dog'}"])
def test_label_names_come_from_the_graphs_metadata(tmp_path: Path, names: str) -> None:
    (result,) = started(detector_model(tmp_path, names)).process(entries(plain(255)))
    assert result["labels"] == ["cat", "dog"]


def test_a_label_without_a_name_stays_a_number(tmp_path: Path) -> None:
    (result,) = started(detector_model(tmp_path, '{"1": "cat", "3": "dog"}')).process(entries(plain(255)))
    assert result["labels"] == ["cat", 2]
    with pytest.raises(ConfigError, match="a class number 2, but its metadata has 2 names; give --names FILE"):
        started(detector_model(tmp_path, '["none", "cat"]'))


def test_names_that_cannot_be_read_name_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for names in ("{0: 'cat'", "7", '{"cat": "0"}', "[" * 100_000, "open('x')"):
        (result,) = started(detector_model(tmp_path, names)).process(entries(plain(255)))
        assert result["labels"] == [1, 2]
        assert "boxes, scores and labels, no names that can be read (see --names), stretch" in caplog.messages[-1]


def test_what_is_no_picture_fails_alone(tmp_path: Path) -> None:
    processor = started(mean_model(tmp_path))
    odd = [None, plain(1)[..., 0], plain(1).astype(np.float32), plain(1)[:0], np.zeros((6, 8, 4), np.uint8)]
    results = processor.process(entries(plain(1), *odd, plain(2)))
    assert [r["mean"][0] for r in (results[0], results[-1])] == [1, 2]
    assert all(isinstance(r, ProcessorError) for r in results[1:-1])
    assert len(results) == 7
    assert "NoneType" in str(results[1])
    assert "float32 [6, 8, 3]" in str(results[3])
    (alone,) = processor.process(entries(None))
    assert isinstance(alone, ProcessorError)


def test_a_picture_that_is_a_view_of_another_is_read_right(tmp_path: Path) -> None:
    picture = np.zeros((12, 16, 3), np.uint8)
    picture[::2, ::-2] = (1, 2, 3)
    (small, large) = started(mean_model(tmp_path)).process(entries(picture[::2, ::-2], picture[::2, ::-1]))
    np.testing.assert_allclose(small["mean"], [1, 2, 3])
    assert large["mean"].shape == (3,)


def test_a_leading_axis_of_one_runs_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = started(mean_model(tmp_path, (1, 6, 8, 3)))
    calls = calls_of(processor, monkeypatch)
    results = processor.process(entries(plain(1), plain(2), plain(3)))
    assert [r["mean"][0] for r in results] == [1, 2, 3]
    assert calls == [1, 1, 1]


def test_a_graph_of_any_size_needs_one(tmp_path: Path) -> None:
    path = mean_model(tmp_path, ("n", "h", "w", 3))
    with pytest.raises(ConfigError, match=r"takes any size .* choose one, such as --size 640"):
        started(path)
    (result,) = started(path, size=(4, 2)).process(entries(plain(7, 20, 30)))
    np.testing.assert_allclose(result["mean"], [7, 7, 7])


def test_a_size_that_the_graph_does_not_take_is_refused(tmp_path: Path) -> None:
    path = mean_model(tmp_path, FIRST)
    started(path, size=(8, 6))
    with pytest.raises(ConfigError, match=r"size 6x8.* width 8 and height 6"):
        started(path, size=(6, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": 1.5}, r"OnnxFrames.score=1.5: must be in \[0, 1\]"),
        ({"score": float("nan")}, r"score=nan"),
        ({"size": (0, 4)}, r"size=\(0, 4\)"),
    ],
)
def test_wrong_settings_are_refused_at_once(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OnnxFrames(tmp_path / "none.onnx", **options)


def test_graphs_that_take_no_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found"):
        started(tmp_path / "none.onnx")
    nodes = [helper.make_node("Identity", ["image"], ["y"])]

    def graph(dims: Sequence[Dim], dtype: int = FLOAT) -> Path:
        output = helper.make_tensor_value_info("y", dtype, dims)
        return save(tmp_path / "odd.onnx", nodes, dims, dtype, [output])

    with pytest.raises(ConfigError, match=r"found \[any, 4, 6, 8\], expected \[n, 3, h, w\]"):
        started(graph(("n", 4, 6, 8)))
    with pytest.raises(ConfigError, match=r"found \[any, 3\], expected"):
        started(graph(("n", 3)))
    with pytest.raises(ConfigError, match="found int64, expected uint8 or floating"):
        started(graph(FIRST, TensorProto.INT64))
    with pytest.raises(ConfigError, match=r"provider='NoneProvider'"):
        started(mean_model(tmp_path), provider="NoneProvider")


def test_a_detector_with_odd_outputs_is_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["image"], ["x"], to=FLOAT),
        helper.make_node("ReduceMean", ["x", "axes"], ["boxes"], keepdims=0),
        *(helper.make_node("Identity", ["boxes"], [name]) for name in ("scores", "labels")),
    ]
    outputs = [helper.make_tensor_value_info(name, FLOAT, ("n", 3)) for name in ("boxes", "scores", "labels")]
    path = save(tmp_path / "odd.onnx", nodes, LAST, UINT8, outputs, axes=np.array([1, 2], np.int64))
    with pytest.raises(ConfigError, match=r"output 'boxes': expected .n, k, 4.; found 'boxes' .n, 3."):
        started(path)


def test_a_detector_whose_outputs_are_no_numbers_is_refused_in_words(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["image"], ["x"], to=FLOAT),
        helper.make_node("ReduceMin", ["x", "axes"], ["least"], keepdims=1),
        helper.make_node("Sub", ["least", "white"], ["negative"]),
        helper.make_node("Log", ["negative"], ["nan"]),
        helper.make_node("Reshape", ["nan", "column"], ["nans"]),
        helper.make_node("Add", ["nans", "rows"], ["output"]),
    ]
    outputs = [helper.make_tensor_value_info("output", FLOAT, ("n", 10, 6))]
    constants = {"axes": np.array([1, 2, 3]), "column": np.array([-1, 1, 1]), "white": np.float32(256)}
    rows = np.zeros((1, 10, 6), np.float32)
    path = save(tmp_path / "nan.onnx", nodes, LAST, UINT8, outputs, rows=rows, **constants)
    with pytest.raises(ConfigError, match=r"nan\.onnx: 'output' .n, 10, 6.: classes would score between nan and nan"):
        started(path)


def test_it_warms_up_before_the_first_frame_and_lets_go_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    whole = OnnxSession.run
    monkeypatch.setattr(OnnxSession, "run", lambda self, rows: (sizes.append(len(rows["image"])), whole(self, rows))[1])
    processor = OnnxFrames(mean_model(tmp_path))
    with pytest.raises(ProcessorError, match="not started"):
        processor.process(entries(plain(1)))
    processor.on_start()
    assert sizes == [1, 1], "once to see what its outputs mean"
    processor.on_stop()
    with pytest.raises(ProcessorError, match="not started"):
        processor.process(entries(plain(1)))


def test_it_serves_behind_a_coordinator(tmp_path: Path) -> None:
    with BatchCoordinator(OnnxFrames(mean_model(tmp_path), id="means"), BatchConfig(max_latency=0.01)) as handle:
        futures = [handle.submit(f"cam{i}", plain(i, 6 + i, 8)) for i in range(4)]
        assert [f.result(PATIENCE)["mean"][0] for f in futures] == [0, 1, 2, 3]
        with pytest.raises(ProcessorError, match="NoneType"):
            handle.submit_and_wait("cam0", None)


@pytest.mark.parametrize("dims", [LAST, FIRST])
def test_a_frame_prepared_ahead_is_not_brought_to_size_again(tmp_path: Path, dims: Sequence[Dim]) -> None:
    processor = OnnxFrames(mean_model(tmp_path, dims))
    assert processor.prepare(plain(1)) is None, "not started"
    processor.on_start()
    ahead, other = processor.prepare(plain(7, 20, 30)), plain(9)
    (result,) = processor.process([BatchEntry("cam", other, ahead, 0, None, 0.0)])
    assert result["mean"].tolist() == [7, 7, 7], "what was prepared is what the graph gets"
    assert [processor.prepare(wrong) for wrong in (None, plain(1)[..., :2], plain(1).astype(np.float32))] == [None] * 3


def test_what_another_graph_prepared_is_not_taken(tmp_path: Path) -> None:
    processor, wider = started(mean_model(tmp_path)), started(mean_model(tmp_path, ("n", 6, 10, 3)))
    cropping = started(mean_model(tmp_path), resize="crop")
    for ahead in (wider.prepare(plain(7)), cropping.prepare(plain(7)), "a view of the feed's own"):
        (result,) = processor.process([BatchEntry("cam", plain(9), ahead, 0, None, 0.0)])
        assert result["mean"].tolist() == [9, 9, 9]


def test_channels_are_taken_apart_alike_with_and_without_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    with_opencv = fitting.planes_of(picture)
    monkeypatch.setattr(fitting, "opencv", lambda: None)
    assert (fitting.planes_of(picture) == with_opencv).all()
    assert (with_opencv == picture.transpose(2, 0, 1)).all()
