"""The rules that comparisons have beside the runtime's own: other systems', and ours with a part left out."""

from __future__ import annotations

from dataclasses import replace

from bench.sim.rivals import EarlyDrop, HoldAlways, MarginalWait
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.batch_processor import BatchConfig
from reflex_runtime.settings.policies import serving_group
from reflex_runtime.sim.run import BY_COST, BY_SIZE, GREEDY, WINDOW, Decider, Rule, Setting

__all__ = ["BY_COST", "BY_SIZE", "GREEDY", "WINDOW"]  # the runtime's, beside those below


def _count(size: int) -> Rule:
    return Rule(f"count {size} + timeout", lambda s: BY_SIZE.make(replace(s, max_batch_size=size)))


def _one_in_flight(s: Setting) -> Decider:
    flush = FlushPolicy(max_batch_size=s.max_batch_size)
    return Scheduler([GroupConfig(flush=flush, cost=UnitCost, max_in_flight_per_client=1)])


def _unheld(s: Setting) -> Decider:
    return WINDOW.make(replace(s, serve=replace(s.serve, batch_timeout_ms=0.0)))


def _unplanned(s: Setting) -> Decider:
    group = serving_group(replace(s.serve, max_batch_cost_ms=s.max_batch_cost * 1e3), "default")
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
