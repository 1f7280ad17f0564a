"""The torch runner against `transformers`: token for token in float32, whatever shares the batch or the blocks.

BOUND is the largest difference of a logit that counts as equal. The models' logits go up to 8 in size, and the
differences seen are below 2e-5, so that a token can differ only where the two best are that close.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.engine.load import load
from reflex_runtime.llm.runners.torch_runner import TorchRunner
from thinned import thinned

from . import models
from .steps import Lane, greedy, prefill, shuffled, step

BOUND = 1e-4
BLOCKS = 80
COUNT = 12  # tokens to write
LENGTHS = (1, 5, 16, 33, 60)

Row = npt.NDArray[np.float32]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng((length, seed)).integers(3, 256, length)]


PROMPTS = [prompt(length) for length in LENGTHS]


class Reference:
    """A model's directory, what the reference writes after each prompt, and the logits it does that with."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.oracle = directory, models.Oracle(directory)
        self.tokens = [self.oracle.greedy(given, COUNT) for given in PROMPTS]
        self.rows = [
            self.oracle.logits(given + written)[len(given) - 1 : -1]
            for given, written in zip(PROMPTS, self.tokens, strict=True)
        ]

    def check(self, made: list[list[tuple[int, Row]]], which: list[int] | None = None, bound: float = BOUND) -> None:
        """What `greedy` made of the prompts, or of those named."""
        for i, lane in zip(which or range(len(PROMPTS)), made, strict=True):
            assert [token for token, _ in lane] == self.tokens[i]
            assert np.abs(np.stack([row for _, row in lane]) - self.rows[i]).max() < bound


@pytest.fixture(scope="module", params=models.KINDS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(models.random_model(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def runner(reference: Reference) -> Iterator[TorchRunner]:
    made = TorchRunner(reference.directory, num_blocks=BLOCKS, threads=1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.random_model("llama", tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("chunk", thinned([1, 3, 7, 1000], [7]))
def test_what_is_written_is_the_references_whatever_the_chunk(
    reference: Reference, runner: TorchRunner, chunk: int
) -> None:
    free = shuffled(BLOCKS)
    reference.check([greedy(runner, [Lane(given)], COUNT, free, lambda: chunk)[0] for given in PROMPTS])


def test_prompts_and_decodes_share_steps(reference: Reference, runner: TorchRunner) -> None:
    sizes = random.Random(1)
    for seed in range(5):  # ragged chunks: single tokens beside runs, of old sequences and of new ones
        lanes = [Lane(given) for given in PROMPTS]
        reference.check(greedy(runner, lanes, COUNT, shuffled(BLOCKS, seed), lambda: sizes.choice([1, 2, 9, 40])))


@pytest.mark.parametrize("mixes", thinned([12, 50], [12]))
def test_a_prompt_alone_and_in_many_mixes(reference: Reference, runner: TorchRunner, mixes: int) -> None:
    rng = random.Random(2)
    for mix in range(mixes):
        which = rng.sample(range(len(PROMPTS)), rng.randint(2, len(PROMPTS)))
        beside = [Lane(prompt(rng.randint(1, 40), mix)) for _ in range(rng.randint(0, 3))]
        lanes = [*(Lane(PROMPTS[i]) for i in which), *beside]
        made = greedy(runner, lanes, 3, shuffled(BLOCKS, mix), lambda: rng.randint(1, 30))
        for i, lane in zip(which, made, strict=False):
            assert [token for token, _ in lane] == reference.tokens[i][:3]
            assert np.abs(np.stack([row for _, row in lane]) - reference.rows[i][:3]).max() < BOUND


def test_blocks_of_a_prefix_may_be_shared(reference: Reference, runner: TorchRunner) -> None:
    free = shuffled(BLOCKS)
    first = Lane(PROMPTS[4])
    prefill(runner, first, 1000, free)
    first.tokens.append(7)
    others = [Lane([*PROMPTS[4][:32], *prompt(length)], 32, first.blocks[:2]) for length in (1, 9)]
    made = greedy(runner, [*others, first], 1, free)  # all three read the two blocks in one step
    for lane, ((_, row),) in zip([*others, first], made, strict=True):
        assert np.abs(row - reference.oracle.logits(lane.tokens[:-1])[-1]).max() < BOUND


def test_a_blocks_earlier_contents_are_nobodys_business(reference: Reference, runner: TorchRunner) -> None:
    """Not-a-number survives a weight of zero, so such rows must not even be multiplied."""
    for pool in (*runner._keys, *runner._values):
        pool[:BLOCKS] = torch.nan
    try:
        reference.check(greedy(runner, [Lane(given) for given in PROMPTS], COUNT, shuffled(BLOCKS, 3)))
    finally:
        for pool in (*runner._keys, *runner._values):
            pool.zero_()


def test_recorded_decode_steps_say_the_same(reference: Reference) -> None:
    """All of a recorded step but the recording, which needs a GPU: fixed buffers, padding, one size for several."""
    runner = TorchRunner(reference.directory, num_blocks=BLOCKS, threads=1)
    recordings, runs = [], []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        recordings.append(run)
        return lambda: (runs.append(run), run())[1]

    runner._record = record
    free = sorted(shuffled(BLOCKS), reverse=True)  # block 0 is taken first: padding must not write there
    reference.check(greedy(runner, [Lane(given) for given in PROMPTS], COUNT, free))
    assert len(runs) == COUNT - 1  # the step of the prompts is not recorded
    reference.check(greedy(runner, [Lane(PROMPTS[i]) for i in (1, 3, 2)], COUNT, free), [1, 3, 2])
    assert set(runner._recorded) == {(8, 4), (8, 8), (4, 4)}  # five sequences of 4, later 5 blocks; three of 3
    assert len(recordings) == 3
    assert len(runs) == 2 * (COUNT - 1)


def test_a_large_decode_step_is_not_recorded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.llm.runners.torch_runner._MOST_RECORDED", 2)
    runner = TorchRunner(llama, num_blocks=8)
    runner._record = lambda run: run
    greedy(runner, [Lane(prompt(5, i)) for i in range(3)], 2, shuffled(8))
    assert not runner._recorded


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
}


@pytest.mark.parametrize("rope", ROPES)
def test_positions_are_scaled_as_the_configuration_says(rope: str, tmp_path: Path) -> None:
    made = Reference(models.random_model("llama", tmp_path, rope_parameters=ROPES[rope]))
    runner = TorchRunner(made.directory, num_blocks=BLOCKS, threads=1)
    made.check(greedy(runner, [Lane(given) for given in PROMPTS], COUNT, shuffled(BLOCKS), lambda: 20))


def test_layers_may_differ_in_what_they_see(tmp_path: Path) -> None:
    kinds = {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}
    made = Reference(models.random_model("qwen2", tmp_path, **kinds))
    runner = TorchRunner(made.directory, num_blocks=BLOCKS, threads=1)
    assert runner._windows == (None, 7)
    made.check(greedy(runner, [Lane(given) for given in PROMPTS], COUNT, shuffled(BLOCKS), lambda: 20))


def test_the_block_size_changes_nothing(reference: Reference) -> None:
    runner = TorchRunner(reference.directory, num_blocks=200, block_size=5, threads=1)
    reference.check(greedy(runner, [Lane(given) for given in PROMPTS], COUNT, shuffled(200), lambda: 11))


def test_bfloat16_stays_near(reference: Reference) -> None:
    """By a bound only: 8 bits of mantissa through two layers moved logits of up to 8 by up to 0.25."""
    runner = TorchRunner(reference.directory, num_blocks=BLOCKS, dtype="bfloat16", threads=1)
    free = shuffled(BLOCKS)
    for given, rows in zip(PROMPTS, reference.rows, strict=True):
        assert np.abs(prefill(runner, Lane(given), 20, free) - rows[0]).max() < 0.4


def test_a_token_that_the_model_does_not_have_is_refused_before_anything_is_written(llama: Path) -> None:
    runner = TorchRunner(llama, num_blocks=8)
    for token in (-1, 256):
        with pytest.raises(ValueError, match=r"must be in \[0, 256\)"):
            runner.forward(step([Lane([5, token])], [2], 16, shuffled(8)))
    assert not any(pool.any() for pool in (*runner._keys, *runner._values))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 0}, "block_size=0: must be >= 1"),
        ({"num_blocks": 0}, "num_blocks=0: must be >= 1"),
        ({"threads": -1}, "threads=-1: must be >= 1"),
    ],
)
def test_settings_that_cannot_be(llama: Path, settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(llama, runner="torch", **settings)  # type: ignore[arg-type]


def test_a_cache_has_room_for_a_block(llama: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_bytes=8191: must be in"):
        TorchRunner(llama, kv_cache_bytes=8191)


def test_a_context_is_at_most_what_the_model_was_made_for(llama: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len=513: must be at most 512, the model's context"):
        TorchRunner(llama, num_blocks=8, max_model_len=513)


def test_what_a_runner_says_of_itself(llama: Path) -> None:
    # 2 layers of keys and values, 16 tokens, 2 heads of 16 numbers, 4 bytes
    runner = TorchRunner(llama, kv_cache_bytes=8192 * 10 + 5, threads=1)
    assert (runner.num_blocks, runner.block_size, runner.vocab_size, runner.max_model_len) == (10, 16, 256, 512)
    assert runner.name == "torch cpu float32"
    small = TorchRunner(llama, kv_cache_bytes=8192 * 10, dtype="bfloat16", max_model_len=100)
    assert (small.num_blocks, small.max_model_len, small.name) == (20, 100, "torch cpu bfloat16")


def test_threads_are_torchs(llama: Path) -> None:
    before = torch.get_num_threads()
    TorchRunner(llama, num_blocks=8, threads=3)
    assert torch.get_num_threads() == 3
    TorchRunner(llama, num_blocks=8)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


@pytest.mark.parametrize(("stored", "name"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")])
def test_auto_is_what_the_weights_are_stored_in(tmp_path: Path, stored: str, name: str) -> None:
    runner = TorchRunner(models.random_model("qwen3", tmp_path, dtype=stored), dtype="auto", num_blocks=8)
    assert runner.name == f"torch cpu {name}"


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_stored_halves_are_computed_exactly_in_float32(tmp_path: Path, stored: str) -> None:
    made = Reference(models.random_model("qwen2", tmp_path, dtype=stored))
    runner = TorchRunner(tmp_path, num_blocks=BLOCKS, threads=1)
    made.check(greedy(runner, [Lane(given) for given in PROMPTS], COUNT, shuffled(BLOCKS)))


def test_a_closed_runner_keeps_no_memory(llama: Path) -> None:
    runner = TorchRunner(llama, num_blocks=8)
    runner.close()
    runner.close()
    assert not any(torch.is_tensor(held) or held for name, held in vars(runner).items() if name in ("_keys", "_values"))
    assert not hasattr(runner, "_decoder")


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "reflex_runtime.llm.runners.torch_runner")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[torch\]'"):
        import reflex_runtime.llm.runners.torch_runner  # noqa: F401
