"""Tenants: groups that take turns as one, and the order in which all take them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.group import Group, GroupConfig, Tenant


class Tenants:
    """The tenants of one scheduler. Turns go by device time over weight, the least served first."""

    def __init__(self) -> None:
        self._all: list[Tenant] = []

    def of(self, config: GroupConfig) -> Tenant:
        """The tenant of a group, made with its first group."""
        found = next((t for t in self._all if config.tenant and t.name == config.tenant), None)
        if found is None:
            found = Tenant(config.tenant, config.weight, len(self._all))
            self._all.append(found)
        if found.weight != config.weight:
            raise ConfigError(
                f"GroupConfig.weight={config.weight!r}: is {found.weight!r} in another group of tenant {found.name!r}"
            )
        return found

    @staticmethod
    def turns(groups: Iterable[Group], now: float, in_flight: Collection[Batch]) -> list[Group]:
        """Groups as they take turns: least device time over weight, of the tenant, then their own; weight 0 only when
        nothing else waits."""
        ready = [g for g in groups if g.active and g.paused_until <= now]
        if len(ready) > 1:
            if any(g.config.weight > 0.0 and _waits(g, in_flight) for g in ready):
                ready = [g for g in ready if g.config.weight > 0.0]
            ready.sort(key=lambda g: (g.tenant.device_time, g.tenant.number, g.device_time))
        return ready

    def lift(self, group: Group) -> None:
        """What becomes active gets no credit for its idle time, and no debt for having used an idle device."""
        tenant = group.tenant
        if len(self._all) > 1 and not tenant.active:
            _lift(tenant, [t for t in self._all if (t.weight > 0.0) == (tenant.weight > 0.0)])
        if len(tenant.groups) > 1:
            _lift(group, tenant.groups)


def _lift(one: Group | Tenant, peers: Sequence[Group | Tenant]) -> None:
    """Raise its device time to the least of its active peers; where none is active, to the largest of all."""
    busy = [peer.device_time for peer in peers if peer.active and peer is not one]
    one.device_time = max(one.device_time, min(busy) if busy else max(peer.device_time for peer in peers))


def _waits(group: Group, in_flight: Collection[Batch]) -> bool:
    """Whether the group has anything that does not run."""
    return group.unsettled > sum(len(batch) for batch in in_flight if batch.group == group.name)
