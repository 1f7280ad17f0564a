"""L9, B4: the cost of requests by their size: a budget of seconds holds whatever sizes come together."""

from __future__ import annotations

import random

import pytest

from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.core.sized_cost import UNMEASURED, SizedCost
from reflex_runtime.core.time_cost import NEARLY_FREE

FIXED, EACH = 0.002, 0.001
MEASURED = [((size,), FIXED + EACH * size) for size in (4, 8, 32, 64)]


def scheduler(budget: float, curve: float = float("inf")) -> Scheduler:
    cost = lambda: SizedCost(curve, MEASURED)  # noqa: E731
    return Scheduler([GroupConfig(flush=FlushPolicy.window(budget, 0.0), cost=cost)])


def finish(of: Scheduler, batch: Batch, now: float) -> None:
    of.complete(batch, [Done(None)] * len(batch), FIXED + EACH * sum(batch.grants.values()), now)


def test_b4_a_batch_of_any_sizes_is_within_the_budget_or_a_single_request() -> None:
    of, rng, now = scheduler(0.050), random.Random(4), 0.0
    for i in range(200):
        of.submit(Request(client=str(i % 5), wants=float(rng.choice((2, 5, 20, 100)))), now)
    sizes = []
    while (batch := of.next_batch(now)) is not None:
        predicted = FIXED + EACH * sum(batch.grants.values())
        dearest = FIXED + EACH * max(batch.grants.values())
        assert predicted <= 0.050 * 1.001 or predicted <= NEARLY_FREE * dearest * 1.001
        assert all(units == ticket.request.wants for ticket, units in batch.grants.items())
        assert batch.cost == pytest.approx(predicted, rel=0.02)
        sizes.append(len(batch))
        now += predicted
        finish(of, batch, now)
    assert sum(sizes) == 200
    assert max(sizes) > 3


def test_l9_clients_share_seconds_not_requests() -> None:
    of, now, served = scheduler(0.020), 0.0, {"long": 0.0, "short": 0.0}
    for _ in range(100):
        of.submit(Request(client="long", wants=16.0), now)
    for _ in range(600):
        of.submit(Request(client="short", wants=2.0), now)
    for _ in range(40):
        batch = of.next_batch(now)
        assert batch is not None
        for ticket, units in batch.grants.items():
            served[ticket.request.client] += units
        now += 0.02
        finish(of, batch, now)
    assert served["long"] == pytest.approx(served["short"], rel=0.3)  # and not 8 to 1, as by requests


def test_l9_a_batch_is_as_long_as_the_deadlines_in_it_allow() -> None:
    """By the budget all would go together, and most would be late."""
    of = scheduler(1.0)
    due = [of.submit(Request(client=str(i), wants=30.0, time_limit=0.1), 0.0) for i in range(6)]
    batch = of.next_batch(0.0)
    assert batch is not None
    assert set(batch.grants) <= set(due)
    assert len(batch) == 2  # 62 ms; with a third one all might be late


def test_l9_work_grows_with_the_square_beyond_the_curve() -> None:
    cost = SizedCost(100.0, [((size,), size * (1 + size / 100) * 1e-3) for size in (10, 50, 100, 200)])
    assert cost.seconds(200.0) == pytest.approx(0.6, rel=0.02)
    assert cost.fixed_seconds == pytest.approx(0.0, abs=1e-3)


def test_l9_batches_teach_the_work_of_their_texts_not_their_sum() -> None:
    of, now = scheduler(10.0, curve=100.0), 0.0
    for size in (10.0, 200.0) * 20:
        of.submit(Request(wants=size), now)
        batch = of.next_batch(now)
        assert batch is not None
        of.complete(batch, [Done(None)], size * (1 + size / 100) * 1e-3, now)
        now += 1.0
    assert of.cost_model("default").seconds(200.0) == pytest.approx(0.6, rel=0.05)
    assert of.cost_model("default").seconds(10.0) == pytest.approx(0.011, rel=0.1)


def test_l9_before_anything_was_measured_a_unit_counts_as_documented() -> None:
    cost = SizedCost()
    assert (cost.seconds(10.0), cost.fixed_seconds, cost.ready) == (10 * UNMEASURED, 0.0, False)
    assert cost.snapshot() == []
    with pytest.raises(ConfigError, match=r"SizedCost.curve=0: must be > 0"):
        SizedCost(0)


def test_b13_what_waits_is_counted_in_units() -> None:
    group = GroupConfig(cost=SizedCost, max_queued_units=30.0)
    of = Scheduler([group])
    of.submit(Request(wants=25.0), 0.0)
    with pytest.raises(Exception, match="units"):
        of.submit(Request(wants=10.0), 0.0)
    assert of.next_batch(0.0) is not None
