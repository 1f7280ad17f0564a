"""The stages of a feed: what they may do with a frame and a result, and who may share them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from feeds.fakes import END, Camera, Collector, Point, balanced, ended, number_in
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.feed import Feed
from reflex_runtime.feeds.runtime.pipeline import Frame, Pipeline, Result


def run(pipeline: Pipeline, count: int = 3) -> tuple[Feed, Collector]:
    sink = Collector()
    feed = Feed("cam", Camera(*range(count), END, live=False), pipeline, [sink])
    feed.start()
    ended(feed)
    assert balanced(feed)
    return feed, sink


def test_stages_run_in_order_around_the_batch_point() -> None:
    steps: list[str] = []

    def step(name: str) -> Any:
        return lambda item: (steps.append(name), item)[1]

    point = Point(lambda sequence: steps.append("batch"))
    run(Pipeline([step("b1"), step("b2")], point, [step("a1"), step("a2")], view=step("view")), 1)
    assert steps == ["b1", "b2", "view", "batch", "a1", "a2"]


def test_the_processor_and_the_sinks_get_the_picture_as_the_stages_left_it() -> None:
    pictures = []

    class Seeing(Point):
        def submit_and_wait(self, feed_id: str, frame: Any, view: Any = None, **known: Any) -> Any:
            pictures.append((frame.shape, number_in(frame), known["sequence"], known["pts"]))
            return super().submit_and_wait(feed_id, frame, view, **known)

    def crop(frame: Frame) -> Frame:
        return replace(frame, image=np.ascontiguousarray(frame.image[:2, :4]))

    _, sink = run(Pipeline([crop], Seeing()), 2)
    assert pictures == [((2, 4, 3), 0, 0, 0.0), ((2, 4, 3), 1, 1, 0.1)]
    assert [result.frame.size for result in sink.results] == [(4, 2), (4, 2)]


def test_a_stage_before_may_skip_a_frame() -> None:
    point = Point()
    feed, sink = run(Pipeline([lambda frame: frame if frame.sequence % 2 else None], point), 5)
    assert sink.sequences == [1, 3]
    assert [sequence for _, sequence, _ in point.asked] == [1, 3]
    assert feed.snapshot().drops["skipped"] == 3


def test_a_stage_after_may_change_a_result_or_keep_it_from_the_sinks() -> None:
    def stage(result: Result) -> Result | None:
        return replace(result, value={"text": str(result.value)}) if result.value else None

    feed, sink = run(Pipeline(batch=Point(), after=[stage, stage]), 3)
    assert sink.values == [{"text": "{'text': '1'}"}, {"text": "{'text': '2'}"}]
    assert feed.snapshot().processed == 3


def test_the_view_is_made_of_the_frame_the_stages_left() -> None:
    point = Point()
    run(Pipeline([lambda frame: replace(frame, pts=7.5)], point, view=lambda frame: (frame.sequence, frame.pts)), 2)
    assert point.views == [(0, 7.5), (1, 7.5)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("before", len), ("after", len), ("before", [1]), ("after", ["x"]), ("view", 3), ("batch", object())],
)
def test_a_pipeline_that_cannot_work_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Pipeline\.{field}"):
        Pipeline(**{field: value})
