"""Settings: one tree of frozen values.

Default, unit and range stand at the dataclass field, and everything else follows from there: the flags and their help,
the TOML keys, the environment names, validation, and the table printed at start-up. Precedence: defaults, then the TOML
file, then the environment (`REFLEX_` + the field's name), then flags.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from reflex_runtime.core.errors import ConfigError

log = logging.getLogger("reflex.config")

C = TypeVar("C")
Places = Mapping[str, str]  # where each setting was given: --split, REFLEX_SPLIT, or reflex.toml: [serve] split


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    bare: str | None = None,
    secret: bool = False,
    repeat: bool = False,
    needs: str = "",
    unless: str = "",
    group: str = "",
) -> Any:
    """A settings field: its default, what it does, its unit and its inclusive range. bare: value of the flag alone.

    needs, unless: what it has no effect without, and with; `check_needs` holds whoever gives it to that. Alternatives
    are joined by `|`; each is a setting that must be on, a setting and its value (`arrivals=closed`), or a fact such as
    `a decomposed export`, which only the command knows.

    group: the heading in --help and on the pages of this option and of those that follow it, up to the next heading.
    """
    meta = {"help": help, "low": low, "high": high, "unit": unit, "choices": choices, "metavar": metavar, "bare": bare}
    meta |= {"secret": secret, "repeat": repeat, "needs": needs, "unless": unless, "group": group}
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything `reflex serve` can be told."""

    provider: str = option(
        "cpu", "execution provider: cpu, cuda or an ONNX Runtime provider name; never another silently",
        group="what is served",
    )
    threads: int = option(1, "ONNX Runtime threads per call", low=1, high=256)
    cuda_graphs: str = option(
        "", "batch sizes to capture at warm-up and pad to, in 1 to 4096; without SIZES 1,2,4,8,16,32; not on the CPU",
        metavar="SIZES", bare="1,2,4,8,16,32",
    )
    robot_id: str = option("", "name of the robot this server belongs to, shown on /health")
    on_bad_action: str = option(
        "error", "what a non-finite action becomes: an error, or a hold of the episode's last good action",
        choices=("error", "hold"),
    )
    policy_a: str = option(
        "", "export of slot a; with --policy-b, two versions side by side", metavar="DIR",
        group="two versions",
    )
    policy_b: str = option("", "export of slot b", metavar="DIR")
    split: int = option(
        50, "percent of the episodes that go to a, where no ramp decides; 100 keeps b loaded, warm and idle",
        low=0, high=100, needs="policy_b", unless="ramp",
    )
    shadow_policy: str = option(
        "", "export that is asked the same as the served one when the device has time; nobody sees its answers",
        metavar="DIR",
    )
    shadow_sample: float = option(
        0.1, "share of the requests the shadow is asked as well", low=0, high=1, needs="shadow_policy"
    )
    ramp: str = option(
        "", "b's share in percent, stage by stage, such as 5,20,50,100", metavar="PERCENTS", needs="policy_b"
    )
    ramp_every: str = option(
        "10m", "how long a stage of the ramp lasts, and how long a guard watches after a hot swap", metavar="TIME",
        needs="ramp|guard",
    )
    guard: str = option(
        "", "what b must keep on the ramp, and any policy after a hot swap, or it is rolled back",
        metavar="p99=150ms,error=1%",
    )
    ramp_evidence: bool = option(
        False, "a stage also waits for outcomes that show b to be no worse than a by more than the margin",
        needs="ramp",
    )
    ramp_margin: float = option(
        5.0, "that margin, in points of success", low=0.1, high=50, unit="points", needs="ramp_evidence"
    )
    host: str = option(
        "127.0.0.1", "address to bind; elsewhere than loopback set --api-key",
        group="listening and trust",
    )
    port: int = option(8000, "port to bind; 0 picks a free one", low=0, high=65535)
    api_key: str = option("", "key that clients must send as Authorization: Bearer or X-Reflex-Key", secret=True)
    api_key_file: str = option("", "file that holds the key", metavar="FILE")
    allow_host: tuple[str, ...] = option(
        (), "without a key: a further name that the server may be called by, and a site whose pages may POST; * is any",
        metavar="NAME", repeat=True, unless="api_key",
    )
    max_concurrent: int = option(0, "HTTP requests being answered, beyond it 429; 0 is off", low=0, high=1_000_000)
    max_body_bytes: int = option(16 * 2**20, "largest request body, beyond it 413", low=1024, high=2**31, unit="bytes")
    max_bodies_mb: float = option(
        256.0, "request bodies held in memory, in all; beyond it 503 overloaded", low=1, high=1_000_000, unit="MB"
    )
    max_connections: int = option(
        4096, "open connections; with one more the one that was idle for longest is closed", low=1, high=1_000_000
    )
    idle_timeout_s: float = option(
        75.0, "time a connection may be without a request", low=0.1, high=86_400, unit="s"
    )
    head_timeout_s: float = option(10.0, "time for the head of a request to come", low=0.1, high=3600, unit="s")
    body_timeout_s: float = option(60.0, "time for its body to come, beyond it 408", low=0.1, high=3600, unit="s")
    max_batch_cost_ms: float = option(
        100.0, "ceiling on a batch's predicted device time; larger: throughput, smaller: tail latency",
        low=10, high=10_000, unit="ms",
        group="batching",
    )
    batch_timeout_ms: float = option(
        5.0, "longest hold on a free device, used only when clients answered a moment ago are expected back",
        low=0, high=1000, unit="ms",
    )
    max_batch_size: int = option(256, "most requests in one batch, whatever they cost", low=1, high=4096)
    cost_model: str = option(
        "affine",
        "how batch time is predicted: affine learns fixed and marginal cost, median is wall time / size alone",
        choices=("affine", "median"),
    )
    max_batch: int = option(1, "ignored, kept for old scripts; use --max-batch-cost-ms", low=1, high=100_000)
    deadline_ms: float = option(
        0.0, "time limit for requests that bring none; 0 is none", low=0, high=600_000, unit="ms",
        group="deadlines and queue",
    )
    max_queue: int = option(1000, "waiting requests per slot; beyond it 503 queue_full", low=1, high=100_000)
    max_queue_s: float = option(
        2.0, "predicted device time that may wait per slot, background aside; beyond it 503 queue_full; 0 is no bound",
        low=0, high=3600, unit="s",
    )
    latest_only: bool = option(
        False, "a newer request of the same robot replaces its waiting older one (409 superseded)"
    )
    max_in_flight_per_client: int = option(
        0, "unsettled requests per robot, beyond it 429 client_at_capacity; 0 is off", low=0, high=100_000
    )
    slo: str = option("", "latency objective, such as p99=150ms", metavar="pNN=MSms")
    slo_mode: str = option(
        "log_only", "when the objective is violated: log it, answer 503, or shrink the budget",
        choices=("log_only", "503", "degrade"), needs="slo",
    )
    rtc: bool | None = option(
        None, "real-time chunking: a chunk continues what is left of the episode's last one",
        group="chunks and the prefix cache",
    )
    rtc_per_episode: bool = option(
        False, "allow --rtc with two policies: what is carried over stays within a slot", needs="rtc"
    )
    rtc_schedule: str = option(
        "LINEAR", "how the old chunk's weight falls up to the horizon", choices=("ZEROS", "ONES", "LINEAR", "EXP"),
        needs="rtc",
    )
    rtc_horizon: int = option(10, "actions of the new chunk the old one reaches into", low=1, high=1000, needs="rtc")
    adaptive_steps: bool = option(
        False, "stop denoising when the velocity changes by less than 1 %, after 2 steps at the earliest"
    )
    prefix_cache_mb: float = option(
        256.0, "memory for cached prefixes, decomposed exports only; 0 is off", low=0, high=1_000_000, unit="MB",
        needs="a decomposed export",
    )
    prefix_max_age_chunks: int = option(
        0,
        "chunks a cached prefix may be reused across different images (blind to the camera meanwhile)",
        low=0,
        high=1000,
        needs="prefix_cache_mb",
    )
    supervise: bool = option(
        True, "a small process above the server starts it again when it is lost; off where another supervisor does",
        group="faults and the end",
    )
    watchdog_s: float = option(
        10.0, "a batch running longer is given up and its callers told; 0 is off", low=0, high=3600, unit="s"
    )
    max_consecutive_crashes: int = option(
        5, "crashed batches in a row until /health says degraded; 0 is off", low=0, high=10_000
    )
    probe_cooldown_s: float = option(
        30.0,
        "while degraded, time until one request is let in as a probe; doubled when it crashes too, up to 16 times",
        low=0, high=480, unit="s", needs="max_consecutive_crashes",
    )
    drain_timeout_s: float = option(10.0, "time to finish what is queued after SIGTERM", low=0, high=600, unit="s")
    trace: str = option(
        "", "write every batch to FILE as a JSON line; read it with reflex trace", metavar="FILE",
        group="recording and trace",
    )
    record: str = option(
        "", "write every request and answer to a file in DIR; read it with reflex replay and reflex report",
        metavar="DIR",
    )
    record_images: str = option(
        "hash_only", "what is recorded of images; full can be replayed", choices=("full", "hash_only", "none"),
        needs="record",
    )
    record_no_gzip: bool = option(False, "record plain text", needs="record")
    record_max_mb: int = option(
        0, "size of a file after which the next is begun; 0 is no bound", low=0, high=1_000_000, unit="MiB",
        needs="record",
    )
    inject_latency_ms: float = option(
        0.0, "added to every batch, for drills", low=0, high=60_000, unit="ms",
        group="drills",
    )
    inject_fault: tuple[str, ...] = option(
        (), "SLOT:KIND:RATE[:MS], KIND raise nan hang slow die; for drills and tests", metavar="FAULT", repeat=True
    )

    def __post_init__(self) -> None:
        validate(self)
        _check_door(self)
        _ = self.captured_sizes

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """What `cuda_graphs` names."""
        return _sizes(self.cuda_graphs) if self.cuda_graphs else ()


@dataclass(frozen=True, slots=True)
class LLMServeConfig:
    """Everything `reflex serve MODEL_DIR` can be told."""

    served_model_name: str = option(
        "", "name that clients ask for and /v1/models tells; without it the directory's own", metavar="NAME",
        group="what is served",
    )
    device: str = option(
        "auto", "where the model runs; auto is a GPU that PyTorch sees, else the CPU", choices=("auto", "cpu", "cuda")
    )
    runner: str = option(
        "auto", "what runs it; auto is OpenVINO on a CPU and PyTorch on a GPU", choices=("auto", "openvino", "torch")
    )
    dtype: str = option(
        "auto",
        "what it computes in; auto is the checkpoint's own where the machine is fast at it; int8 is of the weights",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
    threads: int = option(0, "CPU threads of a step; 0 leaves it to the runner", low=0, high=1024)
    max_model_len: int = option(
        0, "most tokens of one request, prompt and output; 0 is what the model was made for", low=0, high=1 << 24
    )
    workers: int = option(
        0, "runtime processes, each with its own copy of the model; 0 runs it in the server's own", low=0, high=64
    )
    host: str = option(
        "127.0.0.1", "address to bind; elsewhere than loopback set --api-key",
        group="listening and trust",
    )
    port: int = option(8000, "port to bind; 0 picks a free one", low=0, high=65535)
    api_key: str = option("", "key that clients must send as Authorization: Bearer or X-Reflex-Key", secret=True)
    api_key_file: str = option("", "file that holds the key", metavar="FILE")
    allow_host: tuple[str, ...] = option(
        (), "without a key: a further name that the server may be called by, and a site whose pages may POST; * is any",
        metavar="NAME", repeat=True, unless="api_key",
    )
    max_body_bytes: int = option(4 * 2**20, "largest request body, beyond it 413", low=1024, high=2**31, unit="bytes")
    max_bodies_mb: float = option(
        256.0, "request bodies held in memory, in all; beyond it 503 overloaded", low=1, high=1_000_000, unit="MB"
    )
    max_connections: int = option(
        4096, "open connections; with one more the one that was idle for longest is closed", low=1, high=1_000_000
    )
    idle_timeout_s: float = option(
        75.0, "time a connection may be without a request", low=0.1, high=86_400, unit="s"
    )
    head_timeout_s: float = option(10.0, "time for the head of a request to come", low=0.1, high=3600, unit="s")
    body_timeout_s: float = option(60.0, "time for its body to come, beyond it 408", low=0.1, high=3600, unit="s")
    max_num_batched_tokens: int = option(
        2048, "most tokens in a step; it bounds how long a step takes, and so every gap between two tokens",
        low=1, high=1 << 20,
        group="batching",
    )
    max_num_seqs: int = option(256, "most requests that are being generated at a time", low=1, high=1 << 16)
    long_prefill_token_threshold: int = option(
        0, "most tokens of one prompt in a step, so that others fit beside it; 0 leaves it to the step's budget",
        low=0, high=1 << 20,
    )
    max_queue: int = option(1000, "waiting requests; beyond it 429", low=1, high=1_000_000, group="queue")
    max_queued_tokens: int = option(
        1_000_000, "prompt tokens of waiting requests; beyond it 429", low=1, high=1_000_000_000, unit="tokens"
    )
    block_size: int = option(
        0, "tokens in a block of the cache; 0 leaves it to the runner", low=0, high=4096,
        group="the cache",
    )
    kv_cache_gb: float = option(
        0.0, "memory for keys and values; 0 takes 1 GiB", low=0, high=100_000, unit="GB"
    )
    prefix_caching: bool = option(True, "prompts that begin alike are computed once")
    supervise: bool = option(
        True, "a small process above the server starts it again when it is lost; off where another supervisor does",
        group="faults and the end",
    )
    watchdog_s: float = option(
        60.0, "a step running longer is given up and its callers told; twice as long, the server; 0 is off",
        low=0, high=3600, unit="s",
    )
    drain_timeout_s: float = option(
        30.0, "time to finish what was asked before SIGTERM; the rest is cut short", low=0, high=600, unit="s"
    )
    trace: str = option(
        "", "write every step to FILE as a JSON line; read it with reflex trace", metavar="FILE",
        group="trace",
    )

    def __post_init__(self) -> None:
        validate(self)
        _check_door(self)


@dataclass(frozen=True, slots=True)
class FeedsConfig:
    """Everything `reflex feeds` can be told."""

    processor: str = option(
        "", "your processor: module:name of a class, of a function that makes one, or of one that is ready",
        metavar="MODULE:NAME",
        group="the processor",
    )
    onnx: str = option("", "an ONNX model of pictures as the processor; shapes is the bundled one", metavar="FILE")
    score: float = option(
        0.5, "with --onnx: boxes below this score are left out", low=0, high=1, metavar="SCORE", needs="onnx"
    )
    provider: str = option("cpu", "with --onnx: cpu, cuda or an ONNX Runtime provider name", needs="onnx")
    threads: int = option(1, "with --onnx: ONNX Runtime threads per call", low=1, high=256, needs="onnx")
    startup_timeout_s: float = option(30.0, "how long the processor may take to start", low=0.1, high=3600, unit="s")
    max_batch_size: int = option(4, "most frames in a call of the processor", low=1, high=4096, group="batching")
    max_latency_ms: float = option(
        50.0, "longest that a frame waits on a free processor for feeds that are due, and only where that pays",
        low=0, high=60_000, unit="ms",
    )
    queue_capacity: int = option(
        0, "frames waiting for the processor; 0 is four batches, and at least one place per feed", low=0, high=1_000_000
    )
    response_timeout_s: float = option(
        5.0, "what a feed waits for its answer beyond the latency", low=0.01, high=3600, unit="s"
    )
    watchdog_s: float = option(
        60.0, "a batch running longer is reported and its feeds are released; 0 is off", low=0, high=3600, unit="s"
    )
    realtime: bool = option(
        False, "play files at their own pace, as if they were cameras: the newest frame wins", needs="a file",
        group="the feeds",
    )
    loop: bool = option(False, "start files over when they end; needs --realtime", needs="a file")
    max_age_ms: float = option(
        1000.0, "live: a frame older than this is dropped, not computed", low=1, high=3_600_000, unit="ms",
        needs="a live feed",
    )
    restarts: int = option(
        0, "live: how often, in all, a lost source is opened again before the feed is given up; 0 is without end",
        low=0, high=1_000_000, needs="a live feed",
    )
    read_timeout_s: float = option(
        5.0, "a camera silent for this long is taken for lost", low=0.1, high=600, unit="s", needs="a camera"
    )
    duration_s: float = option(
        0.0, "stop this long after the start of the feeds; 0 runs until every feed is over", low=0, high=1e9, unit="s"
    )
    results: str = option(
        "", "write every result to FILE as a JSON line; - is standard output", metavar="FILE",
        group="results",
    )
    annotate: str = option("", "write each feed to DIR as a video with what was found drawn on it", metavar="DIR")
    trace: str = option("", "write every batch to FILE as a JSON line; read it with reflex trace", metavar="FILE")
    table: bool | None = option(
        None,
        "a live table on standard error; by default where that is a terminal, elsewhere a line per feed every 5 s",
        group="watching",
    )
    port: int = option(-1, "port for /metrics and /health; 0 picks a free one, -1 is off", low=-1, high=65535)
    host: str = option("127.0.0.1", "address to bind for them", needs="port")

    def __post_init__(self) -> None:
        validate(self)


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def validate(config: Any) -> None:
    """Check every field against its range and choices; the error names flag, value and range."""
    for f in fields(config):
        value, meta = getattr(config, f.name), f.metadata
        unit = f" {meta['unit']}" if meta.get("unit") else ""
        low, high = meta.get("low"), meta.get("high")
        if low is not None and not low <= value <= high:
            raise ConfigError(f"{flag(f.name)}={value:.10g}: must be in [{low:g}, {high:.10g}]{unit}", field=f.name)
        if meta.get("choices") and value not in meta["choices"]:
            raise ConfigError(
                f"{flag(f.name)}={one_line(value)}: must be one of {', '.join(meta['choices'])}", field=f.name
            )


def _check_door(config: ServeConfig | LLMServeConfig) -> None:
    """Read the key of --api-key-file, and check the names of --allow-host."""
    if config.api_key_file and not config.api_key:
        object.__setattr__(config, "api_key", _key_in(config.api_key_file))
    for name in config.allow_host:
        if not re.fullmatch(r"\*|[\w.-]{1,253}|\[?[0-9a-fA-F:.]{2,45}\]?", name):
            expected = "a host name or an address without a port, or *"
            raise ConfigError(f"--allow-host={one_line(name)}: must be {expected}", field="allow_host")


def _key_in(file: str) -> str:
    """The key that a file holds: one line."""
    where = f"--api-key-file={one_line(file)}"
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read(4097)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}", field="api_key_file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: is no UTF-8 text", field="api_key_file") from None
    key = text.strip()
    if not key or len(text) > 4096 or not key.isprintable():
        raise ConfigError(f"{where}: must hold one line of at most 4096 characters, the key", field="api_key_file")
    return key


def _sizes(text: str) -> tuple[int, ...]:
    """The batch sizes of --cuda-graphs."""
    sizes = tuple(int(part) for part in text.split(",")) if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text) else ()
    if not sizes or sizes[0] < 1 or sizes[-1] > 4096 or any(a >= b for a, b in pairwise(sizes)):
        expected = "ascending whole numbers in [1, 4096], such as 1,2,4,8"
        raise ConfigError(f"--cuda-graphs={one_line(text)}: must be {expected}", field="cuda_graphs")
    return sizes


def one_line(value: Any) -> str:
    """A value as an error shows it: as it was typed where that is one short line."""
    text = str(value)
    return text if text.isprintable() and len(text) <= 200 else repr(text[:200])


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """One flag per field. Unset flags stay out of the namespace, so that the file and the environment can speak."""
    hints = get_type_hints(kind)
    group: Any = parser
    for f in fields(kind):
        meta = f.metadata
        group = parser.add_argument_group(meta["group"]) if meta["group"] else group
        text = described(f).replace("%", "%%") + _suffix(f)
        common: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": text}
        if hints[f.name] in (bool, bool | None):
            group.add_argument(flag(f.name), action=argparse.BooleanOptionalAction, **common)
        elif meta["repeat"]:
            group.add_argument(flag(f.name), action="append", metavar=meta["metavar"], **common)
        else:
            shown = meta["metavar"] or (meta["unit"].upper() if meta["unit"] else None)
            if meta["choices"]:
                shown = "{" + ",".join(meta["choices"]) + "}"
            shown = shown or ("N" if hints[f.name] is int else "TEXT")
            alone = {} if meta["bare"] is None else {"nargs": "?", "const": meta["bare"]}
            group.add_argument(flag(f.name), metavar=shown, **alone, **common)


def described(f: Field[Any]) -> str:
    """What a setting does, and what it needs for that."""
    needs, unless = f.metadata["needs"], f.metadata["unless"]
    words = [f"needs {_in_words(needs)}"] * bool(needs) + [f"not with {_in_words(unless)}"] * bool(unless)
    return str(f.metadata["help"]) + (f" ({'; '.join(words)})" if words else "")


def _suffix(f: Field[Any]) -> str:
    if f.metadata["secret"] or f.default in ("", (), None, MISSING):
        return ""
    default = f.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, float):
        default = f"{default:g}"
    unit = f" {f.metadata['unit']}" if f.metadata["unit"] else ""
    low, high = f.metadata["low"], f.metadata["high"]
    bounds = f", range {low:g} to {high:.10g}" if low is not None else ""
    return f" (default {default}{unit}{bounds})"


def load(
    kind: type[C],
    section: str,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
    beside: tuple[str, ...] = (),
) -> C:
    """Build the settings from all sources; every error says where the value came from.

    beside: further tables that the file may have, which other parts read.
    """
    config, places = read(kind, section, file, environ, flags, beside)
    check_needs(config, places)
    return config


def read(
    kind: type[C],
    section: str,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
    beside: tuple[str, ...] = (),
) -> tuple[C, Places]:
    """`load` for a command that knows facts which settings need: it calls `check_needs` itself, with the places."""
    hints = get_type_hints(kind)
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    places: dict[str, str] = {}

    def give(name: str, value: Any, place: str) -> None:
        values[name], places[name] = convert(value, hints[name], place), place

    for key, value in (_table(file, section, beside) if file is not None else {}).items():
        name = key.replace("-", "_")
        if name not in names:
            raise ConfigError(f"{file}: [{section}] {key}: no such setting{did_you_mean(name, names)}")
        give(name, value, f"{file}: [{section}] {key}")
    for name in names & _settings_in(environ).keys():
        give(name, environ["REFLEX_" + name.upper()], "REFLEX_" + name.upper())
    for name in names & flags.keys():
        give(name, flags[name], flag(name))
    for f in fields(kind):  # type: ignore[arg-type]
        if f.metadata.get("secret") and f.name in values and not values[f.name].strip():
            raise ConfigError(f"{places[f.name]} is empty: give a key, or leave it out", field=f.name)
    if values.get("api_key") and values.get("api_key_file"):
        raise ConfigError(f"{places['api_key']} and {places['api_key_file']}: give one of them", field="api_key_file")
    return kind(**values), places


# -- settings without effect -------------------------------------------------------------------------------------------


def check_needs(config: Any, places: Places, missing: Mapping[str, str] | None = None) -> None:
    """Refuse a flag that has no effect, and warn of a setting from the file or the environment that has none.

    missing: the facts that settings may need and that do not hold, each with the reason.
    """
    missing = {} if missing is None else missing
    for f in fields(config):
        place = places.get(f.name)
        if place is None or getattr(config, f.name) is False:  # what is said to be off is off
            continue
        why = _without_effect(config, f.name, missing)
        if why and place == flag(f.name):
            raise ConfigError(f"{place} {why}", field=f.name)
        if why:
            log.warning("%s has no effect: it %s", place, why)


def _without_effect(config: Any, name: str, missing: Mapping[str, str]) -> str:
    """Why a setting has no effect, "" if it has one."""
    meta = {f.name: f for f in fields(config)}[name].metadata
    needs, unless = str(meta.get("needs", "")), str(meta.get("unless", ""))
    if unless and any(not _lacks(config, need, missing) for need in unless.split("|")):
        return f"has no effect with {_in_words(unless)}"
    if not needs:
        return ""
    lacking = [_lacks(config, need, missing) for need in needs.split("|")]
    if not all(lacking):
        return ""
    return lacking[0] if len(lacking) == 1 else f"needs {_in_words(needs)}"


def _lacks(config: Any, need: str, missing: Mapping[str, str]) -> str:
    """Why a need is not met, "" if it is."""
    name, equals, wanted = need.partition("=")
    found = {f.name: f for f in fields(config)}.get(name)
    if found is None:
        return f"needs {need}: {missing[need]}" if need in missing else ""
    value = getattr(config, name)
    off = value != wanted if equals else value is False or value in ("", (), None, found.metadata["low"])
    return f"needs {_in_words(need)}" if off else _without_effect(config, name, missing)


def _in_words(needs: str) -> str:
    words = []
    for need in needs.split("|"):
        name, equals, value = need.partition("=")
        words.append(need if " " in need else flag(name) + equals + value)
    return " or ".join(words)


# -- the environment ---------------------------------------------------------------------------------------------------

OTHERS = frozenset({"SKIP_2POLICY_MEMORY_CHECK", "DISABLE_GENERATE_BATCHING"})  # not settings
_SERVICE = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def _settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of the environment by name, of any command; warns of variables that are none.

    An orchestrator that runs a service called reflex describes it in variables such as REFLEX_PORT=tcp://10.0.0.1:80:
    those are no settings.
    """
    known = {f.name for kind in (ServeConfig, LLMServeConfig, FeedsConfig) for f in fields(kind)}
    found = {}
    for variable, text in environ.items():
        rest = variable.removeprefix("REFLEX_")
        if rest == variable or rest in OTHERS:
            continue
        if _SERVICE.fullmatch(rest) and (rest != "PORT" or _SERVICE_URL.match(text)):
            continue
        if rest.lower() in known and rest.isupper():
            found[rest.lower()] = text
        else:
            names = [name.upper() for name in known] + list(OTHERS)
            log.warning("%s: no such setting%s", variable, did_you_mean(rest.upper(), names, "REFLEX_"))
    return found


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """What to append to an error on an unknown word: the nearest known one, if one is near."""
    near = difflib.get_close_matches(word, sorted(known), 1, 0.7)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def read_toml(file: Path) -> dict[str, Any]:
    """The file's tables; ConfigError when it cannot be read."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config={file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config={file}: not TOML: {error}") from error


def _table(file: Path, section: str, beside: tuple[str, ...]) -> dict[str, Any]:
    tables = read_toml(file)
    stray = next((name for name in tables if name != section and name not in beside), None)
    if stray is not None:  # a misspelt table must not pass for defaults
        others = "".join(f" and {name}" for name in beside)
        raise ConfigError(f"{file}: found {stray!r}, expected only the table [{section}]{others}")
    found = tables.get(section, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: [{section}] must be a table")
    return found


def convert(value: Any, kind: Any, where: str) -> Any:
    """A value of the field's type from TOML, a flag or an environment string."""
    try:
        if kind in (bool, bool | None):
            if isinstance(value, bool):
                return value
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[str(value).lower()]
        if isinstance(value, (bool, dict)):
            raise ValueError
        if kind is int:
            return int(value) if not isinstance(value, float) else _whole(value)
        if kind is float:
            number = float(value)
            if number != number:
                raise ValueError
            return number
        if kind is str:
            if isinstance(value, list):
                raise ValueError
            return str(value)
        return tuple(value.split(",")) if isinstance(value, str) else tuple(str(v) for v in value)
    except (ValueError, KeyError, TypeError, OverflowError):
        wanted = {bool: "true or false", bool | None: "true or false", int: "a whole number", float: "a number"}.get(
            kind, "text"
        )
        raise ConfigError(f"{where}={one_line(value)}: must be {wanted}") from None


def _whole(value: float) -> int:
    if value != int(value):
        raise ValueError
    return int(value)


def table(config: Any) -> list[tuple[str, str]]:
    """(flag, value) of every setting in force, secrets hidden."""
    rows = []
    for f in fields(config):
        value = getattr(config, f.name)
        if f.metadata["secret"]:
            shown = "set" if value else "not set"
        elif value is False or value is None or value == "" or value == ():
            shown = "off" if value is False else "-"
        else:
            shown = "on" if value is True else ",".join(value) if isinstance(value, tuple) else str(value)
            shown = f"{value:.10g}" if isinstance(value, float) else shown
        rows.append((flag(f.name), f"{shown} {f.metadata['unit']}".strip() if shown != "-" else "-"))
    return rows


def settings(config: Any) -> dict[str, Any]:
    """Every setting in force by its name, JSON-safe, secrets hidden."""
    found = {f.name: getattr(config, f.name) for f in fields(config)}
    return {f.name: "set" if f.metadata["secret"] and found[f.name] else found[f.name] for f in fields(config)}


def environment() -> Mapping[str, str]:
    """The process environment, in one place so that tests can pass another."""
    return os.environ
