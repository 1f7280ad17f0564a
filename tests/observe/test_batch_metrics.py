"""The figures of a coordinator add up to what its callers saw, at every moment of any history. Time is virtual."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflex_runtime.core.batch import (
    Batch,
    BatchFinished,
    Done,
    Failed,
    Outcome,
    RequestQueued,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.errors import (
    Cancelled,
    Closed,
    Drained,
    Dropped,
    Expired,
    InFlightCapReached,
    ProcessorError,
    ProcessorHung,
    QueueFull,
    Rejected,
    Shed,
    Superseded,
    TooLarge,
)
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.observe import batch_metrics
from reflex_runtime.observe.batch_metrics import BOUNDS, COUNTERS, BatchMeter, BatchMetrics, FeedBatchMetrics, Times

SIZE = 3
GROUP = GroupConfig(
    flush=FlushPolicy.by_size(SIZE, 0.05), capacity=6, max_in_flight_per_client=2, latest_only=False, cost=UnitCost
)
REFUSED = {QueueFull: "rejected", InFlightCapReached: "in_flight_exceeded", Closed: "closed"}


class Play:
    """A scheduler in virtual time, a meter as its only sink, and what the callers themselves saw."""

    def __init__(self, group: GroupConfig = GROUP) -> None:
        self.scheduler = Scheduler([group])
        self.meter = BatchMeter(SIZE)
        self.now = 0.0
        self.refused: Counter[tuple[str, str]] = Counter()
        self.tickets: list[Ticket] = []
        self.left: Counter[str] = Counter()
        self.running: Batch | None = None
        self.ran: list[tuple[Batch, float, float]] = []  # oldest waited, took
        self.crashes: list[bool] = []

    def submit(self, feed: str, time_limit: float | None = None) -> None:
        try:
            self.tickets.append(self.scheduler.submit(Request(client=feed, time_limit=time_limit), self.now))
        except Rejected as error:
            self.refused[feed, REFUSED[type(error)]] += 1
        self.tell()

    def begin(self) -> None:
        if self.running is None:
            self.running = self.scheduler.next_batch(self.now)
            self.tell()

    def end(self, outcomes: Sequence[Outcome]) -> None:
        batch = self.running
        if batch is None:
            return
        self.running = None
        some = [outcomes[i % len(outcomes)] for i in range(len(batch))]
        oldest = batch.scheduled_at - min(t.arrived for t in batch.grants)
        self.ran.append((batch, oldest, self.now - batch.scheduled_at))
        self.scheduler.complete(batch, some, self.now - batch.scheduled_at, self.now)
        self.tell()

    def abandon(self, i: int) -> None:
        waiting = [t for t in self.tickets if t.outcome is None and not t.abandoned]
        if waiting:
            ticket = waiting[i % len(waiting)]
            self.left[ticket.request.client] += 1
            self.scheduler.abandon(ticket, self.now)
            self.tell()

    def cancel(self, i: int) -> None:
        if self.tickets:
            self.scheduler.cancel(self.tickets[i % len(self.tickets)], self.now)
            self.tell()

    def tell(self) -> None:
        for event in self.scheduler.take_events():
            self.meter(event)
            if isinstance(event, BatchFinished) and {fate(ticket) for ticket in event.batch.grants} != {"dropped"}:
                self.crashes.append(event.crashed)

    def truth(self, feed: str) -> dict[str, int]:
        """What the feed's callers saw, counted the slow way."""
        count = dict.fromkeys(COUNTERS, 0)
        for (of, how), times in self.refused.items():
            if of == feed:
                count[how] += times
                count["submitted"] += times
        for ticket in self.tickets:
            if ticket.request.client == feed:
                count["submitted"] += 1
                count[fate(ticket)] += 1
        count["timed_out"] = self.left[feed]
        return count

    def check(self) -> None:
        found = self.meter.snapshot()
        feeds = {t.request.client for t in self.tickets} | {feed for feed, _ in self.refused}
        assert found.feeds.keys() == feeds
        for feed in feeds:
            assert counters(found.feeds[feed]) == self.truth(feed), feed
        for name in COUNTERS:
            assert getattr(found, name) == sum(getattr(f, name) for f in found.feeds.values()), name
        for figures in (found, *found.feeds.values()):
            conserved(figures)
        running = [] if self.running is None else [self.running]
        formed = [b for b, *_ in self.ran] + running
        assert found.batches_dispatched == len(formed)
        assert found.batch_sizes == Counter(len(b) for b in formed)
        assert found.processing.count == len(self.ran)
        assert found.formation.count == len(formed)
        in_a_row = 0
        for crashed in self.crashes:
            in_a_row = in_a_row + 1 if crashed else 0
        assert found.consecutive_errors == in_a_row


def fate(ticket: Ticket) -> str:
    if ticket.outcome is None:
        return "pending"
    if isinstance(ticket.outcome, Done):
        return "processed"
    return "dropped" if isinstance(ticket.outcome.error, Dropped) else "failed"


def counters(figures: BatchMetrics | FeedBatchMetrics) -> dict[str, int]:
    return {name: getattr(figures, name) for name in COUNTERS}


def conserved(f: BatchMetrics | FeedBatchMetrics) -> None:
    refused = f.rejected + f.in_flight_exceeded + f.closed
    assert f.submitted == refused + f.processed + f.failed + f.dropped + f.pending
    assert min(counters(f).values()) >= 0


FAULT = Failed(ProcessorError("no"))
feeds = st.sampled_from(["cam1", "cam2", "cam3", "cam4"])
operations = st.one_of(
    st.tuples(st.just("submit"), feeds, st.sampled_from([None, None, 0.03])),
    st.tuples(st.just("submit"), feeds),
    st.tuples(st.just("begin")),
    st.tuples(st.just("end"), st.lists(st.sampled_from([Done(1), FAULT]), min_size=1, max_size=3)),
    st.tuples(st.just("abandon"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("pass"), st.sampled_from([0.001, 0.02, 0.06])),
    st.tuples(st.just("close"), st.booleans()),
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(operations, max_size=60))
def test_f13_every_submission_is_counted_once_at_every_moment(history: list[tuple[Any, ...]]) -> None:
    follow(history)


@pytest.mark.parametrize("seed", range(10))
def test_f13_every_submission_is_counted_once_over_long_histories(seed: int) -> None:
    rng = random.Random(seed)

    def operation() -> tuple[Any, ...]:
        feed = f"cam{rng.randrange(5)}"
        return rng.choice(
            (
                *(("submit", feed, rng.choice((None, None, 0.03))) for _ in range(3)),
                ("begin",),
                ("end", [rng.choice((Done(1), FAULT)) for _ in range(rng.randint(1, 3))]),
                ("abandon", rng.randrange(9)),
                ("cancel", rng.randrange(1000)),
                ("pass", rng.choice((0.001, 0.02, 0.06))),
            )
        )

    follow([operation() for _ in range(400)] + [("close", rng.random() < 0.5), ("submit", "cam1"), ("submit", "late")])


def follow(history: Sequence[tuple[Any, ...]]) -> None:
    play = Play()
    for verb, *arguments in history:
        if verb == "pass":
            play.now += arguments[0]
        elif verb == "close":
            if len(play.tickets) > 4:
                play.scheduler.close(play.now, arguments[0])
                play.tell()
        else:
            getattr(play, verb)(*arguments)
        play.check()


def test_f13_without_data_ratios_and_timings_are_none() -> None:
    found = BatchMeter(4).snapshot()
    assert counters(found) == dict.fromkeys(COUNTERS, 0)
    assert found.fill_ratio is None
    assert found.batch_sizes == {}
    for timing in (found.processing, found.formation):
        assert timing.count == 0
        assert timing.mean is timing.p50 is timing.p95 is timing.p99 is None
    meter = BatchMeter(4)
    meter(RequestRejected(0.0, Request(client="cam"), QueueFull()))
    assert meter.snapshot().feeds["cam"].latency.mean is None


def test_f13_times_are_seconds_from_the_oldest_to_the_answer() -> None:
    play = Play()
    play.submit("slow")
    play.now = 0.04
    play.submit("late")
    play.now = 0.05  # the oldest has waited for max_latency
    play.begin()
    play.now = 0.07
    play.end([Done(1)])
    found = play.meter.snapshot()
    assert found.formation.mean == pytest.approx(0.05)
    assert found.processing.mean == pytest.approx(0.02)
    assert found.feeds["slow"].latency.p50 == pytest.approx(0.07)
    assert found.feeds["late"].latency.p50 == pytest.approx(0.03)
    assert found.fill_ratio == pytest.approx(2 / SIZE)
    assert found.batch_sizes == {2: 1}


def test_f13_latency_is_of_what_was_answered_only() -> None:
    play = Play()
    play.submit("cam")
    play.now = 0.05
    play.begin()
    play.end([FAULT])
    found = play.meter.snapshot().feeds["cam"]
    assert (found.failed, found.latency.count) == (1, 0)


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (QueueFull(), "rejected"),
        (TooLarge(), "rejected"),
        (InFlightCapReached(), "in_flight_exceeded"),
        (Closed(), "closed"),
    ],
)
def test_f13_a_refusal_is_counted_by_its_reason(error: Rejected, counted: str) -> None:
    meter = BatchMeter(4)
    meter(RequestRejected(0.0, Request(client="cam"), error))
    assert counters(meter.snapshot()) == dict.fromkeys(COUNTERS, 0) | {"submitted": 1, counted: 1}


@pytest.mark.parametrize(
    ("outcome", "counted"),
    [
        (Done(None), "processed"),
        *((Failed(kind()), "dropped") for kind in (Cancelled, Expired, Drained, Superseded, Shed)),
        (Failed(ProcessorHung()), "failed"),
        (Failed(ValueError("a processor's own")), "failed"),
    ],
)
def test_f13_an_item_is_counted_as_it_ended(outcome: Outcome, counted: str) -> None:
    meter = BatchMeter(4)
    ticket = settle(meter, 0, "cam", outcome)
    assert ticket.outcome is outcome
    assert counters(meter.snapshot()) == dict.fromkeys(COUNTERS, 0) | {"submitted": 1, counted: 1}


def test_f13_one_answer_ends_the_row_of_errors() -> None:
    play = Play()
    rows = []
    left = Failed(Expired())
    for outcomes in ([FAULT], [FAULT], [left], [FAULT], [left, Done(1)], [FAULT], [FAULT, Done(1)], [FAULT]):
        for feed in ("cam1", "cam2"):
            play.submit(feed)
        play.now += 0.05
        play.begin()
        play.end(outcomes)
        rows.append(play.meter.snapshot().consecutive_errors)
    assert rows == [1, 2, 2, 3, 0, 1, 0, 1], "one that was in no call ends none"


@pytest.mark.parametrize("n", [1, 2, 99, 100, 101, 512, 513, 700])
def test_f13_percentiles_are_of_the_last_512_and_buckets_of_all(n: int) -> None:
    rng = random.Random(n)
    values = [rng.choice((0.0, 0.001, rng.random(), 20.0 * rng.random())) for _ in range(n)]
    values[-min(n, 513)] = 30.0  # with 513 of them it is the first that is out of the window
    times = Times()
    for value in values:
        times.add(value)
    found = times.take()()
    recent = sorted(values[-512:])
    assert found.count == n
    assert found.mean == pytest.approx(math.fsum(values) / n)
    for share, told in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        # nearest rank: the smallest measured value that a share of them does not exceed
        assert told == next(v for v in recent if sum(o <= v for o in recent) >= share * len(recent))
    for i, bound in enumerate(BOUNDS):
        assert sum(found.buckets[: i + 1]) == sum(v <= bound for v in values)


def test_f13_the_window_holds_512() -> None:
    times = Times()
    for value in [1000.0] * 7 + [1.0] * 506:  # one of the seven is out: six are more than a hundredth of the window
        times.add(value)
    assert times.take()().p99 == 1000.0
    times.add(1.0)
    assert times.take()().p99 == 1.0


def test_f13_a_snapshot_stays_as_it_was_and_is_json() -> None:
    play = Play()

    def answer(feeds: int, took: float) -> None:
        for i in range(feeds):
            play.submit(f"cam{i}")
        play.now += 0.05
        play.begin()
        play.now += took
        play.end([Done(1)])

    answer(1, 0.01)
    play.submit("cam0")
    taken = play.meter.take()
    before = taken()
    answer(2, 5.0)
    assert taken().as_dict() == before.as_dict()
    assert (before.pending, play.meter.snapshot().pending) == (1, 0)
    with pytest.raises(AttributeError):
        before.pending = 0
    with pytest.raises(TypeError):
        before.feeds["cam9"] = FeedBatchMetrics()
    told = before.as_dict()
    assert json.loads(json.dumps(told)) == told
    assert told["batch_sizes"] == {"1": 1}
    assert told["feeds"]["cam0"]["latency"]["p99"] == pytest.approx(0.06)
    assert told["processing"].keys() == {"count", "mean", "p50", "p95", "p99"}


def settle(meter: BatchMeter, now: float, feed: str, outcome: Outcome = Done(1)) -> Ticket:  # noqa: B008 - a value
    ticket = Ticket(Request(client=feed), 0, now)
    meter(RequestQueued(now, ticket))
    ticket.outcome = outcome
    meter(RequestSettled(now, ticket))
    return ticket


def test_f13_feeds_idle_for_longest_are_forgotten_and_stay_in_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_metrics, "FEEDS", 8)
    meter = BatchMeter(4)
    waiting = Ticket(Request(client="waits"), 0, 0.0)
    meter(RequestQueued(0.0, waiting))
    for i in range(100):
        settle(meter, 1.0 + i, f"cam{i}")
        settle(meter, 1.0 + i, "busy")
        found = meter.snapshot()
        assert len(found.feeds) <= 8
        assert found.processed == 2 * (i + 1)
        assert found.feeds["busy"].processed == i + 1
        assert {"waits", f"cam{i}"} <= found.feeds.keys()
        conserved(found)
    waiting.outcome = Done(1)
    meter(RequestSettled(200.0, waiting))
    assert meter.snapshot().pending == 0
    assert meter.snapshot().submitted == 201


def test_f13_what_is_pending_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_metrics, "FEEDS", 8)
    meter = BatchMeter(4)
    tickets = [Ticket(Request(client=f"cam{i}"), i, 0.0) for i in range(30)]
    for ticket in tickets:
        meter(RequestQueued(0.0, ticket))
    assert meter.snapshot().pending == len(meter.snapshot().feeds) == 30
    for ticket in tickets:
        ticket.outcome = Failed(Drained())
        meter(RequestSettled(1.0, ticket))
    for i in range(20):
        settle(meter, 2.0, f"new{i}")
    found = meter.snapshot()
    assert (found.dropped, found.processed, found.pending) == (30, 20, 0)
    conserved(found)


def test_f13_a_call_that_was_given_up_counts_as_one_that_failed() -> None:
    play = Play()
    play.submit("cam1")
    play.now = 0.05
    play.begin()
    play.now = 60.05
    play.end([Failed(ProcessorHung())])
    found = play.meter.snapshot()
    assert (found.failed, found.consecutive_errors) == (1, 1)
    assert found.processing.p99 == pytest.approx(60.0)
    assert found.processing.buckets[-1] == 1


def test_only_the_events_that_count_are_asked_for() -> None:
    assert BatchFinished in BatchMeter.events
    assert len(BatchMeter.events) == 6
