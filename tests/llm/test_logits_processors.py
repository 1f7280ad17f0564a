"""What a request changes about the logits: penalties, a bias, no end too soon; and what its model says by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.ipc.messages import SamplingParams, ScoredToken
from reflex_runtime.llm import LLMEngine
from reflex_runtime.llm.engine.load import authors_said, sampling_defaults
from reflex_runtime.llm.engine.logits_processors import Shaping
from reflex_runtime.llm.engine.sampler import sample
from reflex_runtime.llm.engine.sequence import Sequence
from reflex_runtime.llm.engine.toy import ByteTokenizer

VOCAB = 12


def shaped(prompt: list[int], output: list[int], ends: tuple[int, ...] = (), **params: Any) -> Any:
    """What a row of logits from -5 to 6 becomes."""
    shaping = Shaping(SamplingParams(**{"max_tokens": 99} | params), prompt, ends)
    for token in output:
        shaping.sampled(token)
    row = np.arange(VOCAB, dtype=np.float32) - 5.0
    shaping.shape(row)
    return row - (np.arange(VOCAB) - 5.0)


def test_l8_presence_counts_once_and_frequency_each_time_and_only_the_output() -> None:
    change = shaped([1, 2], [3, 3, 4], presence_penalty=0.5, frequency_penalty=0.25)
    assert np.flatnonzero(change).tolist() == [3, 4]
    assert change[3] == pytest.approx(-0.5 - 2 * 0.25)
    assert change[4] == pytest.approx(-0.5 - 0.25)
    assert shaped([1], [3], presence_penalty=-1.0)[3] == pytest.approx(1.0)


def test_l8_repetition_makes_prompt_and_output_less_likely_on_both_sides_of_zero() -> None:
    change = shaped([1, 1, 9], [3, 10], repetition_penalty=2.0)
    assert np.flatnonzero(change).tolist() == [1, 3, 9, 10]
    assert change[1] == pytest.approx(-4.0)  # -4 → -8, however often it came
    assert change[9] == pytest.approx(-2.0)  # 4 → 2


def test_l8_repetition_is_that_of_transformers() -> None:
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(3)
    row = rng.normal(0.0, 3.0, 300).astype(np.float32)
    prompt, output = rng.integers(0, 300, 40).tolist(), rng.integers(0, 300, 200).tolist()
    shaping = Shaping(SamplingParams(max_tokens=999, repetition_penalty=1.3), prompt, ())
    for token in output:
        shaping.sampled(token)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), torch.tensor(row[None]).clone())
    shaping.shape(row)
    assert np.allclose(row, expected[0].numpy(), rtol=1e-6)


def test_l8_a_count_grows_with_the_tokens() -> None:
    output = [token % 300 for token in range(1000)]
    shaping = Shaping(SamplingParams(max_tokens=2000, frequency_penalty=1.0), [], ())
    for token in output:
        shaping.sampled(token)
    row = np.zeros(400, np.float32)
    shaping.shape(row)
    assert (-row).astype(int).tolist() == np.bincount(output, minlength=400).tolist()


def test_l8_bias_is_added_and_ends_wait_for_min_tokens() -> None:
    change = shaped([1], [], ends=(2, 5), logit_bias=((4, 2.5), (5, 100.0)), min_tokens=1)
    assert change[4] == pytest.approx(2.5)
    assert change[2] == change[5] == -np.inf
    assert np.isfinite(shaped([1], [3], ends=(2, 5), min_tokens=1)).all()


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.0},
        {"frequency_penalty": -1.0},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((1, 1.0),)},
        {"min_tokens": 1},
    ],
)
def test_l8_only_what_is_asked_for_costs_anything(params: dict[str, Any]) -> None:
    assert Sequence([1], SamplingParams(), ByteTokenizer(), frozenset({2})).shaping is None
    assert Sequence([1], SamplingParams(**params), ByteTokenizer(), frozenset({2})).shaping is not None


def test_l8_a_shaped_row_changes_its_own_token_and_not_what_is_told_about_it() -> None:
    logits = np.random.default_rng(0).normal(0.0, 2.0, (3, VOCAB)).astype(np.float32)
    best = logits.argmax(axis=1).tolist()
    other = (best[1] + 1) % VOCAB
    before = logits.copy()
    plain = SamplingParams.greedy(logprobs=1)
    biased = SamplingParams.greedy(logprobs=1, logit_bias=((other, 100.0),))
    found = sample(logits, [Sequence([1], params, ByteTokenizer()) for params in (plain, biased, plain)])
    assert all(isinstance(choice, ScoredToken) for choice in found)
    first, second, third = (choice for choice in found if isinstance(choice, ScoredToken))
    assert [first.token_id, second.token_id, third.token_id] == [best[0], other, best[2]]
    assert second.top[0][0] == best[1]
    assert second.logprob is not None
    assert second.logprob < second.top[0][1]
    assert (logits == before).all()
    drawn = sample(logits, [Sequence([1], SamplingParams(seed=1, logit_bias=((other, 100.0),)), ByteTokenizer())] * 3)
    assert [choice.token_id for choice in drawn if isinstance(choice, ScoredToken)] == [other] * 3


def test_l8_min_p_drops_what_is_unlikely_beside_the_likeliest() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    seen = set()
    for seed in range(300):
        (choice,) = sample(logits, [Sequence([1], SamplingParams(min_p=0.2, seed=seed), ByteTokenizer())])
        assert isinstance(choice, ScoredToken)
        seen.add(choice.token_id)
    assert seen == {0, 1, 2}
    (choice,) = sample(logits, [Sequence([1], SamplingParams(min_p=1.0, top_k=3, top_p=0.9, seed=1), ByteTokenizer())])
    assert isinstance(choice, ScoredToken)
    assert choice.token_id == 0


def test_l8_logits_that_are_not_finite_fail_a_shaped_sequence_too() -> None:
    logits = np.full((1, VOCAB), np.nan, np.float32)
    (found,) = sample(logits, [Sequence([1], SamplingParams(presence_penalty=1.0), ByteTokenizer())])
    assert isinstance(found, ProcessorError)


def test_l5_penalties_do_not_depend_on_the_batch_or_on_preemption() -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=4, repetition_penalty=1.2, frequency_penalty=0.5)
    prompts = ["Robots that wait", "Cameras", "A long prompt about robots that wait for cameras", "x"]
    alone = [LLMEngine().generate([prompt], params)[0].text for prompt in prompts]
    tight = LLMEngine(num_blocks=14, block_size=8, max_num_batched_tokens=7)
    assert [output.text for output in tight.generate(prompts, params)] == alone
    plain = SamplingParams(max_tokens=40, temperature=0.8, seed=4, repetition_penalty=1.2)
    assert alone != [output.text for output in LLMEngine().generate(prompts, plain)]


def test_l8_min_tokens_keeps_a_stop_text_from_ending_too_soon() -> None:
    text = LLMEngine().generate(["Robots"], SamplingParams.greedy(30))[0].text
    stop = text[3:5]
    soon = LLMEngine().generate(["Robots"], SamplingParams.greedy(30, stop=(stop,)))[0].text
    late = LLMEngine().generate(["Robots"], SamplingParams.greedy(30, stop=(stop,), min_tokens=10))[0].text
    whole = LLMEngine().generate(["Robots"], SamplingParams.greedy(30, stop=(stop,), include_stop=True))[0].text
    assert len(soon) < len(late)
    assert whole == soon + stop


# -- the model's own defaults ------------------------------------------------------------------------------------------


def said(directory: Path, **values: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_l8_the_files_values_are_the_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == SamplingParams()
    assert authors_said(SamplingParams()) == ""
    said(tmp_path, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, do_sample=True, eos_token_id=[1])
    found = sampling_defaults(tmp_path)
    assert found == SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    assert authors_said(found) == "temperature 0.7, top_p 0.8, top_k 20, repetition_penalty 1.05"
    assert sampling_defaults(said(tmp_path, top_k=-1, temperature=None)) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "hot"), ("temperature", -1), ("top_k", 2.5), ("top_p", 0), ("min_p", True)]
)
def test_l8_a_value_that_cannot_be_names_file_and_key(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {name}="):
        sampling_defaults(said(tmp_path, **{name: value}))


def test_l8_no_token_that_is_left_and_no_parameters_are_errors() -> None:
    with pytest.raises(ProcessorError, match="no token is left"):
        shaped([1], [], ends=tuple(range(VOCAB)), min_tokens=1)
    with pytest.raises(ConfigError, match="0 for 2 prompts"):
        LLMEngine().generate(["a", "b"], [])
