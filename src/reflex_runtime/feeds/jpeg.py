"""A result as a picture for people: its frame, smaller, with what was found drawn on it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from reflex_runtime.feeds.outputs.annotated import annotated
from reflex_runtime.feeds.runtime.pipeline import Result


@dataclass(frozen=True, slots=True)
class PictureSize:
    """longest: pixels of the longer side at most. every: seconds between two of a feed. drawn: fields of a result."""

    suffix: str
    longest: int
    every: float
    quality: int
    drawn: tuple[str, ...]


def jpeg_of(result: Result, size: PictureSize) -> bytes:
    """A result's frame as JPEG, with its boxes drawn. Smaller by a whole number, so that little is read of it: rows are
    left out, pixels of a row averaged."""
    image = result.frame.image
    by = max(1, -(-max(image.shape[:2]) // size.longest))
    picture = np.asarray(Image.fromarray(image[::by]).reduce((by, 1)))
    picture = annotated(picture, _smaller(result.value, by, size.drawn))
    picture = np.ascontiguousarray(picture)
    encoded: bytes = simplejpeg.encode_jpeg(picture, size.quality, colorspace="RGB", colorsubsampling="420")
    return encoded


def _smaller(value: Any, by: int, drawn: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a result that are drawn, in pixels of the smaller picture. What has another form is left out."""
    if not isinstance(value, Mapping):
        return {}
    found = {name: value[name] for name in drawn if name in value}
    with suppress(TypeError, ValueError):
        found["boxes"] = np.asarray(value.get("boxes"), dtype=np.float64) / by
    with suppress(TypeError, ValueError):
        found["polygons"] = np.asarray(value.get("polygons"), dtype=np.float64) / by
    with suppress(TypeError, ValueError, IndexError):
        points = np.asarray(value.get("keypoints"), dtype=np.float64)
        points[..., :2] /= by
        found["keypoints"] = points
    with suppress(TypeError, ValueError, KeyError):
        masks = found.pop("masks", ())
        found["masks"] = [{**mask, "box": [float(v) / by for v in mask["box"]]} for mask in masks]
    return found
