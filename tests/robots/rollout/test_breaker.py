"""The breaker: when a slot is drained, who serves meanwhile, and how it comes back."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise, product
from math import exp, inf, log, prod
from random import Random

import numpy as np
import pytest

from reflex_runtime.robots.versions.breaker import ALPHA, ALTERNATIVES, RATE, Breaker, CrashEvidence
from reflex_runtime.robots.versions.router import Router, bucket

LIMIT = log(1 / ALPHA)


def crash(breaker: Breaker, slot: str, times: int, now: float = 0.0) -> list[bool]:
    return [breaker.crashed(slot, now) for _ in range(times)]


def drained(slots: str = "ab", which: str = "a", now: float = 0.0, **options: float) -> Breaker:
    breaker = Breaker(list(slots), 5, **options)
    for slot in which:
        assert crash(breaker, slot, 5, now)[-1]
    return breaker


# -- the run of crashes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 5, 40])
@pytest.mark.parametrize(("slot", "verdict", "other"), [("a", "drain-a", "b"), ("b", "drain-b", "a")])
def test_v6_so_many_crashes_in_a_row_drain_the_slot(limit: int, slot: str, verdict: str, other: str) -> None:
    breaker = Breaker(("a", "b"), limit)
    assert crash(breaker, slot, limit) == [False] * (limit - 1) + [True]
    assert (breaker.verdict, breaker.count(slot), breaker.count(other)) == (verdict, limit, 0)
    assert breaker.verdicts == {slot: "drained", other: "ok"}
    assert breaker.place(slot, "ep", 0.0) == other
    assert breaker.place(other, "ep", 0.0) == other
    assert breaker.crashed(slot, 0.0) is False  # it opens once


def test_v6_a_clean_answer_resets_that_slot_only() -> None:
    breaker = Breaker(("a", "b"), 5)
    for slot in "ab":
        crash(breaker, slot, 4)
    assert breaker.answered("a") is False
    assert (breaker.count("a"), breaker.count("b")) == (0, 4)
    assert breaker.crashed("b", 0.0)
    assert breaker.verdict == "drain-b"
    assert crash(breaker, "a", 5) == [False] * 4 + [True]  # by its run: nobody would take over for a rate


def test_v6_both_open_is_degraded_and_nobody_serves() -> None:
    breaker = drained(which="ab")
    assert breaker.verdict == "degraded"
    assert breaker.verdicts == {"a": "drained", "b": "drained"}
    assert breaker.place("a", "ep", 1.0) is None
    assert breaker.place("b", "ep", 1.0) is None


def test_v6_one_slot_alone_is_degraded_at_once() -> None:
    breaker = drained("p", "p")
    assert (breaker.verdict, breaker.verdicts) == ("degraded", {"p": "drained"})
    assert breaker.place("p", "req", 29.9) is None
    assert breaker.place("p", "req", 30.0) == "p"
    assert breaker.verdicts == {"p": "probing"}
    assert breaker.answered("p")
    assert (breaker.verdict, breaker.verdicts) == ("ok", {"p": "ok"})


def test_v6_0_disables_all_of_it_and_still_counts() -> None:
    breaker = Breaker(("a", "b"), 0)
    assert not any(crash(breaker, "a", 1000))
    assert (breaker.verdict, breaker.count("a"), breaker.place("a", "ep", 0.0)) == ("ok", 1000, "a")
    assert breaker.answered("a") is False
    assert breaker.count("a") == 0


# -- the crash rate ----------------------------------------------------------------------------------------------------


def test_v6_every_other_call_crashing_is_noticed_without_any_run() -> None:
    breaker = Breaker(("a", "b"), 5)
    opened = []
    for i in range(20):
        opened.append(breaker.crashed("b", float(i)))
        breaker.answered("b")
    assert opened.index(True) == 2
    assert breaker.verdict == "drain-b"
    why = breaker.snapshot(0.0)["slots"]["b"]["why"]
    assert why.startswith("crash rate above 1%: 3 crashes, e-value ")


def test_v6_an_unbroken_run_is_left_to_the_counter() -> None:
    """Whoever allows forty in a row gets forty, though the evidence of four would do."""
    breaker = Breaker(("a", "b"), 40)
    crash(breaker, "a", 39)
    assert breaker.verdict == "ok"
    breaker.answered("a")
    assert breaker.crashed("a", 0.0)  # 40 of 41: a rate, and no longer one run


@pytest.mark.parametrize("slots", [("prod",), ("a", "b")])
def test_v6_a_crash_rate_drains_only_what_another_slot_replaces(slots: tuple[str, ...]) -> None:
    """Nobody would answer the four of five whose calls work."""
    breaker = Breaker(slots, 5)
    if len(slots) == 2:
        crash(breaker, slots[1], 5)
    for i in range(200):
        assert not breaker.crashed(slots[0], float(i) / 100)
        for _ in range(4):
            breaker.answered(slots[0])
    crash(breaker, slots[0], 4)
    assert breaker.crashed(slots[0], 2.0)  # now nobody is answered


def test_v6_fewer_than_three_crashes_are_never_an_alarm() -> None:
    evidence = CrashEvidence()
    for alarmed in (False, False, True):
        evidence.crashed()
        assert evidence.alarmed is alarmed
        assert evidence.log_e > LIMIT or evidence.crashes == 1


def test_v6_old_crashes_no_longer_weigh() -> None:
    evidence = CrashEvidence()
    for _ in range(5):
        evidence.crashed()
    evidence.clean(10_000)
    assert (evidence.crashes, evidence.alarmed) == (0, False)
    assert evidence.log_e == pytest.approx(log(ALPHA))
    assert (CrashEvidence().crashes, CrashEvidence().log_e) == (0, 0.0)


def test_v6_the_evidence_is_the_mean_of_floored_likelihood_ratios() -> None:
    random, evidence, ratios = Random(3), CrashEvidence(), [1.0] * len(ALTERNATIVES)
    for _ in range(3000):
        if random.random() < 0.02:
            evidence.crashed()
            ratios = [m * p / RATE for m, p in zip(ratios, ALTERNATIVES, strict=True)]
        else:
            evidence.clean()
            ratios = [max(m * (1 - p) / (1 - RATE), ALPHA) for m, p in zip(ratios, ALTERNATIVES, strict=True)]
        assert exp(evidence.log_e) == pytest.approx(sum(ratios) / len(ratios), rel=1e-9)


def test_v6_many_clean_calls_at_once_are_as_many_single_ones() -> None:
    random, single, bulk = Random(4), CrashEvidence(), CrashEvidence()
    for _ in range(200):
        n = random.choice([1, 3, 50, 400])
        for _ in range(n):
            single.clean()
        bulk.clean(n)
        assert (bulk.crashes, bulk.log_e) == (single.crashes, pytest.approx(single.log_e, abs=1e-9))
        single.crashed()
        bulk.crashed()


def test_v6_the_evidence_is_a_fair_bet_at_the_rate_that_is_put_up_with() -> None:
    """Exact, over all histories of 12 calls: its mean grows by no more than the floor's share a call."""
    mean = 0.0
    for history in product((False, True), repeat=12):
        evidence = CrashEvidence()
        for crashed in history:
            evidence.crashed() if crashed else evidence.clean()
        mean += prod(RATE if crashed else 1 - RATE for crashed in history) * exp(evidence.log_e)
    assert 1.0 <= mean <= 1.0 + 12 * ALPHA


def calls_to_alarm(rate: float, clean: int, runs: int, rng: np.random.Generator) -> list[int]:
    """Calls until the alarm, run by run, of a slot that begins to crash at `rate` after so many clean calls."""
    found = []
    for _ in range(runs):
        evidence, calls = CrashEvidence(), 0
        evidence.clean(clean)
        while not evidence.alarmed:
            gap = int(rng.geometric(rate))
            evidence.clean(gap - 1)
            evidence.crashed()
            calls += gap
        found.append(calls)
    return found


@pytest.mark.parametrize(
    ("rate", "clean", "median", "late"),
    [(0.2, 0, 25, 60), (0.2, 100_000, 40, 80), (0.05, 0, 250, 600), (0.05, 100_000, 420, 850)],
)
def test_v6_a_crash_rate_is_noticed_within_so_many_calls(rate: float, clean: int, median: float, late: float) -> None:
    calls = calls_to_alarm(rate, clean, 400, np.random.default_rng(1))
    assert np.median(calls) <= median
    assert np.quantile(calls, 0.95) <= late


@pytest.mark.parametrize(("rate", "most"), [(0.001, 0.0), (0.005, 0.0), (0.01, 1.0)])
def test_v6_false_alarms_are_fewer_than_one_in_a_million_calls(rate: float, most: float) -> None:
    evidence, rng, alarms, calls = CrashEvidence(), np.random.default_rng(2), 0, 0
    evidence.clean(100_000)
    for gap in rng.geometric(rate, size=int(5_000_000 * rate)).tolist():
        evidence.clean(gap - 1)
        evidence.crashed()
        calls += gap
        if evidence.alarmed:
            alarms += 1
            evidence = CrashEvidence()
            evidence.clean(100_000)
    assert alarms / (calls / 1e6) <= most


def test_v6_without_the_floor_a_long_clean_run_would_blind_it() -> None:
    """What the floor is for: the same crashes, and a plain e-process that remembers every clean call."""
    calls, plain = 0, [100_000 * log((1 - p) / (1 - RATE)) for p in ALTERNATIVES]
    while max(plain) < LIMIT:  # one call in five crashes
        calls += 5
        plain = [m + log(p / RATE) + 4 * log((1 - p) / (1 - RATE)) for m, p in zip(plain, ALTERNATIVES, strict=True)]
    assert calls > 9000


# -- probes ------------------------------------------------------------------------------------------------------------


def test_v7_one_key_at_a_time_is_the_probe() -> None:
    breaker = drained(now=100.0)
    assert breaker.place("a", "ep1", 129.9) == "b"
    assert breaker.place("a", "ep1", 130.0) == "a"
    assert breaker.verdicts == {"a": "probing", "b": "ok"}
    assert breaker.verdict == "drain-a"
    assert breaker.place("a", "ep2", 130.0) == "b"
    assert breaker.place("a", "ep1", 140.0) == "a"  # the episode stays together
    assert breaker.place("b", "ep1", 140.0) == "b"


def test_v7_a_probe_that_is_answered_closes_the_slot_and_all_starts_afresh() -> None:
    breaker = drained()
    breaker.place("a", "ep1", 30.0)
    breaker.crashed("a", 31.0)  # cool-down 60 s
    assert breaker.place("a", "ep1", 91.0) == "a"
    assert breaker.answered("a") is True
    assert (breaker.verdict, breaker.count("a")) == ("ok", 0)
    state = breaker.snapshot(92.0)["slots"]["a"]
    assert (state["log_e"], state["cooldown_s"], state["why"], state["open_s"]) == (0.0, 30.0, None, None)
    assert breaker.place("a", "ep9", 92.0) == "a"
    assert breaker.answered("a") is False
    assert crash(breaker, "a", 5, 100.0) == [False] * 4 + [True]
    assert breaker.place("a", "ep9", 129.9) == "b"
    assert breaker.place("a", "ep9", 130.0) == "a"


def test_v7_the_cool_down_doubles_with_every_probe_that_crashes_up_to_eight_minutes() -> None:
    breaker, now = drained(), 0.0
    for cooldown in (30.0, 60.0, 120.0, 240.0, 480.0, 480.0):
        assert breaker.place("a", "ep", now + cooldown - 0.001) == "b"
        now += cooldown
        assert breaker.place("a", f"ep{now}", now) == "a"
        assert breaker.crashed("a", now) is False
        assert breaker.verdicts["a"] == "drained"
        assert breaker.place("a", f"ep{now}", now) == "b"  # the probe's episode goes over as well


def test_v7_settable_cool_down() -> None:
    breaker = drained(cooldown=2.0, longest=5.0)
    for at, wait in ((2.0, 4.0), (6.0, 5.0), (11.0, 5.0)):
        assert breaker.place("a", "ep", at) == "a"
        breaker.crashed("a", at)
        assert breaker.snapshot(at)["slots"]["a"]["retry_in_s"] == wait
    always = drained(cooldown=0.0)
    assert [always.place("a", key, 0.0) for key in ("x", "y")] == ["a", "a"]


def test_v7_crashes_of_calls_queued_before_the_drain_do_not_double_the_cool_down() -> None:
    breaker = drained()
    crash(breaker, "a", 7, 3.0)
    assert breaker.count("a") == 12
    assert breaker.place("a", "ep", 30.0) == "a"
    crash(breaker, "a", 3, 31.0)  # the probe's, and two more of the same episode: it doubles once
    assert breaker.place("a", "ep", 90.9) == "b"
    assert breaker.place("a", "ep", 91.0) == "a"


def test_v7_a_probe_that_never_answers_is_replaced_after_the_cool_down() -> None:
    breaker = drained()
    assert breaker.place("a", "ep1", 50.0) == "a"
    assert breaker.place("a", "ep2", 79.9) == "b"
    assert breaker.place("a", "ep2", 80.0) == "a"
    assert breaker.place("a", "ep1", 80.0) == "b"
    assert breaker.place("a", "ep3", 110.0) == "a"  # as long again: nobody crashed
    assert breaker.answered("a")


def test_v7_with_both_open_each_is_probed_on_its_own_and_degraded_is_left() -> None:
    breaker = drained(which="ab")
    assert breaker.place("a", "ep_a", 30.0) == "a"
    assert breaker.place("b", "ep_b", 30.0) == "b"
    assert breaker.verdicts == {"a": "probing", "b": "probing"}
    assert breaker.place("a", "ep_b", 30.0) is None
    breaker.crashed("a", 31.0)
    assert breaker.place("b", "ep_b", 31.0) == "b"
    assert breaker.answered("b")
    assert breaker.verdict == "drain-a"
    assert breaker.place("a", "ep_a", 32.0) == "b"
    assert breaker.place("a", "ep_a", 91.0) == "a"
    assert breaker.answered("a")
    assert breaker.verdict == "ok"


def test_v6_a_clean_answer_of_an_old_call_ends_a_run_and_the_drain_with_it() -> None:
    breaker = drained()
    assert breaker.answered("a") is True
    assert breaker.verdict == "ok"


def test_v7_a_clean_answer_of_an_old_call_says_nothing_about_a_rate() -> None:
    breaker = Breaker(("a", "b"), 5)
    for _ in range(3):
        breaker.answered("a")
        opened = breaker.crashed("a", 0.0)
    assert opened
    assert breaker.answered("a") is False  # four of five are clean at 20 %
    assert breaker.verdict == "drain-a"
    assert breaker.place("a", "ep", 30.0) == "a"
    assert breaker.answered("a") is True
    assert breaker.verdict == "ok"


def test_v7_an_operator_closes_a_slot() -> None:
    breaker = drained(which="ab")
    breaker.place("a", "ep", 30.0)
    breaker.reset("a")
    assert (breaker.verdict, breaker.count("a")) == ("drain-b", 0)
    assert breaker.place("a", "any", 31.0) == "a"
    assert breaker.place("b", "any", 31.0) == "b"  # a probe of its own
    assert breaker.place("b", "other", 31.0) == "a"


def test_the_snapshot_is_json_and_counts_from_now() -> None:
    breaker = drained(which="a", now=10.0)
    found = json.loads(json.dumps(breaker.snapshot(15.0), allow_nan=False))
    assert (found["verdict"], found["max_consecutive"]) == ("drain-a", 5)
    assert found["slots"]["b"]["why"] is None
    found = breaker.snapshot(15.0)["slots"]["a"]
    assert found.pop("log_e") > LIMIT
    assert found == {
        "verdict": "drained",
        "consecutive": 5,
        "why": "5 calls crashed in a row",
        "open_s": 5.0,
        "retry_in_s": 25.0,
        "cooldown_s": 30.0,
    }
    assert breaker.snapshot(1000.0)["slots"]["a"]["retry_in_s"] == 0.0


# -- random histories against the obvious ------------------------------------------------------------------------------


class NaiveSlot:
    """One slot told as a story: everything that happened since it was last fresh, looked at anew each time."""

    def __init__(self, limit: int, cooldown: float, longest: float) -> None:
        self.limit, self.first, self.longest = limit, cooldown, longest
        self.fresh()
        self.open = False

    def fresh(self) -> None:
        self.open, self.story, self.run, self.failed, self.probe, self.last = False, "", 0, 0, None, -inf

    @property
    def wait(self) -> float:
        return min(self.first * 2**self.failed, self.longest)

    def rate(self) -> bool:
        ratios, weighing = [1.0] * 6, 0
        for what in self.story:
            for i, p in enumerate(ALTERNATIVES):
                ratios[i] = ratios[i] * p / RATE if what == "x" else max(ratios[i] * (1 - p) / (1 - RATE), ALPHA)
            weighing = 0 if max(ratios) <= ALPHA else weighing + (what == "x")
        unbroken = len(self.story) - len(self.story.rstrip("x"))
        return weighing >= 3 and weighing > unbroken and sum(ratios) / 6 >= 1 / ALPHA

    def crashed(self, now: float, replaced: bool) -> bool:
        self.run += 1
        if self.open:
            if self.probe is not None:
                self.failed, self.probe, self.last = self.failed + 1, None, now
            return False
        self.story += "x"
        in_a_row = self.run >= self.limit
        if self.limit == 0 or not (in_a_row or (replaced and self.rate())):
            return False
        self.open, self.by_rate, self.last = True, not in_a_row, now
        return True

    def answered(self) -> bool:
        self.run = 0
        if not self.open:
            self.story += "."
        elif self.probe is not None or not self.by_rate:
            self.fresh()
            return True
        return False

    def takes(self, key: str, now: float) -> bool:
        if self.open and now - self.last >= self.wait:
            self.probe, self.last = key, now
        return not self.open or self.probe == key


@pytest.mark.parametrize("seed", range(60))
def test_v6_v7_over_random_histories_it_is_the_obvious_one(seed: int) -> None:
    random = Random(seed)
    names = random.choice([["prod"], ["a", "b"]])
    limit, cooldown = random.choice([0, 1, 2, 5, 9]), random.choice([0.0, 1.0, 8.0])
    longest = random.choice([8.0, 64.0])
    breaker = Breaker(names, limit, cooldown, longest)
    naive = {name: NaiveSlot(limit, cooldown, longest) for name in names}
    crashing = {name: random.choice([0.02, 0.2, 0.6, 1.0]) for name in names}
    now = 0.0
    for _ in range(400):
        now += random.choice([0.0, 0.25, 1.0, 5.0])
        slot, what = random.choice(names), random.random()
        other = names[-1 - names.index(slot)]
        if what < 0.01:
            breaker.reset(slot)
            naive[slot].fresh()
        elif what < 0.5:
            key = random.choice("wxyz")
            right = slot if naive[slot].takes(key, now) else other if not naive[other].open else None
            assert breaker.place(slot, key, now) == right
        elif random.random() < crashing[slot]:
            replaced = any(not naive[other].open for other in names if other != slot)
            assert breaker.crashed(slot, now) == naive[slot].crashed(now, replaced)
        else:
            assert breaker.answered(slot) == naive[slot].answered()
        states = {n: "ok" if not s.open else "probing" if s.probe is not None else "drained" for n, s in naive.items()}
        assert breaker.verdicts == states
        assert [breaker.count(name) for name in names] == [naive[name].run for name in names]
        shut = [name for name in names if naive[name].open]
        assert breaker.verdict == ("ok" if not shut else "degraded" if shut == names else f"drain-{shut[0]}")


def test_v6_v7_with_the_router_a_drain_moves_each_episode_once_and_new_ones_probe() -> None:
    """As a server puts them together: 80/20, b fails from 10 s to 100 s, ten episodes begin every second."""
    router, breaker, told, slots = Router(80), Breaker(("a", "b"), 5), Counter[str](), defaultdict[str, list[str]](list)
    returned, errors = 0.0, 0
    for step in range(1500):
        now = step / 10
        for key in (f"ep_{step}", f"ep_{max(0, step - 5)}", f"ep_{max(0, step - 300)}"):  # some go on for 30 s
            routing = router.route(key, "r", now)
            slot = breaker.place(routing.slot, routing.key, now)
            assert slot is not None
            routing = router.move(routing, slot)
            told[key] += routing.changed
            slots[key].append(slot)
            if slot == "b" and 10.0 <= now < 100.0:
                errors += 1
                breaker.crashed(slot, now)
            elif breaker.answered(slot):
                returned = now
    changes = {key: sum(x != y for x, y in pairwise(path)) for key, path in slots.items()}
    assert {key: n for key, n in told.items() if n} == {key: n for key, n in changes.items() if n}
    assert max(changes.values()) == 1
    assert breaker.verdict == "ok"
    assert 100.0 <= returned < 230.0
    assert errors <= 5 + 3  # the run, and the probes
    assert all(slots[f"ep_{i}"][0] == ("a" if bucket(f"ep_{i}") < 80 else "b") for i in range(100))
