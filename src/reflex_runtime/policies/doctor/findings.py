"""The input of the doctor's checks (`CheckContext`) and their results (`Finding`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from reflex_runtime.policies.export.config_file import CONFIG_FILE
from reflex_runtime.policies.export.directory import Export
from reflex_runtime.policies.export.onnx_file import OnnxFile
from reflex_runtime.policies.policy.base import Policy
from reflex_runtime.policies.policy.model import PolicySource
from reflex_runtime.policies.policy.observation import ActionChunk
from reflex_runtime.policies.policy.spec import DeviceOptions
from reflex_runtime.policies.source import directory_of

Status = Literal["pass", "fail", "warn", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. environment: the fault is in this machine, not in the export."""

    status: Status
    expected: str
    actual: str
    remediation: str = ""
    environment: bool = False


@dataclass(frozen=True, slots=True)
class Clocks:
    """What tells the time. resolution: seconds between two values of the monotonic clock."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    resolution: float = field(default_factory=lambda: time.get_clock_info("monotonic").resolution)

    def together(self) -> tuple[float, float]:
        """(monotonic, wall) at one moment: of five readings the one that other processes interrupted least."""

        def read() -> tuple[float, float, float]:
            before, wall, after = self.monotonic(), self.wall(), self.monotonic()
            return after - before, (before + after) / 2, wall

        return min(read() for _ in range(5))[1:]


@dataclass(slots=True)
class CheckContext:
    """What checks read: the policy under examination, and the results of earlier checks."""

    source: str
    provider: str
    threads: int
    instruction: str | None
    rtc_horizon: int | None
    clocks: Clocks
    total_memory: Callable[[str], int]
    began: tuple[float, float] = (0.0, 0.0)  # monotonic, wall
    raw: dict[str, Any] = field(default_factory=dict)
    files: dict[Path, OnnxFile] = field(default_factory=dict)
    loaded: PolicySource | None = None
    opened: Policy | None = None
    alone: list[ActionChunk] = field(default_factory=list)
    answer_time: float = 0.0

    @property
    def spec(self) -> PolicySource:
        assert self.loaded is not None
        return self.loaded

    @property
    def export(self) -> Export:
        assert isinstance(self.loaded, Export)
        return self.loaded

    @property
    def policy(self) -> Policy:
        assert self.opened is not None
        return self.opened

    @property
    def root(self) -> Path:
        """The directory of the source."""
        return directory_of(self.source)

    @property
    def device(self) -> DeviceOptions:
        return DeviceOptions(self.provider, self.threads)

    @property
    def config_file(self) -> Path:
        return self.root / CONFIG_FILE


def passed(expected: str, actual: str) -> Finding:
    return Finding("pass", expected, actual)


def failed(expected: str, actual: str, remediation: str, environment: bool = False) -> Finding:
    return Finding("fail", expected, actual, remediation, environment)


def warned(expected: str, actual: str, remediation: str) -> Finding:
    return Finding("warn", expected, actual, remediation)


def skipped(why: str) -> Finding:
    return Finding("skip", "", why)


def some(problems: Sequence[str], most: int = 6) -> str:
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


def size(count: float) -> str:
    """A number of bytes with a unit."""
    return f"{count / 2**20:.1f} MB" if count < 2**30 else f"{count / 2**30:.1f} GB"


def json_object(file: Path) -> dict[str, Any]:
    """A JSON object, with NaN allowed; ValueError for anything else."""
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"found {type(value).__name__}, expected an object")
    return value
