"""Keys and values of prefixes already computed, so that an unchanged scene is read once.

Blind reuse costs task success: a cache keyed by episode alone would answer a new picture with the old one's keys and
values. The key therefore holds what the prefix saw, by content; reuse across pictures is an explicit, bounded and
reported option (`max_age_chunks`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError

ENTRY_OVERHEAD = 1024  # bytes counted per entry beside its arrays, so that many tiny entries are bounded too


class PrefixKey(NamedTuple):
    """What a prefix may be shared under. Slot and episode keep versions and robots apart.

    instruction, content: digests of the text and of everything else the prefix sees.
    """

    slot: str
    episode: str
    instruction: bytes
    content: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Keys and values of one row, by tensor name, without a batch axis. Read only: requests share it."""

    tensors: Mapping[str, NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


class _Entry:
    __slots__ = ("nbytes", "prefix", "reused")

    def __init__(self, prefix: Prefix) -> None:
        self.prefix = prefix
        self.nbytes = prefix.nbytes + ENTRY_OVERHEAD
        self.reused = 0  # chunks answered with it for another picture


class PrefixCache:
    """Least recently used, bounded in bytes. Looked up on the event loop, filled on the device thread.

    max_bytes: of keys and values kept, plus 1 KiB an entry; what is larger than that alone is not kept. An entry that a
        request has claimed lives on in that request after its eviction.
    max_age_chunks: how many chunks one entry may serve for *other* pictures of the same episode and instruction
        ("hit_stale"); 0 allows none. Each such answer is as blind as the number says.
    """

    def __init__(self, max_bytes: int, max_age_chunks: int = 0) -> None:
        if not max_bytes >= 1:
            raise ConfigError(f"PrefixCache.max_bytes={max_bytes!r}: must be >= 1 bytes")
        if not max_age_chunks >= 0:
            raise ConfigError(f"PrefixCache.max_age_chunks={max_age_chunks!r}: must be >= 0 chunks")
        self.max_bytes, self.max_age_chunks = max_bytes, max_age_chunks
        self._lock = threading.Lock()
        self._entries: OrderedDict[PrefixKey, _Entry] = OrderedDict()
        self._newest: dict[tuple[str, str, bytes], PrefixKey] = {}  # of each (slot, episode, instruction)
        self._bytes = 0
        self.hits = self.stale_hits = self.misses = self.evictions = 0

    def lookup(self, key: PrefixKey) -> tuple[Literal["hit", "hit_stale", "miss"], Prefix | None]:
        """How the cache answers, and with what.

        Every look counts, also for a request that is refused afterwards; a stale hit uses up one chunk of the entry's
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
        entry = _Entry(prefix)
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
    import hashlib

    sha = hashlib.sha256()
    for array in arrays:
        sha.update(f"{array.dtype.str}{array.shape}".encode())
        sha.update(np.ascontiguousarray(array).data)
    return sha.digest()[:16]
