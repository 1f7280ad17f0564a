"""The ceiling: how much fits, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.flush import FlushPolicy

from .records import Seen

Members = Sequence[tuple[Seen, float]]


class Units:
    """Every member costs 1."""

    in_seconds = False

    def room(self, base: Members, members: Members, ticket: Seen, budget: float) -> float:
        n = len(base) + len(members)
        return 1.0 if n == 0 or n + 1 <= budget else 0.0

    def cost(self, base: Members, members: Members, budget: float) -> float:
        return float(len(base) + len(members))

    def dearest(self, base: Members, members: Members, budget: float) -> float:
        return 1.0 if base or members else 0.0

    def seconds(self, members: Members, budget: float) -> tuple[float, float]:
        return 0.0, 0.0

    def shared(self, rows: int, least: int) -> float:
        """The most members of a step that clients share; inf where its time is not known."""
        return inf

    def charge(self, ticket: Seen, units: float) -> float:
        return 1.0

    def fixed(self, ticket: Seen) -> float:
        return 0.0

    def remaining(self, ticket: Seen) -> float:
        return 0.0

    def share(self, ticket: Seen, flush: FlushPolicy) -> float:
        return 0.0

    def spread(self, members: Members) -> float:
        """Relative spread of predicted times."""
        return 0.0

    def line(self, ticket: Seen) -> tuple[float | None, float]:
        """Fixed and marginal seconds of batches of such tickets; no fixed ones until they can be told apart."""
        return 0.0, 0.0

    def learn(self, members: Members, stage: str, elapsed: float) -> None:
        pass

    def ended(self, ticket: Seen) -> None:
        pass


class Tokens(Units):
    """A member costs what it is granted, which is what it wants as far as that is left."""

    def __init__(self, threshold: float = inf, free: float = inf) -> None:
        self.threshold, self.free = threshold, free

    def shared(self, rows: int, least: int) -> float:
        return max(2 * rows + self.free, least)

    def room(self, base: Members, members: Members, ticket: Seen, budget: float) -> float:
        return max(0.0, min(ticket.wants, budget - self.cost(base, members, budget), self.threshold))

    def cost(self, base: Members, members: Members, budget: float) -> float:
        return sum(units for _, units in [*base, *members])

    def dearest(self, base: Members, members: Members, budget: float) -> float:
        return max((units for _, units in [*base, *members]), default=0.0)

    def charge(self, ticket: Seen, units: float) -> float:
        return units


@dataclass
class _Batch:
    grants: dict[Seen, float]
    stage: str

    def __len__(self) -> int:
        return len(self.grants)


class Seconds(Units):
    """Learned time, by the real cost model: another instance of it, that sees only what the oracle did."""

    in_seconds = True

    def __init__(self, **config: Any) -> None:
        self.model = TimeCost(**config)

    def _tally(self, base: Members, members: Members, budget: float) -> Any:
        tally = self.model.tally()
        for ticket, units in base:
            tally.add(ticket, units)  # type: ignore[arg-type]
        for ticket, units in members:
            tally.offer(ticket, budget)  # type: ignore[arg-type]
            tally.add(ticket, units)  # type: ignore[arg-type]
        return tally

    def room(self, base: Members, members: Members, ticket: Seen, budget: float) -> float:
        return float(self._tally(base, members, budget).offer(ticket, budget))

    def cost(self, base: Members, members: Members, budget: float) -> float:
        return float(self._tally(base, members, budget).cost)

    def dearest(self, base: Members, members: Members, budget: float) -> float:
        return float(self._tally(base, members, budget).dearest)

    def seconds(self, members: Members, budget: float) -> tuple[float, float]:
        tally = self._tally([], members, budget)
        return tally.seconds, tally.sigma

    def spread(self, members: Members) -> float:
        return float(self._tally(members, [], inf).sigma)

    def line(self, ticket: Seen) -> tuple[float | None, float]:
        (one, _), (two, _) = (self.seconds([(ticket, 1.0)] * n, inf) for n in (1, 2))
        fixed = max(0.0, one - max(0.0, two - one))
        return (fixed if self.model.told_apart(ticket) else None), max(0.0, two - one)  # type: ignore[arg-type]

    def charge(self, ticket: Seen, units: float) -> float:
        return self.model.marginal(ticket, units)  # type: ignore[arg-type]

    def fixed(self, ticket: Seen) -> float:
        return self.model.fixed(ticket)  # type: ignore[arg-type]

    def remaining(self, ticket: Seen) -> float:
        return self.model.remaining(ticket)  # type: ignore[arg-type]

    def share(self, ticket: Seen, flush: FlushPolicy) -> float:
        return self.model.share(ticket, flush.max_batch_cost, flush.max_batch_size)  # type: ignore[arg-type]

    def learn(self, members: Members, stage: str, elapsed: float) -> None:
        self.model.observe(_Batch(dict(members), stage), elapsed)  # type: ignore[arg-type]

    def ended(self, ticket: Seen) -> None:
        self.model.settled((ticket,))  # type: ignore[arg-type]
