"""When a batch leaves: whether a free device waits for more requests, and until when.

A batch waits on a free device for three reasons, and only `Holding.until` and `Holding.gap_at` decide it:

    the clock   the holds of the flush policy
    returns     clients whose next request is due, if waiting for them pays: `ThinkTimes.hold`
    a gap       a group with `gap_chance` runs only if no other group is likely to have a request before its batch ends

A full batch never waits, and a hold ends early enough for the next deadline, with time for one more request. A decision
is valid until the next input, so that `wake_at` is exact; an arrival that cannot change it is ignored (`arrived`).

Returns. Cameras send by the clock; robots and files send some time after their answer. Two habits of each client are
kept: the last 32 gaps between its requests, and the last 32 times from an answer to its next request. The more regular
one predicts its next request. Both end when the request can run, after it is prepared (a picture is decoded). Requests
that are being prepared are due for certain, one by one at the pace of those before. With n waiting and a batch whose
fixed part takes a seconds, the batch is held for the h that maximises

    G(h) = a · E(h) − W(h) − (n + P(h)) · h

where E(h) is the expected number of absent clients that can run within h, at most as many as the batch has places for,
W(h) the sum of their expected times until then, and P(h) the number of those being prepared that are not ready then. If
no G(h) > 0, nothing is held. (With T(n) = a + b·n this is E·T(n) − W − P·h − n·(h + b·E): a client that joins saves
itself a whole batch, and lengthens this one for n others.) A hold for a client that is not certain to come ends
JUST_LATE after its time, and is charged for that.

Each client's distribution is summed in at most PARTS steps. If more than FEW are absent, each is taken to come at one
of its past times. The times of all together are spread as their distributions are, and summing them takes a third.

G considers one batch only. But two groups of callers that take turns pay one fixed part more in every cycle than one
group: N callers that are all back ρ after their answer have a cycle of a + b·N + ρ in one group, and of 2a + b·N in
two, because one group comes back while the other runs. So one group is better if ρ < a. ρ is the idle time of the
device so far and the time until nearly all callers that usually come within a of their answer are back. Answers are
written, and requests read, one by one: those that came to a busy device would take their part of ρ too (`_all_back`).
If ρ < a, the device waits for the h that maximises

    (n + E(h)) / (h + held + T(n))

the requests of the batch over the time from its first hold to its end, if that is longer. (Not T(n + E): what comes too
late runs later, and takes its b there.) Here E counts those clients only.

If callers without deadlines do not fit into one batch of the default budget, they share even ones (`_even_part`): those
that the largest batch leaves over would wait for another. If 119 fit, two batches of 64 for 128 callers lower p99 by
43 % and raise the mean by 5 %, three of 84 for 250 lower it by 33 % and raise the mean by 2 %. A budget that was given
may be a limit of memory or of cameras, and batches fill it.

Without holds the mean latency of 8 to 128 callers in a closed loop is 9 to 64 % longer, and that of four cameras of one
rate 20 %. If arrivals do not wait for answers, holds change nothing (docs/benchmarks.md#the-schedulers-rules).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from math import ceil, inf, log

from reflex_runtime.core.flush import Filled, FlushPolicy, Tiers
from reflex_runtime.core.group import Group, GroupConfig
from reflex_runtime.core.order import Partition
from reflex_runtime.core.request import DEFAULT, PREPARING, URGENT, Ticket
from reflex_runtime.core.statistics import Rate, RecentValues

IN_TURNS = 64  # most clients that take turns
RECENT = 128  # absent clients considered for a hold: those answered last
REMEMBERED = 1024  # clients whose habits are kept
HISTORY = 32  # values of each habit
REGULAR = 3  # gaps needed for a prediction
NEARLY = 7.0 / 8.0  # share of the callers that counts as all of them
IRREGULAR = 0.67  # spread of think times over the seconds of a chunk; above it clients that met do not meet again
PACE = 0.125  # weight of the latest time that preparing took
PARTS = 3  # steps by which a habit's distribution is summed
FEW = 24  # absent clients that are considered one by one
NEXT_TIME = 0.6180339887498949  # golden section: its multiples, less their whole parts, are spread evenly over [0, 1)
JUST_LATE = 2.0**-12  # seconds, about 0.25 ms: requests of one moment reach the scheduler one after the other
CLEARLY = 0.0001  # seconds by which gaps must be more regular than think times
BRIEF = 0.0001  # seconds: a shorter hold is not worth it, because ending one takes as long
A_TIE = 1e-9  # seconds of gain, or share of a rate, below which the shorter hold wins

Hold = tuple[float, float]  # seconds, and how many are expected to come meanwhile
NO_HOLD = (0.0, 0.0)
# seconds from now, probability, probability · mean seconds, whether callers are gathered for it, whether it is prepared
_Due = tuple[float, float, float, bool, bool]


class _Client:
    """One client. since, ordered: start of the interval that predicts its next request; its past lengths, sorted."""

    __slots__ = ("answered", "asked", "gaps", "ordered", "partition", "since", "thinks")

    def __init__(self) -> None:
        self.partition: Hashable = None
        self.asked: float | None = None
        self.answered: float | None = None
        self.gaps, self.thinks = RecentValues(HISTORY), RecentValues(HISTORY)
        self.since = 0.0
        self.ordered: list[float] = []

    def answer(self, now: float) -> None:
        assert self.asked is not None
        self.answered = now
        gaps, thinks = self.gaps, self.thinks
        if len(gaps.ordered) >= REGULAR and gaps.spread < thinks.spread - CLEARLY:
            self.since, self.ordered = self.asked, gaps.ordered
        else:
            self.since, self.ordered = now, thinks.ordered

    def due(self, now: float, longest: float, soon: float, found: list[_Due]) -> None:
        """Add its possible times within `longest`, given that it has not come yet. Callers are gathered for a client
        that usually comes within `soon` of its answer."""
        ordered, age = self.ordered, now - self.since
        first = bisect_left(ordered, age - JUST_LATE)
        possible = len(ordered) - first
        if not possible or ordered[first] > age + longest:
            return
        gathers = self.since == self.answered and ordered[len(ordered) // 2] <= soon
        last = bisect_right(ordered, age + longest, first)
        step = 1 + (last - first - 1) // PARTS
        if ordered[last - 1] - ordered[first] <= JUST_LATE:
            step = last - first
        while first < last:
            part = ordered[first : first + step if first + step < last else last]
            share, wait = len(part) / possible, part[-1] - age
            found.append((wait if wait > 0.0 else 0.0, share, sum(part) / possible - share * age, gathers, False))
            first += step


def _all_back(found: Sequence[_Due], met: int) -> float:
    """Seconds until nearly all callers would be back, were they one group. met: those that came to a busy device."""
    gathered = [(wait, share) for wait, share, _, gathers, _ in found if gathers]
    total = missing = sum([share for _, share in gathered])
    for wait, share in gathered:
        missing -= share
        if missing <= (1.0 - NEARLY) * total + A_TIE:
            return wait + (wait - gathered[0][0]) * met / total
    return inf


def _even_part(found: Sequence[_Due], queued: int, most: int) -> int:
    """The batch for callers that do not fit into one of `most`: an even part of them. If those that wait fill it, half
    as many must be expected back: else they may be no callers."""
    back = sum([share for _, share, _, gathers, _ in found if gathers])
    callers = queued + back
    return most if callers <= most or queued > most > 2.0 * back else ceil(callers / ceil(callers / most))


class ThinkTimes:
    """The habits of a group's clients, and the holds that pay. Times in seconds."""

    def __init__(self) -> None:
        self._clients: OrderedDict[Hashable, _Client] = OrderedDict()
        self._absent: OrderedDict[Hashable, _Client] = OrderedDict()  # answered and not back, most recent last
        self._preparing: dict[Ticket, None] = {}  # admitted and soon ready, in that order
        self._pace = 0.0  # seconds from one that is ready to the next, or from its admission
        self._ready_at = -inf

    @property
    def may_come(self) -> int:
        """How many clients may come."""
        return len(self._absent) + len(self._preparing)

    def prepares(self, ticket: Ticket) -> None:
        """The ticket was admitted, and is prepared now."""
        self._preparing[ticket] = None
        self._absent.pop(ticket.request.client, None)

    def prepared(self, ticket: Ticket, now: float) -> None:
        """Its preparation ended."""
        del self._preparing[ticket]
        took = now - max(self._ready_at, ticket.admitted)
        self._pace += (took - self._pace) * (PACE if self._pace else 1.0)
        self._ready_at = now

    def arrived(self, client: Hashable, partition: Hashable, now: float) -> None:
        """A request of the client waits from now on."""
        known = self._clients.get(client)
        if known is None:
            known = self._clients[client] = _Client()
            if len(self._clients) > REMEMBERED:
                self._absent.pop(self._clients.popitem(last=False)[0], None)
        if known.asked is not None:
            known.gaps.add(now - known.asked)
        if known.answered is not None:
            known.thinks.add(now - known.answered)
        known.partition, known.asked, known.answered = partition, now, None
        self._absent.pop(client, None)

    def answered(self, client: Hashable, now: float) -> None:
        """The client got its answer and has no other ticket."""
        known = self._clients.get(client)
        if known is None:
            return
        known.answer(now)
        self._clients.move_to_end(client)
        self._absent[client] = known

    def in_turns(self, seconds: float, now: float) -> float:
        """Share of the device that the active clients take if each comes in turn, for `seconds`. inf if two that once
        met would meet again, because they are not regular enough.

        Considers the most recently answered clients until one that has gone. inf for more than IN_TURNS, for none, and
        while nothing was measured (0.0 seconds).
        """
        if seconds <= 0.0:
            return inf
        share = longest = 0.0
        known = (c for c in reversed(self._clients.values()) if c.answered is not None or c.thinks.ordered)
        for count, client in enumerate(known):
            ordered = client.thinks.ordered
            longest = max(longest, ordered[-1] if ordered else 0.0)
            if client.answered is not None and now - client.answered > 2.0 * longest:
                break
            if count == IN_TURNS or not ordered or client.thinks.spread > IRREGULAR * seconds:
                return inf
            share += seconds / (seconds + ordered[len(ordered) // 2])
        return share or inf

    def hold(
        self,
        partition: Hashable,
        now: float,
        longest: float,
        queued: int,
        places: int,
        fixed: float,
        seconds: float,
        held: float,
        met: int,
        even: bool = False,
    ) -> tuple[Hold, Hold]:
        """Two holds of a batch of the partition, at most for `longest`: by its gain G, and to gather callers. The
        longer one counts.

        queued: n. places: how many more may join. fixed: a. seconds: T(n). held: its hold so far, in seconds. met: of
        n, those that came to a busy device. even: whether callers that are too many for one batch share even ones.
        """
        if longest <= 0.0 or min(self.may_come, places) * fixed <= queued * BRIEF:  # it would not pay if all came now
            return NO_HOLD, NO_HOLD
        found = self.expected(partition, now, longest, fixed)
        places = _even_part(found, queued, queued + places) - queued if even else places
        if not found or places <= 0:
            return NO_HOLD, NO_HOLD
        found.sort()
        many = len(self._absent) > FEW
        best = gathered = NO_HOLD
        gain = expected = waits = back = 0.0
        rate = queued / (held + seconds)
        gathering = _all_back(found, met) <= fixed - held
        left = sum([due[4] for due in found])
        for wait, share, mean, gathers, prepared in found:
            left -= prepared
            expected += share
            waits += mean
            h = min(wait + JUST_LATE, longest)
            g = fixed * (expected if expected < places else places) - waits
            g -= (queued + left) * (wait if prepared else h)
            if g > gain + A_TIE:
                best, gain = (h, expected), g
            if gathering and gathers and held + wait <= fixed:
                back += share
                r = (queued + (back if back < places else places)) / (held + wait + seconds)
                if r > rate * (1.0 + A_TIE):
                    gathered, rate = (h, expected), r
            if many and expected >= places and (back >= places or not gathering):
                break  # no time is below zero: from here on both only fall
        return best, gathered

    def expected(self, partition: Hashable, now: float, longest: float, soon: float, most: int = RECENT) -> list[_Due]:
        """When the partition's absent and prepared clients may come, within `longest`, in any order. most: of many."""
        found = self._ready_soon(partition, longest) if self._preparing else []
        if len(self._absent) <= FEW:
            for client in self._absent.values():
                if client.partition == partition:
                    client.due(now, longest, soon, found)
            return found
        part = 0.0
        for client in islice(reversed(self._absent.values()), most):
            ordered = client.ordered
            if not ordered or client.partition != partition:
                continue
            age, first, n = now - client.since, 0, len(ordered)
            if ordered[0] < age - JUST_LATE:
                first = bisect_left(ordered, age - JUST_LATE)
                if first == n:
                    continue
            part += NEXT_TIME
            if part >= 1.0:
                part -= 1.0
            wait = ordered[first + int((n - first) * part)] - age
            if wait <= longest:
                wait = wait if wait > 0.0 else 0.0
                gathers = ordered[n // 2] <= soon and client.since == client.answered
                found.append((wait, 1.0, wait, gathers, False))
        return found

    def _ready_soon(self, partition: Hashable, longest: float) -> list[_Due]:
        """When those that are prepared are ready, within `longest`: one by one."""
        count = sum([ticket.request.partition == partition for ticket in self._preparing])
        times = [(i + 1) * self._pace for i in range(count)]
        return [(ready, 1.0, ready, True, True) for ready in times if ready <= longest]


# -- the holds of a device ---------------------------------------------------------------------------------------------


class Holding:
    """The holds of one device. It alone writes the `hold_` fields of a `Partition`.

    free_since: when the device last became free. draining: nothing is held.
    inputs: their number; each one lets every hold be decided again. think_times: of the clients of each group.
    idle_after: the input after which nothing was found to run. ends: then, when the first hold ends.
    """

    def __init__(self, configs: Iterable[GroupConfig]) -> None:
        self.think_times = {config.name: ThinkTimes() for config in configs}
        self.free_since = -inf
        self.draining = False
        self.inputs = 0
        self.idle_after = -1
        self.ends = inf
        self._gaps = any(config.gap_chance for config in configs)
        self._asked = Rate()  # of groups that others yield to

    # -- inputs ------------------------------------------------------------------------------------------------------

    def entered(self, group: Group, ticket: Ticket, now: float) -> None:
        """A request can run from now on."""
        if self._gaps and group.config.weight > 0.0:
            self._asked.arrive(now)
        self.think_times[group.name].arrived(ticket.request.client, ticket.request.partition, now)

    def arrived(self, group: Group, ticket: Ticket, now: float) -> None:
        """A ticket came while nothing could run. If it cannot change that, it is no input, and wakes no device thread.

        This is checked where it is cheap: for a ticket that is still prepared, and while a hold waits for several
        clients, until the last of them has come.
        """
        if self.idle_after != self.inputs - 1:
            return
        if ticket.state is not PREPARING:
            if len(group.active) > 1:
                return
            partition = group.active[ticket.request.partition]
            if partition.hold_input != self.idle_after or partition.hold_until <= now:
                return
            if ticket.request.client in group.offenders or partition.residents:
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
        """Decide the hold of the partition again: what it waits for has changed."""
        partition.hold_input = -1

    def sent(self, partition: Partition) -> None:
        """A batch of the partition left."""
        partition.hold_since = None
        self.idle_after = -1

    # -- until when it is valid --------------------------------------------------------------------------------------

    def put_off(self, until: float) -> None:
        """Note that a batch waits until that time."""
        self.ends = min(self.ends, until)

    @property
    def current(self) -> bool:
        """Whether nothing was found to run, and no input since could have changed that."""
        return self.idle_after == self.inputs

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
        seconds, queued, returns = filled.tally.seconds, len(filled.grants), self.think_times[group.name]
        places = filled.places - queued
        if places <= 0 or not returns.may_come:
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
        even = policy.times_fixed > 0.0
        return max(returns.hold(partition.key, now, longest, queued, places, fixed, seconds, now - since, met, even))

    def even_part(self, group: Group, partition: Partition, full: Filled, now: float) -> int:
        """The members of a full batch that are an even part of all callers."""
        fixed = group.cost.line(next(iter(full.grants)))[0]
        found = self.think_times[group.name].expected(partition.key, now, inf, fixed, REMEMBERED)
        return _even_part(found, partition.waiting, len(full.grants))

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
