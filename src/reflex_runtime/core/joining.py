"""Whether newcomers (new requests) run their first stage before the residents' next step.

If they join, newcomers share the residents' steps. But residents wait for the newcomers' first stage, and each of their
remaining steps has a larger batch. Two plans are compared, as if no other request came:

    join    the newcomers' first stage, then all step together
    wait    the residents step to their end, then the newcomers' first stage and their steps

Newcomers join if that lowers the sum of latencies of all present requests, and not at the price of a higher longest
one. The sum alone would improve the mean but harm the tail: some residents would be interrupted again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SAME = 1e-9  # relative: two plans that differ by less are equal


class StagedRequest(NamedTuple):
    """One request: seconds since it arrived, and steps until it ends (those after its first stage, for a newcomer)."""

    age: float
    steps: float


def join_pays(
    residents: Sequence[StagedRequest], newcomers: Sequence[StagedRequest], first: float, fixed: float, marginal: float
) -> bool:
    """Compare the plans. Both sequences hold at least one member.

    first: seconds of the newcomers' first stage. fixed, marginal: a step of n takes fixed + marginal · n seconds.
    """
    everyone = [*residents, *newcomers]
    together = ends([m.steps for m in everyone], fixed, marginal)
    before = ends([m.steps for m in residents], fixed, marginal)
    after = ends([m.steps for m in newcomers], fixed, marginal)
    start = max(before.values()) + first
    join = [m.age + first + together[m.steps] for m in everyone]
    wait = [m.age + before[m.steps] for m in residents] + [m.age + start + after[m.steps] for m in newcomers]
    return sum(join) < sum(wait) * (1.0 - _SAME) and max(join) <= max(wait) * (1.0 + _SAME)


def ends(steps: Sequence[float], fixed: float, marginal: float) -> dict[float, float]:
    """Seconds until members with so many steps left end, by that number, if all of them step together from now on."""
    found: dict[float, float] = {}
    done = seconds = 0.0
    ordered = sorted(steps)
    for i, left in enumerate(ordered):
        if left not in found:
            seconds += (left - done) * (fixed + marginal * (len(ordered) - i))
            done = left
            found[left] = seconds
    return found
