"""The execution providers of ONNX Runtime: their names, and whether this installation has them.

The only module that imports onnxruntime, and only when it is needed.
"""

from __future__ import annotations

from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.processors.quiet import telemetry_off
from reflex_runtime.settings.declare import did_you_mean

CPU, CUDA, OPENVINO = "CPUExecutionProvider", "CUDAExecutionProvider", "OpenVINOExecutionProvider"
PROVIDERS = {"cpu": CPU, "cuda": CUDA, "openvino": OPENVINO}  # by the names of command lines
_PACKAGES = {CUDA: "onnxruntime-gpu", OPENVINO: "onnxruntime-openvino"}  # each in place of onnxruntime


def onnxruntime_here() -> Any:
    """The package, or the ConfigError that says how to install it."""
    telemetry_off()
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            "onnxruntime is not installed: pip install onnxruntime, or onnxruntime-gpu for CUDA"
        ) from error
    return onnxruntime


def check_provider(provider: str) -> None:
    """ConfigError when this onnxruntime cannot offer the provider at all; whether it starts, a session shows."""
    available = onnxruntime_here().get_available_providers()
    if provider not in available:
        hint = did_you_mean(provider, available)
        if provider in _PACKAGES:
            hint = f"; pip install {_PACKAGES[provider]} in place of onnxruntime"
        short = {name: f"{name} ({alias})" for alias, name in PROVIDERS.items()}
        there = ", ".join(short.get(name, name) for name in available)
        raise ConfigError(f"provider={provider!r}: not in this onnxruntime, which has {there}{hint}")
