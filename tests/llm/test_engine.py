"""The engine on the toy model: steps, conservation, exactness, faults (contract L1 to L7)."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llm.steps import faults
from reflex_runtime.core.batch import (
    BatchFinished,
    BatchScheduled,
    Event,
    RequestPreempted,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.errors import (
    Cancelled,
    ConfigError,
    Expired,
    ProcessorError,
    QueueFull,
    TooLarge,
)
from reflex_runtime.core.request import Priority
from reflex_runtime.llm import EngineConfig, LLMEngine, RequestOutput, SamplingParams, trace_batches
from reflex_runtime.llm.engine.processor import flatten, invariants
from reflex_runtime.llm.engine.sequence import Sequence
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.llm.runners.runner import Step
from run.helpers import cannot_learn
from thinned import thinned

GREEDY = SamplingParams.greedy(4, ignore_eos=True)
A, B = "hello world", "goodbye"


def alone(prompt: str, max_tokens: int) -> str:
    """The obvious way: everything from the start, for each token."""
    tokens = list(prompt.encode())
    for _ in range(max_tokens):
        n = len(tokens)
        one = Step(
            np.array(tokens), np.arange(n), np.array([0], np.int32), np.array([0, n], np.int32),
            np.arange(n, dtype=np.int32), np.array([0, n], np.int32),
        )  # fmt: skip
        tokens.append(int(ToyRunner(n, 1).forward(one)[0].argmax()))
    return bytes(tokens[len(prompt) :]).decode()


class Watch:
    """A sink that keeps what a test wants to know."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self.preempted: list[str] = []
        self.order: list[str] = []
        self.tickets: list[Any] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, BatchScheduled):
            self.steps.append({t.id: int(n) for t, n in event.batch.grants.items()})
        elif isinstance(event, RequestPreempted):
            self.preempted.append(event.ticket.id)
        elif isinstance(event, RequestSettled):
            self.order.append(event.ticket.id)
            self.tickets.append(event.ticket)


def watched(**config: Any) -> tuple[LLMEngine, Watch]:
    watch = Watch()
    return LLMEngine(sinks=[watch], **config), watch


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    found = {}
    for _ in range(10_000):
        found.update((o.request_id, o) for o in engine.step())
        if not engine.unfinished:
            return found
    raise AssertionError("the engine does not come to an end")


# -- L1, L2, L3: steps -------------------------------------------------------------------------------------------------


def test_l1_add_step_generate_abort() -> None:
    engine = LLMEngine(max_num_batched_tokens=64, max_num_seqs=4, long_prefill_token_threshold=8, block_size=4,
                       num_blocks=100, enable_prefix_caching=False)  # fmt: skip
    first = engine.add_request(A, GREEDY)
    gone = engine.add_request(B, GREEDY)
    assert engine.scheduler.queued("default") == 2
    assert engine.abort(gone)
    assert not engine.abort(gone)
    outputs = finish(engine)
    assert outputs[first].text == alone(A, 4)
    assert isinstance(outputs[gone].error, Cancelled)
    assert outputs[gone].finish_reason == "cancelled"
    assert [o.text for o in engine.generate([B, A], GREEDY)] == [alone(B, 4), alone(A, 4)]


def test_l1_generate_takes_more_prompts_than_fit_and_keeps_their_order() -> None:
    engine, watch = watched(max_num_seqs=3, max_queue=3)
    prompts = [f"prompt {i}" for i in range(20)]
    each = [SamplingParams.greedy(1 + i % 5) for i in range(20)]
    outputs = engine.generate(prompts, each)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.token_ids) for o in outputs] == [p.max_tokens for p in each]
    assert max(map(len, watch.steps)) == 3


@pytest.mark.parametrize("limit", [{"max_queue": 1}, {"max_queue": 3}, {"max_queued_tokens": 30}])
def test_l1_generate_keeps_to_itself_what_may_not_wait_yet(limit: dict[str, int]) -> None:
    events: list[Event] = []
    engine = LLMEngine(max_num_seqs=4, sinks=[events.append], **limit)
    prompts = [f"prompt {i} " * 2 for i in range(8)]
    assert [output.text for output in engine.generate(prompts, GREEDY)] == [alone(p, 4) for p in prompts]
    assert not [event for event in events if isinstance(event, RequestRejected)]


def test_l1_generate_leaves_the_requests_of_others_alone() -> None:
    engine = LLMEngine()
    other = engine.add_request(A, GREEDY)
    assert [o.prompt for o in engine.generate([B], SamplingParams.greedy(9))] == [B]
    assert [o.request_id for o in engine.step()] == [other]


def test_l1_prompts_may_be_token_ids() -> None:
    [output] = LLMEngine().generate([list(A.encode())], GREEDY)
    assert (output.prompt, output.prompt_token_ids, output.text) == (None, tuple(A.encode()), alone(A, 4))


def test_l1_one_text_is_one_prompt_and_no_stop_of_letters() -> None:
    [output] = LLMEngine().generate(A, GREEDY)
    assert (output.prompt, output.text) == (A, alone(A, 4))
    with pytest.raises(ConfigError, match="stop='end': must be at most 16 texts"):
        SamplingParams(stop="end")  # type: ignore[arg-type]


def test_l3_the_documented_steps() -> None:
    (a, b), steps = trace_batches([A, B], max_num_batched_tokens=8)
    assert steps == [{a: 8}, {a: 3, b: 5}, {a: 1, b: 2}, {a: 1, b: 1}, {a: 1, b: 1}, {b: 1}]
    (a, b), steps = trace_batches([A, B])
    assert steps == [{a: 11, b: 7}] + [{a: 1, b: 1}] * 3


@pytest.mark.parametrize(("budget", "count"), [(4, 8), (8, 6), (11, 5), (16, 5), (18, 4), (64, 4)])
def test_l3_number_of_steps(budget: int, count: int) -> None:
    assert len(trace_batches([A, B], max_num_batched_tokens=budget)[1]) == count


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 13, 64])
def test_l2_no_step_exceeds_the_budget(budget: int) -> None:
    _, steps = trace_batches([A, B, "x", "some more words"], max_tokens=6, max_num_batched_tokens=budget)
    assert max(sum(step.values()) for step in steps) <= budget
    assert any(len(step) > 1 and 1 in step.values() and max(step.values()) > 1 for step in steps) or budget < 3


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5}, {"long_prefill_token_threshold": 3}])
def test_l4_scheduled_tokens_are_prompt_and_outputs_less_one(options: dict[str, int]) -> None:
    ids, steps = trace_batches([A, B, "x"], max_tokens=5, **options)
    for name, prompt in zip(ids, [A, B, "x"], strict=True):
        assert sum(step.get(name, 0) for step in steps) == len(prompt) + 5 - 1


def test_l7_the_probe_returns_copies_and_ids_are_never_used_twice() -> None:
    ids, steps = trace_batches([A, B])
    again, _ = trace_batches([A, B])
    assert not set(ids) & set(again)
    steps[0].clear()
    assert steps[1]


def test_l7_the_probe_changes_nothing() -> None:
    engine, _ = watched(max_num_batched_tokens=8)
    assert [o.text for o in engine.generate([A, B], GREEDY)] == [
        o.text for o in LLMEngine(max_num_batched_tokens=8).generate([A, B], GREEDY)
    ]


class Ending(ByteTokenizer):
    eos_token_ids = frozenset(range(256))


def test_l7_the_models_own_end_is_ignored() -> None:
    assert LLMEngine(tokenizer=Ending()).generate([B], SamplingParams.greedy(9))[0].finish_reason == "stop"
    assert len(trace_batches([B], tokenizer=Ending())[1]) == 4


def test_l7_max_tokens_and_every_engine_keyword_count() -> None:
    assert len(trace_batches([B], max_tokens=9)[1]) == 9
    assert max(len(s) for s in trace_batches([A, B], max_num_seqs=1)[1]) == 1
    assert trace_batches([A], long_prefill_token_threshold=4)[1][0].popitem()[1] == 4


# -- L6: numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("caching", "total"), [(False, 544), (True, 96)])
@pytest.mark.parametrize("together", [False, True])
def test_l6_eight_requests_that_share_a_prefix(caching: bool, total: int, together: bool) -> None:
    engine, watch = watched(block_size=16, enable_prefix_caching=caching)
    prompts = ["s" * 64 + f"{i:04d}" for i in range(8)]
    one = SamplingParams.greedy(1)
    if together:  # with the first prefilled
        engine.generate(prompts[:1], one)
        outputs = engine.generate(prompts[1:], one)
    else:
        outputs = [engine.generate([prompt], one)[0] for prompt in prompts][1:]
    assert sum(sum(step.values()) for step in watch.steps) == total
    assert {o.cached_tokens for o in outputs} == {64 if caching else 0}


@pytest.mark.parametrize(("threshold", "peak"), [(0, 257), (32, 33)])
def test_l6_a_long_prompt_lands_on_a_running_decode(threshold: int, peak: int) -> None:
    engine, watch = watched(long_prefill_token_threshold=threshold)
    engine.add_request("short", SamplingParams.greedy(40))
    engine.step()
    engine.add_request("L" * 256, SamplingParams.greedy(2))
    finish(engine)
    assert max(sum(step.values()) for step in watch.steps) == peak


# -- L5: what is said does not depend on how it was scheduled ----------------------------------------------------------


def prompts_of(rng: random.Random, n: int) -> list[str]:
    shared = "".join(rng.choice("abc ") for _ in range(rng.randint(0, 40)))
    return [
        shared[: rng.randint(0, 40)] + "".join(rng.choice("de ") for _ in range(rng.randint(1, 30))) for _ in range(n)
    ]


SHAPES: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 7},
    {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 5},
    {"enable_prefix_caching": False, "block_size": 4, "num_blocks": 30},
    {"block_size": 4, "num_blocks": 30},
    {"block_size": 1, "num_blocks": 120, "max_num_batched_tokens": 9},
    {"max_num_seqs": 3, "block_size": 8, "num_blocks": 14},
]


@pytest.mark.parametrize("shape", thinned(SHAPES, SHAPES[::2]), ids=str)
def test_l5_outputs_are_the_same_however_they_were_scheduled(shape: dict[str, Any]) -> None:
    preempted = 0
    for seed in range(4):
        prompts = prompts_of(random.Random(seed), 10)
        params = [
            SamplingParams.greedy(3 + 3 * i) if i % 3 else SamplingParams(20, seed=i, top_p=0.9) for i in range(10)
        ]
        expected = [
            LLMEngine(enable_prefix_caching=False).generate([p], s)[0] for p, s in zip(prompts, params, strict=True)
        ]
        engine, watch = watched(**shape)
        found = engine.generate(prompts, params)
        assert [o.token_ids for o in found] == [o.token_ids for o in expected]
        assert faults(engine.processor.pool) == []
        preempted += len(watch.preempted)
    assert preempted or shape.get("num_blocks", 4096) > 120


def test_l5_the_engine_says_what_the_model_says_step_for_step() -> None:
    [output] = LLMEngine(max_num_batched_tokens=3).generate([A], SamplingParams.greedy(12))
    assert output.text == alone(A, 12)


def test_l5_on_exhaustion_the_newest_of_the_lowest_tier_starts_over_from_the_front() -> None:
    engine, watch = watched(block_size=4, num_blocks=9, enable_prefix_caching=False)
    names = {}
    for name, tier in (("bulk", Priority.BACKGROUND), ("old", Priority.DEFAULT), ("new", Priority.DEFAULT)):
        names[name] = engine.add_request("12345678", SamplingParams.greedy(9), priority=tier, client=name)
    late = engine.add_request("late", SamplingParams.greedy(2), client="late")
    outputs = finish(engine)
    assert watch.preempted[0] == names["bulk"]
    assert watch.order[:2] != [names["bulk"], late]
    assert all(o.error is None and o.text == alone(o.prompt or "", len(o.token_ids)) for o in outputs.values())


def test_l5_what_a_preempted_request_finds_of_its_own_is_not_told_as_cached() -> None:
    engine, watch = watched(block_size=4, num_blocks=9, max_num_batched_tokens=16)
    outputs = engine.generate(["first prompt", "second prompt"], SamplingParams.greedy(12))
    assert watch.preempted
    assert max(ticket.cached for ticket in watch.tickets) > 0
    assert [output.cached_tokens for output in outputs] == [0, 0]


def test_l5_never_preempted_twice_without_progress_between() -> None:
    engine, watch = watched(block_size=2, num_blocks=12, max_num_batched_tokens=6, enable_prefix_caching=False)
    for i in range(6):
        engine.add_request("x" * (3 + i), SamplingParams.greedy(10), client=i)
    finish(engine)
    assert len(watch.preempted) > 2
    for ticket in watch.tickets:
        assert all(invariants(ticket).values())
        assert ticket.batches > watch.preempted.count(ticket.id)


# -- priorities, fairness, deadlines, limits ---------------------------------------------------------------------------


def test_an_urgent_request_has_its_first_token_within_three_steps_on_a_full_engine() -> None:
    engine, watch = watched(max_num_seqs=8, max_num_batched_tokens=64)
    for i in range(20):
        engine.add_request(f"background {i}", SamplingParams.greedy(60), priority=Priority.BACKGROUND, client=i)
    for _ in range(10):
        engine.step()
    assert len(watch.steps[-1]) == 8
    at = len(watch.steps)
    urgent = engine.add_request("now!", SamplingParams.greedy(3), priority=Priority.URGENT, client="vip")
    outputs = finish(engine)
    first = next(i for i, step in enumerate(watch.steps[at:], 1) if urgent in step)
    assert first <= 3
    assert watch.order[0] == urgent
    assert len(watch.preempted) == 1
    assert all(o.text == alone(o.prompt or "", len(o.token_ids)) for o in outputs.values())


def test_clients_get_even_shares_of_tokens() -> None:
    engine, watch = watched(max_num_seqs=8)
    for i in range(40):
        engine.add_request(f"greedy {i}", SamplingParams.greedy(20), client="greedy")
    for i in range(10):
        engine.add_request(f"modest {i}", SamplingParams.greedy(20), client="modest", request_id=f"modest-{i}")
    for _ in range(40):
        engine.step()
    modest = sum(n for step in watch.steps[:40] for name, n in step.items() if name.startswith("modest"))
    everything = sum(sum(step.values()) for step in watch.steps[:40])
    assert 0.45 < modest / everything < 0.55


def test_a_deadline_is_for_the_first_token() -> None:
    now = [0.0]
    engine = LLMEngine(max_num_seqs=1, clock=lambda: now[0])
    running = engine.add_request(A, SamplingParams.greedy(6), time_limit=1.0)
    engine.step()
    late = engine.add_request(B, GREEDY, time_limit=0.5)
    now[0] = 1.5
    outputs = finish(engine)
    assert outputs[running].finish_reason == "length"
    assert isinstance(outputs[late].error, Expired)


def test_queue_limits_in_requests_and_in_tokens_are_refused_at_once() -> None:
    engine = LLMEngine(max_queue=2, max_num_seqs=1)
    for _ in range(2):
        engine.add_request(A, GREEDY)
    with pytest.raises(QueueFull) as refused:
        engine.add_request(A, GREEDY)
    assert refused.value.details["max_queue"] == 2
    engine = LLMEngine(max_queued_tokens=20)
    engine.add_request(A, GREEDY)
    with pytest.raises(QueueFull) as refused:
        engine.add_request(A, GREEDY)
    assert refused.value.details["max_queued_units"] == 20
    engine.add_request(B, GREEDY)
    assert len(finish(engine)) == 2


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_giant_request_is_refused_with_the_limits_named() -> None:
    engine = LLMEngine(ToyRunner(num_blocks=4, block_size=8, max_model_len=100))
    with pytest.raises(TooLarge, match=r"100 tokens, not 90 prompt tokens and 11 of the answer"):
        engine.add_request("x" * 90, SamplingParams.greedy(11))
    with pytest.raises(TooLarge, match=r"take 5 blocks of 8, the cache has 4") as refused:
        engine.add_request("x" * 30, SamplingParams.greedy(4))
    assert refused.value.details == {"cache_tokens": 32, "prompt_tokens": 30, "max_tokens": 4}
    assert len(engine.generate(["x" * 30], SamplingParams.greedy(3))[0].token_ids) == 3  # the last is never stored


@pytest.mark.parametrize("prompt", ["", [], [256], [-1]])
def test_a_prompt_that_is_none_is_refused(prompt: Any) -> None:
    with pytest.raises(ConfigError, match="prompt"):
        LLMEngine().add_request(prompt, GREEDY)


def test_a_token_that_only_the_tokenizer_knows_is_refused_and_one_that_only_the_model_knows_is_not() -> None:
    runner = ToyRunner()
    runner.vocab_size = 100  # rows of the embedding; a tokenizer may have been given more tokens, or fewer
    with pytest.raises(ConfigError, match=r"prompt: token id 100: must be in \[0, 99\]"):
        LLMEngine(runner, ByteTokenizer()).add_request([97, 100], GREEDY)
    padded, tokenizer = ToyRunner(), ByteTokenizer()
    tokenizer.vocab_size = 100
    assert LLMEngine(padded, tokenizer).add_request([97, 100], GREEDY)


def test_an_id_that_is_in_use_is_refused() -> None:
    engine = LLMEngine()
    engine.add_request(A, GREEDY, request_id="mine")
    with pytest.raises(ConfigError, match="'mine'"):
        engine.add_request(A, GREEDY, request_id="mine")
    finish(engine)
    engine.add_request(A, GREEDY, request_id="mine")


def test_an_id_of_the_callers_is_never_given_to_another() -> None:
    engine = LLMEngine()
    number = int(engine.add_request("abc", GREEDY).removeprefix("req-"))
    taken = [engine.add_request("abc", GREEDY, request_id=f"req-{number + i}") for i in (1, 2, 3, 4)]
    assert engine.add_request("abc", GREEDY) not in taken
    assert [output.text for output in engine.generate(["abc", "abc"], GREEDY)] == [alone("abc", 4)] * 2
    finish(engine)


def test_generate_refuses_before_anything_runs() -> None:
    engine = LLMEngine()
    with pytest.raises(ConfigError, match="2 for 1 prompts"):
        engine.generate([A], [GREEDY, GREEDY])
    with pytest.raises(TooLarge):
        engine.generate([A, "x" * 9000], GREEDY)
    assert engine.unfinished == 0


class Faulty(ToyRunner):
    """Raises for every step in which this token is computed; says nonsense after another."""

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        if ord("!") in step.token_ids.tolist():
            raise RuntimeError("the model does not like '!'")
        logits = super().forward(step)
        for i, end in enumerate(step.begins[1:].tolist()):
            if step.token_ids[end - 1] == ord("?"):
                logits[i] = np.nan
        return logits


def test_b18_one_bad_request_does_not_fail_its_neighbours() -> None:
    engine = LLMEngine(Faulty(200, 4))
    prompts = [f"prompt number {i}" for i in range(8)]
    prompts[3] += "!"
    prompts[5] += "?"
    outputs = engine.generate(prompts, SamplingParams.greedy(6))
    assert [i for i, o in enumerate(outputs) if o.error] == [3, 5]
    assert all(isinstance(outputs[i].error, ProcessorError) for i in (3, 5))
    assert [o.text for o in outputs if not o.error] == [alone(p, 6) for i, p in enumerate(prompts) if i not in (3, 5)]
    assert faults(engine.processor.pool) == []


def test_l5_nothing_of_what_failed_is_found_by_who_begins_alike() -> None:
    engine = LLMEngine(Faulty(200, 4))
    _, failed = engine.generate(["its neighbour", "a text of its own?"], GREEDY)  # alone, the step would be void
    assert failed.error is not None
    [again] = engine.generate(["a text of its own."], GREEDY)
    assert (again.cached_tokens, again.text) == (0, alone("a text of its own.", 4))


class Undecodable(ByteTokenizer):
    def piece(self, id: int) -> bytes:
        if id in A.encode():
            return super().piece(id)
        raise ValueError("no such token")


def test_a_token_that_cannot_be_told_as_text_fails_its_request() -> None:
    engine = LLMEngine(ToyRunner(), Undecodable())
    [output] = engine.generate([A], GREEDY)
    assert isinstance(output.error, ProcessorError)
    assert "no such token" in str(output.error)


@pytest.mark.parametrize(("when", "steps"), [("waiting", 0), ("prefill", 2), ("decode", 8), ("preempted", -1)])
def test_abort_at_any_stage_frees_its_blocks_and_leaves_its_neighbours_alone(when: str, steps: int) -> None:
    engine, watch = watched(
        max_num_batched_tokens=8, block_size=4, num_blocks=14 if when == "preempted" else 200,
        enable_prefix_caching=False,
    )  # fmt: skip
    prompts = ["a" * 13, "b" * 20]
    others = [engine.add_request(p, SamplingParams.greedy(15), client=p) for p in prompts]
    victim = engine.add_request("c" * 11, SamplingParams.greedy(15), client="c")
    sequence: Sequence = engine._tickets[victim][0].request.payload
    while (victim not in watch.preempted) if when == "preempted" else len(watch.steps) < max(steps, 0):
        engine.step()
    if when == "prefill":
        while not 0 < sequence.num_computed_tokens < 11:
            engine.step()
    held = len(sequence.blocks)
    free = engine.processor.pool.free_blocks
    assert bool(held) == (when in ("prefill", "decode"))
    assert engine.abort(victim)
    assert engine.processor.pool.free_blocks == free + held
    outputs = finish(engine)
    assert [outputs[o].text for o in others] == [alone(p, 15) for p in prompts]
    assert isinstance(outputs[victim].error, Cancelled)
    assert engine.processor.pool.usage == 0.0


@pytest.mark.parametrize("histories", thinned([50, 200], [50]))
def test_random_histories_of_arrivals_aborts_and_preemptions(histories: int) -> None:
    preempted = ended = 0
    for seed in range(histories):
        rng = random.Random(seed)
        size = rng.choice((1, 2, 4))
        engine, watch = watched(
            block_size=size, num_blocks=-(-rng.randint(22, 36) // size), max_num_batched_tokens=rng.randint(1, 24),
            max_num_seqs=rng.randint(1, 6), long_prefill_token_threshold=rng.choice((0, 0, 3)),
            enable_prefix_caching=rng.random() < 0.5,
        )  # fmt: skip
        live: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        for _ in range(rng.randint(5, 40)):
            if rng.random() < 0.4:
                prompt = "ab" * rng.randint(0, 4) + "".join(rng.choice("cd") for _ in range(rng.randint(1, 6)))
                params = SamplingParams.greedy(rng.randint(1, 8))
                live.append(
                    engine.add_request(prompt, params, priority=Priority(rng.randrange(3)), client=rng.randrange(3))
                )
            if live and rng.random() < 0.1:
                engine.abort(rng.choice(live))
            outputs.update((o.request_id, o) for o in engine.step())
            held = [t.request.payload for t, _ in engine._tickets.values()]
            assert faults(engine.processor.pool, held) == [], seed
            for ticket, _ in engine._tickets.values():
                assert ticket.computed == ticket.request.payload.num_computed_tokens, seed
        outputs.update(finish(engine))
        assert sorted(outputs) == sorted(live)
        assert (
            max((sum(step.values()) for step in watch.steps), default=0)
            <= engine.processor.config.max_num_batched_tokens
        )
        assert engine.processor.pool.free_blocks == engine.processor.pool.num_blocks
        for output in outputs.values():
            if output.error is None:
                assert output.text == alone(output.prompt or "", len(output.token_ids)), seed
        for ticket in watch.tickets:
            if not isinstance(outputs[ticket.id].error, Cancelled):
                assert all(invariants(ticket).values()), seed
        preempted += len(watch.preempted)
        ended += len(outputs)
    assert preempted > histories
    assert ended > 2.5 * histories


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_gap_ms", "longest"), [(None, 3.1), (100, 0.1), (400, 0.4)])
def test_l2_a_long_prompt_is_read_within_the_gap(max_gap_ms: float | None, longest: float) -> None:
    """Without a gap the step takes what its tokens take."""
    watch, now = Watch(), [0.0]

    class Timed(ToyRunner):
        def forward(self, step: Step) -> npt.NDArray[np.float32]:
            now[0] += 0.010 + 0.0015 * len(step.token_ids)
            return super().forward(step)

    engine = LLMEngine(Timed(1 << 13), sinks=[watch], clock=lambda: now[0], max_gap_ms=max_gap_ms)
    for text in (A, B):
        engine.add_request(text, SamplingParams.greedy(400, ignore_eos=True), request_id=text)
    for _ in range(20):
        engine.step()
    watch.steps.clear()
    engine.add_request("x" * 3000, SamplingParams.greedy(1), request_id="long")
    times = [now[0]]
    while not watch.steps or "long" in watch.steps[-1]:
        engine.step()
        times.append(now[0])
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    assert 0.65 * longest < gaps[-1] <= longest
    assert sum(step.get("long", 0) for step in watch.steps) == 3000
    engine.close()


# -- small things ------------------------------------------------------------------------------------------------------


def test_a_step_is_laid_out_flat() -> None:
    a, b = (Sequence(p, GREEDY, ByteTokenizer()) for p in ([1, 2, 3, 4, 5], [6, 7, 8]))
    a.blocks, b.blocks = [9, 4, 2], [7, 0]
    step = flatten([(a, 1, 3), (b, 2, 1)])
    assert (step.token_ids.tolist(), step.positions.tolist()) == ([2, 3, 4, 8], [1, 2, 3, 2])
    assert (step.past_lens.tolist(), step.begins.tolist()) == ([1, 2], [0, 3, 4])
    assert (step.blocks.tolist(), step.block_begins.tolist()) == ([9, 4, 2, 7, 0], [0, 3, 5])


@pytest.mark.parametrize(
    "field",
    ["max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold", "max_queue", "max_queued_tokens"],
)
def test_a_setting_out_of_range_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"EngineConfig\.{field}=-1: must be in \["):
        EngineConfig(**{field: -1})


def test_a_runner_needs_its_tokenizer_and_has_its_own_cache() -> None:
    class Other:
        forward = None

    with pytest.raises(ConfigError, match="tokenizer"):
        LLMEngine(Other())
    with pytest.raises(ConfigError, match="block_size"):
        LLMEngine(ToyRunner(), block_size=8)


def test_a_step_is_reported_before_it_runs_and_its_time_is_what_it_took() -> None:
    events: list[Event] = []
    times, seen = iter(range(1000)), list[type]()
    runner = ToyRunner()
    forward = runner.forward
    runner.forward = lambda step: (seen.append(type(events[-1])), forward(step))[1]  # type: ignore[method-assign]
    engine = LLMEngine(runner, sinks=[events.append], clock=lambda: float(next(times)))
    engine.add_request(A, GREEDY)
    engine.step()
    assert seen == [BatchScheduled]
    assert [event.elapsed for event in events if isinstance(event, BatchFinished)] == [1.0]


def test_a_cost_model_that_raises_fails_its_batch_and_the_engine_goes_on() -> None:
    engine, _ = watched()
    model = engine.scheduler.cost_model("default")
    learn, model.observe = model.observe, cannot_learn
    engine.add_request(A, GREEDY, request_id="first")
    (failed,) = engine.step()
    assert "could not be completed: ZeroDivisionError" in str(failed.error)
    model.observe = learn
    (output,) = engine.generate([A], GREEDY)
    assert output.error is None


def test_an_exception_of_a_sink_reaches_the_caller() -> None:
    def broken(event: Event) -> None:
        if isinstance(event, BatchScheduled):
            raise ValueError("a sink failed")

    engine = LLMEngine(sinks=[broken])
    engine.add_request(A, GREEDY)
    with pytest.raises(ValueError, match="a sink failed"):
        engine.step()


def test_close_settles_what_is_left() -> None:
    engine, watch = watched()
    engine.add_request(A, SamplingParams.greedy(50))
    engine.step()
    engine.close()
    assert (engine.unfinished, len(watch.tickets)) == (0, 1)
    assert engine.processor.pool.usage == 0.0
