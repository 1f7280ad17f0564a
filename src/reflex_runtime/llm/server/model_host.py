"""Which model a server serves, and its settings in each process that runs it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.messages import SamplingParams
from reflex_runtime.settings import LLMServeConfig
from reflex_runtime.settings.declare import flag, one_line

if TYPE_CHECKING:
    from reflex_runtime.llm.engine.load import Description
    from reflex_runtime.llm.engine.tokenizer import Tokenizer
    from reflex_runtime.llm.runners.runner import Runner


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The model that is served.

    name: in the API. directory: of its files. adapters: names of its LoRA adapters. defaults: of sampling, for fields
    that a request omits.
    """

    name: str
    config: LLMServeConfig
    directory: Path = Path()
    adapters: tuple[str, ...] = ()
    defaults: SamplingParams = field(default_factory=SamplingParams)


Lost = Callable[[], None]  # called on the loop when the model is lost for good
Reached = Callable[[str], None]  # called with `loading`, and with `warming`
Open = Callable[[ModelPlan, CollectorRegistry, Lost | None, Reached], Awaitable[Any]]
"""Loads a plan's model, with its series in the registry; returns a `LocalModel`, or `Workers`."""


# -- settings of the process that runs it ------------------------------------------------------------------------------

GPUS = "CUDA_VISIBLE_DEVICES"
_OF_THE_FRONT = {
    "workers", "supervise", "host", "port", "api_key", "admin_key", "allow_host",
    "served_model_name", "log_format",
}  # fmt: skip


def load_model(plan: ModelPlan) -> tuple[Runner, Tokenizer]:
    """The runner and the tokenizer of a plan. Errors name flags."""
    from reflex_runtime.llm.engine.load import load as load_directory

    try:
        return load_directory(plan.directory, **_options(plan.config))
    except ConfigError as error:
        raise _as_flag(plan.config, error) from error


def check_model(config: LLMServeConfig, model: Description) -> None:
    """Check the settings without loading the model. Errors name flags."""
    from reflex_runtime.llm.engine.load import check

    try:
        check(model, **_options(config), copies=max(1, config.workers))
    except ConfigError as error:
        raise _as_flag(config, error) from None


def _options(config: LLMServeConfig) -> dict[str, Any]:
    """Arguments of the loader. A setting of 0 becomes None: the runner chooses."""
    return {
        "device": config.device,
        "runner": config.runner,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "cache_dir": config.cache_dir,
        "block_size": config.block_size or None,
        "kv_cache_bytes": round(config.kv_cache_gb * 1e9) if config.kv_cache_gb else None,
        "max_model_len": config.max_model_len or None,
        "threads": config.threads or None,
        "adapters": adapters_of(config),
    }


def adapters_of(config: LLMServeConfig) -> dict[str, Path]:
    """The directories of --lora, by the names of the adapters."""
    pairs = (text.partition("=") for text in config.lora)
    return {name: Path(directory) for name, _, directory in pairs}


def _as_flag(config: LLMServeConfig, error: ConfigError) -> ConfigError:
    """The error of a loader's argument as one of its flag; any other error as it is."""
    name, why = str(error.details.get("field", "")), error.message.partition(": ")[2]
    if name == "kv_cache_bytes":
        low, high = (int(error.details[end] or 0) / 1e9 for end in ("low", "high"))
        name, high = "kv_cache_gb", floor(high * 100) / 100
        each = f" for each of {config.workers} processes" if config.workers > 1 else ""
        why = f"must be in [{low:.10g}, {high:.10g}] GB: from one block of this model to the free memory{each}"
    if name not in LLMServeConfig.__dataclass_fields__:
        return error
    value = getattr(config, name)
    value = one_line(", ".join(value)) if isinstance(value, tuple) else value
    shown = f"{value:.10g}" if isinstance(value, float) else value
    return ConfigError(f"{flag(name)}={shown}: {why}", field=name)


def gpu_of(config: LLMServeConfig, number: int) -> dict[str, str]:
    """The environment of a runtime process: one GPU, in turn, if CUDA_VISIBLE_DEVICES names several."""
    named = [name.strip() for name in os.environ.get(GPUS, "").split(",") if name.strip()]
    return {GPUS: named[number % len(named)]} if len(named) > 1 and config.device != "cpu" else {}


def trace_of(path: str, number: int, restarts: int = 0) -> str:
    """The trace file of a runtime process. A restarted process does not overwrite the file of the lost one."""
    place = Path(path)
    return str(place.parent / f"{place.stem}.worker-{number}{f'.{restarts}' if restarts else ''}{place.suffix}")


def settings_of(config: LLMServeConfig, number: int, restarts: int = 0) -> dict[str, Any]:
    """The settings of a runtime process: the model's, its own trace file, its share of the CPU."""
    names = LLMServeConfig.__dataclass_fields__.keys() - _OF_THE_FRONT
    found = {name: getattr(config, name) for name in sorted(names)}
    if config.trace:
        found["trace"] = trace_of(config.trace, number, restarts)
    if not config.threads and config.workers > 1:  # threads of two models on one core would wait for each other
        found["threads"] = max(1, len(os.sched_getaffinity(0)) // config.workers)
    return found
