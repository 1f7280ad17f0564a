"""Libraries that the plain installation lacks: the extra that brings each, and what to say where it is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from reflex_runtime.core.errors import ConfigError

EXTRAS: Final[Mapping[str, str]] = {
    "av": "cameras", "cv2": "cameras", "google": "grpc", "grpc": "grpc", "jinja2": "llm", "lerobot": "robots",
    "llguidance": "llm", "matplotlib": "plots", "metaworld": "demo", "onnx": "export", "onnxscript": "export",
    "openvino": "llm", "opentelemetry": "otel", "paho": "mqtt", "ray": "ray", "requests": "otel", "safetensors": "llm",
    "sentencepiece": "robots", "supervision": "vision", "tokenizers": "llm", "torch": "torch", "trackers": "vision",
    "transformers": "convert", "zmq": "gr00t",
}  # fmt: skip
"""The extra that brings each import."""
_CALLED: Final[Mapping[str, str]] = {
    "av": "PyAV", "cv2": "OpenCV", "google": "protobuf", "grpc": "grpcio", "opentelemetry": "opentelemetry-sdk and "
    "opentelemetry-exporter-otlp-proto-http", "paho": "paho-mqtt", "zmq": "pyzmq",
}  # fmt: skip


def not_installed(module: str, what: str = "this") -> ConfigError:
    """What to install. what: needs the module, as the line begins."""
    root = module.partition(".")[0]
    return ConfigError(f"{what} needs {_CALLED.get(root, root)}: in a clone, pip install '.[{EXTRAS[root]}]'")


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Around imports of what an extra brings: where it is missing, ConfigError says what to install."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        raise not_installed(error.name or "", what) from error
