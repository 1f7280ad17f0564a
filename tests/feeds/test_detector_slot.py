"""A detector that another one replaces while it runs, and what each feed wants of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feeds.fakes import Camera, Collector
from feeds.graphs import BLUE, RED, bright_graph, lit
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.detector_slot import DetectorSlot, version_of
from reflex_runtime.feeds.detectors.onnx import FrameLimits, OnnxFrames
from reflex_runtime.feeds.runtime.pipeline import Pipeline
from reflex_runtime.feeds.runtime.runtime import Runtime
from reflex_runtime.run.batch_processor import BatchConfig, BatchEntry

SIZE = (64, 48)
PICTURE = lit((8, 8, 40, 40), RED, SIZE)


class Run:
    """Feeds on a detector that is exchanged."""

    def __init__(self, folder: Path) -> None:
        self.graph = bright_graph(folder / "first.onnx", "raw", SIZE)
        self.slot = DetectorSlot(OnnxFrames(self.graph))
        self.runtime = Runtime()
        self.coordinator = self.runtime.coordinator(self.slot, BatchConfig(max_batch_size=4, max_latency=0.0))
        self.found = Collector()

    def feed(self, name: str) -> Camera:
        camera = Camera(live=False)
        self.runtime.feed(name, camera, Pipeline(batch=self.coordinator), [self.found])
        return camera

    def batches_of(self, size: int) -> int:
        return self.runtime.snapshot().coordinators["onnx"].batch_sizes.get(size, 0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    with made.runtime:
        yield made


def test_i18_frames_of_one_batch_have_the_limits_of_their_feeds(tmp_path: Path) -> None:
    made = OnnxFrames(bright_graph(tmp_path / "a.onnx", "raw", SIZE), classes=["red", "green"])
    made.on_start()
    made.limits = {"b": FrameLimits(0.99), "c": FrameLimits(None, ("blue",)), "e": FrameLimits(None, ())}
    colours = {"a": (200, 0, 0), "b": (200, 0, 0), "c": (0, 0, 200), "d": BLUE, "e": (0, 0, 200)}
    frames = [BatchEntry(name, lit((8, 8, 40, 40), c, SIZE), None, 0, None, 0.0) for name, c in colours.items()]
    assert [found["labels"] for found in made.process(frames)] == [["red"], [], ["blue"], [], ["blue"]]


def test_i18_a_detector_is_replaced_between_batches_and_no_frame_is_lost(run: Run, tmp_path: Path) -> None:
    cameras = [run.feed(f"file{i}") for i in range(3)]
    for camera in cameras:
        camera.give(*[(PICTURE, n / 10) for n in range(40)])
    run.found.wait(10)
    other = bright_graph(tmp_path / "other.onnx", "rows", (96, 96), batch=2)  # another form, size and batch
    run.slot.change(OnnxFrames(other), {})
    run.coordinator.relearn()
    of_three = run.batches_of(3)
    for camera in cameras:
        camera.give(*[(PICTURE, n / 10) for n in range(40, 60)], None)
    run.found.wait(180)
    for i in range(3):
        results = [result for result in run.found.results if result.feed == f"file{i}"]
        assert [result.frame.sequence for result in results] == list(range(60))
        versions = [result.value["model"] for result in results]
        assert versions == sorted(versions, key=[version_of(run.graph), version_of(other)].index)  # never back
        assert versions[-20:] == [version_of(other)] * 20
        assert {tuple(map(round, result.value["boxes"][0])) for result in results} == {(8, 8, 40, 40)}
    assert run.batches_of(3) <= of_three + 1  # one may have been formed when it was replaced


def test_i18_a_detector_that_cannot_be_used_leaves_everything_as_it_was(run: Run, tmp_path: Path) -> None:
    camera = run.feed("door")
    camera.give((PICTURE, 0.0))
    run.found.wait(1)
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    others = bright_graph(tmp_path / "others.onnx", "raw", SIZE, metadata={"names": "{0: 'cat', 1: 'dog', 2: 'cow'}"})
    wrong = {"broken.onnx": "broken.onnx", "gone.onnx": "gone.onnx", others.name: "feed door: classes=red"}
    for path, says in wrong.items():
        with pytest.raises(ConfigError, match=says):
            run.slot.change(OnnxFrames(tmp_path / path), {"door": FrameLimits(None, ("red",))})
    with pytest.raises(ConfigError, match=r"feed door: classes=re: the graph has 3 classes; did you mean red\?"):
        run.slot.change(None, {"door": FrameLimits(None, ("re",))})
    camera.give((PICTURE, 0.1))
    run.found.wait(2)
    assert [result.value["model"] for result in run.found.results] == [version_of(run.graph)] * 2
    assert [result.value["labels"] for result in run.found.results] == [["red"]] * 2


def test_i18_a_detector_is_tried_on_the_newest_frame_before_it_is_used(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.feed("door").give((PICTURE, 0.0))
    run.found.wait(1)

    def fails(self: OnnxFrames, entries: Any) -> list[Any]:
        return [ConfigError("no light")] * len(entries)

    with monkeypatch.context() as patched:
        patched.setattr(OnnxFrames, "process", fails)
        with pytest.raises(ConfigError, match="fails on the newest frame of door: no light"):
            run.slot.change(OnnxFrames(bright_graph(tmp_path / "other.onnx", "raw", SIZE)), {})
    assert run.slot.current.name == version_of(run.graph)
