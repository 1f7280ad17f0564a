"""The rules of comparisons by name: the runtime's, other systems', and ours with a part left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, TypeAlias

from bench.sim.rivals import EarlyDrop, HoldAlways, MarginalWait
from reflex_runtime.core.cost import TimeCost, UnitCost
from reflex_runtime.core.flush import BUDGET, FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.coordinator import BatchConfig
from reflex_runtime.settings.policies import ServeConfig
from reflex_runtime.sim import Affine

Decider: TypeAlias = Any  # a `Scheduler`, or what has the methods of one that `simulate` calls

DEVICE = Affine(0.020, 0.002)  # the device all quoted figures are for: 20 + 2n ms


@dataclass(frozen=True, slots=True)
class Setting:
    """The inputs of a rule.

    serve: those of `reflex serve`, for the window rule. batch_timeout, goal: seconds; goal is the answer time aimed at.
    device: the true mean times, for the rules that do not learn. max_batch_size: most requests in a batch, for the
    rules that count.
    """

    serve: ServeConfig = field(default_factory=ServeConfig)
    batch_timeout: float = 0.005
    goal: float = 0.100
    device: Affine = DEVICE
    max_batch_size: int = 32

    @property
    def max_batch_cost(self) -> float:
        """Of rules that have no other default, in seconds."""
        return BUDGET if self.serve.max_batch_cost_ms is None else self.serve.max_batch_cost_ms / 1e3

    @property
    def hold(self) -> float:
        """The longest one of the window rule, in seconds."""
        return inf if self.serve.batch_timeout_ms is None else self.serve.batch_timeout_ms / 1e3


class Blind:
    """A scheduler that is told no time limits: answers are still measured by them."""

    def __init__(self, scheduler: Decider) -> None:
        self._scheduler = scheduler
        self._shown: dict[Request, Request] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def submit(self, request: Request, now: float, ready: bool = True) -> Ticket:
        shown = self._shown.get(request) or self._shown.setdefault(request, replace(request, time_limit=None))
        return self._scheduler.submit(shown, now, ready)


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule. blind: it does not use time limits, so its requests have none (answers are still measured)."""

    name: str
    build: Callable[[Setting], Decider]
    blind: bool = True

    def make(self, setting: Setting) -> Decider:
        built = self.build(setting)
        return Blind(built) if self.blind else built


def _window(s: Setting) -> Decider:
    return Scheduler([s.serve.group("default")])


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

def _count(size: int) -> Rule:
    return Rule(f"count {size} + timeout", lambda s: BY_SIZE.build(replace(s, max_batch_size=size)))


def _one_in_flight(s: Setting) -> Decider:
    flush = FlushPolicy(max_batch_size=s.max_batch_size)
    return Scheduler([GroupConfig(flush=flush, cost=UnitCost, max_in_flight_per_client=1)])


def _unheld(s: Setting) -> Decider:
    return WINDOW.make(replace(s, serve=replace(s.serve, batch_timeout_ms=0.0)))


def _unplanned(s: Setting) -> Decider:
    group = replace(s.serve, max_batch_cost_ms=s.max_batch_cost * 1e3).group("default")
    return Scheduler([replace(group, controller=None)])


def _feeds(s: Setting) -> Decider:
    config = BatchConfig(max_batch_size=s.max_batch_size, max_latency=s.batch_timeout)
    return Scheduler([config.group("default")])


COUNT_8, COUNT_32 = _count(8), _count(32)
ONE_IN_FLIGHT = Rule("greedy, one in flight per client", _one_in_flight)
UNHELD = Rule("no hold", _unheld, blind=False)
UNPLANNED = Rule("window without planner", _unplanned, blind=False)
EARLY_DROP = Rule("early drop (Nexus)", lambda s: EarlyDrop(s.device.of), blind=False)
MARGINAL_WAIT = Rule("marginal wait (BentoML)", lambda s: MarginalWait(s.device.of, s.goal), blind=False)
FEEDS = Rule("feeds", _feeds)  # a coordinator's
WINDOW_3 = Rule("window of 3 ms", lambda s: HoldAlways(0.003))
HOLD_ALWAYS = Rule("hold always", lambda s: HoldAlways(s.batch_timeout))
