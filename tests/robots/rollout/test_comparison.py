"""A against B: intervals, the betting test, and how seldom it is wrong."""

from __future__ import annotations

import json
from math import inf, prod
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from reflex_runtime.robots.versions.comparison import BETS, BLOCKS, Comparison, ratio, wilson
from thinned import thinned

# -- intervals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_newcombe_1998(successes: int, n: int, low: float, high: float) -> None:
    assert [round(bound, 4) for bound in wilson(successes, n)] == [low, high]
    mirrored = wilson(n - successes, n)
    assert [round(1 - bound, 4) for bound in reversed(mirrored)] == [low, high]


def test_wilson_at_the_ends() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 5)[0] == 0.0
    assert wilson(5, 5)[1] == 1.0
    for successes, n in ((-1, 5), (6, 5), (1, 0)):
        with pytest.raises(ValueError, match=f"successes={successes}: must be in"):
            wilson(successes, n)


def test_wilson_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    found = rng.binomial(60, 0.73, size=2000)
    covered = np.mean([low <= 0.73 <= high for low, high in (wilson(int(k), 60) for k in found)])
    assert 0.93 <= covered <= 0.97


# -- blocks and bets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (80, (4, 1)),
        (20, (1, 4)),
        (50, (1, 1)),
        (95, (19, 1)),
        (5, (1, 19)),
        (70, (2, 1)),
        (30, (1, 2)),
        (60, (2, 1)),
        (99, (99, 1)),
        (100, (0, 0)),
        (0, (0, 0)),
    ],
)
def test_v12_a_block_is_in_the_ratio_of_the_split(split: int, expected: tuple[int, int]) -> None:
    assert ratio(split) == expected
    comparison = Comparison(split)
    for slot, n in zip("ab", expected, strict=True):
        assert comparison.blocks == 0
        for _ in range(n):
            comparison.add(slot, True)
    assert comparison.blocks == (1 if sum(expected) else 0)


def test_v12_three_bets_on_every_block() -> None:
    """By hand: two blocks at 80/20, d = 3/4 − 0 and 2/4 − 1."""
    comparison = Comparison(80, margin=0.05)
    for slot, success in [("a", 1), ("a", 1), ("b", 0), ("a", 0), ("a", 1), ("b", 1), ("a", 0), ("a", 1), ("a", 0)]:
        comparison.add(slot, bool(success))
    assert comparison.blocks == 1
    comparison.add("a", True)
    assert comparison.blocks == 2
    assert comparison.counts == {"a": (5, 8), "b": (1, 2)}
    for e, won in (
        (comparison.e["a_better"], (0.75, -0.5)),
        (comparison.e["b_better"], (-0.75, 0.5)),
        (comparison.e["not_inferior"], (-0.70, 0.55)),
    ):
        assert e == pytest.approx(sum(prod(1 + share * w for w in won) for share in BETS) / len(BETS))


def test_v12_verdicts_are_kept_once_reached() -> None:
    comparison = Comparison(50, alpha=0.01)
    while comparison.verdict == "undecided":
        comparison.add("a", False)
        comparison.add("b", True)
    assert (comparison.verdict, comparison.not_inferior) == ("b_better", True)
    for _ in range(2000):
        comparison.add("a", True)
        comparison.add("b", False)
    assert (comparison.verdict, comparison.not_inferior) == ("b_better", True)
    assert comparison.e["b_better"] < 1.0 < comparison.e["a_better"]
    json.dumps(comparison.snapshot(), allow_nan=False)


@pytest.mark.parametrize("alpha", [1e-3, 0.05])
@pytest.mark.parametrize("split", [50, 80])
def test_v12_a_verdict_is_reached_with_the_wealth_of_1_over_alpha_and_not_before(split: int, alpha: float) -> None:
    for b_better in (False, True):
        comparison, random = Comparison(split, alpha), Random(5)
        while True:
            comparison.add("a" if random.random() * 100 < split else "b", (random.random() < 0.8) == b_better)
            comparison.add("b", b_better)
            comparison.add("a", not b_better)
            e = comparison.e["b_better"] if b_better else comparison.e["a_better"]
            assert (comparison.verdict != "undecided") == (e >= 1 / alpha)
            assert not b_better or comparison.not_inferior == (comparison.e["not_inferior"] >= 1 / alpha)
            if e >= 1 / alpha:
                break
        assert comparison.verdict == ("b_better" if b_better else "a_better")


def test_v12_wealth_stays_finite_for_ever() -> None:
    comparison = Comparison(50)
    for _ in range(5000):
        comparison.add("a", True)
        comparison.add("b", False)
    assert comparison.verdict == "a_better"
    assert 1e3 < comparison.e["a_better"] < inf
    assert comparison.e["not_inferior"] >= 0.0
    json.dumps(comparison.snapshot(), allow_nan=False)


@pytest.mark.parametrize("split", [0, 100])
def test_v12_with_all_on_one_side_there_is_nothing_to_compare(split: int) -> None:
    comparison = Comparison(split)
    for i in range(3000):
        comparison.add("ab"[i % 2], i % 3 == 0)
    assert (comparison.verdict, comparison.not_inferior, comparison.blocks) == ("undecided", False, 0)
    assert comparison.e["a_better"] == comparison.e["b_better"] == comparison.e["not_inferior"] == pytest.approx(1.0)
    assert comparison.counts["a"][1] + comparison.counts["b"][1] == 3000
    assert comparison.snapshot()["waiting"] == {"a": 0, "b": 0}


def test_v12_a_new_split_begins_a_new_block_and_keeps_the_wealth() -> None:
    comparison = Comparison(50)
    for _ in range(5):
        comparison.add("a", True)
        comparison.add("b", False)
    before = comparison.e["a_better"]
    comparison.add("a", True)
    comparison.set_split(80)
    assert comparison.snapshot()["waiting"] == {"a": 0, "b": 0}
    assert (comparison.left_out, comparison.split, comparison.e["a_better"]) == (1, 80, before)
    for slot in "baaa":
        comparison.add(slot, slot == "a")
    assert comparison.e["a_better"] == before
    comparison.set_split(80)  # the same: the block goes on
    comparison.add("a", True)
    assert comparison.e["a_better"] > before
    assert comparison.blocks == 6
    comparison.set_split(100)
    comparison.set_split(50)
    assert comparison.blocks == 6


@pytest.mark.parametrize(("split", "fast"), [(50, "a"), (50, "b"), (80, "a"), (80, "b"), (95, "a"), (95, "b")])
def test_v12_a_slot_that_runs_ahead_waits_in_bounded_memory(split: int, fast: str) -> None:
    comparison = Comparison(split)
    size = dict(zip("ab", ratio(split), strict=True))
    for i in range(20_000):
        comparison.add(fast, i >= 10_000)
    bound = BLOCKS * size[fast]
    assert comparison.snapshot()["waiting"] == {"a": 0, "b": 0} | {fast: bound}
    assert comparison.left_out == 20_000 - bound
    assert comparison.counts[fast] == (10_000, 20_000)  # counted all the same
    slow = "b" if fast == "a" else "a"
    for _ in range(size[slow]):
        comparison.add(slow, False)
    assert comparison.blocks == 1
    better = comparison.e["a_better"] if fast == "a" else comparison.e["b_better"]
    assert better > 1.0  # the oldest were left out: those that wait are the successes


def test_v12_memory_is_bounded_however_the_slots_alternate() -> None:
    random, comparison = Random(1), Comparison(80)
    for _ in range(300):
        slot = random.choice("ab")
        for _ in range(random.choice([1, 5, 300])):
            comparison.add(slot, random.random() < 0.7)
            waiting = comparison.snapshot()["waiting"]
            assert waiting["a"] <= 4 * BLOCKS
            assert waiting["b"] <= BLOCKS
            assert waiting["a"] < 4 or waiting["b"] < 1
    used = {"a": 4 * comparison.blocks, "b": comparison.blocks}
    total = sum(n for _, n in comparison.counts.values())
    assert comparison.left_out + sum(waiting.values()) + sum(used.values()) == total


@pytest.mark.parametrize("split", [50, 70, 80, 95])
def test_v12_routing_by_chance_leaves_few_episodes_out(split: int) -> None:
    random, comparison = Random(2), Comparison(split)
    for _ in range(20_000):
        comparison.add("a" if random.random() * 100 < split else "b", True)
    assert comparison.left_out / 20_000 < (0.12 if split == 70 else 0.03)  # 70/30 is compared 2:1


def test_the_snapshot_is_json() -> None:
    comparison = Comparison(80)
    for slot, success in (("a", True), ("a", False), ("b", True)):
        comparison.add(slot, success)
    found = json.loads(json.dumps(comparison.snapshot(), allow_nan=False))
    assert found["slots"]["a"] == {"successes": 1, "episodes": 2, "rate": 0.5, "interval": list(wilson(1, 2))}
    assert found["e"] == {"a_better": 1.0, "b_better": 1.0, "not_inferior": 1.0}
    assert (found["verdict"], found["blocks"], found["waiting"]) == ("undecided", 0, {"a": 2, "b": 1})
    assert json.loads(json.dumps(Comparison(50).snapshot()))["slots"]["b"]["rate"] is None


# -- how often it is wrong, and how soon it is right -------------------------------------------------------------------


def wealths(won: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average wealth after every block; rows are comparisons."""
    logs = [np.cumsum(np.log1p(share * won), axis=1) for share in BETS]
    return np.mean([np.exp(log) for log in logs], axis=0)


def differences(p_a: float, p_b: float, split: int, episodes: int, runs: int, seed: int) -> NDArray[np.float64]:
    """d of every block of so many comparisons."""
    n_a, n_b = ratio(split)
    rng, blocks = np.random.default_rng(seed), episodes // (n_a + n_b)
    return rng.binomial(n_a, p_a, (runs, blocks)) / n_a - rng.binomial(n_b, p_b, (runs, blocks)) / n_b


@pytest.mark.parametrize("split", thinned([50, 80, 95], [80]))
def test_v12_a_against_itself_raises_false_alarms_in_less_than_1_percent(split: int) -> None:
    """1,000 comparisons of up to 2,000 episodes at 0.73, looked at after every block."""
    d = differences(0.73, 0.73, split, 2000, 1000, seed=split)
    alarmed = ((wealths(d) >= 1e3) | (wealths(-d) >= 1e3)).any(axis=1)
    assert alarmed.mean() < 0.01


@pytest.mark.parametrize("split", thinned([50, 80, 95], [95]))
@pytest.mark.parametrize("p", [0.1, 0.5, 0.73, 0.99])
def test_v12_each_bet_is_wrong_no_more_often_than_alpha(split: int, p: float) -> None:
    """At alpha 5 % there is something to count. The worst case of not inferior is exactly the margin worse."""
    d = differences(p, p, split, 2000, 1000, seed=split)
    assert (wealths(d) >= 20).any(axis=1).mean() < 0.05
    assert (wealths(-d) >= 20).any(axis=1).mean() < 0.05
    worse = differences(p, p - 0.05, split, 2000, 1000, seed=split + 1)
    assert (wealths(0.05 - worse) >= 20).any(axis=1).mean() < 0.05


def test_v12_the_simulated_test_is_the_one_that_is_built() -> None:
    rng = np.random.default_rng(7)
    for split, p_b in ((50, 0.73), (80, 0.9), (95, 0.5), (30, 0.99)):
        n_a, n_b = ratio(split)
        a, b = rng.random((200, n_a)) < 0.73, rng.random((200, n_b)) < p_b
        d = (a.mean(axis=1) - b.mean(axis=1))[None]
        comparison = Comparison(split)
        expected = [wealths(d)[0], wealths(-d)[0], wealths(0.05 - d)[0]]
        for i in range(200):
            for slot, outcomes in (("b", b[i]), ("a", a[i])):
                for success in outcomes:
                    comparison.add(slot, bool(success))
            found = [comparison.e["a_better"], comparison.e["b_better"], comparison.e["not_inferior"]]
            assert found == pytest.approx([wealth[i] for wealth in expected], rel=1e-9)


def decided(p_a: float, p_b: float, split: int, random: Random, most: int = 20_000) -> tuple[str, int, int]:
    """(verdict, episodes until it, episodes until b was shown not to be inferior) with routing by chance."""
    comparison, verdict_at, shown_at = Comparison(split), 0, 0
    for n in range(1, most + 1):
        slot = "a" if random.random() * 100 < split else "b"
        comparison.add(slot, random.random() < (p_a if slot == "a" else p_b))
        if comparison.not_inferior and not shown_at:
            shown_at = n
        if comparison.verdict != "undecided" and not verdict_at:
            verdict_at = n
        if verdict_at and shown_at:
            break
    return comparison.verdict, verdict_at, shown_at


@pytest.mark.parametrize(("split", "median", "late"), [(50, 160, 240), (80, 330, 480), (95, 1250, 1800)])
def test_v12_v1_against_v2_is_decided_rightly_and_soon(split: int, median: int, late: int) -> None:
    found = [decided(0.73, 0.99, split, Random(seed)) for seed in range(100)]
    assert {verdict for verdict, _, _ in found} == {"b_better"}
    assert np.median([n for _, n, _ in found]) <= median
    assert np.quantile([n for _, n, _ in found], 0.95) <= late
    assert all(0 < shown <= verdict for _, verdict, shown in found)


def test_v12_a_version_that_is_worse_is_found_out() -> None:
    assert {decided(0.99, 0.73, 80, Random(seed), 2000)[0] for seed in range(40)} == {"a_better"}
