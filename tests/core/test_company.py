"""Requests that are sent on in company: tiers, holds, group commit, room and the adaptive target (contract G3 to G6).

Times are literal, in seconds, at the documented defaults: min_hold 0.75 ms, max_hold 3 ms, background 2 ms more.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.errors import ConfigError, Displaced, QueueFull
from reflex_runtime.core.flush import FlushPolicy, HoldTarget
from reflex_runtime.core.request import Priority, Request, Ticket, TicketState
from reflex_runtime.core.scheduler import Scheduler

from .closed_loop import ClosedLoop
from .helpers import ask, ask_many, finish, ids, outcome_of, scheduler_of, settled, take
from .histories import Streams

URGENT, DEFAULT, BACKGROUND = Priority
RULE = FlushPolicy.by_priority()  # at most 16, target 2


def calls(flush: FlushPolicy = RULE, **config: Any) -> Scheduler:
    """Several calls may be out at a time."""
    return scheduler_of(64, **{"flush": flush, "cost": UnitCost, "promote_after": 0.030, **config})


def held(scheduler: Scheduler, now: float, until: float) -> None:
    """Nothing leaves now, and the scheduler says until when."""
    assert scheduler.next_batch(now) is None
    assert scheduler.wake_at() == pytest.approx(until)


# -- G3: three tiers ---------------------------------------------------------------------------------------------------


def test_g3_urgent_goes_at_once_and_takes_company_along() -> None:
    scheduler = calls()
    ask(scheduler, id="background", priority=BACKGROUND)
    ask(scheduler, id="urgent", priority=URGENT)
    batch = take(scheduler, 0.0)
    assert ids(batch.grants) == ["urgent", "background"]
    assert batch.cause is Cause.URGENT


def test_g3_default_waits_min_hold_when_nobody_else_comes() -> None:
    scheduler = calls()
    ask(scheduler, 1.0)
    held(scheduler, 1.0, until=1.00075)
    assert take(scheduler, 1.00075).cause is Cause.TIMEOUT


def test_g3_default_waits_min_hold_at_the_target() -> None:
    scheduler = calls()
    ask(scheduler, 1.0)
    ask(scheduler, 1.0005)
    held(scheduler, 1.0005, until=1.00075)
    assert len(take(scheduler, 1.00075)) == 2


def test_g3_below_the_target_the_hold_is_extended_while_more_keep_coming() -> None:
    scheduler = calls(replace(RULE, target=8))
    for i in range(4):
        now = 1.0 + 0.0005 * i
        ask(scheduler, now)
        held(scheduler, now, until=now + 0.00075)
    assert len(take(scheduler, 1.00225)) == 4


def test_g3_but_never_beyond_max_hold() -> None:
    scheduler = calls(replace(RULE, target=8))
    for i in range(6):
        ask(scheduler, 1.0 + 0.0005 * i)
    held(scheduler, 1.0025, until=1.003)
    assert len(take(scheduler, 1.003)) == 6


def test_g3_background_alone_waits_max_hold_and_extra() -> None:
    scheduler = calls()
    ask(scheduler, 1.0, priority=BACKGROUND)
    held(scheduler, 1.0, until=1.005)
    ask(scheduler, 1.002, priority=BACKGROUND)
    held(scheduler, 1.002, until=1.005)
    assert len(take(scheduler, 1.005)) == 2


def test_g3_urgent_then_default_then_background_fills_the_free_places() -> None:
    scheduler = calls(replace(RULE, max_batch_size=5))
    for name, priority in zip("bdbudb", (BACKGROUND, DEFAULT, BACKGROUND, URGENT, DEFAULT, BACKGROUND), strict=True):
        ask(scheduler, id=name, priority=priority)
    assert ids(take(scheduler, 0.0).grants) == ["u", "d", "d", "b", "b"]


def test_g3_background_leaves_with_the_default_ones_it_waits_beside() -> None:
    scheduler = calls()
    ask(scheduler, 1.0, id="background", priority=BACKGROUND)
    ask(scheduler, 1.001, id="default")
    held(scheduler, 1.001, until=1.00175)
    assert ids(take(scheduler, 1.00175).grants) == ["default", "background"]


def test_g3_background_counts_as_default_after_ten_times_max_hold_and_is_counted() -> None:
    scheduler = calls(replace(RULE, max_batch_size=1))
    scheduler.set_room("default", 0, 0.0)
    old = ask(scheduler, 0.0, client="quiet", priority=BACKGROUND)
    scheduler.next_batch(0.029)
    assert (old.tier, scheduler.snapshot()["groups"]["default"]["promoted"]) == (BACKGROUND, 0)
    ask(scheduler, 0.030, client="busy")
    scheduler.set_room("default", None, 0.030)
    assert list(take(scheduler, 0.030).grants) == [old]
    assert scheduler.snapshot()["groups"]["default"]["promoted"] == 1


# -- G3: group commit --------------------------------------------------------------------------------------------------


def out(scheduler: Scheduler, **request: Any) -> Batch:
    """A call is out since 0."""
    ask(scheduler, priority=URGENT, **request)
    return take(scheduler, 0.0)


def test_g3_while_a_call_is_out_the_next_ones_gather_up_to_max_hold() -> None:
    scheduler = calls()
    out(scheduler)
    ask_many(scheduler, 2, 0.001)
    held(scheduler, 0.001, until=0.004)  # the target is reached and it is quiet, but the call's return costs nothing
    ask(scheduler, 0.0035)
    held(scheduler, 0.0035, until=0.004)
    assert len(take(scheduler, 0.004)) == 3


def test_g3_what_gathered_leaves_when_the_call_returns() -> None:
    scheduler = calls()
    batch = out(scheduler)
    ask_many(scheduler, 2, 0.001)
    held(scheduler, 0.001, until=0.004)
    finish(scheduler, batch, 0.002)
    assert len(take(scheduler, 0.002)) == 2  # it has been quiet, and min_hold is over


def test_g3_who_came_just_before_the_return_is_held_as_ever() -> None:
    scheduler = calls()
    batch = out(scheduler)
    ask(scheduler, 0.002)
    finish(scheduler, batch, 0.0021)
    held(scheduler, 0.0021, until=0.00275)


def test_g3_with_two_calls_out_the_first_return_is_not_the_end_of_it() -> None:
    scheduler = calls()
    first, second = out(scheduler), out(scheduler)
    ask_many(scheduler, 2, 0.001)
    finish(scheduler, first, 0.002)
    held(scheduler, 0.002, until=0.004)
    finish(scheduler, second, 0.003)
    assert len(take(scheduler, 0.003)) == 2


def test_g3_a_full_batch_and_an_urgent_one_do_not_wait_for_the_call() -> None:
    scheduler = calls(replace(RULE, max_batch_size=4))
    out(scheduler)
    ask_many(scheduler, 5, 0.001)
    assert take(scheduler, 0.001).cause is Cause.SIZE
    held(scheduler, 0.001, until=0.004)  # the fifth
    ask(scheduler, 0.002, priority=URGENT)
    assert take(scheduler, 0.002).cause is Cause.URGENT


def test_g3_a_call_of_another_partition_is_no_reason_to_wait() -> None:
    scheduler = calls()
    out(scheduler, partition="another")
    ask_many(scheduler, 2, 0.001)
    held(scheduler, 0.001, until=0.00175)


def test_g3_without_group_commit_the_target_is_enough_and_quiet_still_waits_for_the_call() -> None:
    scheduler = calls(replace(RULE, group_commit=False))
    out(scheduler)
    ask(scheduler, 0.001)
    held(scheduler, 0.001, until=0.004)
    ask(scheduler, 0.0012)
    held(scheduler, 0.0012, until=0.00175)


def test_g3_a_paused_partition_that_was_quiet_leaves_when_its_pause_ends() -> None:
    scheduler = calls()
    ask(scheduler, 1.0, partition="slow")
    scheduler.pause("default", 1.020, 1.0, partition="slow")
    held(scheduler, 1.0, until=1.020)
    assert len(take(scheduler, 1.020)) == 1


def test_g3_a_drain_gathers_nobody() -> None:
    scheduler = calls()
    out(scheduler)
    ask(scheduler, 0.001)
    scheduler.close(0.001)
    assert len(take(scheduler, 0.001)) == 1


# -- G3: a full queue --------------------------------------------------------------------------------------------------


def full(**config: Any) -> tuple[Scheduler, list[Ticket]]:
    """Of the four places two are taken by background requests of two partitions, and there is no room."""
    scheduler = calls(capacity=4, displace_background=True, **config)
    scheduler.set_room("default", 0, 0.0)
    kinds = [(DEFAULT, "p"), (BACKGROUND, "q"), (BACKGROUND, "p"), (DEFAULT, "q")]
    tickets = [ask(scheduler, i * 0.001, id=str(i), priority=k, partition=p) for i, (k, p) in enumerate(kinds)]
    return scheduler, tickets


def test_g3_an_urgent_request_takes_the_place_of_the_newest_background_one() -> None:
    scheduler, tickets = full()
    for i in (2, 1):
        ask(scheduler, 0.010, priority=URGENT)
        assert settled(scheduler) == [tickets[i]]
        assert isinstance(tickets[i].outcome.error, Displaced)
        assert outcome_of(tickets[i]) == "queue_full"
        assert (scheduler.queued("default"), scheduler.unsettled("default")) == (4, 4)
    with pytest.raises(QueueFull):
        ask(scheduler, 0.010, priority=URGENT)


@pytest.mark.parametrize("priority", [DEFAULT, BACKGROUND])
def test_g3_nobody_else_takes_a_place(priority: Priority) -> None:
    scheduler, _ = full()
    with pytest.raises(QueueFull):
        ask(scheduler, 0.010, priority=priority)
    assert settled(scheduler) == []


def test_g3_background_that_counts_as_default_by_now_is_safe() -> None:
    scheduler, tickets = full()
    ask(scheduler, 0.0315, priority=URGENT)  # nobody has asked for a batch since it is old enough
    assert settled(scheduler) == [tickets[2]]
    with pytest.raises(QueueFull):
        ask(scheduler, 0.0315, priority=URGENT)
    assert tickets[1].state is TicketState.WAITING


def test_g3_sharing_the_room_comes_after_displacing_background() -> None:
    scheduler, tickets = full(share_room=True)
    for expected in (2, 1, 3):  # all of one client
        ask(scheduler, 0.010, priority=URGENT, client=f"another {expected}")
        assert settled(scheduler) == [tickets[expected]]


def test_g3_off_by_default() -> None:
    scheduler = calls(capacity=1)
    ask(scheduler, priority=BACKGROUND)
    with pytest.raises(QueueFull):
        ask(scheduler, priority=URGENT)


# -- G4: a lone request ------------------------------------------------------------------------------------------------


def adaptive(**target: Any) -> tuple[Scheduler, HoldTarget]:
    controller = HoldTarget(**target)
    return calls(controller=controller), controller


def wait_of(scheduler: Scheduler, now: float) -> float:
    """Seconds that one request alone waits; its call takes 10 ms."""
    ticket = ask(scheduler, now)
    batch = scheduler.next_batch(now)
    if batch is None:
        now = scheduler.wake_at()
        batch = take(scheduler, now)
    assert list(batch.grants) == [ticket]
    finish(scheduler, batch, now + 0.010)
    return now - ticket.arrived


def test_g4_the_first_of_all_and_a_lone_caller_are_never_held() -> None:
    scheduler, _ = adaptive()
    assert [wait_of(scheduler, 0.1 * i) for i in range(50)] == [0.0] * 50


def test_g4_beside_others_whose_arrival_is_not_remembered_is_no_company() -> None:
    """As in a partition that was forgotten while its requests waited."""
    _, controller = adaptive()
    controller.arrived(Ticket(Request(), 0, 0.001), 0.001, others=1)
    assert controller.company("") == 0.0
    controller.arrived(Ticket(Request(), 1, 0.002), 0.002, others=2)
    assert controller.company("") > 0.0


def test_g4_a_lone_caller_who_asks_again_at_once_is_not_his_own_company() -> None:
    scheduler, controller = adaptive()
    for i in range(50):
        now = 0.001 * i
        ticket = ask(scheduler, now)
        batch = take(scheduler, now)
        assert list(batch.grants) == [ticket]
        finish(scheduler, batch, now + 0.0005)
    assert controller.company("") == 0.0


def burst(scheduler: Scheduler, now: float, n: int = 8) -> list[int]:
    """n arrivals 0.2 ms apart, asked for a batch after each: the sizes that leave."""
    sizes, batches = [], []
    for i in range(n):
        ask(scheduler, now + 0.0002 * i)
        if (batch := scheduler.next_batch(now + 0.0002 * i)) is not None:
            batches.append(batch)
    while scheduler.queued("default"):
        batches.append(take(scheduler, scheduler.wake_at()))
    for batch in batches:
        sizes.append(len(batch))
        finish(scheduler, batch, now + 0.050)
    return sizes


def test_g4_after_one_burst_the_next_one_is_held() -> None:
    scheduler, controller = adaptive()
    assert burst(scheduler, 0.0)[0] == 1
    assert controller.company("") >= 0.2
    assert burst(scheduler, 0.1)[0] >= 2


def test_g4_company_is_forgotten_after_some_alone_and_until_then_costs_less_than_1_ms() -> None:
    scheduler, controller = adaptive()
    burst(scheduler, 0.0, 16)
    waits = [wait_of(scheduler, 0.1 * i) for i in range(1, 10)]
    assert max(waits) < 0.001
    assert waits[0] == pytest.approx(0.00075)
    assert waits[5:] == [0.0] * 4
    assert controller.company("") < 0.2


def test_g4_what_comes_in_one_turn_is_company_and_leaves_together() -> None:
    scheduler, controller = adaptive()
    ask_many(scheduler, 5)
    assert controller.company("") == pytest.approx(1.0 - 0.75**4)
    held(scheduler, 0.0, until=0.00075)
    assert len(take(scheduler, 0.00075)) == 5


@pytest.mark.parametrize(("gap", "company"), [(0.003, 0.25), (0.0031, 0.0)])
def test_g4_company_is_who_comes_within_the_hold(gap: float, company: float) -> None:
    scheduler, controller = adaptive(hold=0.003)
    ask(scheduler, 0.0)
    ask(scheduler, gap, partition="another")
    assert controller.company("") == controller.company("another") == 0.0
    ask(scheduler, gap)
    assert controller.company("") == company


def test_g4_a_quarter_is_company_enough_and_a_fifth_less_a_little_is_not() -> None:
    scheduler, controller = adaptive()
    ask_many(scheduler, 2)
    assert controller.company("") == 0.25
    assert controller.policy(RULE, lambda: (0.0, 0.0, 0.0), 0.0, "") == RULE
    ask(scheduler, 1.0)
    assert controller.company("") == 0.1875
    unheld = controller.policy(RULE, lambda: (0.0, 0.0, 0.0), 1.0, "")
    assert unheld == replace(RULE, hold_min=(0.0, 0.0, 0.0), hold_max=(0.0, 0.0, 0.0))
    smaller = replace(RULE, max_batch_size=4)
    assert controller.policy(smaller, lambda: (0.0, 0.0, 0.0), 1.0, "") == replace(unheld, max_batch_size=4)


# -- G4: callers that come back ----------------------------------------------------------------------------------------


def returning(n: int = 4, step: float = 0.002, **target: Any) -> tuple[Scheduler, Streams]:
    """n streams have just ended at 1.0, of callers that have been coming back; a step takes 2 ms."""
    controller = Streams(*target.values())
    scheduler = calls(controller=controller)
    for i in range(5):
        controller.ended("", 0.1 * i, step)
        finish(scheduler, take_when_due(scheduler, 0.1 * i), 0.1 * i + 0.010)
    assert controller.back("") > 0.5
    for _ in range(n):
        controller.ended("", 1.0, step)
    return scheduler, controller


def take_when_due(scheduler: Scheduler, now: float) -> Batch:
    ask(scheduler, now)
    return scheduler.next_batch(now) or take(scheduler, scheduler.wake_at())


def test_g4_callers_that_come_back_one_by_one_leave_together_and_at_once() -> None:
    scheduler, controller = returning(4)
    for i in range(3):
        ask(scheduler, 1.0005 + 0.0003 * i)
        held(scheduler, 1.0005 + 0.0003 * i, until=1.0035 + 0.0003 * i)  # max_hold after the last one came
    ask(scheduler, 1.0014)
    assert len(take(scheduler, 1.0014)) == 4  # nobody else is away
    assert controller.company("") == 0.0  # they are no burst


def test_g4_who_does_not_come_back_is_waited_for_no_longer_than_max_hold() -> None:
    scheduler, _ = returning(2)
    ask(scheduler, 1.0005)
    held(scheduler, 1.0005, until=1.0035)
    assert len(take(scheduler, 1.0035)) == 1
    ask(scheduler, 1.0125)  # 12 ms after it ended: nobody knows of it any more
    assert len(take(scheduler, 1.0125)) == 1


def test_g4_beside_streams_that_go_on_nobody_waits_longer_than_max_hold_however_many_end_meanwhile() -> None:
    scheduler, controller = returning(2)
    controller.streams[""] = [16]
    ask(scheduler, 1.0005)
    held(scheduler, 1.0005, until=1.0035)
    controller.ended("", 1.003)
    scheduler.set_room("default", None, 1.003)
    held(scheduler, 1.003, until=1.0035)
    assert len(take(scheduler, 1.0035)) == 1


def test_g4_callers_that_do_not_come_back_are_not_expected() -> None:
    scheduler, controller = returning(0)
    for i in range(4):
        controller.ended("", 1.0 + 0.1 * i)
        ask(scheduler, 1.020 + 0.1 * i)  # another one, much later
        assert len(take(scheduler, 1.020 + 0.1 * i)) == 1
    assert controller.back("") < 0.5
    controller.ended("", 2.0)
    controller.ended("", 2.0)
    ask(scheduler, 2.0005)
    assert len(take(scheduler, 2.0005)) == 1


def test_g4_streams_that_end_with_the_next_step_are_waited_for() -> None:
    scheduler, controller = returning(1)
    controller.streams[""] = [1, 1]
    ask(scheduler, 1.0005)
    held(scheduler, 1.0005, until=1.0305)  # ten times max_hold
    controller.streams[""] = []
    controller.ended("", 1.008)
    controller.ended("", 1.008)
    scheduler.set_room("default", None, 1.008)
    held(scheduler, 1.008, until=1.011)
    ask(scheduler, 1.009)
    held(scheduler, 1.009, until=1.012)
    ask(scheduler, 1.0095)
    assert len(take(scheduler, 1.0095)) == 3


@pytest.mark.parametrize(
    ("left", "waits"),
    [([3, 2, 3], True), ([3], False), ([4, 3, 3], False), ([1, 1, 16], False), ([1], True), ([], False)],
)
def test_g4_few_wait_for_more_streams_that_end_soon_and_not_for_fewer(left: list[int], waits: bool) -> None:
    scheduler, controller = returning(1)
    controller.streams[""] = left
    ask(scheduler, 1.0005)
    assert (scheduler.next_batch(1.0005) is None) is waits


@pytest.mark.parametrize(("step", "held_back"), [(0.0065, True), (0.0055, False)])
def test_g4_where_steps_are_long_a_full_message_waits_for_who_would_miss_its_step(step: float, held_back: bool) -> None:
    """Steps begin with whoever is there: sixteen callers would go, and the others wait for a whole step."""
    scheduler, controller = returning(0, step)
    for _ in range(40):
        controller.ended("", 1.0, step)
    ask_many(scheduler, 20, 1.0005)
    batch = scheduler.next_batch(1.0005)
    assert (batch is None) is held_back
    ask_many(scheduler, 20, 1.001)
    sizes = [len(found) for _ in range(4) if (found := scheduler.next_batch(1.001)) is not None]
    assert sizes == ([16, 16, 8] if held_back else [16, 8])


@pytest.mark.parametrize("step", [0.002, 0.008])
@pytest.mark.parametrize("callers", [16, 32])
def test_g12_closed_loop_callers_that_come_one_by_one_save_nine_messages_in_ten(callers: int, step: float) -> None:
    """Answers of sixteen tokens; the first token comes no later than if each had gone by itself."""
    batched = ClosedLoop(callers, step, (16, 16)).run(3.0)
    single = ClosedLoop(callers, step, (16, 16), batched=False).run(3.0)
    assert single.saved == 0.0
    assert batched.saved >= 0.9
    assert batched.first <= 1.03 * single.first


@pytest.mark.parametrize("step", [0.002, 0.008])
@pytest.mark.parametrize("callers", [1, 2, 8, 32])
def test_g12_callers_whose_answers_differ_in_length_are_not_kept_waiting(callers: int, step: float) -> None:
    batched = ClosedLoop(callers, step, (8, 24)).run(3.0)
    single = ClosedLoop(callers, step, (8, 24), batched=False).run(3.0)
    assert batched.first <= 1.03 * single.first


# -- G5: how many to wait for ------------------------------------------------------------------------------------------


def told(controller: HoldTarget, n: int, wait: float = 0.001, seconds: float = 0.010, crowded: bool = False) -> int:
    """The target after n such batches of four."""
    for _ in range(n):
        controller.returned("", [wait] * 4, seconds, crowded)
    return controller.target("")


def test_g5_the_target_grows_by_two_after_each_batch_up_to_the_largest() -> None:
    controller = HoldTarget()
    assert [told(controller, 1) for _ in range(9)] == [4, 6, 8, 10, 12, 14, 16, 16, 16]
    assert told(HoldTarget(smallest=3, largest=6), 2) == 6


@pytest.mark.parametrize(
    "batch", [{"wait": 0.003}, {"wait": 0.004}, {"seconds": 0.012}, {"seconds": 0.0156}, {"crowded": True}]
)
def test_g5_it_stays_where_one_condition_is_missing_and_nothing_is_bad(batch: dict[str, Any]) -> None:
    controller = HoldTarget(smallest=1, window=1)
    assert told(controller, 2) == 5
    assert told(controller, 5, **batch) == 5


@pytest.mark.parametrize("batch", [{"wait": 0.00401}, {"seconds": 0.01561}, {"wait": 0.0041, "crowded": True}])
def test_g5_it_halves_when_waits_or_calls_are_long_down_to_the_smallest(batch: dict[str, Any]) -> None:
    controller = HoldTarget(window=1)
    assert told(controller, 7) == 16
    assert [told(controller, 1, **batch) for _ in range(5)] == [8, 4, 2, 2, 2]
    controller = HoldTarget(smallest=3, largest=15, window=1)
    assert told(controller, 6) == 15
    assert [told(controller, 1, **batch) for _ in range(4)] == [7, 3, 3, 3]


def test_g5_the_95th_percentile_is_over_the_members_and_the_median_over_the_calls() -> None:
    controller = HoldTarget(smallest=2)
    controller.returned("", [0.001] * 19 + [1.0], 0.010, False)
    assert controller.waits("") == (0.001, 0.001)
    assert controller.target("") == 4
    controller.returned("", [1.0, 1.0], 0.010, False)  # 3 of 22
    assert controller.waits("") == (0.001, 1.0)
    assert controller.target("") == 2
    controller = HoldTarget()
    told(controller, 3)
    assert told(controller, 2, seconds=1.0) == 12  # 2 of 5 calls are long
    assert told(controller, 1, seconds=1.0) == 14  # 3 of 6: the lower half still is short
    assert told(controller, 1, seconds=1.0) == 7


def test_g5_the_last_100_batches_count() -> None:
    controller = HoldTarget()
    told(controller, 50, seconds=1.0)
    assert told(controller, 49, seconds=0.013) == 2
    told(controller, 50, seconds=0.013)  # all that were long are gone
    assert controller.target("") == 2
    assert told(controller, 49) == 2
    assert told(controller, 1) == 4  # 50 of 100
    controller = HoldTarget()
    assert told(controller, 6, wait=1.0) == 2
    assert told(controller, 94) == 2  # 6 of 100
    assert told(controller, 1) == 4  # 5 of 100
    assert HoldTarget().waits("") is None


def test_g5_partitions_have_targets_of_their_own() -> None:
    controller = HoldTarget()
    told(controller, 3)
    assert (controller.target(""), controller.target("another")) == (8, 2)
    assert controller.waits("another") is None


def test_g5_it_says_how_many_to_wait_for_never_how_many_may_go() -> None:
    scheduler, controller = adaptive()
    ask_many(scheduler, 20, 0.0)
    assert controller.target("") == 2
    assert len(take(scheduler, 0.0)) == 16
    assert told(controller, 7) == 16
    assert controller.policy(RULE, lambda: (0.0, 0.0, 0.0), 0.0, "") == replace(RULE, target=16)


def test_g5_a_grown_target_is_waited_for() -> None:
    scheduler, controller = adaptive()
    told(controller, 1)
    ask_many(scheduler, 3)
    held(scheduler, 0.0, until=0.00075)
    ask(scheduler, 0.0005)
    held(scheduler, 0.0005, until=0.00075)  # four: min_hold
    scheduler, controller = adaptive()
    told(controller, 1)
    ask_many(scheduler, 2)
    ask(scheduler, 0.0005)
    held(scheduler, 0.0005, until=0.00125)  # three: until it is quiet


def test_g5_the_last_256_partitions_are_remembered() -> None:
    controller = HoldTarget()
    for i in range(256):
        controller.returned(i, [0.0], 0.010, False)
    assert controller.target(0) == 4
    controller.returned(0, [0.0], 0.010, False)
    controller.returned("new", [0.0], 0.010, False)
    assert [controller.target(i) for i in (0, 1, 2, "new")] == [6, 2, 4, 4]
    assert (controller.waits(1), controller.company(1)) == (None, 0.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"smallest": 0}, "smallest=0"),
        ({"smallest": 5, "largest": 4}, "HoldTarget.smallest=5: must be in .1, largest=4"),
        ({"target_batch_time": 0.0}, "target_batch_time=0.0"),
        ({"target_batch_time": float("nan")}, "target_batch_time=nan"),
        ({"window": 0}, "window=0"),
        ({"hold": -1.0}, "hold=-1.0"),
    ],
)
def test_g5_a_wrong_setting_names_field_value_and_range(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HoldTarget(**wrong)


# -- G6: room ----------------------------------------------------------------------------------------------------------


def test_g6_the_room_of_a_group_is_shared_by_its_partitions_and_counts_down() -> None:
    scheduler = calls(FlushPolicy(max_batch_size=4))
    for partition in "pq":
        ask_many(scheduler, 3, partition=partition)
    scheduler.set_room("default", 5, 0.0)
    first, second = take(scheduler, 0.0), take(scheduler, 0.0)
    assert [(b.partition, len(b), b.short_of) for b in (first, second)] == [("p", 3, ""), ("q", 2, "room")]
    assert second.cause is Cause.SIZE
    held(scheduler, 0.0, until=inf)  # nothing but an input can change that
    finish(scheduler, first, 0.010)
    held(scheduler, 0.010, until=inf)
    scheduler.set_room("default", 1, 0.010)
    assert len(take(scheduler, 0.010)) == 1
    scheduler.set_room("default", None, 0.010)
    assert scheduler.next_batch(0.010) is None
    ask_many(scheduler, 4, 0.010)
    assert len(take(scheduler, 0.010)) == 4


@pytest.mark.parametrize(("group", "partition", "size"), [(1, 3, 1), (3, 1, 1), (2, None, 2), (None, 2, 2)])
def test_g6_both_limits_apply_where_both_are_set(group: int | None, partition: int | None, size: int) -> None:
    scheduler = calls(FlushPolicy(max_batch_size=4))
    ask_many(scheduler, 4, partition="p")
    scheduler.set_room("default", group, 0.0)
    scheduler.set_room("default", partition, 0.0, partition="p")
    batch = take(scheduler, 0.0)
    assert (len(batch), batch.short_of) == (size, "room")
    assert scheduler.next_batch(0.0) is None


def test_g6_the_next_free_place_is_for_an_urgent_request() -> None:
    scheduler = calls()
    scheduler.set_room("default", 0, 0.0)
    ask_many(scheduler, 3, 0.0, partition="p")
    urgent = ask(scheduler, 0.050, partition="q", priority=URGENT)
    held(scheduler, 0.050, until=inf)
    scheduler.set_room("default", 1, 0.060)
    assert list(take(scheduler, 0.060).grants) == [urgent]


def test_g6_who_fills_the_room_goes_although_others_were_held_for_company() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.by_size(4, 0.010), cost=UnitCost)
    scheduler.set_room("default", 2, 0.0)
    ask(scheduler, 0.0)
    held(scheduler, 0.0, until=0.010)
    ask(scheduler, 0.001)
    assert scheduler.wake_at() == 0.001
    assert len(take(scheduler, 0.001)) == 2
