"""Controllers: what turns slowly learned quantities into another `FlushPolicy`.

A controller never decides a batch; it returns a policy value with other numbers in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Protocol

from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.rate import Rate
from reflex_runtime.core.request import Priority, Ticket
from reflex_runtime.core.select import TIER_WEIGHT

Affine = Callable[[], tuple[float, float, float]]


class Controller(Protocol):
    """Adapts a group's flush policy."""

    def arrived(self, ticket: Ticket, now: float) -> None:
        """A ticket was admitted."""

    def policy(self, base: FlushPolicy, affine: Affine, now: float) -> FlushPolicy:
        """The policy to use now. affine: asks for (fixed, marginal) seconds of the work at hand and their spread."""


class Planner:
    """Plans the batch length from the tightest deadlines and tiers in sight.

    Priority without a length limit is cosmetic on a device that cannot be interrupted. For a batch time T the device
    serves (T − a)/(b·T) requests a second, and a class with time limit D keeps the share of its arrivals that still has
    T left; classes are served in tier order. The effective budget is the largest T within 0.2 % of the best value. With
    one class it changes nothing: the window rule sizes itself.
    """

    PERIOD = 0.100  # seconds between plans
    CLASSES = 32  # (tier, time limit) classes followed

    def __init__(self) -> None:
        self._rates: dict[tuple[Priority, float], Rate] = {}
        self._next = -inf
        self._budget = inf

    def arrived(self, ticket: Ticket, now: float) -> None:
        limit = ticket.request.time_limit
        key = (ticket.request.priority, inf if limit is None else round(limit, 3))
        rate = self._rates.get(key)
        if rate is None:
            if len(self._rates) >= self.CLASSES:
                del self._rates[min(self._rates, key=lambda k: self._rates[k].value(now))]
            rate = self._rates[key] = Rate(1.0)
        rate.arrive(now)

    def policy(self, base: FlushPolicy, affine: Affine, now: float) -> FlushPolicy:
        if len(self._rates) < 2:
            return base
        if now >= self._next:
            self._next = now + self.PERIOD
            self._budget = self._plan(base.max_batch_cost, *affine(), now)
        return base if self._budget >= base.max_batch_cost else replace(base, max_batch_cost=self._budget)

    def _plan(self, budget: float, a: float, b: float, sigma: float, now: float) -> float:
        classes = sorted((tier, limit, r) for (tier, limit), rate in self._rates.items() if (r := rate.value(now)) > 1e-3)
        if len(classes) < 2 or min(limit for _, limit, _ in classes) == inf or b <= 0.0:
            return budget
        if budget <= a + b or budget == inf:
            return budget
        grid = [(a + b) * (budget / (a + b)) ** (i / 24.0) for i in range(25)]
        values = [self._value(classes, t, a, b, sigma) for t in grid]
        best = max(values)
        return max(t for t, v in zip(grid, values, strict=True) if v >= 0.998 * best)

    @staticmethod
    def _value(classes: list[tuple[Priority, float, float]], t: float, a: float, b: float, sigma: float) -> float:
        left, total = (t - a) / (b * t), 0.0
        for tier, limit, rate in classes:
            share = 1.0 if limit == inf else max(0.0, min(1.0, (limit - t * (1.0 + sigma)) / t))
            served = min(rate * share, left)
            left -= served
            total += TIER_WEIGHT[tier] * served
        return total
