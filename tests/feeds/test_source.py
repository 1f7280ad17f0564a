"""Video files and addresses as sources: what a text names, every picture of a file in order, and what can be wrong."""

from __future__ import annotations

import gc
import io
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
import pytest
from PIL import Image

from feeds.chaos import ChaosSource
from feeds.fakes import PATIENCE, Clock
from feeds.test_feed import Made
from feeds.videos import SIZE, clip, encoded, number_of, picture, write_fields, write_video
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.plan import source_of_spec, specs_of
from reflex_runtime.feeds.runtime import pipeline
from reflex_runtime.feeds.runtime.pipeline import Source, SourceClock, SourceError
from reflex_runtime.feeds.sources import DRAWN, source_of, video
from reflex_runtime.feeds.sources.video import VideoSource
from reflex_runtime.settings import FeedsConfig


def read_all(source: Source) -> list[tuple[Any, float | None]]:
    """Open, read to the end, close."""
    source.open()
    try:
        return list(iter(source.read, None))  # type: ignore[arg-type]
    finally:
        source.close()


def numbers(read: list[tuple[Any, float | None]]) -> list[int]:
    return [number_of(image) for image, _ in read]


# -- what a text names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "live"),
    [
        ("video.mp4", VideoSource, False),
        ("C:/a/video.mp4", VideoSource, False),
        ("take 2: the end.mp4", VideoSource, False),
        ("rtsp://host/stream", VideoSource, True),
        ("RTSPS://host/stream", VideoSource, True),
        ("http://host/video.mjpg", VideoSource, True),
        ("https://host/video.mjpg", VideoSource, True),
        ("/dev/video0", VideoSource, True),
        ("chaos:seed=7,length=20", ChaosSource, True),
        ("chaos:", ChaosSource, True),
    ],
)
def test_f14_a_text_names_a_source(text: str, kind: type, live: bool) -> None:
    source = source_of(text)
    assert isinstance(source, kind)
    assert source.live is live


def test_a_program_can_add_a_source_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ChaosSource(3)
    asked = []
    monkeypatch.setitem(DRAWN, "lines", lambda text: asked.append(text) or made)
    assert source_of("lines:seed=1") is made
    assert asked == ["lines:seed=1"]


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("", {}, "source=''"),
        (
            "ftp://u:secret@host/x",
            {},
            "source='ftp://host/x': must be a path, /dev/video*, or start with rtsp://",
        ),
        ("rtsp://u:secret@host/x", {"realtime": True}, "realtime=True: must be False for rtsp://host/x"),
        ("rtsp://host/x", {"loop": True}, "loop=True: must be False"),
        ("chaos:", {"loop": True}, "loop=True: must be False for chaos:"),
        ("a.mp4", {"read_timeout": 0.0}, r"_timeout=0.0: must be in (0, 600] seconds"),
        ("a.mp4", {"read_timeout": float("nan")}, r"_timeout=nan: must be in (0, 600] seconds"),
        ("a\0b.mp4", {}, "where="),
    ],
)
def test_a_wrong_text_or_option_is_named(text: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        source_of(text, **options)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_name_holds_no_credentials() -> None:
    assert source_of("rtsp://admin:s3cr@t@cam:554/a/b?user=x&password=s3cret#y").name == "rtsp://cam:554/a/b"
    assert source_of("clips/a@b?.mp4").name == "clips/a@b?.mp4"


def test_without_pyav_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[cameras\]'"):
        source_of("a.mp4")


# -- files -------------------------------------------------------------------------------------------------------------


def test_f14_a_file_gives_every_picture_in_order() -> None:
    source = VideoSource(clip(30))
    read = read_all(source)
    assert numbers(read) == list(range(30))
    assert [pts for _, pts in read] == pytest.approx([i / 25 for i in range(30)])
    image = read[0][0]
    assert (image.dtype, image.shape, image.flags.c_contiguous) == (np.uint8, (SIZE[1], SIZE[0], 3), True)
    assert (source.total, source.live, source.corrupt) == (30, False, 0)
    assert numbers(read_all(source)) == list(range(30)), "opened again, it starts over"


@pytest.mark.parametrize("ending", ["mkv", "ts", "avi", "mov"])
def test_other_containers_say_how_much_they_hold(ending: str) -> None:
    source = VideoSource(clip(30, ending=ending))
    assert numbers(read_all(source)) == list(range(30))
    assert source.total == 30


def test_colours_are_rgb(tmp_path: Path) -> None:
    orange = np.full((48, 64, 3), (250, 120, 10), np.uint8)
    image, _ = read_all(VideoSource(write_video(tmp_path / "a.mp4", [orange])))[0]
    assert np.abs(image.astype(int) - orange).max() < 12


def test_a_picture_belongs_to_the_reader() -> None:
    source = VideoSource(clip(30))
    source.open()
    kept = []
    while (read := source.read()) is not None:
        read[0][0, 0] = 7
        kept.append((read[0], read[0].copy()))
    source.close()
    del source
    gc.collect()
    assert len({image.ctypes.data for image, _ in kept}) == 30
    assert all((image == copy).all() for image, copy in kept)


def test_the_resolution_may_change_and_the_pts_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "two.h264"
    path.write_bytes(encoded([picture(i) for i in range(6)]) + encoded([picture(6 + i, (96, 64)) for i in range(7)]))
    source = VideoSource(path)
    read = read_all(source)
    assert numbers(read) == list(range(13))
    assert [image.shape[:2] for image, _ in read] == [(48, 160)] * 6 + [(64, 96)] * 7
    assert {pts for _, pts in read} == {None}
    assert source.total is None


def test_the_times_of_a_stream_without_times_are_not_taken_from_ffmpeg() -> None:
    """JPEG pictures over HTTP have none: FFmpeg gives them 25 a second, whatever the camera does."""
    jpegs = []
    for number in range(6):
        out = io.BytesIO()
        Image.fromarray(picture(number)).save(out, "JPEG", quality=95)
        jpegs.append(out.getvalue())

    class Camera(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=B")
            self.end_headers()
            for jpeg in [*jpegs, jpegs[-1]]:  # a picture ends where the next one begins
                head = b"--B\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(jpeg)
                self.wfile.write(head + jpeg + b"\r\n")

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Camera) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = VideoSource(f"http://127.0.0.1:{server.server_address[1]}/video")
        source.open()
        read = [source.read() for _ in range(6)]
        source.close()
        server.shutdown()
    assert numbers(read) == list(range(6))  # type: ignore[arg-type]
    assert {one[1] for one in read if one is not None} == {None}


def test_a_file_without_times_is_read_by_its_rate(tmp_path: Path) -> None:
    path = tmp_path / "raw.h264"
    path.write_bytes(encoded([picture(number) for number in range(150)]))
    made = Made(VideoSource(path), fps=5.0).run()
    assert 29 <= len(made.sink.results) <= 31
    assert [result.frame.pts for result in made.sink.results][:3] == pytest.approx([0.0, 0.2, 0.4], abs=0.05)


RAMP = np.tile(np.arange(256, dtype=np.uint8), (64, 1))


def ramp(path: Path, codec: str, form: str) -> Path:
    """A video of one picture, from black to white, in pixels of that form."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 256, 64, form
        frame = av.VideoFrame.from_ndarray(np.dstack([RAMP] * 3), format="rgb24").reformat(format=form)
        frame.pts = 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize(
    ("codec", "forms", "ending"),
    [
        ("ffv1", "gray gray10le gray16le yuv420p yuv420p10le yuv422p16le yuva420p bgra rgb48le gbrp12le", "mkv"),
        ("png", "rgba rgb48be gray16be", "mov"),
        ("mjpeg", "yuvj420p", "avi"),
        ("libx264", "yuv420p yuv444p yuv420p10le", "mp4"),
        ("libvpx-vp9", "yuv420p", "webm"),
        ("prores_ks", "yuva444p10le", "mov"),
    ],
)
def test_a_ramp_from_black_to_white_is_one_in_every_video(tmp_path: Path, codec: str, forms: str, ending: str) -> None:
    for form in forms.split():
        ((image, _),) = read_all(VideoSource(ramp(tmp_path / f"{form}.{ending}", codec, form)))
        assert np.abs(image.mean(axis=(0, 2)) - RAMP[0]).max() <= 4, form


def test_pictures_of_floats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pfm"
    path.write_bytes(b"Pf\n256 64\n-1.0\n" + (RAMP / np.float32(255)).tobytes())
    with pytest.raises(SourceError, match="pictures of floats, grayf32le") as refused:
        read_all(VideoSource(path))
    assert not refused.value.retryable


def turned_in(path: Path, degrees: int, ending: str = "mp4") -> Path:
    """The thirty pictures' file, to be shown turned by so many degrees clockwise: the matrix in its `tkhd`."""
    data = bytearray(clip(30).read_bytes())
    at = data.index(b"tkhd") + 4 + 40  # version 0: flags, times, track, duration, layers and volume are before it
    cos, sin = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    one, w = 1 << 16, 1 << 30
    data[at : at + 36] = struct.pack(">9i", cos * one, sin * one, 0, -sin * one, cos * one, 0, 0, 0, w)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_pictures_are_turned_as_the_file_says(tmp_path: Path, degrees: int) -> None:
    (image, _), *_ = read_all(VideoSource(turned_in(tmp_path / "a.mp4", degrees)))
    lying = pipeline.turned(read_all(VideoSource(clip(30)))[0][0], degrees)
    assert (image == lying).all()


@pytest.mark.parametrize(("aspect", "width"), [(Fraction(2), 320), (Fraction(1, 2), 80), (Fraction(1), 160)])
def test_pixels_become_square(tmp_path: Path, aspect: Fraction, width: int) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        stream.codec_context.sample_aspect_ratio = aspect
        for number in (0, 5):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number), format="rgb24")))
        container.mux(stream.encode(None))
    read = read_all(VideoSource(path))
    assert [image.shape for image, _ in read] == [(SIZE[1], width, 3)] * 2
    assert numbers(read) == [0, 5]


def test_pictures_that_are_too_wide_as_they_are_shown_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(video, "MAX_SIDE", 200)
    source = VideoSource(clip(30))
    source.open()
    source._aspect = 2.0
    with pytest.raises(SourceError, match="320x48"):
        source.read()
    source.close()


def packets_of(path: Path, of: Path, keep: Callable[[int], bool]) -> Path:
    """The packets of a video whose number is kept, as they are."""
    with av.open(str(of)) as source, av.open(str(path), "w") as container:
        video_of = source.streams.video[0]
        stream = container.add_stream_from_template(video_of)
        for number, packet in enumerate(source.demux(video_of)):
            if packet.size and keep(number):
                packet.stream = stream
                container.mux(packet)
    return path


HEVC = {"x265-params": "log-level=none:keyint=10:min-keyint=10:scenecut=0:bframes=0"}
KINDS = [("libx264", {"g": "10", "bf": "0"}), ("libx265", HEVC)]


@pytest.mark.parametrize(("codec", "options"), KINDS)
@pytest.mark.parametrize("ending", ["mp4", "mkv"])
@pytest.mark.parametrize(
    ("kind", "lost"), [("none", range(0)), ("a lost packet", [12]), ("begins between key frames", range(3))]
)
def test_what_a_file_held_and_what_it_gave_is_counted(
    tmp_path: Path, codec: str, options: dict[str, str], ending: str, kind: str, lost: Sequence[int]
) -> None:
    """A decoder may give nothing, without a word, until the next key frame."""
    made = write_video(tmp_path / f"a.{ending}", map(picture, range(30)), 25, codec, options)
    source = VideoSource(packets_of(tmp_path / f"b.{ending}", made, lambda number: number not in lost))
    read = read_all(source)
    given = [number for number in numbers(read) if number not in lost]
    assert len(read) + source.corrupt >= 30 - len(lost)
    assert (source.corrupt == 0) == (len(given) == 30 - len(lost))
    if not lost:
        assert source.corrupt == 0


@pytest.mark.parametrize(("held", "whole", "interlaced", "missing"), [
    (30, 30, 0, 0), (29, 20, 0, 9),  # progressive
    (30, 0, 30, 0), (28, 0, 20, 8),  # a packet a picture, as MBAFF
    (60, 0, 30, 0), (57, 0, 28, 1), (40, 0, 15, 5),  # a packet a field
    (50, 10, 20, 0), (30, 10, 20, 0), (29, 10, 15, 4),  # some of both
])  # fmt: skip
def test_pictures_that_packets_should_have_given(held: int, whole: int, interlaced: int, missing: int) -> None:
    assert video._without_picture(held, whole, interlaced) == missing


@pytest.mark.parametrize(("lost", "corrupt"), [(range(0), 0), (range(1), 9)])
def test_a_loss_of_interlaced_pictures_is_counted(tmp_path: Path, lost: Sequence[int], corrupt: int) -> None:
    """Each of them is one packet here, and decodes to a picture that is interlaced."""
    options = {"x264-params": "interlaced=1:keyint=10:min-keyint=10:scenecut=0:bframes=0"}
    made = write_video(tmp_path / "a.mkv", [picture(number, (160, 64)) for number in range(30)], 25, "libx264", options)
    source = VideoSource(packets_of(tmp_path / "b.mkv", made, lambda number: number not in lost))
    assert len(read_all(source)) + source.corrupt == 30 - len(lost)
    assert source.corrupt == corrupt


def test_a_file_that_lost_its_end_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.mkv"
    path.write_bytes(write_video(tmp_path / "whole.mkv", map(picture, range(100)), 25).read_bytes())
    whole = VideoSource(path)
    assert (len(read_all(whole)), whole.corrupt) == (100, 0)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    cut = VideoSource(path)
    read = read_all(cut)
    assert len(read) < 75
    assert len(read) + cut.corrupt == pytest.approx(100, abs=2)


def test_the_two_fields_of_a_picture_may_be_a_packet_each(tmp_path: Path) -> None:
    source = VideoSource(write_fields(tmp_path / "a.h264", 20))
    read = read_all(source)
    assert ([image.shape for image, _ in read], source.corrupt) == ([(32, 16, 3)] * 20, 0)


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_a_last_picture_that_stands_for_long_is_the_end(tmp_path: Path, ending: str) -> None:
    """As in a recording of a screen on which nothing happens any more."""
    path = tmp_path / f"a.{ending}"
    made = write_video(tmp_path / f"made.{ending}", map(picture, range(30)), options={"bf": "0"})
    with av.open(str(made)) as whole, av.open(str(path), "w") as container:
        video = whole.streams.video[0]
        stream = container.add_stream_from_template(video)
        packets = [packet for packet in whole.demux(video) if packet.size]
        packets[-1].duration = round(6.0 / float(packets[-1].time_base))
        for packet in packets:
            packet.stream = stream
            container.mux(packet)
    source = VideoSource(path)
    assert (len(read_all(source)), source.corrupt) == (30, 0)


def test_decoding_starts_no_thread() -> None:
    process = psutil.Process()
    source = VideoSource(clip(30, size=(320, 240)))
    before = {thread.id for thread in process.threads()}  # some may be about to end
    source.open()
    assert source.read() is not None
    assert {thread.id for thread in process.threads()} <= before
    source.close()


def test_sound_is_skipped_and_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=8000, layout="mono")
        film = container.add_stream("libx264", rate=25)
        film.width, film.height, film.pix_fmt = SIZE[0], SIZE[1], "yuv420p"
        for number in range(10):
            container.mux(film.encode(av.VideoFrame.from_ndarray(picture(number), format="rgb24")))
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        silence.rate = 8000  # two seconds, five times as long as the film
        for stream, frame in ((sound, silence), (sound, None), (film, None)):
            container.mux(stream.encode(frame))
    source = VideoSource(path)
    assert numbers(read_all(source)) == list(range(10))
    assert source.total == 10


def test_a_colon_in_a_name_is_no_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("take:1.mp4").write_bytes(clip(30).read_bytes())
    assert len(read_all(source_of("take:1.mp4"))) == 30


def test_reading_needs_open() -> None:
    with pytest.raises(SourceError, match="not open"):
        VideoSource(clip(30)).read()


# -- what can be wrong -------------------------------------------------------------------------------------------------


def broken(path: Path, packets: range) -> Path:
    """The thirty pictures' file with the bytes of these packets overwritten."""
    data = bytearray(clip(30).read_bytes())
    with av.open(str(clip(30))) as container:
        for number, packet in enumerate(container.demux(video=0)):
            if number in packets and packet.pos is not None:
                data[packet.pos : packet.pos + packet.size] = b"\xff" * packet.size
    path.write_bytes(data)
    return path


def test_corrupt_packets_are_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "MAX_BARREN", 12)  # five, and those that wait for their order
    source = VideoSource(broken(tmp_path / "a.mp4", range(20, 25)))
    read = read_all(source)
    assert source.corrupt == 5
    assert len(read) == 25
    assert numbers(read)[:18] == list(range(18))


def test_too_many_corrupt_packets_in_a_row_are_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "MAX_BARREN", 10)
    source = VideoSource(broken(tmp_path / "a.mp4", range(5, 30)))
    with pytest.raises(SourceError, match="10 packets in a row gave no picture") as caught:
        read_all(source)
    assert not caught.value.retryable
    assert 5 <= source.corrupt <= 10


def test_a_file_that_cannot_be_taken_apart_is_given_up() -> None:
    class Torn:
        def demux(self) -> Iterator[Any]:
            raise av.error.InvalidDataError(1, "torn")
            yield

    source = VideoSource("torn.mkv")
    source._frames = source._decode(Torn(), None)  # type: ignore[arg-type]
    with pytest.raises(SourceError, match="300 packets in a row gave no picture"):
        source.read()
    assert source.corrupt == 300


def test_what_is_no_video_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "cut.mp4").write_bytes(clip(30).read_bytes()[:1000])
    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
    (tmp_path / "strange.avi").write_bytes(clip(30, ending="avi").read_bytes().replace(b"H264", b"ZZZZ"))
    for name, why in {
        "strange.avi": "no decoder for its video",
        "missing.mp4": "No such file",
        "": "Is a directory",
        "text.mp4": "no video that FFmpeg can read, or its end is missing",
        "empty.mp4": "is empty",
        "cut.mp4": "or its end is missing",
        "sound.wav": "holds no video",
    }.items():
        path = tmp_path / name
        with pytest.raises(SourceError, match=why) as caught:
            VideoSource(path).open()
        assert str(path) in str(caught.value)
        assert not caught.value.retryable
        assert caught.value.code == "source_lost"


def test_a_picture_may_be_too_large(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((4, 8200, 3), np.uint8)).save(tmp_path / "wide.png")
    with pytest.raises(SourceError, match="8200x4, must be at most 8192x8192") as caught:
        read_all(VideoSource(tmp_path / "wide.png"))
    assert not caught.value.retryable


# -- a file as a camera ------------------------------------------------------------------------------------------------


def test_realtime_gives_pictures_when_they_are_due() -> None:
    source = VideoSource(clip(10, fps=50), realtime=True)
    assert (source.live, source.paced) == (True, True)
    clock = Clock()
    results = Made(source, queue=10, clock=clock, pause=clock.pause).run().sink.results
    assert [number_of(result.frame.image) for result in results] == list(range(10))
    assert [result.frame.captured - 100.0 for result in results] == pytest.approx([i / 50 for i in range(10)])


def test_realtime_waits_end_with_the_feed() -> None:
    waits = threading.Event()

    def pause(stop: threading.Event, seconds: float) -> bool:
        if seconds:
            waits.set()
        return stop.wait(100 * seconds)

    made = Made(VideoSource(clip(10, fps=1), realtime=True), pause=pause)
    made.feed.start()
    made.sink.wait(1)
    assert waits.wait(PATIENCE)
    assert made.feed.stop(PATIENCE), "the next picture is due after 100 s"
    assert len(made.sink.results) == 1


@pytest.mark.parametrize("made", ["a.mp4", "a.h264"])
def test_a_looped_file_has_no_end_and_one_time(tmp_path: Path, made: str) -> None:
    source = VideoSource(write_video(tmp_path / made, map(picture, range(10)), 25), loop=True)
    clock = SourceClock(live=False)
    source.open()
    read = [source.read() for _ in range(35)]
    assert source.total is None
    assert [number_of(image) for image, _ in read] == [i % 10 for i in range(35)]
    times = [clock.time(pts, 0.0, source.step) for _, pts in read]
    source.close()
    assert times == pytest.approx([i / 25 for i in range(35)])


def test_a_looped_file_without_pictures_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    source = VideoSource(write_video(path, map(picture, range(3)), 25), loop=True)
    source._next = lambda: None  # type: ignore[method-assign]
    source.open()
    with pytest.raises(SourceError, match="holds no picture"):
        source.read()
    source.close()


def test_being_late_is_not_made_up_for_in_a_rush_and_a_leap_is_not_waited_for() -> None:
    clock = SourceClock(live=False)
    told = [(0.0, 100.0, 0.0), (0.1, 100.0, 0.1), (0.2, 100.5, 0.0)]  # pts, now, delay
    told += [(0.3, 105.0, 0.0), (0.4, 105.0, 0.1), (None, 105.0, 0.2)]
    told += [(0.6, 105.0, 0.3), (100.6, 106.0, 0.0), (100.7, 106.0, 0.1), (0.5, 106.0, 0.2), (0.6, 106.0, 0.3)]
    for pts, now, delay in told:
        clock.time(pts, now, 0.1)
        assert clock.ahead(now) == pytest.approx(delay), (pts, now)


# -- the clock that PyAV asks ------------------------------------------------------------------------------------------


def test_only_an_interrupted_source_sees_another_time() -> None:
    clock = video._Clock()
    stop = threading.Event()
    assert abs(clock.monotonic() - time.monotonic()) < 60.0
    video._waiting.stop = stop
    try:
        assert abs(clock.monotonic() - time.monotonic()) < 60.0
        stop.set()
        first = clock.monotonic()
        assert clock.monotonic() - first > 600.0, "longer than any timeout since the call before"
        seen = []
        other = threading.Thread(target=lambda: seen.append(clock.monotonic()))
        other.start()
        other.join()
        assert abs(seen[0] - time.monotonic()) < 60.0
    finally:
        video._waiting.stop = None


def test_a_program_reads_the_feeds_of_a_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "cameras.toml"
    file.write_text('[[feed]]\nname = "door"\nsource = "chaos:seed=7"\nmax_age_ms = 300\n')
    door, yard = specs_of(["yard=chaos:seed=8"], file, FeedsConfig())
    assert (door.name, door.source, door.config.max_age_ms) == ("door", "chaos:seed=7", 300)
    assert (yard.name, yard.config.max_age_ms) == ("yard", FeedsConfig().max_age_ms)
    assert source_of_spec(door).live


# -- decoding on a device ----------------------------------------------------------------------------------------------


def test_a_device_that_ffmpeg_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hwaccel=cudo: must be one of auto, .*; did you mean cuda"):
        VideoSource("a.mp4", hwaccel="cudo")
    with pytest.raises(ConfigError, match="hwaccel=auto:1: must be one of"):
        VideoSource("a.mp4", hwaccel="auto:1")


def test_without_a_device_the_cpu_decodes_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    source = VideoSource(clip(5), hwaccel="drm")  # no decoder uses it
    assert [numbers(read_all(source)) for _ in range(2)] == [[0, 1, 2, 3, 4]] * 2
    (said,) = caplog.messages
    assert said.startswith(f"{clip(5)}: hwaccel=drm: decoded by the CPU")


@pytest.mark.parametrize(("form", "said"), [("yuv420p", 1), ("nv12", 0)])
def test_a_device_that_does_not_decode_a_stream_is_said(
    form: str, said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The device itself is not at hand: what comes of a decoder that took it, and gives its pictures or the CPU's."""
    path = tmp_path / "raw.nut"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("rawvideo", rate=25)
        stream.width, stream.height, stream.pix_fmt = *SIZE, form
        for number in range(2):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number), format="rgb24")))
    source = VideoSource(path)
    source.open()
    source._hwaccel = "cuda"
    assert len(list(iter(source.read, None))) == 2
    source.close()
    lines = [f"{path}: hwaccel=cuda: decoded by the CPU, no such device works for it"]
    assert caplog.messages == lines * said, "once, not for each picture"
