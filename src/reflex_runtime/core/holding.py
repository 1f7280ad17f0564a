"""When a batch leaves: whether a free device waits for more requests, and until when.

A batch waits on a free device for three reasons, and only `Holding.until` and `Holding.gap_at` decide it:

    the clock   the holds of the flush policy
    returns     clients whose next request is due, if waiting for them pays (`think_times`): `_for_returns`
    a gap       a group with `gap_chance` runs only if no other group is likely to have a request before its batch ends

A full batch never waits, and a hold ends early enough for the next deadline, with time for one more request. A decision
is valid until the next input, so that `wake_at` is exact; an arrival that cannot change it is ignored (`arrived`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, log

from reflex_runtime.core.flush import Filled, FlushPolicy, Tiers
from reflex_runtime.core.group import Group, GroupConfig
from reflex_runtime.core.order import Partition
from reflex_runtime.core.request import DEFAULT, PREPARING, URGENT, Ticket
from reflex_runtime.core.statistics import Rate
from reflex_runtime.core.think_times import NO_HOLD, Hold


class Holding:
    """The holds of one device. It alone writes the `hold_` fields of a `Partition`.

    free_since: when the device last became free. draining: no holds any more.
    inputs: their number; after each one every hold is decided again. gaps: whether any group waits for gaps.
    """

    def __init__(self, configs: Iterable[GroupConfig]) -> None:
        self.free_since = -inf
        self.draining = False
        self.inputs = 0
        self._idle_after = -1  # the input after which nothing was found to run
        self._ends = inf  # then: when the first hold ends
        self.gaps = any(config.gap_chance for config in configs)
        self._asked = Rate()  # of groups that others yield to

    # -- what happened -----------------------------------------------------------------------------------------------

    def asks(self, group: Group, now: float) -> None:
        """Count a new request of the group, for groups that wait for gaps."""
        if group.config.weight > 0.0:
            self._asked.arrive(now)

    def arrived(self, group: Group, ticket: Ticket, now: float) -> None:
        """A ticket came while nothing could run. If it cannot change that, it is no input: the decision stays valid.

        This is checked only where it is cheap: for one that is still prepared, and for waits for several clients until
        the last of them has come. Most arrivals change nothing, and the device thread need not wake up for them.
        """
        if self._idle_after != self.inputs - 1:
            return
        if ticket.state is not PREPARING:
            if len(group.active) > 1:
                return
            partition = group.active[ticket.request.partition]
            if partition.hold_input != self._idle_after or partition.hold_until <= now:
                return
            if ticket.request.client in group.offenders or partition.residents or group.room is not None:
                return
            if ticket.tier is not DEFAULT or ticket.deadline < inf or group.config.flush.returns <= 0.0:
                return
            partition.hold_for -= 1
            partition.hold_came = True
            if partition.hold_for <= 0:
                return
        self.inputs -= 1

    @staticmethod
    def changed(partition: Partition) -> None:
        """What the partition holds for has changed."""
        partition.hold_input = -1

    def sent(self, partition: Partition) -> None:
        """A batch of the partition left."""
        partition.hold_since = None
        self._idle_after = -1

    # -- when to ask again -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._ends = inf

    def put_off(self, until: float) -> None:
        """A batch waits until then."""
        self._ends = min(self._ends, until)

    def found_nothing(self) -> None:
        """`next_batch` found nothing to run."""
        self._idle_after = self.inputs

    @property
    def current(self) -> bool:
        """Whether nothing was found to run, and no input since could have changed that."""
        return self._idle_after == self.inputs

    def ends_at(self, now: float) -> float:
        """When to ask again: now after an input."""
        return self._ends if self._idle_after == self.inputs else now

    # -- the decision ------------------------------------------------------------------------------------------------

    def until(self, group: Group, partition: Partition, policy: FlushPolicy, filled: Filled, now: float) -> float:
        """The time until which a filled batch waits for more requests. It is sent now if that is not after `now`."""
        full = filled.tally.cost >= policy.max_batch_cost * (1.0 - 1e-9)
        if self.draining or full or filled.passed_over or filled.apart:
            return -inf
        if partition.hold_input != self.inputs or (partition.hold_came and partition.hold_until <= now):
            if filled.size_reached:
                return -inf
            partition.hold_input, partition.hold_came = self.inputs, False
            partition.hold_until = self._decide(group, partition, policy, filled, now)
        if partition.hold_until > now and partition.hold_since is None:
            partition.hold_since = self.free_since
        return partition.hold_until

    def _decide(self, group: Group, partition: Partition, policy: FlushPolicy, filled: Filled, now: float) -> float:
        if not any(policy.hold_max) and policy.returns <= 0.0:
            return -inf
        heads = partition.heads()
        until = min(_first(heads, policy.hold_max), policy.until)
        tightest = partition.deadlines.first()
        partition.hold_for = 0
        if policy.returns > 0.0 and heads[URGENT] is None:
            seconds, expected = self._for_returns(group, partition, policy, filled, heads, now)
            if now + seconds > until:
                until = now + seconds
                partition.hold_for = int(expected + 1e-9) if tightest is None else 0
        if until > now and tightest is not None and filled.tally.seconds > 0.0:
            next_one = filled.tally.seconds + group.cost.line(next(iter(filled.grants)))[1]
            until = min(until, tightest[0] - next_one * (1.0 + 2.0 * filled.tally.sigma))
        return until

    def _for_returns(
        self,
        group: Group,
        partition: Partition,
        policy: FlushPolicy,
        filled: Filled,
        heads: Sequence[float | None],
        now: float,
    ) -> Hold:
        """The wait for clients whose next request is due, if it pays."""
        seconds, queued, returns = filled.tally.seconds, len(filled.grants), group.think_times
        places = filled.places - queued
        if not returns.worth(queued, places, seconds):  # the fixed part is not above it
            return NO_HOLD
        head = next(iter(filled.grants))
        fixed, marginal, _ = group.cost.line(head)
        if not group.cost.told_apart(head):
            fixed = seconds  # until measured, further members count as free
        elif marginal > 0.0 and group.cost.unit == "seconds":
            places = int(min(places, (policy.max_batch_cost - seconds) / marginal + 1e-9))
        oldest = min(h for h in heads if h is not None)
        # From when it could first have been sent: other partitions' batches in between do not restart its hold.
        since = max(oldest, self.free_since if partition.hold_since is None else partition.hold_since)
        longest = since + min(policy.returns, policy.max_batch_cost) - now
        met = sum([ticket.arrived < since for ticket in filled.grants])
        return max(returns.hold(partition.key, now, longest, queued, places, fixed, seconds, now - since, met))

    def gap_at(self, group: Group, grants: Mapping[Ticket, float]) -> float:
        """When a gap long enough for this batch is likely, if no other group has a request until then."""
        if self.draining or not grants:
            return -inf
        model = group.cost
        seconds = model.fixed(next(iter(grants))) + sum(model.marginal(t, units) for t, units in grants.items())
        return self._asked.falls_to(-log(group.config.gap_chance) / seconds) if seconds > 0.0 else -inf


def _first(heads: Sequence[float | None], hold: Tiers) -> float:
    """When the first of these tickets reaches this hold."""
    return min((arrived + h for arrived, h in zip(heads, hold, strict=True) if arrived is not None), default=inf)
