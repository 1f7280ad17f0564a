"""A pipe whose reader does not read."""

from __future__ import annotations

import os


def fill(writing: int) -> None:
    """Write into the pipe until it takes no byte more; the flags of `writing` itself stay."""
    filling = os.open(f"/proc/self/fd/{writing}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(filling, b"." * 4096)
    except BlockingIOError:
        os.close(filling)
