"""Callers that do not fit into one batch together: batches of equal size, where their number is steady."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from reflex_runtime.core.flush import OVER, WINDOW, WINDOWS, Crowd, FlushPolicy, Planner, even_size
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.sim.run import Affine, simulate
from reflex_runtime.sim.workload import Around, Callers

DEVICE = (0.0077, 0.0023, 0.03)  # 40 fit into 100 ms


def counted(peaks: list[int]) -> int:
    """The callers found after windows with these peaks."""
    crowd = Crowd()
    for i, peak in enumerate([*peaks, 1]):
        for part, count in enumerate((peak // 2, peak, 1)):
            crowd.seen(count, i * WINDOW + part * WINDOW / 4)
    return crowd.callers


@pytest.mark.parametrize(
    ("peaks", "callers"),
    [
        ([128] * 3, 0),
        ([128] * 4, 128),
        ([120, 128, 118, 125], 128),
        ([100, 128, 128, 128], 0),
        ([9, 90, 90, 90, 90], 90),
    ],
)
def test_a_crowd_is_steady_if_four_windows_agree(peaks: list[int], callers: int) -> None:
    assert counted(peaks) == callers


def test_requests_that_come_by_themselves_are_no_crowd() -> None:
    """A queue of 40 to 80 that varies from window to window."""
    random = Random(1)
    assert sum(counted([random.randint(40, 80) for _ in range(WINDOWS)]) > 0 for _ in range(500)) < 25


@pytest.mark.parametrize(
    ("callers", "longest", "size"),
    [
        (40, 0.123, 0),  # they fit
        (42, 0.123, 42),  # a little over the budget is better than two batches
        (64, 0.123, 32),
        (128, 0.0, 43),  # three times 43: 107 ms
        (128, 0.123, 43),
        (128, 0.160, 64),
        (60, 0.200, 30),  # all fit into one, and then the device waits for them
        (150, 0.123, 50),
        (1000, 0.123, 50),
    ],
)
def test_callers_are_split_into_batches_of_equal_size(callers: int, longest: float, size: int) -> None:
    fixed, marginal, _ = DEVICE
    assert even_size(callers, 0.100, longest, fixed, marginal) == size
    assert fixed + marginal * size <= max(OVER * 0.100, longest)


@pytest.mark.parametrize(("think", "size"), [(0.002, 128), (0.030, 64)])
def test_one_batch_of_all_where_they_are_back_within_the_fixed_part(think: float, size: int) -> None:
    """16 + 1.2n ms. One batch spares the second fixed part; but who comes later keeps all others waiting."""
    config = GroupConfig(flush=FlushPolicy.window(None), controller=Planner())
    callers = Callers(128, Around(think, think / 10))
    done = simulate(Scheduler([config]), [callers], Affine(0.016, 0.0012), duration=4.0, warmup=2.0, seed=1)
    sizes = [ran.size for ran in done.batches if 2.0 <= ran.started < 3.5][-5:]
    assert sizes == [size] * 5


def test_a_model_that_is_too_slow_for_the_budget_is_left_alone() -> None:
    assert even_size(128, 0.100, 0.0, 0.200, 0.010) == 0


def planned(
    base: FlushPolicy, callers: int, device: tuple[float, float, float] = DEVICE, **request: object
) -> FlushPolicy:
    """The policy after three seconds in which so many callers were here."""
    planner = Planner()
    for i in range(3000):
        planner.arrived(Ticket(Request(client=i % callers, **request), i, i / 1e3), i / 1e3, callers - 1)  # type: ignore[arg-type]
    return planner.policy(base, lambda: device, 3.0, "")


def test_by_default_a_steady_crowd_is_split_evenly() -> None:
    policy = planned(FlushPolicy.window(None), 128)
    assert policy.max_batch_size == 43
    assert policy.max_batch_cost > DEVICE[0] + 43 * DEVICE[1]
    assert planned(FlushPolicy.window(None), 30) == FlushPolicy.window(None)


def test_a_crowd_has_batches_of_sixteen_times_the_fixed_part_unless_other_policies_wait() -> None:
    device = (0.0125, 0.0018, 0.03)  # 48 fit into 100 ms, 104 into 16 times the fixed part
    assert planned(FlushPolicy.window(None), 128, device).max_batch_size == 64
    shared = replace(FlushPolicy.window(None), times_fixed=Planner.SHARED)
    assert planned(shared, 128, device).max_batch_size == 43
    slow = (0.060, 0.002, 0.03)  # 30 fit into twice its fixed part, 120 into four times
    assert planned(shared, 128, slow).max_batch_size == 32  # not 64


def test_no_crowd_has_batches_of_more_than_two_seconds_because_of_the_fixed_part() -> None:
    fixed, marginal = 0.3, 0.010
    policy = planned(FlushPolicy.window(None), 1000, (fixed, marginal, 0.03))
    assert 0.7 * Planner.LONGEST < fixed + marginal * policy.max_batch_size <= OVER * Planner.LONGEST


def test_a_client_that_asks_for_more_than_its_share_gets_no_longer_batches_while_another_waits() -> None:
    """127 callers of one client, and a client that asks ten times a second."""
    planner = Planner()
    for i in range(3000):
        client = "modest" if i % 100 == 0 else "greedy"
        planner.arrived(Ticket(Request(client=client), i, i / 1e3), i / 1e3, 127)
    base = FlushPolicy.window(None)
    policy = planner.policy(base, lambda: (0.0124, 0.0018, 0.03), 3.0, "")
    assert policy.max_batch_cost <= OVER * base.max_batch_cost


@pytest.mark.parametrize(
    ("base", "request_"),
    [
        (FlushPolicy.window(0.100), {}),
        (FlushPolicy.window(None), {"time_limit": 1.0}),
        (FlushPolicy.window(None), {"wants": 6.0}),
    ],
    ids=["given budget", "deadlines", "steps"],
)
def test_a_given_budget_deadlines_and_steps_leave_sizes_alone(base: FlushPolicy, request_: dict[str, object]) -> None:
    assert planned(base, 128, **request_).max_batch_size == base.max_batch_size
