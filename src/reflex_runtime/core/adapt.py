"""Controllers: compute another `FlushPolicy` from slowly learned quantities.

A controller never decides a batch; it returns a policy with other numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import exp, expm1, inf, log, sqrt
from typing import Protocol

from reflex_runtime.core.crowd import OVER, Crowd, even_size
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.percentile import percentile
from reflex_runtime.core.request import Priority, Ticket
from reflex_runtime.core.select import TIER_WEIGHT

Affine = Callable[[], tuple[float, float, float]]


class Controller(Protocol):
    """Adapts a group's flush policy."""

    def arrived(self, ticket: Ticket, now: float, others: int) -> None:
        """A ticket was admitted. others: tickets of its partition that have not settled."""

    def policy(self, base: FlushPolicy, affine: Affine, now: float, partition: Hashable) -> FlushPolicy:
        """The policy to use now for this partition. affine: asks for (fixed, marginal) seconds of the work at hand and
        their spread."""


class Planner:
    """Plans the batch length from the tightest deadlines, tiers and shares in sight.

    On a device that cannot be interrupted, priorities have little effect without a limit on the batch length. Neither
    has a fair order, if half of a modest client's requests are too old at the next batch. For a batch time T the device
    serves (T − a)/(b·T) requests a second, and requests with time limit D keep the share of their arrivals that still
    has T left; tiers are served in order, and within one each client's fair share counts fully and what it asks beyond
    that a quarter. The effective budget is the largest T within 0.2 % of the best value. If all requests are of one
    kind and no client takes from another, it changes nothing.

    A model whose fixed part a is large gets longer batches where the policy allows it (`FlushPolicy.times_fixed`): with
    batches of k · a the device spends 1 ÷ k of its time on fixed parts. While requests of several priorities come, or
    one client asks for more than its share, others would wait for longer batches and gain nothing. Then k is SHARED.
    In the other case, and without deadlines, callers that do not fit into one batch are split evenly, into batches of
    up to CROWD · k · a (`crowd`).
    """

    PERIOD = 0.100  # seconds between plans
    TAU = 1.0  # seconds over which rates are measured
    CLIENTS = 1024  # (tier, time limit, client) followed; those beyond count as one for each time limit, roughly
    KINDS = 64  # (tier, time limit) planned for as they are; if there are more, time limits count roughly
    LONGEST = 2.0  # seconds that a batch may take because of its fixed part
    CROWD = 2.0  # times as long, where all who come wait for each other, and no other policy for them
    SHARED = 2.0  # times its fixed part, where others would wait for it: half of the device's time

    def __init__(self) -> None:
        self._counts: dict[_Key, float] = {}  # decayed arrivals
        self._weights: dict[_Key, float] = {}
        self._since = self._planned = -inf
        self._demand: dict[tuple[Priority, float], _Demand] = {}
        self._policies: dict[Hashable, FlushPolicy] = {}  # planned now, by partition
        self._crowd = Crowd()

    def arrived(self, ticket: Ticket, now: float, others: int) -> None:
        request = ticket.request
        key = (request.priority, inf if request.time_limit is None else round(request.time_limit, 3), request.client)
        count = self._counts.get(key)
        if count is None:
            if self._since == -inf:
                self._since = self._planned = now
            if len(self._counts) >= self.CLIENTS:
                key = (key[0], _rough(key[1]), None)
            count = self._counts.get(key, 0.0)
            self._weights[key] = request.weight
        self._counts[key] = count + 1.0
        if request.wants == 1.0:  # work in steps has no rounds of batches
            self._crowd.seen(others + 1, now)

    def policy(self, base: FlushPolicy, affine: Affine, now: float, partition: Hashable) -> FlushPolicy:
        if len(self._counts) < 2 and not base.times_fixed:
            return base
        if now >= self._planned + self.PERIOD:
            self._demand = self._demands(now)
            self._policies.clear()
        policy = self._policies.get(partition)
        if policy is None:
            policy = self._policies[partition] = self._made(base, *affine())
        return policy

    def _made(self, base: FlushPolicy, a: float, b: float, sigma: float) -> FlushPolicy:
        budget = self._plan(base, a, b, sigma)
        size = 0
        if base.times_fixed and b > 0.0 and self._alike():
            alone = base.times_fixed > self.SHARED
            longest = min(self.CROWD * base.times_fixed * a, self.LONGEST) if alone else budget
            size = even_size(self._crowd.callers, budget, longest, a, b)
        if 0 < size < base.max_batch_size:
            return replace(base, max_batch_cost=max(budget, OVER * (a + b * size)), max_batch_size=size)
        return base if budget == base.max_batch_cost else replace(base, max_batch_cost=budget)

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
        """The policy's budget, or what the fixed part a makes of it."""
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

    def _alike(self) -> bool:
        """Whether all requests are of one priority, without deadlines, and no client is known to be greedy."""
        return len(self._demand) == 1 and all(k[1] == inf and not d.greedy for k, d in self._demand.items())

    def _find_greedy(self, budget: float, a: float, b: float) -> float:
        """Mark the demands in which a client asks for more than its share, while another asks for less. Returns a
        client's fair rate, per weight."""
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
        for key in sorted(self._counts, key=lambda k: k[:2]):
            kind = (key[0], _rough(key[1])) if many else key[:2]
            clients.setdefault(kind, []).append((self._counts[key] / seen, self._weights[key]))
        fade = exp((self._planned - now) / self.TAU)
        self._counts = {key: count * fade for key, count in self._counts.items() if count * fade > _FORGOTTEN}
        self._weights = {key: self._weights[key] for key in self._counts}
        self._planned = now
        return {kind: _Demand(found, seen) for kind, found in clients.items()}


_Key = tuple[Priority, float, Hashable]
_FORGOTTEN = 0.02  # arrivals: four seconds after a single one
_GREEDY = 1.5  # times the fair share
_SURE = 3.0  # standard deviations; a smaller difference may be chance, and planning for it costs goodput
_SURPLUS = 0.25  # value of serving a client beyond its fair share


def _rough(limit: float) -> float:
    """A time limit to two digits. Clients that send the same deadline at different times have a limit each."""
    return float(f"{limit:.2g}")


class _Demand:
    """The clients of one tier and time limit, ascending by rate over weight, with running sums.

    seen: seconds over which the rates were measured. greedy: whether some of them ask for more than their share while
    another client asks for less.
    """

    __slots__ = ("greedy", "rates", "ratios", "seen", "weights")

    def __init__(self, clients: list[tuple[float, float]], seen: float) -> None:
        clients.sort(key=lambda c: c[0] / c[1])
        self.ratios = [rate / weight for rate, weight in clients]
        self.rates = [0.0, *accumulate(rate for rate, _ in clients)]
        self.weights = [0.0, *accumulate(weight for _, weight in clients)]
        self.seen, self.greedy = seen, False

    def exceeds(self, fair: float) -> bool:
        """Whether the client with the highest rate exceeds its share, and not by chance.

        The square root of a Poisson count has a standard deviation of at most ½ whatever its mean, and the largest of
        n such counts lies about √(2·ln n) of them above the mean.
        """
        most = self.ratios[-1]
        chance = 0.5 * (_SURE + sqrt(2.0 * log(len(self.ratios))))
        return most > _GREEDY * fair and sqrt(most * self.seen) > sqrt(fair * self.seen) + chance

    def split(self, share: float, fair: float) -> tuple[float, float]:
        """(requests a second within fair shares, those beyond) if `share` of the demand can be on time."""
        if share <= 0.0:
            return 0.0, 0.0
        if not self.greedy:
            return share * self.rates[-1], 0.0
        modest = bisect_right(self.ratios, fair / share)
        within = share * self.rates[modest] + fair * (self.weights[-1] - self.weights[modest])
        return within, max(0.0, share * self.rates[-1] - within)


def _planned_value(
    demands: dict[tuple[Priority, float], _Demand], fair: float, t: float, a: float, b: float, sigma: float
) -> float:
    """Value a second of batches that take t seconds. fair: requests a second that are a client's due, per weight."""
    spare, total = (t - a) / (b * t), 0.0
    for tier, value in TIER_WEIGHT.items():
        within = beyond = 0.0
        for (kind, limit), demand in demands.items():
            if kind is tier:
                # A request that just misses a batch waits for two: both may take longer than predicted.
                share = 1.0 if limit == inf else max(0.0, min(1.0, limit / t - 1.0 - 1.5 * sigma))
                due, more = demand.split(share, fair)
                within += due
                beyond += more
        served = min(within, spare)
        surplus = min(beyond, spare - served)
        spare -= served + surplus
        total += value * (served + _SURPLUS * surplus)
    return total


# -- how many to wait for ----------------------------------------------------------------------------------------------


class HoldTarget:
    """How long each partition waits for more requests, and for how many; it does not limit a batch.

    For work that runs elsewhere, where batches save messages. A batch waits for three kinds of requests:

    - **Returns.** A caller whose stream has just ended asks again. A batch is held until the last of them is back, at
      most `hold` seconds after the last one ended or came back, and is then sent at once. - **Streams about to end**,
      see `_ending`: the batch waits up to `PATIENCE` times as long for their callers. Then all are in one batch, end
      together, and return together from then on. - **Bursts.** Arrivals that follow each other within `hold` seconds
      and are no returns. The batch waits for `target` of them. The target grows by 2 while waits stay below `hold`,
      calls are short and the other end has places; it halves when either is long. It is adapted after each batch, from
      the last `window` batches.

    Returns and bursts are expected only if they were frequent, by exponential means. A lone caller is never held,
    however soon it asks again.

    smallest, largest: bounds of the target. target_batch_time: seconds that a call should take at most.
    """

    GAIN = 0.25  # of the means
    EXPECTED, BACK = 0.2, 0.5  # means from which bursts, and returns, are expected
    LONG = 4.0 / 3.0  # times hold: 95th percentile of the waits from which the target halves
    MEMORY = 4.0  # times hold: for how long an absent caller is expected
    PATIENCE = 10.0  # times the usual longest hold: how long streams about to end are waited for
    SLOW = 1.3  # times target_batch_time, median
    PARTITIONS = 256  # remembered; the least recently used is forgotten
    MOST_AWAY = 1024  # callers waited for in a partition

    def __init__(
        self,
        smallest: int = 2,
        largest: int = 16,
        target_batch_time: float = 0.012,
        window: int = 100,
        hold: float = 0.003,
    ) -> None:
        if not 1 <= smallest <= largest:
            raise ConfigError(f"HoldTarget.smallest={smallest!r}: must be in [1, largest={largest!r}]")
        if not target_batch_time > 0.0:
            raise ConfigError(f"HoldTarget.target_batch_time={target_batch_time!r}: must be > 0 seconds")
        if not window >= 1:
            raise ConfigError(f"HoldTarget.window={window!r}: must be >= 1 batches")
        if not hold >= 0.0:
            raise ConfigError(f"HoldTarget.hold={hold!r}: must be >= 0 seconds")
        self._smallest, self._largest = smallest, largest
        self._batch_time, self._window, self._hold = target_batch_time, window, hold
        self._followed: OrderedDict[Hashable, _Followed] = OrderedDict()
        self._base: FlushPolicy | None = None
        self._made: dict[int, FlushPolicy] = {}  # of that base, by target; those below for other kinds of company

    # -- inputs ------------------------------------------------------------------------------------------------------

    def arrived(self, ticket: Ticket, now: float, others: int) -> None:
        one = self._follow(ticket.request.partition)
        one.forget(now - self.MEMORY * self._hold, self.GAIN)
        soon = others > 0 and now - one.last <= self._hold
        one.unsettled = others + 1
        one.company += self.GAIN * ((soon and not one.away) - one.company)
        if one.away:
            one.away.popleft()
            one.back += self.GAIN * (1.0 - one.back)
        one.last = now

    def ended(self, partition: Hashable, now: float, step: float = 0.0) -> None:
        """A stream came to its end; its caller may ask again. step: seconds that each of its tokens took."""
        one = self._follow(partition)
        one.step += self.GAIN * (step - one.step)
        one.away.append(now)
        if len(one.away) > self.MOST_AWAY:
            one.away.popleft()

    def returned(self, partition: Hashable, waits: Sequence[float], seconds: float, crowded: bool) -> None:
        """A batch came back. waits: seconds its members waited, at least one. seconds: the call took. crowded: whether
        the other end has few places left."""
        one = self._follow(partition)
        one.waits.add(waits)
        one.calls.add((seconds,))
        wait, call = one.waits.percentile(95), one.calls.percentile(50)
        if wait < self._hold and call < self._batch_time and not crowded:
            one.target = min(self._largest, one.target + 2)
        elif wait > self.LONG * self._hold or call > self.SLOW * self._batch_time:
            one.target = max(self._smallest, one.target // 2)

    # -- questions ---------------------------------------------------------------------------------------------------

    def policy(self, base: FlushPolicy, affine: Affine, now: float, partition: Hashable) -> FlushPolicy:
        if base is not self._base:
            self._base, self._made = base, {}
        one = self._followed.get(partition)
        if one is None:
            return self._of(base, _NOBODY)
        one.forget(now - self.MEMORY * self._hold, self.GAIN)
        if one.back >= self.BACK:
            tokens = self.tokens_left(partition)
            ending = _ending(tokens, one.unsettled)
            if ending or one.away:
                together = ending or not tokens
                beyond = together and one.step >= 2.0 * self._hold
                made = self._of(base, _BEYOND if beyond else _TOGETHER if together else _RETURNS)
                return made if ending else replace(made, until=self._until(one))
        return self._of(base, one.target if one.company >= self.EXPECTED else _NOBODY)

    def _until(self, one: _Followed) -> float:
        """Until when absent callers are waited for: `hold` after the last one ended or came back."""
        last = one.away[-1]
        return max(last, min(one.last, last + (self.MEMORY - 1.0) * self._hold)) + self._hold

    def _of(self, base: FlushPolicy, kind: int) -> FlushPolicy:
        """The policy for waiting for a number of requests, or for one of the kinds below."""
        made = self._made.get(kind)
        if made is None:
            made = self._made[kind] = self._make(base, kind)
        return made

    def _make(self, base: FlushPolicy, kind: int) -> FlushPolicy:
        if kind == _NOBODY:
            return replace(base, hold_min=_NONE, hold_max=_NONE)
        if kind > 0:
            return replace(base, target=kind)
        target = _EVERYBODY if kind == _BEYOND else base.max_batch_size
        urgent, default, background = base.hold_max
        if kind != _RETURNS:
            background += (self.PATIENCE - 1.0) * default
            default *= self.PATIENCE
        return replace(base, target=target, quiet=0.0, hold_max=(urgent, default, background))

    def tokens_left(self, partition: Hashable) -> Sequence[int]:
        """The tokens left of each active stream of the partition; for subclasses that know them."""
        return ()

    def target(self, partition: Hashable) -> int:
        """How many to wait for where bursts come."""
        one = self._followed.get(partition)
        return self._smallest if one is None else one.target

    def waits(self, partition: Hashable) -> tuple[float, float] | None:
        """Median and 95th percentile of the waits in the window, in seconds; None before a batch came back."""
        one = self._followed.get(partition)
        return (one.waits.percentile(50), one.waits.percentile(95)) if one is not None and len(one.waits) else None

    def company(self, partition: Hashable) -> float:
        """The share of arrivals that another one followed soon, returns not counted, 0 to 1."""
        one = self._followed.get(partition)
        return 0.0 if one is None else one.company

    def back(self, partition: Hashable) -> float:
        """The share of ended streams that another request followed soon, 0 to 1."""
        one = self._followed.get(partition)
        return 0.0 if one is None else one.back

    def _follow(self, partition: Hashable) -> _Followed:
        one = self._followed.get(partition)
        if one is None:
            one = self._followed[partition] = _Followed(self._smallest, self._window)
            if len(self._followed) > self.PARTITIONS:
                self._followed.popitem(last=False)
        else:
            self._followed.move_to_end(partition)
        return one


_EVERYBODY = 1_000_000
_NOBODY, _RETURNS, _TOGETHER, _BEYOND = 0, -1, -2, -3
_FEW = 3  # tokens
_NONE = (0.0, 0.0, 0.0)


def _ending(tokens_left: Sequence[int], waiting: int) -> bool:
    """Whether it pays to wait for streams with these numbers of tokens left.

    With at most one token left they end at the next step, and no other request would have begun before it. With a few
    left, and more streams than waiting requests, the batch waits for some steps once; from then on all end together.
    """
    most = max(tokens_left, default=0)
    return most == 1 or (0 < most <= _FEW and len(tokens_left) > waiting)


class _Followed:
    """The state of a partition. away: ends of streams whose callers are not back, oldest first."""

    __slots__ = ("away", "back", "calls", "company", "last", "step", "target", "unsettled", "waits")

    def __init__(self, target: int, window: int) -> None:
        self.target = target
        self.company = self.back = 0.0
        self.last = -inf
        self.unsettled = 0
        self.step = 0.0
        self.away: deque[float] = deque()
        self.waits, self.calls = _Window(window), _Window(window)

    def forget(self, before: float, gain: float) -> None:
        """Stop expecting callers that have been away since then."""
        while self.away and self.away[0] < before:
            self.away.popleft()
            self.back -= gain * self.back


class _Window:
    """Values of the last `size` batches, kept sorted."""

    __slots__ = ("_batches", "_ordered", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._batches: deque[tuple[float, ...]] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, values: Sequence[float]) -> None:
        if len(self._batches) == self._size:
            for value in self._batches.popleft():
                del self._ordered[bisect_left(self._ordered, value)]
        self._batches.append(tuple(values))
        for value in values:
            insort(self._ordered, value)

    def percentile(self, percent: int) -> float:
        """The percentile of the values."""
        return percentile(self._ordered, percent / 100)
