"""Workloads: the rates asked for, seeds that decide everything, callers that wait."""

from __future__ import annotations

from itertools import islice, pairwise, takewhile
from random import Random
from statistics import fmean, pvariance

import pytest
from bench.sim.loads import Camera, Every

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.sim import (
    Affine,
    Around,
    Arrival,
    Arrivals,
    Bursty,
    Callers,
    Diurnal,
    Exponential,
    Fixed,
    Heavy,
    Mixture,
    Open,
    Poisson,
    RecordedArrivals,
    Report,
    Think,
    simulate,
)


def times(arrivals: Arrivals, seed: int = 1, until: float = 400.0) -> list[float]:
    return list(takewhile(lambda t: t < until, arrivals.times(Random(seed))))


def dispersion(found: list[float], window: float = 1.0) -> float:
    """Variance over mean of counts per window: 1 for Poisson, more for bursts."""
    counts = [0] * (int(found[-1] / window) + 1)
    for t in found:
        counts[int(t / window)] += 1
    return pvariance(counts) / fmean(counts)


@pytest.mark.parametrize(
    "arrivals",
    [Poisson(50.0), Bursty(50.0), Diurnal(50.0), Heavy(50.0), Every(0.020, 0.005)],
    ids=lambda a: type(a).__name__,
)
def test_arrivals_ascend_at_the_mean_rate_and_the_seed_decides_them(arrivals: Arrivals) -> None:
    found = times(arrivals)
    assert all(a <= b for a, b in pairwise(found))
    assert len(found) / 400.0 == pytest.approx(50.0, rel=0.12)
    assert found == times(arrivals)
    assert found != times(arrivals, seed=2)


def test_bursts_clump_and_poisson_does_not() -> None:
    assert dispersion(times(Poisson(50.0))) == pytest.approx(1.0, abs=0.25)
    assert dispersion(times(Bursty(50.0))) > 5.0
    assert dispersion(times(Heavy(50.0))) > 1.5


def test_a_day_has_a_busy_and_a_quiet_half() -> None:
    found = times(Diurnal(50.0, swing=0.8, period=20.0))
    busy = sum(1 for t in found if t % 20.0 < 10.0)
    # the mean of 1 ± 0.8 sin over half a period is 1 ± 0.8 · 2/π
    assert busy / (len(found) - busy) == pytest.approx((1 + 1.6 / 3.14159) / (1 - 1.6 / 3.14159), rel=0.1)


@pytest.mark.parametrize(
    ("think", "mean", "low", "high"),
    [
        (Fixed(0.001), 0.001, 0.001, 0.001),
        (Exponential(0.005), 0.005, 0.0, 0.060),
        (Around(0.100, 0.005), 0.100, 0.095, 0.105),
        (Mixture(((0.5, Fixed(0.001)), (0.5, Fixed(0.300)))), 0.1505, 0.001, 0.300),
    ],
)
def test_think_times(think: Think, mean: float, low: float, high: float) -> None:
    rng = Random(3)
    drawn = [think.draw(rng) for _ in range(4000)]
    assert fmean(drawn) == pytest.approx(mean, rel=0.06)
    assert low <= min(drawn) <= 0.5 * (low + mean)
    assert 0.5 * (mean + high) <= max(drawn) <= high


def test_each_caller_is_a_client_of_its_own_and_thinks_after_its_answer() -> None:
    streams = Callers(3, Fixed(0.5), Request(time_limit=2.0)).streams("seed")
    assert all(stream.waits for stream in streams)
    firsts = [stream.next(0.0) for stream in streams]
    assert {a.request.client for a in firsts if a} == {"caller-0", "caller-1", "caller-2"}
    assert all(a and 0.0 <= a.at <= 0.5 and a.request.time_limit == 2.0 for a in firsts)
    again = streams[0].next(7.0)
    assert again is not None
    assert again.at == 7.5


def test_requests_are_mixed_in_their_shares() -> None:
    light, heavy = Request(cost_class="light"), Request(cost_class="heavy")
    stream = Open(Poisson(10.0), (light, heavy), (0.9, 0.1)).streams("s")[0]
    drawn = [stream.next(0.0) for _ in range(2000)]
    assert sum(1 for a in drawn if a and a.request is heavy) / 2000 == pytest.approx(0.1, abs=0.03)


def test_what_was_recorded_is_made_again_at_the_same_times() -> None:
    early, late = Arrival(1.0, Request()), Arrival(2.0, Request())
    stream = RecordedArrivals([late, early]).streams("s")[0]
    assert [stream.next(0.0), stream.next(0.0), stream.next(0.0)] == [early, late, None]


def test_a_camera_keeps_its_newest_frame_while_one_is_out() -> None:
    """Frames at 0.1, 0.2, 0.3 …: the next one asked is the last made by the answer, as old as it is."""
    request = Request()
    stream = Camera(Every(0.1, phase=0.1), request).streams("s")[0]
    assert stream.waits
    found = [stream.next(now) for now in (0.0, 0.15, 0.25, 0.68)]
    assert found == [
        Arrival(pytest.approx(0.1), request, pytest.approx(0.1), 0),
        Arrival(pytest.approx(0.2), request, pytest.approx(0.2), 0),
        Arrival(pytest.approx(0.3), request, pytest.approx(0.3), 0),
        Arrival(0.68, request, pytest.approx(0.6), 2),  # 0.4 and 0.5 were overrun
    ]


def test_frames_that_were_overrun_count_as_such_and_age_from_their_making() -> None:
    """A frame every 100 ms on a device of 250 ms: three frames in five are never asked."""
    camera = Camera(Every(0.1, phase=0.05))
    report = Report.of(simulate(Scheduler(), camera, Affine(0.250, 0.0), duration=50.0))
    made = sum(report.outcomes.values())
    assert made == pytest.approx(500, abs=5)
    assert report.outcomes["overrun"] == pytest.approx(0.6 * made, abs=5)
    assert report.p50 is not None
    assert 0.250 < report.p50 <= 0.350  # up to 100 ms old when asked


def test_cameras_that_are_answered_in_time_lose_nothing() -> None:
    report = Report.of(simulate(Scheduler(), Camera(Every(0.1)), Affine(0.090, 0.0), duration=20.0))
    assert report.outcomes == {"ok": 200}
    assert report.p99 == pytest.approx(0.090)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Poisson(0.0), "Poisson.rate"),
        (lambda: Heavy(1.0, alpha=1.0), "Heavy.alpha"),
        (lambda: Bursty(1.0, peak=9.0, share=0.5), "Bursty.peak"),
        (lambda: Diurnal(1.0, swing=2.0), "Diurnal.swing"),
        (lambda: Callers(0, Fixed(1.0)), "Callers.count"),
        (lambda: Open(Poisson(1.0), ()), "Open.requests"),
        (lambda: Open(Poisson(1.0), (Request(),), (1.0, 2.0)), "Open.shares"),
    ],
)
def test_wrong_values_name_their_field(make: object, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()  # type: ignore[operator]


def test_streams_of_a_source_do_not_disturb_each_other() -> None:
    """A caller's think times are its own, so another rule that answers in another order meets the same callers."""
    one, two = (Callers(2, Exponential(1.0)).streams("s") for _ in range(2))
    straight = [[stream.next(0.0) for _ in range(5)] for stream in one]
    mixed: list[list[Arrival | None]] = [[], []]
    for i in islice([0, 1, 1, 0, 1, 0, 0, 1, 1, 0], 10):
        mixed[i].append(two[i].next(0.0))
    assert [[a.at for a in found if a] for found in straight] == [[a.at for a in found if a] for found in mixed]
