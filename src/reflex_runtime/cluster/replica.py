"""One Reflex server as a replica of Ray Serve: the same application as `reflex serve`, below Ray's proxy."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

import msgspec
from prometheus_client import disable_created_metrics
from ray import serve

from reflex_runtime.cluster.front import LAST_HEADER, REPLICA_HEADER, read_body, replayed
from reflex_runtime.cluster.peers import RayPeers
from reflex_runtime.cluster.scaling import BACKLOG, BUSY
from reflex_runtime.cluster.together import (
    PeerAnswer,
    PeerRequest,
    RayLive,
    changes,
    concerns_all,
    together,
    unsure,
    why_not,
)
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.drivers.in_thread import in_thread
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.policies.serving.watching import asked_live, watchers_of
from reflex_runtime.telemetry.live import OnDemandLive
from reflex_runtime.web import asgi
from reflex_runtime.web.app import App
from reflex_runtime.web.dashboard import dashboard_routes
from reflex_runtime.web.errors import Conflict, NotReady
from reflex_runtime.web.exchange import OPERATOR_BODY, retry_headers
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.serve import Make, close_connections, drain

log = logging.getLogger("reflex.ray")

MakeServer = Callable[[], tuple[Make, float]]
"""Called in the replica's process: what `web.serve` serves, and the seconds that its end may take."""
SETTLES: Final = 10.0  # seconds after which every other replica knows this one
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
        self._peers = RayPeers()
        self._live: OnDemandLive | None = None
        self._changes: dict[str, PeerRequest] = {}  # by path: the last one that was done
        self._settled_at = 0.0  # until then it asks what was changed meanwhile

    async def begin(self) -> None:
        """Load and warm up. Raises RuntimeError if the policy cannot be served: Ray then reports the replica's start
        as failed, with the message."""
        make, self._drain_s = await asyncio.to_thread(self._make)
        app, host = make(self._lose, None)
        assert isinstance(host, PolicyRuntime)
        app.form = replace(app.form, keeps_id=True)  # that of the front, so that every part has the same one
        watchers = watchers_of(host, lambda _: RayLive(self._peers, _name()))
        app.routes |= {route.path: route for route in dashboard_routes(watchers)}
        self._live = asked_live(host)
        self._app, self._runtime = app, host
        await host.start()
        if host.error:
            raise RuntimeError(f"the policy could not be started: {host.error}")
        await self._catch_up()
        self._settled_at = time.monotonic() + SETTLES
        log.info("replica %s is ready", _name())

    async def end(self) -> None:
        """Drain: Ray has waited for the requests of this replica, or gives it up."""
        if self._app is None or self._runtime is None or self._live is None:
            return
        self._live.close()
        await drain(self._app, self._runtime, asyncio.get_running_loop().time() + self._drain_s)
        await close_connections(self._app)

    def _lose(self) -> None:
        self._lost = True

    async def handle(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """One request or websocket; or the life of the server, as ASGI has it."""
        if scope["type"] == "lifespan":
            await self._life(receive, send)
            return
        assert self._app is not None
        if scope["type"] == "http" and why_not(scope["path"]):
            await _refuse(Conflict(why_not(scope["path"])), scope, send)
            return
        if scope["type"] == "http" and concerns_all(scope["method"], scope["path"]):
            messages = await read_body(receive)
            body = b"".join(message.get("body", b"") for message in messages)
            if len(body) <= OPERATOR_BODY:
                await self._for_all(scope, body, send)
                return
            receive = replayed(messages, receive)  # it is refused here
        name = _name().encode()
        last = next((value for header, value in scope["headers"] if header == LAST_HEADER), name)
        await asgi.answer(self._app, scope, receive, partial(_named, send, name), moved=last != name)

    async def _life(self, receive: asgi.Receive, send: asgi.Send) -> None:
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

    # -- what all replicas are asked -----------------------------------------------------------------------------------

    async def _for_all(self, scope: asgi.Scope, body: bytes, send: asgi.Send) -> None:
        """Ask every replica, and answer for all of them."""
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        client = scope.get("client")
        request = PeerRequest(
            scope["method"], scope["path"], scope.get("query_string", b""), headers,
            None if client is None else (client[0], client[1]), body, time.time(),
        )  # fmt: skip
        found = await self._peers.call("asked", request)
        if why := unsure(request, found):
            await _refuse(NotReady(why, retry_after=1.0), scope, send)
            return
        answers = [one for one in found if one is not None] or [await self.asked(request)]
        told = await in_thread(lambda: together(request, sorted(answers)))  # pages are long; robots wait for the loop
        head = [(b"content-type", told.content_type), (b"content-length", b"%d" % len(told.body)), *_id_of(scope)]
        if told.status == 503:
            head.append((b"retry-after", b"1"))
        await send({"type": "http.response.start", "status": told.status, "headers": head})
        await send({"type": "http.response.body", "body": told.body})

    async def asked(self, request: PeerRequest) -> PeerAnswer:
        """The answer of this replica alone to a request that another one got."""
        assert self._app is not None
        scope = {
            "type": "http", "method": request.method, "path": request.path, "raw_path": request.path.encode(),
            "query_string": request.query, "headers": list(request.headers), "client": request.client,
        }  # fmt: skip
        coming: list[dict[str, Any]] = [{"type": "http.request", "body": request.body}]
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            if not coming:
                await asyncio.Event().wait()  # its caller stays
            return coming.pop()

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await asgi.answer(self._app, scope, receive, send)
        status, kind = sent[0]["status"], dict(sent[0]["headers"]).get(b"content-type", b"")
        if status == 200 and changes(request):
            self._changes[request.path] = request
        return PeerAnswer(_name(), status, kind, b"".join(message.get("body", b"") for message in sent[1:]))

    async def live(self, asker: str) -> tuple[str, bytes]:
        """The name of this replica, and its snapshot for those who watch the replica that asks."""
        assert self._live is not None
        return _name(), msgspec.msgpack.encode(self._live.snapshot(asker))

    async def changed(self) -> list[PeerRequest]:
        """The changes that hold here, for a replica that has begun since."""
        return list(self._changes.values())

    async def _catch_up(self) -> None:
        """Do what was changed before this replica began, or while Ray did not know it yet."""
        known = [change for changes in await self._peers.call("changed") for change in changes or ()]
        for change in sorted(known, key=lambda change: change.at):
            mine = self._changes.get(change.path)
            if mine is None or mine.at < change.at:
                log.info("%s was asked of the other replicas: done here too", change.path)
                await self.asked(change)

    # -- what Ray asks -------------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises when the device is lost for good: Ray then replaces the replica."""
        if self._lost:
            raise RuntimeError("the device is lost")
        if time.monotonic() < self._settled_at:
            await self._catch_up()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load of this replica, for `BacklogPolicy`."""
        runtime = self._runtime
        if runtime is None or not runtime.loaded:
            return {BACKLOG: 0.0, BUSY: 0.0}
        runtime.batcher.flush()
        groups = [slot.group for slot in runtime.slots]
        backlog = runtime.batcher.device.input(lambda scheduler, now: sum(map(scheduler.queued_seconds, groups)))
        return {BACKLOG: backlog, BUSY: self._busy.read(time.monotonic(), runtime.metrics.busy_seconds)}


def _name() -> str:
    name: str = serve.get_replica_context().replica_id.unique_id
    return name


def _id_of(scope: asgi.Scope) -> list[tuple[bytes, bytes]]:
    """The header that the front has given it."""
    return [(name, value) for name, value in scope["headers"] if name == b"x-request-id"]


async def _refuse(error: ReflexError, scope: asgi.Scope, send: asgi.Send) -> None:
    told = PLAIN.refuse(error, next((value.decode() for _, value in _id_of(scope)), ""), False)
    head = [(b"content-type", told.content_type), (b"content-length", b"%d" % len(told.body))]
    head += [*told.headers, *retry_headers(error), *_id_of(scope)]
    await send({"type": "http.response.start", "status": told.status, "headers": head})
    await send({"type": "http.response.body", "body": told.body})


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
