"""The form of a server's errors and ids, also used by its supervisor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.web.errors import describe_error
from reflex_runtime.web.json import JSON_TYPE, MSGPACK_TYPE, encode

Headers = list[tuple[bytes, bytes]]

JSON: Final = JSON_TYPE.encode()
MSGPACK: Final = MSGPACK_TYPE.encode()


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as it is sent."""

    status: int
    body: bytes
    content_type: bytes = JSON
    headers: Headers = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form of one server's errors.

    refuse: makes the answer from the error, the request's id, and whether the caller reads msgpack. keeps_id: whether a
    caller's own X-Request-Id is repeated.
    """

    refuse: Callable[[ReflexError, str, bool], Refusal]
    keeps_id: bool = False

    def own_id(self, sent: bytes) -> str | None:
        """The id that a caller sent, where it is repeated: printable ASCII, and not too long."""
        if not (self.keeps_id and 0 < len(sent) <= 256 and sent.isascii()):
            return None
        text = sent.decode()
        return text if text.isprintable() and text == text.strip() else None


def _plain(error: ReflexError, request_id: str, packed: bool) -> Refusal:
    body = describe_error(error, request_id)
    if packed:
        return Refusal(error.http_status, msgspec.msgpack.encode(body), MSGPACK)
    return Refusal(error.http_status, encode(body))


PLAIN: Final = ErrorForm(_plain)
"""`error`, `message`, `request_id`, `retry_safe` and the error's details, in JSON or msgpack."""
