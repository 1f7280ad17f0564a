"""From the bytes of a connection to its requests: httptools parses, and each head becomes an `Exchange`.

- The head of a request is limited in bytes.
- A request's age counts from when it reached this machine; a busy process reads it later.
- An upgrade that is declined is ignored: its request is answered in HTTP/1.1, body included.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Protocol
from urllib.parse import unquote

import httptools

from reflex_runtime.web.app import App
from reflex_runtime.web.arrival import arrived
from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.exchange import Carrier, Exchange
from reflex_runtime.web.http_bytes import FRAMING

MAX_HEAD: Final = 64 * 1024  # bytes


class Receiver(Carrier, Protocol):
    """What gets the requests: their connection."""

    app: App

    def came(self, exchange: Exchange) -> None:
        """The head of a request has come."""

    def take(self, exchange: Exchange, part: bytes) -> None:
        """A part of the body of an opened request has come."""

    def upgrade(self, rest: bytes) -> bool:
        """The last request offers to upgrade. Whether the connection was handed over. rest: the bytes behind it."""


class RequestParser:
    """file: of the socket, which knows when its bytes came. client: its address. in_head: a head has come in part."""

    def __init__(self, receiver: Receiver, file: int, client: tuple[str, int] | None) -> None:
        self._receiver, self._file, self._client = receiver, file, client
        self._parser = _parser_for(self)
        self._coming: Exchange | None = None  # the last whose head has come
        self.in_head = self._skip_head = False
        self._head = 0
        self._seen = self._arrived = 0.0
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()

    def feed(self, data: bytes, seen: float) -> ClientError | None:
        """What has come, seen at that time. Returns what is wrong with it, or None."""
        self._seen, self._arrived = seen, 0.0
        error = self._parse(data)
        if error is None and self.in_head:  # what came with its beginning is not counted: it may end another
            self._head = 0 if self._head < 0 else self._head + len(data)
            if self._head > MAX_HEAD:
                return ClientError(f"the head of the request has over {MAX_HEAD} bytes")
        return error

    def close(self) -> None:
        """No more comes. Breaks the reference cycles with the parser and with the receiver."""
        del self._parser, self._receiver
        self._coming = None

    @property
    def head(self) -> bytes:
        """The head of the last request, as it came."""
        lines = b"".join(b"%s: %s\r\n" % header for header in self._headers)
        version = self._parser.get_http_version().encode()
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self._parser.get_method(), self._url, version, lines)

    def _parse(self, data: bytes) -> ClientError | None:
        """Feed the parser; returns an error in the data, or None."""
        while data:
            try:
                self._parser.feed_data(data)
                return None
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self._receiver.upgrade(data):
                    return None
                if not self._decline_upgrade():
                    return ClientError("the request is not framed as its headers say")
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, ClientError):  # one of our own callbacks raised it
                    return error.__context__
                in_body = self._coming is not None and not self._coming.whole and not self.in_head
                return ClientError(
                    "the body broke off: it is not framed as its headers say" if in_body else "this is not HTTP/1.1"
                )
        return None

    def on_message_begin(self) -> None:
        """httptools: a request begins."""
        if not self._skip_head:
            self.in_head, self._head = True, -1
            self._url, self._headers = b"", []
            if not self._arrived:
                self._arrived = min(self._seen, arrived(self._file))

    def on_url(self, url: bytes) -> None:
        """httptools: a part of its target."""
        if not self._skip_head:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: a header."""
        if not self._skip_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """httptools: its head has come."""
        if self._skip_head:
            return
        self.in_head = False
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise ClientError(f"HTTP/{version} is not spoken here, HTTP/1.1 is")
        headers = dict(self._headers)
        if b"host" not in headers or len(headers) < len(self._headers):
            hosts = sum(name == b"host" for name, _ in self._headers)
            if hosts > 1 or (not hosts and version == "1.1"):
                raise ClientError(f"the request has {hosts} Host headers, HTTP/1.1 wants one")
        self._coming = Exchange(
            self._receiver.app,
            self._receiver,
            self._parser.get_method().decode("ascii"),
            path_of(self._url),
            headers,
            self._client,
            self._arrived,
            version == "1.1" and self._parser.should_keep_alive(),
            version == "1.1",
        )
        self._coming.target = self._url
        self._receiver.came(self._coming)

    def on_body(self, data: bytes) -> None:
        """httptools: a part of its body."""
        exchange = self._coming
        assert exchange is not None
        if exchange.opened:
            self._receiver.take(exchange, data)
        else:
            exchange.body.append(data)
            exchange.size += len(data)

    def on_message_complete(self) -> None:
        """httptools: all of it has come."""
        if self._coming is not None and not self._parser.should_upgrade():  # else its body is still to come
            self._coming.whole = True

    def _decline_upgrade(self) -> bool:
        """Ignore the upgrade: a new parser gets the framing and then reads the body. False if that is not possible."""
        framing = [(name, value) for name, value in self._headers if name in FRAMING]
        self._parser = _parser_for(self)
        self._skip_head = True
        head = b"".join(b"%s: %s\r\n" % pair for pair in framing)
        try:
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + (head or b"content-length: 0\r\n") + b"\r\n")
        except httptools.HttpParserError:
            return False
        finally:
            self._skip_head = False
        return True


def _parser_for(requests: RequestParser) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(requests)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # what is pipelined behind the last is not read
    return parser


@lru_cache(maxsize=64)
def path_of(target: bytes) -> str:
    """The path of a request's target, decoded."""
    return unquote(httptools.parse_url(target).path.decode("ascii"))
