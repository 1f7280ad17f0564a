"""The latency objective: a percentile over served requests, and what to do when it is violated.

Rejections never count as fast samples. Checked every 32 samples and every second; cleared after three checks below
0.8 × the limit.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from dataclasses import dataclass

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.events import Event, RequestAnswered
from reflex_runtime.core.statistics import percentile
from reflex_runtime.settings.declare import one_line, seconds

log = logging.getLogger("reflex.slo")


@dataclass(frozen=True, slots=True)
class Objective:
    """percentile in (0, 100), limit in seconds."""

    percentile: float
    limit: float

    @classmethod
    def read(cls, text: str) -> Objective | None:
        """From `p99=150ms`; None for any other text."""
        name, _, time = text.strip().partition("=")
        rank = re.fullmatch(r"p([0-9]{1,2}(?:\.[0-9]{1,6})?)", name)
        limit = seconds(time, "ms", "s")
        return cls(float(rank[1]), limit) if rank is not None and float(rank[1]) > 0 and limit > 0 else None

    @classmethod
    def parse(cls, text: str) -> Objective:
        """The same; ConfigError names flag, value and format."""
        if (found := cls.read(text)) is None:
            raise ConfigError(
                f"--slo={one_line(text)}: must be pNN=MSms with NN in (0, 100) and a limit > 0, such as p99=150ms"
            )
        return found


class SloTracker:
    """Follows one objective: a sink. violated: whether it is now.

    prefix: what the slots begin with whose answers count.
    """

    events = frozenset({RequestAnswered})

    WINDOW, EVERY, PERIOD, CLEAR, CHECKS, ADMIT = 1000, 32, 1.0, 0.8, 3, 10

    def __init__(self, objective: Objective, mode: str, prefix: str = "") -> None:
        self.objective, self._prefix = objective, prefix
        self.mode = mode
        self.violated = False
        self.value = 0.0
        self._samples: deque[float] = deque(maxlen=self.WINDOW)
        self._since = 0
        self._checked_at = 0.0
        self._good = 0
        self._asked = 0

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
        """The percentile now, in milliseconds."""
        return round(self.value * 1e3, 3)

    def admits(self) -> bool:
        """Whether the next request may enter; in mode 503 one in ten does while violated, so that it can clear."""
        if not self.violated or self.mode != "503":
            return True
        self._asked += 1
        return self._asked % self.ADMIT == 0

    def check(self, now: float) -> None:
        """Check the percentile. Call it every second; `served` calls it too."""
        self._since, self._checked_at = 0, now
        if not self._samples:
            return
        self.value = percentile(sorted(self._samples), self.objective.percentile / 100.0)
        limit = self.objective.limit
        if self.value > limit:
            self._good = 0
            if not self.violated:
                self.violated = True
                log.warning("slo violated: p%g is %.1f ms, limit %.1f ms", *self._numbers())
        elif self.value < self.CLEAR * limit:
            self._good += 1
            if self._good >= self.CHECKS and self.violated:
                self.violated = False
                log.warning("slo met again: p%g is %.1f ms, limit %.1f ms", *self._numbers())
        else:
            self._good = 0

    def _numbers(self) -> tuple[float, float, float]:
        return self.objective.percentile, self.value * 1e3, self.objective.limit * 1e3
