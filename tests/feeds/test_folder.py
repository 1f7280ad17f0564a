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
from reflex_runtime.feeds.plan import source_of_spec, specs_of
from reflex_runtime.feeds.runtime.feed import Feed
from reflex_runtime.feeds.runtime.pipeline import Result, SourceError
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
    return [picture for picture, _ in read_named(source)]


def read_named(source: PictureFolder) -> list[tuple[Any, str]]:
    source.open()
    try:
        return [(picture, source.file) for picture in iter(source.read, None)]
    finally:
        source.close()


def test_f14_each_picture_of_a_directory_comes_once_by_name(pictures: Path) -> None:
    source = source_of(str(pictures))
    assert isinstance(source, PictureFolder)
    read = read_named(source)
    assert [(file, *image.shape, image[0, 0].tolist(), pts) for (image, pts), file in read] == [
        ("a.bmp", 2, 4, 3, [10] * 3, None),
        ("b.PNG", 6, 8, 3, [20] * 3, None),
        ("c.png", 6, 8, 3, [30] * 3, None),
    ]
    assert {image.dtype for (image, _), _ in read} == {np.dtype(np.uint8)}
    assert (source.total, source.live, source.corrupt) == (3, False, 0)
    assert len(read_all(source)) == 3, "opened again, it starts over"


@pytest.mark.parametrize("form", ["EPS", "PPM", "ICNS"])
def test_a_file_of_another_format_is_not_opened_whatever_its_name(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pillow would start Ghostscript for the first."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: Image.new("RGB", (8, 6)).im)
    save(tmp_path / "a.png", 1)
    save(tmp_path / "b.png", 2, (64, 64), format=form)
    source = PictureFolder(tmp_path)
    assert len(read_all(source)) == 1
    assert source.corrupt == 1
    assert f"{tmp_path / 'b.png'}: cannot be decoded" in caplog.text


def test_names_are_in_natural_order(tmp_path: Path) -> None:
    names = ["a2.png", "a10.png", "a010.png", "b.png", "a.png", "10.png", "9.png", "a2b1.png"]
    for name in names:
        save(tmp_path / name, 1)
    order = ["9.png", "10.png", "a2.png", "a2b1.png", "a010.png", "a10.png", "a.png", "b.png"]
    assert [file for _, file in read_named(PictureFolder(tmp_path))] == order


RAMP = np.linspace(0, 1, 64 * 48).reshape(48, 64)
SIXTEEN = (RAMP * 0xFFFF).astype(np.uint16)
EIGHT = (RAMP * 0xFF).astype(np.uint8)


def cmyk() -> Image.Image:
    return Image.fromarray(np.dstack([255 - EIGHT] * 3 + [EIGHT * 0]), "CMYK")


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("16.png", lambda: Image.fromarray(SIXTEEN)),
        ("16.tif", lambda: Image.fromarray(SIXTEEN)),
        ("32.tif", lambda: Image.fromarray(SIXTEEN.astype(np.int32))),
        ("float.tif", lambda: Image.fromarray(RAMP.astype(np.float32))),
        ("8.png", lambda: Image.fromarray(EIGHT)),
        ("alpha.png", lambda: Image.fromarray(np.dstack([EIGHT] * 3 + [EIGHT * 0]), "RGBA")),
        ("grey-alpha.png", lambda: Image.fromarray(np.dstack([EIGHT, EIGHT]), "LA")),
        ("palette.png", lambda: Image.fromarray(EIGHT).convert("P")),
        ("cmyk.tif", cmyk),
        ("cmyk.jpg", cmyk),
    ],
)
def test_a_ramp_from_black_to_white_is_one_in_every_form(tmp_path: Path, name: str, made: Any) -> None:
    made().save(tmp_path / name, **({"quality": 100} if name.endswith("jpg") else {}))
    ((image, _),) = read_all(PictureFolder(tmp_path))
    assert image.shape == (48, 64, 3)
    assert np.abs(image.astype(int) - EIGHT[..., None]).max() <= 3


@pytest.mark.parametrize(
    "levels", [SIXTEEN.astype(np.int32) * 2, SIXTEEN.astype(np.int32) - 1, RAMP.astype(np.float32) * 255, RAMP * np.nan]
)
def test_levels_that_mean_nothing_are_refused_and_counted(tmp_path: Path, levels: Any) -> None:
    Image.fromarray(levels.astype(np.float32) if levels.dtype == np.float64 else levels).save(tmp_path / "a.tif")
    source = PictureFolder(tmp_path)
    assert read_all(source) == []
    assert source.corrupt == 1


def test_that_fps_has_no_effect_where_there_are_no_times_is_said(
    pictures: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Made(PictureFolder(pictures), fps=2.0).run()
    assert made.sink.sequences == [0, 1, 2]
    assert [record.message for record in caplog.records if "fps" in record.message] == [
        "cam: fps has no effect: its pictures have neither times nor a rate; use every"
    ]


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp"])
def test_an_orientation_in_the_picture_is_applied_once(tmp_path: Path, ending: str) -> None:
    """Pillow turns some kinds of files by itself."""
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    made = Image.new("L", (8, 6))
    made.paste(255, (0, 0, 4, 6))
    made.convert("RGB").save(tmp_path / f"a.{ending}", exif=exif)
    ((image, _),) = read_all(PictureFolder(tmp_path))
    assert image.shape == (8, 6, 3)
    assert image[0].min() > 200
    assert image[-1].max() < 50


def test_a_picture_that_cannot_be_decoded_is_passed_over_and_counted(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pictures / "b.PNG").write_bytes((pictures / "b.PNG").read_bytes()[:40])
    monkeypatch.setattr(sources, "MOST_PIXELS", 40)
    source = PictureFolder(pictures)
    assert [file for _, file in read_named(source)] == ["a.bmp"], "nor one with more pixels than are allowed"
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
    out, sink = io.BytesIO(), Collector()
    lines = JsonLines(out)
    feed = Feed("cam", PictureFolder(pictures), sinks=[lines, sink], emit=Log())
    feed.start()
    ended(feed)
    assert [json.loads(line)["file"] for line in out.getvalue().splitlines()] == ["a.bmp", "b.PNG", "c.png"]
    (result, *_) = Made(Camera(1, END, live=False)).run().sink.results
    out.truncate(0)
    lines(Result(result.frame, "cam", None, 0.0))
    lines.close()
    assert b"file" not in out.getvalue()


@pytest.mark.parametrize("setting", ["realtime", "loop", "hwaccel", "max_age_ms", "restarts", "read_timeout_s"])
def test_what_a_directory_has_not_is_refused_for_it_alone(pictures: Path, setting: str) -> None:
    value = {"hwaccel": "auto", "realtime": "true", "loop": "true"}.get(setting, "7")
    with pytest.raises(ConfigError, match=f"{setting}: needs .*, and .* is a directory of pictures"):
        specs_of([f"a={pictures}", f"a.{setting}={value}"], None, FeedsConfig())
    (spec,) = specs_of([f"a={pictures}"], None, FeedsConfig(realtime=True, hwaccel="auto"))
    assert isinstance(source_of_spec(spec), PictureFolder), "a setting for all feeds is for those that have it"
