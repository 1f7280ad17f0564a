"""What a feed takes of its source: which pictures, how they are turned, and which part of them the processor gets."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from feeds.fakes import END, Camera, Point, picture
from feeds.test_feed import Made
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.feeds.runtime import pipeline
from reflex_runtime.feeds.runtime.health import FeedStageError
from reflex_runtime.feeds.runtime.pipeline import Pipeline, Region, SourceClock, Taking, turned


def taken(taking: Taking, times: Iterable[float | None]) -> list[int]:
    """The numbers of the pictures that are taken."""
    return [number for number, time in enumerate(times) if taking.takes(time)]


def test_one_of_every_so_many_is_taken() -> None:
    assert taken(Taking(every=4), [None] * 10) == [0, 4, 8]


@pytest.mark.parametrize(("camera", "fps", "expected"), [(25, 5, 50), (30, 10, 100), (25, 10, 100), (24, 7, 70)])
def test_at_most_so_many_a_second_are_taken_on_average(camera: int, fps: int, expected: int) -> None:
    assert len(taken(Taking(fps=fps), (k / camera for k in range(10 * camera)))) - expected in (0, 1)


def test_a_limit_at_or_above_the_rate_of_a_camera_takes_all_in_spite_of_jitter() -> None:
    random = np.random.default_rng(0)
    times = [k / 30 + random.uniform(-0.003, 0.003) for k in range(300)]
    assert len(taken(Taking(fps=30), times)) == 300
    assert len(taken(Taking(fps=100), times)) == 300


def test_every_comes_before_the_rate() -> None:
    assert taken(Taking(every=2, fps=5), [k / 25 for k in range(25)]) == [0, 4, 10, 14, 20, 24]


@pytest.mark.parametrize(
    ("kind", "times", "expected"),
    [
        ("as they are", [5.0, 5.1, 5.2, 5.3], [5.0, 5.1, 5.2, 5.3]),
        ("far apart in a file", [0.0, 60.0, 120.0], [0.0, 60.0, 120.0]),
        ("missing", [None, None, None], [0.0, 0.2, 0.4]),
        ("missing later", [1.0, None, None, 1.6], [1.0, 1.2, 1.4, 1.6]),
        ("standing still", [1.0, 1.0, 1.0, 1.1], [1.0, 1.2, 1.4, 1.5]),
        ("no numbers", [1.0, nan, inf, 1.6], [1.0, 1.2, 1.4, 1.6]),
        ("going back", [1.0, 0.8, 0.9], [1.0, 1.2, 1.3]),
        ("beginning anew", [9.8, 10.0, 0.0, 0.2], [9.8, 10.0, 10.2, 10.4]),
        ("a leap", [1.0, 95_443.0, 95_443.2], [1.0, 1.2, 1.4]),
        ("a leap and back", [1.0, 1e12, 1.4, 1.6], [1.0, 1.2, 1.4, 1.6]),
    ],
)
def test_the_times_of_a_file_never_go_back_and_follow_its_rate_where_they_mean_nothing(
    kind: str, times: list[float | None], expected: list[float]
) -> None:
    """The machine's clock has no part in it: a file is read as fast as it can be."""
    for arrivals in ([7.0] * 9, [7.0 + 100.0 * k for k in range(9)]):
        clock = SourceClock(live=False)
        assert [clock.time(pts, at, 0.2) for pts, at in zip(times, arrivals, strict=False)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "times", "expected"),
    [
        ("as they are", [5.0, 5.1, 5.2, 5.3], [5.0, 5.1, 5.2, 5.3]),
        ("missing", [None, None, None], [0.0, 0.3, 0.6]),
        ("standing still", [1.0, 1.0, 1.0, 1.1], [1.0, 1.3, 1.6, 1.7]),
        ("going back", [1.0, 0.8, 0.9], [1.0, 1.3, 1.4]),
        ("beginning anew", [9.8, 10.0, 0.0, 0.2], [9.8, 10.0, 10.3, 10.5]),
        ("a leap", [1.0, 7.0, 7.2], [1.0, 1.3, 1.5]),
    ],
)
def test_the_times_of_a_camera_never_go_back_and_follow_the_arrivals_where_they_mean_nothing(
    kind: str, times: list[float | None], expected: list[float]
) -> None:
    for step in (None, 0.04):  # what FFmpeg takes for its rate has no part in it
        clock = SourceClock(live=True)
        found = [clock.time(pts, 7.0 + 0.3 * k, step) for k, pts in enumerate(times)]
        assert found == pytest.approx(expected)


def test_a_file_without_times_and_rate_has_none() -> None:
    clock = SourceClock(live=False)
    assert [clock.time(None, at, None) for at in (1.0, 2.0)] == [None, None]


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_pictures_are_turned_clockwise_alike_with_and_without_opencv(
    degrees: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    with_opencv = turned(image, degrees)
    monkeypatch.setattr(pipeline, "opencv", lambda: None)
    plain = turned(image, degrees)
    assert (plain == with_opencv).all()
    assert plain.flags.c_contiguous
    corner = {0: (0, 0), 90: (0, -1), 180: (-1, -1), 270: (-1, 0)}[degrees]
    assert (plain[corner] == image[0, 0]).all()


def test_a_region_is_cut_to_the_picture() -> None:
    image = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    assert (Region(2, 1, 3, 2).part(image) == image[1:3, 2:5]).all()
    assert Region(6, 0, 100, 100).part(image).shape == (6, 2, 3)
    with pytest.raises(ProcessorError, match="roi=8,0,1,1 lies outside of the picture, 8x6"):
        Region(8, 0, 1, 1).part(image)


def test_places_of_a_part_become_those_of_the_whole_picture() -> None:
    region = Region(100, 20, 50, 50)
    value: dict[str, Any] = {
        "boxes": [[1.25, 2, 3, 4]],
        "keypoints": [[[5, 6, 0.9], [0, 0, 0]]],
        "masks": [{"box": [1, 2, 3, 4], "size": [1, 1], "counts": [0, 1]}],
        "scores": [0.5],
    }
    placed = region.placed(value)
    assert placed == {
        "boxes": [[101.25, 22, 103, 24]],
        "keypoints": [[[105, 26, 0.9], [100, 20, 0]]],
        "masks": [{"box": [101, 22, 103, 24], "size": [1, 1], "counts": [0, 1]}],
        "scores": [0.5],
    }
    assert value["boxes"] == [[1.25, 2, 3, 4]], "the processor's own result stays"
    assert region.placed({"boxes": np.array([[1, 2, 3, 4]])})["boxes"].tolist() == [[101, 22, 103, 24]]


@pytest.mark.parametrize(
    "value",
    ["text", {"boxes": None}, {"boxes": "none"}, {"boxes": []}, {"masks": [7]}, {"masks": None}, {"masks": "none"}],
)
def test_results_of_another_form_stay_as_they_are(value: Any) -> None:
    assert Region(1, 1, 2, 2).placed(value) == value


@pytest.mark.parametrize("text", ["", "1,2,3", "1,2,0,4", "1,2,3,-4", "1.5,2,3,4", "1,2,3,4,5", "1,2,3,4000000"])
def test_a_wrong_region_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be X,Y,WIDTH,HEIGHT in pixels"):
        Region.of(text)


def test_a_region_is_no_other_than_its_text() -> None:
    assert Region.of(" 0, 200,1280 ,520") == Region(0, 200, 1280, 520)


# -- in a feed ---------------------------------------------------------------------------------------------------------


def test_pictures_that_are_not_taken_are_numbered_and_counted() -> None:
    made = Made(Camera(*range(7), END, live=False), every=3).run()
    assert made.sink.sequences == [0, 3, 6]
    assert made.drops == {"skipped": 4}
    snapshot = made.feed.snapshot()
    assert (snapshot.frames, snapshot.processed, snapshot.waiting) == (7, 3, 0)


class _Seeing(Point):
    """Keeps what it was asked about, and finds one box."""

    def submit_and_wait(self, feed_id: str, frame: Any, view: Any = None, **options: Any) -> Any:
        self.views.append(frame)
        return {"boxes": [[0, 0, 1, 1]]}


def test_the_processor_gets_the_region_of_the_turned_picture_and_sinks_the_whole() -> None:
    point = _Seeing()
    pipeline = Pipeline(batch=point, region=Region(1, 2, 3, 4))
    made = Made(Camera(5, END, live=False), pipeline=pipeline, rotate=90).run()
    whole = np.rot90(picture(5)[0], -1)  # 8 high, 6 wide
    assert (point.views[0] == whole[2:6, 1:4]).all()
    (result,) = made.sink.results
    assert (result.frame.image == whole).all()
    assert result.value == {"boxes": [[1, 2, 2, 3]]}
    assert made.feed.snapshot().resolution == (6, 8)


def test_what_is_prepared_ahead_is_the_region() -> None:
    class Preparing(_Seeing):
        def prepare(self, image: Any) -> Any:
            return image.shape

        def submit_and_wait(self, feed_id: str, frame: Any, view: Any = None, **options: Any) -> Any:
            if options["newest"] is not None:
                frame, view, *_ = options["newest"]()
            self.views.append((frame.shape, view))
            return None

    point = Preparing()
    for live in (False, True):
        Made(Camera(5, END, live=live), pipeline=Pipeline(batch=point, region=Region(1, 2, 3, 4))).run()
    assert point.views == [((4, 3, 3), (4, 3, 3))] * 2


def test_a_region_outside_of_the_picture_fails_the_frame_and_says_why() -> None:
    made = Made(Camera(1, END, live=False), pipeline=Pipeline(batch=_Seeing(), region=Region(100, 0, 5, 5))).run()
    assert made.drops == {"failed": 1}
    (event,) = made.log.of(FeedStageError)
    assert event.error == "roi=100,0,5,5 lies outside of the picture, 8x6"


def test_a_feed_turns_by_quarters() -> None:
    with pytest.raises(ConfigError, match=r"FeedConfig\.rotate=45: must be 0, 90, 180 or 270 degrees"):
        Made(Camera(END), rotate=45)
