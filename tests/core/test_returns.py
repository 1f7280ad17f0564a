"""The hold for expected returns (contract B6), against a direct evaluation of its definition."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from reflex_runtime.core.returns import _GRID, HISTORY, RECENT, REMEMBERED, Returns

JUST_LATE = _GRID[0]  # a client that is no later than this is still expected at once


def gain(h: float, ages: Sequence[tuple[float, Sequence[float]]], n: int, batch: float, b: float) -> float:
    """G(h) = E(h) · T(n) − W(h) − n · (h + b · E(h)), summed over every think time of every client.

    ages: for each client that is away, how long ago it was answered, and its think times.
    """
    expected = waits = 0.0
    for age, thinks in ages:
        possible = [x for x in thinks if x >= age - JUST_LATE]
        back = [x for x in possible if x <= age + h]
        if back:
            expected += len(back) / len(possible)
            waits += max(0.0, sum(x - age for x in back)) / len(possible)
    return expected * batch - waits - n * (h + b * expected)


def clients(random: Random, count: int) -> tuple[Returns, list[tuple[float, list[float]]], float]:
    """A history of `count` clients that are all away now: (returns, (age, think times) of each, now)."""
    returns, ages, now = Returns(), [], 0.0
    kinds = [random.choice(["fixed", "spread", "slow"]) for _ in range(count)]
    for client, kind in enumerate(kinds):
        thinks, at = [], 0.0
        returns.answered(client, at)
        for _ in range(random.randint(0, HISTORY + 8)):
            think = {"fixed": 0.001, "spread": random.expovariate(200.0), "slow": 0.3}[kind]
            at += think
            returns.arrived(client, at)
            at += 0.020
            returns.answered(client, at)
            thinks.append(at - 0.020 - (at - 0.020 - think))
        ages.append((at, thinks[-HISTORY:]))
        now = max(now, at)
    now += random.choice([0.0, 0.0003, 0.001])
    return returns, [(now - at, thinks) for at, thinks in ages], now


def test_the_hold_is_the_best_of_the_grid() -> None:
    random = Random(21)
    held = 0
    for _ in range(300):
        returns, ages, now = clients(random, random.randint(1, 8))
        n, batch, b = random.randint(1, 6), random.choice([0.005, 0.02, 0.1]), random.choice([0.0, 0.002])
        longest = random.choice([0.001, 0.005, 0.02])
        hold = returns.hold(now, longest, n, batch, b)
        grid = [h for h in (*_GRID, 0.010, 0.020, longest) if h <= longest]
        best = max(gain(h, ages, n, batch, b) for h in grid)
        assert hold <= longest
        if hold == 0.0:
            assert best <= 1e-9
        else:
            held += 1
            assert gain(hold, ages, n, batch, b) == pytest.approx(best, abs=1e-9)
            assert best > 0.0
    assert held > 30


def returning(think: float, count: int = 4) -> Returns:
    returns, now = Returns(), 0.0
    for _ in range(8):
        for client in range(count):
            returns.answered(client, now)
        now += think
        for client in range(count):
            returns.arrived(client, now)
        now += 0.020
    for client in range(count):
        returns.answered(client, now)
    returns.arrived(0, now + think)
    return returns


def now_of(think: float) -> float:
    return 8 * (think + 0.020) + think


def test_clients_that_come_back_together_are_waited_for() -> None:
    assert returning(0.001).hold(now_of(0.001), 0.005, 1, 0.028, 0.002) > 0.0


def test_clients_that_come_back_much_later_are_not() -> None:
    assert returning(0.100).hold(now_of(0.100) - 0.099, 0.005, 1, 0.028, 0.002) == 0.0


def test_nothing_is_held_without_time_or_without_a_measured_batch() -> None:
    returns = returning(0.001)
    assert returns.hold(now_of(0.001), 0.0, 1, 0.028, 0.002) == 0.0
    assert returns.hold(now_of(0.001), -1.0, 1, 0.028, 0.002) == 0.0
    assert returns.hold(now_of(0.001), 0.005, 1, 0.0, 0.0) == 0.0


def test_nothing_is_held_for_clients_never_seen() -> None:
    assert Returns().hold(0.0, 0.005, 1, 0.028, 0.002) == 0.0


def test_many_queued_are_not_kept_waiting_for_few() -> None:
    returns = returning(0.004)
    assert returns.hold(now_of(0.004) - 0.003, 0.005, 100, 0.028, 0.002) == 0.0


def test_memory_is_bounded() -> None:
    returns = Returns()
    for client in range(3 * REMEMBERED):
        returns.answered(client, 0.0)
    assert len(returns._clients) <= REMEMBERED
    assert len(returns._away) <= RECENT
    for i in range(3 * HISTORY):
        returns.arrived("one", i + 0.5)
        returns.answered("one", float(i + 1))
    assert len(returns._clients["one"].history) == HISTORY == len(returns._clients["one"].ordered)
