"""Errors tell whether a retry is safe, and one bad item does not fail its neighbours (contract B18, B19, X2, H12)."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from reflex_runtime.core import errors
from reflex_runtime.core.batch import Apart, Batch, Cause, Done, Failed, More
from reflex_runtime.core.errors import (
    Cancelled,
    ConfigError,
    Dropped,
    NonFiniteResult,
    ProcessorError,
    QueueFull,
    ReflexError,
    Rejected,
    ResultCountMismatch,
    TooLarge,
    WaitTimeout,
)
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.run.processor import BaseProcessor, FunctionProcessor, run_batch


def every_class() -> list[type[ReflexError]]:
    return [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ReflexError)]


# -- the classes -------------------------------------------------------------------------------------------------------


def test_x2_the_class_says_whether_a_retry_is_safe() -> None:
    for kind in every_class():
        if issubclass(kind, (Rejected, Dropped)):
            assert kind.retry_safe is (kind is not TooLarge), kind
        else:
            assert kind.retry_safe is False, kind


def test_x2_every_error_belongs_to_one_branch() -> None:
    branches = (Rejected, Dropped, ProcessorError, WaitTimeout, ConfigError)
    for kind in every_class():
        if kind is not ReflexError:
            assert sum(issubclass(kind, b) for b in branches) == 1, kind


def test_h12_codes_and_statuses() -> None:
    assert {kind.__name__: (kind.code, kind.http_status) for kind in every_class()} == {
        "ReflexError": ("internal", 500),
        "Rejected": ("rejected", 503),
        "QueueFull": ("queue_full", 503),
        "InFlightCapReached": ("client_at_capacity", 429),
        "TooLate": ("deadline_unreachable", 503),
        "TooLarge": ("too_large", 413),
        "Closed": ("shutting_down", 503),
        "Dropped": ("dropped", 503),
        "Cancelled": ("cancelled", 499),
        "Expired": ("deadline_exceeded", 504),
        "Shed": ("deadline_unreachable", 503),
        "Superseded": ("superseded", 409),
        "Displaced": ("queue_full", 503),
        "Drained": ("shutting_down", 503),
        "ProcessorError": ("processor_failed", 500),
        "ResultCountMismatch": ("processor_failed", 500),
        "NonFiniteResult": ("processor_failed", 500),
        "GpuLost": ("processor_failed", 500),
        "ProcessorHung": ("processor_hung", 500),
        "CutShort": ("shutting_down", 503),
        "WaitTimeout": ("wait_timeout", 504),
        "ConfigError": ("invalid_config", 400),
    }


def test_b15_outcomes_for_the_metrics() -> None:
    known = {"ok", "cancelled", "rejected", "expired", "shed", "superseded", "drained", "failed", "client_error"}
    assert {kind.outcome for kind in every_class()} <= known


def test_details_are_json_safe_and_survive_pickling() -> None:
    error = QueueFull("full", retry_after=1.5, policy_id="prod", max_queue=3)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is QueueFull
    assert (str(again), again.retry_after, dict(again.details)) == ("full", 1.5, {"policy_id": "prod", "max_queue": 3})
    assert json.loads(json.dumps(dict(again.details))) == {"policy_id": "prod", "max_queue": 3}
    for kind in every_class():
        assert str(kind()) == kind.code


def test_a_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


# -- run_batch ---------------------------------------------------------------------------------------------------------


def batch_of(n: int) -> Batch:
    tickets = [Ticket(Request(payload=i, id=str(i)), i, 0.0) for i in range(n)]
    return Batch(1, "default", "", "", Cause.IDLE, 0.0, 0.0, 0.0, dict.fromkeys(tickets, 1.0))


class Recording(BaseProcessor):
    """Raises when a guilty payload is in the batch; remembers what it was called with."""

    def __init__(self, guilty: Sequence[int] = (), answer: Callable[[int], Any] = lambda i: i * 10) -> None:
        self.guilty, self.answer = set(guilty), answer
        self.calls: list[list[int]] = []
        self.left: list[tuple[Ticket, ...]] = []

    def run(self, batch: Batch) -> Sequence[Any]:
        payloads = [t.request.payload for t in batch.grants]
        self.calls.append(payloads)
        self.left.append(batch.left)
        if self.guilty & set(payloads):
            raise RuntimeError(f"poisoned by {sorted(self.guilty & set(payloads))}")
        return [self.answer(i) for i in payloads]


def test_b18_results_in_the_order_of_the_grants() -> None:
    assert run_batch(Recording(), batch_of(3)) == [Done(0), Done(10), Done(20)]


def test_b18_a_call_that_raises_fails_nobody_yet_unless_it_was_for_one() -> None:
    """Who is guilty is found by the scheduler: `test_isolation.py`."""
    processor = Recording([1])
    outcomes = run_batch(processor, batch_of(4))
    assert [type(o) for o in outcomes] == [Apart] * 4
    assert "poisoned by [1]" in str(outcomes[0].error)  # type: ignore[union-attr]
    assert len(processor.calls) == 1
    (alone,) = run_batch(Recording([0]), batch_of(1))
    assert isinstance(alone, Failed)
    assert isinstance(alone.error, ProcessorError)


def test_b18_a_returned_exception_fails_its_item_alone() -> None:
    crash = ValueError("bad pixel")
    processor = Recording(answer=lambda i: crash if i == 1 else NonFiniteResult("nan") if i == 2 else i)
    outcomes = run_batch(processor, batch_of(4))
    assert [type(o) for o in outcomes] == [Done, Failed, Failed, Done]
    assert isinstance(outcomes[1].error, ProcessorError)
    assert outcomes[1].error.__cause__ is crash
    assert "ValueError: bad pixel" in str(outcomes[1].error)
    assert isinstance(outcomes[2].error, NonFiniteResult)
    assert len(processor.calls) == 1


def test_b18_a_processor_that_cannot_repeat_a_call_fails_as_one() -> None:
    processor = Recording([1])
    processor.repeatable = False
    outcomes = run_batch(processor, batch_of(4))
    assert all(isinstance(o, Failed) for o in outcomes)
    assert len(processor.calls) == 1


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_b19_a_wrong_number_of_results_fails_the_batch(count: int) -> None:
    calls = []

    def wrong(payloads: list[Any]) -> list[Any]:
        calls.append(payloads)
        return [0] * count

    outcomes = run_batch(FunctionProcessor(wrong), batch_of(4))
    assert all(isinstance(o, Failed) and isinstance(o.error, ResultCountMismatch) for o in outcomes)
    assert f"returned {count} results for 4 items" in str(outcomes[0].error)  # type: ignore[union-attr]
    assert len(calls) == 1


@pytest.mark.parametrize("result", [None, 7, iter(())])
def test_b19_what_has_no_length_is_a_processor_error(result: Any) -> None:
    outcomes = run_batch(FunctionProcessor(lambda payloads: result), batch_of(1))
    assert all(isinstance(o, Failed) and isinstance(o.error, ProcessorError) for o in outcomes)


def test_b18_outcomes_pass_through() -> None:
    answers = [Done("a"), More("b", 2.0), Failed(Cancelled("c"))]
    assert run_batch(Recording(answer=lambda i: answers[i]), batch_of(3)) == answers


def test_b18_a_runtime_error_of_ours_keeps_its_class() -> None:
    class Ours(Recording):
        def run(self, batch: Batch) -> Sequence[Any]:
            raise NonFiniteResult("nan")

    (outcome,) = run_batch(Ours(), batch_of(1))
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, NonFiniteResult)
