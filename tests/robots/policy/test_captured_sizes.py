"""What a policy makes of its captured sizes without a GPU. What the GPU makes of them: test_cuda.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import load_policy
from reflex_runtime.robots.policy.spec import DeviceOptions
from robots.tiny import STEPS, write_export

KINDS = ["monolithic", "decomposed"]


@pytest.mark.parametrize("kind", KINDS)
def test_b24_the_cpu_has_nothing_to_capture(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"captured_sizes=\(1, 2\): CPUExecutionProvider has no graphs to capture"):
        load_policy(write_export(tmp_path, kind), device=DeviceOptions(captured_sizes=(1, 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_b24_captured_sizes_are_warmed_up_predicted_and_told(tmp_path: Path, kind: str) -> None:
    policy = load_policy(write_export(tmp_path, kind))
    assert policy.captured_sizes == ()
    assert policy.describe()["captured_sizes"] == []
    policy.captured_sizes = (2, 6)  # as if this were a GPU
    assert policy.describe()["captured_sizes"] == [2, 6]
    assert policy.cost_model().sizes == (2, 6)
    calls = 1 if kind == "monolithic" else 1 + STEPS
    ran = [len(batch) for batch, _ in policy.warm_up((1, 2), repeats=1).batches]
    assert ran == [size for size in (1, 2, 6) for _ in range(calls)]
