"""Stages after the batch: tracks, zones, lines and stages of one's own, on real videos and a real detector."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feeds.commands import by_feed, ran, refusal, results, scratch
from feeds.fakes import END, PATIENCE, Camera, Collector, Log, Point, balanced
from feeds.graphs import BLUE, RED, bright_graph, lit
from feeds.videos import clip, write_video
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.feed import Feed, FeedConfig
from reflex_runtime.feeds.runtime.health import FeedSnapshot, FeedStageError, StageFigures
from reflex_runtime.feeds.runtime.pipeline import Frame, Pipeline, Result
from reflex_runtime.feeds.stages import TrackStage, ZoneStage, lines_of, zones_of
from reflex_runtime.feeds.table import line_of_counts, line_of_stages

BLACK = np.zeros((64, 64, 3), np.uint8)
MINE = '''
class Count:
    """State of one feed, in order of its frames."""
    def __init__(self):
        self.seen = []
    def __call__(self, result):
        self.seen.append(result.frame.sequence)
        if result.frame.sequence == 2:
            raise ValueError("two is wrong")
        return None if result.frame.sequence == 3 else type(result)(
            result.frame, result.feed, result.value | {"seen": list(self.seen)}, result.latency)

def rename(result):
    result.value["labels"] = [label.upper() for label in result.value["labels"]]
    return result

wrong = 7
def fails(result):
    return 7
'''


def found(boxes: list[list[float]], pts: float | None, number: int = 0, **more: Any) -> Result:
    value = {"boxes": boxes, "scores": [0.9] * len(boxes), "labels": ["red"] * len(boxes)} | more
    return Result(Frame(BLACK, number, pts, 0.0), "a", value, 0.0)


def box(x: float, y: float = 20.0) -> list[float]:
    return [x, y, x + 12.0, y + 12.0]


# -- the command -------------------------------------------------------------------------------------------------------


def crossing(xs: list[int], colour: tuple[int, int, int]) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """A rectangle that is at these places, one a picture; a dark picture for a place below 0."""
    return [BLACK if x < 0 else lit((x, 20, x + 12, 32), colour, (64, 64)) for x in xs]


def test_f14_tracks_zones_and_lines_are_counted_for_each_feed_in_results_and_in_the_end(tmp_path: Path) -> None:
    there = list(range(2, 50, 2))
    write_video(tmp_path / "a.mp4", crossing(there, RED))
    write_video(tmp_path / "b.mp4", crossing([*there[::-1], *[-1] * 30, *there[::-1]], BLUE))
    write_video(tmp_path / "dim.mp4", crossing([8] * 5, (140, 0, 0)))
    bright_graph(tmp_path / "m.onnx", "named")
    (tmp_path / "feeds.toml").write_text(
        '[feeds]\nonnx = "m.onnx"\nresults = "r.jsonl"\ntrack = true\nline = "gate=32,0,32,64"\n'
        'zone = ["left=0,0,30,0,30,64,0,64"]\n[[feed]]\nname = "a"\nsource = "a.mp4"\n'
        '[[feed]]\nname = "b"\nsource = "b.mp4"\nzone = ["all=0,0,64,0,64,64,0,64"]\ntrack_score = 0.3\n'
        '[[feed]]\nname = "dim"\nsource = "dim.mp4"\n'
    )
    feeds = ran("--config", "feeds.toml", "--track-score", "0.6", "--line", "gate=32,64,32,0",
                "--zone", "left=0,0,28,0,28,64,0,64", cwd=tmp_path)  # fmt: skip
    seen = by_feed(results(tmp_path / "r.jsonl"))
    a, b = ([line["value"] for line in seen[name]] for name in "ab")
    assert [v["tracker_ids"] for v in a] == [[None], *[[0]] * (len(there) - 1)]
    assert {i for v in b for i in v["tracker_ids"]} == {None, 0, 1}, "gone for over a second: another object"
    assert [line["value"]["tracker_ids"] for line in seen["dim"]] == [[None]] * 5, "it scores 0.55"
    for value in a:
        (x0, _, x1, y1), inside = value["boxes"][0], value["zones"]["left"]
        assert inside == ([0] if (x0 + x1) / 2 <= 28.0 and y1 <= 64.0 else []), value
    assert 0 < sum(len(v["zones"]["left"]) for v in a) < len(a)
    assert all(v["zones"] == {"all": [0]} for v in b if v["boxes"])
    (over,) = [k for k, v in enumerate(a) if v["lines"]["gate"]["crossed_out"] == [0]]
    middles = [(v["boxes"][0][0] + v["boxes"][0][2]) / 2 for v in a]
    assert middles[over - 1] <= 32.0 < middles[over] or middles[over - 1] < 32.0 <= middles[over]
    assert a[-1]["lines"]["gate"] == {"in": 0, "out": 1, "crossed_in": [], "crossed_out": []}
    assert (b[-1]["lines"]["gate"]["in"], b[-1]["lines"]["gate"]["out"]) == (2, 0)
    assert "a: 0 in left; gate crossed 0 in, 1 out" in feeds.log
    assert "b: 1 in all; gate crossed 2 in, 0 out" in feeds.log


def test_f14_stages_of_ones_own_have_state_of_their_feed_and_a_fault_costs_one_frame(tmp_path: Path) -> None:
    (scratch(tmp_path) / "own.py").write_text(MINE)
    bright_graph(tmp_path / "m.onnx", "named")
    write_video(tmp_path / "a.mp4", crossing([4] * 6, RED))
    arguments = ("a=a.mp4", "b=a.mp4", "--onnx", "m.onnx", "--stage", "own:rename", "--stage", "own:Count")
    feeds = ran(*arguments, "--results", "r.jsonl", cwd=tmp_path, status=1)
    for lines in by_feed(results(tmp_path / "r.jsonl")).values():
        assert [line["sequence"] for line in lines] == [0, 1, 4, 5], "2 failed, 3 was kept from the sinks"
        assert lines[-1]["value"]["seen"] == list(range(6)), "of this feed alone, in order"
        assert lines[0]["value"]["labels"] == ["RED"]
    assert any("a: stage own:Count: ValueError: two is wrong (own.py, line " in line for line in feeds.log)
    assert any("a: 1 of 6 frames have no answer: stage own:Count" in line for line in feeds.log)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--zone door", "--zone=door: must be NAME=x1,y1,x2,y2,x3,y3,… in pixels, 0 to 8192"),
        ("--zone d=1,2,3,4", "--zone=d: must have 3 to 100 corners, found 2"),
        ("--zone d=1,1,2,2,3,3", "--zone=d: encloses no area"),
        ("--zone d=1,1,2,2,3,nan", "--zone=d=1,1,2,2,3,nan: must be NAME="),
        ("--zone d=1,1,9,9,1,9 --zone d=1,1,9,9,1,9", "--zone=d: is given twice"),
        ("--track --line l=1,2,3", "--line=l=1,2,3: must be NAME=x1,y1,x2,y2"),
        ("--track --line l=1,2,1,2", "--line=l: must be two points"),
        ("--line l=1,2,3,4", "--line needs --track"),
        ("--track-score 0.4", "--track-score needs --track"),
        ("--stage own", "--stage=own: must be MODULE:NAME, such as mypkg.rules:only_large"),
        ("--stage own:nothing", "--stage=own:nothing: own has no 'nothing'"),
        ("--stage own:wrong", "--stage=own:wrong: int cannot be called with a result"),
    ],
)
def test_f14_a_stage_that_cannot_be_is_refused_before_a_camera_opens(
    arguments: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("own.py").write_text(MINE)
    assert says in refusal(capsys, f"a={clip(3)}", "--onnx", "shapes", *arguments.split())


def test_f14_stages_that_need_boxes_are_refused_for_a_classifier(tmp_path: Path) -> None:
    bright_graph(tmp_path / "m.onnx", "classes", metadata={"task": "classify"})
    file = tmp_path / "cameras.toml"
    file.write_text(f"[[feed]]\nname = 'a'\nsource = '{clip(3)}'\nzone = ['d=1,1,9,9,1,9']\n")
    for arguments, where in (((f"a={clip(3)}", "--track"), "track"), (("--config", str(file)), "feed a: zone")):
        log = ran(*arguments, "--onnx", "m.onnx", cwd=tmp_path, status=2).log
        assert f"--onnx=m.onnx: {where} has no effect: the graph gives no boxes" in log[-1]


# -- slow and failing stages -------------------------------------------------------------------------------------------


def test_f14_frames_that_a_slow_stage_costs_are_dropped_before_they_are_computed_and_it_is_named() -> None:
    entered, gate, point, sink = threading.Semaphore(0), threading.Event(), Point(), Collector()

    def slow(result: Result) -> Result:
        entered.release()
        assert gate.wait(PATIENCE)
        return result

    camera = Camera(0)
    feed = Feed("cam", camera, Pipeline(batch=point, after=[slow]), [sink], FeedConfig(max_age=1000.0))
    feed.start()
    assert entered.acquire(timeout=PATIENCE)
    camera.idle()
    camera.give(1, 2, 3)
    camera.idle()
    gate.set()
    sink.wait(2)
    camera.give(END)
    assert feed.join(PATIENCE)
    assert balanced(feed)
    assert [sequence for _, sequence, _ in point.asked] == sink.sequences == [0, 3]
    told = feed.snapshot()
    assert {reason: n for reason, n in told.drops.items() if n} == {"slow_stage": 2}
    assert told.stages["slow"].runs == 2
    assert line_of_stages(told).startswith("cam: 2 frames dropped while a stage ran; slow takes ")


def test_f14_a_stage_that_returns_something_else_is_an_error_that_says_so() -> None:
    log = Log()
    after = [lambda result: result.value]
    feed = Feed("cam", Camera(0, END, live=False), Pipeline(batch=Point(), after=after), emit=log)
    feed.start()
    assert feed.join(PATIENCE)
    (told,) = log.of(FeedStageError)
    assert told.error == "stage <lambda>: TypeError: returned int, must return a Result or None"
    figures = feed.snapshot().stages["<lambda>"]
    assert (figures.runs, figures.errors) == (1, 1)


def test_counts_and_stages_in_words() -> None:
    counts: dict[str, Any] = {"zones": {"z": 2}, "lines": {"l": {"in": 1, "out": 0}}}
    feed = FeedSnapshot(name="a", mode="live", source="", state="running", **counts)
    assert line_of_counts(feed) == "a: 2 in z; l crossed 1 in, 0 out"
    assert line_of_stages(feed) == ""
    slow = {"s": StageFigures(4, 0, 2.0)}
    feed = FeedSnapshot(name="a", mode="live", source="", state="x", drops={"slow_stage": 1}, stages=slow)
    assert line_of_stages(feed) == "a: 1 frame dropped while a stage ran; s takes 500 ms a frame"


# -- tracks ------------------------------------------------------------------------------------------------------------


def tracked(stage: TrackStage, result: Result) -> list[int | None]:
    ids: list[int | None] = stage(result).value["tracker_ids"]
    return ids


def test_f14_ids_belong_to_the_boxes_in_their_order_whatever_the_tracker_returns() -> None:
    stage, boxes = TrackStage(), [box(0, 0), box(40, 0), box(20, 40)]
    for k in range(3):
        ids = tracked(stage, found(boxes, k / 25))
    assert sorted(i for i in ids if i is not None) == [0, 1, 2]
    turned = tracked(stage, found([*boxes[::-1], [0.0, 0.0, float("nan"), 1.0]], 3 / 25))
    assert turned == [*ids[::-1], None]


def test_f14_a_score_below_track_score_continues_a_track_and_begins_none() -> None:
    stage = TrackStage(0.6)
    assert [tracked(stage, found([box(0)], k / 25, scores=[0.5])) for k in range(4)] == [[None]] * 4
    for k in range(4, 7):
        tracked(stage, found([box(0)], k / 25))
    assert tracked(stage, found([box(0)], 7 / 25, scores=[0.2])) == [0]


@pytest.mark.parametrize(("pause", "same"), [(0.5, True), (1.6, False)])
def test_f14_a_track_ends_after_a_second_of_the_source_and_its_number_is_not_used_again(
    pause: float, same: bool
) -> None:
    stage = TrackStage()
    for k in range(5):
        assert tracked(stage, found([box(0)], k / 25)) == [None if k == 0 else 0]
    stage(found([], 4 / 25 + pause))
    ids = [tracked(stage, found([box(0)], 4 / 25 + pause + k / 25)) for k in range(1, 4)]
    assert ids[-1] == ([0] if same else [1])


def test_f14_pictures_without_times_are_tracked_as_25_a_second() -> None:
    stage = TrackStage()
    for k in range(5):
        assert tracked(stage, found([box(0)], None, k)) == [None if k == 0 else 0]


def test_f14_a_result_with_a_score_too_few_is_no_detection() -> None:
    with pytest.raises(ConfigError, match="a result of 'a' has no detections: 1 values of scores for 2 boxes"):
        TrackStage()(found([box(0), box(40)], 0.0, scores=[0.5]))


def test_f14_a_result_without_boxes_passes_as_it_is() -> None:
    for value in (None, "text", {"labels": ["cat"], "scores": [0.5]}, {"boxes": None}):
        result = Result(Frame(BLACK, 0, 0.0, 0.0), "a", value, 0.0)
        assert TrackStage()(result) is result
        assert ZoneStage({"z": ((0, 0), (9, 0), (9, 9))}, {})(result) is result


# -- zones -------------------------------------------------------------------------------------------------------------


def test_zones_and_lines_are_read_from_lists_that_a_file_or_the_environment_cut_at_commas() -> None:
    assert zones_of(["a=0", "0", "9", "0", "9", "9.5", "b=1", "1", "5", "1", "5", "5"]) == {
        "a": ((0.0, 0.0), (9.0, 0.0), (9.0, 9.5)),
        "b": ((1.0, 1.0), (5.0, 1.0), (5.0, 5.0)),
    }
    assert lines_of(["a=0,0,9,0", "b-1.x=0,1,2,3"]) == {"a": ((0, 0), (9, 0)), "b-1.x": ((0, 1), (2, 3))}
    assert zones_of(()) == {}


def test_lines_without_tracks_are_an_error_not_a_count_of_nothing() -> None:
    with pytest.raises(ConfigError, match="lines need tracks"):
        ZoneStage({}, {"l": ((0, 0), (9, 9))})(found([box(0)], 0.0))


def test_a_zone_outside_of_the_picture_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Such as one in pixels of a camera's larger stream."""
    beside, inside = ((400.0, 0.0), (500.0, 0.0), (500.0, 40.0)), ((0.0, 0.0), (500.0, 0.0), (500.0, 40.0))
    edge = ((0.0, 64.0), (64.0, 64.0), (64.0, 70.0))  # where boxes end that are clipped to the picture
    stage = ZoneStage({"far": beside, "near": inside, "edge": edge}, {})
    for number in range(3):
        stage(found([box(0)], 0.0, number))
    assert caplog.messages == ["a: far lies outside of the picture, 64x64, and counts nothing"]
