"""Replicas of a policy server on Ray Serve, started by Ray's own command.

    serve run reflex_runtime.ray:app export=./my-export replicas=2

Each replica is the application of `reflex serve` with a device of its own. Ray routes requests, and adds and removes
replicas by its settings. Its router with consistent hashing sends requests with an episode in the header `x-session-id`
to one replica; a websocket stays on one replica anyway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.extras import needed_by
from reflex_runtime.robots.app import create
from reflex_runtime.settings.declare import whole
from reflex_runtime.web.request import Receive, Scope, Send

with needed_by("reflex_runtime.ray"):
    from ray import serve
    from ray.serve.config import RequestRouterConfig

log = logging.getLogger("reflex.ray")

ROUTER: Final = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
OWN: Final = ("export", "replicas", "max_replicas", "cpus", "gpus")


def app(args: Mapping[str, str]) -> serve.Application:
    """The application that Ray deploys.

    export: SOURCE of `reflex serve`. replicas: fewest (2); max_replicas: most, for Ray's autoscaling. cpus, gpus: Ray
    reserves them for a replica (1, 0). Other arguments: settings of `reflex serve`.
    Raises ConfigError.
    """
    if not args.get("export"):
        raise ConfigError("export is missing: serve run reflex_runtime.ray:app export=./my-export")
    replicas = whole("replicas", args.get("replicas", "2"), 0, 1000)
    most = whole("max_replicas", args.get("max_replicas", "0"), 0, 1000)
    settings = {name: value for name, value in args.items() if name not in OWN}
    replica = ReflexReplica(args["export"], settings)
    options: dict[str, Any] = {
        "name": "reflex",
        "max_ongoing_requests": 10_000,  # the scheduler of the replica decides what may wait
        "request_router_config": RequestRouterConfig(request_router_class=ROUTER),
        "ray_actor_options": {"num_cpus": float(args.get("cpus", 1)), "num_gpus": float(args.get("gpus", 0))},
    }
    if most > replicas:
        options["autoscaling_config"] = {"min_replicas": replicas, "max_replicas": most}
    else:
        options["num_replicas"] = replicas
    deployed: serve.Application = serve.deployment(**options)(serve.ingress(replica)()).bind()
    return deployed


class ReflexReplica:
    """The ASGI application of a replica, made in its process at ASGI's lifespan startup."""

    def __init__(self, export: str, settings: Mapping[str, str]) -> None:
        self._export, self._settings = export, dict(settings)
        self._app: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Load before Ray sends requests; drain when it stops the replica."""
        await receive()
        try:
            self._app = await asyncio.to_thread(create, self._export, **self._settings)
            await self._app.life.begin()
            await self._app.life.begun()
            if self._app.life.error:
                raise ConfigError(f"the policy could not be started: {self._app.life.error}")
        except Exception as error:
            log.exception("the replica could not be started")
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._app.life.end()
        await send({"type": "lifespan.shutdown.complete"})
