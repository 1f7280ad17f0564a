"""Token budgets by time: step times are learned, and prompts get the time that running sequences leave them.

    T(step) = a + b · rows + c · prompt tokens + d · pairs

rows: sequences that get their next token. pairs: of a new token and an earlier one, as attention computes them. The
time of a step is the gap between two tokens of every running sequence, so its prompt tokens are chosen by that time. A
fixed number of tokens that suits a small model on a GPU makes gaps of ten seconds with a large one on a CPU.

Speculation: a resident may use more units than it wants, each with a chance to be of use. A generated sequence guesses
its next tokens. A step that computes the guesses, too, takes longer, and right ones are tokens without a step of their
own. The extra time is learned for each size of step, because an extra row is nearly free beside one sequence and has
its full price beside many:

    T(step) = fixed + row · rows + unit · extra units

Extra units are granted last, of the rest, and only where they raise the rate of useful units, (rows + Σ chances) / T,
with MARGIN to spare. A CPU chooses its kernels anew when the size of a step changes, which takes up to a fifth of a
step of one sequence. It is a part of the price of a unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, inf, sqrt
from typing import Any

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.cost import WARM_SAMPLES, Tally, TokenCost, TokenTally
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import BUDGET
from reflex_runtime.core.request import URGENT, WAITING, Ticket
from reflex_runtime.core.statistics import AffineFit, Counts

WARM = 3  # steps of a size, without extra units and with them, before they count
MARGIN = 1.25  # times the price that units must bring: learned prices are not exact, and ignore changes of size
HOPE = 0.2  # the chance that is enough to measure a unit's price
PLAIN, SELDOM = 16, 128  # steps with extra units in a row, before one without; doubled each time
PROBE, RAREST = 64, 4096  # steps without extra units until the price is tried again; doubled each time in vain
OPTIMISM = 0.5  # of the learned price is assumed then

_ROWS, _UNITS = 16.0, 16.0  # the fit wants numbers of similar size

Chances = Sequence[float]


class _Steps:
    """The times of steps of about one size.

    plain, extended: number of measured steps without and with extra units. since: steps since the last extended one;
    until: after so many the price is tried again. together: extended steps in a row; most: limit for these, because
    with only extended steps the fit could not tell units from rows.
    """

    def __init__(self) -> None:
        self.fit = AffineFit()
        self.plain = self.extended = self.since = self.together = 0
        self.until, self.most = PROBE, PLAIN

    @property
    def price(self) -> float | None:
        """Seconds of one more extra unit; None before it is known."""
        return None if self.extended < WARM else (self.fit.slope("units") or 0.0) / _UNITS

    def predict(self, rows: int) -> float:
        """Seconds of a step of so many rows."""
        return self.fit.predict({"rows": rows / _ROWS})

    def observe(self, rows: int, units: float, elapsed: float) -> None:
        counts: Counts = {"rows": rows / _ROWS, "units": units / _UNITS} if units else {"rows": rows / _ROWS}
        self.fit.observe(counts, elapsed)
        if units:
            self.extended, self.since, self.together = self.extended + 1, 0, self.together + 1
            return
        if self.together >= self.most:
            self.most = min(2 * self.most, SELDOM)
        self.plain, self.since, self.together = self.plain + 1, self.since + 1, 0


class ExtraUnits:
    """Chooses how many extra units each member of a step gets, and learns their price."""

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}  # by the power of two that is above the number of rows

    def seconds(self, rows: int, units: float) -> float:
        """Learned seconds of so many extra units in such a step; 0.0 before they are learned."""
        steps = self._steps.get(rows.bit_length())
        return 0.0 if steps is None else (steps.price or 0.0) * units

    def observe(self, rows: int, tokens: float, units: float, elapsed: float) -> None:
        """Learn from a step of so many rows, prompt tokens and extra units. A time that is not finite or not above
        zero, as from a coarse clock, is ignored."""
        if rows and not tokens and 0.0 < elapsed < inf:
            self._steps.setdefault(rows.bit_length(), _Steps()).observe(rows, units, elapsed)

    def choose(self, rows: int, asked: Sequence[Chances], most: float, seconds: float) -> list[int]:
        """How many extra units each member gets. asked: for each member, the chances of its units, descending. rows: of
        the whole step. most, seconds: units and time that are left for all of them."""
        steps = self._steps.get(rows.bit_length())
        if steps is None or steps.plain < WARM or steps.together >= steps.most or seconds <= 0.0:
            return [0] * len(asked)
        price, base = steps.price, steps.predict(rows)
        if price is None:  # assume that a unit costs at most as much as a row
            return _first(asked, HOPE, min(most, max(4, rows), seconds * rows / base))
        left = min(most, seconds / max(1e-12, price))
        if n := _best(asked, rows / base, rows, MARGIN * price, left):
            steps.until = PROBE
        elif steps.since >= steps.until:
            steps.until = min(2 * steps.until, RAREST)
            n = _best(asked, rows / base, rows, OPTIMISM * price, left)
        return _first(asked, 0.0, n)


def _best(asked: Sequence[Chances], rate: float, useful: float, price: float, most: float) -> int:
    """How many of the likeliest units give the largest rate of useful units. rate, useful: without any."""
    seconds, found = useful / rate, 0
    for chance in sorted([chance for chances in asked for chance in chances], reverse=True):
        useful, seconds = useful + chance, seconds + price
        if found + 1 > most or useful / seconds <= rate:
            break
        found, rate = found + 1, useful / seconds
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


# -- token budgets by time ---------------------------------------------------------------------------------------------


SHARE = 0.25  # of the time of the rows of a step, that its first prompt gets in any case, so that none waits for ever
SURE = 3.0  # times the spread of measured times that is left free: 99 of 100 steps then keep the gap
COLD = 64.0  # prompt tokens of a step, while too little was measured
COLD_ROWS = 8.0  # and sequences, if a gap is promised
TIMES_FIXED = 8.0  # times its fixed part that a step may take if no gap is given: 1/8 of the time goes to fixed parts
ALONE = 4.0  # times the gap, or the fixed part, that a step of prompts may take while no sequence waits for a token
EVEN = 2.0  # times the time of its rows, that a step may take whatever gap a request has
FIRST_SHARED = 2.0  # times the other rows, that a step may have because one client has more, until learned
SHARED = 2.5  # times the time of the other rows, that a step may take because one client has more rows
LONGEST = 2.0  # seconds of a step because of its fixed part, or because its rows allow a long gap

# The fit wants numbers of similar size: rows, prompt tokens and pairs are counted in these units.
_RUNNING, _TOKENS, _PAIRS = 16.0, 64.0, 2.0**20


class TimedTokens(TokenCost):
    """Grants as many tokens of prompts as keep the gap between two tokens of the sequences that run.

    gap: most seconds; None is `BUDGET`, or `TIMES_FIXED` times the fixed part of a step where that is more, at most
    `LONGEST`. A gap that is given is a promise: no further sequence enters while one more row would break it, unless a
    single row already does. Urgent ones enter beside others, and break it for them, but not for each other.
    A request may have a gap of its own (`Request.max_gap`). Prompts then get the time that the shortest gap of the
    running sequences leaves, but at least as much as those take, and it keeps nobody out: one caller must not stop all
    others. For the same reason a long one makes no step longer than `LONGEST`.
    A step without running sequences may take `ALONE` times as long. inf bounds nothing.
    threshold: see `TokenCost`.
    Units beyond those that sequences want are granted where they pay (`ExtraUnits`), within the gap: at most
    `most_extra` in a step.
    """

    def __init__(self, threshold: float = inf, gap: float | None = None, most_extra: float = inf) -> None:
        super().__init__(threshold)
        if gap is not None and not gap > 0.0:
            raise ConfigError(f"TimedTokens.gap={gap!r}: must be > 0 seconds, or None")
        self._gap = gap
        self._fit = AffineFit()
        # By the power of two above a number of rows: the usual seconds of steps without prompts; how many rows a step
        # may have that clients share. A fit of all steps is too coarse for it: it cannot tell few rows from very few.
        self._plain: dict[int, float] = {}
        self._shared: dict[int, float] = {}
        self._sharing: tuple[int, float] | None = None  # of the step that is formed: its key there, and most seconds
        self.extras, self.most_extra, self.speculates = ExtraUnits(), most_extra, False

    @property
    def measured(self) -> bool:
        """Whether enough steps were measured to predict one."""
        return self._fit.samples >= WARM_SAMPLES

    @property
    def sigma(self) -> float:
        """Relative spread of measured over predicted times."""
        return self._fit.sigma

    @property
    def gap(self) -> float:
        """Seconds that a step with running sequences may take now."""
        return max(BUDGET, min(TIMES_FIXED * self._fit.fixed, LONGEST)) if self._gap is None else self._gap

    def predict(self, rows: float, tokens: float, pairs: float) -> float:
        """Seconds of such a step; see the module docstring."""
        return self._fit.predict(_counts(rows, tokens, pairs))

    def allowed(self, own: float, rows: float, pairs: float) -> float:
        """Seconds of a step of these rows and prompts. own: shortest gap of the rows, inf without rows."""
        gap = self.gap
        if own == inf or not self.measured:
            return gap
        return min(own, max(gap, LONGEST)) if own >= gap else max(own, min(gap, EVEN * self.predict(rows, 0.0, pairs)))

    def most(self, rows: float, tokens: float, pairs: float, past: float, gap: float) -> float:
        """Tokens of a prompt, of which `past` are computed, that may be added to such a step. gap: that is `allowed`.

        The first prompt of a step gets some in any case.
        """
        if self._gap == inf:
            return inf
        if not self.measured:
            return COLD - tokens
        limit = gap * (1.0 if rows else ALONE) / (1.0 + SURE * self.sigma)
        base = self.predict(rows, tokens, pairs)
        if tokens:
            return self._fit_in(limit - base, past)
        return max(1.0, self._fit_in(max(limit - base, (SHARE if rows else ALONE) * base), past))

    def _fit_in(self, seconds: float, past: float) -> float:
        """Tokens of such a prompt that take so long."""
        if seconds <= 0.0:
            return 0.0
        quadratic = 0.5 * (self._fit.slope("pairs") or 0.0) / _PAIRS
        linear = (self._fit.slope("tokens") or 0.0) / _TOKENS + 2.0 * quadratic * past
        return floor(2.0 * seconds / max(1e-12, linear + sqrt(linear * linear + 4.0 * quadratic * seconds)))

    def closed(self, rows: float, pairs: float) -> bool:
        """Whether no further sequence may enter, because one more than so many rows would break the promise."""
        if self._gap is None or self._gap == inf:
            return False
        if not self.measured:
            return rows >= COLD_ROWS
        limit = self._gap / ((1.0 + SURE * self.sigma) * (1.0 + SHARE))
        return self.predict(1.0, 0.0, 0.0) <= limit < self.predict(rows + 1.0, 0.0, pairs)

    def shared(self, rows: int) -> float:
        if not self.measured:
            return inf
        size = rows.bit_length()
        self._sharing = size, SHARED * (self._plain.get(size) or self.predict(rows, 0.0, 0.0))
        return self._shared.setdefault(size, FIRST_SHARED * rows)

    def tally(self) -> Tally:
        return _TimedTokenTally(self)

    def told_apart(self, ticket: Ticket) -> bool:
        return self._fit.ready

    def observe(self, batch: Batch, elapsed: float) -> None:
        rows, tokens, pairs, extra = 0, 0.0, 0.0, batch.extra
        for ticket, units in batch.grants.items():
            computed = ticket.computed
            if extra:
                units -= extra.get(ticket, 0.0)
            pairs += units * (computed + 0.5 * units)
            if units == 1.0 and computed:
                rows += 1
            else:
                tokens += units
        more = sum(extra.values())
        if self.speculates:
            self.extras.observe(rows, tokens, more, elapsed)
        took = elapsed - self.extras.seconds(rows, more)  # without them
        if rows and not tokens and 0.0 < took < inf:
            self._observe_rows(rows, took)
        self._fit.observe(_counts(rows, tokens, pairs), max(took, 0.2 * elapsed))

    def _observe_rows(self, rows: int, took: float) -> None:
        usual = self._plain.setdefault(rows.bit_length(), took)
        self._plain[rows.bit_length()] += 0.2 * (min(took, 1.25 * usual) - usual)  # a stall is not usual
        if self._sharing is not None:
            (size, most), self._sharing = self._sharing, None
            if took > most:
                self._shared[size] *= 0.9
            elif rows > self._shared[size] - 1.0:
                self._shared[size] += max(1.0, 0.05 * rows)

    def snapshot(self) -> list[dict[str, Any]]:
        fit = self._fit
        if not fit.samples:
            return []
        row, token, pair = (1e3 * (fit.slope(kind) or 0.0) for kind in ("rows", "tokens", "pairs"))
        times = {
            "fixed_ms": round(fit.fixed * 1e3, 4),
            "row_ms": round(row / _RUNNING, 6),
            "prompt_token_ms": round(token / _TOKENS, 6),
            "million_pairs_ms": round(1e6 * pair / _PAIRS, 4),
            "gap_ms": round(self.gap * 1e3, 3),
        }
        return [{"samples": fit.samples, "ready": fit.ready} | times]


def _counts(rows: float, tokens: float, pairs: float) -> Counts:
    return {"rows": rows / _RUNNING, "tokens": tokens / _TOKENS, "pairs": pairs / _PAIRS}


class _TimedTokenTally(TokenTally):
    """Counts granted units, and the rows, prompt tokens and pairs of the step. Knows the shortest gap of its rows."""

    def __init__(self, model: TimedTokens) -> None:
        super().__init__(model.threshold, model.sigma)
        self._model = model
        self._rows = self._tokens = self._pairs = 0.0
        self._urgent = 0  # of the rows, and of the members whose prompts are read
        self._read = 0  # members whose prompts are read: rows soon
        self._expected: set[Ticket] = set()
        self._own = inf  # shortest gap of the rows
        self._gap = model.gap  # the seconds that `TimedTokens.allowed` gives for it

    @property
    def seconds(self) -> float:
        model = self._model
        return model.predict(self._rows, self._tokens, self._pairs) if self.cost and model.measured else 0.0

    def expect(self, tickets: Iterable[Ticket]) -> None:
        self._expected.update(tickets)
        self._rows += len(self._expected)
        self._urgent += sum([ticket.tier is URGENT for ticket in self._expected])
        self._pairs += sum([ticket.computed for ticket in self._expected])
        for gap in {ticket.request.max_gap for ticket in self._expected}:
            self._keep(gap)

    def offer(self, ticket: Ticket, budget: float, limit: float = inf) -> float:
        units = super().offer(ticket, budget, limit)
        enters = ticket.state is WAITING
        if units <= 1.0 and ticket.computed and not enters:  # it runs: to leave it out would make its gap longer
            return units
        model, totals = self._model, (self._rows, self._tokens, self._pairs)
        if enters and self._closed(ticket):
            return 0.0
        if not self._read:  # the step has rows only, so far
            self._gap = model.allowed(self._own, self._rows, self._pairs)
        return min(units, model.most(*totals, ticket.computed, self._gap))

    def _closed(self, ticket: Ticket) -> bool:
        """Whether the ticket would break the promise. An urgent one may break it, but not for urgent rows."""
        rows, pairs = self._rows + self._read, self._pairs
        if ticket.tier is URGENT and rows:
            rows, pairs = self._urgent, pairs * self._urgent / rows
        return self._model.closed(rows, pairs)

    def extra(self, tickets: Sequence[Ticket], budget: float) -> Sequence[int]:
        model = self._model
        model.speculates = True
        left = min(self._own, model.gap) / (1.0 + SURE * self.sigma) - self.seconds
        most = min(budget - self.cost, model.most_extra)
        return model.extras.choose(round(self._rows), [ticket.extra for ticket in tickets], most, left)

    def add(self, ticket: Ticket, units: float) -> None:
        super().add(ticket, units)
        if ticket in self._expected:
            return
        self._pairs += units * (ticket.computed + 0.5 * units)
        self._urgent += ticket.tier is URGENT
        if units == 1.0 and ticket.computed:
            self._rows += 1.0
            self._keep(ticket.request.max_gap)
        else:
            self._tokens += units
            self._read += 1

    def _keep(self, own: float | None) -> None:
        """Count the gap of a row; None: the group's."""
        self._own = min(self._own, self._model.gap if own is None else own)
