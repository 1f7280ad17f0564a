"""What the settings of `reflex serve MODEL_DIR` mean where the model runs: in the server, or in a runtime process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflex_runtime.config import LLMServeConfig, flag
from reflex_runtime.core.errors import ConfigError

if TYPE_CHECKING:
    from reflex_runtime.llm.runner import Runner
    from reflex_runtime.llm.tokenizer import Tokenizer

GPUS = "CUDA_VISIBLE_DEVICES"
_OF_THE_FRONT = {
    "workers", "supervise", "host", "port", "api_key", "api_key_file", "allow_host", "served_model_name",
}  # fmt: skip


def load_model(directory: Path, config: LLMServeConfig) -> tuple[Runner, Tokenizer]:
    """The runner and the tokenizer as the settings want them; 0 leaves a number to the runner."""
    from reflex_runtime.llm.load import load as load_directory

    try:
        return load_directory(
            directory,
            device=config.device,
            runner=config.runner,
            dtype=config.dtype,
            block_size=config.block_size or None,
            kv_cache_bytes=int(config.kv_cache_gb * 1e9) or None,
            max_model_len=config.max_model_len or None,
            threads=config.threads or None,
        )
    except ConfigError as error:
        name = "kv_cache_gb" if "kv_cache_bytes=" in error.message else str(error.details.get("field", ""))
        raise _as_flag(config, name, error) from error


def check_model(config: LLMServeConfig, positions: int) -> None:
    """Check what can be checked without loading the model; errors name flags. positions: most that the model takes."""
    from reflex_runtime.llm.load import choose

    device = "cpu" if config.device == "auto" else config.device  # whether there is a GPU, loading will tell
    try:
        choose(device, config.runner, config.dtype, config.block_size or None)
    except ConfigError as error:
        raise _as_flag(config, str(error.details["field"]), error) from None
    if config.max_model_len > positions:
        raise ConfigError(
            f"--max-model-len={config.max_model_len}: must be at most {positions}, what the model was made for",
            field="max_model_len",
        )


def _as_flag(config: LLMServeConfig, name: str, error: ConfigError) -> ConfigError:
    """An error about an argument, in the words of the command line; itself where it is about something else."""
    if name not in LLMServeConfig.__dataclass_fields__:
        return error
    return ConfigError(f"{flag(name)}={getattr(config, name)}: {error.message.partition(': ')[2]}", field=name)


def gpu_of(config: LLMServeConfig, number: int) -> dict[str, str]:
    """The environment of a runtime process that gives it a GPU of its own, where CUDA_VISIBLE_DEVICES names several."""
    named = [name.strip() for name in os.environ.get(GPUS, "").split(",") if name.strip()]
    return {GPUS: named[number % len(named)]} if len(named) > 1 and config.device != "cpu" else {}


def trace_of(path: str, number: int, restarts: int = 0) -> str:
    """Where a runtime process writes its trace: one that was started again leaves that of the lost one alone."""
    place = Path(path)
    return str(place.parent / f"{place.stem}.worker-{number}{f'.{restarts}' if restarts else ''}{place.suffix}")


def settings_of(config: LLMServeConfig, number: int, restarts: int = 0) -> dict[str, Any]:
    """What a runtime process is told of the settings: those of the model, its own trace, its part of the CPU."""
    names = LLMServeConfig.__dataclass_fields__.keys() - _OF_THE_FRONT
    found = {name: getattr(config, name) for name in sorted(names)}
    if config.trace:
        found["trace"] = trace_of(config.trace, number, restarts)
    if not config.threads and config.workers > 1:  # threads of two models on one core wait for each other
        found["threads"] = max(1, len(os.sched_getaffinity(0)) // config.workers)
    return found
