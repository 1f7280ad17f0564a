"""The last observations of each episode, for policies that look at more than the newest one.

What is kept, and when: the observation of a request is kept once its chunk has been computed. So a request that was
refused, shed, cancelled or failed leaves nothing behind, and one that is asked again sees the same past as the first
time. Observations of an episode are in the order in which the server received them, whatever the order in which they
were decoded or answered. An episode belongs to one policy in one slot.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.rtc import EPISODES
from reflex_runtime.web.errors import InvalidRequest

HISTORY_BYTES: Final = 256 << 20
MOMENT_OVERHEAD: Final = 1024  # bytes counted per observation beside its arrays


@dataclass(frozen=True, slots=True, eq=False)
class Glimpse:
    """What one request saw: one observation, without a history axis. Arrays are read only.

    received: orders the observations of an episode; seconds on a clock that all of them share.
    present: whether the image was sent, by name.
    """

    request_id: str
    received: float
    images: Mapping[str, NDArray[np.uint8]]
    present: Mapping[str, bool]
    state: NDArray[np.float32] | None

    @property
    def nbytes(self) -> int:
        size = sum(image.nbytes for image in self.images.values())
        return size + (0 if self.state is None else self.state.nbytes) + MOMENT_OVERHEAD


class ObservationHistory:
    """The newest moments of each episode of one slot. Read on threads that prepare, written on the device thread.

    steps: observations that the policy sees together, >= 2. Episodes that were not asked for longest are forgotten
    beyond `max_bytes` or `episodes`; such an episode goes on as if it began.
    """

    def __init__(self, steps: int, max_bytes: int = HISTORY_BYTES, episodes: int = EPISODES) -> None:
        if not steps >= 2 or not max_bytes >= 1 or not episodes >= 1:
            raise ConfigError(
                f"ObservationHistory: steps={steps!r}, max_bytes={max_bytes!r}, episodes={episodes!r}: "
                "must be >= 2, 1 and 1"
            )
        self.steps, self.max_bytes, self._most = steps, max_bytes, episodes
        self._lock = threading.Lock()
        self._moments: OrderedDict[str, tuple[Glimpse, ...]] = OrderedDict()
        self._bytes = 0
        self.evictions = 0

    def before(self, episode: str, moment: Glimpse) -> tuple[Glimpse, ...]:
        """At most steps − 1 moments that were received before this one, oldest first; none of the request itself."""
        with self._lock:
            kept = self._moments.get(episode, ())
            if kept:
                self._moments.move_to_end(episode)
        past = [one for one in kept if one.request_id != moment.request_id and one.received <= moment.received]
        return tuple(past[1 - self.steps :])

    def remember(self, episode: str, moment: Glimpse) -> None:
        """Keep a moment at its place; it replaces that of the same request."""
        if not episode:
            return
        with self._lock:
            kept = [one for one in self._moments.get(episode, ()) if one.request_id != moment.request_id]
            kept = sorted([*kept, moment], key=lambda one: one.received)
            self._remove(episode)
            # One more than a request looks back to: a request that is asked again must not see less than before.
            self._moments[episode] = tuple(kept[-self.steps :])
            self._bytes += sum(one.nbytes for one in self._moments[episode])
            while self._bytes > self.max_bytes or len(self._moments) > self._most:
                self._remove(next(iter(self._moments)))
                self.evictions += 1

    def forget(self, episode: str) -> None:
        """Forget the episode: it was moved, or starts again."""
        with self._lock:
            self._remove(episode)

    def forget_all(self) -> None:
        """Forget all episodes: they were moved."""
        with self._lock:
            self._moments.clear()
            self._bytes = 0

    def snapshot(self) -> dict[str, int]:
        """JSON-safe."""
        with self._lock:
            return {
                "steps": self.steps,
                "episodes": len(self._moments),
                "bytes": self._bytes,
                "max_bytes": self.max_bytes,
                "evictions": self.evictions,
            }

    def _remove(self, episode: str) -> None:
        for moment in self._moments.pop(episode, ()):
            self._bytes -= moment.nbytes


def together(moments: tuple[Glimpse, ...], steps: int) -> dict[str, Any]:
    """The fields of an `Observation` that have an axis of `steps`: the moments, oldest first, the first one repeated.

    InvalidRequest where a camera's pictures have another size than earlier in the episode.
    """
    moments = (moments[0],) * (steps - len(moments)) + moments
    newest = moments[-1]
    for name, image in newest.images.items():
        if any(moment.images[name].shape != image.shape for moment in moments):
            field = f"images.{name}"
            raise InvalidRequest(f"{field}: another size than earlier in this episode; use a new episode_id", field)
    return {
        "images": {name: np.stack([moment.images[name] for moment in moments]) for name in newest.images},
        "present": {name: tuple(moment.present[name] for moment in moments) for name in newest.present},
        "state": None if newest.state is None else np.stack([moment.state for moment in moments]),  # type: ignore[misc]
    }
