"""Stages after the batch point: tracks, zones, lines, and stages of users; results for supervision."""

from __future__ import annotations

import inspect
import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.pipeline import After, Result, library, refusals_of
from reflex_runtime.run.modules import imported, made
from reflex_runtime.settings import FeedsConfig
from reflex_runtime.settings.declare import one_line

log = logging.getLogger("reflex.feeds")

NO_TRACK: Final = -1
NO_CLASS: Final = -1
MOST_CELLS: Final = 4_000_000  # of a mask


def to_supervision(result: Result, names: Sequence[str] | None = None, masks: bool = True) -> Any:
    """The detections of a result as `supervision.Detections`: xyxy in pixels of the frame, confidence (1 without
    scores), class_id, tracker_id (-1 without a track), mask, and the labels as data["class_name"].

    names: the classes in order; class_id is the place of a label in them, -1 for other labels. Without names, a number
    is its own class_id, and the class_id of a text is a hash, the same in every frame and run.
    masks: whether masks are unpacked: each takes a byte for every pixel of the frame.
    Raises ConfigError if supervision is missing, for a result without boxes, or if its fields differ in length.
    """
    value = result.value
    if not isinstance(value, Mapping) or "boxes" not in value:
        raise ConfigError(f"a result of {result.feed!r} has no boxes, so it has no detections")
    try:
        boxes = np.asarray(value["boxes"], dtype=np.float32).reshape(-1, 4)
        k = len(boxes)
        labels = [None] * k if value.get("labels") is None else list(value["labels"])
        scores, ids = value.get("scores"), value.get("tracker_ids")
        fields: dict[str, NDArray[Any] | None] = {
            "confidence": np.ones(k, np.float32) if scores is None else np.asarray(scores, np.float32),
            "class_id": np.array([_number(label, names) for label in labels], np.int64),
            "tracker_id": None if ids is None else np.array([NO_TRACK if i is None else i for i in ids], np.int64),
        }
        for name, values in fields.items():
            if values is not None and values.shape != (k,):
                raise ValueError(f"{values.size} values of {name} for {k} boxes")
        mask = None
        if masks and value.get("masks") is not None:
            if len(value["masks"]) != k:
                raise ValueError(f"{len(value['masks'])} values of masks for {k} boxes")
            mask = _masks(value["masks"], result.frame.size)
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"a result of {result.feed!r} has no detections: {error}") from None
    texts = np.array(["" if label is None else str(label) for label in labels], dtype=str)
    return library("supervision", "this").Detections(xyxy=boxes, mask=mask, data={"class_name": texts}, **fields)


def _number(label: Any, names: Sequence[str] | None) -> int:
    if label is None:
        return NO_CLASS
    if names is not None:
        return list(names).index(label) if label in names else NO_CLASS
    if isinstance(label, (int, np.integer)) and not isinstance(label, bool):
        return int(label)
    return zlib.crc32(str(label).encode()) >> 1


def _masks(masks: Sequence[Any], size: tuple[int, int]) -> NDArray[np.bool_]:
    """[k, height, width]. Masks that cannot be drawn are empty."""
    found = np.zeros((len(masks), size[1], size[0]), np.bool_)
    for whole, mask in zip(found, masks, strict=True):
        if (placed := mask_picture(mask, size)) is not None:
            picture = Image.new("L", size)
            picture.paste(*placed)
            whole[:] = np.asarray(picture)
    return found


def mask_picture(
    mask: Any, size: tuple[int, int], by: int = 1, level: int = 255
) -> tuple[Image.Image, tuple[int, int]] | None:
    """A mask of a result as a grey picture of its box, `level` where the mask is; and the box's corner in a picture of
    this `size`. by: how many times larger the frame is. None for another form, a huge mask, and one outside of it."""
    cells = cells_of(mask)
    if cells is None:
        return None
    try:
        x0, y0, x1, y1 = (round(float(v) / by) for v in mask["box"])
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
    if not (0 < x1 - x0 <= 2 * size[0] and 0 < y1 - y0 <= 2 * size[1]):
        return None
    if x0 >= size[0] or y0 >= size[1] or x1 <= 0 or y1 <= 0:
        return None
    picture = Image.fromarray(cells.astype(np.uint8) * level)
    return picture.resize((x1 - x0, y1 - y0), Image.Resampling.NEAREST), (x0, y0)


def cells_of(mask: Any) -> NDArray[np.bool_] | None:
    """The cells [rows, columns] of a mask of a result; they cover its `box` evenly. None if it has another form."""
    try:
        rows, columns = (int(n) for n in mask["size"])
        counts = np.asarray(mask["counts"], np.int64)
        if not (0 < rows * columns <= MOST_CELLS and counts.ndim == 1 and counts.min(initial=0) >= 0):
            return None
        if counts.max(initial=0) > rows * columns or counts.sum() != rows * columns:  # the sum could overflow
            return None
        return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(rows, columns)
    except (TypeError, ValueError, KeyError, OverflowError):
        return None


# -- stages ------------------------------------------------------------------------------------------------------------


def has_boxes(result: Result) -> bool:
    """Whether a result has the field `boxes`, which may be empty."""
    return isinstance(result.value, Mapping) and result.value.get("boxes") is not None


class TrackStage:
    """Adds `tracker_ids` to each result: for each box the number of its track, None without a track.

    ByteTrack, by the library trackers. score: a box with at least this score begins a track, which has a number from
    its second frame; one with less only continues a track. A track ends when it is not seen for a second of the stream;
    its number is not used again. Results without boxes pass unchanged.
    """

    name = "track"

    def __init__(self, score: float = 0.5) -> None:
        tracker = library("trackers", "this").ByteTrackTracker
        self._tracker = tracker(track_activation_threshold=score, high_conf_det_threshold=score)
        self._detections = library("supervision", "this").Detections

    def __call__(self, result: Result) -> Result:
        if not has_boxes(result):
            return result
        value = result.value
        boxes = np.asarray(value["boxes"], np.float64).reshape(-1, 4)
        scores = np.ones(len(boxes)) if value.get("scores") is None else np.asarray(value["scores"], np.float64)
        if scores.shape != (len(boxes),):
            counts = f"{scores.size} values of scores for {len(boxes)} boxes"
            raise ConfigError(f"a result of {result.feed!r} has no detections: {counts}")
        fine = np.flatnonzero(np.isfinite(boxes).all(axis=1) & np.isfinite(scores))
        detections = self._detections(xyxy=boxes[fine], confidence=scores[fine], data={"row": fine})
        tracked = self._tracker.update(detections, timestamp=result.frame.time)
        ids: list[int | None] = [None] * len(boxes)
        for row, number in zip(tracked.data.get("row", ()), tracked.tracker_id, strict=True):
            ids[row] = None if number == NO_TRACK else int(number)
        return replace(result, value={**value, "tracker_ids": ids})


FARTHEST: Final = 8192  # the largest coordinate in pixels: supervision keeps a mask of that size for a zone
MOST: Final = 64  # zones, and lines, of a feed
CORNERS: Final = 100  # of a zone

Points = tuple[tuple[float, float], ...]


class ZoneStage:
    """Adds `zones` and `lines` to each result that has boxes.

    zones: {NAME: [indices of the boxes inside]}. lines: {NAME: {"in": n, "out": n, "crossed_in": [indices],
    "crossed_out": [indices]}}, n since the start; a line needs `tracker_ids`. A box is where the middle of its lower
    edge is. `in` is from the right of a line to its left, seen from its first point to its second.
    """

    name = "zones"

    def __init__(self, zones: Mapping[str, Points], lines: Mapping[str, Points]) -> None:
        sv = library("supervision", "this")
        self._zones = {name: sv.PolygonZone(np.array(points).round().astype(int)) for name, points in zones.items()}
        foot = [sv.Position.BOTTOM_CENTER]
        self._lines = {
            name: sv.LineZone(start=sv.Point(*start), end=sv.Point(*end), triggering_anchors=foot)
            for name, (start, end) in lines.items()
        }
        self._unchecked = {**zones, **lines}  # until the first result shows the size of the pictures
        self.zone_counts = dict.fromkeys(zones, 0)
        self.line_counts = {name: {"in": 0, "out": 0} for name in lines}

    def __call__(self, result: Result) -> Result:
        if not has_boxes(result):
            return result
        places, self._unchecked = self._unchecked, {}
        for name, points in places.items():
            if (np.array(points) > result.frame.size).all(axis=0).any():
                size = "x".join(map(str, result.frame.size))
                log.warning("%s: %s lies outside of the picture, %s, and counts nothing", result.feed, name, size)
        detections = to_supervision(result, masks=False)
        if self._lines and detections.tracker_id is None:
            raise ConfigError("lines need tracks: put a TrackStage before")
        more: dict[str, Any] = {}
        if self._zones:
            inside = {name: _indices(zone.trigger(detections)) for name, zone in self._zones.items()}
            self.zone_counts = {name: len(indices) for name, indices in inside.items()}
            more["zones"] = inside
        if self._lines:
            crossed = {name: line.trigger(detections) for name, line in self._lines.items()}
            counts = {name: {"in": line.in_count, "out": line.out_count} for name, line in self._lines.items()}
            self.line_counts = counts
            more["lines"] = {
                name: counts[name] | {"crossed_in": _indices(entered), "crossed_out": _indices(left)}
                for name, (entered, left) in crossed.items()
            }
        return replace(result, value={**result.value, **more})


def zones_of(texts: Sequence[str]) -> dict[str, Points]:
    """Zones by name, from NAME=x1,y1,x2,y2,x3,y3,… in pixels of the frame. Raises ConfigError."""
    found = _named("--zone", texts, "x1,y1,x2,y2,x3,y3,…")
    for name, points in found.items():
        if not 3 <= len(points) <= CORNERS:
            raise ConfigError(f"--zone={name}: must have 3 to {CORNERS} corners, found {len(points)}", field="zone")
        if _area(points) < 1.0:
            raise ConfigError(f"--zone={name}: encloses no area", field="zone")
    return found


def lines_of(texts: Sequence[str]) -> dict[str, Points]:
    """Lines by name, from NAME=x1,y1,x2,y2. Raises ConfigError."""
    found = _named("--line", texts, "x1,y1,x2,y2")
    for name, points in found.items():
        if len(points) != 2 or points[0] == points[1]:
            raise ConfigError(f"--line={name}: must be two points, x1,y1,x2,y2", field="line")
    return found


def _named(flag: str, texts: Sequence[str], form: str) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for text in re.split(r",(?=[^,=]*=)", ",".join(texts)) if texts else ():  # a list in a file is cut at every comma
        name, equals, numbers = text.partition("=")
        wrong = ConfigError(f"{flag}={one_line(text)}: must be NAME={form} in pixels, 0 to {FARTHEST}")
        if not equals or not re.fullmatch(r"[\w.-]{1,64}", name):
            raise wrong
        try:
            values = [float(number) for number in numbers.split(",")]
        except ValueError:
            raise wrong from None
        if len(values) % 2 or not all(isfinite(v) and 0.0 <= v <= FARTHEST for v in values):
            raise wrong
        if name in found:
            raise ConfigError(f"{flag}={name}: is given twice")
        found[name] = tuple(zip(values[::2], values[1::2], strict=True))
    if len(found) > MOST:
        raise ConfigError(f"{flag}: {len(found)} are given, at most {MOST} may be")
    return found


def _area(points: Points) -> float:
    ends = zip(points, (*points[1:], points[0]), strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in ends)) / 2


def _indices(chosen: Any) -> list[int]:
    found: list[int] = np.flatnonzero(chosen).tolist()
    return found


def stages_of(config: FeedsConfig) -> list[After]:
    """New stages for one feed: tracks, zones and lines, then those of --stage in order. Raises ConfigError."""
    found: list[After] = []
    zones, lines = zones_of(config.zone), lines_of(config.line)
    if config.track:
        with refusals_of("--track"):
            found.append(TrackStage(config.track_score))
    if lines and not config.track:
        raise ConfigError("--line needs --track: an object crosses it once", field="line")
    if zones or lines:
        with refusals_of("--zone" if zones else "--line"):
            found.append(ZoneStage(zones, lines))
    return found + [own_stage(text) for text in config.stage]


# -- code of users -----------------------------------------------------------------------------------------------------


class OwnStage:
    """A stage of MODULE:NAME: a function, which all feeds share, or a class, of which each feed has an instance."""

    def __init__(self, name: str, call: After) -> None:
        self.name, self._call = name, call

    def __call__(self, result: Result) -> Result | None:
        return self._call(result)


def own_stage(text: str) -> OwnStage:
    """Import a stage. Raises ConfigError."""
    flag = f"--stage={one_line(text)}"
    found = imported(text, flag, "MODULE:NAME, such as mypkg.rules:only_large")
    found = made(found, flag, found.__name__) if inspect.isclass(found) else found
    if not callable(found):
        raise ConfigError(f"{flag}: {type(found).__name__} cannot be called with a result")
    return OwnStage(text, found)
