"""The ASGI application: routes, auth, limits and answers. Plain ASGI, because every layer costs on the hot path.

Every answer carries `X-Request-Id`; every non-2xx body has `error`, `message`, `request_id` and `retry_safe`. Nothing
in a request can make it fail in another way: what is not a `ReflexError` becomes a 500 without a stack trace in it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

import numpy as np

from reflex_runtime.config import settings
from reflex_runtime.core.errors import Closed, Expired, ReflexError
from reflex_runtime.core.request import Admission, Priority, Ticket
from reflex_runtime.policies import ActionChunk, Observation
from reflex_runtime.server import openapi
from reflex_runtime.server.errors import (
    BodyTooLarge,
    CallerLeft,
    ClientError,
    MethodNotAllowed,
    NotFound,
    TooManyRequests,
    Unauthorized,
    describe_error,
)
from reflex_runtime.server.http import BROKEN, LEFT
from reflex_runtime.server.images import has_images, images_of
from reflex_runtime.server.runtime import SLOT, Runtime
from reflex_runtime.server.wire import act as wire
from reflex_runtime.telemetry import metrics
from reflex_runtime.version import __version__

log = logging.getLogger("reflex.server")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json", "/docs"})
_PRIORITIES = {"urgent": Priority.URGENT, "default": Priority.DEFAULT, "background": Priority.BACKGROUND}
_JSON = wire.JSON_TYPE.encode()
_MSGPACK = wire.MSGPACK_TYPE.encode()


class Exchange:
    """One HTTP request: what was asked and how it is answered.

    started: when its head had been read; received: when all of it had, 0.0 before.
    """

    __slots__ = (
        "app", "headers", "left", "receive", "received", "request_id", "scope", "send", "started", "ticket", "watcher",
    )

    def __init__(self, app: App, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.app = app
        self.scope, self.receive, self.send = scope, receive, send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = request_id
        self.started = time.monotonic()
        self.received = 0.0
        self.ticket: Ticket | None = None
        self.left = False
        self.watcher: asyncio.Task[None] | None = None

    async def answer(self, status: int, body: bytes, content_type: bytes = _JSON, extra: Headers | None = None) -> None:
        """Send a whole answer."""
        headers = [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", header_text(self.request_id)),
        ]
        if extra:
            headers += extra
        # Who waits for a go-ahead may or may not send the body after this: only a new connection starts clean.
        if self.app.closing or (b"expect" in self.headers and not self.received):
            headers.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def fail(self, error: ReflexError) -> None:
        """Answer with an error."""
        extra: Headers = []
        if error.retry_after is not None:
            extra.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
        if isinstance(error, Unauthorized):
            extra.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, MethodNotAllowed):
            extra.append((b"allow", str(error.details["allow"]).encode()))
        body = describe_error(error, self.request_id)
        if self.wants_msgpack:
            await self.answer(error.http_status, wire.encode_msgpack(body), _MSGPACK, extra)
        else:
            await self.answer(error.http_status, wire.encode_json(body), _JSON, extra)

    @property
    def sent_msgpack(self) -> bool:
        """Whether the body is msgpack; anything else is read as JSON."""
        return b"msgpack" in self.headers.get(b"content-type", b"").lower()

    @property
    def wants_msgpack(self) -> bool:
        """Whether the answer is to be msgpack: as accepted, else as it was asked."""
        accepted = self.headers.get(b"accept", b"").lower()
        return b"msgpack" in accepted or (accepted in (b"", b"*/*") and self.sent_msgpack)


class App:
    """The application around one `Runtime`. active: POST /act requests being answered. asked: requests so far."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.config = runtime.config
        self.active = 0
        self.closing = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._key = self.config.api_key.encode()
        self._reading: set[asyncio.Task[Any]] = set()
        self._told: tuple[Admission, dict[str, Any]] | None = None
        self._prefix = secrets.token_hex(6)
        self.asked = 0
        self._routes: dict[str, tuple[str, Callable[[Exchange], Awaitable[None]]]] = {
            "/act": ("POST", self.act),
            "/health": ("GET", self.health),
            "/config": ("GET", self.configuration),
            "/metrics": ("GET", self.metrics),
            "/diagnostics/cost-model": ("GET", self.cost_model),
            "/openapi.json": ("GET", self.openapi),
            "/docs": ("GET", self.docs),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        self.asked += 1
        exchange = Exchange(self, scope, receive, send, f"{self._prefix}-{self.asked:x}")
        try:
            await self._route(exchange)
        except ReflexError as error:
            if scope["path"] == "/act":
                self._count_answer(exchange, error.outcome, error.http_status)
            await exchange.fail(error)
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            await exchange.fail(ReflexError("internal error; the server's log has the details"))

    async def _route(self, exchange: Exchange) -> None:
        path = exchange.scope["path"]
        if self._key and path not in OPEN_PATHS:
            self._authorize(exchange)
        found = self._routes.get(path)
        if found is None:
            raise NotFound(f"no such path: {path[:200]}")
        method, handler = found
        asked = exchange.scope["method"]
        if asked != method and not (asked == "HEAD" and method == "GET"):
            raise MethodNotAllowed(f"{path} takes {method}", allow=method)
        await handler(exchange)

    def _authorize(self, exchange: Exchange) -> None:
        plain = exchange.headers.get(b"x-reflex-key", b"")
        bearer = exchange.headers.get(b"authorization", b"")
        borne = bearer[7:].strip() if bearer[:7].lower() == b"bearer " else b""
        if not (hmac.compare_digest(plain, self._key) | hmac.compare_digest(borne, self._key)):
            raise Unauthorized("send the key as Authorization: Bearer KEY or as X-Reflex-Key")

    def close(self) -> None:
        """From now on refuse what is asked of the policy, and close every connection after its next answer."""
        self.closing = True

    def give_up_reading(self) -> None:
        """Answer those whose body has not come, although they are still sending it."""
        for task in self._reading:
            task.cancel()

    # -- POST /act -----------------------------------------------------------------------------------------------------

    async def act(self, exchange: Exchange) -> None:
        """Answer an observation with a chunk of actions."""
        self.active += 1
        self.idle.clear()
        try:
            await self._act(exchange)
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()

    async def _act(self, exchange: Exchange) -> None:
        try:
            if self.closing:
                raise Closed("the server is shutting down", retry_after=1.0)
            limit = self.config.max_concurrent
            if limit and self.active > limit:
                raise TooManyRequests(
                    f"{self.active - 1} requests are being answered, at most {limit} may be", retry_after=1.0,
                    concurrent_requests=self.active - 1, max_concurrent=limit,
                )
            self.runtime.need_policy()
            body = await self._body(exchange)
            fields = wire.decode(body, exchange.sent_msgpack)
            if fields.request_id:
                exchange.request_id = fields.request_id
            self.runtime.admit()
            chunk = await self._run(exchange, fields)
        except asyncio.CancelledError:
            self._count_answer(exchange, "cancelled", 499)
            raise
        except ReflexError as error:
            self._count_answer(exchange, error.outcome, error.http_status)
            await exchange.fail(error)
            return
        except Exception:
            self._count_answer(exchange, "failed", 500)
            raise
        answer = self._answer(exchange, chunk)
        packed = exchange.wants_msgpack
        encoded = wire.encode_msgpack(answer) if packed else wire.encode_json(answer)
        self._count_answer(exchange, "ok", 200)
        await exchange.answer(200, encoded, _MSGPACK if packed else _JSON)

    async def _body(self, exchange: Exchange) -> bytes:
        """The whole body. What is left of one that is too large is read by the connection and thrown away."""
        most = self.config.max_body_bytes
        declared = exchange.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > most:
            raise BodyTooLarge(f"the body has {int(declared)} bytes, at most {most} are read", max_body_bytes=most)
        parts: list[bytes] = []
        size, more = 0, True
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            while more:
                message = await exchange.receive()
                if message["type"] == "http.disconnect":
                    raise CallerLeft("the caller left before it had sent its request")
                part = message.get("body", b"")
                size += len(part)
                if size > most:
                    raise BodyTooLarge(f"the body has over {most} bytes", max_body_bytes=most)
                parts.append(part)
                more = message.get("more_body", False)
        except asyncio.CancelledError:
            if not self.closing:
                raise
            task.uncancel()
            raise Closed("the server is shutting down, and the request was not complete", retry_after=1.0) from None
        finally:
            self._reading.discard(task)
        if BROKEN in exchange.scope.get("extensions", ()):
            raise ClientError("the body broke off: it is not framed as its headers say")
        exchange.received = time.monotonic()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _run(self, exchange: Exchange, fields: wire.ActFields) -> ActionChunk:
        """Prepare, queue and await one request; a caller that hangs up meanwhile takes it back."""
        runtime = self.runtime
        self._watch(exchange)
        try:
            if has_images(fields):
                loop = asyncio.get_running_loop()
                observation = await loop.run_in_executor(runtime.workers, self._observe, exchange, fields)
            else:
                observation = self._observe(exchange, fields)
            if exchange.left:
                raise CallerLeft("the caller left")
            ticket = exchange.ticket = runtime.batcher.submit(
                runtime.policy.request(
                    observation,
                    client=self._client(exchange, fields),
                    priority=_PRIORITIES[fields.priority],
                    time_limit=self._time_limit(exchange, fields),
                )
            )
            chunk: ActionChunk = await ticket.waiter
            return chunk
        finally:
            if LEFT in exchange.scope:
                exchange.scope[LEFT] = None  # the exchange holds the scope: this breaks the circle

    def _observe(self, exchange: Exchange, fields: wire.ActFields) -> Observation:
        return self.runtime.policy.prepare(
            images=images_of(fields),
            instruction=fields.instruction,
            state=wire.state_of(fields),
            episode_id=fields.episode_id or "",
            request_id=exchange.request_id,
            seed=fields.seed,
        )

    def _watch(self, exchange: Exchange) -> None:
        """Take the request back when the caller hangs up or closes its sending side.

        Our own protocol calls; under another server a task waits for it, which costs more than all of the scheduling.
        """
        if LEFT in exchange.scope:
            exchange.scope[LEFT] = lambda: self._caller_left(exchange)
        else:
            exchange.watcher = asyncio.create_task(self._wait_for_disconnect(exchange))

    async def _wait_for_disconnect(self, exchange: Exchange) -> None:
        await exchange.receive()
        self._caller_left(exchange)

    def _caller_left(self, exchange: Exchange) -> None:
        exchange.left = True
        if exchange.ticket is not None and exchange.ticket.outcome is None:
            self.runtime.batcher.cancel(exchange.ticket)

    def _client(self, exchange: Exchange, fields: wire.ActFields) -> str:
        """Whose share it takes: the robot's, else the episode's, else the connection's."""
        return fields.robot_id or fields.episode_id or repr(exchange.scope.get("client"))

    def _time_limit(self, exchange: Exchange, fields: wire.ActFields) -> float | None:
        limit = fields.deadline_ms if fields.deadline_ms is not None else self.config.deadline_ms
        if not limit:
            return None
        left = limit / 1e3 - (time.monotonic() - exchange.started)
        if left <= 0.0:
            raise Expired("its deadline passed while it was read")
        return left

    def _answer(self, exchange: Exchange, chunk: ActionChunk) -> wire.ActAnswer:
        ticket, runtime = exchange.ticket, self.runtime
        assert ticket is not None
        assert ticket.admission is not None
        assert ticket.started is not None
        now = time.monotonic()
        total = now - exchange.received
        spent = _ms(total)
        if self._told is None or self._told[0] is not ticket.admission:  # those of one batch are told the same of it
            self._told = (ticket.admission, _described(ticket.admission))
        return wire.ActAnswer(
            actions=np.asarray(chunk.actions),
            num_actions=chunk.actions.shape[0],
            action_dim=chunk.actions.shape[1],
            latency_ms=spent,
            hz=_thousandths(1.0 / total) if total > 0 else 0.0,
            denoising_steps=chunk.denoising_steps,
            inference_mode=runtime.policy.inference_mode,
            model_hash=runtime.export.model_hash,
            config_hash=runtime.export.config_hash,
            reflex_version=__version__,
            request_id=exchange.request_id,
            timing={
                "queue_ms": _ms(ticket.started - ticket.arrived),
                "batch_ms": _ms(now - ticket.started),
                "total_ms": spent,
                "age_ms": spent,
            },
            batch=self._told[1],
            cache=chunk.cache,
            guard=chunk.guard.as_dict() if chunk.guard is not None else None,
            injected={"latency_ms": self.config.inject_latency_ms} if self.config.inject_latency_ms else None,
        )

    def _count_answer(self, exchange: Exchange, outcome: str, status: int) -> None:
        now = time.monotonic()
        self.runtime.answered(outcome, status, now - exchange.started, now - exchange.received, exchange.ticket)

    # -- GET -----------------------------------------------------------------------------------------------------------

    async def health(self, exchange: Exchange) -> None:
        """200 only when ready."""
        runtime = self.runtime
        state = runtime.health
        body: dict[str, Any] = {
            "status": "ok" if state == "ready" else state,
            "state": state,
            "model_loaded": runtime.loaded,
            "inference_mode": runtime.policy.inference_mode if runtime.loaded else None,
            "export_dir": str(runtime.export.path),
            "consecutive_crashes": runtime.crashes.count,
            "max_consecutive_crashes": runtime.crashes.limit,
            "robot_id": self.config.robot_id or None,
            "slots": {SLOT: {"verdict": "degraded" if runtime.crashes.open else "ok"}},
        }
        if runtime.error:
            body["error"] = runtime.error
        if runtime.loaded:
            body["hung_batches"] = runtime.batcher.device.hung
        if self.config.inject_fault or self.config.inject_latency_ms:
            body["injected"] = {"faults": list(self.config.inject_fault), "latency_ms": self.config.inject_latency_ms}
        if runtime.slo is not None:
            body["slo"] = {"violated": runtime.slo.violated, "value_ms": runtime.slo.value_ms}
        if runtime.trace is not None and runtime.trace.error is not None:
            body["trace_error"] = str(runtime.trace.error)
        await exchange.answer(200 if state == "ready" else 503, wire.encode_json(body))

    async def configuration(self, exchange: Exchange) -> None:
        """The export's configuration and the settings in force."""
        runtime = self.runtime
        body = {
            "export": dict(runtime.export.config),
            "policy": runtime.policy.describe() if runtime.loaded else None,
            "server": settings(self.config),
            "reflex_version": __version__,
        }
        await exchange.answer(200, wire.encode_json(body))

    async def metrics(self, exchange: Exchange) -> None:
        """Prometheus text."""
        if self.runtime.loaded:
            self.runtime.batcher.flush()
        await exchange.answer(200, self.runtime.metrics.render(), metrics.CONTENT_TYPE.encode())

    async def cost_model(self, exchange: Exchange) -> None:
        """Every key the cost model knows."""
        runtime = self.runtime
        runtime.need_policy()
        model = runtime.batcher.scheduler.cost_model(SLOT)
        rows = runtime.batcher.device.input(lambda scheduler, now: model.snapshot())
        body = {"cost_model": self.config.cost_model, "slots": {SLOT: rows}}
        await exchange.answer(200, wire.encode_json(body))

    async def openapi(self, exchange: Exchange) -> None:
        """The machine-readable description."""
        await exchange.answer(200, openapi.document())

    async def docs(self, exchange: Exchange) -> None:
        """The same for people."""
        await exchange.answer(200, openapi.page(), b"text/html; charset=utf-8")


def _described(admission: Admission) -> dict[str, Any]:
    return {
        "id": admission.id,
        "size": admission.size,
        "reason": admission.reason,
        "cost_ms": round(admission.cost * 1e3, 3),
    }


def _ms(seconds: float) -> float:
    """Milliseconds to three places."""
    return _thousandths(seconds * 1e3)


def _thousandths(value: float) -> float:
    """To three places, at a quarter of what `round` costs."""
    return int(value * 1e3 + 0.5) / 1e3


def header_text(text: str) -> bytes:
    """Text as a header value: plain ASCII as it is, anything else percent-encoded."""
    if text.isascii() and text.isprintable() and text == text.strip():
        return text.encode()
    return quote(text, safe="").encode()
