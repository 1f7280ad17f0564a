"""From a model directory to its runner: by default OpenVINO's paged attention on a CPU, and PyTorch on a GPU.

A runner is imported only when it is chosen.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.extras import not_installed
from reflex_runtime.ipc.messages import SamplingParams
from reflex_runtime.llm.engine.tokenizer import HFTokenizer, Tokenizer
from reflex_runtime.llm.runners.adapters import ADAPTER_CONFIG, MERGE, AdapterStack, not_adaptable
from reflex_runtime.llm.runners.checkpoint import (
    CONFIG_FILE,
    GENERATION_FILE,
    AnyModelConfig,
    Checkpoint,
    ModelConfig,
    is_known,
    require,
)
from reflex_runtime.llm.runners.openvino_source import OpenVinoExport, is_export
from reflex_runtime.llm.runners.runner import BLOCK_SIZES, GIB, Runner, blocks_in, context_length, free_bytes
from reflex_runtime.run.model_files import check_files, read_object

Description = ModelConfig | OpenVinoExport | AnyModelConfig


def load(
    directory: str | Path,
    *,
    device: str = "auto",
    runner: str = "auto",
    dtype: str = "auto",
    quantization: str = "none",
    cache_dir: str | Path = "",
    adapters: Mapping[str, Path] | None = None,
    **options: Any,
) -> tuple[Runner, Tokenizer]:
    """A runner and the tokenizer of a directory: a Hugging Face checkpoint, or an export to OpenVINO.

    device: `cpu`, `cuda`, or `auto` (a GPU if PyTorch sees one). runner: `openvino`, `torch`, or `auto`. dtype: of the
    computation (`float32`, `bfloat16`; `auto`: that of the checkpoint if the machine is fast at it). quantization:
    `int8` or `int4` rounds the weights, on OpenVINO. cache_dir: for graphs that are made of checkpoints; by default
    they lie beside the checkpoint. adapters: directories of LoRA adapters, by name. options: block_size, num_blocks,
    kv_cache_bytes, max_model_len, threads; None for the runner's default. Raises ConfigError that names the file.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if value < 1:
            raise _wrong(name, value, "must be >= 1")
    check_files(Path(directory))
    device, runner = choose(device, runner, given.get("block_size"), is_export(directory), quantization)
    tokenizer = HFTokenizer.load(directory)
    if runner == "openvino":
        from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner

        weights, kept = "auto" if quantization == "none" else quantization, Path(cache_dir) if cache_dir else None
        made = OpenVinoRunner(directory, dtype=dtype, weights=weights, cache_dir=kept, adapters=adapters, **given)
        return made, tokenizer
    from reflex_runtime.llm.runners.torch_runner import TorchRunner

    return TorchRunner(directory, device=device, dtype=dtype, adapters=adapters, **given), tokenizer


def describe(directory: str | Path) -> Description:
    """The description of a directory, checked; its weights are not read. ConfigError for one that cannot be served."""
    check_files(Path(directory))
    if is_export(directory):
        return OpenVinoExport.open(directory)
    check_directory(Path(directory))
    if is_known(directory):
        return Checkpoint.open(directory).config
    require(Path(directory))
    from reflex_runtime.llm.runners import transformers_model

    return transformers_model.describe(Path(directory))


def choose(
    device: str, runner: str, block_size: int | None = None, export: bool = False, quantization: str = "none"
) -> tuple[str, str]:
    """The device and the runner that `load` uses. Loads nothing. export: whether the model is an export to OpenVINO.

    Raises ConfigError if no runner accepts these options together, or this machine cannot run them; `field` names one.
    """
    if export:
        for name, value, refused in (("device", device, "cuda"), ("runner", runner, "torch")):
            if value == refused:
                raise _wrong(name, value, "an export to OpenVINO runs on a CPU as it was exported; leave it out")
        device, runner = "cpu", "openvino"
    if device == "auto":
        device = "cuda" if runner != "openvino" and _sees_cuda() else "cpu"
    elif device == "cuda" and not _sees_cuda():
        raise _wrong("device", device, "PyTorch is not installed or sees no GPU; use cpu or auto")
    if runner == "auto":
        runner = "openvino" if device == "cpu" else "torch"
    if runner == "openvino" and device != "cpu":
        raise _wrong("runner", runner, f"runs on the cpu, not on {device}; use torch, or the device cpu")
    if runner == "openvino" and block_size is not None:
        why = "the kernels of the openvino runner fix the size of a block; leave it out, or use torch"
        raise _wrong("block_size", block_size, why)
    if runner == "torch" and quantization != "none":
        why = "only the openvino runner rounds weights; leave it out, or use the device cpu"
        raise _wrong("quantization", quantization, why)
    if find_spec(runner) is None:
        raise _wrong("runner", runner, not_installed(runner, "it").message)
    return device, runner


def check(
    model: Description,
    *,
    device: str = "auto",
    runner: str = "auto",
    dtype: str = "auto",
    quantization: str = "none",
    cache_dir: str | Path = "",
    block_size: int | None = None,
    kv_cache_bytes: int | None = None,
    max_model_len: int | None = None,
    threads: int | None = None,
    adapters: Mapping[str, Path] | None = None,
    copies: int = 1,
) -> None:
    """Raise ConfigError for options of `load` that do not fit this model or this machine; `field` names the option.
    Loads nothing.

    copies: how many processes will load the model. The memory of the weights is not counted: whether cache and weights
    fit together shows when they are loaded.
    """
    device, runner = choose(device, runner, block_size, isinstance(model, OpenVinoExport), quantization)
    if adapters:
        if not isinstance(model, ModelConfig):
            raise not_adaptable()
        AdapterStack.read(adapters, model, copies)
    if cache_dir and Path(cache_dir).exists() and not Path(cache_dir).is_dir():
        raise _wrong("cache_dir", str(cache_dir), "is not a directory")
    context_length(max_model_len, model.max_position_embeddings)
    if dtype == "bfloat16" and runner == "openvino":
        from reflex_runtime.llm.runners.openvino_runner import check_bfloat16

        check_bfloat16()
    narrow = dtype == "bfloat16" or (dtype != "float32" and model.torch_dtype == "bfloat16")
    block = model.cache_bytes(block_size or BLOCK_SIZES[runner], 2 if narrow else 4)
    total = GIB if kv_cache_bytes is None else kv_cache_bytes
    if device == "cpu":
        blocks_in(total, block, free_bytes() // copies)
    else:  # processes may have a GPU each, and each look at a GPU's memory takes some of it
        blocks_in(total, block, free_bytes(device) if copies == 1 else max(total, block))


def check_directory(root: Path) -> None:
    """Raise ConfigError for a GGUF file and for an adapter, which users take for a model. Checks nothing else."""
    if root.suffix == ".gguf" or (root.is_dir() and not (root / CONFIG_FILE).is_file() and any(root.glob("*.gguf"))):
        why = "is llama.cpp's format, which cannot be served; serve the Hugging Face directory it was made of"
        raise ConfigError(f"{root}: GGUF {why}; --quantization int4 makes that as small")
    adapter = root / ADAPTER_CONFIG
    if adapter.is_file() and not (root / CONFIG_FILE).is_file():
        base = read_object(adapter).get("base_model_name_or_path")
        how = f"serve it beside its model, reflex serve MODEL_DIR --lora NAME={root}, or {MERGE}"
        raise ConfigError(f"{root}: is an adapter (PEFT) of {base!r}, not a model; {how}")


def _wrong(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"{name}={value!r}: {why}", field=name)


def _sees_cuda() -> bool:
    if sys.platform == "linux" and not Path("/dev/kfd").exists():  # the driver of AMD's GPUs
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return False  # found seconds sooner than by the import of PyTorch
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


# -- how a model is sampled --------------------------------------------------------------------------------------------

AUTHORS_SAY: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Defaults of a model's authors for fields that a request omits."""


def authors_said(defaults: SamplingParams) -> str:
    """The defaults that differ from the OpenAI API's."""
    plain = SamplingParams()
    found = ((name, getattr(defaults, name)) for name in AUTHORS_SAY)
    return ", ".join(f"{name} {value:g}" for name, value in found if value != getattr(plain, name))


def sampling_defaults(directory: Path | str) -> SamplingParams:
    """The defaults in a model directory. ConfigError names the file, the key and the range.

    `do_sample` and `max_new_tokens` are ignored: in the OpenAI API they are fields of a request.
    """
    file = Path(directory) / GENERATION_FILE
    given = read_object(file) if file.is_file() else {}
    found = {name: given[name] for name in AUTHORS_SAY if given.get(name) is not None}
    for name, value in found.items():
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ConfigError(f"{file}: {name}={value!r:.200}: must be a {'whole ' if whole else ''}number")
        found[name] = max(0, value) if whole else float(value)  # top_k: some files write -1 for no limit
    try:
        return SamplingParams(**found)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from None
