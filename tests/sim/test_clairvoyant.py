"""The bound is exact on small cases and holds for every rule; the server's defaults come close to it."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from bench.sim import compare
from bench.sim import rules as named
from bench.sim.clairvoyant import most_on_time

FIXED, MARGINAL, LIMIT = 0.020, 0.002, 0.060


def tried_all(arrivals: list[float]) -> int:
    """Every way to refuse some and to cut the rest, in order, into batches."""
    best = 0
    for choice in product((0, 1, 2), repeat=len(arrivals)):  # refused; joins the batch before it; begins one
        batches: list[list[float]] = []
        for at, what in zip(arrivals, choice, strict=True):
            if what == 2 or (what == 1 and not batches):
                batches.append([at])
            elif what == 1:
                batches[-1].append(at)
        free, good = 0.0, True
        for batch in batches:
            free = max(free, batch[-1]) + FIXED + MARGINAL * len(batch)
            good = good and free <= batch[0] + LIMIT + 1e-12
        best = max(best, sum(map(len, batches)) if good else 0)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_what_trying_everything_finds(seed: int) -> None:
    rng = Random(seed)
    arrivals = sorted(rng.uniform(0.0, 0.15) for _ in range(8))
    assert most_on_time(arrivals, LIMIT, FIXED, MARGINAL) == tried_all(arrivals)


@pytest.mark.long
def test_the_servers_defaults_are_within_two_per_cent_of_what_is_possible() -> None:
    """With many robots, none of them greedy: the planner must not take chance for greed (1,000 robots, −5.8 points)."""
    bench = compare.Bench(duration=8.0, noise=0.0)  # the bound knows no noise
    bounds = compare.overload_bounds(bench)
    for name, workload in compare.loads_of(bench).items():
        window = bench.run(named.WINDOW, workload).on_time or 0.0
        plain = bench.run(named.UNPLANNED, workload).on_time or 0.0
        assert window >= plain - 0.002, name
        assert plain <= bounds[name], name
        assert name == "600/s" or window >= 0.98 * bounds[name], (name, window, bounds[name])
