"""Who is waited for (contract B6, F6): against a direct evaluation of the definition, and against the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from random import Random

import pytest

from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.holding import FEW, HISTORY, JUST_LATE, PARTS, RECENT, REMEMBERED, ThinkTimes
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from thinned import thinned

from .helpers import ask, finish, scheduler_of, take, trained
from .histories import TICK, Play, Scenario, timed

HERE = "partition"
MANY = 1000  # places


def hold(
    returns: ThinkTimes, now: float, longest: float, n: int, fixed: float, places: int = MANY, where: str = HERE
) -> float:
    """By the gain for this batch; nobody comes early enough to be gathered."""
    return returns.hold(where, now, longest, n, places, fixed, fixed + 0.002 * n, 0.0, 0, True)[0][0]


def gathers(returns: ThinkTimes, now: float, longest: float, n: int, fixed: float) -> float:
    return returns.hold(HERE, now, longest, n, MANY, fixed, fixed + 0.002 * n, 0.0, n)[1][0]


def possible_waits(age: float, thinks: Sequence[float], longest: float) -> list[tuple[float, float, float]]:
    """(wait, probability, probability · mean wait) of a client answered so long ago, in at most three parts."""
    left = sorted(x for x in thinks if x >= age - JUST_LATE)
    soon = [x for x in left if x <= age + longest]
    if not soon:
        return []
    size = len(soon) if soon[-1] - soon[0] <= JUST_LATE else ceil(len(soon) / PARTS)
    parts = [soon[i : i + size] for i in range(0, len(soon), size)]
    return [(max(0.0, p[-1] - age), len(p) / len(left), sum(x - age for x in p) / len(left)) for p in parts]


def even_places(waits: Sequence[tuple[float, float, float]], n: int, places: int) -> int:
    """Places for an even part of the callers, if those that wait and these together are too many for one batch."""
    callers, batches = n + sum(p for _, p, _ in waits), 1
    if callers <= n + places:
        return places
    while callers / batches > n + places:
        batches += 1
    return max(0, ceil(callers / batches) - n)


def gathered_waits(
    ages: Sequence[tuple[float, list[float]]], longest: float, fixed: float
) -> list[tuple[float, float, float]]:
    """Of those clients that usually come within the fixed part."""
    soon = [(age, thinks) for age, thinks in ages if thinks and sorted(thinks)[len(thinks) // 2] <= fixed]
    return [w for age, thinks in soon for w in possible_waits(age, thinks, longest)]


def gain(h: float, waits: Sequence[tuple[float, float, float]], n: int, fixed: float, places: int = MANY) -> float:
    """G for a hold that ends JUST_LATE after h, by when those due until h are there."""
    back = [w for w in waits if w[0] <= h]
    return fixed * min(places, sum(p for _, p, _ in back)) - sum(w for _, _, w in back) - n * (h + JUST_LATE)


def clients(random: Random, count: int) -> tuple[ThinkTimes, list[tuple[float, list[float]]], float]:
    """A history of `count` clients that are all absent now: (returns, (age, think times) of each, now)."""
    returns, ages, now = ThinkTimes(), [], 64.0
    kinds = [random.choice(["fixed", "spread", "slow"]) for _ in range(count)]
    for client, kind in enumerate(kinds):
        think = {"fixed": lambda: 0.002, "spread": lambda: random.expovariate(200.0), "slow": lambda: 0.3}[kind]
        pauses = [think() for _ in range(random.randint(0, HISTORY + 8))]
        takes = [random.uniform(0.020, 0.200) for _ in pauses]  # by this the clock predicts worse
        at = now - random.uniform(0.0, 0.003) - sum(pauses) - sum(takes)
        returns.arrived(client, HERE, at)
        returns.answered(client, at)
        thinks = []
        for pause, taken in zip(pauses, takes, strict=True):
            thinks.append(at + pause - at)
            returns.arrived(client, HERE, at + pause)
            at = at + pause + taken
            returns.answered(client, at)
        ages.append((now - at, thinks[-HISTORY:]))
    return returns, ages, now


def test_b6_the_hold_is_the_best_of_all() -> None:
    random = Random(21)
    held = capped = 0
    for _ in range(400):
        returns, ages, now = clients(random, random.randint(1, 8))
        n, fixed = random.randint(1, 6), random.choice([0.003, 0.02, 0.1])
        longest, places = random.choice([0.001, 0.005, 0.02]), random.choice([1, 2, MANY])
        found = hold(returns, now, longest, n, fixed, places=places)
        waits = [w for age, thinks in ages for w in possible_waits(age, thinks, longest)]
        ends = [h for h, _, _ in waits]
        places = even_places(gathered_waits(ages, longest, fixed), n, places)
        best = max((gain(h, waits, n, fixed, places) for h in ends), default=0.0)
        if found == 0.0:
            assert best <= 2e-9
        else:
            held += 1
            capped += best < max(gain(h, waits, n, fixed) for h in ends) - 1e-9
            until = max(h for h in ends if h + JUST_LATE <= found + 1e-12 or found == longest)
            assert gain(until, waits, n, fixed, places) == pytest.approx(best, abs=2e-9) or found == longest
            assert best > 0.0
            assert found <= longest
    assert held > 60
    assert capped > 10


def single_waits(age: float, thinks: Sequence[float]) -> list[tuple[float, float, float]]:
    """The same as `possible_waits`, with a step for each time."""
    left = [max(0.0, x - age) for x in thinks if x >= age - JUST_LATE]
    return [(x, 1.0 / len(left), x / len(left)) for x in left]


def test_b6_the_hold_for_many_is_as_good_as_by_their_distributions() -> None:
    """Of many clients each counts by one of its times. What that gains, by all their times, less what the best hold by
    their distributions gains, as a share of all that company could save."""
    random = Random(5)
    losses, held = [], 0
    for _ in range(60):
        count = random.randint(FEW + 1, RECENT)
        returns, ages, now = clients(random, count)
        n, fixed = random.choice([1, 8, count]), random.choice([0.003, 0.02, 0.1])
        longest, places = random.choice([0.005, 0.02]), random.choice([12, MANY])
        if even_places(gathered_waits(ages, longest, fixed), n, places) != places:
            continue
        found = hold(returns, now, longest, n, fixed, places=places)
        waits = [w for age, thinks in ages for w in possible_waits(age, thinks, longest)]
        ends = [h for h, _, _ in waits]
        best = max([0.0, *ends], key=lambda h: gain(h, waits, n, fixed, places) if h else 0.0)
        exact = [w for age, thinks in ages for w in single_waits(age, thinks)]
        theirs = gain(best + JUST_LATE, exact, n, fixed, places) if best else 0.0
        mine = gain(found, exact, n, fixed, places) if found else 0.0
        losses.append((theirs - mine) / (fixed * min(count, places)))
        held += found > 0.0
        assert found <= longest
    assert held > 20
    assert sum(losses) / len(losses) < 0.01
    assert max(losses) < 0.1


def test_b6_of_many_that_come_back_together_all_are_waited_for() -> None:
    returns, now = returning(0.001, count=2 * FEW)
    seconds, expected = returns.hold(HERE, now, 0.005, 1, MANY, 0.020, 0.022, 0.0, 0)[0]
    assert (0.0 < seconds <= 2 * JUST_LATE, expected) == (True, 2 * FEW - 1)
    assert hold(returns, now, 0.005, 1, 0.020, where="other") == 0.0
    assert hold(returns, now + 0.100, 0.005, 1, 0.020) == 0.0  # they did not come


def returning(think: float, count: int = 4, rounds: int = 8) -> tuple[ThinkTimes, float]:
    """Clients that ask `think` after each answer; the first of them is back, the others are about to be."""
    returns, now = ThinkTimes(), 0.0
    for i in range(rounds):
        for client in range(count):
            returns.arrived(client, HERE, now)
        now += 0.020 + 0.003 * i
        for client in range(count):
            returns.answered(client, now)
        now += think
    returns.arrived(0, HERE, now)
    return returns, now


def test_b6_clients_that_come_back_together_are_waited_for() -> None:
    returns, now = returning(0.001)
    assert hold(returns, now, 0.005, 1, 0.020) > 0.0


def test_b6_clients_that_come_back_much_later_are_not() -> None:
    returns, now = returning(0.100)
    assert hold(returns, now - 0.099, 0.005, 1, 0.020) == 0.0


def test_b6_clients_of_another_partition_are_not() -> None:
    returns, now = returning(0.001)
    assert hold(returns, now, 0.005, 1, 0.020, where="other") == 0.0


def test_b6_nothing_is_held_without_time_gain_or_places() -> None:
    returns, now = returning(0.001)
    assert hold(returns, now, 0.0, 1, 0.020) == 0.0
    assert hold(returns, now, -1.0, 1, 0.020) == 0.0
    assert hold(returns, now, 0.005, 1, 0.0) == 0.0
    assert hold(returns, now, 0.005, 1, 0.020, places=0) == 0.0
    assert hold(ThinkTimes(), 0.0, 0.005, 1, 0.020) == 0.0


def test_b6_many_queued_are_not_kept_waiting_for_few() -> None:
    returns, now = returning(0.004)
    assert hold(returns, now - 0.003, 0.005, 1, 0.020) > 0.0
    assert hold(returns, now - 0.003, 0.005, 100, 0.020) == 0.0


def test_b6_no_more_are_waited_for_than_have_a_place() -> None:
    """Of 30 clients one is due at once and the others in 4 ms; with one place left the hold is for the first."""
    returns, now = ThinkTimes(), 0.0
    for i in range(4):
        for client in range(30):
            returns.arrived(client, HERE, now + (0.0001 if client == 0 else 0.004))
        now += 0.030 + 0.005 * i
        for client in range(30):
            returns.answered(client, now)
    assert hold(returns, now, 0.005, 4, 0.020) > 0.004
    assert 0.0 < hold(returns, now, 0.005, 4, 0.020, places=1) < 0.001


# -- two habits --------------------------------------------------------------------------------------------------------


def camera(returns: ThinkTimes, name: str, period: float, frames: int, takes: Sequence[float]) -> float:
    """A camera's last `frames` frames, each answered after one of `takes`; returns when the last one was made."""
    for i in range(frames):
        returns.arrived(name, HERE, i * period)
        returns.answered(name, i * period + takes[i % len(takes)])
    return (frames - 1) * period


def test_f6_a_camera_is_due_by_its_clock_whenever_it_was_answered() -> None:
    returns = ThinkTimes()
    last = camera(returns, "cam", 1 / 30, 20, (0.004, 0.019, 0.011, 0.024))
    due = last + 1 / 30
    for before in (0.002, 0.006):
        assert hold(returns, due - before, 0.050, 1, 0.020) == pytest.approx(before + JUST_LATE)
    assert hold(returns, due - 0.012, 0.050, 1, 0.020) == 0.0  # it pays up to half of what is saved


def test_f6_a_robot_is_due_by_its_answer_whenever_it_asked() -> None:
    returns, now = ThinkTimes(), 0.0
    for i in range(20):
        returns.arrived("robot", HERE, now)
        now += (0.020, 0.035, 0.090)[i % 3]
        returns.answered("robot", now)
        now += 0.004
    answered = now - 0.004
    assert hold(returns, answered + 0.001, 0.050, 1, 0.020) == pytest.approx(0.003 + JUST_LATE)


def test_f6_a_feed_that_missed_its_time_is_not_waited_for() -> None:
    returns = ThinkTimes()
    due = camera(returns, "cam", 0.010, 20, (0.002, 0.005)) + 0.010
    assert hold(returns, due + JUST_LATE / 2, 0.050, 1, 0.020) > 0.0  # just late
    assert hold(returns, due + 2 * JUST_LATE, 0.050, 1, 0.020) == 0.0


# -- two groups or one -------------------------------------------------------------------------------------------------


def alternating(think: float, cycles: int = 6, each: float = 0.0) -> tuple[ThinkTimes, float]:
    """Two groups of four in turn on a device of 20 ms: the second waits complete as the first is answered.

    each: seconds from one to the next of those that come back.
    """
    returns, now = ThinkTimes(), 0.0
    for client in range(8):
        returns.arrived(client, HERE, now)
    for i in range(2 * cycles):
        now += 0.020
        group = range(4) if i % 2 == 0 else range(4, 8)
        for client in group:
            returns.answered(client, now)
        if i < 2 * cycles - 1:
            for place, client in enumerate(group):
                returns.arrived(client, HERE, now + think + each * place)
    return returns, now


def test_a_complete_group_gathers_those_that_come_within_the_fixed_part() -> None:
    returns, now = alternating(0.014)
    assert hold(returns, now, 0.050, 4, 0.020) == 0.0  # for this batch alone it does not pay
    assert gathers(returns, now, 0.050, 4, 0.020) == pytest.approx(0.014 + JUST_LATE)
    _, expected = returns.hold(HERE, now, 0.050, 4, MANY, 0.020, 0.028, 0.0, 4)[1]
    assert expected == pytest.approx(4.0)
    assert gathers(returns, now + 0.014 + 2 * JUST_LATE, 0.050, 4, 0.020) == 0.0  # they did not come


@pytest.mark.parametrize(
    ("think", "longest", "waiting"),
    [(0.022, 0.050, 4), (0.014, 0.013, 4), (0.014, 0.050, 40)],
    ids=["not_faster", "short_hold", "few_for_many"],
)
def test_two_groups_stay_two_where(think: float, longest: float, waiting: int) -> None:
    returns, now = alternating(think)
    assert gathers(returns, now, longest, waiting, 0.020) == 0.0


def test_callers_that_come_one_by_one_are_gathered_if_all_of_them_come_within_the_fixed_part() -> None:
    """Answers are written and requests read one by one: eight take twice as long to come back as four."""
    for each, gathered in ((0.002, True), (0.004, False)):
        returns, now = alternating(0.002, each=each)
        assert (gathers(returns, now, 0.050, 4, 0.020) > 0.0) == gathered, each
        alone = returns.hold(HERE, now, 0.050, 4, MANY, 0.020, 0.028, 0.0, 0)[1]  # those waiting came to a free device
        assert alone[0] == pytest.approx(0.002 + 3 * each + JUST_LATE)


# -- pictures that are decoded -----------------------------------------------------------------------------------------


def decoding(count: int, each: float = 0.001) -> tuple[ThinkTimes, float]:
    """So many requests that are prepared one by one; one took `each` before."""
    returns = ThinkTimes()
    tickets = [Ticket(Request(client=i, partition=HERE), i, 0.0) for i in range(count + 1)]
    for ticket in tickets:
        returns.prepares(ticket)
    returns.prepared(tickets[0], each)
    returns.arrived(0, HERE, each)
    return returns, each


def test_pictures_that_are_decoded_are_due_one_by_one() -> None:
    returns, now = decoding(3)
    seconds, expected = returns.hold(HERE, now, 0.050, 1, MANY, 0.020, 0.022, 0.0, 0)[0]
    assert (seconds, expected) == (pytest.approx(0.003 + JUST_LATE), 3.0)
    assert returns.hold("other", now, 0.050, 1, MANY, 0.020, 0.022, 0.0, 0)[0] == (0.0, 0.0)


def test_those_that_are_decoded_longer_wait_as_well() -> None:
    """Twenty more pictures: a hold for the first few delays all of them."""
    assert hold(*decoding(3, 0.004), 0.050, 1, 0.020) > 0.004
    assert hold(*decoding(23, 0.004), 0.050, 1, 0.020) == 0.0


def test_a_picture_that_is_decoded_no_more_is_not_due() -> None:
    returns = ThinkTimes()
    gone, ready = (Ticket(Request(client=i, partition=HERE), i, 0.0) for i in range(2))
    for ticket in (ready, gone):
        returns.prepares(ticket)
    returns.prepared(ready, 0.001)
    returns.arrived(0, HERE, 0.001)
    assert hold(returns, 0.001, 0.050, 1, 0.020) > 0.0
    returns.prepared(gone, 0.001)
    assert hold(returns, 0.001, 0.050, 1, 0.020) == 0.0


def test_a_client_may_be_forgotten_while_its_picture_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.core.holding.REMEMBERED", 2)
    returns, now = decoding(1)
    for client in ("others", "that", "came"):
        returns.arrived(client, HERE, now)
    assert hold(returns, now, 0.050, 1, 0.020) == pytest.approx(0.001 + JUST_LATE), "its picture is still due"


def test_memory_is_bounded() -> None:
    returns = ThinkTimes()
    for client in range(3 * REMEMBERED):
        returns.arrived(client, HERE, 0.0)
        returns.answered(client, 0.0)
    assert len(returns._clients) <= REMEMBERED
    assert len(returns._absent) <= REMEMBERED
    for i in range(3 * HISTORY):
        returns.arrived("one", HERE, i + 0.5)
        returns.answered("one", float(i + 1))
    one = returns._clients["one"]
    assert len(one.thinks.ordered) == HISTORY == len(one.gaps.ordered)


# -- in the scheduler --------------------------------------------------------------------------------------------------


def test_b6_the_instant_is_fixed_between_inputs() -> None:
    scheduler = scheduler_of(flush=FlushPolicy(returns=0.050), cost=lambda: trained(0.020, 0.002))
    frames = [(k / 30 + 0.004 * c, c) for k in range(12) for c in range(3)]
    batch, ends, wakes = None, inf, 0
    for at, client in frames:
        while min(ends, scheduler.wake_at()) < at:
            now = min(ends, scheduler.wake_at())
            if batch is not None and now == ends:
                finish(scheduler, batch, now, 0.020 + 0.002 * len(batch))
                batch, ends = None, inf
            batch, ends = _next(scheduler, now, batch, ends)
        ask(scheduler, at, client=client)
        batch, ends = _next(scheduler, at, batch, ends)
        wake = scheduler.wake_at()
        if batch is None and at < wake < inf:
            wakes += 1
            for part in (0.25, 0.5, 0.999):
                assert scheduler.next_batch(at + part * (wake - at)) is None
                assert scheduler.wake_at() == wake
    assert wakes > 3


def _next(scheduler: Scheduler, now: float, batch: Batch | None, ends: float) -> tuple[Batch | None, float]:
    if batch is not None:
        return batch, ends
    found = scheduler.next_batch(now)
    return (None, inf) if found is None else (found, now + 0.020 + 0.002 * len(found))


def test_company_is_tried_where_only_one_size_was_measured() -> None:
    """Two callers take turns on a device that does two as fast as one. Until two sizes were measured nobody knows that,
    and in turns there is but one size."""
    scheduler = scheduler_of(flush=FlushPolicy(returns=0.050))
    sizes, now = [], 0.0
    ask(scheduler, now, client="a")
    batch = take(scheduler, now)
    back = {"b": 0.050}
    for _ in range(40):
        ends = now + 0.120
        for client, at in sorted(back.items(), key=lambda b: b[1]):
            ask(scheduler, min(at, ends), client=client)
        now = ends
        sizes.append(len(batch))
        finish(scheduler, batch, now, 0.120)
        back = {t.request.client: now + 0.003 for t in batch.grants}
        found = scheduler.next_batch(now)
        while found is None:
            client = min(back, key=lambda c: back[c], default="")
            now = min(back.get(client, inf), scheduler.wake_at())
            if client and back[client] <= now:
                ask(scheduler, back.pop(client), client=client)
            found = scheduler.next_batch(now)
        batch = found
    assert sizes[:3] == [1, 1, 1]
    assert sizes[-20:] == [2] * 20


@pytest.mark.parametrize("seed", thinned([2, 3, 4, 5, 6, 7, 8, 11], [2, 3, 4]))
def test_the_oracle_agrees_where_clients_have_habits(seed: int) -> None:
    """Cameras of several rates and robots, in step and out of it, against the naive rule, batch by batch."""
    random = Random(f"habits {seed}")
    fixed, marginal = random.choice([9, 30]), random.choice([1, 2])
    flush = FlushPolicy(max_batch_size=random.choice([3, 8]), returns=random.choice([20, 60]) * TICK)
    scenario = Scenario((timed(flush),), device=lambda b: (fixed + marginal * len(b)) * TICK)
    play = Play(scenario, b"")
    kinds = [random.choice(["camera", "robot"]) for _ in range(6)]
    paces = [random.choice([6, 20, 34, 35, 100]) * TICK for _ in kinds]
    due: list[tuple[float, int]] = [(random.randrange(40) * TICK, c) for c in range(6)]
    ends, held = inf, 0
    for _ in range(700):
        wake = play.scheduler.wake_at()
        assert wake == play.oracle.wake_at()
        play.now = max(play.now, min(min(due, default=(inf, 0))[0], ends, wake))
        assert play.now < inf
        for at, client in [d for d in due if d[0] <= play.now]:
            due.remove((at, client))
            request = Request(client=client, partition=client % 2 if seed % 3 == 0 else 0)
            play.pairs.append((play.scheduler.submit(request, play.now), play.oracle.submit(request, play.now)))  # type: ignore[arg-type]
            if kinds[client] == "camera":
                due.append((at + paces[client] + random.choice([0, 0, 0, 1]) * TICK / 4, client))
        if play.running and play.now >= ends:
            batch, expected = play.running.pop()
            elapsed = ends - batch.scheduled_at
            ends = inf
            play.scheduler.complete(batch, [Done()] * len(batch), elapsed, play.now)
            play.oracle.complete(expected, [Done()] * len(batch), elapsed, play.now)
            robots = [t.request.client for t in batch.grants if kinds[t.request.client] == "robot"]  # type: ignore[index]
            due += [(play.now + paces[c] + random.choice([0, 0, 1]) * TICK, c) for c in robots]  # type: ignore[index, misc]
        if not play.running:
            batch = play.step()  # type: ignore[assignment]
            if batch is not None:
                ends = play.now + scenario.device(batch)
            held += batch is None and play.scheduler.wake_at() < inf
        play.compare()
    assert held >= 5
