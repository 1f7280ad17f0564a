"""Which tickets to send when deadlines are at risk: the set with the largest expected value.

Goodput depends on which tickets are left out, not on when a batch is sent. For every slack threshold s among the
candidates at risk, and a few safety factors, fill a batch from those with at least that slack so that it ends in time,
and score it

    E = Σ w · Φ(ln(slack ÷ T) ÷ σ) − κ · μ · T

its expected on-time value less the price of its device time. The best one is sent.
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
    """A filled batch: granted units in order, its tally, and whether something did not fit the budget.

    places: how many may enter.
    apart: whether its member runs alone because the client's last request failed alone.
    short_of: the limit that ended the fill; if it saw the whole queue, the limit that kept out the first one skipped.
    """

    grants: dict[Ticket, float]
    tally: Tally
    passed_over: bool = False
    short_of: str = ""
    apart: bool = False
    places: int = 0

    @property
    def size_reached(self) -> bool:
        """Whether as many entered as may."""
        return len(self.grants) >= self.places


Fitter = Callable[[Sequence[Ticket], float], tuple[Sequence[Ticket], float]]
"""(candidates in order, limit in seconds) → those that fit, and the seconds they take together."""

_SURE = 4.0  # standard deviations beyond which an outcome is taken as certain


def value(ticket: Ticket) -> float:
    """What answering the ticket in time is worth."""
    return TIER_WEIGHT[ticket.tier] * ticket.request.weight


def at_risk(filled: Filled, now: float) -> bool:
    """Whether a member of the batch is likely to miss its deadline by it."""
    tightest = min([t.deadline for t in filled.grants], default=inf)
    return tightest - now < filled.tally.seconds * (1.0 + 2.0 * filled.tally.sigma)


def window(candidates: Sequence[Ticket], full: Filled, fit: Fitter, price: float, now: float) -> Sequence[Ticket]:
    """The members of the batch of largest expected value.

    candidates: in serving order, each able to make its deadline alone. full: the batch that ignores deadlines.
    """
    sigma = max(0.01, full.tally.sigma)
    risky = full.tally.seconds * (1.0 + 2.0 * sigma)
    slacks = {t: t.deadline - now for t in candidates}
    thresholds = sorted({slack for slack in slacks.values() if slack < risky})
    if len(thresholds) > THRESHOLDS:
        thresholds = [thresholds[i * len(thresholds) // THRESHOLDS] for i in range(THRESHOLDS)]
    values = {t: TIER_WEIGHT[t.tier] * t.request.weight for t in candidates}  # `value`, without a call for each
    dearest = max(values.values())
    alike = min(values.values()) == dearest
    best, top = candidates[:1], -inf  # in any case the device does not idle
    enough = candidates
    for slack in (*thresholds, risky):
        enough = [t for t in enough if slacks[t] >= slack]
        if not enough or len(enough) * dearest <= top:
            break  # smaller sets cannot win either
        for factor in (1.0, 1.0 + sigma, 1.0 + 2.0 * sigma):
            chosen, seconds = fit(enough, slack / factor)
            cost = KAPPA * price * seconds
            most = len(chosen) * dearest if alike else sum([values[t] for t in chosen])
            if not chosen or most - cost <= top + 1e-9:
                continue  # even if all were in time it could not win
            score = most - expected_loss(chosen, values, slacks, seconds, sigma) - cost
            if score > top + 1e-9:
                best, top = chosen, score
    return best


def expected_loss(
    chosen: Sequence[Ticket],
    values: Mapping[Ticket, float],
    slacks: Mapping[Ticket, float],
    seconds: float,
    sigma: float,
) -> float:
    """Σ w · P(late) over the members of a batch that takes `seconds`; each member's slack is at least that."""
    surely, scale = seconds * exp(_SURE * sigma), 0.7071067811865476 / sigma
    unsure = [t for t in chosen if slacks[t] < surely]
    return 0.5 * sum([values[t] * (1.0 - erf(log(slacks[t] / seconds) * scale)) for t in unsure])


def price_of_time(rate: float, limit: float, fixed: float, marginal: float, weight: float) -> float:
    """μ: what one second of the device could earn elsewhere; 0 below the lossless rate (1 − 2a/D)/b.

    rate: arrivals per second. limit: D, the usual time limit in seconds. fixed, marginal: a and b in seconds.
    """
    if not 0.0 < limit < inf or marginal <= 0.0 or rate <= (1.0 - 2.0 * fixed / limit) / marginal:
        return 0.0
    n = max(1.0, rate * (limit - fixed) / (1.0 + rate * marginal))
    return weight * min(rate, n / (fixed + marginal * n))
