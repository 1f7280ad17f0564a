"""How long batches may wait, and how large they may be.

A `FlushPolicy` is a frozen value, not behaviour: two holds per tier, the conditions that end them, and two ceilings
express every documented rule. `holding` uses it to decide when a batch leaves, and `cause_of` names the cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Self

from reflex_runtime.core.batch import Cause
from reflex_runtime.core.errors import ConfigError

Tiers = tuple[float, float, float]
_NONE: Tiers = (0.0, 0.0, 0.0)
BUDGET = 0.100  # seconds that a batch may take by default
TIMES_FIXED = 8.0  # and how many times its fixed part, where that is more: 1/8 of the device's time goes to fixed parts


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """How long, and how large.

    max_batch_cost: ceiling in the cost model's unit.
    max_batch_size: most tickets in a batch, residents included.
    hold_min, hold_max: seconds from arrival that each tier (urgent, default, background) may wait for more requests on
        a free device: hold_max while fewer than `target` wait, hold_min once that many do. The added latency is at most
        hold_max; 0 sends at once.
    target: number of requests to wait for; it does not limit a batch. A target above max_batch_size holds full batches.
    quiet: seconds without an arrival in the partition after which a hold below the target ends, once its hold_min is
        over. Not while a batch of the partition is in flight; 0 switches it off.
    until: time after which a hold below the target ends in any case; for controllers.
    times_fixed: a batch may also take this many times the fixed part of its kind, if that is longer than max_batch_cost
        and others need not wait for it. 0 switches it off. It needs a `Planner`, see there.
    group_commit: while a batch of the partition is in flight, waiting requests are held up to hold_max, also at the
        target: the return of that batch is the next occasion to send, so waiting costs little. A full batch is sent.
    returns: longest hold, in seconds, for clients whose next request is due, if it pays (`returns.py`); counted
        from max(oldest arrival, device free), and never longer than max_batch_cost. 0 switches it off.
    shed: refuse waiting requests whose deadline cannot be met any more, and choose the set of largest expected value
        when deadlines are at risk.
    """

    max_batch_cost: float = inf
    max_batch_size: int = 4096
    hold_min: Tiers = (0.0, 0.0, 0.0)
    hold_max: Tiers = (0.0, 0.0, 0.0)
    target: int = 1
    returns: float = 0.0
    shed: bool = False
    quiet: float = 0.0
    group_commit: bool = False
    until: float = inf
    times_fixed: float = 0.0

    def __post_init__(self) -> None:
        _check("max_batch_cost", self.max_batch_cost, 0.0, inf, exclusive=True)
        _check("max_batch_size", self.max_batch_size, 1, 1_000_000)
        _check("target", self.target, 1, 1_000_000)
        if self.returns != inf:
            _check("returns", self.returns, 0.0, 60.0)
        _check("quiet", self.quiet, 0.0, 3600.0)
        _check("times_fixed", self.times_fixed, 0.0, 1000.0)
        for name, tiers in (("hold_min", self.hold_min), ("hold_max", self.hold_max)):
            for value in tiers:
                _check(name, value, 0.0, 3600.0)

    @classmethod
    def window(cls, max_batch_cost: float | None, batch_timeout: float = inf, max_batch_size: int = 256) -> Self:
        """The default: work conserving, held only for expected returns, shedding only what has a deadline.

        max_batch_cost: None for BUDGET, or TIMES_FIXED times the fixed part where that is more; it needs a `Planner`.
        """
        times = TIMES_FIXED if max_batch_cost is None else 0.0
        cost = BUDGET if max_batch_cost is None else max_batch_cost
        return cls(cost, max_batch_size, returns=batch_timeout, shed=True, times_fixed=times)

    @classmethod
    def by_cost(cls, max_batch_cost: float, batch_timeout: float, max_batch_size: int = 4096) -> Self:
        """The documented literal rule: wait out the timeout unless the summed estimate reaches the budget."""
        hold = (0.0, batch_timeout, batch_timeout)
        return cls(max_batch_cost=max_batch_cost, max_batch_size=max_batch_size, hold_min=hold, hold_max=hold, target=1)

    @classmethod
    def by_size(cls, max_batch_size: int, max_latency: float) -> Self:
        """Send at a count, or when the oldest has waited `max_latency` seconds."""
        hold = (0.0, max_latency, max_latency)
        return cls(max_batch_size=max_batch_size, hold_min=hold, hold_max=hold)

    @classmethod
    def by_priority(
        cls,
        max_batch_size: int = 16,
        target: int = 2,
        min_hold: float = 0.00075,
        max_hold: float = 0.003,
        background_extra: float = 0.002,
    ) -> Self:
        """Urgent at once; default after min_hold, up to max_hold while more keep coming and fewer than the target wait
        or while a batch is in flight; background a little longer."""
        longest = max_hold + background_extra
        return cls(
            max_batch_size=max_batch_size,
            hold_min=(0.0, min_hold, longest),
            hold_max=(0.0, max_hold, longest),
            target=target,
            quiet=min_hold,
            group_commit=True,
        )

    @classmethod
    def every_step(cls, max_num_batched_tokens: int, max_num_seqs: int = 256) -> Self:
        """Continuous batching: a step leaves whenever the device is free, within a token budget."""
        return cls(max_batch_cost=max_num_batched_tokens, max_batch_size=max_num_seqs)

    @property
    def holds(self) -> bool:
        """Whether the policy has a hold for any tier."""
        return self.hold_max != _NONE or self.hold_min != _NONE


@dataclass(slots=True)
class Fill:
    """The facts of a filled batch from which its cause follows; not frozen, because that takes as long again."""

    cost: float
    dearest: float
    passed_over: bool  # something waiting did not fit the budget
    size_reached: bool
    urgent: bool
    newcomers: bool
    residents: bool
    held: bool
    draining: bool
    apart: bool = False  # runs alone, because the request or its client made a call fail


def cause_of(fill: Fill, budget: float) -> Cause:
    """The cause of a batch. Precedence: single, apart, budget, size, then the event that ended the wait."""
    reached = budget * (1.0 - 1e-9)
    if fill.newcomers and fill.dearest > budget * (1.0 + 1e-9):
        return Cause.SINGLE
    if fill.apart:
        return Cause.APART
    if fill.newcomers and (fill.cost >= reached or fill.passed_over):
        return Cause.BUDGET
    if fill.newcomers and fill.size_reached:
        return Cause.SIZE
    if fill.urgent:
        return Cause.URGENT
    if fill.residents:
        return Cause.STEP
    if fill.draining:
        return Cause.DRAIN
    return Cause.TIMEOUT if fill.held else Cause.IDLE


def _check(name: str, value: float, low: float, high: float, exclusive: bool = False) -> None:
    if not (low < value <= high if exclusive else low <= value <= high):
        raise ConfigError(f"FlushPolicy.{name}={value!r}: must be in {'(' if exclusive else '['}{low:g}, {high:g}]")
