"""The OpenAI API over one served model: plain ASGI, so that any server can carry it.

Every answer has `X-Request-Id`, the caller's own where it sent one; every error has the API's body, and says in
`X-Should-Retry` what its class knows: whether a retry is safe. A stream begins with its first token, so that whatever
goes wrong before is an honest status. Whoever hangs up, streaming or not, takes the request back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from urllib.parse import unquote

from reflex_runtime.core.errors import Closed, ConfigError, Expired, ReflexError, TooLarge
from reflex_runtime.core.request import Request
from reflex_runtime.drivers.stream import Bell
from reflex_runtime.ipc.engine import OutputStream
from reflex_runtime.server.bodies import LARGE, Bodies
from reflex_runtime.server.connections import connections_of
from reflex_runtime.server.errors import CallerLeft, MethodNotAllowed, NotFound, Unauthorized
from reflex_runtime.server.exchange import ARRIVED, CLOSE, JSON, LEFT, Headers, Scope, retry_headers, too_large
from reflex_runtime.server.generation import Generator, merged
from reflex_runtime.server.openapi import page
from reflex_runtime.server.openapi_models import document
from reflex_runtime.server.served_model import ServedModel
from reflex_runtime.server.trust import Trust
from reflex_runtime.server.wire import openai as wire
from reflex_runtime.server.wire.act import encode_json, printable
from reflex_runtime.server.wire.openai_answers import Answer, Cached, Usage, error_body, told
from reflex_runtime.telemetry import metrics

log = logging.getLogger("reflex.server")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PART = "reflex.part"  # in the scope: the connection's own `Part`, where it has one
GONE = "reflex.gone"  # in the scope: the caller left before its request was looked at
STATUS, MODELS, COMPLETIONS, CHAT = "/status", "/v1/models", "/v1/completions", "/v1/chat/completions"
OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json", "/docs"})
PATHS = OPEN_PATHS | {STATUS, MODELS, COMPLETIONS, CHAT}
MAX_ID_BYTES = 256
_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that collect answers would collect this one
]


class Part(Protocol):
    """A way to write a part of the body of a streamed answer at once."""

    @property
    def ready(self) -> bool:
        """Whether it may be written now: the head was sent, and the connection takes more."""

    def write(self, data: bytes) -> None:
        """Write it."""

    def abort(self) -> None:
        """End the connection without what was not taken yet."""


class Exchange:
    """One HTTP request and its answer. streams: what generates for it. left: its caller has gone. started: when it
    reached this machine."""

    def __init__(self, app: OpenAIApp, scope: Scope, receive: Receive, send: Send, number: str) -> None:
        self.app, self.scope, self.receive, self.send = app, scope, receive, send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        own = self.headers.get(b"x-request-id", b"")
        self.id = number
        self.request_id = own.decode() if _plain(own) else number
        self.streams: list[OutputStream] = []
        self.left = self.received = self.begun = False
        self.held = 0
        self.started = float(scope.get(ARRIVED) or time.monotonic())

    def leave(self) -> None:
        """The caller hung up: what is generated for it is taken back."""
        self.left = True
        for stream in self.streams:
            stream.close()

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head of the answer."""
        self.begun = True
        path = self.scope["path"]
        known = path if path in PATHS else MODELS + "/{id}" if path.startswith(MODELS + "/") else "other"
        self.app.model.answered(known, status)
        headers = [*headers, (b"x-request-id", self.request_id.encode())]
        # Who waits for a go-ahead may or may not send the body after this: only a new connection starts clean.
        if self.app.closing or (not self.received and b"expect" in self.headers):
            headers.append(CLOSE)
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, more: bool = False) -> None:
        """Send the body of the answer, or a part of it."""
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(self, status: int, data: bytes, kind: bytes = JSON, extra: Headers | None = None) -> None:
        """A whole answer."""
        head = [(b"content-type", kind), (b"content-length", b"%d" % len(data)), *(extra or ())]
        await self.begin(status, head)
        await self.body(data)

    async def fail(self, error: ReflexError) -> None:
        """Answer with an error; an event where the answer is a stream that has begun."""
        data = error_body(error)
        if self.begun:
            await self.body(b"data: " + data + b"\n\n")
            return
        status = told(error).status
        extra = _retry(error)
        if status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, MethodNotAllowed):
            extra.append((b"allow", str(error.details["allow"]).encode()))
        await self.answer(status, data, JSON, extra)


class OpenAIApp:
    """The application. closing: what is asked from now on is refused, and connections close after their answer.

    asked: requests so far. active: those being answered; `idle` is set while there are none. entering: those that are
    still being received or tokenised; `entered` is set while there are none.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.closing = False
        self.asked = self.active = 0
        self.idle, self.entered = asyncio.Event(), asyncio.Event()
        self.idle.set()
        self.entered.set()
        self._key = model.config.api_key.encode()
        self._trust = Trust(model.config.host, model.config.allow_host)
        self._entering: set[asyncio.Task[Any]] = set()
        self.connections = connections_of(model.config)
        self.bodies = Bodies(int(model.config.max_bodies_mb * 1e6), self.connections)
        self._prefix = secrets.token_hex(6)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        self.asked += 1
        exchange = Exchange(self, scope, receive, send, f"{self._prefix}-{self.asked:x}")
        self.active += 1
        self.idle.clear()
        try:
            await self._answer(exchange)
        except ReflexError as error:
            await exchange.fail(error)
        except asyncio.CancelledError:
            if not self.closing:
                raise
            log.warning("request %s: its reader takes nothing, and the time to shut down is over", exchange.request_id)
            if (part := exchange.scope.get(PART)) is not None:
                part.abort()
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            await exchange.fail(ReflexError("internal error; the server's log has the details"))
        finally:
            exchange.leave()
            self.bodies.release(exchange)
            self.active -= 1
            if not self.active:
                self.idle.set()

    async def _answer(self, exchange: Exchange) -> None:
        path, method = exchange.scope["path"], exchange.scope["method"]
        if not self._key:
            self._trust.check(method, exchange.headers)
        elif path not in OPEN_PATHS:
            self._authorize(exchange)
        if path in (COMPLETIONS, CHAT):
            if method != "POST":
                raise MethodNotAllowed(f"{path} takes POST", allow="POST")
            await self._generate(exchange, path == CHAT)
            return
        if path not in PATHS and not path.startswith(MODELS + "/"):
            raise NotFound(printable(f"no such path: {path[:200]}"))
        if method not in ("GET", "HEAD"):
            raise MethodNotAllowed(f"{path[:200]} takes GET", allow="GET")
        if path == "/health":
            body = self.model.health()
            await exchange.answer(200 if body["status"] == "ok" else 503, encode_json(body))
        elif path == "/metrics":
            await exchange.answer(200, await self.model.metrics(), metrics.CONTENT_TYPE.encode())
        elif path == "/openapi.json":
            await exchange.answer(200, self._described())
        elif path == "/docs":
            await exchange.answer(200, page(self._described()), b"text/html; charset=utf-8")
        elif path == STATUS:
            await exchange.answer(200, encode_json(await self.model.status()))
        elif path == MODELS:
            await exchange.answer(200, encode_json({"object": "list", "data": [self.model.card()]}))
        else:
            self._check_name(unquote(path[len(MODELS) + 1 :]))
            await exchange.answer(200, encode_json(self.model.card()))

    @staticmethod
    def refusal(error: ReflexError, request_id: str) -> tuple[Headers, bytes]:
        """What a connection answers by itself, to what is not a request."""
        return [(b"content-type", JSON), *_retry(error)], error_body(error)

    def _authorize(self, exchange: Exchange) -> None:
        plain = exchange.headers.get(b"x-reflex-key", b"")
        bearer = exchange.headers.get(b"authorization", b"")
        borne = bearer[7:].strip() if bearer[:7].lower() == b"bearer " else b""
        if not (hmac.compare_digest(plain, self._key) | hmac.compare_digest(borne, self._key)):
            raise Unauthorized("send the key as Authorization: Bearer KEY")

    def _described(self) -> bytes:
        limits = None if self.model.host is None else self.model.host.generator.limits
        return document(self.model.name, limits, self.model.config.max_queue, tuple(OPEN_PATHS) if self._key else None)

    def _check_name(self, name: str) -> None:
        if name != self.model.name:
            raise wire.ModelNotFound(printable(f"the model {name[:200]!r} does not exist; {self.model.name!r} does"))

    def _check_choices(self, asked: wire.Asked) -> None:
        """They are queued together: more than may wait never are, however often it is tried."""
        choices, most = asked.n * max(1, len(asked.prompts)), self.model.config.max_queue
        if choices > most:
            raise wire.BadRequest(f"n: asks for {choices} choices of all prompts, at most {most} may wait", "n")

    def _check_tokens(self, asked: wire.Asked, prompts: list[list[int]]) -> None:
        """The same for their tokens. One that is alone may wait whatever its length."""
        tokens, most = asked.n * sum(map(len, prompts)), self.model.config.max_queued_tokens
        if tokens > most and asked.n * len(prompts) > 1:
            name = "n" if asked.n > 1 else asked.field
            raise wire.BadRequest(f"{name}: all choices have {tokens} prompt tokens, at most {most} may wait", name)

    def give_up_entering(self) -> None:
        """Answer those whose request has not come to its end, although they are still sending it."""
        for task in self._entering:
            task.cancel()

    # -- generation ----------------------------------------------------------------------------------------------------

    async def _generate(self, exchange: Exchange, chat: bool) -> None:
        runtime = self._open()
        bell = Bell()
        with self._watched(exchange) as watch:
            with self._enters():
                asked = await self._asked(exchange, chat, watch)
                self._check_name(asked.model)
                self._check_choices(asked)
                prompts = await self._tokens(runtime, asked)
                self._check_tokens(asked, prompts)
                asked = _aged(asked, exchange)
                groups = [_requests(runtime, asked, i, ids, exchange) for i, ids in enumerate(prompts)]
                if exchange.left:
                    raise CallerLeft("the caller left before its request was queued")
                for group in groups:  # nothing is awaited: all of them, or none
                    exchange.streams += runtime.submit_alike(group, bell)
                asked = replace(asked, prompts=[], messages=None)  # the texts are not needed any more
                self.bodies.release(exchange)
            token, logprobs = runtime.tokenizer.token, asked.params.logprobs is not None
            n = len(exchange.streams)
            answer = Answer(exchange.id, asked.model, chat, n, token, logprobs, asked.include_usage)
            await (_stream if asked.stream else _whole)(exchange, answer, asked, bell)

    def _open(self) -> Generator:
        if self.closing:
            raise Closed("the server is shutting down", retry_after=1.0)
        return self.model.generator

    @staticmethod
    async def _tokens(runtime: Generator, asked: wire.Asked) -> list[list[int]]:
        try:
            if asked.messages is not None:
                return [await runtime.encode_chat(asked.messages)]
            texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]  # all of them are, or none
            return await runtime.encode(texts) if texts else [p for p in asked.prompts if not isinstance(p, str)]
        except ConfigError as error:
            raise wire.refused(error, asked.field) from None

    async def _asked(self, exchange: Exchange, chat: bool, watch: Callable[[], None]) -> wire.Asked:
        """Read what is asked. watch: called once its body is there."""
        most = self.model.config.max_body_bytes
        too_large(exchange.headers, most)
        body = await self.bodies.read(exchange, exchange.scope, exchange.receive, most)
        exchange.received = True
        watch()
        decode = wire.chat if chat else wire.completion
        return decode(body) if len(body) <= LARGE else await self.bodies.beside(decode, body)

    @contextlib.contextmanager
    def _enters(self) -> Iterator[None]:
        """Until it is queued, a drain waits for the request for a moment and then gives it up."""
        task = asyncio.current_task()
        assert task is not None
        self._entering.add(task)
        self.entered.clear()
        try:
            yield
        except asyncio.CancelledError:
            if not self.closing:
                raise
            task.uncancel()
            raise Closed("the server is shutting down, and the request was not complete", retry_after=1.0) from None
        finally:
            self._entering.discard(task)
            if not self._entering:
                self.entered.set()

    @contextlib.contextmanager
    def _watched(self, exchange: Exchange) -> Iterator[Callable[[], None]]:
        """Notice when the caller hangs up.

        Our own connection calls what the scope has under LEFT; under another server, a task waits for it once `watch`
        was called: before that the body is being received.
        """
        watchers: list[asyncio.Task[None]] = []
        if LEFT in exchange.scope:
            exchange.scope[LEFT] = exchange.leave
            if exchange.scope.get(GONE):
                exchange.leave()

        async def wait_for_disconnect() -> None:
            message = await exchange.receive()
            if message["type"] == "http.disconnect":
                exchange.leave()

        def watch() -> None:
            if LEFT not in exchange.scope:
                watchers.append(asyncio.create_task(wait_for_disconnect()))

        try:
            yield watch
        finally:
            for watcher in watchers:
                watcher.cancel()


def _aged(asked: wire.Asked, exchange: Exchange) -> wire.Asked:
    """With the rest of its time limit: it counts from when the request reached this machine."""
    if asked.time_limit is None:
        return asked
    left = asked.time_limit - (time.monotonic() - exchange.started)
    if left <= 0.0:
        raise Expired("its deadline passed while it was read")
    return replace(asked, time_limit=left)


def _requests(runtime: Generator, asked: wire.Asked, number: int, ids: list[int], exchange: Exchange) -> list[Request]:
    """The requests of one prompt, one for each choice. Raises BadRequest where they could never run."""
    params = asked.params
    if asked.max_tokens is None:  # as many as there is room for
        params = replace(params, max_tokens=runtime.limits.room(len(ids)))
    peer = exchange.scope.get("client")
    client = asked.client if asked.client is not None else f"@{peer[0]}" if peer else ""
    found = []
    for i in range(asked.n):
        index = number * asked.n + i
        seeded = params if params.seed is None or not i else replace(params, seed=(params.seed + i) % (1 << 64))
        name = exchange.request_id + (f"#{index}" if index or asked.n > 1 or len(asked.prompts) > 1 else "")
        try:
            request = runtime.request(
                ids, seeded, id=name, priority=asked.priority, client=client, time_limit=asked.time_limit
            )
        except TooLarge as error:
            raise wire.BadRequest(error.message, asked.field, "context_length_exceeded") from None
        except ConfigError as error:
            raise wire.refused(error, asked.field) from None
        found.append(request)
    return found


async def _whole(exchange: Exchange, answer: Answer, asked: wire.Asked, bell: Bell) -> None:
    async for index, outputs in merged(exchange.streams, bell):
        answer.add(index, outputs)
    await exchange.answer(200, answer.whole(_usage(exchange.streams, asked.n)))


async def _stream(exchange: Exchange, answer: Answer, asked: wire.Asked, bell: Bell) -> None:
    part: Part | None = exchange.scope.get(PART)
    aside = partial(_pass_on, exchange, answer, part) if part is not None and len(exchange.streams) == 1 else None
    async for index, outputs in merged(exchange.streams, bell, aside):
        events = answer.chunk(index, outputs)
        if not exchange.begun:
            await exchange.begin(200, _STREAM)
        if events:
            await exchange.body(events, more=True)
    await exchange.body(answer.end(_usage(exchange.streams, asked.n)))


def _pass_on(exchange: Exchange, answer: Answer, part: Part) -> bool:
    """Write what a stream says where it is said, without waking a task for each token. False when there is more to it:
    nothing was sent yet, the reader is slow, the end, an error."""
    (stream,) = exchange.streams
    if not exchange.begun or stream.ended or not part.ready:
        return False
    try:
        events = answer.chunk(0, stream.take())
    except ReflexError:
        return False  # it is raised again for who is woken
    if events:
        part.write(events)
    return True


def _usage(streams: list[OutputStream], n: int) -> Usage:
    """A prompt counts once, whatever the number of its choices."""
    firsts = streams[::n]
    prompt, made = sum(s.prompt_tokens for s in firsts), sum(s.completion_tokens for s in streams)
    return Usage(prompt, made, prompt + made, Cached(sum(s.cached_tokens for s in firsts)))


def _retry(error: ReflexError) -> Headers:
    return [(b"x-should-retry", b"true" if error.retry_safe else b"false"), *retry_headers(error)]


def _plain(value: bytes) -> bool:
    """Whether an id can be told again as it came: printable ASCII, and not too long."""
    if not (0 < len(value) <= MAX_ID_BYTES and value.isascii()):
        return False
    return value.decode().isprintable() and value == value.strip()
