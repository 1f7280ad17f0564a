"""Whether a policy that was put into a slot stays there: `--guard` watches it for a time, and may bring back the one
before."""

from __future__ import annotations

import time
from collections.abc import Callable

from reflex_runtime.robots.rollout.ramp import Ramp
from reflex_runtime.robots.rollout.rollout import Rollout
from reflex_runtime.robots.serving.slots import SHADOW
from reflex_runtime.settings import ServeConfig


class KeptExchanges:
    """The exchanged slots of one policy that are watched.

    go_back: puts the version before into a slot again and returns its name; None if there is none. settle: gives that
    version up.
    """

    def __init__(
        self,
        config: ServeConfig,
        rollout: Rollout,
        go_back: Callable[[str], str | None],
        settle: Callable[[str], None],
    ) -> None:
        self._config, self._rollout = config, rollout
        self._go_back, self._settle = go_back, settle
        self._watch_until: dict[str, float] = {}

    def guarded(self, slot: str) -> bool:
        """Whether a guard will watch what is put into this slot."""
        return bool(self._config.guard) and slot != SHADOW

    def exchanged(self, slot: str, version: str, source: str) -> None:
        """A slot has another version: watch it if it is guarded, and note the change."""
        now = time.monotonic()
        if self.guarded(slot):
            self._rollout.watch(slot)
            self._watch_until[slot] = now + Ramp.every_of(self._config.ramp_every)
        numbers = {"slot": slot, "version": version, "path": source}
        self._rollout.changed(now, "load", f"slot {slot} is now {version}", numbers)

    def look(self, now: float) -> None:
        """Call it once a second: go back if a guard tripped, and end watches that have seen enough."""
        for slot in self._rollout.evaluate(now):
            back = self._go_back(slot)
            if back is not None:
                numbers = {"slot": slot, "version": back}
                self._rollout.changed(now, "load", f"slot {slot} is {back} again: the guard tripped", numbers)
        for slot, until in list(self._watch_until.items()):
            if now >= until and self._rollout.watched_enough(slot):
                del self._watch_until[slot]
                self._rollout.unwatch(slot, now)
                self._settle(slot)
