"""Samples requests for a shadow policy, and measures how far its actions are from the served ones.

Both policies get the same request with the same noise. Only the ids decide which requests are sampled, so a replay
samples the same ones. This module runs nothing; see `shadowing.py`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError

WAITING: Final = 1024  # sampled requests that wait for their other answer


class Sampler:
    """Draws a share of the requests, by SHA-256 of their ids. share: in [0, 1]."""

    def __init__(self, share: float) -> None:
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"--shadow-sample={share:g}: must be in [0, 1]")
        self.share = share

    def takes(self, request_id: str) -> bool:
        """Whether this request is sampled."""
        digest = hashlib.sha256(b"shadow:" + request_id.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") < self.share * 2.0**64


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one shadow chunk is from the served one. Over the places and joints both have.

    mean, largest: of the absolute differences, in the robot's units. per_joint, per_step: means.
    """

    mean: float
    largest: float
    per_joint: tuple[float, ...]
    per_step: tuple[float, ...]

    @classmethod
    def of(cls, served: NDArray[np.float32], shadow: NDArray[np.float32]) -> Difference | None:
        """None when they have nothing in common, or one of them is not finite."""
        steps, joints = min(len(served), len(shadow)), min(served.shape[1], shadow.shape[1])
        apart = np.abs(served[:steps, :joints].astype(np.float64) - shadow[:steps, :joints])
        if not apart.size or not np.isfinite(apart).all():
            return None
        per_joint, per_step = apart.mean(axis=0), apart.mean(axis=1)
        return cls(float(apart.mean()), float(apart.max()), tuple(per_joint.tolist()), tuple(per_step.tolist()))


class ShadowDivergence:
    """Pairs served and shadow answers by request id, in any order, and sums up their differences.

    waiting: most incomplete pairs; beyond it the oldest is given up and counted as unpaired.
    """

    def __init__(self, waiting: int = WAITING) -> None:
        self._waiting = waiting
        self._halves: OrderedDict[str, tuple[bool, NDArray[np.float32]]] = OrderedDict()
        self.compared = self.unpaired = 0
        self._per_joint = self._per_step = np.zeros(0)
        self._largest = 0.0

    def answered(self, request_id: str, actions: NDArray[np.float32], shadow: bool) -> Difference | None:
        """Add one answer; returns the difference if it completes a pair."""
        other = self._halves.pop(request_id, None)
        if other is None or other[0] == shadow:
            self._halves[request_id] = (shadow, actions)
            if len(self._halves) > self._waiting:
                self._halves.popitem(last=False)
                self.unpaired += 1
            return None
        served, its = (other[1], actions) if shadow else (actions, other[1])
        found = Difference.of(served, its)
        if found is None:
            self.unpaired += 1
        else:
            self._add(found)
        return found

    def gone(self, request_id: str) -> None:
        """Give up a pair whose other answer failed or was dropped."""
        if self._halves.pop(request_id, None) is not None:
            self.unpaired += 1

    def _add(self, found: Difference) -> None:
        self.compared += 1
        self._largest = max(self._largest, found.largest)
        self._per_joint = _running(self._per_joint, found.per_joint, self.compared)
        self._per_step = _running(self._per_step, found.per_step, self.compared)

    def snapshot(self) -> dict[str, Any]:
        """Means over all pairs, JSON-safe."""
        return {
            "compared": self.compared,
            "unpaired": self.unpaired,
            "waiting": len(self._halves),
            "largest": self._largest,
            "mean": float(self._per_joint.mean()) if self.compared else None,
            "per_joint": self._per_joint.tolist(),
            "per_step": self._per_step.tolist(),
        }


def _running(mean: NDArray[np.float64], values: Sequence[float], n: int) -> NDArray[np.float64]:
    """The mean with one more row of it; rows of another length are cut or begin anew at 0."""
    row = np.asarray(values)
    if len(mean) != len(row):
        padded = np.zeros(len(row))
        padded[: min(len(mean), len(row))] = mean[: len(row)]
        mean = padded
    return mean + (row - mean) / n
