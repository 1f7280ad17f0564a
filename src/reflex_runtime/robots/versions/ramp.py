"""The ramp: raises b's share in stages, or rolls back, by a guard on its answers.

Every decision has the numbers that it was made from, so that the log says why.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.statistics import percentile
from reflex_runtime.robots.versions.comparison import wilson
from reflex_runtime.robots.versions.slo import Objective
from reflex_runtime.settings.declare import seconds

LEAST_BAD: Final = 3  # failures; one or two may be chance
BEYOND_CHANCE: Final = 2.326348  # standard deviations: 99 %, one-sided
_ERROR: Final = re.compile(r"error=([0-9]{1,2}(?:\.[0-9]{1,6})?)%")
_LONGEST: Final = 720 * 3600.0

State = Literal["running", "finished", "rolled_back"]


@dataclass(frozen=True, slots=True)
class RampGuard:
    """The limits of b; None is no limit.

    percentile: in (0, 100), of the latency of its 200s, at most limit_s seconds. error_rate: share of its answers that
    failed by the model's fault, in [0, 1).
    """

    percentile: float | None = None
    limit_s: float | None = None
    error_rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> RampGuard:
        """From `p99=150ms,error=1%`; either part alone will do. ConfigError names flag, value and format."""
        percentile = limit = rate = None
        for part in text.split(","):
            latency, error = Objective.read(part), _ERROR.fullmatch(part.strip())
            if latency is not None and percentile is None:
                percentile, limit = latency.percentile, latency.limit
            elif error is not None and rate is None:
                rate = float(error[1]) / 100.0
            else:
                raise ConfigError(
                    f"--guard={text!r:.200}: must be pNN=MSms, error=R% or both with a comma, NN in (0, 100), a limit"
                    " > 0 in ms or s, R in [0, 100), such as p99=150ms,error=1%",
                    field="guard",
                )
        return cls(percentile, limit, rate)


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of a ramp. share: b's percent from now on. numbers: JSON-safe, the reasons for it."""

    at: float
    action: Literal["advance", "finish", "hold", "rollback"]
    share: int
    why: str
    numbers: dict[str, float] = field(default_factory=dict)


class GuardWatch:
    """Compares the last answers of a slot with a guard.

    window: number of most recent answers. least: answers needed before it may trigger (200s for the latency).

    It triggers when the share of bad answers (failed, or slower than the limit) is above the guard's limit and chance
    cannot explain it: by the 99 % Wilson bound, and with at least three bad answers. It is checked every second. With
    the plain share of the window, a version that fails half as often as allowed would be rolled back in nine ramps of
    ten (12,000 answers, limit 1 %); with this rule in 2 %. One that fails at 5 % is noticed as soon, after 50 answers.
    """

    def __init__(self, guard: RampGuard, window: int = 500, least: int = 30) -> None:
        self.guard, self.least = guard, least
        self._answers: deque[tuple[bool, float]] = deque(maxlen=window)

    def add(self, ok: bool, latency: float) -> None:
        """One answer: a 200 with its latency in seconds, or one that failed by the model's fault (no latency then)."""
        self._answers.append((ok, latency))

    @property
    def enough(self) -> bool:
        """Whether it has enough answers to decide."""
        return len(self._answers) >= self.least

    def tripped(self) -> str | None:
        """Why, with figures, or None."""
        for why, bad, n, allowed in self._offences():
            if n >= self.least and bad >= LEAST_BAD and wilson(bad, n, BEYOND_CHANCE)[0] > allowed:
                return why
        return None

    def above(self) -> str | None:
        """The limit that the window is above, perhaps by chance, or None. The ramp then stays at its stage."""
        return next((why for why, *_ in self._offences()), None)

    def _offences(self) -> Iterator[tuple[str, int, int, float]]:
        """Every part of the guard that the window is above of: (figures, answers that offend, of, share allowed)."""
        guard, n = self.guard, len(self._answers)
        failed = sum(1 for ok, _ in self._answers if not ok)
        if guard.error_rate is not None and n and failed / n > guard.error_rate:
            why = f"error {failed / n:.2%} ({failed} of {n} answers), limit {guard.error_rate * 100:g}%"
            yield why, failed, n, guard.error_rate
        if guard.percentile is None or guard.limit_s is None:
            return
        value = self._percentile(guard.percentile)
        if value is not None and value > guard.limit_s:
            slow = sum(1 for ok, latency in self._answers if ok and latency > guard.limit_s)
            slower, limit = f"{slow} of {n - failed} answers slower", f"limit {guard.limit_s * 1e3:g} ms"
            why = f"p{guard.percentile:g} {value * 1e3:.1f} ms ({slower}), {limit}"
            yield why, slow, n - failed, 1.0 - guard.percentile / 100.0

    def numbers(self) -> dict[str, float]:
        """JSON-safe figures of the window: answers, error share, and the guarded percentile in ms once there is one."""
        n = len(self._answers)
        found: dict[str, float] = {"answers": n}
        if n:
            found["error_share"] = sum(1 for ok, _ in self._answers if not ok) / n
        if self.guard.percentile is not None:
            value = self._percentile(self.guard.percentile)
            if value is not None:
                found[f"p{self.guard.percentile:g}_ms"] = round(value * 1e3, 3)
        return found

    def _percentile(self, percent: float) -> float | None:
        served = sorted(latency for ok, latency in self._answers if ok)
        return percentile(served, percent / 100.0) if served else None


class Ramp:
    """b's share in stages. Pure: `now` is passed in, in seconds that never go back; `evaluate` is called once a second.

    shares: b's percent in each stage, ascending, in [1, 100]. every: seconds a stage lasts. guard: b is rolled back as
        soon as it triggers.
    least: answers of b that a stage with a guard needs before it may end, because a time without traffic proves
        nothing. Nor does a stage end while b is above a limit of the guard, even if by chance.

    The last stage is watched too; then the ramp is finished and keeps the share. After a roll-back the share stays 0:
    for another attempt start another ramp.
    """

    def __init__(
        self,
        shares: Sequence[int],
        every: float,
        guard: RampGuard | None,
        now: float,
        least: int = 30,
    ) -> None:
        self.shares = tuple(shares)
        self.every, self.guard, self.least = every, guard, least
        self.state: State = "running"
        self.decisions: list[Decision] = []  # at most two a stage
        self._watch = GuardWatch(guard or RampGuard(), least=least)
        self._stage, self._began, self._held, self._seen, self._now = 0, now, False, 0, now
        self.share = self.shares[0]  # b's percent now

    @classmethod
    def shares_of(cls, text: str) -> tuple[int, ...]:
        """The shares in `5,20,50,100`. ConfigError names flag, value and format."""
        parts = [part.strip() for part in text.split(",")]
        whole = all(re.fullmatch(r"[0-9]{1,3}", part) for part in parts)
        shares = tuple(int(part) for part in parts) if whole else ()
        if not shares or not shares[0] >= 1 or shares[-1] > 100 or any(a >= b for a, b in pairwise(shares)):
            raise ConfigError(
                f"--ramp={text!r:.200}: must be ascending whole percents in [1, 100] with commas, such as 5,20,50,100",
                field="ramp",
            )
        return shares

    @classmethod
    def every_of(cls, text: str) -> float:
        """The seconds in `10m`, `90s` or `1.5h`. ConfigError names flag, value and format."""
        every = seconds(text, "s", "m", "h")
        if not 1.0 <= every <= _LONGEST:
            raise ConfigError(
                f"--ramp-every={text!r:.200}: must be a number with s, m or h, from 1s to 720h, such as 10m",
                field="ramp_every",
            )
        return every

    def observe(self, ok: bool, latency: float) -> None:
        """Add an answer of b: a 200 with its latency in seconds, or a failure of the model. Add no other answers."""
        if self.state == "running":
            self._watch.add(ok, latency)
            self._seen += 1

    def evaluate(self, now: float) -> Decision | None:
        """The decision that is due now, if any.

        A stage's time begins at the planned end of the stage before, so a late call makes no stage longer. But each
        stage lasts at least half its time.
        """
        self._now = now
        if self.state != "running":
            return None
        tripped = self._watch.tripped()
        if tripped is not None:
            return self._end("rolled_back", "rollback", f"guard: {tripped}")
        planned = self._began + self.every
        if now < planned:
            return None
        missing = self._missing()
        if missing is not None:
            if self._held:
                return None
            self._held = True
            return self._decide("hold", missing, self._numbers())
        if self._stage + 1 == len(self.shares):
            return self._end("finished", "finish", f"b was watched at {self.share} % for its time")
        return self._advance(planned)

    def roll_back(self, now: float, why: str) -> Decision | None:
        """Roll back for an outside reason (an operator, a drain). None if the ramp has already ended."""
        self._now = now
        return self._end("rolled_back", "rollback", why) if self.state == "running" else None

    def snapshot(self, now: float) -> dict[str, Any]:
        """JSON-safe, as of `now`: state, share, stage, time left, figures, decisions."""
        running = self.state == "running"
        return {
            "state": self.state,
            "share": self.share,
            "shares": list(self.shares),
            "stage": self._stage + 1,
            "every_s": self.every,
            "left_s": round(max(0.0, self._began + self.every - now), 3) if running else 0.0,
            "held": self._held and running,
            "numbers": self._numbers(),
            "decisions": [asdict(decision) for decision in self.decisions],
        }

    def _missing(self) -> str | None:
        """Why the stage may not end yet although its time is over, or None."""
        if self.guard is not None and self._seen < self.least:
            return f"b has had {self._seen} answers in this stage, the guard needs {self.least}"
        above = self._watch.above()
        if above is not None:
            return f"guard: {above}; not beyond chance yet"
        return None

    def _advance(self, planned: float) -> Decision:
        numbers, why = self._numbers(), f"b was watched at {self.share} % for its time"
        self._began = self._now if self._held else max(planned, self._now - self.every / 2.0)
        self._stage, self._held, self._seen = self._stage + 1, False, 0
        self.share = self.shares[self._stage]
        return self._decide("advance", why, numbers)

    def _end(self, state: State, action: Literal["finish", "rollback"], why: str) -> Decision:
        numbers = self._numbers()
        self.state = state
        self.share = 0 if state == "rolled_back" else self.share
        return self._decide(action, why, numbers)

    def _decide(
        self, action: Literal["advance", "finish", "hold", "rollback"], why: str, numbers: dict[str, float]
    ) -> Decision:
        decision = Decision(self._now, action, self.share, why, numbers)
        self.decisions.append(decision)
        return decision

    def _numbers(self) -> dict[str, float]:
        return {"stage_answers": float(self._seen), **self._watch.numbers()}
