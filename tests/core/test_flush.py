"""When a batch leaves and how large it is (contract B3 to B6, F6; G3 and on: `test_company.py`)."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from reflex_runtime.core.batch import Cause, FlushReason, RequestAbandoned
from reflex_runtime.core.cost import TimeCost, UnitCost
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Priority
from reflex_runtime.core.scheduler import Scheduler

from .helpers import ask, ask_many, finish, measure, scheduler_of, serve, take, trained


def by_cost(budget: float = 0.100, timeout: float = 0.005) -> Scheduler:
    """The documented rule on the documented estimates."""
    return scheduler_of(flush=FlushPolicy.by_cost(budget, timeout), cost=lambda: TimeCost(affine=False))


# -- B3 ----------------------------------------------------------------------------------------------------------------


def test_b3_due_when_the_summed_estimate_reaches_the_budget() -> None:
    scheduler = by_cost()
    ask(scheduler)
    assert scheduler.next_batch(0.0) is None
    ask(scheduler)
    batch = take(scheduler, 0.0)
    assert (len(batch), batch.reason) == (2, FlushReason.BUDGET_REACHED)


def test_b3_due_when_the_oldest_has_waited_the_timeout() -> None:
    scheduler = by_cost(budget=1.0)
    ask(scheduler, 0.000)
    ask(scheduler, 0.004)
    assert scheduler.next_batch(0.004) is None
    assert scheduler.wake_at() == 0.005
    batch = take(scheduler, 0.005)
    assert (len(batch), batch.reason, batch.cause) == (2, FlushReason.TIMEOUT, Cause.HELD)


def test_b3_due_when_one_request_alone_costs_more_than_the_budget() -> None:
    scheduler = by_cost(budget=0.049)
    ask(scheduler)
    assert take(scheduler, 0.0).reason is FlushReason.SINGLE_REQUEST_OVER_BUDGET


def test_b3_a_request_that_costs_just_the_budget_is_not_over_it() -> None:
    scheduler = by_cost(budget=0.050)
    ask(scheduler)
    assert take(scheduler, 0.0).reason is FlushReason.BUDGET_REACHED


def test_b3_single_takes_precedence_over_budget_and_timeout() -> None:
    scheduler = by_cost(budget=0.040)
    ask_many(scheduler, 3)
    batch = take(scheduler, 1.0)  # over, full and overdue
    assert (len(batch), batch.reason) == (1, FlushReason.SINGLE_REQUEST_OVER_BUDGET)


def test_b3_budget_takes_precedence_over_timeout() -> None:
    scheduler = by_cost()
    ask_many(scheduler, 2)
    assert take(scheduler, 1.0).reason is FlushReason.BUDGET_REACHED


def test_b3_every_cause_has_one_of_the_three_reasons() -> None:
    assert {c: c.reason.value for c in Cause} == {
        Cause.FULL: "budget_reached",
        Cause.SIZE: "budget_reached",
        Cause.SINGLE: "single_request_over_budget",
        Cause.HELD: "timeout",
        Cause.IDLE: "timeout",
        Cause.URGENT: "timeout",
        Cause.STEP: "timeout",
        Cause.APART: "timeout",
        Cause.DRAIN: "timeout",
        Cause.APART: "timeout",
    }


# -- B4 ----------------------------------------------------------------------------------------------------------------


def test_b4_203_requests_of_50ms_start_as_batches_of_2_and_grow() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(0.100, 0.005))
    ask_many(scheduler, 203)
    log = serve(scheduler, lambda batch: 0.040 + 0.010 * len(batch))  # one alone takes 50 ms; company is cheap
    sizes = [len(batch) for _, batch in log]
    assert sum(sizes) == 203
    assert sizes[:3] == [2, 2, 2]
    assert max(sizes) in (5, 6)  # 40 + 6 · 10 = 100
    assert all(batch.cost <= 0.100 * (1 + 1e-9) or len(batch) == 1 for _, batch in log)
    assert all(b >= a for a, b in pairwise(sizes[:-1]))  # it grows as the model learns


def test_b4_203_requests_that_share_nothing_stay_batches_of_2() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(0.100, 0.005))
    ask_many(scheduler, 203)
    sizes = [len(batch) for _, batch in serve(scheduler, lambda batch: 0.050 * len(batch))]
    assert sizes == [2] * 101 + [1]


def test_b4_no_batch_exceeds_the_budget_unless_it_is_alone_or_company_is_nearly_free() -> None:
    for fixed, marginal in ((0.020, 0.002), (0.0, 0.030), (0.090, 0.004), (0.200, 0.010), (0.0, 0.300)):
        scheduler = scheduler_of(flush=FlushPolicy.window(0.100, 0.005))
        ask_many(scheduler, 300)
        for i, (_, batch) in enumerate(serve(scheduler, lambda b, f=fixed, m=marginal: f + m * len(b))):  # type: ignore[misc]
            measured = fixed + marginal * len(batch)
            alone = fixed + marginal
            if i > 20 and len(batch) > 1:
                assert measured <= max(0.100, 1.25 * alone) * 1.03


def test_b4_size_cap_is_a_ceiling_too() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(0.100, 0.005, max_batch_size=3), cost=lambda: trained(0.01, 1e-4))
    ask_many(scheduler, 7)
    log = serve(scheduler, lambda batch: 0.01)
    assert [len(batch) for _, batch in log] == [3, 3, 1]
    assert log[0][1].cause is Cause.SIZE


# -- B5 ----------------------------------------------------------------------------------------------------------------


def test_b5_nothing_is_formed_while_the_device_is_busy() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.by_size(4, 0.005))
    ask_many(scheduler, 4)
    batch = take(scheduler, 0.0)
    for i in range(4):
        ask(scheduler, 0.001 * i)
        assert scheduler.next_batch(0.001 * i) is None
    assert scheduler.wake_at() == inf  # nothing but an input can change that
    finish(scheduler, batch, 0.050)
    assert len(take(scheduler, 0.050)) == 4  # the queue grew into the next batch by itself


def test_b5_waiting_is_counted_from_arrival() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.by_size(8, 0.010))
    ask(scheduler)
    batch = take(scheduler, 0.010)
    late = ask(scheduler, 0.012)
    finish(scheduler, batch, 0.030)
    assert list(take(scheduler, 0.030).grants) == [late]  # it has waited 18 ms already


# -- B6 ----------------------------------------------------------------------------------------------------------------


def test_b6_a_free_device_takes_what_is_queued_at_once() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(0.100, 0.005))
    ask(scheduler)
    batch = take(scheduler, 0.0)
    assert (batch.reason, batch.cause) == (FlushReason.TIMEOUT, Cause.IDLE)


def closed_loop(clients: int, think: float, rounds: int = 6) -> tuple[Scheduler, float]:
    """Clients that ask again `think` seconds after each answer; stops with all of them answered and the device free."""
    scheduler = scheduler_of(flush=FlushPolicy.window(0.100, 0.005), cost=lambda: trained(0.020, 0.002))
    now = 0.0
    for _ in range(rounds):
        for client in range(clients):
            ask(scheduler, now, client=client)
        now += 0.006
        seconds = 0.020 + 0.002 * clients
        batch = take(scheduler, now)
        assert len(batch) == clients
        now += seconds
        finish(scheduler, batch, now, seconds)
        now += think
    return scheduler, now


def test_b6_held_only_while_answered_clients_are_expected_back() -> None:
    scheduler, now = closed_loop(4, think=0.001)
    ask(scheduler, now, client=0)
    assert scheduler.next_batch(now) is None
    assert now < scheduler.wake_at() <= now + 0.005
    for client in range(1, 4):
        ask(scheduler, now, client=client)
    assert len(take(scheduler, now)) == 4  # nobody else is expected


def test_b6_the_hold_ends_at_max_of_oldest_arrival_and_device_free_plus_timeout() -> None:
    scheduler, now = closed_loop(4, think=0.004)
    free_since = now - 0.004
    ask(scheduler, free_since + 0.0035, client=0)
    assert scheduler.next_batch(free_since + 0.0035) is None
    assert scheduler.wake_at() <= free_since + 0.0035 + 0.005
    assert len(take(scheduler, scheduler.wake_at())) == 1


def test_b6_an_unknown_client_is_expected_by_nobody() -> None:
    scheduler, now = closed_loop(4, think=10.0, rounds=2)
    ask(scheduler, now - 9.9, client="new")
    take(scheduler, now - 9.9)


def test_b6_an_urgent_request_is_never_held() -> None:
    scheduler, now = closed_loop(4, think=0.001)
    ask(scheduler, now, client=0, priority=Priority.URGENT)
    assert take(scheduler, now).cause is Cause.URGENT


def test_b6_a_held_batch_that_goes_says_timeout() -> None:
    scheduler, now = closed_loop(4, think=0.001)
    ask(scheduler, now, client=0)
    assert scheduler.next_batch(now) is None
    batch = take(scheduler, scheduler.wake_at())
    assert (batch.reason, batch.cause) == (FlushReason.TIMEOUT, Cause.HELD)


def test_b6_nobody_is_waited_for_whom_the_budget_keeps_out() -> None:
    """Two of 20 + 10 n ms are 40 ms, a third one would be over 45: those that are due are of no use to them."""
    for budget, held in ((0.045, False), (0.055, True)):
        scheduler = scheduler_of(flush=FlushPolicy.window(budget, 0.005), cost=lambda: trained(0.020, 0.010))
        now = 0.0
        for _ in range(6):
            for client in range(4):
                ask(scheduler, now, client=client)
            for _ in range(2):  # the first two, then the others, or all at once
                batch = scheduler.next_batch(now + 0.006)
                if batch is not None:
                    now += 0.006 + 0.040
                    finish(scheduler, batch, now, 0.020 + 0.010 * len(batch))
            now += 0.002
        ask(scheduler, now, client=0)
        ask(scheduler, now, client=1)
        assert (scheduler.next_batch(now) is None) is held


def test_b6_a_hold_never_costs_a_deadline() -> None:
    scheduler, now = closed_loop(4, think=0.004)
    needed = 0.022
    ask(scheduler, now, client=0, time_limit=needed + 0.0101)
    if scheduler.next_batch(now) is None:
        at = scheduler.wake_at()
        assert at + needed <= now + needed + 0.0101
        assert len(take(scheduler, at)) == 1


# -- the simple rules --------------------------------------------------------------------------------------------------


def test_f6_a_full_batch_goes_at_once_and_a_partial_one_after_max_latency() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.by_size(3, 0.050), cost=UnitCost)
    ask_many(scheduler, 3)
    assert take(scheduler, 0.0).cause is Cause.SIZE
    scheduler = scheduler_of(flush=FlushPolicy.by_size(3, 0.050), cost=UnitCost)
    ask(scheduler, 0.000)
    ask(scheduler, 0.040)
    assert scheduler.next_batch(0.049) is None
    assert len(take(scheduler, 0.050)) == 2


def feeds(*rates: float, fixed: float = 0.020, hold: float = 0.050) -> tuple[Scheduler, float]:
    """Cameras 0, 1, … of so many frames a second after three seconds on a device of fixed + 2n ms, which answers each
    frame at once. The next frame of all of them is due at the time returned."""
    flush = FlushPolicy(max_batch_size=8, returns=hold)
    scheduler = scheduler_of(flush=flush, cost=lambda: trained(fixed, 0.002), max_in_flight_per_client=1)
    frames = sorted((k / rate, camera) for camera, rate in enumerate(rates) for k in range(1, int(3 * rate)))
    for at, camera in frames:
        ask(scheduler, at, client=camera)
        batch = scheduler.next_batch(at)
        now = at
        while batch is None:
            now = scheduler.wake_at()
            batch = scheduler.next_batch(now)
        finish(scheduler, batch, now, fixed + 0.002 * len(batch))
    return scheduler, 3.0


def test_f6_a_feed_that_is_due_within_the_hold_is_waited_for_if_that_pays() -> None:
    scheduler, due = feeds(30.0, 10.0)
    ask(scheduler, due - 0.004, client=0)
    assert scheduler.next_batch(due - 0.004) is None
    assert scheduler.wake_at() == pytest.approx(due, abs=0.001)
    ask(scheduler, due, client=1)
    batch = take(scheduler, due)
    assert (len(batch), batch.cause) == (2, Cause.HELD)


def test_f6_a_feed_that_is_not_due_within_the_hold_is_not() -> None:
    scheduler, now = feeds(30.0, 1.0)
    ask(scheduler, now - 0.060, client=0)
    assert take(scheduler, now - 0.060).cause is Cause.IDLE


def test_f6_a_feed_for_which_waiting_does_not_pay_is_not() -> None:
    """Due in 10 ms, well within the hold; but a batch has only 5 ms to save."""
    scheduler, now = feeds(30.0, 10.0, fixed=0.005)
    ask(scheduler, now - 0.010, client=0)
    assert take(scheduler, now - 0.010).cause is Cause.IDLE


def test_f6_a_lone_feed_is_never_held_and_the_hold_bounds_the_rest() -> None:
    scheduler, now = feeds(30.0, fixed=0.100)
    ask(scheduler, now, client=0)
    finish(scheduler, take(scheduler, now), now)
    scheduler, now = feeds(30.0, 10.0, fixed=0.200, hold=0.020)  # 200 ms to save: all would pay but for the bound
    ask(scheduler, now - 0.021, client=0)
    assert take(scheduler, now - 0.021).cause is Cause.IDLE
    scheduler, now = feeds(30.0, 10.0, fixed=0.200, hold=0.020)
    ask(scheduler, now - 0.019, client=0)
    assert scheduler.next_batch(now - 0.019) is None
    due = scheduler.wake_at()
    assert now - 0.001 <= due <= now + 0.001
    assert len(take(scheduler, due)) == 1


def test_f6_nobody_is_waited_for_before_times_were_measured() -> None:
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_size=8, returns=0.050))
    for k in range(2):  # fewer than three measurements
        for feed in ("a", "b"):
            ask(scheduler, k * 0.1, client=feed)
        batch = take(scheduler, k * 0.1)
        finish(scheduler, batch, k * 0.1 + 0.05, 0.05)
    ask(scheduler, 0.2, client="a")
    assert take(scheduler, 0.2).cause is Cause.IDLE


def test_an_abandoned_ticket_says_so_once() -> None:
    scheduler = scheduler_of()
    ticket = ask(scheduler)
    for now in (1.0, 2.0):
        scheduler.abandon(ticket, now)
    told = [e for e in scheduler.take_events() if isinstance(e, RequestAbandoned)]
    assert told == [RequestAbandoned(1.0, ticket)]
    assert scheduler.next_batch(3.0) is None
    scheduler.abandon(ticket, 4.0)  # settled: nobody waited for it any more anyway
    assert not any(isinstance(e, RequestAbandoned) for e in scheduler.take_events())


def test_expire_settles_what_is_due_and_forms_nothing() -> None:
    scheduler = scheduler_of()
    ask(scheduler, 0.0, time_limit=1.0)
    assert scheduler.expires_at() == 1.0
    scheduler.expire(0.5)
    assert not scheduler.idle
    scheduler.expire(1.0)
    assert scheduler.idle
    assert scheduler.expires_at() == inf


def test_a_hold_stands_until_the_next_input() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.by_size(8, 0.003), cost=UnitCost)
    ask(scheduler, 0.0)
    assert scheduler.next_batch(0.0) is None
    at = scheduler.wake_at()
    for now in (0.0002, 0.0005):
        assert scheduler.next_batch(now) is None
        assert scheduler.wake_at() == at


def test_a_hold_is_decided_again_when_the_oldest_expires() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.by_size(4, 0.010), cost=UnitCost)
    ask(scheduler, time_limit=0.001)
    ask(scheduler, 0.0005)
    assert scheduler.next_batch(0.0005) is None
    assert scheduler.wake_at() == 0.001
    assert scheduler.next_batch(0.001) is None
    assert scheduler.wake_at() == pytest.approx(0.0105)


def test_a_hold_of_one_partition_does_not_stop_another() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.by_size(2, 0.010), cost=UnitCost)
    ask(scheduler, partition="half empty")
    ask_many(scheduler, 2, partition="full")
    assert take(scheduler, 0.0).partition == "full"


def test_wake_at_is_now_after_an_input_to_a_free_device() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.by_size(8, 0.003), cost=UnitCost)
    assert scheduler.wake_at() == -inf or scheduler.wake_at() <= 0.0
    ask(scheduler, 1.0)
    assert scheduler.wake_at() == 1.0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_batch_cost": 0.0}, r"FlushPolicy\.max_batch_cost=0\.0: must be in \(0, inf\]"),
        ({"max_batch_cost": float("nan")}, "max_batch_cost=nan"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"returns": -0.1}, "returns=-0.1"),
        ({"returns": 60.1}, r"returns=60.1: must be in \[0, 60\]"),
        ({"hold_max": (0.0, -1.0, 0.0)}, r"hold_max=-1.0: must be in \[0, 3600\]"),
        ({"hold_max": (0.0, 0.0, 3601.0)}, "hold_max=3601.0"),
    ],
)
def test_a_wrong_policy_names_field_value_and_range(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FlushPolicy(**wrong)  # type: ignore[arg-type]


def test_cancelling_the_rest_of_a_held_batch_settles_nothing_else() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.by_size(4, 0.010), cost=UnitCost)
    first, second = ask_many(scheduler, 2)
    assert scheduler.next_batch(0.0) is None
    scheduler.cancel(first, 0.004)
    assert scheduler.next_batch(0.004) is None
    assert scheduler.wake_at() == 0.010
    assert list(take(scheduler, 0.010).grants) == [second]


def test_a_probe_of_larger_sizes_learns_what_a_pessimistic_start_hides() -> None:
    model = TimeCost()
    for n in (1, 2, 1, 2):
        measure(model, [""] * n, 0.050 * n)
    scheduler = scheduler_of(flush=FlushPolicy.window(0.100, 0.005), cost=lambda: model)
    ask_many(scheduler, 400)
    sizes = [len(batch) for _, batch in serve(scheduler, lambda batch: 0.040 + 0.001 * len(batch))]
    assert max(sizes) >= 40


def test_b6_another_partitions_batch_does_not_start_a_hold_again() -> None:
    """A hold is counted from when the device was free for what is held; later returns would be waited for otherwise."""
    scheduler = scheduler_of(flush=FlushPolicy.window(0.5, 0.020), cost=lambda: trained(0.060, 0.002))

    def answered(now: float, *clients: str) -> float:
        for client in clients:
            ask(scheduler, now, client=client, partition="a")
        while (batch := scheduler.next_batch(now)) is None:
            now = scheduler.wake_at()
        finish(scheduler, batch, now + 0.062, elapsed=0.062)
        return now + 0.062

    now = 0.0
    for _ in range(6):
        now = answered(now + 0.005, "soon")
    for _ in range(6):
        now = answered(now + 0.025, "late")
    now = answered(now + 0.025, "late", "soon")

    ask(scheduler, now + 0.001, client="held", partition="a")
    assert scheduler.next_batch(now + 0.001) is None
    assert scheduler.wake_at() == pytest.approx(now + 0.005, abs=0.001)  # for "soon"
    ask(scheduler, now + 0.002, client="other", partition="b")
    batch = take(scheduler, now + 0.002)
    assert batch.partition == "b"
    finish(scheduler, batch, now + 0.012)
    # "late" is due at 25 ms, within 20 ms of now, but not of when the device got free for what is held
    assert take(scheduler, now + 0.012).partition == "a"
