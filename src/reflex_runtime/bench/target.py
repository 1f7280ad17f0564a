"""The address of a server, and what its /health and /config say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

from reflex_runtime.bench.streams import Address, Streams
from reflex_runtime.client.answers import decoded
from reflex_runtime.client.errors import BadAnswer, NotFound
from reflex_runtime.client.exchange import Reply, Send
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings.declare import one_line

HTTP: Final = ("http", "https")
WEBSOCKET: Final = ("ws", "wss")
ZMQ: Final = "tcp"
GRPC: Final = "grpc"
LANGUAGE_MODEL: Final = "language_model"  # code of the error for a server of language models


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server, and how to ask it. key: "" for none. timeout: seconds for each step. model: name of the
    served model; "" if unknown."""

    url: str
    scheme: str
    address: Address
    key: str = ""
    timeout: float = 10.0
    model: str = ""

    @classmethod
    def of(cls, url: str, key: str = "", timeout: float = 10.0) -> Target:
        """Parse a URL; ConfigError if it is not one of a server."""
        parts = urlsplit(url if "//" in url else "//" + url, scheme="http")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if (
            parts.scheme not in (*HTTP, *WEBSOCKET, ZMQ, GRPC)
            or not parts.hostname
            or parts.hostname.isdigit()
            or port == 0
        ):
            raise ConfigError(f"URL={one_line(url)}: must be as http://127.0.0.1:8000 or ws://127.0.0.1:8000/path")
        if key and not (key.isascii() and key.isprintable()):
            raise ConfigError("--api-key: must be printable ASCII")
        secure = parts.scheme in ("https", "wss")
        path = parts.path.rstrip("/") + (f"?{parts.query}" if parts.query else "")
        address = Address(secure, parts.hostname, port or (443 if secure else 80), path)
        return cls(url, parts.scheme, address, key, timeout)

    def send(self, method: str, path: str, kind: str, body: bytes | None = None) -> Send:
        """An HTTP request. kind: media type of the body and of the wanted answer."""
        headers = {"Content-Type": kind, "Accept": kind}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        return Send(method, path, headers, body, self.timeout)

    def websocket(self, path: str) -> str:
        """The URL of the websocket at this path; a target that is a websocket URL keeps its own path."""
        prefix = self.address.prefix if self.scheme in WEBSOCKET else self.address.prefix + path
        slash = "" if prefix.startswith("/") else "/"
        return f"{'wss' if self.address.secure else 'ws'}://{self.address.netloc}{slash}{prefix}"

    def listener(self, url: str) -> Target:
        """Another listener of this server. url: from its settings; a wildcard host means this server's."""
        parts = urlsplit(url if "//" in url else f"{GRPC}://{url}")
        host = self.address.host if parts.hostname in ("*", "0.0.0.0", "::") else parts.hostname
        known = f"{parts.scheme}://{f'[{host}]' if ':' in str(host) else host}:{parts.port}"
        return replace(Target.of(known, self.key, self.timeout), model=self.model)


@dataclass(frozen=True, slots=True)
class ServerLook:
    """What /health and /config of a server say. All fields are empty if it is not a server of reflex.

    wires: what an observation must hold, by wire. settings: of `reflex serve`. Both are empty also without the right
    key. locked: it wants a key, or another one.
    """

    state: str = ""
    version: str = ""
    model: str = ""
    locked: bool = False
    wires: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether it is a server of reflex."""
        return bool(self.state)


async def look(target: Target) -> ServerLook:
    """Read /health and /config. Raises Unreachable where nothing answers, NotFound at a language model's server."""
    if target.scheme not in HTTP:
        return ServerLook()
    streams = Streams(target.address)
    try:
        health = _map(await streams.exchange(target.send("GET", "/health", "application/json")))
        state = health.get("state")
        if not isinstance(state, str):
            return ServerLook()
        if "model" in health:  # only servers of language models name it in /health
            raise NotFound(f"{target.url}: serves a language model", code=LANGUAGE_MODEL)
        reply = await streams.exchange(target.send("GET", "/config", "application/json"))
    except BadAnswer:
        return ServerLook()
    finally:
        await streams.close()
    config = _map(reply)
    policy = config.get("policy") or {}
    model = f"{policy.get('model_id', '')}@{policy.get('model_hash', '')}".strip("@")
    version = str(config.get("reflex_version", ""))
    return ServerLook(state, version, model, reply.status == 401, config.get("wires") or {}, config.get("server") or {})


def _map(reply: Reply) -> dict[str, Any]:
    """The JSON map of an answer; empty if there is none."""
    try:
        return decoded(reply)
    except BadAnswer:
        return {}
