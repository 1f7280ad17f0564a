"""An estimate refuses only while something renews it (contract B17): who is let in against it, and when."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from reflex_runtime.core.batch import Failed
from reflex_runtime.core.cost import MAX_KEYS, Evidence
from reflex_runtime.core.errors import ProcessorError, TooLate
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler

from .helpers import ask, finish, measure, outcome_of, scheduler_of, take, trained

WINDOW = FlushPolicy.window(1.0, 0.005)


def believing(seconds: float = 0.5, flush: FlushPolicy = WINDOW, **config: Any) -> Scheduler:
    """A scheduler that believes that one request takes so long."""
    return scheduler_of(flush=flush, cost=lambda: trained(seconds, 0.001), **config)


def refused(scheduler: Scheduler, now: float, **request: Any) -> bool:
    try:
        ask(scheduler, now, **{"time_limit": 0.1, **request})
    except TooLate:
        return True
    return False


def run_one(scheduler: Scheduler, now: float, elapsed: float, **request: Any) -> Ticket:
    """A request that runs alone at once."""
    ticket = ask(scheduler, now, **request)
    batch = take(scheduler, now)
    assert list(batch.grants) == [ticket]
    finish(scheduler, batch, now + elapsed, elapsed)
    return ticket


def test_b17_an_estimate_that_nothing_renews_refuses_for_a_second() -> None:
    scheduler = believing()
    assert [refused(scheduler, t) for t in (0.0, 0.5, 0.999)] == [True] * 3
    assert not refused(scheduler, 1.0)


def test_b17_a_batch_that_came_back_renews_it() -> None:
    scheduler = believing()
    assert refused(scheduler, 0.0)
    run_one(scheduler, 0.4, 0.5)  # without a deadline
    assert [refused(scheduler, t) for t in (0.9, 1.3, 1.89)] == [True] * 3
    assert not refused(scheduler, 1.91)


def test_b17_a_fresh_estimate_refuses_at_once_and_a_stale_one_not_even_the_first() -> None:
    scheduler = believing()
    run_one(scheduler, 0.0, 0.5)
    assert refused(scheduler, 0.6)
    scheduler = believing()
    run_one(scheduler, 0.0, 0.5)
    assert not refused(scheduler, 5.0)


@pytest.mark.parametrize("flush", [WINDOW, FlushPolicy.by_cost(1.0, 0.005)], ids=["window", "by_cost"])
def test_b17_one_is_let_in_at_a_time(flush: FlushPolicy) -> None:
    scheduler = believing(flush=flush)
    assert refused(scheduler, 0.0)
    probe = ask(scheduler, 1.0, time_limit=0.1)
    assert refused(scheduler, 1.0)
    batch = take(scheduler, 1.05)  # held by `by_cost` until then
    assert list(batch.grants) == [probe]
    assert batch.notes == {"probe": True}
    assert refused(scheduler, 1.06)


def test_b17_a_batch_that_runs_is_about_to_renew_it() -> None:
    scheduler = believing()
    ask(scheduler, 0.0)
    batch = take(scheduler, 0.0)
    assert refused(scheduler, 5.0)
    finish(scheduler, batch, 6.0, 6.0, Failed(ProcessorError("bad")))
    assert not refused(scheduler, 6.5)


def test_b17_a_probe_in_time_lets_the_next_in_at_once() -> None:
    scheduler = believing()
    assert refused(scheduler, 0.0)
    run_one(scheduler, 1.0, 0.022, time_limit=0.1)
    run_one(scheduler, 1.03, 0.022, time_limit=0.1)  # two teach the model
    assert not refused(scheduler, 1.06)
    assert not refused(scheduler, 1.06)


def test_b17_a_late_probe_renews_the_refusal() -> None:
    scheduler = believing()
    assert refused(scheduler, 0.0)
    late = run_one(scheduler, 1.0, 0.5, time_limit=0.1)
    assert outcome_of(late) == "ok"
    assert [refused(scheduler, t) for t in (1.5, 2.4)] == [True] * 2
    assert not refused(scheduler, 2.5)


def test_b17_a_probe_that_fails_is_not_followed_at_once() -> None:
    scheduler = believing()
    assert refused(scheduler, 0.0)
    ask(scheduler, 1.0, time_limit=0.1)
    finish(scheduler, take(scheduler, 1.0), 1.01, 0.01, Failed(ProcessorError("bad")))
    assert refused(scheduler, 1.02)
    assert not refused(scheduler, 2.02)


def test_b17_a_probe_that_never_ran_is_followed_at_once() -> None:
    scheduler = believing()
    ask(scheduler, 0.0, partition="other", shape="other")
    busy = take(scheduler, 0.0)
    assert refused(scheduler, 0.0)
    gone = ask(scheduler, 1.0, time_limit=0.1)
    scheduler.cancel(gone, 1.0)
    late = ask(scheduler, 1.0, time_limit=0.1)
    assert scheduler.next_batch(1.1) is None
    assert outcome_of(late) == "deadline_exceeded"
    assert not refused(scheduler, 1.1)
    finish(scheduler, busy, 1.15, 1.15)


def test_b17_who_has_more_time_takes_the_turn_of_a_probe_that_waits() -> None:
    scheduler = believing()
    busy = ask(scheduler, 0.0, partition="other", shape="other")
    batch = take(scheduler, 0.0)
    assert refused(scheduler, 0.0)
    hurried = ask(scheduler, 1.0, time_limit=0.3)
    patient = ask(scheduler, 1.0, time_limit=0.4)
    assert refused(scheduler, 1.0, time_limit=0.4)
    finish(scheduler, batch, 1.05, 1.05)
    assert outcome_of(busy) == "ok"
    batch = take(scheduler, 1.05)
    assert list(batch.grants) == [patient]
    assert outcome_of(hurried) == "deadline_unreachable"
    assert refused(scheduler, 1.1, time_limit=0.45)  # it runs: nobody takes its turn


def test_b17_what_waited_while_the_device_was_busy_with_others_is_tried_too() -> None:
    scheduler = scheduler_of(flush=WINDOW, cost=lambda: trained(0.020, 0.001))
    ask(scheduler, 0.0, partition="other", shape="other")
    batch = take(scheduler, 0.0)
    waiting = [ask(scheduler, 0.0, client=i, time_limit=2.4) for i in range(3)]
    model = scheduler.cost_model("default")
    for _ in range(4):
        measure(model, [""], 2.0)
    assert refused(scheduler, 0.1)
    finish(scheduler, batch, 1.5, 1.5)
    batch = take(scheduler, 1.5)
    assert list(batch.grants) == waiting[:1]
    assert [outcome_of(t) for t in waiting[1:]] == ["deadline_unreachable"] * 2


def test_b17_a_burst_after_a_pause_is_shed_at_once() -> None:
    """The batch that leaves renews the estimate: those who cannot make it after that need not wait for it."""
    scheduler = scheduler_of(flush=WINDOW, cost=lambda: trained(0.020, 0.010))
    run_one(scheduler, 0.0, 0.030)
    burst = [ask(scheduler, 10.0, client=i, time_limit=0.070) for i in range(9)]
    batch = take(scheduler, 10.0)
    assert 3 <= len(batch) <= 5
    assert "probe" not in batch.notes
    assert {outcome_of(t) for t in burst if t not in batch.grants} == {"deadline_unreachable"}


def test_b17_a_probe_that_the_batch_at_hand_has_no_place_for_waits() -> None:
    scheduler = believing(0.2, flush=FlushPolicy.window(1.0, 0.005, 1))
    assert refused(scheduler, 0.0)
    urgent = ask(scheduler, 1.0, priority=Priority.URGENT)
    probe = ask(scheduler, 1.0, time_limit=0.1)
    batch = take(scheduler, 1.0)
    assert list(batch.grants) == [urgent]
    finish(scheduler, batch, 1.02, 0.02)
    assert list(take(scheduler, 1.02).grants) == [probe]


def test_b17_a_class_beside_others_is_tried_with_a_tenth_of_the_device() -> None:
    model = trained(0.020, 0.001)
    for n in (1, 2, 1, 2):
        measure(model, ["dear"] * n, 0.020 + 0.200 * n)
    scheduler = scheduler_of(flush=WINDOW, cost=lambda: model)
    run_one(scheduler, 0.0, 0.220, cost_class="dear")
    tried, now = [0.0], 0.3
    while now < 12.0:  # the others keep the estimate of the shape fresh
        run_one(scheduler, now, 0.021, time_limit=0.05)
        if not refused(scheduler, now + 0.03, cost_class="dear", time_limit=0.15):
            tried.append(now + 0.03)
            finish(scheduler, take(scheduler, now + 0.03), now + 0.25, 0.220)
            now += 0.25
        now += 0.1
    assert [b - a for a, b in pairwise(tried)] == pytest.approx([2.47] * 4, abs=0.1)


def test_b17_a_probe_is_charged_what_it_took() -> None:
    """Not what the estimate says: its client would come after all others for as long."""
    scheduler = believing(5.0)
    assert refused(scheduler, 0.0, client="probe")
    probe = run_one(scheduler, 1.0, 0.022, client="probe", time_limit=0.1)
    assert probe.queue.client.counter == pytest.approx(0.022)
    usual = run_one(scheduler, 1.1, 0.022, client="usual")
    assert usual.queue.client.counter == pytest.approx(0.022 + 5.0, rel=0.01)


def test_b17_what_was_tried_longest_ago_is_forgotten_first() -> None:
    evidence = Evidence()
    for i in range(MAX_KEYS):
        assert evidence.refuses(Ticket(Request(shape=i), i, 0.0), 0.0)
    assert len(evidence._renewed) <= MAX_KEYS
    assert not evidence.refuses(Ticket(Request(shape=MAX_KEYS - 1), 0, 0.0), 1.0)
    assert evidence.refuses(Ticket(Request(shape=0), 0, 0.0), 1.0)  # as if it had never refused before
