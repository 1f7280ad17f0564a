"""What can be asked of all replicas together: health, metrics, diagnostics, the dashboard, and operators' changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import msgspec
from prometheus_client import Metric
from prometheus_client.core import Sample

from reflex_runtime.placing import asks_policy, opens_websocket
from reflex_runtime.policies.serving import fields as wire
from reflex_runtime.policies.serving.admin import Admin, Load
from reflex_runtime.policies.serving.app import application
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.policies.serving.served import ServedPolicy
from reflex_runtime.policies.serving.views import ServerViews, Views
from reflex_runtime.replicas.front import FrontRuntime
from reflex_runtime.replicas.merging import PageSum
from reflex_runtime.replicas.messages import AskReplica, ReplicaAnswer
from reflex_runtime.replicas.replica import Replica, answers
from reflex_runtime.replicas.watching import MergedLive
from reflex_runtime.settings.declare import settings
from reflex_runtime.telemetry.live import LiveProcess, live_process, own_process
from reflex_runtime.telemetry.metrics import CONTENT_TYPE
from reflex_runtime.version import __version__
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import NotReady
from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.handover import handing_on
from reflex_runtime.web.watchers import Watchers

WITHIN: Final = 2.0  # seconds for a replica to answer; one that takes longer is left out
LOADED_WITHIN: Final = 86_400.0  # the same for loading a policy, which takes what it takes
REPAIR: Final = "put this right, or load another version (POST /admin/load)"
HEALTH_WITHIN: Final = 0.5  # the same for /health: those who probe it wait a second
Handler = Callable[[Exchange, bytes], None]


def front_application(front: FrontRuntime) -> App:
    """The application around a front."""
    pages = PageSum()
    front.on_lost.append(pages.lost)
    several = len(front.policies) > 1

    def views(asking: Asking, of_server: bool) -> Views:
        kind = FrontServerViews if several and of_server else FrontViews
        return kind(asking, front, pages)

    app = application(front, views, partial(FrontAdmin, front), _watchers_of(front), listens=False)
    most = front.config.max_body_bytes

    def elsewhere(exchange: Exchange) -> Route | None:
        opens = opens_websocket(exchange.method, exchange.headers.get(b"upgrade", b""))
        if opens or asks_policy(exchange.method, exchange.path):
            return handing_on(exchange.method, most, front.hand_over)
        return None

    app.elsewhere = elsewhere
    front.app = app
    return app


async def _asked(
    front: FrontRuntime, exchange: Exchange, body: bytes = b"", within: float = WITHIN
) -> dict[str, ReplicaAnswer]:
    """What the live replicas answer, by name. NotReady if none does."""
    method = "GET" if exchange.method == "HEAD" else exchange.method
    asked = AskReplica(method, exchange.path, list(exchange.headers.items()), body)
    found = await answers(front.replicas, asked, within)
    if not found:
        front.need_policy()
        raise NotReady("no replica answers", retry_after=1.0)
    return found


def _pass(exchange: Exchange, answer: ReplicaAnswer, body: bytes | None = None) -> None:
    """Answer as a replica does."""
    kind = dict(answer.headers).get(b"content-type", b"application/json")
    exchange.answer(answer.status, answer.body if body is None else body, kind)


class FrontViews(Views):
    """`Views` of a policy that replicas serve."""

    def __init__(self, asking: Asking, front: FrontRuntime, pages: PageSum) -> None:
        super().__init__(asking)
        self.front, self._pages = front, pages

    def health(self, exchange: Exchange, _: bytes) -> None:
        """200 while a replica is ready."""
        exchange.app.spawn(exchange, self._health(exchange))

    async def _health(self, exchange: Exchange) -> None:
        front, state = self.front, self._state()
        found = await answers(front.replicas, AskReplica("GET", exchange.path), HEALTH_WITHIN)
        body: dict[str, Any] = {"status": state, "state": state, "model_loaded": front.loaded}
        bodies = [msgspec.json.decode(answer.body) for answer in found.values()]
        if bodies:
            body = bodies[0] | self._decided(bodies[0])
            if "hung_batches" in body:
                body["hung_batches"] = sum(other.get("hung_batches", 0) for other in bodies)
            body |= recorded([told["recording"] for told in bodies if "recording" in told])
        if front.error:
            body["error"] = front.error
        if front.lives is not None:
            body |= {"restarts": front.lives.restarts, "last_exit": front.lives.last_exit}
        body |= {"status": "ok" if state == "ready" else state, "state": state}
        body["replicas"] = [replica.told() for replica in front.replicas]
        exchange.answer(200 if state == "ready" else 503, wire.encode_json(body))

    def _state(self) -> str:
        return self.served.health if self.front.health == "ready" else self.front.health

    def _decided(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the front knows better than one replica."""
        return _verdicts(self.served, body)

    def metrics(self, exchange: Exchange, _: bytes) -> None:
        """Prometheus text: the series of all replicas added, and the state of each."""
        exchange.app.spawn(exchange, self._metrics(exchange))

    async def _metrics(self, exchange: Exchange) -> None:
        front = self.front
        found = await answers(front.replicas, AskReplica("GET", exchange.path), WITHIN)
        pages = {name: answer.body for name, answer in found.items() if answer.status == 200}
        page = self._pages.page(pages, front.metrics.render(), replica_series(self.front.replicas))
        exchange.answer(200, page, CONTENT_TYPE.encode())

    def configuration(self, exchange: Exchange, _: bytes) -> None:
        """As of one replica, with the settings of the whole server."""
        exchange.app.spawn(exchange, self._configuration(exchange))

    async def _configuration(self, exchange: Exchange) -> None:
        answer = next(iter((await _asked(self.front, exchange)).values()))
        body = msgspec.json.decode(answer.body)
        if answer.status == 200:
            body |= {"server": settings(self.front.config), "reflex_version": __version__}
        _pass(exchange, answer, wire.encode_json(body))

    def cost_model(self, exchange: Exchange, _: bytes) -> None:
        """Of every replica: each learns the cost of its own device."""
        exchange.app.spawn(exchange, self._each(exchange))

    def shadow(self, exchange: Exchange, _: bytes) -> None:
        """Of every replica: each has a shadow of its own."""
        exchange.app.spawn(exchange, self._each(exchange))

    async def _each(self, exchange: Exchange) -> None:
        found = await _asked(self.front, exchange)
        good = {name: msgspec.Raw(answer.body) for name, answer in found.items() if answer.status == 200}
        first = next(iter(found.values()))
        _pass(exchange, first, msgspec.json.encode({"replicas": good}) if good else None)

    def rollout(self, exchange: Exchange, _: bytes) -> None:
        """Split, breakers, outcomes, the comparison, the ramp and what has changed, of all replicas together."""
        exchange.app.spawn(exchange, self._rollout(exchange))

    async def _rollout(self, exchange: Exchange) -> None:
        answer = next(iter((await _asked(self.front, exchange)).values()))
        told = msgspec.json.decode(answer.body)
        body = self.served.rollout.snapshot(time.monotonic()) | {"versions": told.get("versions", {})}
        _pass(exchange, answer, wire.encode_json(body) if answer.status == 200 else None)


def recorded(several: list[dict[str, Any]]) -> dict[str, Any]:
    """What /health says of the recordings of all replicas: counts added, the first file, the first error."""
    if not several:
        return {}
    counts = {name: sum(told[name] for told in several) for name in ("recorded", "dropped", "cpu_s")}
    error = next((told["error"] for told in several if told["error"]), None)
    return {"recording": several[0] | counts | {"error": error}}


class FrontServerViews(FrontViews, ServerViews):
    """The same for a server of several policies, where none is named."""

    def _state(self) -> str:
        return self.front.health

    def _decided(self, body: dict[str, Any]) -> dict[str, Any]:
        policies = body.get("policies", {})
        served = self.front.policies
        return {"policies": {name: told | _verdicts(served[name], told) for name, told in policies.items()}}


def _verdicts(served: ServedPolicy, body: dict[str, Any]) -> dict[str, Any]:
    """The state of the breaker of record, in the place of a replica's."""
    breaker = served.rollout.breaker
    slots = dict(body.get("slots", {}))
    for slot, verdict in breaker.verdicts.items():
        slots[slot] = {"verdict": verdict, "consecutive_crashes": breaker.count(slot)}
    crashes = max(breaker.count(slot) for slot in served.served)
    return {"verdict": breaker.verdict, "slots": slots, "consecutive_crashes": crashes, "state": served.health}


class FrontAdmin(Admin):
    """`Admin` of a policy that replicas serve: the front's rollout changes, and the replicas follow."""

    def __init__(self, front: FrontRuntime, asking: Asking) -> None:
        super().__init__(asking)
        self._front = front

    def _answer(self, exchange: Exchange, told: Mapping[str, Any]) -> None:
        """Answer once every replica has done it."""
        exchange.app.spawn(exchange, self._answer_done(exchange, told))

    async def _answer_done(self, exchange: Exchange, told: Mapping[str, Any]) -> None:
        await self._front.heard(WITHIN)
        exchange.answer(200, wire.encode_json(told))

    def faults(self, exchange: Exchange, body: bytes) -> None:
        """Begin or end a drill, in every replica."""
        exchange.app.spawn(exchange, self._faults(exchange, body))

    async def _faults(self, exchange: Exchange, body: bytes) -> None:
        served, found = self.served, await _asked(self._front, exchange, body)
        worst = max(found.values(), key=lambda answer: answer.status)
        if worst.status == 200:
            for replica in self._front.replicas:
                replica.serves(served.name, faults=msgspec.json.decode(worst.body)["faults"])
        _pass(exchange, worst)

    async def _exchanged(self, exchange: Exchange, served: ServedPolicy, asked: Load) -> dict[str, Any]:
        """In every replica, or in none."""
        ask = partial(_asked, self._front, exchange, msgspec.json.encode(asked), LOADED_WITHIN)
        return await self._front.swaps[served.name].exchange(asked.slot, asked.path, ask)


def replica_series(replicas: Iterable[Replica]) -> list[Metric]:
    """The series of the replicas themselves."""
    ready = Metric("reflex_replica_ready", "Whether the replica takes requests", "gauge")
    restarts = Metric("reflex_replica_restarts", "Times it was started again", "counter")
    given = Metric("reflex_replica_connections", "Connections that it was given", "counter")
    for replica in replicas:
        labels = {"replica": replica.name}
        ready.samples.append(Sample("reflex_replica_ready", labels, float(replica.live)))
        restarts.samples.append(Sample("reflex_replica_restarts_total", labels, float(replica.client.restarts)))
        given.samples.append(Sample("reflex_replica_connections_total", labels, float(replica.given)))
    return [ready, restarts, given]


def _watchers_of(front: FrontRuntime) -> Watchers:
    key = front.config.api_key
    headers = [(b"x-reflex-key", key.encode())] if key else []
    folds: list[MergedLive] = []

    def make(now: float) -> MergedLive:
        folds[:] = [MergedLive(front.replicas, headers)]
        return folds[0]

    watchers = Watchers(make, lambda _: folds[0].watch(), lambda _: folds[0].end(), partial(_server, front))
    front.on_drain.append(watchers.close)
    return watchers


def _server(front: FrontRuntime) -> dict[str, Any]:
    policies = {}
    for name, served in front.policies.items():
        groups = {slot: served.group(slot) for slot in served.specs}
        policies[name] = served.rollout.snapshot(time.monotonic()) | {
            "state": served.health, "groups": groups, "versions": {},
        }  # fmt: skip
    return {
        "product": "policies",
        "version": __version__,
        "state": front.health,
        "error": front.error,
        "unit": front.config.cost_model,
        "policies": policies,
        "processes": _processes(front),
        "replicas": [replica.told() for replica in front.replicas],
    }


def _processes(front: FrontRuntime) -> list[LiveProcess]:
    """The front first."""
    found = [own_process(front.health, front.lives, None, None, front.error)]
    for replica in front.replicas:
        state, client = replica.told()["state"], replica.client
        why = f"{REPAIR}: {client.last_error}" if client.start_failed else client.last_error
        found.append(live_process(replica.name, client.pid, state, client.restarts, None, None, why))
    return found
