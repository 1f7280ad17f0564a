"""What came of a replay through a model: each request, each timed batch, and whether they differ."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

COSINE = 0.999  # at least, of recorded and replayed actions
MAX_ABS = 1e-3  # at most, in the robot's units
LATENCY = 0.05  # by how much the time of batches may differ

Compose = Literal["alone", "recorded"]
Diff = Literal["actions", "latency", "cache"]
DIFFS: tuple[Diff, ...] = get_args(Diff)


@dataclass(slots=True)
class ReplayedRequest:
    """One answered request, recorded against replayed.

    cosine, max_abs: of the actions; max_abs in the robot's units, inf where they have another shape. equal: to the
    last bit. recorded_cache, cache: how the prefix cache answered. composed: it ran in the recorded company throughout.
    error: why there is nothing to compare, else "".
    """

    seq: int
    request_id: str
    slot: str
    cosine: float = 0.0
    max_abs: float = inf
    equal: bool = False
    recorded_cache: str = ""
    cache: str = ""
    composed: bool = False
    error: str = ""

    @property
    def close(self) -> bool:
        """Whether the actions are the same within the bounds."""
        return not self.error and self.cosine >= COSINE and self.max_abs <= MAX_ABS


@dataclass(frozen=True, slots=True)
class Timed:
    """One batch that ran in the same company both times. Seconds."""

    slot: str
    stage: str
    size: int
    recorded: float
    replayed: float


@dataclass(slots=True)
class ModelReplay:
    """The result. left_out: recorded requests that were never answered, by how they ended."""

    compose: Compose
    items: list[ReplayedRequest] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def failed(self, diff: Diff, same_hardware: bool = True) -> bool:
        """Whether the replay differs. Latency counts only on the same hardware. Nothing to compare fails `actions`, and
        not `latency`."""
        if diff == "actions":
            return not self.items or not all(item.close for item in self.items)
        if diff == "cache":
            return any(item.cache != item.recorded_cache for item in self.items if not item.error)
        ratio = self.latency_ratio()
        return same_hardware and ratio is not None and abs(ratio - 1.0) > LATENCY

    def latency_ratio(self, slot: str | None = None) -> float | None:
        """Median of the replayed ÷ median of the recorded batch times; None when no batch ran in the same company both
        times."""
        timed = [t for t in self.timed if slot in (None, t.slot)]
        recorded = median([t.recorded for t in timed]) if timed else 0.0
        return median([t.replayed for t in timed]) / recorded if recorded > 0.0 else None

    def summary(self, slot: str | None = None) -> dict[str, Any]:
        """Figures of one slot, or of all, JSON-safe."""
        items = [item for item in self.items if slot in (None, item.slot)]
        compared = [item for item in items if not item.error]
        kinds = Counter(f"{item.recorded_cache} → {item.cache}" for item in compared)
        timed = [t for t in self.timed if slot in (None, t.slot)]
        return {
            "requests": len(items),
            "actions": {
                "compared": len(compared),
                "close": sum(item.close for item in compared),
                "equal": sum(item.equal for item in compared),
                "composed": sum(item.composed for item in compared),
                "cosine_min": _number(min((i.cosine for i in compared), default=None)),
                "max_abs": _number(max((i.max_abs for i in compared), default=None)),
                "errors": dict(Counter(item.error for item in items if item.error).most_common()),
            },
            "cache": {
                "same": sum(item.cache == item.recorded_cache for item in compared),
                "changes": {kind: n for kind, n in kinds.items() if len(set(kind.split(" → "))) > 1},
            },
            "latency": {
                "batches": len(timed),
                "recorded_ms": _number(median(t.recorded for t in timed) * 1e3 if timed else None),
                "replayed_ms": _number(median(t.replayed for t in timed) * 1e3 if timed else None),
                "ratio": _number(self.latency_ratio(slot)),
            },
        }


def distance(recorded: NDArray[np.float32], replayed: NDArray[Any]) -> tuple[float, float]:
    """(cosine, largest absolute difference) of two chunks of one shape.

    What is not finite must stand in the same places, and is then left out; elsewhere the distance is infinite.
    """
    a, b = recorded.astype(np.float64).ravel(), np.asarray(replayed, np.float64).ravel()
    finite = np.isfinite(a)
    if not (finite == np.isfinite(b)).all() or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return 0.0, inf
    a, b = a[finite], b[finite]
    if not a.size:
        return 1.0, 0.0
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    both_zero = not a.any() and not b.any()
    cosine = 1.0 if both_zero else (float(a @ b) / norms if norms > 0.0 else 0.0)
    return min(1.0, cosine), float(np.abs(a - b).max())


def _number(value: float | None) -> float | None:
    return value if value is None or isfinite(value) else None
