"""Calls of one size (`--deterministic`): what shares a batch, and how many do, does not change a bit of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reflex_runtime.core.request import Request
from reflex_runtime.robots import Policy, load_policy
from reflex_runtime.robots.policy.base import MonolithicPolicy
from reflex_runtime.robots.policy.decomposed import DecomposedPolicy
from robots.plain import Staged, Whole, plain
from robots.tiny import asked, write_export

ROWS = 4


class Sized:
    """What both kinds of models below do: their numbers depend on the size of the call, as those of libraries do."""

    sizes: set[int]

    def drift(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        self.sizes.add(len(x))
        return x + np.float32(1e-3 * len(x))


class SizedWhole(Sized, Whole):
    def chunk(self, rows: Any, noise: Any) -> NDArray[np.float32]:
        return self.drift(super().chunk(rows, noise))


class SizedStaged(Sized, Staged):
    def prefix(self, rows: Any) -> Any:
        self.sizes.add(len(rows))
        return super().prefix(rows)

    def step(self, packed: Any, x: Any, k: Any, n: int) -> NDArray[np.float32]:
        assert len(packed) == len(x) == len(k)
        return self.drift(super().step(packed, x, k, n))


def sized(kind: str, rows: int) -> Policy:
    spec = plain(lambda row: row.state.sum(), staged=kind == "decomposed", takes_noise=True)
    policy: Policy
    if kind == "decomposed":
        policy = DecomposedPolicy(SizedStaged(spec, spec.look), rows=rows)
    else:
        policy = MonolithicPolicy(SizedWhole(spec, spec.look), rows=rows)
    policy.model.sizes = set()  # type: ignore[attr-defined]
    return policy


def request(policy: Policy, i: int, **more: Any) -> Request:
    seen = {"images": {"front": np.full((4, 6, 3), i, np.uint8)}, "state": [0.1 * i, 0.3], "request_id": f"r{i}"}
    return policy.request(policy.prepare(**(seen | more)), client=i)


def bits(policy: Policy, requests: list[Request], starts: tuple[int, ...] = ()) -> list[bytes]:
    return [chunk.actions.tobytes() for chunk in policy.answers(requests, starts)]


@pytest.mark.parametrize("kind", ["monolithic", "decomposed"])
def test_p53_calls_have_one_size_and_answers_the_same_bits_in_any_company(kind: str) -> None:
    loose, fixed = sized(kind, 0), sized(kind, ROWS)
    fixed.warm_up((1, 2, 8), repeats=1)
    requests = [request(fixed, i) for i in range(ROWS)]
    alone = [bits(fixed, [one])[0] for one in requests]
    assert bits(fixed, requests) == alone
    assert bits(fixed, requests[::-1]) == alone[::-1]
    assert bits(fixed, requests[:3], (0, 1, 2)) == alone[:3]
    assert fixed.model.sizes == {ROWS}  # type: ignore[attr-defined]
    assert bits(loose, requests) != [bits(loose, [one])[0] for one in requests]


@pytest.mark.parametrize("kind", ["monolithic", "decomposed"])
def test_p53_graphs_answer_the_same_bits_in_any_company(kind: str, tmp_path: Path) -> None:
    policy = load_policy(write_export(tmp_path, kind), rows=ROWS)
    requests = [asked(policy, i, episode_id=None) for i in range(ROWS)]
    alone = [bits(policy, [one])[0] for one in requests]
    assert bits(policy, requests) == alone
    assert bits(policy, requests[1:], (2, 0, 1)) == alone[1:]
    assert policy.describe()["rows"] == ROWS


def test_p53_a_cached_prefix_and_a_seed_give_the_same_bits(tmp_path: Path) -> None:
    policy = load_policy(write_export(tmp_path, "decomposed"), rows=ROWS)

    def again(name: str, seed: int) -> Request:
        return asked(policy, 1, request_id=name, seed=seed)

    (computed,) = bits(policy, [again("a", 7)])
    cached = policy.answers([again("b", 7), asked(policy, 2)])
    assert cached[0].cache == "hit"
    assert cached[0].actions.tobytes() == computed
    assert bits(policy, [again("c", 8)]) != [computed]
