"""The sink that reports answers and crashes to the rollout and its breaker."""

from __future__ import annotations

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.events import BatchFinished, Event, RequestAnswered, RequestSettled
from reflex_runtime.core.request import Ticket
from reflex_runtime.robots.rollout.rollout import Rollout


class VerdictSink:
    """The sink that passes answers to the rollout, and crashed and clean calls to its breaker.

    A call is clean only if it gave an answer: a prefix that worked before a crashed denoise step proves nothing.
    A request that failed while others were answered counts as a bad request; each crash is reported with their share.
    prefix: before the name of each slot in the names of groups; other groups are none of its concern.
    """

    events = frozenset({BatchFinished, RequestSettled, RequestAnswered})

    def __init__(self, rollout: Rollout, prefix: str = "") -> None:
        self._rollout = rollout
        self._slots = {prefix + slot: slot for slot in rollout.slots}  # by group
        self._clean = ""  # the slot whose batch came back and has not answered yet
        self._counted: BatchFinished | None = None  # the last one

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestSettled):
            slot = self._slots.get(event.ticket.request.group)
            if slot is not None:
                self._settled(slot, event.ticket, event.at)
        elif isinstance(event, RequestAnswered):
            slot = self._slots.get(event.slot)
            if slot is not None and (event.ticket is not None or event.outcome == "ok"):
                self._rollout.answered(slot, event.outcome, event.latency)
        elif isinstance(event, BatchFinished):
            self._count(event)

    def notes(self, event: BatchFinished) -> dict[str, str]:
        """The notes of a finished batch for trace and recording: the verdict after it, in any order of sinks."""
        self._count(event)
        verdict = self._rollout.breaker.verdict
        return {} if verdict == "ok" else {"verdict": verdict}

    def _count(self, event: BatchFinished) -> None:
        """Count a batch once, although several sinks get its event in any order."""
        if event is self._counted:
            return
        self._counted = event
        slot, part = self._slots.get(event.batch.group), event.batch.part
        self._clean = "" if event.crashed or slot is None else slot
        if event.crashed and slot is not None:
            by_chance = part is not None and part.origin.served  # all of them were, once they ran apart
            self._rollout.crashed(slot, event.at, 0.0 if by_chance else self._rollout.poison[slot].share)

    def _settled(self, slot: str, ticket: Ticket, now: float) -> None:
        outcome = ticket.outcome
        if isinstance(outcome, Done):
            self._rollout.poison[slot].answered(ticket.request.client)
            if slot == self._clean:
                self._rollout.computed(slot, now)
                self._clean = ""
        elif isinstance(outcome.error, ProcessorError):
            self._rollout.poison[slot].failed(ticket.request.client)
