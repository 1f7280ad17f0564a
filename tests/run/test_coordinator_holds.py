"""Who is waited for, on the real coordinator: its thread, its lock, a processor that declares its time, a clock that
jumps. The same cases as `compare.feeds` in the simulator (contract F6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

import pytest
from bench.sim.loads import Camera, Every

from reflex_runtime import BatchConfig
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.holding import JUST_LATE
from reflex_runtime.core.request import Request
from reflex_runtime.run.coordinator import FIRST, FORMING, LEAST, PayingSize
from reflex_runtime.sim import Affine, Around, Arrival, Callers, RecordedArrivals, WorkloadPart
from run.coordinated import nobody_left
from run.virtual import played
from thinned import thinned

USUAL = Affine(0.005, 0.001)


@pytest.fixture(autouse=True)
def _nobody_left() -> Iterator[None]:
    yield from nobody_left()


def cameras(*rates: float, jitter: float = 0.0) -> Sequence[WorkloadPart]:
    return [Camera(Every(1.0 / fps, jitter / fps)) for fps in rates]


@pytest.mark.parametrize(
    ("feeds", "device"),
    [
        (cameras(30.0, 10.0), USUAL),
        (cameras(30.0, 30.0, 10.0, 5.0), USUAL),
        (cameras(30.0, 1.0), USUAL),
        (cameras(60.0, 25.0, 12.0, jitter=0.1), Affine(0.006, 0.002)),
    ],
    ids=["30+10", "30+30+10+5", "30+1", "60+25+12 with jitter"],
)
def test_f6_cameras_of_different_rates_lose_no_frame_at_the_defaults(
    feeds: Sequence[WorkloadPart], device: Affine
) -> None:
    outcome = played(feeds, device.of, BatchConfig(), 20.0)
    assert outcome.lost == 0
    assert outcome.answered > 20.0 * 30.0
    assert max(outcome.ages) < 0.033


@pytest.mark.parametrize("jitter", thinned([0.0, 0.1], [0.1]))
def test_f6_of_sixteen_cameras_of_four_rates_no_hold_loses_a_frame(jitter: float) -> None:
    """5, 10, 15 and 30 fps, four of each, from a processor that is idle half of the time to one that is too slow."""
    feeds = [camera for _ in range(4) for camera in cameras(5.0, 10.0, 15.0, 30.0, jitter=jitter)]
    for device in (USUAL, Affine(0.010, 0.0015), Affine(0.020, 0.002)):
        at_once, held = (
            played(feeds, device.of, BatchConfig(max_batch_size=8, max_latency=most), 10.0) for most in (0.0, 0.050)
        )
        assert held.lost <= at_once.lost
        assert fmean(held.sizes) > 1.05 * fmean(at_once.sizes)
        assert fmean(held.ages) < 1.02 * fmean(at_once.ages)
    assert held.lost < 0.7 * at_once.lost, "the last one is too slow"


def test_f6_cameras_in_step_share_full_batches_at_the_defaults() -> None:
    feeds = [Camera(Every(1.0 / 30.0, phase=0.010 + 0.001 * i)) for i in range(4)]
    outcome = played(feeds, Affine(0.010, 0.002).of, BatchConfig(), 10.0)
    assert outcome.lost == 0
    assert set(outcome.sizes) == {4}


def test_f6_cameras_of_one_rate_out_of_step_share_batches() -> None:
    """Twelve of 5 fps, three by three within 10 ms, on a processor that is busy without a pause if it takes each batch
    as it is."""
    feeds = [Camera(Every(0.2, phase=0.010 + 0.050 * (i // 3) + 0.005 * (i % 3))) for i in range(12)]
    at_once, held = (
        played(feeds, Affine(0.030, 0.003).of, BatchConfig(max_batch_size=8, max_latency=most), 20.0)
        for most in (0.0, 0.050)
    )
    assert at_once.lost == held.lost == 0
    assert fmean(held.sizes) > 1.25 * fmean(at_once.sizes)
    assert fmean(held.ages) < fmean(at_once.ages)


def test_f6_a_feed_is_waited_for_until_it_is_due_and_no_longer() -> None:
    """Two cameras in step, 2 ms apart, until the second is silent: it is waited for once in vain, and then no more."""
    first = Camera(Every(1.0 / 30.0, phase=0.010))
    second = RecordedArrivals([Arrival(0.012 + i / 30.0, Request()) for i in range(150)])  # for five seconds
    outcome = played([first, second], Affine(0.010, 0.002).of, BatchConfig(), 10.0)
    together, in_vain, alone = 0.002 + 0.014, 0.002 + JUST_LATE + 0.012, 0.012
    ages = [age for age in outcome.ages if age == pytest.approx(together)]
    assert len(ages) > 140
    assert [age for age in outcome.ages if age == pytest.approx(in_vain)] == pytest.approx([in_vain])
    assert outcome.ages[-140:] == pytest.approx([alone] * 140)
    assert outcome.lost == 0


def test_f6_sixteen_files_on_a_flat_processor_go_sixteen_at_once() -> None:
    """120 ms whatever n, 3 ± 1 ms to decode the next picture. Two groups of eight in turn would be half as fast."""
    files = [Callers(16, Around(0.003, 0.001))]
    outcome = played(files, lambda n: 0.120, BatchConfig(max_batch_size=16), 12.0)
    assert fmean(outcome.sizes) > 15.7


# -- whether calls of several frames pay -------------------------------------------------------------------------------


def dearer_together(n: int) -> float:
    """A CPU: a frame takes 10 ms alone, and 13 ms in a call of several."""
    return 0.010 if n == 1 else 0.013 * n


@pytest.mark.long  # plays for seconds
def test_f6_frames_run_alone_where_a_call_of_several_takes_longer() -> None:
    many = [camera for _ in range(4) for camera in cameras(5.0, 10.0, 15.0, 30.0)]
    outcome = played(many, dearer_together, BatchConfig(max_batch_size=8), 20.0)
    assert fmean(n == 1 for n in outcome.sizes) > 0.7
    assert outcome.answered > 20.0 * 90.0, "in calls of eight it is 77 a second"


@pytest.mark.long  # plays for seconds
def test_f6_frames_share_calls_again_when_that_pays() -> None:
    many = [camera for _ in range(4) for camera in cameras(5.0, 10.0, 15.0, 30.0)]
    calls = [0]

    def other_machine(n: int) -> float:
        calls[0] += 1
        return dearer_together(n) if calls[0] < 400 else Affine(0.020, 0.002).of(n)

    outcome = played(many, other_machine, BatchConfig(max_batch_size=8), 60.0)
    assert fmean(outcome.sizes) > 7.0


def test_f6_where_sharing_calls_pays_few_calls_try_whether_it_does() -> None:
    many = [camera for _ in range(4) for camera in cameras(5.0, 10.0, 15.0, 30.0)]
    outcome = played(many, Affine(0.020, 0.002).of, BatchConfig(max_batch_size=8), 20.0)
    assert sum(n == 1 for n in outcome.sizes) <= 3
    assert fmean(outcome.sizes) > 7.5


def test_f6_frames_of_a_processor_that_keeps_up_share_calls_whatever_they_take() -> None:
    outcome = played(cameras(10.0, 10.0, 10.0), dearer_together, BatchConfig(), 20.0)
    assert outcome.lost == 0


def test_f6_a_trial_compares_calls_of_now_with_each_other() -> None:
    sizes, now = PayingSize("x", lambda: None), 0.0
    before = [(1, 0.005)] * LEAST  # when the machine was idle, and frames came one by one
    for frames, seconds in [*before, *[(8, 0.8)] * FIRST, *[(1, 0.2)] * LEAST]:
        sizes.ran(frames, now, now := now + seconds)
    assert not sizes.alone


@pytest.mark.parametrize(("at_once", "size"), [(None, 8), (2, 2), (16, 8)])
def test_f6_a_batch_is_no_larger_than_the_processor_computes_at_once(at_once: int | None, size: int) -> None:
    sizes = PayingSize("x", lambda: at_once)
    policy = sizes.policy(FlushPolicy(max_batch_size=8), lambda: (0.0, 0.0, 0.0), 0.0, "")
    assert policy.max_batch_size == size


def test_f6_frames_that_take_nearly_as_long_alone_share_calls_which_are_formed_once() -> None:
    sizes, now = PayingSize("x", lambda: None), 0.0
    for frames, seconds in [(8, 0.8)] * (FIRST + 1) + [(1, 0.1 - FORMING / 2)] * LEAST:
        sizes.ran(frames, now, now := now + seconds)
    assert not sizes.alone
