"""The application of a policy server: its routes, of every policy below a path that names it.

Every answer carries `X-Request-Id`; every non-2xx body has `error`, `message`, `request_id` and `retry_safe`.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.openapi import OUTCOME, POLICIES, document
from reflex_runtime.robots.policy.spec import PolicySpec
from reflex_runtime.robots.serving.admin import Admin, is_outcome
from reflex_runtime.robots.serving.handler import RequestHandler
from reflex_runtime.robots.serving.journal_stream import JournalStreams
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.robots.serving.served import PolicyPlan
from reflex_runtime.robots.serving.views import ServerViews, Views, watchers_of
from reflex_runtime.robots.wires import openpi, vla_eval
from reflex_runtime.robots.wires.act import Act
from reflex_runtime.robots.wires.oip import PolicyModels, Sequences
from reflex_runtime.settings import DEFAULT_POLICY, ServeConfig
from reflex_runtime.settings.declare import did_you_mean
from reflex_runtime.web.access import Keys
from reflex_runtime.web.app import App
from reflex_runtime.web.dashboard import dashboard_routes
from reflex_runtime.web.errors import PLAIN, NotFound
from reflex_runtime.web.oip import ROOT, OipHttp
from reflex_runtime.web.openapi import document_routes
from reflex_runtime.web.request import OPERATOR_BODY, HttpRequest, HttpResponse, Route
from reflex_runtime.web.serve import Make, ServerLife
from reflex_runtime.web.supervisor import Parent

if TYPE_CHECKING:
    from reflex_runtime.web.zeromq import ZmqListener

log = logging.getLogger("reflex.server")


def application(runtime: PolicyRuntime) -> App:
    """The application around one `PolicyRuntime`."""
    config, sequences = runtime.config, Sequences()
    handler = RequestHandler(runtime)
    several = len(runtime.policies) > 1
    named = {name: PolicyRoutes(RequestHandler(runtime, name, POLICIES + name), sequences) for name in runtime.policies}
    plain = PolicyRoutes(handler, sequences, list(named.values()) if several else ())

    def find(path: str) -> Route | None:
        if not path.startswith(POLICIES):
            return plain.find(path)
        name, slash, rest = path[len(POLICIES) :].partition("/")
        return named[name].find(slash + rest or "/") if name in named else None

    live = dashboard_routes(watchers_of(runtime))
    live.append(JournalStreams(runtime).route)
    plain.by_path |= {route.path: route for route in live}
    app = App(config, plain.by_path, PLAIN, find, missing=partial(_missing, runtime), cors=config.cors)
    if config.gr00t:
        _listen_groot(app, handler)
    if config.oip_grpc:
        _listen_oip(app, handler, sequences)
    if config.lerobot:
        _listen_lerobot(app, handler)
    return app


def _missing(runtime: PolicyRuntime, path: str) -> str:
    """What to say of a path that has no route."""
    name = path.removeprefix(POLICIES).partition("/")[0]
    if path.startswith(POLICIES) and name not in runtime.policies:
        names = ", ".join(runtime.policies)
        return f"policy {name[:100]!r} is not served, only {names}{did_you_mean(name[:100], runtime.policies)}"
    return f"no such path: {path[:200]}"


class PolicyRoutes:
    """The routes of one policy: everything that a server of this policy alone has, below the path that names it."""

    def __init__(self, handler: RequestHandler, sequences: Sequences, below: Sequence[PolicyRoutes] = ()) -> None:
        """sequences: of clients of OIP. below: the policies of a server of several, which these routes are of."""
        self._handler, self._below = handler, below
        self._document: tuple[Mapping[str, Mapping[str, PolicySpec]], bytes] = ({}, b"")  # of these policies
        runtime, most = handler.runtime, handler.config.max_body_bytes
        operator = min(most, OPERATOR_BODY)
        act, admin, views = Act(handler), Admin(handler), ServerViews(handler) if below else Views(handler)
        runtime.on_drain.append(admin.close)
        sockets = dict.fromkeys(openpi.PATHS, partial(openpi.serve, handler))
        sockets[vla_eval.PATH] = partial(vla_eval.serve, handler)
        self._oip = OipHttp(PolicyModels(handler, sequences), most, handler.prefix)
        self._outcome = Route(OUTCOME, admin.outcome, "POST", changes=True, most=operator)
        routes = [
            Route("/act", act.run, "POST", most=most, refused=act.refused),
            Route("/reset", act.reset, "POST", most=operator),
            *(Route(path, websocket_only, most=most, socket=session) for path, session in sockets.items()),
            *self._oip.routes,
            *views.routes,
            *document_routes(self._described),
            *(
                Route(path, change, "POST", operators=True, changes=True, most=operator)
                for path, change in admin.changes.items()
            ),
            self._outcome,
        ]
        self.by_path = {route.path: route for route in routes}

    def find(self, path: str) -> Route | None:
        """The route of a path."""
        found = self.by_path.get(path)
        return found or (self._outcome if is_outcome(path) else self._oip.find(path))

    def _described(self, request: HttpRequest) -> bytes:
        """The document of its routes, made again when an exchange has changed what is served."""
        runtime, prefix, config = self._handler.runtime, self._handler.prefix, self._handler.config
        policies = [self._handler.served] if prefix else runtime.policies.values()
        specs = {served.name: served.specs for served in policies}
        if self._document[0] != specs:
            self._document = specs, document(self.described, specs, Keys(config.api_key, config.admin_key))
        return self._document[1]

    @property
    def described(self) -> list[Route]:
        """All its routes; of a server of several policies those that it answers as a whole, and all of each policy."""
        if self._below:
            whole = [route for route in self.by_path.values() if _of_server(route)]
            return whole + [route for below in self._below for route in below.described]
        return [replace(route, path=self._handler.prefix + route.path) for route in self.by_path.values()]


def _of_server(route: Route) -> bool:
    """Whether a server of several policies answers it as a whole."""
    return route.open or route.own_pages or route.path == "/config" or route.path.startswith(ROOT)


def _listen_groot(app: App, handler: RequestHandler) -> None:
    """Clients of GR00T: what they send waits until there is a policy."""
    from reflex_runtime.robots.wires.groot import GrootSession
    from reflex_runtime.web.zeromq import ZmqListener

    config, session = handler.config, GrootSession(handler, handler.config.gr00t_config)
    listener = ZmqListener(app, "--gr00t", config.gr00t, config.max_body_bytes, session.answer, session.failed)
    app.listeners.append(listener)
    app.spawn(_begin_groot(handler.runtime, listener))
    handler.runtime.listening["gr00t"] = listener.address
    log.info("clients of GR00T: %s", listener.address)


async def _begin_groot(runtime: PolicyRuntime, listener: ZmqListener) -> None:
    await runtime.wait_started()
    listener.begin()


def _listen_oip(app: App, handler: RequestHandler, sequences: Sequences) -> None:
    from reflex_runtime.web.grpc_listener import GrpcListener
    from reflex_runtime.web.oip_grpc import SERVICE, OipService

    service = OipService(PolicyModels(handler, sequences))
    listener = GrpcListener(app, "--oip-grpc", handler.config.oip_grpc, handler.config)
    listener.serve(SERVICE, service.methods, {}, service.failed)
    app.listeners.append(listener)
    handler.runtime.listening["oip_grpc"] = listener.address
    log.info("clients of OIP over gRPC: %s", listener.address)


def _listen_lerobot(app: App, handler: RequestHandler) -> None:
    from reflex_runtime.robots.wires.lerobot import LerobotService
    from reflex_runtime.robots.wires.lerobot_client import SERVICE
    from reflex_runtime.web.grpc_listener import GrpcListener

    service = LerobotService(handler, app.bodies)
    listener = GrpcListener(app, "--lerobot", handler.config.lerobot, handler.config)
    listener.serve(SERVICE, service.methods, service.streams, service.failed)
    app.listeners.append(listener)
    handler.runtime.on_drain.append(service.end)
    handler.runtime.listening["lerobot"] = listener.address
    log.info("clients of LeRobot: %s", listener.address)


async def websocket_only(request: HttpRequest) -> HttpResponse:
    """What answers a plain request on the path of a websocket."""
    raise NotFound(f"{request.path} is for websockets; docs/wires.md says which protocol it speaks")


def create(source: str | None = None, **settings: str) -> App:
    """The application of one policy, for any ASGI server, as `uvicorn --factory` takes it. See `create_app`."""
    return create_app(source, **settings)[0]


def create_app(source: str | None = None, **settings: str) -> tuple[App, PolicyRuntime]:
    """An application and its runtime, for programs that add a route, such as a wire of their own.

    source: as SOURCE of `reflex serve`; else REFLEX_SOURCE. settings: its options; those that are not given come from
    the environment (REFLEX_MAX_QUEUE=64). ConfigError for what can be found before anything is loaded.
    """
    from reflex_runtime.robots import read_source
    from reflex_runtime.robots.serving.slots import device_of
    from reflex_runtime.settings.read import environment, read

    for name in settings.keys() - {field.name for field in fields(ServeConfig)}:
        raise ConfigError(f"{name}={settings[name]}: no such setting")
    config, _ = read(ServeConfig, "serve", None, environment(), settings)
    source = source or os.environ.get("REFLEX_SOURCE", "")
    if not source:
        raise ConfigError("REFLEX_SOURCE is missing: the directory of an export")
    spec = read_source(source, device_of(config))
    spec.check()
    runtime = PolicyRuntime(config, [PolicyPlan(DEFAULT_POLICY, config, {"prod": spec})], _lost)
    app = application(runtime)
    ServerLife(app, runtime, config.drain_timeout_s)
    return app, runtime


def _lost() -> None:
    """The device is lost for good: the server drains, and whoever runs it starts it again."""
    signal.raise_signal(signal.SIGTERM)


def serving(config: ServeConfig, plans: Sequence[PolicyPlan]) -> Make:
    """What `web.serve` makes to serve policies."""

    def make(on_lost: Callable[[], None], parent: Parent | None) -> tuple[App, PolicyRuntime]:
        runtime = PolicyRuntime(config, plans, on_lost)
        runtime.parent = parent
        return application(runtime), runtime

    return make
