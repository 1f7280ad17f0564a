"""How a serving process uses memory: when Python collects, and what the C library keeps of what was freed.

By default glibc has a pool of memory for each thread, and once arrays of some megabytes have been freed it gives little
back. Pictures are decoded on several threads and batches filled on two, so every pool grew to its own peak, one after
the other for ten minutes: a server of 245 MB used 120 MB of them for nothing.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

LARGE: Final = 16 * 2**20
"""Bytes: a larger array has memory of its own, which goes back when it is freed. Its fresh pages cost 1 ms per 20 MB;
for batches of 32 pictures they would cost more than the copying."""
KEPT: Final = 2 * LARGE  # bytes at the end of the pool that may stay unused

_MALLOC: Final = ((-8, 1), (-3, LARGE), (-1, KEPT))  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h


def prepare_memory(environ: Mapping[str, str] = os.environ, load: Callable[[None], Any] = ctypes.CDLL) -> None:
    """Set up this process to serve. Call it before threads start: those that run keep their pools.

    Settings of malloc in the environment stay as they are. Without glibc only Python's collector is set.
    """
    gc.set_threshold(50_000, 20, 100)  # requests make few cycles; a young collection each 700 objects is pure tail
    if any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(load(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOC:
            mallopt(parameter, value)


def freeze_loaded() -> None:
    """Collect now, and never look again at the objects that are there: what is loaded stays."""
    gc.collect()
    gc.freeze()
