"""A policy whose model reads the scene once (the prefix) and then denoises in steps.

Requests are resident between steps, so the batch may change at every step boundary. Each row has its own flow time
k/n: a new request joins a running batch at the next step. Prefix and step are stages of the scheduler; a stage is one
call for all its rows. A prefix stays where the model made it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Batch, Done, More
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.request import Ticket, TicketState
from reflex_runtime.robots.policy.base import Policy, StagedModel, described, stacked
from reflex_runtime.robots.policy.episodes import Anchor, ChunkTails, Prefix, PrefixCache, PrefixKey, Rtc, digest
from reflex_runtime.robots.policy.observation import ActionChunk, Observation

PREFIX, DENOISE = "prefix", "denoise"
CACHE_BYTES = 256 << 20
STEADY = 0.01  # relative change of velocity below which the remaining steps are spared
LEAST_STEPS = 2  # before any step is spared


@dataclass(frozen=True, slots=True, eq=False)
class _Flow:
    """A request between two steps: x after `step` of them, in the model's units."""

    prefix: Prefix
    x: NDArray[np.float32]
    step: int = 0
    noise: NDArray[np.float32] | None = None  # only if the chunk is anchored
    velocity: NDArray[np.float32] | None = None  # of the last step, only if steps are adaptive
    finished: bool = False


class DecomposedPolicy(Policy):
    """Runs a staged model.

    A request whose prefix is cached enters at stage "denoise" and wants one unit for each step; any other enters at
    "prefix" and wants one unit more. Prefixes of requests without an episode are not cached.

    cache_bytes, max_age_chunks: of the `PrefixCache`, 0 bytes for none. rtc: chunks continue the episode's last one.
    adaptive: a row whose velocity is steady does its remaining steps as one.
    """

    stages = (PREFIX, DENOISE)
    staged = True
    model: StagedModel

    def __init__(
        self,
        model: StagedModel,
        slot: str = "prod",
        *,
        cache_bytes: int = CACHE_BYTES,
        max_age_chunks: int = 0,
        rtc: Rtc | None = None,
        adaptive: bool = False,
        rows: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(model, slot, rows)
        if not model.pads_prefix:
            self.padded_stages = (DENOISE,)
        self.adaptive = adaptive
        self.tails = None if rtc is None else ChunkTails(rtc, clock, self.spec.embodiment.control_rate_hz)
        self._clock = clock
        self.cache = PrefixCache(cache_bytes, max_age_chunks) if cache_bytes else None
        self.caches = self.cache is not None
        self._flows: dict[Ticket, _Flow] = {}
        self._packed: tuple[tuple[Ticket, ...], Any] = ((), None)

    # -- on the way in -------------------------------------------------------------------------------------------------

    def prepare(self, **fields: Any) -> Observation:
        observation = super().prepare(**fields)
        if self.cache is None or not observation.episode_id:
            return observation
        text = np.frombuffer(observation.instruction.encode("utf-8", "surrogatepass"), np.uint8)
        seen: list[NDArray[Any]] = [observation.images[name] for name in sorted(observation.images)]
        if observation.tokens is not None:
            seen.append(observation.tokens)
        if self.spec.prefix_takes_state and observation.state is not None:
            seen.append(observation.state)
        if self.spec.optional_images:  # a black picture differs from a missing one
            seen.append(observation.row("image_masks"))
        key = PrefixKey(self.slot, observation.episode_id, digest(text), digest(*seen))
        return replace(observation, prefix_key=key)

    def _enter(self, observation: Observation) -> Observation:
        if self.tails is not None and observation.episode_id:
            observation = replace(observation, anchor=self._anchor(observation, self.tails))
        if self.cache is None or observation.prefix_key is None:
            return observation
        use, prefix = self.cache.lookup(observation.prefix_key)
        return replace(observation, cache=use, prefix=prefix)

    def _entry(self, cached: bool) -> tuple[str, float]:
        steps = float(self.spec.num_denoising_steps)
        return (DENOISE, steps) if cached else (PREFIX, steps + 1.0)

    def _anchor(self, observation: Observation, tails: ChunkTails) -> Anchor | None:
        """The anchor of the next chunk. If actions are changes of the state, the old ones are shifted to start from the
        new state, so that the robot's targets stay the same."""
        o = observation
        anchor = tails.anchor(o.episode_id, o.executed, o.delay, o.received)
        if anchor is None or anchor.state is None or o.robot_state is None:
            return anchor
        shift = self.model.shift(o.robot_state - anchor.state)
        if shift is None:
            return anchor
        target = anchor.target.copy()
        target[:, : len(shift)] += shift
        return replace(anchor, target=target)

    def forget(self, episode: str | None = None) -> None:
        super().forget(episode)
        if self.tails is not None:
            self.tails.forget(episode)

    # -- device thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        super().start()
        self._packed = ((), None)  # it may refer to buffers of the last thread

    def run(self, batch: Batch) -> Sequence[Any]:
        self.drop(batch.left)
        # A ticket whose first batch hung is settled, but is never in `left`, because it was not resident.
        self.drop([ticket for ticket in list(self._flows) if ticket.state is TicketState.SETTLED])
        self.model.notes = batch.notes
        return self._run_prefix(batch) if batch.stage == PREFIX else self._run_step(batch)

    def drop(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if self._flows.pop(ticket, None) is not None:
                self._packed = ((), None)

    def stop(self) -> None:
        self._flows.clear()
        self._packed = ((), None)

    def _run_prefix(self, batch: Batch) -> Sequence[Any]:
        tickets = list(batch.grants)
        seen: list[Observation] = [ticket.request.payload for ticket in tickets]
        rows = self._filled(seen)
        prefixes = self.model.prefix(rows)
        if len(prefixes) != len(rows):
            raise ProcessorError(f"{self.spec.source}: the model answered {len(prefixes)} prefixes for {len(rows)}")
        # Nothing above changes state, and nothing below can fail: so a call that raises may be repeated.
        for ticket, observation, prefix in zip(tickets, seen, prefixes, strict=False):
            self._flows[ticket] = self._begun(prefix, observation)
            if self.cache is not None and observation.prefix_key is not None:
                self.cache.insert(observation.prefix_key, prefix)
        return [More(wants=float(self.spec.num_denoising_steps), stage=DENOISE)] * len(tickets)

    def _run_step(self, batch: Batch) -> Sequence[Any]:
        flows = {ticket: flow for ticket in batch.grants if (flow := self._flow(ticket)) is not None}
        moved = {t: self._moved(t, flow, x) for (t, flow), x in zip(flows.items(), self._step(flows), strict=True)}
        chunks = self._finished({ticket: flow for ticket, flow in moved.items() if flow.finished})
        # Nothing above changes state, and nothing below can fail: so a call that raises may be repeated.
        results: list[Any] = []
        for ticket in batch.grants:
            if ticket in chunks:
                self._arrive(ticket, moved[ticket])
                results.append(Done(chunks[ticket]))
            elif ticket in moved:
                self._flows[ticket] = moved[ticket]
                results.append(More(wants=float(self.spec.num_denoising_steps - moved[ticket].step)))
            else:
                results.append(ProcessorError("the request's prefix was dropped; send the request again"))
        if chunks:
            self._packed = ((), None)
            self._note(batch.notes, list(chunks.values()))
        return results

    def _step(self, flows: dict[Ticket, _Flow]) -> Sequence[NDArray[np.float32]]:
        """x of every row after its next step. Rows are packed again only when they change."""
        if not flows:
            return ()
        tickets = tuple(flows)
        if self._packed[0] != tickets:
            prefixes, seen = [flow.prefix for flow in flows.values()], [ticket.request.payload for ticket in tickets]
            self._packed = (tickets, self.model.pack(self._filled(prefixes), self._filled(seen)))
        rows = self._filled(list(flows.values()))
        k, x = np.array([flow.step for flow in rows], np.int64), stacked([flow.x for flow in rows])
        moved = self.model.step(self._packed[1], x, k, self.spec.num_denoising_steps)
        if not isinstance(moved, np.ndarray) or moved.shape != x.shape or moved.dtype.kind not in "fiu":
            shapes = f"{described(moved)}, not the {list(x.shape)} of its x"
            raise ProcessorError(f"{self.spec.source}: a step of the model answered {shapes}")
        return list(moved)[: len(flows)]

    def _flow(self, ticket: Ticket) -> _Flow | None:
        """The state of a ticket between steps: the first one if its prefix was cached; None if it was dropped."""
        known = self._flows.get(ticket)
        observation: Observation = ticket.request.payload
        if known is None and observation.prefix is not None:
            return self._begun(observation.prefix, observation)
        return known

    def _begun(self, prefix: Prefix, observation: Observation) -> _Flow:
        noise = self._noise(observation)
        return _Flow(prefix, noise, noise=None if observation.anchor is None else noise)

    def _moved(self, ticket: Ticket, flow: _Flow, x: NDArray[np.float32]) -> _Flow:
        """One row after a step. x: the result of the step."""
        steps, anchor = self.spec.num_denoising_steps, ticket.request.payload.anchor
        done, velocity = flow.step + 1, None
        finished = done == steps
        if self.adaptive and not finished:
            velocity = (x - flow.x) * np.float32(steps)
            if done >= LEAST_STEPS and flow.velocity is not None and _steady(flow.velocity, velocity):
                x, finished = x + velocity * np.float32((steps - done) / steps), True
        if anchor is not None and flow.noise is not None:
            x = anchor.pull(x, flow.noise, 1.0 if finished else done / steps)
        return replace(flow, x=x, step=done, velocity=velocity, finished=finished)

    def _finished(self, flows: Mapping[Ticket, _Flow]) -> dict[Ticket, ActionChunk]:
        """The answers of rows that made their last step."""
        if not flows:
            return {}
        seen: list[Observation] = [ticket.request.payload for ticket in flows]
        x = stacked(self._filled([flow.x for flow in flows.values()]))
        actions = self._actions(self._filled(seen), x)
        chunks = {}
        for (ticket, flow), observation, row in zip(flows.items(), seen, actions, strict=False):
            report = None if observation.anchor is None else observation.anchor.report
            # A copy: a view would keep the actions of all rows in memory.
            chunks[ticket] = ActionChunk(np.array(row, np.float32), flow.step, observation.cache, rtc=report)
        return chunks

    def _arrive(self, ticket: Ticket, flow: _Flow) -> None:
        """Drop the state of a finished ticket; keep what the episode's next chunk continues."""
        self._flows.pop(ticket, None)
        if self._remember(ticket) and self.tails is not None:
            episode = ticket.request.payload.episode_id
            state = ticket.request.payload.robot_state
            self.tails.remember(episode, np.array(flow.x), self._clock() - ticket.arrived, state)

    def _note(self, notes: dict[str, Any], chunks: Sequence[ActionChunk]) -> None:
        """Note how many chunks continued their episode's last one, and the number of spared steps."""
        continued = sum(chunk.rtc is not None for chunk in chunks)
        if continued:
            notes["rtc"] = notes.get("rtc", 0) + continued
        spared = sum(self.spec.num_denoising_steps - chunk.denoising_steps for chunk in chunks)
        if spared:
            notes["steps_spared"] = notes.get("steps_spared", 0) + spared

    def _describe(self) -> dict[str, Any]:
        return {
            "prefix_cache": None if self.cache is None else self.cache.snapshot(),
            "rtc": None if self.tails is None else asdict(self.tails.rtc) | {"episodes": len(self.tails)},
            "adaptive_steps": self.adaptive,
        }


def _steady(before: NDArray[np.float32], now: NDArray[np.float32]) -> bool:
    """Whether the velocity changes by less than 1 %."""
    return float(np.linalg.norm(now - before)) < STEADY * float(np.linalg.norm(before))
