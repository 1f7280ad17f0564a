"""SIGHUP: the configuration is read again by a real process, and only the feeds that it changes notice.

The videos carry their feed and frame number, and every frame of a file is answered: one that is lost, repeated or mixed
up shows. They are longer than a test, as the processor takes its time.
"""

from __future__ import annotations

import signal
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from feeds.commands import Feeds, by_feed, refusal, scratch
from feeds.graphs import bright_graph, lit
from feeds.markers import write_marker_video
from feeds.videos import clip, write_video

READER = 'processor = "slow:SlowReader"\n'
SLOW = """
from threading import Event
from feeds.markers import MarkerReader

class SlowReader(MarkerReader):
    def process(self, entries):
        Event().wait(0.02 * len(entries))
        return super().process(entries)
"""
ENDLESS = "shapes:realtime=false,size=64x48"


def feed(name: str, source: str, *more: str) -> str:
    return f'[[feed]]\nname = "{name}"\nsource = "{source}"\n' + "".join(f"{line}\n" for line in more)


class Configured:
    """A run of feeds with a configuration file that a test writes again."""

    def __init__(self, folder: Path, *feeds: str, general: str = READER, arguments: tuple[str, ...] = ()) -> None:
        (folder / "slow.py").write_text(SLOW)
        self.file = folder / "cameras.toml"
        self.write(*feeds, general=general)
        self.feeds = Feeds("--config", "cameras.toml", "--results=-", *arguments, cwd=folder)
        self.told = 0

    def write(self, *feeds: str, general: str = READER) -> None:
        self.file.write_text(f"[feeds]\n{general}{''.join(feeds)}")

    def reload(self, *feeds: str, general: str = READER) -> str:
        """Write it, signal, and return the line that says what came of it."""
        self.write(*feeds, general=general)
        return self.hup()

    def hup(self) -> str:
        self.feeds.process.send_signal(signal.SIGHUP)
        self.told += 1
        return self.feeds.wait_log("cameras.toml ", self.told).partition("cameras.toml ")[2]

    def more(self, count: int = 12) -> dict[str, list[Any]]:
        """Every result so far, once there are so many more."""
        return by_feed(self.feeds.wait_out(len(self.feeds.out) + count))

    def seen(self, *names: str, after: str = "") -> dict[str, list[Any]]:
        """Every result so far, once there are some of these feeds, since the first one of `after`."""

        def found() -> Any:
            lines = self.feeds.wait_out(0)
            feeds = [line["feed"] for line in lines]
            since = feeds.index(after) if after in feeds else 0 if not after else len(feeds)
            return by_feed(lines) if {*names} <= {*feeds[since:]} else None

        made: dict[str, list[Any]] = self.feeds.reach(found, f"results of {names}")
        return made

    def restarted(self, name: str) -> list[Any]:
        """The results of a feed since it began anew, once there are some. Of a file, whose frames are all answered."""

        def since() -> list[Any]:
            lines = by_feed(self.feeds.wait_out(0)).get(name, [])
            numbers = [line["sequence"] for line in lines]
            return next((lines[k:] for k in range(1, len(lines)) if numbers[k] <= numbers[k - 1]), [])

        found: list[Any] = self.feeds.reach(since, f"results of {name} since it began anew")
        return found


def uninterrupted(lines: list[Any]) -> bool:
    """Whether no frame is missing, and each is the one after that before it in the video."""
    return [line["sequence"] for line in lines] == list(range(len(lines)))


def test_i18_feeds_come_go_and_change_and_the_others_are_not_touched(tmp_path: Path) -> None:
    for number, name in enumerate(("door", "gate", "yard", "hall"), 1):
        write_marker_video(tmp_path / f"{name}.mp4", number, 900, size=(80, 36))
    door, gate, yard, hall = (feed(name, f"{name}.mp4") for name in ("door", "gate", "yard", "hall"))
    made = Configured(tmp_path, door, gate, yard)
    with made.feeds as feeds:
        assert made.seen("door", "gate", "yard").keys() == {"door", "gate", "yard"}
        made.more(20)
        told = made.reload(door, feed("gate", "gate.mp4", "every = 3"), hall)
        assert told == "was read again: new: hall; changed: gate; gone: yard; 1 as before"
        made.restarted("gate")
        made.seen("door", "gate", "hall", after="hall")
        made.more(30)
        assert feeds.stop() == 0
        lines = feeds.wait_out(0)
    found = by_feed(lines)
    after = by_feed(lines[[line["feed"] for line in lines].index("hall") :])
    assert uninterrupted(found["door"]), "it went on, and lost nothing"
    assert after.keys() == {"door", "gate", "hall"}
    again = [line["sequence"] for line in found["gate"]].index(0, 1)
    assert uninterrupted(found["gate"][:again])
    assert [line["sequence"] for line in found["gate"][again:]] == list(range(0, 3 * len(found["gate"][again:]), 3))
    assert uninterrupted(found["hall"])
    numbers = {"door": 1, "gate": 2, "yard": 3, "hall": 4}
    for name, lines in found.items():
        assert {line["value"]["feed"] for line in lines} == {numbers[name]}


@pytest.mark.long  # plays for seconds
def test_i18_tracks_of_a_feed_go_on_while_another_one_changes(tmp_path: Path) -> None:
    pytest.importorskip("trackers")
    general = 'onnx = "shapes"\ntrack = true\n'
    door, gate = feed("door", "shapes:seed=0"), feed("gate", "shapes:seed=1")
    made = Configured(tmp_path, door, gate, general=general)
    with made.feeds as feeds:
        made.seen("door", "gate")
        made.more(30)
        assert "changed: gate; 1 as before" in made.reload(door, gate + "score = 0.9\n", general=general)
        anew = made.restarted("gate")[0]
        made.more(20)
        assert feeds.stop() == 0
        lines = feeds.wait_out(0)
    begun = max(place for place, line in enumerate(lines) if line == anew)
    before, after = (ids(by_feed(part)["door"]) for part in (lines[:begun], lines[begun:]))
    assert before & after, "the same objects have the same numbers"
    numbers = [line["sequence"] for line in by_feed(lines)["door"]]
    assert numbers == sorted({*numbers}), "it has not begun anew"


def ids(lines: list[Any]) -> set[int]:
    return {number for line in lines for number in line["value"]["tracker_ids"] if number is not None}


def test_i18_a_file_that_is_wrong_changes_nothing_and_a_line_names_the_file_and_the_key(tmp_path: Path) -> None:
    write_marker_video(tmp_path / "door.mp4", 1, 900, size=(80, 36))
    door = feed("door", "door.mp4")
    wrong = {
        "[[feed]\n": "not TOML",
        door + feed("gate", "gate.mp4"): "gate=gate.mp4: no such file",
        door + feed("gate", "door.mp4", "colour = 3"): "feed 2: colour: no such setting of a feed",
        door + feed("gate", "door.mp4", "fps = -1"): "feed 2: fps=-1: must be in [0, 1000]",
        door + feed("gate", "door.mp4", "score = 0.5"): "feed 2: score: has no effect on a processor of your own",
        door + feed("gate", "door.mp4", 'stage = ["no.such:stage"]'): "gate: stage=no.such:stage: there is no module",
        door + door: "two feeds are called door",
        "": "no feeds: give NAME=SOURCE",
        "max_batch_size = 0\n" + door: "--max-batch-size=0: must be in [1, 4096]",
        "max_batchsize = 8\n" + door: "[feeds] max_batchsize: no such setting; did you mean max_batch_size?",
        "[[feeds]]\n" + door: "not TOML",
    }
    made = Configured(tmp_path, door)
    with made.feeds as feeds:
        made.more(5)
        for text, says in wrong.items():
            told = made.reload(text)
            assert told.startswith("changes nothing: "), told
            assert says in told
        assert "1 as before" in made.reload(door)
        made.more(5)
        assert feeds.stop() == 0
        assert uninterrupted(feeds.wait_out(0))
    assert sum("cameras.toml" in line for line in feeds.log) == len(wrong) + 1, "a line each"


def test_i18_another_detector_counts_at_the_next_start(tmp_path: Path) -> None:
    bright_graph(tmp_path / "first.onnx", "raw", (64, 48))
    feeds_ = [feed(name, ENDLESS) for name in "ab"]
    made = Configured(tmp_path, *feeds_, general='onnx = "first.onnx"\n')
    with made.feeds as feeds:
        made.more(20)
        told = made.reload(*feeds_, general='onnx = "other.onnx"\nthreads = 2\n')
        assert told == "was read again: 2 as before; at the next start: --onnx, --threads"
        made.more(20)
        assert feeds.stop() == 0
    digest = sha256((tmp_path / "first.onnx").read_bytes()).hexdigest()[:16]
    assert {line["value"]["model"] for line in feeds.wait_out(0)} == {f"first@{digest}"}


def test_i18_each_feed_reports_its_own_classes_and_scores(tmp_path: Path) -> None:
    bright_graph(tmp_path / "model.onnx", "raw", (64, 48))
    write_video(tmp_path / "red.mp4", [lit((8, 8, 40, 40), (150, 0, 0), (64, 48))] * 1500)  # scores 0.6
    general = 'onnx = "model.onnx"\nclasses = ["red"]\nrealtime = true\n'
    feeds_ = [feed("a", "red.mp4"), feed("b", "red.mp4", 'classes = ["blue"]')]
    made = Configured(tmp_path, *feeds_, general=general, arguments=("c=red.mp4", "c.score=0.9"))
    with made.feeds as feeds:
        def kinds() -> dict[str, list[Any]]:
            """What each feed has told so far, without repetitions: a live camera loses frames, and any may be first."""
            told = by_feed(feeds.wait_out(0))
            return {name: [k for k, _ in groupby(line["value"]["labels"] for line in told[name])] for name in told}

        feeds.reach(lambda: kinds() == {"a": [["red"]], "b": [[]], "c": [[]]}, "results of all")
        told = made.reload(feeds_[0], feed("b", "red.mp4", "classes = []"), general=general)
        assert "changed: b; 2 as before" in told
        feeds.reach(lambda: kinds()["b"][1:], "other results of b")
        told = made.reload(*feeds_, general=general.replace('"red"', '"blue"'))
        assert told.startswith("was read again: changed: a, b"), "the general classes are a setting of each feed"
        feeds.reach(lambda: kinds()["a"][1:] and kinds()["b"][2:], "other results of a and b")
        assert kinds() == {"a": [["red"], []], "b": [[], ["red"], []], "c": [[]]}
        wrong = made.reload(feeds_[0], feed("b", "red.mp4", 'classes = ["re"]'), general=general)
        assert "model.onnx: feed b: classes=re: the graph has 3 classes; did you mean red?" in wrong
        assert feeds.stop() == 0


def test_i18_a_class_that_the_detector_lacks_is_refused_at_the_start(tmp_path: Path) -> None:
    bright_graph(tmp_path / "model.onnx", "raw", (64, 48))
    with Feeds("a=shapes:", "a.classes=re", "--onnx", "model.onnx", cwd=tmp_path) as feeds:
        assert feeds.wait() == 2
    assert "--onnx=model.onnx: feed a: classes=re: the graph has 3 classes; did you mean red?" in feeds.log[-1]


def test_i18_limits_need_a_detector(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "a=shapes:", "a.score=0.5", "--processor", "feeds.markers:MarkerReader")
    assert "score: has no effect on a processor of your own (--processor)" in said


def test_f14_a_run_ends_when_what_is_left_has_ended_after_a_feed_is_gone(tmp_path: Path) -> None:
    (tmp_path / "door.mp4").write_bytes(clip(3).read_bytes())
    door, general = feed("door", "door.mp4"), 'processor = "mine:Sizes"\n'
    made = Configured(scratch(tmp_path), door, feed("yard", ENDLESS), general=general)
    with made.feeds as feeds:
        feeds.wait_log("door: came to its end")
        assert "gone: yard" in made.reload(door, general=general)
        assert feeds.wait() == 0
