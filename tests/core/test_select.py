"""Whom to send when deadlines are at risk (contract B17, SCHEDULING: largest expected window), against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import erf, inf, log, sqrt
from random import Random

import pytest

from reflex_runtime.core.batch import Batch, More
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.errors import Shed
from reflex_runtime.core.flush import THRESHOLDS, Filled, FlushPolicy, at_risk, window
from reflex_runtime.core.request import Priority, Request, Ticket

from .helpers import ask, finish, ids, measure, outcome_of, scheduler_of, serve, settled, take, trained

A, B = 0.020, 0.010  # seconds: fixed and marginal


def model() -> TimeCost:
    return trained(A, B, sizes=(1, 2, 4, 8) * 30)


class Seen:
    """The pieces `window` is given, made the slow way."""

    def __init__(self, slacks: Sequence[float], weights: Sequence[float], budget: float = inf) -> None:
        self.model, self.budget = model(), budget
        self.tickets = [
            Ticket(Request(client=i, time_limit=None if s == inf else s, weight=w), i, 0.0)
            for i, (s, w) in enumerate(zip(slacks, weights, strict=True))
        ]
        self.candidates = [t for t in self.tickets if t.deadline >= self.model.remaining(t)]
        self.full = Filled({}, self.model.tally())
        for t in self.tickets:
            if self.full.tally.offer(t, budget):
                self.full.tally.add(t, 1.0)
                self.full.grants[t] = 1.0

    def seconds(self, some: Sequence[Ticket]) -> float:
        tally = self.model.tally()
        for t in some:
            tally.add(t, 1.0)
        return tally.cost

    def fit(self, some: Sequence[Ticket], limit: float) -> tuple[Sequence[Ticket], float]:
        chosen: list[Ticket] = []
        for t in some:
            if self.seconds([*chosen, t]) <= min(limit, self.budget) * (1 + 1e-9):
                chosen.append(t)
        return chosen, self.seconds(chosen)

    def score(self, some: Sequence[Ticket]) -> float:
        """Σ w · Φ(ln(slack ÷ T) ÷ σ), straight from the definition."""
        seconds, sigma = self.seconds(some), max(0.01, self.full.tally.sigma)
        total = 0.0
        for t in some:
            chance = 1.0 if t.deadline == inf else 0.5 * (1.0 + erf(log(t.deadline / seconds) / sigma / sqrt(2.0)))
            total += 10.0 * t.request.weight * chance
        return total

    def window(self) -> Sequence[Ticket]:
        return window(self.candidates, self.full, self.fit, 0.0)


def histories(count: int) -> list[Seen]:
    random = Random(11)
    out = []
    for _ in range(count):
        n = random.randint(1, 7)
        slacks = [random.choice([random.uniform(0.031, 0.12), inf]) for _ in range(n)]
        weights = [random.choice([1.0, 1.0, 3.0]) for _ in range(n)]
        out.append(Seen(slacks, weights, random.choice([inf, 0.061])))
    return out


def test_the_window_is_the_best_of_all_thresholds_and_factors() -> None:
    for seen in histories(150):
        sigma = max(0.01, seen.full.tally.sigma)
        risky = seen.full.tally.seconds * (1 + 2 * sigma)
        slacks = sorted({t.deadline for t in seen.candidates if t.deadline < risky})
        assert len(slacks) <= THRESHOLDS
        scores = [
            seen.score(chosen)
            for s in [*slacks, risky]
            for f in (1.0, 1.0 + 2.0 * sigma)
            if (chosen := seen.fit([t for t in seen.candidates if t.deadline >= s], s / f)[0])
        ]
        if scores:
            assert seen.score(seen.window()) == pytest.approx(max(scores), abs=0.01)


def test_the_window_is_close_to_the_best_of_all_subsets() -> None:
    """Value within a few percent of the optimum in all, and never less than half of it in one batch."""
    won = best = 0.0
    for seen in histories(100):
        if not at_risk(seen.full, 0.0) or not seen.candidates:
            continue
        fits = [
            subset
            for r in range(1, len(seen.candidates) + 1)
            for subset in combinations(seen.candidates, r)
            if r == 1 or seen.seconds(subset) <= seen.budget * (1 + 1e-9)
        ]
        top = max(seen.score(subset) for subset in fits)
        got = seen.score(seen.window())
        assert got <= top + 0.01
        if top > 1.0:
            assert got >= 0.5 * top
            won, best = won + got, best + top
    assert won >= 0.93 * best


def test_no_more_thresholds_are_tried_than_sixteen() -> None:
    calls: list[float] = []
    seen = Seen([0.035 + 0.001 * i for i in range(60)], [1.0] * 60)

    def fit(some: Sequence[Ticket], limit: float) -> tuple[Sequence[Ticket], float]:
        calls.append(limit)
        return seen.fit(some, limit)

    window(seen.candidates, seen.full, fit, 0.0)
    assert len(calls) <= 2 * (THRESHOLDS + 1)


# -- in the scheduler --------------------------------------------------------------------------------------------------


def window_scheduler(size: int = 256, **config: object):  # type: ignore[no-untyped-def]
    return scheduler_of(flush=FlushPolicy.window(1.0, 0.005, size), cost=model, **config)


def test_b17_everything_goes_when_nothing_is_at_risk() -> None:
    scheduler = window_scheduler()
    for i in range(6):
        ask(scheduler, client=i, time_limit=0.5)
    assert len(take(scheduler, 0.0)) == 6


def test_b17_the_batch_is_sized_so_that_its_members_are_in_time() -> None:
    scheduler = window_scheduler()
    for i in range(20):
        ask(scheduler, client=i, time_limit=0.100)
    batch = take(scheduler, 0.0)
    assert 4 <= len(batch) <= 8  # 20 + 8 · 10 = 100
    late = [t for t in settled(scheduler) if outcome_of(t) == "deadline_unreachable"]
    assert len(late) >= 10  # they cannot finish after this batch either


def test_b17_shed_at_once_what_cannot_be_answered_after_this_batch() -> None:
    scheduler = window_scheduler()
    for i in range(3):
        ask(scheduler, client=i, time_limit=0.300)
    hurried = ask(scheduler, client="hurried", time_limit=0.035)
    relaxed = ask(scheduler, client="relaxed")
    take(scheduler, 0.006)
    assert outcome_of(hurried) == "deadline_unreachable"
    assert isinstance(hurried.outcome.error, Shed)
    assert (hurried.outcome.error.http_status, hurried.outcome.error.retry_safe) == (503, True)
    assert relaxed.outcome is None


def test_a_request_without_a_deadline_is_never_shed() -> None:
    scheduler = window_scheduler()
    random = Random(12)
    patient = [ask(scheduler, client=i) for i in range(10)]
    for i in range(40):
        ask(scheduler, client=100 + i, time_limit=random.uniform(0.031, 0.3))
    serve(scheduler, lambda batch: A + B * len(batch))
    assert [outcome_of(t) for t in patient] == ["ok"] * 10


def test_an_elder_is_refused_rather_than_answered_after_its_clients_younger_one() -> None:
    scheduler = window_scheduler()
    elder = ask(scheduler, client="robot", time_limit=0.032)
    for i in range(8):
        ask(scheduler, client=i, time_limit=0.150)
    younger = ask(scheduler, client="robot", time_limit=0.150)
    batch: Batch = take(scheduler, 0.0)
    assert younger in batch.grants
    assert elder not in batch.grants
    assert outcome_of(elder) == "deadline_unreachable"


def test_an_elder_that_a_larger_batch_leaves_out_is_refused_at_once() -> None:
    cost = model()
    for n in (1, 2, 4) * 20:
        measure(cost, ["dear"] * n, A + 0.200 * n)
    scheduler = scheduler_of(flush=FlushPolicy.window(1.0, 0.005), cost=lambda: cost)
    elder = ask(scheduler, client="robot", time_limit=0.235, cost_class="dear")
    for i in range(15):
        ask(scheduler, client=i)
    younger = ask(scheduler, client="robot")
    batch = take(scheduler, 0.0)
    assert younger in batch.grants
    assert len(batch) == 16
    assert outcome_of(elder) == "deadline_unreachable"


def test_urgent_work_outweighs_default_work() -> None:
    scheduler = window_scheduler()
    urgent = ask(scheduler, client="urgent", time_limit=0.040, priority=Priority.URGENT)
    for i in range(8):
        ask(scheduler, client=i, time_limit=0.100)
    batch = take(scheduler, 0.0)
    assert urgent in batch.grants
    assert A + B * len(batch) <= 0.041


def test_nothing_hopeless_at_the_head_blocks_what_can_still_be_done() -> None:
    """The first 4 × the size cap cannot make it, one with an earlier deadline behind them can."""
    cost = model()
    for n in (1, 2, 4) * 20:
        measure(cost, ["dear"] * n, A + 0.200 * n)
    scheduler = scheduler_of(flush=FlushPolicy.window(1.0, 0.005, max_batch_size=1), cost=lambda: cost)
    blocker = ask(scheduler, client="blocker")
    batch = take(scheduler, 0.0)
    for i in range(6):
        ask(scheduler, client=i, time_limit=0.300, cost_class="dear")
    light = ask(scheduler, client="light", time_limit=0.290)
    finish(scheduler, batch, 0.200, elapsed=0.030)
    assert outcome_of(blocker) == "ok"
    assert ids(take(scheduler, 0.200).grants) == [light.id]


def test_resident_places_are_shared_among_whom_the_window_chose() -> None:
    scheduler = window_scheduler(max_batches=2, size=4)
    for i in range(2):
        ask(scheduler, client=f"resident {i}")
    finish(scheduler, take(scheduler, 0.0), 0.0, A + 2 * B, More())
    take(scheduler, 0.0)  # the residents' next step is in flight
    greedy = [ask(scheduler, client="greedy", time_limit=0.0415) for _ in range(3)]
    ask(scheduler, client="modest", time_limit=0.0415, priority=Priority.BACKGROUND)
    assert list(take(scheduler, 0.0).grants) == greedy[:1]  # four clients, four places


def test_the_window_never_orders_within_a_client() -> None:
    scheduler = window_scheduler()
    random = Random(13)
    for i in range(60):
        ask(scheduler, client=i % 4, id=f"{i:03}", time_limit=random.choice([None, random.uniform(0.031, 0.4)]))
    served: dict[object, list[str]] = {}
    for _, batch in serve(scheduler, lambda batch: A + B * len(batch)):
        for t in batch.grants:
            served.setdefault(t.request.client, []).append(t.id)
    for own in served.values():
        assert own == sorted(own)


def test_conservation_holds_when_shedding() -> None:
    for seed in range(20):
        scheduler, random = window_scheduler(), Random(seed)
        tickets, now = [], 0.0
        for _ in range(60):
            now += random.uniform(0.0, 0.02)
            limit = random.choice([None, random.uniform(0.035, 0.2)])
            tickets.append(ask(scheduler, now, client=random.randrange(5), time_limit=limit))
            if random.random() < 0.3 and (batch := scheduler.next_batch(now)) is not None:
                now += A + B * len(batch)
                finish(scheduler, batch, now, A + B * len(batch))
        serve(scheduler, lambda batch: A + B * len(batch), now)
        assert sorted(t.seq for t in settled(scheduler)) == [t.seq for t in tickets]


def test_of_equals_who_could_not_wait_for_another_batch_goes_first() -> None:
    """Batches of 4 take 60 ms: who has 70 ms could not wait for one, who has 150 could."""
    scheduler = window_scheduler(4)
    patient = [ask(scheduler, client=f"patient {i}", time_limit=limit) for i, limit in enumerate((0.9, 0.150, None))]
    tight = [ask(scheduler, client=f"tight {i}", time_limit=0.070) for i in range(3)]
    went = [list(batch.grants) for _, batch in serve(scheduler, lambda batch: A + B * len(batch))]
    assert went == [[*tight, patient[0]], patient[1:]]
    assert [outcome_of(t) for t in (*patient, *tight)] == ["ok"] * 6


def test_the_oldest_of_equals_go_first_where_all_can_wait() -> None:
    scheduler = window_scheduler(4)
    first = [ask(scheduler, client=f"first {i}") for i in range(4)]
    ask(scheduler, client="later", time_limit=0.200)
    assert list(take(scheduler, 0.0).grants) == first


def test_who_was_served_already_gives_way_however_little_time_is_left() -> None:
    scheduler = window_scheduler(2)
    others = [ask(scheduler, client=name) for name in ("served", "beside", "left")]
    finish(scheduler, take(scheduler, 0.0), 0.040)
    again = ask(scheduler, 0.040, client="served", time_limit=0.055)
    new = [others[2], ask(scheduler, 0.040, client="new")]
    assert list(take(scheduler, 0.040).grants) == new
    assert outcome_of(again) == "deadline_unreachable"


def test_an_elder_that_is_held_is_refused_rather_than_answered_after_its_clients_younger_one() -> None:
    scheduler = window_scheduler()
    elder, younger = [ask(scheduler, client="robot", time_limit=limit) for limit in (0.300, 0.100)]
    scheduler.hold(elder, 0.0)
    ask(scheduler, client="hurried", time_limit=0.035)
    for i in range(3):
        ask(scheduler, client=i, time_limit=0.100)
    assert younger in take(scheduler, 0.0).grants
    assert outcome_of(elder) == "deadline_unreachable"
