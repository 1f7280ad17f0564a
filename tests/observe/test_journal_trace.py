"""A journal without payloads, as --trace writes it: what the real scheduler did is read back exactly."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.batch import (
    Batch,
    BatchFinished,
    BatchScheduled,
    Cause,
    Done,
    Event,
    Failed,
    More,
    Outcome,
    RequestSettled,
)
from reflex_runtime.core.cost import TimeCost, TokenCost
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.observe import journal_writer
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.observe.journal_writer import JournalWriter
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.processor import FunctionProcessor

TOKENS = GroupConfig(name="llm", flush=FlushPolicy.every_step(8), cost=TokenCost)
ROBOTS = GroupConfig(name="prod", flush=FlushPolicy.by_cost(0.1, 0.0), cost=TimeCost)


def writer(path: Path, *groups: GroupConfig, capacity: int = 1024) -> JournalWriter:
    return JournalWriter(path, groups, capacity, clock=lambda: 0.0)


class Loop:
    """A device in virtual time: every batch takes 10 ms, every event goes to the sinks."""

    def __init__(self, config: GroupConfig, *sinks: Callable[[Event], None]) -> None:
        self.scheduler = Scheduler([config])
        self.group = config.name
        self.sinks = sinks
        self.now = 0.0

    def submit(self, **kw: Any) -> Ticket:
        return self.scheduler.submit(Request(group=self.group, **kw), self.now)

    def run(self, answer: Callable[[Ticket, float], Outcome], notes: dict[str, Any] | None = None) -> list[Batch]:
        ran = []
        while (batch := self.scheduler.next_batch(self.now)) is not None:
            self.now += 0.01
            batch.notes.update(notes or {})
            self.scheduler.complete(batch, [answer(t, u) for t, u in batch.grants.items()], 0.01, self.now)
            self.emit()
            ran.append(batch)
        return ran

    def emit(self) -> None:
        for event in self.scheduler.take_events():
            for sink in self.sinks:
                sink(event)


def run_of(n: int, trace: JournalWriter, **kw: Any) -> None:
    """n batches of one request each."""
    loop = Loop(ROBOTS, trace)
    for i in range(n):
        loop.submit(id=f"act_{i}", client="robot", **kw)
        loop.run(lambda t, u: Done())


class Toy:
    """Prompts of given lengths, `outputs` tokens each: what a token runner answers per grant."""

    def __init__(self, prompts: dict[str, int], outputs: int) -> None:
        self.left = dict(prompts)
        self.outputs = dict.fromkeys(prompts, outputs)

    def __call__(self, ticket: Ticket, units: float) -> Outcome:
        name = ticket.id
        if self.left[name] > 0:
            self.left[name] -= int(units)
            if self.left[name] > 0:
                return More(wants=self.left[name])
        self.outputs[name] -= 1
        return More("token", wants=1.0) if self.outputs[name] else Done("token")


# -- what was written is what happened ---------------------------------------------------------------------------------


def test_l3_the_token_schedule_reads_back_exactly(tmp_path: Path) -> None:
    with writer(tmp_path / "t.jsonl", TOKENS) as trace:
        loop = Loop(TOKENS, trace)
        loop.submit(id="A", wants=11)
        loop.submit(id="B", wants=7)
        loop.run(Toy({"A": 11, "B": 7}, outputs=4))
    read = read_journal(tmp_path / "t.jsonl")
    steps = [{m.id: m.units for m in b.members} for b in read.batches]
    assert steps == [{"A": 8}, {"A": 3, "B": 5}, {"A": 1, "B": 2}, {"A": 1, "B": 1}, {"A": 1, "B": 1}, {"B": 1}]
    assert [b.unit for b in read.batches] == ["tokens"] * 6
    assert [b.cost for b in read.batches] == [8, 8, 3, 2, 2, 1]
    assert [[m.id for m in b.entered] for b in read.batches] == [["A"], ["B"], [], [], [], []]
    assert [b.queued for b in read.batches] == [1, 0, 0, 0, 0, 0]
    assert [b.expected for b in read.batches] == [None] * 6
    ends = [(m.id, m.outcome) for b in read.batches for m in b.members if m.outcome != "more"]
    assert ends == [("A", "done"), ("B", "done")]
    assert [m.asked for b in read.batches for m in b.entered] == [11, 7]
    info = read.groups["llm"]
    assert (info.unit, info.budget) == ("tokens", 8)
    assert read.footer is not None
    assert (read.footer.batches, read.footer.dropped) == (6, 0)


def test_t2_every_value_of_a_batch_is_the_schedulers(tmp_path: Path) -> None:
    seen: list[tuple[Batch, float, int]] = []
    queued: dict[int, int] = {}

    def probe(event: Event) -> None:
        if isinstance(event, BatchScheduled):
            queued[event.batch.id] = event.queued
        elif isinstance(event, BatchFinished):
            seen.append((event.batch, event.elapsed, queued[event.batch.id]))

    with writer(tmp_path / "t.jsonl", ROBOTS) as trace:
        loop = Loop(ROBOTS, trace, probe)
        for i in range(12):
            loop.submit(id=f"act_{i}", client=f"robot_{i % 5}", partition=("pi", 224), shape="224")
            loop.now += 0.001
        loop.run(lambda t, u: Done(t.id), notes={"fanout": "sequential", "bisect_calls": 3})
    batches = read_journal(tmp_path / "t.jsonl").batches
    assert len(batches) == len(seen) > 3
    for read, (batch, elapsed, behind) in zip(batches, seen, strict=True):
        assert (read.id, read.group, read.partition, read.stage) == (batch.id, "prod", "('pi', 224)", "")
        assert (read.reason, read.cause) == (batch.reason.value, batch.cause.value)
        assert (read.at, read.finished) == (batch.scheduled_at, batch.scheduled_at + elapsed)
        assert (read.elapsed, read.queued, read.size, read.crashed) == (elapsed, behind, len(batch), False)
        assert read.cost == pytest.approx(batch.cost, abs=1e-6)
        assert (read.expected or 0.0) == pytest.approx(batch.predicted, abs=1e-6)
        assert (read.expected is None) == batch.guessed == (batch.id <= 3)
        assert read.unit == "seconds"
        assert read.notes == {"fanout": "sequential", "bisect_calls": 3}
        assert [(m.seq, m.id, m.client, m.units, m.outcome) for m in read.members] == [
            (t.seq, t.id, t.request.client, units, "done") for t, units in batch.grants.items()
        ]
        ages = [batch.scheduled_at - t.arrived for t in batch.grants]
        assert [m.age for m in read.members] == pytest.approx(ages, abs=1e-6)
        assert all(m.state == "waiting" for m in read.members)


def test_ids_that_repeat_or_are_empty_stay_apart(tmp_path: Path) -> None:
    with writer(tmp_path / "t.jsonl", ROBOTS) as trace:
        loop = Loop(ROBOTS, trace)
        for name in ("same", "same", "", ""):
            loop.submit(id=name, client=7)
        loop.run(lambda t, u: Done())
    members = [m for b in read_journal(tmp_path / "t.jsonl").batches for m in b.members]
    assert [(m.seq, m.id) for m in members] == [(0, "same"), (1, "same"), (2, ""), (3, "")]
    assert {m.client for m in members} == {"7"}


def test_outcomes_tell_how_each_member_fared(tmp_path: Path) -> None:
    """A member that leaves at the boundary after its step had the outcome `more`; the next batch names it as left."""
    config = GroupConfig(name="llm", flush=FlushPolicy.every_step(64), cost=TokenCost)
    with writer(tmp_path / "t.jsonl", config) as trace:
        loop = Loop(config, trace)
        tickets = [loop.submit(id=name, wants=4) for name in ("ends", "fails", "leaves", "quits", "stays")]
        batch = loop.scheduler.next_batch(0.0)
        assert batch is not None
        loop.scheduler.cancel(tickets[2], 0.0)  # running: leaves at the boundary
        loop.scheduler.cancel(tickets[3], 0.0)
        outcomes: list[Done | More | Failed] = [Done(), Failed(ProcessorError("bad")), More(), Done(), More()]
        loop.scheduler.complete(batch, outcomes, 0.01, 0.01)
        loop.run(lambda t, u: Failed(ValueError("not one of ours")))
    first, second = read_journal(tmp_path / "t.jsonl").batches
    assert [(m.id, m.outcome) for m in first.members] == [
        ("ends", "done"), ("fails", "failed"), ("leaves", "more"), ("quits", "cancelled"), ("stays", "more"),
    ]  # fmt: skip
    assert second.left == [tickets[2].seq]
    assert [(m.id, m.outcome, m.state) for m in second.members] == [("stays", "failed", "resident")]
    assert (first.crashed, second.crashed) == (False, True)


def test_outcomes_nobody_told_are_unknown(tmp_path: Path) -> None:
    with writer(tmp_path / "t.jsonl", ROBOTS) as trace:
        loop = Loop(ROBOTS, lambda e: None if isinstance(e, RequestSettled) else trace(e))
        loop.submit()
        loop.run(lambda t, u: Done())
    [batch] = read_journal(tmp_path / "t.jsonl").batches
    assert [m.outcome for m in batch.members] == [None]


def test_the_writer_keeps_no_payload(tmp_path: Path) -> None:
    class Payload:
        pass

    payload = Payload()
    gone = weakref.ref(payload)
    with writer(tmp_path / "t.jsonl", ROBOTS) as trace:
        # Without the outcomes the batch stays in the writer's hands.
        loop = Loop(ROBOTS, lambda e: None if isinstance(e, RequestSettled) else trace(e))
        loop.submit(payload=payload)
        loop.run(lambda t, u: Done())
        del payload, loop
        gc.collect()
        assert gone() is None


def test_a_file_without_groups_says_that_units_are_unknown(tmp_path: Path) -> None:
    with writer(tmp_path / "t.jsonl") as trace:
        run_of(1, trace)
    read = read_journal(tmp_path / "t.jsonl")
    assert read.groups == {}
    assert [b.unit for b in read.batches] == [None]


def test_what_json_cannot_say_does_not_end_the_trace(tmp_path: Path) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError("no name")

    with writer(tmp_path / "t.jsonl", ROBOTS) as trace:
        loop = Loop(ROBOTS, trace)
        loop.submit(id="lone \ud800", client="c\ud800", partition="p\ud800")
        loop.run(lambda t, u: Done(), notes={"odd": Odd()})
        loop.submit(id="next")
        batch = loop.scheduler.next_batch(loop.now)
        assert batch is not None
        batch.cost = float("inf")
        loop.scheduler.complete(batch, [Done()], 0.01, loop.now)
        loop.emit()
    assert trace.error is None
    first, second = read_journal(tmp_path / "t.jsonl").batches
    assert first.members[0].id == "lone \\ud800"
    assert first.notes == {"odd": "unwritable: ValueError: no name"}
    assert second.cost is None


def test_numbers_of_numpy_stay_numbers(tmp_path: Path) -> None:
    with writer(tmp_path / "t.jsonl", ROBOTS) as trace:
        loop = Loop(ROBOTS, trace)
        loop.submit(id="a", wants=np.float32(1.0))
        odd = {"share": np.float64(0.5), "count": np.int64(3), "held": np.bool_(True), "long": np.longdouble(2.0)}
        loop.run(lambda t, u: Done(), notes=odd)
    (batch,) = read_journal(tmp_path / "t.jsonl").batches
    assert batch.notes == {"share": 0.5, "count": 3, "held": True, "long": 2.0}
    assert batch.members[0].asked == 1.0


# -- the disk ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_remembered_and_touches_nobody() -> None:
    trace = writer(Path("/dev/full"), ROBOTS)
    run_of(50, trace)
    assert trace.close() is False
    assert trace.error is not None
    assert trace.error.strerror == os.strerror(28)  # ENOSPC
    run_of(1, trace)  # still harmless
    assert trace.dropped == 50


def test_batches_that_were_taken_back_before_they_ran_leave_nothing_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their numbers are missing."""
    monkeypatch.setattr(journal_writer, "KEPT", 4)
    trace = writer(tmp_path / "t.jsonl", ROBOTS)
    loop = Loop(ROBOTS, trace)
    for _ in range(20):
        loop.submit()
        loop.run(lambda t, u: Done())
        loop.scheduler._batches += 2
    assert len(trace._entered) == 4
    assert trace.close()


def test_a_path_that_cannot_be_opened_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the trace '.*/no/t\.jsonl': cannot be written: there is no"):
        JournalWriter(tmp_path / "no" / "t.jsonl")
    with pytest.raises(ConfigError, match=r"capacity=0: must be >= 1"):
        JournalWriter(tmp_path / "t.jsonl", capacity=0)


def test_batches_beyond_the_queue_are_dropped_and_counted(tmp_path: Path) -> None:
    """A pipe nobody reads from holds the writer's thread in its first write."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    trace = writer(pipe, ROBOTS, capacity=2)
    loop = Loop(ROBOTS, trace)
    for _ in range(20):
        loop.submit()
        loop.run(lambda t, u: Done(), notes={"weight": "x" * 300_000})  # more than is written at once
    assert trace.dropped >= 20 - 2 - 1  # two in the queue, one in the thread's hands
    out = bytearray()

    def drain() -> None:
        while chunk := os.read(reader, 1 << 16):
            out.extend(chunk)

    thread = threading.Thread(target=drain)
    thread.start()
    assert trace.close(timeout=10.0)
    thread.join(10.0)
    os.close(reader)
    lines = [json.loads(line) for line in out.splitlines()]
    footer = lines[-1]
    assert footer["dropped"] == trace.dropped
    assert footer["batches"] == len(lines) - 2 == 20 - trace.dropped


def test_a_batch_is_written_without_waiting_for_the_next(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    with writer(pipe, ROBOTS) as trace:
        run_of(1, trace)
        out = b""
        while out.count(b"\n") < 2:  # header and batch
            out += os.read(reader, 1 << 16)
    os.close(reader)
    assert json.loads(out.splitlines()[1])["members"][0]["outcome"] == "done"


def test_the_asyncio_driver_feeds_it(tmp_path: Path) -> None:
    async def serve() -> None:
        with JournalWriter(tmp_path / "t.jsonl", [ROBOTS]) as trace:
            batcher = Batcher({"prod": FunctionProcessor(lambda items: items)}, [ROBOTS], sinks=[trace])
            async with batcher:
                await asyncio.gather(*(batcher.run(Request(i, id=str(i), group="prod")) for i in range(200)))

    asyncio.run(serve())
    members = [m for b in read_journal(tmp_path / "t.jsonl").batches for m in b.members]
    assert sorted(int(m.id) for m in members) == list(range(200))
    assert {m.outcome for m in members} == {"done"}


def test_a_closed_writer_takes_nothing_more(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t.jsonl", ROBOTS)
    run_of(2, trace)
    assert trace.close()
    run_of(2, trace)
    assert trace.close()
    assert len(read_journal(tmp_path / "t.jsonl").batches) == 2


def test_gz_is_written_and_read_by_suffix(tmp_path: Path) -> None:
    with writer(tmp_path / "t.jsonl.gz", ROBOTS) as trace:
        run_of(30, trace)
    assert gzip.decompress((tmp_path / "t.jsonl.gz").read_bytes()).startswith(b'{"kind":"header"')
    assert len(read_journal(tmp_path / "t.jsonl.gz").batches) == 30


def test_every_cause_is_written_with_its_reason(tmp_path: Path) -> None:
    with writer(tmp_path / "t.jsonl", ROBOTS) as trace:
        for cause in Cause:
            loop = Loop(ROBOTS, trace)
            loop.submit()
            batch = loop.scheduler.next_batch(0.0)
            assert batch is not None
            batch.cause = cause
            loop.scheduler.complete(batch, [Done()], 0.01, 0.01)
            loop.emit()
    read = read_journal(tmp_path / "t.jsonl").batches
    assert [(b.reason, b.cause) for b in read] == [(c.reason.value, c.value) for c in Cause]
