"""The files behind an export's model, and the hashes that name its versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from reflex_runtime.policies.export.config_file import CONFIG_FILE

MODEL_PATTERNS: Final = ("*.onnx", "*.onnx.data", "*.bin", "*.safetensors")


def model_hash(root: Path) -> str:
    """The `files_hash` of the model files, sorted by their path within the directory."""
    return files_hash(root, (name for name, _ in _model_files(root)))


def files_hash(root: Path, names: Iterable[str]) -> str:
    """First 16 hex digits of SHA-256 over files of a directory, without those that are not there.

    Of each file: its path in UTF-8 with forward slashes, a zero byte, its size in 8 bytes (big-endian), its contents.
    """
    sha = hashlib.sha256()
    for name in names:
        file = root / name
        if not file.is_file():
            continue
        sha.update(name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "big"))
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()[:16]


def model_bytes(root: Path) -> int:
    """Total size of the files behind `model_hash`, without reading them; 0 where there is no such directory."""
    return sum(file.stat().st_size for _, file in _model_files(root))


def config_hash(root: Path) -> str:
    """First 16 hex digits of SHA-256 of the bytes of `reflex_config.json`."""
    return hashlib.sha256((root / CONFIG_FILE).read_bytes()).hexdigest()[:16]


def _model_files(root: Path) -> list[tuple[str, Path]]:
    found = {
        file.relative_to(root).as_posix(): file for p in MODEL_PATTERNS for file in root.rglob(p) if file.is_file()
    }
    return sorted(found.items())
