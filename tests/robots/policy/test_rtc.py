"""Real-time chunking: weights against hand-computed ones, and tails that stay with their episode."""

from __future__ import annotations

import numpy as np
import pytest

from reflex_runtime.robots.policy.episodes import Anchor, ChunkTails, Rtc


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _chunk(start: float = 0.0, size: int = 8) -> np.ndarray:
    return np.arange(size * 2, dtype=np.float32).reshape(size, 2) + np.float32(start)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("ZEROS", [1, 1, 0, 0, 0, 0, 0, 0]),
        ("ONES", [1, 1, 1, 1, 1, 0, 0, 0]),
        ("LINEAR", [1, 1, 0.75, 0.5, 0.25, 0, 0, 0]),
        ("EXP", [1, 1, 0.75 * np.expm1(0.75) / np.expm1(1), 0.5 * np.expm1(0.5) / np.expm1(1),
                 0.25 * np.expm1(0.25) / np.expm1(1), 0, 0, 0]),
    ],
)  # fmt: skip
def test_e2_the_weight_falls_along_its_schedule_between_the_frozen_places_and_the_horizon(
    schedule: str, expected: list[float]
) -> None:
    weights = Rtc(schedule, 5).weights(frozen=2, overlap=7, chunk_size=8)  # type: ignore[arg-type]
    assert weights[:, 0] == pytest.approx(expected, rel=1e-6)


def test_e2_nothing_is_anchored_beyond_what_the_old_chunk_covers() -> None:
    assert Rtc("ONES", 10).weights(frozen=6, overlap=3, chunk_size=8)[:, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_e2_frozen_places_end_exactly_on_the_old_chunk_and_free_ones_are_left_alone() -> None:
    target, noise, x = _chunk(0.1), _chunk(50.3), _chunk(7.7)
    weights = np.array([[1], [1], [0.5], [0], [0], [0], [0], [0]], np.float32)
    pulled = Anchor(target, weights, {}).pull(x, noise, 1.0)
    assert np.array_equal(pulled[:2], target[:2])
    assert np.array_equal(pulled[3:], x[3:])
    assert pulled[2] == pytest.approx((target[2] + x[2]) / 2)
    halfway = Anchor(target, weights, {}).pull(x, noise, 0.5)
    assert halfway[0] == pytest.approx((noise[0] + target[0]) / 2)


def test_e2_the_tail_is_what_was_not_executed_moved_to_the_front() -> None:
    tails = ChunkTails(Rtc("ONES", 4), _Clock())
    tails.remember("ep", _chunk(), 0.02)
    anchor = tails.anchor("ep", executed=3)
    assert anchor is not None
    assert np.array_equal(anchor.target[:5], _chunk()[3:])
    assert anchor.report | {"delay_ms": 0} == {
        "executed": 3, "overlap": 5, "frozen": 0, "delay": 0, "delay_ms": 0, "horizon": 4, "schedule": "ONES",
    }  # fmt: skip


def test_e2_with_a_control_rate_time_says_how_many_were_executed_and_how_many_are_frozen() -> None:
    clock = _Clock()
    tails = ChunkTails(Rtc("LINEAR", 6), clock, control_hz=50.0)
    tails.remember("ep", _chunk(), latency=0.030)  # 1.5 control periods: two actions run before the next answer
    clock.now += 0.0405  # two were executed
    anchor = tails.anchor("ep", executed=None)
    assert anchor is not None
    assert (anchor.report["executed"], anchor.report["frozen"], anchor.report["delay_ms"]) == (2, 2, 30.0)


def test_e2_time_counts_until_the_observation_arrived_however_long_it_waited_then() -> None:
    clock = _Clock()
    tails = ChunkTails(Rtc("LINEAR", 6), clock, control_hz=50.0)
    tails.remember("ep", _chunk(), latency=0.030)
    answered = clock.now
    clock.now += 0.100  # of a queue
    for received, executed in ((answered + 0.0405, 2), (answered, 0), (answered - 0.050, 0)):
        anchor = tails.anchor("ep", executed=None, received=received)
        assert anchor is not None
        assert anchor.report["executed"] == executed


def test_e2_a_delay_that_was_said_is_no_estimate() -> None:
    for rate in (50.0, None):
        tails = ChunkTails(Rtc("LINEAR", 6), _Clock(), control_hz=rate)
        tails.remember("ep", _chunk(), latency=0.030)
        for delay in (0, 3):
            anchor = tails.anchor("ep", executed=1, delay=delay)
            assert anchor is not None
            assert anchor.report["delay"] == anchor.report["frozen"] == delay
            assert (anchor.weights == 1.0).sum() == delay


def test_e2_a_caller_that_says_nothing_at_an_unknown_rate_gets_no_anchor() -> None:
    tails = ChunkTails(Rtc(), _Clock())
    tails.remember("ep", _chunk(), 0.01)
    assert tails.anchor("ep", executed=None) is None
    assert tails.anchor("ep", executed=8) is None  # nothing is left of it
    assert tails.anchor("ep", executed=7) is not None


def test_e2_tails_are_never_shared_between_episodes_and_are_bounded() -> None:
    tails = ChunkTails(Rtc(), _Clock(), episodes=2)
    for name in ("a", "b", "c"):
        tails.remember(name, _chunk(), 0.01)
    assert tails.anchor("a", 1) is None
    assert len(tails) == 2
    tails.forget("b")
    assert tails.anchor("b", 1) is None
    assert tails.anchor("c", 1) is not None
    tails.remember("", _chunk(), 0.01)
    assert tails.anchor("", 1) is None


def test_e2_a_chunk_that_is_not_finite_is_nothing_to_continue() -> None:
    tails = ChunkTails(Rtc(), _Clock())
    bad = _chunk()
    bad[3, 1] = np.nan
    tails.remember("ep", bad, 0.01)
    assert tails.anchor("ep", 1) is None
