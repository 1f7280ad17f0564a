"""The processor around a policy: the guard of its actions, and injected faults, which the guard sees.

The guard is the last check before actions are sent: they must be finite and within the robot's ranges. Non-finite
actions are an error, or the episode's last good action is held. Never zeros: in absolute joint control zero is a motion
command.

Injected faults, for drills and tests: `--inject-fault SLOT:KIND:RATE[:MS]` and `--inject-latency-ms`.

    raise   the call that holds a marked request raises, so it is repeated in parts until that request stands alone
    nan     a marked request's actions are NaN, as if the model had returned them
    hang    a marked batch hangs for 60 s, then fails
    slow    a marked batch takes 500 ms longer
    die     a marked batch ends the device thread

RATE is a share of requests for raise and nan, of batches for the others. The marks depend on ids alone: a repeated call
meets the same fault again, and a drill can be repeated exactly.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.errors import ConfigError, NonFiniteResult, ProcessorError, ProcessorHung
from reflex_runtime.core.request import Ticket
from reflex_runtime.robots.policy.base import Policy
from reflex_runtime.robots.policy.episodes import Lru
from reflex_runtime.robots.policy.observation import ActionChunk, Observation
from reflex_runtime.robots.policy.spec import Embodiment
from reflex_runtime.run.processor import Processor, may_run_anywhere

# -- the guard ---------------------------------------------------------------------------------------------------------


OnBadAction = Literal["error", "hold"]
_CLEAN: Final[dict[str, Any]] = {"clamped": 0, "joints": [], "held": False}


class ActionGuard:
    """Checks the chunks of one version of a policy, on the device thread. `forget` may be called on any thread.

    embodiment: actions are clamped to its ranges; without ranges they are only checked for non-finite values.
    on_bad_action: "error" fails the request. "hold" answers with the episode's last good action in every step of the
        chunk, and marks the answer; it is an error without an episode or a good action of it. In a relative action
        space a repeated action continues the motion, so "error" is safer there.
    max_episodes: number of episodes whose last action is kept; the least recently used is forgotten.
    """

    def __init__(self, embodiment: Embodiment, on_bad_action: OnBadAction = "error", max_episodes: int = 4096) -> None:
        self.on_bad_action = on_bad_action
        self._ranges, self._names = embodiment.action_ranges, embodiment.action_names
        self._lock = threading.Lock()
        self._last: Lru[str, NDArray[np.float32]] = Lru(max_episodes)

    def check(self, chunk: ActionChunk, episode_id: str) -> ActionChunk:
        """The checked chunk with its report; NonFiniteResult if it must not be sent."""
        actions, report = chunk.actions, _CLEAN
        if (bad := ~np.isfinite(actions)).any():
            return self._hold(chunk, episode_id, bad)
        if self._ranges is not None:
            inside = np.clip(actions, self._ranges[:, 0], self._ranges[:, 1])
            changed = inside != actions
            if changed.any():
                actions, report = inside, self._report(changed)
        self.keep(actions, episode_id)
        return replace(chunk, actions=actions, guard=report)

    def clean(self, chunks: Sequence[ActionChunk]) -> bool:
        """Whether all of these pass `check` unchanged, tested on the whole batch; False may be a false alarm."""
        actions = np.concatenate([chunk.actions for chunk in chunks])
        if self._ranges is None:
            return bool(np.isfinite(actions).all())
        low, high = self._ranges[:, 0], self._ranges[:, 1]
        return bool(((actions >= low) & (actions <= high)).all())  # comparisons with NaN are False

    def keep(self, actions: NDArray[np.float32], episode_id: str) -> None:
        """Keep the episode's last good action, if it may be needed."""
        if self.on_bad_action == "hold" and episode_id:
            with self._lock:
                self._last[episode_id] = actions[-1].copy()

    def forget(self, episode_id: str | None = None) -> None:
        """Forget the last action of an episode, or of all: in another run the arm is elsewhere."""
        with self._lock:
            for one in list(self._last) if episode_id is None else (episode_id,):
                self._last.pop(one, None)

    def _hold(self, chunk: ActionChunk, episode_id: str, bad: NDArray[np.bool_]) -> ActionChunk:
        report = self._report(bad, held=True)
        with self._lock:
            if (last := self._last.get(episode_id)) is not None:
                self._last.move_to_end(episode_id)
        if last is None:
            held = "" if self.on_bad_action == "error" else "; the episode has no good action to hold"
            raise NonFiniteResult(f"the policy's actions are not finite (joints {', '.join(report['joints'])}){held}")
        return replace(chunk, actions=np.broadcast_to(last, chunk.actions.shape).copy(), guard=report)

    def _report(self, bad: NDArray[np.bool_], held: bool = False) -> dict[str, Any]:
        joints = [self._names[j] if self._names else str(j) for j in np.flatnonzero(bad.any(axis=0)).tolist()]
        return {"clamped": int(bad.sum()), "joints": joints, "held": held}


# -- faults ------------------------------------------------------------------------------------------------------------


FaultKind = Literal["raise", "nan", "hang", "slow", "die"]
SLOTS: Final = ("prod", "a", "b", "shadow")
_DEFAULT_SECONDS: Final = {"hang": 60.0, "slow": 0.5}


class InjectedDeath(SystemExit):
    """Ends the device thread: it is no Exception, so that nothing catches it as an error of the processor."""


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


_NUMBER: Final = r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
_FAULT: Final = re.compile(rf"({'|'.join(SLOTS)}):({'|'.join(get_args(FaultKind))}):{_NUMBER}(?::{_NUMBER})?")


def parse_fault(text: str, option: str = "--inject-fault") -> Fault:
    """A fault from SLOT:KIND:RATE[:MS]; ConfigError for a wrong part. option: of the text."""
    slot, kind, rate, ms = found.groups() if (found := _FAULT.fullmatch(text)) else ("", "", "2", None)
    seconds = _DEFAULT_SECONDS.get(kind, 0.0) if ms is None else float(ms) / 1e3
    right = 0.0 < seconds <= 3600.0 if kind in _DEFAULT_SECONDS else ms is None
    if float(rate) > 1.0 or not right:
        slots, kinds = ", ".join(SLOTS), ", ".join(get_args(FaultKind))
        raise ConfigError(
            f"{option}={text!r}: must be SLOT:KIND:RATE, SLOT one of {slots}, KIND one of {kinds}, RATE in "
            f"[0, 1]; {' and '.join(_DEFAULT_SECONDS)} may have :MS, in (0, 3600000]"
        )
    return Fault(slot, cast("FaultKind", kind), float(rate), seconds)


# -- both, around a policy ---------------------------------------------------------------------------------------------


class GuardedProcessor:
    """A processor with injected faults and then the guard, which therefore sees an injected NaN. A chunk that must not
    be sent fails alone. The batch's notes count the chunks that were `clamped`, `held` or `refused`.

    guard: None for none. faults: of this slot; they may change between two batches. latency: seconds added to every
    batch (`--inject-latency-ms`). seed: of the marks. sleep: waits for `slow` and latency. release: ends every hang.
    """

    def __init__(
        self, inner: Processor, guard: ActionGuard | None = None, faults: Sequence[Fault] = (), latency: float = 0.0,
        seed: int = 0, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._inner, self.repeatable, self.guard, self.faults = inner, inner.repeatable, guard, faults
        self.start, self.drop, self.stop = inner.start, inner.drop, inner.stop
        self._latency, self._seed, self._sleep = latency, seed, sleep
        self.release = threading.Event()

    @property
    def any_thread(self) -> bool:
        """Whether any thread may run it: not with faults, which may hang or end the thread."""
        return not self.faults and may_run_anywhere(self._inner)

    def run(self, batch: Batch) -> Sequence[Any]:
        if self._latency:
            self._sleep(self._latency)
            batch.notes["injected_ms"] = self._latency * 1e3
        faults, guard = tuple(self.faults), self.guard
        for fault in faults:
            self._before(fault, batch)
        results = list(self._inner.run(batch))
        if len(results) != len(batch.grants):
            return results
        chunks = {
            ticket: result.value
            for ticket, result in zip(batch.grants, results, strict=True)
            if isinstance(result, Done) and isinstance(result.value, ActionChunk)
        }
        for fault in faults:
            for ticket, chunk in chunks.items():
                if fault.kind == "nan" and self._marked(fault, ticket.id):
                    chunk.actions = np.full_like(chunk.actions, np.nan)
        if guard is None or not chunks:
            return results
        if guard.clean(list(chunks.values())):
            for ticket, chunk in chunks.items():
                chunk.guard = _CLEAN
                guard.keep(chunk.actions, _episode(ticket))
            return results
        checked = {ticket: _checked(guard, ticket, chunk, batch.notes) for ticket, chunk in chunks.items()}
        return [checked.get(ticket, result) for ticket, result in zip(batch.grants, results, strict=True)]

    def _before(self, fault: Fault, batch: Batch) -> None:
        """Inject the faults of the whole call, before it has changed anything."""
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
                # By now the callers have an error, and another thread may run the device: the batch must not run.
                raise ProcessorHung(f"injected fault {fault}: batch {batch.id} hung")

    def _marked(self, fault: Fault, key: str) -> bool:
        """Whether the hash of a request or batch, uniform in [0, 1) by SHA-256, is below the rate."""
        text = f"{self._seed}:{fault.slot}:{fault.kind}:{key}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < fault.rate * 2.0**64


def served_by(
    policy: Policy, guard: ActionGuard | None = None, faults: Iterable[Fault] = (), latency: float = 0.0
) -> GuardedProcessor:
    """The processor that serves a policy. guard: by default that of its embodiment, with errors for bad actions.
    faults: only those of its slot are used."""
    mine = [fault for fault in faults if fault.slot == policy.slot]
    return GuardedProcessor(policy, guard or ActionGuard(policy.spec.embodiment), mine, latency)


def _checked(guard: ActionGuard, ticket: Ticket, chunk: ActionChunk, notes: dict[str, Any]) -> Done | NonFiniteResult:
    try:
        checked: Done | NonFiniteResult = Done(chunk := guard.check(chunk, _episode(ticket)))
        report = chunk.guard or _CLEAN
        note = "held" if report["held"] else "clamped" if report["clamped"] else ""
    except NonFiniteResult as error:
        checked, note = error, "refused"
    if note:  # added up, because a batch that is repeated in parts has several calls
        notes[note] = notes.get(note, 0) + 1
    return checked


def _episode(ticket: Ticket) -> str:
    observation = ticket.request.payload
    return observation.episode_id if isinstance(observation, Observation) else ""
