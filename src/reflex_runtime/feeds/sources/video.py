"""Video files, network cameras and local cameras, decoded by FFmpeg through PyAV on the reading thread.

PyAV is imported when the first source is made.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.pipeline import Picture, SourceError, library, turned
from reflex_runtime.settings.declare import one_line, one_of

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

log = logging.getLogger("reflex.feeds")

AUTO: Final = "auto"


def kinds_of(text: str) -> list[str]:
    """The kinds of device that a setting `hwaccel` names, as FFmpeg calls them; all for `auto`. Raises ConfigError for
    a kind that this FFmpeg lacks."""
    from av.codec.hwaccel import hwdevices_available

    kind, _, which = text.partition(":")
    known = hwdevices_available()
    if kind not in (AUTO, *known) or (which and kind == AUTO):
        raise ConfigError(f"hwaccel={one_line(text)}: {one_of(kind, [AUTO, *known])}, or such as cuda:1")
    return list(known) if kind == AUTO else [kind]


def hardware_of(text: str) -> Any:
    """The first device of this setting that works here, for `av.open`; None if there is none."""
    from av.codec import Codec
    from av.codec.hwaccel import HWAccel

    for kind in kinds_of(text):
        with suppress(Exception):  # NotImplementedError, and what FFmpeg finds missing
            found = HWAccel(kind, text.partition(":")[2] or None, allow_software_fallback=True)
            found.create(Codec("h264", "r"))
            return found
    return None


MAX_SIDE = 8192  # pixels: a header with more is an error or an attack, and would exhaust the memory
MAX_BARREN = 300  # packets in a row without a picture: encoders send a key frame every 250 by default
EMPTY = 8  # bytes: a packet of at most so many repeats the picture before, as in MPEG-4
EARLY_S = 1.0  # a file whose last picture ends more than this before its length has lost pictures
FLOATS = re.compile(r"f(16|32)(le|be)$")  # formats of pixels
NO_TIMES = 0x80  # FFmpeg's flag of formats without times, such as raw H.264 and JPEG over HTTP
NETWORK = ("rtsp", "rtsps", "http", "https")


class VideoSource:
    """A video file, a network camera, or a local camera, as a `Source`.

    where: a path; an address with rtsp, rtsps, http or https; a device like /dev/video0. RTSP runs over TCP.
    realtime: a file is live, and read at its times (`paced`), as is a video over HTTP whose length is known.
    loop: a file starts over at its end, and its pts too; the source has no end.
    open_timeout: seconds to wait for a connection, and again for enough data to know the format; in (0, 600].
    read_timeout: seconds to wait for the data of a picture, in (0, 600]. A small value finds a frozen camera sooner.
    hwaccel: decode on a device by FFmpeg's name, such as cuda, vaapi, or cuda:1 for the second one; auto takes the
        first that works. If none can decode this video, the CPU decodes, which is logged.
    name: the address without user, password and query. total: the frame count in the file, else its duration times
        its rate. corrupt: packets and pictures that could not be decoded and are left out; at the end of a file also
        those missing by the number of packets or by its length. step: seconds between two pictures by its rate.

    A picture is RGB, turned as the file says, with square pixels. SourceError is raised for 300 packets in a row
    without a good picture, and for a side of more than 8192 pixels. A network source is lost when it ends, is cut off,
    or sends nothing for read_timeout; it may be opened again unless it refused the password. An error in a file is
    permanent. A picture of H.264 over RTSP comes one frame time late: it is complete when the next one begins.

    `interrupt` ends a wait for the network within 0.2 s (see `_Clock`; without it, after the timeout). Neither it nor a
    timeout ends waits of the operating system: name look-ups, stuck devices and disks.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        realtime: bool = False,
        loop: bool = False,
        open_timeout: float = 5.0,
        read_timeout: float = 5.0,
        hwaccel: str = "",
    ) -> None:
        self._where = os.fspath(where)
        self._scheme = self._where.partition("://")[0].lower() if "://" in self._where else ""
        self.name = without_secrets(self._where)
        self._remote = self._scheme in NETWORK or self._where.startswith("/dev/video")
        if not self._where or "\0" in self._where or (self._scheme and not self._remote):
            raise ConfigError(f"VideoSource.where={self.name!r}: must be a path, or start with {', '.join(NETWORK)}")
        for field, value in (("realtime", realtime), ("loop", loop)):
            if value and self._remote:
                raise ConfigError(f"VideoSource.{field}={value}: must be False for {self.name}, which is no file")
        for field, seconds in (("open_timeout", open_timeout), ("read_timeout", read_timeout)):
            if not 0.0 < seconds <= 600.0:
                raise ConfigError(f"VideoSource.{field}={seconds!r}: must be in (0, 600] seconds")
        self._av = _load()
        self._loop, self._timeouts = loop, (open_timeout, read_timeout)
        self._hwaccel, self._hardware = hwaccel, None
        if hwaccel:
            kinds_of(hwaccel)
        self._stop = threading.Event()
        self._container: InputContainer | None = None
        self._frames: Iterator[VideoFrame] = iter(())
        self.live, self.paced = self._remote or realtime, realtime  # paced, over HTTP: set by `open`
        self.total: int | None = None
        self.corrupt, self.step = 0, 0.04
        self._aspect, self._timed = 1.0, True  # of a pixel: width over height; False: the times are made up by FFmpeg

    # -- Source ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect and find the video stream. Raises SourceError."""
        self.close()
        if self._hwaccel and self._hardware is None:
            self._hardware = hardware_of(self._hwaccel)
        self._container = self._guarded(self._open, "no answer", self._timeouts[0])
        if not self._container.streams.video:
            raise SourceError(f"{self.name}: holds no video", retryable=self._remote)
        stream = self._container.streams.video[0]
        if stream.codec_context is None:
            raise SourceError(f"{self.name}: no decoder for its video", retryable=False)
        if self._remote and not stream.codec_context.width:  # connected, but too little data to know the format
            raise SourceError(f"{self.name}: no answer for {self._timeouts[0]:g} s")
        self._check_side(stream.codec_context.width, stream.codec_context.height)
        stream.codec_context.thread_type = "NONE"  # the reading thread decodes; many feeds share the cores
        stream.codec_context.thread_count = 1
        rate = float(stream.average_rate or stream.guessed_rate or 0.0)
        self.step = 1.0 / rate if rate > 0.0 else 0.04
        self._timed = not self._container.format.flags & NO_TIMES
        live = "mp4" in self._container.format.name and not (stream.frames or self._container.size > 0)  # in fragments
        self.paced = self.paced or (self._scheme.startswith("http") and bool(self._container.duration) and not live)
        self.total = None if self._remote or self._loop else self._expected(stream, rate)
        if self._hwaccel and not stream.codec_context.is_hwaccel:
            self._log_cpu()
        self._aspect = float(stream.codec_context.sample_aspect_ratio or stream.sample_aspect_ratio or 1.0)
        self._frames = self._decode(self._container, stream)

    def read(self) -> Picture | None:
        """The next picture and its pts in seconds. None at the end of a file."""
        frame = self._guarded(self._next, "no frame", self._timeouts[1])
        if frame is None and self._loop:
            self.open()
            frame = self._guarded(self._next, "no frame", self._timeouts[1])
            if frame is None:
                raise SourceError(f"{self.name}: holds no picture", retryable=False)
        if frame is None:
            return None
        self._check_side(frame.width, frame.height)
        picture = self._guarded(lambda: self._picture(frame), "no frame", self._timeouts[1])
        return picture, frame.time if self._timed else None

    def close(self) -> None:
        self._frames = iter(())  # it holds the container
        container, self._container = self._container, None
        if container is not None:
            container.close()

    def interrupt(self) -> None:
        """End the wait of the reading thread, and every later one."""
        self._stop.set()

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open(self) -> InputContainer:
        seconds_open, seconds_read = self._timeouts
        # FFmpeg's own limit, longer than PyAV's, for calls that PyAV does not limit, such as closing a dead camera.
        limit = str(int((seconds_open + seconds_read) * 1e6))
        form, address, options = None, self._where, {}
        if self._scheme.startswith("rtsp"):
            # Probing is short, and its data is kept: `nobuffer` would drop the first key frame.
            options = {"rtsp_transport": "tcp", "allowed_media_types": "video", "timeout": limit, "fpsprobesize": "1"}
        elif self._scheme:
            options = {"rw_timeout": limit}
        elif self._remote:
            form = "v4l2"
        else:
            address = "file:" + os.path.abspath(self._where)  # a colon in a name is no protocol
        version = int(self._av.__version__.partition(".")[0])
        # From PyAV 19 on, what is not UTF-8 in a file's texts is always replaced.
        older: dict[str, Any] = {"metadata_errors": "replace"} if version < 19 else {}
        opened: InputContainer = self._av.open(
            address, format=form, options=options, timeout=(seconds_open, seconds_read), hwaccel=self._hardware, **older
        )
        return opened

    def _expected(self, stream: VideoStream, rate: float) -> int | None:
        if stream.frames > 0:
            return stream.frames
        duration = self._container.duration if self._container is not None else None  # microseconds
        return round(duration * 1e-6 * rate) if duration and duration > 0 and rate > 0.0 else None

    # -- decoding ----------------------------------------------------------------------------------------------------

    def _next(self) -> VideoFrame | None:
        for frame in self._frames:
            return frame
        if self._container is None:
            raise SourceError(f"{self.name}: not open", retryable=False)
        if self._scheme and not self.paced:
            raise SourceError(f"{self.name}: the stream ended")
        return None

    def _decode(self, container: InputContainer, video: VideoStream) -> Iterator[VideoFrame]:
        """Every good picture until the end. Packets that cannot be decoded are counted and left out."""
        invalid: type[Exception] = self._av.error.InvalidDataError
        packets, barren, waited = container.demux(), 0, 0.0
        packed, decoded, before, end = 0, [0, 0], self.corrupt, 0.0  # decoded: whole and interlaced pictures
        while barren < MAX_BARREN:
            began = time.monotonic()
            try:
                packet = next(packets)
            except StopIteration:
                if not self._remote:
                    missing = max(_without_picture(packed, *decoded), self._missing(video, end))
                    self.corrupt = before + max(self.corrupt - before, missing)
                return
            except invalid:  # data without packets ended the generator
                self.corrupt, barren, packets = self.corrupt + 1, barren + 1, container.demux()
                continue
            waited += time.monotonic() - began
            # After a timeout FFmpeg still returns the packet that it was assembling; and packets of sound do not count.
            if self._remote and waited >= self._timeouts[1]:
                raise SourceError(f"{self.name}: no frame for {self._timeouts[1]:g} s")
            if packet.stream is not video:  # not by stream_index: the packet that flushes a decoder has none
                continue
            barren, waited = barren + 1, 0.0
            packed += packet.size > EMPTY and not packet.is_discard
            try:
                frames: list[VideoFrame] = packet.decode()  # type: ignore[assignment]
            except invalid:
                self.corrupt += 1
                continue
            for frame in frames:
                if frame.is_corrupt:
                    self.corrupt += 1
                else:
                    barren = 0
                    decoded[frame.interlaced_frame] += 1
                    if frame.time is not None and frame.time_base is not None:
                        end = frame.time + float(frame.duration * frame.time_base)
                    # A decoder may choose the CPU late; pictures of devices are semi-planar, such as nv12.
                    if self._hwaccel and frame.format.name.startswith("yuv"):
                        self._log_cpu()
                    yield frame
        raise SourceError(f"{self.name}: {MAX_BARREN} packets in a row gave no picture", retryable=self._remote)

    def _log_cpu(self) -> None:
        """Log it once: a camera connects many times."""
        log.warning("%s: hwaccel=%s: decoded by the CPU, no such device works for it", self.name, self._hwaccel)
        self._hwaccel = ""

    def _missing(self, video: VideoStream, end: float) -> int:
        """How many pictures are missing after the last one, by the length in the file. The file's frame count is no
        proof: it includes pictures that an edit has cut off."""
        length = _length_of(video)
        return round((length - end) / self.step) if self._timed and length - end > EARLY_S else 0

    def _picture(self, frame: VideoFrame) -> NDArray[np.uint8]:
        """A decoded picture as RGB, turned, with square pixels."""
        if FLOATS.search(frame.format.name):  # their levels have no single meaning
            raise SourceError(f"{self.name}: pictures of floats, {frame.format.name}", retryable=False)
        turn = round(-frame.rotation / 90) % 4 * 90  # FFmpeg counts against the clock
        width, height = frame.width, frame.height
        if self._aspect != 1.0:
            width = max(1, round(width * self._aspect))
            self._check_side(width, height)
        # One thread: PyAV's default is one per core, for every feed.
        rgb = frame.reformat(width, height, "rgb24", threads=1)
        return turned(np.ascontiguousarray(rgb.to_ndarray(), np.uint8), turn)

    # -- faults ------------------------------------------------------------------------------------------------------

    def _guarded(self, action: Callable[[], Any], what: str, limit: float) -> Any:
        """Call `action`, so that `interrupt` ends it. Every error of PyAV becomes a SourceError without PyAV's message,
        which may contain a password."""
        if self._stop.is_set():
            raise self._interrupted()
        fault: SourceError | None = None
        began, _waiting.stop = time.monotonic(), self._stop
        try:
            result = action()
        except (self._av.FFmpegError, ValueError) as error:
            fault = self._fault(error)
            if self._remote and time.monotonic() - began >= limit:  # FFmpeg has several names for it
                fault = SourceError(f"{self.name}: {what} for {limit:g} s")
        finally:
            _waiting.stop = None
        if self._stop.is_set():
            raise self._interrupted()
        if fault is not None:
            raise fault  # here, where PyAV's error is not its context
        return result

    def _fault(self, error: Exception) -> SourceError:
        known = self._av.error
        refused = isinstance(error, known.HTTPUnauthorizedError | known.HTTPForbiddenError | known.LookupError)
        why = getattr(error, "strerror", None) or type(error).__name__
        if not self._remote and os.path.isfile(self._where) and not os.path.getsize(self._where):
            why = "is empty"
        elif isinstance(error, known.InvalidDataError):
            why = "no video that FFmpeg can read" + ("" if self._remote else ", or its end is missing")
        elif self._scheme and getattr(error, "errno", 0) == errno.EIO:  # also for a name that it cannot find
            why = _unknown_host(self._where) or "it broke off, or is no video"
        return SourceError(f"{self.name}: {why}", retryable=self._remote and not refused)

    def _interrupted(self) -> SourceError:
        return SourceError(f"{self.name}: interrupted", retryable=False)

    def _check_side(self, width: int, height: int) -> None:
        if max(width, height) > MAX_SIDE:
            raise SourceError(
                f"{self.name}: pictures of {width}x{height}, must be at most {MAX_SIDE}x{MAX_SIDE}", retryable=False
            )


def without_secrets(where: str) -> str:
    """An address without user, password and query; a path as it is."""
    if "://" not in where:
        return where
    scheme, _, rest = where.partition("://")
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def _unknown_host(address: str) -> str:
    """Why the host of an address has no IP address; empty if it has one."""
    try:
        socket.getaddrinfo(urlsplit(address).hostname, None)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _without_picture(packets: int, whole: int, interlaced: int) -> int:
    """How many pictures are missing, by the number of packets. Interlaced pictures have one packet each, or all of them
    two: whichever fits better."""
    by_field = interlaced > 0 and packets >= whole + 1.5 * interlaced
    return -(-(packets - whole - 2 * interlaced) // 2) if by_field else packets - whole - interlaced


def _length_of(video: VideoStream) -> float:
    """The length of a stream in seconds, as its file has it, Matroska as a text; 0 if unknown."""
    if video.duration and video.time_base:
        return float(video.duration * video.time_base)
    found = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", video.metadata.get("DURATION", ""), re.ASCII)
    return 3600 * int(found[1]) + 60 * int(found[2]) + float(found[3]) if found else 0.0


# -- PyAV --------------------------------------------------------------------------------------------------------------

_waiting = threading.local()  # stop: the Event of the source that this thread reads


class _Clock:
    """The clock of PyAV's interrupt callback, which compares it with a limit about ten times a second.

    A thread whose source was interrupted gets a time after any limit, all others the true time.
    """

    def __init__(self) -> None:
        self._later = itertools.count(1)

    def monotonic(self) -> float:
        stop = getattr(_waiting, "stop", None)
        if stop is None or not stop.is_set():
            return time.monotonic()
        return next(self._later) * 1e9  # later than any limit that counts from the call before


def _load() -> Any:
    """PyAV with its clock replaced. In a version without that clock `interrupt` takes effect after the timeout."""
    av = library("av", "reading video")
    core = sys.modules.get("av.container.core")
    if getattr(core, "time", None) is time:
        core.time = _Clock()  # type: ignore[union-attr]
    return av
