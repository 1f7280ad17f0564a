"""Which version answers which episode, and how well: router, breaker, comparison and ramp together.

No HTTP and no clock: the server passes `now`. An automatic change (a drain, a stage of the ramp, a rollback) is a
`Change`, logged with its numbers and kept for the diagnostics.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from reflex_runtime.core.batch import BatchFinished, Done, Event, RequestAnswered, RequestSettled
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.observe.journal import episode_key
from reflex_runtime.robots.policy.episodes import Lru
from reflex_runtime.robots.versions.breaker import Breaker, Poison
from reflex_runtime.robots.versions.comparison import Comparison, wilson
from reflex_runtime.robots.versions.ramp import Change, GuardWatch, Ramp, RampGuard
from reflex_runtime.robots.versions.router import Router, Routing
from reflex_runtime.web.errors import Conflict, Degraded, NotFound

log = logging.getLogger("reflex.rollout")

EPISODES: Final = 10_000  # episodes remembered: which policies answered them, and whether their outcome is known
CHANGES: Final = 200  # changes kept for the diagnostics


@dataclass(slots=True)
class SlotRecord:
    """The results of one policy in a slot.

    number: of the policy, counted in its slot from 1. successes, episodes: of reported outcomes. watch: the guard of a
    new policy, at least until `until`. drained: whether the breaker opened meanwhile.
    """

    number: int = 1
    poison: Poison = field(default_factory=Poison)
    successes: int = 0
    episodes: int = 0
    watch: GuardWatch | None = None
    until: float = 0.0
    drained: bool = False


class Rollout:
    """The versions of one server, and the sink of their results.

    slots: ("prod",), or ("a", "b"). split: percent of the episodes that go to a. ramp: makes the ramp when the server
    is ready. guard: for policies that are exchanged. on_change: called with every change, on the event loop. on_moved:
    called with moved episodes. prefix: of the slots' groups; events of other groups are ignored.
    """

    events = frozenset({BatchFinished, RequestSettled, RequestAnswered})

    def __init__(
        self,
        slots: Sequence[str],
        breaker: Breaker,
        split: int = 100,
        ramp: Callable[[float], Ramp] | None = None,
        guard: RampGuard | None = None,
        on_change: Callable[[Change], None] = lambda change: None,
        on_moved: Callable[[Sequence[str]], None] = lambda episodes: None,
        prefix: str = "",
    ) -> None:
        self.slots = tuple(slots)
        self._slot_of = {prefix + slot: slot for slot in slots}  # by group
        self.breaker = breaker
        self.records = {slot: SlotRecord() for slot in self.slots}
        self.router = Router(split) if len(self.slots) == 2 else None
        self._only = Routing(self.slots[0])  # of every request, if there is one slot
        self.comparison = Comparison(split) if self.router is not None else None
        self.ramp: Ramp | None = None
        self._make_ramp = ramp
        self.changes: deque[Change] = deque(maxlen=CHANGES)
        self._guard = guard
        self._clean = ""  # the slot of a finished batch without an answer yet
        self._counted: BatchFinished | None = None  # the last one
        self._on_change, self._on_moved = on_change, on_moved
        self._episodes: Lru[str, set[tuple[str, int]]] = Lru(EPISODES)  # episode → policies that answered it
        self._reported: Lru[str, None] = Lru(EPISODES)  # episodes whose outcome is known
        self._warned = False

    def begin(self, now: float) -> None:
        """Start the ramp with its first stage: the server is ready."""
        if self._make_ramp is not None:
            self.ramp = self._make_ramp(now)
            self._set_split(100 - self.ramp.share)
            self.changed(now, "ramp", f"started: {self.ramp.share} % of new episodes go to b", {})

    def place(
        self,
        episode_id: str | None,
        request_id: str,
        now: float,
        robot_id: str | None = None,
        connection: Hashable = None,
    ) -> Routing:
        """The slot of the request; raises `Degraded` if all are drained."""
        episode = episode_key(robot_id, episode_id)
        routing = self._only
        if self.router is not None:
            routing = self.router.route(episode_id, request_id, now, robot_id, connection)
            if routing.degraded and not self._warned:
                self._warned = True
                log.warning(
                    "policy_router.degraded_mode request_id=%s: no episode_id and no robot_id, so a request is routed "
                    "by its connection, and robots that open one for each request change between policies; send a "
                    "stable episode_id or robot_id with every request",
                    request_id,
                )
        found = self.breaker.place(routing.slot, routing.entry or routing.key or episode or request_id, now)
        if found is None:
            self.untold(routing)
            raise Degraded(
                "every policy crashes; a probe is let in from time to time",
                retry_after=60.0,
                consecutive_crashes=max(self.breaker.count(slot) for slot in self.slots),
            )
        if self.router is not None:
            if found != routing.slot:
                routing = self.router.move(routing, found)
                if routing.changed and episode:
                    self._on_moved((episode,))
            if (verdict := self.breaker.verdict) != "ok":
                routing = replace(routing, verdict=verdict)
        if episode:
            self._episodes.use(episode, set).add((routing.slot, self.records[routing.slot].number))
        return routing

    def untold(self, routing: Routing) -> None:
        """Let the next answer of the episode report its move: this request failed."""
        if routing.changed and routing.episode is not None:
            routing.episode.moved = True

    def crashed(self, slot: str, now: float) -> None:
        """Count a crashed batch of the slot."""
        if self.breaker.crashed(slot, now, self.records[slot].poison.share):
            self._switched("drain", slot, now, f"{slot} crashes: {self.breaker.verdict}, {self.breaker.why(slot)}")
            self.records[slot].drained = True
            if slot == "b" and self.ramp is not None and self.ramp.state == "running":
                self.rollback(now, "b was drained during its ramp")

    def computed(self, slot: str, now: float) -> None:
        """Count a batch of the slot that gave an answer; called once per batch."""
        if self.breaker.answered(slot):
            self._switched("return", slot, now, f"{slot} answers again: {self.breaker.verdict}")

    def answered(self, slot: str, outcome: str, latency: float) -> None:
        """Count an answer; only `ok` and `failed` depend on the policy."""
        if outcome not in ("ok", "failed"):
            return
        if self.ramp is not None and slot == "b":
            self.ramp.observe(outcome == "ok", latency)
        watch = self.records[slot].watch
        if watch is not None:
            watch.add(outcome == "ok", latency)

    def outcome(self, episode_id: str, success: bool, robot_id: str | None = None) -> dict[str, Any]:
        """Count how an episode ended; only the first report counts. An episode that two policies answered, or whose
        policy was exchanged, counts for none. Without robot_id, only one robot may have an episode of this name."""
        episode = episode_key(robot_id, episode_id)
        if robot_id is None and episode not in self._episodes:
            named = [known for known in self._episodes if known.endswith(f"\n{episode_id}")]
            if len(named) > 1:
                raise Conflict(f"{len(named)} robots have an episode_id {episode_id[:100]!r}: say whose by robot_id")
            episode = named[0] if named else ""
        by = self._episodes.get(episode)
        if by is None:
            raise NotFound(f"no request with episode_id {episode_id[:100]!r} was answered here lately")
        slot, policy = next(iter(by))
        record, mixed = self.records[slot], len({slot for slot, _ in by}) > 1
        counted = len(by) == 1 and policy == record.number
        report: dict[str, Any] = {"episode_id": episode_id, "slot": None if mixed else slot, "success": success}
        if robot := episode.rpartition("\n")[0]:
            report["robot_id"] = robot
        if episode in self._reported:  # a caller that got no answer repeats its report
            return report | {"counted": False, "repeated": True}
        self._reported[episode] = None
        if counted:
            record.successes += success
            record.episodes += 1
            if self.comparison is not None:
                self.comparison.add(slot, success)
        return report | {"counted": counted, "repeated": False}

    def __call__(self, event: Event) -> None:
        """Count answers, and crashed and clean calls, of the slots.

        A call is clean only if it gave an answer: a prefix that worked before a crashed denoise step proves nothing. A
        request that failed while others were answered is a bad request; the breaker gets their share with each crash.
        """
        if isinstance(event, RequestSettled):
            slot, outcome = self._slot_of.get(event.ticket.request.group), event.ticket.outcome
            if slot is None:
                return
            if isinstance(outcome, Done):
                self.records[slot].poison.answered(event.ticket.request.client)
                if slot == self._clean:
                    self.computed(slot, event.at)
                    self._clean = ""
            elif isinstance(outcome.error, ProcessorError):
                self.records[slot].poison.failed(event.ticket.request.client)
        elif isinstance(event, RequestAnswered):
            slot = self._slot_of.get(event.slot)
            if slot is not None and (event.ticket is not None or event.outcome == "ok"):
                self.answered(slot, event.outcome, event.latency)
        elif isinstance(event, BatchFinished):
            self._count(event)

    def notes(self, event: BatchFinished) -> dict[str, str]:
        """The notes of a finished batch for trace and recording: the verdict after it, in any order of sinks."""
        self._count(event)
        verdict = self.breaker.verdict
        return {} if verdict == "ok" else {"verdict": verdict}

    def _count(self, event: BatchFinished) -> None:
        """Count a batch once; `notes` may get its event before or after this sink."""
        if event is self._counted:
            return
        self._counted = event
        slot = self._slot_of.get(event.batch.group)
        self._clean = "" if event.crashed or slot is None else slot
        if event.crashed and slot is not None:
            self.crashed(slot, event.at)

    def set_split(self, split: int, now: float) -> None:
        """From now on `split` percent of new episodes go to a. Ends a ramp."""
        self._two()
        self.ramp = None
        self._set_split(split)
        self.changed(now, "split", "by an operator", {"split": split})

    def rollback(self, now: float, why: str = "by an operator") -> list[str]:
        """Send all traffic to a at once, running episodes too. Returns those that were moved."""
        router = self._two()
        if self.ramp is not None and self.ramp.state == "running":
            self.ramp.roll_back(now, why)
        moved = router.rollback("a", now)
        self._set_split(100)
        self._on_moved(moved)
        self.changed(now, "rollback", why, {"split": 100, "episodes_moved": len(moved)})
        return moved

    def reset(self, slot: str, now: float) -> None:
        if slot not in self.slots:
            raise NotFound(f"no slot {slot[:20]!r}; the slots are {', '.join(self.slots)}")
        self.breaker.reset(slot)
        self.records[slot].poison = Poison()
        self._switched("return", slot, now, f"{slot} was reset by an operator: {self.breaker.verdict}")

    def may_exchange(self) -> None:
        """Raise Conflict while a ramp runs: its results belong to the old policy."""
        if self.ramp is not None and self.ramp.state == "running":
            raise Conflict("a ramp is running; end it with /admin/rollback or /admin/split, then load")

    def exchanged(self, slot: str, watch_until: float | None = None) -> None:
        """The slot has a new policy without results. watch_until: its guard watches at least until then."""
        if slot not in self.slots:  # the shadow
            return
        self.breaker.reset(slot)
        record = self.records[slot] = SlotRecord(self.records[slot].number + 1)
        if watch_until is not None and self._guard is not None:
            record.watch, record.until = GuardWatch(self._guard), watch_until
        if self.comparison is not None:
            self.comparison = Comparison(self.comparison.split)

    def evaluate(self, now: float) -> dict[str, bool]:
        """Advance or roll back the ramp; called every second. Returns the slots whose watch has ended, and whether the
        guard triggered."""
        if self.ramp is not None:
            change = self.ramp.evaluate(now)
            if change is not None and self.ramp.state == "rolled_back":
                self.rollback(now, f"the ramp: {change.why}")
            elif change is not None:
                self._set_split(100 - self.ramp.share)
            if change is not None:
                self._add(change)
        ended = {}
        for slot, record in self.records.items():
            watch = record.watch
            if watch is None:
                continue
            why = f"{slot} was drained" if record.drained else watch.tripped()
            if why is not None or (now >= record.until and watch.enough):
                record.watch = None
                text = f"{slot} has kept its guard" if why is None else f"{slot}: {why}"
                self.changed(now, "guard", text, dict(watch.numbers()))
                ended[slot] = why is not None
        return ended

    def snapshot(self, now: float) -> dict[str, Any]:
        """The whole state, JSON-safe. Takes a millisecond with many episodes."""
        state: dict[str, Any] = {
            "verdict": self.breaker.verdict,
            "slots": {slot: {"verdict": verdict} for slot, verdict in self.breaker.verdicts.items()},
            "breaker": self.breaker.snapshot(now),
            "outcomes": {slot: _described(one.successes, one.episodes) for slot, one in self.records.items()},
            "changes": [asdict(change) | {"ago_s": round(now - change.at, 3)} for change in self.changes],
        }
        if self.router is not None and self.comparison is not None:
            state |= {"split": self.router.split, "router": self.router.snapshot()}
            state["comparison"] = self.comparison.snapshot()
        if self.ramp is not None:
            state["ramp"] = self.ramp.snapshot(now)
        return state

    def _set_split(self, split: int) -> None:
        self._two().set_split(split)
        if self.comparison is not None:
            self.comparison.set_split(split)

    def _two(self) -> Router:
        if self.router is None:
            raise Conflict("this server has one policy; a split needs --policy-a and --policy-b")
        return self.router

    def _switched(self, kind: str, slot: str, now: float, why: str) -> None:
        """The breaker opened or closed a slot."""
        breaker = self.breaker
        self.changed(now, kind, why, {"slot": slot, "verdict": breaker.verdict, "breaker": breaker.snapshot(now)})

    def changed(self, now: float, kind: str, why: str, numbers: dict[str, Any]) -> None:
        """Log and keep a change, and call `on_change`."""
        self._add(Change(now, kind, why, numbers))

    def _add(self, change: Change) -> None:
        self.changes.append(change)
        numbers = ", ".join(f"{name} {n:g}" for name, n in change.numbers.items() if isinstance(n, int | float))
        log.warning("%s: %s%s", change.kind, change.why, f" ({numbers})" if numbers else "")
        self._on_change(change)


def _described(successes: int, episodes: int) -> dict[str, Any]:
    low, high = wilson(successes, episodes) if episodes else (0.0, 1.0)
    return {"episodes": episodes, "successes": successes, "low": round(low, 4), "high": round(high, 4)}
