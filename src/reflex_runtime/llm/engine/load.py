"""From a model directory to what runs it: the one place that knows which runner suits which device.

OpenVINO's paged attention on a CPU, PyTorch on a GPU; either can be asked for. Each is imported only when it is chosen.
An export to OpenVINO runs on OpenVINO alone.
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
from reflex_runtime.settings.declare import one_of

DEVICES = ("auto", "cpu", "cuda")
RUNNERS = ("auto", "openvino", "torch")
DTYPES = ("auto", "float32", "bfloat16")
QUANTIZATIONS = ("none", "int8", "int4")

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

    device: `cpu`, `cuda`, or `auto` (a GPU when PyTorch sees one). runner: `openvino`, `torch`, or `auto`. dtype: what
    the model computes in (`float32`, `bfloat16`; `auto` is what the checkpoint is stored in where the machine is fast
    at it). quantization: `int8` or `int4` rounds the weights, on OpenVINO. cache_dir: where graphs made of checkpoints
    are kept; by default beside the checkpoint. adapters: directories of LoRA adapters, by name. options: block_size,
    num_blocks, kv_cache_bytes, max_model_len, threads; None leaves the runner's own. Raises ConfigError that names the
    file and what is wrong.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if value < 1:
            raise _wrong(name, value, "must be >= 1")
    check_files(Path(directory))
    device, runner = choose(device, runner, dtype, given.get("block_size"), is_export(directory), quantization)
    tokenizer = HFTokenizer.load(directory)
    if runner == "openvino":
        from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner

        weights, kept = "auto" if quantization == "none" else quantization, Path(cache_dir) if cache_dir else None
        made = OpenVinoRunner(directory, dtype=dtype, weights=weights, cache_dir=kept, adapters=adapters, **given)
        return made, tokenizer
    from reflex_runtime.llm.runners.torch_runner import TorchRunner

    return TorchRunner(directory, device=device, dtype=dtype, adapters=adapters, **given), tokenizer


def describe(directory: str | Path) -> Description:
    """What is in a directory, read and checked without its weights. ConfigError for what cannot be served."""
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
    device: str,
    runner: str,
    dtype: str,
    block_size: int | None = None,
    export: bool = False,
    quantization: str = "none",
) -> tuple[str, str]:
    """The device and the runner that `load` uses. Loads nothing. export: the model is OpenVINO's own.

    ConfigError for options that no runner takes together, or that nothing here can run; `field` names one of them.
    """
    _one_of("device", device, DEVICES)
    _one_of("runner", runner, RUNNERS)
    if dtype in ("int8", "int4"):
        raise _wrong("dtype", dtype, f"is about what is computed; weights of fewer bits are quantization={dtype}")
    _one_of("dtype", dtype, DTYPES)
    _one_of("quantization", quantization, QUANTIZATIONS)
    if export:
        for name, value, refused in (("device", device, "cuda"), ("runner", runner, "torch")):
            if value == refused:
                raise _wrong(name, value, "an export to OpenVINO runs on a CPU as it was exported; leave it out")
        device, runner = "cpu", "openvino"
    if device == "auto":
        device = "cuda" if runner != "openvino" and _sees_cuda() else "cpu"
    elif device == "cuda" and not _sees_cuda():
        raise _wrong("device", device, "needs a GPU and a PyTorch that sees it, and there is none; use cpu or auto")
    if runner == "auto":
        runner = "openvino" if device == "cpu" else "torch"
    if runner == "openvino" and device != "cpu":
        raise _wrong("runner", runner, f"runs on the cpu, not on {device}; use torch, or the device cpu")
    if runner == "openvino" and block_size is not None:
        why = "blocks of the openvino runner have the size that its kernels want; leave it out, or use torch"
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
    """Refuse options of `load` that this model or this machine cannot take. Loads nothing.

    copies: how often it will be loaded, by processes of their own. ConfigError; `field` names the option. The memory of
    the weights is not counted: whether cache and weights fit together shows when they are loaded.
    """
    device, runner = choose(device, runner, dtype, block_size, isinstance(model, OpenVinoExport), quantization)
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
    else:  # processes may have a GPU each, and a look at its memory takes some of it
        blocks_in(total, block, free_bytes(device) if copies == 1 else max(total, block))


def check_directory(root: Path) -> None:
    """Refuse what people take for a model and is none, with what to do about it. Nothing else is checked."""
    if root.suffix == ".gguf" or (root.is_dir() and not (root / CONFIG_FILE).is_file() and any(root.glob("*.gguf"))):
        why = "is llama.cpp's format, which is not served; serve the Hugging Face directory that it was made of"
        raise ConfigError(f"{root}: GGUF {why}; --quantization int4 makes it as small")
    adapter = root / ADAPTER_CONFIG
    if adapter.is_file() and not (root / CONFIG_FILE).is_file():
        base = read_object(adapter).get("base_model_name_or_path")
        how = f"serve it beside its model, reflex serve MODEL_DIR --lora NAME={root}, or {MERGE}"
        raise ConfigError(f"{root}: is an adapter (PEFT) of {base!r}, not a model; {how}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise _wrong(name, value, one_of(str(value), known))


def _wrong(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"{name}={value!r}: {why}", field=name)


def _sees_cuda() -> bool:
    if sys.platform == "linux" and not _has_driver():
        return False  # seconds sooner than PyTorch would say so
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _has_driver() -> bool:
    """Whether there is a driver that PyTorch could see a GPU through."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()  # that of the GPUs of AMD
    return True


# -- how a model is sampled --------------------------------------------------------------------------------------------


AUTHORS_SAY: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's authors may say of how it is sampled, for requests that do not; else it is the OpenAI API's own."""


def authors_said(defaults: SamplingParams) -> str:
    """Those that differ from the API's own."""
    plain = SamplingParams()
    said = ((name, getattr(defaults, name)) for name in AUTHORS_SAY)
    return ", ".join(f"{name} {value:g}" for name, value in said if value != getattr(plain, name))


def sampling_defaults(directory: Path | str) -> SamplingParams:
    """Of a model directory. ConfigError that names the file, the key and the range for a value that cannot be.

    `do_sample` and `max_new_tokens` are for other programs: in the OpenAI API a request says both.
    """
    file = Path(directory) / GENERATION_FILE
    said = read_object(file) if file.is_file() else {}
    found = {name: said[name] for name in AUTHORS_SAY if said.get(name) is not None}
    for name, value in found.items():
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ConfigError(f"{file}: {name}={value!r:.200}: must be a {'whole ' if whole else ''}number")
    if found.get("top_k", 0) < 0:  # -1 is off, too, in some files
        found["top_k"] = 0
    found |= {name: float(value) for name, value in found.items() if name != "top_k"}
    try:
        return SamplingParams(**found)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message.removeprefix('SamplingParams.')}") from None
