"""Token budgets by time: how long steps take is learned, and prompts get the time that running sequences leave them.

    T(step) = a + b · rows + c · prompt tokens + d · pairs

rows: sequences that get their next token. pairs: of a new token and one before it, as attention computes them. The time
of a step is the gap between two tokens of every sequence that runs, so its prompt tokens are chosen by that time; a
number of tokens that suits a small model on a GPU makes gaps of ten seconds with a large one on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, inf, sqrt
from typing import Any

from reflex_runtime.core.affine import AffineFit, Counts
from reflex_runtime.core.batch import Batch
from reflex_runtime.core.cost import WARM_SAMPLES, Tally, TokenCost, TokenTally
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.extra import ExtraUnits
from reflex_runtime.core.flush import BUDGET, TIMES_FIXED
from reflex_runtime.core.request import URGENT, WAITING, Ticket

SHARE = 0.25  # of the time of the rows of a step, that its first prompt gets in any case, so that none waits for ever
SURE = 3.0  # times the spread of measured times that is left free: 99 of 100 steps then keep the gap
COLD = 64.0  # prompt tokens of a step, while too little was measured
COLD_ROWS = 8.0  # and sequences, where a gap is promised
ALONE = 4.0  # times the gap, or the fixed part, that a step of prompts may take while no sequence waits for a token
EVEN = 2.0  # times the rows of a step, that it may take whatever gap a request asks for
LONGEST = 2.0  # seconds of a step because of its fixed part, or because its rows allow a long gap

# The fit wants numbers of similar size: rows, prompt tokens and pairs are counted in these units.
_ROWS, _TOKENS, _PAIRS = 16.0, 64.0, 2.0**20


class TimedTokens(TokenCost):
    """Grants as many tokens of prompts as keep the gap between two tokens of the sequences that run.

    gap: seconds, most; None is `BUDGET`, or `TIMES_FIXED` times the fixed part of a step where that is more, at most
    `LONGEST`: then 1/8 of the time goes to fixed parts. A gap that is given is a promise, so no further sequence
    enters while one more row would break it; unless a single row already does. Urgent ones enter beside others, and
    break it for them, but not for each other.
    A request may say a gap of its own (`Request.max_gap`). Prompts then get what the shortest gap of the sequences that
    run leaves, but at least as much time as those take, and it keeps nobody out: one caller must not stop all others.
    For the same reason a long one makes no step longer than `LONGEST`: who comes meanwhile waits for its end.
    A step without running sequences may take `ALONE` times as long. inf bounds nothing.
    See `TokenCost` for threshold.
    Units beyond those that sequences want are granted where they pay (`extra.py`), within the gap: at most `most_extra`
    in a step.
    """

    def __init__(self, threshold: float = inf, gap: float | None = None, most_extra: float = inf) -> None:
        super().__init__(threshold)
        if gap is not None and not gap > 0.0:
            raise ConfigError(f"TimedTokens.gap={gap!r}: must be > 0 seconds, or None")
        self._gap = gap
        self._fit = AffineFit()
        self._extra, self._asked, self._most_extra = ExtraUnits(), False, most_extra

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
        """Seconds that a step may take now beside sequences that run."""
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
        """Whether nobody may enter beside so many rows, because one more would break the promise."""
        if self._gap is None or self._gap == inf:
            return False
        if not self.measured:
            return rows >= COLD_ROWS
        limit = self._gap / ((1.0 + SURE * self.sigma) * (1.0 + SHARE))
        return self.predict(1.0, 0.0, 0.0) <= limit < self.predict(rows + 1.0, 0.0, pairs)

    def extra(self, tickets: Sequence[Ticket], rows: int, seconds: float, units: float, gap: float) -> Sequence[int]:
        """How many extra units each of these members of a step may get. rows: of the step. seconds: that it takes so
        far; units: that the budget leaves. gap: shortest one of the rows."""
        self._asked = True
        left = min(gap, self.gap) / (1.0 + SURE * self.sigma) - seconds
        return self._extra.choose(rows, [ticket.extra for ticket in tickets], min(units, self._most_extra), left)

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
        if self._asked:
            self._extra.observe(rows, tokens, more, elapsed)
        took = elapsed - self._extra.seconds(rows, more)  # without them
        self._fit.observe(_counts(rows, tokens, pairs), max(took, 0.2 * elapsed))

    def snapshot(self) -> list[dict[str, Any]]:
        fit = self._fit
        if not fit.samples:
            return []
        row, token, pair = (1e3 * (fit.slope(kind) or 0.0) for kind in ("rows", "tokens", "pairs"))
        times = {
            "fixed_ms": round(fit.fixed * 1e3, 4),
            "row_ms": round(row / _ROWS, 6),
            "prompt_token_ms": round(token / _TOKENS, 6),
            "million_pairs_ms": round(1e6 * pair / _PAIRS, 4),
            "gap_ms": round(self.gap * 1e3, 3),
        }
        return [{"samples": fit.samples, "ready": fit.ready} | times]


def _counts(rows: float, tokens: float, pairs: float) -> Counts:
    return {"rows": rows / _ROWS, "tokens": tokens / _TOKENS, "pairs": pairs / _PAIRS}


class _TimedTokenTally(TokenTally):
    """Counts granted units, and the rows, prompt tokens and pairs of the step. Knows the shortest gap of its rows."""

    __slots__ = ("_expected", "_gap", "_model", "_own", "_pairs", "_read", "_rows", "_tokens", "_urgent")

    def __init__(self, model: TimedTokens) -> None:
        super().__init__(model.threshold)
        self._model = model
        self._rows = self._tokens = self._pairs = 0.0
        self._urgent = 0  # of the rows, and of the members whose prompts are read
        self._read = 0  # members whose prompts are read: rows soon
        self._expected: set[Ticket] = set()
        self._own = inf  # shortest gap of the rows, and what is `allowed`
        self._gap = model.gap

    @property
    def seconds(self) -> float:  # type: ignore[override]
        model = self._model
        return model.predict(self._rows, self._tokens, self._pairs) if self.cost and model.measured else 0.0

    @property
    def sigma(self) -> float:  # type: ignore[override]
        return self._model.sigma

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
        """Whether it would break the promise. An urgent ticket may, but not for urgent rows."""
        rows, pairs = self._rows + self._read, self._pairs
        if ticket.tier is URGENT and rows:
            rows, pairs = self._urgent, pairs * self._urgent / rows
        return self._model.closed(rows, pairs)

    def extra(self, tickets: Sequence[Ticket], budget: float) -> Sequence[int]:
        return self._model.extra(tickets, round(self._rows), self.seconds, budget - self.cost, self._own)

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
        """A row has that gap of its own; None: it has the group's."""
        self._own = min(self._own, self._model.gap if own is None else own)
