"""What a step bounded in time does to gaps, throughput and first tokens: the scheduler in virtual time.

Two models on two cores, by their step times; prompts of 16 to 4,000 tokens, outputs of 16 to 128. Nothing is measured
but decisions: each row is the same on every machine.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from bench.report import Row, row, say
from reflex_runtime.core.batch import Batch, Done, More, Outcome, RequestProgressed, RequestSettled
from reflex_runtime.core.cost import CostModel, TokenCost
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.core.statistics import percentile
from reflex_runtime.core.token_budget import TimedTokens

StepTimes = tuple[float, float, float, float]  # seconds: fixed, of a row, of a prompt token, of a pair
MODELS: dict[str, tuple[StepTimes, float, tuple[float | None, ...]]] = {
    "42 M": ((0.008, 0.0003, 0.0002, 0.15e-6), 0.05, (None, 3.0)),
    "0.5 B": ((0.080, 0.003, 0.0045, 1.5e-6), 0.5, (None, 0.15)),
}
REQUESTS, SEQUENCES, NOISE = 128, 64, 0.05


class Arrival(NamedTuple):
    """A prompt, and how many tokens are to be generated."""

    at: float
    name: str
    prompt: int
    outputs: int
    client: str
    priority: Priority = Priority.DEFAULT


class Endless:
    """Memory that is never short."""

    def fits(self, request: Request) -> bool:
        return True

    def begin(self, ticket: Ticket) -> float:
        return 0.0

    def reserve(self, ticket: Ticket, units: float) -> bool:
        return True

    def extend(self, ticket: Ticket, units: float, more: float) -> float:
        return more

    def would_fit(self, ticket: Ticket, units: float, released: Collection[Ticket]) -> bool:
        return True

    def commit(self, batch: Batch) -> None:
        return

    def rollback(self, batch: Batch) -> None:
        return

    def release(self, ticket: Ticket) -> None:
        return


def gaps(scale: float) -> list[Row]:
    """Rows of each model, load and way to bound a step."""
    rows = []
    for name, (times, promise, rates) in MODELS.items():
        ways: dict[str, tuple[int, Callable[[], CostModel]]] = {
            "2,048 tokens": (2048, TokenCost),
            "512 tokens": (512, TokenCost),
            "in time": (2048, TimedTokens),
            f"{1e3 * promise:g} ms promised": (2048, lambda promise=promise: TimedTokens(gap=promise)),  # type: ignore[misc]
        }
        for rate, (way, (budget, cost)) in itertools.product(rates, ways.items()):
            load = "all at once" if rate is None else f"{rate:g} requests/s"
            say(f"  {name}, {load}, {way}")
            rows += _run(f"{name}, {load}, {way}", times, budget, cost, rate, round(REQUESTS * scale))
    return rows


def _run(
    what: str, times: StepTimes, budget: int, cost: Callable[[], CostModel], rate: float | None, n: int
) -> list[Row]:
    chance = random.Random(3)
    todo, at = [], 0.0
    for i in range(n):
        at += 0.0 if rate is None else chance.expovariate(rate)
        prompt = round(math.exp(chance.uniform(math.log(16), math.log(4000))))
        todo.append(Arrival(at, f"{i}", prompt, chance.randint(16, 128), f"{i}"))
    came = {each.name: each.at for each in todo}
    tokens, now = play(todo, times, budget, cost, chance)
    between = sorted(b - a for one in tokens.values() for a, b in itertools.pairwise(one))
    first = sorted(one[0] - came[name] for name, one in tokens.items())
    computed = sum(each.prompt + each.outputs for each in todo)
    return [
        row("gaps", f"{what}: tokens/s", [computed / now], "/s"),
        row("gaps", f"{what}: gap p99", [1e3 * percentile(between, 0.99)], "ms"),
        row("gaps", f"{what}: first token p50", [percentile(first, 0.5)], "s"),
        row("gaps", f"{what}: first token p99", [percentile(first, 0.99)], "s"),
    ]


def play(
    todo: Sequence[Arrival],
    times: StepTimes,
    budget: int,
    cost: Callable[[], CostModel],
    chance: random.Random,
    until: float = math.inf,
) -> tuple[dict[str, list[float]], float]:
    """When each token of each answer came, and when the last step ended. todo: in order of time. until: no step begins
    after that."""
    flush = FlushPolicy.every_step(budget, SEQUENCES)
    scheduler = Scheduler([GroupConfig(flush=flush, cost=cost, resources=Endless(), capacity=len(todo))])
    total = {each.name: each.prompt + each.outputs - 1 for each in todo}
    tokens: dict[str, list[float]] = {name: [] for name in total}
    waiting, now = list(reversed(todo)), 0.0
    while now < until and (waiting or not scheduler.idle):
        while waiting and (waiting[-1].at <= now or scheduler.idle):
            one = waiting.pop()
            now = max(now, one.at)
            made = Request(id=one.name, client=one.client, wants=float(one.prompt), streams=True, priority=one.priority)
            scheduler.submit(made, now)
        batch = scheduler.next_batch(now)
        assert batch is not None
        seconds, outcomes = times[0], list[Outcome]()
        for ticket, units in batch.grants.items():
            done = ticket.computed + units
            seconds += times[1] if units == 1.0 and ticket.computed else times[2] * units
            seconds += times[3] * units * (ticket.computed + units / 2)
            left = ticket.wants - units
            ends = done >= total[ticket.id]
            outcomes.append(Done("last") if ends else More(None, left) if left else More("token", 1.0))
        seconds *= chance.lognormvariate(0.0, NOISE)
        now += seconds
        scheduler.complete(batch, outcomes, seconds, now)
        for event in scheduler.take_events():
            if isinstance(event, RequestSettled) or (isinstance(event, RequestProgressed) and event.value is not None):
                tokens[event.ticket.id].append(now)
    return tokens, now
