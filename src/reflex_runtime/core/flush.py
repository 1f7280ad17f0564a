"""How large batches may be, and how long they may wait.

A `FlushPolicy` is a frozen value: a hold per tier and two ceilings express every documented rule. `holding` decides by
it when a batch leaves.

Deadlines at risk: the set of tickets with the largest expected value is sent. Goodput depends on which tickets are left
out, not on when a batch is sent. For every slack threshold s among the candidates at risk, and two safety factors,
fill a batch from those with at least that slack so that it ends in time, and score it

    E = Σ w · Φ(ln(slack ÷ T) ÷ σ)

its expected on-time value. The best one is sent. In overload, without it, up to 62 % fewer answers are on time
(docs/benchmarks.md#the-schedulers-rules).

Controllers compute another `FlushPolicy` from slowly learned quantities. A controller never decides a batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import erf, exp, expm1, inf, log, sqrt
from operator import itemgetter
from typing import Protocol, Self

from reflex_runtime.core.cost import Tally
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Priority, Ticket

Tiers = tuple[float, float, float]
BUDGET = 0.100  # seconds that a batch may take by default
TIMES_FIXED = 16.0  # and how many times its fixed part, if that is more: 1/16 of the device's time goes to fixed parts


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """The limits of a group's batches.

    max_batch_cost: ceiling in the cost model's unit.
    max_batch_size: most tickets in a batch, residents included.
    hold_max: seconds from arrival that each tier (urgent, default, background) may wait for more requests on a free
        device; 0 sends at once.
    until: time at which such a hold ends in any case; for controllers.
    times_fixed: a batch may also take this many times the fixed part of its kind, if that is longer than max_batch_cost
        and delays nobody else. 0 switches it off. It needs a `Planner`.
    returns: longest hold, in seconds, for clients whose next request is due, if it pays (`holding.py`); counted from
        max(oldest arrival, device free), and never longer than max_batch_cost. 0 switches it off.
    shed: refuse waiting requests whose deadline cannot be met, and choose the set of largest expected value when
        deadlines are at risk.
    """

    max_batch_cost: float = inf
    max_batch_size: int = 4096
    hold_max: Tiers = (0.0, 0.0, 0.0)
    returns: float = 0.0
    shed: bool = False
    until: float = inf
    times_fixed: float = 0.0

    def __post_init__(self) -> None:
        _check("max_batch_cost", self.max_batch_cost, 0.0, inf, exclusive=True)
        _check("max_batch_size", self.max_batch_size, 1, 1_000_000)
        if self.returns != inf:
            _check("returns", self.returns, 0.0, 60.0)
        _check("times_fixed", self.times_fixed, 0.0, 1000.0)
        for value in self.hold_max:
            _check("hold_max", value, 0.0, 3600.0)

    @classmethod
    def window(cls, max_batch_cost: float | None, batch_timeout: float = inf, max_batch_size: int = 256) -> Self:
        """The default: work conserving, held only for expected returns, shedding only requests with a deadline.

        max_batch_cost: None for BUDGET, or TIMES_FIXED times the fixed part where that is more; it needs a `Planner`.
        """
        times = TIMES_FIXED if max_batch_cost is None else 0.0
        cost = BUDGET if max_batch_cost is None else max_batch_cost
        return cls(cost, max_batch_size, returns=batch_timeout, shed=True, times_fixed=times)

    @classmethod
    def by_cost(cls, max_batch_cost: float, batch_timeout: float, max_batch_size: int = 4096) -> Self:
        """The documented literal rule: wait out the timeout unless the summed estimate reaches the budget."""
        return cls(max_batch_cost, max_batch_size, hold_max=(0.0, batch_timeout, batch_timeout))

    @classmethod
    def by_size(cls, max_batch_size: int, max_latency: float) -> Self:
        """Send at a count, or when the oldest has waited `max_latency` seconds."""
        return cls(max_batch_size=max_batch_size, hold_max=(0.0, max_latency, max_latency))

    @classmethod
    def every_step(cls, max_num_batched_tokens: int, max_num_seqs: int = 256) -> Self:
        """Continuous batching: a step leaves whenever the device is free, within a token budget."""
        return cls(max_batch_cost=max_num_batched_tokens, max_batch_size=max_num_seqs)


def _check(name: str, value: float, low: float, high: float, exclusive: bool = False) -> None:
    if not (low < value <= high if exclusive else low <= value <= high):
        raise ConfigError(f"FlushPolicy.{name}={value!r}: must be in {'(' if exclusive else '['}{low:g}, {high:g}]")


# -- which tickets to send when deadlines are at risk ------------------------------------------------------------------


TIER_WEIGHT = {Priority.URGENT: 100.0, Priority.DEFAULT: 10.0, Priority.BACKGROUND: 1.0}
THRESHOLDS = 16  # slack thresholds tried


@dataclass(slots=True)
class Filled:
    """A filled batch: granted units in order, its tally, and whether something did not fit the budget.

    places: how many may enter.
    apart: whether its member runs alone because the client's last request failed alone.
    short_of: the limit that ended the fill; else the one that kept out the first ticket that was skipped.
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

_CERTAIN = 4.0  # standard deviations beyond which an outcome is taken as certain


def at_risk(filled: Filled, now: float) -> bool:
    """Whether a member of the batch is likely to miss its deadline by it."""
    tightest = min([t.deadline for t in filled.grants], default=inf)
    return tightest - now < filled.tally.seconds * (1.0 + 2.0 * filled.tally.sigma)


def window(candidates: Sequence[Ticket], full: Filled, fit: Fitter, now: float) -> Sequence[Ticket]:
    """The members of the batch of largest expected value.

    candidates: in serving order, each able to make its deadline alone. full: the batch that ignores deadlines.
    """
    sigma = max(0.01, full.tally.sigma)
    risky = full.tally.seconds * (1.0 + 2.0 * sigma)
    slacks = {t: t.deadline - now for t in candidates}
    thresholds = sorted({slack for slack in slacks.values() if slack < risky})
    if len(thresholds) > THRESHOLDS:
        thresholds = [thresholds[i * len(thresholds) // THRESHOLDS] for i in range(THRESHOLDS)]
    values = {t: TIER_WEIGHT[t.tier] * t.request.weight for t in candidates}
    dearest = max(values.values())
    alike = min(values.values()) == dearest
    best, top = candidates[:1], -inf  # in any case the device does not idle
    enough = candidates
    for slack in (*thresholds, risky):
        enough = [t for t in enough if slacks[t] >= slack]
        if not enough or len(enough) * dearest <= top:
            break  # smaller sets cannot win either
        for factor in (1.0, 1.0 + 2.0 * sigma):
            chosen, seconds = fit(enough, slack / factor)
            most = len(chosen) * dearest if alike else sum([values[t] for t in chosen])
            if not chosen or most <= top + 1e-9:
                continue  # even if all were in time it could not win
            score = most - expected_loss(chosen, values, slacks, seconds, sigma)
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
    surely, scale = seconds * exp(_CERTAIN * sigma), 0.7071067811865476 / sigma
    unsure = [t for t in chosen if slacks[t] < surely]
    return 0.5 * sum([values[t] * (1.0 - erf(log(slacks[t] / seconds) * scale)) for t in unsure])


# -- controllers -------------------------------------------------------------------------------------------------------


Affine = Callable[[], tuple[float, float, float]]


class Controller(Protocol):
    """Adapts a group's flush policy."""

    def arrived(self, ticket: Ticket, now: float) -> None:
        """A ticket was admitted."""

    def policy(self, base: FlushPolicy, affine: Affine, now: float, partition: Hashable) -> FlushPolicy:
        """The policy to use now for this partition. affine: returns (fixed, marginal) seconds of its work, and their
        spread."""


class Planner:
    """Plans the batch length from the tightest deadlines, tiers and shares in sight.

    On a device that cannot be interrupted, priorities have little effect without a limit on the batch length. A fair
    order has none either, if half of a modest client's requests are too old at the next batch. With batches of T
    seconds the device serves (T − a)/(b·T) requests a second, and of requests with time limit D those can be on time
    that have T left; tiers are served in order, and in a tier each client counts up to its fair share. The budget is
    the largest T within 0.2 % of the best value. If all requests are of one kind and no client takes from another, it
    changes nothing.

    A model whose fixed part a is large gets longer batches where the policy allows it (`FlushPolicy.times_fixed`): with
    batches of k · a the device spends 1 ÷ k of its time on fixed parts. While requests of several priorities come, or
    one client exceeds its share, others would wait for longer batches and gain nothing. Then k is SHARED.
    Without it urgent requests on time fall by 57 % in overload, Jain's index by 15 % with one greedy client beside
    modest ones, and with a large fixed part the mean at 95 % load more than doubles.
    """

    PERIOD = 0.100  # seconds between plans
    TAU = 1.0  # seconds over which rates are measured
    CLIENTS = 1024  # (tier, time limit, client) followed; those beyond count as one for each time limit, roughly
    KINDS = 64  # (tier, time limit) planned for as they are; if there are more, time limits count roughly
    LONGEST = 2.0  # seconds that a batch may take because of its fixed part
    SHARED = 2.0  # times its fixed part, where others would wait for it: half of the device's time

    def __init__(self) -> None:
        self._counts: dict[_Key, list[float]] = {}  # decayed arrivals, and the client's weight
        self._since = self._planned = -inf
        self._demand: dict[tuple[Priority, float], _Demand] = {}
        self._policies: dict[Hashable, FlushPolicy] = {}  # planned now, by partition

    def arrived(self, ticket: Ticket, now: float) -> None:
        request = ticket.request
        key = (request.priority, inf if request.time_limit is None else round(request.time_limit, 3), request.client)
        if key not in self._counts:
            if self._since == -inf:
                self._since = self._planned = now
            if len(self._counts) >= self.CLIENTS:
                key = (key[0], _rough(key[1]), None)
        self._counts.setdefault(key, [0.0, request.weight])[0] += 1.0

    def policy(self, base: FlushPolicy, affine: Affine, now: float, partition: Hashable) -> FlushPolicy:
        if len(self._counts) < 2 and not base.times_fixed:
            return base
        if now >= self._planned + self.PERIOD:
            self._demand = self._demands(now)
            self._policies.clear()
        policy = self._policies.get(partition)
        if policy is None:
            policy = self._policies[partition] = replace(base, max_batch_cost=self._plan(base, *affine()))
        return policy

    def _plan(self, base: FlushPolicy, a: float, b: float, sigma: float) -> float:
        demands = self._demand
        if b <= 0.0 or base.max_batch_cost == inf or not demands:
            return base.max_batch_cost
        budget = self._longest(base, a, b)
        if budget <= a + b:
            return budget
        fair = self._find_greedy(budget, a, b)
        if all(limit == inf for _, limit in demands):
            return budget
        if len(demands) < 2 and not any(d.greedy for d in demands.values()):
            return budget
        grid: list[float] = [(a + b) * (budget / (a + b)) ** (i / 24.0) for i in range(25)]
        values = [_planned_value(demands, fair, t, a, b, sigma) for t in grid]
        best = max(values)
        return max(t for t, v in zip(grid, values, strict=True) if v >= 0.998 * best)

    def _longest(self, base: FlushPolicy, a: float, b: float) -> float:
        """The policy's budget, or a longer one for a large fixed part a."""
        given, times = base.max_batch_cost, base.times_fixed
        longest = max(given, min(times * a, self.LONGEST))
        if longest > given:
            shared = max(given, min(times * a, self.SHARED * a, self.LONGEST))
            if len({tier for tier, _ in self._demand}) > 1:
                return shared
            self._find_greedy(longest, a, b)
            if any(d.greedy for d in self._demand.values()):
                return shared
        return longest

    def _find_greedy(self, budget: float, a: float, b: float) -> float:
        """Mark the demands in which a client exceeds its share while another does not. Returns a client's fair rate,
        per weight."""
        demands = self._demand.values()
        fair = (1.0 - a / budget) / b / sum(d.weights[-1] for d in demands)
        modest = min(d.ratios[0] for d in demands) <= fair
        for demand in demands:
            demand.greedy = modest and demand.exceeds(fair)
        return fair

    def _demands(self, now: float) -> dict[tuple[Priority, float], _Demand]:
        """The present demand by tier and time limit, tiers in order; ages the counts."""
        seen = self.TAU * -expm1((self._since - now) / self.TAU)
        clients: dict[tuple[Priority, float], list[tuple[float, float]]] = {}
        many = len({key[:2] for key in self._counts}) > self.KINDS
        for key in sorted(self._counts, key=_kind):
            kind = (key[0], _rough(key[1])) if many else key[:2]
            count, weight = self._counts[key]
            # Those that are not followed one by one are as many clients as requests: none of them is greedy.
            clients.setdefault(kind, []).append((count / seen, weight if key[2] is not None else count))
        fade, counts = exp((self._planned - now) / self.TAU), self._counts.items()
        self._counts = {key: [count * fade, weight] for key, (count, weight) in counts if count * fade > _FORGOTTEN}
        self._planned = now
        return {kind: _Demand(found, seen) for kind, found in clients.items()}


_Key = tuple[Priority, float, Hashable]
_kind = itemgetter(slice(2))  # of a key: the tier and time limit
_FORGOTTEN = 0.02  # arrivals: four seconds after a single one
_GREEDY = 1.5  # times the fair share
_SURE = 3.0  # standard deviations; a smaller difference may be chance, and planning for it costs goodput


def _rough(limit: float) -> float:
    """A time limit to two digits. Clients that send the same deadline at different times have a limit each."""
    return float(f"{limit:.2g}")


class _Demand:
    """The clients of one tier and time limit, ascending by rate over weight, with running sums.

    seen: seconds over which the rates were measured. greedy: whether some of them exceed their share while another
    client does not.
    """

    __slots__ = ("greedy", "rates", "ratios", "seen", "weights")

    def __init__(self, clients: list[tuple[float, float]], seen: float) -> None:
        ratios = [rate / weight for rate, weight in clients]
        order = sorted(range(len(clients)), key=ratios.__getitem__)
        self.ratios = [ratios[i] for i in order]
        self.rates = [0.0, *accumulate([clients[i][0] for i in order])]
        self.weights = [0.0, *accumulate([clients[i][1] for i in order])]
        self.seen, self.greedy = seen, False

    def exceeds(self, fair: float) -> bool:
        """Whether the client with the highest rate exceeds its share, and not by chance.

        The square root of a Poisson count has a standard deviation of at most ½ whatever its mean, and the largest of
        n such counts lies about √(2·ln n) of them above the mean.
        """
        most = self.ratios[-1]
        chance = 0.5 * (_SURE + sqrt(2.0 * log(len(self.ratios))))
        return most > _GREEDY * fair and sqrt(most * self.seen) > sqrt(fair * self.seen) + chance

    def due(self, share: float, fair: float) -> float:
        """Requests a second within fair shares, if `share` of the demand can be on time."""
        if share <= 0.0 or not self.greedy:
            return max(0.0, share) * self.rates[-1]
        modest = bisect_right(self.ratios, fair / share)
        return share * self.rates[modest] + fair * (self.weights[-1] - self.weights[modest])


def _planned_value(
    demands: dict[tuple[Priority, float], _Demand], fair: float, t: float, a: float, b: float, sigma: float
) -> float:
    """Value a second of batches that take t seconds. fair: requests a second that are a client's due, per weight."""
    spare, total = (t - a) / (b * t), 0.0
    for tier, value in TIER_WEIGHT.items():
        due = 0.0
        for (kind, limit), demand in demands.items():
            if kind is tier:
                # A request that just misses a batch waits for two: both may take longer than predicted.
                due += demand.due(1.0 if limit == inf else min(1.0, limit / t - 1.0 - 1.5 * sigma), fair)
        served = min(due, spare)
        spare -= served
        total += value * served
    return total
