"""Service models, against figures worked out by hand."""

from __future__ import annotations

from math import log
from random import Random
from statistics import fmean, pstdev

import pytest
from bench.sim.loads import Drifting

from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.sim import Affine, Noisy
from reflex_runtime.sim.run import line_through

RNG = Random(1)


def batch(*classes: str, shape: str = "") -> Batch:
    tickets = [Ticket(Request(cost_class=c, shape=shape), i, 0.0) for i, c in enumerate(classes)]
    return Batch(1, "default", "", "", Cause.IDLE, 0.0, 0.0, 0.0, dict.fromkeys(tickets, 1.0))


def test_affine_is_fixed_plus_marginal_per_request() -> None:
    assert Affine(0.020, 0.002).seconds(batch("", "", ""), 0.0, RNG) == pytest.approx(0.026)


def test_drift_comes_at_once_or_gradually() -> None:
    sudden = Drifting(Affine(0.010, 0.0), factor=3.0, at=5.0)
    assert [sudden.seconds(batch(""), t, RNG) for t in (4.9, 5.0, 9.0)] == pytest.approx([0.010, 0.030, 0.030])
    spell = Drifting(Affine(0.010, 0.0), factor=3.0, at=5.0, until=9.0)
    found = [spell.seconds(batch(""), t, RNG) for t in (4.9, 5.0, 8.9, 9.0)]
    assert found == pytest.approx([0.010, 0.030, 0.030, 0.010])
    slow = Drifting(Affine(0.010, 0.0), factor=3.0, at=5.0, over=4.0)
    assert [slow.seconds(batch(""), t, RNG) for t in (5.0, 7.0, 20.0)] == pytest.approx([0.010, 0.020, 0.030])


def test_noise_is_relative_and_centred() -> None:
    rng = Random(5)
    logs = [log(Noisy(Affine(0.010, 0.0), 0.05).seconds(batch(""), 0.0, rng) / 0.010) for _ in range(4000)]
    assert fmean(logs) == pytest.approx(0.0, abs=0.003)
    assert pstdev(logs) == pytest.approx(0.05, rel=0.05)


def test_a_share_of_batches_stalls() -> None:
    rng = Random(5)
    device = Noisy(Affine(0.010, 0.0), 0.0, stalls=0.2, stall=7.0)
    taken = [device.seconds(batch(""), 0.0, rng) for _ in range(2000)]
    assert {round(t, 6) for t in taken} == {0.010, 0.070}
    assert sum(t > 0.05 for t in taken) / 2000 == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Affine(-1.0, 2.0), "Affine.fixed=-1.0"),
        (lambda: Affine(0.0, 0.0), "fixed \\+ marginal"),
        (lambda: Noisy(Affine(1.0, 1.0), 3.0), "Noisy.sigma"),
    ],
)
def test_wrong_values_name_their_field(make: object, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1.0, 3.0, 1.0), (2.0, 5.0, 1.0), (4.0, 9.0, 1.0)], (1.0, 2.0)),
        ([(1.0, 3.0, 9.0), (2.0, 5.0, 9.0), (3.0, 100.0, 0.0)], (1.0, 2.0)),  # a weight of none
        ([(2.0, 5.0, 1.0), (2.0, 7.0, 1.0)], (6.0, 0.0)),  # one size only
        ([(1.0, 5.0, 1.0), (3.0, 1.0, 1.0)], (3.0, 0.0)),  # falling: flat
        ([(1.0, 1.0, 1.0), (3.0, 7.0, 1.0)], (0.0, 2.2)),  # below zero at 0: through the origin
    ],
)
def test_a_line_through_measured_points(
    points: list[tuple[float, float, float]], line: tuple[float, float]
) -> None:
    assert line_through(points) == pytest.approx(line)
