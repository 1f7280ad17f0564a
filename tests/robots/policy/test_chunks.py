"""Real-time chunking and adaptive steps in a decomposed policy under the real scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Ticket, TicketState
from reflex_runtime.robots import Export, load_policy, served_by
from reflex_runtime.robots.policy.base import run_through
from reflex_runtime.robots.policy.decomposed import DecomposedPolicy
from reflex_runtime.robots.policy.episodes import Rtc
from reflex_runtime.robots.policy.spec import DeviceOptions
from reflex_runtime.robots.sources.export_directory import OnnxStaged
from reflex_runtime.run.processor import run_batch
from robots.tiny import _POSE, CHUNK, STEPS, Bench, asked, value, write_export, write_graph


def _policy(root: Path, slot: str = "prod", rtc: Rtc | None = None, adaptive: bool = False) -> Any:
    model = Export.load(root).open(DeviceOptions())
    assert isinstance(model, OnnxStaged)
    return DecomposedPolicy(model, slot, rtc=rtc, adaptive=adaptive, clock=lambda: 0.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_export(tmp_path / "export", "decomposed")


def _steady_export(root: Path, curved: bool = False) -> Path:
    """An export whose velocity is constant along the way, or, curved, grows with the flow time."""
    write_export(root, "decomposed")
    drive = [
        *_POSE,
        helper.make_node("ReduceMax", ["keys"], ["k"], axes=[1, 2], keepdims=0),
        helper.make_node("ReduceSum", ["values", "one"], ["v"], keepdims=0),
        helper.make_node("Add", ["k", "v"], ["kv"]),
        helper.make_node("Add", ["kv", "t"], ["with_t"]),
        helper.make_node("Sub", ["with_t", "t"], ["without_t"]),
        helper.make_node("Unsqueeze", ["with_t" if curved else "without_t", "one_two"], ["term"]),
        helper.make_node("Add", ["pose_term", "term"], ["velocity"]),
        helper.make_node("Mul", ["velocity", "dt"], ["change"]),
        helper.make_node("Add", ["x", "change"], ["chunk"]),
    ]
    write_graph(root / "expert_denoise.onnx", drive, ["x", "t", "pose", "keys", "values"], ["chunk"])
    return root


def test_e2_frozen_actions_repeat_the_tail_exactly_and_free_ones_do_not(root: Path) -> None:
    bench = Bench(policy := _policy(root, rtc=Rtc("ONES", 2)))
    first = bench.answer(asked(policy, 1))
    second = bench.answer(asked(policy, 1, request_id="next", executed=1))
    assert first.rtc is None
    assert second.rtc | {"delay_ms": 0} == {
        "executed": 1, "overlap": 3, "frozen": 0, "delay": 0, "delay_ms": 0, "horizon": 2, "schedule": "ONES",
    }  # fmt: skip
    assert second.actions[:2] == pytest.approx(first.actions[1:3], abs=1e-6)
    alone = Bench(other := _policy(root)).answer(asked(other, 1, request_id="next"))
    assert np.abs(second.actions[2:] - alone.actions[2:]).max() < 1e-6  # this graph has no coupling between places
    assert np.abs(second.actions[:2] - alone.actions[:2]).max() > 1e-3


def test_e2_a_tail_never_reaches_another_episode_slot_or_robot(root: Path) -> None:
    bench = Bench(policy := _policy(root, rtc=Rtc("ONES", 4)))
    bench.answer(asked(policy, 1))
    assert bench.answer(asked(policy, 2, executed=1)).rtc is None
    assert bench.answer(asked(policy, 3, episode_id=None, executed=1)).rtc is None
    other = Bench(beside := _policy(root, "b", rtc=Rtc("ONES", 4)))
    assert other.answer(asked(beside, 1, executed=1)).rtc is None
    assert policy.tails is not None
    policy.tails.forget("episode-1")
    assert bench.answer(asked(policy, 1, executed=1)).rtc is None


def test_e2_a_chunk_that_nobody_got_is_not_continued(root: Path) -> None:
    """Its caller left while its last step ran: the robot goes on with the chunk before."""
    bench = Bench(policy := _policy(root, rtc=Rtc("ONES", 4)))
    first = bench.answer(asked(policy, 1))
    gone = bench.submit(asked(policy, 1, request_id="gone", executed=3, seed=7))
    for _ in range(STEPS - 1):  # its scene is cached
        bench.step()
    batch = bench.scheduler.next_batch(bench.now)
    assert batch is not None
    bench.scheduler.cancel(gone, bench.now)
    bench.scheduler.complete(batch, run_batch(policy, batch), 0.01, bench.now)
    assert gone.outcome is not None
    third = bench.answer(asked(policy, 1, request_id="third", executed=0, seed=8))
    assert third.actions == pytest.approx(first.actions, abs=1e-6)


def test_e2_a_chunk_whose_last_step_hung_is_not_continued(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = _policy(root, rtc=Rtc("ONES", 4))
    ticket, step = Ticket(asked(policy, 1), 1, 0.0), policy.model.step

    def hung(packed: Any, x: Any, k: Any, n: int) -> Any:
        if k[0] == n - 1:
            ticket.state = TicketState.SETTLED  # its caller got an error meanwhile
        return step(packed, x, k, n)

    monkeypatch.setattr(policy.model, "step", hung)
    run_through(policy, [ticket], policy.stages, group=policy.slot, shape=policy.shape)
    assert len(policy.tails) == 0


def test_e2_anchored_rows_are_the_same_alone_and_in_company(root: Path) -> None:
    alone = Bench(policy := _policy(root, rtc=Rtc("LINEAR", 4)))
    for i in range(3):
        alone.answer(asked(policy, i))
    expected = [alone.answer(asked(policy, i, request_id=f"next-{i}", executed=1)).actions for i in range(3)]
    bench = Bench(policy := _policy(root, rtc=Rtc("LINEAR", 4)))
    for i in range(3):
        bench.answer(asked(policy, i))
    tickets: list[Ticket] = []
    for i in range(3):  # each joins at another step
        tickets.append(bench.submit(asked(policy, i, request_id=f"next-{i}", executed=1)))
        bench.step()
    bench.drain()
    assert max(len(batch) for batch in bench.batches) == 3
    for ticket, actions in zip(tickets, expected, strict=True):
        assert np.abs(value(ticket).actions - actions).max() < 1e-6


def test_e2_the_guard_keeps_the_report(root: Path) -> None:
    policy = _policy(root, rtc=Rtc("LINEAR", 4))
    bench = Bench(policy, served_by(policy))
    bench.answer(asked(policy, 1))
    second = bench.answer(asked(policy, 1, request_id="next", executed=2))
    assert second.rtc["executed"] == 2
    assert second.guard is not None


def test_e3_adaptive_steps_end_early_where_the_velocity_is_steady(tmp_path: Path) -> None:
    root = _steady_export(tmp_path / "steady")
    full = Bench(plain := _policy(root)).answer(asked(plain, 1))
    early = Bench(policy := _policy(root, adaptive=True)).answer(asked(policy, 1))
    assert (full.denoising_steps, early.denoising_steps) == (STEPS, 2)
    assert np.abs(full.actions - early.actions).max() < 1e-5  # a straight way is gone in one leap as well as in three


def test_e3_adaptive_steps_go_all_the_way_where_it_is_not(tmp_path: Path) -> None:
    root = _steady_export(tmp_path / "curved", curved=True)
    full = Bench(plain := _policy(root)).answer(asked(plain, 1))
    same = Bench(policy := _policy(root, adaptive=True)).answer(asked(policy, 1))
    assert same.denoising_steps == STEPS
    assert np.array_equal(full.actions, same.actions)


def test_e3_rows_that_end_early_leave_the_others_alone(tmp_path: Path) -> None:
    root = _steady_export(tmp_path / "steady")
    bench = Bench(policy := _policy(root, adaptive=True))
    first = bench.submit(asked(policy, 1))
    bench.step()
    bench.step()
    second = bench.submit(asked(policy, 2))
    bench.drain()
    assert [value(t).denoising_steps for t in (first, second)] == [2, 2]
    assert [first.batches, second.batches] == [3, 3]
    assert not policy._flows


@pytest.mark.parametrize(("flag", "options"), [("--rtc", {"rtc": Rtc()}), ("--adaptive-steps", {"adaptive": True})])
def test_e2_e3_a_monolithic_export_has_no_steps_to_reach_into(
    tmp_path: Path, flag: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: .* is monolithic"):
        load_policy(write_export(tmp_path, "monolithic"), **options)


def test_e2_the_whole_chunk_size_is_the_longest_tail(root: Path) -> None:
    bench = Bench(policy := _policy(root, rtc=Rtc("ONES", 100)))
    first = bench.answer(asked(policy, 1))
    again = bench.answer(asked(policy, 1, request_id="next", executed=0))
    assert again.rtc["overlap"] == CHUNK
    assert again.actions == pytest.approx(first.actions, abs=1e-6)


def test_e2_every_step_is_drawn_to_the_path_of_the_old_chunk(tmp_path: Path) -> None:
    """Against the flow computed slowly: x is pulled after each step, not only at the end."""
    root = _steady_export(tmp_path / "steady")
    write_graph(
        root / "expert_denoise.onnx",
        [
            *_POSE,
            helper.make_node("ReduceMax", ["keys"], ["k"], axes=[1, 2], keepdims=0),
            helper.make_node("ReduceSum", ["values", "one"], ["v"], keepdims=0),
            helper.make_node("Add", ["k", "v"], ["kv"]),
            helper.make_node("Add", ["kv", "t"], ["kvt"]),
            helper.make_node("Unsqueeze", ["kvt", "one_two"], ["term"]),
            helper.make_node("Mul", ["pose_term", "dt"], ["small"]),
            helper.make_node("Add", ["small", "term"], ["bias"]),
            helper.make_node("ReduceMean", ["x"], ["level"], axes=[1], keepdims=1),  # couples the places of a chunk
            helper.make_node("Sub", ["bias", "level"], ["velocity"]),
            helper.make_node("Mul", ["velocity", "dt"], ["change"]),
            helper.make_node("Add", ["x", "change"], ["chunk"]),
        ],
        ["x", "t", "pose", "keys", "values"],
        ["chunk"],
    )
    bench = Bench(policy := _policy(root, rtc=Rtc("LINEAR", 4)))
    bench.answer(asked(policy, 1))
    request = asked(policy, 1, request_id="next", executed=1)
    anchor = request.payload.anchor
    noise = x = policy._noise(request.payload)
    pulled = bench.answer(request)
    plain = Bench(other := _policy(root))
    step = {"x": 0}

    def one_step(rows: dict[str, Any], notes: Any) -> dict[str, Any]:
        nonlocal x
        step["x"] += 1
        made = run(rows, notes)
        made["chunk"] = anchor.pull(made["chunk"][0], noise, step["x"] / STEPS)[None]
        return made

    run = other.model._expert.run
    other.model._expert.run = one_step  # type: ignore[method-assign, assignment]
    slow = plain.answer(asked(other, 1, request_id="next"))
    assert pulled.actions == pytest.approx(slow.actions, abs=1e-6)
