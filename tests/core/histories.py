"""Random histories: a string of bytes becomes inputs, the scheduler and the oracle get the same ones, and everything
that can be seen from outside is compared after each. Times are multiples of 2⁻¹⁰ s, so sums of them are exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from reflex_runtime.core.batch import (
    Apart,
    Batch,
    BatchFinished,
    Done,
    Failed,
    More,
    Outcome,
    RequestPreempted,
    RequestSettled,
)
from reflex_runtime.core.cost import CostModel, TimeCost, TokenCost, UnitCost
from reflex_runtime.core.errors import ProcessorError, ReflexError, Rejected
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Priority, Request, Ticket, TicketState
from reflex_runtime.core.scheduler import Scheduler

from .helpers import Cached, outcome_of
from .oracle import Expected, Oracle, Seconds, Seen, Tokens, Units, World

TICK = 2.0**-10


class ClientFault(Rejected):
    """What was sent cannot be prepared."""

    code = "client_fault"


class Dice:
    """Choices read from bytes: equal bytes, equal history; the end of the bytes ends the history."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def spent(self) -> bool:
        return self._at >= len(self._data)

    def roll(self, n: int) -> int:
        if self.spent:
            return 0
        self._at += 1
        return self._data[self._at - 1] % n

    def of(self, *choices: Any) -> Any:
        return choices[self.roll(len(choices))]


@dataclass(frozen=True)
class GroupSpec:
    """A group, as both sides are told of it."""

    flush: FlushPolicy
    meter: Callable[[], Units]
    cost: Callable[[], CostModel]
    name: str = "default"
    capacity: int = 1000
    cap: int = 0
    weight: float = 1.0
    latest_only: bool = False
    share_room: bool = False
    promote_after: float = 1.0
    pool: float | None = None
    there: float = 0.0  # units of a ticket that the pool knows already
    max_queued_units: float = inf
    max_queued_seconds: float = inf
    displace_background: bool = False
    tenant: str = ""

    def config(self) -> GroupConfig:
        return GroupConfig(
            name=self.name,
            flush=self.flush,
            capacity=self.capacity,
            max_in_flight_per_client=self.cap,
            weight=self.weight,
            tenant=self.tenant,
            latest_only=self.latest_only,
            share_room=self.share_room,
            promote_after=self.promote_after,
            cost=self.cost,
            resources=None if self.pool is None else Cached(self.pool, self.there),
            max_queued_units=self.max_queued_units,
            max_queued_seconds=self.max_queued_seconds,
            displace_background=self.displace_background,
        )

    def world(self) -> World:
        return World(
            self.name,
            self.flush,
            self.meter(),
            self.capacity,
            self.cap,
            self.weight,
            self.latest_only,
            self.share_room,
            self.promote_after,
            self.pool,
            self.there,
            self.max_queued_units,
            self.max_queued_seconds,
            self.displace_background,
            self.tenant,
        )


class Timeless(UnitCost):
    """Never learns how long batches take, as the oracle's."""

    def observe(self, batch: Batch, elapsed: float) -> None:
        pass


def counted(flush: FlushPolicy, **kw: Any) -> GroupSpec:
    return GroupSpec(flush, Units, Timeless, **kw)


def tokens(flush: FlushPolicy, threshold: float = inf, **kw: Any) -> GroupSpec:
    return GroupSpec(flush, lambda: Tokens(threshold), lambda: TokenCost(threshold), **kw)


class SharedTokens(TokenCost):
    """One whose steps have a fixed part that lasts as long as so many rows."""

    def __init__(self, fixed: float) -> None:
        super().__init__()
        self._fixed = fixed

    def shared(self, rows: int) -> float:
        return 2 * rows + self._fixed


def timed(flush: FlushPolicy, stages: tuple[str, ...] = ("",), **kw: Any) -> GroupSpec:
    return GroupSpec(flush, lambda: Seconds(stages=stages), lambda: TimeCost(stages), **kw)


@dataclass(frozen=True)
class Scenario:
    """What a history may contain."""

    groups: tuple[GroupSpec, ...]
    max_batches: int = 1
    partitions: int = 2
    clients: int = 3
    limits: tuple[float | None, ...] = (None, None, None, 4.0, 16.0, 40.0)  # ticks
    wants: tuple[float, ...] = (1.0,)
    stages: tuple[str, ...] = ("",)
    more: bool = False  # requests stay for several steps
    streams: bool = False
    holds: bool = False
    prepares: bool = False  # some are admitted before they are ready
    classes: int = 1
    shapes: bool = False  # every partition has its own
    device: Callable[[Batch], float] = field(default=lambda batch: 3 * TICK)


class Play:
    """One history."""

    def __init__(self, scenario: Scenario, data: bytes) -> None:
        self.scenario, self.dice = scenario, Dice(data)
        self.scheduler = Scheduler([g.config() for g in scenario.groups], scenario.max_batches)
        self.oracle = Oracle([g.world() for g in scenario.groups], scenario.max_batches)
        self.pairs: list[tuple[Ticket, Seen]] = []
        self.open: list[tuple[Ticket, Seen]] = []  # those that had not settled when they were last compared
        self.running: list[tuple[Batch, Expected]] = []
        self.log: list[str] = []
        self.causes: list[str] = []
        self.hard = bool(data) and data[0] >= 128  # how it is closed at the end
        self.now = 0.0
        self.ends: dict[int, int] = {}
        self.left: list[Ticket] = []
        self.refused = 0  # for their deadline

    def run(self) -> Play:
        moves = [self.submit] * 8 + [self.step] * 8 + [self.finish] * 6 + [self.advance] * 3 + [self.wake] * 4
        moves += [self.cancel] * 2 + [self.abandon, self.pause, self.room]
        if self.scenario.holds:
            moves += [self.hold, self.resume]
        if self.scenario.prepares:
            moves += [self.submit_unready] * 8 + [self.prepared] * 8
        while not self.dice.spent:
            moves[self.dice.roll(len(moves))]()
            self.compare()
        self.end()
        return self

    # -- moves -------------------------------------------------------------------------------------------------------

    def submit_unready(self) -> None:
        self.submit(ready=False)

    def prepared(self) -> None:
        """One that is prepared is ready, in another class perhaps, or is not to be had; mostly in another order."""
        unready = [p for p in self.pairs if p[1].state == "preparing"] or self.pairs
        if not unready:
            return
        ticket, seen = unready[self.dice.roll(len(unready))]
        made: Request | ReflexError = ClientFault("not a picture")
        if self.dice.roll(5):
            made = replace(
                seen.request, cost_class=self.dice.roll(self.scenario.classes), wants=self.dice.of(*self.scenario.wants)
            )
        self.scheduler.prepared(ticket, made, self.now)
        self.oracle.prepared(seen, made, self.now)
        assert ticket.seq == seen.seq

    def submit(self, ready: bool = True) -> None:
        dice, s = self.dice, self.scenario
        limit = dice.of(*s.limits)
        group, partition = dice.of(*[g.name for g in s.groups]), dice.roll(s.partitions)
        request = Request(
            group=group,
            partition=partition,
            shape=partition if s.shapes else "",
            client=dice.roll(s.clients),
            priority=dice.of(Priority.DEFAULT, Priority.DEFAULT, Priority.URGENT, Priority.BACKGROUND),
            time_limit=None
            if limit is None
            else limit * TICK + len(self.pairs) * 2.0**-40,  # no two deadlines are equal
            weight=dice.of(1.0, 1.0, 2.0),
            wants=dice.of(*s.wants),
            stage=s.stages[0],
            cost_class=dice.roll(s.classes),
            streams=s.streams and bool(dice.roll(2)),
        )
        try:
            ticket: Ticket | str = self.scheduler.submit(request, self.now, ready)
        except Rejected as error:
            ticket = error.code
        seen = self.oracle.submit(request, self.now, ready)
        if isinstance(ticket, str) or isinstance(seen, str):
            assert ticket == seen
            self.refused += seen == "deadline_unreachable"
            return
        self.pairs.append((ticket, seen))
        self.open.append((ticket, seen))
        assert ticket.seq == seen.seq

    def some(self) -> tuple[Ticket, Seen] | None:
        """A ticket, mostly one that has not settled."""
        pairs = [p for p in self.pairs if p[1].state != "settled"] or self.pairs
        return pairs[self.dice.roll(len(pairs))] if pairs else None

    def each(self, verb: str) -> None:
        pair = self.some()
        if pair is not None:
            getattr(self.scheduler, verb)(pair[0], self.now)
            getattr(self.oracle, verb)(pair[1], self.now)

    def cancel(self) -> None:
        self.each("cancel")

    def abandon(self) -> None:
        self.each("abandon")

    def hold(self) -> None:
        self.each("hold")

    def resume(self) -> None:
        self.each("resume")

    def place(self) -> tuple[str, Hashable]:
        return self.dice.of(*[g.name for g in self.scenario.groups]), self.dice.roll(self.scenario.partitions)

    def room(self) -> None:
        group, _ = self.place()
        n = self.dice.of(None, None, 0, 1, 2, 5)
        for side in (self.scheduler, self.oracle):
            side.set_room(group, n, self.now)  # type: ignore[attr-defined]

    def pause(self) -> None:
        group, partition = self.place()
        until = self.now + self.dice.of(-1, 1, 2, 5) * TICK
        for side in (self.scheduler, self.oracle):
            side.pause(group, until, self.now, partition if self.dice_bit else None)  # type: ignore[attr-defined]

    @property
    def dice_bit(self) -> bool:
        return len(self.pairs) % 2 == 0

    def advance(self) -> None:
        self.now += self.dice.roll(8) * TICK / 2

    def wake(self) -> None:
        """On to the time the scheduler asked for; on the way nothing is possible."""
        at = self.scheduler.wake_at()
        assert at == self.oracle.wake_at()
        if not self.now < at < inf:
            self.step()
            return
        if self.oracle.quiet:  # next_batch has said there is nothing before then
            for between in (self.now, (self.now + at) / 2):
                before = len(self.scheduler._events)
                assert self.formed(between) is None, "something became possible before wake_at()"
                assert len(self.scheduler._events) == before, "something happened before wake_at()"
                assert self.scheduler.wake_at() == at
                assert self.oracle.next_batch(between) is None
        pauses = dict(self.oracle.pauses)
        self.now = at
        batch = self.step()
        happened = self.oracle.settled or pauses != self.oracle.pauses or batch is not None
        assert happened, "nothing happened at wake_at()"

    def step(self) -> Batch | None:
        batch, expected = self.formed(self.now), self.oracle.next_batch(self.now)
        assert (batch is None) == (expected is None), f"{batch} instead of {expected}"
        if batch is None or expected is None:
            assert self.scheduler.wake_at() == self.oracle.wake_at()
            return None
        assert [(t.seq, u) for t, u in batch.grants.items()] == [(t.seq, u) for t, u in expected.grants]
        assert (batch.id, batch.group, batch.partition, batch.stage) == (
            expected.id,
            expected.group,
            expected.partition,
            expected.stage,
        )
        assert batch.cause.value == expected.cause
        assert batch.cost == expected.cost
        assert [t.seq for t in batch.admitted] == [t.seq for t in expected.admitted]
        assert sorted(t.seq for t in batch.left) == sorted(t.seq for t in expected.left)
        assert batch.short_of == expected.short_of
        assert {t.seq: u for t, u in batch.cached.items()} == {t.seq: u for t, u in expected.cached.items()}
        self.ceiling(batch)
        self.left += batch.left
        self.running.append((batch, expected))
        self.causes.append(batch.cause.value)
        self.log.append(f"{self.now} {batch.group} {batch.partition} {batch.stage} {batch.cause} {batch.cost!r} ")
        self.log[-1] += " ".join(f"{t.seq}:{u!r}" for t, u in batch.grants.items())
        return batch

    def ceiling(self, batch: Batch) -> None:
        group = next(g for g in self.scenario.groups if g.name == batch.group)
        assert len(batch) <= group.flush.max_batch_size
        unit = self.scheduler.cost_model(batch.group).unit
        if len(batch) > 1 and unit != "seconds":
            assert batch.cost <= group.flush.max_batch_cost

    def finish(self) -> None:
        if not self.running:
            return
        batch, expected = self.running.pop(self.dice.roll(len(self.running)))
        elapsed = self.scenario.device(batch)
        self.now += elapsed if len(self.running) == 0 else 0.0
        outcomes = self.answers(batch)
        self.scheduler.complete(batch, outcomes, elapsed, self.now)
        self.oracle.complete(expected, outcomes, elapsed, self.now)
        (finished,) = [e for e in self.scheduler._events if isinstance(e, BatchFinished) and e.batch is batch]
        assert (finished.crashed, finished.apart) == (expected.crashed, isinstance(outcomes[0], Apart))

    def answers(self, batch: Batch) -> list[Outcome]:
        fate = self.dice.roll(16)
        if fate == 1:
            return [Failed(ProcessorError("crash"))] * len(batch)
        if fate in (3, 4) or (batch.part is not None and fate < 10):
            error = ProcessorError("the call failed")
            return [Apart(error) if len(batch) > 1 else Failed(error)] * len(batch)
        outcomes = [self.answer(ticket, units) for ticket, units in batch.grants.items()]
        if fate == 2:
            outcomes[self.dice.roll(len(outcomes))] = Failed(ProcessorError("bad item"))
        return outcomes

    def answer(self, ticket: Ticket, units: float) -> Outcome:
        if not self.scenario.more:
            return Done()
        stages = self.scenario.stages
        if len(stages) > 1:
            if ticket.stage == stages[0]:
                return More(None, max(1.0, ticket.wants - 1.0), stages[1])
            return More(None, ticket.wants - 1.0) if ticket.wants > 1.0 else Done()
        outputs = self.ends.setdefault(ticket.seq, 1 + self.dice.roll(5))
        if ticket.computed + units >= ticket.request.wants + outputs - 1:
            return Done()
        return More(None, ticket.wants - units) if ticket.wants > units else More("token", 1.0)

    # -- slices ------------------------------------------------------------------------------------------------------

    def formed(self, now: float) -> Batch | None:
        """What `next_batch` says once all has left that must; the oracle lets it go at once."""
        batch = self.scheduler.next_batch(now)
        while batch is None and self.scheduler.behind:
            batch = self.scheduler.next_batch(now)
        self.catch_up(now)
        return batch

    def catch_up(self, now: float) -> None:
        while self.scheduler.behind:
            assert self.scheduler.wake_at() <= now
            self.scheduler.expire(now)

    # -- comparing ---------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        if self.scheduler.decision_current and not self.oracle.quiet:  # it says that the last arrival changed nothing
            self.scheduler.expire(self.now)
            self.catch_up(self.now)
            assert self.oracle.next_batch(self.now) is None
        events = self.scheduler.take_events()
        settled = sorted((e.ticket.seq, outcome_of(e.ticket)) for e in events if isinstance(e, RequestSettled))
        assert settled == sorted(self.oracle.settled)
        assert [e.ticket.seq for e in events if isinstance(e, RequestPreempted)] == self.oracle.preempted
        self.oracle.settled.clear()
        self.oracle.preempted.clear()
        for ticket, seen in self.open:
            assert ticket.state.value == seen.state
            assert ticket.tier == seen.tier
        self.open = [pair for pair in self.open if pair[1].state != "settled"]
        assert self.scheduler.wake_at() == self.oracle.wake_at()
        for world in self.oracle.worlds.values():  # after every move: what the oracle has is listed once
            group = self.scheduler._groups[world.name]
            unsettled = self.oracle.unsettled(world.name)
            active = {t.client for t in unsettled}
            assert len(group.clients) == len(active)
            for c in active:
                assert group.clients._known[c].counter == world.counters[c]
            assert group.counter == world.device_time
            preparing = [t for t in self.oracle.preparing if t.request.group == world.name]
            queued = [t for t in unsettled if t.state == "waiting"] + preparing
            assert group.queued == len(queued)
            assert group.queued_units == sum([t.wants for t in queued])
            assert group.unsettled == len(unsettled) + len(preparing)
            if preparing or group.preparing:
                assert {c: len(ts) for c, ts in group.preparing.items()} == Counter(t.client for t in preparing)
            if world.pool is not None:
                assert group.config.resources.used == self.oracle.used() <= world.pool  # type: ignore[union-attr]

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Everything is let go, drained and settled once."""
        if self.hard:
            self.close(drain=False)
            self.compare()
        for group in self.scenario.groups:
            for partition in range(self.scenario.partitions):
                for side in (self.scheduler, self.oracle):
                    side.set_room(group.name, None, self.now)  # type: ignore[attr-defined]
                    side.pause(group.name, -inf, self.now, partition)  # type: ignore[attr-defined]
                    side.pause(group.name, -inf, self.now)  # type: ignore[attr-defined]
        for ticket, seen in self.pairs:
            self.scheduler.resume(ticket, self.now)
            self.oracle.resume(seen, self.now)
            self.scheduler.prepared(ticket, seen.request, self.now)
            self.oracle.prepared(seen, seen.request, self.now)
        self.close(drain=not self.scheduler._closed)
        for _ in range(20_000):
            if self.scheduler.idle:
                break
            if self.step() is None and not self.running and not self.scheduler.idle:
                self.now = self.scheduler.wake_at()
                assert self.now < inf, "stuck"
            self.finish()
            self.compare()
        assert self.scheduler.idle, "does not end"
        for ticket, seen in self.pairs:
            assert ticket.state is TicketState.SETTLED
            assert (ticket.granted, ticket.recomputed) == (seen.granted, seen.recomputed)
            assert ticket.granted - ticket.recomputed >= ticket.computed - ticket.cached

    def close(self, drain: bool) -> None:
        while self.scheduler.close(self.now, drain):
            pass
        self.oracle.close(self.now, drain)


STEPS = FlushPolicy.every_step(8, 4)

SCENARIOS: dict[str, Scenario] = {
    "greedy": Scenario((counted(FlushPolicy(max_batch_size=3)),)),
    "by_size": Scenario((counted(FlushPolicy.by_size(3, 6 * TICK)),)),
    "returns": Scenario(
        (timed(FlushPolicy(max_batch_size=4, returns=20 * TICK)),),
        clients=5,
        limits=(None, None, None, None, None, 90.0),
        device=lambda b: (9 + len(b)) * TICK,
    ),
    "returns_one_partition": Scenario(
        (timed(FlushPolicy(max_batch_cost=13 * TICK, returns=20 * TICK), share_room=True, cap=1),),
        clients=5,
        partitions=1,
        limits=(None,),
        device=lambda b: (9 + len(b)) * TICK,
    ),
    "returns_several": Scenario(
        (timed(FlushPolicy(max_batch_size=3, returns=12 * TICK)),),
        max_batches=2,
        clients=4,
        partitions=1,
        device=lambda b: (9 + len(b)) * TICK,
    ),
    "by_size_several": Scenario((counted(FlushPolicy.by_size(2, 6 * TICK)),), max_batches=3),
    "by_priority": Scenario(
        (counted(FlushPolicy(max_batch_size=4, hold_max=(0.0, 4 * TICK, 6 * TICK)), promote_after=6 * TICK),)
    ),
    "by_priority_several": Scenario(
        (
            counted(
                FlushPolicy(max_batch_size=5, hold_max=(0.0, 5 * TICK, 7 * TICK)),
                promote_after=9 * TICK,
                capacity=5,
                displace_background=True,
            ),
        ),
        max_batches=3,
        clients=4,
    ),
    "promotion": Scenario((counted(FlushPolicy(max_batch_size=2), promote_after=3 * TICK),), clients=2, partitions=1),
    "by_cost": Scenario(
        (timed(FlushPolicy.by_cost(12 * TICK, 5 * TICK)),),
        classes=2,
        device=lambda b: (2 + sum(1 + 2 * t.request.cost_class for t in b.grants)) * TICK,
    ),
    "learned": Scenario(
        (timed(FlushPolicy(max_batch_cost=12 * TICK, max_batch_size=5)),),
        classes=2,
        limits=(None, None, 30.0, 60.0, 90.0),
        device=lambda b: (2 + sum(1 + 4 * t.request.cost_class for t in b.grants)) * TICK,
    ),
    "learned_several": Scenario(
        (timed(FlushPolicy(max_batch_cost=12 * TICK, max_batch_size=3)),),
        max_batches=2,
        limits=(None, 30.0, 60.0),
        device=lambda b: (2 + len(b)) * TICK,
    ),
    "refused": Scenario(  # spells of slowness, and limits near what one alone takes
        (timed(FlushPolicy(max_batch_cost=2000 * TICK, max_batch_size=3)),),
        max_batches=2,
        limits=(None, 200.0, 200.0, 200.0, 300.0, 300.0, 500.0, 1000.0),
        classes=2,
        shapes=True,
        device=lambda b: (
            (20 + sum(20 + 60 * t.request.cost_class for t in b.grants)) * TICK * (13 if b.id % 20 < 14 else 1)
        ),
    ),
    "caps": Scenario((counted(FlushPolicy(max_batch_size=2), capacity=4, cap=2),)),
    "share_room": Scenario((counted(FlushPolicy(max_batch_size=2), capacity=5, share_room=True),), clients=4),
    "share_room_caps": Scenario((counted(FlushPolicy(max_batch_size=2), capacity=4, share_room=True, cap=3),)),
    "displace": Scenario(
        (
            counted(
                FlushPolicy(max_batch_size=2),
                capacity=4,
                share_room=True,
                displace_background=True,
                promote_after=6 * TICK,
            ),
        ),
        clients=4,
    ),
    "displace_latest_only": Scenario(
        (counted(FlushPolicy(max_batch_size=2), capacity=3, latest_only=True, displace_background=True, cap=2),),
        clients=5,
    ),
    "prepares": Scenario((counted(FlushPolicy(max_batch_size=3), capacity=5, cap=3),), prepares=True, clients=4),
    "prepares_latest_only": Scenario(
        (counted(FlushPolicy(max_batch_size=2), capacity=4, latest_only=True, displace_background=True),), prepares=True
    ),
    "prepares_timed": Scenario(
        (
            timed(FlushPolicy(max_batch_cost=12 * TICK), name="a"),
            tokens(STEPS, max_queued_units=12.0, capacity=5, share_room=True, name="b"),
            counted(FlushPolicy(max_batch_size=1), name="shadow", weight=0.0),
        ),
        wants=(1.0,),
        classes=2,
        prepares=True,
        device=lambda b: (1 + len(b)) * TICK,
    ),
    "latest_only": Scenario((counted(FlushPolicy(max_batch_size=2), capacity=3, latest_only=True, cap=1),)),
    "tokens": Scenario((tokens(STEPS),), wants=(1.0, 3.0, 7.0, 12.0), more=True, streams=True, holds=True),
    "tokens_threshold_several": Scenario(
        (tokens(STEPS, 4.0),), max_batches=2, wants=(1.0, 3.0, 12.0), more=True, streams=True, holds=True
    ),
    "memory": Scenario(
        (tokens(STEPS, pool=16.0, promote_after=8 * TICK),),
        wants=(1.0, 3.0, 7.0, 10.0),
        more=True,
        holds=True,
        partitions=1,
    ),
    "memory_of_many": Scenario(  # places are what is short
        (tokens(FlushPolicy.every_step(8, 2), pool=200.0, promote_after=30 * TICK),),
        wants=(1.0, 2.0, 7.0, 12.0),
        limits=(None, None, None, 40.0),
        more=True,
        holds=True,
        partitions=1,
    ),
    "memory_several": Scenario(
        (tokens(FlushPolicy.every_step(6, 3), 4.0, pool=24.0, promote_after=8 * TICK),),
        max_batches=2,
        wants=(1.0, 3.0, 7.0),
        more=True,
        streams=True,
        holds=True,
    ),
    "memory_cached": Scenario(
        (tokens(STEPS, pool=14.0, there=2.0, max_queued_units=25.0),),
        clients=4,
        wants=(1.0, 3.0, 7.0, 10.0),
        more=True,
        partitions=1,
    ),
    "memory_shared": Scenario(  # steps are
        (
            GroupSpec(
                FlushPolicy.every_step(20, 12),
                lambda: Tokens(free=1.5),
                lambda: SharedTokens(1.5),
                pool=60.0,
                promote_after=8 * TICK,
            ),
        ),
        clients=3,
        wants=(1.0, 1.0, 2.0, 5.0),
        more=True,
        holds=True,
        partitions=1,
    ),
    "memory_shared_several": Scenario(
        (GroupSpec(FlushPolicy.every_step(20, 6), lambda: Tokens(free=-2.5), lambda: SharedTokens(-2.5), pool=30.0),),
        max_batches=2,
        clients=2,
        wants=(1.0, 1.0, 3.0),
        more=True,
    ),
    "queued_units": Scenario(
        (tokens(STEPS, max_queued_units=12.0, capacity=5, share_room=True),), wants=(1.0, 3.0, 20.0), more=True
    ),
    "queued_units_latest_only": Scenario(
        (tokens(STEPS, max_queued_units=8.0, latest_only=True),), wants=(1.0, 3.0, 5.0), more=True
    ),
    "queued_seconds": Scenario(
        (timed(FlushPolicy(max_batch_cost=12 * TICK, max_batch_size=3), max_queued_seconds=9 * TICK),),
        clients=4,
        classes=2,
        limits=(None, None, 60.0),
        device=lambda b: (2 + sum(1 + 4 * t.request.cost_class for t in b.grants)) * TICK,
    ),
    "queued_seconds_latest_only": Scenario(
        (timed(FlushPolicy(max_batch_cost=12 * TICK), max_queued_seconds=4 * TICK, latest_only=True, capacity=4),),
        clients=6,
        prepares=True,
        device=lambda b: (2 + 2 * len(b)) * TICK,
    ),
    "queued_seconds_stages": Scenario(
        (timed(FlushPolicy.every_step(1, 4), ("prefix", "denoise"), max_queued_seconds=40 * TICK),),
        wants=(3.0, 4.0, 6.0),
        stages=("prefix", "denoise"),
        more=True,
        device=lambda b: (2 + len(b) / 2 if b.stage == "prefix" else 3 + len(b) / 4) * TICK,
    ),
    "stages": Scenario(
        (timed(FlushPolicy.every_step(1, 4), ("prefix", "denoise")),),
        wants=(3.0, 4.0, 6.0),
        stages=("prefix", "denoise"),
        more=True,
        limits=(None, None, 60.0, 100.0),
        device=lambda b: (2 + len(b) / 2 if b.stage == "prefix" else 3 + len(b) / 4) * TICK,
    ),
    "stages_memory": Scenario(
        (counted(FlushPolicy.every_step(8, 4), pool=9.0),),
        wants=(3.0, 4.0, 6.0),
        stages=("prefix", "denoise"),
        more=True,
        holds=True,
        partitions=1,
    ),
    "groups": Scenario(
        (
            counted(FlushPolicy(max_batch_size=2), name="a", weight=2.0),
            counted(FlushPolicy.by_size(2, 4 * TICK), name="b", weight=1.0, capacity=5),
            counted(FlushPolicy(max_batch_size=1), name="shadow", weight=0.0),
        ),
        device=lambda b: (1 + len(b)) * TICK,
    ),
    "tenants": Scenario(
        (
            timed(FlushPolicy(max_batch_cost=12 * TICK), name="arm.a", weight=2.0, tenant="arm"),
            timed(FlushPolicy(max_batch_size=2), name="arm.b", weight=2.0, tenant="arm"),
            counted(FlushPolicy.by_size(2, 4 * TICK), name="hand", capacity=5),
            counted(FlushPolicy(max_batch_size=1), name="arm.shadow", weight=0.0),
            counted(FlushPolicy(max_batch_size=1), name="hand.shadow", weight=0.0),
        ),
        partitions=1,
        device=lambda b: (1 + len(b)) * TICK,
    ),
    "groups_several": Scenario(
        (
            timed(FlushPolicy(max_batch_cost=12 * TICK), name="a"),
            counted(FlushPolicy(max_batch_size=1), name="shadow", weight=0.0),
        ),
        max_batches=2,
        device=lambda b: (1 + len(b)) * TICK,
    ),
}
