"""V8: two policies that cannot fit are refused before anything is loaded, with the sizes and the ways out."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import Export
from reflex_runtime.robots.sources.load import (
    GB,
    SKIP,
    check_two_policies,
    gpu_memory,
    host_memory,
    in_gb,
    read_source,
    refusal,
    total_memory,
    weight_of,
)
from reflex_runtime.run import model_files
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
    assert refusal(8 * GB, 16 * GB, provider=CUDA) == (
        "2-policy mode requires 16.0 GB VRAM but only 11.2 GB (70% of 16.0 GB) is available. Either pick smaller "
        "models, run on a larger GPU, or drop to single-policy mode."
    )
    assert "16.0 GB of memory" in refusal(8 * GB, 16 * GB)
    assert "run on a larger machine" in refusal(8 * GB, 16 * GB)


def test_v8_the_rule_is_twice_the_model_against_seven_tenths() -> None:
    fits = [refusal(size, 100, policies) == "" for size, policies in ((35, 2), (36, 2), (70, 1), (71, 1))]
    assert fits == [True, False, True, False]


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


@pytest.mark.parametrize("source", ["{}", "lerobot:{}", "openpi:{}"])
def test_v8_only_a_directory_of_a_policy_is_walked_and_only_so_far(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("walked")

    (tmp_path / "model.onnx").touch()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rglob", never)
        patched.setattr(os, "walk", never)
        assert weight_of(source.format(tmp_path)).model_bytes == 0
        with pytest.raises(ConfigError, match="not found"):
            read_source(source.format(tmp_path))
    (tmp_path / "reflex_config.json").touch()
    monkeypatch.setattr(model_files, "MOST_FILES", 1)
    with pytest.raises(ConfigError, match="holds over 1 files"):
        weight_of(source.format(tmp_path))


def test_small_sizes_are_not_shown_as_nothing() -> None:
    assert [in_gb(n) for n in (16 * GB, 1.25 * GB, GB / 2, 2_349_900)] == ["16.0 GB", "1.2 GB", "0.5 GB", "0.00219 GB"]
    assert [in_gb(n) for n in (0, 1_430)] == ["0 GB", "under 0.0001 GB"]


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
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("1000\n")
    assert host_memory(tmp_path) == 1000
    assert total_memory(CPU) <= machine


SMI = """#!/bin/sh
case "$*" in
  --id=0*) echo 16384 ;;
  --id=1*) echo 32768 ;;
  --id=GPU-abc*) echo 49152 ;;
  *) echo No devices were found; exit 6 ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path) -> str:
    """A stand-in for the driver's program: GPUs by index and by id."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(("visible", "gb"), [(None, 16), ("", 16), ("1", 32), ("1,0", 32), ("GPU-abc,0", 48)])
def test_v8_gpu_memory_is_that_of_the_first_visible_device(visible: str | None, gb: int, smi: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_memory(environ, smi) == gb * GB


@pytest.mark.parametrize("driver", [True, False])
def test_v8_a_probe_that_fails_says_so_and_how_to_go_on(driver: bool, smi: str) -> None:
    with pytest.raises(ConfigError, match=rf"nvidia-smi.*belongs to the NVIDIA driver.*{SKIP}=1"):
        gpu_memory({"CUDA_VISIBLE_DEVICES": "7"}, smi if driver else f"{smi}-missing")
