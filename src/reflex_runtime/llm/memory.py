"""How many blocks of a cache fit into how much memory: asked before a model is loaded, and again where it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from reflex_runtime.core.errors import ConfigError

GIB: Final = 1 << 30
BLOCK_SIZES: Final = {"openvino": 32, "torch": 16}  # tokens, by runner; OpenVINO's kernels decide their own


def free_bytes(device: str = "cpu") -> int:
    """Memory that can be had on a device: of a machine without swapping, of a GPU as its driver tells."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def blocks_in(kv_cache_bytes: int, block_bytes: int, free: int, num_blocks: int | None = None) -> int:
    """How many blocks a cache has: `num_blocks`, or as many as there is room for.

    ConfigError, with the range, for less than one and for more than is free.
    """
    if num_blocks is None:
        if not block_bytes <= kv_cache_bytes <= free:
            why = f"must be in [{block_bytes}, {free}]: from one block of this model to the memory that is free"
            raise ConfigError(
                f"kv_cache_bytes={kv_cache_bytes}: {why}", field="kv_cache_bytes", low=block_bytes, high=free
            )
        return kv_cache_bytes // block_bytes
    if not 1 <= num_blocks <= free // block_bytes:
        why = f"{free / GIB:.1f} GiB are free, and a block takes {block_bytes} bytes"
        raise ConfigError(
            f"num_blocks={num_blocks}: must be in [1, {free // block_bytes}]: {why}", field="num_blocks"
        )
    return num_blocks
