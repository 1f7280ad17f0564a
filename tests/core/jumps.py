"""How the learned cost follows a device that suddenly becomes slower or faster, and how it bears outliers.

    python tests/core/jumps.py      the table, before the bars of `test_cost.py` are applied to it

Virtual and seeded: batches of 1 to 16, 3 % noise, one batch in a hundred takes fifty times as long. Every figure is the
median over the runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import exp, inf
from random import Random
from statistics import median

from reflex_runtime.core.statistics import AffineFit

FACTORS = (5.0, 10.0, 30.0)
BEFORE, AFTER = 200, 60  # batches
NEAR = 1.25  # a prediction is right when it is within this ratio of the truth


def affine(n: int) -> float:
    """Seconds of a batch of n: 20 + 2 n ms."""
    return 0.020 + 0.002 * n


def stepped(n: int) -> float:
    """The same for a processor that pads to powers of two."""
    return affine(1 << (n - 1).bit_length())


DEVICES = {"affine": affine, "stepped": stepped}


@dataclass(frozen=True)
class Jump:
    """One run: how far a prediction went beyond the truth in the direction of the jump, as a ratio, and how many
    batches were measured before ten predictions in a row were right (inf: never)."""

    overshoot: float
    batches: float


def ratios(
    device: Callable[[int], float],
    factor: float = 1.0,
    added: float = 0.0,
    outliers: float = 0.01,
    times: float = 50.0,
    seed: int = 0,
    before: int = BEFORE,
    after: int = AFTER,
) -> list[float]:
    """Prediction ÷ truth of every batch after the device came to take `factor` times as long and `added` seconds more.

    Negative `added`: it takes that much more before, and not after.
    """
    random, fit, found = Random(f"{factor}/{added}/{seed}"), AffineFit(), []
    for i in range(before + after):
        n = random.randint(1, 16)
        truth = device(n) * (factor if i >= before else 1.0) + max(0.0, added if i >= before else -added)
        if i >= before:
            found.append(fit.predict({"": float(n)}) / truth)
        noise = exp(random.gauss(0.0, 0.03)) * (times if random.random() < outliers else 1.0)
        fit.observe({"": float(n)}, truth * noise)
    return found


def right(ratio: float) -> bool:
    """Whether a prediction is near enough to the truth."""
    return 1.0 / NEAR <= ratio <= NEAR


def run(device: Callable[[int], float], factor: float = 1.0, added: float = 0.0, seed: int = 0) -> Jump:
    """One jump: train a fit, let the device change, and follow the predictions."""
    found = ratios(device, factor, added, seed=seed)
    slower = factor > 1.0 or added > 0.0
    settled = (i for i in range(AFTER - 10) if all(right(r) for r in found[i : i + 10]))
    return Jump(max(r if slower else 1.0 / r for r in found), next(settled, inf))


def medians(device: Callable[[int], float], factor: float = 1.0, added: float = 0.0, runs: int = 41) -> Jump:
    """The medians of both figures."""
    seen = [run(device, factor, added, seed) for seed in range(runs)]
    return Jump(median(j.overshoot for j in seen), median(j.batches for j in seen))


def wrong(device: Callable[[int], float], outliers: float, times: float) -> float:
    """Share of the predictions that are not right where nothing changes but outliers are many."""
    found = [r for seed in range(5) for r in ratios(device, 1.0, 0.0, outliers, times, seed, 100, 2000)]
    return sum(not right(r) for r in found) / len(found)


def main() -> None:
    print(f"{'device':8} {'jump':>9} {'overshoot':>9} {'batches':>7}")
    jumps = [(f"x{f:g}", f, 0.0) for f in FACTORS] + [(f"/{f:g}", 1.0 / f, 0.0) for f in FACTORS]
    jumps += [("+500 ms", 1.0, 0.5), ("-500 ms", 1.0, -0.5)]
    for (name, device), (label, factor, added) in product(DEVICES.items(), jumps):
        found = medians(device, factor, added)
        print(f"{name:8} {label:>9} {found.overshoot:9.2f} {found.batches:7g}")
    print(f"\n{'device':8} {'outliers':>13} {'wrong predictions':>18}")
    for (name, device), (share, times) in product(DEVICES.items(), ((0.01, 50.0), (0.05, 50.0), (0.1, 10.0))):
        print(f"{name:8} {share:7.0%} of x{times:<3g} {wrong(device, share, times):18.2%}")


if __name__ == "__main__":
    main()
