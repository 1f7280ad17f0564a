"""Break the core on purpose, one line at a time, and see whether the tests notice.

    python tests/core/mutate.py            every mutant
    python tests/core/mutate.py 3 17       these
    python tests/core/mutate.py --table    every mutant, and write the table of MUTANTS.md
    python tests/core/mutate.py --stale    run nothing: list those whose text is no longer there exactly once

Each mutant is a text replacement in a temporary copy of src; the tests run with PYTHONPATH set to that copy and stop at
the first failure. The test that MUTANTS.md names for a mutant runs first, and the others only if it passes. Not part of
the test run: all mutants take about forty minutes. Exit code 1 when a mutant survives or is stale (its text is no
longer there exactly once).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "reflex_runtime"


@dataclass(frozen=True)
class Mutant:
    """In `file` of the package, `old` becomes `new`."""

    file: str
    what: str
    old: str
    new: str


M = Mutant
MUTANTS = [
    # who
    M(
        "core/order.py",
        "moved entries count as valid",
        "if self._entries.get(entry[2]) is entry:\n                return",
        "if entry[2] in self._entries:\n                return",
    ),
    M(
        "core/order.py",
        "dead entries are kept for ever",
        "if len(self._heap) > FEW",
        "if len(self._heap) > 10**9",
    ),
    M(
        "core/order.py",
        "looking ahead sees one side of the tree",
        "min(2 * at + 3, len(heap))",
        "min(2 * at + 2, len(heap))",
    ),
    M(
        "core/order.py",
        "a returning client keeps its credit",
        "if member.counter < (floor := self.floor()):",
        "if member.counter < (floor := 0.0):",
    ),
    M(
        "core/order.py",
        "an idle device is a debt",
        "if member.counter > self._rest:",
        "if False:",
    ),
    M(
        "core/forming.py",
        "later tickets of a passed-over client go",
        "            passed_over.add(client)\n",
        "",
    ),
    M(
        "core/order.py",
        "shares within a fill are stale",
        "if place[0] < counter or place",
        "if place",
    ),
    M(
        "core/order.py",
        "stale counters in a tier",
        "(place := top[1].place) != top[0]",
        "(place := top[1].place)[1] != top[0][1]",
    ),
    M(
        "core/order.py",
        "preempted tickets go last",
        "if self and next(reversed(self)).seq > ticket.seq:",
        "if False:",
    ),
    M(
        "core/order.py",
        "preempted tickets go first",
        "before = sorted((*self, ticket), key=lambda t: t.seq)",
        "before = (ticket, *self)",
    ),
    M(
        "core/order.py",
        "those that left are the floor",
        "if counter == member.counter:",
        "if True:",
    ),
    M(
        "core/order.py",
        "promotion leaves the elders behind",
        "[*takewhile(lambda ticket: ticket is not due, due.queue.tickets), due]",
        "[due]",
    ),
    M("core/order.py", "17 may be passed over", "MAX_PASSED_OVER = 16", "MAX_PASSED_OVER = 17"),
    M(
        "core/order.py",
        "shares bind although nobody else waits",
        "for queue in tier.queues}) > 1",
        "for queue in tier.queues}) > 0",
    ),
    M(
        "core/group.py",
        "promoted out of turn",
        "top[0] <= now:\n            partition = self.active",
        "top[0] <= now + 1e9:\n            partition = self.active",
    ),
    M(
        "core/order.py",
        "a charge is forgotten within a fill",
        "charged.get(client, 0.0) + charge(ticket)",
        "charged.get(client, 0.0)",
    ),
    M(
        "core/order.py",
        "urgent partitions wait their turn",
        "share = -inf if partition.tiers[URGENT].tickets else partition.counter",
        "share = partition.counter",
    ),
    M("core/order.py", "deadlines at risk have no say", "laxity < self._budget", "laxity < -1e9"),
    M(
        "core/order.py",
        "deadlines at risk however far ahead",
        "or partition.counter > most",
        "or partition.counter > inf",
    ),
    M(
        "core/order.py",
        "the youngest head goes first",
        "(share, oldest.seq))",
        "(share, -oldest.seq))",
    ),
    M("core/order.py", "shares of partitions do not count", "(share, oldest.seq))", "(min(share, 0.0), oldest.seq))"),
    M(
        "core/scheduler.py",
        "a pause ends a moment late",
        "if target.paused_until <= self._now:",
        "if target.paused_until < self._now:",
    ),
    M(
        "core/holding.py",
        "holds start again after every batch of others",
        "if partition.hold_since is None else partition.hold_since)\n",
        "if True else partition.hold_since)\n",
    ),
    M(
        "core/group.py",
        "partitions are not lifted",
        "self.turns.shares.enter(partition)",
        "self.turns.shares._push(partition)",
    ),
    M(
        "core/group.py",
        "partitions are charged what was expected",
        "self.turns.shares.charge(partition, seconds)",
        "self.turns.shares.charge(partition, max(0.0, seconds))",
    ),
    M("core/group.py", "half the time limit does not promote", "0.5 * limit", "5 * limit"),
    M("core/scheduler.py", "what failed counts as an answer", "self._now) and answered:", "self._now):"),
    # life cycle
    M("core/admission.py", "expiry a moment late", "group.turns.expires_at() <= now", "group.turns.expires_at() < now"),
    M(
        "core/scheduler.py",
        "a pause is over and its partition has no turn",
        "target.paused_until = -inf\n                if isinstance(target, Partition):",
        "target.paused_until = -inf\n                if False:",
    ),
    M(
        "core/group.py",
        "what runs counts as waiting",
        "return group.unsettled > sum(",
        "return group.unsettled > 0 * sum(",
    ),
    M(
        "core/group.py",
        "a returning group keeps its credit",
        "self.tenant.enter(self)",
        "self.tenant._active.push(self.counter, self)",
    ),
    M("core/group.py", "groups ignore their weight", "seconds / (self.config.weight or 1.0)", "seconds"),
    M(
        "core/group.py",
        "groups in any order",
        "ready.sort(key=lambda g: (g.tenant.counter, g.tenant.number, g.counter))",
        "pass",
    ),
    M("core/holding.py", "held for ever after", "partition.hold_since = None", "pass"),
    M(
        "core/scheduler.py",
        "cancelled residents stay",
        "if ticket.cancel_requested or ticket.abandoned:",
        "if ticket.abandoned:",
    ),
    M(
        "core/scheduler.py",
        "a cancelled value is delivered",
        "if ticket.cancel_requested:  # while",
        "if False:  # while",
    ),
    M("core/holding.py", "quiet although a batch left", "        self.idle_after = -1\n\n", "\n"),
    M(
        "core/scheduler.py",
        "crashed steps are committed",
        "resources.rollback(batch) if failed",
        "resources.commit(batch) if failed",
    ),
    M(
        "core/scheduler.py",
        "residents' deadlines have no say",
        "partition.deadlines.push(ticket.deadline, ticket)\n        return None",
        "pass\n        return None",
    ),
    M(
        "core/scheduler.py",
        "what runs wakes at its deadline",
        "partition.deadlines.discard(ticket)\n            ticket.granted",
        "pass\n            ticket.granted",
    ),
    M(
        "core/scheduler.py",
        "a stream's deadline outlives its first token",
        "ticket.answered, ticket.deadline = True, inf",
        "ticket.answered = True",
    ),
    M("core/scheduler.py", "lost work is not counted", "ticket.recomputed += ticket.computed", "pass"),
    M("core/scheduler.py", "preempted ones keep their stage", "ticket.stage = ticket.request.stage", "pass"),
    M(
        "core/scheduler.py",
        "the processor is not told who failed",
        "isinstance(outcome, Failed) and ticket in",
        "False and ticket in",
    ),
    M(
        "core/holding.py",
        "a promise outlives what it was for",
        "        partition.hold_input = -1\n",
        "        pass\n",
    ),
    M(
        "core/holding.py",
        "the last hold is the wake time",
        "self.ends = min(self.ends, until)",
        "self.ends = until",
    ),
    M("core/scheduler.py", "what was replaced stays", "        for old in replaced:\n", "        for old in ():\n"),
    M(
        "core/scheduler.py",
        "memory outlives its ticket",
        "            resources.release(ticket)\n",
        "            pass\n",
    ),
    M("core/scheduler.py", "failed batches teach", "if not failed:  # first", "if True:  # first"),
    M("core/admission.py", "a hard close spares residents", "if t.state is not RUNNING)", "if t.state is WAITING)"),
    M("core/admission.py", "one too many in the queue", ">= config.capacity", "> config.capacity"),
    M("core/admission.py", "one too many in flight", "- replaces >= cap:", "- replaces > cap:"),
    M("core/admission.py", "hopeless deadlines are admitted", "if now + needed > ticket.deadline and", "if False and"),
    # when and how large
    M("core/forming.py", "others enter when memory is short", "if self._memory_short and over is None:", "if False:"),
    M("core/forming.py", "preempted ones still run", "if ticket in preempted or len", "if len"),
    M(
        "core/forming.py",
        "shares are rounded down",
        "even = ceil(places / active)",
        "even = places // active",
    ),
    M("core/forming.py", "the oldest is preempted", "key=self._gives_way(), reverse=True", "key=self._gives_way()"),
    M(
        "core/forming.py",
        "held ones are preempted last",
        "lambda ticket: (ticket.held, ticket.tier",
        "lambda ticket: (False, ticket.tier",
    ),
    M(
        "core/forming.py",
        "held ones get grants",
        "if t.state is RESIDENT and not t.held]",
        "if t.state is RESIDENT]",
    ),
    M(
        "core/forming.py",
        "partial prefills before decodes",
        "(t.tier, t.wants > 1.0, t.seq)",
        "(t.tier, t.wants <= 1.0, t.seq)",
    ),
    M(
        "core/forming.py",
        "residents take no places",
        "free = self._size - len(self._partition.residents)\n",
        "free = self._size\n",
    ),
    M("core/holding.py", "a full batch is held", "or full or filled.passed_over", "or filled.passed_over"),
    M("core/holding.py", "a drain holds", "if self.draining or full", "if full"),
    M(
        "core/holding.py",
        "a hold is decided again without an input",
        "if partition.hold_input != self.inputs or (",
        "if True or (",
    ),
    M(
        "core/holding.py",
        "a hold costs a deadline",
        "until = min(until, tightest[0] - next_one",
        "until = min(until, tightest[0] + next_one",
    ),
    M("core/holding.py", "urgent work is held for returns", " and heads[URGENT] is None", ""),
    M("core/forming.py", "newcomers run first when it does not pay", "if gain <= loss * (1.0 + _SAME):", "if False:"),
    M("core/forming.py", "streams that have begun hold newcomers back", " and not t.request.streams]", "]"),
    M("core/forming.py", "the slowest answer may become slower", "> waiting * (1.0 + _SAME):", "> inf:"),
    M("core/forming.py", "newcomers do not widen the steps", "sum([takes + t.wants * wider for t", "sum([takes for t"),
    M("core/forming.py", "newcomers cost a resident its deadline", "> t.deadline and not t.req", "> inf and not t.req"),
    M(
        "core/forming.py",
        "who is late in any case is waited for",
        "any(now + t.wants * (fixed + each) <= t.deadline for t in late)",
        "late",
    ),
    M("core/forming.py", "a deadline is met to the microsecond", "end * (1.0 + 2.0 * sigma)", "end"),
    M("core/forming.py", "regular clients join like others", "gain <= (3.0 - turns) * loss", "gain <= loss"),
    M("core/forming.py", "regular clients join though each has its turn", "if turns <= 1.0 or", "if"),
    M("core/holding.py", "the irregular take turns", " or client.thinks.spread > IRREGULAR * seconds", ""),
    M("core/holding.py", "those that have gone take turns", "now - client.answered > 2.0 * longest", "False"),
    M("core/holding.py", "too many clients are looked at", "if count == IN_TURNS or not ordered", "if not ordered"),
    M("core/holding.py", "no clients take turns", "return share or inf", "return share"),
    M("core/holding.py", "chunks that nobody measured have turns", "if seconds <= 0.0:", "if False:"),
    M(
        "core/forming.py",
        "elders are answered late",
        "(*hopeless, *self._overtaken(chosen))",
        "hopeless",
    ),
    M(
        "core/forming.py",
        "the hopeless block the queue",
        "(*hopeless, *self._overtaken(chosen))",
        "self._overtaken(chosen)",
    ),
    M(
        "core/forming.py",
        "shed only what is late already",
        "(chosen.tally.until_boundary if chosen.grants else 0.0)",
        "0.0",
    ),
    M("core/forming.py", "nothing is ever at risk", "return at_risk(full, self.now) or", "return"),
    M("core/forming.py", "who is left out is not at risk", " or bool(self._infeasible(full, []))", ""),
    M("core/forming.py", "the oldest of equals go first in any case", "itemgetter(0, 1, 2)", "itemgetter(0, 1)"),
    M("core/forming.py", "who cannot wait goes before its share", "itemgetter(0, 1, 2)", "itemgetter(0, 2)"),
    M(
        "core/forming.py",
        "a request at the budget is over it",
        "tally.dearest > budget * (1.0 + 1e-9)",
        "tally.dearest >= budget",
    ),
    M(
        "core/group.py",
        "who has one more waiting gives way",
        "counts[client] + 2",
        "counts[client] + 1",
    ),
    M(
        "core/group.py",
        "the oldest gives way",
        "return max((t for t in waiting",
        "return min((t for t in waiting",
    ),
    M("core/scheduler.py", "who gives way stays", "if displaced is not None:", "if False:"),
    M("core/holding.py", "clocks are no habits", "gaps.spread < thinks.spread - CLEARLY", "False"),
    M(
        "core/holding.py",
        "other partitions are waited for",
        "if client.partition == partition:\n                    client.due",
        "if True:\n                    client.due",
    ),
    M(
        "core/scheduler.py",
        "an answer makes no client absent",
        "think_times.answered(ticket.request.client, self._now)",
        "pass",
    ),
    M(
        "core/forming.py",
        "budget is named before single",
        "newcomers and tally.dearest",
        "False and tally.dearest",
    ),
    # how much
    M("core/cost.py", "dear company is nearly free", "NEARLY_FREE = 1.25", "NEARLY_FREE = 1.5"),
    M("core/cost.py", "two measurements are enough", "WINDOW, WARM = 100, 3", "WINDOW, WARM = 100, 2"),
    M("core/cost.py", "the last 101", "WINDOW, WARM = 100, 3", "WINDOW, WARM = 101, 3"),
    M(
        "core/cost.py",
        "mixed batches teach the median",
        "if self.one_shot and len(counts) == 1:",
        "if self.one_shot:",
    ),
    M(
        "core/cost.py",
        "a sample is the whole batch",
        "RollingMedian).observe(elapsed / n)",
        "RollingMedian).observe(elapsed)",
    ),
    M("core/cost.py", "a guess refuses", "seconds if tally.measured else 0.0", "seconds"),
    M(
        "core/cost.py",
        "tokens beyond the budget",
        "if units > budget - self.cost:",
        "if units > budget:",
    ),
    M(
        "core/cost.py",
        "the horizon forgets the longest",
        "self._steps, self._first = max(self._steps, steps)",
        "self._steps, self._first = steps",
    ),
    M(
        "core/statistics.py",
        "ready after one size",
        "_WARM_SAMPLES, _WARM_SIZES = 3, 2",
        "_WARM_SAMPLES, _WARM_SIZES = 3, 1",
    ),
    M("core/statistics.py", "outliers count fully", "(min(1.0, bound / residual) if residual else 1.0)", "1.0"),
    M(
        "core/statistics.py",
        "two outliers are drift",
        "_CLAMP_UP, _CLAMP_DOWN = 2.5, 4.0",
        "_CLAMP_UP, _CLAMP_DOWN = 4.0, 4.0",
    ),
    M("core/statistics.py", "the old scale outweighs the new", "_KEPT * g / factor**2", "_KEPT * g"),
    M("core/statistics.py", "what came since a change is lost", "for row, took in since:", "for row, took in ():"),
    M("core/statistics.py", "a slope that shrank cannot grow", "_SHARE = 0.2", "_SHARE = 1e-9"),
    M(
        "core/statistics.py",
        "a slow start is believed",
        "self._learn(x, seconds, 1.0 / seconds**2, self._time(x))",
        "self._learn_robustly(x, seconds)",
    ),
    M("core/statistics.py", "drift goes unnoticed", "_CUSUM_ALARM = 0.75, 6.0", "_CUSUM_ALARM = 0.75, 600.0"),
    M("core/statistics.py", "a new class counts as drift", "if fewest <= _WARM_SAMPLES:", "if fewest <= 0:"),
    M("core/statistics.py", "a guess is an anchor", "guessed = i > 0 and", "guessed = False and"),
    M("core/statistics.py", "negative fixed costs", "if theta[0] < 0.0:", "if False:"),
    # company and value
    M("core/holding.py", "more come than fit", "(expected if expected < places else places)", "expected"),
    M("core/holding.py", "waiting is free", "            g -= (queued + left) * (wait if prepared else h)\n", ""),
    M("core/holding.py", "held beyond the limit", "best, gain = (h, expected), g", "best, gain = (9.9, 0.0), g"),
    M(
        "core/flush.py",
        "no safety factors",
        "for factor in (1.0, 1.0 + 2.0 * sigma):",
        "for factor in (1.0 + 2.0 * sigma,):",
    ),
    M(
        "core/holding.py",
        "callers that do not fit fill the largest batch",
        "return most if callers <= most or",
        "return most if True or",
    ),
    # the wall
    M("run/processor.py", "repeats what must not be", "len(batch) > 1 and repeatable and ", "len(batch) > 1 and "),
    # who is guilty
    M("core/batch.py", "calls what must fail", "part.other.fails = True", "pass"),
    M("core/batch.py", "any number shares a call", "if self.share else inf", "if False else inf"),
    M(
        "core/batch.py",
        "offenders are never forgiven",
        "self._failed.pop(ticket.request.client, None)",
        "self._failed.get(ticket.request.client)",
    ),
    M("core/forming.py", "offenders share batches", "apart = client in offenders", "apart = False"),
    M(
        "core/group.py",
        "poison is the processor's fault",
        "origin.pending == 0 and not origin.served",
        "origin.pending == 0",
    ),
    M("core/group.py", "known offenders are crashes", "== len(batch) and not known", "== len(batch)"),
    # special cases beside the plain way
    M(
        "core/holding.py",
        "the wild count as regular",
        "if ordered[last - 1] - ordered[first] <= JUST_LATE",
        "if True",
    ),
    M("core/flush.py", "all are worth the same", "alike = min(values.values()) == dearest", "alike = True"),
    M("core/flush.py", "gives up too soon", "len(enough) * dearest <= top:", "len(enough) * dearest <= 2.0 * top:"),
    # who gives way
    M("core/forming.py", "equals give way", "if t.tier > priority]", "if t.tier >= priority]"),
    M(
        "core/forming.py",
        "age throws out",
        "self._come_up_to(ticket.request.priority)",
        "self._come_up_to(ticket.tier)",
    ),
    M(
        "core/forming.py",
        "shares bind the more urgent",
        "elif over is None and (\n",
        "elif (\n",
    ),
    M(
        "core/forming.py",
        "thrown out for nothing",
        "if not victims or not resources.would_fit(ticket, units, victims):",
        "if not victims:",
    ),
    M(
        "core/forming.py",
        "nobody gives way to a resident",
        "if self._displace(behind, ticket",
        "if self._displace((), ticket",
    ),
    M("core/forming.py", "anyone gives way again", "fresh = [t for t in found if t.progressed]", "fresh = found"),
    M("core/forming.py", "nobody gives way again at all", "return fresh if runs else", "return fresh if True else"),
    M("core/forming.py", "elders give way", "order(t) > order(ticket)]", "t is not ticket]"),
    M("core/forming.py", "who holds much is not told apart", "before + ticket.computed > part", "False"),
    M("core/forming.py", "the first of a client is beyond its part", "if before and before", "if before"),
    M("core/forming.py", "nobody gives way itself", "if ticket.progressed or not runs:", "if False:"),
    M("core/forming.py", "gives way itself again", "if ticket.progressed or not runs:", "if True:"),
    M("core/request.py", "one step is progress", "return self.computed > self.lost", "return self.computed > 0.0"),
    M("core/scheduler.py", "what was lost is forgotten", "ticket.lost = ticket.computed", "pass"),
    M("core/forming.py", "decodes wait", "max(self._budget - kept, self._entered.tally.cost + one)", "self._budget"),
    M(
        "core/forming.py",
        "decodes keep out the more urgent",
        "max(self._budget - kept, self._entered.tally.cost + one)",
        "self._budget - kept",
    ),
    M("core/forming.py", "who gives way keeps budget", "and t is not leaves]", "]"),
    M(
        "core/forming.py",
        "who runs elsewhere gives way",
        "for t in some if t.state is RESIDENT and t not",
        "for t in some if t not",
    ),
    M("core/forming.py", "a place counts as memory", "for_memory=i > 0 or not place", "for_memory=True"),
    M(
        "core/forming.py",
        "room gives way",
        'return "room" if self._room is not None and entered >= self._room',
        'return "" if self._room',
    ),
    M("core/forming.py", "size is no ceiling for who enters", " or entered + len(self.base) >= self._size:", ":"),
    M(
        "core/forming.py",
        "size is no ceiling for who steps",
        "if ticket in preempted or len(grants) >= places:",
        "if ticket in preempted:",
    ),
    M("core/forming.py", "the less urgent step first", "self._step_up_to(priority)", "self._step_up_to(BACKGROUND)"),
    M("core/forming.py", "who gave way is still there", "self._present[ticket.tier] -= 1", "pass"),
    # what a batch tells, and the limit of units
    M("core/forming.py", "what was cached is not told", "self.cached[ticket] = cached", "pass"),
    M("core/forming.py", "the last one's reason", "= spent or filled.short_of or why", "= spent or why"),
    M(
        "core/forming.py",
        "short although it fitted",
        "if self.preempted and not filled.short_of:",
        "if self.preempted:",
    ),
    M("core/scheduler.py", "short although nobody waits", "if not partition.waiting:", "if False:"),
    M("core/forming.py", "other stages are not told", '"stage" if len(newcomers) < len(filled.grants) else ', ""),
    M("core/forming.py", "deadlines are not told", 'full.short_of or "budget"', "full.short_of"),
    M("core/forming.py", "room counts as places", '"room" if outside else "places"', '"places"'),
    M(
        "core/group.py",
        "rounding is carried on",
        "self.queued_units - units if self.queued else 0.0",
        "self.queued_units - units",
    ),
    M("core/group.py", "who waits again wants nothing", "self.queued_units += ticket.wants", "pass"),
    M(
        "core/group.py",
        "what was cached waits for ever",
        "for ticket in tickets]) + cached",
        "for ticket in tickets])",
    ),
    M("core/admission.py", "an empty queue refuses", "if group.queued > len(leaving) and queued", "if queued"),
    M("core/admission.py", "who leaves still counts", " - sum(t.wants for t in leaving)", ""),
    M(
        "core/admission.py",
        "the limit itself is too much",
        "queued_units + wants > most",
        "queued_units + wants >= most",
    ),
    # company
    M("core/holding.py", "only returns may hold", "if not any(policy.hold_max) and ", "if "),
    M("core/holding.py", "a hold knows no end", ", policy.until)", ", inf)"),
    M(
        "core/statistics.py",
        "the first arrival is the newest",
        "            self.last = now\n        self._count",
        "        self._count",
    ),
    M(
        "core/group.py",
        "the group's room is never used up",
        "self.room -= len(batch.admitted)",
        "pass",
    ),
    M(
        "core/forming.py",
        "steps know no room of the group",
        "policy.max_batch_size, group.room\n",
        "policy.max_batch_size, None\n",
    ),
    M(
        "core/group.py",
        "default displaces",
        "self.config.displace_background and request.priority is URGENT:",
        "self.config.displace_background:",
    ),
    M(
        "core/group.py",
        "background is displaced unasked",
        "self.config.displace_background and request.priority",
        "request.priority",
    ),
    M(
        "core/group.py",
        "who is default by now is displaced",
        "            self.promote(now)  # a ticket",
        "            pass  # a ticket",
    ),
    M(
        "core/group.py",
        "the oldest background gives way",
        "found = max(queued, key",
        "found = min(queued, key",
    ),
    M(
        "core/group.py",
        "the longest waiting background gives way",
        "key=lambda ticket: ticket.seq, default=None",
        "key=lambda ticket: -ticket.seq, default=None",
    ),
    M(
        "core/group.py",
        "sharing goes first",
        "if found is None and self.config.share_room:",
        "if self.config.share_room:",
    ),
    M(
        "core/group.py",
        "only the full queue of equals is shared",
        "if found is None and self.config.share_room:",
        "if False:",
    ),
    M(
        "core/scheduler.py",
        "displaced although one is replaced",
        ">= group.config.capacity and not replaced",
        ">= group.config.capacity",
    ),
    M("core/scheduler.py", "displaced although there is room", "if full else None", "if not replaced else None"),
    M(
        "core/group.py",
        "what is prepared takes no place",
        "{})[ticket] = None\n        self._count(ticket)\n",
        "{})[ticket] = None\n",
    ),
    M("core/group.py", "what is prepared is not its client's", "+ len(self.preparing.get(client, ()))", ""),
    M("core/scheduler.py", "prepared twice", "        if ticket.state is not PREPARING:\n            return\n", ""),
    M(
        "core/scheduler.py",
        "prepared keeps its old class",
        "ticket.request, ticket.stage, ticket.wants = made,",
        "_, ticket.stage, ticket.wants = made,",
    ),
    M(
        "core/group.py",
        "latest-only spares what is prepared",
        "return [*self.preparing.get(request.client, ()), *sorted",
        "return [*sorted",
    ),
    M("core/admission.py", "closing forgets what is prepared", "chain(prepared, queued)", "chain((), queued)"),
    M(
        "core/group.py",
        "being prepared is credit",
        "            if not self.active:\n                self.tenant.enter(self)",
        "            if self.unsettled == 0:\n                self.tenant.enter(self)",
    ),
    # two groups or one
    M("core/statistics.py", "a slow-down is in every part", "if fixed < 0.0 else", "if True else"),
    M("core/flush.py", "who is not followed is greedy", " if key[2] is not None else count", ""),
    M("core/holding.py", "two groups stay two", "if r > rate", "if False and r > rate"),
    M("core/holding.py", "those that come later are gathered", "ordered) // 2] <= soon", "ordered) // 2] <= 1e9"),
    M("core/holding.py", "what is prepared does not wait", "(queued + left) * (wait if", "queued * (wait if"),
    M("core/holding.py", "one size tells all", "if not group.cost.told_apart(head):", "if False:"),
    M("core/cost.py", "seconds before they are measured", "if self._fit.samples >= WARM_SAMPLES else 0.0", ""),
    M("core/holding.py", "the budget is no limit to company", "elif marginal > 0.0 and", "elif False and"),
    # refusals
    M("core/cost.py", "an estimate refuses for ever", "and now - of_shape >= RENEW:", "and False:"),
    M(
        "core/cost.py",
        "a class beside others is never tried",
        "or now - of_key < max(RENEW, seconds / SHARE)",
        "or True",
    ),
    M("core/cost.py", "a class beside others is tried each second", "max(RENEW, seconds / SHARE)", "RENEW"),
    M("core/cost.py", "everybody is let in at once", "return probe is not ticket and not (", "return False and ("),
    M("core/cost.py", "a probe in time proves nothing", "if answered and now <= ticket.deadline:", "if False:"),
    M(
        "core/cost.py",
        "a late probe proves the contrary",
        "if answered and now <= ticket.deadline:",
        "if answered:",
    ),
    M("core/cost.py", "a probe that fails is followed at once", "elif ticket.batches:", "elif answered:"),
    M("core/cost.py", "a probe that never ran counts", "elif ticket.batches:", "else:"),
    M("core/cost.py", "who has less time is tried", "and _limit(ticket) > _limit(probe)", "and True"),
    M("core/cost.py", "a running probe is replaced", "probe.state is WAITING and _limit", "_limit"),
    M("core/cost.py", "what was learned before serving is tried at once", "return now, 0.0", "return -inf, 0.0"),
    M("core/forming.py", "a probe is shed", "probe = next((t for t in hopeless", "probe = next((t for t in ()"),
    M("core/scheduler.py", "nothing renews an estimate", "elapsed, now, not failed)", "elapsed, now, False)"),
    M("core/scheduler.py", "a probe is free", "queue.client, share / ticket", "queue.client, 0.0 / ticket"),
    M(
        "core/group.py",
        "a probe costs its estimate",
        "if evidence.pending and evidence.probes(ticket):\n                batch.notes",
        "if False:\n                batch.notes",
    ),
    M(
        "core/forming.py",
        "a burst after a pause waits to be shed",
        "if chosen.grants else evidence",
        "if False else evidence",
    ),
    M("core/forming.py", "a probe without a place is shed", "return not evidence.probes(ticket) if", "return True if"),
    # the backlog in seconds
    M("core/cost.py", "background work waits before others", " and request.priority is not BACKGROUND:", ":"),
    M("core/cost.py", "those of later tiers wait before a request", "[: priority + 1]", "[:]"),
    M("core/cost.py", "those of its own tier do not wait before a request", "[: priority + 1]", "[:priority]"),
    M("core/cost.py", "those that left wait on", "-= seconds\n            own =", "-= 0.0\n            own ="),
    M("core/cost.py", "a client keeps the seconds of what left", "own[0] -= seconds", "own[0] -= 0.0"),
    M(
        "core/cost.py",
        "clients without waiting tickets have shares",
        "if own[1] == 1:",
        "if False:",
    ),
    M("core/cost.py", "rounding of seconds is carried on", "if not by_client:", "if False:"),
    M("core/cost.py", "what is replaced counts ahead", "found -= ticket.seconds", "found -= 0.0 * ticket.seconds"),
    M("core/cost.py", "what is replaced counts in its share", "waiting -= sum(", "waiting -= 0.0 * sum("),
    M("core/cost.py", "a newcomer has no share", "+ (own is None)", ""),
    M("core/cost.py", "everybody exceeds the share", "> most / clients * SLACK", "> 0.0"),
    M("core/cost.py", "shares are not divided", "> most / clients * SLACK", "> most * SLACK"),
    # tenants
    M(
        "core/group.py",
        "tenants have no turns",
        "(g.tenant.counter, g.tenant.number, g.counter)",
        "g.counter",
    ),
    M(
        "core/group.py",
        "groups of a tenant in any order",
        "g.tenant.number, g.counter)",
        "g.tenant.number)",
    ),
    M(
        "core/order.py",
        "a returning tenant keeps its credit",
        "            self._over.enter(self)",
        "            self._over._active.push(self.counter, self)",
    ),
    M(
        "core/group.py",
        "each group is a tenant",
        "made.setdefault(config.tenant or new, new)",
        "made.setdefault(new, new)",
    ),
    # ahead
    M("core/forming.py", "what goes first is not let in", "ticket.tier < self.last", "ticket.tier < -1"),
    M("core/forming.py", "everybody is let in", "ticket.tier < self.last", "ticket.tier < 9"),
    M("core/forming.py", "another group waits for what is formed ahead", "].waiting == 1 or", "].waiting == 0 or"),
    M(
        "core/forming.py",
        "a deadline elsewhere waits for what is formed ahead",
        "!= batch.partition and",
        "is None and",
    ),
    M("core/forming.py", "what is taken back forgets who left", "    group.left[:0] = batch.left\n", ""),
    M(
        "core/scheduler.py",
        "a member of the batch cannot leave",
        "        self._take_back()\n        if ticket.state is RUNNING:",
        "        if ticket.state is RUNNING:",
    ),
    M("core/forming.py", "a batch formed ahead does not expire", "min(t.deadline for t in batch.grants)", "inf"),
    M("core/forming.py", "a batch formed ahead is never late", "now + self.batch.expected > self.expires", "False"),
    M("core/forming.py", "a batch formed ahead is late too early", "now + self.batch.expected > self", "1e9 > self"),
    M("core/forming.py", "a member is not replaced", "any(t.request.client == client for", "any(False for"),
    M("core/forming.py", "everybody's batch is taken back", "any(t.request.client == client for", "any(True for"),
    M("core/forming.py", "residents wait behind what is formed", "group.steps", "False"),
    M("core/forming.py", "a shadow is formed ahead", "or config.gap_chance", "or False"),
    M("core/forming.py", "offenders are formed ahead", "or group.offenders", "or False"),
    M("core/forming.py", "what was taken back counts as run", "ticket.batches -= 1", "pass"),
    M("core/forming.py", "what was taken back loses its deadline", "if ticket.deadline < inf:", "if False:"),
    M("core/forming.py", "what was taken back keeps its room", "group.room += len(batch)", "pass"),
    M(
        "core/forming.py",
        "batches that are not full are formed ahead",
        "filled.grants and (filled.size_reached",
        "filled.grants and (True",
    ),
    M(
        "core/forming.py",
        "deadlines at risk are formed ahead",
        "if not full or (self.policy.shed and",
        "if not full or (False and",
    ),
    M("core/scheduler.py", "a batch formed ahead starts when it was formed", "batch.scheduled_at = self._now", "pass"),
    M("core/scheduler.py", "what is formed ahead survives a pause", "self._take_back()\n        self._e", "self._e"),
    M("core/scheduler.py", "a closed scheduler forms ahead", "batch is None and not self._closed", "batch is None"),
    M(
        "core/cost.py",
        "every stage learns padded sizes",
        "self.padded(n) if batch.stage in self.padded_stages else n",
        "self.padded(n)",
    ),
    M("core/cost.py", "stages that pad cost what they are given", "if stage in model.padded_stages:", "if False:"),
    # many callers, and models with a large fixed part
    M("core/holding.py", "all of many come first", "int((n - first) * part)", "0"),
    M(
        "core/holding.py",
        "of many those of other partitions are waited for",
        " or client.partition != partition:",
        ":",
    ),
    M("core/flush.py", "a fixed part has no limit", "min(times * a, self.LONGEST)", "times * a"),
    M(
        "core/flush.py",
        "urgent requests wait for long batches",
        "if len({tier for tier, _ in self._demand}) > 1:",
        "if False:",
    ),
    M(
        "core/flush.py",
        "a greedy client fills long batches",
        "if any(d.greedy for d in self._demand.values()):\n                return shared",
        "if False:\n                return shared",
    ),
    M("core/group.py", "what waits is counted in short batches", "ticket, self.budget, self", "ticket, 0.1, self"),
    # tokens by time
    M(
        "core/token_budget.py",
        "the spread is not left free",
        "(1.0 + SURE * self.sigma)\n        base",
        "1.0\n        base",
    ),
    M(
        "core/token_budget.py",
        "attention costs nothing",
        "quadratic = 0.5 * (self._fit.slope",
        "quadratic = 0.0 * (self._fit.slope",
    ),
    M(
        "core/token_budget.py",
        "a prompt may wait for ever",
        "return max(1.0, self._fit_in(max(",
        "return max(0.0, self._fit_in(min(",
    ),
    M(
        "core/token_budget.py",
        "the fixed part of a step has no limit",
        "min(TIMES_FIXED * self._fit.fixed, LONGEST)",
        "TIMES_FIXED * self._fit.fixed",
    ),
    M(
        "core/token_budget.py",
        "all may enter at once",
        "self._rows + self._read, self._pairs",
        "self._rows, self._pairs",
    ),
    M(
        "core/token_budget.py",
        "a promise admits everybody",
        "if enters and self._closed(",
        "if False and self._closed(",
    ),
    M("core/token_budget.py", "urgent requests wait for a promise", "if ticket.tier is URGENT and rows:", "if False:"),
    M("core/token_budget.py", "what was not measured is unlimited", "return COLD - tokens", "return inf"),
    M(
        "core/token_budget.py",
        "expected rows count twice",
        "if ticket in self._expected:\n            return",
        "if False:\n            return",
    ),
    M("core/token_budget.py", "prompts alone keep the gap", "(1.0 if rows else ALONE)", "1.0"),
    M("core/forming.py", "prompts leave no time for decodes", "self._entered.tally.expect([", "list(["),
    # clients share steps
    M("core/scheduler.py", "the oldest steps first", "partition.residents.pop(ticket, None)", "None"),
    M("core/forming.py", "who left a moment ago is forgotten", "now < known.left_at + BESIDE", "False"),
    M("core/forming.py", "all have the part of one", "clients - 1) * least)", "clients - 1))"),
    M("core/forming.py", "prompts count as one unit of a part", "left[client] -= grants[ticket]", "left[client] -= 1"),
    M("core/token_budget.py", "a stall is usual", "min(took, 1.25 * usual)", "took"),
    # callers in several batches
    M("core/group.py", "early charges stay dear", "if cost < known:", "if False:"),
    M("core/group.py", "all kinds fall with one", "(cost / known) ** (1.0 / len(self._prices))", "cost / known"),
    M("core/order.py", "counters shrink", "most - (most - client.counter) * factor", "client.counter * factor"),
    M("core/holding.py", "those that come once share even parts", " or queued > most > 2.0 * back", ""),
    M("core/forming.py", "a queue fills the largest batch", "filled.passed_over and filled.grants and", "False and"),
    M("core/forming.py", "even parts with deadlines", " and not len(self.partition.deadlines)", ""),
    M("core/forming.py", "even parts of none", "passed_over and filled.grants and", "passed_over and"),
]


def failing(source: Path, *tests: str) -> str | None:
    """The first of the tests that fails, or None."""
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT / "tests/core",
        check=False,
    )
    if done.returncode in (0, 4):  # 4: the page names a test that is no longer there
        return None
    found = re.search(r"^(?:FAILED|ERROR) \S*?(\w+\.py\S*)", done.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pytest stopped without naming a test:\n{done.stdout}{done.stderr}")
    return found.group(1)


def places(mutant: Mutant) -> int:
    """How often the text of a mutant is in its file."""
    return (ROOT / "src" / PACKAGE / mutant.file).read_text().count(mutant.old)


def verdict(mutant: Mutant, known: str | None) -> str:
    """The test that notices the mutant: the one `known` to, else the first of all."""
    if (found := places(mutant)) != 1:
        return f"STALE: {found} places"
    files = sorted((ROOT / "tests/core").glob("test_*.py"), key=lambda f: (f.stem == "test_properties", f.name))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        path = source / PACKAGE / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        return (known and failing(source, known)) or failing(source, *(file.name for file in files)) or "SURVIVED"


def main() -> int:
    if "--stale" in sys.argv:
        stale = [(number, mutant) for number, mutant in enumerate(MUTANTS, 1) if places(mutant) != 1]
        for number, mutant in stale:
            print(f"{number:3} {mutant.file:20} {mutant.what:45} {places(mutant)} places")
        return 1 if stale else 0
    page = Path(__file__).with_name("MUTANTS.md")
    head, _, table = page.read_text().partition("| # |")
    known = dict(re.findall(r"^\| \d+ \| `.*` \| (.*) \| `(.*)` \|$", table, re.MULTILINE))
    bad = 0
    for number in [int(a) for a in sys.argv[1:] if a.isdigit()] or range(1, len(MUTANTS) + 1):
        mutant = MUTANTS[number - 1]
        found = known[mutant.what] = verdict(mutant, known.get(mutant.what))
        bad += found.startswith(("STALE", "SURVIVED"))
        print(f"{number:3} {mutant.file:20} {mutant.what:45} {found}", flush=True)
        if "--table" in sys.argv:  # after each row: a run that was stopped goes on with the numbers that it lacks
            ran = [(n, m) for n, m in enumerate(MUTANTS, 1) if m.what in known]
            lines = [f"| {n} | `{m.file}` | {m.what} | `{known[m.what]}` |\n" for n, m in ran]
            page.write_text(
                f"{head}| # | file | change | a test that fails |\n| --- | --- | --- | --- |\n{''.join(lines)}"
            )
    print(f"{bad} not caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
