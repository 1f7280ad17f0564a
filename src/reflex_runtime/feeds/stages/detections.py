"""What stages ask of a result."""

from __future__ import annotations

from collections.abc import Mapping

from reflex_runtime.feeds.pipeline import Result


def has_boxes(result: Result) -> bool:
    """Whether a result has detections, perhaps none in this frame."""
    return isinstance(result.value, Mapping) and result.value.get("boxes") is not None
