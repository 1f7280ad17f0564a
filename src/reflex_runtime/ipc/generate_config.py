"""The settings of the generate batcher: a section of the configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.messages import GenerateParams
from reflex_runtime.settings.declare import option, validate

# Fields of a request, and their defaults.
OPTIONS: dict[str, Any] = {f.name: f.default for f in msgspec.structs.fields(GenerateParams)}


@dataclass(frozen=True, slots=True)
class GenerateBatcherConfig:
    """The section `generate_batcher` of the configuration file.

    enabled: False sends every request by itself. min_batch_size, max_batch_size: bounds of the target, and the most
    requests in a message. min_hold_ms, max_hold_ms: how long a request may wait for others once the target is reached,
    and before. background_extra_ms: how much longer a background request may. target_batch_time_ms: time of a message
    and its answer above which the target shrinks. pause_on_backpressure_ms: pause of a model's messages when a reader
    is slow. max_pending, max_pending_tokens: requests that may wait, and their prompt tokens (characters of text).
    stream_limit: streams that may be active. call_timeout_ms: time for the answer to a message. ungroupable_options:
    fields of a request that make it go by itself.
    """

    enabled: bool = True
    min_batch_size: int = option(2, low=1, high=1024)
    max_batch_size: int = option(16, low=1, high=1024)
    min_hold_ms: float = option(0.75, low=0, high=1000)
    max_hold_ms: float = option(3.0, low=0, high=1000)
    background_extra_ms: float = option(2.0, low=0, high=1000)
    target_batch_time_ms: float = option(12.0, low=0.01, high=60_000)
    pause_on_backpressure_ms: float = option(20.0, low=0, high=10_000)
    max_pending: int = option(1000, low=1, high=1_000_000)
    max_pending_tokens: int = option(1_000_000, low=1, high=1_000_000_000)
    stream_limit: int = option(64, low=1, high=1_000_000)
    call_timeout_ms: float = option(30_000.0, low=1, high=3_600_000)
    ungroupable_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        validate(self, "generate_batcher")
        for least, most in (("min_batch_size", "max_batch_size"), ("min_hold_ms", "max_hold_ms")):
            low, high = getattr(self, least), getattr(self, most)
            if low > high:
                raise ConfigError(f"generate_batcher.{least}={low!r}: must be at most {most}, which is {high!r}")
        for name in self.ungroupable_options:
            if name not in OPTIONS:
                raise ConfigError(
                    f"generate_batcher.ungroupable_options={name!r}: must be fields of a request: {sorted(OPTIONS)}"
                )
