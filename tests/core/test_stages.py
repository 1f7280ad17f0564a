"""Work in stages and steps: a prefix, then denoise steps, joined at step boundaries (contract B23)."""

from __future__ import annotations

import pytest

from reflex_runtime.core.batch import Batch, Cause, Done, Failed, More, Outcome
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.core.time_cost import TimeCost

from .helpers import ask, finish, ids, measure, outcome_of, scheduler_of, take

STAGES = ("prefix", "denoise")
PREFIX, DENOISE = (0.020, 0.004), (0.005, 0.001)  # fixed and marginal seconds of one call


def seconds(batch: Batch) -> float:
    fixed, marginal = PREFIX if batch.stage == "prefix" else DENOISE
    return fixed + marginal * len(batch)


def model() -> TimeCost:
    made = TimeCost(STAGES)
    for n in (1, 2, 4, 8) * 30:
        measure(made, [""] * n, PREFIX[0] + PREFIX[1] * n, stage="prefix", wants=6.0)
        measure(made, [""] * n, DENOISE[0] + DENOISE[1] * n, stage="denoise", wants=6.0)
    return made


def policy(budget: float = 0.100, size: int = 16, **config: object) -> Scheduler:
    return scheduler_of(flush=FlushPolicy.window(budget, 0.005, size), cost=model, **config)


def robot(scheduler: Scheduler, name: str, now: float = 0.0, **fields: object) -> Ticket:
    """One prefix and five denoise steps, or a cache hit: five denoise steps."""
    return ask(scheduler, now, **{"id": name, "client": name, "stage": "prefix", "wants": 6.0, **fields})


def step(scheduler: Scheduler, now: float) -> tuple[Batch, float]:
    """Run one call and answer it the way a denoising policy does."""
    batch = take(scheduler, now)
    took = seconds(batch)
    outcomes: list[Outcome] = [
        More(None, t.wants - 1.0, "denoise") if t.wants > 1.0 else Done(t.id) for t in batch.grants
    ]
    scheduler.complete(batch, outcomes, took, now + took)
    return batch, now + took


def alone(stage: str = "prefix", steps: int = 5) -> float:
    return (sum(PREFIX) if stage == "prefix" else 0.0) + steps * sum(DENOISE)


def test_b23_a_batch_has_one_stage_and_a_request_passes_through_all() -> None:
    scheduler = policy()
    robot(scheduler, "a")
    now, stages = 0.0, []
    while not scheduler.idle:
        batch, now = step(scheduler, now)
        stages.append(batch.stage)
    assert stages == ["prefix"] + ["denoise"] * 5


def test_b23_the_cost_is_the_time_until_the_last_present_member_ends() -> None:
    scheduler = policy()
    robot(scheduler, "a")
    batch, now = step(scheduler, 0.0)
    assert batch.cost == pytest.approx(alone(), rel=0.03)
    assert batch.expected == pytest.approx(sum(PREFIX), rel=0.03)  # this one call
    batch, now = step(scheduler, now)
    assert batch.cost == pytest.approx(alone("denoise", 5), rel=0.03)
    assert batch.expected == pytest.approx(sum(DENOISE), rel=0.03)


def test_b23_the_last_to_end_sets_the_horizon_whoever_joined_last() -> None:
    for all_wants in ((5.0, 2.0, 2.0), (2.0, 5.0, 2.0), (2.0, 2.0, 5.0)):
        tally = model().tally()
        for i, wants in enumerate(all_wants):
            tally.add(Ticket(Request(stage="denoise", wants=wants), i, 0.0), 1.0)
        assert tally.cost == pytest.approx(5 * DENOISE[0] + 9 * DENOISE[1], rel=0.03)


def test_b23_a_cache_hit_merely_skips_the_prefix() -> None:
    scheduler = policy()
    robot(scheduler, "hit", stage="denoise", wants=5.0)
    batch, now = step(scheduler, 0.0)
    assert (batch.stage, batch.cost) == ("denoise", pytest.approx(alone("denoise"), rel=0.03))
    while not scheduler.idle:
        batch, now = step(scheduler, now)
    assert scheduler.snapshot()["batches"] == 5


def test_b23_a_newcomer_joins_at_a_step_boundary() -> None:
    scheduler = policy()
    robot(scheduler, "a", stage="denoise", wants=5.0)
    _, now = step(scheduler, 0.0)
    robot(scheduler, "b", now, stage="denoise", wants=5.0)
    batch, now = step(scheduler, now)
    assert ids(batch.grants) == ["a", "b"]


@pytest.mark.parametrize(("budget", "joins"), [(0.060, True), (0.040, True), (0.034, False)])
def test_b23_a_newcomer_joins_only_while_the_horizon_stays_within_the_budget(budget: float, joins: bool) -> None:
    scheduler = policy(budget)
    robot(scheduler, "a", stage="denoise", wants=5.0)
    _, now = step(scheduler, 0.0)  # a has 4 steps left
    robot(scheduler, "b", now, stage="denoise", wants=5.0)  # together: 5 · 5 + (4 + 5) · 1 = 34 ms, 39 with a prefix
    robot(scheduler, "c", now, stage="denoise", wants=5.0)  # + 5 ms
    batch, now = step(scheduler, now)
    assert ("c" in ids(batch.grants)) is joins


def test_b23_no_batch_is_above_the_budget_unless_company_is_nearly_free() -> None:
    scheduler = policy(0.060)
    for i in range(30):
        robot(scheduler, str(i))
    now = 0.0
    while not scheduler.idle:
        batch, now = step(scheduler, now)
        assert batch.cost <= max(0.060, 1.25 * alone()) * 1.03


def test_b23_admission_groups_are_those_admitted_at_one_boundary() -> None:
    scheduler = policy()
    a, b = (robot(scheduler, name, stage="denoise", wants=3.0) for name in "ab")
    first, now = step(scheduler, 0.0)
    c = robot(scheduler, "c", now, stage="denoise", wants=3.0)
    second, now = step(scheduler, now)
    third, now = step(scheduler, now)
    assert [ids(batch.admitted) for batch in (first, second, third)] == [["a", "b"], ["c"], []]
    assert (a.admission.id, b.admission.id, c.admission.id) == (first.id, first.id, second.id)
    assert (a.admission.size, c.admission.size) == (2, 1)
    assert third.cause is Cause.STEP
    assert a.admission.reason == first.reason


def test_b23_newcomers_run_their_prefix_first_when_that_saves_more_than_it_costs() -> None:
    scheduler = policy(0.200)
    robot(scheduler, "a")
    _, now = step(scheduler, 0.0)
    for name in "bcd":  # three newcomers · 30 ms a still needs > one resident · 32 ms of prefix
        robot(scheduler, name, now)
    batch, now = step(scheduler, now)
    assert (batch.stage, sorted(ids(batch.grants))) == ("prefix", ["b", "c", "d"])
    batch, now = step(scheduler, now)
    assert (batch.stage, sorted(ids(batch.grants))) == ("denoise", ["a", "b", "c", "d"])


def test_b23_residents_step_on_when_the_prefix_would_cost_them_more() -> None:
    scheduler = policy(0.300)
    for name in "abcdef":
        robot(scheduler, name)
    now = 0.0
    for _ in range(4):
        _, now = step(scheduler, now)
    robot(scheduler, "late", now)  # one newcomer · 22 ms they still need < six residents · 24 ms of prefix
    batch, now = step(scheduler, now)
    assert batch.stage == "denoise"
    assert "late" not in ids(batch.grants)


def test_b23_newcomers_wait_when_a_resident_would_miss_its_deadline_by_them() -> None:
    for slack, stage in ((0.060, "prefix"), (0.010, "denoise")):
        scheduler = policy(0.300)
        robot(scheduler, "a", time_limit=alone() + slack)
        _, now = step(scheduler, 0.0)
        for name in "bcd":
            robot(scheduler, name, now)
        batch, now = step(scheduler, now)
        assert batch.stage == stage


def test_b23_a_b7_sample_is_per_request() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(1.0, 0.005), cost=lambda: TimeCost(STAGES))
    for _ in range(3):
        for name in "ab":
            robot(scheduler, name)
        now = 0.0
        while not scheduler.idle:
            _, now = step(scheduler, now)
    cost = scheduler.cost_model("default")
    share = (PREFIX[0] + 2 * PREFIX[1]) / 2 + 5 * (DENOISE[0] + 2 * DENOISE[1]) / 2  # Σ step ms ÷ step size
    ticket = Ticket(Request(stage="prefix", wants=6.0), 0, 0.0)
    assert cost.estimate(ticket) == pytest.approx(share)
    (row,) = (r for r in cost.snapshot() if r["stage"] is None)
    assert row["samples"] == 6


def test_b23_the_affine_model_is_learned_per_shape_and_stage() -> None:
    cost = model()
    prefix = Ticket(Request(stage="prefix", wants=6.0), 0, 0.0)
    denoise = Ticket(Request(stage="denoise", wants=5.0), 0, 0.0)
    assert (cost.fixed(prefix), cost.marginal(prefix, 1.0)) == pytest.approx(PREFIX, rel=0.05)
    assert (cost.fixed(denoise), cost.marginal(denoise, 1.0)) == pytest.approx(DENOISE, rel=0.05)
    assert cost.fits("") is not None
    assert cost.fits("another shape") is None
    assert cost.remaining(prefix) == pytest.approx(alone(), rel=0.03)
    assert cost.remaining(denoise) == pytest.approx(alone("denoise"), rel=0.03)


def test_b23_a_stage_the_model_does_not_know_is_the_processors_to_refuse() -> None:
    scheduler = policy()
    robot(scheduler, "fine", stage="denoise", wants=2.0)
    odd = robot(scheduler, "odd", stage="denoise", wants=2.0)
    batch = take(scheduler, 0.0)
    scheduler.complete(batch, [More(None, 1.0, "denoise"), More(None, 1.0, "typo")], seconds(batch), 0.010)
    batch = take(scheduler, 0.010)
    assert ids(batch.grants) == ["fine"]
    finish(scheduler, batch, 0.020)
    batch = take(scheduler, 0.020)
    assert (batch.stage, ids(batch.grants)) == ("typo", ["odd"])
    finish(scheduler, batch, 0.030, outcome=Failed(ProcessorError("no such stage")))
    assert outcome_of(odd) == "processor_failed"
