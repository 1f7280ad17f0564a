"""Whom to send when deadlines are at risk: the set with the largest expected value.

Goodput is decided by whom to leave out, not by when to flush. For every slack threshold s among the candidates at risk,
and a few safety factors, fill a batch from those with at least that slack so that it ends in time, and score it

    E = Σ w · Φ(ln(slack ÷ T) ÷ σ) − κ · μ · T

its expected on-time value less the price of the device time it takes. The best one goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import erf, exp, inf, log

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


Fitter = Callable[[Sequence[Ticket], float], tuple[Sequence[Ticket], float]]
"""(candidates in order, limit in seconds) → those that fit, and the seconds they take together."""

_SURE = 4.0  # standard deviations beyond which an outcome is taken as certain


def value(ticket: Ticket) -> float:
    """What answering the ticket in time is worth."""
    return TIER_WEIGHT[ticket.tier] * ticket.request.weight


def at_risk(filled: Filled, now: float) -> bool:
    """Whether a member of the batch is likely to miss its deadline by it."""
    tightest = min((t.deadline for t in filled.grants), default=inf)
    return tightest - now < filled.tally.seconds * (1.0 + 2.0 * filled.tally.sigma)


def window(candidates: Sequence[Ticket], full: Filled, fit: Fitter, price: float, now: float) -> Sequence[Ticket]:
    """The members of the batch of largest expected value.

    candidates: in serving order, each able to make its deadline alone. full: the batch that ignores deadlines.
    """
    sigma = max(0.01, full.tally.sigma)
    risky = full.tally.seconds * (1.0 + 2.0 * sigma)
    slacks = sorted({slack for t in candidates if (slack := t.deadline - now) < risky})
    if len(slacks) > THRESHOLDS:
        slacks = [slacks[i * len(slacks) // THRESHOLDS] for i in range(THRESHOLDS)]
    values = {t: value(t) for t in candidates}
    best, top = candidates[:1], -inf  # whatever happens, the device does not idle
    for slack in (*slacks, risky):
        enough = [t for t in candidates if t.deadline - now >= slack]
        if not enough:
            break
        for factor in (1.0, 1.0 + sigma, 1.0 + 2.0 * sigma):
            chosen, seconds = fit(enough, slack / factor)
            cost = KAPPA * price * seconds
            if not chosen or sum([values[t] for t in chosen]) - cost <= top + 1e-9:
                continue  # even if all were in time it could not win
            score = expected_value(chosen, values, seconds, sigma, now) - cost
            if score > top + 1e-9:
                best, top = chosen, score
    return best


def expected_value(
    chosen: Sequence[Ticket], values: Mapping[Ticket, float], seconds: float, sigma: float, now: float
) -> float:
    """Σ w · P(in time) over the members of a batch that takes `seconds`."""
    surely, never = seconds * exp(_SURE * sigma), seconds * exp(-_SURE * sigma)
    total = 0.0
    for ticket in chosen:
        slack = ticket.deadline - now
        if slack >= surely:
            total += values[ticket]
        elif slack > never:
            total += values[ticket] * 0.5 * (1.0 + erf(log(slack / seconds) / sigma * 0.7071067811865476))
    return total


def price_of_time(rate: float, limit: float, fixed: float, marginal: float, weight: float) -> float:
    """μ: what one second of the device could earn elsewhere; 0 below the lossless rate (1 − 2a/D)/b.

    rate: arrivals per second. limit: D, the usual time limit in seconds. fixed, marginal: a and b in seconds.
    """
    if not 0.0 < limit < inf or marginal <= 0.0 or rate <= (1.0 - 2.0 * fixed / limit) / marginal:
        return 0.0
    n = max(1.0, rate * (limit - fixed) / (1.0 + rate * marginal))
    return weight * min(rate, n / (fixed + marginal * n))
