"""Policies under the real scheduler: one call per batch, joining at step boundaries, the same results as alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.errors import Cancelled, ProcessorError
from reflex_runtime.core.request import Ticket, TicketState
from reflex_runtime.robots import DecomposedPolicy, MonolithicPolicy, Policy, load_policy
from reflex_runtime.robots.policy.decomposed import DENOISE, PREFIX
from reflex_runtime.robots.sources.export_directory import OnnxStaged
from reflex_runtime.run.processor import BaseProcessor
from robots.tiny import STEPS, Bench, asked, run_alone, value, write_export

KINDS = ["monolithic", "decomposed"]

# A row of a batch against the same row alone, largest absolute difference of an action. Measured 0.0: the tests leave
# room for a CPU whose kernels treat the rest of a vector differently. For a real network: test_bundled_exports.py.
BOUND = 1e-6


def largest_difference(a: Any, b: Any) -> float:
    return float(np.abs(a.actions - b.actions).max())


@pytest.fixture
def policy(tmp_path: Path) -> DecomposedPolicy:
    loaded = load_policy(write_export(tmp_path, "decomposed"))
    assert isinstance(loaded, DecomposedPolicy)
    return loaded


@pytest.mark.parametrize("kind", KINDS)
def test_b11_a_batch_is_one_model_call(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(load_policy(write_export(tmp_path, kind)))
    calls: list[int] = []
    for name in ("_session", "_prefix", "_expert"):
        if session := getattr(bench.policy.model, name, None):
            whole = session.call
            monkeypatch.setattr(session, "call", lambda rows, w=whole: (calls.append(len(rows)), w(rows))[1])
    tickets = [bench.submit(asked(bench.policy, i)) for i in range(3)]
    bench.drain()
    assert [value(t).cache for t in tickets] == ["off" if kind == "monolithic" else "miss"] * 3
    assert [len(b) for b in bench.batches] == ([3] if kind == "monolithic" else [3] * (STEPS + 1))
    assert len(calls) == len(bench.batches)
    assert all("fanout" not in b.notes for b in bench.batches)


@pytest.mark.parametrize("kind", KINDS)
def test_b11_without_a_batch_axis_items_run_one_by_one_and_the_trace_says_so(tmp_path: Path, kind: str) -> None:
    dynamic = load_policy(write_export(tmp_path / "any", kind))
    bench = Bench(load_policy(write_export(tmp_path / "one", kind, batch=1)))
    tickets = [bench.submit(asked(bench.policy, i)) for i in range(3)]
    bench.drain()
    assert [b.notes for b in bench.batches] == [{"fanout": "sequential"}] * len(bench.batches)
    for i, ticket in enumerate(tickets):
        assert largest_difference(value(ticket), run_alone(dynamic, asked(dynamic, i, episode_id=None))) <= BOUND


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_batch_of_n_equals_n_singles(tmp_path: Path, kind: str, n: int) -> None:
    bench = Bench(load_policy(write_export(tmp_path, kind)))
    tickets = [bench.submit(asked(bench.policy, i)) for i in range(n)]
    bench.drain()
    assert {len(b) for b in bench.batches} == {n}
    for i, ticket in enumerate(tickets):
        alone = run_alone(bench.policy, asked(bench.policy, i, episode_id=None))
        assert largest_difference(value(ticket), alone) <= BOUND


def test_monolithic_result_is_the_formula_with_the_norms_outside(tmp_path: Path) -> None:
    policy = load_policy(write_export(tmp_path))
    image = np.full((4, 6, 3), 51, np.uint8)
    sent: dict[str, Any] = {"images": {"front": image}, "instruction": "open the door", "state": [3.0, 0.0]}
    chunk = run_alone(policy, policy.request(policy.prepare(**sent, seed=11)))
    state = (np.array([3.0, 0.0]) - [1.0, -1.0]) / [2.0, 0.5]
    noise = np.random.default_rng(11).standard_normal((4, 2), dtype=np.float32)
    scene = 51 / 255 + 0.1 * (1 + 3 + 4)
    expected = np.tanh(noise + state @ [[0.5, -0.25], [0.125, 1.0]] + scene) * [0.5, 0.125] + [0.25, 0.0]
    np.testing.assert_allclose(chunk.actions, expected, atol=1e-6)
    assert (chunk.actions.dtype, chunk.denoising_steps, chunk.cache) == (np.float32, STEPS, "off")


def test_decomposed_result_is_the_loop_written_out(tmp_path: Path) -> None:
    policy = load_policy(write_export(tmp_path, "decomposed"))
    image = np.full((4, 6, 3), 51, np.uint8)
    sent: dict[str, Any] = {"images": {"front": image}, "instruction": "open the door", "state": [3.0, 0.0]}
    chunk = run_alone(policy, policy.request(policy.prepare(**sent, seed=11)))
    state = (np.array([3.0, 0.0]) - [1.0, -1.0]) / [2.0, 0.5]
    scene = 51 / 255 + 0.1 * (1 + 3 + 4)
    seen = scene * 1.0 + scene * (0.25 + 0.5 - 1.0)  # the largest key and the sum of the values
    x = np.random.default_rng(11).standard_normal((4, 2), dtype=np.float32)
    for k in range(STEPS):
        x = x + (np.tanh(state @ [[0.5, -0.25], [0.125, 1.0]] + seen + k / STEPS) - x) / STEPS
    np.testing.assert_allclose(chunk.actions, x * [0.5, 0.125] + [0.25, 0.0], atol=1e-6)


def test_b23_requests_join_and_leave_at_step_boundaries(policy: DecomposedPolicy) -> None:
    bench = Bench(policy)
    tickets = [bench.submit(asked(policy, 0))]
    bench.step()  # prefix of 0
    bench.step()  # its first step
    bench.step()
    tickets.append(bench.submit(asked(policy, 1)))
    while PREFIX not in {b.stage for b in bench.batches[3:]}:
        bench.step()
    tickets.append(bench.submit(asked(policy, 2)))
    bench.drain()
    sizes = [(b.stage, len(b)) for b in bench.batches]
    assert max(n for stage, n in sizes if stage == DENOISE) >= 2
    assert sorted(n for stage, n in sizes if stage == PREFIX) == [1, 1, 1]
    assert len({t.batches for t in tickets}) == 1  # each had one prefix and STEPS steps, whatever company it kept
    assert tickets[0].batches == STEPS + 1
    mixed = [b for b in bench.batches if b.stage == DENOISE and len(b) > 1]
    assert mixed, "nobody ever shared a step"
    for i, ticket in enumerate(tickets):
        alone = run_alone(policy, asked(policy, i, episode_id=None))
        assert largest_difference(value(ticket), alone) <= BOUND
    assert policy._flows == {}


def test_b23_a_cache_hit_joins_at_the_next_step(policy: DecomposedPolicy) -> None:
    bench = Bench(policy)
    first = bench.answer(asked(policy, 0))
    running = bench.submit(asked(policy, 1))
    bench.step()
    bench.step()
    hit = bench.submit(asked(policy, 0, request_id="again", seed=5))
    assert (hit.stage, hit.wants, running.wants) == (DENOISE, STEPS, STEPS - 1)
    batch = bench.step()
    assert batch is not None
    assert list(batch.grants) == [running, hit]
    bench.drain()
    assert value(hit).cache == "hit"
    assert first.cache == "miss"
    assert largest_difference(value(hit), run_alone(policy, asked(policy, 0, episode_id=None, seed=5))) <= BOUND


def test_b23_a_miss_wants_the_prefix_and_all_steps(policy: DecomposedPolicy) -> None:
    request = asked(policy, 0)
    assert (request.stage, request.wants, request.group) == (PREFIX, STEPS + 1, "prod")


def test_state_of_those_who_left_is_dropped(policy: DecomposedPolicy) -> None:
    bench = Bench(policy)
    gone, staying = bench.submit(asked(policy, 0)), bench.submit(asked(policy, 1))
    bench.step()
    bench.step()
    assert set(policy._flows) == {gone, staying}
    bench.scheduler.cancel(gone, bench.now)
    batch = bench.step()
    assert batch is not None
    assert batch.left == (gone,)
    assert set(policy._flows) == {staying}
    bench.scheduler.cancel(staying, bench.now)
    assert bench.step() is None  # no next batch carries it: the driver hands it to `drop`
    assert policy._flows == {}
    assert policy._packed == ((), None)
    with pytest.raises(Cancelled):
        value(staying)


def batch_of(policy: Policy, stage: str, *tickets: Ticket, left: tuple[Ticket, ...] = ()) -> Batch:
    return Batch(1, "prod", policy.shape, stage, Cause.IDLE, 0.0, 0.0, 0.0, dict.fromkeys(tickets, 1.0), left=left)


def test_state_of_the_preempted_is_dropped_before_the_batch_runs(policy: DecomposedPolicy) -> None:
    preempted, other = (Ticket(asked(policy, i), i, 0.0) for i in range(2))  # a preempted ticket waits, as here
    policy.run(batch_of(policy, PREFIX, preempted))
    policy.run(batch_of(policy, PREFIX, other, left=(preempted,)))
    assert set(policy._flows) == {other}


def test_state_of_a_newcomer_that_was_given_up_while_it_hung_is_dropped(policy: DecomposedPolicy) -> None:
    given_up, other = (Ticket(asked(policy, i), i, 0.0) for i in range(2))
    given_up.state = TicketState.SETTLED  # its callers were told before the hung thread came back to run it
    policy.run(batch_of(policy, PREFIX, given_up))
    policy.run(batch_of(policy, PREFIX, other))
    assert set(policy._flows) == {other}


def test_rows_are_stacked_once_for_a_run_of_steps_and_then_let_go(
    policy: DecomposedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[str] = []
    place = onnx(policy)._expert.place
    monkeypatch.setattr(onnx(policy)._expert, "place", lambda array, name: (placed.append(name), place(array, name))[1])
    bench = Bench(policy)
    placed.clear()
    for i in range(2):
        bench.submit(asked(policy, i))
    bench.drain()
    assert sorted(placed) == ["keys", "pose", "values"]
    assert policy._packed == ((), None)


def onnx(policy: DecomposedPolicy) -> OnnxStaged:
    assert isinstance(policy.model, OnnxStaged)
    return policy.model


class Failing(BaseProcessor):
    """Raises, before or after the policy did its work, while `fails` says so."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.fails: set[str] = set()

    def run(self, batch: Batch) -> Any:
        if self.fails & {t.id for t in batch.grants}:
            raise ProcessorError("as told")
        return self.policy.run(batch)

    def drop(self, tickets: Any) -> None:
        self.policy.drop(tickets)


def test_state_of_those_who_failed_is_dropped(policy: DecomposedPolicy) -> None:
    failing = Failing(policy)
    bench = Bench(policy, failing)
    tickets = [bench.submit(asked(policy, i)) for i in range(3)]
    bench.step()
    bench.step()
    failing.fails = {"request-1"}
    bench.drain()
    with pytest.raises(ProcessorError, match="as told"):
        value(tickets[1])
    for i in (0, 2):
        assert largest_difference(value(tickets[i]), run_alone(policy, asked(policy, i, episode_id=None))) <= BOUND
    assert policy._flows == {}


def test_b18_a_failed_call_changes_no_state(policy: DecomposedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph itself raises, in every stage once, for the whole batch: the repeated calls give the right results."""
    bench = Bench(policy)
    for session in (onnx(policy)._prefix, onnx(policy)._expert):
        whole, failures = session.call, iter([True])

        def once(rows: Any, whole: Any = whole, failures: Any = failures) -> Any:
            if next(failures, False):
                raise RuntimeError("out of memory")
            return whole(rows)

        monkeypatch.setattr(session, "call", once)
    tickets = [bench.submit(asked(policy, i)) for i in range(3)]
    bench.drain()
    assert [(b.stage, len(b)) for b in bench.batches[:8]] == [("prefix", n) for n in (3, 1, 1, 1)] + [
        ("denoise", n) for n in (3, 1, 1, 1)
    ]  # after a half that works the other is not tried as a whole
    assert len(bench.batches) == 8 + STEPS - 1
    for i, ticket in enumerate(tickets):
        assert largest_difference(value(ticket), run_alone(policy, asked(policy, i, episode_id=None))) <= BOUND


def test_a_ticket_whose_state_is_gone_fails_alone(policy: DecomposedPolicy) -> None:
    bench = Bench(policy)
    tickets = [bench.submit(asked(policy, i)) for i in range(2)]
    bench.step()
    policy.drop([tickets[0]])
    bench.drain()
    with pytest.raises(ProcessorError, match="prefix was dropped"):
        value(tickets[0])
    assert value(tickets[1]).actions.shape == (4, 2)


def test_noise_is_a_function_of_the_seed_alone(tmp_path: Path) -> None:
    for kind in KINDS:
        policy = load_policy(write_export(tmp_path / kind, kind))
        bench = Bench(policy)
        same = [bench.answer(asked(policy, 0, request_id=r, seed=9, episode_id=None)).actions for r in ("a", "b")]
        other = bench.answer(asked(policy, 0, request_id="a", episode_id=None)).actions
        assert np.array_equal(*same)
        assert not np.array_equal(same[0], other)


def test_the_cost_model_is_taught_by_warm_up(tmp_path: Path) -> None:
    for kind, stages in (("monolithic", [""]), ("decomposed", [PREFIX, DENOISE])):
        policy = load_policy(write_export(tmp_path / kind, kind))
        model = policy.cost_model()
        warm = policy.warm_up((1, 3), clock=Bench._clock(iter(range(1000))))
        warm.teach(model)
        for stage in stages:
            sizes = [len(batch) for batch, _ in warm.batches if batch.stage == stage]
            assert len(sizes) >= 3
            assert set(sizes) == {1, 3}
        rows = model.snapshot()
        assert {row["stage"] for row in rows if row.get("ready")} == set(stages)
        assert [row["samples"] for row in rows if row["stage"] is None and row["samples"] >= 3]


@pytest.mark.parametrize(("kind", "calls"), [("monolithic", 1), ("decomposed", 1 + STEPS)])
def test_what_happens_once_while_warming_up_teaches_nothing(tmp_path: Path, kind: str, calls: int) -> None:
    policy = load_policy(write_export(tmp_path, kind))
    slow = 3 * 2 * calls  # of four rounds with two sizes each, three take 5 s a call

    def times() -> Iterator[float]:
        now = 0.0
        for call in count():
            yield now
            now += 5.0 if call < slow else 0.010
            yield now

    warm, model = policy.warm_up((1, 2), clock=partial(next, times())), policy.cost_model()
    assert len(warm.batches) == slow
    warm.teach(model)
    one = asked(policy, 0)
    assert model.remaining(Ticket(one, 0, 0.0)) < 0.2
    assert model.estimate(Ticket(one, 0, 0.0)) < 0.2


def test_warm_up_leaves_nothing_behind(policy: DecomposedPolicy) -> None:
    policy.warm_up((1, 2))
    assert policy._flows == {}
    assert policy.cache is not None
    assert policy.cache.snapshot()["entries"] == policy.cache.misses == 0


def test_warm_up_of_a_policy_that_cannot_run_raises(policy: DecomposedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rows: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(onnx(policy)._expert, "call", broken)
    with pytest.raises(ProcessorError, match="no kernel"):
        policy.warm_up((1, 2))
    assert policy._flows == {}


def test_b9_hit_and_miss_are_classes_of_one_shape(policy: DecomposedPolicy) -> None:
    bench = Bench(policy)
    miss = asked(policy, 0)
    bench.answer(miss)
    hit = asked(policy, 0)
    assert miss.shape == hit.shape
    assert (miss.cost_class, hit.cost_class) == ("miss, 5 steps", "hit, 5 steps")
    bench.answer(hit)
    model = bench.scheduler.cost_model("prod")
    known = {row["class"]: row["samples"] for row in model.snapshot() if row["stage"] is None}
    assert known["hit, 5 steps"] == 1
    assert known["miss, 5 steps"] > 1
    # 20 ms of prefix are what a hit saves: estimated apart although both run the same steps.
    tickets = [bench.submit(asked(policy, i)) for i in (0, 7)]
    assert model.remaining(tickets[0]) < model.remaining(tickets[1])


def test_b9_the_shape_tells_executables_apart(tmp_path: Path) -> None:
    small = load_policy(write_export(tmp_path / "a"))
    assert small.shape == "front[4,6,3] tokens[3] state[2] actions[4,2]"
    assert load_policy(write_export(tmp_path / "b")).shape == small.shape


def test_v5_slots_share_nothing(tmp_path: Path) -> None:
    root = write_export(tmp_path, "decomposed")
    a, b = load_policy(root, "a"), load_policy(root, "b")
    Bench(a).answer(asked(a, 0))
    assert asked(a, 0).stage == DENOISE
    assert asked(b, 0).stage == PREFIX
    assert (asked(a, 0).group, asked(b, 0).group) == ("a", "b")


def test_describe_is_json(tmp_path: Path) -> None:
    for kind in KINDS:
        policy = load_policy(write_export(tmp_path / kind, kind))
        described = json.loads(json.dumps(policy.describe()))
        assert described["inference_mode"] == kind
        assert described["model_hash"] == policy.spec.model_hash
        assert described["config"]["model_id"] == "tiny"
        assert (described["prefix_cache"] is None) == isinstance(policy, MonolithicPolicy)
