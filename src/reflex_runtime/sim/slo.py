"""The budget and threshold with most throughput within bounds on first token and gap, or the bound that fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reflex_runtime.sim.tokens import Progress, TokenRuns


class Bounds(NamedTuple):
    """Seconds that no request may exceed: until its first token, and between two of its tokens."""

    ttft: float | None = None
    gap: float | None = None

    def __str__(self) -> str:
        named = zip(self._fields, self, strict=True)
        return " and ".join(f"{name} ≤ {value * 1e3:g} ms" for name, value in named if value is not None)


class Tried(NamedTuple):
    """A setting and its results in seconds; threshold 0 is off."""

    budget: int
    threshold: int
    seconds: float
    ttft: float
    gap: float
    tokens: int

    def meets(self, bounds: Bounds) -> bool:
        """Whether all requests kept both bounds. Times are sums of many steps, so a millionth is rounding."""
        return self.meets_ttft(bounds) and self.meets_gap(bounds)

    def meets_ttft(self, bounds: Bounds) -> bool:
        """Whether all requests kept the bound on the first token."""
        return bounds.ttft is None or self.ttft <= bounds.ttft * (1 + 1e-6)

    def meets_gap(self, bounds: Bounds) -> bool:
        """Whether all requests kept the bound on the gap."""
        return bounds.gap is None or self.gap <= bounds.gap * (1 + 1e-6)

    @property
    def name(self) -> str:
        return f"budget {self.budget}, threshold {self.threshold or 'off'}"


def grid(budgets: Sequence[int]) -> list[tuple[int, int]]:
    """Every budget with every threshold that differs from none: off, and powers of two below the budget from 8 on."""
    return [(budget, threshold) for budget in budgets for threshold in (0, *_thresholds(budget))]


def _thresholds(budget: int) -> list[int]:
    return [1 << n for n in range(3, 20) if 1 << n < budget]


def budgets_for(prompt_tokens: int, prompts: int) -> list[int]:
    """Powers of two, and halfway between, from 8 or a step of decodes to where every prompt fits at once."""
    low, high = 8, max(16, prompt_tokens)
    while low * 2 <= min(prompts, high):
        low *= 2
    found = [low]
    while found[-1] < high:
        found += [found[-1] * 3 // 2, found[-1] * 2]
    return found


def try_all(
    runs: TokenRuns, settings: Sequence[tuple[int, int]], progress: Progress = lambda _: None
) -> list[Tried]:
    """Run every setting and return the results."""
    tried = []
    for number, (budget, threshold) in enumerate(settings, 1):
        progress(f"{number} of {len(settings)} settings")
        run = runs.measure(budget, long_prefill_token_threshold=threshold)
        tried.append(Tried(budget, threshold, run.seconds, max(run.first_token), max(run.gap), sum(run.tokens)))
    return tried


def best(tried: Sequence[Tried], bounds: Bounds) -> Tried | None:
    """The fastest setting within the bounds; among equals the one with the largest margin."""
    within = [t for t in tried if t.meets(bounds)]
    return min(within, key=lambda t: (round(t.seconds, 9), round(t.gap, 9), round(t.ttft, 9), t.budget), default=None)


def refusal(tried: Sequence[Tried], bounds: Bounds) -> str:
    """Why no setting qualifies: the bound that fails, and the best value reached for each."""
    told = [f"none of {len(tried):,} settings keeps {bounds}"]
    for name, bound, meets in (("ttft", bounds.ttft, Tried.meets_ttft), ("gap", bounds.gap, Tried.meets_gap)):
        if bound is None:
            continue
        reached = min(tried, key=lambda t: (getattr(t, name), t.seconds))
        value = f"{getattr(reached, name) * 1e3:.4g} ms with {reached.name}"
        fails = "can be kept" if any(meets(t, bounds) for t in tried) else "fails in all of them"
        told.append(f"{name} ≤ {bound * 1e3:g} ms {fails}: best {value}")
    both = bounds.ttft is not None and bounds.gap is not None
    if both and all(any(meets(t, bounds) for t in tried) for meets in (Tried.meets_ttft, Tried.meets_gap)):
        one = min((t for t in tried if t.meets_gap(bounds)), key=lambda t: t.ttft)
        told.append(f"but not both at once: where gap is kept, ttft is {one.ttft * 1e3:.4g} ms at best ({one.name})")
    return "; ".join(told)
