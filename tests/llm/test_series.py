"""Every series of the engine moves, and says what happened (contract L4, and B15's rule)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from reflex_runtime.core.batch import RequestSettled
from reflex_runtime.core.request import Priority
from reflex_runtime.core.token_budget import ExtraUnits
from reflex_runtime.llm import LLMEngine, SamplingParams
from reflex_runtime.llm.engine.processor import INVARIANTS, SHORT_OF, EngineSeries


class Metered:
    """An engine whose clock stands still unless a step passes: each takes one second."""

    def __init__(self, **config: Any) -> None:
        self.now = 0.0
        self.registry = CollectorRegistry()
        self.engine = LLMEngine(clock=lambda: self.now, **config)
        self.series = EngineSeries(
            self.engine.processor, lambda: self.engine.scheduler.queued("default"), self.registry
        )
        self.engine._sinks.append(self._take)

    def _take(self, event: Any) -> None:
        if type(event) in EngineSeries.events:
            self.series(event)

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.now += 1.0
            self.engine.step()

    def __getitem__(self, name: str) -> float:
        name, _, label = name.partition("/")
        key, _, value = label.partition("=")
        found = self.registry.get_sample_value(name, {key: value} if key else {})
        return float("nan") if found is None else found


def test_requests_running_and_waiting_and_why() -> None:
    m = Metered(max_num_seqs=2)
    for i in range(5):
        m.engine.add_request(f"prompt {i}", SamplingParams.greedy(3), client=i)
    assert (m["reflex_num_requests_waiting"], m["reflex_num_requests_running"]) == (5, 0)
    m.step()
    assert (m["reflex_num_requests_waiting"], m["reflex_num_requests_running"]) == (3, 2)
    by_reason = {reason: m[f"reflex_num_requests_waiting_by_reason/reason={reason}"] for reason in SHORT_OF}
    assert by_reason == dict.fromkeys(SHORT_OF, 0.0) | {"places": 3.0}
    m.step(20)
    assert (m["reflex_num_requests_waiting"], m["reflex_num_requests_running"]) == (0, 0)
    assert sum(m[f"reflex_num_requests_waiting_by_reason/reason={reason}"] for reason in SHORT_OF) == 0


def test_tokens_of_prompts_steps_and_outputs() -> None:
    m = Metered(max_num_batched_tokens=8)
    m.engine.add_request("hello world", SamplingParams.greedy(4, ignore_eos=True))
    m.engine.add_request("goodbye", SamplingParams.greedy(4, ignore_eos=True))
    m.step(6)
    assert m["reflex_prompt_tokens_total"] == 18
    assert m["reflex_generation_tokens_total"] == 8
    assert m["reflex_iteration_tokens_total_count"] == 6
    assert m["reflex_iteration_tokens_total_sum"] == 11 + 7 + 2 * (4 - 1)
    assert m["reflex_iteration_tokens_total_bucket/le=1.0"] == 1
    assert m["reflex_request_success_total/finished_reason=length"] == 2


def test_times_to_the_first_token_between_tokens_in_the_queue_and_in_all() -> None:
    m = Metered(max_num_seqs=1)
    m.engine.add_request("a", SamplingParams.greedy(3))
    m.engine.add_request("b", SamplingParams.greedy(1), client="b")
    m.step(4)
    assert m["reflex_time_to_first_token_seconds_sum"] == 1.0 + 4.0
    assert m["reflex_time_to_first_token_seconds_count"] == 2
    assert (m["reflex_inter_token_latency_seconds_sum"], m["reflex_inter_token_latency_seconds_count"]) == (2.0, 2)
    assert m["reflex_request_queue_time_seconds_sum"] == 1.0 + 4.0
    assert m["reflex_e2e_request_latency_seconds_sum"] == 3.0 + 4.0
    assert m["reflex_e2e_request_latency_seconds_count"] == 2


def test_prefix_cache_and_blocks() -> None:
    m = Metered(block_size=4, num_blocks=10)
    m.engine.add_request("abcdefghi", SamplingParams.greedy(1))
    m.step()
    assert (m["reflex_prefix_cache_queries_total"], m["reflex_prefix_cache_hits_total"]) == (9, 0)
    m.engine.add_request("abcdefghj", SamplingParams.greedy(2))
    m.step()
    assert (m["reflex_prefix_cache_queries_total"], m["reflex_prefix_cache_hits_total"]) == (18, 8)
    assert m["reflex_kv_cache_usage_perc"] == pytest.approx(0.3)
    m.step()
    assert m["reflex_kv_cache_usage_perc"] == 0.0


def test_guessed_tokens_and_those_that_were_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExtraUnits, "choose", lambda self, rows, asked, most, seconds: [min(3, len(asked[0]))])
    m = Metered(speculate="ngram")
    m.engine.add_request("abab", SamplingParams.greedy(30, ignore_eos=True, logit_bias=((97, 100.0),)))
    while m.engine.unfinished:
        m.step()
    assert m["reflex_generation_tokens_total"] == 30
    right, tried = (m[f"reflex_spec_decode_num_{kind}_tokens_total"] for kind in ("accepted", "draft"))
    assert 10 < right < tried
    assert (right, tried) == (m.engine.processor.accepted, m.engine.processor.drafted)
    assert m["reflex_iteration_tokens_total_sum"] == 4 + 29 + tried - right
    assert sum(m[f"reflex_invariant_violations_total/invariant={name}"] for name in INVARIANTS) == 0


def test_preemptions_do_not_disturb_what_is_known_of_a_request() -> None:
    m = Metered(block_size=1, num_blocks=9, enable_prefix_caching=False)
    m.engine.add_request("abc", SamplingParams.greedy(6), client="a")
    m.engine.add_request("xyz", SamplingParams.greedy(6), client="x", priority=Priority.BACKGROUND)
    m.step(20)
    assert m["reflex_num_preemptions_total"] >= 1
    assert m["reflex_time_to_first_token_seconds_count"] == 2
    assert m["reflex_request_queue_time_seconds_count"] == 2
    assert m["reflex_generation_tokens_total"] == 12
    assert m["reflex_inter_token_latency_seconds_count"] == 10
    assert m["reflex_prefix_cache_queries_total"] > 6
    assert m["reflex_num_requests_running"] == 0


def test_a_preempted_request_does_not_run_and_looks_up_all_it_knows_when_it_comes_back() -> None:
    m = Metered(block_size=1, num_blocks=9, enable_prefix_caching=False)
    m.engine.add_request("abc", SamplingParams.greedy(6), client="a")
    victim = m.engine.add_request("xyz", SamplingParams.greedy(6), client="x", priority=Priority.BACKGROUND)
    while not m["reflex_num_preemptions_total"]:
        m.step()
    assert (m["reflex_num_requests_running"], m["reflex_num_requests_waiting"]) == (1, 1)
    sequence = m.engine._tickets[victim][0].request.payload
    known = sequence.num_tokens
    assert known > 3
    while not sequence.blocks:
        m.step()
    assert m["reflex_prefix_cache_queries_total"] == 3 + 3 + known
    m = Metered(block_size=1, num_blocks=9, enable_prefix_caching=False)
    m.engine.add_request("abc", SamplingParams.greedy(6), client="a")
    victim = m.engine.add_request("xyz", SamplingParams.greedy(6), client="x", priority=Priority.BACKGROUND)
    while not m["reflex_num_preemptions_total"]:
        m.step()
    m.engine.abort(victim)
    assert m["reflex_num_requests_running"] == 1


def test_what_ends_without_an_answer_is_counted_by_its_code() -> None:
    m = Metered(max_num_seqs=1)
    names = [m.engine.add_request("abc", SamplingParams.greedy(9), client=i) for i in range(2)]
    m.step()
    for name in names:
        m.engine.abort(name)
    assert m["reflex_request_success_total/finished_reason=cancelled"] == 2
    assert m["reflex_num_requests_running"] == 0
    assert m["reflex_e2e_request_latency_seconds_count"] == 0


def test_l4_an_engine_that_is_right_violates_nothing_and_one_that_is_not_is_counted() -> None:
    m = Metered(max_num_batched_tokens=4)
    m.engine.add_request("hello", SamplingParams.greedy(3))
    tickets = [ticket for ticket, _ in m.engine._tickets.values()]
    m.step(4)
    violated = {name: m[f"reflex_invariant_violations_total/invariant={name}"] for name in INVARIANTS}
    assert violated == dict.fromkeys(INVARIANTS, 0.0)
    [ticket] = tickets
    ticket.granted += 1
    ticket.request.payload.blocks.append(3)
    m.series(RequestSettled(m.now, ticket))
    m.series._config = SimpleNamespace(max_num_batched_tokens=1)  # type: ignore[assignment]
    m.engine.add_request("hello", SamplingParams.greedy(1))
    m.step()
    assert {name: m[f"reflex_invariant_violations_total/invariant={name}"] for name in INVARIANTS} == {
        "conservation": 1.0, "blocks": 1.0, "budget": 1.0,
    }  # fmt: skip
