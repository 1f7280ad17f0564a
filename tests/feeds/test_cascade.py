"""A second model on what the first one found, as one pipeline over several feeds: real graphs on real pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feeds.fakes import Camera, Collector
from feeds.graphs import BLUE, RED, bright_graph, lit
from reflex_runtime.core.batch import Done, Failed
from reflex_runtime.core.errors import ConfigError, Expired, ProcessorError
from reflex_runtime.feeds.detectors.detector_slot import DetectorSlot, SecondModel
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.outputs.annotated import annotated
from reflex_runtime.feeds.outputs.json_lines import JsonLines
from reflex_runtime.feeds.runtime.health import BatchSubmissionRejected
from reflex_runtime.feeds.runtime.pipeline import Pipeline
from reflex_runtime.feeds.runtime.runtime import Runtime
from reflex_runtime.run.batch_processor import BatchConfig

SIZE = (64, 48)


def crops(folder: Path, **options: Any) -> SecondModel:
    metadata = {"names": "{0: 'warm', 1: 'mild', 2: 'cold'}", "task": "classify"}
    graph = bright_graph(folder / "then.onnx", "classes", (16, 16), metadata=metadata)
    classifier = OnnxFrames(graph, "then", max_detections=1, resize="stretch")
    return SecondModel(classifier, BatchConfig(max_batch_size=8, max_latency=0.0, max_in_flight_per_feed=0), **options)


def test_i18_boxes_of_all_feeds_are_classified_and_each_frame_has_its_own(tmp_path: Path) -> None:
    detector = DetectorSlot(OnnxFrames(bright_graph(tmp_path / "first.onnx", "raw", SIZE)), ["red", "blue"])
    found, cameras = Collector(), {name: Camera(live=False) for name in ("a", "b", "c")}
    colours = {"a": RED, "b": BLUE, "c": (0, 0, 0)}
    lines = JsonLines(tmp_path / "lines.jsonl")
    with Runtime() as runtime:
        then = crops(tmp_path, labels=detector.labels)
        point = runtime.coordinator(detector, BatchConfig(max_batch_size=4, max_latency=0.0), then=then)
        for name, camera in cameras.items():
            picture = lit((8, 8, 40, 40), colours[name], SIZE)
            camera.give(*[(picture, n / 10) for n in range(20)], None)
            runtime.feed(name, camera, Pipeline(batch=point), [found, lines])
        found.wait(60)
        told = runtime.snapshot().coordinators
        assert (told["onnx"].processed, told["then"].processed) == (60, 40)
        assert runtime.snapshot().feeds["a"].processed == 20
    for name, label in (("a", "warm"), ("b", "cold")):
        values = [result.value for result in found.results if result.feed == name]
        assert [[(one["box"], one["labels"]) for one in value["then"]] for value in values] == [[(0, [label])]] * 20
    assert all(result.value["then"] == [] for result in found.results if result.feed == "c")
    written = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert sum(len(line["value"]["then"]) for line in written) == 40


def test_i18_a_new_detector_must_have_the_classes_that_the_second_model_is_asked_about(tmp_path: Path) -> None:
    detector = DetectorSlot(OnnxFrames(bright_graph(tmp_path / "first.onnx", "raw", SIZE)), ["red", "2"])
    detector.on_start()
    before = {"model": detector.current.name}
    assert detector.labels(before) == {"red", "blue"}
    names = {"names": "{0: 'red', 1: 'green', 2: 'violet'}"}
    detector.change(OnnxFrames(bright_graph(tmp_path / "violet.onnx", "rows", SIZE, metadata=names)), {})
    assert detector.labels({"model": detector.current.name}) == {"red", "violet"}
    assert detector.labels(before) == {"red", "blue"}  # a batch of the one before may still run
    names = {"names": "{0: 'rot', 1: 'green', 2: 'blue'}"}
    with pytest.raises(ConfigError, match="needed classes=red: the graph has 3 classes"):
        detector.change(OnnxFrames(bright_graph(tmp_path / "other.onnx", "raw", SIZE, metadata=names)), {})
    assert detector.current.detector.path.name == "violet.onnx"


class TwoBoxes:
    """Finds two boxes in every picture."""

    id = "two"

    def on_start(self) -> None:
        pass

    def process(self, entries: Any) -> list[Any]:
        return [{"boxes": [[8, 8, 40, 40], [0, 0, 20, 20]]} for _ in entries]

    def on_stop(self) -> None:
        pass


def test_f10_boxes_without_a_place_in_the_queue_are_no_refused_frames(tmp_path: Path) -> None:
    found, camera, then = Collector(), Camera(live=False), crops(tmp_path)
    then.config = BatchConfig(max_batch_size=1, max_latency=0.0, queue_capacity=1, max_in_flight_per_feed=0)
    with Runtime() as runtime:
        events = runtime.events()
        point = runtime.coordinator(TwoBoxes(), BatchConfig(max_latency=0.0), then=then)
        camera.give(*[(lit((8, 8, 40, 40), RED, SIZE), n / 10) for n in range(5)], None)
        runtime.feed("a", camera, Pipeline(batch=point), [found])
        found.wait(5)
        assert [one.get("missing") for value in found.values for one in value["then"]] == [None, "queue_full"] * 5
        assert runtime.snapshot().coordinators["then"].rejected == 5
        assert not [event for event in events.take() if isinstance(event, BatchSubmissionRejected)]


FOUND = {
    "boxes": [[0, 0, 4, 4], [-3.5, 2.2, 5.1, 70], [8, 8, 20, 20], [70, 8, 90, 20]],
    "labels": ["car", "person", "car", "car"],
    "scores": [0.5, 0.9, 0.7, 0.8],
}


def test_i18_the_best_boxes_of_the_wanted_classes_are_cut_out_within_the_frame(tmp_path: Path) -> None:
    image = np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3)
    every = crops(tmp_path)
    parts, _ = every.parts(image, FOUND)
    assert [part.shape for part in parts] == [(46, 6, 3), (12, 12, 3), (4, 4, 3)]  # one is outside
    wanted = {"car"}
    cars = crops(tmp_path, labels=lambda value: wanted, most=1)
    (part,), join = cars.parts(image, FOUND)
    assert (part == image[8:20, 8:20]).all()
    answer = Done({"labels": ["van"], "text": "van 0.80"})
    wanted.add("person")  # by another detector: the answer is still of the box that was asked about
    assert join([answer]) == {
        **FOUND,
        "then": [{"box": 0, "missing": "too_many"}, {"box": 2, "labels": ["van"], "text": "van 0.80"}],
    }


@pytest.mark.parametrize("value", [None, [1, 2], {"text": "x"}, {"boxes": []}, {"boxes": np.zeros((0, 4))}])
def test_i18_what_has_no_boxes_has_no_parts(tmp_path: Path, value: Any) -> None:
    then = crops(tmp_path)
    parts, join = then.parts(np.zeros((8, 8, 3), np.uint8), value)
    assert parts == []
    joined = join([])
    assert joined["then"] == [] if isinstance(value, dict) else joined is value


def test_i18_a_box_without_an_answer_says_why(tmp_path: Path) -> None:
    image = np.zeros((48, 64, 3), np.uint8)
    answers = [Failed(Expired()), Failed(ProcessorError("x")), Done({"value": 3, "box": [1, 2, 3, 4]})]
    _, join = crops(tmp_path).parts(image, FOUND)
    assert join(answers)["then"] == [
        {"box": 0, "value": 3}, {"box": 1, "missing": "deadline_exceeded"}, {"box": 2, "missing": "processor_failed"},
    ]  # fmt: skip


def test_i18_what_the_second_model_said_stands_beside_the_box() -> None:
    image = np.zeros((200, 400, 3), np.uint8)
    value = {"boxes": [[10, 100, 60, 150]], "labels": ["car"]}
    plain, more = annotated(image, value), annotated(image, {**value, "then": [{"box": 0, "text": "van 0.80"}]})
    assert plain[80:98, 60:110].max() == 0
    assert more[80:98, 60:110].max() > 0
    for odd in (3, [3], [{"box": "x", "text": "y"}], [{}]):
        assert (annotated(image, {**value, "then": odd}) == plain).all()
