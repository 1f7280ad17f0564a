"""Asking again: what the server said decides, within the call's timeout and deadline."""

from __future__ import annotations

import pytest

from reflex_runtime.client import (
    ClientError,
    ProcessorFailed,
    ServerBusy,
    StaleRequest,
    Unreachable,
)
from reflex_runtime.client.calls import pause_after

from .callers import Make, Time
from .stub import Stub, refusal, reply


def test_a_refusal_is_asked_again_after_what_the_server_said(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with Stub([refusal(after="3"), refusal("not_ready", after="2"), refusal(after=None), reply()]) as stub:
        time = Time()
        assert make(stub.url, time).act().attempts == 4
    assert time.pauses == [3.0, 2.0, 0.4]
    assert stub.connections == 1
    assert [line.split(":")[0] for line in caplog.messages] == [
        f"POST /act is repeated in {pause} s" for pause in time.pauses
    ]


def test_attempts_end(make: Make) -> None:
    with Stub([refusal()] * 3) as stub:
        time = Time()
        with pytest.raises(ServerBusy):
            make(stub.url, time, retries=2).act()
    assert len(stub.seen) == 3
    assert time.pauses == [1.0, 1.0]


def test_a_call_ends_with_its_timeout(make: Make) -> None:
    with Stub([refusal()] * 9) as stub:
        time = Time()
        with pytest.raises(ServerBusy):
            make(stub.url, time, retries=100, timeout=2.5).act()
    assert time.pauses == [1.0, 1.0]


def test_asking_again_stops_at_the_deadline_and_tells_what_is_left_of_it(make: Make) -> None:
    with Stub([refusal(), refusal(), refusal()]) as stub:
        time = Time()
        with pytest.raises(ServerBusy):
            make(stub.url, time).act(deadline_ms=2500.0)
    assert time.pauses == [1.0, 1.0]
    assert [seen.fields["deadline_ms"] for seen in stub.seen] == [2500.0, 1500.0, 500.0]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal("shutting_down", retry_safe=False), ServerBusy),
        (refusal("processor_failed", 500, retry_safe=False), ProcessorFailed),
        (refusal("deadline_exceeded", 504), StaleRequest),
        (refusal("deadline_unreachable"), StaleRequest),
        (refusal("superseded", 409), StaleRequest),
        (refusal("cancelled", 499), StaleRequest),
    ],
)
def test_what_ran_or_came_too_late_is_not_asked_again(make: Make, answer: bytes, kind: type[ClientError]) -> None:
    with Stub([answer, reply()]) as stub, pytest.raises(kind):
        make(stub.url).act()
    assert len(stub.seen) == 1


def test_the_decision_is_pure() -> None:
    busy, safe = ServerBusy("full", retry_safe=True, retry_after=1.0), Unreachable("gone", retry_safe=True)
    assert pause_after(busy, 0, 0.5) == 1.05, "no less than was said, and a little more"
    assert [pause_after(safe, made, 0.5) for made in range(1, 7)] == pytest.approx([0.21, 0.42, 0.84, 1.68, 2.1, 2.1])
    assert pause_after(Unreachable("broken off"), 0, 0.0) is None
    assert pause_after(StaleRequest("late", retry_safe=True), 0, 0.0) is None


@pytest.mark.parametrize("text", ["Wed, 21 Oct 2026 07:28:00 GMT", "-1", "nan", "inf", ""])
def test_a_retry_after_that_is_no_number_counts_as_none(make: Make, text: str) -> None:
    with Stub([refusal(after=text), reply()]) as stub:
        time = Time()
        make(stub.url, time).act()
    assert time.pauses == [0.1]
