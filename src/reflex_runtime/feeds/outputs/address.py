"""Addresses of receivers. They may hold a user and a password: neither appears in errors, logs or figures."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.video import without_secrets
from reflex_runtime.settings.declare import one_line

LONGEST: Final = 2000  # characters of an address
LONGEST_TOPIC: Final = 200
_MQTT, _HTTP = {"mqtt": 1883, "mqtts": 8883}, {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ReceiverAddress:
    """secure: over TLS. path: with the leading slash; of a web server as it is written, with the query. user, password:
    None without."""

    secure: bool
    host: str
    port: int
    path: str
    shown: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)


def mqtt_address(text: str) -> ReceiverAddress:
    """mqtt://[user:password@]host[:port]/topic, or mqtts for TLS. Raises ConfigError without secrets."""
    address = _address(text, _MQTT, "mqtt://HOST/TOPIC, or mqtts://HOST/TOPIC over TLS")
    topic = unquote(address.path[1:])
    if not 0 < len(topic) <= LONGEST_TOPIC or set(topic) & set("+#\0") or topic[0] in "$/" or topic[-1] == "/":
        what = f"a topic of 1 to {LONGEST_TOPIC} characters, without + and #, and no / or $ at its ends"
        raise ConfigError(f"{address.shown}: the path must be {what}")
    return replace(address, path=f"/{topic}")


def webhook_address(text: str) -> ReceiverAddress:
    """http(s)://[user:password@]host[:port]/path?query. Raises ConfigError without secrets."""
    return _address(text, _HTTP, "http://HOST/PATH or https://HOST/PATH")


def _address(text: str, schemes: dict[str, int], expected: str) -> ReceiverAddress:
    shown = one_line(without_secrets(text))
    wrong = ConfigError(f"{shown}: must be {expected}")
    if not text.isascii() or not text.isprintable() or " " in text or len(text) > LONGEST:
        raise wrong
    try:
        found: SplitResult = urlsplit(text)
        port = found.port
    except ValueError:  # a wrong port or address
        raise wrong from None
    if found.scheme not in schemes or not found.hostname or port == 0 or found.fragment:
        raise wrong
    if found.scheme in _MQTT and found.query:
        raise wrong
    return ReceiverAddress(
        secure=found.scheme in ("mqtts", "https"),
        host=found.hostname,
        port=port or schemes[found.scheme],
        path=(found.path or "/") + (f"?{found.query}" if found.query else ""),
        shown=shown,
        user=None if found.username is None else unquote(found.username),
        password=None if found.password is None else unquote(found.password),
    )
