"""Draws results on pictures, and writes videos of them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from fractions import Fraction
from functools import cache, lru_cache
from math import ceil, floor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from reflex_runtime.feeds.outputs.json_lines import SinkError
from reflex_runtime.feeds.runtime.pipeline import Result, library
from reflex_runtime.feeds.stages import mask_picture
from reflex_runtime.observe import files

Box = tuple[float, float, float, float]  # x0, y0, x1, y1
Colour = tuple[int, int, int]

# Of about equal brightness, far apart also for the colour-blind.
COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
DARK, LIGHT = (0, 0, 0), (255, 255, 255)
MOST_BOXES = 1000  # drawn in a picture
MOST_CORNERS = 64  # of a polygon
FARTHEST = 20_000.0  # pixels; a polygon with a corner farther away is drawn as its box
MOST_TEXT = 500  # characters drawn of a text
_SHORT = 40  # most characters of a text whose picture is kept
VEIL = 110  # of 255: how much of the colour of a mask covers the picture


def annotated(image: NDArray[np.uint8], value: Any, caption: str = "", by: int = 1) -> NDArray[np.uint8]:
    """A copy of a picture (RGB [h, w, 3]) with a result drawn on it.

    value: a mapping with any of boxes ([[x0, y0, x1, y1], ...] in pixels), labels, scores, tracker_ids, keypoints,
        polygons and masks (see docs/feeds.md), and text for the upper corner. A field of another form is left out.
    caption: a line in the lower left corner, over which boxes are drawn; if too long, its beginning is cut off.
    by: how many times larger the frame is, in whose pixels the positions are.
    """
    picture = Image.fromarray(image)
    pen = ImageDraw.Draw(picture)
    height = max(10, min(28, picture.height // 24))
    if caption:
        sign = _sign(caption, DARK, height)
        _paste(picture, sign, (min(2, picture.width - sign.picture.width), picture.height - sign.picture.height))
    if isinstance(value, Mapping):
        boxes = _boxes(value.get("boxes"), picture.size, by)
        words = [_words(value, i) for i in range(len(boxes))]
        thick = max(1, min(4, (min(picture.size) + 120) // 180))
        for mask, (_, colour) in zip(_items(value.get("masks")), words, strict=False):
            if (placed := mask_picture(mask, picture.size, by, VEIL)) is not None:
                veil, corner = placed
                picture.paste(colour, (*corner, corner[0] + veil.width, corner[1] + veil.height), veil)
        polygons = _polygons(value.get("polygons"), len(boxes), by)
        for box, polygon, (_, colour) in zip(boxes, polygons, words, strict=True):
            if polygon is not None:
                pen.polygon(polygon, outline=colour, width=thick)
            elif box is not None:
                pen.rectangle(box, outline=colour, width=thick)
        for points, (_, colour) in zip(_items(value.get("keypoints")), words, strict=False):
            _dots(pen, points, colour, 2 * thick, by)
        for box, (label, colour) in zip(boxes, words, strict=True):
            if box is not None and label:
                _label(picture, height, box, label, colour)
        if value.get("text") is not None:
            _paste(picture, _sign(str(value["text"]), DARK, height), (2, 2))
    return np.asarray(picture)


def _boxes(boxes: Any, size: tuple[int, int], by: int) -> list[Box | None]:
    """Boxes with ordered corners, cut off just outside of the picture, because drawing takes time for every pixel. None
    for a row that is no box."""
    rows = _numbers(boxes)
    if rows.ndim != 2 or rows.shape[1] != 4:
        return []
    rows = rows[:MOST_BOXES] / by
    found: list[Box | None] = []
    for given, (x0, y0, x1, y1) in zip(rows, rows.clip(-1.0, (*size, *size)).tolist(), strict=True):
        box = min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)
        found.append(box if np.isfinite(given).all() else None)
    return found


def _polygons(polygons: Any, count: int, by: int) -> list[list[tuple[float, float]] | None]:
    """The polygon of each box; None for one that cannot be drawn."""
    rows = _numbers(polygons)
    if rows.ndim != 3 or rows.shape[0] < count or rows.shape[2] != 2 or not 3 <= rows.shape[1] <= MOST_CORNERS:
        return [None] * count
    found: list[list[tuple[float, float]] | None] = []
    for row in rows[:count] / by:
        near = bool((np.abs(row) < FARTHEST).all())  # False for NaN
        found.append([(x, y) for x, y in row.tolist()] if near else None)
    return found


def _dots(pen: ImageDraw.ImageDraw, points: Any, colour: Colour, radius: int, by: int) -> None:
    """Draw keypoints [x, y] or [x, y, visible]; those less visible than 0.5 are left out."""
    rows = _numbers(points)
    if rows.ndim != 2 or rows.shape[1] not in (2, 3):
        return
    for row in rows[:MOST_BOXES][np.isfinite(rows[:MOST_BOXES]).all(axis=1)].tolist():
        if len(row) == 2 or row[2] >= 0.5:
            x, y = row[0] / by, row[1] / by
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def _words(value: Mapping[Any, Any], i: int) -> tuple[str, Colour]:
    """The text of box i and its colour, which depends on the label alone."""
    labels, scores = _items(value.get("labels")), _items(value.get("scores"))
    label = labels[i] if i < len(labels) else None
    score = scores[i] if i < len(scores) else None
    tracks = _items(value.get("tracker_ids"))
    track = "" if i >= len(tracks) or tracks[i] is None else f"#{tracks[i]}"
    parts = ["" if label is None else str(label), "" if score is None else _number(score), track]
    words = " ".join(filter(None, parts))
    mixed = zlib.crc32(str(label).encode()) >> 16
    return words, COLOURS[mixed % len(COLOURS)]


def _label(picture: Image.Image, height: int, box: Box, words: str, colour: Colour) -> None:
    """Write a label above its box, or below where there is no room. height: of its letters."""
    size, sign = picture.size, _sign(words, colour, height)
    above, lowest = box[1] - height - 5, size[1] - height - 5
    left = max(0.0, min(box[0], size[0] - 3 - sign.first))
    _paste(picture, sign, (left, above if above >= 0.0 else min(box[3] + 1.0, lowest)))


class _Sign(NamedTuple):
    """A text on its background. at: its corner relative to the start of the text. first: width of its first line."""

    picture: Image.Image
    at: tuple[int, int]
    first: float


def _sign(words: str, background: Colour, height: int) -> _Sign:
    """A text as a picture; short ones are kept, because labels repeat in every frame."""
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


def _numbers(values: Any) -> NDArray[np.float64]:
    """The values as an array; an array without axes if they are no numbers."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        return np.zeros(())


def _number(score: Any) -> str:
    try:
        return f"{float(score):.2f}"
    except (TypeError, ValueError):
        return str(score)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font, which needs no file of the system."""
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


_FRAGMENTED = (".mp4", ".m4v", ".mov")


class AnnotatedVideo:
    """Writes a video of one feed with its results drawn, as H.264 or, where that is missing, MPEG-4.

    path: the file, whose suffix is the container (.mp4, .mkv, .avi). The first result opens it, and all pictures get
    its size, made even. An earlier file is kept as PATH.1; only the owner may read the new one. An .mp4 has fragments
    of `FRAGMENT_S`, so that a killed process loses only the last one.
    caption: whether feed, number and latency are written in a corner.
    Times are those of the source, but no picture is shown longer than `LONGEST_S`.
    Raises ConfigError if PyAV is missing.
    """

    shared = False  # belongs to one feed
    LONGEST_S = 5.0
    FRAGMENT_S = 1.0
    TICKS = 60_000  # ticks a second: a whole number for a picture at every usual rate; MPEG-4 allows 65,535

    def __init__(self, path: str | os.PathLike[str], caption: bool = True) -> None:
        self._av = library("av", "AnnotatedVideo: writing video")
        self.path, self._caption = Path(path), caption
        self._open_files = ExitStack()  # the file and its container
        self._container: Any = None
        self._stream: Any = None
        self._size = (0, 0)
        self._over = self.whole = False  # over: closed, or failed. whole: begun, and nothing is missing
        self._before, self._shown = 0.0, 0.0  # times of the last picture: of its source, in the video
        self._tick = -1

    def __call__(self, result: Result) -> None:
        """Add a picture. Raises SinkError at the first failure."""
        if self._over:
            return
        caption = f"{result.feed} #{result.frame.sequence} {1e3 * result.latency:.0f} ms" if self._caption else ""
        picture = annotated(result.frame.image, result.value, caption)
        tick = self._next_tick(result.frame.time)
        self._guarded(lambda: self._encode(picture, tick))

    def close(self) -> None:
        """Finish the file; later results are ignored. Raises SinkError."""
        over, self._over = self._over, True
        if self._container is not None and not over:
            self._guarded(self._finish)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._over = True
            with suppress(Exception):  # the same error again
                self._open_files.close()
            self.whole = False
            why = getattr(error, "strerror", None) or error
            raise SinkError(f"video to {self.path} failed: {why}; no more is written") from error

    def _encode(self, picture: NDArray[np.uint8], tick: int) -> None:
        if self._container is None:
            self._open(picture)
        frame = self._av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame = frame.reformat(width=self._size[0], height=self._size[1], format="yuv420p", threads=1)
        frame.pts, frame.time_base = tick, Fraction(1, self.TICKS)
        self._container.mux(self._stream.encode(frame))

    def _open(self, picture: NDArray[np.uint8]) -> None:
        height, width = picture.shape[:2]
        self._size = (max(2, width - width % 2), max(2, height - height % 2))
        file = self._open_files.enter_context(files.create(self.path, private=True))
        fragments = {"movflags": "empty_moov+default_base_moof", "frag_duration": str(round(self.FRAGMENT_S * 1e6))}
        parts = fragments if self.path.suffix.lower() in _FRAGMENTED else {}
        opened = self._av.open(file, "w", options={"flush_packets": "1", **parts})
        self._container = self._open_files.enter_context(opened)
        codec = "libx264" if "libx264" in self._av.codecs_available else "mpeg4"
        self._stream = self._container.add_stream(codec, rate=25)
        self._stream.width, self._stream.height = self._size
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.time_base = Fraction(1, self.TICKS)
        if codec == "libx264":
            # The encoder holds no pictures back, so that the flush at the stop is short.
            self._stream.options = {"preset": "veryfast", "crf": "23", "tune": "zerolatency"}
        self._stream.codec_context.thread_count = 1  # the default is one per core, for every feed
        self.whole = True
        self._container.start_encoding()  # so that a failure shows now, not when the encoder is full

    def _finish(self) -> None:
        self._container.mux(self._stream.encode(None))
        self._open_files.close()

    def _next_tick(self, time: float) -> int:
        """The time of the next picture in ticks from the first, always later than the one before."""
        before, self._before = self._before, time
        if self._tick >= 0:
            self._shown += min(time - before, self.LONGEST_S)
        self._tick = max(self._tick + 1, round(self._shown * self.TICKS))
        return self._tick
