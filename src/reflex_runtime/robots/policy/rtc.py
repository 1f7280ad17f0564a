"""Real-time chunking: the next chunk continues the one that the robot still executes.

The new chunk is anchored, at every denoise step, to the part of the episode's last chunk that the robot has not
executed yet. Its first actions, which run while the new chunk is computed, are frozen; the weight then falls along a
schedule up to the horizon (after Black et al., "Real-Time Execution of Action Chunking Flow Policies", 2025; anchored
here by in-painting along the flow, because an exported graph has no gradient to guide by).

A tail (the rest of a chunk) belongs to one (slot, episode): for another robot or version it would be a jump.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, expm1
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.robots.policy.lru import Lru

Schedule = Literal["ZEROS", "ONES", "LINEAR", "EXP"]
EPISODES: Final = 4096  # tails remembered, a chunk of floats each


@dataclass(frozen=True, slots=True)
class Rtc:
    """How chunks are joined.

    horizon: actions of the new chunk that the old one may reach, >= 1. schedule: how its weight falls between the
    frozen ones and the horizon: ZEROS at once, ONES not at all, LINEAR, EXP (faster at first).
    """

    schedule: Schedule = "LINEAR"
    horizon: int = 10

    def weights(self, frozen: int, overlap: int, chunk_size: int) -> NDArray[np.float32]:
        """Weight of the old chunk at each place of the new one, float32 [chunk_size, 1], never rising.

        frozen: places executed before the new chunk arrives. overlap: places the old chunk still covers; beyond both
        it and the horizon the weight is 0.
        """
        end = min(self.horizon, overlap, chunk_size)
        start = min(frozen, end)
        weights = np.zeros((chunk_size, 1), np.float32)
        weights[:start] = 1.0
        fall = np.linspace(1.0, 0.0, end - start + 2, dtype=np.float32)[1:-1, None]
        if self.schedule == "ONES":
            fall = np.ones_like(fall)
        elif self.schedule == "ZEROS":
            fall = np.zeros_like(fall)
        elif self.schedule == "EXP":
            fall = fall * np.expm1(fall) / np.float32(expm1(1.0))
        weights[start:end] = fall
        return weights


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """The old actions that a new chunk is pulled towards. In the model's units; arrays are read only.

    target: float32 [chunk_size, x_dim], the old chunk moved to the new one's places. weights: as `Rtc.weights`.
    state: the state that the old actions are changes of, in the robot's units; None if they are no changes.
    report: for the answer, JSON-safe.
    """

    target: NDArray[np.float32]
    weights: NDArray[np.float32]
    report: dict[str, Any]
    state: NDArray[np.float32] | None = None

    def pull(self, x: NDArray[np.float32], noise: NDArray[np.float32], time: float) -> NDArray[np.float32]:
        """x at flow time `time` (0 noise, 1 action), its anchored places on the straight path from noise to target."""
        path = np.float32(1.0 - time) * noise + np.float32(time) * self.target
        return self.weights * path + (np.float32(1.0) - self.weights) * x  # exact where the weight is 0 or 1


@dataclass(slots=True)
class _Tail:
    actions: NDArray[np.float32]
    answered: float
    latency: float
    state: NDArray[np.float32] | None


class ChunkTails:
    """The last chunk of each episode of one slot, longest unused forgotten. Read on the loop, written on the device.

    control_hz: actions that the robot executes a second. If None, the request must give the number of executed actions,
    and no action is frozen unless it says how many.
    """

    def __init__(
        self, rtc: Rtc, clock: Callable[[], float], control_hz: float | None = None, episodes: int = EPISODES
    ) -> None:
        self.rtc, self.control_hz = rtc, control_hz
        self._clock = clock
        self._lock = threading.Lock()
        self._tails: Lru[str, _Tail] = Lru(episodes)

    def __len__(self) -> int:
        return len(self._tails)

    def remember(
        self, episode: str, actions: NDArray[np.float32], latency: float, state: NDArray[np.float32] | None = None
    ) -> None:
        """Keep the episode's newest chunk. actions: float32 [chunk_size, x_dim]; a non-finite one is not kept.

        latency: seconds from its arrival to its end, the estimate for the next one. state: as in `Anchor`.
        """
        if not episode or not np.isfinite(actions).all():
            return
        with self._lock:
            self._tails[episode] = _Tail(actions, self._clock(), latency, state)

    def forget(self, episode: str) -> None:
        """Forget the episode's chunk: the episode was moved or starts again."""
        with self._lock:
            self._tails.pop(episode, None)

    def forget_all(self) -> None:
        """Forget all chunks: the episodes were moved."""
        with self._lock:
            self._tails.clear()

    def anchor(
        self, episode: str, executed: int | None, delay: int | None = None, received: float | None = None
    ) -> Anchor | None:
        """The anchor for the episode's next chunk; None if it has no last chunk, or all of it was executed.

        executed: actions of the last chunk that were executed before this observation. If absent, they are those of the
        time from the last answer until this observation was received (now, if None): as if the robot began a chunk when
        it was answered and never stood still. delay: actions that are executed until the new chunk arrives. If absent,
        they are those of the time that the last chunk took. Both need a control rate.
        """
        with self._lock:
            tail = self._tails.get(episode)
        if tail is None:
            return None
        done = executed
        if done is None:
            if self.control_hz is None:
                return None
            at = self._clock() if received is None else received
            done = max(0, int((at - tail.answered) * self.control_hz))
        size = len(tail.actions)
        overlap = size - done
        if overlap <= 0:
            return None
        if delay is None:
            delay = max(0, ceil(tail.latency * self.control_hz)) if self.control_hz else 0
        target = np.zeros_like(tail.actions)
        target[:overlap] = tail.actions[done:]
        weights = self.rtc.weights(delay, overlap, size)
        report = {
            "executed": done,
            "overlap": overlap,
            "frozen": int((weights == 1.0).sum()) if self.rtc.schedule != "ONES" else min(delay, overlap),
            "delay": delay,
            "delay_ms": round(tail.latency * 1e3, 3),
            "horizon": self.rtc.horizon,
            "schedule": self.rtc.schedule,
        }
        return Anchor(target, weights, report, tail.state)
