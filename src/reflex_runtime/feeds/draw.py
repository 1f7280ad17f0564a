"""Boxes, labels and text on a picture, so that a result can be looked at."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from math import ceil, floor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Box = tuple[float, float, float, float]  # x0, y0, x1, y1
Colour = tuple[int, int, int]

# Of about equal brightness, far apart also for the colour-blind.
COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
DARK, LIGHT = (0, 0, 0), (255, 255, 255)
MOST_BOXES = 1000  # drawn in a picture
MOST_CORNERS = 64  # of a polygon
FARTHEST = 20_000.0  # pixels; a polygon with a corner farther away is drawn as its box
MOST_TEXT = 500  # characters drawn of a text
MOST_CELLS = 4_000_000  # of a mask
VEIL = 110  # of 255: how much of the colour of a mask covers the picture
_SHORT = 40  # characters of a text that is kept as drawn


def annotated(image: NDArray[np.uint8], value: Any, caption: str = "") -> NDArray[np.uint8]:
    """A copy of a picture (RGB [h, w, 3]) with what a result says drawn on it.

    value: a mapping; boxes ([[x0, y0, x1, y1], ...] in pixels) with labels, scores and tracker_ids beside them, and
    what a second model said of them (`then`), keypoints, polygons and masks (see docs/feeds.md), text in the corner.
    What is missing or has another form is left out.
    caption: a line in the other corner, on a darkened ground, under the boxes; too long, it loses its beginning.
    """
    picture = Image.fromarray(image)
    pen = ImageDraw.Draw(picture)
    height = max(10, min(28, picture.height // 24))
    if caption:
        _caption(picture, pen, _font(height), caption)
    if isinstance(value, Mapping):
        boxes = [None if box is None else _within(box, picture.size) for box in _boxes(value.get("boxes"))]
        more = _followed(value.get("then"))
        words = [_words(value, i, more.get(i, "")) for i in range(len(boxes))]
        thick = max(1, min(4, (min(picture.size) + 120) // 180))
        for mask, (_, colour) in zip(_items(value.get("masks")), words, strict=False):
            _tint(picture, mask, colour)
        polygons = _polygons(value.get("polygons"), len(boxes))
        for box, polygon, (_, colour) in zip(boxes, polygons, words, strict=True):
            if polygon is not None:
                pen.polygon(polygon, outline=colour, width=thick)
            elif box is not None:
                pen.rectangle(box, outline=colour, width=thick)
        for points, (_, colour) in zip(_items(value.get("keypoints")), words, strict=False):
            _dots(pen, points, colour, 2 * thick)
        for box, (label, colour) in zip(boxes, words, strict=True):
            if box is not None and label:
                _label(picture, height, box, label, colour)
        if value.get("text") is not None:
            _paste(picture, _sign(str(value["text"]), DARK, height), (2, 2))
    return np.asarray(picture)


def _boxes(boxes: Any) -> list[Box | None]:
    """Corners in order, None for what is no box."""
    try:
        rows = np.asarray(boxes, dtype=np.float64)
    except (TypeError, ValueError):
        return []
    if rows.ndim != 2 or rows.shape[1] != 4:
        return []
    found: list[Box | None] = []
    for x0, y0, x1, y1 in rows[:MOST_BOXES].tolist():
        finite = np.isfinite((x0, y0, x1, y1)).all()
        found.append((min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)) if finite else None)
    return found


def _polygons(polygons: Any, count: int) -> list[list[tuple[float, float]] | None]:
    """Corners around each box, None for what has none that can be drawn."""
    try:
        rows = np.asarray(polygons, dtype=np.float64)
    except (TypeError, ValueError):
        return [None] * count
    if rows.ndim != 3 or rows.shape[0] < count or rows.shape[2] != 2 or not 3 <= rows.shape[1] <= MOST_CORNERS:
        return [None] * count
    found: list[list[tuple[float, float]] | None] = []
    for row in rows[:count]:
        near = bool((np.abs(row) < FARTHEST).all())  # not one that is not a number
        found.append([(x, y) for x, y in row.tolist()] if near else None)
    return found


def _within(box: Box, size: tuple[int, int]) -> Box:
    """The box cut off at the picture's edge, just outside of it: drawing takes time for every pixel."""
    x0, y0, x1, y1 = (min(max(v, -1.0), float(most)) for v, most in zip(box, (*size, *size), strict=True))
    return x0, y0, x1, y1


def cells_of(mask: Any) -> NDArray[np.bool_] | None:
    """The cells [rows, columns] of a mask of a result; they cover its `box` evenly. None for what is no mask."""
    try:
        rows, columns = (int(n) for n in mask["size"])
        counts = np.asarray(mask["counts"], np.int64)
        if not (0 < rows * columns <= MOST_CELLS and counts.ndim == 1 and counts.min(initial=0) >= 0):
            return None
        if counts.max(initial=0) > rows * columns or counts.sum() != rows * columns:  # their sum could overflow
            return None
        return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(rows, columns)
    except (TypeError, ValueError, KeyError, OverflowError):
        return None


def _tint(picture: Image.Image, mask: Any, colour: Colour) -> None:
    """The cells of a mask in a colour that lets the picture through."""
    cells = cells_of(mask)
    boxes = _boxes([mask.get("box")]) if cells is not None else []
    if cells is None or not boxes or boxes[0] is None:
        return
    x0, y0, x1, y1 = (round(v) for v in boxes[0])
    if not (0 < x1 - x0 <= 2 * picture.width and 0 < y1 - y0 <= 2 * picture.height):
        return
    veil = Image.fromarray(cells.astype(np.uint8) * VEIL).resize((x1 - x0, y1 - y0), Image.Resampling.NEAREST)
    picture.paste(colour, (x0, y0, x1, y1), veil)


def _dots(pen: ImageDraw.ImageDraw, points: Any, colour: Colour, radius: int) -> None:
    """Keypoints x, y, and how visible: those below 0.5 are left out."""
    try:
        rows = np.asarray(points, dtype=np.float64)
    except (TypeError, ValueError):
        return
    if rows.ndim != 2 or rows.shape[1] not in (2, 3):
        return
    for row in rows[:MOST_BOXES][np.isfinite(rows[:MOST_BOXES]).all(axis=1)].tolist():
        if len(row) == 2 or row[2] >= 0.5:
            x, y = row[:2]
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def _followed(then: Any) -> dict[int, str]:
    """What a second model said of boxes, by their numbers; see `SecondModel`."""
    found = {}
    for one in _items(then):
        if isinstance(one, Mapping) and isinstance(one.get("box"), int) and one.get("text"):
            found[one["box"]] = str(one["text"])
    return found


def _words(value: Mapping[Any, Any], i: int, more: str) -> tuple[str, Colour]:
    """What stands beside box i, and its colour, which is of the label alone: the same in every run."""
    labels, scores = _items(value.get("labels")), _items(value.get("scores"))
    label = labels[i] if i < len(labels) else None
    score = scores[i] if i < len(scores) else None
    tracks = _items(value.get("tracker_ids"))
    track = "" if i >= len(tracks) or tracks[i] is None else f"#{tracks[i]}"
    parts = ["" if label is None else str(label), "" if score is None else _number(score), track, more]
    words = " ".join(filter(None, parts))
    mixed = zlib.crc32(str(label).encode()) >> 16
    return words, COLOURS[mixed % len(COLOURS)]


def _label(picture: Image.Image, height: int, box: Box, words: str, colour: Colour) -> None:
    """height: of its letters."""
    size, sign = picture.size, _sign(words, colour, height)
    above, lowest = box[1] - height - 5, size[1] - height - 5
    left = max(0.0, min(box[0], size[0] - 3 - sign.first))
    _paste(picture, sign, (left, above if above >= 0.0 else min(box[3] + 1.0, lowest)))


def _caption(picture: Image.Image, pen: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont, words: str) -> None:
    words = words[:MOST_TEXT]
    if pen.textlength(words, font) > picture.width - 4:
        while words and pen.textlength("…" + words, font) > picture.width - 4:
            words = words[1:]
        words = "…" + words
    at = (2, picture.height - font.size - 6)
    right = min(picture.width, round(pen.textbbox(at, words, font=font)[2]) + 2)
    ground = (0, max(0, int(at[1]) - 1), right, picture.height)
    if ground[0] < ground[2] and ground[1] < ground[3]:
        picture.paste(picture.crop(ground).point([value // 3 for value in range(256)] * 3), ground[:2])
    pen.text(at, words, fill=LIGHT, font=font)


class _Sign(NamedTuple):
    """Text on its ground. at: of its corner, from where the text begins. first: the length of its first line."""

    picture: Image.Image
    at: tuple[int, int]
    first: float


def _sign(words: str, background: Colour, height: int) -> _Sign:
    """Drawn once, as long as it is short: the same labels come with every frame."""
    words = words[:MOST_TEXT]
    return _drawn(words, background, height) if len(words) <= _SHORT else _drawn.__wrapped__(words, background, height)


@lru_cache(256)
def _drawn(words: str, background: Colour, height: int) -> _Sign:
    font, pen = _font(height), ImageDraw.Draw(Image.new("RGB", (1, 1)))
    x0, y0, x1, y1 = pen.textbbox((0, 0), words, font=font)
    left, top = floor(x0) - 2, floor(y0) - 1
    picture = Image.new("RGB", (ceil(x1) + 3 - left, ceil(y1) + 2 - top), background)
    bright = sum(background) > 330
    ImageDraw.Draw(picture).text((-left, -top), words, fill=DARK if bright else LIGHT, font=font)
    return _Sign(picture, (left, top), pen.textlength(words.splitlines()[0], font=font) if words else 0.0)


def _paste(picture: Image.Image, sign: _Sign, at: tuple[float, float]) -> None:
    picture.paste(sign.picture, (round(at[0]) + sign.at[0], round(at[1]) + sign.at[1]))


def _items(values: Any) -> Sequence[Any]:
    if isinstance(values, np.ndarray):
        values = values.tolist()
    return values if isinstance(values, (list, tuple)) else ()


def _number(score: Any) -> str:
    try:
        return f"{float(score):.2f}"
    except (TypeError, ValueError):
        return str(score)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font: no file of the system is needed."""
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font
