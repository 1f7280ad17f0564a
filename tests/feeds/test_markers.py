"""Pictures that say whose they are: what was drawn is what is read, also after a codec, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from PIL import Image

from feeds.markers import (
    NUMBERS,
    MarkerCamera,
    MarkerPictures,
    MarkerReader,
    markers_source,
    read_markers,
    write_marker_video,
)
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.run.coordinator import BatchConfig, BatchCoordinator, BatchEntry


def read(*pictures: Any) -> list[Any]:
    reader = MarkerReader()
    reader.on_start()
    results = reader.process([BatchEntry("cam", picture, None, 0, None, 0.0) for picture in pictures])
    reader.on_stop()
    return results


def test_every_number_reads_as_itself() -> None:
    for number in range(NUMBERS):
        assert read_markers(MarkerPictures(number).picture(NUMBERS - 1 - number)) == [number, NUMBERS - 1 - number]


def test_frames_are_counted_modulo_the_dictionary() -> None:
    (result,) = read(MarkerPictures(3).picture(2017))
    assert result == {"feed": 3, "frame": 17, "text": "feed 3 frame 17"}


@pytest.mark.parametrize("size", [(40, 18), (61, 35), (160, 120), (640, 480), (300, 1000)])
def test_any_size_of_picture(size: tuple[int, int]) -> None:
    picture = MarkerPictures(417, size).picture(9)
    assert picture.shape == (size[1], size[0], 3)
    assert read_markers(picture) == [417, 9]


@pytest.mark.parametrize("size", [(123, 97), (200, 110), (97, 101)])
def test_a_camera_may_scale_the_picture(size: tuple[int, int]) -> None:
    for i in range(0, NUMBERS, 50):
        scaled = Image.fromarray(MarkerPictures(417).picture(i)).resize(size, Image.Resampling.BILINEAR)
        assert read_markers(np.asarray(scaled)) == [417, i]


def test_they_are_markers_for_everybody() -> None:
    """OpenCV's own detector reads the same numbers."""
    aruco = cv2.aruco
    detector = aruco.ArucoDetector(aruco.getPredefinedDictionary(aruco.DICT_5X5_1000))
    corners, numbers, _ = detector.detectMarkers(cv2.cvtColor(MarkerPictures(3).picture(777), cv2.COLOR_RGB2GRAY))
    at = {int(number): float(corner[0, :, 0].mean()) for number, corner in zip(numbers.ravel(), corners, strict=True)}
    assert set(at) == {3, 777}
    assert at[3] < at[777]


@pytest.mark.parametrize(("suffix", "size"), [("mp4", (160, 120)), ("mp4", (80, 36)), ("avi", (320, 240))])
def test_they_survive_a_codec(tmp_path: Path, suffix: str, size: tuple[int, int]) -> None:
    path = tmp_path / f"markers.{suffix}"
    write_marker_video(path, feed=417, frames=120, fps=30, size=size)
    with av.open(str(path)) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert [(r["feed"], r["frame"]) for r in read(*pictures)] == [(417, i) for i in range(120)]


def test_what_cannot_be_read_fails_alone() -> None:
    good = MarkerPictures(1).picture(2)
    covered = good.copy()
    covered[:, 90:] = 225
    noise = np.random.default_rng(0).integers(0, 256, good.shape, np.uint8)
    bad = [covered, good[::-1], good[:, ::-1], noise, np.full_like(good, 7), good[..., 0], good.astype(float), None]
    first, *failed, last = read(good, *bad, good)
    assert first == last == {"feed": 1, "frame": 2, "text": "feed 1 frame 2"}
    assert len(failed) == len(bad)
    assert all(isinstance(result, ProcessorError) for result in failed)
    assert "found 1 markers, expected 2" in str(failed[0])


def test_one_wrong_cell_is_no_other_marker() -> None:
    rng = np.random.default_rng(1)
    for number in rng.integers(0, NUMBERS, 30):
        picture = MarkerPictures(int(number)).picture(5)
        y, x = 40 + 8 * int(rng.integers(5)), 24 + 8 * int(rng.integers(5))  # cells of 8 pixels, inside the border
        picture[y : y + 8, x : x + 8] = 245 - picture[y : y + 8, x : x + 8]
        assert read_markers(picture) == [5]


def test_the_camera_shows_its_feed_and_counts() -> None:
    camera = markers_source("markers:feed=12,fps=30,frames=4,size=80x60,live=no")
    assert (camera.live, camera.total, camera.name) == (False, 4, "markers:feed=12,fps=30")
    camera.open()
    seen = []
    while (picture := camera.read()) is not None:
        assert picture[1] == pytest.approx(len(seen) / 30)
        seen.append(read_markers(picture[0]))
    assert seen == [[12, 0], [12, 1], [12, 2], [12, 3]]
    assert MarkerCamera(1).live


def test_routing_is_proved_by_content_behind_a_coordinator() -> None:
    cameras = [MarkerPictures(feed) for feed in range(8)]
    with BatchCoordinator(MarkerReader(), BatchConfig(max_batch_size=4, max_in_flight_per_feed=4)) as handle:
        futures = {
            (feed, i): handle.submit(f"cam{feed}", cameras[feed].picture(i)) for i in range(2) for feed in range(8)
        }
        answers = {key: future.result(60) for key, future in futures.items()}
    assert {key: (answer["feed"], answer["frame"]) for key, answer in answers.items()} == {key: key for key in answers}
