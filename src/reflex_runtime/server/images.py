"""Images as they come over the wire (base64 text, PNG or JPEG bytes, raw arrays) made into pixels.

Runs in a worker thread, never on the loop.
"""

from __future__ import annotations

import base64
import binascii

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.policies.observation import MAX_IMAGE_PIXELS, decode_image
from reflex_runtime.server.wire.act import ActFields, Array, Image, array_of, invalid, printable

PIECE = 1 << 20  # characters decoded at a time: nothing else runs meanwhile
Pixels = NDArray[np.uint8]


def images_of(fields: ActFields) -> dict[str, Pixels]:
    """Every image of a request as uint8 [h, w, 3], by name."""
    found: dict[str, Pixels] = {}
    if fields.image is not None:
        found["image"] = _pixels(fields.image, "image")
    if fields.image_wrist is not None:
        found["image_wrist"] = _pixels(fields.image_wrist, "image_wrist")
    for name, image in (fields.images or {}).items():
        if name in found:
            raise invalid("images", printable(f"images.{name}: given twice"))
        found[name] = _pixels(image, printable(f"images.{name}"))
    return found


def has_images(fields: ActFields) -> bool:
    """Whether there is anything to decode."""
    return fields.image is not None or fields.image_wrist is not None or bool(fields.images)


def _pixels(image: Image, field: str) -> Pixels:
    if isinstance(image, Array):
        return _raw(image, field)
    return decode_image(_from_base64(image, field) if isinstance(image, str) else image, field)


def _raw(image: Array, field: str) -> Pixels:
    pixels = array_of(image, field)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise invalid(field, f"{field}: must be uint8 [h, w, 3], is {pixels.dtype} {list(pixels.shape)}")
    if pixels.shape[0] * pixels.shape[1] > MAX_IMAGE_PIXELS:
        raise invalid(field, f"{field}: {pixels.shape[1]}x{pixels.shape[0]} pixels, at most 4096x4096 are accepted")
    return pixels


def _from_base64(text: str, field: str) -> bytes:
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise invalid(field, f"{field}: a data URL must be data:image/…;base64,…")
    if text.find("=", 0, len(text) - 2) >= 0:
        raise invalid(field, f"{field}: not base64: padding before its end")
    try:
        return b"".join(
            base64.b64decode(text[at : at + PIECE], validate=True) for at in range(0, len(text), PIECE)
        )
    except (binascii.Error, ValueError) as error:
        raise invalid(field, f"{field}: not base64: {error}") from None
