"""The videos of a LeRobot dataset: one picture a frame, several episodes in a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError

CODECS = {"libx264": {"crf": "18", "g": "2", "bf": "0"}, "libsvtav1": {"crf": "20", "g": "2"}}
"""The first that PyAV has. Every second picture is whole (`g`), as LeRobot does it: frames are read in any order."""

LONGEST_S = 1000.0  # of a file: LeRobot compares times in float32 with a tolerance of 0.1 ms, finer than it at 2,048 s


class FilePlace(NamedTuple):
    """`chunk-CHUNK/file-FILE`."""

    chunk: int
    file: int

    def next(self, files_in_chunk: int) -> FilePlace:
        return FilePlace(self.chunk + 1, 0) if self.file + 1 >= files_in_chunk else FilePlace(self.chunk, self.file + 1)

    def path(self, folder: Path, suffix: str) -> Path:
        return folder / f"chunk-{self.chunk:03d}" / f"file-{self.file:03d}{suffix}"


class CameraVideos:
    """The pictures of one camera, encoded as they come.

    height, width: of every picture. max_bytes: of a file, after which the next episode begins another.
    """

    def __init__(self, folder: Path, fps: int, height: int, width: int, *, max_bytes: int, files_in_chunk: int) -> None:
        self._av = need_av()
        self._codec = next((name for name in CODECS if name in self._av.codecs_available), None)
        if self._codec is None:
            raise ConfigError(f"PyAV {self._av.__version__} can encode neither H.264 nor AV1")
        self.place = FilePlace(0, 0)
        self.info: dict[str, Any] = {}
        self._folder, self._fps, self._size = folder, fps, (height, width)
        self._max_bytes, self._files_in_chunk = max_bytes, files_in_chunk
        self._container: Any = None
        self._stream: Any = None
        self._frames = self._bytes = 0

    @property
    def seconds(self) -> float:
        """Length of the current file."""
        return self._frames / self._fps

    def begin(self, frames: int) -> None:
        """An episode of at most so many frames follows: in the current file, or in a new one."""
        if self._frames and (self._bytes >= self._max_bytes or (self._frames + frames) / self._fps > LONGEST_S):
            self.close()
            self.place, self._frames, self._bytes = self.place.next(self._files_in_chunk), 0, 0

    def add(self, picture: NDArray[np.uint8]) -> None:
        """picture: uint8 [height, width, 3]."""
        if self._container is None:
            self._open()
        frame = self._av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame.pts, frame.time_base = self._frames, Fraction(1, self._fps)
        if self._frames:
            self._mux(frame)
        else:
            with no_realtime_threads():
                self._mux(frame)  # starts the encoder
        self._frames += 1

    def close(self) -> None:
        if self._container is not None:
            self._mux(None)
            self._container.close()
            self._container = self._stream = None

    def _open(self) -> None:
        path = self.place.path(self._folder, ".mp4")
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = self._size
        assert self._codec is not None
        self._container = self._av.open(str(path), "w")
        self._stream = self._container.add_stream(self._codec, rate=self._fps, options=dict(CODECS[self._codec]))
        self._stream.height, self._stream.width = height, width
        # Colour at half the resolution needs even sides.
        self._stream.pix_fmt = "yuv420p" if height % 2 == width % 2 == 0 else "yuv444p"
        self._stream.time_base = Fraction(1, self._fps)
        self.info = {
            "video.height": height,
            "video.width": width,
            "video.codec": "h264" if self._codec == "libx264" else "av1",
            "video.pix_fmt": self._stream.pix_fmt,
            "video.is_depth_map": False,
            "video.fps": self._fps,
            "video.channels": 3,
            "has_audio": False,
        }

    def _mux(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._bytes += packet.size
            self._container.mux(packet)


@contextmanager
def no_realtime_threads() -> Iterator[None]:
    """What becomes real-time (SCHED_FIFO) meanwhile is made ordinary again.

    SVT-AV1, if root runs it, makes its own threads and the calling one real-time, and leaves them so: with a core or
    two everything else on the machine stands still, a server included.
    """
    before = _policies()
    yield
    for thread, policy in _policies().items():
        if policy != before.get(thread, os.SCHED_OTHER):
            with suppress(OSError):  # it has ended
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _policies() -> dict[int, int]:
    """The scheduling policy of each thread of this process; empty where there is no /proc."""
    found = {}
    with suppress(OSError):
        for thread in map(int, os.listdir("/proc/self/task")):
            with suppress(OSError):
                found[thread] = os.sched_getscheduler(thread)
    return found


def need_av() -> Any:
    """PyAV; ConfigError names the extra."""
    try:
        import av
    except ImportError as error:
        raise ConfigError("--to-lerobot writes videos with PyAV: in a clone, pip install '.[datasets]'") from error
    return av
