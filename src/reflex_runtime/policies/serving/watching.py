"""What a policy server shows to those who watch it: the live fold, its queues, and the rollout of every policy."""

from __future__ import annotations

import time
from typing import Any

from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.policies.serving.served import ServedPolicy
from reflex_runtime.telemetry.live import Live, LiveSnapshot
from reflex_runtime.version import __version__
from reflex_runtime.web.watchers import Watchers


class Watching:
    """The watchers of one server, and what they are told."""

    def __init__(self, runtime: PolicyRuntime) -> None:
        self._runtime = runtime
        self._live: Live | None = None
        self.watchers = Watchers(self._begin, self._take, self._end)
        runtime.on_drain.append(self.watchers.close)

    def _begin(self) -> None:
        self._live = Live(time.monotonic())
        self._runtime.audience.add(self._live)

    def _end(self) -> None:
        assert self._live is not None
        self._runtime.audience.remove(self._live)
        self._live = None

    def _take(self) -> LiveSnapshot:
        assert self._live is not None
        if self._runtime.loaded:
            self._runtime.batcher.flush()
        return self._live.snapshot(time.monotonic(), self._server())

    def _server(self) -> dict[str, Any]:
        runtime = self._runtime
        return {
            "product": "policies",
            "version": __version__,
            "state": runtime.health,
            "error": runtime.error,
            "unit": runtime.config.cost_model,
            "queues": runtime.batcher.device.input(_queues) if runtime.loaded else {},
            "policies": {name: _policy(served) for name, served in runtime.policies.items()},
            "watchers": len(self.watchers),
            "missed": self.watchers.missed,
        }


def _queues(scheduler: Any, _: float) -> dict[str, Any]:
    return scheduler.snapshot()["groups"]  # type: ignore[no-any-return]


def _policy(served: ServedPolicy) -> dict[str, Any]:
    """The health of one policy, its versions, and how they compare."""
    told = served.rollout.snapshot(time.monotonic())
    told["state"] = served.health
    told["groups"] = {slot.name: slot.group for slot in served.slots.values()}
    told["versions"] = {name: slot.version.name for name, slot in served.slots.items()}
    if served.slo is not None:
        told["slo"] = {"violated": served.slo.violated, "value_ms": served.slo.value_ms}
    if served.shadow is not None:
        told["shadow"] = dict(served.shadow.snapshot())
    return told
