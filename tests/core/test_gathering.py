"""Callers that come back soon are gathered into one batch (contract B6)."""

from __future__ import annotations

import pytest

from reflex_runtime.core.flush import FlushPolicy

from .helpers import ask, finish, scheduler_of, take, trained
from .one_core import OneCore


@pytest.mark.parametrize(
    ("callers", "decoding", "least"),
    [
        pytest.param(8, 0.0013, 7.5, id="8_png"),
        pytest.param(8, 0.00035, 7.5, id="8_jpeg", marks=pytest.mark.long),
        pytest.param(32, 0.0013, 28.0, id="32_png", marks=pytest.mark.long),
        pytest.param(32, 0.00035, 28.0, id="32_jpeg"),
    ],
)
def test_callers_with_pictures_share_one_batch_where_one_core_decodes_and_runs(
    callers: int, decoding: float, least: float
) -> None:
    """Before, they were 4.9, 7.8, 16.0 and 22.4."""
    run = OneCore(callers, decoding, fixed=0.009, marginal=0.0014).run(20.0)
    assert run.mean_batch >= least


def test_one_caller_never_waits() -> None:
    run = OneCore(1, 0.0013, fixed=0.009, marginal=0.0014, noise=0.0).run(10.0)
    assert max(run.latencies) == pytest.approx(0.009 + 0.0014 + 0.0013, abs=1e-6)


def test_clients_of_small_batches_are_charged_as_others() -> None:
    """128 callers on a device with noise: none waits for two rounds while others are served."""
    run = OneCore(128, 0.0013, fixed=0.009, marginal=0.0014).run(20.0)
    latencies = sorted(run.latencies)
    assert latencies[int(0.99 * len(latencies))] <= 1.35 * latencies[len(latencies) // 2]


def test_arrivals_that_are_expected_do_not_change_the_decision() -> None:
    """So they need not wake the device: the hold is decided with the first one and ends with the last."""
    scheduler = scheduler_of(flush=FlushPolicy.window(0.1), cost=lambda: trained(0.020, 0.002))
    now = 0.0
    for _ in range(4):
        for client in range(4):
            ask(scheduler, now, client=client)
        batch = take(scheduler, now)
        finish(scheduler, batch, now + 0.028, 0.028)
        now += 0.030
    current = []
    for client in range(4):
        ask(scheduler, now + 0.0001 * client, client=client)
        current.append(scheduler.decision_current)
        scheduler.next_batch(now + 0.0001 * client)
    assert current == [False, True, True, False]
