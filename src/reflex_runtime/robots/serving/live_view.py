"""What a policy server shows to those who watch it: the live fold, its queues, and the rollout of every policy."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from reflex_runtime.observe.live import Live, own_process
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.robots.serving.served import ServedPolicy
from reflex_runtime.version import __version__
from reflex_runtime.web.watchers import Watchers


def watchers_of(runtime: PolicyRuntime) -> Watchers:
    """Those who watch the server. They are sent away when it drains."""
    audience = runtime.audience
    watchers = Watchers(Live, audience.add, audience.remove, partial(_server, runtime))
    runtime.on_drain.append(watchers.close)
    return watchers


def _server(runtime: PolicyRuntime) -> dict[str, Any]:
    if runtime.loaded:
        runtime.batcher.flush()  # events without an answer come with the next answer, or now
    queues: dict[str, Any] = runtime.batcher.device.input(_queues) if runtime.loaded else {}
    waiting = sum(queue["queued"] for queue in queues.values())
    running = sum(queue["unsettled"] for queue in queues.values()) - waiting
    lives = None if runtime.parent is None else runtime.parent.lives
    return {
        "product": "policies",
        "version": __version__,
        "state": runtime.health,
        "error": runtime.error,
        "unit": runtime.config.cost_model,
        "queues": queues,
        "processes": [own_process(runtime.health, lives, running, waiting, runtime.error)],
        "policies": {name: _policy(served) for name, served in runtime.policies.items()},
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
