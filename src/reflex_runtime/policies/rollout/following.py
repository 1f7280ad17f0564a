"""The rollout of one of several replicas: it places requests, and reports to the process that decides for all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from reflex_runtime.policies.rollout.rollout import EPISODES, Placement, Rollout


class RolloutReports(Protocol):
    """Where the reports go. policy: the name of theirs."""

    def placed(self, policy: str, episode: str, slot: str, client: Hashable, robot: str | None) -> None:
        """The first request of an episode in a slot, and whose it is; see `Rollout.place`."""

    def crashed(self, policy: str, slot: str, poison: float) -> None: ...
    def computed(self, policy: str, slot: str) -> None: ...
    def answered(self, policy: str, slot: str, outcome: str, latency: float) -> None: ...
    def probes(self, policy: str, slot: str, key: str) -> None:
        """A request with this key is served as the probe of a drained slot."""

    def outcome(self, policy: str, episode: str, success: bool) -> None:
        """How an episode ended, told on a wire of this process."""


class RolloutOrders(msgspec.Struct):
    """What the process that decides tells of one policy.

    split: percent of new episodes for a; None with one slot. rollbacks: how often everything went to a so far. opened:
    drained slots, and why. probes: those of them that this replica may probe once. watched: slots whose every answer it
    reports.
    """

    split: int | None = None
    rollbacks: int = 0
    opened: dict[str, str] = {}
    probes: list[str] = []
    watched: list[str] = []


class FollowingRollout(Rollout):
    """A `Rollout` that decides nothing: no breaker, ramp or guard of its own.

    Versions stay the same for an episode, because the slot of a new one is a hash of its id in every process, and
    because an episode stays with its replica.
    """

    def __init__(self, reports: RolloutReports, policy: str, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._reports, self._policy = reports, policy
        self._rollbacks = 0
        self._watched_slots: frozenset[str] = frozenset()
        self._arriving: OrderedDict[str, None] = OrderedDict()  # episodes that may come from a lost replica
        self._whose: tuple[Hashable, str | None] = (None, None)  # the request that is being placed

    def begin(self, now: float) -> None:
        """Nothing: the ramp is elsewhere."""

    def place(
        self,
        episode_id: str | None,
        request_id: str,
        now: float,
        client: Hashable = None,
        robot: str | None = None,
    ) -> Placement:
        self._whose = client, robot
        before = dict(self.breaker.probes) if self.breaker.opened else {}
        try:
            placement = super().place(episode_id, request_id, now)
            if episode_id and episode_id in self._arriving:
                del self._arriving[episode_id]
                return replace(placement, arrived=episode_id)
            return placement
        finally:
            if self.breaker.opened:
                for slot, key in self.breaker.probes.items():
                    if before.get(slot) != key:
                        self._reports.probes(self._policy, slot, key)

    def arrives(self, episode: str) -> None:
        """The replica of this episode has left. If it goes on here, its first answer says that it was moved."""
        self._arriving[episode] = None
        self._arriving.move_to_end(episode)
        if len(self._arriving) > EPISODES:
            self._arriving.popitem(last=False)

    def untold(self, placement: Placement) -> None:
        if placement.arrived:
            self.arrives(placement.arrived)
        super().untold(placement)

    def _remember(self, episode: str, slot: str) -> None:
        known = self._episodes.get(episode)
        if known is None or (slot, self._policies[slot]) not in known:
            self._reports.placed(self._policy, episode, slot, *self._whose)
        super()._remember(episode, slot)

    def crashed(self, slot: str, now: float, poison: float = 0.0) -> None:
        if slot in self.slots:
            self._reports.crashed(self._policy, slot, poison)

    def computed(self, slot: str, now: float) -> None:
        if slot in self.slots:
            self._reports.computed(self._policy, slot)

    def answered(self, slot: str, outcome: str, latency: float) -> None:
        if slot in self._watched_slots:
            self._reports.answered(self._policy, slot, outcome, latency)

    def outcome(self, episode_id: str, success: bool) -> dict[str, Any]:
        """Report it. What is returned is what this replica knows of the episode."""
        told = super().outcome(episode_id, success)
        if not told["repeated"]:
            self._reports.outcome(self._policy, episode_id, success)
        return told

    def evaluate(self, now: float) -> list[str]:
        """Nothing: guards are elsewhere."""
        return []

    def obey(self, orders: RolloutOrders, now: float) -> None:
        """Do what was decided for all replicas."""
        self.breaker.follow(orders.opened, orders.probes, now)
        self._watched_slots = frozenset(orders.watched)
        if self.router is None or orders.split is None:
            return
        if orders.rollbacks > self._rollbacks:
            self._rollbacks = orders.rollbacks
            self._on_moved(self.router.rollback("a", now))
        if orders.split != self.router.split:
            self._set_split(orders.split)


def orders_of(rollout: Rollout, rollbacks: int, probes: Sequence[str]) -> RolloutOrders:
    """What a replica is told of a rollout. probes: slots that it may probe."""
    return RolloutOrders(
        split=None if rollout.router is None else rollout.router.split,
        rollbacks=rollbacks,
        opened=rollout.breaker.opened,
        probes=list(probes),
        watched=rollout.watched,
    )

