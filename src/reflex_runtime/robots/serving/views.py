"""What can be asked of a policy server with GET: health, settings, metrics, diagnostics, and the live view."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from reflex_runtime.observe import metrics
from reflex_runtime.observe.live import Live, own_process
from reflex_runtime.robots import PolicySpec
from reflex_runtime.robots.policy.spec import WIRES, WireMap
from reflex_runtime.robots.serving.handler import RequestHandler
from reflex_runtime.robots.serving.observation_reader import ObservationReader
from reflex_runtime.robots.serving.question import ACT, LEROBOT, OIP
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.robots.serving.served import ServedPolicy
from reflex_runtime.settings.declare import settings
from reflex_runtime.version import __version__
from reflex_runtime.web.errors import NotFound
from reflex_runtime.web.fields import encode
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route
from reflex_runtime.web.watchers import Watchers


class Views:
    """What can be asked of one policy with GET."""

    def __init__(self, handler: RequestHandler) -> None:
        self.runtime, self._handler = handler.runtime, handler
        self.routes = [
            Route("/health", self.health, open=True),
            Route("/healthz", self.healthz, open=True),
            Route("/metrics", self.metrics, open=True),
            Route("/config", self.configuration),
            Route("/diagnostics/cost-model", self.cost_model, operators=True),
            Route("/diagnostics/rollout", self.rollout, operators=True),
            Route("/diagnostics/shadow", self.shadow, operators=True),
        ]

    async def health(self, request: HttpRequest) -> HttpResponse:
        """200 only when ready."""
        return _health(self.runtime, self._handler.served.health, _policy_in(self._handler.served, self.runtime.loaded))

    async def healthz(self, request: HttpRequest) -> HttpResponse:
        """The same in a word, as clients of openpi ask for it."""
        return _ready(self._handler.served.health)

    async def configuration(self, request: HttpRequest) -> HttpResponse:
        """The export's configuration, what each wire expects, and the settings in force."""
        body = self.configuration_of(self._handler.served) | {
            "server": settings(self._handler.served.config) | self.runtime.listening,
            "reflex_version": __version__,
        }
        return HttpResponse(200, encode(body))

    def configuration_of(self, served: ServedPolicy) -> dict[str, Any]:
        """What /config says of one policy."""
        loaded, spec = self.runtime.loaded, served.spec
        return {
            "export": dict(spec.config),
            "wires": {name: _expected(name, spec) for name in WIRES},
            "policy": served.policy.describe() if loaded else None,
            "slots": {name: slot.policy.describe() for name, slot in served.slots.items()} if loaded else None,
        }

    async def metrics(self, request: HttpRequest) -> HttpResponse:
        """Prometheus text."""
        if self.runtime.loaded:
            self.runtime.batcher.flush()
        return HttpResponse(200, self.runtime.metrics.render(), metrics.CONTENT_TYPE.encode())

    async def cost_model(self, request: HttpRequest) -> HttpResponse:
        """Every key the cost model knows, and the milliseconds that a batch may take now."""
        runtime, served = self.runtime, self._handler.served
        runtime.need_policy()
        groups = {name: slot.group for name, slot in served.slots.items()}
        slots, states = runtime.batcher.device.input(
            lambda scheduler, now: (
                {name: scheduler.cost_model(group).snapshot() for name, group in groups.items()},
                scheduler.snapshot()["groups"],
            )
        )
        budgets = {name: round(states[group]["max_batch_cost"] * 1e3, 3) for name, group in groups.items()}
        told = {"cost_model": served.config.cost_model, "max_batch_cost_ms": budgets, "slots": slots}
        return HttpResponse(200, encode(told))

    async def rollout(self, request: HttpRequest) -> HttpResponse:
        """Split, breakers, outcomes, the comparison, the ramp and what has changed."""
        body = self._handler.served.rollout.snapshot(time.monotonic())
        body["versions"] = {name: slot.version.name for name, slot in self._handler.served.slots.items()}
        return HttpResponse(200, encode(body))

    async def shadow(self, request: HttpRequest) -> HttpResponse:
        """How far the shadow's actions are from the served ones."""
        if self._handler.served.shadow is None:
            raise NotFound("no shadow is served; start the server with --shadow-policy DIR")
        return HttpResponse(200, encode(dict(self._handler.served.shadow.snapshot())))


class ServerViews(Views):
    """The same for a server of several policies, where none is named: what is of the whole server, and of each policy.

    What only one policy can answer is the default's, or 422.
    """

    async def health(self, request: HttpRequest) -> HttpResponse:
        """200 while any policy is ready."""
        runtime = self.runtime
        policies = {
            name: {"state": served.health, **_policy_in(served, runtime.loaded)}
            for name, served in runtime.policies.items()
        }
        return _health(runtime, runtime.health, {"policies": policies})

    async def healthz(self, request: HttpRequest) -> HttpResponse:
        """The same in a word."""
        return _ready(self.runtime.health)

    async def configuration(self, request: HttpRequest) -> HttpResponse:
        """Of every policy its configuration and its settings, and the server's own."""
        body = {
            "policies": {
                name: self.configuration_of(served) | {"settings": settings(served.config), "weight": served.weight}
                for name, served in self.runtime.policies.items()
            },
            "server": settings(self.runtime.config) | self.runtime.listening,
            "reflex_version": __version__,
        }
        return HttpResponse(200, encode(body))


# -- the parts of /health ----------------------------------------------------------------------------------------------


def _health(runtime: PolicyRuntime, state: str, of_policies: Mapping[str, Any]) -> HttpResponse:
    body: dict[str, Any] = {
        "status": "ok" if state == "ready" else state,
        "state": state,
        "model_loaded": runtime.loaded,
        "robot_id": runtime.config.robot_id or None,
        **of_policies,
        **_process_of(runtime),
    }
    return HttpResponse(200 if state == "ready" else 503, encode(body))


def _policy_in(served: ServedPolicy, loaded: bool) -> dict[str, Any]:
    breaker, shadow, latency = served.rollout.breaker, served.shadow, served.config.inject_latency_ms
    slots: dict[str, Any] = {
        slot: {"verdict": verdict, "consecutive_crashes": breaker.count(slot)}
        for slot, verdict in breaker.verdicts.items()
    }
    if shadow is not None:
        slots["shadow"] = {"verdict": shadow.verdict, "why": shadow.stopped or None}
    told: dict[str, Any] = {
        "inference_mode": served.policy.spec.inference_mode if loaded else None,
        "export_dir": served.spec.source,
        "consecutive_crashes": max(breaker.count(slot) for slot in served.served),
        "max_consecutive_crashes": served.config.max_consecutive_crashes,
        "verdict": breaker.verdict,
        "slots": slots,
    }
    if served.faults or latency:
        told["injected"] = {"faults": served.faults, "latency_ms": latency}
    return told | _objective_in(served)


def _objective_in(served: ServedPolicy) -> dict[str, Any]:
    return {} if served.slo is None else {"slo": {"violated": served.slo.violated, "value_ms": served.slo.value_ms}}


def _process_of(runtime: PolicyRuntime) -> dict[str, Any]:
    told: dict[str, Any] = {"error": runtime.error} if runtime.error else {}
    if (parent := runtime.parent) is not None:
        told |= {"restarts": parent.lives.restarts, "last_exit": parent.lives.last_exit}
        if parent.own_urls:
            told |= {"worker": parent.number, "workers": parent.own_urls}
    if runtime.loaded:
        told["hung_batches"] = runtime.batcher.device.hung
    if (recorder := runtime.recorder) is not None:
        told["recording"] = {
            "recorded": recorder.recorded,
            "dropped": recorder.dropped,
            "cpu_s": round(recorder.cpu, 6),
            "file": None if recorder.path is None else str(recorder.path),
            "error": None if recorder.error is None else str(recorder.error),
        }
    if runtime.trace is not None and runtime.trace.error is not None:
        told["trace_error"] = str(runtime.trace.error)
    return told


def _ready(health: str) -> HttpResponse:
    ready = health == "ready"
    return HttpResponse(200 if ready else 503, b"OK\n" if ready else b"not ready\n", b"text/plain; charset=utf-8")


def _expected(name: str, spec: PolicySpec) -> dict[str, Any]:
    """The observation that a wire expects. One of LeRobot has a number for each motor, and its robot says of which
    policy it is."""
    own = WireMap(prompt="instruction") if name in (ACT, OIP) else spec.wires.get(name)
    found = ObservationReader(spec, own).describe()
    if name == LEROBOT:
        found |= {"policy_type": spec.model_type} | ({"prompt": "task"} if spec.takes_text else {})
        if spec.embodiment.state_names and "state" in found and len(found["state"]["names"]) == 1:
            found["state"] = {"names": list(spec.embodiment.state_names), "dim": spec.state_dim}
    return found


# -- the live view -----------------------------------------------------------------------------------------------------


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
    if served.shadow is not None:
        told["shadow"] = dict(served.shadow.snapshot())
    return told | _objective_in(served)
