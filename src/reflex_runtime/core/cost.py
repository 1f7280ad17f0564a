"""Cost models: the cost of a request, and how much of it fits into a batch.

A `CostModel` answers for one group. To fill a batch the scheduler opens a `Tally`, offers tickets to it one by one and
adds those it takes; the tally keeps the running total, so nothing is ever summed again. Five models, one protocol:

    UnitCost    every request costs 1: a batch size
    TimedUnits  the same, and learns how long batches take, to know when a hold pays
    TokenCost   a request takes as many of the units it wants as are left: a token budget
    TimedTokens the same within a promised time between two tokens (`token_budget.py`)
    TimeCost    learned device seconds, for one-shot work and for work in stages and steps (`time_cost.py`)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Ticket
from reflex_runtime.core.statistics import AffineFit

WARM_SAMPLES = 3  # measurements before a prediction counts


class Tally(Protocol):
    """The running total of one batch being filled.

    cost: predicted cost of what was added, in the model's unit. dearest: cost of the dearest member alone.
    seconds: measured prediction of the device time, 0.0 while the model knows none; sigma: its relative spread.
    until_boundary: seconds until the next boundary at which others may enter; 0.0 when unknown.
    """

    cost: float
    dearest: float

    @property
    def seconds(self) -> float: ...
    @property
    def sigma(self) -> float: ...
    @property
    def until_boundary(self) -> float: ...

    def expect(self, tickets: Iterable[Ticket]) -> None:
        """These residents want one unit and are surely added: what is granted before leaves room for them. Called once,
        before `offer`, in groups with resources."""

    def offer(self, ticket: Ticket, budget: float, limit: float = inf) -> float:
        """Units the ticket could be granted; 0.0 when it does not fit.

        budget: ceiling on cost, with the exceptions of contract B4. limit: ceiling on seconds, without exception.
        """

    def add(self, ticket: Ticket, units: float) -> None:
        """Take the ticket with what `offer` granted it."""

    def extra(self, tickets: Sequence[Ticket], budget: float) -> Sequence[int]:
        """How many units beyond those it wants each of these members may get (`Ticket.extra`)."""

    def repeat(self, ticket: Ticket, most: int, budget: float) -> int:
        """Add up to `most` tickets of this cost at once, as long as they plainly fit; returns how many.

        The total equals that of `offer` and `add` one by one. 0 if the model has no faster way, or none fits.
        """


class CostModel(Protocol):
    """What requests of one group cost. All seconds; see the module docstring."""

    unit: str

    @property
    def linear(self) -> bool:
        """Whether a batch of equal requests takes fixed + marginal · n seconds."""

    def tally(self) -> Tally:
        """Start filling a batch."""

    def estimate(self, ticket: Ticket) -> float:
        """Documented estimate of the whole request, in the model's unit."""

    def remaining(self, ticket: Ticket) -> float:
        """Seconds until the ticket is answered if it ran alone from now; 0.0 while nothing was measured."""

    def share(self, ticket: Ticket, budget: float, most: int) -> float:
        """The ticket's part of the device seconds of a full batch of its kind, all its steps together.

        budget, most: limits of a batch's cost and size. 0.0 if not learned yet, or if the model knows no times.
        """

    def shared(self, rows: int) -> float:
        """The most members of a step that clients share, if those of all but one of them are so many; inf while it is
        not known how much longer others make it."""

    def marginal(self, ticket: Ticket, units: float) -> float:
        """The cost that this grant adds to a batch: the part of the charge known before the batch is complete."""

    def fixed(self, ticket: Ticket) -> float:
        """The fixed cost of a batch of the ticket's shape and stage, which its members share equally."""

    def told_apart(self, ticket: Ticket) -> bool:
        """Whether batches of two or more sizes were measured, so that fixed and marginal seconds are known
        separately."""

    def observe(self, batch: Batch, elapsed: float) -> None:
        """Learn from a batch that ran without a fault. elapsed: seconds."""

    def settled(self, ticket: Ticket) -> None:
        """Learn from a request that ran to its end."""

    def snapshot(self) -> list[dict[str, Any]]:
        """Everything learned, for people: one mapping per key, JSON-safe."""


def tally_of(model: CostModel, grants: Mapping[Ticket, float]) -> Tally:
    """The tally of these grants."""
    tally = model.tally()
    for ticket, units in grants.items():
        tally.add(ticket, units)
    return tally


def line_of(model: CostModel, ticket: Ticket) -> tuple[float, float, float]:
    """(fixed, marginal, sigma) seconds of batches of tickets like this one."""
    tally = model.tally()
    tally.add(ticket, 1.0)
    one = tally.seconds
    tally.add(ticket, 1.0)
    marginal = max(0.0, tally.seconds - one)
    return max(0.0, one - marginal), marginal, tally.sigma


class _UnitTally:
    """Counts requests. Budget is the largest count."""

    __slots__ = ("cost", "dearest")
    seconds = sigma = until_boundary = 0.0

    def __init__(self) -> None:
        self.cost = self.dearest = 0.0

    def expect(self, tickets: Iterable[Ticket]) -> None:
        return

    def offer(self, ticket: Ticket, budget: float, limit: float = inf) -> float:
        return 1.0 if self.cost == 0.0 or self.cost + 1.0 <= budget else 0.0

    def add(self, ticket: Ticket, units: float) -> None:
        self.cost += 1.0
        self.dearest = 1.0

    def extra(self, tickets: Sequence[Ticket], budget: float) -> Sequence[int]:
        return [0] * len(tickets)

    def repeat(self, ticket: Ticket, most: int, budget: float) -> int:
        n = int(min(most, max(budget, 1.0)))
        if n > 0:
            self.cost, self.dearest = float(n), 1.0
        return n


class UnitCost:
    """Every request costs 1 a batch: the budget is a batch size. It knows nothing of time."""

    unit = "requests"
    linear = True

    def tally(self) -> Tally:
        return _UnitTally()

    def estimate(self, ticket: Ticket) -> float:
        return 1.0

    def remaining(self, ticket: Ticket) -> float:
        return 0.0

    def share(self, ticket: Ticket, budget: float, most: int) -> float:
        return 0.0

    def shared(self, rows: int) -> float:
        return inf

    def marginal(self, ticket: Ticket, units: float) -> float:
        return 1.0

    def fixed(self, ticket: Ticket) -> float:
        return 0.0

    def told_apart(self, ticket: Ticket) -> bool:
        return True

    def observe(self, batch: Batch, elapsed: float) -> None:
        return

    def settled(self, ticket: Ticket) -> None:
        return

    def snapshot(self) -> list[dict[str, Any]]:
        return []


class _TimedTally(_UnitTally):
    """Counts requests and predicts what so many take."""

    __slots__ = ("_fit",)

    def __init__(self, fit: AffineFit) -> None:
        super().__init__()
        self._fit = fit

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self._fit.predict({"": self.cost}) if self._fit.samples >= WARM_SAMPLES else 0.0

    @property
    def sigma(self) -> float:  # type: ignore[override]
        return self._fit.sigma


class TimedUnits(UnitCost):
    """Every request costs 1 a batch, and clients share requests, not time. Batch times are learned too, but only to
    decide whether a hold pays; no request is refused by them."""

    def __init__(self) -> None:
        self._fit = AffineFit()

    def forget(self) -> None:
        """Learn anew: another processor runs the batches."""
        self._fit = AffineFit()

    def tally(self) -> Tally:
        return _TimedTally(self._fit)

    def told_apart(self, ticket: Ticket) -> bool:
        return self._fit.ready

    def observe(self, batch: Batch, elapsed: float) -> None:
        self._fit.observe({"": float(len(batch))}, elapsed)

    def snapshot(self) -> list[dict[str, Any]]:
        fit = self._fit
        marginal = fit.slope("") or 0.0
        times = {"fixed_ms": round(fit.fixed * 1e3, 4), "marginal_ms": round(marginal * 1e3, 4)}
        return [{"samples": fit.samples, "ready": fit.ready, **times}] if fit.samples else []


class TokenTally:
    """Counts granted units; grants what is left, at most `threshold` per ticket and step."""

    __slots__ = ("_threshold", "cost", "dearest")
    seconds = sigma = until_boundary = 0.0

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self.cost = self.dearest = 0.0

    def expect(self, tickets: Iterable[Ticket]) -> None:
        return

    def offer(self, ticket: Ticket, budget: float, limit: float = inf) -> float:
        units = ticket.wants  # compared one by one: every resident asks at every step
        if units > self._threshold:
            units = self._threshold
        if units > budget - self.cost:
            units = budget - self.cost
        return units if units > 0.0 else 0.0

    def add(self, ticket: Ticket, units: float) -> None:
        self.cost += units
        if units > self.dearest:
            self.dearest = units

    def extra(self, tickets: Sequence[Ticket], budget: float) -> Sequence[int]:
        return [0] * len(tickets)  # what they cost in time is not known

    def repeat(self, ticket: Ticket, most: int, budget: float) -> int:
        return 0


class TokenCost(UnitCost):
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

    def estimate(self, ticket: Ticket) -> float:
        return ticket.wants

    def marginal(self, ticket: Ticket, units: float) -> float:
        return units
