"""Two ways to walk that must decide the same: queues sorted once or taken off the heap."""

from __future__ import annotations

import random

import pytest

from core.helpers import scheduler_of
from reflex_runtime.core import order
from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import Rejected
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Priority, Request, Ticket


def history(seed: int) -> list[list[int]]:
    """The batches of one random history, by order of arrival."""
    rng = random.Random(seed)
    scheduler = scheduler_of(flush=FlushPolicy.window(0.4, 0.0, 12), promote_after=0.2)
    now, batches = 0.0, []
    waiting: list[Ticket] = []
    for _ in range(400):
        now += rng.choice((0.0, 0.001, 0.02))
        roll = rng.random()
        if roll < 0.75:
            request = Request(
                client=rng.randrange(6),
                priority=rng.choice(list(Priority)),
                weight=rng.choice((1.0, 2.0)),
                cost_class=rng.choice("xy"),
                time_limit=rng.choice((None, None, 0.3, 2.0)),
            )
            try:
                waiting.append(scheduler.submit(request, now))
            except Rejected:
                continue
        elif roll < 0.85 and waiting:
            scheduler.cancel(waiting.pop(rng.randrange(len(waiting))), now)
        elif (batch := scheduler.next_batch(now)) is not None:
            batches.append([ticket.seq for ticket in batch.grants])
            elapsed = 0.020 + 0.010 * len(batch)
            now += elapsed
            scheduler.complete(batch, [Done()] * len(batch), elapsed, now)
    return batches


@pytest.mark.parametrize("seed", range(20))
def test_sorted_once_or_off_the_heap_is_the_same_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lined_up = history(seed)
    monkeypatch.setattr(order, "SORTED", 0)
    assert history(seed) == lined_up
    assert sum(map(len, lined_up)) > 50
