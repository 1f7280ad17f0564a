"""The torch runner on a GPU against `transformers` on the CPU, token for token in float32. Skipped without one.

What records decode steps as CUDA graphs runs only here.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from reflex_runtime.llm.runners.torch_runner import TorchRunner

from . import models
from .steps import Lane, greedy, shuffled
from .test_torch_runner import BLOCKS, COUNT, PROMPTS, Reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


@pytest.fixture(scope="module", params=models.KINDS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(models.random_model(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "plain"])
def test_a_gpu_writes_what_the_cpu_does(reference: Reference, graphs: bool) -> None:
    runner = TorchRunner(reference.directory, device="cuda", num_blocks=BLOCKS, cuda_graphs=graphs)
    free, sizes = shuffled(BLOCKS), random.Random(1)
    reference.check(greedy(runner, [Lane(given) for given in PROMPTS], COUNT, free))
    reference.check(greedy(runner, [Lane(given) for given in PROMPTS], COUNT, shuffled(BLOCKS), lambda: 7))
    reference.check(
        greedy(runner, [Lane(given) for given in PROMPTS], COUNT, shuffled(BLOCKS), lambda: sizes.choice([1, 2, 9, 40]))
    )
    reference.check(greedy(runner, [Lane(PROMPTS[i]) for i in (1, 3, 2)], COUNT, shuffled(BLOCKS)), [1, 3, 2])
    assert bool(runner._recorded) == graphs
    runner.close()


def test_recordings_of_many_sizes_share_their_memory(tmp_path: Path) -> None:
    runner = TorchRunner(models.random_model("llama", tmp_path), device="cuda", num_blocks=400)
    rows = []
    for running in (1, 2, 5, 16, 2):  # recorded upwards, replayed downwards
        lanes = [Lane(PROMPTS[3]) for _ in range(running)]
        rows.append(np.stack([row for _, row in greedy(runner, lanes, 8, shuffled(400))[0]]))
    assert len({key[0] for key in runner._recorded}) == 4
    for row in rows[1:]:
        assert np.abs(row - rows[0]).max() < 1e-4
    runner.close()


def test_a_cache_beyond_the_memory_of_the_gpu_is_refused(tmp_path: Path) -> None:
    from reflex_runtime.core.errors import ConfigError

    with pytest.raises(ConfigError, match="to the free memory"):
        TorchRunner(models.random_model("llama", tmp_path), device="cuda", kv_cache_bytes=1 << 50)
