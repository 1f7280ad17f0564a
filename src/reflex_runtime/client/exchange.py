"""One request and its reply, the same for both kinds of connection: fields, limits and errors."""

from __future__ import annotations

import select
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from reflex_runtime.client.errors import BadAnswer, TimedOut, Unreachable

MAX_ANSWER: Final = 64 << 20
"""Bytes of an answer that are read at most."""


@dataclass(frozen=True, slots=True)
class Address:
    """The server's address. host: as it is resolved. prefix: the path before the server's own paths."""

    secure: bool
    host: str
    port: int
    prefix: str

    @classmethod
    def of(cls, url: str) -> Address:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={url!r}: expected http://HOST:PORT or https://HOST")
        secure = parts.scheme == "https"
        return cls(secure, parts.hostname, parts.port or (443 if secure else 80), parts.path.rstrip("/"))

    @property
    def netloc(self) -> str:
        """HOST:PORT, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.netloc}{self.prefix}"


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


class Stale(Exception):
    """The connection was closed, perhaps long ago, before any of the answer came."""


def readable(sock: Any) -> bool:
    """Whether an idle kept-alive connection can be read: then the server has closed it."""
    if sock is None:
        return True
    if hasattr(select, "poll"):  # select cannot take numbers above 1023
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([sock], [], [], 0)[0])


def bounded(size: int, status: int) -> int:
    """The size of an answer; BadAnswer if it is too large."""
    if not 0 <= size <= MAX_ANSWER:
        raise BadAnswer(f"{size} bytes, at most {MAX_ANSWER} are read", status=status)
    return size


def not_connected(error: Exception, address: Address) -> Unreachable:
    kind = TimedOut if isinstance(error, TimeoutError) else Unreachable
    return kind(f"cannot connect to {address}: {why(error)}", retry_safe=True)


def broken(error: Exception, address: Address) -> Unreachable:
    return Unreachable(f"{address} closed the connection before it had answered: {why(error)}")


def too_late(send: Send, address: Address) -> TimedOut:
    return TimedOut(f"no answer from {address} within {send.limit:.3g} s")


def not_http(error: Exception) -> BadAnswer:
    return BadAnswer(f"not HTTP/1.1: {error}")


def why(error: Exception) -> str:
    return str(error) or type(error).__name__
