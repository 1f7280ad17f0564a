"""One attempt over httpx: a request goes out, and a `Reply` or a `ClientError` comes back.

httpx keeps the connections, and knows proxies, TLS and Unix sockets. This file adds what a robot needs beside that: one
limit for the whole attempt, a bound on the answer, and one more attempt where a kept connection had been closed.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import httpx

from reflex_runtime.client.errors import BadAnswer, ClientError, TimedOut, Unreachable

MAX_ANSWER: Final = 64 << 20
"""Bytes of an answer that are read at most."""
_UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
_PLAIN = {"Accept-Encoding": "identity"}  # a compressed answer could unfold to any size


@dataclass(frozen=True, slots=True)
class Send:
    """A request to send. limit: seconds until its answer must be there."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None
    limit: float


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer. headers: names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class KeptConnectionClosed(Exception):
    """A kept connection was closed, perhaps long ago, before the head of the answer came."""


@dataclass(slots=True)
class Attempt:
    """What one attempt knows without waiting: its limits for httpx, what came so far, and which error a failure is.

    An answer that trickles in ends late, at most after twice the limit: httpx bounds a part, not the body.
    """

    url: str
    send: Send
    clock: Callable[[], float]
    again: bool  # another attempt may follow
    kept: bool = True  # until it connects
    status: int | None = None
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    until: float = field(init=False)
    timeouts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.until = self.clock() + self.send.limit

    def request(self, trace: Callable[..., Any]) -> dict[str, Any]:
        """The arguments of httpx's `stream`. trace: calls `note`, awaited or not."""
        send = self.send
        return {
            "method": send.method, "url": self.url + send.path, "headers": dict(send.headers), "content": send.body,
            "extensions": {"timeout": self.timeouts, "trace": trace},
        }  # fmt: skip

    def note(self, event: str, _: Mapping[str, Any]) -> None:
        """A phase of the request begins or ends: each gets what is left of the attempt's time."""
        left = max(1e-3, self.until - self.clock())
        self.timeouts.update(connect=left, write=left, read=left)
        if event.startswith("connection.connect_"):
            self.kept = False

    def begin(self, response: httpx.Response) -> None:
        """The head of the answer is there."""
        self.status = response.status_code
        self._bound(int(response.headers.get("content-length", 0)))

    def take(self, part: bytes) -> None:
        self.size += len(part)
        self._bound(self.size)
        self.parts.append(part)
        if self.clock() > self.until:
            raise self.too_late()

    def reply(self, response: httpx.Response) -> Reply:
        return Reply(response.status_code, dict(response.headers), b"".join(self.parts))

    def too_late(self) -> TimedOut:
        return TimedOut(f"no answer from {self.url} within {self.send.limit:.3g} s")

    def failed(self, error: httpx.TransportError) -> ClientError:
        """The error to raise. Raises KeptConnectionClosed if the request may go out once more."""
        why = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
            kind = TimedOut if isinstance(error, httpx.ConnectTimeout) else Unreachable
            return kind(f"cannot connect to {self.url}: {why}", retry_safe=True)
        if isinstance(error, httpx.TimeoutException):
            return self.too_late()
        if isinstance(error, httpx.RemoteProtocolError) and "connect" not in why:  # neither closed nor disconnected
            return BadAnswer(f"not HTTP/1.1: {why}")
        if self.again and self.kept and self.status is None:
            raise KeptConnectionClosed
        return Unreachable(f"{self.url} closed the connection before it had answered: {why}")

    def _bound(self, size: int) -> None:
        if size > MAX_ANSWER:
            raise BadAnswer(f"{size} bytes, at most {MAX_ANSWER} are read", status=self.status)


class Network:
    """Where the server is and how it is reached; the arguments are `Client`'s."""

    def __init__(self, url: str, uds: str | None, proxy: str | None, verify: ssl.SSLContext | bool) -> None:
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"url={url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ValueError(f"url={url!r}: expected http://HOST:PORT or https://HOST")
        self.url, self._uds = url.rstrip("/"), uds
        self._tls = _system_certificates() if verify is True else verify
        here = parts.host in ("localhost", "::1") or parts.host.startswith("127.")
        self._options: dict[str, Any] = {  # the environment's proxies are not for a server on this machine
            "proxy": proxy, "verify": self._tls, "limits": _UNLIMITED, "headers": _PLAIN, "trust_env": not here,
        }  # fmt: skip

    def client(self) -> httpx.Client:
        socket = httpx.HTTPTransport(self._tls, uds=self._uds, limits=_UNLIMITED) if self._uds else None
        return httpx.Client(transport=socket, **self._options)

    def async_client(self) -> httpx.AsyncClient:
        socket = httpx.AsyncHTTPTransport(self._tls, uds=self._uds, limits=_UNLIMITED) if self._uds else None
        return httpx.AsyncClient(transport=socket, **self._options)


@lru_cache(1)
def _system_certificates() -> ssl.SSLContext:
    """httpx alone would trust the certificates that it brings, and not a robot's own authority."""
    return ssl.create_default_context()


class SyncConnections:
    """The blocking side: one kept connection for each thread that asks at the same time."""

    def __init__(self, network: Network, clock: Callable[[], float]) -> None:
        self._network, self._clock = network, clock
        self._http = network.client()

    def close(self) -> None:
        old, self._http = self._http, self._network.client()
        old.close()

    def exchange(self, send: Send) -> Reply:
        """One attempt, and one more if a kept connection turns out to be closed."""
        try:
            return self._attempt(send, again=True)
        except KeptConnectionClosed:
            return self._attempt(send, again=False)

    def _attempt(self, send: Send, again: bool) -> Reply:
        attempt = Attempt(self._network.url, send, self._clock, again)
        try:
            with self._http.stream(**attempt.request(attempt.note)) as response:
                attempt.begin(response)
                for part in response.iter_raw():
                    attempt.take(part)
                return attempt.reply(response)
        except httpx.TransportError as error:
            raise attempt.failed(error) from None


class AsyncConnections:
    """The same, awaited."""

    def __init__(self, network: Network, clock: Callable[[], float]) -> None:
        self._network, self._clock = network, clock
        self._http = network.async_client()

    async def close(self) -> None:
        old, self._http = self._http, self._network.async_client()
        await old.aclose()

    async def exchange(self, send: Send) -> Reply:
        try:
            return await self._attempt(send, again=True)
        except KeptConnectionClosed:
            return await self._attempt(send, again=False)

    async def _attempt(self, send: Send, again: bool) -> Reply:
        attempt = Attempt(self._network.url, send, self._clock, again)

        async def note(event: str, info: Mapping[str, Any]) -> None:
            attempt.note(event, info)

        try:
            async with self._http.stream(**attempt.request(note)) as response:
                attempt.begin(response)
                async for part in response.aiter_raw():
                    attempt.take(part)
                return attempt.reply(response)
        except httpx.TransportError as error:
            raise attempt.failed(error) from None
