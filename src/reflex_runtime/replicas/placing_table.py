"""Which replica a caller is sent to: where its episode runs, else where its name hashes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from reflex_runtime.rendezvous import owner
from reflex_runtime.replicas.fair_table import Caller, FairTable

EPISODES = 10_000  # remembered: as many as a router has
LONGEST = 256  # characters of one: a replica refuses longer ones, but the front has not checked them
SETTLED = 3600.0  # seconds after which a replica counts as one that was always there: an episode idle as long is over


class ReplicaTable:
    """The front's table. Pure: times are given.

    An episode stays where it began while that replica lives. So one that joins takes over only what begins later.
    moved: episodes whose replica has left, and that none has answered since; the longest lost is first.
    """

    def __init__(self) -> None:
        self.live: dict[str, None] = {}
        self._runs = FairTable(EPISODES)  # episode → replica
        self.moved: OrderedDict[str, None] = OrderedDict()
        self._joined_at: float | None = None

    def began_with(self, names: Collection[str]) -> None:
        """The replicas that were there from the beginning."""
        self.live = dict.fromkeys(names)

    def join(self, name: str, now: float) -> None:
        if name not in self.live:
            self.live[name] = None
            self._joined_at = now

    def leave(self, name: str) -> list[str]:
        """It takes no more requests. Returns its episodes, which go on elsewhere."""
        self.live.pop(name, None)
        left = [episode for episode, runs in self._runs.items() if runs == name]
        for episode in left:
            self._runs.drop(episode)
            self.moved[episode] = None
            if len(self.moved) > EPISODES:
                self.moved.popitem(last=False)
        return left

    def settled(self, now: float) -> bool:
        """Whether every episode runs where its caller hashes to."""
        return self._joined_at is None or now - self._joined_at > SETTLED

    def place(self, identity: str, episode: str, caller: Caller) -> str | None:
        """The replica for a request; None while there is none. caller: whose episode it is."""
        found = self._runs.get(episode) if episode else None
        if found is not None:
            return found
        name = owner(identity, self.live)
        if name is not None and 0 < len(episode) <= LONGEST:
            self.runs(episode, name, caller)
        return name

    def runs(self, episode: str, name: str, caller: Caller) -> None:
        """The episode of this caller runs there."""
        if name not in self.live:
            return
        self.moved.pop(episode, None)
        self._runs.put(episode, name, caller)
