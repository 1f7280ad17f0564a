"""Writing and checking JSON, for all servers."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

JSON_TYPE: Final = "application/json"
MSGPACK_TYPE: Final = "application/msgpack"
MAX_VALUES: Final = 40_000  # commas in a body whose values are built; all fields of /act at their bounds have fewer
LARGE_JSON: Final = 1 << 20  # bytes; `json` holds the interpreter for 5 ms in each MB

encode = msgspec.json.Encoder().encode
_skip = msgspec.json.Decoder(msgspec.Raw)


def is_json(body: bytes) -> bool:
    """Whether a body is JSON to its end, asked once a field is wrong. Of a large body nothing is built."""
    decode: Any = _skip.decode if len(body) > LARGE_JSON or body.count(b",") > MAX_VALUES else json.loads
    try:
        decode(body)
    except (json.JSONDecodeError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    except (RecursionError, ValueError):  # too deep or too long a number, but JSON
        return True
    return True


def is_unicode(text: str) -> bool:
    """False for text with a lone surrogate, which JSON can write and nothing can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """Text for an error: one line, always encodable, and at most 300 characters."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in text[:300])
    return line.encode("utf-8", "replace").decode("utf-8")
