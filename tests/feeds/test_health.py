"""F10: what goes wrong is told at once, then rarely, and the counts told add up to what happened. Time is virtual."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflex_runtime.core.batch import (
    DeviceLost,
    Done,
    Event,
    Failed,
    Outcome,
    RequestAbandoned,
    RequestQueued,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.errors import (
    Cancelled,
    Closed,
    Drained,
    InFlightCapReached,
    ProcessorError,
    ProcessorHung,
    QueueFull,
    ReflexError,
)
from reflex_runtime.core.request import AdmittedBatch, Request, Ticket
from reflex_runtime.feeds.runtime import health as module
from reflex_runtime.feeds.runtime.health import (
    BatchError,
    BatchInFlightExceeded,
    BatchSubmissionRejected,
    BatchTimeout,
    FeedDisconnected,
    FeedFailed,
    Health,
    HealthEvent,
    StageError,
)
from reflex_runtime.pacing import Throttle

OK, BAD = Done(1), Failed(ProcessorError("no model today"))


class Coordinator:
    """The events of a coordinator, made by hand, its health, and the truth about it."""

    def __init__(self, every: float = 1.0) -> None:
        self.told: list[HealthEvent] = []
        self.health = Health("detector", self.told.append, every)
        self.now = 100.0
        self.truth: Counter[tuple[type, str]] = Counter()
        self.recovered: set[tuple[type, str, float]] = set()
        self.batches = 0

    def give(self, event: Event) -> list[HealthEvent]:
        """What is told because of this event."""
        before = len(self.told)
        self.health(event)
        return self.told[before:]

    def queue(self, feed: str) -> list[HealthEvent]:
        for kind in (BatchSubmissionRejected, BatchInFlightExceeded):
            self.recovered.add((kind, feed, self.now))
        return self.give(RequestQueued(self.now, self.ticket(feed)))

    def refuse(self, feed: str, error: ReflexError) -> list[HealthEvent]:
        if not isinstance(error, Closed):
            kind = BatchInFlightExceeded if isinstance(error, InFlightCapReached) else BatchSubmissionRejected
            self.truth[kind, feed] += 1
        return self.give(RequestRejected(self.now, Request(client=feed), error))

    def abandon(self, feed: str) -> list[HealthEvent]:
        self.truth[BatchTimeout, feed] += 1
        return self.give(RequestAbandoned(self.now, self.ticket(feed)))

    def batch(self, items: Sequence[tuple[str, Outcome]], abandoned: bool = False) -> list[HealthEvent]:
        """A batch comes back."""
        self.batches += 1
        admission = AdmittedBatch(self.batches, len(items), "timeout", "idle", 1.0)
        told = []
        if any(outcome is BAD for _, outcome in items):
            self.truth[BatchError, "detector"] += 1
        for feed, outcome in items:
            ticket = self.ticket(feed, outcome)
            ticket.admission, ticket.abandoned = admission, abandoned
            if outcome is OK:
                self.recovered.add((BatchError, "detector", self.now))
                if not abandoned:
                    self.recovered.add((BatchTimeout, feed, self.now))
            told += self.give(RequestSettled(self.now, ticket))
        return told

    def flush(self) -> list[HealthEvent]:
        before = len(self.told)
        self.health.flush(self.now)
        return self.told[before:]

    def counts(self) -> Counter[tuple[type, str]]:
        found: Counter[tuple[type, str]] = Counter()
        for event in self.told:
            if not isinstance(event, StageError):
                found[type(event), event.source] += event.count
        return found

    @staticmethod
    def ticket(feed: str, outcome: Any = None) -> Ticket:
        ticket = Ticket(Request(client=feed), 0, 0.0)
        ticket.outcome = outcome
        return ticket


# -- random histories --------------------------------------------------------------------------------------------------

names = st.sampled_from(["cam1", "cam2"])
refusals = st.sampled_from([QueueFull(), InFlightCapReached()])
items = st.lists(st.tuples(names, st.sampled_from([OK, BAD, Failed(Cancelled())])), min_size=1, max_size=3)
operations = st.one_of(
    st.tuples(st.just("queue"), names),
    st.tuples(st.just("refuse"), names, refusals),
    st.tuples(st.just("abandon"), names),
    st.tuples(st.just("batch"), items, st.booleans()),
    st.tuples(st.just("pass"), st.sampled_from([0.001, 0.3, 0.999, 1.0, 5.0])),
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(operations, max_size=40))
def test_f10_what_is_told_adds_up_and_is_told_rarely(history: list[tuple[Any, ...]]) -> None:
    follow(history)


@pytest.mark.parametrize("seed", range(30))
def test_f10_what_is_told_adds_up_over_long_histories(seed: int) -> None:
    rng = Random(seed)

    def operation() -> tuple[Any, ...]:
        feed = rng.choice(("cam1", "cam2"))
        found = [(rng.choice(("cam1", "cam2")), rng.choice((OK, BAD, Failed(Cancelled())))) for _ in range(3)]
        return rng.choice(
            (
                ("queue", feed),
                ("refuse", feed, rng.choice((QueueFull(), InFlightCapReached()))),
                ("abandon", feed),
                ("batch", found[: rng.randint(1, 3)], rng.random() < 0.2),
                ("pass", rng.choice((0.001, 0.01, 0.3, 0.999, 1.0, 5.0))),
            )
        )

    follow([operation() for _ in range(400)])


def follow(history: Sequence[tuple[Any, ...]]) -> None:
    play = Coordinator()
    known: Counter[tuple[type, str]] = Counter()
    for verb, *arguments in history:
        if verb == "pass":
            play.now += arguments[0]
            continue
        before, count = play.truth.copy(), len(play.told)
        getattr(play, verb)(*arguments)
        for key in play.truth - before:
            if key not in known:  # the first at once
                assert key in [(type(e), e.source) for e in play.told[count:]]
        known = play.counts()
        assert all(known[key] <= play.truth[key] for key in known)
    spaced(play)
    play.flush()
    assert play.counts() == play.truth
    assert all(event.count > 0 for event in play.told)
    assert play.flush() == []


def spaced(play: Coordinator) -> None:
    """Never two of one kind and source within a second, but for one recovery between them."""
    by_source: dict[tuple[type, str], list[float]] = {}
    for event in play.told:
        by_source.setdefault((type(event), event.source), []).append(event.at)
    for (kind, source), times in by_source.items():
        for first, second in itertools.pairwise(times):
            if second - first < 1.0:
                assert (kind, source, second) in play.recovered
        for first, _, third in zip(times, times[1:], times[2:], strict=False):
            assert third - first >= 1.0


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(["count", "due", "recover", "flush"]), st.floats(0.0, 1.5)), max_size=60))
def test_f10_a_throttle_loses_nothing(history: list[tuple[str, float]]) -> None:
    throttle = Throttle(1.0)
    now, counted, told, last = 0.0, 0, 0, -10.0
    for verb, passed in history:
        now += passed
        counted += verb == "count"
        n = getattr(throttle, verb)(now)
        told += n
        assert told + throttle.held == counted
        if n and verb in ("count", "due"):
            assert now - last >= 1.0
        if verb in ("count", "due") and now - last >= 1.0 + 1e-9:
            assert throttle.held == 0
        last = now if n else last
    told += throttle.flush(now)
    assert (told, throttle.held) == (counted, 0)


def test_f10_a_recovery_with_nothing_to_tell_does_not_use_up_the_early_word() -> None:
    throttle = Throttle(1.0)
    told = [throttle.count(0.0), throttle.recover(0.1), throttle.count(0.2), throttle.recover(0.3)]
    assert told == [1, 0, 0, 1]
    told = [throttle.count(0.4), throttle.recover(0.5), throttle.recover(1.2), throttle.recover(1.3)]
    assert told == [0, 0, 0, 1]  # the early word is used; a second after it was said it is time again
    told = [throttle.count(9.0), throttle.count(9.1), throttle.recover(9.2), throttle.count(10.3)]
    assert told == [1, 0, 1, 1]
    assert [throttle.count(10.4), throttle.recover(10.5)] == [0, 1]  # and there is a new one with every word in time


# -- the rules one by one ----------------------------------------------------------------------------------------------


def test_f10_the_first_is_told_at_once_the_rest_once_a_second() -> None:
    play = Coordinator()
    assert play.refuse("cam1", QueueFull()) == [BatchSubmissionRejected(100.0, "cam1", 1, "detector")]
    for _ in range(9):
        play.now += 0.1
        assert play.refuse("cam1", QueueFull()) == []
    play.now = 101.0
    assert play.refuse("cam1", QueueFull()) == [BatchSubmissionRejected(101.0, "cam1", 10, "detector")]


def test_f10_each_feed_and_each_kind_has_its_own_second() -> None:
    play = Coordinator()
    for feed in ("cam1", "cam2"):
        assert len(play.refuse(feed, QueueFull())) == 1
        assert play.refuse(feed, InFlightCapReached()) == [BatchInFlightExceeded(100.0, feed, 1, "detector")]
        assert play.abandon(feed) == [BatchTimeout(100.0, feed, 1, "detector")]


@pytest.mark.parametrize("error", [QueueFull(), InFlightCapReached()])
def test_f10_an_admission_tells_the_rest_of_the_refusals(error: ReflexError) -> None:
    play = Coordinator()
    for _ in range(4):
        play.refuse("cam1", error)
    play.now += 0.1
    assert play.queue("cam2") == []  # of another feed
    (rest,) = play.queue("cam1")
    assert (rest.at, rest.source, rest.count) == (100.1, "cam1", 3)
    assert play.queue("cam1") == []


def test_f10_an_answer_tells_the_rest_of_the_time_outs_and_errors() -> None:
    play = Coordinator()
    for _ in range(3):
        play.abandon("cam1")
        play.batch([("cam1", BAD), ("cam2", BAD)])
    assert [type(e) for e in play.told] == [BatchTimeout, BatchError]
    play.now += 0.1
    assert play.batch([("cam2", OK)]) == [BatchError(100.1, "detector", 2, "detector", "no model today")]
    assert play.batch([("cam1", OK)], abandoned=True) == []  # that one came too late
    assert play.batch([("cam1", OK)]) == [BatchTimeout(100.1, "cam1", 2, "detector")]


def test_f10_a_feed_that_fails_and_recovers_in_turns_is_no_flood() -> None:
    play = Coordinator()
    for _ in range(300):  # ten seconds at 30 frames per second, every other one refused
        play.refuse("cam1", QueueFull())
        play.now += 1 / 60
        play.queue("cam1")
        play.now += 1 / 60
    assert len(play.told) <= 20
    play.flush()
    assert play.counts() == play.truth


def test_f10_what_nobody_recovers_from_is_told_when_its_second_is_over() -> None:
    play = Coordinator()
    play.refuse("gone", QueueFull())
    play.refuse("gone", QueueFull())  # and it never submits again
    play.now += 1.0
    assert play.queue("another") == [BatchSubmissionRejected(101.0, "gone", 1, "detector")]


def test_f10_whose_second_is_not_over_is_told_when_it_is() -> None:
    play = Coordinator()
    for feed in ("gone1", "gone2"):
        play.refuse(feed, QueueFull())
        play.refuse(feed, QueueFull())
        play.now += 0.5
    assert [e.source for e in play.queue("another")] == ["gone1"]  # at 101.0
    play.now += 1.0
    assert [e.source for e in play.queue("another")] == ["gone2"]


def test_f10_errors_are_counted_by_batches() -> None:
    play = Coordinator()
    play.batch([("cam1", BAD), ("cam2", BAD), ("cam3", BAD)])
    play.batch([("cam1", BAD)])
    hung = Failed(ProcessorHung("it hangs"))
    play.truth[BatchError, "detector"] += 1
    play.batch([("cam1", hung), ("cam2", hung)])
    play.batch([("cam1", Failed(Cancelled())), ("cam2", Failed(Drained()))])  # nobody's fault
    assert play.flush() == [BatchError(100.0, "detector", 2, "detector", "it hangs")]
    assert play.counts() == play.truth == {(BatchError, "detector"): 3}


def test_f10_errors_are_told_when_their_second_is_over_or_something_is_answered() -> None:
    play = Coordinator()
    for _ in range(2):
        play.batch([("cam1", BAD)])
    play.now += 1.0
    assert play.queue("cam1") == [BatchError(101.0, "detector", 1, "detector", "no model today")]
    play.batch([("cam1", BAD)])
    assert play.batch([("cam1", OK)]) == [BatchError(101.0, "detector", 1, "detector", "no model today")]


def test_f10_a_failure_without_a_batch_is_no_batch_error() -> None:
    play = Coordinator()
    assert play.give(RequestSettled(play.now, play.ticket("cam1", BAD))) == []


def test_f10_a_dead_coordinator_is_one_stage_error_per_feed() -> None:
    play = Coordinator()
    play.queue("cam1")
    play.refuse("cam2", QueueFull())
    play.told.clear()
    dead = ProcessorError("the device thread died")
    told = play.give(DeviceLost(play.now, dead))
    assert told == [StageError(100.0, feed, 1, "detector", "the device thread died") for feed in ("cam1", "cam2")]
    assert play.give(DeviceLost(play.now, dead)) == []
    for feed in ("cam1", "cam2"):
        assert play.refuse(feed, Closed()) == []
    (late,) = play.refuse("cam3", Closed())  # it had not asked before
    assert late == StageError(100.0, "cam3", 1, "detector", "the device thread died")
    assert play.refuse("cam3", Closed()) == []


def test_f10_an_ordinary_stop_is_nobodys_error() -> None:
    play = Coordinator()
    play.queue("cam1")
    play.batch([("cam1", Failed(Drained()))])
    for feed in ("cam1", "cam2"):
        assert play.refuse(feed, Closed()) == []
    assert play.flush() == []


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_many_feeds_are_forgotten_and_no_count_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEEDS", 16)
    play = Coordinator()
    for i in range(1000):
        play.now += 0.2
        play.refuse(f"cam{i}", QueueFull())
        play.refuse(f"cam{i}", QueueFull())
        play.queue(f"cam{i}")
        assert len(play.health._feeds) <= 20
    play.flush()
    assert play.counts() == play.truth


def test_a_feed_of_which_something_is_held_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEEDS", 16)
    play = Coordinator()
    play.refuse("cam", QueueFull())
    play.refuse("cam", QueueFull())
    for i in range(100):
        play.now += 0.005
        play.queue(f"other{i}")
    assert play.refuse("cam", QueueFull()) == []
    play.flush()
    assert play.counts() == play.truth
    assert len(play.health._feeds) <= 20


def test_a_flood_of_names_at_a_dead_coordinator_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEEDS", 16)
    play = Coordinator()
    play.queue("cam")
    play.give(DeviceLost(play.now, ProcessorError("dead")))
    for i in range(100):
        play.refuse(f"name{i}", Closed())
    play.refuse("name0", Closed())
    assert len(play.health._feeds) == len(play.told) == len({e.source for e in play.told}) == 16


def test_a_sink_that_fails_leaves_no_empty_telling_behind() -> None:
    told: list[HealthEvent] = []

    def emit(event: HealthEvent) -> None:
        if event.source == "cam1":
            raise OSError("disk full")
        told.append(event)

    health = Health("detector", emit)
    for feed in ("cam1", "cam2"):
        for _ in range(2):
            try:
                health(RequestRejected(0.0, Request(client=feed), QueueFull()))
            except OSError:
                continue
    told.clear()
    with pytest.raises(OSError, match="disk full"):
        health.flush(0.5)
    health.flush(0.6)
    assert all(event.count for event in told)


def test_health_events_are_values() -> None:
    event = FeedDisconnected(1.0, "cam1", error="connection refused", retry_in=2.0)
    assert (event.source, event.error, event.retry_in) == ("cam1", "connection refused", 2.0)
    assert event == FeedDisconnected(1.0, "cam1", error="connection refused", retry_in=2.0)
    assert event != FeedFailed(1.0, "cam1", error="connection refused", retry_in=2.0)
    with pytest.raises(FrozenInstanceError):
        event.error = ""
