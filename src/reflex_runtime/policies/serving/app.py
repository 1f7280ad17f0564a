"""The application of a policy server: its routes, and the questions that are answered at once.

Every answer carries `X-Request-Id`; every non-2xx body has `error`, `message`, `request_id` and `retry_safe`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from reflex_runtime.config import ServeConfig
from reflex_runtime.options import settings
from reflex_runtime.policies import PolicySpec
from reflex_runtime.policies.export.wires import WireMap
from reflex_runtime.policies.serving import fields as wire
from reflex_runtime.policies.serving import openapi
from reflex_runtime.policies.serving.act import Act
from reflex_runtime.policies.serving.admin import Admin, is_outcome
from reflex_runtime.policies.serving.ask import ACT, OIP, WIRES
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.policies.serving.served import PolicyPlan, ServedPolicy
from reflex_runtime.policies.wires import openpi, vla_eval, xpolicylab
from reflex_runtime.policies.wires.observations import Reading
from reflex_runtime.policies.wires.oip import Sequences
from reflex_runtime.policies.wires.oip_http import OipHttp
from reflex_runtime.policies.wires.openpi import OpenpiSession
from reflex_runtime.policies.wires.vla_eval import VlaEvalSession
from reflex_runtime.policies.wires.xpolicylab import XPolicyLabSession
from reflex_runtime.telemetry import metrics
from reflex_runtime.version import __version__
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import NotFound
from reflex_runtime.web.exchange import OPERATOR_BODY, Exchange, Route
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.openapi import page
from reflex_runtime.web.serve import Make
from reflex_runtime.web.supervisor import Lives
from reflex_runtime.web.websocket import SocketSession

log = logging.getLogger("reflex.server")

OUTCOME: Final = "/episodes/{id}/outcome"


def application(runtime: PolicyRuntime) -> App:
    """The application around one `PolicyRuntime`."""
    config = runtime.config
    asking, admin = Asking(runtime), Admin(runtime.first)
    act, views = Act(asking), Views(runtime, runtime.first)

    def ready(exchange: Exchange) -> None:
        runtime.need_policy()

    most = config.max_body_bytes
    routes = [Route("/act", act.run, "POST", most=most, enter=act.enter, fail=act.fail)]
    routes.append(Route("/reset", act.reset, "POST", most=min(most, OPERATOR_BODY), enter=ready))
    sessions: dict[str, Callable[..., SocketSession]] = dict.fromkeys(openpi.PATHS, OpenpiSession)
    sessions |= {vla_eval.PATH: VlaEvalSession, xpolicylab.PATH: XPolicyLabSession}
    for path, session in sessions.items():
        routes.append(Route(path, _websocket_only, most=most, socket=partial(session, asking)))
    sequences = Sequences()
    oip = OipHttp(asking, most, sequences)
    routes += oip.routes
    for path, view in views.open.items():
        routes.append(Route(path, view, open=True))
    for path, view in views.guarded.items():
        routes.append(Route(path, view))
    operator = min(most, OPERATOR_BODY)
    for path, change in admin.changes.items():
        routes.append(Route(path, change, "POST", changes=True, most=operator, enter=ready))
    outcome = Route(OUTCOME, admin.outcome, "POST", changes=True, most=operator, enter=ready)
    by_path = {route.path: route for route in routes}
    app = App(config, by_path, PLAIN, lambda path: outcome if is_outcome(path) else oip.find(path))
    runtime.on_drain.append(admin.close)
    if config.gr00t:
        _listen_groot(app, asking)
    if config.oip_grpc:
        _listen_oip(app, asking, sequences)
    if config.lerobot:
        _listen_lerobot(app, asking)
    return app


def _listen_groot(app: App, asking: Asking) -> None:
    """Clients of GR00T: what they send waits until there is a policy."""
    from reflex_runtime.policies.wires.groot import GrootSession
    from reflex_runtime.web.zeromq import ZmqListener

    config, session = asking.config, GrootSession(asking, asking.config.gr00t_config)
    listener = ZmqListener(app, "--gr00t", config.gr00t, config.max_body_bytes, session)
    app.listeners.append(listener)
    asking.runtime.when_started(listener.begin)
    log.info("clients of GR00T: %s", listener.address)


def _listen_oip(app: App, asking: Asking, sequences: Sequences) -> None:
    from reflex_runtime.policies.wires.oip_grpc import SERVICE, OipService
    from reflex_runtime.web.grpc_listener import GrpcListener

    service = OipService(asking, sequences)
    listener = GrpcListener(app, "--oip-grpc", asking.config.oip_grpc, asking.config)
    listener.serve(SERVICE, service.methods, {}, service.failed)
    app.listeners.append(listener)
    log.info("clients of OIP over gRPC: %s", listener.address)


def _listen_lerobot(app: App, asking: Asking) -> None:
    from reflex_runtime.policies.wires.lerobot import SERVICE, LerobotService
    from reflex_runtime.web.grpc_listener import GrpcListener

    service = LerobotService(asking, app.bodies)
    listener = GrpcListener(app, "--lerobot", asking.config.lerobot, asking.config)
    listener.serve(SERVICE, service.methods, service.streams, service.failed)
    app.listeners.append(listener)
    asking.runtime.on_drain.append(service.end)
    log.info("clients of LeRobot: %s", listener.address)


def _websocket_only(exchange: Exchange, _: bytes) -> None:
    raise NotFound(f"{exchange.path} is for websockets; docs/wires.md says which protocol it speaks")


def _map_of(name: str, spec: PolicySpec) -> WireMap | None:
    return WireMap(prompt="instruction") if name in (ACT, OIP) else spec.wires.get(name)


def serving(config: ServeConfig, plans: Sequence[PolicyPlan]) -> Make:
    """What `web.serve` makes to serve policies."""

    def make(on_lost: Callable[[], None], lives: Lives | None) -> tuple[App, PolicyRuntime]:
        runtime = PolicyRuntime(config, plans, on_lost)
        runtime.lives = lives
        return application(runtime), runtime

    return make


class Views:
    """What can be asked with GET, each answered at once. open: needs no key; guarded: needs it where there is one."""

    def __init__(self, runtime: PolicyRuntime, served: ServedPolicy) -> None:
        self.runtime, self.served, self.config = runtime, served, served.config
        self._document: tuple[Mapping[str, PolicySpec], bytes] | None = None  # of these exports
        self.open: dict[str, Callable[[Exchange, bytes], None]] = {
            "/health": self.health,
            "/healthz": self.healthz,
            "/metrics": self.metrics,
            "/openapi.json": self.openapi,
            "/docs": self.docs,
        }
        self.guarded: dict[str, Callable[[Exchange, bytes], None]] = {
            "/config": self.configuration,
            "/diagnostics/cost-model": self.cost_model,
            "/diagnostics/rollout": self.rollout,
            "/diagnostics/shadow": self.shadow,
        }

    def health(self, exchange: Exchange, _: bytes) -> None:
        """200 only when ready."""
        runtime, served = self.runtime, self.served
        state, breaker = served.health, served.rollout.breaker
        body: dict[str, Any] = {
            "status": "ok" if state == "ready" else state,
            "state": state,
            "model_loaded": runtime.loaded,
            "inference_mode": served.policy.spec.inference_mode if runtime.loaded else None,
            "export_dir": served.spec.source,
            "consecutive_crashes": max(breaker.count(slot) for slot in served.served),
            "max_consecutive_crashes": self.config.max_consecutive_crashes,
            "robot_id": self.config.robot_id or None,
            "verdict": breaker.verdict,
            "slots": {
                slot: {"verdict": verdict, "consecutive_crashes": breaker.count(slot)}
                for slot, verdict in breaker.verdicts.items()
            },
        }
        if served.shadow is not None:
            body["slots"]["shadow"] = {"verdict": served.shadow.verdict, "why": served.shadow.stopped or None}
        if runtime.error:
            body["error"] = runtime.error
        if runtime.lives is not None:
            body |= {"restarts": runtime.lives.restarts, "last_exit": runtime.lives.last_exit}
        if runtime.loaded:
            body["hung_batches"] = runtime.batcher.device.hung
        if served.faults or self.config.inject_latency_ms:
            body["injected"] = {"faults": served.faults, "latency_ms": self.config.inject_latency_ms}
        if runtime.recorder is not None:
            error = runtime.recorder.error
            body["recording"] = {
                "recorded": runtime.recorder.recorded,
                "dropped": runtime.recorder.dropped,
                "cpu_s": round(runtime.recorder.cpu, 6),
                "file": None if runtime.recorder.path is None else str(runtime.recorder.path),
                "error": None if error is None else str(error),
            }
        if served.slo is not None:
            body["slo"] = {"violated": served.slo.violated, "value_ms": served.slo.value_ms}
        if runtime.trace is not None and runtime.trace.error is not None:
            body["trace_error"] = str(runtime.trace.error)
        exchange.answer(200 if state == "ready" else 503, wire.encode_json(body))

    def healthz(self, exchange: Exchange, _: bytes) -> None:
        """The same in a word, as clients of openpi ask for it."""
        ready = self.served.health == "ready"
        exchange.answer(200 if ready else 503, b"OK\n" if ready else b"not ready\n", b"text/plain; charset=utf-8")

    def configuration(self, exchange: Exchange, _: bytes) -> None:
        """The export's configuration, what each wire expects, and the settings in force."""
        loaded, served, spec = self.runtime.loaded, self.served, self.served.spec
        body = {
            "export": dict(spec.config),
            "wires": {name: Reading(spec, _map_of(name, spec)).describe() for name in WIRES},
            "policy": served.policy.describe() if loaded else None,
            "slots": {name: slot.policy.describe() for name, slot in served.slots.items()} if loaded else None,
            "server": settings(self.config),
            "reflex_version": __version__,
        }
        exchange.answer(200, wire.encode_json(body))

    def metrics(self, exchange: Exchange, _: bytes) -> None:
        """Prometheus text."""
        if self.runtime.loaded:
            self.runtime.batcher.flush()
        exchange.answer(200, self.runtime.metrics.render(), metrics.CONTENT_TYPE.encode())

    def cost_model(self, exchange: Exchange, _: bytes) -> None:
        """Every key the cost model knows."""
        runtime, served = self.runtime, self.served
        runtime.need_policy()
        slots = runtime.batcher.device.input(
            lambda scheduler, now: {
                name: scheduler.cost_model(slot.group).snapshot() for name, slot in served.slots.items()
            }
        )
        exchange.answer(200, wire.encode_json({"cost_model": self.config.cost_model, "slots": slots}))

    def rollout(self, exchange: Exchange, _: bytes) -> None:
        """Split, breakers, outcomes, the comparison, the ramp and what has changed."""
        body = self.served.rollout.snapshot(time.monotonic())
        body["versions"] = {name: slot.version.name for name, slot in self.served.slots.items()}
        exchange.answer(200, wire.encode_json(body))

    def shadow(self, exchange: Exchange, _: bytes) -> None:
        """How far the shadow's actions are from the served ones."""
        if self.served.shadow is None:
            raise NotFound("no shadow is served; start the server with --shadow-policy DIR")
        exchange.answer(200, wire.encode_json(dict(self.served.shadow.snapshot())))

    def openapi(self, exchange: Exchange, _: bytes) -> None:
        exchange.answer(200, self._described())

    def docs(self, exchange: Exchange, _: bytes) -> None:
        exchange.answer(200, page(self._described(), exchange.headers.get(b"host", b"")), b"text/html; charset=utf-8")

    def _described(self) -> bytes:
        slots = self.served.slots
        specs = {slot: holder.policy.spec for slot, holder in slots.items()} or self.served.specs
        if self._document is None or self._document[0] != specs:
            self._document = (specs, openapi.document(specs, bool(self.config.api_key)))
        return self._document[1]
