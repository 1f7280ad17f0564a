"""Results on their way out: lines of JSON that any reader can read, and pictures that can be looked at."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from feeds.fakes import Clock, frame
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.outputs import check_files, written
from reflex_runtime.feeds.outputs.annotated import AnnotatedVideo, annotated
from reflex_runtime.feeds.outputs.json_lines import JsonLines, SinkError, line_of
from reflex_runtime.feeds.runtime.pipeline import Frame, Result
from reflex_runtime.settings import FeedsConfig
from reflex_runtime.settings.declare import flag


def result(sequence: int = 0, value: Any = None, feed: str = "cam") -> Result:
    return Result(frame(sequence), feed, value, 0.0123456)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# -- JSON --------------------------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1


@dataclass
class Point:
    x: float
    y: Any


class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("such as a lock")

    def __str__(self) -> str:
        return "uncopied"


@pytest.mark.parametrize(
    ("value", "safe"),
    [
        (None, None),
        (True, True),
        (float("nan"), None),
        ([1, float("inf")], [1, None]),
        (np.float32(0.5), 0.5),
        (np.float32("nan"), None),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1, 2]], np.uint8), [[1, 2]]),
        (np.array([1.0, np.nan]), [1.0, None]),
        (np.array(["a"]), ["a"]),
        (np.array(2.5), 2.5),
        ({1: (2, {"x": np.array([3])})}, {"1": [2, {"x": [3]}]}),
        (Colour.RED, 1),
        (Point(1.0, np.array([2.0])), {"x": 1.0, "y": [2.0]}),
        (Point(1.0, Uncopied()), {"x": 1.0, "y": "uncopied"}),
        (1 + 2j, "(1+2j)"),
        (b"x", "eA=="),
        ("half \ud800", "half \ud800"),
        ({"a\ud800": np.array([1])}, {"a\ud800": [1]}),
        ({"a\ud800": [float("nan"), -float("inf")]}, {"a\ud800": [None, None]}),
    ],
)
def test_whatever_a_processor_answers_becomes_json(value: Any, safe: Any) -> None:
    made = json.loads(line_of(result(0, value)))["value"]
    assert made == safe
    assert type(made) is type(safe)


def test_f14_a_line_says_feed_number_time_and_value(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "out.jsonl")
    sink(result(3, {"boxes": np.array([[0, 1, 2, 3]]), "text": "é"}))
    sink.close()
    assert lines(tmp_path / "out.jsonl") == [
        {
            "feed": "cam",
            "sequence": 3,
            "pts": 0.3,
            "latency_ms": 12.346,
            "value": {"boxes": [[0, 1, 2, 3]], "text": "é"},
        }
    ]


def test_many_feeds_share_a_file_and_no_line_is_torn(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "out.jsonl")
    with ThreadPoolExecutor(8) as pool:
        for feed in range(8):
            pool.submit(lambda feed=feed: [sink(result(i, "x" * 200, f"cam{feed}")) for i in range(200)])
    sink.close()
    found = lines(tmp_path / "out.jsonl")
    for feed in range(8):
        assert [line["sequence"] for line in found if line["feed"] == f"cam{feed}"] == list(range(200))


def test_one_feed_at_a_time_writes() -> None:
    class Narrow(io.BytesIO):
        inside = crowded = 0

        def isatty(self) -> bool:
            return True  # every line at once

        def write(self, text: bytes) -> int:
            self.inside += 1
            time.sleep(0)  # let others in, if they may
            self.crowded += self.inside > 1
            self.inside -= 1
            return len(text)

    stream = Narrow()
    sink = JsonLines(stream)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(lambda: [sink(result(i)) for i in range(100)])
    assert stream.crowded == 0


def test_lines_are_written_out_every_second_and_at_the_end(tmp_path: Path) -> None:
    path, clock = tmp_path / "out.jsonl", Clock()
    sink = JsonLines(path, clock)
    for at, seen in ((0.0, 1), (0.5, 1), (0.99, 1), (1.0, 4), (1.5, 4), (9.0, 6)):
        clock.now = 100.0 + at
        sink(result())
        assert len(lines(path)) == seen
    sink(result())
    sink.close()
    assert len(lines(path)) == 7


def test_a_file_is_written_anew_and_after_a_close_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    sink = JsonLines(path)
    sink(result(0))
    sink.close()
    sink(result(1))
    sink.close()
    sink.close()
    assert [line["sequence"] for line in lines(path)] == [0, 1]


def test_a_stream_is_written_and_not_closed() -> None:
    stream = io.BytesIO()
    sink = JsonLines(stream, Clock())
    sink(result(0))
    sink(result(1))
    assert stream.getvalue().count(b"\n") == 1
    sink.close()
    assert stream.getvalue().count(b"\n") == 2


def test_a_stream_with_a_buffer_is_written_out(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with path.open("wb") as stream:
        JsonLines(stream, Clock())(result(0))
        assert len(lines(path)) == 1


def test_a_pipe_that_is_full_and_does_not_wait_is_an_error() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb"), open(writer, "wb", buffering=0) as stream:
        sink = JsonLines(stream, Clock())
        with pytest.raises(SinkError, match="unavailable"):
            sink(result(0, "x" * 5_000_000))


def test_a_terminal_sees_every_line_at_once() -> None:
    class Terminal(io.BytesIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    sink = JsonLines(stream, Clock())
    for i in range(3):
        sink(result(i))
        assert stream.getvalue().count(b"\n") == i + 1


def test_times_have_microseconds_not_the_noise_of_sums() -> None:
    line = line_of(Result(replace(frame(), pts=1.9200000000000728), "cam", None, 0.0))
    assert json.loads(line)["pts"] == 1.92


def test_a_full_disk_is_told_once() -> None:
    sink = JsonLines("/dev/full", Clock())
    with pytest.raises(SinkError, match="failed: No space left on device; no more"):
        sink(result())
    sink(result())
    sink.close()
    assert sink.lost == 2


def test_a_reader_that_left_is_told_once() -> None:
    class Gone(io.BytesIO):
        def write(self, text: bytes) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    sink = JsonLines(Gone(), Clock())
    with pytest.raises(SinkError, match="Broken pipe"):
        sink(result())
    sink(result())
    sink.close()
    assert sink.lost == 2


def test_what_is_left_at_the_end_and_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "out.jsonl", Clock())
    sink(result())
    sink(result())
    sink._stream.close()
    monkeypatch.setattr(sink, "_stream", open("/dev/full", "wb", buffering=0))  # noqa: SIM115 - the sink closes it
    with pytest.raises(SinkError):
        sink.close()
    assert sink.lost == 1


def test_a_run_without_a_result_leaves_none_of_the_run_before(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("before\n")
    sink = JsonLines(path, Clock())
    assert path.read_text() == "before\n"
    sink.begin()
    assert path.read_text() == ""
    sink(result())
    sink.begin()  # too late: it has begun
    sink.close()
    assert len(path.read_text().splitlines()) == 1


def test_an_encoder_has_one_thread_and_holds_no_pictures_back(tmp_path: Path) -> None:
    video = AnnotatedVideo(tmp_path / "a.mp4")
    video(result())
    context = video._stream.codec_context
    assert context.thread_count == 1
    assert not context.has_b_frames
    video.close()


# -- drawing -----------------------------------------------------------------------------------------------------------


def blank(width: int = 64, height: int = 48) -> Any:
    return np.full((height, width, 3), 100, np.uint8)


def test_a_box_is_drawn_where_it_is_and_the_picture_is_not_touched() -> None:
    image = blank()
    drawn = annotated(image, {"boxes": [[10, 20, 30, 40]]})
    assert (image == 100).all()
    changed = (drawn != 100).any(axis=2)
    ys, xs = np.nonzero(changed)
    assert (xs.min(), ys.min(), xs.max(), ys.max()) == (10, 20, 30, 40)
    assert not changed[25:35, 15:25].any()


def test_the_same_label_has_the_same_colour_and_others_differ() -> None:
    def colour(label: str) -> tuple[int, ...]:
        return tuple(annotated(blank(), {"boxes": [[20, 30, 40, 44]], "labels": [label]})[37, 20])

    assert colour("circle") == colour("circle")
    assert len({colour(label) for label in "abcdefgh"}) > 2
    assert len({colour(label) for label in ("circle", "square", "triangle")}) == 3  # those of the demo


def test_a_label_at_the_edge_can_be_read() -> None:
    """It is moved into the picture: as much is drawn as in the middle."""

    def drawn(x: int, y: int) -> int:
        value = {"boxes": [[x, y, x + 4, y + 4]], "labels": ["square"]}
        return int((annotated(blank(200, 100), value) != 100).any(axis=2).sum())

    middle = drawn(60, 50)
    assert abs(drawn(190, 50) - middle) < 20
    assert abs(drawn(190, 0) - middle) < 60


def test_text_and_caption_are_drawn_in_their_corners() -> None:
    drawn = annotated(blank(200, 100), {"text": "two people"}, "cam #7")
    changed = (drawn != 100).any(axis=2)
    assert changed[:20, :60].any()
    assert changed[80:, :60].any()
    assert not changed[40:60].any()


MASK = {"box": [10, 20, 30, 40], "size": [2, 2], "counts": [1, 1, 1, 1]}  # the right half


def test_f14_keypoints_and_masks_are_drawn_where_they_are() -> None:
    value = {"boxes": [[10, 20, 30, 40]], "keypoints": [[[50, 10, 0.9], [55, 40, 0.1]]], "masks": [MASK]}
    changed = (annotated(blank(), value) != 100).any(axis=2)
    assert changed[9:12, 49:52].all()
    assert not changed[38:43, 53:58].any(), "a point that is hardly visible"
    assert changed[22:39, 21:29].all()
    assert not changed[22:39, 12:19].any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"keypoints": 3},
        {"keypoints": [[["a", 1]]]},
        {"keypoints": [[[np.nan, 1]]]},
        {"masks": [3]},
        {"masks": [{**MASK, "counts": [1]}]},
        {"masks": [{**MASK, "counts": [-1, 5]}]},
        {"masks": [{**MASK, "counts": [10**15]}]},
        {"masks": [{**MASK, "counts": [2**62] * 4 + [4]}]},  # together 4, as 64 bits count
        {"masks": [{**MASK, "size": [10**5, 10**5]}]},
        {"masks": [{**MASK, "box": [0, 0, 1e9, 1e9]}]},
        {"masks": [{**MASK, "box": [3e9, 0, 3e9 + 9, 9]}]},
        {"masks": [{**MASK, "box": None}]},
    ],
)
def test_f14_keypoints_and_masks_of_another_form_are_left_out(wrong: Any) -> None:
    plain = {"boxes": [[10, 20, 30, 40]]}
    assert (annotated(blank(), plain | wrong) == annotated(blank(), plain)).all()


@pytest.mark.parametrize(
    "value",
    [None, 3, "text", {}, {"boxes": None}, {"boxes": [[1, 2, 3]]}, {"boxes": [["a"] * 4]}, {"boxes": [[1, 2], [3]]},
     {"boxes": [[np.nan, 20, 30, 40]], "labels": ["x"]}, {"boxes": [], "labels": ["x"]},
     {"boxes": [[5, 5, np.inf, 9]]}],
)  # fmt: skip
def test_what_is_not_of_the_form_is_left_out(value: Any) -> None:
    assert (annotated(blank(), value) == 100).all()


@pytest.mark.parametrize(
    "value",
    [
        {"boxes": np.array([[40.0, 30.0, 5.0, 5.0]]), "labels": np.array(["swapped"]), "scores": np.array([0.5])},
        {"boxes": [[-1e9, -1e9, 1e9, 1e9]], "scores": ["no number"]},
        {"boxes": [[5, 5, 5, 5]], "labels": [None, "more labels than boxes"]},
        {"boxes": [[5, 5, 9, 9]], "labels": ["日本語 \n \u202e" * 400], "text": "x" * 100_000},
    ],
)
def test_odd_boxes_and_words_are_drawn_as_well_as_can_be(value: Any) -> None:
    drawn = annotated(blank(), value)
    assert drawn.shape == (48, 64, 3)
    assert (drawn != 100).any()


def test_a_tiny_or_strided_picture_can_be_drawn_on() -> None:
    assert annotated(blank(1, 1), {"boxes": [[0, 0, 1, 1]], "text": "x"}).shape == (1, 1, 3)
    assert annotated(blank()[:, ::-1], {"text": "x"}, "y").shape == (48, 64, 3)


# -- video -------------------------------------------------------------------------------------------------------------


def shown(sequence: int, pts: float | None, width: int = 64, height: int = 48, level: int = 100) -> Result:
    image = np.full((height, width, 3), level, np.uint8)
    return Result(Frame(image, sequence, pts, 0.0), "cam", {"boxes": [[8, 8, 40, 40]]}, 0.01)


def frames_of(path: Path) -> list[tuple[float, Any]]:
    with av.open(str(path)) as container:
        return [(float(f.pts * f.time_base), f.to_ndarray(format="rgb24")) for f in container.decode(video=0)]


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_f14_the_video_holds_every_picture_at_its_time(
    tmp_path: Path, suffix: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if codec == "mpeg4":
        monkeypatch.setattr(av, "codecs_available", av.codecs_available - {"libx264"})
    path = tmp_path / f"out.{suffix}"
    sink = AnnotatedVideo(path, caption=False)
    for i in range(20):
        sink(shown(i, 5.0 + i / 10, level=5 * i))
    sink.close()
    sink(shown(99, 99.0))  # too late: what is finished stays as it is
    sink.close()
    found = frames_of(path)
    assert [round(at, 2) for at, _ in found] == [round(i / 10, 2) for i in range(20)]
    for i, (_, image) in enumerate(found):
        assert abs(float(image[20:28, 20:28].mean()) - 5 * i) < 12


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_f14_a_killed_process_leaves_a_video_that_can_be_seen(tmp_path: Path, suffix: str) -> None:
    sink = AnnotatedVideo(tmp_path / f"out.{suffix}", caption=False)
    for i in range(60):
        sink(shown(i, i / 10))
    killed = tmp_path / f"killed.{suffix}"
    killed.write_bytes((tmp_path / f"out.{suffix}").read_bytes())  # what the system has when the process is gone
    seen = [round(at, 2) for at, _ in frames_of(killed)]
    sink.close()
    assert seen == [round(i / 10, 2) for i in range(len(seen))]
    assert len(seen) >= 40  # all but the fragment that was being made, and the one that is flushed with the next


def test_f14_an_annotated_video_is_for_its_owner_and_keeps_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "out.mp4"
    path.write_bytes(b"of the run before")
    sink = AnnotatedVideo(path)
    sink(shown(0, 0.0))
    sink.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "out.mp4.1").read_bytes() == b"of the run before"


def test_f14_an_annotated_video_follows_no_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "out.mp4").symlink_to(target)
    sink = AnnotatedVideo(tmp_path / "out.mp4")
    with pytest.raises(SinkError, match="is a symbolic link"):
        sink(shown(0, 0.0))
    assert target.read_bytes() == b"precious"


def test_another_size_is_scaled_to_the_first_and_odd_sides_are_made_even(tmp_path: Path) -> None:
    sink = AnnotatedVideo(tmp_path / "out.mp4", caption=False)
    sizes = [(65, 49), (200, 30), (16, 16)]
    for i, (width, height) in enumerate(sizes):
        image = np.full((height, width, 3), 50, np.uint8)
        image[:, width // 2 :] = 200  # a dark and a bright half
        sink(Result(Frame(image, i, i / 10, 0.0), "cam", None, 0.0))
    sink.close()
    found = [image for _, image in frames_of(tmp_path / "out.mp4")]
    assert [image.shape for image in found] == [(48, 64, 3)] * 3
    for image in found:
        assert abs(float(image[:, :28].mean()) - 50) < 15
        assert abs(float(image[:, 36:].mean()) - 200) < 15


@pytest.mark.parametrize(
    ("times", "shown_for"),
    [
        ([10.0, 10.1, 10.2, 10.3, 7000.0, 7000.1], [0.1, 0.1, 0.1, 5.0, 0.1]),
        ([None] * 4, [0.04] * 3),  # a directory
    ],
)
def test_times_are_those_of_the_source_and_a_long_gap_is_shortened(
    tmp_path: Path, times: list[float | None], shown_for: list[float]
) -> None:
    sink = AnnotatedVideo(tmp_path / "out.mkv")
    for i, pts in enumerate(times):
        sink(shown(i, pts))
    sink.close()
    found = [at for at, _ in frames_of(tmp_path / "out.mkv")]
    assert [round(b - a, 2) for a, b in pairwise(found)] == shown_for


def test_a_video_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    sink = AnnotatedVideo(tmp_path / "missing" / "out.mp4")
    with pytest.raises(SinkError, match="failed"):
        sink(shown(0, 0.0))
    sink(shown(1, 0.1))
    sink.close()


def test_a_video_without_a_picture_leaves_no_file(tmp_path: Path) -> None:
    AnnotatedVideo(tmp_path / "out.mp4").close()
    assert list(tmp_path.iterdir()) == []


def test_without_pyav_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[cameras\]'"):
        AnnotatedVideo("out.mp4")


def test_a_file_that_cannot_be_names_its_option() -> None:
    for name in ("results", "trace"):
        with pytest.raises(ConfigError, match=f"--{name}=.*: cannot be written: File name too long"):
            check_files(FeedsConfig(**{name: "x" * 300}))  # type: ignore[arg-type]


def test_every_file_that_a_setting_names_is_read_or_checked_before_the_run() -> None:
    """`--annotate` has a directory, whose files are checked by feed."""
    named = [f.name for f in fields(FeedsConfig) if f.metadata["metavar"] in ("FILE", "DIR")]
    outputs = {name for name, _ in written(FeedsConfig(**dict.fromkeys(named, "x")))}  # type: ignore[arg-type]
    assert {flag(name) for name in named} - outputs == {"--onnx", "--names", "--annotate"}
