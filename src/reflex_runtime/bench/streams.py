"""Kept-alive connections for measuring: HTTP/1.1 over asyncio's streams, at a tenth of what httpx takes a request."""

from __future__ import annotations

import asyncio
import http.client
import io
import select
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from reflex_runtime.client.errors import BadAnswer, TimedOut, Unreachable
from reflex_runtime.client.exchange import MAX_ANSWER, Reply, Send

_MAX_HEAD = 64 << 10


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


class Streams:
    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def close(self) -> None:
        while self._idle:
            _hang_up(self._idle.pop()[1])
        await asyncio.sleep(0)  # the loop's turn to close them

    async def exchange(self, send: Send) -> Reply:
        """One attempt. If a kept-alive connection turns out to be closed, one more on a new connection."""
        try:
            async with asyncio.timeout(send.limit):
                return await self._exchange(send)
        except TimeoutError:
            raise too_late(send, self._address) from None

    async def _exchange(self, send: Send) -> Reply:
        while self._idle:
            reader, writer = self._idle.pop()
            if not (writer.is_closing() or _buffered(reader) or readable(writer.get_extra_info("socket"))):
                try:
                    return await self._over(reader, writer, send)
                except Stale:
                    break
            _hang_up(writer)
        reader, writer = await self._connected()
        try:
            return await self._over(reader, writer, send)
        except Stale as error:
            raise broken(error, self._address) from None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        secure = ssl.create_default_context() if self._address.secure else None
        try:
            return await asyncio.open_connection(self._address.host, self._address.port, ssl=secure, limit=_MAX_HEAD)
        except TimeoutError:
            raise
        except OSError as error:
            raise not_connected(error, self._address) from None

    async def _over(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, send: Send) -> Reply:
        """One request on one connection, which is kept if possible. Raises Stale if it closes before any of the
        answer."""
        done = False
        try:
            writer.write(_head(send, self._address))
            if send.body:
                writer.write(send.body)
            await writer.drain()
            reply, done = await _read_reply(reader)
            return reply
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            if isinstance(error, asyncio.IncompleteReadError) and error.partial:
                raise broken(error, self._address) from None
            raise Stale(why(error)) from None
        except (asyncio.LimitOverrunError, http.client.HTTPException, ValueError) as error:
            raise not_http(error) from None
        finally:
            if done:
                self._idle.append((reader, writer))
            else:
                _hang_up(writer)


def _buffered(reader: asyncio.StreamReader) -> bool:
    """Whether an idle kept-alive connection has received something: its end, or unexpected data."""
    reading = reader.read(1)
    try:
        reading.send(None)
    except StopIteration:
        return True
    reading.close()  # it would have had to wait
    return False


def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close at once, without waiting for the other side."""
    writer.transport.abort()


def _head(send: Send, address: Address) -> bytes:
    headers = {"Host": address.netloc, **send.headers}
    if send.body is not None:
        headers["Content-Length"] = str(len(send.body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{send.method} {address.prefix}{send.path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


async def _read_reply(reader: asyncio.StreamReader) -> tuple[Reply, bool]:
    """The reply, and whether the connection may be kept. IncompleteReadError with nothing partial: nothing came."""
    status = 100
    while 100 <= status < 200:  # what is said before the answer
        head = await reader.readuntil(b"\r\n\r\n")
        line, _, rest = head.partition(b"\r\n")
        version, _, tail = line.decode("latin-1").partition(" ")
        if not version.startswith("HTTP/1.") or not tail[:3].isdigit():
            raise BadAnswer(f"not HTTP/1.1: {line[:80]!r}")
        status = int(tail[:3])
    headers = {name.lower(): value for name, value in http.client.parse_headers(io.BytesIO(rest)).items()}
    keep = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    try:
        body, whole = await _read_body(reader, status, headers)
    except asyncio.IncompleteReadError as error:  # a part of an answer came
        raise asyncio.IncompleteReadError(error.partial or head, error.expected) from None
    return Reply(status, headers, body), keep and whole


async def _read_body(reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]) -> tuple[bytes, bool]:
    """The body, and whether its length was given (otherwise the connection's end is the body's end)."""
    parts, size = [], 0
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while count := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            size = bounded(size + count, status)
            parts.append((await reader.readexactly(count + 2))[:-2])
        while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
            pass
        return b"".join(parts), True
    length = headers.get("content-length")
    if status in (204, 304):
        return b"", True
    if length is not None:
        return await reader.readexactly(bounded(int(length), status)), True
    while part := await reader.read(1 << 20):
        size = bounded(size + len(part), status)
        parts.append(part)
    return b"".join(parts), False
