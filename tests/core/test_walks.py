"""Ways to decide that must decide the same: queues sorted once or walked off the heap, and equals taken at once or one
by one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from core.helpers import outcome_of, scheduler_of, trained
from reflex_runtime.core import order
from reflex_runtime.core.batch import Batch, Done, More
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.errors import Rejected
from reflex_runtime.core.events import RequestSettled
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.order import Cursor, Partition
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from thinned import thinned


def history(seed: int) -> list[list[int]]:
    """The batches of one random history, by order of arrival."""
    rng = random.Random(seed)
    scheduler = scheduler_of(flush=FlushPolicy.window(0.4, 0.0, 12), promote_after=0.2)
    now, batches = 0.0, []
    waiting: list[Ticket] = []
    for _ in range(400):
        now += rng.choice((0.0, 0.001, 0.02))
        roll = rng.random()
        if roll < 0.75:
            request = Request(
                client=rng.randrange(6),
                priority=rng.choice(list(Priority)),
                weight=rng.choice((1.0, 2.0)),
                cost_class=rng.choice("xy"),
                time_limit=rng.choice((None, None, 0.3, 2.0)),
            )
            try:
                waiting.append(scheduler.submit(request, now))
            except Rejected:
                continue
        elif roll < 0.85 and waiting:
            scheduler.cancel(waiting.pop(rng.randrange(len(waiting))), now)
        elif (batch := scheduler.next_batch(now)) is not None:
            batches.append([ticket.seq for ticket in batch.grants])
            elapsed = 0.020 + 0.010 * len(batch)
            now += elapsed
            scheduler.complete(batch, [Done()] * len(batch), elapsed, now)
    return batches


@pytest.mark.parametrize("seed", range(20))
def test_sorted_once_or_off_the_heap_is_the_same_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lined_up = history(seed)
    monkeypatch.setattr(order, "LINED_UP", 0)
    assert history(seed) == lined_up
    assert sum(map(len, lined_up)) > 50


A, B = 0.010, 0.004  # seconds: fixed and marginal


class Robots:
    """A random history of clients that mostly wait once, and whose requests mostly cost the same.

    Some histories have some that are not so: a client that waits twice, a dear class, a held ticket, one that stays for
    another step; some have two batches in flight.
    """

    def __init__(self, seed: int) -> None:
        rng = self.random = random.Random(seed)
        self.odd = rng.choice((0.0, 0.0, 0.03, 0.5))
        self.dear = rng.choice((0.0, 0.3))
        self.limits: Sequence[float | None] = rng.choice(
            ((None,), (0.03, 0.06, 0.09, 0.12, 0.2), (None, 0.05, 0.1), (0.08,), (None, 9.0))
        )
        self.tiers = rng.choice(((Priority.DEFAULT,), (Priority.DEFAULT, Priority.URGENT, Priority.BACKGROUND)))
        learned = rng.choice((trained(A, B), trained(A, B, sizes=(1,) * 8), trained(0.0, 0.020), trained(A, B, (1,))))
        flush = FlushPolicy.window(rng.choice((0.05, 0.1, 0.3)), rng.choice((0.0, 0.005)), rng.choice((4, 16, 64)))
        self.several = rng.choice((1, 1, 1, 2))
        self.stay = rng.choice((0.0, 0.0, 0.0, 0.5))
        self.scheduler: Scheduler = scheduler_of(self.several, flush=flush, cost=lambda: learned, promote_after=0.05)
        self.now, self.log = 0.0, [""]
        self.running: list[Batch] = []

    def run(self) -> list[str]:
        """Everything that was decided, to the last bit."""
        for _ in range(60):
            for _ in range(self.random.choice((1, 4, 40))):
                self.submit()
            self.decide()
            self.now += self.random.choice((0.0, 0.001, 0.02))
        return self.log

    def submit(self) -> None:
        rng, scheduler = self.random, self.scheduler
        client = rng.randrange(60)
        odd = rng.random() < self.odd
        if scheduler._groups["default"].unsettled_of(client) and not odd:
            return
        request = Request(
            client=client,
            priority=rng.choice(self.tiers),
            time_limit=rng.choice(self.limits),
            weight=rng.choice((1.0, 1.0, 3.0)),
            cost_class="dear" if odd and rng.random() < self.dear else "",
        )
        try:
            ticket = scheduler.submit(request, self.now)
        except Rejected as error:
            self.log.append(f"{self.now!r} {error}")
            return
        if odd and rng.random() < self.dear:
            scheduler.hold(ticket, self.now)

    def decide(self) -> None:
        scheduler = self.scheduler
        batch = scheduler.next_batch(self.now)
        while scheduler.behind:  # what must leave does so in slices, which differ
            if batch is None:
                batch = scheduler.next_batch(self.now)
            else:
                scheduler.expire(self.now)
        late = [
            f"{e.ticket.seq}:{outcome_of(e.ticket)}" for e in scheduler.take_events() if isinstance(e, RequestSettled)
        ]
        self.log.append(f"{self.now!r} {late} {scheduler.wake_at()!r}")
        if batch is not None:
            grants = [(t.seq, units) for t, units in batch.grants.items()]
            self.log.append(f"{batch.cause} {batch.cost!r} {batch.expected!r} {grants}")
            self.running.append(batch)
        if len(self.running) == self.several:
            batch = self.running.pop(0)
            elapsed = (A + B * len(batch)) * self.random.uniform(0.9, 1.1)
            self.now += elapsed
            outcomes = [More() if self.random.random() < self.stay else Done() for _ in batch.grants]
            scheduler.complete(batch, outcomes, elapsed, self.now)
            scheduler.take_events()


@pytest.mark.parametrize("block", thinned(range(5), [0, 1]))
def test_equals_taken_at_once_or_one_by_one_are_the_same_decisions(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"at once": 0, "one by one": 0}
    sort = Cursor.fixed_order

    def counted(partition: Partition) -> list[Ticket] | None:
        line = sort(partition)
        seen["one by one" if line is None else "at once"] += 1
        return line

    for seed in range(12 * block, 12 * block + 12):
        monkeypatch.undo()
        monkeypatch.setattr(Cursor, "fixed_order", counted)
        at_once = Robots(seed).run()
        monkeypatch.setattr(Cursor, "fixed_order", lambda partition: None)
        monkeypatch.setattr(type(TimeCost().tally()), "repeat", lambda *_: 0)
        assert Robots(seed).run() == at_once
    assert seen["at once"] > 200  # in each fifth
    assert seen["one by one"] > 100  # beside those where residents are
