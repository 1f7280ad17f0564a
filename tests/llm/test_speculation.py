"""Guessed tokens change nothing but the number of steps (contract L4, L5, L8): outputs are equal token for token.

Guesses are forced: every one is computed that the budget and the blocks leave room for, whatever it costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llm.models import random_model
from llm.steps import faults
from reflex_runtime.cli import main
from reflex_runtime.core.batch import BatchScheduled, Done, Event, RequestPreempted, RequestProgressed, RequestSettled
from reflex_runtime.core.token_budget import ExtraUnits
from reflex_runtime.ipc.messages import Constraint, SamplingParams
from reflex_runtime.llm.engine.llm_engine import LLMEngine
from reflex_runtime.llm.engine.processor import invariants
from reflex_runtime.llm.engine.sequence import RequestOutput
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner
from reflex_runtime.llm.runners.runner import Runner, Step
from reflex_runtime.llm.runners.torch_runner import TorchRunner
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.observe.journal_writer import JournalWriter
from reflex_runtime.observe.trace_tables import courses, unused
from thinned import thinned

PHRASE = [int(token) for token in np.random.default_rng(3).integers(3, 256, 12)]
PROMPTS = [PHRASE * 3 + PHRASE[:4], PHRASE * 5, [9, 8, 7, 6, 5], PHRASE[:3], [7] * 20]
TEXTS = ["the cat sat on the mat, the cat sat on ", "aaaaaaaaaaaa", "one two one two one", "x"]


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every guess is worth its price."""

    def choose(self: ExtraUnits, rows: int, asked: Sequence[Sequence[float]], most: float, seconds: float) -> list[int]:
        counts, left = [], int(min(most, 1 << 20))
        for chances in asked:
            counts.append(min(len(chances), left))
            left -= counts[-1]
        return counts

    monkeypatch.setattr(ExtraUnits, "choose", choose)
    monkeypatch.setattr("reflex_runtime.llm.engine.ngram_proposer.LEAST", 0.0)


@pytest.fixture(scope="module", params=["toy", "openvino", "torch"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    path, kind = tmp_path_factory.mktemp("model"), request.param
    made: Runner
    if kind == "toy":
        made = Looping(60, 16)
    else:  # a narrow model with its weights at random soon says the same again
        path = random_model("llama", path, seed=4)
        made = (OpenVinoRunner if kind == "openvino" else TorchRunner)(path, num_blocks=60, threads=1)
    yield made
    made.close()


class Looping(ToyRunner):
    """Often says what came three tokens before: most guesses are right, and some are not."""

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        logits = super().forward(step)
        for row, at in enumerate(step.picked.tolist()):
            token, place = int(step.token_ids[at]), int(step.positions[at])
            if place % 11 != 7:
                logits[row, 97 + (token * 5 + 1) % 4] += 100.0
        return logits


class Seen:
    """A sink: the steps, and what requests are made of."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def granted(self) -> float:
        """Tokens computed in all."""
        return sum(sum(event.batch.grants.values()) for event in self.events if isinstance(event, BatchScheduled))

    @property
    def preempted(self) -> int:
        return sum(isinstance(event, RequestPreempted) for event in self.events)

    def check(self) -> None:
        """Every token was published once, in order, and every request was granted what it needed."""
        said: dict[str, list[int]] = {}
        for event in self.events:
            if isinstance(event, RequestProgressed) and event.value is not None:
                said.setdefault(event.ticket.id, []).append(event.value.token_id)
            elif isinstance(event, RequestSettled) and isinstance(event.ticket.outcome, Done):
                said.setdefault(event.ticket.id, []).append(event.ticket.outcome.value.token_id)
                assert tuple(said[event.ticket.id]) == event.ticket.request.payload.output_ids
                assert all(invariants(event.ticket).values()), event.ticket


def outputs(
    runner: Runner, speculate: str, prompts: Sequence[Any], params: Sequence[SamplingParams] | SamplingParams,
    **config: Any,
) -> tuple[list[RequestOutput], LLMEngine, Seen]:  # fmt: skip
    seen = Seen()
    engine = LLMEngine(runner, ByteTokenizer(), speculate=speculate, sinks=[seen], **config)
    found = engine.generate(prompts, params)
    seen.check()
    return found, engine, seen


def plain(some: Sequence[RequestOutput]) -> list[tuple[Any, ...]]:
    """What must be equal: tokens, text, why it ended, which tokens were likely."""
    return [
        (o.token_ids, o.text, o.finish_reason, [(c.token_id, [t for t, _ in c.top]) for c in o.logprobs]) for o in some
    ]


KINDS: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams.greedy(48, ignore_eos=True)],
    "sampled": [SamplingParams(40, seed=i, ignore_eos=True, temperature=0.7, top_p=0.95, top_k=40) for i in range(5)],
    "min_p": [SamplingParams(40, seed=i, ignore_eos=True, temperature=0.3, min_p=0.2) for i in range(5)],
    "penalties": [
        SamplingParams.greedy(40, ignore_eos=True, repetition_penalty=1.05, frequency_penalty=0.2, presence_penalty=0.1)
    ],
    "logprobs": [SamplingParams.greedy(40, ignore_eos=True, logprobs=3)],
    "ends": [SamplingParams.greedy(60, min_tokens=5, stop_token_ids=tuple(range(0, 256, 37)))],
    "bias": [SamplingParams.greedy(30, ignore_eos=True, logit_bias=((97, 3.0), (98, -5.0)))],
    "lengths": [SamplingParams.greedy(n, ignore_eos=True) for n in (1, 2, 3, 17, 33)],
}


@pytest.mark.parametrize("kind", thinned(KINDS, ["greedy", "sampled", "ends", "lengths"]))
def test_l8_outputs_are_the_same_with_guesses(runner: Runner, kind: str) -> None:
    params = KINDS[kind]
    each = params * len(PROMPTS) if len(params) == 1 else params
    without, _, many = outputs(runner, "off", PROMPTS, each)
    found, engine, few = outputs(runner, "ngram", PROMPTS, each)
    assert plain(found) == plain(without)
    for ours, theirs in zip(found, without, strict=True):
        told = [[c.logprob for c in output.logprobs if c.logprob is not None] for output in (ours, theirs)]
        np.testing.assert_allclose(*told, atol=1e-4)
    assert engine.processor.drafted > (0 if kind == "ends" else engine.processor.accepted)
    if kind in ("greedy", "logprobs"):
        assert engine.processor.accepted > 10
        assert few.granted - engine.processor.drafted == many.granted - engine.processor.accepted


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 9},
        {"max_num_seqs": 2},
        {"enable_prefix_caching": False},
        {"max_gap_ms": 0},
    ],
)
def test_l8_outputs_are_the_same_however_steps_are_cut(runner: Runner, config: dict[str, Any]) -> None:
    params = SamplingParams.greedy(40, ignore_eos=True)
    without, _, _ = outputs(runner, "off", PROMPTS, params)
    found, engine, seen = outputs(runner, "ngram", PROMPTS * 2, params, **config)
    assert plain(found) == plain(without) * 2
    assert engine.processor.accepted
    most = config.get("max_num_batched_tokens", 2048)
    assert max(sum(e.batch.grants.values()) for e in seen.events if isinstance(e, BatchScheduled)) <= most
    assert faults(engine.processor.pool) == []


def test_l5_guesses_take_no_blocks_from_others_and_survive_a_preemption() -> None:
    params = SamplingParams.greedy(60, ignore_eos=True)
    without, _, _ = outputs(Looping(200, 4), "off", TEXTS * 2, params)
    found, engine, seen = outputs(Looping(45, 4), "ngram", TEXTS * 2, params)
    assert plain(found) == plain(without)
    assert seen.preempted
    assert engine.processor.accepted
    assert faults(engine.processor.pool) == []


def test_l5_only_accepted_tokens_are_found_in_the_cache() -> None:
    """A second request that goes on with the first one's output finds its blocks, and says what it says without."""
    runner = Looping(200, 4)
    params = SamplingParams.greedy(50, ignore_eos=True)
    engine = LLMEngine(runner, ByteTokenizer(), speculate="ngram")
    [first] = engine.generate([TEXTS[0]], params)
    longer = [*first.prompt_token_ids, *first.token_ids]
    [found] = engine.generate([longer], params)
    [expected] = LLMEngine(Looping(200, 4), ByteTokenizer()).generate([longer], params)
    assert found.token_ids == expected.token_ids
    assert found.cached_tokens >= len(longer) - 6
    assert engine.processor.accepted < engine.processor.drafted


@pytest.mark.parametrize("params", [{"stop": ("acad", "bd")}, {"stop": ("ca",), "include_stop": True, "min_tokens": 9}])
def test_l8_a_stop_text_ends_a_guess_too(params: dict[str, Any]) -> None:
    asked = SamplingParams.greedy(60, **params)
    without, _, _ = outputs(Looping(200, 4), "off", TEXTS, asked)
    found, engine, _ = outputs(Looping(200, 4), "ngram", TEXTS, asked)
    assert plain(found) == plain(without)
    assert {output.finish_reason for output in found} == {"stop"}
    assert engine.processor.drafted


def test_l8_a_form_holds_for_every_guess() -> None:
    asked = SamplingParams.greedy(60, constraint=Constraint("regex", "([ab]{2}c){1,9}d"))
    without, _, _ = outputs(Looping(200, 4), "off", TEXTS, asked)
    found, engine, _ = outputs(Looping(200, 4), "ngram", TEXTS, asked)
    assert plain(found) == plain(without)
    assert engine.processor.accepted
    assert all(output.error is None for output in found)


def test_l8_rows_that_are_not_finite_fail_their_sequence_after_what_was_said() -> None:
    class Broken(Looping):
        def forward(self, step: Step) -> npt.NDArray[np.float32]:
            logits = super().forward(step)
            logits[step.positions[step.picked] == 57] = np.nan
            return logits

    params = SamplingParams.greedy(60, ignore_eos=True)
    without, _, _ = outputs(Broken(200, 4), "off", TEXTS, params)
    found, _, seen = outputs(Broken(200, 4), "ngram", TEXTS, params)
    assert plain(found) == plain(without)
    assert [str(output.error) for output in found] == [str(output.error) for output in without]
    said = [e.value.token_id for e in seen.events if isinstance(e, RequestProgressed) and e.value is not None]
    assert len(said) == sum(len(output.token_ids) for output in found)


def test_l8_a_step_that_fails_with_guesses_is_repeated_without_them() -> None:
    class Crashing(Looping):
        crashes = 0

        def forward(self, step: Step) -> npt.NDArray[np.float32]:
            if len(step.picked) > len(step.past_lens) > 1 and self.crashes < 3:
                self.crashes += 1
                raise OSError("gone")
            return super().forward(step)

    params = SamplingParams.greedy(40, ignore_eos=True)
    without, _, _ = outputs(Looping(200, 4), "off", TEXTS, params)
    runner = Crashing(200, 4)
    found, engine, _ = outputs(runner, "ngram", TEXTS, params)
    assert runner.crashes == 3
    assert plain(found) == plain(without)
    assert engine.processor.accepted


@pytest.mark.long
def test_l10_a_trace_tells_guesses_from_prompts_and_adds_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "steps.jsonl"
    engine = LLMEngine(Looping(45, 4), ByteTokenizer(), speculate="ngram", max_num_batched_tokens=20)
    writer = JournalWriter(file, [engine.processor.group])
    engine._sinks.append(writer)
    engine.generate(TEXTS * 2, SamplingParams.greedy(40, ignore_eos=True))
    writer.close()
    batches = read_journal(file).batches
    went = courses(batches)
    assert [course.conserved for course in went] == [True] * 8
    assert [(course.outputs, len(course.gaps), course.ended) for course in went] == [(40, 39, "done")] * 8
    assert sum(course.preemptions for course in went) > 0
    guessed = sum(member.guessed or 0.0 for batch in batches for member in batch.members)
    wrong = sum(unused(member) for batch in batches for member in batch.members)
    assert (guessed, guessed - wrong) == (engine.processor.drafted, engine.processor.accepted)
    assert main(["trace", str(file)]) == 0
    told = capsys.readouterr().out
    assert f"{guessed:g} guessed, of which {guessed - wrong:g} were right" in told
    assert "holds for all 8 requests" in told


def test_l8_nothing_is_guessed_beyond_the_last_token() -> None:
    class Measured(Looping):
        longest = 0

        def forward(self, step: Step) -> npt.NDArray[np.float32]:
            self.longest = max(self.longest, int(step.positions.max()) + 1)
            return super().forward(step)

    runner = Measured(11, 4, max_model_len=44)  # what it writes last is never computed
    params = SamplingParams.greedy(40, ignore_eos=True, logit_bias=((98, 100.0),))
    [output], engine, _ = outputs(runner, "ngram", ["aaaa"], params)
    assert len(output.token_ids) == 40
    assert engine.processor.accepted
    assert runner.longest == 43


def test_l8_the_logits_of_guesses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.llm.engine.processor.GUESSED_BYTES", 5 * 4 * ToyRunner.vocab_size)
    params = SamplingParams.greedy(40, ignore_eos=True)
    without, _, _ = outputs(Looping(200, 4), "off", TEXTS, params)
    found, _, seen = outputs(Looping(200, 4), "ngram", TEXTS, params)
    assert plain(found) == plain(without)
    assert max(sum(e.batch.extra.values()) for e in seen.events if isinstance(e, BatchScheduled)) == 5


def test_l1_a_request_with_guesses_can_be_aborted() -> None:
    engine = LLMEngine(Looping(200, 4), ByteTokenizer(), speculate="ngram")
    request = engine.add_request(TEXTS[0], SamplingParams.greedy(60, ignore_eos=True))
    while not engine.processor.accepted:
        engine.step()
    assert engine.abort(request)
    assert faults(engine.processor.pool) == []
    assert engine.processor.pool.free_blocks == 200
