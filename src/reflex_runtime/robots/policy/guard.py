"""The last check of actions before they are sent: within the robot's ranges, and finite.

Non-finite actions are an error, or a hold of the episode's last good action. Never zeros: in absolute joint control
zero is a motion command.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.errors import NonFiniteResult
from reflex_runtime.core.request import Ticket
from reflex_runtime.robots.policy.observation import ActionChunk, GuardReport, Observation
from reflex_runtime.robots.policy.spec import Embodiment
from reflex_runtime.run.processor import Processor, WrappedProcessor

OnBadAction = Literal["error", "hold"]
_CLEAN = GuardReport()


class ActionGuard:
    """Checks the chunks of one slot, on the device thread.

    embodiment: actions are clamped to its ranges; without ranges they are only checked for non-finite values.
    on_bad_action: "error" fails the request. "hold" answers with the episode's last good action in every place of the
        chunk, and marks the answer. It is an error if the episode has no good action yet, or the request has no
        episode. In a relative action space a repeated action goes on moving, so "error" is safer there.
    max_episodes: number of episodes whose last action is kept; the longest unused is forgotten.
    """

    def __init__(
        self, embodiment: Embodiment, slot: str = "prod", on_bad_action: OnBadAction = "error", max_episodes: int = 4096
    ) -> None:
        self.slot, self.on_bad_action = slot, on_bad_action
        self._ranges, self._names = embodiment.action_ranges, embodiment.action_names
        self._max_episodes = max_episodes
        self._last: OrderedDict[tuple[str, str], NDArray[np.float32]] = OrderedDict()
        self.clamped = self.held = self.refused = 0  # chunks

    def check(self, chunk: ActionChunk, episode_id: str) -> ActionChunk:
        """The checked chunk with its report; NonFiniteResult if it must not be sent."""
        actions = chunk.actions
        if not np.isfinite(actions).all():
            return self._hold(chunk, episode_id)
        report = GuardReport()
        if self._ranges is not None:
            inside = np.clip(actions, self._ranges[:, 0], self._ranges[:, 1])
            changed = inside != actions
            if changed.any():
                joints = tuple(self._name(int(j)) for j in np.flatnonzero(changed.any(axis=0)))
                report = GuardReport(int(changed.sum()), joints)
                self.clamped += 1
                actions = inside
        if self.on_bad_action == "hold" and episode_id:
            self._remember((self.slot, episode_id), actions[-1].copy())
        return replace(chunk, actions=actions, guard=report)

    def clean(self, chunks: Sequence[ActionChunk]) -> bool:
        """True if all of these pass `check` unchanged, tested on the whole batch at once; False may also be a false
        alarm."""
        actions = np.concatenate([chunk.actions for chunk in chunks])
        if self._ranges is None:
            return bool(np.isfinite(actions).all())
        low, high = self._ranges[:, 0], self._ranges[:, 1]
        return bool(((actions >= low) & (actions <= high)).all())  # NaN is on neither side

    def passed(self, chunks: Sequence[ActionChunk], tickets: Iterable[Ticket]) -> None:
        """Add the guard's report to clean chunks. tickets: theirs."""
        for chunk in chunks:
            chunk.guard = _CLEAN
        if self.on_bad_action == "hold":
            for chunk, ticket in zip(chunks, tickets, strict=True):
                if episode_id := _episode(ticket):
                    self._remember((self.slot, episode_id), chunk.actions[-1].copy())

    def _hold(self, chunk: ActionChunk, episode_id: str) -> ActionChunk:
        bad = ~np.isfinite(chunk.actions)
        joints = tuple(self._name(int(j)) for j in np.flatnonzero(bad.any(axis=0)))
        last = self._last.get((self.slot, episode_id))
        if last is None:
            self.refused += 1
            held = "" if self.on_bad_action == "error" else "; no good action of the episode to hold"
            raise NonFiniteResult(f"the policy's actions are not finite ({', '.join(joints)}){held}")
        self._last.move_to_end((self.slot, episode_id))
        self.held += 1
        actions = np.broadcast_to(last, chunk.actions.shape).copy()
        return replace(chunk, actions=actions, guard=GuardReport(int(bad.sum()), joints, held=True))

    def _remember(self, key: tuple[str, str], action: NDArray[np.float32]) -> None:
        self._last[key] = action
        self._last.move_to_end(key)
        if len(self._last) > self._max_episodes:
            self._last.popitem(last=False)

    def _name(self, joint: int) -> str:
        return str(joint) if self._names is None else self._names[joint]


class GuardedProcessor(WrappedProcessor):
    """A policy whose chunks pass through the guard. A chunk that must not be sent fails alone.

    The batch's notes count the chunks that were `clamped`, `held` or `refused`.
    """

    def __init__(self, inner: Processor, guard: ActionGuard) -> None:
        super().__init__(inner)
        self.guard = guard

    def run(self, batch: Batch) -> Sequence[Any]:
        results = self._inner.run(batch)
        if len(results) != len(batch.grants):
            return results
        chunks = [r.value for r in results if isinstance(r, Done) and isinstance(r.value, ActionChunk)]
        if chunks and len(chunks) == len(results) and self.guard.clean(chunks):
            self.guard.passed(chunks, batch.grants)
            return results
        guard = self.guard
        before = guard.clamped, guard.held, guard.refused
        checked = [self._checked(ticket, result) for ticket, result in zip(batch.grants, results, strict=True)]
        after = guard.clamped, guard.held, guard.refused
        for name, was, now in zip(("clamped", "held", "refused"), before, after, strict=True):
            if now > was:  # added up: a batch that is bisected is several calls
                batch.notes[name] = batch.notes.get(name, 0) + now - was
        return checked

    def _checked(self, ticket: Ticket, result: Any) -> Any:
        if not (isinstance(result, Done) and isinstance(result.value, ActionChunk)):
            return result
        try:
            return Done(self.guard.check(result.value, _episode(ticket)))
        except NonFiniteResult as error:
            return error


def _episode(ticket: Ticket) -> str:
    observation = ticket.request.payload
    return observation.episode_id if isinstance(observation, Observation) else ""
