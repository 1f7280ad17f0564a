"""`reflex trace --slo`: the budget and threshold with most throughput within bounds on first token and gap, or a no."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table
from rich.text import Text

from reflex_runtime.config import one_line
from reflex_runtime.core.errors import ConfigError

if TYPE_CHECKING:
    from reflex_runtime.cli.trace_runs import Setup

ROWS = 40
MOST_SETTINGS = 2048


class Bounds(NamedTuple):
    """Seconds that no request may exceed: until its first token, and between two of its tokens."""

    ttft: float | None = None
    gap: float | None = None

    @classmethod
    def parse(cls, text: str) -> Bounds:
        """Read `ttft=200ms,gap=40ms`; either may be left out."""
        found: dict[str, float] = {}
        for part in text.split(","):
            one = re.fullmatch(r"\s*(ttft|gap)=([0-9]*\.?[0-9]+)(ms|s)\s*", part)
            seconds = float(one[2]) * (1e-3 if one[3] == "ms" else 1.0) if one is not None else 0.0
            if one is None or one[1] in found or not 0.0 < seconds <= 86_400.0:
                raise ConfigError(
                    f"--slo={one_line(text)}: must be ttft=TIME,gap=TIME, or one of them, with TIME such as 200ms or "
                    "0.2s in (0, 86400] s"
                )
            found[one[1]] = seconds
        return cls(**found)

    def __str__(self) -> str:
        named = zip(self._fields, self, strict=True)
        return " and ".join(f"{name} ≤ {value * 1e3:g} ms" for name, value in named if value is not None)


class Tried(NamedTuple):
    """A setting and what it came to, seconds; threshold 0 is off."""

    budget: int
    threshold: int
    seconds: float
    ttft: float
    gap: float
    tokens: int

    def meets(self, bounds: Bounds) -> bool:
        """Whether no request exceeded a bound. Times are sums of many steps: a millionth is rounding."""
        return self.meets_ttft(bounds) and self.meets_gap(bounds)

    def meets_ttft(self, bounds: Bounds) -> bool:
        """The same of the first token alone."""
        return bounds.ttft is None or self.ttft <= bounds.ttft * (1 + 1e-6)

    def meets_gap(self, bounds: Bounds) -> bool:
        """The same of the gap alone."""
        return bounds.gap is None or self.gap <= bounds.gap * (1 + 1e-6)

    @property
    def name(self) -> str:
        """In words."""
        return f"budget {self.budget}, threshold {self.threshold or 'off'}"


def grid(budgets: Sequence[int]) -> list[tuple[int, int]]:
    """Every budget with every threshold that differs from none: off, and powers of two below the budget from 8 on."""
    found = [(budget, threshold) for budget in budgets for threshold in (0, *_thresholds(budget))]
    if len(found) > MOST_SETTINGS:
        raise ConfigError(f"--sweep: {len(found):,} settings of budget and threshold; must be at most {MOST_SETTINGS}")
    return found


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
    setup: Setup, settings: Sequence[tuple[int, int]], progress: Callable[[str], None] = lambda _: None
) -> list[Tried]:
    """Run every setting; what it came to."""
    from reflex_runtime.cli.trace_runs import measure

    tried = []
    for number, (budget, threshold) in enumerate(settings, 1):
        progress(f"{number} of {len(settings)} settings")
        run = measure(setup, budget, long_prefill_token_threshold=threshold)
        tried.append(Tried(budget, threshold, run.seconds, max(run.first_token), max(run.gap), sum(run.tokens)))
    return tried


def best(tried: Sequence[Tried], bounds: Bounds) -> Tried | None:
    """Of those within the bounds the one done first; of equals the one that keeps the most from them."""
    within = [t for t in tried if t.meets(bounds)]
    return min(within, key=lambda t: (round(t.seconds, 9), round(t.gap, 9), round(t.ttft, 9), t.budget), default=None)


def refusal(tried: Sequence[Tried], bounds: Bounds) -> str:
    """Why nothing qualifies: which bound fails, and the best that was reached for each."""
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


def slo_table(tried: Sequence[Tried], bounds: Bounds, chosen: Tried | None) -> Table:
    """One row per setting; of many, those that show the choice: the chosen one, and each budget's best."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = ("budget", "threshold", "total ms", "tokens/s", "ttft ms\nlongest", "gap ms\nlongest", "")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 6 else "right", no_wrap=True, vertical="bottom")
    for t in _shown(tried, bounds, chosen):
        cells = [Text(str(t.budget)), Text(str(t.threshold or "off")), Text(f"{t.seconds * 1e3:.1f}")]
        cells.append(Text(f"{t.tokens / t.seconds:.0f}" if t.seconds else "–"))
        cells.append(Text(f"{t.ttft * 1e3:.1f}", "" if t.meets_ttft(bounds) else "red"))
        cells.append(Text(f"{t.gap * 1e3:.1f}", "" if t.meets_gap(bounds) else "red"))
        missed = [name for name, kept in (("ttft", t.meets_ttft(bounds)), ("gap", t.meets_gap(bounds))) if not kept]
        cells.append(Text("◀ most throughput" if t is chosen else f"{', '.join(missed)} missed" if missed else "kept"))
        table.add_row(*cells, style="bold" if t is chosen else "dim" if missed else "")
    return table


def _shown(tried: Sequence[Tried], bounds: Bounds, chosen: Tried | None) -> list[Tried]:
    if len(tried) <= ROWS:
        return list(tried)
    found = []
    for budget in dict.fromkeys(t.budget for t in tried):
        of = [t for t in tried if t.budget == budget]
        found += [t for t in of if t in (chosen, best(of, bounds), of[0])]
    return found
