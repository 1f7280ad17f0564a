"""Limits on the answers of a policy: the latency objective of a server, the guard of a version, and the ramp, which
raises b's share in stages, or rolls b back if the guard triggers.

Every decision carries the numbers behind it, for the log.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

from reflex_runtime.core.batch import Event, RequestAnswered
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.statistics import percentile
from reflex_runtime.robots.versions.comparison import wilson
from reflex_runtime.settings.declare import one_line, seconds

log = logging.getLogger("reflex.slo")


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the versions.

    kind: split, drain, return, rollback, ramp, load, guard, shadow; fault and mended at the start and end of a drill.
    numbers: on which it is based, JSON-safe.
    """

    at: float
    kind: str
    why: str
    numbers: dict[str, Any] = field(default_factory=dict)


# -- the latency objective ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit in seconds for a percentile in (0, 100) of the latencies."""

    percentile: float
    limit: float

    @classmethod
    def read(cls, text: str) -> Objective | None:
        """An objective from `p99=150ms`; None for any other text."""
        name, _, time = text.strip().partition("=")
        rank = re.fullmatch(r"p([0-9]{1,2}(?:\.[0-9]{1,6})?)", name)
        limit = seconds(time, "ms", "s")
        return cls(float(rank[1]), limit) if rank is not None and float(rank[1]) > 0 and limit > 0 else None

    @classmethod
    def parse(cls, text: str) -> Objective:
        """The same; ConfigError for any other text."""
        if (found := cls.read(text)) is None:
            raise ConfigError(
                f"--slo={one_line(text)}: must be pNN=MSms with NN in (0, 100) and a limit > 0, such as p99=150ms"
            )
        return found

    def value(self, latencies: Sequence[float]) -> float | None:
        """The percentile of these latencies, in seconds; None without any."""
        return percentile(sorted(latencies), self.percentile / 100.0) if latencies else None


class SloTracker:
    """A sink that follows one objective. prefix: of the slots whose answers count."""

    events = frozenset({RequestAnswered})

    WINDOW, EVERY, PERIOD, CLEAR, CHECKS, ADMIT = 1000, 32, 1.0, 0.8, 3, 10

    def __init__(self, objective: Objective, mode: str, prefix: str = "") -> None:
        self.objective, self.mode, self._prefix = objective, mode, prefix
        self.violated, self.value = False, 0.0
        self._samples: deque[float] = deque(maxlen=self.WINDOW)
        self._since, self._checked_at = 0, 0.0  # samples since the last check, and its time
        self._good = self._asked = 0  # checks in a row that were good; requests while it is violated

    def __call__(self, event: Event) -> None:
        """Count a served answer."""
        if not (isinstance(event, RequestAnswered) and event.slot.startswith(self._prefix)):
            return
        if event.status == 200 and event.served_in is not None:
            self.served(event.served_in, event.at)

    def served(self, latency: float, now: float) -> None:
        self._samples.append(latency)
        self._since += 1
        if self._since >= self.EVERY or now - self._checked_at >= self.PERIOD:
            self.check(now)

    @property
    def value_ms(self) -> float:
        """The percentile at the last check, in milliseconds."""
        return round(self.value * 1e3, 3)

    def admits(self) -> bool:
        """Whether the next request may enter: in mode 503 one in ten while it is violated, so that it can clear."""
        if not self.violated or self.mode != "503":
            return True
        self._asked += 1
        return self._asked % self.ADMIT == 0

    def check(self, now: float) -> None:
        """Check the percentile; called every second, and by `served`."""
        self._since, self._checked_at = 0, now
        if (value := self.objective.value(self._samples)) is None:
            return
        self.value = value
        rank, limit, before = self.objective.percentile, self.objective.limit, self.violated
        self._good = self._good + 1 if value < self.CLEAR * limit else 0
        self.violated = value > limit or (before and self._good < self.CHECKS)
        if self.violated != before:
            what = "violated" if self.violated else "met again"
            log.warning("slo %s: p%g is %.1f ms, limit %.1f ms", what, rank, value * 1e3, limit * 1e3)


# -- the guard of a version --------------------------------------------------------------------------------------------


LEAST_BAD: Final = 3  # failures; one or two may be chance
BEYOND_CHANCE: Final = 2.326348  # standard deviations: 99 %, one-sided
_ERROR: Final = re.compile(r"error=([0-9]{1,2}(?:\.[0-9]{1,6})?)%")


@dataclass(frozen=True, slots=True)
class RampGuard:
    """The limits of a version; None is no limit.

    latency: of answers with status 200. error_rate: share of answers that failed because of the model, in [0, 1).
    """

    latency: Objective | None = None
    error_rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> RampGuard:
        """A guard from `p99=150ms,error=1%` or either part alone; ConfigError for another text."""
        latency = rate = None
        for part in text.split(","):
            found, error = Objective.read(part), _ERROR.fullmatch(part.strip())
            if found is not None and latency is None:
                latency = found
            elif error is not None and rate is None:
                rate = float(error[1]) / 100.0
            else:
                raise ConfigError(
                    f"--guard={text!r:.200}: must be pNN=MSms, error=R% or both with a comma, NN in (0, 100), a limit"
                    " > 0 in ms or s, R in [0, 100), such as p99=150ms,error=1%",
                    field="guard",
                )
        return cls(latency, rate)


class GuardWatch:
    """Compares the last answers of a slot with a guard.

    window: number of most recent answers. least: answers needed before it may trigger (200s for the latency).

    It triggers when the share of bad answers (failed, or slower than the limit) exceeds the guard's limit beyond
    chance: by the 99 % Wilson bound, and with at least three bad answers. It is checked every second. With the share in
    the window alone, a version that fails half as often as allowed would be rolled back in nine ramps of ten (12,000
    answers, limit 1 %); with this rule in 2 %. One that fails at 5 % is noticed as soon, after 50 answers.
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
        """Why it triggers, with figures, or None."""
        for why, bad, n, allowed in self._offences():
            if n >= self.least and bad >= LEAST_BAD and wilson(bad, n, BEYOND_CHANCE)[0] > allowed:
                return why
        return None

    def above(self) -> str | None:
        """The limit that the window exceeds, perhaps by chance, or None. The ramp then stays at its stage."""
        return next((why for why, *_ in self._offences()), None)

    def numbers(self) -> dict[str, float]:
        """JSON-safe figures of the window: answers, error share, and the guarded percentile in ms once there is one."""
        n, served, latency = len(self._answers), self._served(), self.guard.latency
        found: dict[str, float] = {"answers": n}
        if n:
            found["error_share"] = (n - len(served)) / n
        if latency is not None and (value := latency.value(served)) is not None:
            found[f"p{latency.percentile:g}_ms"] = round(value * 1e3, 3)
        return found

    def _served(self) -> list[float]:
        return [latency for ok, latency in self._answers if ok]

    def _offences(self) -> Iterator[tuple[str, int, int, float]]:
        """Each limit of the guard that the window exceeds: (figures, bad answers, of how many, share allowed)."""
        served, n, allowed, latency = self._served(), len(self._answers), self.guard.error_rate, self.guard.latency
        failed = n - len(served)
        if allowed is not None and n and failed / n > allowed:
            yield f"error {failed / n:.2%} ({failed} of {n} answers), limit {allowed * 100:g}%", failed, n, allowed
        if latency is not None and (value := latency.value(served)) is not None and value > latency.limit:
            slow, rank = sum(1 for one in served if one > latency.limit), latency.percentile
            figures = f"{value * 1e3:.1f} ms ({slow} of {len(served)} answers slower)"
            yield f"p{rank:g} {figures}, limit {latency.limit * 1e3:g} ms", slow, len(served), 1.0 - rank / 100.0


# -- the ramp ----------------------------------------------------------------------------------------------------------


LONGEST: Final = 720 * 3600.0
State = Literal["running", "finished", "rolled_back"]


class Ramp:
    """b's share in stages. Pure: `now` is in seconds that never go back; `evaluate` is called once a second.

    shares: b's percent in each stage, ascending, in [1, 100]. every: seconds a stage lasts. guard: b is rolled back as
        soon as it triggers. A stage with a guard needs some answers of b before it may end, because a time without
        traffic proves nothing. Nor does it end while b exceeds a limit of the guard, even if by chance.

    The last stage is watched too; then the ramp is finished and keeps the share. After a rollback the share stays 0.
    """

    def __init__(self, shares: Sequence[int], every: float, guard: RampGuard | None, now: float) -> None:
        self.shares = tuple(shares)
        self.every, self.guard = every, guard
        self.state: State = "running"
        self.decisions: list[Change] = []  # at most two a stage
        self._watch = GuardWatch(guard or RampGuard())
        self._stage, self._began, self._held, self._seen = 0, now, False, 0
        self.share = self.shares[0]  # b's percent now

    @classmethod
    def parse(cls, shares: str, every: str, guard: RampGuard | None, now: float) -> Ramp:
        """A ramp by `--ramp` and `--ramp-every`; ConfigError for a wrong text."""
        return cls(cls.shares_of(shares), cls.every_of(every), guard, now)

    @classmethod
    def shares_of(cls, text: str) -> tuple[int, ...]:
        """The shares in `5,20,50,100`; ConfigError for another text."""
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
        """The seconds in `10m`, `90s` or `1.5h`; ConfigError for another text."""
        every = seconds(text, "s", "m", "h")
        if not 1.0 <= every <= LONGEST:
            raise ConfigError(
                f"--ramp-every={text!r:.200}: must be a number with s, m or h, from 1s to 720h, such as 10m",
                field="ramp_every",
            )
        return every

    def observe(self, ok: bool, latency: float) -> None:
        """Add an answer of b: a 200 with its latency in seconds, or a failure of the model."""
        if self.state == "running":
            self._watch.add(ok, latency)
            self._seen += 1

    def evaluate(self, now: float) -> Change | None:
        """The decision that is due now, if any: advance, finish, hold or rollback, with b's share from now on.

        A stage begins at the planned end of the last one, so a late call makes no stage longer; but each lasts at least
        half its time.
        """
        if self.state != "running":
            return None
        tripped = self._watch.tripped()
        if tripped is not None:
            return self.roll_back(now, f"guard: {tripped}")
        planned = self._began + self.every
        if now < planned:
            return None
        numbers, missing = self._numbers(), self._missing()
        if missing is not None:
            held, self._held = self._held, True
            return None if held else self._decided(now, "hold", missing, numbers)
        why = f"b was watched at {self.share} % for its time"
        if self._stage + 1 == len(self.shares):
            self.state = "finished"
            return self._decided(now, "finish", why, numbers)
        self._began = now if self._held else max(planned, now - self.every / 2.0)
        self._stage, self._held, self._seen = self._stage + 1, False, 0
        self.share = self.shares[self._stage]
        return self._decided(now, "advance", why, numbers)

    def roll_back(self, now: float, why: str) -> Change | None:
        """Roll back, also for an outside reason (an operator, a drain). None if the ramp has ended."""
        if self.state != "running":
            return None
        self.state, self.share = "rolled_back", 0
        return self._decided(now, "rollback", why, self._numbers())

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
        if self.guard is not None and self._seen < self._watch.least:
            return f"b has had {self._seen} answers in this stage, the guard needs {self._watch.least}"
        above = self._watch.above()
        return None if above is None else f"guard: {above}; not beyond chance yet"

    def _decided(self, now: float, what: str, why: str, numbers: dict[str, float]) -> Change:
        self.decisions.append(Change(now, "ramp", f"{what}: {why}", {"share": self.share, **numbers}))
        return self.decisions[-1]

    def _numbers(self) -> dict[str, float]:
        return {"stage_answers": float(self._seen), **self._watch.numbers()}
