"""Token runs from a program: no command line, the same figures as the schedule itself."""

from __future__ import annotations

import pytest

from reflex_runtime.llm import SamplingParams, trace_batches
from reflex_runtime.llm.engine.llm_engine import Engines
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.sim.tokens import Prompt, StepTime, TokenRuns, sweep

TEXTS = ["hello world", "goodbye"]
TAKES = StepTime(0.002, 0.00005)


def runs(*arrives: int) -> TokenRuns:
    params = SamplingParams.greedy(4, ignore_eos=True)
    prompts = [Prompt(f"P{i}", text, params, at) for i, (text, at) in enumerate(zip(TEXTS, arrives, strict=True))]
    return TokenRuns(Engines(ToyRunner(), ByteTokenizer(), TAKES), prompts)


def test_a_run_is_measured_in_virtual_time() -> None:
    _, schedule = trace_batches(TEXTS, 4, max_num_batched_tokens=8)
    sizes = [sum(step.values()) for step in schedule]
    run = runs(0, 0).measure(budget=8)
    assert run.tokens == sizes
    assert run.first_step == [2, 3]
    assert run.first_token == pytest.approx([sum(map(TAKES, sizes[:2])), sum(map(TAKES, sizes[:3]))])
    assert run == runs(0, 0).measure(budget=8)


def test_a_prompt_that_arrives_later_waits_from_then_on() -> None:
    run = runs(0, 30).measure(budget=64)
    assert run.tokens == [11, 1, 1, 1, 7, 1, 1, 1]
    assert run.first_token == pytest.approx([TAKES(11), TAKES(7)])


def test_programs_sweep() -> None:
    told: list[tuple[int, int]] = []
    found, knee = sweep(runs(0, 0), [4, 18, 64], lambda *done: told.append(done))
    assert [len(run.tokens) for run in found] == [8, 4, 4]
    assert (knee.saturated, knee.floor) == (18, 4)
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_runner_serves_one_engine_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ToyRunner()
    closed: list[bool] = []
    monkeypatch.setattr(runner, "close", lambda: closed.append(True))
    for takes in (None, TAKES):
        engine, _ = Engines(runner, ByteTokenizer(), takes)()
        engine.close()
    assert closed == []
