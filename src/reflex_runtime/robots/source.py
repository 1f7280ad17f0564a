"""Where a policy comes from: an export directory, a checkpoint of LeRobot or openpi, or a factory in Python."""

from __future__ import annotations

from pathlib import Path

from reflex_runtime.robots.export.config_file import CONFIG_FILE
from reflex_runtime.robots.export.directory import Export
from reflex_runtime.robots.export.memory import Weight
from reflex_runtime.robots.export.model_files import model_bytes
from reflex_runtime.robots.lerobot.checkpoint import LeRobotCheckpoint, is_checkpoint
from reflex_runtime.robots.lerobot.openpi import OpenpiCheckpoint
from reflex_runtime.robots.policy.model import PolicySource
from reflex_runtime.robots.policy.spec import LEROBOT, OPENPI, PYTHON, DeviceOptions


def read_source(source: str | Path, device: DeviceOptions | None = None) -> PolicySource:
    """Read and check what a source says of its policy; the model itself is loaded by its `open`.

    source: an export directory, `lerobot:DIR` (or DIR alone, if it is a checkpoint),
        `openpi:DIR`, or `python:module:make`.
    device: what a factory in Python is called with.
    ConfigError says what is wrong with it and what to do.
    """
    text = str(source)
    if text.startswith(PYTHON):
        from reflex_runtime.robots.models.python import read_python

        return read_python(text, device or DeviceOptions())
    if text.startswith(OPENPI):
        return OpenpiCheckpoint.load(text)
    if text.startswith(LEROBOT) or _is_lerobot(text):
        return LeRobotCheckpoint.load(text)
    return Export.load(source)


def _is_lerobot(source: str) -> bool:
    """Whether a plain directory is a LeRobot checkpoint."""
    return not (Path(source) / CONFIG_FILE).is_file() and is_checkpoint(Path(source))


def is_export(source: str) -> bool:
    """Whether a source is read as an export directory."""
    return not source.startswith((LEROBOT, OPENPI, PYTHON)) and not _is_lerobot(source)


def directory_of(source: str) -> Path:
    """The directory that a source names; of `python:` the current one."""
    return Path() if source.startswith(PYTHON) else Path(source.removeprefix(LEROBOT).removeprefix(OPENPI))


def weight_of(source: str) -> Weight:
    """The size of a source's model files, without reading them; 0 for `python:`, which has none."""
    return Weight(source, 0 if source.startswith(PYTHON) else model_bytes(directory_of(source)))
