"""Which of two policies serves an episode: the same one from its first request to its last.

Only the key decides the slot, so the choice is the same in every process and after a restart. The key is the episode's
name, else the robot's, else the connection. When the split changes, a table keeps running episodes on their slot. One
answer reports a move (by a drain or a rollback).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.journal import episode_key
from reflex_runtime.robots.policy.episodes import Lru

BUCKETS: Final = 100


def bucket(key: str) -> int:
    """The bucket of a routing key, in [0, 100): SHA-256 of its UTF-8, first 8 bytes big-endian, modulo 100.

    Any text will do: a lone surrogate, which UTF-8 cannot encode, counts as the three bytes it would have.
    """
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS


@dataclass(slots=True)
class RunningEpisode:
    """An episode, or a robot or connection without one. moved: to another slot, which no answer has reported yet."""

    slot: str
    used: float
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Routing:
    """Where one request goes.

    slot: a or b; with one slot its name, and no other field is set. key: the hashed text. degraded: the next request
    may have another key, because this one names neither episode nor robot, and is the first of its connection or has
    none. cached: the slot is from the table of running episodes. changed: the other slot served the episode so far; the
    answer must report it, whatever its status. entry: the name of `episode` in the table, "" for none; robots that use
    the same name for an episode have one each. verdict: the breaker's at that time.
    """

    slot: str
    key: str = ""
    degraded: bool = False
    cached: bool = False
    changed: bool = False
    entry: str = field(default="", compare=False)
    episode: RunningEpisode | None = field(default=None, compare=False)
    verdict: str = "ok"


class Router:
    """Sends a share of the episodes to each of two slots. Pure: `now` is in seconds that never go back.

    split: percent of the keys that go to a, in [0, 100].
    episodes: most running episodes; the longest unused is forgotten. idle: seconds without a request after which an
        episode is forgotten. Then its key decides again.
    """

    def __init__(self, split: int, episodes: int = 10_000, idle: float = 3600.0) -> None:
        self.split = _checked(split)
        self._capacity, self._idle = episodes, idle
        self._table: Lru[str, RunningEpisode] = Lru(episodes)
        self._connections: Lru[str, RunningEpisode] = Lru(episodes)  # apart, so that they push no episode out

    def set_split(self, split: int) -> None:
        """Set the split for episodes that begin from now on. ConfigError outside [0, 100]."""
        self.split = _checked(split)

    def route(
        self,
        episode_id: str | None,
        request_id: str,
        now: float,
        robot_id: str | None = None,
        connection: Hashable = None,
    ) -> Routing:
        """The slot of a request. An empty episode_id counts as none. connection: a text or (address, port)."""
        self._forget(now)
        table = self._table
        if key := episode_id or robot_id or "":
            entry = episode_key(robot_id, episode_id) or f"{robot_id}\n"
        elif connection:
            key = ":".join(map(str, connection)) if isinstance(connection, tuple) else str(connection)
            entry, table = f"\n{key}", self._connections
        else:
            return Routing(self._slot_of(request_id), request_id, degraded=True)
        cached = entry in table
        episode = table.use(entry, lambda: RunningEpisode(self._slot_of(key), now))
        changed, episode.moved, episode.used = episode.moved, False, now
        new = table is self._connections and not cached
        return Routing(episode.slot, key, new, cached, changed, entry, episode)

    def move(self, routing: Routing, slot: str) -> Routing:
        """Move a request that was just routed to another slot, and its episode; `changed` if that began before."""
        if routing.slot == slot:
            return routing
        episode, changed = routing.episode, routing.changed
        if episode is not None:
            changed = changed or (routing.cached and episode.slot != slot)
            episode.slot = slot
        return replace(routing, slot=slot, changed=changed)

    def rollback(self, slot: str, now: float) -> list[str]:
        """Send all to `slot`, running episodes too; the next answer of each moved one reports it. Returns the moved
        episodes, whose state in the old slot the caller must drop."""
        self._forget(now)
        self.split = BUCKETS if slot == "a" else 0
        moved = []
        for table in (self._table, self._connections):
            for entry, episode in table.items():
                if episode.slot != slot:
                    episode.slot, episode.moved = slot, True
                    moved += [entry] if _is_episode(entry) else []
        return moved

    def __len__(self) -> int:
        """Episodes and robots remembered."""
        return len(self._table)

    def snapshot(self) -> dict[str, Any]:
        """JSON-safe: the split, and the number of episodes in each slot. O(episodes)."""
        slots = Counter(episode.slot for entry, episode in self._table.items() if _is_episode(entry))
        return {
            "split": self.split,
            "episodes": {"a": slots["a"], "b": slots["b"]},
            "max_episodes": self._capacity,
            "idle_s": self._idle,
        }

    def _slot_of(self, key: str) -> str:
        return "a" if bucket(key) < self.split else "b"

    def _forget(self, now: float) -> None:
        for table in (self._table, self._connections):
            while table and table[entry := next(iter(table))].used <= now - self._idle:
                del table[entry]


def _is_episode(entry: str) -> bool:
    """Whether an entry of the table is an episode's, not a robot's or a connection's."""
    return not entry.startswith("\n") and not entry.endswith("\n")


def _checked(split: int) -> int:
    if isinstance(split, bool) or not isinstance(split, int) or not 0 <= split <= BUCKETS:
        raise ConfigError(f"--split={split!r:.200}: must be a whole number in [0, {BUCKETS}]", field="split")
    return split
