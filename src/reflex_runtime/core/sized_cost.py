"""Learned seconds of one-shot requests that differ in size, such as texts to embed: fixed + seconds a unit · work.

A request wants its size in units and gets all of them in one batch, so that a batch is within its budget of seconds
whatever sizes come together, and clients share the seconds that their sizes take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

from reflex_runtime.core.affine import AffineFit
from reflex_runtime.core.batch import Batch
from reflex_runtime.core.cost import Tally
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Ticket
from reflex_runtime.core.time_cost import NEARLY_FREE

UNMEASURED = 1e-4  # seconds that a unit counts for before anything was measured
_SLACK = 1.0 + 1e-9  # sums of floats


class SizedCost:
    """A `CostModel` by size. Requests of all shapes are learned as one kind.

    curve: the size at which a unit takes twice the work of one in a very small request: work grows with the square of
        the size where all units look at each other. inf: it does not.
    measured: (sizes of the requests, seconds) of batches that ran before.
    """

    unit = "seconds"
    linear = False

    def __init__(self, curve: float = inf, measured: Iterable[tuple[Iterable[float], float]] = ()) -> None:
        if not curve > 0:
            raise ConfigError(f"SizedCost.curve={curve!r}: must be > 0 units")
        self._curve = curve
        self._fit = AffineFit()
        for sizes, seconds in measured:
            self._fit.observe({"": sum(map(self.work, sizes))}, seconds)

    def work(self, size: float) -> float:
        """What a request of that size takes, in units of very small requests."""
        return size * (1.0 + size / self._curve)

    @property
    def ready(self) -> bool:
        """Whether enough was measured to predict."""
        return self._fit.ready

    @property
    def fixed_seconds(self) -> float:
        """Seconds of a batch before its first unit."""
        return self._fit.fixed if self._fit.ready else 0.0

    def seconds(self, size: float) -> float:
        """Seconds that one more request of that size adds to a batch."""
        slope = self._fit.slope("") if self._fit.ready else None
        return self.work(size) * (UNMEASURED if slope is None else slope)

    @property
    def sigma(self) -> float:
        """Relative spread of the measured seconds."""
        return self._fit.sigma

    # -- what the scheduler asks: see `CostModel` ----------------------------------------------------------------------

    def tally(self) -> Tally:
        return _SizedTally(self)

    def estimate(self, ticket: Ticket) -> float:
        return self.seconds(ticket.request.wants)

    def remaining(self, ticket: Ticket) -> float:
        return self.fixed_seconds + self.seconds(ticket.request.wants) if self.ready else 0.0

    def share(self, ticket: Ticket, budget: float, most: int) -> float:
        if not self.ready:
            return 0.0
        each, fixed = self.seconds(ticket.request.wants), self.fixed_seconds
        alike = 1.0 if each <= 0.0 else max(1.0, (budget - fixed) / each)
        return each + fixed / min(float(most), alike)

    def marginal(self, ticket: Ticket, units: float) -> float:
        return self.seconds(ticket.request.wants)

    def fixed(self, ticket: Ticket) -> float:
        return self.fixed_seconds

    def told_apart(self, ticket: Ticket) -> bool:
        return self.ready

    def observe(self, batch: Batch, elapsed: float) -> None:
        self._fit.observe({"": sum(self.work(ticket.request.wants) for ticket in batch.grants)}, elapsed)

    def settled(self, ticket: Ticket) -> None:
        return

    def snapshot(self) -> list[dict[str, Any]]:
        fit = self._fit
        if not fit.samples:
            return []
        each = (fit.slope("") or 0.0) * 1e3
        return [
            {"samples": fit.samples, "ready": fit.ready, "fixed_ms": round(fit.fixed * 1e3, 4)}
            | {"marginal_ms": round(each, 6), "residual": round(fit.sigma, 4), "drift_alarms": fit.alarms}
        ]


class _SizedTally:
    """Sums the seconds of sizes; a request gets all its units or none."""

    __slots__ = ("_fixed", "_model", "_n", "cost", "dearest")
    until_boundary = 0.0

    def __init__(self, model: SizedCost) -> None:
        self._model, self._fixed, self._n = model, model.fixed_seconds, 0
        self.cost = self.dearest = 0.0

    @property
    def seconds(self) -> float:
        return self.cost if self._model.ready else 0.0

    @property
    def sigma(self) -> float:
        return self._model.sigma

    def expect(self, tickets: Iterable[Ticket]) -> None:
        return

    def offer(self, ticket: Ticket, budget: float, limit: float = inf) -> float:
        size = ticket.request.wants
        each = self._model.seconds(size)
        cost = (self.cost if self._n else self._fixed) + each
        if cost > limit * _SLACK:
            return 0.0
        nearly_free = cost <= NEARLY_FREE * max(self.dearest, self._fixed + each)
        return size if not self._n or cost <= budget * _SLACK or nearly_free else 0.0

    def add(self, ticket: Ticket, units: float) -> None:
        each = self._model.seconds(ticket.request.wants)
        self.cost = (self.cost if self._n else self._fixed) + each
        self.dearest = max(self.dearest, self._fixed + each)
        self._n += 1

    def repeat(self, ticket: Ticket, most: int, budget: float) -> int:
        return 0

    def extra(self, tickets: Sequence[Ticket], budget: float) -> Sequence[int]:
        return [0] * len(tickets)
