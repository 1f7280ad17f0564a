"""The loop around the real scheduler: the same every time, nothing lost, time kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

import pytest
from bench.sim import rules as named
from bench.sim.loads import Every
from bench.sim.rules import Rule, Setting

from reflex_runtime.core.batch import (
    Batch,
    BatchScheduled,
    Event,
    Outcome,
    RequestProgressed,
    RequestQueued,
    RequestSettled,
)
from reflex_runtime.core.cost import TokenCost
from reflex_runtime.core.flush import FlushPolicy, Planner
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.sim import (
    Affine,
    Arrival,
    Callers,
    Exponential,
    Fixed,
    Noisy,
    Open,
    Poisson,
    RecordedArrivals,
    Report,
    Run,
    WorkloadPart,
    simulate,
)

DEVICE = Noisy(Affine(0.020, 0.002), 0.05)
ALL_RULES = [
    named.WINDOW, named.BY_COST, named.BY_SIZE, named.GREEDY, named.EARLY_DROP, named.MARGINAL_WAIT, named.HOLD_ALWAYS,
]  # fmt: skip
MIXED: list[WorkloadPart] = [
    Open(Poisson(300.0), (Request(client="feed", time_limit=0.100), Request(client="other", time_limit=0.050))),
    Callers(5, Exponential(0.020), Request(time_limit=0.200)),
]


def run(rule: Rule, seed: int = 1, duration: float = 4.0) -> Run:
    return simulate(rule.make(Setting()), MIXED, DEVICE, duration=duration, seed=seed)


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda r: r.name)
def test_same_arguments_same_run(rule: Rule) -> None:
    first, second = run(rule), run(rule)
    # requests are compared by who asked: each run makes its callers' requests anew
    assert [(a.request.client, *a[1:]) for a in first.answers] == [(a.request.client, *a[1:]) for a in second.answers]
    assert first.batches == second.batches
    other = run(rule, seed=2)
    assert other.batches != first.batches
    assert {a.arrived for a in other.answers}.isdisjoint(a.arrived for a in first.answers)


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda r: r.name)
def test_every_request_ends_once_and_the_device_does_one_thing_at_a_time(rule: Rule) -> None:
    events: list[Event] = []
    done = simulate(rule.make(Setting()), MIXED, DEVICE, duration=4.0, sinks=[events.append])
    queued = Counter(e.ticket for e in events if isinstance(e, RequestQueued))
    settled = Counter(e.ticket for e in events if isinstance(e, RequestSettled))
    assert queued == settled
    assert set(settled.values()) == {1}
    assert len(done.answers) == len(settled) + sum(a.outcome == "rejected" for a in done.answers)
    assert sum(a.outcome == "ok" for a in done.answers) == sum(b.size for b in done.batches)
    assert sum(a.device for a in done.answers) == pytest.approx(sum(b.seconds for b in done.batches))
    ends = 0.0
    for batch in done.batches:
        assert batch.started >= ends - 1e-12
        ends = batch.started + batch.seconds


def test_open_arrivals_do_not_depend_on_the_rule() -> None:
    feeds = ("feed", "other")
    arrivals = [sorted(a.arrived for a in run(rule).answers if a.request.client in feeds) for rule in ALL_RULES]
    assert all(found == arrivals[0] for found in arrivals)


def test_a_blind_rule_is_measured_by_limits_it_does_not_see() -> None:
    events: list[Event] = []
    load = Open(Poisson(600.0), (Request(time_limit=0.050),))
    done = simulate(named.GREEDY.make(Setting()), load, DEVICE, duration=2.0, sinks=[events.append])
    assert all(e.ticket.deadline == inf for e in events if isinstance(e, RequestQueued))
    assert all(a.limit == 0.050 for a in done.answers)
    assert not any(a.on_time for a in done.answers if a.arrived > 1.0)


def test_a_caller_asks_again_one_think_time_after_its_answer() -> None:
    done = simulate(Scheduler(), Callers(1, Fixed(0.030)), Affine(0.020, 0.002), duration=1.0)
    ends = [a.ended for a in done.answers]
    assert [a.arrived for a in done.answers[1:]] == pytest.approx([e + 0.030 for e in ends[:-1]])
    assert all(a.latency == pytest.approx(0.022) for a in done.answers)


def test_a_refused_caller_comes_back_when_it_was_told_to() -> None:
    crowd = Callers(3, Fixed(0.001), Request())
    full = Scheduler([GroupConfig(capacity=1, flush=FlushPolicy(max_batch_size=1))])
    done = simulate(full, crowd, Affine(0.5, 0.0), duration=4.0)
    refused = [a for a in done.answers if a.outcome == "rejected"]
    assert refused
    for a in refused:
        later = [b.arrived for b in done.answers if b.request.client == a.request.client and b.arrived > a.arrived]
        assert not later or min(later) >= a.arrived + 1.0


def test_work_in_steps_is_stepped_until_it_has_what_it_wants() -> None:
    """The documented token schedule: prompts of 11 and 7, one further unit each time they are asked back."""
    scheduler = Scheduler([GroupConfig(flush=FlushPolicy.every_step(8), cost=TokenCost)])
    events: list[Event] = []
    asked = [Arrival(0.0, Request(id="A", wants=11)), Arrival(0.0, Request(id="B", wants=7))]
    simulate(scheduler, RecordedArrivals(asked), Affine(0.010, 0.0), sinks=[events.append])
    steps = [{t.id: u for t, u in e.batch.grants.items()} for e in events if isinstance(e, BatchScheduled)]
    assert steps == [{"A": 8.0}, {"A": 3.0, "B": 5.0}, {"B": 2.0}]
    assert sum(isinstance(e, RequestProgressed) for e in events) == 2


def test_a_scheduler_that_asks_to_be_woken_for_nothing_is_reported() -> None:
    class Restless:
        def submit(self, request: Request, now: float) -> Ticket:
            return Ticket(request, 0, now)

        def next_batch(self, now: float) -> Batch | None:
            return None

        def complete(self, batch: Batch, outcomes: Sequence[Outcome], elapsed: float, now: float) -> None: ...

        def wake_at(self) -> float:
            return 0.0

        def take_events(self) -> list[Event]:
            return []

    with pytest.raises(RuntimeError, match="again and again"):
        simulate(Restless(), Open(Every(1.0)), Affine(1.0, 1.0))


def test_virtual_hours_are_cheap() -> None:
    done = simulate(Scheduler(), Open(Poisson(0.5)), Affine(0.020, 0.002), duration=7200.0, warmup=60.0)
    assert Report.of(done).p50 == pytest.approx(0.022)


def slow_model(budget: float | None, workload: Sequence[WorkloadPart], duration: float = 12.0) -> Report:
    """A model that takes 36 + 4.5 n ms, as `reflex serve` schedules it."""
    group = GroupConfig(flush=FlushPolicy.window(budget), controller=Planner(), max_queued_seconds=2.0)
    device = Noisy(Affine(0.036, 0.0045), 0.03)
    return Report.of(simulate(Scheduler([group]), workload, device, duration=duration, warmup=3.0))


def test_b4_a_slow_model_keeps_up_by_default() -> None:
    """At 90 % of what batches of 32 bring, in time within three such batches."""
    robots = tuple(Request(client=i, time_limit=None) for i in range(64))
    load = [Open(Poisson(0.9 * 32 / 0.180), robots)]

    def in_time(budget: float | None) -> float:
        report = slow_model(budget, load)
        assert report.outcomes.keys() <= {"ok", "rejected"}
        return report.throughput / report.offered if report.p95 is not None and report.p95 < 0.540 else 0.0

    assert in_time(None) > 0.98
    assert in_time(0.100) == 0.0


def test_callers_that_do_not_fit_into_one_batch_wait_equally_long() -> None:
    """40 of 128 fit into 100 ms; rounds of three and four batches make the 99th percentile a third longer than the
    median."""

    def spread(budget: float | None) -> tuple[float, float]:
        group = GroupConfig(flush=FlushPolicy.window(budget), controller=Planner())
        device = Noisy(Affine(0.0077, 0.0023), 0.03)
        callers = Callers(128, Fixed(0.002))
        report = Report.of(simulate(Scheduler([group]), callers, device, duration=10.0, warmup=4.0))
        assert report.p99 is not None
        assert report.p50 is not None
        return report.p99 / report.p50, report.throughput

    (even, rate), (uneven, before) = spread(None), spread(0.100)
    assert even < 1.1
    assert uneven > 1.25
    assert rate > 0.99 * before


def test_b4_urgent_requests_wait_no_longer_by_default() -> None:
    robots = tuple(Request(client=i) for i in range(64))
    load = [Open(Poisson(140.0), robots), Open(Poisson(2.0), (Request(client="urgent", priority=Priority.URGENT),))]
    by_default, given = slow_model(None, load), slow_model(0.100, load)
    assert by_default.batch_size is not None
    assert given.batch_size is not None
    assert by_default.batch_size <= 1.1 * given.batch_size


def test_a_batch_before_anything_was_measured_has_no_predicted_time() -> None:
    config = GroupConfig(flush=FlushPolicy.window(None), controller=Planner())
    done = simulate(Scheduler([config]), [Callers(2, Fixed(0.01))], Affine(0.01, 0.001), duration=0.5)
    assert (done.batches[0].expected, done.batches[-1].expected > 0.0) == (0.0, True)
