"""The fake processor takes the time it declares, on whatever clock it is given."""

from __future__ import annotations

from typing import Any

import pytest

from reflex_runtime.core.batch import Batch, Cause, Done
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.run.processor import FakeProcessor, run_batch


def batch_of(*payloads: Any) -> Batch:
    tickets = [Ticket(Request(p), i, 0.0) for i, p in enumerate(payloads)]
    return Batch(1, "default", "", "", Cause.IDLE, 0.0, 0.0, 0.0, dict.fromkeys(tickets, 1.0))


def test_a_batch_takes_fixed_plus_marginal_times_n() -> None:
    slept: list[float] = []
    processor = FakeProcessor(0.020, 0.002, slept.append)
    assert run_batch(processor, batch_of("a", "b", "c")) == [Done("a"), Done("b"), Done("c")]
    run_batch(processor, batch_of("d"))
    assert slept == pytest.approx([0.026, 0.022])
    assert processor.calls == [3, 1]


def test_answers_are_made_of_payloads() -> None:
    processor = FakeProcessor(0.0, 0.0, lambda seconds: None, answer=str.upper)
    assert run_batch(processor, batch_of("a")) == [Done("A")]


@pytest.mark.parametrize(("fixed", "marginal", "name"), [(-1.0, 0.0, "fixed"), (0.0, float("inf"), "marginal")])
def test_times_out_of_range_are_named(fixed: float, marginal: float, name: str) -> None:
    with pytest.raises(ConfigError, match=f"FakeProcessor.{name}="):
        FakeProcessor(fixed, marginal, lambda seconds: None)
