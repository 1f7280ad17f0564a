"""What a decoded picture means, once for all products: bit depth, grey, alpha, palettes, CMYK, and how it was held.

Levels are scaled to 8 bits, never cut off: 16 bits of grey by their upper half, floats from 0 to 1. Alpha is left out.
What has no such meaning (levels beyond 16 bits, floats beyond 1) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BAND_PIXELS: Final = 1 << 20  # that are converted to the mode they are needed in at a time
MAX_EXIF: Final = 1 << 16  # bytes; each has up to a twelfth of a tag, and Pillow reads all of them, 60,000 in a second
ORIENTATION: Final = 0x0112  # tag of EXIF; a value beyond 1 means that the picture is to be turned or mirrored
TURNS: Final = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # by the orientation, as `PIL.Image.Transpose` counts
SIDEWAYS: Final = {TURNS[orientation] for orientation in (5, 6, 7, 8)}


def turn_of(image: Any) -> int | None:
    """How to turn an open picture so that it is seen as the camera was held; None for not at all. An EXIF that is
    broken, or longer than a JPEG's can be, turns nothing."""
    if image.format != "JPEG":  # which is to be drafted first
        # Its EXIF may be at the end, and Pillow turns a TIFF by itself. Below, an error of it would be one of EXIF.
        image.load()
    if len(image.info.get("exif", b"")) > MAX_EXIF:
        return None
    try:
        return TURNS.get(image.getexif().get(ORIENTATION))
    except Exception:  # as many classes as broken files
        return None


def upright(image: Any) -> NDArray[np.uint8]:
    """An open picture as RGB, uint8 [height, width, 3], turned as its EXIF says. ValueError for levels that mean
    nothing, and what Pillow raises for a broken file."""
    turn = turn_of(image)
    return whole(image if turn is None else image.transpose(turn))


def plain(image: Any) -> Any:
    """A picture of Pillow's in grey or in colours, of 8 bits. ValueError for levels that mean nothing."""
    import PIL.Image

    if image.mode.startswith("I") or image.mode == "F":  # a conversion would cut off instead of scale
        levels, most = np.asarray(image), 1 if image.mode == "F" else 0xFFFF
        if levels.size and not (levels.min() >= 0 and levels.max() <= most):
            raise ValueError(f"levels from {levels.min()} to {levels.max()}, must be from 0 to {most}")
        eight = np.rint(levels * 255) if image.mode == "F" else levels >> 8
        return PIL.Image.fromarray(eight.astype(np.uint8))
    return image if image.mode in ("RGB", "L") else image.convert("L" if image.mode == "1" else "RGB")


def bands(image: Any) -> Iterator[tuple[int, Any]]:
    """(first row, its part) of a picture in parts, in grey or in colours: one part where nothing is converted."""
    step = max(1, BAND_PIXELS // image.width)
    if image.mode in ("RGB", "L") or image.height <= step:
        yield 0, plain(image)
        return
    for top in range(0, image.height, step):
        yield top, plain(image.crop((0, top, image.width, min(top + step, image.height))))


def whole(image: Any) -> NDArray[np.uint8]:
    """In colours, at its size."""
    parts = ((top, np.asarray(band if band.mode == "RGB" else band.convert("RGB"))) for top, band in bands(image))
    _, first = next(parts)
    if len(first) == image.height:
        return first
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    pixels[: len(first)] = first
    for top, band in parts:
        pixels[top : top + len(band)] = band
    return pixels
