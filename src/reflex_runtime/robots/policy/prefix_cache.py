"""The cache of computed prefixes, so that the model reads an unchanged scene only once.

A cache keyed only by episode would use the old picture's prefix for a new picture, and the policy would fail
more often. Therefore the key contains a digest of the prefix's whole input. Reuse across pictures is an explicit,
bounded and reported option (`max_age_chunks`).
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

ENTRY_OVERHEAD = 1024  # bytes counted per entry beside its prefix, so that many tiny entries are bounded too


class PrefixKey(NamedTuple):
    """The key of a prefix. Slot and episode keep versions and robots apart.

    instruction, content: digests of the text and of all other inputs of the prefix.
    """

    slot: str
    episode: str
    instruction: bytes
    content: bytes


class Prefix(Protocol):
    """What a model's prefix stage made of one request: opaque, read only (requests share it), where the model keeps it.

    nbytes: memory it takes there.
    """

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTensors:
    """A prefix of arrays or tensors by name."""

    tensors: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(slots=True)
class _Entry:
    prefix: Prefix
    nbytes: int
    reused: int = 0  # chunks answered with it for another picture


class PrefixCache:
    """Least recently used, bounded in bytes. Looked up on the event loop, filled on the device thread.

    max_bytes: limit for prefixes, plus 1 KiB an entry; a larger entry is not kept. A request that has found an
        entry keeps it after its eviction.
    max_age_chunks: number of chunks for which an entry may serve *other* pictures of the same episode and instruction
        ("hit_stale"); 0 allows none. The policy does not see the pictures of those chunks.
    """

    def __init__(self, max_bytes: int, max_age_chunks: int = 0) -> None:
        self.max_bytes, self.max_age_chunks = max_bytes, max_age_chunks
        self._lock = threading.Lock()
        self._entries: OrderedDict[PrefixKey, _Entry] = OrderedDict()
        self._newest: dict[tuple[str, str, bytes], PrefixKey] = {}  # of each (slot, episode, instruction)
        self._bytes = 0
        self.hits = self.stale_hits = self.misses = self.evictions = 0

    def lookup(self, key: PrefixKey) -> tuple[Literal["hit", "hit_stale", "miss"], Prefix | None]:
        """The cache's result and the entry.

        Every look-up counts, also for a request that is refused afterwards. A stale hit uses one chunk of the entry's
        allowance.
        """
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
                self.hits += 1
                return "hit", found.prefix
            newest = self._newest.get(key[:3])
            entry = None if newest is None else self._entries[newest]
            if newest is not None and entry is not None and entry.reused < self.max_age_chunks:
                entry.reused += 1
                self._entries.move_to_end(newest)
                self.stale_hits += 1
                return "hit_stale", entry.prefix
            self.misses += 1
            return "miss", None

    def insert(self, key: PrefixKey, prefix: Prefix) -> None:
        """Keep a prefix; it replaces what was kept under the key."""
        entry = _Entry(prefix, prefix.nbytes + ENTRY_OVERHEAD)
        if entry.nbytes > self.max_bytes:
            return
        with self._lock:
            self._remove(key)
            self._entries[key] = entry
            self._newest[key[:3]] = key
            self._bytes += entry.nbytes
            while self._bytes > self.max_bytes:
                self._remove(next(iter(self._entries)))
                self.evictions += 1

    def forget(self, slot: str, episode: str) -> None:
        """Drop everything kept for an episode."""
        with self._lock:
            for key in [k for k in self._entries if k.slot == slot and k.episode == episode]:
                self._remove(key)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return {
                "entries": len(self._entries),
                "bytes": self._bytes,
                "max_bytes": self.max_bytes,
                "max_age_chunks": self.max_age_chunks,
                "hits": self.hits,
                "stale_hits": self.stale_hits,
                "misses": self.misses,
                "evictions": self.evictions,
            }

    def _remove(self, key: PrefixKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._bytes -= entry.nbytes
        if self._newest.get(key[:3]) == key:
            del self._newest[key[:3]]


def digest(*arrays: NDArray[Any]) -> bytes:
    """16 bytes of SHA-256 over shapes and contents, in order."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(f"{array.dtype.str}{array.shape}".encode())
        sha.update(np.ascontiguousarray(array).data)
    return sha.digest()[:16]
