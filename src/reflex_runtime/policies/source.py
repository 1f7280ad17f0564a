"""Where a policy comes from: an export directory, a LeRobot checkpoint, or a factory in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from reflex_runtime.policies.export.directory import Export
from reflex_runtime.policies.export.memory import Weight
from reflex_runtime.policies.export.model_files import model_bytes
from reflex_runtime.policies.policy.model import PolicySource

LEROBOT: Final = "lerobot:"
PYTHON: Final = "python:"


def read_source(source: str | Path) -> PolicySource:
    """Read and check what a source says of its policy; the model itself is loaded by its `open`.

    source: an export directory. ConfigError says what is wrong with it and what to do.
    """
    return Export.load(source)


def directory_of(source: str) -> Path:
    """The directory that a source names; of `python:` the current one."""
    return Path() if source.startswith(PYTHON) else Path(source.removeprefix(LEROBOT))


def weight_of(source: str) -> Weight:
    """The size of a source's model files, without reading them; 0 for `python:`, which has none."""
    return Weight(source, 0 if source.startswith(PYTHON) else model_bytes(directory_of(source)))
