"""The interface of runners: the flat batch of a step, the size of the cache, and a test of paging.

A step is one forward pass over several sequences, each with its own number of new tokens: those of prompts and of
outputs follow one another in one array, without padding. A block table for each sequence has the places of its keys and
values.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.run.process import CGROUP, container_memory

GIB: Final = 1 << 30
_MEMINFO: Final = Path("/proc/meminfo")
PROBE: Final = 24  # tokens of `probe`: they fit into one of OpenVINO's blocks
BLOCK_SIZES: Final = {"openvino": 32, "torch": 16}  # tokens, by runner; OpenVINO's kernels fix theirs


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over n sequences, t tokens and b blocks.

    token_ids, positions: [t], one sequence after the other. past_lens: [n], tokens of each that are in the cache.
    begins: [n + 1], where each one's tokens begin. blocks: [b], the block tables; block_begins: [n + 1], where each
    one's table begins. Position p of a sequence lies in row p % block_size of block p // block_size of its table; the
    table covers this step's tokens. adapters: [n], the number of each one's adapter, from 1 on, 0 for none; None: no
    sequence has one. rows: [r], ascending, indices of the step's tokens after which logits are needed; None: after the
    last token of each sequence.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    past_lens: npt.NDArray[np.int32]
    begins: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.int32]
    block_begins: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64] | None = None
    adapters: npt.NDArray[np.int32] | None = None

    @property
    def picked(self) -> npt.NDArray[np.int64]:
        """`rows`, or the last token of each sequence."""
        return self.begins[1:].astype(np.int64) - 1 if self.rows is None else self.rows

    @property
    def adapter_ids(self) -> npt.NDArray[np.int32]:
        """[t], the number of each token's adapter."""
        if self.adapters is None:
            return np.zeros(len(self.token_ids), np.int32)
        return np.repeat(self.adapters, np.diff(self.begins))


class Runner(Protocol):
    """A model and its key-value blocks.

    vocab_size: width of a row of logits. block_size: tokens that a block holds. num_blocks: how many blocks there are.
    max_model_len: most tokens of one sequence, prompt and output. name: for people ("openvino bf16"). adapters: names
    of LoRA adapters; the first has the number 1.
    """

    vocab_size: int
    block_size: int
    num_blocks: int
    max_model_len: int
    name: str
    adapters: tuple[str, ...]

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        """Logits [n, vocab_size] after the last token of each sequence, or [r, vocab_size] after the step's `rows`.

        Afterwards the step's keys and values are in its blocks. Called by one thread at a time; the next call may reuse
        the array. If it raises, the cache of earlier steps is untouched.
        """

    def close(self) -> None:
        """Free the model. No method is called afterwards."""


def free_bytes(device: str = "cpu", meminfo: Path = _MEMINFO, cgroup: Path = CGROUP) -> int:
    """Free memory of a device in bytes: of the machine without swapping, or of its container; of a GPU if "cuda"."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):
        lines = map(str.split, meminfo.read_text().splitlines())
        free = next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), free)
    container = container_memory(cgroup)
    return free if container is None else max(0, min(free, container[0] - container[1]))


def blocks_in(kv_cache_bytes: int, block_bytes: int, free: int, num_blocks: int | None = None) -> int:
    """Blocks of a cache: `num_blocks`, or as many as fit into kv_cache_bytes. Raises ConfigError with the range."""
    if num_blocks is None:
        if not block_bytes <= kv_cache_bytes <= free:
            why = f"must be in [{block_bytes}, {free}]: from one block of this model to the free memory"
            raise ConfigError(
                f"kv_cache_bytes={kv_cache_bytes}: {why}", field="kv_cache_bytes", low=block_bytes, high=free
            )
        return kv_cache_bytes // block_bytes
    if not 1 <= num_blocks <= free // block_bytes:
        why = f"{free / GIB:.1f} GiB are free, and a block takes {block_bytes} bytes"
        raise ConfigError(f"num_blocks={num_blocks}: must be in [1, {free // block_bytes}]: {why}", field="num_blocks")
    return num_blocks


def context_length(wanted: int | None, most: int) -> int:
    """Tokens of one sequence: `wanted`, or if that is None, `most`, the positions of the model. Raises ConfigError."""
    if wanted is not None and not 1 <= wanted <= most:
        why = f"must be at most {most}, the model's context" if wanted > most else "must be >= 1"
        raise ConfigError(f"max_model_len={wanted}: {why}", field="max_model_len")
    return wanted or most


def probe(vocab_size: int) -> npt.NDArray[np.int64]:
    """Tokens after which logits with and without paging are compared."""
    return np.arange(PROBE, dtype=np.int64) * 7 % vocab_size


def check_paging(runner: Runner, expected: npt.NDArray[np.float32], most: float, where: str, why: str = "") -> None:
    """Raise ConfigError if the logits after the tokens of `probe`, computed in two steps, differ from the expected ones
    by more than `most`, a share of their spread. where, why: the file, and the likely cause."""
    ids, width, zero = probe(runner.vocab_size), -(-PROBE // runner.block_size), np.zeros(1, np.int32)
    blocks, widths = np.arange(width, dtype=np.int32), np.array([0, width], np.int32)
    for past, end in ((0, PROBE // 2), (PROBE // 2, PROBE)):
        begins = np.array([0, end - past], np.int32)
        found = runner.forward(Step(ids[past:end], np.arange(past, end), zero + past, begins, blocks, widths))[0]
    off = float(np.abs(found - expected).max() / max(np.ptp(expected), 1e-9))
    if not off <= most:
        raise ConfigError(f"{where}: its logits change by {off:.0%} with paged attention, so it cannot be batched{why}")
