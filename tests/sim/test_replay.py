"""Schedule replay: runs recorded through the real `Batcher` on real time, run again through the scheduler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from reflex_runtime.cli import main
from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.observe.journal import BatchLine, GroupInfo, Journal, Member, read_journal
from reflex_runtime.observe.journal_writer import info_of
from reflex_runtime.robots import load_policy, served_by
from reflex_runtime.robots.analysis.report import report
from reflex_runtime.robots.policy.processors import parse_fault
from reflex_runtime.sim import Report
from reflex_runtime.sim.recorded import Changes, MeasuredDevice, _group, recorded_report, replay_schedule, side_by_side
from robots.analysis.recorded import Served, serve
from robots.tiny import picture, write_export
from sim.measured import replay_measured

Robot = Callable[[Served], Awaitable[None]]


def fields(i: int, k: int) -> dict[str, Any]:
    return {
        "images": {"image": picture(100 * i + k // 2)}, "instruction": "open the door", "state": [0.1 * i, 0.2 * k],
        "episode_id": f"episode-{i}", "request_id": f"request-{i}-{k}",
    }  # fmt: skip


def robot(i: int, n: int = 20, slot: str = "prod", deadline: float | None = None) -> Robot:
    async def ask(served: Served) -> None:
        turns = Random(i)
        for k in range(n):
            for _ in range(turns.randrange(20)):  # of the loop: think times that differ, without a clock
                await asyncio.sleep(0)
            await served.ask(slot, deadline, **fields(i, k))

    return ask


def impatient(i: int) -> Robot:
    """Takes back every request at once."""

    async def ask(served: Served) -> None:
        for k in range(10):
            await served.ask(give_up=True, **fields(i, k))

    return ask


def recorded(directory: Path, kind: str, *robots: Robot, slots: tuple[str, ...] = ("prod",), **options: Any) -> Journal:
    export = write_export(directory / "export", kind)
    policies = [load_policy(export, slot) for slot in slots]
    return read_journal(serve(Served(directory / "recordings", policies, images="none", **options), *robots))


# -- the same again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [None, ("denoise",)])
def test_b24_a_replay_pads_the_stages_that_the_server_padded(padded: tuple[str, ...] | None) -> None:
    stages = ("prefix", "denoise")
    cost = partial(TimeCost, stages, True, (1, 4), padded_stages=padded)
    again = json.loads(msgspec.json.encode(info_of(GroupConfig("prod", FlushPolicy.window(0.1), cost=cost))))
    model = _group("prod", msgspec.convert(again, GroupInfo), Changes()).cost()
    assert isinstance(model, TimeCost)
    assert (model.stages, model.sizes, model.padded_stages) == (stages, (1, 4), padded or stages)


@pytest.mark.parametrize("kind", ["monolithic", "decomposed"])
def test_t6_measured_times_fed_back_give_the_recorded_batches(tmp_path: Path, kind: str) -> None:
    recording = recorded(tmp_path, kind, *(robot(i) for i in range(6)))
    replay = replay_measured(recording)
    assert replay.first_difference is None
    assert replay.same == len(replay.batches) == len(recording.batches) > 0
    assert max(len(b.members) for b in recording.batches) > 1
    assert replay.late < 0.006  # what it still held when it was recorded it would have held no longer than the timeout


def test_t6_steps_that_were_spared_and_requests_that_failed_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reflex_runtime.robots.policy.decomposed.STEADY", 0.5)
    policy = load_policy(write_export(tmp_path / "export", "decomposed"), adaptive=True)
    fault = served_by(policy, faults=[parse_fault("prod:nan:0.3")])
    served = Served(tmp_path / "r", [policy], images="none", processors={"prod": fault})
    recording = read_journal(serve(served, *(robot(i) for i in range(4))))
    assert {line.denoise for line in recording.requests if line.outcome == "ok"} & {2, 3, 4}
    assert "failed" in {e.outcome for e in recording.ended}
    replay = replay_measured(recording)
    assert replay.same == len(recording.batches)


def test_x3_the_same_recording_gives_the_same_replay(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "decomposed", *(robot(i) for i in range(4)))
    assert replay_measured(recording) == replay_measured(recording)
    assert replay_schedule(recording) == replay_schedule(recording)


def test_t6_two_slots_take_the_same_turns(tmp_path: Path) -> None:
    robots = [robot(i, slot="ab"[i % 2]) for i in range(6)]
    recording = recorded(tmp_path, "decomposed", *robots, slots=("a", "b"))
    assert {b.group for b in recording.batches} == {"a", "b"}
    assert replay_measured(recording).first_difference is None


def test_t6_cancelled_refused_and_late_requests_are_replayed(tmp_path: Path) -> None:
    robots = [robot(0), robot(1, deadline=0.0005), robot(2), impatient(9)]
    recording = recorded(tmp_path, "decomposed", *robots, capacity=2)
    outcomes = {line.outcome for line in recording.requests}
    assert outcomes & {"expired", "shed", "rejected"}
    assert "cancelled" in {e.outcome for e in recording.ended}
    replay = replay_measured(recording)
    assert replay.same == len(recording.batches)


def test_t6_batches_of_requests_that_are_not_in_the_file_are_passed_over(tmp_path: Path) -> None:
    """Those of a shadow, say: nobody is answered with them, and the device is busy all the same."""
    robots = [robot(i, slot="ab"[i % 2]) for i in range(4)]
    rule = FlushPolicy.window(0.1, batch_timeout=0.0)
    recording = recorded(tmp_path, "monolithic", *robots, slots=("a", "b"), flush=rule)
    recording.requests[:] = [line for line in recording.requests if line.slot == "a"]
    replay = replay_measured(recording)
    assert replay.unknown == sum(b.group == "b" for b in recording.batches) > 0
    assert replay.same == len(replay.batches) == sum(b.group == "a" for b in recording.batches)


def test_t6_with_the_looks_recorded_the_instants_and_causes_are_the_same_too(tmp_path: Path) -> None:
    """When a free device looked and held is recorded, so holds that race between slots end as they did."""
    robots = [robot(i, 40, slot="aab"[i % 3]) for i in range(6)]
    recording = recorded(tmp_path, "monolithic", *robots, slots=("a", "b"))
    replay = replay_measured(recording)
    assert replay.same == replay.same_cause == len(recording.batches)
    assert replay.late == 0.0
    assert replay.early == 0


def test_t6_a_changed_recording_is_noticed(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "monolithic", *(robot(i) for i in range(4)))
    batch = next(b for b in recording.batches if len(b.members) > 1)
    batch.members.pop()
    replay = replay_measured(recording)
    assert replay.first_difference is not None
    assert replay.first_difference.recorded is batch
    recording.header.groups.clear()
    with pytest.raises(ConfigError, match="the header's `groups` lack the settings of prod"):
        replay_measured(recording)


@pytest.mark.parametrize("kind", ["monolithic", "decomposed"])
def test_t6_a_trace_is_replayed_and_reported_like_a_recording(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One journal: all that it lacks is what was asked and answered."""
    export, file = write_export(tmp_path / "export", kind), tmp_path / "t.jsonl"
    served = Served(tmp_path, [load_policy(export)], trace=file)
    serve(served, *(robot(i) for i in range(6)))
    trace = read_journal(file)
    assert (trace.header.payloads, len(trace.requests), set(trace.warm)) == (False, 120, {"prod"})
    asked = {name for line in trace.requests for name in ("instruction", "state", "image_sha256", "image_b64")
             if getattr(line.request, name) is not None}  # fmt: skip
    assert asked == set()
    assert {line.response.actions for line in trace.requests if line.response is not None} == {None}
    replay = replay_measured(trace)
    assert replay.same == replay.same_cause == len(trace.batches) > 0
    assert max(len(b.members) for b in trace.batches) > 1
    found = report([file])
    assert (found.slots["prod"].requests, len(found.slots["prod"].latencies)) == (120, 120)
    capsys.readouterr()
    assert main(["replay", str(file), "--schedule"]) == 0
    assert main(["trace", str(file), "--no-picture"]) == 0
    assert "120 requests" in capsys.readouterr().out
    assert main(["replay", str(file), "--model", str(export)]) == 2
    assert "t.jsonl: holds no payloads, as --trace writes it" in capsys.readouterr().err


def test_t6_the_schedule_of_a_later_part_knows_the_warm_up(tmp_path: Path) -> None:
    """Each part of a session says what its cost models had learned."""
    policy = load_policy(write_export(tmp_path / "export", "monolithic"))
    served = Served(tmp_path / "r", [policy], images="none", gzip=False, max_bytes=20_000)
    serve(served, *(robot(i) for i in range(4)))
    parts = [read_journal(path) for path in sorted((tmp_path / "r").iterdir())]
    assert len(parts) > 1
    assert all(set(part.warm) == {"prod"} for part in parts)


# -- something else ----------------------------------------------------------------------------------------------------


def test_t6_another_budget_gives_other_batches(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "monolithic", *(robot(i, 30) for i in range(8)))
    for i, batch in enumerate(recording.batches):  # a slower device: 20 ms and 10 ms each, of which all sizes are known
        batch.size = 1 + i % 8
        batch.elapsed = 0.020 + 0.010 * batch.size
    recording.warm.clear()
    for i, line in enumerate(recording.requests):
        assert line.schedule is not None
        line.schedule.arrived = 0.005 * i
    small = replay_schedule(recording, Changes(max_batch_cost=0.030))
    large = replay_schedule(recording, Changes(max_batch_cost=10.0))
    assert sum(small.sizes.values()) > sum(large.sizes.values())
    assert max(large.sizes) > max(small.sizes)
    assert small.p50 is not None
    assert large.p50 is not None
    assert small.p50 > large.p50  # overloaded: only large batches keep up
    one = replay_schedule(recording, Changes(max_batch_size=1))
    assert max(one.sizes) == 1


def test_t6_the_changes_reach_the_recorded_rule() -> None:
    window = Changes(0.05, 0.002, 7).of(FlushPolicy.window(0.1))
    assert (window.max_batch_cost, window.returns, window.max_batch_size) == (0.05, 0.002, 7)
    by_cost = Changes(batch_timeout=0.002).of(FlushPolicy.by_cost(0.1, 0.01))
    assert by_cost == FlushPolicy.by_cost(0.1, 0.002)
    assert Changes().of(by_cost) == by_cost
    assert Changes(max_batch_cost=0.1).of(FlushPolicy.window(None)) == FlushPolicy.window(0.1)
    assert Changes(batch_timeout=0.0).of(FlushPolicy.window(None)) == FlushPolicy.window(None, 0.0)


def test_t6_the_device_takes_what_the_recorded_batches_took() -> None:
    def ran(size: int, seconds: float) -> BatchLine:
        return BatchLine(
            id=1, group="a", reason="timeout", cause="idle", at=0.0, finished=1.0, elapsed=seconds, expected=None,
            cost=None, unit=None, size=size, queued=0,
            members=[Member(i, "", "", 1, 1, "waiting", 0) for i in range(size)],
        )  # fmt: skip

    device = MeasuredDevice([ran(1, 0.010)] * 3 + [ran(2, 0.014)] * 5 + [ran(4, 0.022)])

    def seconds(size: int) -> float:
        grants = dict.fromkeys(object() for _ in range(size))
        batch = Batch(1, "a", "", "", Cause.IDLE, 0.0, 0.0, 0.0, grants)  # type: ignore[arg-type]
        return device.seconds(batch, 0.0, Random(0))

    assert seconds(1) == pytest.approx(0.010)
    assert seconds(2) == pytest.approx(0.014)
    assert seconds(10) == pytest.approx(0.046, rel=0.02)
    with pytest.raises(ConfigError, match="no batch to learn"):
        MeasuredDevice([])


def test_the_report_of_what_was_recorded_is_what_happened(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "decomposed", *(robot(i, 5) for i in range(3)))
    summed = recorded_report(recording)
    assert isinstance(summed, Report)
    assert summed.outcomes == {"ok": 15}
    assert summed.p99 is not None
    slowest = max(line.latency.total_ms for line in recording.requests) / 1e3
    assert 0.0 < summed.p99 <= slowest


def test_batches_after_the_last_arrival_are_counted(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "monolithic", *(robot(i, 1) for i in range(4)))
    for line in recording.requests:
        assert line.schedule is not None
        line.schedule.arrived = min(batch.at for batch in recording.batches)  # a single burst
    for told in (recorded_report(recording), replay_schedule(recording)):
        assert sum(size * n for size, n in told.sizes.items()) == 4
        assert 0.0 < told.busy <= 1.0


# -- the command -------------------------------------------------------------------------------------------------------


def test_t6_the_command_shows_both_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = recorded(tmp_path, "monolithic", *(robot(i) for i in range(4)))
    out = tmp_path / "o.json"
    call = ["replay", str(recording.path), "--schedule", "--max-batch-cost-ms", "50", "--output", str(out)]
    assert main(call) == 0
    text = capsys.readouterr().out
    header = next(line for line in text.splitlines() if "recorded" in line and "replayed" in line)
    assert header.split() == ["recorded", "replayed", "50", "ms"]
    assert max(map(len, text.splitlines()[1:])) <= 80
    told = json.loads(out.read_text())
    assert list(told["reports"]) == ["recorded", "replayed", "50 ms"]


def test_side_by_side_names_what_was_lost(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "monolithic", robot(0, 5), robot(1, 5, deadline=1e-6))
    rows = side_by_side({"recorded": recorded_report(recording)})
    assert any(row[0].strip() in ("expired", "shed", "rejected") for row in rows)
