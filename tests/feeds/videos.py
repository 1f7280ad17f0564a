"""Small real videos for the tests of feeds, in which every picture says which one it is.

A picture shows its number as ten black or white stripes, so that it is read back whatever a codec did to it.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

BITS = 10
SIZE = (160, 48)  # width and height: sixteen pixels a stripe, so that codecs keep them apart


def picture(number: int, size: tuple[int, int] = SIZE) -> NDArray[np.uint8]:
    """RGB [h, w, 3] that shows `number` (below 1024): the highest bit on the left, white for one."""
    width, height = size
    bits = np.array([number >> (BITS - 1 - i) & 1 for i in range(BITS)], np.uint8) * 255
    row = bits[np.arange(width) * BITS // width]
    return np.ascontiguousarray(np.broadcast_to(row[None, :, None], (height, width, 3)))


def number_of(image: NDArray[np.uint8]) -> int:
    """The number that a picture shows."""
    height, width = image.shape[:2]
    columns = [int((i + 0.5) * width / BITS) for i in range(BITS)]
    return sum(1 << (BITS - 1 - i) for i, x in enumerate(columns) if image[height // 2, x].mean() > 127)


def write_video(
    path: Path,
    pictures: Iterable[NDArray[np.uint8]],
    fps: int | Fraction = 25,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    parts: dict[str, str] | None = None,
) -> Path:
    """Encode the pictures into a file; the name's ending chooses the container, `parts` are its options."""
    with av.open(str(path), "w", options=parts or {}) as container:
        stream = container.add_stream(codec, rate=fps, options=options or {})
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for number, image in enumerate(pictures):
            if number == 0:
                stream.height, stream.width = image.shape[:2]
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = number, 1 / Fraction(fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def encoded(pictures: Sequence[NDArray[np.uint8]], fps: int = 25) -> bytes:
    """The pictures as a bare H.264 stream, which can be cut and joined: two sizes in a row are two of these."""
    path = _folder() / f"bare-{len(pictures)}-{pictures[0].shape[1]}.h264"
    return write_video(path, pictures, fps, options={"g": "5", "bf": "0"}).read_bytes()


def write_fields(path: Path, count: int) -> Path:
    """H.264 as camcorders write it: each of the 16 × 32 pictures is two fields, and each field an access unit. No
    encoder of FFmpeg's does that. A field is one macroblock of plain grey levels."""
    begin, delimiter = b"\0\0\0\1", b"\0\0\0\1\x09\x10"
    out = begin + bytes.fromhex("674d001eda6480") + begin + bytes.fromhex("68ce3880")  # SPS and PPS
    for number in range(2 * count):
        # First macroblock, I, PPS 0, frame number, field, its parity; of the first the IDR's id; marking, QP, I_PCM.
        head = f"1{'0001000'}1{number // 2 % 16:04b}1{number % 2}{'0' if number else '100'}1{'000011010'}"
        data = int(head.ljust(-(-len(head) // 8) * 8, "0"), 2).to_bytes(-(-len(head) // 8), "big")
        grey = bytes([100] * 256 + [128] * 128)
        out += delimiter + begin + (b"\x61" if number else b"\x65") + data + grey + b"\x80"
    path.write_bytes(out)
    return path


@functools.cache
def clip(count: int = 30, fps: int = 25, size: tuple[int, int] = SIZE, ending: str = "mp4") -> Path:
    """A video of `count` numbered pictures; made once per session, so nobody may change it."""
    path = _folder() / f"clip-{count}-{fps}-{size[0]}x{size[1]}.{ending}"
    return write_video(path, (picture(i, size) for i in range(count)), fps)


@functools.cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="reflex-videos-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
