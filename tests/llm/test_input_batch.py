"""Rows of logits: several of one sequence in a step, from every runner, and prompts that are scored by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from llm.models import Oracle, random_checkpoint, random_model
from llm.steps import Lane, shuffled, step
from reflex_runtime.core.batch import BatchScheduled, Event, RequestPreempted
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.ipc.messages import GenerateParams, SamplingParams, ScoredToken
from reflex_runtime.llm.engine.llm_engine import LLMEngine
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner
from reflex_runtime.llm.runners.runner import Runner
from reflex_runtime.llm.runners.torch_runner import TorchRunner

BOUND = 1e-4
TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 256, 60)]


@pytest.fixture(scope="module", params=["toy", "openvino", "torch", "transformers"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    path, kind = tmp_path_factory.mktemp("model"), request.param
    made: Runner
    if kind == "toy":
        made = ToyRunner(20, 16)
    elif kind == "transformers":
        made = TorchRunner(random_checkpoint("GPT2", path), num_blocks=20, threads=1)
    elif kind == "openvino":
        made = OpenVinoRunner(random_model("llama", path), num_blocks=20, threads=1)
    else:
        made = TorchRunner(random_model("llama", path), num_blocks=20, threads=1)
    yield made
    made.close()


def one_by_one(runner: Runner, tokens: list[int]) -> npt.NDArray[np.float32]:
    """The logits after each token, a step each."""
    lane, free = Lane(tokens), shuffled(20)
    return np.stack([runner.forward(step([lane], [1], runner.block_size, free))[0].copy() for _ in tokens])


def test_l8_a_step_gives_the_rows_that_are_asked_for(runner: Runner) -> None:
    expected = one_by_one(runner, TOKENS)
    first, second, free = Lane(TOKENS), Lane(TOKENS[:33]), shuffled(20, 1)
    runner.forward(step([first, second], [40, 30], runner.block_size, free))
    mixed = replace(step([first, second], [20, 3], runner.block_size, free), rows=np.array([0, 7, 18, 19, 21, 22]))
    np.testing.assert_allclose(
        runner.forward(mixed), expected[[40, 47, 58, 59, 31, 32]], atol=BOUND, rtol=0, err_msg=runner.name
    )


def test_l8_rows_outside_a_step_are_refused(tmp_path: Path) -> None:
    model = OpenVinoRunner(random_model("llama", tmp_path), num_blocks=4, threads=1)
    wrong = replace(step([Lane([5, 6])], [2], model.block_size, shuffled(4)), rows=np.array([0, 2]))
    with pytest.raises(ProcessorError, match="asks for logits of a token that it does not have"):
        model.forward(wrong)


def log_softmax(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("alternatives", [0, 3])
def test_l8_a_prompt_is_scored_in_chunks_beside_others_and_after_a_preemption(
    tmp_path: Path, alternatives: int
) -> None:
    path = random_model("llama", tmp_path)
    model = OpenVinoRunner(path, num_blocks=4, threads=1)
    table = log_softmax(Oracle(path).logits(TOKENS))
    expected = [float(table[i, token]) for i, token in enumerate(TOKENS[1:])]
    events: list[Event] = []
    engine = LLMEngine(model, ByteTokenizer(), max_num_batched_tokens=24, sinks=[events.append])
    params = SamplingParams.greedy(20, ignore_eos=True)
    plain = engine.generate([TOKENS], params)[0].token_ids  # its blocks are cached from now on
    other = engine.add_request(TOKENS[:50], params)
    engine.step()
    request = engine.processor.request(TOKENS, GenerateParams.of(params, request_id="scored"))
    request.payload.score(alternatives)
    engine._submit(request, TOKENS)
    found = {}
    while engine.unfinished:
        found.update((output.request_id, output) for output in engine.step())
    choices: list[ScoredToken] = request.payload.prompt_choices
    np.testing.assert_allclose([choice.logprob for choice in choices], expected, atol=BOUND, rtol=0)
    assert [choice.token_id for choice in choices] == TOKENS[1:]
    assert found["scored"].token_ids == plain
    assert found["scored"].cached_tokens == 0
    assert len(found[other].token_ids) == 20
    assert {event.ticket.id for event in events if isinstance(event, RequestPreempted)} == {"scored"}
    assert [len(choice.top) for choice in choices] == [alternatives] * 59
    if alternatives:
        assert [choice.top[0][0] for choice in choices] == table[:-1].argmax(axis=1).tolist()
    assert max(sum(e.batch.grants.values()) for e in events if isinstance(e, BatchScheduled)) <= 24


def test_l8_a_step_that_fails_leaves_no_scores() -> None:
    class Once(ToyRunner):
        crashes = 1

        def forward(self, step: object) -> npt.NDArray[np.float32]:
            if self.crashes:
                self.crashes -= 1
                raise OSError("gone")
            return super().forward(step)  # type: ignore[arg-type]

    engine = LLMEngine(Once(), ByteTokenizer(), max_num_batched_tokens=64)
    ids = []
    for name in ("a", "b"):  # the call is repeated for each alone
        request = engine.processor.request("hello world", GenerateParams.greedy(3, request_id=name))
        request.payload.score()
        engine._submit(request, "hello world")
        ids.append(request.payload)
    while engine.unfinished:
        engine.step()
    assert all(len(sequence.prompt_choices) == 10 for sequence in ids)


def test_l8_a_prompt_of_one_token_has_nothing_to_score() -> None:
    engine = LLMEngine()
    request = engine.processor.request("a", SamplingParams.greedy(2))
    request.payload.score(2)
    engine._submit(request, "a")
    assert [len(output.token_ids) for _ in range(2) for output in engine.step()] == [2]
    assert request.payload.prompt_choices == []
