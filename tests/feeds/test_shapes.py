"""The scene tells the truth about itself, as picture, camera and video, and the bundled detector finds it."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import onnx
import pytest
from tools.shape_detector.scoring import Truth, hits, truth_of, write_scene

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.runtime.pipeline import Source, SourceClock, SourceError
from reflex_runtime.feeds.sources.shapes import (
    DETECTOR,
    LABELS,
    DrawnSource,
    Image,
    Shapes,
    ShapesSource,
    shapes_source,
)
from reflex_runtime.run.coordinator import BatchEntry

HELD_OUT = 2_000_000  # seeds from here on were neither trained on nor looked at when the figures were made


@pytest.fixture(scope="module")
def detector() -> OnnxFrames:
    detector = OnnxFrames(DETECTOR)
    detector.on_start()
    return detector


def figures(detector: OnnxFrames, seen: list[tuple[Image, list[Truth]]]) -> tuple[float, float, float]:
    """Precision, recall and mean overlap, in batches of 8."""
    wanted = answered = 0
    overlaps: list[float] = []
    for k in range(0, len(seen), 8):
        some = seen[k : k + 8]
        results = detector.process([BatchEntry("cam", picture, None, 0, None, 0.0) for picture, _ in some])
        for (_, truth), found in zip(some, results, strict=True):
            wanted, answered = wanted + len(truth), answered + len(found["boxes"])
            overlaps += hits(truth, found["boxes"], found["labels"])
    return len(overlaps) / answered, len(overlaps) / wanted, float(np.mean(overlaps))


# -- the scene ---------------------------------------------------------------------------------------------------------


def test_picture_and_truth_depend_on_the_seed_and_the_number_alone() -> None:
    first, second = Shapes(3), Shapes(3)
    for i in (0, 1, 500):
        np.testing.assert_array_equal(first.picture(i), second.picture(i))
        assert truth_of(first, i) == truth_of(second, i)
    np.testing.assert_array_equal(first.picture(0), second.picture(0))
    assert (first.picture(0) != first.picture(1)).any()
    assert (first.picture(0) != Shapes(4).picture(0)).any()


@pytest.mark.parametrize("size", [(320, 240), (64, 33), (200, 400)])
def test_boxes_lie_in_the_picture_and_pictures_have_the_size(size: tuple[int, int]) -> None:
    for seed in range(20):
        scene = Shapes(seed, size)
        assert scene.picture(seed).shape == (size[1], size[0], 3)
        assert scene.picture(seed).dtype == np.uint8
        for label, x0, y0, x1, y1 in truth_of(scene, seed * 37):
            assert label in LABELS
            assert -1e-6 <= x0 < x1 <= size[0] + 1e-6
            assert -1e-6 <= y0 < y1 <= size[1] + 1e-6


def test_a_box_is_where_the_shape_is_drawn() -> None:
    """Without noise and with an even ground, the shape is what differs from it."""
    for seed in range(40):
        scene = Shapes(seed, count=1)
        scene._ground = np.zeros_like(scene._ground)
        scene._noise = np.zeros_like(scene._noise)
        for i in (0, 123):
            ((_, *box),) = truth_of(scene, i)
            rows, columns = np.nonzero(scene.picture(i).max(2) > 20)
            drawn_at = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            np.testing.assert_allclose(drawn_at, box, atol=2.5)  # the tips of corners fade


def test_shapes_move_evenly_and_stay() -> None:
    scene = Shapes(5, count=1)
    centres = np.array([((b[1] + b[3]) / 2, (b[2] + b[4]) / 2) for i in range(2000) for b in truth_of(scene, i)])
    assert len(centres) == 2000
    assert abs(np.diff(centres, axis=0)).max() < 10
    assert np.ptp(centres, axis=0).min() > 50


def test_a_hidden_shape_is_not_in_the_truth() -> None:
    scenes = [Shapes(seed, count=8) for seed in range(12)]
    shown = [len(truth_of(scene, i)) for scene in scenes for i in range(0, 300, 10)]
    assert min(shown) < 8
    assert min(shown) >= 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shapes(0, (31, 64)), r"size=\(31, 64\)"),
        (lambda: Shapes(0, count=0), "count=0: must be 1"),
        (lambda: Shapes(-1), "seed=-1: must be >= 0"),
        (lambda: Shapes(0, (64, 4097)), r"size=\(64, 4097\): .* \[32, 4096\]"),
        (lambda: ShapesSource(fps=0), r"^fps=0: must be in \(0, 1000\]"),
        (lambda: ShapesSource(fps=1001), r"fps=1001: must be in \(0, 1000\]"),
        (lambda: ShapesSource(seconds=0), r"seconds=0: must be in \(0, 1e9\]"),
        (lambda: ShapesSource(seconds=2e9), r"seconds=2000000000.0: must be in \(0, 1e9\]"),
        (lambda: DrawnSource("x", Shapes(0).picture, frames=0), "frames=0: must be >= 1"),
        (lambda: shapes_source("shapes:seed=x"), r"^shapes:seed=x: must be a whole number$"),
        (lambda: shapes_source("shapes:fps=2000"), r"^shapes:fps=2000.0: must be in \(0, 1000\]$"),
        (lambda: shapes_source("shapes:fps=fast"), r"^shapes:fps=fast: must be a number$"),
        (lambda: shapes_source("shapes:seconds=2e10"), r"^shapes:seconds=20000000000.0: must be in \(0, 1e9\]"),
        (lambda: shapes_source("shapes:size=32x9999"), r"^shapes:size=\(32, 9999\): must be .* \[32, 4096\]$"),
        (lambda: shapes_source("shapes:size=axb"), r"^shapes:size=axb: must be a size like 320x240$"),
        (lambda: shapes_source("shapes:colour=red"), "^shapes:colour: must be one of seed, fps"),
        (lambda: shapes_source("shapes:seed=1,seed=2"), "^shapes:seed: is given twice$"),
        (lambda: shapes_source("shapes:size=320"), "must be a size like 320x240"),
        (lambda: shapes_source("shapes:realtime=perhaps"), "must be true or false"),
    ],
)
def test_wrong_settings_say_what_is_wrong(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=message):
        make()


def test_hits_counts_each_shape_once_by_label_and_overlap() -> None:
    truth: list[Truth] = [("circle", 0, 0, 10, 10), ("square", 20, 0, 30, 10)]
    assert hits(truth, [[0, 0, 10, 10], [20, 0, 30, 10]], ["circle", "square"]) == [1.0, 1.0]
    assert hits(truth, [[0, 0, 10, 10], [0, 0, 10, 10]], ["circle", "circle"]) == [1.0]
    assert hits(truth, [[0, 0, 10, 10]], ["square"]) == []
    assert hits(truth, [[0, 0, 10, 5]], ["circle"]) == [0.5]
    assert hits(truth, [[0, 0, 10, 4.9]], ["circle"]) == []
    assert hits([], [[0, 0, 1, 1]], ["circle"]) == []


# -- as a camera -------------------------------------------------------------------------------------------------------


def test_read_as_a_file_it_gives_every_picture_and_ends() -> None:
    source: Source = ShapesSource(7, fps=10, seconds=0.5, realtime=False)
    source.open()
    assert (source.live, source.total) == (False, 5)
    scene = Shapes(7)
    for i in range(5):
        picture = source.read()
        assert picture is not None
        np.testing.assert_array_equal(picture[0], scene.picture(i))
        assert picture[1] == pytest.approx(i / 10)
    assert source.read() is None
    source.close()
    source.open()
    again = source.read()
    assert again is not None
    assert again[1] == 0.0


def test_a_live_camera_is_read_at_its_times_and_begins_again_when_it_is_opened_again() -> None:
    source, clock = ShapesSource(1, fps=10, seconds=0.3, size=(64, 48)), SourceClock(live=False)
    assert (source.live, source.paced) == (True, True)
    times = []
    for _ in range(2):
        source.open()
        times += [clock.time(pts, 0.0, source.step) for _, pts in iter(source.read, None)]  # type: ignore[misc]
    assert times == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_an_interrupted_source_stays_so() -> None:
    source = ShapesSource(1, fps=0.001)
    source.open()
    source.read()
    source.interrupt()
    for call in (source.read, source.open):
        with pytest.raises(SourceError, match="interrupted"):
            call()
    source.close()
    source.close()


def test_a_source_that_is_not_open_says_so() -> None:
    with pytest.raises(SourceError, match="not open"):
        ShapesSource(1).read()


def test_the_text_of_a_source() -> None:
    source = shapes_source("shapes:seed=3,fps=5,seconds=2,size=64x48,count=2,realtime=no")
    assert (source.fps, source.total, source.live) == (5.0, 10, False)
    assert (source.scene.seed, source.scene.size, source.scene.count) == (3, (64, 48), 2)
    plain = shapes_source("shapes:")
    assert (plain.live, plain.total, plain.name) == (True, None, "shapes:seed=0,fps=15,size=320x240")


# -- as a video --------------------------------------------------------------------------------------------------------


def test_a_video_shows_the_scene(tmp_path: Path) -> None:
    path, scene = tmp_path / "scene.mp4", Shapes(11, (160, 120))
    write_scene(path, seconds=2, fps=10, seed=11, size=(160, 120))
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 10
    assert len(frames) == 20
    for i, frame in enumerate(frames):
        assert abs(frame.astype(int) - scene.picture(i)).mean() < 16


# -- the detector ------------------------------------------------------------------------------------------------------


def test_the_detector_is_small_and_batches() -> None:
    assert DETECTOR.stat().st_size < 1e6
    graph = onnx.load(DETECTOR).graph
    for tensor in (*graph.input, *graph.output):
        first, *rest = tensor.type.tensor_type.shape.dim
        assert first.dim_param, f"{tensor.name}: the leading axis is the batch"
        assert all(dim.dim_value > 0 for dim in rest), f"{tensor.name}: and no other is free"


def test_the_detector_finds_shapes_it_never_saw(detector: OnnxFrames) -> None:
    scenes = [Shapes(HELD_OUT + k) for k in range(60)]
    seen = [(scene.picture(i), truth_of(scene, i)) for scene in scenes for i in (0, 40)]
    precision, recall, overlap = figures(detector, seen)
    assert precision >= 0.95
    assert recall >= 0.95
    assert overlap >= 0.80


def test_the_detector_finds_them_in_a_decoded_video(detector: OnnxFrames, tmp_path: Path) -> None:
    seen = []
    for seed in range(HELD_OUT, HELD_OUT + 4):
        write_scene(tmp_path / "v.mp4", 1.5, fps=7, seed=seed)
        with av.open(str(tmp_path / "v.mp4")) as container:
            pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        seen += [(picture, truth_of(Shapes(seed), i)) for i, picture in enumerate(pictures)]
    precision, recall, _ = figures(detector, seen)
    assert precision >= 0.9
    assert recall >= 0.9


def test_a_picture_is_answered_the_same_alone_and_in_company(detector: OnnxFrames) -> None:
    pictures = [Shapes(HELD_OUT + k, (320, 240) if k % 2 else (640, 480)).picture(k) for k in range(9)]
    made = [BatchEntry("cam", picture, None, 0, None, 0.0) for picture in pictures]
    together = detector.process(made)
    for entry, found in zip(made, together, strict=True):
        (alone,) = detector.process([entry])
        assert alone["labels"] == found["labels"]
        np.testing.assert_allclose(alone["boxes"], found["boxes"], atol=1e-2)
        np.testing.assert_allclose(alone["scores"], found["scores"], atol=1e-4)
