"""Faults on purpose, for drills and tests: `--inject-fault SLOT:KIND:RATE[:MS]` and `--inject-latency-ms`.

    raise   the call that holds a marked request raises, so it is repeated in parts until that request stands alone
    nan     a marked request's actions are NaN, as if the model had returned them
    hang    a marked batch hangs for 60 s, then fails
    slow    a marked batch takes 500 ms longer
    die     a marked batch ends the device thread

RATE is a share of requests for raise and nan, of batches for the others. Marks are drawn from the ids alone, so that a
repeated call meets the same fault again and a drill can be repeated exactly.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast, get_args

import numpy as np

from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.errors import ConfigError, ProcessorError, ProcessorHung
from reflex_runtime.robots.policy.observation import ActionChunk
from reflex_runtime.run.processor import Processor, WrappedProcessor

FaultKind = Literal["raise", "nan", "hang", "slow", "die"]
SLOTS: Final = ("prod", "a", "b", "shadow")
_DEFAULT_SECONDS: Final = {"hang": 60.0, "slow": 0.5}


class InjectedDeath(SystemExit):
    """Ends the device thread: no processor error, nothing catches it on the way."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. rate: share of requests or batches in [0, 1]. seconds: how long hang and slow take."""

    slot: str
    kind: FaultKind
    rate: float
    seconds: float = 0.0

    def __str__(self) -> str:
        tail = f":{self.seconds * 1e3:g}" if self.kind in _DEFAULT_SECONDS else ""
        return f"{self.slot}:{self.kind}:{self.rate:g}{tail}"


def parse_fault(text: str) -> Fault:
    """A fault from SLOT:KIND:RATE[:MS]; ConfigError naming the part that is wrong."""

    def wrong(part: str, found: str, expected: str) -> ConfigError:
        return ConfigError(f"--inject-fault {text!r}: {part}: found {found!r}, expected {expected}")

    parts = text.split(":")
    if len(parts) not in (3, 4):
        raise wrong("format", text, "SLOT:KIND:RATE or SLOT:KIND:RATE:MS")
    slot, kind = parts[:2]
    if slot not in SLOTS:
        raise wrong("SLOT", slot, "one of " + ", ".join(SLOTS))
    if kind not in get_args(FaultKind):
        raise wrong("KIND", kind, "one of " + ", ".join(get_args(FaultKind)))
    rate = _number(parts[2])
    if not 0.0 <= rate <= 1.0:
        raise wrong("RATE", parts[2], "a number in [0, 1]")
    seconds = _DEFAULT_SECONDS.get(kind, 0.0)
    if len(parts) == 4:
        if kind not in _DEFAULT_SECONDS:
            raise wrong("MS", parts[3], f"nothing: {kind} takes no time")
        seconds = _number(parts[3]) / 1e3
        if not 0.0 < seconds <= 3600.0:
            raise wrong("MS", parts[3], "a number in (0, 3600000]")
    return Fault(slot, cast("FaultKind", kind), rate, seconds)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


class FaultyProcessor(WrappedProcessor):
    """A processor with faults. It stands between the policy and its guard, so that the guard sees an injected NaN.

    faults: those of this slot. latency: seconds added to every batch (`--inject-latency-ms`). seed: of the draw.
    sleep: waits for `slow` and latency. `release` ends every present and future hang; tests and shutdown set it.
    """

    def __init__(
        self,
        inner: Processor,
        faults: Iterable[Fault] = (),
        latency: float = 0.0,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self.faults, self._latency, self._seed, self._sleep = tuple(faults), latency, seed, sleep
        self.release = threading.Event()

    @property
    def any_thread(self) -> bool:
        """Not with faults: they hang, and end their thread."""
        return not self.faults and super().any_thread

    def run(self, batch: Batch) -> Sequence[Any]:
        if self._latency:
            self._sleep(self._latency)
            batch.notes["injected_ms"] = self._latency * 1e3
        for fault in self.faults:
            self._before(fault, batch)
        results = self._inner.run(batch)
        for fault in self.faults:
            if fault.kind == "nan" and len(results) == len(batch.grants):
                results = [
                    _poisoned(result) if self._marked(fault, ticket.id) else result
                    for ticket, result in zip(batch.grants, results, strict=True)
                ]
        return results

    def _before(self, fault: Fault, batch: Batch) -> None:
        """Faults of the whole call, before it has changed anything."""
        if fault.kind == "raise":
            for ticket in batch.grants:
                if self._marked(fault, ticket.id):
                    raise ProcessorError(f"injected fault {fault}: request {ticket.id!r}")
        elif fault.kind != "nan" and self._marked(fault, str(batch.id)):
            if fault.kind == "die":
                raise InjectedDeath(f"injected fault {fault}")
            if fault.kind == "slow":
                self._sleep(fault.seconds)
            else:
                self.release.wait(fault.seconds)
                # It must not run the batch now: its callers have their error, and another thread may run the device.
                raise ProcessorHung(f"injected fault {fault}: batch {batch.id} hung")

    def _marked(self, fault: Fault, key: str) -> bool:
        """The draw for one request or batch: uniform in [0, 1) by SHA-256, below the rate."""
        text = f"{self._seed}:{fault.slot}:{fault.kind}:{key}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < fault.rate * 2.0**64


def _poisoned(result: Any) -> Any:
    if not (isinstance(result, Done) and isinstance(result.value, ActionChunk)):
        return result
    return Done(replace(result.value, actions=np.full_like(result.value.actions, np.nan)))
