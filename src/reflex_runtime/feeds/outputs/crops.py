"""What was found, cut out of its frames: a JPEG for each detection, in a folder for each feed."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import simplejpeg

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.arrays import NO_TRACK, to_arrays
from reflex_runtime.feeds.outputs.output import ResultOutput
from reflex_runtime.feeds.pipeline import Result
from reflex_runtime.feeds.spec import path_name
from reflex_runtime.feeds.stages.detections import has_boxes
from reflex_runtime.telemetry import files

FRAMES: Final = 8  # that wait, each with its picture
MOST: Final = 50  # crops of a frame: the first ones
LEAST_PX: Final = 4  # of a side
QUALITY: Final = 85
_OWN: Final = re.compile(r"\d{8}T\d{6}\.\d{3}Z-\d+-\d+-[\w.-]*\.jpg")


class Crops(ResultOutput[Result]):
    """Writes FOLDER/FEED/TIME-SEQUENCE-PLACE-LABEL.jpg for every box, on a thread of its own.

    FEED is the feed's name, or feed- and the beginning of its SHA-256 if it has other characters than letters, digits,
    '.', '-' and '_'. Only programs give such names.
    keep: crops of a feed on the disk, those of earlier runs among them; beyond that the oldest are deleted. TIME is
    that of the capture, in UTC; with tracks, #ID follows the label as -ID. Only their owner may read them. Frames that
    come while it writes wait; there are at most `FRAMES`, and the newest win.
    """

    kind = "crops"

    def __init__(self, folder: str | os.PathLike[str], keep: int = 1000, name: str = "") -> None:
        super().__init__(str(folder), FRAMES, name)
        if keep < 1:
            raise ConfigError(f"Crops.keep={keep}: must be >= 1")
        self._folder, self._keep = Path(folder), keep
        self._kept: dict[str, deque[str]] = {}  # by feed, the oldest first

    def _item(self, result: Result) -> Result:
        return result

    def _send_all(self) -> None:
        while results := self.box.take(1):
            try:
                if has_boxes(results[0]):
                    self._write(results[0])
            except (OSError, ConfigError, ValueError) as error:
                self.box.drop("refused")
                self._unwell(getattr(error, "strerror", None) or error, again=False)
            else:
                self.box.sent()
                self._well()

    def _write(self, result: Result) -> None:
        folder = self._folder / path_name(result.feed)
        kept = self._kept.get(result.feed)
        if kept is None:
            folder.mkdir(parents=True, exist_ok=True)
            kept = self._kept[result.feed] = deque(sorted(n for n in os.listdir(folder) if _OWN.fullmatch(n)))
        for place, (name, picture) in enumerate(_cut(result)):
            data = simplejpeg.encode_jpeg(picture, QUALITY, colorspace="RGB", colorsubsampling="420")
            name = f"{_when(result)}-{result.frame.sequence:06}-{place}-{name}.jpg"
            with files.create(folder / name, private=True) as file:
                files.write_all(file, data)
            kept.append(name)
        while len(kept) > self._keep:
            (folder / kept.popleft()).unlink(missing_ok=True)


def _cut(result: Result) -> list[tuple[str, Any]]:
    """Name and pixels of each detection."""
    found, image = to_arrays(result, masks=False), result.frame.image
    height, width = image.shape[:2]
    cut = []
    for i, box in enumerate(found.boxes[:MOST]):
        if not np.isfinite(box).all():
            continue
        x0, y0 = (int(max(0.0, side)) for side in np.floor(box[:2]))
        x1, y1 = (int(min(float(most), side)) for side, most in zip(np.ceil(box[2:]), (width, height), strict=True))
        if x1 - x0 >= LEAST_PX and y1 - y0 >= LEAST_PX:
            label = "" if found.labels[i] is None else re.sub(r"[^\w.-]+", "_", str(found.labels[i]))[:40]
            ids = found.tracker_ids
            track = "" if ids is None or ids[i] == NO_TRACK else f"-{ids[i]}"
            cut.append((label + track, np.ascontiguousarray(image[y0:y1, x0:x1])))
    return cut


def _when(result: Result) -> str:
    at = time.time() - (time.monotonic() - result.frame.captured)
    return datetime.fromtimestamp(at, UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3] + "Z"
