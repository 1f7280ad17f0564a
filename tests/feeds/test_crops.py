"""Detections cut out of their frames: what is in them, and what bounds them."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from feeds.commands import ran
from feeds.fakes import PATIENCE
from feeds.graphs import BLUE, RED, bright_graph, lit
from feeds.videos import write_video
from reflex_runtime.feeds import Crops
from reflex_runtime.feeds.frame import Frame
from reflex_runtime.feeds.outputs.crops import FRAMES, MOST
from reflex_runtime.feeds.pipeline import Result

LONG = "\N{CJK UNIFIED IDEOGRAPH-20000}" * 64  # 256 bytes: too long for the name of a file


def result(number: int, value: Any, feed: str = "a") -> Result:
    return Result(Frame(lit((16, 8, 48, 56), RED, (64, 64)), number, 0.0, 0.0), feed, value, 0.0)


def written(folder: Path, *results: Result, keep: int = 1000) -> Crops:
    """One after the other; the output is closed."""
    crops = Crops(folder, keep)
    for each in results:
        crops.take(each)
    crops.start()
    crops.signal(PATIENCE)
    assert crops.join()
    return crops


def opened(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as picture:
        return np.asarray(picture)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_f14_crops_are_what_was_found_and_so_many_are_kept(tmp_path: Path) -> None:
    pictures = [lit((10 + k, 20, 26 + k, 40), RED if k % 2 else BLUE, (64, 64)) for k in range(6)]
    write_video(tmp_path / "a.mp4", pictures)
    bright_graph(tmp_path / "m.onnx", "named")
    arguments = ("a=a.mp4", "--realtime", "--onnx", "m.onnx", "--crops", "out", "--crops-keep", "3")
    feeds = ran(*arguments, cwd=tmp_path)
    kept = names(tmp_path / "out" / "a")
    assert [name.split("-", 1)[1] for name in kept] == ["000003-0-red.jpg", "000004-0-blue.jpg", "000005-0-red.jpg"]
    for name, channel in zip(kept, (0, 2, 0), strict=True):
        crop = opened(tmp_path / "out" / "a" / name)
        assert abs(crop.shape[1] - 16) <= 2
        assert abs(crop.shape[0] - 20) <= 2
        assert crop[4:-4, 4:-4].mean((0, 1)).argmax() == channel
    assert stat.S_IMODE((tmp_path / "out" / "a" / kept[0]).stat().st_mode) == 0o600
    assert any("crops: 6 results to out" in line for line in feeds.log)


def test_f14_crops_are_of_the_first_boxes_within_the_frame_and_have_a_name_that_is_one(tmp_path: Path) -> None:
    boxes = [[-9, -9, 20, 20], [60, 60, 99, 99], [1, 1, 3, 30], [0, 0, float("nan"), 9], *[[0, 0, 9, 9]] * 99]
    labels = ["../../etc/x y", *["b"] * 102]
    ids = [7, *[None] * 102]
    written(tmp_path, result(0, {"boxes": boxes, "labels": labels, "tracker_ids": ids}), result(1, None))
    found = names(tmp_path / "a")
    assert len(found) == MOST - 2, "one too narrow, one no box"
    assert found[0].endswith("-000000-0-.._.._etc_x_y-7.jpg")
    assert opened(tmp_path / "a" / found[0]).shape == (20, 20, 3)
    assert opened(tmp_path / "a" / found[1]).shape == (4, 4, 3)
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("feed", ["..", ".", "../other", "/etc", "a/b", "a\0b", "x" * 200, "camera 1", "\udc80", LONG])
def test_f14_crops_of_a_feed_whose_name_is_no_folders_stay_below_theirs(tmp_path: Path, feed: str) -> None:
    written(tmp_path / "out", result(1, {"boxes": [[16, 8, 48, 56]]}, feed))
    assert names(tmp_path) == ["out"]
    (folder,) = names(tmp_path / "out")
    assert re.fullmatch("feed-[0-9a-f]{16}", folder)
    assert len(names(tmp_path / "out" / folder)) == 1


def test_f14_crops_of_earlier_runs_count_and_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "holiday.jpg").write_text("mine")
    old = "20200101T000000.000Z-000000-0-red.jpg"
    (tmp_path / "a" / old).write_text("")
    written(tmp_path, result(0, {"boxes": [[0, 0, 9, 9]]}), keep=2)
    assert old in names(tmp_path / "a")
    written(tmp_path, result(1, {"boxes": [[0, 0, 9, 9]]}), keep=2)
    found = names(tmp_path / "a")
    assert old not in found
    assert len(found) == 3
    assert "holiday.jpg" in found


def test_f14_few_frames_wait_for_their_crops_and_the_newest_win(tmp_path: Path) -> None:
    value = {"boxes": [[0, 0, 9, 9]]}
    crops = written(tmp_path, *(result(k, value) for k in range(FRAMES + 3)))
    told = crops.snapshot()
    assert (told.taken, told.sent, told.drops["overrun"]) == (FRAMES + 3, FRAMES, 3)
    assert names(tmp_path / "a")[0].split("-")[1] == "000003"


def test_f14_a_disk_that_takes_no_crop_costs_the_crop_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("no folder")
    crops = written(tmp_path, result(0, {"boxes": [[0, 0, 9, 9]]}), result(1, {"boxes": [[0, 0, 9, 9]]}, "b"))
    told = crops.snapshot()
    assert (told.sent, told.drops["refused"], told.error) == (1, 1, "File exists")
    assert len(names(tmp_path / "b")) == 1
