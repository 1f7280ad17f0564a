"""The stages of a feed: what they may do with a result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from feeds.fakes import END, Camera, Collector, Point, balanced, ended
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.feed import Feed
from reflex_runtime.feeds.runtime.pipeline import Pipeline, Result


def run(pipeline: Pipeline, count: int = 3) -> tuple[Feed, Collector]:
    sink = Collector()
    feed = Feed("cam", Camera(*range(count), END, live=False), pipeline, [sink])
    feed.start()
    ended(feed)
    assert balanced(feed)
    return feed, sink


def test_stages_run_in_order_after_the_batch_point() -> None:
    steps: list[str] = []

    def step(name: str) -> Any:
        return lambda item: (steps.append(name), item)[1]

    run(Pipeline(Point(lambda sequence: steps.append("batch")), [step("first"), step("second")]), 1)
    assert steps == ["batch", "first", "second"]


def test_a_stage_may_change_a_result_or_keep_it_from_the_sinks() -> None:
    def stage(result: Result) -> Result | None:
        return replace(result, value={"text": str(result.value)}) if result.value else None

    feed, sink = run(Pipeline(batch=Point(), after=[stage, stage]), 3)
    assert sink.values == [{"text": "{'text': '1'}"}, {"text": "{'text': '2'}"}]
    assert feed.snapshot().processed == 3


@pytest.mark.parametrize(("field", "value"), [("after", len), ("after", ["x"]), ("batch", object())])
def test_a_pipeline_that_cannot_work_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Pipeline\.{field}"):
        Pipeline(**{field: value})
