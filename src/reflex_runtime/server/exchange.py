"""One HTTP request and its answer, whoever carries them: our own connection, or any ASGI server."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Mapping, MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import quote

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.request import Ticket
from reflex_runtime.policies.slots import Version
from reflex_runtime.server.bodies import Bodies
from reflex_runtime.server.errors import BodyTooLarge, MethodNotAllowed, Unauthorized, describe_error
from reflex_runtime.server.rollout import Placement
from reflex_runtime.server.wire import act as wire

Scope = MutableMapping[str, Any]
Headers = list[tuple[bytes, bytes]]
Reply = Callable[[int, Headers, bytes], None]  # status, headers, body; called once

LEFT = "reflex.left"  # in the scope: what to call when the caller leaves before its answer, or None
ARRIVED = "reflex.arrived"  # in the scope: when the request reached this machine, by time.monotonic()
CLOSE = (b"connection", b"close")  # the last of the headers where it is among them
JSON = wire.JSON_TYPE.encode()
MSGPACK = wire.MSGPACK_TYPE.encode()


class Door:
    """What all exchanges of a server share.

    active: POST /act requests being answered; idle: set while there are none. asked: requests so far, of any kind.
    closing: every connection closes after its next answer, and nothing more is asked of the policy. bodies: what they
    hold until they are answered.
    """

    def __init__(self, bodies: Bodies) -> None:
        self.bodies = bodies
        self.active = self.asked = 0
        self.closing = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._prefix = secrets.token_hex(6)

    def open(self, scope: Scope, reply: Reply) -> Exchange:
        """A request whose head has been read. reply: takes the answer."""
        self.asked += 1
        return Exchange(self, scope, reply, f"{self._prefix}-{self.asked:x}")

    def enter(self, exchange: Exchange) -> None:
        """It is one of the active ones until `leave`."""
        exchange.active = True
        self.active += 1
        self.idle.clear()

    def leave(self, exchange: Exchange) -> None:
        """It has its answer."""
        if exchange.active:
            exchange.active = False
            self.active -= 1
            if not self.active:
                self.idle.set()


class Exchange:
    """One request: what was asked and how it is answered.

    started: when it reached this machine; received: when all of it had been read, 0.0 before. left: the caller has
    gone. active: `Door.enter` counts it. fields: what was asked, decoded. placement, version: who answers it; None
    before that is known.
    """

    __slots__ = (
        "active",
        "door",
        "fields",
        "headers",
        "held",
        "left",
        "placement",
        "received",
        "reply",
        "request_id",
        "scope",
        "started",
        "ticket",
        "version",
    )

    def __init__(self, door: Door, scope: Scope, reply: Reply, request_id: str) -> None:
        self.door, self.scope, self.reply, self.request_id = door, scope, reply, request_id
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.started = float(scope.get(ARRIVED) or time.monotonic())
        self.received = 0.0
        self.held = 0
        self.ticket: Ticket | None = None
        self.fields: wire.ActFields | None = None
        self.placement: Placement | None = None
        self.version: Version | None = None
        self.active = self.left = False

    def answer(self, status: int, body: bytes, content_type: bytes = JSON, extra: Headers | None = None) -> None:
        """Hand over a whole answer."""
        headers = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", header_text(self.request_id)),
        ]
        if extra:
            headers += extra
        # Who waits for a go-ahead may or may not send the body after this: only a new connection starts clean.
        if self.door.closing or (not self.received and b"expect" in self.headers):
            headers.append(CLOSE)
        self.door.bodies.release(self)
        self.reply(status, headers, body)

    def fail(self, error: ReflexError, more: Headers | None = None) -> None:
        """Answer with an error. more: further headers."""
        extra: Headers = [*(more or ()), *retry_headers(error)]
        if isinstance(error, Unauthorized):
            extra.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, MethodNotAllowed):
            extra.append((b"allow", str(error.details["allow"]).encode()))
        body = describe_error(error, self.request_id)
        if self.wants_msgpack:
            self.answer(error.http_status, wire.encode_msgpack(body), MSGPACK, extra)
        else:
            self.answer(error.http_status, wire.encode_json(body), JSON, extra)

    @property
    def sent_msgpack(self) -> bool:
        """Whether the body is msgpack; anything else is read as JSON."""
        kind = self.headers.get(b"content-type")
        return kind is not None and kind != JSON and b"msgpack" in kind.lower()

    @property
    def wants_msgpack(self) -> bool:
        """Whether the answer is to be msgpack: as accepted, else as it was asked."""
        accepted = self.headers.get(b"accept", b"*/*").lower()
        return self.sent_msgpack if accepted in (b"*/*", b"") else b"msgpack" in accepted


def retry_headers(error: ReflexError) -> Headers:
    """When to come again, where the error says so."""
    return [] if error.retry_after is None else [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after)))]


def too_large(headers: Mapping[bytes, bytes], most: int) -> None:
    """Raise when the body is announced with more than `most` bytes."""
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > most:
        raise BodyTooLarge(f"the body has {int(declared)} bytes, at most {most} are read", max_body_bytes=most)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1, on a socket that takes both
    return (mapped or address).is_loopback


def header_text(text: str) -> bytes:
    """Text as a header value: plain ASCII as it is, anything else percent-encoded."""
    if text.isascii() and text.isprintable() and text == text.strip():
        return text.encode()
    return quote(text, safe="").encode()
