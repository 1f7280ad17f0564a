"""The application: routes, the key, and the questions that are answered at once. POST /act is in `act`.

Every answer carries `X-Request-Id`; every non-2xx body has `error`, `message`, `request_id` and `retry_safe`. Nothing
in a request can make it fail in another way: what is not a `ReflexError` becomes a 500 without a stack trace in it.

There are two ways in. `whole` takes a request that has come with its body, as our own connection hands it over: no
coroutine, because every layer costs on the hot path. Calling the application is plain ASGI, for a body that is still
to come and for any other server. Both go through `begin` and end in `Exchange.answer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

from reflex_runtime.config import settings
from reflex_runtime.core.errors import Closed, ReflexError
from reflex_runtime.policies import Export
from reflex_runtime.server import openapi
from reflex_runtime.server.act import Act
from reflex_runtime.server.admin import Admin, is_outcome
from reflex_runtime.server.bodies import Bodies
from reflex_runtime.server.connections import connections_of
from reflex_runtime.server.errors import (
    CallerLeft,
    MethodNotAllowed,
    NotFound,
    Unauthorized,
    describe_error,
)
from reflex_runtime.server.exchange import (
    JSON,
    LEFT,
    Door,
    Exchange,
    Headers,
    Reply,
    Scope,
    retry_headers,
    too_large,
)
from reflex_runtime.server.runtime import PolicyRuntime
from reflex_runtime.server.trust import Trust, check_direct
from reflex_runtime.server.wire import act as wire
from reflex_runtime.telemetry import metrics
from reflex_runtime.version import __version__

log = logging.getLogger("reflex.server")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Answer = tuple[int, Headers, bytes]
Run = Callable[[Exchange, bytes], None]

OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json", "/docs"})
MAX_OPERATOR_BODY = 64 * 1024  # bytes of what is asked beside /act
ACT, OUTCOME = "/act", "/episodes/{id}/outcome"


class App:
    """The application around one `PolicyRuntime`."""

    def __init__(self, runtime: PolicyRuntime) -> None:
        self.runtime = runtime
        self.config = runtime.config
        self.connections = connections_of(self.config)
        self.door = Door(Bodies(int(self.config.max_bodies_mb * 1e6), self.connections))
        self.act = Act(runtime, self.door)
        self._key = self.config.api_key.encode()
        self._trust = Trust(self.config.host, self.config.allow_host)
        self._document: tuple[Mapping[str, Export], bytes] | None = None  # of these exports
        self._reading: set[asyncio.Task[Any]] = set()
        self.admin = Admin(runtime)
        self._get: dict[str, Callable[[Exchange], None]] = {
            "/health": self.health,
            "/config": self.configuration,
            "/metrics": self.metrics,
            "/diagnostics/cost-model": self.cost_model,
            "/diagnostics/rollout": self.rollout,
            "/diagnostics/shadow": self.shadow,
            "/openapi.json": self.openapi,
            "/docs": self.docs,
        }
        self._post: dict[str, Run] = {
            ACT: self.act.run,
            "/admin/split": self.admin.split,
            "/admin/rollback": self.admin.rollback,
            "/admin/reset": self.admin.reset,
            "/admin/load": self.admin.load,
            "/admin/faults": self.admin.faults,
            OUTCOME: self.admin.outcome,
        }

    def whole(self, scope: Scope, body: bytes, reply: Reply) -> None:
        """Take a request that is all there. reply: called on the loop with its answer, before this returns or later."""
        exchange = self.door.open(scope, reply)
        run = self.begin(exchange)
        if run is not None:
            try:
                self.door.bodies.take(exchange, len(body))
            except ReflexError as error:
                self._fail(exchange, error)
            else:
                self._go_on(exchange, run, body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        exchange = self.door.open(scope, partial(_set_answer, answer))
        with self._watched(exchange, receive) as watch:
            run = self.begin(exchange)
            if run is not None:
                try:
                    body = await self._body(exchange, receive)
                except ReflexError as error:
                    self._fail(exchange, error)
                except asyncio.CancelledError:
                    self._fail(exchange, CallerLeft("the server gave up waiting for the request"))
                    raise
                else:
                    watch()
                    self._go_on(exchange, run, body)
                    del body  # it is decoded, or about to be: not kept until it is answered
            status, headers, content = await answer
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def begin(self, exchange: Exchange) -> Run | None:
        """Answer what can be answered by its head; else what is to be done once its body is there."""
        path = exchange.scope["path"]
        try:
            asked = exchange.scope["method"]
            if not self._key:
                self._trust.check(asked, exchange.headers)
            elif path not in OPEN_PATHS:
                self._authorize(exchange)
            run = self._post.get(OUTCOME if is_outcome(path) else path)
            if run is not None:
                if asked != "POST":
                    raise MethodNotAllowed(f"{path[:200]} takes POST", allow="POST")
                if path == ACT:
                    self.act.enter(exchange)
                else:
                    self._enter(exchange)
                return run
            answer = self._get.get(path)
            if answer is None:
                raise NotFound(f"no such path: {path[:200]}")
            if asked not in ("GET", "HEAD"):
                raise MethodNotAllowed(f"{path} takes GET", allow="GET")
            answer(exchange)
        except Exception as error:
            self._fail(exchange, error)
        return None

    def _go_on(self, exchange: Exchange, run: Run, body: bytes) -> None:
        try:
            run(exchange, body)
        except Exception as error:
            self._fail(exchange, error)

    def _fail(self, exchange: Exchange, error: Exception) -> None:
        if exchange.scope["path"] == ACT:
            self.act.fail(exchange, error)
        elif isinstance(error, ReflexError):
            exchange.fail(error)
        else:
            log.error("request %s failed", exchange.request_id, exc_info=error)
            exchange.fail(ReflexError("internal error; the server's log has the details"))

    def _enter(self, exchange: Exchange) -> None:
        """What changes state is for who has the key, or for this machine where there is none."""
        if not self._key:
            check_direct(exchange.scope, exchange.headers)
        if self.door.closing:
            raise Closed("the server is shutting down", retry_after=1.0)
        self.runtime.need_policy()
        too_large(exchange.headers, self._most(exchange))

    @staticmethod
    def refusal(error: ReflexError, request_id: str) -> tuple[Headers, bytes]:
        """What a connection answers by itself, to what is not a request."""
        return [(b"content-type", JSON), *retry_headers(error)], wire.encode_json(describe_error(error, request_id))

    def _authorize(self, exchange: Exchange) -> None:
        plain = exchange.headers.get(b"x-reflex-key", b"")
        bearer = exchange.headers.get(b"authorization", b"")
        borne = bearer[7:].strip() if bearer[:7].lower() == b"bearer " else b""
        if not (hmac.compare_digest(plain, self._key) | hmac.compare_digest(borne, self._key)):
            raise Unauthorized("send the key as Authorization: Bearer KEY or as X-Reflex-Key")

    def close(self) -> None:
        """From now on refuse what is asked of the policy, and close every connection after its next answer."""
        self.door.closing = True
        self.admin.close()

    def give_up_reading(self) -> None:
        """Answer those whose body has not come, although they are still sending it."""
        for task in self._reading:
            task.cancel()

    # -- ASGI ----------------------------------------------------------------------------------------------------------

    async def _body(self, exchange: Exchange, receive: Receive) -> bytes:
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            return await self.door.bodies.read(exchange, exchange.scope, receive, self._most(exchange))
        except asyncio.CancelledError:
            if not self.door.closing:
                raise
            task.uncancel()
            raise Closed("the server is shutting down, and the request was not complete", retry_after=1.0) from None
        finally:
            self._reading.discard(task)

    def _most(self, exchange: Exchange) -> int:
        """Bytes that its body may have."""
        most = self.config.max_body_bytes
        return most if exchange.scope["path"] == ACT else min(most, MAX_OPERATOR_BODY)

    @contextlib.contextmanager
    def _watched(self, exchange: Exchange, receive: Receive) -> Iterator[Callable[[], None]]:
        """Take the request back when the caller hangs up, or when the server gives its task up.

        Our own connection calls what the scope has under LEFT; under another server, a task waits for it once `watch`
        was called: before that the body is being received.
        """
        watchers: list[asyncio.Task[None]] = []

        async def wait_for_disconnect() -> None:
            await receive()
            self.act.caller_left(exchange)

        def watch() -> None:
            if LEFT not in exchange.scope:
                watchers.append(asyncio.create_task(wait_for_disconnect()))

        try:
            yield watch
        except asyncio.CancelledError:
            self.act.caller_left(exchange)
            raise
        finally:
            for watcher in watchers:
                watcher.cancel()

    # -- GET -----------------------------------------------------------------------------------------------------------

    def health(self, exchange: Exchange) -> None:
        """200 only when ready."""
        runtime = self.runtime
        state, breaker = runtime.health, runtime.rollout.breaker
        body: dict[str, Any] = {
            "status": "ok" if state == "ready" else state,
            "state": state,
            "model_loaded": runtime.loaded,
            "inference_mode": runtime.policy.inference_mode if runtime.loaded else None,
            "export_dir": str(runtime.export.path),
            "consecutive_crashes": max(breaker.count(slot) for slot in runtime.served),
            "max_consecutive_crashes": self.config.max_consecutive_crashes,
            "robot_id": self.config.robot_id or None,
            "verdict": breaker.verdict,
            "slots": {
                slot: {"verdict": verdict, "consecutive_crashes": breaker.count(slot)}
                for slot, verdict in breaker.verdicts.items()
            },
        }
        if runtime.shadow is not None:
            body["slots"]["shadow"] = {"verdict": runtime.shadow.verdict, "why": runtime.shadow.stopped or None}
        if runtime.error:
            body["error"] = runtime.error
        if runtime.lives is not None:
            body |= {"restarts": runtime.lives.restarts, "last_exit": runtime.lives.last_exit}
        if runtime.loaded:
            body["hung_batches"] = runtime.batcher.device.hung
        if runtime.faults or self.config.inject_latency_ms:
            body["injected"] = {"faults": runtime.faults, "latency_ms": self.config.inject_latency_ms}
        if runtime.recorder is not None:
            error = runtime.recorder.error
            body["recording"] = {
                "recorded": runtime.recorder.recorded,
                "dropped": runtime.recorder.dropped,
                "cpu_s": round(runtime.recorder.cpu, 6),
                "file": None if runtime.recorder.path is None else str(runtime.recorder.path),
                "error": None if error is None else str(error),
            }
        if runtime.slo is not None:
            body["slo"] = {"violated": runtime.slo.violated, "value_ms": runtime.slo.value_ms}
        if runtime.trace is not None and runtime.trace.error is not None:
            body["trace_error"] = str(runtime.trace.error)
        exchange.answer(200 if state == "ready" else 503, wire.encode_json(body))

    def configuration(self, exchange: Exchange) -> None:
        """The export's configuration and the settings in force."""
        runtime = self.runtime
        body = {
            "export": dict(runtime.export.config),
            "policy": runtime.policy.describe() if runtime.loaded else None,
            "slots": {name: slot.policy.describe() for name, slot in runtime.slots.items()} if runtime.loaded else None,
            "server": settings(self.config),
            "reflex_version": __version__,
        }
        exchange.answer(200, wire.encode_json(body))

    def metrics(self, exchange: Exchange) -> None:
        """Prometheus text."""
        if self.runtime.loaded:
            self.runtime.batcher.flush()
        exchange.answer(200, self.runtime.metrics.render(), metrics.CONTENT_TYPE.encode())

    def cost_model(self, exchange: Exchange) -> None:
        """Every key the cost model knows."""
        runtime = self.runtime
        runtime.need_policy()
        slots = runtime.batcher.device.input(
            lambda scheduler, now: {slot: scheduler.cost_model(slot).snapshot() for slot in runtime.slots}
        )
        exchange.answer(200, wire.encode_json({"cost_model": self.config.cost_model, "slots": slots}))

    def rollout(self, exchange: Exchange) -> None:
        """Split, breakers, outcomes, the comparison, the ramp and what has changed."""
        body = self.runtime.rollout.snapshot(time.monotonic())
        body["versions"] = {name: slot.version.name for name, slot in self.runtime.slots.items()}
        exchange.answer(200, wire.encode_json(body))

    def shadow(self, exchange: Exchange) -> None:
        """How far the shadow's actions are from the served ones."""
        if self.runtime.shadow is None:
            raise NotFound("no shadow is served: --shadow-policy DIR")
        exchange.answer(200, wire.encode_json(dict(self.runtime.shadow.snapshot())))

    def openapi(self, exchange: Exchange) -> None:
        """The machine-readable description."""
        exchange.answer(200, self._described())

    def docs(self, exchange: Exchange) -> None:
        """The same for people."""
        exchange.answer(200, openapi.page(self._described()), b"text/html; charset=utf-8")

    def _described(self) -> bytes:
        slots = self.runtime.slots
        exports = {slot: holder.policy.export for slot, holder in slots.items()} or self.runtime.exports
        if self._document is None or self._document[0] != exports:
            self._document = (exports, openapi.document(exports, bool(self._key)))
        return self._document[1]


def _set_answer(future: asyncio.Future[_Answer], status: int, headers: Headers, body: bytes) -> None:
    if not future.done():
        future.set_result((status, headers, body))
