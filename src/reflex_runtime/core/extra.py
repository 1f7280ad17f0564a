"""Units that a resident could use beyond those it wants, each with the chance that it is of use.

A generated sequence may guess its next tokens. A step that computes the guesses, too, takes longer, and those that turn
out right are tokens that need no step of their own. How much longer is learned for each size of step, because an extra
row is nearly free beside one sequence and has its full price beside many. Extra units are granted last, of what the
others leave, and only where they raise the rate of useful units:

    (rows + Σ chances) / (T + e · units)        largest, where each unit's chance is above e times that rate
"""

from __future__ import annotations

from collections.abc import Sequence

from reflex_runtime.core.affine import AffineFit

WARM = 3  # steps of a size, without extra units and with them, before they count
MARGIN = 1.1  # times the price that a unit must bring: what is learned is not exact
HOPE = 0.2  # the chance that is enough to find out what a unit costs
PLAIN = 64  # steps with extra units, one behind the other, before one without: else their price is not told apart
PROBE, RAREST = 64, 4096  # steps without extra units until the price is looked at again; doubled each time in vain
OPTIMISM = 0.5  # of the learned price is assumed for that

_ROWS, _UNITS = 16.0, 16.0  # the fit wants numbers of similar size

Chances = Sequence[float]


class _Steps:
    """What steps of about one size take: fixed + row · rows + unit · extra units.

    plain, extended: how many were measured without and with extra units. since: steps since the last extended one;
    until: as many must be over before the price is looked at again. together: extended ones, none plain between.
    """

    __slots__ = ("extended", "fit", "plain", "since", "together", "until")

    def __init__(self) -> None:
        self.fit = AffineFit()
        self.plain = self.extended = self.since = self.together = 0
        self.until = PROBE

    @property
    def unit(self) -> float | None:
        """Seconds that one more extra unit takes; None before it is known."""
        slope = self.fit.slope("units") if self.extended >= WARM else None
        return None if slope is None else slope / _UNITS

    def predict(self, rows: int) -> float:
        return self.fit.predict({"rows": rows / _ROWS})

    def observe(self, rows: int, units: float, elapsed: float) -> None:
        self.fit.observe({"rows": rows / _ROWS, "units": units / _UNITS} if units else {"rows": rows / _ROWS}, elapsed)
        if units:
            self.extended, self.since, self.together = self.extended + 1, 0, self.together + 1
        else:
            self.plain, self.since, self.together = self.plain + 1, self.since + 1, 0


class ExtraUnits:
    """Chooses how many extra units each member of a step gets, and learns what they cost."""

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}  # by the power of two that is above the number of rows

    def unit(self, rows: int) -> float:
        """Learned seconds of one more extra unit in such a step; 0.0 before it is known."""
        steps = self._steps.get(rows.bit_length())
        return (steps.unit or 0.0) if steps is not None else 0.0

    def observe(self, rows: int, units: float, elapsed: float) -> None:
        """A step without prompts took so long: so many rows that got their next token, and extra units."""
        self._steps.setdefault(rows.bit_length(), _Steps()).observe(rows, units, elapsed)

    def choose(self, rows: int, asked: Sequence[Chances], most: float, seconds: float) -> list[int]:
        """How many extra units each gets. asked: their chances, descending; rows: of the step, theirs and others'.
        most, seconds: units and time that are left for all of them."""
        steps = self._steps.get(rows.bit_length())
        if steps is None or steps.plain < WARM or steps.together >= PLAIN or seconds <= 0.0:
            return [0] * len(asked)
        unit, base = steps.unit, steps.predict(rows)
        if unit is None:  # at most as dear as a row by itself
            return _first(asked, HOPE, min(most, max(4, rows), seconds * rows / base))
        counts = _best(asked, rows, base, MARGIN * unit)
        if any(counts):
            steps.until = PROBE
        elif steps.since >= steps.until:
            steps.until = min(2 * steps.until, RAREST)
            counts = _best(asked, rows, base, OPTIMISM * unit)
        most = min(most, seconds / unit)
        return counts if sum(counts) <= most else _first([c[:n] for c, n in zip(asked, counts, strict=True)], 0.0, most)


def _best(asked: Sequence[Chances], rows: int, base: float, unit: float) -> list[int]:
    """The counts that make the rate of useful units largest. Each round uses the rate of the one before, which only
    grows, so the counts only shrink (Dinkelbach's method). But for rounding: so it ends when they do not."""
    counts: list[int] | None = None
    useful, seconds = float(rows), base
    while True:
        price = unit * useful / seconds
        found = [sum([chance > price for chance in chances]) for chances in asked]
        if counts is not None and sum(found) >= sum(counts):
            return counts
        counts = found
        useful = rows + sum([sum(chances[:n]) for chances, n in zip(asked, counts, strict=True)])
        seconds = base + unit * sum(counts)


def _first(asked: Sequence[Chances], least: float, most: float) -> list[int]:
    """The likeliest units, at most so many, of those whose chance is at least so large."""
    counts = [0] * len(asked)
    offers = sorted(((-chance, i) for i, chances in enumerate(asked) for chance in chances if chance >= least))
    for _, i in offers[: max(0, int(most))]:
        counts[i] += 1
    return counts
