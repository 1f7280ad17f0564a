"""What can be asked of a policy server with GET: health, settings, metrics and diagnostics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from reflex_runtime.observe import metrics
from reflex_runtime.robots.policy.spec import WIRES, PolicySpec, WireMap
from reflex_runtime.robots.serving.handler import RequestHandler
from reflex_runtime.robots.serving.observation_reader import ObservationReader
from reflex_runtime.robots.serving.question import ACT, LEROBOT, OIP
from reflex_runtime.robots.serving.runtime import PolicyRuntime, ServedPolicy
from reflex_runtime.settings.declare import settings
from reflex_runtime.version import __version__
from reflex_runtime.web.errors import NotFound
from reflex_runtime.web.fields import encode
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route


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
        runtime.need_loaded()
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
        **runtime.process_health(),
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
    return told | served.objective


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
