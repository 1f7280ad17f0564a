"""Guessed tokens: tokens a second with `speculate="ngram"` over without, in turns, at 1, 8 and 32 running.

The model computes with 42 million random weights, and which token it says is scripted: what stood one prompt's length
before, with a given chance, else any other token. So a step costs what it costs, and the share of right guesses is
known. `copies`: text that repeats its prompt. `half`: six of ten tokens are the prompt's. `other`: nothing repeats. The
bundled model, in float32, says what it says: greedy answers to a few beginnings soon go round in circles, sampled ones
do not. Both engines of a pair are made once, so the first turn, in which prices are learned, does not count.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.llm import VOCAB, Words, write_model
from bench.report import Row, row, say
from reflex_runtime.demo import SCRIBE
from reflex_runtime.ipc.messages import SamplingParams
from reflex_runtime.llm.engine.llm_engine import LLMEngine
from reflex_runtime.llm.engine.load import load
from reflex_runtime.llm.runners.runner import Runner, Step

PROMPT = 128
TOKENS = {1: 192, 8: 128, 32: 96}
ROUNDS = 5
_LONG = 65_521  # places of a script
SCRIPTS = {"copies": 0.97, "half": 0.6, "other": 0.0}
WORDS = ("robot", "camera", "boy", "girl", "cat", "dog", "boat", "hill")
BARS = {"copies": 1.5, "half": 0.97, "other": 0.97}


class Kept:
    """A runner that several engines use one after the other: closing an engine leaves it open."""

    def __init__(self, runner: Runner) -> None:
        self.vocab_size, self.block_size, self.num_blocks = runner.vocab_size, runner.block_size, runner.num_blocks
        self.max_model_len, self.name, self.adapters = runner.max_model_len, runner.name, runner.adapters
        self._runner = runner

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        return self._runner.forward(step)

    def close(self) -> None:
        return


class Scripted(Kept):
    """A runner that says what stood PROMPT tokens before, with a chance; a sequence is known by its first block."""

    def __init__(self, runner: Runner, chance: float) -> None:
        super().__init__(runner)
        rng = random.Random(9)
        self._script = [-1 if rng.random() < chance else rng.randrange(300, VOCAB) for _ in range(_LONG)]
        self._texts: dict[int, list[int]] = {}

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        logits = self._runner.forward(step)
        rows, at = step.picked.tolist(), 0
        for i, past in enumerate(step.past_lens.tolist()):
            begin, end = int(step.begins[i]), int(step.begins[i + 1])
            text = self._texts.setdefault(int(step.blocks[step.block_begins[i]]), [])
            text[past:] = step.token_ids[begin:end].tolist()
            while at < len(rows) and rows[at] < end:
                place = past + rows[at] - begin + 1
                logits[at, self._next(text, place)] += 1e4
                at += 1
        return logits

    def _next(self, text: list[int], place: int) -> int:
        said = self._script[(place + 977 * text[0]) % _LONG]
        return text[max(0, place - PROMPT)] if said < 0 else said  # inside a prompt nothing is said


def speculation(root: Path, scale: float) -> list[Row]:
    """Every row about guessed tokens."""
    from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner

    runner = OpenVinoRunner(write_model(root / "llama-f32", "float32"), threads=2, num_blocks=400)
    rounds = max(3, round(ROUNDS * scale))
    rows: list[Row] = []
    for name in SCRIPTS:
        for running in TOKENS:
            rows += scripted(runner, name, running, rounds)
    runner.close()
    return rows + _bundled(rounds)


def scripted(runner: Runner, name: str, running: int, rounds: int) -> list[Row]:
    """One row: this many sequences of this script."""
    rng = random.Random(running)
    prompts = [[rng.randrange(300, VOCAB) for _ in range(PROMPT)] for _ in range(running)]
    params = [SamplingParams.greedy(TOKENS[running], ignore_eos=True)] * running
    return _pair(f"42 M, {name}", Scripted(runner, SCRIPTS[name]), Words(), prompts, params, rounds, BARS[name])


def _bundled(rounds: int) -> list[Row]:
    runner, tokenizer = load(SCRIBE, threads=2, dtype="float32")
    rows: list[Row] = []
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        for running, tokens in TOKENS.items():
            params = [SamplingParams(tokens, temperature=temperature, seed=i, ignore_eos=True) for i in range(running)]
            asked = [f"Once there was a {WORDS[i % 8]}" for i in range(running)]
            rows += _pair(f"scribe, {name}", runner, tokenizer, asked, params, rounds, 0.97)
    runner.close()
    return rows


def _pair(
    what: str,
    runner: Runner,
    tokenizer: Any,
    prompts: list[Any],
    params: list[SamplingParams],
    rounds: int,
    least: float,
) -> list[Row]:
    running = len(prompts)
    engines = {
        mode: LLMEngine(Kept(runner), tokenizer, speculate=mode, enable_prefix_caching=False, max_gap_ms=0)
        for mode in ("off", "ngram")
    }
    rates: dict[str, list[float]] = {"off": [], "ngram": []}
    busy: dict[str, list[float]] = {"off": [], "ngram": []}
    said: dict[str, Any] = {}
    for turn in range(-1, rounds):
        for mode in list(engines)[:: 1 if turn % 2 else -1]:
            began, used = time.perf_counter(), time.process_time()
            outputs = engines[mode].generate(prompts, params)
            taken, used = time.perf_counter() - began, time.process_time() - used
            said[mode] = [output.token_ids for output in outputs]
            if turn >= 0:
                rates[mode].append(sum(map(len, said[mode])) / taken)
                busy[mode].append(sum(map(len, said[mode])) / used)
        assert said["off"] == said["ngram"], what
    processor = engines["ngram"].processor
    ratios = [on / off for on, off in zip(rates["ngram"], rates["off"], strict=True)]
    of_cpu = [on / off for on, off in zip(busy["ngram"], busy["off"], strict=True)]
    told = f"{processor.accepted} of {processor.drafted} guesses right"
    say(f"  {what}, {running} running: {sorted(ratios)[rounds // 2]:.2f}, {sorted(of_cpu)[rounds // 2]:.2f}, {told}")
    return [
        row("speculation", f"{what}, {running} running ({told}): tokens/s over without", ratios, "x", least=least),
        row("speculation", f"{what}, {running} running: tokens a CPU second over without", of_cpu, "x"),
    ]
