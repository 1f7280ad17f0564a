"""One picture of a feed and what is known of it: the value that everything after the camera handles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A picture of one feed. Two frames are equal when they are the same object: comparing pixels is not for `==`.

    image: RGB, uint8 [height, width, 3]. Its size may differ from that of the frame before it.
    sequence: counts the feed's frames from 0; a reconnect goes on counting and repeats no number.
    pts: seconds in the stream's own time, None when it gave none. It may jump, and after a reconnect it may start over.
    captured: when the picture was read, in seconds of the monotonic clock. Ages and latencies count from here.
    file: its name in a directory of pictures.
    prepared: what the processor's `prepare` made of the image, if that was done when it was read.
    """

    image: NDArray[np.uint8]
    sequence: int
    pts: float | None
    captured: float
    prepared: Any = None
    file: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.image.shape[1], self.image.shape[0]
