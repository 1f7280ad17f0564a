"""Whether an estimate may refuse requests: only while finished batches renew it.

Refused requests do not run, so nothing is measured, and a wrong estimate that refuses every request would never be
corrected. Therefore an estimate refuses only while a batch of its shape runs and for `RENEW` seconds after. Then one
request, the probe, is admitted against the estimate; others are refused until it has settled. If the probe is answered
in time, the estimate is wrong: the next request is admitted at once, until the cost model has learned. If the probe is
late, the refusal is renewed. So an idle device is tried at once, and one that is too slow once a second.

A class of requests may be refused while other classes of its shape run and renew the shape's estimates. It is probed
too, but then probes take device time from others: at most `SHARE` of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.request import WAITING, Ticket

RENEW = 1.0  # seconds
SHARE = 0.1  # of the device, for probes of a class beside others of its shape
MAX_KEYS = 1024  # shapes and classes kept; a forgotten one counts as renewed when it next refuses


class Evidence:
    """The latest batches of one group, which renew its estimates."""

    __slots__ = ("_flying", "_keys", "_renewed", "pending")

    def __init__(self) -> None:
        self._renewed: dict[
            Hashable, tuple[float, float]
        ] = {}  # when, and the seconds its batch took; by shape and key
        self._keys: dict[Batch, set[Hashable]] = {}  # of the batches in flight
        self._flying: dict[Hashable, int] = {}  # batches that are about to renew it, by shape and key
        self.pending: dict[Hashable, Ticket] = {}  # probes that have not settled, by key

    def refuses(self, ticket: Ticket, now: float) -> bool:
        """Whether to refuse the ticket because an estimate says that it cannot meet its deadline."""
        shape, key = ticket.request.shape, _key(ticket)
        probe = self.pending.get(key)
        if probe is not None:
            return probe is not ticket and not (probe.state is WAITING and _limit(ticket) > _limit(probe))
        of_shape, _ = self._since(shape, now)
        of_key, seconds = self._since(key, now)
        if shape not in self._flying and now - of_shape >= RENEW:
            return False
        return key in self._flying or now - of_key < max(RENEW, seconds / SHARE)

    def probe(self, ticket: Ticket) -> None:
        """Admit the ticket against the estimate, as a probe."""
        self.pending[_key(ticket)] = ticket

    def probes(self, ticket: Ticket) -> bool:
        """Whether the ticket is a probe."""
        return bool(self.pending) and self.pending.get(_key(ticket)) is ticket

    def scheduled(self, batch: Batch) -> None:
        keys = self._keys[batch] = _keys(batch)
        for key in keys:
            self._flying[key] = self._flying.get(key, 0) + 1

    def returned(self, batch: Batch, elapsed: float, now: float, clean: bool) -> None:
        """The batch came back. clean: without a fault."""
        for key in self._keys.pop(batch):
            self._flying[key] -= 1
            if not self._flying[key]:
                del self._flying[key]
            if clean:
                self._renew(key, now, elapsed)

    def settled(self, ticket: Ticket, answered: bool, now: float) -> None:
        key = _key(ticket)
        del self.pending[key]
        if answered and now <= ticket.deadline:
            self._renew(ticket.request.shape, -inf, 0.0)
            self._renew(key, -inf, 0.0)
        elif ticket.batches:  # also one that failed: the next is tried as late as after one that was late
            self._renew(key, now, ticket.shared)
            self._renew(ticket.request.shape, now, ticket.shared)

    def _since(self, key: Hashable, now: float) -> tuple[float, float]:
        found = self._renewed.get(key)
        if found is None:  # learned before anything was served: that is tried no later than the rest
            self._renew(key, now, 0.0)
            return now, 0.0
        return found

    def _renew(self, key: Hashable, now: float, seconds: float) -> None:
        if key not in self._renewed and len(self._renewed) >= MAX_KEYS:
            del self._renewed[next(iter(self._renewed))]
        self._renewed[key] = (now, seconds)


def _keys(batch: Batch) -> set[Hashable]:
    """The shapes of its members, and what has an estimate of its own."""
    kinds = {(request.shape, request.cost_class) for ticket in batch.grants if (request := ticket.request)}
    return kinds.union([shape for shape, _ in kinds])


def _key(ticket: Ticket) -> Hashable:
    return ticket.request.shape, ticket.request.cost_class


def _limit(ticket: Ticket) -> float:
    return inf if ticket.request.time_limit is None else ticket.request.time_limit
