"""Tokens as units: the batch is rebuilt every step within a token budget (contract L2 to L4)."""

from __future__ import annotations

import pytest

from reflex_runtime.core.batch import Cause
from reflex_runtime.core.cost import TokenCost
from reflex_runtime.core.errors import ConfigError, QueueFull
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.scheduler import Scheduler

from .helpers import Generation, ask, finish, scheduler_of, steps_of, take


def engine(budget: int, seqs: int = 256, threshold: float = float("inf")) -> Scheduler:
    return scheduler_of(flush=FlushPolicy.every_step(budget, seqs), cost=lambda: TokenCost(threshold))


def test_l3_prompts_of_11_and_7_under_a_budget_of_8() -> None:
    steps = steps_of(Generation({"A": 11, "B": 7}, 4), engine(8))
    assert steps == [{"A": 8}, {"A": 3, "B": 5}, {"A": 1, "B": 2}, {"A": 1, "B": 1}, {"A": 1, "B": 1}, {"B": 1}]


def test_l3_prompts_of_11_and_7_under_a_budget_of_2048() -> None:
    steps = steps_of(Generation({"A": 11, "B": 7}, 4), engine(2048))
    assert steps == [{"A": 11, "B": 7}] + [{"A": 1, "B": 1}] * 3


@pytest.mark.parametrize(("budget", "count"), [(4, 8), (8, 6), (11, 5), (16, 5), (18, 4), (64, 4)])
def test_l3_number_of_steps(budget: int, count: int) -> None:
    assert len(steps_of(Generation({"A": 11, "B": 7}, 4), engine(budget))) == count


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 8, 11, 16, 18, 64])
def test_l2_no_step_exceeds_the_budget(budget: int) -> None:
    steps = steps_of(Generation({"A": 11, "B": 7, "C": 3}, 5), engine(budget))
    assert max(sum(step.values()) for step in steps) <= budget


def test_l2_residents_that_want_one_token_go_before_partial_prefills() -> None:
    scheduler = engine(4)
    generation = Generation({"long": 9, "short": 2}, 3)
    short, long = (r for name in ("short", "long") for r in generation.requests() if r.id == name)
    scheduler.submit(long, 0.0)
    batch = take(scheduler, 0.0)  # long 4
    scheduler.submit(short, 0.0)
    scheduler.complete(batch, generation.outcomes(batch), 0.001, 0.001)
    batch = take(scheduler, 0.001)  # long 4, nothing left for short
    assert {t.id: u for t, u in batch.grants.items()} == {"long": 4}
    scheduler.complete(batch, generation.outcomes(batch), 0.001, 0.002)
    batch = take(scheduler, 0.002)
    assert {t.id: u for t, u in batch.grants.items()} == {"long": 1, "short": 2}
    scheduler.complete(batch, generation.outcomes(batch), 0.001, 0.003)
    late = ask(scheduler, 0.003, id="late", client="late", wants=50.0)
    generation.total["late"] = 100
    for now in (0.003, 0.004):
        batch = take(scheduler, now)
        assert list(batch.grants)[-1] is late  # after those that want one token
        assert batch.grants[late] == 2
        scheduler.complete(batch, generation.outcomes(batch), 0.001, now + 0.001)


def test_l6_threshold_bounds_the_share_of_a_long_prefill() -> None:
    for threshold, peak in ((float("inf"), 257), (32.0, 33)):
        scheduler = engine(2048, threshold=threshold)
        generation = Generation({"decode": 1, "long": 256}, {"decode": 20, "long": 2})
        decode, long = generation.requests()
        scheduler.submit(decode, 0.0)
        batch = take(scheduler, 0.0)
        scheduler.complete(batch, generation.outcomes(batch), 0.001, 0.001)
        scheduler.submit(long, 0.001)
        sizes, now = [], 0.001
        while not scheduler.idle:
            batch = take(scheduler, now)
            sizes.append(sum(batch.grants.values()))
            now += 0.001
            scheduler.complete(batch, generation.outcomes(batch), 0.001, now)
        assert max(sizes) == peak


@pytest.mark.parametrize("budget", [2, 5, 8, 64])
def test_l4_granted_units_are_prompt_plus_outputs_less_one(budget: int) -> None:
    scheduler = engine(budget)
    generation = Generation({"A": 11, "B": 7, "C": 1}, {"A": 4, "B": 1, "C": 6})
    steps = steps_of(generation, scheduler)
    for name, total in generation.total.items():
        assert sum(step.get(name, 0) for step in steps) == total


def test_a_step_of_residents_alone_has_cause_step_and_admits_nobody() -> None:
    scheduler = engine(8)
    generation = Generation({"A": 3}, 3)
    scheduler.submit(generation.requests()[0], 0.0)
    first = take(scheduler, 0.0)
    assert (first.cause, len(first.admitted)) == (Cause.IDLE, 1)
    scheduler.complete(first, generation.outcomes(first), 0.001, 0.001)
    second = take(scheduler, 0.001)
    assert (second.cause, len(second.admitted)) == (Cause.STEP, 0)


def test_b13_the_predicted_drain_time_counts_every_step_of_a_request() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.every_step(64, 2), cost=TokenCost, capacity=100)
    steps_of(Generation({"a": 4, "b": 4}, 50), scheduler)  # 50 steps of 1 ms, two at a time: 25 ms each
    for i in range(100):
        ask(scheduler, 1.0, id=f"w{i}", wants=4.0)
    with pytest.raises(QueueFull) as refused:
        ask(scheduler, 1.0, id="w", wants=4.0)
    assert refused.value.retry_after == pytest.approx(2.5)


def test_at_most_max_num_seqs_residents() -> None:
    scheduler = engine(64, seqs=2)
    generation = Generation({"A": 2, "B": 2, "C": 2}, 3)
    steps = steps_of(generation, scheduler)
    assert all(len(step) <= 2 for step in steps)
    assert set(steps[0]) == {"A", "B"}
    assert [set(step) for step in steps[3:]] == [{"C"}] * 3


def test_l2_size_is_a_ceiling_with_two_batches_in_flight() -> None:
    scheduler = scheduler_of(max_batches=2, flush=FlushPolicy.every_step(64, 2), cost=TokenCost)
    generation = Generation(dict.fromkeys("ABCD", 2), 3)
    for request in generation.requests():
        scheduler.submit(request, 0.0)
    first, second = take(scheduler, 0.0), take(scheduler, 0.0)
    assert (len(first), len(second)) == (2, 2)
    for batch in (first, second):
        scheduler.complete(batch, generation.outcomes(batch), 0.001, 0.001)
    assert len(take(scheduler, 0.001)) == 2
    assert len(take(scheduler, 0.001)) == 2


def test_a_threshold_below_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"TokenCost\.threshold"):
        TokenCost(0.0)


def test_a_client_takes_its_even_part_of_resident_places_while_others_wait() -> None:
    scheduler = engine(64, seqs=4)
    generation = Generation({f"a{i}": 1 for i in range(8)} | {f"b{i}": 1 for i in range(4)}, 100)
    for request in generation.requests(client="a"):
        if request.id.startswith("a"):
            scheduler.submit(request, 0.0)
    batch = take(scheduler, 0.0)
    assert len(batch) == 4
    for request in generation.requests(client="b"):
        if request.id.startswith("b"):
            scheduler.submit(request, 0.0)
    tickets = list(batch.grants)
    scheduler.complete(batch, generation.outcomes(batch), 0.001, 0.001)
    for ticket in tickets[:3]:  # three places come free; a keeps one and may have two
        scheduler.cancel(ticket, 0.001)
    batch = take(scheduler, 0.001)
    assert sorted(t.request.client for t in batch.grants) == ["a", "a", "b", "b"]


def test_a_client_takes_every_free_resident_place_while_nobody_else_waits() -> None:
    scheduler = engine(64, seqs=4)
    generation = Generation({f"a{i}": 1 for i in range(8)} | {"b": 1}, 100)
    requests = {r.id: r for r in generation.requests(client="a")}
    scheduler.submit(generation.requests(client="b")[-1], 0.0)
    batch = take(scheduler, 0.0)
    scheduler.complete(batch, generation.outcomes(batch), 0.001, 0.001)
    for i in range(8):
        scheduler.submit(requests[f"a{i}"], 0.001)
    assert len(take(scheduler, 0.001)) == 4


def test_a_request_that_wants_nothing_more_is_a_fault_of_the_processor() -> None:
    from reflex_runtime.core.batch import More

    from .helpers import outcome_of

    for wants in (0.0, -1.0, float("nan"), float("inf")):
        scheduler = engine(8)
        ticket = ask(scheduler, wants=3.0)
        finish(scheduler, take(scheduler, 0.0), 0.001, outcome=More(None, wants))
        assert outcome_of(ticket) == "processor_failed"
        assert scheduler.idle
