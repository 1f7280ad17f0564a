"""The application of a policy server: its routes, of every policy below a path that names it.

Every answer carries `X-Request-Id`; every non-2xx body has `error`, `message`, `request_id` and `retry_safe`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from reflex_runtime.policies.serving.act import Act
from reflex_runtime.policies.serving.admin import Admin, is_outcome
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.policies.serving.journal_stream import JournalStreams
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.policies.serving.served import PolicyPlan
from reflex_runtime.policies.serving.views import ServerViews, Views
from reflex_runtime.policies.serving.watching import watchers_of
from reflex_runtime.policies.wires import openpi, vla_eval, xpolicylab
from reflex_runtime.policies.wires.oip import Sequences
from reflex_runtime.policies.wires.oip_http import OipHttp
from reflex_runtime.policies.wires.openpi import OpenpiSession
from reflex_runtime.policies.wires.vla_eval import VlaEvalSession
from reflex_runtime.policies.wires.xpolicylab import XPolicyLabSession
from reflex_runtime.settings import ServeConfig
from reflex_runtime.settings.declare import did_you_mean
from reflex_runtime.web.app import App
from reflex_runtime.web.dashboard import dashboard_routes
from reflex_runtime.web.errors import NotFound
from reflex_runtime.web.exchange import OPERATOR_BODY, Exchange, Route
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.serve import Make
from reflex_runtime.web.supervisor import Lives
from reflex_runtime.web.watchers import Watchers
from reflex_runtime.web.websocket import SocketSession

log = logging.getLogger("reflex.server")

OUTCOME: Final = "/episodes/{id}/outcome"
POLICIES: Final = "/policies/"  # before the name of a policy; behind it is what its server would have


def application(
    runtime: PolicyRuntime,
    views: Callable[[Asking, bool], Views] | None = None,
    admin: Callable[[Asking], Admin] = Admin,
    watchers: Watchers | None = None,
    listens: bool = True,
) -> App:
    """The application around one `PolicyRuntime`.

    views, admin, watchers: other ones than those of a server that is one process. views: made for an `Asking`, and
    whether no policy is named. listens: whether wires with ports of their own are served here.
    """
    config, sequences = runtime.config, Sequences()
    asking = Asking(runtime)
    several = len(runtime.policies) > 1
    made = views or (lambda asking, of_server: ServerViews(asking) if of_server and several else Views(asking))
    plain = PolicyRoutes(asking, made(asking, True), admin(asking), sequences)
    named = {}
    for name in runtime.policies:
        of_one = Asking(runtime, name, POLICIES + name)
        named[name] = PolicyRoutes(of_one, made(of_one, False), admin(of_one), sequences)

    def find(path: str) -> Route | None:
        if not path.startswith(POLICIES):
            return plain.find(path)
        name, slash, rest = path[len(POLICIES) :].partition("/")
        return named[name].find(slash + rest or "/") if name in named else None

    live = dashboard_routes(watchers_of(runtime) if watchers is None else watchers)
    live.append(JournalStreams(runtime).route)
    routes = plain.by_path | {route.path: route for route in live}
    app = App(config, routes, PLAIN, find, missing=partial(_missing, runtime), cors=config.cors)
    if not listens:
        return app
    if config.gr00t:
        _listen_groot(app, asking)
    if config.oip_grpc:
        _listen_oip(app, asking, sequences)
    if config.lerobot:
        _listen_lerobot(app, asking)
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

    def __init__(self, asking: Asking, views: Views, admin: Admin, sequences: Sequences) -> None:
        """sequences: of clients of OIP."""
        runtime, most = asking.runtime, asking.config.max_body_bytes
        act = Act(asking)
        runtime.on_drain.append(admin.close)

        def ready(exchange: Exchange) -> None:
            runtime.need_policy()

        routes = [Route("/act", act.run, "POST", most=most, enter=act.enter, fail=act.fail)]
        routes.append(Route("/reset", act.reset, "POST", most=min(most, OPERATOR_BODY), enter=ready))
        sessions: dict[str, Callable[..., SocketSession]] = dict.fromkeys(openpi.PATHS, OpenpiSession)
        sessions |= {vla_eval.PATH: VlaEvalSession, xpolicylab.PATH: XPolicyLabSession}
        for path, session in sessions.items():
            routes.append(Route(path, _websocket_only, most=most, socket=partial(session, asking)))
        self._oip = OipHttp(asking, most, sequences)
        routes += self._oip.routes
        for path, view in views.open.items():
            routes.append(Route(path, view, open=True))
        for path, view in views.guarded.items():
            routes.append(Route(path, view))
        operator = min(most, OPERATOR_BODY)
        for path, change in admin.changes.items():
            routes.append(Route(path, change, "POST", changes=True, most=operator, enter=ready))
        self._outcome = Route(OUTCOME, admin.outcome, "POST", changes=True, most=operator, enter=ready)
        self.by_path = {route.path: route for route in routes}

    def find(self, path: str) -> Route | None:
        """The route of a path."""
        found = self.by_path.get(path)
        return found or (self._outcome if is_outcome(path) else self._oip.find(path))


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


def serving(config: ServeConfig, plans: Sequence[PolicyPlan]) -> Make:
    """What `web.serve` makes to serve policies."""

    def make(on_lost: Callable[[], None], lives: Lives | None) -> tuple[App, PolicyRuntime]:
        runtime = PolicyRuntime(config, plans, on_lost)
        runtime.lives = lives
        return application(runtime), runtime

    return make
