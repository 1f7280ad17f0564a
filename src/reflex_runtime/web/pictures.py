"""Decodes callers' pictures, PNG and JPEG, once bounds are checked on the header. Errors are the 422 that names the
field.

All products read a picture in the same way: bit depth, grey, alpha, palettes, CMYK, orientation. Levels are scaled to 8
bits and never clipped: of 16 bits of grey the upper 8 are taken; floats are from 0 to 1. Alpha is dropped. Levels
beyond 16 bits and floats beyond 1 are refused.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Final

import numpy as np
import pybase64
from numpy.typing import NDArray

from reflex_runtime.run.processor import WALL
from reflex_runtime.web.errors import InvalidRequest

Picture = NDArray[Any]  # uint8 [height, width, 3]

BAND_PIXELS: Final = 1 << 20  # pixels that are converted to another mode at a time
MAX_EXIF: Final = 1 << 16  # bytes; a tag takes 12 of them, and Pillow reads all tags, 60,000 a second
ORIENTATION: Final = 0x0112  # tag of EXIF; values beyond 1 turn or mirror
TURNS: Final = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # orientation → number in `PIL.Image.Transpose`
SIDEWAYS: Final = {TURNS[orientation] for orientation in (5, 6, 7, 8)}

MAX_IMAGE_PIXELS = 4096 * 4096
MAX_SIDE = 16_384  # Pillow's resizing takes 16 bytes for each pixel of a side and each pixel of the resized side
MAX_SCANS = 64  # of a progressive JPEG: passes over the whole picture; encoders write about ten
SMALL_PIXELS = 1 << 19  # of a PNG that is decoded with the interpreter's lock: 3 ms
PNG_START = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
RGB_8 = b"\x08\x02\0\0\0"  # in its header, behind the size
JPEG_START = b"\xff\xd8\xff"
JPEG_SCAN = b"\xff\xda"  # begins every scan, and is never within one
MAX_PARTS = 4096  # chunks of a PNG, or segments of a JPEG's head; encoders write some hundred of 8 kB at most
MAX_READS = 4 * MAX_PARTS + 1024  # reads of a file by Pillow, some microseconds each; a part may have one byte


def turn_of(image: Any) -> int | None:
    """How to turn an open picture upright, as `PIL.Image.Transpose`; None if it is upright or its EXIF is broken."""
    if image.format != "JPEG":  # a JPEG must not be loaded before `draft`
        # The EXIF may be at the end, and Pillow turns a TIFF in `load`. The `try` below would swallow errors of `load`.
        image.load()
    if len(image.info.get("exif", b"")) > MAX_EXIF:
        return None
    try:
        return TURNS.get(image.getexif().get(ORIENTATION))
    except Exception:  # Pillow raises many classes
        return None


def upright(image: Any) -> NDArray[np.uint8]:
    """An open picture as RGB, uint8 [height, width, 3], turned by EXIF. ValueError for levels out of range, Pillow's
    errors for a broken file."""
    turn = turn_of(image)
    return whole(image if turn is None else image.transpose(turn))


def plain(image: Any) -> Any:
    """A picture of Pillow in 8 bits, grey or RGB. ValueError for levels out of range."""
    import PIL.Image

    if image.mode.startswith("I") or image.mode == "F":  # Pillow's conversion would clip instead of scale
        levels, most = np.asarray(image), 1 if image.mode == "F" else 0xFFFF
        if levels.size and not (levels.min() >= 0 and levels.max() <= most):
            raise ValueError(f"levels from {levels.min()} to {levels.max()}, must be from 0 to {most}")
        eight = np.rint(levels * 255) if image.mode == "F" else levels >> 8
        return PIL.Image.fromarray(eight.astype(np.uint8))
    return image if image.mode in ("RGB", "L") else image.convert("L" if image.mode == "1" else "RGB")


def bands(image: Any) -> Iterator[tuple[int, Any]]:
    """(first row, part) for each horizontal band of a picture, grey or RGB; one band if no conversion is needed."""
    step = max(1, BAND_PIXELS // image.width)
    if image.mode in ("RGB", "L") or image.height <= step:
        yield 0, plain(image)
        return
    for top in range(0, image.height, step):
        yield top, plain(image.crop((0, top, image.width, min(top + step, image.height))))


def whole(image: Any) -> NDArray[np.uint8]:
    """A picture of Pillow as RGB, in its own size."""
    parts = ((top, np.asarray(band if band.mode == "RGB" else band.convert("RGB"))) for top, band in bands(image))
    _, first = next(parts)
    if len(first) == image.height:
        return first
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    pixels[: len(first)] = first
    for top, band in parts:
        pixels[top : top + len(band)] = band
    return pixels


# -- files -------------------------------------------------------------------------------------------------------------


def decode_picture(
    data: bytes,
    field: str = "image",
    least: tuple[int, int] | None = None,
    fit: Callable[[Any], Picture] = whole,
) -> Picture:
    """A PNG or JPEG as uint8 [height, width, 3]; InvalidRequest when it is neither, broken, or too large.

    It is turned by its EXIF. least: (height, width) that are needed: a JPEG of at least twice that is decoded at 1/2,
    1/4 or 1/8 of its size; None keeps the size. fit: makes the array from a picture that Pillow opened; ordinary files
    are decoded without Pillow. Memory: one picture at full size in the mode of its file, at most 4 bytes a pixel; two
    of them to turn it.
    """
    try:
        fast, exif = None, _for_pillow(data, field)
        if not exif:
            fast = _png(data) if data.startswith(PNG_START) else _jpeg(data, field, least)
        if fast is not None:
            return fast
        with _opened(data, field) as image:
            turn = turn_of(image) if exif else None
            if least is not None and image.format == "JPEG":
                image.draft(None, least if turn in SIDEWAYS else least[::-1])
            return fit(image if turn is None else image.transpose(turn))
    except InvalidRequest:
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, struct.error … on broken files
        raise InvalidRequest(f"{field}: not a readable PNG or JPEG image", field) from error


def pixels_of(sent: Any, field: str = "image") -> int:
    """The work of decoding, in pixels of a PNG: of a PNG or JPEG by its header, or of an array uint8 [h, w, 3].

    A JPEG counts 1/32 of its pixels for each scan, because it is decoded at a fraction of its size if less is needed.
    InvalidRequest for other input, for a broken file, and for one that is too large or has over `MAX_SCANS` scans.
    """
    if isinstance(sent, bytes | bytearray | memoryview):
        data, scans = bytes(sent), 0
        if data.startswith(JPEG_START):
            _for_pillow(data, field)  # refuses over MAX_PARTS
            scans = data.count(JPEG_SCAN)
        found = _png_size(data) or _jpeg_size(data)
        if found is None:
            with _opened(data, field) as image:
                found = image.height, image.width
        pixels = prod(_checked_size(*found, field))
        if scans > MAX_SCANS:
            raise InvalidRequest(f"{field}: a JPEG of {scans} scans, at most {MAX_SCANS} are accepted", field)
        return pixels // 32 * scans if scans else pixels
    if not isinstance(sent, np.ndarray) or sent.dtype != np.uint8 or sent.ndim != 3 or sent.shape[2] != 3:
        is_now = f"{sent.dtype} {list(sent.shape)}" if isinstance(sent, np.ndarray) else type(sent).__name__
        raise InvalidRequest(f"{field}: must be uint8 [height, width, 3], is {is_now}", field)
    return prod(_checked_size(sent.shape[0], sent.shape[1], field)) // 8


_BARE: Final = {b"\xff" + bytes([mark]) for mark in (0, 1, *range(0xD0, 0xDA))}  # markers of a JPEG without a length


def _for_pillow(data: bytes, field: str) -> bool:
    """Whether Pillow must read a PNG or JPEG: if it may have EXIF or an unusual structure, or is a PNG with a colour
    profile: kornia would inflate that, 300 kB to 300 MB, while nothing else runs (Pillow stops at 1 MB). InvalidRequest
    for over `MAX_PARTS`: 16 MB of empty parts take Pillow a minute.
    """
    if data.startswith(PNG_START):
        at = 8
        for _ in range(MAX_PARTS):
            kind = data[at + 4 : at + 8]
            if kind in (b"IEND", b"eXIf", b"iCCP", b""):
                return kind in (b"eXIf", b"iCCP")
            at += 12 + int.from_bytes(data[at : at + 4])
    elif data.startswith(JPEG_START):
        at = 2
        for _ in range(MAX_PARTS):
            mark = data[at : at + 2]
            if mark == JPEG_SCAN:
                return False
            if data[at + 4 : at + 10] == b"Exif\0\0" or at >= len(data):
                return True
            if mark[:1] != b"\xff" or mark == b"\xff\xff":  # decoders skip such bytes
                at += 1
            else:
                at += 2 + (0 if mark in _BARE else int.from_bytes(data[at + 2 : at + 4]))
    else:
        return True
    raise InvalidRequest(f"{field}: a file of over {MAX_PARTS} parts", field)


def _opened(data: bytes, field: str) -> Any:
    """The picture, opened: only its header is read."""
    import PIL.Image  # here: servers whose callers send arrays do not need it

    try:
        image = PIL.Image.open(_BoundedReads(data, field), formats=("PNG", "JPEG"))
    except InvalidRequest:
        raise
    except Exception as error:
        raise InvalidRequest(f"{field}: not a readable PNG or JPEG image", field) from error
    _checked_size(image.height, image.width, field)
    return image


class _BoundedReads(io.BytesIO):
    """A file in memory. InvalidRequest at the read after `MAX_READS`."""

    def __init__(self, data: bytes, field: str) -> None:
        super().__init__(data)
        self._field, self._left = field, MAX_READS

    def read(self, size: int | None = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise InvalidRequest(f"{self._field}: a file of over {MAX_PARTS} parts", self._field)
        return super().read(size)


def _checked_size(height: int, width: int, field: str) -> tuple[int, int]:
    """(height, width), or InvalidRequest if too large. Sides are bounded too: long rows cost more than their pixels."""
    if not 0 < width * height <= MAX_IMAGE_PIXELS or max(width, height) > MAX_SIDE:
        most = f"at most 4096×4096 are accepted, and {MAX_SIDE} on a side"
        raise InvalidRequest(f"{field}: {width}×{height} pixels, {most}", field)
    return height, width


def _png_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) of a PNG with 8 bits of red, green and blue, not interlaced; None for anything else."""
    if not data.startswith(PNG_START) or data[24:29] != RGB_8:
        return None
    return int.from_bytes(data[20:24]), int.from_bytes(data[16:20])


def _png(data: bytes) -> Picture | None:
    """The pixels of a small ordinary PNG, in 2/5 of Pillow's time, but with the interpreter's lock held; None for other
    and broken files."""
    found = _png_size(data)
    if found is None or found[0] * found[1] > SMALL_PIXELS or max(found) > MAX_SIDE:
        return None
    import kornia_rs

    try:
        with WALL:  # a panic of Rust is no Exception
            return kornia_rs.io.decode_image_png_u8(data, found, "rgb")  # type: ignore[no-any-return]
    except Exception:  # kornia has no class for its errors
        return None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) of an ordinary JPEG in colour; None for other files, which Pillow reads."""
    if not data.startswith(JPEG_START):
        return None
    import simplejpeg

    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width) if colours == "YCbCr" else None


def _jpeg(data: bytes, field: str, least: tuple[int, int] | None) -> Picture | None:
    """The pixels of an ordinary JPEG, as Pillow would give them in nearly twice the time; None for other files."""
    found = _jpeg_size(data)
    if found is None:
        return None
    import simplejpeg

    height, width = _checked_size(*found, field)
    less = 1
    if least is not None:
        less = next((n for n in (8, 4, 2) if min(height // least[0], width // least[1]) >= n), 1)
    image: Picture = simplejpeg.decode_jpeg(
        data, "RGB", fastdct=False, fastupsample=False, min_height=-(-height // less), min_width=-(-width // less),
        min_factor=1, strict=True,
    )  # fmt: skip
    return image


# -- base64 ------------------------------------------------------------------------------------------------------------

PIECE: Final = 1 << 20  # characters that are decoded at a time; the interpreter's lock is held meanwhile


def picture_bytes(text: str, field: str) -> bytes:
    """The bytes of a picture in base64 or a data URL of it."""
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidRequest(f"{field}: a data URL must be data:image/…;base64,…", field)
    try:
        return decoded_base64(text)
    except ValueError as error:
        raise InvalidRequest(f"{field}: not base64: {error}", field) from None


def decoded_base64(text: str) -> bytes:
    """The bytes of a base64 text, in either alphabet of RFC 4648, also in lines as in MIME; ValueError for other text.
    It is decoded in pieces, so that other threads can run in between."""
    try:
        return _decoded(text)
    except ValueError:
        plain = text.replace("\r", "").replace("\n", "").replace("-", "+").replace("_", "/")
        if plain == text:
            raise
        return _decoded(plain + "=" * (-len(plain) % 4))  # in URLs the padding is mostly left out


def _decoded(text: str) -> bytes:
    if text.find("=", 0, len(text) - 2) >= 0:
        raise ValueError("padding before its end")
    if len(text) <= PIECE:
        return pybase64.b64decode(text, validate=True)
    return b"".join(pybase64.b64decode(text[at : at + PIECE], validate=True) for at in range(0, len(text), PIECE))
