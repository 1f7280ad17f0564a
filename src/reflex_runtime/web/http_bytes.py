"""The bytes of HTTP/1.1: of an answer, of its head, and of a request as another process can read it."""

from __future__ import annotations

import http
import time
from email.utils import formatdate
from functools import lru_cache
from typing import Final

from reflex_runtime.web.exchange import Exchange
from reflex_runtime.web.form import Headers

FRAMING: Final = (b"content-length", b"transfer-encoding")
_PHRASES: Final = {status.value: status.phrase for status in http.HTTPStatus} | {499: "Client Closed Request"}
_STATUS: Final = {code: f"HTTP/1.1 {code} {phrase}\r\n".encode() for code, phrase in _PHRASES.items()}


def answer(status: int, headers: Headers, body: bytes = b"") -> bytes:
    """The head of an answer, and its body behind it."""
    lines = [b"%b: %b\r\n" % header for header in headers]
    return b"".join([_STATUS[status], _date(), *lines, b"\r\n", body])


def as_sent(exchange: Exchange, body: bytes) -> bytes:
    """The bytes of a request, as another process can read them."""
    version = b"1.1" if exchange.streams else b"1.0"
    lines = [b"%s %s HTTP/%s\r\n" % (exchange.method.encode(), exchange.target, version)]
    for name, value in exchange.headers.items():
        if name not in FRAMING and name != b"expect":
            lines.append(b"%s: %s\r\n" % (name, value))
    if body or exchange.method == "POST":
        lines.append(b"content-length: %d\r\n" % len(body))
    return b"".join([*lines, b"\r\n", body])


@lru_cache(maxsize=1)
def _date_at(second: int) -> bytes:
    return b"date: %s\r\n" % formatdate(second, usegmt=True).encode()


def _date() -> bytes:
    """The header that says when an answer was made."""
    return _date_at(int(time.time()))
