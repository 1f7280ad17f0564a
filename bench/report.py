"""Rows: what was measured, its spread over the rounds, its bar, and whether it was met."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Row:
    """One line of the table. value: the median over rounds; low, high: the extremes. bar: None when it only informs."""

    case: str
    what: str
    value: float
    low: float
    high: float
    unit: str
    bar: str = ""
    met: bool | None = None
    rounds: list[float] = field(default_factory=list)

    def cells(self) -> tuple[str, ...]:
        spread = f"{_number(self.low)}…{_number(self.high)}"
        verdict = "" if self.met is None else "met" if self.met else "NOT MET"
        return (self.case, self.what, f"{_number(self.value)} {self.unit}".strip(), spread, self.bar, verdict)


def row(
    case: str, what: str, rounds: Sequence[float], unit: str, most: float | None = None, least: float | None = None
) -> Row:
    """A row from one number per round. most, least: the bar on the median."""
    value = statistics.median(rounds)
    bar, met = "", None
    if most is not None:
        bar, met = f"<= {_number(most)}", value <= most
    elif least is not None:
        bar, met = f">= {_number(least)}", value >= least
    return Row(case, what, value, min(rounds), max(rounds), unit, bar, met, list(rounds))


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, aligned for a terminal."""
    head = ("case", "what", "median", "spread", "bar", "")
    cells = [head, *(r.cells() for r in rows)]
    widths = [max(len(c[i]) for c in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(c, widths, strict=True)) + " |" for c in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """JSON-safe."""
    return [asdict(r) for r in rows]


def _number(value: float) -> str:
    if value != value:
        return "-"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
