"""A circuit breaker: opens a slot that crashes too often (it gets no requests), and closes it after a clean probe.

Two tests decide. The count of crashes in a row is fast if nothing works. An e-process on the crash rate notices a slot
that fails sometimes (at 20 % a run of five takes 3,900 calls), and moves its callers to the other slot. A drained slot
is probed, one routing key at a time, because only a clean answer can close it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import ceil, exp, log
from typing import Any, Final

RATE: Final = 0.01  # an acceptable crash rate
ALPHA: Final = 1e-3
ALTERNATIVES: Final = (3 * RATE, 0.05, 0.1, 0.2, 0.5, 0.9)
CHANCE: Final = 1e-9  # probability of taking a run of bad requests for crashes of the slot
LEAST: Final = 3  # crashes since the ratios were last at the floor, needed for an alarm
_GAIN: Final = [log(p / RATE) for p in ALTERNATIVES]
_PRICE: Final = [log((1.0 - p) / (1.0 - RATE)) for p in ALTERNATIVES]
_FLOOR: Final = log(ALPHA)


class CrashEvidence:
    """Evidence that calls crash more often than `RATE`: a bet that wins at a crash and loses at a clean call.

    It is the mean of one likelihood ratio for each rate in `ALTERNATIVES`. If calls crash at `RATE` or less, in any
    pattern, each ratio is a supermartingale, so from a fresh start it ever reaches 1/alpha with probability alpha.

    Without a floor its logarithm goes to minus infinity on a clean slot, and a fault that begins after 100,000 calls
    would first have to win all of that back. So every ratio has a **floor at alpha**: M ← max(M·L, alpha). Then
    M(t) − alpha·t is a supermartingale (Shin, Ramdas and Rinaldo, E-detectors), and by optional stopping the mean
    number of calls to a false alarm is at least (1/alpha − 1)/alpha: a million calls at alpha = 1/1000, guaranteed for
    every pattern; within n calls an alarm is false with probability at most alpha·(1 + alpha·n). A floor at 1 (CUSUM)
    would notice a 20 % rate 16 calls sooner, but guarantees 999 calls only, and at exactly 1 % drains a slot every
    14,000 calls. A fresh start begins at 1, above the floor: a new version is watched more closely.

    crashes: since every ratio was last at the floor.
    """

    def __init__(self) -> None:
        self._log = [0.0] * len(ALTERNATIVES)
        self._at_floor = False
        self.crashes = 0

    def crashed(self) -> None:
        self._log = [m + gain for m, gain in zip(self._log, _GAIN, strict=True)]
        self._at_floor = False
        self.crashes += 1

    def clean(self, calls: int = 1) -> None:
        """Add calls without a crash."""
        if self._at_floor:
            return
        self._log = [max(m + calls * price, _FLOOR) for m, price in zip(self._log, _PRICE, strict=True)]
        if max(self._log) <= _FLOOR:
            self._at_floor, self.crashes = True, 0

    @property
    def log_e(self) -> float:
        """Natural logarithm of the evidence now; never below ln alpha."""
        top = max(self._log)
        return top + log(sum(exp(m - top) for m in self._log) / len(self._log))

    @property
    def alarmed(self) -> bool:
        """Whether the evidence is sufficient now: 1/alpha is reached, with at least `LEAST` crashes."""
        return self.crashes >= LEAST and self.log_e >= -_FLOOR


class Poison:
    """The share of bad requests in a slot: those that fail while other clients are answered, over about 64 requests.

    A failure counts only after another client was answered: a slot without any answers shows nothing.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._failed = 0  # since another client was answered
        self._client: Hashable = None  # the one whose request failed last

    def failed(self, client: Hashable) -> None:
        self._failed += 1
        self._client = client

    def answered(self, client: Hashable) -> None:
        if self._failed and client != self._client:
            self.share = 1.0 - (1.0 - self.share) * (1.0 - 1.0 / 64.0) ** self._failed
            self._failed = 0
        self.share -= self.share / 64.0


class _Circuit:
    """The state of one slot; closed at first.

    count: crashes in a row. opened: when it was opened (drained); None while closed. by_rate: whether the evidence
    opened it. probe: the routing key that is served as a test.
    """

    def __init__(self, cooldown: float) -> None:
        self.count = 0
        self.evidence = CrashEvidence()
        self.opened: float | None = None
        self.by_rate = False
        self.cooldown, self.retry_at = cooldown, 0.0
        self.probe: str | None = None
        self.why = ""

    @property
    def verdict(self) -> str:
        """ok, drained, or probing while a probe is out."""
        return "ok" if self.opened is None else "drained" if self.probe is None else "probing"


class Breaker:
    """Decides whether a slot gets requests: one slot, or two that replace each other. Pure; used on one thread.

    A slot opens at `max_consecutive` crashes in a row, or, while another slot can take over, when the evidence on its
    crash rate is sufficient. For an unbroken run only the counter decides, so that ten in a row are allowed if the
    setting is ten. 0 disables the breaker; crashes are still counted.

    Closing: when an open slot has waited for `cooldown` seconds, one key is served there as a probe. Its clean answer
    closes the slot and resets count, evidence and cool-down. A crash doubles the cool-down, up to `longest`. If the
    probe has no result, the next key is the probe after the cool-down. A crash while no probe is out comes from an
    older queued call, and changes nothing. A clean answer of such a call closes a slot that a run opened (the run is
    over), but not one that the evidence opened: at 20 % most calls are clean.
    """

    def __init__(
        self, slots: Sequence[str], max_consecutive: int = 5, cooldown: float = 30.0, longest: float = 480.0
    ) -> None:
        self.max_consecutive, self.cooldown, self.longest = max_consecutive, cooldown, longest
        self._slots = {name: _Circuit(cooldown) for name in slots}
        self._other = dict(zip(slots, reversed(slots), strict=True))

    def crashed(self, slot: str, now: float, poison: float = 0.0) -> bool:
        """Count a call of the slot in which no item succeeded. True if it opened the slot.

        poison: the share of requests that failed lately while others were answered, in [0, 1). A call of only such
        requests is no evidence of a crash rate, so a longer run is needed.
        """
        state = self._slots[slot]
        state.count += 1
        if state.opened is None:
            if poison < RATE:
                state.evidence.crashed()
            return self._opens(slot, now, ceil(log(CHANCE) / log(poison)) if poison > 0.0 else 0)
        if state.probe is not None:
            state.probe = None
            state.cooldown = min(2.0 * state.cooldown, self.longest)
            state.retry_at = now + state.cooldown
        return False

    def answered(self, slot: str) -> bool:
        """Count a clean call of the slot, whatever the size of its batch. True if it closed the slot."""
        state = self._slots[slot]
        state.count = 0
        if state.opened is None:
            state.evidence.clean()
            return False
        if state.by_rate and state.probe is None:
            return False
        self.reset(slot)
        return True

    def place(self, slot: str, key: str, now: float) -> str | None:
        """The slot that serves a request with this routing key: `slot`, the other one, or None (degraded).

        The probe's key keeps its slot until the probe ends or is replaced. With both open each has its own probes.
        """
        state = self._slots[slot]
        if state.opened is None:
            return slot
        if now >= state.retry_at:
            state.probe, state.retry_at = key, now + state.cooldown
            return slot
        if state.probe == key:
            return slot
        other = self._other[slot]
        return other if self._slots[other].opened is None else None

    def reset(self, slot: str) -> None:
        """Close the slot and forget its crashes."""
        self._slots[slot] = _Circuit(self.cooldown)

    def count(self, slot: str) -> int:
        """Crashes of the slot in a row."""
        return self._slots[slot].count

    def why(self, slot: str) -> str:
        """Why the slot is open; "" while it is closed."""
        return self._slots[slot].why

    @property
    def verdict(self) -> str:
        """ok, drain-a, drain-b (`drain-` and the open slot's name), or degraded: no slot is left."""
        drained = [name for name, state in self._slots.items() if state.opened is not None]
        if not drained:
            return "ok"
        return "degraded" if len(drained) == len(self._slots) else f"drain-{drained[0]}"

    @property
    def verdicts(self) -> dict[str, str]:
        """Each slot: ok, drained, or probing while a probe of it is out."""
        return {name: state.verdict for name, state in self._slots.items()}

    def snapshot(self, now: float) -> dict[str, Any]:
        """JSON-safe. Of an open slot also why, for how long, and the time until the next probe."""
        return {
            "verdict": self.verdict,
            "max_consecutive": self.max_consecutive,
            "slots": {
                name: {
                    "verdict": state.verdict,
                    "consecutive": state.count,
                    "log_e": round(state.evidence.log_e, 3),
                    "why": state.why or None,
                    "open_s": None if state.opened is None else round(now - state.opened, 3),
                    "retry_in_s": None if state.opened is None else round(max(0.0, state.retry_at - now), 3),
                    "cooldown_s": state.cooldown,
                }
                for name, state in self._slots.items()
            },
        }

    def _opens(self, slot: str, now: float, least: int) -> bool:
        """Open the slot if its crashes suffice. least: crashes in a row that are needed, if above the setting."""
        state, other = self._slots[slot], self._slots[self._other[slot]]
        evidence, replaced = state.evidence, other is not state and other.opened is None
        if self.max_consecutive == 0:
            return False
        if state.count >= max(self.max_consecutive, least):
            state.why = f"{state.count} calls crashed in a row"
        elif replaced and evidence.crashes > state.count and evidence.alarmed:
            state.by_rate = True
            state.why = f"crash rate above {RATE:.0%}: {evidence.crashes} crashes, e-value {exp(evidence.log_e):.3g}"
        else:
            return False
        state.opened, state.retry_at = now, now + state.cooldown
        return True
