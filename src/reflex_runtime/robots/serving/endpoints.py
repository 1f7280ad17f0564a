"""The paths of a policy server that are no wires: health, settings, metrics and diagnostics; `/admin/*` and
`/episodes/*`, which change it while it runs.

The body of a POST is JSON with the fields of its struct, no others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from reflex_runtime.core.errors import Closed, ConfigError, ReflexError
from reflex_runtime.observe import metrics
from reflex_runtime.robots.policy.spec import PYTHON, WIRES, PolicySpec, WireMap
from reflex_runtime.robots.serving.handler import RequestHandler
from reflex_runtime.robots.serving.question import ACT, LEROBOT, OIP, ObservationReader
from reflex_runtime.robots.serving.runtime import ServedPolicy
from reflex_runtime.robots.versions.slots import SHADOW
from reflex_runtime.settings.declare import settings
from reflex_runtime.version import __version__
from reflex_runtime.web.errors import NotFound
from reflex_runtime.web.fields import Whole, check_id, client_errors, encode, invalid, whole
from reflex_runtime.web.request import OPERATOR_BODY, HttpRequest, HttpResponse, Route

log = logging.getLogger("reflex.admin")

OUTCOME: Final = "/episodes/{id}/outcome"
T = TypeVar("T", bound=msgspec.Struct)


class Split(msgspec.Struct, forbid_unknown_fields=True):
    """a's percent of new episodes."""

    split: Annotated[Whole, Meta(extra_json_schema={"minimum": 0, "maximum": 100})]


class SlotName(msgspec.Struct, forbid_unknown_fields=True):
    """One slot."""

    slot: str


class Load(msgspec.Struct, forbid_unknown_fields=True):
    """An export to put into a slot."""

    slot: str
    path: Annotated[str, Meta(extra_json_schema={"minLength": 1, "pattern": r"^[^\u0000]*$"})]


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """The faults of a drill, as --inject-fault takes them; an empty list ends it."""

    faults: Annotated[list[str], Meta(max_length=100)]


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No fields; the body may be empty."""


class Outcome(msgspec.Struct, forbid_unknown_fields=True):
    """How an episode ended."""

    success: bool
    reward: float | None = None
    robot_id: str | None = None


BODIES = (Split, SlotName, Load, Faults, Nothing, Outcome)


class Endpoints:
    """The paths of one policy. several: of a whole server of several policies: health and settings are of all, other
    paths of the default policy; without a default they answer 422."""

    def __init__(self, handler: RequestHandler, several: bool) -> None:
        self.runtime, self._handler, self._several = handler.runtime, handler, several
        most = min(handler.config.max_body_bytes, OPERATOR_BODY)
        changes = (self.split, self.rollback, self.reset, self.load, self.faults)
        self.routes = [
            Route("/health", self.health, open=True),
            Route("/healthz", self.healthz, open=True),
            Route("/metrics", self.metrics, open=True),
            Route("/config", self.configuration),
            Route("/diagnostics/cost-model", self.cost_model, operators=True),
            Route("/diagnostics/rollout", self.rollout, operators=True),
            Route("/diagnostics/shadow", self.shadow, operators=True),
            *(
                Route(f"/admin/{change.__name__}", change, "POST", operators=True, changes=True, most=most)
                for change in changes
            ),
            Route(OUTCOME, self.outcome, "POST", changes=True, most=most),
        ]

    # -- health, settings, diagnostics ---------------------------------------------------------------------------------

    @property
    def _state(self) -> str:
        return self.runtime.health if self._several else self._handler.served.health

    async def health(self, request: HttpRequest) -> HttpResponse:
        """200 only when ready; with several policies when any of them is."""
        runtime, state = self.runtime, self._state
        if self._several:
            policies = runtime.policies.items()
            told = {"policies": {name: {"state": one.health, **self._policy_health(one)} for name, one in policies}}
        else:
            told = self._policy_health(self._handler.served)
        body: dict[str, Any] = {
            "status": "ok" if state == "ready" else state,
            "state": state,
            "model_loaded": runtime.loaded,
            "robot_id": runtime.config.robot_id or None,
            **told,
            **runtime.process_health(),
        }
        return HttpResponse(200 if state == "ready" else 503, encode(body))

    def _policy_health(self, served: ServedPolicy) -> dict[str, Any]:
        breaker, shadow, latency = served.rollout.breaker, served.shadow, served.config.inject_latency_ms
        slots: dict[str, Any] = {
            slot: {"verdict": verdict, "consecutive_crashes": breaker.count(slot)}
            for slot, verdict in breaker.verdicts.items()
        }
        if shadow is not None:
            slots["shadow"] = {"verdict": shadow.verdict, "why": shadow.stopped or None}
        told: dict[str, Any] = {
            "inference_mode": served.policy.spec.inference_mode if self.runtime.loaded else None,
            "export_dir": served.spec.source,
            "consecutive_crashes": max(breaker.count(slot) for slot in served.served),
            "max_consecutive_crashes": served.config.max_consecutive_crashes,
            "verdict": breaker.verdict,
            "slots": slots,
        }
        if served.faults or latency:
            told["injected"] = {"faults": served.faults, "latency_ms": latency}
        return told | served.objective

    async def healthz(self, request: HttpRequest) -> HttpResponse:
        """Health as one word, for clients of openpi."""
        ready = self._state == "ready"
        return HttpResponse(200 if ready else 503, b"OK\n" if ready else b"not ready\n", b"text/plain; charset=utf-8")

    async def configuration(self, request: HttpRequest) -> HttpResponse:
        """The export's configuration, what each wire expects, and the settings in force."""
        runtime = self.runtime
        body: dict[str, Any]
        if self._several:
            policies = {name: self._policy_configuration(served) for name, served in runtime.policies.items()}
            for name, served in runtime.policies.items():
                policies[name] |= {"settings": settings(served.config), "weight": served.weight}
            body, config = {"policies": policies}, runtime.config
        else:
            body, config = self._policy_configuration(self._handler.served), self._handler.served.config
        body |= {"server": settings(config) | runtime.listening, "reflex_version": __version__}
        return HttpResponse(200, encode(body))

    def _policy_configuration(self, served: ServedPolicy) -> dict[str, Any]:
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
        """Every key of the cost model, and the largest cost of a batch now, in milliseconds."""
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
        return _done(cost_model=served.config.cost_model, max_batch_cost_ms=budgets, slots=slots)

    async def rollout(self, request: HttpRequest) -> HttpResponse:
        """Split, breakers, outcomes, the comparison, the ramp and what has changed."""
        served = self._handler.served
        versions = {name: slot.version.name for name, slot in served.slots.items()}
        return _done(**(served.rollout.snapshot(time.monotonic()) | {"versions": versions}))

    async def shadow(self, request: HttpRequest) -> HttpResponse:
        """How far the shadow's actions are from the served ones."""
        if self._handler.served.shadow is None:
            raise NotFound("no shadow is served; start the server with --shadow-policy DIR")
        return _done(**self._handler.served.shadow.snapshot())

    # -- changes -------------------------------------------------------------------------------------------------------

    async def split(self, request: HttpRequest) -> HttpResponse:
        """Another split for new episodes."""
        split = whole("split", (await self._sent(request, Split)).split)
        if not 0 <= split <= 100:
            raise invalid("split", f"split={split}: must be in [0, 100]")
        self._handler.served.rollout.set_split(split, time.monotonic())
        return _done(split=split)

    async def rollback(self, request: HttpRequest) -> HttpResponse:
        """Everything to a, running episodes too."""
        await self._sent(request, Nothing)
        moved = self._handler.served.rollout.rollback(time.monotonic())
        return _done(split=100, episodes_moved=len(moved))

    async def reset(self, request: HttpRequest) -> HttpResponse:
        """Forget a slot's crashes."""
        slot, now = (await self._sent(request, SlotName)).slot, time.monotonic()
        rollout, shadow = self._handler.served.rollout, self._handler.served.shadow
        if shadow is not None and slot == SHADOW:
            shadow.resume()
            rollout.changed(now, "shadow", "was reset by an operator", {})
        else:
            rollout.reset(slot, now)
        slots = dict(rollout.breaker.verdicts) | ({} if shadow is None else {SHADOW: shadow.verdict})
        return _done(verdict=rollout.breaker.verdict, slots=slots)

    async def faults(self, request: HttpRequest) -> HttpResponse:
        """Begin or end a drill."""
        faults, served = (await self._sent(request, Faults)).faults, self._handler.served
        try:
            served.inject(faults)
        except ConfigError as error:
            raise invalid("faults", error.message) from None
        kind, why = "mended", "no injected faults any more"
        if faults:
            kind, why = "fault", f"injected by an operator: {', '.join(faults)}"
        served.rollout.changed(time.monotonic(), kind, why, {"faults": faults})
        return _done(faults=served.faults)

    async def load(self, request: HttpRequest) -> HttpResponse:
        """Another policy in a slot."""
        asked = await self._sent(request, Load)
        if not asked.path or "\0" in asked.path or asked.path.startswith(PYTHON):
            raise invalid("path", f"path={asked.path[:200]!r}: must be an export directory, lerobot:DIR or openpi:DIR")
        task = self.runtime.exchange(self._handler.served, asked.slot, asked.path)
        try:
            version = await asyncio.shield(task)  # the load goes on if the operator leaves
        except asyncio.CancelledError:
            if task.cancelled():
                raise Closed("the server is shutting down", retry_after=1.0) from None
            raise
        except ConfigError as error:
            raise invalid("path", error.message) from None
        except OSError as error:
            raise invalid("path", f"path: {error.strerror}") from None
        except ReflexError:
            raise
        except Exception:
            log.exception("loading %s into slot %s failed", asked.path, asked.slot)
            raise ReflexError("the policy could not be loaded; the server's log has the details") from None
        return _done(slot=asked.slot, model_version=version.name, path=version.policy.spec.source)

    async def outcome(self, request: HttpRequest) -> HttpResponse:
        """How an episode ended."""
        path = request.path.removeprefix(self._handler.prefix)
        episode = path[len("/episodes/") : -len("/outcome")]  # percent-decoded by the ASGI server
        check_id("episode_id", episode)
        asked = await self._sent(request, Outcome)
        fields = {"reward": asked.reward} if asked.reward is not None else {}
        if asked.robot_id is not None:
            check_id("robot_id", asked.robot_id)
        return _done(**self._handler.served.ended(episode, asked.success, asked.robot_id, **fields))

    async def _sent(self, request: HttpRequest, kind: type[T]) -> T:
        """The body, once a policy is loaded; 400 or 422 for a wrong one."""
        self.runtime.need_loaded()
        body = await request.body() or (b"{}" if kind is Nothing else b"")
        with client_errors(kind):
            return msgspec.json.decode(body, type=kind)


def _done(**told: Any) -> HttpResponse:
    return HttpResponse(200, encode(told))


def _expected(name: str, spec: PolicySpec) -> dict[str, Any]:
    """The observation that a wire expects; LeRobot's has a number for each motor and a policy type."""
    own = WireMap(prompt="instruction") if name in (ACT, OIP) else spec.wires.get(name)
    found = ObservationReader(spec, own).describe()
    if name == LEROBOT:
        found |= {"policy_type": spec.model_type} | ({"prompt": "task"} if spec.takes_text else {})
        if spec.embodiment.state_names and "state" in found and len(found["state"]["names"]) == 1:
            found["state"] = {"names": list(spec.embodiment.state_names), "dim": spec.state_dim}
    return found
