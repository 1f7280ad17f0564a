"""The CUDA provider against the CPU, on the bundled policies. Skipped without onnxruntime-gpu and a GPU."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import numpy as np
import onnxruntime
import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import POLICY
from reflex_runtime.robots import DecomposedPolicy, Policy, load_policy
from reflex_runtime.robots.policy.spec import DeviceOptions
from reflex_runtime.run.onnx_session import CUDA
from robots.bundled import KINDS, bundled
from robots.tiny import Bench, run_alone, value, write_export

from .test_bundled_exports import alone, asked

pytestmark = pytest.mark.skipif(
    CUDA not in onnxruntime.get_available_providers(), reason="this onnxruntime has no CUDA provider"
)

# Largest absolute difference of an action (within ±1.3) from the CPU's result of the same request alone. Measured on an
# H200: 2.8e-6 alone, 2.0e-6 in batches.
BOUND = 1e-5


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: bundled(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_equals_the_cpu_alone_and_in_a_batch(exports: dict[str, Path], kind: str) -> None:
    root = exports[kind]
    singles = alone(load_policy(root), 16)
    policy = load_policy(root, device=DeviceOptions(CUDA))
    assert policy.describe()["provider"] == CUDA
    worst = max(np.abs(a - b).max() for a, b in zip(alone(policy, 16), singles, strict=True))
    assert worst <= BOUND
    for n in (2, 5, 16):
        bench = Bench(policy)
        tickets = [bench.submit(asked(policy, i)) for i in range(n)]
        bench.drain()
        assert {len(b) for b in bench.batches} == {n}
        worst = max(np.abs(value(t).actions - singles[i]).max() for i, t in enumerate(tickets))
        assert worst <= BOUND


def test_cuda_keys_and_values_are_uploaded_once_for_a_run_of_steps() -> None:
    policy = load_policy(POLICY, device=DeviceOptions(CUDA))
    assert isinstance(policy, DecomposedPolicy)
    bench = Bench(policy)
    tickets = [bench.submit(asked(policy, i)) for i in range(2)]
    bench.step()
    bench.step()
    packed = policy._packed[1]
    assert {v.device_name().lower() for v in packed.values()} == {"cuda"}
    bench.step()
    assert policy._packed[1] is packed
    bench.drain()
    assert all(np.isfinite(value(t).actions).all() for t in tickets)


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_runs_static_graphs_row_by_row(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    from robots.tiny import asked as ask

    root = write_export(tmp_path_factory.mktemp(kind), kind, batch=1)
    cpu, policy = load_policy(root), load_policy(root, device=DeviceOptions(CUDA))
    bench = Bench(policy)
    tickets = [bench.submit(ask(policy, i)) for i in range(3)]
    bench.drain()
    for i, ticket in enumerate(tickets):
        expected = run_alone(cpu, ask(cpu, i, episode_id=None)).actions
        assert np.abs(value(ticket).actions - expected).max() <= BOUND


def graphed(root: Path, sizes: tuple[int, ...]) -> Policy:
    return load_policy(root, device=DeviceOptions(CUDA, captured_sizes=sizes))


@pytest.mark.parametrize("kind", KINDS)
def test_b24_a_replay_padded_to_a_captured_size_equals_the_plain_run(exports: dict[str, Path], kind: str) -> None:
    singles = alone(load_policy(exports[kind]), 12)
    plain, policy = load_policy(exports[kind], device=DeviceOptions(CUDA)), graphed(exports[kind], (1, 4, 8))
    assert policy.describe()["captured_sizes"] == [1, 4, 8]
    for n in (1, 4, 8, 3, 2, 5, 12, 7, 1):  # 3 after 8, 2 after 3: what others left in the padding is never seen
        reference, bench = Bench(plain), Bench(policy)
        expected = [reference.submit(asked(plain, i)) for i in range(n)]
        tickets = [bench.submit(asked(policy, i)) for i in range(n)]
        reference.drain()
        bench.drain()
        assert {len(b) for b in bench.batches} == {n}
        assert [b.notes.get("captured", False) for b in bench.batches] == [n <= 8] * len(bench.batches)
        assert not any("captured" in b.notes for b in reference.batches)
        for i, (ticket, other) in enumerate(zip(tickets, expected, strict=True)):
            assert np.abs(value(ticket).actions - value(other).actions).max() <= BOUND
            assert np.abs(value(ticket).actions - singles[i]).max() <= BOUND


def test_b24_robots_join_and_leave_a_batch_that_replays() -> None:
    singles = alone(load_policy(POLICY), 12)
    policy = graphed(POLICY, (1, 2, 4, 8))
    bench = Bench(policy)
    tickets = []
    for i in range(12):
        tickets.append(bench.submit(asked(policy, i)))
        for _ in range(1 + i % 3):
            bench.step()
    bench.drain()
    assert len({len(b) for b in bench.batches if b.stage == "denoise"}) > 2, "the batch never changed"
    assert all(b.notes.get("captured") for b in bench.batches)
    assert max(np.abs(value(t).actions - singles[i]).max() for i, t in enumerate(tickets)) <= BOUND


def test_b24_keys_and_values_stay_in_the_captured_buffers_for_a_run_of_steps() -> None:
    policy = graphed(POLICY, (4,))
    assert isinstance(policy, DecomposedPolicy)
    bench = Bench(policy)
    tickets = [bench.submit(asked(policy, i)) for i in range(3)]
    bench.step()
    bench.step()
    packed = policy._packed[1]
    buffers = policy.model._expert._captured[4].inputs
    assert packed
    assert all(placed is buffers[name] for name, placed in packed.items())
    bench.drain()
    assert all(np.isfinite(value(t).actions).all() for t in tickets)


@pytest.mark.parametrize("kind", KINDS)
def test_b24_every_hit_is_one_replay(
    exports: dict[str, Path], kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = graphed(exports[kind], (1, 4))
    bench = Bench(policy)  # warms up: all sizes are captured
    tickets = [bench.submit(asked(policy, i)) for i in range(3)]
    capfd.readouterr()
    onnxruntime.set_default_logger_severity(1)
    try:
        bench.drain()
    finally:
        onnxruntime.set_default_logger_severity(2)
    told = capfd.readouterr().err
    assert told.count("Replaying CUDA graph") == len(bench.batches) == sum(b.notes["captured"] for b in bench.batches)
    assert "Capturing the cuda graph" not in told
    assert all(np.isfinite(value(t).actions).all() for t in tickets)


@pytest.mark.parametrize("kind", KINDS)
def test_b24_another_thread_than_the_one_that_captured_runs_without(exports: dict[str, Path], kind: str) -> None:
    singles = alone(load_policy(exports[kind]), 3)
    policy = graphed(exports[kind], (1, 4))
    bench = Bench(policy)
    tickets = [bench.submit(asked(policy, i)) for i in range(3)]
    other = Thread(target=bench.drain)
    other.start()
    other.join()
    assert not any("captured" in b.notes for b in bench.batches)
    assert max(np.abs(value(t).actions - singles[i]).max() for i, t in enumerate(tickets)) <= BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_b24_a_fixed_batch_axis_has_no_sizes_to_capture(tmp_path: Path, kind: str) -> None:
    root = write_export(tmp_path, kind, batch=1)
    with pytest.raises(ConfigError, match="its batch axis is fixed at 1"):
        load_policy(root, device=DeviceOptions(CUDA, captured_sizes=(1, 2)))
