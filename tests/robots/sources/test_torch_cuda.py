"""Policies in PyTorch on a GPU, with graphs and without. Skipped where torch sees none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from reflex_runtime.core.errors import ConfigError  # noqa: E402
from reflex_runtime.robots import DeviceOptions, Policy, load_policy  # noqa: E402
from reflex_runtime.run.onnx_session import CUDA  # noqa: E402

from .test_torch import SOURCE, asked, staged, template  # noqa: E402, F401

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
BOUND = 1e-4  # another device sums in another order


def answers(policy: Policy, starts: list[int]) -> list[Any]:
    return [chunk.actions for chunk in policy.answers([asked(policy, i) for i in range(len(starts))], starts)]


@pytest.mark.filterwarnings("ignore")  # those of torch.compile, about itself
@pytest.mark.parametrize("sizes", [(), (1, 2, 4, 8)], ids=["plain", "graphs"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_p7_a_gpu_answers_as_the_cpu(sizes: tuple[int, ...], compiled: bool) -> None:
    policy = load_policy(SOURCE, device=DeviceOptions(CUDA, captured_sizes=sizes, compile=compiled))
    policy.warm_up((1,), repeats=1)
    for starts in ([0] * 3, [0] * 8, [0] * 9, [i // 2 for i in range(7)]):
        pairs = zip(answers(policy, starts), answers(staged(), starts), strict=True)
        assert max(np.abs(a - b).max() for a, b in pairs) <= BOUND
    if sizes:
        told = policy.describe()["cuda_graphs"]
        assert (told["graphs"], told["missed"]) == (len(sizes), 10)  # the batch of nine


def test_p7_a_gpu_refuses_to_capture_a_step_that_waits_for_it(
    template: Any, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr(template.TinyVLA, "step", lambda self, prefix, x, k, n: x * int(k.max()))
    policy = load_policy(SOURCE, device=DeviceOptions(CUDA, captured_sizes=(1,)))
    with pytest.raises(ConfigError, match="--cuda-graphs: the step cannot be captured at batch size 1"):
        policy.warm_up((1,), repeats=1)
