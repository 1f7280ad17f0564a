"""What the numbers were measured on, and which core does what."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    "numpy", "onnxruntime", "uvicorn", "uvloop", "httptools", "msgspec", "mosec", "litserve", "openvino",
    "openvino-genai",
)  # fmt: skip


def cores() -> tuple[set[int] | None, set[int] | None]:
    """(cores of the server, cores of whoever asks it), apart where there are two to be had; else (None, None)."""
    if not hasattr(os, "sched_getaffinity"):
        return None, None
    mine = sorted(os.sched_getaffinity(0))
    return ({mine[0]}, {mine[-1]}) if len(mine) > 1 else (None, None)


def pin(where: set[int] | None) -> None:
    """Keep this process, and what it starts, on some cores."""
    if where is not None:
        os.sched_setaffinity(0, where)


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """Processor, system, versions."""
    server, load = cores()
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "pinned": server is not None and load is not None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := installed(name)) is not None},
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    try:
        asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
