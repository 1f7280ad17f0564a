"""The CUDA provider against the CPU, on the bundled policies. Skipped without onnxruntime-gpu and a GPU."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from reflex_runtime.demo.exports import KINDS, Kind, export_dir
from reflex_runtime.policies import DecomposedPolicy, load_policy
from reflex_runtime.processors.onnx import CUDA

from .test_bundled_exports import alone, asked
from .tiny import Bench, run_alone, value, write_export

pytestmark = pytest.mark.skipif(
    CUDA not in onnxruntime.get_available_providers(), reason="this onnxruntime has no CUDA provider"
)

# Largest absolute difference of an action (within ±1.3) from the CPU's result of the same request alone. Measured on an
# H200: 2.8e-6 alone, 2.0e-6 in batches.
BOUND = 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_equals_the_cpu_alone_and_in_a_batch(kind: Kind) -> None:
    root = export_dir("v2", kind)
    singles = alone(load_policy(root), 16)
    policy = load_policy(root, provider=CUDA)
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
    policy = load_policy(export_dir("v2", "decomposed"), provider=CUDA)
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
def test_cuda_runs_static_graphs_row_by_row(tmp_path_factory: pytest.TempPathFactory, kind: Kind) -> None:
    from .tiny import asked as ask

    root = write_export(tmp_path_factory.mktemp(kind), kind, batch=1)
    cpu, policy = load_policy(root), load_policy(root, provider=CUDA)
    bench = Bench(policy)
    tickets = [bench.submit(ask(policy, i)) for i in range(3)]
    bench.drain()
    for i, ticket in enumerate(tickets):
        expected = run_alone(cpu, ask(cpu, i, episode_id=None)).actions
        assert np.abs(value(ticket).actions - expected).max() <= BOUND
