"""What the default rule is for: the comparisons of docs/simulator.md, shortened, with generous margins."""

from __future__ import annotations

import pytest

from reflex_runtime.core.request import Request
from reflex_runtime.sim import Affine, Callers, Fixed, Noisy, Open, Poisson, Report, Setting, compare, simulate
from reflex_runtime.sim import rules as named
from reflex_runtime.sim.rivals import EarlyDrop, HoldAlways, MarginalWait

BENCH = compare.Bench(duration=12.0)


@pytest.fixture(scope="module")
def overload() -> compare.Results:
    return compare.overload(BENCH, only=("250/s", "300/s", "400/s", "600/s"))


def on_time(results: compare.Results, rule: str, rate: str) -> float:
    share = results[rule][rate].on_time
    assert share is not None
    return share


@pytest.mark.parametrize(
    ("rate", "least", "others_at_most"),
    [("250/s", 0.96, 1.0), ("300/s", 0.90, 0.92), ("400/s", 0.73, 0.3), ("600/s", 0.51, 0.05)],
)
def test_in_overload_the_window_rule_answers_on_time_what_simple_rules_do_not(
    overload: compare.Results, rate: str, least: float, others_at_most: float
) -> None:
    assert on_time(overload, "window", rate) >= least
    for rule in ("count 8 + timeout", "count 32 + timeout", "by_cost", "greedy"):
        assert on_time(overload, rule, rate) <= others_at_most


@pytest.mark.parametrize("rate", ["250/s", "300/s", "400/s", "600/s"])
@pytest.mark.parametrize("rival", ["early drop (Nexus)", "marginal wait (BentoML)"])
def test_learning_the_device_costs_little_against_rules_that_were_told_it(
    overload: compare.Results, rival: str, rate: str
) -> None:
    assert on_time(overload, "window", rate) >= on_time(overload, rival, rate) - 0.03


def test_no_device_time_goes_into_late_answers(overload: compare.Results) -> None:
    wasted = {rule: overload[rule]["400/s"].wasted or 0.0 for rule in ("window", "greedy")}
    assert wasted["window"] < 0.05
    assert wasted["greedy"] > 0.5


def test_callers_that_come_back_together_stay_together() -> None:
    """Eight callers, 1 ms of thought: without the hold for expected returns they split into two groups of four."""
    sizes, rates = {}, {}
    for rule in (named.WINDOW, named.UNHELD):
        device = Noisy(Affine(0.020, 0.002), 0.03)
        done = simulate(rule.make(Setting()), Callers(8, Fixed(0.001)), device, duration=10.0, warmup=1.0)
        report = Report.of(done)
        sizes[rule.name], rates[rule.name] = report.batch_size or 0.0, report.throughput
    assert sizes["window"] > 7.5
    assert sizes["no hold"] < 4.5
    assert rates["window"] > 1.4 * rates["no hold"]


def test_nobody_waits_for_callers_that_do_not_come_back_soon() -> None:
    window, always = (BENCH.run(rule, [Callers(8, Fixed(0.400))]) for rule in (named.WINDOW, named.HOLD_ALWAYS))
    assert window.p50 is not None
    assert always.p50 is not None
    assert window.p50 <= always.p50


def test_f7_b21_a_greedy_client_does_not_starve_the_modest() -> None:
    results = compare.fairness(BENCH)
    window, greedy = results["window"][""], results["greedy"][""]
    assert window.fairness is not None
    assert window.fairness >= 0.99
    assert window.goodput > 3.0 * results["greedy, one in flight per client"][""].goodput
    assert window.goodput > 3.0 * greedy.goodput
    # one in flight each: no batch is larger than the number of feeds, and the device runs half empty
    assert results["greedy, one in flight per client"][""].batch_size <= 8.0  # type: ignore[operator]
    for client, (made, good) in window.clients.items():
        assert client == "greedy" or good >= 0.95 * made


def test_equal_clients_lose_nothing_to_fairness() -> None:
    """Planning for shares shortens batches; where nobody takes from anybody that would only cost goodput."""
    workload = [Open(Poisson(50.0), (Request(client=i, time_limit=0.100),)) for i in range(8)]
    planned, unplanned = (BENCH.run(rule, workload) for rule in (named.WINDOW, named.UNPLANNED))
    assert planned.goodput == pytest.approx(unplanned.goodput, rel=0.02)


def test_urgent_requests_keep_their_limit_in_overload() -> None:
    results = compare.priority(BENCH)
    urgent = {rule: by[""].on_time_by["urgent"] for rule, by in results.items()}
    assert urgent["window"] > 0.80
    assert urgent["window"] > urgent["window without planner"] + 0.1
    assert urgent["greedy"] < 0.2


# -- the rivals --------------------------------------------------------------------------------------------------------


def predict(n: int) -> float:
    return 0.020 + 0.002 * n


def test_early_drop_sends_the_longest_run_that_its_first_survives() -> None:
    rule = EarlyDrop(predict)
    for deadline in (0.021, 0.023, 0.100, 0.100):
        rule.submit(Request(time_limit=deadline), 0.0)
    batch = rule.next_batch(0.0)  # from the first: none; from the second: 1 (22 ms); from the third: both
    assert batch is not None
    assert [t.deadline for t in batch.grants] == [0.100, 0.100]
    assert len([e for e in rule.take_events() if type(e).__name__ == "RequestSettled"]) == 2


def test_marginal_wait_goes_at_once_while_nothing_was_ever_waited_for_and_drops_the_hopeless() -> None:
    rule = MarginalWait(predict, goal=0.050)
    rule.submit(Request(), 0.0)
    rule.submit(Request(), 0.030)
    batch = rule.next_batch(0.030)  # 30 ms waited + 24 ms for two is beyond 50 ms
    assert batch is not None
    assert [t.arrived for t in batch.grants] == [0.030]


def test_marginal_wait_waits_in_ticks_while_waiting_is_cheaper_than_usual() -> None:
    rule = MarginalWait(predict, goal=1.0)
    rule.submit(Request(), 0.0)
    first = rule.next_batch(0.100)  # waited 100 ms: the mean past wait
    assert first is not None
    rule.complete(first, [], 0.022, 0.122)
    rule.submit(Request(), 0.200)
    assert rule.next_batch(0.200) is None  # 1 · (0 + 1 + 2 ms) <= 95 ms
    assert rule.wake_at() == pytest.approx(0.201)
    assert rule.next_batch(0.300) is not None  # 1 · (100 + 1 + 2 ms) > 95 ms


def test_hold_always_counts_from_when_the_device_is_free() -> None:
    rule = HoldAlways(0.005)
    rule.submit(Request(), 0.0)
    assert rule.next_batch(0.0) is None
    assert rule.wake_at() == pytest.approx(0.005)
    first = rule.next_batch(0.005)
    assert first is not None
    rule.submit(Request(), 0.010)
    rule.complete(first, [], 0.022, 0.027)
    assert rule.next_batch(0.027) is None
    assert rule.next_batch(0.032) is not None
