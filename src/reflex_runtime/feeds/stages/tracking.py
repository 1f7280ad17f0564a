"""Detections of a feed numbered by the object that they are, from frame to frame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.arrays import NO_TRACK, supervision, to_arrays
from reflex_runtime.feeds.frame import Frame
from reflex_runtime.feeds.pipeline import Result
from reflex_runtime.feeds.stages.detections import has_boxes

LEAP_S: Final = 5.0  # a longer step of the stream's time is a jump, and the time of the capture is taken
LEAST_S: Final = 1e-3  # between two frames


class TrackStage:
    """Adds `tracker_ids` to each result: for each box the number of its track, None while it has none.

    ByteTrack, by the library trackers. score: a box that scores this begins a track, on its second frame; one that
    scores less only continues one. A track that is not seen for a second of the stream ends, and its number is not
    used again. A result without boxes passes as it is.
    """

    name = "track"

    def __init__(self, score: float = 0.5) -> None:
        tracker = _trackers().ByteTrackTracker
        self._tracker = tracker(track_activation_threshold=score, high_conf_det_threshold=score)
        self._detections = supervision().Detections
        self._time = 0.0
        self._before: tuple[float | None, float] | None = None  # times of the frame before

    def __call__(self, result: Result) -> Result:
        if not has_boxes(result):
            return result
        found = to_arrays(result, masks=False)
        fine = np.flatnonzero(np.isfinite(found.boxes).all(axis=1) & np.isfinite(found.scores))
        detections = self._detections(
            xyxy=found.boxes[fine], confidence=found.scores[fine], data={"row": np.arange(len(found))[fine]}
        )
        tracked = self._tracker.update(detections, timestamp=self._next_time(result.frame))
        ids: list[int | None] = [None] * len(found)
        for row, number in zip(tracked.data.get("row", ()), tracked.tracker_id, strict=True):
            ids[row] = None if number == NO_TRACK else int(number)
        return replace(result, value={**result.value, "tracker_ids": ids})

    def _next_time(self, frame: Frame) -> float:
        """Seconds that never go back: those of the stream; where these stand still, go back or leap, those between the
        captures."""
        before, self._before = self._before, (frame.pts, frame.captured)
        if before is not None:
            pts, captured = before
            step = None if frame.pts is None or pts is None else frame.pts - pts
            if step is None or not 0.0 < step <= LEAP_S:
                step = frame.captured - captured
            self._time += max(LEAST_S, step)
        return self._time


def _trackers() -> Any:
    try:
        import trackers
    except ImportError:
        raise ConfigError("tracking needs trackers: in a clone, pip install '.[vision]'") from None
    return trackers
