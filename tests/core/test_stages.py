"""Work in stages and steps: a prefix, then denoise steps, joined at step boundaries (contract B23)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import pytest

from reflex_runtime.core.batch import Batch, Cause, Done, Failed, More, Outcome
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.holding import ThinkTimes
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler

from .helpers import ask, finish, ids, measure, outcome_of, scheduler_of, take
from .histories import Play, Scenario, timed
from .oracle import Seen

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


def padding_model(*padded_stages: str) -> TimeCost:
    """A device that runs these stages at the next of 1, 4 and 8, and others as they are."""
    made = TimeCost(STAGES, sizes=(1, 4, 8), padded_stages=padded_stages)
    for n in (1, 2, 3, 4, 5, 8) * 20:
        for stage, (fixed, marginal) in zip(STAGES, (PREFIX, DENOISE), strict=True):
            size = made.padded(n) if stage in padded_stages else n
            measure(made, [""] * n, fixed + marginal * size, stage=stage, wants=6.0)
    return made


@pytest.mark.parametrize("padded", [("denoise",), ("prefix",), STAGES, ()])
def test_b24_each_stage_is_predicted_at_the_size_that_it_runs(padded: tuple[str, ...]) -> None:
    made = padding_model(*padded)
    assert made.padded_stages == padded
    tally = made.tally()
    for n in range(1, 9):
        tally.add(Ticket(Request(stage="prefix", wants=6.0), n, 0.0), 1.0)
        prefix, step = (made.padded(n) if stage in padded else n for stage in STAGES)
        expected = PREFIX[0] + PREFIX[1] * prefix + 5 * (DENOISE[0] + DENOISE[1] * step)
        assert tally.cost == pytest.approx(expected, rel=0.02)


def test_b24_stages_that_pad_are_stages() -> None:
    assert TimeCost(STAGES, sizes=(1,)).padded_stages == STAGES
    with pytest.raises(ConfigError, match=r"TimeCost\.padded_stages: 'step' is none of the stages"):
        TimeCost(STAGES, sizes=(1,), padded_stages=("step",))


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
    for name in "bcd":  # each saves 25 ms of steps by itself; a loses 32 ms of prefix and 15 ms of wider steps
        robot(scheduler, name, now)
    batch, now = step(scheduler, now)
    assert (batch.stage, sorted(ids(batch.grants))) == ("prefix", ["b", "c", "d"])
    batch, now = step(scheduler, now)
    assert (batch.stage, sorted(ids(batch.grants))) == ("denoise", ["a", "b", "c", "d"])


def test_b23_a_newcomer_waits_when_the_wider_steps_take_back_what_it_saves() -> None:
    scheduler = policy(0.200)
    robot(scheduler, "a")
    _, now = step(scheduler, 0.0)
    robot(scheduler, "b", now)  # it would save 25 ms, and cost a 24 ms of prefix and 5 ms of wider steps
    batch, now = step(scheduler, now)
    assert (batch.stage, ids(batch.grants)) == ("denoise", ["a"])


def test_b23_residents_step_on_when_the_prefix_would_cost_them_more() -> None:
    scheduler = policy(0.300)
    for name in "abcdef":
        robot(scheduler, name)
    now = 0.0
    for _ in range(4):
        _, now = step(scheduler, now)
    robot(scheduler, "late", now)
    batch, now = step(scheduler, now)
    assert batch.stage == "denoise"
    assert "late" not in ids(batch.grants)


def test_b23_no_join_makes_the_slowest_answer_slower() -> None:
    """Residents that have waited long already are not interrupted, however much the sum of all answers would gain."""
    for waited, stage in ((0.0, "prefix"), (0.100, "denoise")):
        scheduler = policy(0.300)
        robot(scheduler, "a")
        _, now = step(scheduler, waited)
        for name in "bcdef":
            robot(scheduler, name, now)
        batch, now = step(scheduler, now)
        assert batch.stage == stage


@pytest.mark.parametrize(
    ("in_turns", "stage"),
    [(1.0, "denoise"), (1.25, "denoise"), (1.5, "prefix"), (4.0, "prefix"), (inf, "prefix")],
)
def test_b23_the_price_of_a_join_falls_with_the_share_that_turns_would_take(
    in_turns: float, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three save 75 ms of steps together, and cost a resident 47: 1.6 times as much."""
    monkeypatch.setattr(ThinkTimes, "in_turns", lambda *_: in_turns)
    scheduler = policy(0.200)
    robot(scheduler, "a")
    _, now = step(scheduler, 0.0)
    for name in "bcd":
        robot(scheduler, name, now)
    assert take(scheduler, now).stage == stage


# -- robots that ask by the clock ------------------------------------------------------------------------------------


class Fleet(Play):
    """Robots that think a while after each answer, against the scheduler and the oracle."""

    def __init__(self, thinks: Sequence[Callable[[random.Random], float]], seed: int) -> None:
        super().__init__(STAGED, b"")
        self._thinks, self._random = thinks, random.Random(seed)
        self._agenda = [(think(self._random) * self._random.random(), i) for i, think in enumerate(thinks)]
        self.shares: list[float] = []  # what the oracle said
        in_turns = self.oracle.in_turns

        def told(*args: Any) -> float:
            self.shares.append(in_turns(*args))
            return self.shares[-1]

        self.oracle.in_turns = told  # type: ignore[method-assign]

    def until(self, end: float) -> Fleet:
        """Run to that time, every decision compared."""
        while self.now < end:
            if self.step() is None:
                self.now = max(self.now, min(self._agenda)[0])
            else:
                self._finish()
            for at, i in [a for a in self._agenda if a[0] <= self.now]:
                self._agenda.remove((at, i))
                self._ask(i)
            self.compare()
        return self

    def _ask(self, i: int) -> None:
        request = Request(client=i, stage="prefix", wants=11.0)
        pair = self.scheduler.submit(request, self.now), self.oracle.submit(request, self.now)
        assert isinstance(pair[1], Seen)
        self.pairs.append((pair[0], pair[1]))

    def _finish(self) -> None:
        batch, expected = self.running.pop()
        took = STAGED.device(batch)
        self.now += took
        outcomes = [self.answer(ticket, units) for ticket, units in batch.grants.items()]
        self.scheduler.complete(batch, outcomes, took, self.now)
        self.oracle.complete(expected, outcomes, took, self.now)
        for ticket, answered in zip(batch.grants, outcomes, strict=True):
            if isinstance(answered, Done):
                i = int(str(ticket.request.client))
                self._agenda.append((self.now + self._thinks[i](self._random), i))


STAGED = Scenario(
    (timed(FlushPolicy(max_batch_cost=1.0), STAGES),),
    stages=STAGES,
    more=True,
    device=lambda b: 0.012 + 0.0045 * len(b) if b.stage == "prefix" else 0.0055 + 0.0006 * len(b),
)


def about(mean: float, spread: float) -> Callable[[random.Random], float]:
    return lambda rng: mean + spread * (2.0 * rng.random() - 1.0)


@pytest.mark.parametrize(
    ("name", "robots", "think", "low", "high"),
    [
        ("regular, and there is time for each", 4, about(0.250, 0.030), 0.8, 1.0),
        ("regular, and there is almost time", 5, about(0.250, 0.010), 1.1, 1.3),
        ("regular, and there is not", 8, about(0.250, 0.010), 1.6, 2.0),
        ("there is time, but they are not regular", 4, about(0.250, 0.200), inf, inf),
    ],
)
def test_b23_robots_that_would_take_turns_by_themselves_join_at_a_price(
    name: str, robots: int, think: Callable[[random.Random], float], low: float, high: float
) -> None:
    """Regular robots that join meet again in each cycle; one that waits instead comes later from then on."""
    fleet = Fleet([think] * robots, seed=1).until(8.0)
    assert any(low <= share <= high for share in fleet.shares), name
    assert all(low <= share <= high or share == inf for share in fleet.shares), name


def test_b23_a_robot_that_left_does_not_count_among_those_that_take_turns() -> None:
    returns = ThinkTimes()
    for i in range(12):
        for client in ("a", "b"):
            returns.arrived(client, "", 1.0 * i)
            returns.answered(client, 1.0 * i + 0.5)
    assert returns.in_turns(0.6, now=12.0) == pytest.approx(2 * 0.6 / 1.1)
    for i in range(12, 60):
        returns.arrived("a", "", 1.0 * i)
        returns.answered("a", 1.0 * i + 0.5)
    assert returns.in_turns(0.5, now=59.6) == pytest.approx(0.5)  # a alone: 0.5 / (0.5 + 0.5)
    assert ThinkTimes().in_turns(0.5, now=0.0) == inf


def test_b23_clients_that_ask_at_once_again_take_no_turns_before_a_chunk_was_measured() -> None:
    returns = ThinkTimes()
    for now in (0.0, 1.0, 1.0):
        returns.arrived("a", "", now)
        returns.answered("a", 1.0)
    assert returns.in_turns(0.0, now=1.0) == inf
    assert returns.in_turns(0.1, now=1.0) == 1.0


@pytest.mark.parametrize(("clients", "share"), [(64, pytest.approx(64 * 0.01 / 0.51)), (65, inf)])
def test_b23_more_than_64_clients_do_not_take_turns(clients: int, share: float) -> None:
    """There the device is busy all the time, or the decision would take too long."""
    returns = ThinkTimes()
    for i in range(3):
        for client in range(clients):
            returns.arrived(client, "", 1.0 * i)
            returns.answered(client, 1.0 * i + 0.5)
    assert returns.in_turns(0.01, now=2.6) == share


@pytest.mark.parametrize(
    ("limit", "takes", "stage"),
    [
        (0.105, 0.024, "prefix"),  # a ends at 101 ms if they join, at 54 ms if they wait
        (0.102, 0.024, "denoise"),  # not with twice the spread of 1 % to spare
        (0.060, 0.024, "denoise"),
        (0.072, 0.070, "prefix"),  # its first call took long: it ends too late in any case
    ],
)
def test_b23_newcomers_wait_when_a_resident_would_miss_its_deadline_by_them(
    limit: float, takes: float, stage: str
) -> None:
    scheduler = policy(0.300)
    robot(scheduler, "a", time_limit=limit)
    batch = take(scheduler, 0.0)
    for name in "bcd":
        robot(scheduler, name, 0.001)
    scheduler.complete(batch, [More(None, 5.0, "denoise")], takes, takes)
    assert take(scheduler, takes).stage == stage


def test_b23_newcomers_do_not_wait_for_the_deadline_of_a_resident_that_streams() -> None:
    """Its first output came in time, and that is what its limit is about."""
    for streams, stage in ((False, "denoise"), (True, "prefix")):
        scheduler = policy(0.300)
        robot(scheduler, "a", time_limit=0.060, streams=streams)
        _, now = step(scheduler, 0.0)
        for name in "bcd":
            robot(scheduler, name, now)
        assert take(scheduler, now).stage == stage


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
