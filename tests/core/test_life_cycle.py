"""What happens to one ticket: admission, cancelling, expiry, abandoning, closing (contract B13, B16, B17, B20, X2)."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from reflex_runtime.core.batch import (
    Apart,
    BatchFinished,
    BatchScheduled,
    Cause,
    Done,
    Failed,
    More,
    Outcome,
    RequestQueued,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.cost import TimeCost, TokenCost, UnitCost
from reflex_runtime.core.errors import (
    Closed,
    ConfigError,
    Displaced,
    Expired,
    InFlightCapReached,
    ProcessorError,
    QueueFull,
    TooLate,
)
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import IDLE_PARTITIONS, GroupConfig
from reflex_runtime.core.request import TRANSITIONS, Request, TicketState
from reflex_runtime.core.scheduler import IDLE_POLLS, Scheduler

from .helpers import ask, ask_many, finish, ids, outcome_of, scheduler_of, serve, settled, take, trained

STEPS = FlushPolicy.every_step(64, 16)
GREEDY = FlushPolicy(max_batch_size=4)


# -- B13: capacity ---------------------------------------------------------------------------------------------------


def test_b13_queue_at_capacity_refuses_with_the_documented_values() -> None:
    scheduler = scheduler_of(name="prod", capacity=3, flush=GREEDY)
    ask_many(scheduler, 3, group="prod")
    with pytest.raises(QueueFull) as refused:
        ask(scheduler, group="prod")
    error = refused.value
    assert (error.code, error.http_status, error.retry_after) == ("queue_full", 503, 1.0)
    assert error.message == "policy runtime queue at capacity"
    assert error.details == {"policy_id": "prod", "max_queue": 3}
    assert error.retry_safe


def test_b13_capacity_counts_only_what_waits() -> None:
    scheduler = scheduler_of(capacity=2, flush=FlushPolicy(max_batch_size=2))
    ask_many(scheduler, 2)
    take(scheduler, 0.0)
    ask_many(scheduler, 2)
    with pytest.raises(QueueFull):
        ask(scheduler)


def test_b13_retry_after_is_the_predicted_drain_time_when_longer() -> None:
    scheduler = scheduler_of(capacity=4, flush=FlushPolicy(max_batch_size=1))
    ask(scheduler)
    finish(scheduler, take(scheduler, 0.0), 0.8, elapsed=0.8)
    ask_many(scheduler, 4, 0.8)
    with pytest.raises(QueueFull) as refused:
        ask(scheduler, 0.8)
    assert refused.value.retry_after == pytest.approx(3.2)


# -- B16: cancelling -------------------------------------------------------------------------------------------------


def test_b16_a_cancelled_waiting_request_is_never_executed() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    gone, stays = ask_many(scheduler, 2)
    scheduler.cancel(gone, 0.0)
    assert outcome_of(gone) == "cancelled"
    assert list(take(scheduler, 0.0).grants) == [stays]


def test_b16_cancelled_while_running_its_value_is_dropped_and_it_is_no_fault() -> None:
    for outcome in (Done("value"), Failed(ProcessorError("crash"))):
        scheduler = scheduler_of(flush=GREEDY)
        ticket = ask(scheduler)
        batch = take(scheduler, 0.0)
        scheduler.cancel(ticket, 0.0)
        assert ticket.state is TicketState.RUNNING
        finish(scheduler, batch, 0.01, outcome=outcome)
        assert outcome_of(ticket) == "cancelled"


def test_b16_a_cancelled_running_ticket_leaves_at_the_next_step_boundary() -> None:
    scheduler = scheduler_of(flush=STEPS, cost=TokenCost, max_in_flight_per_client=1)
    ticket = ask(scheduler)
    batch = take(scheduler, 0.0)
    scheduler.cancel(ticket, 0.0)
    with pytest.raises(InFlightCapReached):
        ask(scheduler)
    finish(scheduler, batch, 0.01, outcome=More())
    assert outcome_of(ticket) == "cancelled"
    assert scheduler.take_left("default") == (ticket,)
    ask(scheduler)  # its client's place is free


def test_b16_a_cancelled_resident_settles_at_once_and_the_processor_is_told() -> None:
    scheduler = scheduler_of(flush=STEPS, cost=TokenCost)
    gone, stays = (ask(scheduler, client=c) for c in "ab")
    finish(scheduler, take(scheduler, 0.0), 0.01, outcome=More())
    scheduler.cancel(gone, 0.01)
    assert outcome_of(gone) == "cancelled"
    batch = take(scheduler, 0.01)
    assert list(batch.grants) == [stays]
    assert batch.left == (gone,)


def test_b16_cancelling_twice_or_after_the_end_does_nothing() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ticket = ask(scheduler)
    scheduler.cancel(ticket, 0.0)
    scheduler.cancel(ticket, 0.0)
    scheduler.abandon(ticket, 0.0)
    assert scheduler.next_batch(0.0) is None
    assert settled(scheduler) == [ticket]


# -- F9: abandoning --------------------------------------------------------------------------------------------------


def test_f9_an_abandoned_waiting_ticket_keeps_its_place_until_the_next_formation() -> None:
    scheduler = scheduler_of(flush=GREEDY, max_in_flight_per_client=1)
    ask(scheduler, client="other")
    batch = take(scheduler, 0.0)
    ticket = ask(scheduler)
    scheduler.abandon(ticket, 0.0)
    assert scheduler.next_batch(0.0) is None  # the device is busy: nothing is formed
    with pytest.raises(InFlightCapReached):
        ask(scheduler)
    finish(scheduler, batch, 0.01)
    assert scheduler.next_batch(0.01) is None
    assert outcome_of(ticket) == "cancelled"
    ask(scheduler, 0.01)


def test_f9_an_abandoned_running_ticket_runs_to_its_end() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ticket = ask(scheduler)
    batch = take(scheduler, 0.0)
    scheduler.abandon(ticket, 0.0)
    finish(scheduler, batch, 0.01)
    assert outcome_of(ticket) == "ok"


def test_f9_an_abandoned_resident_leaves_at_the_boundary() -> None:
    scheduler = scheduler_of(flush=STEPS, cost=TokenCost)
    running, resting = ask_many(scheduler, 2)
    batch = take(scheduler, 0.0)
    scheduler.abandon(running, 0.0)
    finish(scheduler, batch, 0.01, outcome=More())
    assert outcome_of(running) == "cancelled"
    scheduler.abandon(resting, 0.01)
    assert resting.state is TicketState.RESIDENT
    assert scheduler.next_batch(0.01) is None
    assert outcome_of(resting) == "cancelled"


# -- B17: deadlines --------------------------------------------------------------------------------------------------


def test_b17_refused_at_once_when_the_estimate_says_it_cannot_be_met() -> None:
    scheduler = scheduler_of(flush=GREEDY, cost=lambda: trained(0.020, 0.010))
    with pytest.raises(TooLate) as refused:
        ask(scheduler, time_limit=0.029)
    assert (refused.value.code, refused.value.http_status) == ("deadline_unreachable", 503)
    assert refused.value.details["deadline_ms"] == 29.0
    assert refused.value.details["needed_ms"] == pytest.approx(30.0, rel=0.02)
    ask(scheduler, time_limit=0.031)


def test_b17_a_guess_refuses_nobody() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ask(scheduler, time_limit=0.001)  # the cold start says 50 ms, but nothing was measured


def test_b17_dropped_before_execution_when_the_deadline_has_passed() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ask(scheduler)
    batch = take(scheduler, 0.0)
    late, fine = ask(scheduler, 0.0, time_limit=0.010), ask(scheduler, 0.0, time_limit=0.020)
    assert scheduler.wake_at() == 0.010
    assert scheduler.next_batch(0.010) is None
    assert outcome_of(late) == "deadline_exceeded"
    assert isinstance(late.outcome.error, Expired)
    assert late.outcome.error.http_status == 504
    finish(scheduler, batch, 0.015)
    assert list(take(scheduler, 0.015).grants) == [fine]


def test_b17_a_running_one_shot_is_answered_even_past_its_deadline() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ticket = ask(scheduler, time_limit=0.010)
    batch = take(scheduler, 0.0)
    assert scheduler.next_batch(0.020) is None
    finish(scheduler, batch, 0.030)
    assert outcome_of(ticket) == "ok"


def test_wake_at_ignores_the_deadline_of_what_runs() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ask(scheduler, time_limit=0.010)
    take(scheduler, 0.0)
    assert scheduler.wake_at() == inf  # nothing would happen then


def test_b17_a_resident_past_its_deadline_leaves_at_the_next_boundary() -> None:
    scheduler = scheduler_of(flush=STEPS, cost=TokenCost)
    running, resting = ask(scheduler, time_limit=0.010), ask(scheduler, time_limit=0.030)
    batch = take(scheduler, 0.0)
    finish(scheduler, batch, 0.020, outcome=More())
    assert outcome_of(running) == "deadline_exceeded"
    assert resting.state is TicketState.RESIDENT
    assert scheduler.wake_at() <= 0.030
    assert scheduler.next_batch(0.030) is None
    assert outcome_of(resting) == "deadline_exceeded"
    assert set(scheduler.take_left("default")) == {running, resting}


def test_b17_a_resident_expires_while_it_rests_beside_a_batch_in_flight() -> None:
    scheduler = scheduler_of(flush=STEPS, cost=TokenCost)
    resting = ask(scheduler, time_limit=0.030)
    finish(scheduler, take(scheduler, 0.0), 0.010, outcome=More())
    scheduler.hold(resting, 0.010)
    ask(scheduler, 0.010)
    take(scheduler, 0.010)
    assert scheduler.wake_at() == 0.030
    scheduler.next_batch(0.030)
    assert outcome_of(resting) == "deadline_exceeded"


def test_the_deadline_of_a_stream_is_for_its_first_token() -> None:
    scheduler = scheduler_of(flush=STEPS, cost=TokenCost)
    silent, speaking = (ask(scheduler, id=name, time_limit=0.010, streams=True) for name in ("silent", "speaking"))
    batch = take(scheduler, 0.0)
    scheduler.complete(batch, [More(None), More("token")], 0.005, 0.005)
    assert scheduler.wake_at() <= 0.010
    batch = take(scheduler, 0.010)
    assert outcome_of(silent) == "deadline_exceeded"
    finish(scheduler, batch, 0.020, outcome=More("token"))
    finish(scheduler, take(scheduler, 0.020), 0.030)
    assert outcome_of(speaking) == "ok"


def test_the_first_token_counts_even_when_the_deadline_passed_during_its_step() -> None:
    scheduler = scheduler_of(flush=STEPS, cost=TokenCost)
    ticket = ask(scheduler, time_limit=0.010, streams=True)
    finish(scheduler, take(scheduler, 0.0), 0.020, outcome=More("token"))
    assert ticket.state is TicketState.RESIDENT


def test_an_answered_stream_puts_its_partition_first_no_longer() -> None:
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_cost=0.1, max_batch_size=4), cost=lambda: TimeCost(("",)))
    stream = ask(scheduler, id="stream", partition="s", time_limit=0.020, streams=True)
    finish(scheduler, take(scheduler, 0.0), 0.010, outcome=More("token"))
    scheduler.hold(stream, 0.010)
    ask(scheduler, 0.010, id="old", partition="p", client="old")
    ask(scheduler, 0.015, id="young", partition="s", client="young")
    # The stream is the oldest of its partition, so that goes first by age; its spent deadline must not count though.
    group = scheduler._groups["default"]
    assert [p.key for p in group.turns.in_order(0.5)] == ["s", "p"]
    assert group.turns.expires_at() == inf


# -- B20, closing ----------------------------------------------------------------------------------------------------


def test_b20_closing_with_drain_finishes_what_was_queued_without_holds() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.by_size(4, 10.0))
    tickets = ask_many(scheduler, 2)
    assert scheduler.next_batch(0.0) is None
    scheduler.close(0.0)
    with pytest.raises(Closed) as refused:
        ask(scheduler)
    assert (refused.value.code, refused.value.http_status) == ("shutting_down", 503)
    batch = take(scheduler, 0.0)
    assert batch.cause is Cause.DRAIN
    finish(scheduler, batch, 0.01)
    assert [outcome_of(t) for t in tickets] == ["ok", "ok"]
    assert scheduler.idle


def test_b20_closing_hard_settles_what_waits_and_rests_as_drained() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.every_step(64, 2), cost=TokenCost, max_batches=2)
    rests = ask(scheduler, id="rests")
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More())
    scheduler.hold(rests, 0.0)
    runs = ask(scheduler, id="runs")
    batch = take(scheduler, 0.0)
    waits = ask(scheduler, id="waits")
    scheduler.close(0.0, drain=False)
    assert (outcome_of(waits), outcome_of(rests)) == ("shutting_down", "shutting_down")
    assert runs.state is TicketState.RUNNING
    finish(scheduler, batch, 0.01, outcome=More())
    assert outcome_of(runs) == "shutting_down"
    assert scheduler.idle


def test_b20_what_ran_to_its_end_during_a_hard_close_is_answered() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ticket = ask(scheduler)
    batch = take(scheduler, 0.0)
    scheduler.close(0.0, drain=False)
    finish(scheduler, batch, 0.01)
    assert outcome_of(ticket) == "ok"


def test_b20_a_drain_lets_residents_step_to_their_end() -> None:
    scheduler = scheduler_of(flush=STEPS, cost=TokenCost)
    ticket = ask(scheduler)
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More())
    scheduler.close(0.0)
    for _ in range(3):
        finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More())
    finish(scheduler, take(scheduler, 0.0), 0.0)
    assert outcome_of(ticket) == "ok"


# -- X2: every admitted request settles once ---------------------------------------------------------------------------


def test_x2_a_rejected_request_never_has_a_ticket() -> None:
    scheduler = scheduler_of(capacity=1, flush=GREEDY)
    ask(scheduler)
    with pytest.raises(QueueFull):
        ask(scheduler, id="refused")
    queued, rejected = scheduler.take_events()
    assert isinstance(queued, RequestQueued)
    assert isinstance(rejected, RequestRejected)
    assert (rejected.request.id, rejected.error.code) == ("refused", "queue_full")
    assert scheduler.snapshot()["admitted"] == 1


def test_x2_every_outcome_settles_its_ticket_once() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    tickets = ask_many(scheduler, 4)
    batch = take(scheduler, 0.0)
    crash = ProcessorError("bad")
    scheduler.complete(batch, [Done(1), Failed(crash), Done(2), Failed(crash)], 0.01, 0.01)
    assert [outcome_of(t) for t in tickets] == ["ok", "processor_failed", "ok", "processor_failed"]
    events = scheduler.take_events()
    assert [e.ticket for e in events if isinstance(e, RequestSettled)] == tickets
    (finished,) = (e for e in events if isinstance(e, BatchFinished))
    assert not finished.crashed


def test_a_batch_crashed_when_no_item_of_it_succeeded() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ask_many(scheduler, 2)
    finish(scheduler, take(scheduler, 0.0), 0.01, outcome=Failed(ProcessorError("bad")))
    assert [e.crashed for e in scheduler.take_events() if isinstance(e, BatchFinished)] == [True]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_f14_who_left_when_the_batch_began_says_nothing_about_the_processor(left: int) -> None:
    """Of two: it crashed if the others failed, not if nobody was left."""
    scheduler = scheduler_of(flush=GREEDY)
    ask_many(scheduler, 2)
    outcomes = [Failed(Expired())] * left + [Failed(ProcessorError("bad"))] * (2 - left)
    scheduler.complete(take(scheduler, 0.0), outcomes, 0.01, 0.01)
    assert [e.crashed for e in scheduler.take_events() if isinstance(e, BatchFinished)] == [left < 2]


@pytest.mark.parametrize("other", [Failed(ProcessorError("bad")), Done()], ids=["fails again", "succeeds alone"])
def test_f14_a_part_with_nobody_left_says_nothing_about_the_call(other: Outcome) -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ask_many(scheduler, 2)
    finish(scheduler, take(scheduler, 0.0), 0.01, outcome=Apart(ProcessorError("bad")))
    for outcome in (Failed(Expired()), other):
        finish(scheduler, take(scheduler, 0.01), 0.01, outcome=outcome)
    crashed = [e.crashed for e in scheduler.take_events() if isinstance(e, BatchFinished)]
    assert crashed == [False, False, other != Done()]


def test_f14_a_client_that_had_left_when_its_batch_began_is_no_offender() -> None:
    """Its next request shares a batch."""
    scheduler = scheduler_of(flush=GREEDY)
    ask(scheduler, client="left")
    finish(scheduler, take(scheduler, 0.0), 0.01, outcome=Failed(Expired()))
    ask(scheduler, 0.01, client="left")
    ask(scheduler, 0.01, client="other")
    assert len(take(scheduler, 0.01)) == 2


def test_a_wrong_number_of_outcomes_changes_nothing() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    tickets = ask_many(scheduler, 2)
    batch = take(scheduler, 0.0)
    with pytest.raises(ValueError, match="2 outcomes"):
        scheduler.complete(batch, [Done()], 0.01, 0.01)
    finish(scheduler, batch, 0.01)
    assert [outcome_of(t) for t in tickets] == ["ok", "ok"]


def test_a_batch_comes_back_once() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ask(scheduler)
    batch = take(scheduler, 0.0)
    finish(scheduler, batch, 0.01)
    with pytest.raises(ValueError, match="not in flight"):
        finish(scheduler, batch, 0.01)


def test_the_table_of_transitions_ends_in_settled() -> None:
    assert set(TRANSITIONS) == set(TicketState)
    assert not TRANSITIONS[TicketState.SETTLED]
    assert all(TicketState.SETTLED in TRANSITIONS[s] for s in TicketState if s is not TicketState.SETTLED)


# -- B21: caps -------------------------------------------------------------------------------------------------------


def test_b21_in_flight_cap_counts_waiting_and_running() -> None:
    scheduler = scheduler_of(max_in_flight_per_client=2, flush=FlushPolicy(max_batch_size=1))
    ask(scheduler, client="a")
    batch = take(scheduler, 0.0)
    ask(scheduler, client="a")
    with pytest.raises(InFlightCapReached) as refused:
        ask(scheduler, client="a")
    error = refused.value
    assert (error.code, error.http_status, error.retry_after) == ("client_at_capacity", 429, 1.0)
    ask(scheduler, client="b")
    finish(scheduler, batch, 0.01)
    ask(scheduler, 0.01, client="a")


def test_b21_a_cap_of_zero_is_off() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    assert len(ask_many(scheduler, 50, client="a")) == 50


def test_f5_the_cap_is_free_before_the_answer_can_be_seen() -> None:
    scheduler = scheduler_of(max_in_flight_per_client=1, flush=GREEDY)
    ask(scheduler)
    scheduler.take_events()
    finish(scheduler, take(scheduler, 0.0), 0.01)
    ask(scheduler, 0.01)  # before anybody took the events


# -- B22: latest only ------------------------------------------------------------------------------------------------


def test_b22_a_newer_request_replaces_the_waiting_older_one() -> None:
    scheduler = scheduler_of(latest_only=True, flush=GREEDY)
    ask(scheduler, client="other")
    batch = take(scheduler, 0.0)
    old, new = ask(scheduler, client="robot"), ask(scheduler, client="robot")
    assert (outcome_of(old), old.outcome.error.http_status) == ("superseded", 409)
    finish(scheduler, batch, 0.01)
    assert list(take(scheduler, 0.01).grants) == [new]


def crowded(**config: Any) -> Scheduler:
    """The device runs three of "c" and the queue of 4 is full: three of "a", one of "b"."""
    scheduler = scheduler_of(capacity=4, share_room=True, flush=FlushPolicy(max_batch_size=8), **config)
    ask_many(scheduler, 3, client="c")
    assert len(take(scheduler, 0.0)) == 3
    for i, client in enumerate("aaba"):
        ask(scheduler, id=f"{client}{i}", client=client)
    scheduler.take_events()
    return scheduler


def test_f7_who_has_most_waiting_gives_way_in_a_full_queue() -> None:
    scheduler = crowded()
    ticket = ask(scheduler, 1.0, client="d")
    assert ticket.state is TicketState.WAITING
    (settled,) = [e.ticket for e in scheduler.take_events() if isinstance(e, RequestSettled)]
    assert settled.id == "a3"  # the newest of the one with most
    assert isinstance(settled.outcome.error, Displaced)
    assert scheduler.queued("default") == 4


def test_f7_nobody_gives_way_to_who_has_nearly_as_much() -> None:
    scheduler = crowded()
    ask(scheduler, 1.0, client="b")  # 3 against 1: now it is 2 and 2
    for client in ("a", "b"):
        with pytest.raises(QueueFull):
            ask(scheduler, 2.0, client=client)
    assert sum(isinstance(e, RequestSettled) for e in scheduler.take_events()) == 1


def test_f7_who_is_refused_for_another_reason_displaces_nobody() -> None:
    scheduler = crowded(max_in_flight_per_client=3)
    with pytest.raises(InFlightCapReached):
        ask(scheduler, 2.0, client="c")
    assert not any(isinstance(e, RequestSettled) for e in scheduler.take_events())


def test_b22_what_runs_is_not_replaced() -> None:
    scheduler = scheduler_of(latest_only=True, flush=GREEDY)
    running = ask(scheduler, client="robot")
    take(scheduler, 0.0)
    ask(scheduler, client="robot")
    assert running.state is TicketState.RUNNING


def test_b22_the_older_one_is_replaced_in_whatever_partition_it_waits() -> None:
    scheduler = scheduler_of(latest_only=True, flush=GREEDY)
    old = ask(scheduler, client="robot", partition="224x224")
    ask(scheduler, client="robot", partition="96x96")
    assert outcome_of(old) == "superseded"


def test_b22_replacing_works_at_capacity_and_at_the_cap() -> None:
    scheduler = scheduler_of(latest_only=True, capacity=2, max_in_flight_per_client=1, flush=GREEDY)
    ask(scheduler, client="a")
    ask(scheduler, client="b")
    ask(scheduler, client="a")
    with pytest.raises(QueueFull):
        ask(scheduler, client="c")


def test_b22_a_refused_newcomer_replaces_nobody() -> None:
    scheduler = scheduler_of(latest_only=True, flush=GREEDY, cost=lambda: trained(0.020, 0.010))
    old = ask(scheduler, client="robot")
    with pytest.raises(TooLate):
        ask(scheduler, client="robot", time_limit=0.001)
    assert old.state is TicketState.WAITING


# -- configuration ---------------------------------------------------------------------------------------------------


def test_wrong_settings_name_field_value_and_range() -> None:
    for wrong, words in (
        ({"capacity": 0}, r"GroupConfig\.capacity=0: must be >= 1"),
        ({"max_in_flight_per_client": -1}, r"GroupConfig\.max_in_flight_per_client=-1"),
        ({"weight": -1.0}, r"GroupConfig\.weight=-1\.0"),
        ({"weight": inf}, r"GroupConfig\.weight=inf"),
        ({"promote_after": -1.0}, r"GroupConfig\.promote_after=-1\.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            GroupConfig(**wrong)  # type: ignore[arg-type]
    for wrong, words in (
        ({"weight": 0.0}, "weight=0.0"),
        ({"weight": float("nan")}, "weight=nan"),
        ({"wants": 0.0}, "wants=0.0"),
        ({"time_limit": -1.0}, "time_limit=-1.0"),
        ({"time_limit": float("nan")}, "time_limit=nan"),
    ):
        with pytest.raises(ConfigError, match=words):
            Request(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_batches=0"):
        Scheduler(max_batches=0)
    with pytest.raises(ConfigError, match="at least one group"):
        Scheduler([])
    with pytest.raises(ConfigError, match="unique"):
        Scheduler([GroupConfig(), GroupConfig()])


def test_an_unknown_group_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="not one of"):
        ask(scheduler_of(), group="nowhere")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"priority": "urgent"}, r"Request\.priority='urgent': must be one of Priority\.URGENT, Priority\.DEFAULT, "),
        ({"priority": 0}, r"Request\.priority=0: must be one of"),
        ({"weight": 0.0}, r"Request: weight=0\.0, wants=1\.0: both must be finite and > 0"),
        ({"wants": inf}, r"Request: weight=1\.0, wants=inf: both"),
        ({"time_limit": nan}, r"Request\.time_limit=nan: must be >= 0 seconds or None"),
        ({"time_limit": "a"}, r"Request\.time_limit='a': must be a number"),
        ({"weight": None}, r"Request\.weight=None: must be a number"),
        ({"max_gap": [1]}, r"Request\.max_gap=\[1\]: must be a number"),
    ],
)
def test_a_request_that_cannot_be_scheduled_is_a_configuration_error(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Request(**wrong)


# -- room and pause --------------------------------------------------------------------------------------------------


def test_room_limits_newcomers_until_it_is_set_again() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ask_many(scheduler, 4)
    scheduler.set_room("default", 3, 0.0)
    batch = take(scheduler, 0.0)
    assert (len(batch), batch.cause) == (3, Cause.SIZE)
    finish(scheduler, batch, 0.01)
    assert scheduler.next_batch(0.01) is None
    assert scheduler.wake_at() == inf
    scheduler.set_room("default", None, 0.01)
    assert len(take(scheduler, 0.01)) == 1


def test_room_does_not_stop_residents() -> None:
    scheduler = scheduler_of(flush=STEPS, cost=TokenCost)
    ask(scheduler)
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More())
    scheduler.set_room("default", 0, 0.0)
    assert len(take(scheduler, 0.0)) == 1


def test_a_paused_group_takes_no_turn_until_the_pause_ends() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ask(scheduler)
    scheduler.pause("default", 0.020, 0.0)
    assert scheduler.next_batch(0.0) is None
    assert scheduler.wake_at() == 0.020
    assert scheduler.next_batch(0.019) is None
    take(scheduler, 0.020)


def test_a_paused_partition_takes_no_turn_but_others_do() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ask(scheduler, partition="p")
    ask(scheduler, partition="q")
    scheduler.pause("default", 0.020, 0.0, partition="p")
    batch = take(scheduler, 0.0)
    assert batch.partition == "q"
    finish(scheduler, batch, 0.005)
    assert scheduler.next_batch(0.005) is None
    assert scheduler.wake_at() == 0.020
    assert take(scheduler, 0.020).partition == "p"


def test_a_pause_can_be_ended_early() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ask(scheduler)
    scheduler.pause("default", inf, 0.0)
    assert scheduler.next_batch(5.0) is None
    scheduler.pause("default", 0.0, 5.0)
    take(scheduler, 5.0)


def test_many_paused_partitions_never_lose_a_ticket() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    for i in range(IDLE_PARTITIONS + 2):
        scheduler.pause("default", inf, 0.0, partition=i)
    tickets = [ask(scheduler, partition="new", id=str(i)) for i in range(3)]
    serve(scheduler, lambda batch: 0.01)
    assert [outcome_of(t) for t in tickets] == ["ok"] * 3


def test_idle_partitions_are_forgotten() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    for i in range(3 * IDLE_PARTITIONS):
        ask(scheduler, partition=i)
        finish(scheduler, take(scheduler, 0.0), 0.0)
    assert len(scheduler._groups["default"].partitions) <= IDLE_PARTITIONS + 1


def test_idle_partitions_whose_pause_is_over_are_forgotten_and_paused_ones_are_not() -> None:
    scheduler = scheduler_of()
    for i in range(3 * IDLE_PARTITIONS):
        scheduler.pause("default", 1.0, 0.0, partition=f"a{i}")
    assert len(scheduler._groups["default"].partitions) == 3 * IDLE_PARTITIONS
    for i in range(4 * IDLE_PARTITIONS):
        scheduler.pause("default", 9.0 if i == 0 else 2.0, 2.0, partition=f"b{i}")
    known = scheduler._groups["default"].partitions
    assert len(known) <= 3 * IDLE_PARTITIONS + 1
    assert "b0" in known


def test_a_budget_below_one_request_still_runs_them_one_by_one() -> None:
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_cost=0.1), cost=UnitCost)
    ask_many(scheduler, 2)
    assert len(take(scheduler, 0.0)) == 1


def test_ids_are_for_people_and_need_not_be_unique() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ask_many(scheduler, 2, id="same")
    assert ids(take(scheduler, 0.0).grants) == ["same", "same"]


def test_t6_a_batch_tells_when_it_was_decided_to_send_nothing() -> None:
    scheduler = scheduler_of(flush=FlushPolicy(hold_max=(1.0, 1.0, 1.0)))

    def looked() -> tuple[float, ...]:
        return next(e.idle_polls for e in scheduler.take_events() if isinstance(e, BatchScheduled))

    assert scheduler.next_batch(0.5) is None  # nothing to send is no look
    ask(scheduler, 0.5, time_limit=0.1)
    assert scheduler.next_batch(0.75) is None  # one that ends what waited is, even if nothing waits any more
    ask(scheduler, 1.0)
    for now in (1.0, 1.25):
        assert scheduler.next_batch(now) is None
    scheduler.submit(Request(), 1.25, ready=False)  # cannot change the decision
    assert scheduler.next_batch(1.3) is None
    scheduler.set_room("default", None, 1.5)  # an input, and so another decision
    for now in (1.5, 1.75):
        assert scheduler.next_batch(now) is None
    batch = take(scheduler, 2.0)
    assert looked() == (0.75, 1.0, 1.5)
    ask(scheduler, 2.1)
    assert scheduler.next_batch(2.2) is None  # the device is busy
    finish(scheduler, batch, 2.3)
    batch = take(scheduler, 3.5)
    assert looked() == ()
    finish(scheduler, batch, 4.0)
    ask(scheduler, 5.0)
    for i in range(2 * IDLE_POLLS):
        scheduler.set_room("default", None, 5.0 + i / 1024)
        assert scheduler.next_batch(5.0 + i / 1024) is None
    take(scheduler, 7.0)
    assert len(told := looked()) == IDLE_POLLS
    assert told[-1] == 5.0 + (2 * IDLE_POLLS - 1) / 1024
