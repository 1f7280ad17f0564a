"""One engine of vLLM in a process of its own: `python engine.py MODEL SCHEDULER TRACE` prints what came of it.

SCHEDULER: a class by name, or `stock`. Steps are counted, not seconds: a busy machine changes nothing.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.token_budget import TimedTokens

PLACES, TOKENS = 8, 64


def engine_of(model: str, scheduler: str, reflex: dict[str, Any] | None = None, **options: Any) -> Any:
    """An engine in this process, so that its scheduler can be looked at."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    from vllm import EngineArgs, LLMEngine

    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": PLACES,
        "max_num_batched_tokens": TOKENS,
        "disable_log_stats": True,
    }
    if scheduler != "stock":
        arguments |= {"scheduler_cls": scheduler, "additional_config": {"reflex": reflex or {}}}
    return LLMEngine.from_engine_args(EngineArgs(model=model, **(arguments | options)))


def scheduler_of(engine: Any) -> Any:
    return engine.engine_core.engine_core.scheduler


class Run:
    """Requests of an engine, by steps."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.steps = 0
        self.first: dict[str, int] = {}  # request → step of its first token
        self.done: dict[str, Any] = {}

    def add(self, name: str, prompt: list[int], tokens: int, priority: int = 0, **told: Any) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=told or None
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params, priority=priority)

    def step(self) -> None:
        self.steps += 1
        for output in self.engine.step():
            told = output.outputs[0]
            if told.token_ids:
                self.first.setdefault(output.request_id, self.steps)
            if output.finished:
                self.done[output.request_id] = told

    def run(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def greedy(self, tokens: int) -> dict[str, list[int]]:
        """64 requests longer than a step, of eight clients; every second one begins as one before it did."""
        shared = prompt(150, 7)
        for i in range(64):
            ids = shared[: 4 * i] + prompt(40 + 2 * i, i) if i % 2 else prompt(30 + 3 * i, i)
            self.add(f"greedy-{i}", ids[:220], tokens, client=f"c{i % 8}")
        self.run()
        return {name: list(done.token_ids) for name, done in self.done.items()}

    def light_beside_heavy(self) -> int:
        """Steps until both requests of a light client have their first token, behind 16 of a heavy one."""
        for i in range(16):
            self.add(f"heavy-{i}", prompt(6, 100 + i), 8 * (i + 1) if i < PLACES else 40, client="heavy")
        for _ in range(4):
            self.step()
        began = self.steps
        for i in range(2):
            self.add(f"light-{i}", prompt(6, 200 + i), 4, client="light")
        self.run()
        return max(self.first["light-0"], self.first["light-1"]) - began

    def late(self) -> list[Any]:
        """What becomes of a request whose deadline has passed, behind full places, and of one that came in time."""
        for i in range(PLACES):
            self.add(f"full-{i}", prompt(6, 300 + i), 20, client="full")
        self.step()
        self.add("late", prompt(6, 400), 4, client="late", deadline_ms=0)
        self.add("in-time", prompt(6, 401), 4, client="in-time", deadline_ms=600_000)
        self.run()
        late = self.done["late"]
        return [late.finish_reason, late.stop_reason, len(late.token_ids), len(self.done["in-time"].token_ids)]

    def aborted(self) -> int:
        """A request that its caller leaves while it runs, and one while it waits; the others are answered."""
        for i in range(PLACES + 4):
            self.add(f"left-{i}", prompt(100, 500 + i), 6, priority=i % 3, client=f"c{i % 3}")
        for _ in range(3):
            self.step()
        self.engine.abort_request(["left-0", f"left-{PLACES + 3}"])
        self.run()
        return sum(f"left-{i}" in self.done for i in range(PLACES + 4))

    def promised(self) -> list[list[int]]:
        """Tokens of each member, step by step, while a prompt of 200 tokens is read beside four sequences. A token of a
        prompt takes 5 ms, and a gap of 100 ms is promised."""
        scheduler = scheduler_of(self.engine)
        scheduler.model = learnt_times()
        for i in range(4):
            self.add(f"row-{i}", prompt(6, 600 + i), 60, max_gap_ms=100)
        for _ in range(20):
            self.step()
        seen: list[list[int]] = []
        inner = scheduler.schedule

        def watched(*args: Any) -> Any:
            output = inner(*args)
            if any(name.startswith("long") for name in output.num_scheduled_tokens):
                seen.append(sorted(output.num_scheduled_tokens.values()))
            return output

        scheduler.schedule = watched
        self.add("long", prompt(200, 700), 1)
        self.run()
        scheduler.schedule = inner
        return seen

    def hopeless(self) -> list[Any]:
        """How two requests end whose prompts take a minute: one has less time than that, the other has enough."""
        scheduler_of(self.engine).model = learnt_times(60.0)
        self.add("beside", prompt(6, 701), 60)
        for _ in range(5):
            self.step()
        self.add("hopeless", prompt(200, 702), 1, deadline_ms=55_000)
        self.step()
        self.add("possible", prompt(200, 703), 1, deadline_ms=600_000)
        self.run()
        return [self.done[name].stop_reason or self.done[name].finish_reason for name in ("hopeless", "possible")]

    def full(self) -> dict[str, list[Any]]:
        """How requests end while a second of work may wait: a greedy client's, and two of another that come later."""
        scheduler_of(self.engine).model = learnt_times()
        for i in range(40):
            self.add(f"greedy-client-{i}", prompt(60, 800 + i), 10, client="greedy")
        for i in range(2):
            self.add(f"modest-{i}", prompt(6, 900 + i), 10, client="modest")
        self.run()
        return {name: [done.finish_reason, done.stop_reason] for name, done in self.done.items()}


def learnt_times(slower: float = 1.0) -> TimedTokens:
    """10 ms, 1 ms for each sequence that runs, 5 ms for each token of a prompt; nothing is learnt any more. slower: so
    many times those."""
    model = TimedTokens()
    for i in range(60):
        tickets = [Ticket(Request(wants=300.0), n, 0.0) for n in range(1 + i % 5)]
        for ticket in tickets:
            ticket.computed = 8.0
        grants = dict.fromkeys(tickets, 1.0) | {Ticket(Request(wants=300.0), 9, 0.0): float(i % 7 * 4)}
        elapsed = 0.010 + 0.001 * len(tickets) + 0.005 * (i % 7 * 4)
        model.observe(Batch(i, "", "", "", Cause.STEP, 0.0, 0.0, 0.0, grants), slower * elapsed)
    model.observe = lambda *_: None  # type: ignore[method-assign]
    return model


def prompt(length: int, seed: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i * seed) % 250 for i in range(length)]


def main(model: str, scheduler: str, trace: str, options: str = "{}") -> None:
    if options == "promised":
        engine = engine_of(model, scheduler, {"trace": trace, "max_queue_s": 1.0})
        run = Run(engine)
        found: dict[str, Any] = {"promised": run.promised(), "hopeless": run.hopeless(), "full": Run(engine).full()}
        engine.engine_core.shutdown()
        print("FOUND " + json.dumps(found), flush=True)
        return
    run = Run(engine_of(model, scheduler, {"trace": trace}, **json.loads(options)))
    found = {"tokens": run.greedy(12 if options == "{}" else 40)}
    if options == "{}":
        found |= {"first": run.light_beside_heavy(), "late": run.late(), "answered": run.aborted()}
    run.engine.engine_core.shutdown()
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
