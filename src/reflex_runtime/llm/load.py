"""From a model directory to what runs it: the one place that knows which runner suits which device.

OpenVINO's paged attention on a CPU, PyTorch on a GPU; either can be asked for. Each is imported only when it is chosen.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.runner import Runner
from reflex_runtime.llm.tokenizer import HFTokenizer, Tokenizer

DEVICES = ("auto", "cpu", "cuda")
RUNNERS = ("auto", "openvino", "torch")
DTYPES = ("auto", "float32", "bfloat16", "int8")


def load(
    directory: str | Path, *, device: str = "auto", runner: str = "auto", dtype: str = "auto", **options: Any
) -> tuple[Runner, Tokenizer]:
    """A runner and the tokenizer of a Hugging Face directory.

    device: `cpu`, `cuda`, or `auto` (a GPU when PyTorch sees one). runner: `openvino`, `torch`, or `auto`. dtype: what
    the model computes in (`float32`, `bfloat16`; `auto` is what the checkpoint is stored in where the machine is fast
    at it); `int8` is that with weights of 8 bits, on OpenVINO. options: block_size, num_blocks, kv_cache_bytes,
    max_model_len, threads; None leaves the runner's own. Raises ConfigError that names the file and what is wrong.
    """
    given = {name: value for name, value in options.items() if value is not None}
    device, runner = choose(device, runner, dtype, given.get("block_size"))
    tokenizer = HFTokenizer.load(directory)
    if runner == "openvino":
        from reflex_runtime.llm.openvino_runner import OpenVinoRunner

        if dtype == "int8":
            return OpenVinoRunner(directory, dtype="auto", weights="int8", **given), tokenizer
        return OpenVinoRunner(directory, dtype=dtype, **given), tokenizer
    from reflex_runtime.llm.torch_runner import TorchRunner

    return TorchRunner(directory, device=device, dtype=dtype, **given), tokenizer


def choose(device: str, runner: str, dtype: str, block_size: int | None = None) -> tuple[str, str]:
    """The device and the runner that `load` uses. Loads nothing.

    ConfigError for options that no runner takes together, or that nothing here can run; `field` names one of them.
    """
    _one_of("device", device, DEVICES)
    _one_of("runner", runner, RUNNERS)
    _one_of("dtype", dtype, DTYPES)
    if device == "auto":
        device = "cuda" if runner != "openvino" and _sees_cuda() else "cpu"
    elif device == "cuda" and not _sees_cuda():
        raise _wrong("device", device, "needs a GPU and a PyTorch that sees it, and there is none")
    if runner == "auto":
        runner = "openvino" if device == "cpu" else "torch"
    if runner == "openvino" and device != "cpu":
        raise _wrong("runner", runner, f"runs on the cpu, not on {device}")
    if runner == "openvino" and block_size is not None:
        why = "blocks of the openvino runner have the size that its kernels want; leave it out, or use the torch runner"
        raise _wrong("block_size", block_size, why)
    if runner == "torch" and dtype == "int8":
        raise _wrong("dtype", dtype, "only the openvino runner has weights of 8 bits; use float32, bfloat16 or auto")
    if find_spec(runner) is None:
        hint = "in a clone, pip install '.[llm]'" if runner == "openvino" else "pip install torch"
        raise _wrong("runner", runner, f"{runner} is not installed: {hint}")
    return device, runner


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise _wrong(name, value, f"must be one of {', '.join(known)}")


def _wrong(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"{name}={value!r}: {why}", field=name)


def _sees_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
