"""What the default rule is for: the comparisons of docs/simulator.md, shortened, with generous margins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from bench.sim import compare
from bench.sim import rules as named
from bench.sim.__main__ import main
from bench.sim.loads import Camera, Every
from bench.sim.rivals import EarlyDrop, HoldAlways, MarginalWait
from bench.sim.rules import Setting

from reflex_runtime.core.request import Request
from reflex_runtime.settings import ServeConfig
from reflex_runtime.sim import (
    Affine,
    Around,
    Arrival,
    Callers,
    Fixed,
    Noisy,
    Open,
    Poisson,
    Report,
    RequestStream,
    Think,
    WorkloadPart,
    simulate,
)
from thinned import thinned

BENCH = compare.Bench(duration=7.0)


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
@pytest.mark.long
def test_in_overload_the_window_rule_answers_on_time_what_simple_rules_do_not(
    overload: compare.Results, rate: str, least: float, others_at_most: float
) -> None:
    assert on_time(overload, "window", rate) >= least
    for rule in ("count 8 + timeout", "count 32 + timeout", "by_cost", "greedy"):
        assert on_time(overload, rule, rate) <= others_at_most


@pytest.mark.long  # plays every rule at every rate
@pytest.mark.parametrize("rate", ["250/s", "300/s", "400/s", "600/s"])
@pytest.mark.parametrize("rival", ["early drop (Nexus)", "marginal wait (BentoML)"])
def test_learning_the_device_costs_little_against_rules_that_were_told_it(
    overload: compare.Results, rival: str, rate: str
) -> None:
    assert on_time(overload, "window", rate) >= on_time(overload, rival, rate) - 0.03


def test_no_device_time_goes_into_late_answers() -> None:
    overload = compare.overload(BENCH, only=("400/s",), ruled=("window", "greedy"))
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


@pytest.mark.long
def test_compare_prints_its_tables_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "rules.png"
    assert main(["compare", "--duration-s", "1", "--warmup-s", "0.5", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    for heading in ("on time, offered", "requests/s · p50", "lost · p95 ms", "one greedy feed", "urgent in overload"):
        assert heading in out
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["rules.png", "rules.svg"]


# -- feeds: who is waited for, and whether it pays ---------------------------------------------------------------------

FEEDS = [replace(BENCH, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def feeds() -> list[compare.Results]:
    return [compare.feeds(bench) for bench in FEEDS]


def lost(report: Report) -> int:
    return report.outcomes.get("overrun", 0)


@pytest.mark.parametrize("case", ["30 + 10 fps", "30 + 30 + 10 + 5 fps", "30 + 1 fps", "60 + 25 + 12 fps"])
@pytest.mark.long
def test_f6_cameras_of_different_rates_lose_no_frame_and_no_time(feeds: list[compare.Results], case: str) -> None:
    for results in feeds:
        by_rule = next(by_rule for name, by_rule in results.items() if name.startswith(case))
        held, at_once, always = by_rule["feeds"], by_rule["greedy"], by_rule["by_size"]
        assert lost(held) == lost(at_once) == 0
        assert lost(always) > 0.2 * sum(always.outcomes.values())  # what a hold for everybody costs
        assert held.p95 is not None
        assert held.p95 <= 1.05 * (at_once.p95 or 0.0) + 0.001
        assert held.busy <= at_once.busy + 0.005


EQUAL = ("4 × 30 fps, 10 + 2n ms", "12 × 5 fps, 30 + 3n ms", "4 × 30 fps in step, 10 + 2n ms")


def test_f6_cameras_of_equal_rates_share_batches() -> None:
    for bench in FEEDS:
        results = compare.feeds(bench, only=EQUAL, ruled=("feeds", "greedy"))
        for case, saved in (("4 × 30 fps, 10 + 2n ms", 0.03), ("12 × 5 fps, 30 + 3n ms", 0.10)):
            held, at_once = results[case]["feeds"], results[case]["greedy"]
            assert lost(held) == lost(at_once) == 0
            assert held.busy <= at_once.busy - saved
        in_step = results["4 × 30 fps in step, 10 + 2n ms"]
        assert lost(in_step["feeds"]) == 0
        assert in_step["feeds"].batch_size == pytest.approx(4.0, abs=0.1)
        assert (in_step["greedy"].batch_size or 0.0) < 2.5


FILES = "16 files, 120 ms whatever n"


def test_f6_sixteen_files_on_a_flat_processor_go_sixteen_at_once() -> None:
    for bench in FEEDS:
        by_rule = compare.feeds(bench, only=(FILES,), ruled=("feeds", "greedy"))[FILES]
        assert by_rule["feeds"].batch_size == pytest.approx(16.0, abs=0.2)
        assert by_rule["greedy"].batch_size == pytest.approx(8.0, abs=0.5)
        assert by_rule["feeds"].throughput > 1.8 * by_rule["greedy"].throughput


@pytest.mark.parametrize("runs", thinned([7, 16], [7]))
def test_f6_waiting_loses_no_frame_that_starting_at_once_would_have_saved(runs: int) -> None:
    """Cameras and devices by chance, from idle to overloaded: what a hold costs some feed it must bring in for all."""
    random, at_once, held = Random(7), 0, 0
    for _ in range(runs):
        device = Affine(random.choice([0.005, 0.010, 0.020, 0.040]), random.choice([0.0005, 0.001, 0.002]))
        setting = Setting(batch_timeout=0.050, max_batch_size=8)
        bench = compare.Bench(device=device, duration=8.0, warmup=2.0, seed=random.randrange(100), setting=setting)
        periods = [1.0 / random.choice([1, 5, 10, 12, 15, 25, 30, 60]) for _ in range(random.randint(2, 8))]
        jitter = random.choice([0.0, 0.1, 0.3])
        cameras = [Camera(Every(p, jitter * p), Request(client=i)) for i, p in enumerate(periods)]
        greedy, feeds = (bench.run(rule, cameras, noise=0.03) for rule in (named.GREEDY, named.FEEDS))
        assert lost(feeds) <= 1.03 * lost(greedy) + 2, (device, periods, jitter)
        at_once, held = at_once + lost(greedy), held + lost(feeds)
    assert at_once > 60 * runs  # some were overloaded
    assert held < 0.8 * at_once


@pytest.mark.parametrize(
    ("device", "think"),
    [
        (Affine(0.120, 0.0), Fixed(0.002)),  # shipped otherwise: eight in turn with eight
        (Affine(0.020, 0.002), Around(0.003, 0.001)),
        pytest.param(Affine(0.008, 0.0005), Around(0.0045, 0.0003), marks=pytest.mark.long),  # back after half of a
    ],
)
def test_b6_two_groups_that_alternate_become_one(device: Affine, think: Think) -> None:
    """Sixteen callers, eight of whom began half a batch later, so that two groups take turns at first."""
    half = device.of(8) / 2.0
    groups = [Callers(8, think, name="first"), Delayed(Callers(8, think, name="second"), half)]
    for rule, most in ((named.WINDOW, 0.005), (named.FEEDS, 0.050)):
        setting = Setting(ServeConfig(max_batch_cost_ms=1000.0), batch_timeout=most, max_batch_size=16)
        run = simulate(rule.make(setting), groups, Noisy(device, 0.03), duration=12.0, warmup=6.0)
        assert Report.of(run).batch_size == pytest.approx(16.0, abs=0.6), rule.name


@dataclass(frozen=True)
class Delayed:
    """A source whose streams all begin at one time."""

    inner: WorkloadPart
    at: float

    def streams(self, seed: str) -> Sequence[RequestStream]:
        return [DelayedStream(stream, self.at) for stream in self.inner.streams(seed)]


class DelayedStream:
    waits = True

    def __init__(self, inner: RequestStream, at: float) -> None:
        self._inner, self._at = inner, at

    def next(self, now: float) -> Arrival | None:
        found = self._inner.next(now)
        at, self._at = self._at, 0.0
        return found._replace(at=at) if found is not None and at else found


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
