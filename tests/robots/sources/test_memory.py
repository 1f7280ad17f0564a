"""V8: two policies that cannot fit are refused before anything is loaded, with the sizes and the ways out."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import Export
from reflex_runtime.robots.sources.memory import (
    GB,
    SKIP,
    Room,
    check_two_policies,
    gpu_memory,
    host_memory,
    in_gb,
    total_memory,
)
from reflex_runtime.run.onnx_session import CPU, CUDA
from robots.tiny import write_export


@pytest.fixture
def pair(tmp_path: Path) -> list[Export]:
    small, large = write_export(tmp_path / "small"), write_export(tmp_path / "large")
    (large / "weights.bin").write_bytes(bytes(1_000_000))
    return [Export.load(small), Export.load(large)]


def refuse(exports: list[Export], total: int, provider: str = CPU, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_two_policies(exports, environ, provider, lambda asked: total)
    return str(caught.value)


def test_v8_the_refusal_names_sizes_and_three_ways_out() -> None:
    assert Room(8 * GB, 16 * GB).refusal(CUDA) == (
        "2-policy mode requires 16.0 GB VRAM but only 11.2 GB (70% of 16.0 GB) is available. Either pick smaller "
        "models, run on a larger GPU, or drop to single-policy mode."
    )
    assert "16.0 GB of memory" in Room(8 * GB, 16 * GB).refusal(CPU)
    assert "run on a larger machine" in Room(8 * GB, 16 * GB).refusal(CPU)


def test_v8_the_rule_is_twice_the_model_against_seven_tenths() -> None:
    assert Room(35, 100).fits
    assert not Room(36, 100).fits
    assert Room(70, 100, policies=1).fits
    assert not Room(71, 100, policies=1).fits


def test_v8_the_larger_of_the_two_exports_counts(pair: list[Export]) -> None:
    larger = pair[1].model_bytes
    assert larger > 1_000_000 > pair[0].model_bytes
    check_two_policies(pair, {}, CPU, lambda provider: int(2 * larger / 0.7) + 1)
    for exports in (pair, pair[::-1]):
        told = refuse(exports, int(2 * larger / 0.7) - 1)
        assert told.startswith(f"{pair[1].path}: 2-policy mode requires")


def test_v8_the_probe_is_the_providers(pair: list[Export]) -> None:
    asked = []
    check_two_policies(pair, {}, CUDA, lambda provider: asked.append(provider) or 80 * GB)
    assert asked == [CUDA]
    assert "VRAM" in refuse(pair, 1, CUDA)


def test_v8_skipping_is_loud(pair: list[Export], caplog: pytest.LogCaptureFixture) -> None:
    def never(provider: str) -> int:
        raise AssertionError("probed")

    with caplog.at_level(logging.WARNING, "reflex.policies"):
        check_two_policies(pair, {SKIP: "1"}, CUDA, never)
    assert SKIP in caplog.text
    assert str(pair[1].path) in caplog.text
    assert "2-policy mode requires" in refuse(pair, 1, CPU, **{SKIP: "0"}), "only 1 skips"


def test_small_sizes_are_not_shown_as_nothing() -> None:
    assert [in_gb(n) for n in (16 * GB, 1.25 * GB, GB / 2, 2_349_900)] == ["16.0 GB", "1.2 GB", "0.5 GB", "0.00219 GB"]


# -- probes ------------------------------------------------------------------------------------------------------------


def test_v8_host_memory_is_the_machines_or_the_containers(tmp_path: Path) -> None:
    machine = host_memory(tmp_path)
    assert machine == sum(
        int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line
    )
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(tmp_path) == machine
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert host_memory(tmp_path) == GB
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("1000\n")
    assert host_memory(tmp_path) == 1000
    assert total_memory(CPU) <= machine


class Nvml:
    """A stand-in for the driver's library: GPUs by index and by id, of 16, 32, … GB."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.open = broken, 0
        self.calls: dict[str, Any] = {
            "nvmlInit_v2": lambda: self.count(1),
            "nvmlShutdown": lambda: self.count(-1),
            "nvmlDeviceGetHandleByIndex_v2": lambda index, handle: self.put(handle, "value", index.value + 1),
            "nvmlDeviceGetHandleByUUID": lambda uuid, handle: self.put(handle, "value", {b"GPU-abc": 3}[uuid.value]),
            "nvmlDeviceGetMemoryInfo": lambda handle, memory: self.put(memory, "total", 16 * GB * handle.value),
        }

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 999 if name == self.broken else self.calls[name](*arguments)

    def count(self, change: int) -> int:
        self.open += change
        return 0

    @staticmethod
    def put(reference: Any, name: str, value: Any) -> int:
        setattr(reference._obj, name, value)
        return 0


@pytest.mark.parametrize(("visible", "gb"), [(None, 16), ("", 16), ("1", 32), ("1,0", 32), ("GPU-abc,0", 48)])
def test_v8_gpu_memory_is_that_of_the_first_visible_device(visible: str | None, gb: int) -> None:
    nvml = Nvml()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_memory(environ, lambda name: nvml) == gb * GB
    assert nvml.open == 0


@pytest.mark.parametrize("broken", ["nvmlInit_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo"])
def test_v8_a_probe_that_fails_says_so_and_how_to_go_on(broken: str) -> None:
    nvml = Nvml(broken)
    with pytest.raises(ConfigError, match=rf"{broken} answers 999; {SKIP}=1 skips"):
        gpu_memory({}, lambda name: nvml)
    assert nvml.open == 0


def test_v8_without_a_driver_the_error_names_the_library() -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError("cannot open shared object file")

    with pytest.raises(ConfigError, match=rf"libnvidia-ml\.so\.1.*NVIDIA driver.*{SKIP}=1"):
        gpu_memory({}, missing)
