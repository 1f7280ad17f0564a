"""Units that a resident could use beyond those it wants, each with the chance that it is of use.

A generated sequence may guess its next tokens. A step that computes the guesses, too, takes longer, and those that turn
out right are tokens that need no step of their own. How much longer is learned for each size of step, because an extra
row is nearly free beside one sequence and has its full price beside many:

    T(step) = (fixed + row · rows) · (1 + change · [another shape]) + unit · extra units

Shape: all units of a step, which kernels are chosen by. Where it is not that of the step before, they are chosen anew:
on a CPU up to a fifth of a step of one sequence. Extra units are granted last, of what the others leave, and only where
they raise the rate of useful units:

    (rows + Σ chances) / T          largest; where that of the same shape as before is as good, the shape stays
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from reflex_runtime.core.affine import AffineFit, Counts

WARM = 3  # steps of a size, without extra units and with them, before they count
MARGIN = 1.1  # times the price that units must bring: what is learned is not exact
HOPE = 0.2  # the chance that is enough to find out what a unit costs
PLAIN, SELDOM = 16, 128  # steps with extra units, one behind the other, before some without: else their price is not
PAIR = 2  # told apart. As many of those, of which the second has the shape of the step before; doubled each time
PROBE, RAREST = 64, 4096  # steps without extra units until the price is looked at again; doubled each time in vain
OPTIMISM = 0.5  # of the learned price is assumed for that
MEMORY = 32  # pairs of plain steps, of which the mean says what another shape costs

_ROWS, _UNITS = 16.0, 16.0  # the fit wants numbers of similar size

Chances = Sequence[float]


class _Price(NamedTuple):
    """Seconds of one more extra unit, and of another shape than that of the step before."""

    unit: float
    change: float

    def times(self, factor: float) -> _Price:
        return _Price(factor * self.unit, factor * self.change)


class _Steps:
    """What steps of about one size take; see the module docstring.

    plain, extended: how many were measured without and with extra units. since: steps since the last extended one;
    until: as many must be over before the price is looked at again. together: extended ones, none plain between;
    most: of those; owed: plain ones that must come now.
    ratio, pairs: how much longer plain steps took that had another shape than the step before than those that came next
    and had the same. A fit could not tell the change from the units: where there are units, the shape changes.
    """

    __slots__ = ("before", "extended", "fit", "most", "owed", "pairs", "plain", "ratio", "since", "together", "until")

    def __init__(self) -> None:
        self.fit = AffineFit()
        self.plain = self.extended = self.since = self.together = self.owed = 0
        self.ratio, self.pairs = 1.0, 1  # one is assumed
        self.before: float | None = None  # what the step before took, if it was a plain one of another shape
        self.until, self.most = PROBE, PLAIN

    @property
    def change(self) -> float:
        """What another shape costs, as a share of a plain step."""
        return max(0.0, self.ratio - 1.0)

    def price(self, rows: int) -> _Price | None:
        """Of extra units; None before it is known."""
        if self.extended < WARM:
            return None
        return _Price((self.fit.slope("units") or 0.0) / _UNITS, self.change * self.predict(rows))

    def predict(self, rows: int) -> float:
        """Seconds of a step of so many rows and the same shape as before."""
        return self.fit.predict({"rows": rows / _ROWS})

    def observe(self, rows: int, units: float, changed: bool, elapsed: float) -> None:
        before, self.before = self.before, elapsed if changed and not units else None
        usual = elapsed - min(self.change * self.predict(rows), 0.5 * elapsed) if changed else elapsed
        counts: Counts = {"rows": rows / _ROWS, "units": units / _UNITS} if units else {"rows": rows / _ROWS}
        self.fit.observe(counts, usual)
        if units:
            self.extended, self.since, self.together = self.extended + 1, 0, self.together + 1
            if self.together >= self.most:
                self.owed, self.most = PAIR, min(2 * self.most, SELDOM)
            return
        self.plain, self.since, self.together = self.plain + 1, self.since + 1, 0
        self.owed = max(0, self.owed - 1)
        if before is not None and not changed:
            self.pairs += 1
            self.ratio += (min(max(0.5, before / elapsed), 2.0) - self.ratio) / min(self.pairs, MEMORY)


class ExtraUnits:
    """Chooses how many extra units each member of a step gets, and learns what they cost."""

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}  # by the power of two that is above the number of rows
        self._total = self._units = 0.0  # of the last step: all units, and the extra ones

    def seconds(self, rows: int, units: float) -> float:
        """Learned seconds that so many extra units take in such a step; 0.0 before it is known."""
        steps = self._steps.get(rows.bit_length())
        price = steps.price(rows) if steps is not None and units else None
        return 0.0 if price is None else price.unit * units

    def observe(self, rows: int, tokens: float, units: float, elapsed: float) -> None:
        """A step took so long: so many rows that got their next token, tokens of prompts, and extra units. A time that
        is not finite or not above zero, as a coarse clock shows, is ignored."""
        changed = rows + tokens + units != self._total
        self._total, self._units = rows + tokens + units, units
        if rows and not tokens and 0.0 < elapsed < inf:
            self._steps.setdefault(rows.bit_length(), _Steps()).observe(rows, units, changed, elapsed)

    def choose(self, rows: int, asked: Sequence[Chances], most: float, seconds: float) -> list[int]:
        """How many extra units each gets. asked: their chances, descending; rows: of the step, theirs and others'.
        most, seconds: units and time that are left for all of them."""
        steps = self._steps.get(rows.bit_length())
        if steps is None or steps.plain < WARM or steps.owed or seconds <= 0.0:
            return [0] * len(asked)
        price, base = steps.price(rows), steps.predict(rows)
        if price is None:  # at most as dear as a row by itself
            return _first(asked, HOPE, min(most, max(4, rows), seconds * rows / base))
        left = min(most, (seconds - price.change) / max(1e-12, price.unit))
        n = self._best(asked, rows, base, price.times(MARGIN), left)
        if n:
            steps.until = PROBE
        elif steps.since >= steps.until:
            steps.until = min(2 * steps.until, RAREST)
            n = self._best(asked, rows, base, price.times(OPTIMISM), left)
        return _first(asked, 0.0, n)

    def _best(self, asked: Sequence[Chances], rows: int, base: float, price: _Price, most: float) -> int:
        """The number of units, the likeliest ones, that makes the rate of useful ones largest.

        A step of another shape pays for the change. So does the first step after the extra units end; where they begin,
        that is counted with them, or they would be granted where they pay only as long as they go on.
        """
        same = self._total - rows if self._units else 0.0
        once = price.change * (2.0 if self._total == rows else 1.0)
        offers = sorted([chance for chances in asked for chance in chances], reverse=True)
        if len(offers) > most:
            del offers[max(0, int(most)) :]
        found, rate, useful, seconds = 0, rows / base, float(rows), base + once
        for n, chance in enumerate(offers, 1):
            useful += chance
            seconds += price.unit
            now = useful / (seconds - price.change if n == same else seconds)
            if now > rate:
                found, rate = n, now
            elif chance < price.unit * rate and n > same:
                break  # with any more it only falls
        return found


def _first(asked: Sequence[Chances], least: float, most: float) -> list[int]:
    """The likeliest units, at most so many, of those whose chance is at least so large."""
    counts = [0] * len(asked)
    if most < 1.0:
        return counts
    offers = sorted([(-chance, i) for i, chances in enumerate(asked) for chance in chances if chance >= least])
    for _, i in offers[: int(most)]:
        counts[i] += 1
    return counts
