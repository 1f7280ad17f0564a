"""Cameras on the network as sources: a real RTSP server on loopback that freezes, dies and comes back; and HTTP."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from av.container import core

from feeds.fakes import PATIENCE, Clock
from feeds.rtsp import RtspCamera
from feeds.tls import behind_tls
from feeds.videos import clip, number_of, picture, write_video
from reflex_runtime.feeds.runtime.feed import Feed, FeedConfig
from reflex_runtime.feeds.runtime.pipeline import SourceError
from reflex_runtime.feeds.sources import video
from reflex_runtime.feeds.sources.video import VideoSource

FPS = 100.0
PICTURES = [picture(i) for i in range(200)]


@pytest.fixture
def camera() -> Iterator[RtspCamera]:
    with RtspCamera(PICTURES, FPS) as camera:
        yield camera


class Still:
    """The time of a source, which stands still but for `goes`: else a busy machine loses a camera that is there."""

    goes = False

    def monotonic(self) -> float:
        return time.monotonic() if self.goes else 0.0


def lost(source: VideoSource) -> SourceError:
    """Read until the source is lost."""
    try:
        for _ in range(10_000):
            source.read()
    except SourceError as error:
        return error
    raise AssertionError("it was not lost")


def test_f14_a_network_camera_gives_pictures_in_order(camera: RtspCamera) -> None:
    source = VideoSource(camera.url)
    source.open()
    read = [source.read() for _ in range(30)]
    source.close()
    assert [number_of(image) for image, _ in read] == list(range(30)), "from the first on: none is lost to probing"
    times = np.array([pts for _, pts in read[1:]])  # from the second on by the camera's clock, whenever it sent that
    assert times - times[0] == pytest.approx(np.arange(29) / FPS, abs=2e-3)
    assert (source.total, source.live, source.corrupt) == (None, True, 0)


def test_f14_a_frozen_camera_is_lost_after_the_timeout(camera: RtspCamera, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Still()
    monkeypatch.setattr(video, "time", clock)
    source = VideoSource(camera.url, open_timeout=600.0, read_timeout=0.3)
    source.open()
    source.read()
    camera.freeze()
    clock.goes = True
    began = time.monotonic()
    error = lost(source)
    assert time.monotonic() - began >= 0.3
    assert str(error) == f"rtsp://127.0.0.1:{camera.port}/camera: no frame for 0.3 s"
    assert error.retryable
    source.close()
    camera.thaw()
    clock.goes = False
    source.open()
    assert source.read() is not None
    source.close()


@pytest.mark.parametrize("trouble", ["freeze", "silence"])
def test_f14_a_camera_that_does_not_answer_is_lost_after_the_timeout(camera: RtspCamera, trouble: str) -> None:
    getattr(camera, trouble)()
    source = VideoSource(camera.url, open_timeout=0.3, read_timeout=0.3)
    with pytest.raises(SourceError, match=r"/camera: no answer for 0\.3 s") as caught:
        source.open()
    assert caught.value.retryable
    source.close()


def test_f14_a_killed_camera_is_lost_and_comes_back(camera: RtspCamera) -> None:
    source = VideoSource(camera.url)
    source.open()
    source.read()
    camera.stop()
    error = lost(source)
    assert error.retryable
    assert str(error).endswith("/camera: the stream ended")
    source.close()
    with pytest.raises(SourceError, match="Connection refused") as caught:
        source.open()
    assert caught.value.retryable
    camera.pictures = [picture(i, (96, 64)) for i in range(200)]
    camera.start()
    source.open()
    image, _ = source.read() or (None, None)
    assert image is not None
    assert image.shape == (64, 96, 3), "it may come back with another size"
    source.close()


def test_f14_a_refused_password_is_not_tried_again() -> None:
    with RtspCamera(PICTURES, FPS, password="s3cret") as camera:
        source = VideoSource(camera.url)
        source.open()
        assert source.read() is not None
        source.close()
        wrong = VideoSource(camera.url.replace("s3cret", "oth3r"))
        with pytest.raises(SourceError, match="401") as caught:
            wrong.open()
    assert not caught.value.retryable
    assert caught.value.__cause__ is caught.value.__context__ is None, "PyAV's error holds the address"
    for text in (str(caught.value), wrong.name, source.name):
        assert "s3cret" not in text
        assert "oth3r" not in text


# -- interrupt ---------------------------------------------------------------------------------------------------------


class Asked(video._Clock):
    """Notices that FFmpeg has asked for the time again and again since the last picture: the reader is waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0
        self.waiting = threading.Event()

    def monotonic(self) -> float:
        self.times += 1
        if self.times > 4:
            self.waiting.set()
        return super().monotonic()


class Reader(threading.Thread):
    """Opens and reads until that fails."""

    def __init__(self, source: VideoSource, clock: Asked) -> None:
        super().__init__()
        self.source, self.clock = source, clock
        self.error: SourceError | None = None
        self.started_reading = threading.Event()

    def run(self) -> None:
        try:
            self.source.open()
            while True:
                self.source.read()
                self.clock.times = 0
                self.clock.waiting.clear()
                self.started_reading.set()
        except SourceError as error:
            self.error = error
        finally:
            self.source.close()


@pytest.mark.parametrize("trouble", ["freeze", "silence"])
def test_f14_a_wait_for_a_camera_can_be_interrupted(
    camera: RtspCamera, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    monkeypatch.setattr(core, "time", asked)
    reader = Reader(VideoSource(camera.url, open_timeout=600.0, read_timeout=600.0), asked)
    if trouble == "silence":
        camera.silence()
    reader.start()
    if trouble == "freeze":
        assert reader.started_reading.wait(PATIENCE)
        camera.freeze()
    assert asked.waiting.wait(PATIENCE)
    reader.source.interrupt()
    reader.join(PATIENCE)
    assert str(reader.error).endswith("/camera: interrupted")
    assert reader.error is not None
    assert not reader.error.retryable


def test_f14_an_interrupt_leaves_other_cameras_alone(camera: RtspCamera) -> None:
    first, second = VideoSource(camera.url), VideoSource(camera.url)
    first.open()
    second.open()
    first.interrupt()
    assert "interrupted" in str(lost(first))
    with pytest.raises(SourceError, match="interrupted"):
        first.open()
    assert camera.opened == 2, "it does not so much as connect"
    assert [number_of(image) for image, _ in (second.read() for _ in range(60))] == list(range(60))
    first.close()
    second.close()


def test_the_clock_of_pyav_is_replaced_where_it_is_kept(camera: RtspCamera) -> None:
    VideoSource(camera.url)
    assert isinstance(core.time, video._Clock), "this PyAV keeps it elsewhere: interrupt waits for the timeout"


# -- HTTP --------------------------------------------------------------------------------------------------------------


@contextmanager
def web(data: bytes, size: int | None = None, closes: bool = False) -> Iterator[str]:
    """A server that answers with `data` and, if `size` says there is more, keeps the connection open until the end,
    unless it `closes` it. size: -1 if it does not tell how much there is."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if size != -1:
                self.send_header("Content-Length", str(size or len(data)))
            self.end_headers()
            self.wfile.write(data)
            if size and not closes:
                over.wait()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://user:secret@127.0.0.1:{server.server_port}/video"
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_video_over_http_ends() -> None:
    with web(clip(30, ending="mkv").read_bytes()) as url:
        source = VideoSource(url)
        source.open()
        assert [number_of(image) for image, _ in iter(source.read, None)] == list(range(30))
        source.close()


def test_f14_a_video_over_http_plays_at_its_own_pace() -> None:
    """Else a server that sends it faster than a processor answers would cost most of its pictures."""
    pauses: list[float] = []

    def pause(stop: threading.Event, seconds: float) -> bool:
        pauses.append(seconds)
        return stop.is_set()

    with web(clip(30, ending="mkv").read_bytes()) as url:
        feed = Feed("door", VideoSource(url), clock=Clock(), pause=pause)
        feed.start()
        assert feed.join(PATIENCE)
    assert feed.state == "ended"
    assert pauses == pytest.approx([i / 25 for i in range(30)], abs=1e-3)


def test_f14_a_slow_video_over_http_plays_at_its_own_pace_too(tmp_path: Path) -> None:
    """Pictures of a camera that are as far apart as these have the times of their arrival."""
    times, taken, clock = [0.0, 8.0, 16.0, 24.0, 32.0], list[float | None](), Clock()
    slow = write_video(tmp_path / "slow.mkv", map(picture, range(5)), fps=Fraction(1, 8))
    with web(slow.read_bytes()) as url:
        sinks, config = [lambda result: taken.append(result.frame.pts)], FeedConfig(max_age=None, queue=9)
        feed = Feed("door", VideoSource(url), None, sinks, config, clock=clock, pause=clock.pause)
        feed.start()
        assert feed.join(PATIENCE)
    assert (taken, clock.now) == (times, 132.0)


def test_f14_fragments_of_unknown_length_are_those_of_a_camera(tmp_path: Path) -> None:
    """FFmpeg takes those that came for the whole: a camera would stay as late as what it sends at first."""
    fragments = {"movflags": "empty_moov+default_base_moof", "frag_duration": "200000"}
    cut = write_video(tmp_path / "a.mp4", map(picture, range(60)), options={"g": "5"}, parts=fragments).read_bytes()
    whole = write_video(tmp_path / "b.mp4", map(picture, range(60)), parts={"movflags": "faststart"}).read_bytes()
    for data, size, paced in ((cut, -1, False), (cut, None, True), (whole, -1, True)):
        with web(data, size, closes=True) as url:
            source = VideoSource(url, open_timeout=PATIENCE)
            source.open()
            assert source.paced is paced
            source.close()


def test_f14_a_page_in_place_of_a_video_is_said() -> None:
    with web(b"<html>log in</html>", size=1000, closes=True) as url, pytest.raises(SourceError, match="or is no video"):
        VideoSource(url, open_timeout=PATIENCE).open()


def test_f14_a_host_that_nobody_knows_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, port: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, f"nobody knows {host[:5]}")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    host = 64 * "x"  # too long for a name, so that FFmpeg looks it up nowhere
    for address in (f"rtsp://admin:s3cret@{host}.invalid/live", f"http://{host}.invalid/video.mp4"):
        with pytest.raises(SourceError, match="nobody knows xxxxx") as caught:
            VideoSource(address, open_timeout=PATIENCE).open()
        assert caught.value.retryable
        assert "s3cret" not in str(caught.value)


def test_f14_http_that_freezes_is_lost() -> None:
    with web(clip(30, ending="ts").read_bytes(), size=10**9) as url:
        source = VideoSource(url, open_timeout=PATIENCE, read_timeout=0.3)
        source.open()
        error = lost(source)
        source.close()
    assert error.retryable
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/video: no frame for 0\.3 s", str(error))


# -- over TLS, and devices ---------------------------------------------------------------------------------------------


def test_f14_rtsps_and_https_cameras_are_read_whatever_their_certificate(camera: RtspCamera, tmp_path: Path) -> None:
    with behind_tls(camera.port, tmp_path) as port:
        source = VideoSource(f"rtsps://127.0.0.1:{port}/camera")
        source.open()
        assert [number_of(image) for image, _ in (source.read() for _ in range(10))] == list(range(10))
        source.close()
    with web(clip(30, ending="mkv").read_bytes()) as url, behind_tls(int(url.split(":")[-1][:-6]), tmp_path) as port:
        source = VideoSource(f"https://127.0.0.1:{port}/video")
        source.open()
        assert [number_of(image) for image, _ in iter(source.read, None)] == list(range(30))
        source.close()


def test_f14_a_device_that_is_not_there_is_said_and_tried_again() -> None:
    source = VideoSource("/dev/video63")
    with pytest.raises(SourceError, match="/dev/video63: No such file or directory") as caught:
        source.open()
    assert caught.value.retryable, "it may be plugged in"
