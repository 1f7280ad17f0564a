"""Virtual time, against a list of members."""

from __future__ import annotations

from random import Random

from reflex_runtime.core.order import FEW, ClientShare, Shares


def test_the_floor_is_the_smallest_active_counter_whoever_enters_leaves_and_is_charged() -> None:
    random = Random(17)
    shares = Shares()
    active: list[ClientShare] = []
    idle = [ClientShare(i) for i in range(40)]
    largest = 0.0  # of those that left
    for _ in range(5000):
        floor = min((member.counter for member in active), default=largest)
        assert shares.floor() == floor
        assert len(shares) == len(active)
        move = random.randrange(4)
        if move == 0 and idle:
            member = idle.pop(random.randrange(len(idle)))
            expected = max(member.counter, floor)
            shares.enter(member)
            active.append(member)
            assert member.counter == expected
        elif move == 1 and active:
            member = active.pop(random.randrange(len(active)))
            shares.leave(member)
            idle.append(member)
            largest = max(largest, member.counter)
        elif active:
            member = random.choice(active)
            before, amount = member.counter, random.choice((1.0, 2.0, 0.5, -0.25))
            shares.charge(member, amount)
            assert member.counter == before + amount


def test_counters_that_no_member_has_any_more_are_forgotten() -> None:
    shares = Shares()
    member, other = ClientShare("a"), ClientShare("b")
    shares.enter(other)  # stays at the floor
    shares.enter(member)
    for _ in range(1000):
        shares.charge(member, 1.0)
        shares.charge(member, -1.0)  # only this makes a new entry
    assert len(shares._active._heap) <= FEW + 2 * 2
