"""E4: faults on purpose strike whom they say they strike, and every time again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.core.errors import ConfigError, NonFiniteResult, ProcessorError, ProcessorHung
from reflex_runtime.robots import Policy, load_policy, served_by
from reflex_runtime.robots.policy.processors import Fault, GuardedProcessor, InjectedDeath, parse_fault
from robots.tiny import STEPS, Bench, asked, value, write_export


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return load_policy(write_export(tmp_path))


def struck(faulty: GuardedProcessor, fault: Fault, keys: list[str]) -> set[str]:
    return {key for key in keys if faulty._marked(fault, key)}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("prod:raise:0.1", Fault("prod", "raise", 0.1)),
        ("a:nan:1", Fault("a", "nan", 1.0)),
        ("b:hang:0.01", Fault("b", "hang", 0.01, 60.0)),
        ("b:hang:0.01:250", Fault("b", "hang", 0.01, 0.25)),
        ("shadow:slow:0.5", Fault("shadow", "slow", 0.5, 0.5)),
        ("prod:slow:0:1500", Fault("prod", "slow", 0.0, 1.5)),
        ("prod:die:1e-3", Fault("prod", "die", 0.001)),
        ("prod:die:1E-3", Fault("prod", "die", 0.001)),
    ],
)
def test_e4_the_flag_is_parsed_and_written_back(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault
    assert parse_fault(str(fault)) == fault


@pytest.mark.parametrize(
    "text",
    [
        "prod", "prod:raise", "prod:raise:1:2:3", "c:raise:1", "prod:crash:1", "prod:raise:1.5", "prod:raise:nan",
        "prod:raise:often", "prod:raise:1:5", "prod:slow:1:0", "prod:slow:1:nan", "prod:hang:1:x", "prod:slow:1:2:3",
        "prod:raise:1:",
    ],
)  # fmt: skip
def test_e4_a_wrong_flag_is_refused_with_the_format(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^faults='{text}': must be SLOT:KIND:RATE") as caught:
        parse_fault(text, "faults")
    assert caught.value.code == "invalid_config"


def test_e4_the_draw_is_a_share_of_ids_and_always_the_same(policy: Policy) -> None:
    ids = [f"request-{i}" for i in range(4000)]
    fault = Fault("prod", "raise", 0.1)
    first = struck(GuardedProcessor(policy), fault, ids)
    assert 320 <= len(first) <= 480  # 400 expected, four standard deviations
    assert struck(GuardedProcessor(policy), fault, ids) == first
    assert struck(GuardedProcessor(policy, seed=1), fault, ids) != first
    assert struck(GuardedProcessor(policy), Fault("prod", "nan", 0.1), ids) != first
    assert struck(GuardedProcessor(policy), Fault("prod", "raise", 0.0), ids) == set()
    assert struck(GuardedProcessor(policy), Fault("prod", "raise", 1.0), ids) == set(ids)


def one_of(faulty: GuardedProcessor, fault: Fault, n: int) -> list[int]:
    """n requests of which exactly the second is struck."""
    marked = [i for i in range(200) if faulty._marked(fault, f"request-{i}")]
    clean = [i for i in range(200) if i not in marked]
    return [clean[0], marked[0], *clean[1 : n - 1]]


@pytest.mark.parametrize("kind", ["monolithic", "decomposed"])
def test_e4_raise_fails_the_marked_request_and_repeating_saves_the_rest(tmp_path: Path, kind: str) -> None:
    policy = load_policy(write_export(tmp_path, kind))
    fault = parse_fault("prod:raise:0.2")
    faulty = GuardedProcessor(policy, None, [fault])
    bench = Bench(policy, faulty)
    chosen = one_of(faulty, fault, 5)
    tickets = [bench.submit(asked(policy, i)) for i in chosen]
    bench.drain()
    assert [len(b) for b in bench.batches[:4]] == [5, 2, 3, 1]
    with pytest.raises(ProcessorError, match=f"injected fault prod:raise:0.2: request 'request-{chosen[1]}'"):
        value(tickets[1])
    assert all(value(t).actions.shape == (4, 2) for t in tickets if t is not tickets[1])
    with pytest.raises(ProcessorError, match="injected fault"):
        bench.answer(asked(policy, chosen[1]))  # asked again, it meets the fault again


@pytest.mark.parametrize("kind", ["monolithic", "decomposed"])
def test_e4_nan_is_the_guards_to_judge(tmp_path: Path, kind: str) -> None:
    policy = load_policy(write_export(tmp_path, kind))
    fault = parse_fault("prod:nan:0.2")
    bench = Bench(policy, served_by(policy, faults=[fault]))
    chosen = one_of(GuardedProcessor(policy), fault, 4)
    tickets = [bench.submit(asked(policy, i)) for i in chosen]
    bench.drain()
    with pytest.raises(NonFiniteResult):
        value(tickets[1])
    assert all(value(t).actions.shape == (4, 2) for t in tickets if t is not tickets[1])
    assert len(bench.batches) == (1 if kind == "monolithic" else STEPS + 1)


def test_e4_faults_of_other_slots_do_not_strike(policy: Policy) -> None:
    served = served_by(policy, faults=[parse_fault("a:raise:1"), parse_fault("shadow:nan:1")])
    assert Bench(policy, served).answer(asked(policy, 0)).actions.shape == (4, 2)


def test_e4_slow_and_latency_are_per_batch_and_so_per_repeated_call(policy: Policy) -> None:
    slept: list[float] = []
    faults = [parse_fault("prod:slow:1"), parse_fault("prod:raise:0.2")]
    faulty = GuardedProcessor(policy, None, faults, latency=0.02, sleep=slept.append)
    bench = Bench(policy, faulty)
    for i in one_of(faulty, faults[1], 5):
        bench.submit(asked(policy, i))
    bench.drain()
    assert len(bench.batches) > 1
    assert slept == [0.02, 0.5] * len(bench.batches)


def test_e4_slow_strikes_a_share_of_batches(policy: Policy) -> None:
    slept: list[float] = []
    bench = Bench(policy, GuardedProcessor(policy, None, [parse_fault("prod:slow:0.3:10")], sleep=slept.append))
    for i in range(100):
        bench.answer(asked(policy, i))
    assert 12 <= len(slept) <= 48  # 30 expected, four standard deviations
    assert set(slept) == {0.01}


def test_e4_hang_waits_until_it_is_released_and_never_runs_the_batch(policy: Policy) -> None:
    faulty = GuardedProcessor(policy, None, [parse_fault("prod:hang:1")])
    bench = Bench(policy, faulty)
    waits: list[float | None] = []
    waiting = threading.Event()

    def wait(timeout: float | None = None) -> bool:
        waits.append(timeout)
        waiting.set()
        return threading.Event.wait(faulty.release, timeout)

    faulty.release.wait = wait  # type: ignore[method-assign]
    tickets = [bench.submit(asked(policy, i)) for i in range(3)]
    thread = threading.Thread(target=bench.drain)
    thread.start()
    assert waiting.wait(10)
    assert thread.is_alive()
    faulty.release.set()
    thread.join(10)
    assert not thread.is_alive()
    assert waits == [60.0]  # once: the calls that look for the guilty one do not hang again
    for ticket in tickets:
        with pytest.raises(ProcessorHung, match="injected fault prod:hang:1"):
            value(ticket)


def test_e4_die_ends_the_device_thread(policy: Policy) -> None:
    bench = Bench(policy, GuardedProcessor(policy, None, [parse_fault("prod:die:1")]))
    bench.submit(asked(policy, 0))
    with pytest.raises(InjectedDeath):  # not an Exception: nothing between here and the thread catches it
        bench.step()
    assert not issubclass(InjectedDeath, Exception)


def test_e4_life_cycle_reaches_the_policy_through_all_layers(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    verbs: dict[str, Callable[..., Any]] = {
        name: (lambda *a, name=name: called.append(name)) for name in ("start", "drop", "stop")
    }
    for name, verb in verbs.items():
        monkeypatch.setattr(policy, name, verb)
    served = served_by(policy, faults=[parse_fault("prod:nan:0")])
    served.start()
    served.drop([])
    served.stop()
    assert called == ["start", "drop", "stop"]
    assert served.repeatable
