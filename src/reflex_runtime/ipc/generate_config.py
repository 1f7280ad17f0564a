"""The settings of the generate batcher: a section of the configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.messages import GenerateParams

# Fields of a request, and what they are when nobody says.
OPTIONS: dict[str, Any] = {f.name: f.default for f in msgspec.structs.fields(GenerateParams)}


@dataclass(frozen=True, slots=True)
class GenerateBatcherConfig:
    """The section `generate_batcher` of the configuration file.

    enabled: False sends every request by itself. min_batch_size, max_batch_size: how many the batcher waits for at
    least and at most, and the most that share a message. min_hold_ms, max_hold_ms: how long a request may wait for
    company once so many wait, and before. background_extra_ms: how much longer a background request may.
    target_batch_time_ms: time of a message and its answer beyond which it waits for fewer. pause_on_backpressure_ms:
    how long nothing is sent for the model of a stream whose reader is slow. max_pending, max_pending_tokens: requests,
    and prompt tokens of theirs (characters, where a prompt is text), that may wait. stream_limit: streams that may be
    active. call_timeout_ms: time for the answer to a message.
    ungroupable_options: fields of a request that make it go by itself.
    """

    enabled: bool = True
    min_batch_size: int = 2
    max_batch_size: int = 16
    min_hold_ms: float = 0.75
    max_hold_ms: float = 3.0
    background_extra_ms: float = 2.0
    target_batch_time_ms: float = 12.0
    pause_on_backpressure_ms: float = 20.0
    max_pending: int = 1000
    max_pending_tokens: int = 1_000_000
    stream_limit: int = 64
    call_timeout_ms: float = 30_000.0
    ungroupable_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"generate_batcher.{name}={value!r}: must be in [{low:g}, {high:.10g}]")
        for least, most in (("min_batch_size", "max_batch_size"), ("min_hold_ms", "max_hold_ms")):
            low, high = getattr(self, least), getattr(self, most)
            if low > high:
                raise ConfigError(f"generate_batcher.{least}={low!r}: must be at most {most}, which is {high!r}")
        for name in self.ungroupable_options:
            if name not in OPTIONS:
                raise ConfigError(
                    f"generate_batcher.ungroupable_options={name!r}: must be fields of a request: {sorted(OPTIONS)}"
                )


_RANGES = {
    "min_batch_size": (1, 1024),
    "max_batch_size": (1, 1024),
    "min_hold_ms": (0.0, 1000.0),
    "max_hold_ms": (0.0, 1000.0),
    "background_extra_ms": (0.0, 1000.0),
    "target_batch_time_ms": (0.01, 60_000.0),
    "pause_on_backpressure_ms": (0.0, 10_000.0),
    "max_pending": (1, 1_000_000),
    "max_pending_tokens": (1, 1_000_000_000),
    "stream_limit": (1, 1_000_000),
    "call_timeout_ms": (1.0, 3_600_000.0),
}
