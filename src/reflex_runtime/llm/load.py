"""From a model directory to what runs it: the one place that knows which runner suits which device.

OpenVINO's paged attention on a CPU, PyTorch on a GPU; either can be asked for. Each is imported only when it is chosen.
"""

from __future__ import annotations

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
    _one_of("device", device, DEVICES)
    _one_of("runner", runner, RUNNERS)
    _one_of("dtype", dtype, DTYPES)
    given = {name: value for name, value in options.items() if value is not None}
    tokenizer = HFTokenizer.load(directory)
    if device == "auto":
        device = "cuda" if runner != "openvino" and _sees_cuda() else "cpu"
    if runner == "auto":
        runner = "openvino" if device == "cpu" else "torch"
    if runner == "openvino":
        if device != "cpu":
            raise ConfigError(f"runner='openvino': runs on device='cpu', not {device!r}")
        if given.pop("block_size", None) is not None:
            raise ConfigError(
                "block_size: the OpenVINO runner's blocks have the size that its kernels want; leave it out"
            )
        from reflex_runtime.llm.openvino_runner import OpenVinoRunner

        if dtype == "int8":
            return OpenVinoRunner(directory, dtype="auto", weights="int8", **given), tokenizer
        return OpenVinoRunner(directory, dtype=dtype, **given), tokenizer
    if dtype == "int8":
        raise ConfigError("dtype='int8': only the OpenVINO runner has weights of 8 bits; use float32, bfloat16 or auto")
    from reflex_runtime.llm.torch_runner import TorchRunner

    return TorchRunner(directory, device=device, dtype=dtype, **given), tokenizer


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(known)}")


def _sees_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
