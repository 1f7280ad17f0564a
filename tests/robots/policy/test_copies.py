"""How many times the pixels of a picture are copied on the way to the model: decoded, then into its batch's row."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import simplejpeg

from reflex_runtime.robots.policy.base import stacked
from reflex_runtime.robots.policy.observation import decode_image

SIDE = 512
PIXELS = SIDE * SIDE * 3


def _allocated(call: Callable[[], object]) -> float:
    """The peak of memory that it allocates, in pictures."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / PIXELS
    finally:
        tracemalloc.stop()


def test_a_jpeg_is_decoded_into_one_array_and_copied_once_into_its_batch() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    data = simplejpeg.encode_jpeg(noise, quality=50)
    picture = decode_image(data, size=(SIDE, SIDE))
    assert 1.0 <= _allocated(lambda: decode_image(data, size=(SIDE, SIDE))) < 1.1
    assert 4.0 <= _allocated(lambda: stacked([picture] * 4)) < 4.1
