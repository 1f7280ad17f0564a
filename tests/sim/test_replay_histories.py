"""Random histories of a device, recorded and replayed: requests that are ready later, are cancelled, or expire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from reflex_runtime.core.batch import Batch, Done, Failed, More, RequestAnswered, RequestSettled
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.errors import Rejected
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.observe.journal import Journal, read_journal
from reflex_runtime.observe.journal_writer import JournalWriter, Recording, RequestRecord
from sim.measured import replay_measured

TURNS = 12  # requests of each client


class Virtual:
    """A scheduler driven as `Device` drives one, on a clock that jumps; each look at the clock takes a little."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.random = Random(seed)
        self.now = self.random.uniform(0.0, 1e5)
        flush = replace(FlushPolicy.window(0.1), max_batch_size=self.random.choice((2, 3, 256)))
        flush = replace(flush, max_batch_cost=self.random.choice((0.05, 0.1)))
        group = GroupConfig("prod", flush, cost=lambda: TimeCost(("prefix", "denoise"), True, ()))
        self.scheduler = Scheduler([group])
        to = Recording(directory, gzip=False, images="none")
        self.journal = JournalWriter(to, [group], header={"model_hash": "x"}, clock=lambda: self.now)
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.running: tuple[Batch, float] | None = None
        self.then: dict[Ticket, Callable[[], None]] = {}  # what a client does once it has its answer

    def clock(self) -> float:
        self.now += self.random.choice((1e-6, 3e-6, 1e-5))
        return self.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        heappush(self.due, (time, len(self.due) + self.scheduler.settled * 1000, action))

    def run(self) -> Journal:
        for client in range(self.random.randrange(2, 7)):
            self.at(self.now + self.random.uniform(0.0, 0.05), lambda client=client: self.ask(client, 0))
        while self.due:
            time, _, action = heappop(self.due)
            self.now = max(self.now, time)
            action()
        assert self.journal.close(60.0), self.journal.error
        assert self.journal.path is not None
        return read_journal(self.journal.path)

    def ask(self, client: int, turn: int) -> None:
        if turn == TURNS:
            return
        random = self.random
        hit, ready = random.random() < 0.5, random.random() < 0.3
        request = Request(
            id=f"{client}-{turn}",
            group="prod",
            client=f"c{client}",
            priority=Priority(random.choice((0, 1, 1, 1))),
            time_limit=random.choice((None, None, 0.05, 0.15, 0.02)) if client % 2 else None,
            shape=("s",),
            cost_class="hit" if hit else "miss",
            stage="denoise" if hit else "prefix",
            wants=5.0 if hit else random.choice((3.0, 6.0)),
        )

        def again() -> None:
            pause = random.choice((0.0, 0.0005, random.uniform(0.0, 0.03)))
            self.at(self.now + pause, lambda: self.ask(client, turn + 1))

        try:
            ticket = self.scheduler.submit(request, self.clock(), ready)
        except Rejected as error:
            self.answered(request.id, error, None)
            again()
        else:
            self.then[ticket] = again
            if not ready:
                self.at(self.now + random.uniform(0.0, 0.02), lambda: self.prepared(ticket, request))
            if random.random() < 0.15:
                self.at(self.now + random.uniform(0.0, 0.08), lambda: self.cancel(ticket))
            if ticket.deadline < inf:
                self.at(ticket.deadline + random.choice((0.0, 1e-4, 2e-3)), self.expire)
        self.look()

    def prepared(self, ticket: Ticket, request: Request) -> None:
        self.scheduler.prepared(ticket, request, self.clock())
        self.look()

    def cancel(self, ticket: Ticket) -> None:
        self.scheduler.cancel(ticket, self.clock())
        self.look()

    def expire(self) -> None:
        if self.running is not None:
            self.scheduler.expire(self.clock())
        self.tell()

    def look(self) -> None:
        if self.running is None:
            self.next(self.clock())
        self.tell()

    def next(self, now: float) -> None:
        batch = self.scheduler.next_batch(now)
        if batch is not None:
            self.running = batch, self.clock()
            self.at(self.now + 0.02 + 0.001 * len(batch) + self.random.uniform(0.0, 0.004), self.finish)
        elif (wake := self.scheduler.wake_at()) < inf:
            self.at(max(wake, self.now) + self.random.choice((0.0, 1e-4)), self.look)

    def finish(self) -> None:
        assert self.running is not None
        (batch, since), self.running, now = self.running, None, self.clock()
        left = [ticket.wants - units for ticket, units in batch.grants.items()]
        outcomes = [More(wants=wants, stage="denoise") if wants > 1e-9 else Done() for wants in left]
        self.scheduler.complete(batch, outcomes, now - since, now)
        self.next(now)
        self.tell()

    def tell(self) -> None:
        """Hand the journal the events, and let those go on who have their answers."""
        for event in self.scheduler.take_events():
            self.journal(event)
            if isinstance(event, RequestSettled):
                outcome = event.ticket.outcome
                error = outcome.error if isinstance(outcome, Failed) else None
                self.answered(event.ticket.request.id, error, event.ticket)
                self.then.pop(event.ticket)()

    def answered(self, name: str, error: Any, ticket: Ticket | None) -> None:
        detail = RequestRecord(request_id=name)
        outcome = "ok" if error is None else error.outcome
        self.journal(RequestAnswered(self.now, "prod", outcome, 200, 0.0, ticket, detail))


def test_t6_requests_that_are_ready_later_are_replayed_in_the_same_batches(tmp_path: Path) -> None:
    seen: set[str] = set()
    near = 0
    for seed in (*range(30), 142, 146, 297, 570):
        recording = Virtual(seed, tmp_path / str(seed)).run()
        seen |= {line.outcome for line in recording.requests}
        replay = replay_measured(recording)
        assert (replay.same, replay.early) == (len(recording.batches), 0), seed
        assert replay.same_cause == replay.same, seed
        for batch in recording.batches:
            batch.looked.clear()
        near += replay_measured(recording) != replay
    assert seen >= {"ok", "cancelled", "expired", "shed", "rejected"}
    assert near > 0, "when a free device looked, and held, is recorded because it matters"
