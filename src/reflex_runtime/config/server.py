"""What every kind of server has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from reflex_runtime.config.checks import check_endpoint, check_trust
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.options import one_line, option, validate

_ORIGIN = r"\*|https?://([\w.-]{1,253}|\[[0-9a-fA-F:.]{2,45}\])(:[0-9]{1,5})?"


@dataclass(frozen=True)
class ServerConfig:
    """What both kinds of server have. Errors name flags."""

    host: str = option(
        "127.0.0.1", "address to bind; set --api-key if it is not loopback",
        group="listening and trust",
    )
    port: int = option(8000, "port to bind; 0 picks a free one", low=0, high=65535)
    api_key: str = option(
        "", "key that clients must send as Authorization: Bearer, X-Reflex-Key or x-api-key", secret=True
    )
    api_key_file: str = option("", "file that holds the key", metavar="FILE")
    allow_host: tuple[str, ...] = option(
        (), "without a key: a further host name of the server, and a site whose pages may POST; * is any",
        metavar="NAME", repeat=True, unless="api_key",
    )
    cors: tuple[str, ...] = option(
        (), "a site whose pages may ask this server and read its answers; * is any; operators' paths take no part",
        metavar="ORIGIN", repeat=True,
    )
    max_body_bytes: int = option(16 * 2**20, "largest request body; beyond it 413", low=1024, high=2**31, unit="bytes")
    max_bodies_mb: float = option(
        256.0, "memory for all request bodies together; beyond it 503 overloaded", low=1, high=1_000_000, unit="MB"
    )
    max_connections: int = option(
        4096, "most open connections; a further one closes the one that was idle for longest", low=1, high=1_000_000
    )
    idle_timeout_s: float = option(
        75.0, "a connection without a request is closed after this time", low=0.1, high=86_400, unit="s"
    )
    head_timeout_s: float = option(
        10.0, "time for the head of a request to arrive; beyond it 408", low=0.1, high=3600, unit="s"
    )
    body_timeout_s: float = option(
        60.0, "time for the body of a request to arrive; beyond it 408", low=0.1, high=3600, unit="s"
    )
    supervise: bool = option(
        True,
        "a small parent process restarts the server after a crash; off under another supervisor",
        group="faults and the end",
    )
    log_format: str = option(
        "text", "lines for people, or a JSON object a line for a log collector", choices=("text", "json")
    )
    otel: str = option(
        "", "send spans of requests and batches to this OpenTelemetry collector, over OTLP/HTTP",
        metavar="http://HOST:4318",
        group="spans",
    )
    otel_sample: float = option(
        1.0, "share of the requests that get a span, where the caller's traceparent does not decide it",
        low=0, high=1, needs="otel",
    )

    def __post_init__(self) -> None:
        validate(self)
        check_endpoint(self.otel)
        check_trust(self)
        for origin in self.cors:
            if not re.fullmatch(_ORIGIN, origin):
                expected = "*, or a site such as https://example.org or http://localhost:3000, without a path"
                raise ConfigError(f"--cors={one_line(origin)}: must be {expected}", field="cors")
