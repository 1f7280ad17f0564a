"""The settings of every server, and those of `reflex serve` for language models.

The functions check what a range cannot express. Errors name flags."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings.declare import again, flag, one_line, option, validate


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError for an invalid address of a collector, or one with a secret in it: settings are shown."""
    if not endpoint:
        return
    if any(mark in endpoint for mark in "@?#"):
        expected = "must have no user, query or fragment; set headers of your own in OTEL_EXPORTER_OTLP_HEADERS"
        raise ConfigError(f"--otel: {expected}", field="otel")
    try:
        found = urlsplit(endpoint)
        plain = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # a wrong port or address
        plain = False
    if not (plain and endpoint.isascii() and endpoint.isprintable()) or " " in endpoint or len(endpoint) > 1000:
        expected = "must be http://HOST:PORT or https://HOST:PORT of a collector"
        raise ConfigError(f"--otel={one_line(endpoint)}: {expected}", field="otel")


def check_address(name: str, address: str) -> None:
    """Raise ConfigError for an address that is not HOST:PORT. name: of the setting."""
    found = re.fullmatch(r"(?:localhost|[0-9.]{7,15}|\[[0-9a-fA-F:.]{2,45}\]):([0-9]{1,5})", address)
    if address and (found is None or int(found[1]) > 65_535):
        expected = "ADDRESS:PORT, where ADDRESS is localhost or numeric"
        raise ConfigError(f"{flag(name)}={one_line(address)}: must be {expected}", field=name)


KEYS = ("api_key", "admin_key")  # of callers, and of operators


def check_trust(config: Any) -> None:
    """Read keys from their files. Raises ConfigError for an invalid host name, and for two equal keys."""
    for key in KEYS:
        given = getattr(config, key)
        if given.startswith("@"):
            object.__setattr__(config, key, _key_in(given[1:], key))
    if config.admin_key and config.admin_key == config.api_key:
        raise ConfigError("--admin-key and --api-key: must differ", field="admin_key")
    for name in config.allow_host:
        if not re.fullmatch(r"\*|[\w.-]{1,253}|\[?[0-9a-fA-F:.]{2,45}\]?", name):
            expected = "a host name or an address without a port, or *"
            raise ConfigError(f"--allow-host={one_line(name)}: must be {expected}", field="allow_host")


def _key_in(file: str, name: str) -> str:
    """The key in a file, one line. name: of the setting."""
    where = f"{flag(name)}=@{one_line(file)}"
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read(4097)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}", field=name) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: is no UTF-8 text", field=name) from None
    key = text.strip()
    if not key or len(text) > 4096 or not key.isprintable():
        raise ConfigError(f"{where}: must hold one line of at most 4096 characters, the key", field=name)
    return key


def sizes_of(text: str) -> tuple[int, ...]:
    """The batch sizes of --cuda-graphs."""
    sizes = tuple(int(part) for part in text.split(",")) if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text) else ()
    if not sizes or sizes[0] < 1 or sizes[-1] > 4096 or any(a >= b for a, b in pairwise(sizes)):
        expected = "ascending whole numbers in [1, 4096], such as 1,2,4,8"
        raise ConfigError(f"--cuda-graphs={one_line(text)}: must be {expected}", field="cuda_graphs")
    return sizes


# -- server ------------------------------------------------------------------------------------------------------------

_ORIGIN = r"\*|https?://([\w.-]{1,253}|\[[0-9a-fA-F:.]{2,45}\])(:[0-9]{1,5})?"


@dataclass(frozen=True)
class ServerConfig:
    """The settings of every server. Errors name flags."""

    host: str = option("127.0.0.1", "address to bind; set --api-key if it is not loopback", group="listening and trust")
    port: int = option(8000, "port to bind; 0 picks a free one", (0, 65535))
    api_key: str = option(
        "", "key of callers (Bearer, X-Reflex-Key or x-api-key); @FILE holds it", metavar="KEY|@FILE", secret=True
    )
    admin_key: str = option(
        "",
        "key of operators: opens every path, and is needed for /admin, /diagnostics and /status; without it only "
        "programs on this machine change anything",
        metavar="KEY|@FILE",
        secret=True,
    )
    allow_host: tuple[str, ...] = option(
        (), "accept this Host and Origin without an API key; * is any", metavar="NAME", repeat=True, unless="api_key"
    )
    cors: tuple[str, ...] = option((), "pages of this origin may read answers; * is any", metavar="ORIGIN", repeat=True)
    max_body_bytes: int = option(16 * 2**20, "largest request body; beyond it 413", (1024, 2**31, "bytes"))
    max_bodies_mb: float = option(
        256.0, "memory for all request bodies; beyond it 503 overloaded", (1, 1_000_000, "MB")
    )
    max_connections: int = option(4096, "most open connections; beyond it 503 overloaded", (1, 1_000_000))
    max_connections_per_address: int = option(
        0, "most connections of one address (of IPv6 a /64); 0 is no limit; not behind a proxy", (0, 1_000_000)
    )
    idle_timeout_s: float = option(75.0, "close a connection without a request after this time", (0.1, 86_400, "s"))
    body_timeout_s: float = option(60.0, "time for a request's body to arrive; beyond it 408", (0.1, 3600, "s"))
    uds: str = option("", "listen on this Unix socket, for this user only, instead of a port", metavar="PATH")
    ssl_certfile: str = option("", "serve TLS with this certificate chain, in PEM", metavar="FILE")
    ssl_keyfile: str = option("", "its private key, if in another file", metavar="FILE", needs="ssl_certfile")
    supervise: bool = option(True, "restart after a crash; off under another supervisor", group="faults and the end")
    log_format: str = option("text", "lines for people, or JSON", choices=("text", "json"))
    otel: str = option(
        "",
        "OpenTelemetry collector (OTLP/HTTP) for spans of requests and batches",
        metavar="http://HOST:4318",
        group="spans",
    )

    def __post_init__(self) -> None:
        validate(self)
        check_endpoint(self.otel)
        check_trust(self)
        for origin in self.cors:
            if not re.fullmatch(_ORIGIN, origin):
                expected = "*, or a site such as https://example.org or http://localhost:3000, without a path"
                raise ConfigError(f"--cors={one_line(origin)}: must be {expected}", field="cors")


@dataclass(frozen=True)
class LLMServeConfig(ServerConfig):
    """The settings of `reflex serve MODEL_DIR`."""

    served_model_name: str = option(
        "", "name of the model for clients; by default the directory's", metavar="NAME", group="what is served"
    )
    lora: tuple[str, ...] = option((), "LoRA adapter (PEFT), in requests MODEL:NAME", metavar="NAME=DIR", repeat=True)
    device: str = option("auto", "auto: a GPU if PyTorch finds one, else the CPU", choices=("auto", "cpu", "cuda"))
    runner: str = option("auto", "auto: OpenVINO on a CPU, PyTorch on a GPU", choices=("auto", "openvino", "torch"))
    dtype: str = option(
        "auto", "auto: the checkpoint's own if the machine is fast at it", choices=("auto", "float32", "bfloat16")
    )
    quantization: str = option(
        "none", "round the weights (OpenVINO): int8 is close to float32, int4 coarse", choices=("none", "int8", "int4")
    )
    cache_dir: str = option(
        "", "place of converted models; by default .reflex in the model's own, or the user's cache", metavar="DIR"
    )
    threads: int = option(0, "CPU threads of a step; 0 is the runner's default", (0, 1024))
    max_model_len: int = option(0, "most tokens of a request, prompt and output; 0 is the model's limit", (0, 1 << 24))
    workers: int = option(0, "runtime processes with a copy of the model each; 0: the server's process", (0, 64))
    max_body_bytes: int = again(ServerConfig, "max_body_bytes", 4 * 2**20, group="listening and trust")
    max_gap_ms: float = option(
        0.0,
        "longest gap between two tokens: prompts are read in steps that keep it, requests wait while one more would "
        "break it; 0: 100 ms or eight times a step's fixed part, and none waits",
        (0, 60_000, "ms"),
        group="batching",
    )
    max_num_batched_tokens: int = option(2048, "most tokens in a step", (1, 1 << 20))
    max_num_seqs: int = option(256, "most requests that generate at a time", (1, 1 << 16))
    long_prefill_token_threshold: int = option(0, "most tokens of one prompt in a step; 0 is no limit", (0, 1 << 20))
    speculate: str = option(
        "off",
        "ngram guesses tokens from the prompt and the answer, if that gives more tokens a second; answers stay the "
        "same",
        choices=("off", "ngram"),
    )
    default_tiers: bool = option(False, "without a priority streams are urgent, requests of several prompts background")
    max_queue: int = option(1000, "most waiting requests; beyond it 429", (1, 1_000_000), group="queue")
    max_queued_tokens: int = option(
        1_000_000, "most waiting prompt tokens; beyond it 429", (1, 1_000_000_000, "tokens")
    )
    block_size: int = option(0, "tokens in a block; 0 is the runner's default", (0, 4096), group="the cache")
    kv_cache_gb: float = option(0.0, "memory for keys and values of a process; 0 is 1 GiB", (0, 100_000, "GB"))
    prefix_caching: bool = option(True, "compute the common beginning of prompts once")
    watchdog_s: float = option(
        60.0,
        "a step that runs longer fails; after twice the time the server ends; 0 is off",
        (0, 3600, "s"),
        group="faults and the end",
    )
    drain_timeout_s: float = option(30.0, "time to finish accepted requests after SIGTERM", (0, 600, "s"))
    trace: str = option("", "write every step to FILE, for reflex trace", metavar="FILE", group="trace")
