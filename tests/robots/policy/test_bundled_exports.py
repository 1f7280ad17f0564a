"""The bundled demo policies through the same path: what batching and joining do to the results of a real network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reflex_runtime.core.request import Request
from reflex_runtime.demo import POLICY
from reflex_runtime.robots import Policy, load_policy
from robots.bundled import KINDS, V1, bundled, write_whole
from robots.tiny import Bench, run_alone, value

# Largest absolute difference of an action, in the robot's units (actions are within ±1.3). Measured with one thread on
# x86: 0.0 for a row alone against the row in any company, 1.1e-6 for five steps against the whole loop in one graph.
ROW_BOUND, KIND_BOUND = 1e-5, 1e-5


def asked(policy: Policy, i: int) -> Request:
    rng = np.random.default_rng(i)
    sent: dict[str, Any] = {
        "images": {"image": rng.integers(0, 256, (64, 64, 3), np.uint8)},
        "instruction": ("open the door", "close the drawer", "press the button on the wall")[i % 3],
        "state": rng.uniform(-0.5, 1.0, policy.spec.state_dim),
    }
    return policy.request(policy.prepare(**sent, request_id=f"request-{i}"), client=i)


def alone(policy: Policy, count: int) -> list[NDArray[np.float32]]:
    return [run_alone(policy, asked(policy, i)).actions for i in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_bundled_batch_of_n_equals_n_singles(kind: str, tmp_path: Path) -> None:
    policy = load_policy(bundled(kind, tmp_path))
    singles = alone(policy, 16)
    for n in (2, 3, 8, 16):
        bench = Bench(policy)
        tickets = [bench.submit(asked(policy, i)) for i in range(n)]
        bench.drain()
        assert {len(b) for b in bench.batches} == {n}
        worst = max(np.abs(value(t).actions - singles[i]).max() for i, t in enumerate(tickets))
        assert worst <= ROW_BOUND


def test_bundled_requests_that_join_a_running_batch_get_their_own_results() -> None:
    policy = load_policy(POLICY)
    singles = alone(policy, 12)
    bench = Bench(policy)
    tickets = []
    for i in range(12):
        tickets.append(bench.submit(asked(policy, i)))
        for _ in range(1 + i % 3):
            bench.step()
    bench.drain()
    sizes = {len(b) for b in bench.batches if b.stage == "denoise"}
    assert len(sizes) > 2, "the batch never changed"
    assert max(np.abs(value(t).actions - singles[i]).max() for i, t in enumerate(tickets)) <= ROW_BOUND


def test_bundled_decomposed_equals_monolithic(tmp_path: Path) -> None:
    whole, steps = load_policy(write_whole(tmp_path)), load_policy(POLICY)
    for a, b in zip(alone(whole, 8), alone(steps, 8), strict=True):
        assert np.abs(a - b).max() <= KIND_BOUND


def test_bundled_versions_differ() -> None:
    first, second = load_policy(V1), load_policy(POLICY)
    assert first.spec.model_hash != second.spec.model_hash
    assert np.abs(alone(first, 1)[0] - alone(second, 1)[0]).max() > 1e-3
