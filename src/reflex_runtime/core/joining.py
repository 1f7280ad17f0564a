"""Whether newcomers (new requests) run their first stage before the residents' next step.

If they join, newcomers share the residents' steps. But residents wait for the newcomers' first stage, and each of their
remaining steps has a larger batch. Two plans are compared, as if no other request came:

    join    the newcomers' first stage, then all step together
    wait    the residents step to their end, then the newcomers' first stage and their steps

Newcomers join if they gain more than the residents lose, but never at these prices:

    a higher longest latency    the mean alone would harm the tail: some residents would be delayed again and again
    a resident's deadline       that it would meet if they waited

Regular clients that join meet again in each cycle, and the residents lose again. One that waits instead comes later
from then on: it waits once. So the gain must be `price` times the loss, by the share of the device that they would
take if each came in turn (`ThinkTimes.in_turns`). Up to a share of 1 they do so by themselves and none joins. Above it
some must share, and the price falls from 2 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

_SAME = 1e-9  # relative: two plans that differ by less are equal


class StagedRequest(NamedTuple):
    """One request: seconds since it arrived, and steps until it ends (those after its first stage, for a newcomer).

    slack: seconds until its deadline.
    """

    age: float
    steps: float
    slack: float = inf


def gain_over_loss(
    residents: Sequence[StagedRequest],
    newcomers: Sequence[StagedRequest],
    first: float,
    fixed: float,
    marginal: float,
    sigma: float = 0.0,
) -> float:
    """What the newcomers gain by joining, as a multiple of what the residents lose. 0.0 if a resident would miss its
    deadline by it, or the longest latency would grow. Both sequences hold at least one member.

    first: seconds of the newcomers' first stage. fixed, marginal: a step of n takes fixed + marginal · n seconds.
    sigma: relative spread of these times; a deadline must leave twice that.
    """
    everyone = [*residents, *newcomers]
    together = ends([m.steps for m in everyone], fixed, marginal)
    before = ends([m.steps for m in residents], fixed, marginal)
    after = ends([m.steps for m in newcomers], fixed, marginal)
    start = max(before.values())
    margin = 1.0 + 2.0 * sigma
    if any((first + together[m.steps]) * margin > m.slack >= before[m.steps] for m in residents):
        return 0.0
    join = [m.age + first + together[m.steps] for m in everyone]
    wait = [m.age + before[m.steps] for m in residents]
    wait += [m.age + start + first + after[m.steps] for m in newcomers]
    if max(join) > max(wait) * (1.0 + _SAME):
        return 0.0
    gain = sum(start + after[m.steps] - together[m.steps] for m in newcomers)
    loss = sum(first + together[m.steps] - before[m.steps] for m in residents)
    return gain / loss if loss > 0.0 else inf


def price(in_turns: float) -> float:
    """The multiple of the loss that a gain must be above. in_turns: share of the device; inf for irregular clients."""
    return inf if in_turns <= 1.0 else max(1.0, 3.0 - in_turns) * (1.0 + _SAME)


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
