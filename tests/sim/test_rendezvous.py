"""Who owns a key: agreed by all, evenly shared, and moved only where it must be."""

from __future__ import annotations

from collections import Counter

from bench.sim.rendezvous import owner, preference

MEMBERS = ["r0", "r1", "r2", "r3"]
KEYS = [f"ep-{i}" for i in range(4000)]


def test_x7_the_owner_of_a_key_is_the_same_in_every_process() -> None:
    known = {"ep_xyz": "r1", "ep_abc": "r2", "arm-7": "r2", "": "r3", "\ud800": "r0"}
    assert {key: owner(key, MEMBERS) for key in known} == known
    assert owner("ep_xyz", []) is None
    assert all(owner(key, MEMBERS) == owner(key, reversed(MEMBERS)) for key in KEYS[:100])
    assert owner("1a", ["1:", "1"]) == owner("1a", ["1", "1:"])


def test_x7_members_own_even_shares() -> None:
    shares = Counter(owner(key, MEMBERS) for key in KEYS)
    assert set(shares) == set(MEMBERS)
    assert max(shares.values()) < 1.1 * len(KEYS) / len(MEMBERS)


def test_x7_a_member_that_leaves_moves_its_own_keys_alone_and_to_the_next_in_their_order() -> None:
    left = [member for member in MEMBERS if member != "r2"]
    for key in KEYS:
        order = preference(key, MEMBERS)
        assert order[0] == owner(key, MEMBERS)
        assert sorted(order) == MEMBERS
        assert owner(key, left) == (order[1] if order[0] == "r2" else order[0])
