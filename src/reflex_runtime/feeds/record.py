"""A result as it is written: the same fields in JSON lines, Parquet and messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Any

import numpy as np

from reflex_runtime.feeds.pipeline import Result

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """A result without its picture, so that one that waits to be sent holds no frame.

    pts: seconds in the stream, or None. latency_ms: from the frame's capture to its answer. value: as the stages left
    it. file: the picture's name in a directory, or "".
    """

    feed: str
    sequence: int
    pts: float | None
    latency_ms: float
    value: Any
    file: str = ""

    def as_json(self) -> str:
        """One line, without its end."""
        line = {
            "feed": self.feed,
            "sequence": self.sequence,
            **({"file": self.file} if self.file else {}),
            "pts": json_safe(self.pts),
            "latency_ms": self.latency_ms,
            "value": self.value,
        }
        try:  # nearly every value can be written as it is, four times as fast
            return _ENCODER.encode(line)
        except (TypeError, ValueError):
            return _ENCODER.encode({**line, "value": json_safe(self.value)})


def record_of(result: Result) -> ResultRecord:
    """What is written of a result."""
    frame = result.frame
    latency_ms = round(1e3 * result.latency, 3)
    return ResultRecord(result.feed, frame.sequence, frame.pts, latency_ms, result.value, frame.file)


def json_safe(value: Any) -> Any:
    """The same as JSON can hold it: arrays become lists, numbers that are not finite null, and anything unknown its
    text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, np.ndarray):
        plain = value.dtype.kind in "biu" or (value.dtype.kind == "f" and bool(np.isfinite(value).all()))
        return value.tolist() if plain else json_safe(value.tolist())
    if isinstance(value, np.generic):
        return json_safe(value.item())
    if isinstance(value, Enum):
        return json_safe(value.value)
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_safe(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return json_safe({each.name: getattr(value, each.name) for each in fields(value)})  # asdict would copy it
    return str(value)
