"""The batching rules the simulator knows by name, each made fresh for a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.flush import FlushPolicy, Planner
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.core.time_cost import TimeCost
from reflex_runtime.sim.run import Decider
from reflex_runtime.sim.service import Affine

DEVICE = Affine(0.020, 0.002)  # the device all quoted figures are for: 20 + 2n ms


@dataclass(frozen=True, slots=True)
class Setting:
    """The inputs of a rule.

    max_batch_cost, batch_timeout, goal: seconds; goal is the answer time aimed at. device: the true mean times, for the
    rules that do not learn. max_batch_size: most requests in a batch, for the rules that count. hold: longest hold of
    the window rule.
    """

    max_batch_cost: float = 0.100
    batch_timeout: float = 0.005
    goal: float = 0.100
    device: Affine = DEVICE
    max_batch_size: int = 32
    hold: float = inf


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule. blind: it does not use time limits, so its requests have none (answers are still measured)."""

    name: str
    make: Callable[[Setting], Decider]
    blind: bool = True


def _window(s: Setting) -> Decider:
    return Scheduler([GroupConfig(flush=FlushPolicy.window(s.max_batch_cost, s.hold), controller=Planner())])


def _by_cost(s: Setting) -> Decider:
    flush = FlushPolicy.by_cost(s.max_batch_cost, s.batch_timeout)
    return Scheduler([GroupConfig(flush=flush, cost=partial(TimeCost, affine=False))])


def _by_size(s: Setting) -> Decider:
    flush = FlushPolicy.by_size(s.max_batch_size, s.batch_timeout)
    return Scheduler([GroupConfig(flush=flush, cost=UnitCost)])


def _greedy(s: Setting) -> Decider:
    return Scheduler([GroupConfig(flush=FlushPolicy(max_batch_size=s.max_batch_size), cost=UnitCost)])


WINDOW = Rule("window", _window, blind=False)
BY_COST = Rule("by_cost", _by_cost)
BY_SIZE = Rule("by_size", _by_size)
GREEDY = Rule("greedy", _greedy)
RULES = {rule.name: rule for rule in (WINDOW, BY_COST, BY_SIZE, GREEDY)}  # what the runtime offers
