"""L8: prompts are scored within bounded memory: calls before the step, and nothing is left of one that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm.models import Oracle, random_checkpoint, random_model
from reflex_runtime.core.batch import Event, RequestPreempted
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.messages import SamplingParams
from reflex_runtime.llm.engine import processor as module
from reflex_runtime.llm.engine.llm_engine import LLMEngine
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner
from reflex_runtime.llm.runners.runner import Step
from reflex_runtime.llm.runners.torch_runner import TorchRunner

TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 256, 60)]
PARAMS = SamplingParams.greedy(20, ignore_eos=True)
BOUND = 1e-4


def expected(oracle: Oracle, tokens: list[int]) -> list[float]:
    """What transformers says of these tokens from the second on."""
    rows = oracle.logits(tokens).astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return [float(rows[i, token]) for i, token in enumerate(tokens[1:])]


@pytest.mark.parametrize("kind", ["openvino", "torch", "transformers"])
def test_l8_scores_are_those_of_transformers_in_bounded_calls_beside_others(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = random_checkpoint("GPT2", tmp_path) if kind == "transformers" else random_model("llama", tmp_path)
    made: Any = OpenVinoRunner if kind == "openvino" else TorchRunner
    runner, rows = made(path, num_blocks=6 if kind == "openvino" else 12, threads=1), list[int]()
    plain = runner.forward
    monkeypatch.setattr(module, "SCORED_BYTES", 10 * 4 * runner.vocab_size)
    events: list[Event] = []
    engine = LLMEngine(runner, ByteTokenizer(), max_num_batched_tokens=48, sinks=[events.append])
    alone = engine.generate([TOKENS[:50]], PARAMS)[0].token_ids
    monkeypatch.setattr(runner, "forward", lambda step: rows.append(len(step.picked)) or plain(step))
    other = engine.add_request(TOKENS[:50], PARAMS)
    asked = {engine.add_request(TOKENS[:n], PARAMS, prompt_logprobs=2): n for n in (60, 33)}
    found = {}
    while engine.unfinished:
        found.update((output.request_id, output) for output in engine.step())
    oracle = Oracle(path)
    for name, n in asked.items():
        told = found[name].prompt_logprobs
        assert [choice.token_id for choice in told] == TOKENS[1:n]
        np.testing.assert_allclose(
            [choice.logprob for choice in told], expected(oracle, TOKENS[:n]), atol=BOUND, rtol=0, err_msg=kind
        )
    assert found[other].token_ids == alone
    assert found[other].prompt_logprobs == ()
    assert max(rows) <= 13  # ten for scores, and one of each other sequence
    assert [event for event in events if isinstance(event, RequestPreempted)]


def test_l8_a_call_that_fails_in_the_middle_leaves_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(ToyRunner):
        calls = 0

        def forward(self, step: Step) -> Any:
            self.calls += 1
            if self.calls == 3:
                raise OSError("gone")
            return super().forward(step)

    runner = Fails()
    monkeypatch.setattr(module, "SCORED_BYTES", 4 * 4 * runner.vocab_size)
    engine = LLMEngine(runner, ByteTokenizer(), max_num_batched_tokens=64)
    names = [engine.add_request("hello world", SamplingParams.greedy(3), prompt_logprobs=0) for _ in range(2)]
    found = {}
    while engine.unfinished:
        found.update((output.request_id, output) for output in engine.step())
    whole = LLMEngine(ToyRunner(), ByteTokenizer())
    name = whole.add_request("hello world", SamplingParams.greedy(3), prompt_logprobs=0)
    (once,) = [output for _ in range(3) for output in whole.step()]
    assert once.request_id == name
    assert [found[name].error for name in names] == [None, None]
    assert all(found[name].prompt_logprobs == once.prompt_logprobs for name in names)
    assert all(found[name].token_ids == once.token_ids for name in names)
    assert len(once.prompt_logprobs) == 10


@pytest.mark.parametrize("count", [-1, 21])
def test_l8_as_many_alternatives_are_told_of_a_prompt_as_of_an_output(count: int) -> None:
    engine = LLMEngine(ToyRunner(), ByteTokenizer())
    with pytest.raises(ConfigError, match=rf"prompt_logprobs={count}: must be in \[0, 20\]"):
        engine.add_request(TOKENS, PARAMS, prompt_logprobs=count)
    assert engine.unfinished == 0
