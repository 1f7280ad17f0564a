"""A directory of pictures as a source."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from feeds.fakes import END, Camera, Collector, Log, ended
from feeds.test_feed import Made
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds import sources
from reflex_runtime.feeds.outputs.json_lines import JsonLines
from reflex_runtime.feeds.runtime.feed import Feed
from reflex_runtime.feeds.runtime.pipeline import Result, SourceError
from reflex_runtime.feeds.settings import source_of_spec, specs_of
from reflex_runtime.feeds.sources import PictureFolder, source_of
from reflex_runtime.settings import FeedsConfig


def save(path: Path, value: int, size: tuple[int, int] = (8, 6), **options: Any) -> Path:
    Image.new("RGB", size, (value, value, value)).save(path, **options)
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three that can be read, and what is none of them."""
    save(tmp_path / "b.PNG", 20)
    save(tmp_path / "a.bmp", 10, (4, 2))
    Image.new("L", (8, 6), 30).save(tmp_path / "c.png")
    save(tmp_path / ".hidden.png", 1)
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "below.png").mkdir()
    save(tmp_path / "below.png" / "d.png", 1)
    return tmp_path


def read_all(source: PictureFolder) -> list[Any]:
    source.open()
    try:
        return list(iter(source.read, None))
    finally:
        source.close()


def test_f14_each_picture_of_a_directory_comes_once_by_name(pictures: Path) -> None:
    source = source_of(str(pictures))
    assert isinstance(source, PictureFolder)
    read = read_all(source)
    assert [(picture.file, *picture[0].shape, picture[0][0, 0].tolist(), picture[1]) for picture in read] == [
        ("a.bmp", 2, 4, 3, [10] * 3, None),
        ("b.PNG", 6, 8, 3, [20] * 3, None),
        ("c.png", 6, 8, 3, [30] * 3, None),
    ]
    assert {picture[0].dtype for picture in read} == {np.dtype(np.uint8)}
    assert (source.total, source.live, source.corrupt) == (3, False, 0)
    assert len(read_all(source)) == 3, "opened again, it starts over"


def test_an_orientation_in_the_picture_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    save(tmp_path / "a.jpg", 10, exif=exif)
    ((image, _),) = read_all(PictureFolder(tmp_path))
    assert image.shape == (8, 6, 3)


def test_a_picture_that_cannot_be_decoded_is_passed_over_and_counted(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pictures / "b.PNG").write_bytes((pictures / "b.PNG").read_bytes()[:40])
    monkeypatch.setattr(sources, "MOST_PIXELS", 40)
    source = PictureFolder(pictures)
    assert [picture.file for picture in read_all(source)] == ["a.bmp"], "nor one with more pixels than are allowed"
    assert source.corrupt == 2


def test_what_holds_no_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"holds no pictures \(\.bmp, ") as caught:
        PictureFolder(tmp_path).open()
    assert not caught.value.retryable
    with pytest.raises(SourceError, match="No such file"):
        PictureFolder(tmp_path / "none").open()
    with pytest.raises(ConfigError, match="a directory of pictures"):
        source_of(str(tmp_path), realtime=True)


def test_an_interrupted_directory_gives_no_more(pictures: Path) -> None:
    source = PictureFolder(pictures)
    source.open()
    source.read()
    source.interrupt()
    with pytest.raises(SourceError, match="interrupted"):
        source.read()


def test_results_name_the_file(pictures: Path) -> None:
    out, sink = io.StringIO(), Collector()
    lines = JsonLines(out)
    feed = Feed("cam", PictureFolder(pictures), sinks=[lines, sink], emit=Log())
    feed.start()
    ended(feed)
    assert [json.loads(line)["file"] for line in out.getvalue().splitlines()] == ["a.bmp", "b.PNG", "c.png"]
    (result, *_) = Made(Camera(1, END, live=False)).run().sink.results
    out.truncate(0)
    lines(Result(result.frame, "cam", None, 0.0))
    lines.close()
    assert "file" not in out.getvalue()


@pytest.mark.parametrize("setting", ["realtime", "loop", "hwaccel", "max_age_ms", "restarts", "read_timeout_s"])
def test_what_a_directory_has_not_is_refused_for_it_alone(pictures: Path, setting: str) -> None:
    value = {"hwaccel": "auto", "realtime": "true", "loop": "true"}.get(setting, "7")
    with pytest.raises(ConfigError, match=f"{setting}: is for .*, and .* is a directory of pictures"):
        specs_of([f"a={pictures}", f"a.{setting}={value}"], None, FeedsConfig())
    (spec,) = specs_of([f"a={pictures}"], None, FeedsConfig(realtime=True, hwaccel="auto"))
    assert isinstance(source_of_spec(spec), PictureFolder), "a setting for all feeds is for those that have it"
