"""Whom to send when deadlines are at risk: the set with the largest expected value.

Goodput is decided by whom to leave out, not by when to flush. For every slack threshold s among the candidates at risk,
and a few safety factors, fill a batch from those with at least that slack so that it ends in time, and score it

    E = Σ w · Φ(ln(slack ÷ T) ÷ σ) − κ · μ · T

its expected on-time value less the price of the device time it takes. The best one goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import erf, inf, log

from reflex_runtime.core.cost import Tally
from reflex_runtime.core.request import Priority, Ticket

TIER_WEIGHT = {Priority.URGENT: 100.0, Priority.DEFAULT: 10.0, Priority.BACKGROUND: 1.0}
KAPPA = 0.7
THRESHOLDS = 8  # slack thresholds tried


@dataclass(slots=True)
class Filled:
    """A filled batch: granted units in order, its tally, and whether something did not fit the budget or the size."""

    grants: dict[Ticket, float]
    tally: Tally
    passed_over: bool = False
    size_reached: bool = False


Filler = Callable[[Sequence[Ticket], float], Filled]  # (candidates in order, limit in seconds) → batch


def value(ticket: Ticket) -> float:
    """What answering the ticket in time is worth."""
    return TIER_WEIGHT[ticket.tier] * ticket.request.weight


def at_risk(filled: Filled, now: float) -> bool:
    """Whether a member of the batch is likely to miss its deadline by it."""
    tightest = min((t.deadline for t in filled.grants), default=inf)
    return tightest - now < filled.tally.seconds * (1.0 + 2.0 * filled.tally.sigma)


def window(candidates: Sequence[Ticket], full: Filled, fill: Filler, price: float, now: float) -> Filled:
    """The batch of largest expected value.

    candidates: in serving order, each able to make its deadline alone. full: the batch that ignores deadlines.
    """
    sigma = max(0.01, full.tally.sigma)
    risky = full.tally.seconds * (1.0 + 2.0 * sigma)
    slacks = sorted({t.deadline - now for t in candidates if t.deadline - now < risky})
    if len(slacks) > THRESHOLDS:
        slacks = [slacks[i * len(slacks) // THRESHOLDS] for i in range(THRESHOLDS)]
    best, top = fill(candidates[:1], inf), -inf  # whatever happens, the device does not idle
    for slack in (*slacks, risky):
        enough = [t for t in candidates if t.deadline - now >= slack]
        if not enough:
            break
        for factor in (1.0, 1.0 + sigma, 1.0 + 2.0 * sigma):
            filled = fill(enough, slack / factor)
            if not filled.grants:
                continue
            score = expected_value(filled, sigma, now) - KAPPA * price * filled.tally.seconds
            if score > top + 1e-9:
                best, top = filled, score
    return best


def expected_value(filled: Filled, sigma: float, now: float) -> float:
    """Σ w · P(in time) over the members."""
    seconds = max(1e-9, filled.tally.seconds)
    total = 0.0
    for ticket in filled.grants:
        slack = ticket.deadline - now
        if slack == inf:
            total += value(ticket)
        elif slack > 0.0:
            total += value(ticket) * _normal(log(slack / seconds) / sigma)
    return total


def price_of_time(rate: float, limit: float, fixed: float, marginal: float, weight: float) -> float:
    """μ: what one second of the device could earn elsewhere; 0 below the lossless rate (1 − 2a/D)/b.

    rate: arrivals per second. limit: D, the usual time limit in seconds. fixed, marginal: a and b in seconds.
    """
    if not 0.0 < limit < inf or marginal <= 0.0 or rate <= (1.0 - 2.0 * fixed / limit) / marginal:
        return 0.0
    n = max(1.0, rate * (limit - fixed) / (1.0 + rate * marginal))
    return weight * min(rate, n / (fixed + marginal * n))


def _normal(x: float) -> float:
    return 0.5 * (1.0 + erf(x * 0.7071067811865476))
