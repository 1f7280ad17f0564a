"""Pictures of feeds over real sockets: made only while somebody looks, once for all of them, and for nobody who does
not read."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simplejpeg

from feeds.fakes import frame
from feeds.pages import PATIENCE, Page
from reflex_runtime.feeds import pictures
from reflex_runtime.feeds.pictures import LARGE, MIDDLE, SMALL, FeedPictures, PictureSize, jpeg_of
from reflex_runtime.feeds.runtime.pipeline import Frame, Result

BOX = {"boxes": [[8, 8, 40, 40]], "labels": ["cup"], "scores": [0.5]}


class Cameras:
    """Pictures of the feed `door` on a port. `show` is a result; `play` gives results until the block ends."""

    def __init__(self, **settings: Any) -> None:
        self.pictures = FeedPictures(lambda: {"door", "a b"})
        self.routes = self.pictures.routes
        self.find, self.close = self.pictures.find, self.pictures.close
        self.page = Page(lambda: self, **settings)
        self.image = np.full((64, 64, 3), 100, np.uint8)

    def show(self, value: Any = None) -> None:
        for name in ("door", "a b"):
            self.pictures.take(Result(Frame(self.image, 0, None, 0.0), name, value, 0.01))

    @contextmanager
    def play(self) -> Iterator[None]:
        over = threading.Event()

        def give() -> None:
            while not over.wait(0.001):
                self.show()

        thread = threading.Thread(target=give)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.fixture
def cameras() -> Iterator[Cameras]:
    made = Cameras()
    with made.page.server:
        yield made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PictureSize]:
    """The size of every picture that was made."""
    found: list[PictureSize] = []

    def make(result: Result, size: PictureSize) -> bytes:
        found.append(size)
        return jpeg_of(result, size)

    monkeypatch.setattr(pictures, "jpeg_of", make)
    return found


def part(answer: http.client.HTTPResponse) -> bytes:
    """The next picture of a stream."""
    length = 0
    while (line := answer.readline()) != b"\r\n" or not length:
        assert line
        if line.startswith(b"Content-Length: "):
            length = int(line[16:])
    return answer.read(length)


def test_i18_nothing_is_made_unless_asked_and_one_picture_is_for_all_who_ask(
    cameras: Cameras, made: list[PictureSize], monkeypatch: pytest.MonkeyPatch
) -> None:
    hourly = replace(SMALL, every=3600.0)
    monkeypatch.setattr(pictures, "SMALL", hourly)
    for _ in range(100):
        cameras.show()
    assert made == []
    with ThreadPoolExecutor(4) as pool, cameras.play():
        answers = list(pool.map(cameras.page.ask, ["/feeds/door.jpg"] * 12))
    assert {(code, headers["Content-Type"]) for code, headers, _ in answers} == {(200, "image/jpeg")}
    assert len({body for _, _, body in answers}) == 1
    assert simplejpeg.decode_jpeg(answers[0][2]).shape == (64, 64, 3)
    assert made == [hourly]


def test_i18_a_stream_has_at_most_ten_pictures_a_second_each_made_once(
    cameras: Cameras, made: list[PictureSize]
) -> None:
    began = time.monotonic()
    with cameras.play(), cameras.page.asked("/feeds/door.mjpeg") as one, cameras.page.asked("/feeds/door.mjpeg") as two:
        assert one.headers["Content-Type"] == "multipart/x-mixed-replace; boundary=frame"
        assert one.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        for _ in range(5):
            assert simplejpeg.is_jpeg(part(one))
        assert time.monotonic() - began > 0.35
        for _ in range(5):
            part(two)
        pictures_made = len(made)
        assert pictures_made <= 2 + 10 * (time.monotonic() - began)  # not as many for each of the two
    for _ in range(1000):
        cameras.show()
    until(lambda: not cameras.pictures._viewers)
    seen = len(made)
    cameras.show()
    assert len(made) == seen


def test_i18_several_feeds_come_in_one_answer_and_each_picture_names_its_feed(
    cameras: Cameras, made: list[PictureSize], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "TOGETHER", 2)
    seen = set()
    with cameras.play(), cameras.page.asked("/feeds.mjpeg?feed=a%20b&feed=door&feed=door") as some:
        while len(seen) < 2:
            seen.add(named(some))
    assert (seen, set(made)) == ({"door", "a%20b"}, {MIDDLE})
    with cameras.play(), cameras.page.asked("/feeds.mjpeg") as every, cameras.page.asked("/feeds.mjpeg?feed=door"):
        while len(seen) > 1:
            seen.discard(named(every))
        assert {size for _, size in cameras.pictures._made} == {MIDDLE}  # each is made once for both
    with cameras.play(), cameras.page.asked("/feeds.mjpeg?feed=wall&feed=door") as rest:  # one was removed meanwhile
        assert named(rest) == "door"
    until(lambda: not cameras.pictures._viewers)
    told = [cameras.page.ask(f"/feeds.mjpeg?{query}") for query in ("feed=wall", "feed=door&feed=a&feed=b")]
    assert [(code, json.loads(body)["message"]) for code, _, body in told] == [
        (404, "there is no feed wall"),
        (422, "feed: 3 are named, at most 2 may be"),
    ]


def named(answer: http.client.HTTPResponse) -> str:
    """The feed of the next picture of a stream."""
    while not (line := answer.readline()).startswith(b"X-Feed: "):
        assert line
    part(answer)
    return line[8:].decode().strip()


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.005)


def test_i18_there_are_only_so_many_streams(cameras: Cameras, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "STREAMS", 1)
    with cameras.page.asked("/feeds/door.mjpeg"):
        code, _, body = cameras.page.ask("/feeds/a%20b.mjpeg")
        assert (code, json.loads(body)["message"]) == (429, "1 streams of pictures are open, which is the most")


def test_i18_one_that_does_not_read_is_cut_off_and_others_go_on(
    cameras: Cameras, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "UNREAD", 0.0)
    monkeypatch.setattr(pictures, "RESTS", 0.0)
    monkeypatch.setattr(pictures, "LARGE", replace(LARGE, every=0.0, quality=100))
    cameras.image = np.random.default_rng(0).integers(0, 255, (900, 900, 3), dtype=np.uint8)
    with cameras.page.connect() as slow, cameras.page.asked("/feeds.mjpeg?feed=door") as quick:
        slow.sendall(b"GET /feeds/door.mjpeg HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: cameras.pictures._streams == 2)
        with cameras.play():
            while cameras.pictures._streams == 2:
                part(quick)  # smaller and seldom: the connection has room for it however busy the machine is
            part(quick)


def test_i18_without_a_frame_there_is_no_picture_and_no_error(
    cameras: Cameras, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "PATIENCE", 0.05)
    assert cameras.page.ask("/feeds/door.jpg")[0] == 204
    assert cameras.page.ask("/feeds/door.mjpeg", "HEAD")[0] == 200
    code, _, body = cameras.page.ask("/feeds/wall.jpg")
    assert (code, json.loads(body)["message"]) == (404, "there is no feed wall")


def test_i18_a_frame_that_is_no_picture_is_logged_once(
    cameras: Cameras, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pictures, "PATIENCE", 0.5)
    monkeypatch.setattr(pictures, "SMALL", replace(SMALL, every=0.0))
    cameras.image = np.zeros((0, 5, 3), np.uint8)
    with cameras.play():
        assert cameras.page.ask("/feeds/door.jpg")[0] == 204
        assert caplog.text.count("a picture could not be made") == 1
        cameras.image = np.zeros((6, 8, 3), np.uint8)
        monkeypatch.setattr(pictures, "PATIENCE", PATIENCE)
        assert cameras.page.ask("/feeds/door.jpg")[0] == 200


def test_h5_pictures_need_the_key_and_pages_of_other_sites_are_refused_without_one(cameras: Cameras) -> None:
    for path in ("/feeds/door.jpg", "/feeds/door.mjpeg", "/feeds.mjpeg"):
        assert cameras.page.ask(path, Origin="http://evil.example")[0] == 403
        keyed = Cameras(api_key="s3cret")
        with keyed.page.server, keyed.play():
            assert keyed.page.ask(path)[0] == 401
            with keyed.page.asked(path, X_Reflex_Key="s3cret") as answer:
                assert answer.status == 200


def test_i18_a_stop_ends_streams(cameras: Cameras) -> None:
    with cameras.page.asked("/feeds/door.mjpeg") as stream:
        cameras.page.server.stop()
        with suppress(http.client.IncompleteRead, ConnectionResetError):
            assert not stream.read().rstrip(b"\r\n").removeprefix(b"--frame")


@pytest.mark.parametrize("shape", [(480, 640), (1080, 1920), (1920, 1080), (7, 5), (1, 3000)])
def test_i18_a_picture_is_small_and_what_was_found_is_in_its_place(shape: tuple[int, int]) -> None:
    image = np.full((*shape, 3), 100, np.uint8)
    by = -(-max(shape) // SMALL.longest)
    value = {"boxes": np.array([[20 * by, 10 * by, 60 * by, 50 * by]], np.float32), "labels": np.array([3])}
    picture = simplejpeg.decode_jpeg(jpeg_of(Result(Frame(image, 0, None, 0.0), "a", value, 0.0), SMALL))
    assert max(picture.shape) <= SMALL.longest
    assert abs(picture.shape[0] / shape[0] - picture.shape[1] / shape[1]) < max(1 / shape[0], 1 / shape[1])
    if min(shape) > 100:
        coloured = np.ptp(picture.astype(int), axis=2) > 40
        assert coloured[30:45, 19:22].any(axis=1).all()  # the left side
        assert not coloured[55:, 65:].any()


def test_i18_the_class_of_a_picture_stands_in_its_corner() -> None:
    value = {"labels": ["cat"], "scores": [0.9], "text": "cat 0.90"}
    picture = simplejpeg.decode_jpeg(
        jpeg_of(Result(Frame(np.full((480, 640, 3), 100, np.uint8), 0, None, 0.0), "a", value, 0.0), SMALL)
    )
    assert picture[:12, :30].min() < 30
    assert np.ptp(picture[30:]) < 10


def test_i18_keypoints_and_masks_are_in_their_place_in_a_smaller_picture() -> None:
    image = np.full((480, 640, 3), 100, np.uint8)
    mask = {"box": [200, 200, 400, 400], "size": [1, 1], "counts": [0, 1]}
    value = {"boxes": [[200, 200, 400, 400]], "keypoints": [[[560, 80]]], "masks": [mask]}
    picture = simplejpeg.decode_jpeg(jpeg_of(Result(Frame(image, 0, None, 0.0), "a", value, 0.0), SMALL))
    coloured = np.ptp(picture.astype(int), axis=2) > 20
    assert coloured[110:190, 110:190].all()
    assert coloured[39:42, 279:282].all()
    assert not coloured[60:90].any()


@pytest.mark.parametrize(
    "value",
    [None, "text", {"boxes": "none"}, {"boxes": [[1, 2]]}, {"labels": 3}, {"masks": 3}, {"masks": [{}]},
     {"keypoints": "x"}, {"keypoints": []}, BOX],
)  # fmt: skip
def test_i18_results_of_any_form_make_a_picture(value: Any) -> None:
    made = jpeg_of(Result(frame(), "a", value, 0.0), LARGE)
    assert simplejpeg.decode_jpeg(made).shape == (6, 8, 3)


def test_i18_the_last_viewer_leaves_no_frame_behind() -> None:
    """It leaves while a feed's thread keeps a result for it."""

    class Leaving(Counter[str]):
        def __contains__(self, feed: object) -> bool:
            there = super().__contains__(feed)
            self.pop("door", None)
            return there

    watched = FeedPictures(lambda: {"door"})
    watched._viewers = Leaving(door=1)
    watched.take(Result(frame(1), "door", BOX, 0.01))
    assert not watched._newest
    watched.close()
