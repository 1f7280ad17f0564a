"""State of an episode between its requests: its last chunk and its prefixes.

Real-time chunking: the new chunk is anchored, at every denoise step, to the part of the episode's last chunk that the
robot has not executed yet. The first actions of that part, which the robot executes while the new chunk is computed,
are frozen; the weight then falls along a schedule up to the horizon (after Black et al., "Real-Time Execution of Action
Chunking Flow Policies", 2025; here by in-painting along the flow, as an exported graph has no gradient for guidance).

An episode belongs to one policy in one slot: on another robot or version the rest of its chunk would be a jump.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, expm1
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

K = TypeVar("K")
V = TypeVar("V")
EPISODES: Final = 4096  # that are kept for one slot


class Lru(OrderedDict[K, V]):
    """A table of at most `most` entries. Beyond them the least recently set or `use`d value goes, to `forgotten`."""

    def __init__(self, most: int, forgotten: Callable[[V], object] = lambda value: None) -> None:
        super().__init__()
        self._most, self._forgotten = most, forgotten

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self._forgotten(self.popitem(last=False)[1])

    def use(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made if missing; it is then the most recently used."""
        value = self.get(key)
        if value is None:
            value = make()
        self[key] = value
        return value


# -- the last chunk ----------------------------------------------------------------------------------------------------

Schedule = Literal["ZEROS", "ONES", "LINEAR", "EXP"]


@dataclass(frozen=True, slots=True)
class Rtc:
    """How chunks are joined.

    horizon: actions of the new chunk that the old one may change, >= 1. schedule: how the weight of the old chunk falls
    after the frozen actions: ZEROS at once, ONES not before the horizon, LINEAR, EXP (faster at first).
    """

    schedule: Schedule = "LINEAR"
    horizon: int = 10

    def weights(self, frozen: int, overlap: int, chunk_size: int) -> NDArray[np.float32]:
        """Weight of the old chunk at each place of the new one, float32 [chunk_size, 1], never rising.

        frozen: actions executed before the new chunk arrives. overlap: actions left of the old chunk; beyond them or
        the horizon the weight is 0.
        """
        end = min(self.horizon, overlap, chunk_size)
        start = min(frozen, end)
        weights = np.zeros((chunk_size, 1), np.float32)
        weights[:start] = 1.0
        fall = np.linspace(1.0, 0.0, end - start + 2, dtype=np.float32)[1:-1, None]
        if self.schedule == "ONES":
            fall = np.ones_like(fall)
        elif self.schedule == "ZEROS":
            fall = np.zeros_like(fall)
        elif self.schedule == "EXP":
            fall = fall * np.expm1(fall) / np.float32(expm1(1.0))
        weights[start:end] = fall
        return weights


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """Old actions that pull a new chunk towards them. In the model's units; arrays are read only.

    target: float32 [chunk_size, x_dim], the old chunk moved to the new one's places. weights: as `Rtc.weights`.
    state: the robot's state at the old observation, in its units; None if the policy reads none.
    report: for the answer, JSON-safe.
    """

    target: NDArray[np.float32]
    weights: NDArray[np.float32]
    report: dict[str, Any]
    state: NDArray[np.float32] | None = None

    def pull(self, x: NDArray[np.float32], noise: NDArray[np.float32], time: float) -> NDArray[np.float32]:
        """x at flow time `time` (0 noise, 1 action), drawn by the weights to the straight path from noise to target."""
        path = np.float32(1.0 - time) * noise + np.float32(time) * self.target
        return self.weights * path + (np.float32(1.0) - self.weights) * x  # exact where the weight is 0 or 1


@dataclass(slots=True)
class _Tail:
    actions: NDArray[np.float32]
    answered: float
    latency: float
    state: NDArray[np.float32] | None


class ChunkTails:
    """The last chunk of each episode of one slot, for at most `episodes`. Read on the event loop, written on the device
    thread.

    control_hz: actions that the robot executes a second. If None, only a request with `executed` continues a chunk, and
    actions are frozen only by its `delay`.
    """

    def __init__(
        self, rtc: Rtc, clock: Callable[[], float], control_hz: float | None = None, episodes: int = EPISODES
    ) -> None:
        self.rtc, self.control_hz = rtc, control_hz
        self._clock = clock
        self._lock = threading.Lock()
        self._tails: Lru[str, _Tail] = Lru(episodes)

    def __len__(self) -> int:
        return len(self._tails)

    def remember(
        self, episode: str, actions: NDArray[np.float32], latency: float, state: NDArray[np.float32] | None = None
    ) -> None:
        """Keep the episode's newest chunk, if it is finite. actions: float32 [chunk_size, x_dim].

        latency: seconds from its request's arrival to its end, the estimate for the next one. state: as in `Anchor`.
        """
        if not episode or not np.isfinite(actions).all():
            return
        with self._lock:
            self._tails[episode] = _Tail(actions, self._clock(), latency, state)

    def forget(self, episode: str | None = None) -> None:
        """Forget the chunk of an episode, or of all."""
        with self._lock:
            for one in list(self._tails) if episode is None else (episode,):
                self._tails.pop(one, None)

    def anchor(
        self, episode: str, executed: int | None, delay: int | None = None, received: float | None = None
    ) -> Anchor | None:
        """The anchor for the episode's next chunk; None if it has no last chunk, or all of it was executed.

        executed: actions of the last chunk that were executed before this observation; by default as many as fit
        between the last answer and `received` (None: now), for a robot that never stands still. delay: actions that are
        executed until the new chunk arrives; by default as many as fit into the time that the last chunk took. Without
        a control rate there is no anchor by default, and the default delay is 0.
        """
        with self._lock:
            tail = self._tails.get(episode)
        if tail is None:
            return None
        rate, size = self.control_hz, len(tail.actions)
        if executed is None:
            if rate is None:
                return None
            at = self._clock() if received is None else received
            executed = max(0, int((at - tail.answered) * rate))
        overlap = size - executed
        if overlap <= 0:
            return None
        if delay is None:
            delay = max(0, ceil(tail.latency * rate)) if rate else 0
        target = np.zeros_like(tail.actions)
        target[:overlap] = tail.actions[executed:]
        weights = self.rtc.weights(delay, overlap, size)
        report = {
            "executed": executed,
            "overlap": overlap,
            "frozen": int((weights == 1.0).sum()) if self.rtc.schedule != "ONES" else min(delay, overlap),
            "delay": delay,
            "delay_ms": round(tail.latency * 1e3, 3),
            "horizon": self.rtc.horizon,
            "schedule": self.rtc.schedule,
        }
        return Anchor(target, weights, report, tail.state)


# -- the prefix --------------------------------------------------------------------------------------------------------
#
# A cache keyed only by episode would use the old picture's prefix for a new picture, and the policy would fail more
# often. So the key contains a digest of all inputs of the prefix. Reuse across pictures is an explicit, bounded and
# reported option (`max_age_chunks`).

ENTRY_OVERHEAD: Final = 1024  # bytes that an entry counts besides its prefix, to bound the number of tiny entries


class PrefixKey(NamedTuple):
    """instruction, content: digests of the text and of all other inputs of the prefix. With slot and episode, versions
    and robots share no entry."""

    slot: str
    episode: str
    instruction: bytes
    content: bytes


class Prefix(Protocol):
    """The result of a model's prefix stage: opaque, and read only, because requests share it."""

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
    """Keeps the most recently used prefixes, bounded in bytes. Read on the event loop, filled on the device thread.

    max_bytes: of prefixes, plus 1 KiB an entry; a larger entry is not kept.
    max_age_chunks: chunks for which an entry may serve *other* pictures of the same episode and instruction
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
        """The cache's result, and the prefix found. Every look-up is counted, also that of a refused request."""
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
