"""One Reflex server as a replica of Ray Serve: the same application as `reflex serve`, below Ray's proxy."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

from prometheus_client import disable_created_metrics
from ray import serve

from reflex_runtime.cluster.front import LAST_HEADER, REPLICA_HEADER
from reflex_runtime.cluster.scaling import BACKLOG, BUSY
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.web import asgi
from reflex_runtime.web.app import App
from reflex_runtime.web.serve import Make, close_connections, drain

log = logging.getLogger("reflex.ray")

MakeServer = Callable[[], tuple[Make, float]]
"""Called in the replica's process: what `web.serve` serves, and the seconds that its end may take."""
BUSY_OVER: Final = 10.0  # seconds over which the busy share is averaged


class BusyShare:
    """The share of the last seconds that the device computed. since: when it began."""

    def __init__(self, since: float) -> None:
        self._at, self._share, self._seconds = since, 0.0, 0.0

    def read(self, now: float, seconds: float) -> float:
        """The share until now, older times counting less. seconds: that the device has computed in all."""
        passed = now - self._at
        if passed > 0.0:
            weight = min(1.0, passed / BUSY_OVER)
            self._share += weight * (min(1.0, (seconds - self._seconds) / passed) - self._share)
            self._at, self._seconds = now, seconds
        return self._share


class RayReplica:
    """What a replica of Ray Serve runs; `RayIngress` hands requests to it. here: the one of this process."""

    here: ClassVar[RayReplica | None] = None

    def __init__(self, make: MakeServer) -> None:
        RayReplica.here = self
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._make = make
        self._app: App | None = None
        self._runtime: PolicyRuntime | None = None
        self._drain_s = 0.0
        self._lost = False
        self._busy = BusyShare(time.monotonic())

    async def begin(self) -> None:
        """Load and warm up. Raises RuntimeError if the policy cannot be served: Ray then reports the replica's start
        as failed, with the message."""
        make, self._drain_s = await asyncio.to_thread(self._make)
        app, host = make(self._lose, None)
        assert isinstance(host, PolicyRuntime)
        app.form = replace(app.form, keeps_id=True)  # that of the front, so that every part has the same one
        self._app, self._runtime = app, host
        await host.start()
        if host.error:
            raise RuntimeError(f"the policy could not be started: {host.error}")
        log.info("replica %s is ready", serve.get_replica_context().replica_id.unique_id)

    async def end(self) -> None:
        """Drain: Ray has waited for the requests of this replica, or gives it up."""
        if self._app is None or self._runtime is None:
            return
        await drain(self._app, self._runtime, asyncio.get_running_loop().time() + self._drain_s)
        await close_connections(self._app)

    def _lose(self) -> None:
        self._lost = True

    async def handle(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """One request or websocket; or the life of the server, as ASGI has it."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        assert self._app is not None
        name = serve.get_replica_context().replica_id.unique_id.encode()
        last = next((value for header, value in scope["headers"] if header == LAST_HEADER), name)
        await asgi.answer(self._app, scope, receive, partial(_named, send, name), moved=last != name)

    async def _live(self, receive: asgi.Receive, send: asgi.Send) -> None:
        await receive()
        try:
            await self.begin()
        except Exception as error:
            log.exception("the replica could not be started")
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.end()
        await send({"type": "lifespan.shutdown.complete"})

    # -- what Ray asks -------------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises when the device is lost for good: Ray then replaces the replica."""
        if self._lost:
            raise RuntimeError("the device is lost")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load of this replica, for `BacklogPolicy`."""
        runtime = self._runtime
        if runtime is None or not runtime.loaded:
            return {BACKLOG: 0.0, BUSY: 0.0}
        runtime.batcher.flush()
        groups = [slot.group for slot in runtime.slots]
        backlog = runtime.batcher.device.input(lambda scheduler, now: sum(map(scheduler.queued_seconds, groups)))
        return {BACKLOG: backlog, BUSY: self._busy.read(time.monotonic(), runtime.metrics.busy_seconds)}


async def _named(send: asgi.Send, name: bytes, message: MutableMapping[str, Any]) -> None:
    """Send, with a header that says which replica answers."""
    if message["type"].endswith((".start", ".accept")):
        message["headers"] = [*message.get("headers", ()), (REPLICA_HEADER, name)]
    await send(message)


class RayIngress:
    """The ASGI application of every replica, made before there is one: that of the `RayReplica` in its process."""

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        assert RayReplica.here is not None
        await RayReplica.here.handle(scope, receive, send)
