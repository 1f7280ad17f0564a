"""When a process is given up and started again, without a process and without a clock."""

from __future__ import annotations

from typing import Any

import pytest

from reflex_runtime.pacing import Pulse, Restarts


def restarts(**given: Any) -> Restarts:
    defaults: dict[str, Any] = {"first": 0.2, "longest": 10.0, "steady": 30.0, "most": 5, "rest": 60.0}
    return Restarts(**{**defaults, "jitter": lambda: 0.0, **given})


def test_g14_each_failure_in_a_row_doubles_the_wait_up_to_the_longest() -> None:
    one = restarts(most=100)
    waits = []
    for _ in range(8):
        one.failed()
        waits.append(one.wait())
    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])


def test_g14_a_thousand_failures_are_no_overflow() -> None:
    one = restarts(most=2000, first=1e-3)
    for _ in range(1500):
        one.failed()
    assert one.wait() == 10.0


def test_g14_a_short_life_is_a_failure_and_a_steady_one_starts_anew() -> None:
    one = restarts(most=100)
    for lived, wait in ((29.9, 0.2), (29.9, 0.4), (30.0, 0.2), (1e9, 0.2), (0.0, 0.2), (0.0, 0.4)):
        one.lived(lived)
        assert one.wait() == pytest.approx(wait), lived


def test_g14_jitter_shortens_a_wait_by_up_to_half_and_never_the_rest() -> None:
    given = [0.0, 0.5, 1.0]
    one = restarts(jitter=lambda: given.pop(0), most=3)
    one.failed()
    assert [one.wait() for _ in range(3)] == pytest.approx([0.2, 0.15, 0.1])
    one.failed()
    one.failed()
    assert one.wait() == 60.0  # and the jitter was not asked


def test_g14_the_breaker_opens_after_the_most_failures_and_a_steady_trial_closes_it() -> None:
    one = restarts(most=3)
    for kind in (one.failed, lambda: one.lived(5.0)):
        kind()
        assert not one.open
    one.failed()
    assert one.open
    assert one.wait() == 60.0
    one.failed()  # the trial
    assert one.open
    assert one.wait() == 60.0
    one.lived(2.0)  # a trial that became ready and did not stay
    assert one.open
    one.lived(31.0)
    assert not one.open
    assert one.wait() == pytest.approx(0.2)


def ticks(pulse: Pulse, answers: list[bool], late: list[float] | None = None) -> list[tuple[float, bool]]:
    """Delays until each tick, and whether to go on."""
    now, told = 100.0, []
    for i, answered in enumerate(answers):
        delay = pulse.next(now)
        now += delay + (late[i] if late else 0.0)
        told.append((round(delay, 6), pulse.tick(answered, now)))
    return told


def test_g14_who_answers_lives() -> None:
    assert ticks(Pulse(5, 20), [True] * 9) == [(5, True)] * 9


def test_g14_who_answers_nothing_is_given_up_at_the_limit_exactly() -> None:
    assert ticks(Pulse(5, 12), [True, False, False, False]) == [(5, True), (5, True), (5, True), (2, False)]
    assert ticks(Pulse(0.1, 0.3), [False] * 3)[-1][1] is False  # whatever floats add up to


def test_g14_an_answer_starts_the_count_anew() -> None:
    told = ticks(Pulse(5, 12), [False, False, True, False, False, False])
    assert told == [(5, True), (5, True), (2, True), (5, True), (5, True), (2, False)]


def test_g14_the_time_that_this_process_stood_still_is_not_counted() -> None:
    assert ticks(Pulse(5, 5), [False, False], [5.1, 0.0]) == [(5, True), (5, False)]
    assert ticks(Pulse(5, 5), [False], [4.9]) == [(5, False)]
    assert ticks(Pulse(5, 10.001), [False] * 3, [0.1] * 3) == [
        (5, True),
        (5, True),
        (0.001, False),
    ]  # a little is usual
