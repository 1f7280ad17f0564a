"""The ramp: forward when its time has come, back as soon as the guard trips, and always with its reasons."""

from __future__ import annotations

import json
from random import Random

import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.versions.ramp import Change, GuardWatch, Objective, Ramp, RampGuard

GUARD = RampGuard(Objective(99.0, 0.150), 0.01)
SHARES = (5, 20, 50, 100)


def told(change: Change) -> tuple[str, float]:
    """What was decided, and b's share from then on."""
    return change.why.partition(":")[0], change.numbers["share"]


def ramp(guard: RampGuard | None = GUARD, every: float = 600.0) -> Ramp:
    return Ramp(SHARES, every, guard, 0.0)


def good(ramp: Ramp, n: int = 100) -> None:
    for _ in range(n):
        ramp.observe(True, 0.050)


# -- what is typed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p99=150ms,error=1%", RampGuard(Objective(99.0, 0.150), 0.01)),
        ("error=0.5%,p99.9=2s", RampGuard(Objective(99.9, 2.0), 0.005)),
        (" p50=80.5ms ", RampGuard(Objective(50.0, 0.0805), None)),
        ("error=0%", RampGuard(error_rate=0.0)),
    ],
)
def test_v12_guards(text: str, expected: RampGuard) -> None:
    assert RampGuard.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "p99", "p99=150", "p0=150ms", "p100=1s", "p99=0ms", "p99=-1ms", "error=1", "error=100%"),
        *("error=-1%", "p99=150ms,", "p99=150ms,p50=10ms", "error=1%,error=2%", "p99=150ms;error=1%", "p99=nanms"),
        *("P99=150ms", "p99=1e3ms", "p٩٩=150ms", "p99=150ms\nerror=1%", "x" * 1000),
    ],
)
def test_v12_a_wrong_guard_names_flag_value_and_format(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        RampGuard.parse(text)
    assert error.value.message.startswith(f"--guard={text!r:.200}: must be pNN=MSms, error=R%")
    assert "such as p99=150ms,error=1%" in error.value.message
    assert "\n" not in error.value.message


def test_v12_shares() -> None:
    assert Ramp.shares_of("5,20,50,100") == (5, 20, 50, 100)
    assert Ramp.shares_of(" 1, 100 ") == (1, 100)
    assert Ramp.shares_of("100") == (100,)


@pytest.mark.parametrize(
    "text", ["", "5,", "5;20", "0,5", "5,5", "20,5", "5,101", "5.5", "-5", "5%", "٥", "5,20,x", "9" * 900, "1\n"]
)
def test_v12_wrong_shares_name_flag_value_and_format(text: str) -> None:
    if text == "1\n":
        assert Ramp.shares_of(text) == (1,)
        return
    with pytest.raises(ConfigError) as error:
        Ramp.shares_of(text)
    assert error.value.message == (
        f"--ramp={text!r:.200}: must be ascending whole percents in [1, 100] with commas, such as 5,20,50,100"
    )


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600.0), ("90s", 90.0), ("1.5h", 5400.0), ("720h", 2_592_000.0)])
def test_v12_every(text: str, seconds: float) -> None:
    assert Ramp.every_of(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "0s", "0.5s", "-1m", "721h", "10ms", "10 m", "infs", "9" * 400 + "s"])
def test_v12_a_wrong_every_names_flag_value_and_format(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Ramp.every_of(text)
    assert error.value.message == (
        f"--ramp-every={text!r:.200}: must be a number with s, m or h, from 1s to 720h, such as 10m"
    )


# -- the guard ---------------------------------------------------------------------------------------------------------


def fed(guard: RampGuard, *answers: tuple[bool, float], least: int = 30, window: int = 500) -> GuardWatch:
    watch = GuardWatch(guard, window, least)
    for ok, latency in answers:
        watch.add(ok, latency)
    return watch


def test_v12_the_guard_trips_on_the_share_of_failures() -> None:
    fine = [(True, 0.05)] * 292
    assert fed(GUARD, *fine).tripped() is None
    assert fed(GUARD, *fine, *[(False, 0.0)] * 2).tripped() is None
    watch = fed(GUARD, *fine, *[(False, 0.0)] * 8)
    assert watch.tripped() == "error 2.67% (8 of 300 answers), limit 1%"
    assert watch.numbers() == {"answers": 300, "error_share": pytest.approx(8 / 300), "p99_ms": 50.0}


def test_v12_exactly_at_the_limit_is_within_it() -> None:
    answers = [(False, 0.0)] * 29 + [(True, 0.05)] * 71  # 0.29 * 100 is less than 29 in floating point
    assert fed(RampGuard(error_rate=0.29), *answers).above() is None
    assert fed(RampGuard(error_rate=0.29), *answers, (False, 0.0)).above() is not None
    assert fed(RampGuard(Objective(50.0, 0.05)), *[(True, 0.05)] * 100, *[(True, 9.0)] * 40).above() is None


def test_v12_above_a_limit_by_chance_is_above_it_and_no_trip() -> None:
    by_chance = fed(GUARD, *[(True, 0.05)] * 492, *[(False, 0.0)] * 8)
    assert (by_chance.tripped(), by_chance.above()) == (None, "error 1.60% (8 of 500 answers), limit 1%")
    assert fed(GUARD, *[(True, 0.05)] * 487, *[(False, 0.0)] * 13).tripped() is not None
    slow = fed(GUARD, *[(True, 0.05)] * 492, *[(True, 0.2)] * 8)
    assert (slow.tripped(), slow.above()) == (None, "p99 200.0 ms (8 of 500 answers slower), limit 150 ms")
    assert fed(GUARD, *[(True, 0.05)] * 487, *[(True, 0.2)] * 13).tripped() is not None
    assert fed(GUARD, *[(True, 0.05)] * 495, *[(False, 0.0)] * 5).above() is None
    assert GuardWatch(GUARD).above() is None


@pytest.mark.parametrize(("rate", "least", "most"), [(0.001, 0, 0), (0.005, 0, 2), (0.05, 25, 25), (0.2, 25, 25)])
def test_v12_over_a_whole_ramp_the_guard_seldom_trips_below_its_limit(rate: float, least: int, most: int) -> None:
    """25 ramps of 6,000 answers, looked at after every fifth."""
    rolled_back = 0
    for seed in range(25):
        random, watch = Random(seed), GuardWatch(RampGuard(error_rate=0.01))
        for i in range(6000):
            watch.add(random.random() >= rate, 0.05)
            if i % 5 == 0 and watch.tripped() is not None:
                rolled_back += 1
                break
    assert least <= rolled_back <= most


def test_v12_the_guard_trips_on_slow_answers() -> None:
    watch = fed(GUARD, *[(True, 0.05)] * 290, *[(True, 0.2)] * 10)
    assert watch.tripped() == "p99 200.0 ms (10 of 300 answers slower), limit 150 ms"
    assert fed(RampGuard(Objective(95.0, 0.15)), *[(True, 0.05)] * 290, *[(True, 0.2)] * 10).tripped() is None
    assert fed(RampGuard(Objective(50.0, 0.04)), *[(True, 0.05)] * 30).tripped() is not None


def test_v12_only_the_200s_have_a_latency() -> None:
    slow_failures = [(False, 9.0)] * 300 + [(True, 0.05)] * 100
    assert fed(RampGuard(Objective(99.0, 0.15)), *slow_failures).tripped() is None
    fast_failures = [(False, 0.0)] * 300 + [(True, 0.2)] * 30
    assert fed(RampGuard(Objective(99.0, 0.15)), *fast_failures).tripped() is not None
    assert fed(RampGuard(Objective(99.0, 0.15)), *fast_failures[:-1]).tripped() is None  # 29 of them are too few
    some = [(False, 9.0)] * 100 + [(True, 0.05)] * 397 + [(True, 9.0)] * 3
    assert fed(RampGuard(Objective(99.0, 0.15)), *some).above() is None  # 3 of 400
    assert (
        fed(RampGuard(Objective(99.0, 0.15)), *[(False, 9.0)] * 3, *[(True, 0.05)] * 30, (True, 9.0)).tripped() is None
    )


def test_v12_a_guard_needs_so_many_answers_before_it_may_trip() -> None:
    watch = GuardWatch(RampGuard(Objective(99.0, 0.15), 0.01))
    for _ in range(29):
        watch.add(False, 0.0)
        assert watch.tripped() is None
    watch.add(False, 0.0)
    assert watch.tripped() == "error 100.00% (30 of 30 answers), limit 1%"
    assert fed(GUARD, *[(False, 0.0)] * 3, least=3).tripped() is not None


def test_v12_one_hiccup_does_not_take_a_policy_back() -> None:
    for hiccup in ((False, 0.0), (True, 3.0)):
        fine = [(True, 0.05)] * 40
        assert fed(GUARD, *fine, hiccup, hiccup).tripped() is None
        assert fed(GUARD, *fine, hiccup, hiccup, hiccup).tripped() is not None


def test_v12_the_guard_forgets_what_has_left_its_window() -> None:
    watch = fed(GUARD, *[(False, 0.0)] * 50, *[(True, 0.05)] * 450)
    assert watch.tripped() is not None
    for _ in range(45):
        watch.add(True, 0.05)
    assert watch.tripped() is None  # 5 of 500
    watch.add(True, 0.05)
    assert watch.numbers() == {"answers": 500, "error_share": 4 / 500, "p99_ms": 50.0}


def test_v12_a_guard_without_a_part_does_not_look_at_it() -> None:
    bad = [(False, 0.0)] * 100 + [(True, 9.0)] * 100
    assert fed(RampGuard(error_rate=0.9), *bad).tripped() is None
    assert fed(RampGuard(), *bad).tripped() is None
    assert fed(RampGuard(), *bad).numbers() == {"answers": 200, "error_share": 0.5}
    assert GuardWatch(GUARD).numbers() == {"answers": 0}


# -- forward -----------------------------------------------------------------------------------------------------------


def test_v12_stage_by_stage_to_the_end() -> None:
    subject, seen = ramp(), []
    assert (subject.share, subject.state) == (5, "running")
    for now in range(1, 2500):
        good(subject, 1)
        decision = subject.evaluate(float(now))
        if decision is not None:
            seen.append((decision.at, *told(decision), subject.share))
    assert seen == [
        (600.0, "advance", 20, 20),
        (1200.0, "advance", 50, 50),
        (1800.0, "advance", 100, 100),
        (2400.0, "finish", 100, 100),
    ]
    assert subject.state == "finished"
    assert [d.why for d in subject.decisions][1] == "advance: b was watched at 20 % for its time"
    assert subject.decisions[1].numbers == {
        "share": 50, "stage_answers": 600, "answers": 500, "error_share": 0.0, "p99_ms": 50.0,
    }  # fmt: skip


def test_v12_a_ramp_that_stops_short_of_100_leaves_the_share_there() -> None:
    subject = Ramp((5, 20), 10.0, None, 100.0)
    assert subject.evaluate(109.9) is None
    assert subject.evaluate(110.0) == Change(
        110.0, "ramp", "advance: b was watched at 5 % for its time", {"share": 20, "stage_answers": 0, "answers": 0}
    )
    finish = subject.evaluate(120.0)
    assert finish is not None
    assert (*told(finish), subject.state) == ("finish", 20, "finished")
    assert subject.evaluate(1e6) is None


def test_v12_being_called_late_makes_no_stage_longer() -> None:
    subject = ramp(guard=None)
    assert subject.evaluate(607.0) is not None
    assert subject.evaluate(1199.0) is None
    assert subject.evaluate(1200.0) is not None


def test_v12_being_called_very_late_eats_no_stage_up() -> None:
    subject = ramp(guard=None)
    decision = subject.evaluate(10_000.0)
    assert decision is not None
    assert told(decision) == ("advance", 20)  # one stage at a time
    assert subject.evaluate(10_299.0) is None  # half its time at its own share
    assert subject.evaluate(10_300.0) is not None


def test_v12_above_a_limit_by_chance_a_stage_does_not_end() -> None:
    subject = ramp()
    good(subject, 98)
    for _ in range(2):
        subject.observe(False, 0.0)
    hold = subject.evaluate(600.0)
    assert hold is not None
    assert told(hold) == ("hold", 5)
    assert hold.why == "hold: guard: error 2.00% (2 of 100 answers), limit 1%; not beyond chance yet"
    good(subject, 99)
    assert subject.evaluate(601.0) is None
    good(subject, 1)
    advance = subject.evaluate(602.0)
    assert advance is not None
    assert told(advance) == ("advance", 20)


def test_v12_a_guard_that_saw_nothing_vouches_for_nothing() -> None:
    subject = ramp()
    good(subject, 29)
    hold = subject.evaluate(600.0)
    assert hold is not None
    assert told(hold) == ("hold", 5)
    assert hold.why == "hold: b has had 29 answers in this stage, the guard needs 30"
    assert hold.numbers["stage_answers"] == 29
    assert subject.snapshot(0.0)["held"] is True
    assert [subject.evaluate(600.0 + i) for i in range(1, 1000)] == [None] * 999  # said once
    good(subject, 1)
    advance = subject.evaluate(1700.0)
    assert advance is not None
    assert told(advance) == ("advance", 20)
    good(subject)
    assert subject.evaluate(2299.0) is None  # after a hold the next stage has its whole time
    assert subject.evaluate(2300.0) is not None
    hold = subject.evaluate(2900.0)  # what was seen at 20 % says nothing about 50 %
    assert hold is not None
    assert told(hold)[0] == "hold"


# -- back --------------------------------------------------------------------------------------------------------------


def test_v12_a_guard_that_trips_rolls_back_at_the_next_evaluation_and_says_why() -> None:
    subject = ramp()
    good(subject)
    assert subject.evaluate(600.0) is not None
    for _ in range(5):
        subject.observe(False, 0.0)
    decision = subject.evaluate(601.0)
    assert decision == Change(
        601.0,
        "ramp",
        "rollback: guard: error 4.76% (5 of 105 answers), limit 1%",
        {"share": 0, "stage_answers": 5, "answers": 105, "error_share": pytest.approx(5 / 105), "p99_ms": 50.0},
    )
    assert (subject.share, subject.state) == (0, "rolled_back")
    good(subject, 10_000)
    assert subject.snapshot(0.0)["numbers"]["stage_answers"] == 5  # what comes now is no longer its business
    assert [subject.evaluate(601.0 + 600.0 * i) for i in range(20)] == [None] * 20
    assert subject.share == 0


def test_v12_a_slow_version_is_rolled_back_at_once() -> None:
    subject = ramp()
    for _ in range(30):
        subject.observe(True, 0.4)
    decision = subject.evaluate(1.0)
    assert decision is not None
    assert decision.why == "rollback: guard: p99 400.0 ms (30 of 30 answers slower), limit 150 ms"
    assert decision.numbers["p99_ms"] == 400.0


def test_v12_a_trip_at_the_end_of_a_stage_is_no_advance() -> None:
    subject = ramp()
    for _ in range(100):
        subject.observe(False, 0.0)
    decision = subject.evaluate(600.0)
    assert decision is not None
    assert told(decision)[0] == "rollback"


def test_v12_without_a_guard_nothing_trips() -> None:
    subject = ramp(guard=None)
    for _ in range(100):
        subject.observe(False, 0.0)
    assert subject.evaluate(1.0) is None
    assert subject.evaluate(600.0) is not None
    assert subject.share == 20


def test_v12_a_reason_from_outside_rolls_back_too() -> None:
    subject = ramp()
    decision = subject.roll_back(7.0, "an operator asked")
    assert decision is not None
    assert (decision.at, decision.why, told(decision)[1]) == (7.0, "rollback: an operator asked", 0)
    assert (subject.share, subject.state) == (0, "rolled_back")
    assert subject.roll_back(8.0, "again") is None
    assert len(subject.decisions) == 1
    finished = Ramp((100,), 1.0, None, 0.0)
    finished.evaluate(1.0)
    assert finished.roll_back(2.0, "too late") is None
    assert (finished.share, finished.state) == (100, "finished")


# -- always ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_v12_the_share_never_exceeds_the_plan_and_stays_0_after_a_rollback(seed: int) -> None:
    random = Random(seed)
    shares = tuple(sorted(random.sample(range(1, 100), random.randint(1, 5))))
    every, begin = random.choice([1.0, 10.0, 600.0]), random.choice([0.0, 12345.678])
    guard = random.choice([None, GUARD, RampGuard(error_rate=0.0), RampGuard(Objective(95.0, 0.2))])
    subject = Ramp(shares, every, guard, begin)
    failing = random.choice([0.0, 0.001, 0.01, 0.2])
    now, before, rolled_back = begin, subject.share, False
    for _ in range(300):
        now += every * random.choice([0.0, 0.01, 0.1, 0.5, 2.0])
        for _ in range(random.choice([0, 1, 40])):
            subject.observe(random.random() >= failing, 0.05)
        if random.random() < 0.005:
            subject.roll_back(now, "outside")
        decision = subject.evaluate(now)
        if decision is not None:
            assert (decision.at, told(decision)[1]) == (now, subject.share)
            json.dumps(decision.numbers, allow_nan=False)
        planned = shares[min(int((now - begin) / every * 2.0 + 1e-6), len(shares) - 1)]  # half a stage at the least
        assert subject.share <= planned
        assert subject.share in {*shares, 0}
        rolled_back = rolled_back or subject.state == "rolled_back"
        assert not rolled_back or (subject.share == 0 and subject.state == "rolled_back")
        assert rolled_back or subject.share in {before, *shares[shares.index(before) + 1 :][:1]}  # one stage at a time
        before = subject.share
    assert len(subject.decisions) <= 2 * len(shares) + 1
    assert subject.snapshot(0.0)["decisions"][-1:] == [
        {"at": d.at, "kind": "ramp", "why": d.why, "numbers": d.numbers} for d in subject.decisions[-1:]
    ]


def test_the_snapshot_is_json_and_counts_from_now() -> None:
    subject = ramp()
    good(subject, 10)
    subject.evaluate(600.0)
    found = json.loads(json.dumps(subject.snapshot(610.0), allow_nan=False))
    assert (found["state"], found["share"], found["stage"], found["shares"]) == ("running", 5, 1, list(SHARES))
    assert (found["every_s"], found["left_s"], found["held"]) == (600.0, 0.0, True)
    assert found["decisions"][0]["why"].startswith("hold: ")
    assert found["numbers"]["stage_answers"] == 10
    assert ramp().snapshot(100.0)["left_s"] == 500.0
