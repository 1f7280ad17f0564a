"""`reflex tune`: the budget, hold and size that would serve a recorded load best, and their predicted effect.

The load and the device are those of a journal (`recorded.py`, `MeasuredDevice`); the scheduler is the real one, in
virtual time. The present settings are simulated, too. The prediction is the *change* between the two simulations,
applied to the measured figures, so that an error of both, such as a missing network, has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Literal, NamedTuple

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.journal import Journal
from reflex_runtime.sim.recorded import (
    Changes,
    MeasuredDevice,
    ObservedLoad,
    RecordedSteps,
    flush_of,
    observe,
    scheduler_of,
)
from reflex_runtime.sim.report import Report, columns, doubt, ms
from reflex_runtime.sim.run import Ran, RequestEnd, Run, simulate

Aim = Literal["p50", "p95", "p99", "throughput", "on-time"]

BUDGETS: Final = tuple(ms / 1e3 for ms in (10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000))
HOLDS: Final = (0.0, 0.002, 0.005, 0.010, 0.030, inf)
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LONG: Final = 20.0  # seconds at least for which a steady load is simulated
MOST: Final = 2_500  # requests of one simulated run, about
LEAST: Final = 2.0  # seconds of one simulated run, at least, if the recording is as long
SEEDS: Final = 3  # simulated runs of each setting that may be proposed
WORTH: Final = 0.05  # share by which a setting must be better to be proposed
SPARED: Final = 0.01  # share by which each changed setting must improve the result to be kept
MISSED: Final = 0.01  # with more late requests than this share, `on-time` is the default aim
LOSS: Final = 0.05  # share by which p99 may get worse; throughput may get worse by half of it
SATURATED: Final = 0.95  # from this busy share on the device counts as saturated
IDLE: Final = 0.10  # up to this busy share there counts as no load


class Knobs(NamedTuple):
    """The settings that are tuned, in seconds and requests. hold: inf is the server's default."""

    budget: float
    hold: float
    size: int

    def flags(self, before: Knobs) -> list[str]:
        """The flags of `reflex serve` that differ from `before`."""
        flags = []
        if self.budget != before.budget:
            flags.append(f"--max-batch-cost-ms {self.budget * 1e3:g}")
        if self.hold != before.hold and self.hold < inf:
            flags.append(f"--batch-timeout-ms {self.hold * 1e3:g}")
        if self.size != before.size:
            flags.append(f"--max-batch-size {self.size}")
        return flags

    def in_words(self) -> str:
        """The settings as a text."""
        hold = "hold by default" if self.hold == inf else f"hold ≤ {self.hold * 1e3:g} ms"
        return f"budget {self.budget * 1e3:g} ms, {hold}, size ≤ {self.size}"


class TunedFigures(NamedTuple):
    """The figures of a setting. Seconds, answers/s, shares. on_time: answered, within the limit if any. batch: mean."""

    p50: float
    p95: float
    p99: float
    throughput: float
    on_time: float
    batch: float
    busy: float

    def of(self, aim: Aim) -> float:
        """The figure of this aim; smaller is better."""
        if aim == "throughput":
            return -self.throughput
        return 1.0 - self.on_time if aim == "on-time" else float(getattr(self, aim))


@dataclass(frozen=True, slots=True)
class TriedKnobs:
    """A setting and its simulated figures. figures: means over the seeds. each: those of every seed."""

    knobs: Knobs
    figures: TunedFigures
    each: Sequence[TunedFigures]


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result. aim: the figure that was improved. measured: the figures of the journal. before, after: simulated, of
    the present and the proposed settings; equal if nothing helps. why: one sentence on why nothing helps, else empty.
    """

    aim: Aim
    load: ObservedLoad
    measured: TunedFigures
    before: TriedKnobs
    after: TriedKnobs
    why: str

    @property
    def predicted(self) -> TunedFigures:
        """The measured figures after the simulated change: multiplied by its ratio, `on_time` by its difference."""
        measured, before, after = self.measured, self.before.figures, self.after.figures

        def ratio(name: str) -> float:
            real, old, new = (float(getattr(figures, name)) for figures in (measured, before, after))
            return real * new / old if old > 0.0 else new

        predicted = {name: ratio(name) for name in ("p50", "p95", "p99", "throughput", "batch", "busy")}
        predicted["on_time"] = min(1.0, max(0.0, measured.on_time + after.on_time - before.on_time))
        return TunedFigures(**{**predicted, "busy": min(1.0, predicted["busy"])})

    @property
    def doubt(self) -> str:
        """Why the prediction is not reliable; "" if it is."""
        simulated, measured = self.before.figures, self.measured
        return doubt((simulated.p50, measured.p50), (simulated.throughput, measured.throughput))


class Tuner:
    """The simulations of one journal. progress: called with (done, None) runs, at the end with (done, done).

    ConfigError if its schedule cannot be replayed, or its groups have different settings.
    """

    def __init__(
        self,
        journal: Journal,
        progress: Callable[[int, int | None], None] = lambda *_: None,
    ) -> None:
        self.journal, self._progress = journal, progress
        scheduler_of(journal)  # raises if it cannot be replayed
        self.load = observe(journal)
        self.present = present(journal)
        self._device = MeasuredDevice(journal.batches, journal.warm.values())
        self._found: dict[tuple[Knobs, int], TunedFigures] = {}
        self._reached: dict[Knobs, tuple[float, int]] = {}  # predicted seconds and size of the largest batches
        self._runs = 0
        span = max(self.load.span, LONG) if self.load.steady else self.load.span
        rate = len(self.load.requests) / self.load.span
        self._span = min(span, max(LEAST, MOST / rate))
        self.warmup = min(1.0, 0.1 * self._span)

    def figures(self, knobs: Knobs, seed: int = 0) -> TunedFigures:
        """The figures of one run, simulated once."""
        if (knobs, seed) in self._found:
            return self._found[knobs, seed]
        self._runs += 1
        self._progress(self._runs, None)
        budget = None if knobs.budget == self.present.budget else knobs.budget  # it may depend on the fixed part
        run = simulate(
            scheduler_of(self.journal, Changes(budget, knobs.hold, knobs.size)),
            self.load.parts,
            self._device,
            duration=self._span,
            warmup=self.warmup,
            seed=seed,
            outcome=RecordedSteps(self.journal),
            between=self.load.between,
        )
        expected, sizes = (b.expected for b in run.batches), (b.size for b in run.batches)
        self._reached[knobs] = max(expected, default=0.0), max(sizes, default=0)
        found = self._found[knobs, seed] = figures_of(Report.of(run))
        return found

    def tried(self, knobs: Knobs) -> TriedKnobs:
        """Simulate a setting with every seed."""
        each = [self.figures(knobs, seed) for seed in range(SEEDS)]
        mean = TunedFigures(*(sum(values) / len(each) for values in zip(*each, strict=True)))
        return TriedKnobs(knobs, mean, each)

    def measured(self) -> TunedFigures:
        """The figures of the journal itself, without its warm-up if it is long enough. Latency is from the request at
        the server to the answer."""
        first, span = self.load.requests[0].came, self.load.span
        run = Run(self.warmup * (self.warmup < 0.5 * span), span)
        for one in self.load.requests:
            if one.outcome != "cancelled":
                came, limit = one.came - first, one.request.time_limit
                limit = inf if limit is None else limit
                run.answers.append(RequestEnd(one.request, came, came + one.served, one.outcome, limit, 0.0))
        run.batches += [Ran(b.at - first, b.elapsed, b.size, 0.0, b.cause) for b in self.journal.batches]
        return figures_of(Report.of(run))

    def tune(self, aim: Aim | None = None) -> Tuning:
        """Search one setting after another, twice; then simulate the best with every seed. aim: by default on-time if
        requests miss their deadlines, else p95. ConfigError if no request was answered: there is nothing to compare."""
        measured = self.measured()
        if measured.p50 <= 0.0 and measured.throughput <= 0.0:
            raise ConfigError(f"{self.journal.path}: none of its requests was answered; record a load that is")
        before = self.tried(self.present)
        missed = 1.0 - before.figures.on_time
        chosen: Aim = aim or ("on-time" if missed > MISSED else "p95")
        best = self._search(chosen)
        after = self.tried(best)
        if not self._better(chosen, before, after):
            after = before
        why = "" if after is not before else self._why(before.figures)
        self._progress(self._runs, self._runs)
        return Tuning(chosen, self.load, measured, before, after, why)

    def _search(self, aim: Aim) -> Knobs:
        base = best = self.present
        allowed = self.figures(base)

        def least(candidates: Iterable[Knobs], now: Knobs) -> Knobs:
            found, at = now, self.figures(now).of(aim)
            for knobs in candidates:
                figures = self.figures(knobs)
                if figures.of(aim) < at - 1e-12 and _acceptable(figures, allowed, aim):
                    found, at = knobs, figures.of(aim)
            return found

        for _ in range(2):
            last = best
            best = least((best._replace(hold=hold) for hold in HOLDS), best)
            best = least(self._budgets(best), best)
            best = least(self._sizes(best), best)
            if best == last:
                break
        return self._fewest(base, best, aim)

    def _budgets(self, now: Knobs) -> list[Knobs]:
        """Other budgets that change a batch: those below the longest batch, and larger ones if the budget is reached.

        Not those that allow only one request: nothing is learned from batches of one.
        """
        longest, _ = self._reached[now]
        least = max(self._device.usual(2), BUDGETS[0])
        reached = longest > 0.8 * now.budget
        found = [b for b in BUDGETS if least <= b < longest or (reached and b > now.budget)]
        return [now._replace(budget=budget) for budget in found]

    def _sizes(self, now: Knobs) -> list[Knobs]:
        """Other sizes that change a batch, as for budgets."""
        _, largest = self._reached[now]
        found = [n for n in SIZES if n < largest or (largest >= now.size and n > now.size)]
        return [now._replace(size=size) for size in found]

    def _fewest(self, base: Knobs, best: Knobs, aim: Aim) -> Knobs:
        """Go back to the present value of each setting whose change hardly matters."""
        allowed = self.figures(base)
        for name in Knobs._fields:
            back = best._replace(**{name: getattr(base, name)})
            now, then = self.figures(best).of(aim), self.figures(back).of(aim)
            if back != best and then <= now + SPARED * abs(now) and _acceptable(self.figures(back), allowed, aim):
                best = back
        return best

    def _better(self, aim: Aim, before: TriedKnobs, after: TriedKnobs) -> bool:
        """Whether the gain is large enough, and positive with every seed."""
        gain = before.figures.of(aim) - after.figures.of(aim)
        least = MISSED if aim == "on-time" else WORTH * abs(before.figures.of(aim))
        each = zip(before.each, after.each, strict=True)
        better = gain >= least and all(b.of(aim) > a.of(aim) for b, a in each)
        return better and _acceptable(after.figures, before.figures, aim)

    def _why(self, now: TunedFigures) -> str:
        """Why nothing helps."""
        count = len({knobs for knobs, _ in self._found})
        if now.busy >= SATURATED:
            return (
                f"the device is saturated: it runs {now.busy:.0%} of the time, and none of {count} settings is better "
                f"by {WORTH:.0%}. A faster model, another device or fewer requests would help"
            )
        if now.busy <= IDLE:
            return (
                f"there is no load: the device runs {now.busy:.1%} of the time, so hardly any request waits for "
                "another one. The latency is the model's own time"
            )
        return f"none of {count} settings is better by {WORTH:.0%}: the present ones suit this load"


def _acceptable(figures: TunedFigures, allowed: TunedFigures, aim: Aim) -> bool:
    """Whether the figures besides that of the aim are not much worse than the allowed ones."""
    return (
        (aim == "on-time" or figures.p99 <= allowed.p99 * (1.0 + LOSS))
        and figures.throughput >= allowed.throughput * (1.0 - 0.5 * LOSS)
        and figures.on_time >= allowed.on_time - 0.005
    )


def present(journal: Journal) -> Knobs:
    """The settings of a journal. ConfigError if its groups have different ones."""
    found = set()
    for name, info in journal.groups.items():
        flush = flush_of(name, info)
        if any(flush.hold_max):
            raise ConfigError(f"{journal.path}: its batches were sent by a rule that reflex serve does not have")
        if info.weight > 0.0:  # a shadow, of weight 0, may have others
            found.add(Knobs(flush.max_batch_cost, flush.returns, flush.max_batch_size))
    if len(found) != 1:
        raise ConfigError(
            f"{journal.path}: its policies have different settings of batches; tune them one by one, each with a "
            "recording of its own"
        )
    return found.pop()


def figures_of(report: Report) -> TunedFigures:
    """The figures of a simulated run."""
    return TunedFigures(
        report.p50 or 0.0, report.p95 or 0.0, report.p99 or 0.0, report.throughput,
        1.0 if report.on_time is None else report.on_time, report.batch_size or 0.0, min(1.0, report.busy),
    )  # fmt: skip


def text_of(tuning: Tuning, present: str, source: str) -> str:
    """The result as text. present: the settings of the journal, in words. source: name of the journal."""
    load, before, after = tuning.load, tuning.before, tuning.after
    lines = [
        f"{source}: {len(load.requests)} requests in {load.span:.1f} s",
        f"load      {load.text()}",
        f"now       {present}",
        f"aim       {tuning.aim}",
    ]
    if tuning.doubt:
        lines.append(f"warning   {tuning.doubt}")
    rows = _rows({"measured": tuning.measured, "simulated": before.figures})
    if tuning.why:
        lines += ["", columns(rows[0], rows[1:]), "", f"Nothing to change: {tuning.why}."]
        return "\n".join(lines)
    simulated = {"simulated now": before.figures, "simulated then": after.figures}
    rows = _rows({"measured": tuning.measured, "predicted": tuning.predicted} | simulated)
    flags = after.knobs.flags(before.knobs)
    if after.knobs.hold != before.knobs.hold and after.knobs.hold == float("inf"):
        flags.append("and no --batch-timeout-ms")
    lines += [] if tuning.doubt else [f"set       {' '.join(flags)}"]
    lines += ["", columns(rows[0], rows[1:])]
    return "\n".join(lines)


def _rows(found: dict[str, TunedFigures]) -> list[list[str]]:
    cells: list[tuple[str, Callable[[TunedFigures], str]]]
    cells = [("latency p50, ms", lambda f: ms(f.p50)), ("latency p95, ms", lambda f: ms(f.p95))]
    cells += [("latency p99, ms", lambda f: ms(f.p99)), ("answers/s", lambda f: f"{f.throughput:.1f}")]
    cells += [("not answered in time", lambda f: f"{1.0 - f.on_time:.1%}"), ("batch size", lambda f: f"{f.batch:.1f}")]
    cells += [("device busy", lambda f: f"{f.busy:.0%}")]
    return [["", *found], *([name, *(cell(figures) for figures in found.values())] for name, cell in cells)]
