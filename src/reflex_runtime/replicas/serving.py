"""The front as `web.serve` takes it: what makes its application, and its door."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from reflex_runtime.policies.serving.served import PolicyPlan
from reflex_runtime.replicas.front import FrontRuntime
from reflex_runtime.replicas.replica import ReplicaPlan
from reflex_runtime.replicas.views import front_application
from reflex_runtime.settings import ServeConfig
from reflex_runtime.web.app import App
from reflex_runtime.web.serve import ListeningPort, Make
from reflex_runtime.web.supervisor import Lives


def front_and_door(
    config: ServeConfig, plans: Sequence[PolicyPlan], replicas: Sequence[ReplicaPlan], sock: socket.socket
) -> tuple[Make, ListeningPort]:
    """The front of these replicas, on a listening socket."""
    made: list[FrontRuntime] = []

    def make(on_lost: Callable[[], None], lives: Lives | None) -> tuple[App, FrontRuntime]:
        front = FrontRuntime(config, plans, replicas, on_lost)
        front.lives = lives
        made.append(front)
        return front_application(front), front

    def kind(app: App) -> asyncio.BaseProtocol:
        return made[0].arriving(app)

    return make, ListeningPort(sock, kind)
