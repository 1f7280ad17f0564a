"""How much a request costs, and how many requests fit into a batch.

Each group has a `CostModel`. To fill a batch the scheduler opens a `Tally`, offers tickets to it one by one and adds
those that fit; the tally keeps the running total, so nothing is summed again. Four models:

    UnitCost    every request costs 1: a batch size. It learns how long batches take, for holds
    TokenCost   a request takes as many of the units it wants as are left: a token budget
    TimedTokens the same within a promised time between two tokens (`token_budget.py`)
    TimeCost    learned device seconds, for one-shot work and for work in stages and steps

`TimeCost` is the default. Until enough was measured the documented rolling median stands; then the affine fit of each
(shape, stage). One-shot batches are the hot path and have a tally of their own: `_OneShotTally` adds a slope,
`_StagedTally` keeps the horizon.

`Backlog` keeps the predicted seconds of waiting tickets: by priority, for the wait, and by client, for fair shares.

Evidence. A refused request does not run, so nothing is measured, and a wrong estimate that refuses every request would
never be corrected. So an estimate refuses only while a batch of its shape runs and for `RENEW` seconds after. Then one
request, the probe, is admitted against the estimate; others are refused until it has settled. If the probe is answered
in time, the estimate is wrong: the next request is admitted at once, until the cost model has learned. If the probe is
late, the refusal is renewed. So an idle device is tried at once, and one that is too slow once a second. Without it
22 % fewer answers are on time around a slow spell of two seconds, and none after a longer one. A class that is refused
while other classes of its shape run is probed, too, with at most `SHARE` of the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import BACKGROUND, WAITING, Priority, Ticket
from reflex_runtime.core.statistics import DEFAULT_COST, AffineFit, RecentValues

WARM_SAMPLES = 3  # measurements before a prediction counts


class Tally:
    """The running total of one batch while it is filled. Here: no prediction of time, no extra units.

    cost: predicted cost of the members, in the model's unit. dearest: cost of the dearest member alone.
    sigma: relative spread of `seconds`.
    """

    __slots__ = ("cost", "dearest", "sigma")

    def __init__(self, sigma: float = 0.0) -> None:
        self.cost = self.dearest = 0.0
        self.sigma = sigma

    @property
    def seconds(self) -> float:
        """Predicted device time; 0.0 until measured."""
        return 0.0

    @property
    def until_boundary(self) -> float:
        """Seconds until the next boundary at which others may enter; 0.0 when unknown."""
        return 0.0

    def expect(self, tickets: Iterable[Ticket]) -> None:
        """These residents want one unit each and will be added: keep room for them. Called once, before `offer`, in
        groups with resources."""

    def offer(self, ticket: Ticket, budget: float, limit: float = inf) -> float:
        """Units the ticket could be granted; 0.0 when it does not fit.

        budget: ceiling on cost, with the exceptions of contract B4. limit: ceiling on seconds, without exception.
        """
        raise NotImplementedError

    def add(self, ticket: Ticket, units: float) -> None:
        """Add the ticket with the units that `offer` granted."""
        raise NotImplementedError

    def grant(self, ticket: Ticket, budget: float, limit: float = inf) -> float:
        """`offer`, and `add` if it fits."""
        units = self.offer(ticket, budget, limit)
        if units > 0.0:
            self.add(ticket, units)
        return units

    def extra(self, tickets: Sequence[Ticket], budget: float) -> Sequence[int]:
        """The units beyond those it wants that each of these members may get (`Ticket.extra`)."""
        return [0] * len(tickets)


class CostModel:
    """The costs of one group's requests. Here: each costs 1, and time is unknown.

    unit: of costs. linear: whether a batch of equal requests takes fixed + marginal · n seconds.
    """

    unit = "requests"
    linear = True

    def tally(self) -> Tally:
        """Start filling a batch."""
        raise NotImplementedError

    def line(self, ticket: Ticket) -> tuple[float, float, float]:
        """(fixed, marginal, sigma) seconds of batches of tickets like this one."""
        tally = self.tally()
        tally.add(ticket, 1.0)
        one = tally.seconds
        tally.add(ticket, 1.0)
        marginal = max(0.0, tally.seconds - one)
        return max(0.0, one - marginal), marginal, tally.sigma

    def remaining(self, ticket: Ticket) -> float:
        """Seconds until the ticket is answered if it ran alone from now; 0.0 while nothing was measured."""
        return 0.0

    def share(self, ticket: Ticket, budget: float, most: int) -> float:
        """The ticket's part of the device seconds of a full batch of its kind, all its steps together.

        budget, most: limits of a batch's cost and size. 0.0 until learned, and for models without times.
        """
        return 0.0

    def shared(self, rows: int) -> float:
        """Most members of a step that clients share, if all but one of them have `rows`; inf until learned."""
        return inf

    def marginal(self, ticket: Ticket, units: float) -> float:
        """The cost that this grant adds to a batch."""
        return 1.0

    def fixed(self, ticket: Ticket) -> float:
        """The fixed cost of a batch of the ticket's shape and stage, which its members share equally."""
        return 0.0

    def told_apart(self, ticket: Ticket) -> bool:
        """Whether fixed and marginal seconds are known separately: batches of at least two sizes were measured."""
        return True

    def observe(self, batch: Batch, elapsed: float) -> None:
        """Learn from a batch that ran without a fault. elapsed: seconds."""

    def settled(self, tickets: Sequence[Ticket]) -> None:
        """Learn from requests that ran to their end."""

    def snapshot(self) -> list[dict[str, Any]]:
        """Everything learned, for people: one mapping per key, JSON-safe."""
        return []


def tally_of(model: CostModel, grants: Mapping[Ticket, float]) -> Tally:
    """The tally of these grants."""
    tally = model.tally()
    for ticket, units in grants.items():
        tally.add(ticket, units)
    return tally


class _UnitTally(Tally):
    """Counts requests, and predicts their time. The budget is the largest count."""

    __slots__ = ("_fit",)

    def __init__(self, fit: AffineFit) -> None:
        super().__init__(fit.sigma)
        self._fit = fit

    @property
    def seconds(self) -> float:
        return self._fit.predict({"": self.cost}) if self._fit.samples >= WARM_SAMPLES else 0.0

    def offer(self, ticket: Ticket, budget: float, limit: float = inf) -> float:
        return 1.0 if self.cost == 0.0 or self.cost + 1.0 <= budget else 0.0

    def add(self, ticket: Ticket, units: float) -> None:
        self.cost += 1.0
        self.dearest = 1.0


class UnitCost(CostModel):
    """Every request costs 1 a batch: the budget is a batch size, and clients share requests, not time. Batch times are
    learned too, but only to decide whether a hold pays; no request is refused by them."""

    def __init__(self) -> None:
        self._fit = AffineFit()

    def tally(self) -> Tally:
        return _UnitTally(self._fit)

    def told_apart(self, ticket: Ticket) -> bool:
        return self._fit.ready

    def observe(self, batch: Batch, elapsed: float) -> None:
        self._fit.observe({"": float(len(batch))}, elapsed)

    def snapshot(self) -> list[dict[str, Any]]:
        fit = self._fit
        marginal = fit.slope("") or 0.0
        times = {"fixed_ms": round(fit.fixed * 1e3, 4), "marginal_ms": round(marginal * 1e3, 4)}
        return [{"samples": fit.samples, "ready": fit.ready, **times}] if fit.samples else []


class TokenTally(Tally):
    """Counts granted units; grants the rest of the budget, at most `threshold` units per ticket and step."""

    __slots__ = ("_threshold",)

    def __init__(self, threshold: float, sigma: float = 0.0) -> None:
        super().__init__(sigma)
        self._threshold = threshold

    def offer(self, ticket: Ticket, budget: float, limit: float = inf) -> float:
        units = ticket.wants  # compared one by one: this runs for every resident at every step
        if units > self._threshold:
            units = self._threshold
        if units > budget - self.cost:
            units = budget - self.cost
        return units if units > 0.0 else 0.0

    def add(self, ticket: Ticket, units: float) -> None:
        self.cost += units
        if units > self.dearest:
            self.dearest = units


class TokenCost(CostModel):
    """A request takes as many of the units it wants as are left in the budget, and the rest in later steps.

    threshold: most units one request gets in one step (`long_prefill_token_threshold`).
    """

    unit = "tokens"
    linear = False

    def __init__(self, threshold: float = inf) -> None:
        if not threshold >= 1:
            raise ConfigError(f"TokenCost.threshold={threshold!r}: must be >= 1 token")
        self.threshold = threshold

    def tally(self) -> Tally:
        return TokenTally(self.threshold)

    def marginal(self, ticket: Ticket, units: float) -> float:
        return units


# -- waiting seconds ---------------------------------------------------------------------------------------------------


SLACK = 1.0 + 1e-9  # for rounding: 0.05 + 0.05 + … must reach a budget of 0.1


class Backlog:
    """Running totals. Background work is not included: only its count is limited."""

    __slots__ = ("_by_client", "_by_priority")

    def __init__(self) -> None:
        self._by_priority = [0.0] * BACKGROUND
        self._by_client: dict[Hashable, list[float]] = {}  # [seconds, tickets]

    @property
    def seconds(self) -> float:
        """Predicted seconds of all waiting tickets."""
        return sum(self._by_priority)

    def add(self, ticket: Ticket, seconds: float) -> None:
        """Add a waiting ticket with its predicted device seconds; 0.0 if they are not known."""
        request = ticket.request
        if seconds > 0.0 and request.priority is not BACKGROUND:
            ticket.seconds = seconds
            self._by_priority[request.priority] += seconds
            own = self._by_client.setdefault(request.client, [0.0, 0])
            own[0] += seconds
            own[1] += 1

    def remove(self, tickets: Iterable[Ticket]) -> None:
        """Remove tickets that wait no more."""
        by_client, by_priority = self._by_client, self._by_priority
        for ticket in tickets:
            seconds = ticket.seconds
            if seconds == 0.0:
                continue
            ticket.seconds = 0.0
            request = ticket.request
            by_priority[request.priority] -= seconds
            own = by_client[request.client]
            if own[1] == 1:
                del by_client[request.client]
            else:
                own[0] -= seconds
                own[1] -= 1
        if not by_client:
            self._by_priority = [0.0] * BACKGROUND  # no rounding is carried on

    def ahead(self, priority: Priority, leaving: Iterable[Ticket] = ()) -> float:
        """Waiting seconds of this priority and more urgent ones, without the tickets that are leaving."""
        found = sum(self._by_priority[: priority + 1])
        for ticket in leaving:
            if ticket.request.priority <= priority:
                found -= ticket.seconds
        return found

    def exceeds_share(self, client: Hashable, seconds: float, most: float, leaving: Iterable[Ticket] = ()) -> bool:
        """Whether with so many more seconds the client would have more than its even share of `most` waiting."""
        own = self._by_client.get(client)
        clients = len(self._by_client) + (own is None)
        waiting = 0.0 if own is None else own[0]
        waiting -= sum([t.seconds for t in leaving if t.request.client == client])
        return waiting + seconds > most / clients * SLACK


# -- whether an estimate may refuse requests ---------------------------------------------------------------------------


RENEW = 1.0  # seconds
SHARE = 0.1  # of the device, for probes of a class beside others of its shape
MAX_KEYS = 1024  # shapes and classes that are kept; a forgotten one counts as just renewed


class Evidence:
    """The latest batches of one group, which renew its estimates."""

    def __init__(self) -> None:
        # By shape, and by key: when, and the seconds that its batch took.
        self._renewed: dict[Hashable, tuple[float, float]] = {}
        self._flying: dict[Batch, set[Hashable]] = {}  # batches that run, and the estimates that they will renew
        self.pending: dict[Hashable, Ticket] = {}  # probes that have not settled, by key

    def refuses(self, ticket: Ticket, now: float) -> bool:
        """Whether an estimate may refuse the ticket, which would miss its deadline by it."""
        shape, key = ticket.request.shape, _key(ticket)
        probe = self.pending.get(key)
        if probe is not None:
            return probe is not ticket and not (probe.state is WAITING and _limit(ticket) > _limit(probe))
        of_shape, _ = self._since(shape, now)
        of_key, seconds = self._since(key, now)
        flying = set().union(*self._flying.values())
        if shape not in flying and now - of_shape >= RENEW:
            return False
        return key in flying or now - of_key < max(RENEW, seconds / SHARE)

    def probe(self, ticket: Ticket) -> None:
        """Admit the ticket against the estimate, as a probe."""
        self.pending[_key(ticket)] = ticket

    def probes(self, ticket: Ticket) -> bool:
        """Whether the ticket is a probe."""
        return bool(self.pending) and self.pending.get(_key(ticket)) is ticket

    def scheduled(self, batch: Batch, kinds: set[tuple[Hashable, Hashable]]) -> None:
        """The batch runs. kinds: shapes and classes of its members."""
        self._flying[batch] = kinds.union([shape for shape, _ in kinds])

    def returned(self, batch: Batch, elapsed: float, now: float, clean: bool) -> None:
        """The batch came back. clean: without a fault."""
        for key in self._flying.pop(batch):
            if clean:
                self._renew(key, now, elapsed)

    def settled(self, ticket: Ticket, answered: bool, now: float) -> None:
        key = _key(ticket)
        del self.pending[key]
        if answered and now <= ticket.deadline:
            self._renew(ticket.request.shape, -inf, 0.0)
            self._renew(key, -inf, 0.0)
        elif ticket.batches:  # a probe that was late, or failed: both postpone the next one
            self._renew(key, now, ticket.shared)
            self._renew(ticket.request.shape, now, ticket.shared)

    def _since(self, key: Hashable, now: float) -> tuple[float, float]:
        found = self._renewed.get(key)
        if found is None:  # the estimate was learned before anything was served: count it as renewed now
            self._renew(key, now, 0.0)
            return now, 0.0
        return found

    def _renew(self, key: Hashable, now: float, seconds: float) -> None:
        if key not in self._renewed and len(self._renewed) >= MAX_KEYS:
            del self._renewed[next(iter(self._renewed))]
        self._renewed[key] = (now, seconds)


def _key(ticket: Ticket) -> Hashable:
    return ticket.request.shape, ticket.request.cost_class


def _limit(ticket: Ticket) -> float:
    return inf if ticket.request.time_limit is None else ticket.request.time_limit


# -- the cost model ----------------------------------------------------------------------------------------------------


NEARLY_FREE = 1.25  # contract B4: further members may exceed the budget up to this multiple of the dearest one


class RollingMedian(RecentValues):
    """The documented estimate of one (shape, class): 50 ms until 3 measurements, then the median of the last 100."""

    __slots__ = ("samples",)

    WINDOW, WARM = 100, 3

    def __init__(self) -> None:
        super().__init__(self.WINDOW)
        self.samples = 0

    @property
    def value(self) -> float:
        """The estimate, in seconds."""
        ordered, middle = self.ordered, len(self.ordered) // 2
        if self.samples < self.WARM:
            return DEFAULT_COST
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

    def observe(self, seconds: float) -> None:
        """Add wall ÷ size of one batch. Samples that are not finite or not above zero are ignored."""
        if 0.0 < seconds < inf:
            self.add(seconds)
            self.samples += 1


class _KindCost:
    """The present costs of requests of one shape, stage and class.

    fit: of their stage, None until it is ready. fixed, slope: its a and b; without it 0 and the documented estimate.
    measured: see `TimeCost`. line, remaining (by units wanted), shares (by those, budget and size): kept results.
    """

    __slots__ = ("fit", "fixed", "line", "measured", "remaining", "shares", "slope")

    def __init__(self, model: TimeCost, ticket: Ticket) -> None:
        self.fit = model.fit(ticket.request.shape, ticket.stage)
        self.fixed = 0.0 if self.fit is None else self.fit.fixed
        self.slope = model.slope(self.fit, ticket)
        self.measured = model.measured(ticket)
        self.line: tuple[float, float, float] | None = None
        self.remaining: dict[float, float] = {}
        self.shares: dict[tuple[float, float, int], float] = {}


class TimeCost(CostModel):
    """Learned device seconds per request and batch.

    stages: names of the stages in order. One-shot work has the single stage "". Otherwise every stage but the last
    takes one unit of what a ticket wants and the last takes the rest, one unit a step: ("prefix", "denoise") with 6
    wanted units is one prefix and five denoise steps. The cost of a batch is then the time until its last member ends.
    affine: False keeps the documented rolling median alone (`--cost-model median`).
    sizes: batch sizes the processor pads to; empty when it does not pad.
    padded_stages: the stages it pads; None for all.
    max_keys: shapes remembered; the least recently used is forgotten beyond it.
    """

    unit = "seconds"

    def __init__(
        self,
        stages: Sequence[str] = ("",),
        affine: bool = True,
        sizes: Sequence[int] = (),
        max_keys: int = 256,
        padded_stages: Sequence[str] | None = None,
    ) -> None:
        if not stages:
            raise ConfigError("TimeCost.stages=(): name at least one stage")
        if unknown := sorted(set(padded_stages or ()) - set(stages)):
            raise ConfigError(f"TimeCost.padded_stages: {unknown[0]!r} is none of the stages {tuple(stages)}")
        self.stages = tuple(stages)
        self.one_shot = len(stages) == 1
        self.affine = affine
        self.sizes = tuple(sorted(sizes))
        self.padded_stages = self.stages if padded_stages is None else tuple(padded_stages)
        self._max_keys = max_keys
        self._fits: OrderedDict[tuple[Hashable, str], AffineFit] = OrderedDict()
        self._medians: OrderedDict[tuple[Hashable, Hashable], RollingMedian] = OrderedDict()
        self._kinds: dict[tuple[Hashable, str, Hashable], _KindCost] = {}  # until something is learned
        self.linear = self.one_shot and not sizes

    # -- costs -------------------------------------------------------------------------------------------------------

    def tally(self) -> _OneShotTally | _StagedTally:
        return _OneShotTally(self) if self.linear else _StagedTally(self)

    def estimate(self, ticket: Ticket) -> float:
        """The documented estimate: the rolling median of the ticket's (shape, class)."""
        known = self._medians.get((ticket.request.shape, ticket.request.cost_class))
        return known.value if known else DEFAULT_COST

    def remaining(self, ticket: Ticket) -> float:
        kind = self.kind(ticket)
        known = kind.remaining.get(ticket.wants)
        if known is None:
            tally = self.tally()
            seconds = tally.with_ticket(ticket)
            known = kind.remaining[ticket.wants] = seconds if tally.measured else 0.0
        return known

    def line(self, ticket: Ticket) -> tuple[float, float, float]:
        kind = self.kind(ticket)
        if kind.line is None:
            kind.line = super().line(ticket)
        return kind.line

    def share(self, ticket: Ticket, budget: float, most: int) -> float:
        kind, key = self.kind(ticket), (ticket.wants, budget, most)
        known = kind.shares.get(key)
        if known is None:
            known = kind.shares[key] = self._share(ticket, budget, most)
        return known

    def _share(self, ticket: Ticket, budget: float, most: int) -> float:
        """Its marginal part, and the fixed one divided among a full batch."""
        if self.affine and self.fits(ticket.request.shape) is None:
            return 0.0  # a median of small batches does not predict full ones
        fixed, each, _ = super().line(ticket)
        ceiling = max(budget, NEARLY_FREE * (fixed + each))
        size = most if each == 0.0 else int(min(most, 1.0 + (ceiling - fixed - each) / each * SLACK))
        return each + fixed / size

    def measured(self, ticket: Ticket) -> bool:
        """Whether such requests were measured; a guess must not refuse requests."""
        known = self._medians.get((ticket.request.shape, ticket.request.cost_class))
        if known is not None and known.samples >= RollingMedian.WARM:
            return True
        return self.fits(ticket.request.shape) is not None

    def marginal(self, ticket: Ticket, units: float) -> float:
        kind = self.kind(ticket)
        return (kind.slope if kind.fit is not None else kind.slope / max(1.0, ticket.request.wants)) * units

    def fixed(self, ticket: Ticket) -> float:
        return self.kind(ticket).fixed

    def kind(self, ticket: Ticket) -> _KindCost:
        """What tickets like this one cost."""
        request = ticket.request
        key = (request.shape, ticket.stage, request.cost_class)
        known = self._kinds.get(key)
        if known is None:
            known = self._kinds[key] = _KindCost(self, ticket)
        return known

    def told_apart(self, ticket: Ticket) -> bool:
        return not self.affine or self.kind(ticket).fit is not None

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, batch: Batch, elapsed: float) -> None:
        if not (0.0 < elapsed < inf):
            return
        counts: dict[Hashable, float] = {}
        for ticket in batch.grants:
            k = ticket.request.cost_class if self.one_shot else ""
            counts[k] = counts.get(k, 0.0) + 1.0
        shape, n = ticket.request.shape, len(batch)
        padded = self.padded(n) if batch.stage in self.padded_stages else n
        if padded != n:
            counts = {k: c * padded / n for k, c in counts.items()}
        self._kinds.clear()
        self._entry(self._fits, (shape, batch.stage), AffineFit).observe(counts, elapsed)
        if self.one_shot and len(counts) == 1:
            self._entry(self._medians, (shape, k), RollingMedian).observe(elapsed / n)

    def settled(self, tickets: Sequence[Ticket]) -> None:
        """Work in steps has one sample per request: Σ over its steps of step seconds ÷ step size."""
        if not self.one_shot:
            self._kinds.clear()
            for ticket in tickets:
                key = (ticket.request.shape, ticket.request.cost_class)
                self._entry(self._medians, key, RollingMedian).observe(ticket.shared)

    def _entry(self, table: OrderedDict[Any, Any], key: Any, make: type[Any]) -> Any:
        known = table.get(key)
        if known is None:
            known = table[key] = make()
            if len(table) > self._max_keys:
                table.popitem(last=False)
        else:
            table.move_to_end(key)
        return known

    # -- shared with the tally ---------------------------------------------------------------------------------------

    def fit(self, shape: Hashable, stage: str) -> AffineFit | None:
        """The fit of a shape and stage, or None until it is ready."""
        fit = self._fits.get((shape, stage))
        return fit if fit is not None and fit.ready and self.affine else None

    def fits(self, shape: Hashable) -> tuple[AffineFit, ...] | None:
        """The fits of all stages of a shape, or None until every one is ready."""
        found = tuple([fit for stage in self.stages if (fit := self.fit(shape, stage)) is not None])
        return found if len(found) == len(self.stages) else None

    def slope(self, fit: AffineFit | None, ticket: Ticket) -> float:
        """Seconds that one more such member adds by this fit, or by the documented estimate. In staged work the cost of
        a step depends on the stage alone."""
        slope = None if fit is None else fit.slope(ticket.request.cost_class if self.one_shot else "")
        return self.estimate(ticket) if slope is None else slope

    def padded(self, n: int) -> int:
        """The size that a padded stage runs for n members."""
        return next((s for s in self.sizes if s >= n), n)

    def snapshot(self) -> list[dict[str, Any]]:
        """Every key: shape, class, stage, samples, median, fixed, marginal, residual (milliseconds)."""
        rows: list[dict[str, Any]] = []
        for (shape, cost_class), known in self._medians.items():
            rows.append(
                {"shape": str(shape), "class": str(cost_class), "stage": None, "samples": known.samples}
                | {"median_ms": round(known.value * 1e3, 4)}
            )
        for (shape, stage), fit in self._fits.items():
            for cost_class in fit.classes:
                slope = fit.slope(cost_class) or 0.0
                rows.append(
                    {"shape": str(shape), "class": str(cost_class), "stage": stage, "samples": fit.samples}
                    | {"ready": fit.ready, "fixed_ms": round(fit.fixed * 1e3, 4), "marginal_ms": round(slope * 1e3, 4)}
                    | {"residual": round(fit.sigma, 4), "drift_alarms": fit.alarms}
                )
        return rows


class _TimeTally(Tally):
    """Seconds of device time; `with_ticket` is what a ticket adds to them."""

    __slots__ = ("_fitted", "_model", "_n", "measured")

    def __init__(self, model: TimeCost) -> None:
        self.cost = self.dearest = 0.0  # not by the base: several are made for each request
        self._model, self._n = model, 0
        self.measured = self._fitted = False
        self.sigma = 0.15

    @property
    def seconds(self) -> float:
        return self.cost if self.measured else 0.0

    @property
    def until_boundary(self) -> float:
        return self.seconds if self._model.one_shot else 0.0

    def with_ticket(self, ticket: Ticket) -> float:
        """Predicted seconds if the ticket joined."""
        raise NotImplementedError

    def alone(self, ticket: Ticket) -> float:
        """Predicted seconds of this ticket alone, after `with_ticket`."""
        raise NotImplementedError

    def offer(self, ticket: Ticket, budget: float, limit: float = inf) -> float:
        return 1.0 if self._takes(ticket, self.with_ticket(ticket), budget, limit) else 0.0

    def grant(self, ticket: Ticket, budget: float, limit: float = inf) -> float:
        cost = self.with_ticket(ticket)  # once: this runs for every member of a batch
        if not self._takes(ticket, cost, budget, limit):
            return 0.0
        self._join(ticket, cost)
        return 1.0

    def add(self, ticket: Ticket, units: float) -> None:
        self._join(ticket, self.with_ticket(ticket))

    def _takes(self, ticket: Ticket, cost: float, budget: float, limit: float) -> bool:
        """Whether it fits. A member that is nearly free may exceed the budget."""
        if self._n and cost > budget * SLACK:
            free = self._fitted and cost <= NEARLY_FREE * max(self.dearest, self.alone(ticket))
            return free and cost <= limit * SLACK
        return cost <= limit * SLACK

    def _join(self, ticket: Ticket, cost: float) -> None:
        self.cost = cost
        self._n += 1
        alone = self.alone(ticket)
        if alone > self.dearest:
            self.dearest = alone


class _OneShotTally(_TimeTally):
    """a + Σ b over the members: one addition per ticket."""

    __slots__ = ("_fixed", "_slopes")

    def __init__(self, model: TimeCost) -> None:
        super().__init__(model)
        self._fixed = 0.0
        self._slopes: dict[Hashable, float] = {}  # marginal seconds of each class

    def with_ticket(self, ticket: Ticket) -> float:
        slope = self._slopes.get(ticket.request.cost_class)
        if slope is None:
            kind = self._model.kind(ticket)
            if not self._n:
                self._fixed, self.measured, self._fitted = kind.fixed, kind.measured, kind.fit is not None
                self.sigma = self.sigma if kind.fit is None else kind.fit.sigma
            slope = self._slopes[ticket.request.cost_class] = kind.slope
        return (self.cost if self._n else self._fixed) + slope

    def alone(self, ticket: Ticket) -> float:
        return self._fixed + self._slopes[ticket.request.cost_class]


class _StagedTally(_TimeTally):
    """Seconds until the last member ends: for each stage but the last a + Σ b over those still before it, and for the
    last a · max(steps) + Σ b · steps. Others enter at the next step. In stages that pad, members share the cost of the
    padded size in proportion."""

    __slots__ = ("_first", "_fits", "_padded", "_plain", "_steps")

    def __init__(self, model: TimeCost) -> None:
        super().__init__(model)
        self._fits: tuple[AffineFit, ...] = ()  # of the stages; none until all are ready
        self._first = len(model.stages)  # the first stage before which a member is
        self._padded = self._plain = 0.0  # Σ of marginal seconds over members: stages that pad, and the others
        self._steps = 0.0  # longest remaining run of the last stage

    def with_ticket(self, ticket: Ticket) -> float:
        if self._n == 0:
            self._fits = self._model.fits(ticket.request.shape) or ()
            self._fitted, self.measured = bool(self._fits), self._model.measured(ticket)
            self.sigma = max([fit.sigma for fit in self._fits], default=self.sigma)
        padded, plain, steps, first = self._price(ticket)
        n = self._n + 1
        total = (self._padded + padded) * self._model.padded(n) / n + self._plain + plain
        if self._fits:
            total += self._fits[-1].fixed * max(self._steps, steps)
            total += sum([fit.fixed for fit in self._fits[min(self._first, first) : -1]])
        return total

    def alone(self, ticket: Ticket) -> float:
        return _StagedTally(self._model).with_ticket(ticket)

    def _join(self, ticket: Ticket, cost: float) -> None:
        super()._join(ticket, cost)
        padded, plain, steps, first = self._price(ticket)
        self._padded += padded
        self._plain += plain
        self._steps, self._first = max(self._steps, steps), min(self._first, first)

    def _price(self, ticket: Ticket) -> tuple[float, float, float, int]:
        """(marginal seconds over the padded stages left, over the others, units of the last stage left, index of its
        current stage); without fits the documented estimate of its remaining work."""
        model, last = self._model, len(self._model.stages) - 1
        if not self._fits:
            return 0.0, model.estimate(ticket) * (ticket.wants / ticket.request.wants), 0.0, last
        # An unknown stage is priced as the last one; the processor should refuse it.
        first = model.stages.index(ticket.stage) if ticket.stage in model.stages else last
        steps = max(0.0, ticket.wants - (last - first))
        padded = plain = 0.0
        for stage, fit in zip(model.stages[first:], self._fits[first:], strict=True):
            seconds = model.slope(fit, ticket) * (steps if fit is self._fits[-1] else 1.0)
            if stage in model.padded_stages:
                padded += seconds
            else:
                plain += seconds
        return padded, plain, steps, first
