"""What watchers are shown: a fold over the events of a scheduler in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from reflex_runtime.core.batch import BatchFinished, BatchScheduled, Done, Failed, More, Outcome, RequestAnswered
from reflex_runtime.core.errors import ProcessorError, QueueFull
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.observe import live
from reflex_runtime.observe.live import Live, LiveSnapshot

GROUP = GroupConfig(flush=FlushPolicy.by_size(4, 0.0), capacity=6)


class Play:
    """A scheduler in virtual time, and the fold as its only sink."""

    def __init__(self, group: GroupConfig = GROUP) -> None:
        self.scheduler = Scheduler([group])
        self.live = Live(0.0)
        self.now = 0.0

    def tell(self) -> None:
        for event in self.scheduler.take_events():
            if type(event) in Live.events:
                self.live(event)

    def ask(self, *clients: str) -> None:
        for client in clients:
            self.scheduler.submit(Request(None, client=client), self.now)
        self.tell()

    def run(self, seconds: float, outcomes: Sequence[Outcome] | None = None) -> None:
        """The next batch, to its end."""
        batch = self.scheduler.next_batch(self.now)
        assert batch is not None
        self.tell()
        self.now += seconds
        self.scheduler.complete(batch, outcomes or [Done()] * len(batch), seconds, self.now)
        self.tell()

    def snapshot(self) -> LiveSnapshot:
        return self.live.snapshot(self.now, {})


def test_x4_a_batch_runs_and_then_has_ended_once() -> None:
    play = Play()
    play.ask("r1", "r2", "r3", "r4", "r5")
    batch = play.scheduler.next_batch(0.0)
    assert batch is not None
    play.tell()
    (running,) = play.snapshot().running
    assert (running.size, running.queued, running.took) == (4, 1, None)
    first = running.members[0]
    assert (first.client, first.units, first.waited, first.entered) == ("r1", 1.0, 0.0, True)
    play.now = 0.25
    play.scheduler.complete(batch, [Done()] * 4, 0.25, play.now)
    play.tell()
    told = play.snapshot()
    assert (told.running, [b.took for b in told.batches], told.left_out) == ([], [0.25], 0)
    assert told.batches[0].cause == "size_reached"
    assert play.snapshot().batches == []  # each is told once
    assert [told.number, play.snapshot().number] == [2, 4]


def test_x4_figures_of_clients_and_groups() -> None:
    play = Play()
    for client, seconds in (("r1", 0.1), ("r1", 0.3), ("r2", 0.2)):
        play.ask(client)
        play.run(seconds)
    play.ask("r2")
    play.run(0.4, [Failed(ProcessorError("no"))])
    play.now = 2.0
    told = play.snapshot()
    first, second = told.clients
    assert (first.name, first.answers, first.p95, first.lost, first.why) == ("r1", 2, pytest.approx(0.3), 0, "")
    assert first.age == pytest.approx(2.0 - 0.4)
    assert (second.answers, second.lost, second.why) == (1, 1, "processor_failed")
    (group,) = told.groups
    assert group.busy == pytest.approx(1.0 / 2.0)  # 1.0 s of calls in 2.0 s
    assert (group.batches, group.requests, group.outcomes) == (4, 3, {"ok": 3, "failed": 1})
    assert (group.p50, group.p99) == (pytest.approx(0.2), pytest.approx(0.3))
    play.now = 3.0
    (later,) = play.snapshot().groups
    assert (later.busy, later.batches, later.requests) == (0.0, 0, 3)


def test_x4_the_device_is_busy_in_every_snapshot_of_a_long_batch() -> None:
    play = Play()
    play.ask("r1")
    batch = play.scheduler.next_batch(0.0)
    assert batch is not None
    play.tell()
    busy = []
    for play.now in (0.25, 0.5, 0.75):
        busy.append(play.snapshot().groups[0].busy)
    play.now = 0.875
    play.scheduler.complete(batch, [Done()], 0.875, play.now)
    play.tell()
    for play.now in (1.0, 1.25):
        busy.append(play.snapshot().groups[0].busy)
    assert busy == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0])


def test_x4_names_that_differ_at_their_end_stay_apart() -> None:
    play = Play()
    names = [f"warehouse-7/line-3/robot-arm-{i}" for i in range(2)]
    play.ask(*names, "x" * 1000)
    play.run(0.1)
    told = play.snapshot()
    assert [m.client for m in told.batches[0].members] == [*names, "x" * 47 + "…"]
    assert [c.name for c in told.clients] == [*names, "x" * 47 + "…"]


def test_x4_a_request_without_a_client_counts_for_its_group_only() -> None:
    play = Play()
    play.ask("", "r1")
    play.run(0.1)
    play.ask("")
    play.run(0.1, [Failed(ProcessorError("no"))])
    told = play.snapshot()
    assert ([c.name for c in told.clients], told.clients_known) == (["r1"], 1)
    assert told.groups[0].outcomes == {"ok": 2, "failed": 1}


def test_x4_refusals_count_for_their_client() -> None:
    play = Play()
    play.ask(*["r1"] * 6)
    with pytest.raises(QueueFull):
        play.ask("r1")
    play.tell()
    told = play.snapshot()
    assert (told.clients[0].lost, told.clients[0].why, told.groups[0].outcomes) == (1, "queue_full", {"rejected": 1})


def test_x4_the_ratio_is_of_batches_with_a_prediction_that_succeeded() -> None:
    play = Play()
    play.ask("r1", "r2")
    batch = play.scheduler.next_batch(0.0)
    assert batch is not None
    assert batch.guessed  # nothing like it was measured yet
    play.live(BatchFinished(0.2, batch, 0.2, False))
    assert play.snapshot().groups[0].error is None
    batch.expected, batch.guessed = 0.3, False
    play.live(BatchFinished(0.2, batch, 0.3, False))
    play.live(BatchFinished(0.2, batch, 0.0001, False))  # the end of a stream: a mean of ratios would be 1500
    play.live(BatchFinished(0.2, batch, 0.1, True))
    (group,) = play.snapshot().groups
    assert group.error == pytest.approx(0.6 / 0.3001)
    assert play.snapshot().groups[0].error is None


def test_x4_what_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "CLIENTS", 2)
    monkeypatch.setattr(live, "REMEMBERED", 4)
    monkeypatch.setattr(live, "MEMBERS", 2)
    play = Play()
    for i in range(live.BATCHES + 5):
        play.ask(f"r{i % 6}")
        play.run(0.001)
    told = play.snapshot()
    assert (len(told.batches), told.left_out) == (live.BATCHES, 5)
    assert (len(told.clients), told.clients_known) == (2, 4)
    assert {c.name for c in told.clients} == {f"r{i % 6}" for i in (live.BATCHES + 3, live.BATCHES + 4)}
    play.ask("a", "b", "c")
    play.run(0.001)
    (batch,) = play.snapshot().batches
    assert (batch.size, len(batch.members)) == (3, 2)


def test_x4_the_wire_of_a_client_and_a_short_name() -> None:
    play = Play()
    ticket = play.scheduler.submit(Request(None, client=("127.0.0.1", 4)), 0.0)
    play.tell()
    play.run(0.1)
    play.live(RequestAnswered(play.now, "prod", "ok", 200, 0.1, ticket, wire="openpi"))
    (client,) = play.snapshot().clients
    assert (client.name, client.wire) == ("127.0.0.1 #4", "openpi")


def test_x4_a_snapshot_is_json_and_the_fold_keeps_no_ticket() -> None:
    play = Play()
    play.ask("r1")
    play.run(0.1)
    read = msgspec.json.decode(msgspec.json.encode(play.snapshot()), type=LiveSnapshot)
    assert read.batches[0].members[0].client == "r1"
    assert not play.live._running
    assert BatchScheduled in Live.events


def test_x4_tokens_first_tokens_and_gaps() -> None:
    play = Play()
    play.scheduler.submit(Request(None, client="chat", streams=True), 0.0)
    for seconds, outcome in ((0.5, More()), (0.1, More("a")), (0.2, More("b")), (0.3, Done("c"))):
        play.run(seconds, [outcome])
    (group,) = play.snapshot().groups
    assert (group.first_p50, group.first_p99) == (pytest.approx(0.6), pytest.approx(0.6))
    assert (group.gap_p50, group.gap_p99) == (pytest.approx(0.2), pytest.approx(0.3))
    assert group.tokens > 0.0
    assert not play.live._parts


def test_x4_a_stream_that_had_begun_before_gives_gaps_and_no_first_token() -> None:
    play = Play()
    play.scheduler.submit(Request(None, client="chat", streams=True), 0.0)
    play.run(0.5, [More("a")])
    play.live = Live(play.now)
    play.run(0.1, [More("b")])
    play.run(0.2, [Done("c")])
    (group,) = play.snapshot().groups
    assert (group.first_p50, group.gap_p50) == (None, pytest.approx(0.2))
