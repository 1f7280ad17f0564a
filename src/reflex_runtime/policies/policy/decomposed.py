"""A policy in two graphs: the prefix reads the scene once, the expert denoises in steps.

Requests are resident between steps, so the batch may change at every step boundary. Each row has its own flow time
k/n: a new request joins a running batch at the next step instead of waiting for the last one. Prefix and step are
stages of the scheduler; every stage is one call for all its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Batch, Done, More
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.core.request import Ticket, TicketState
from reflex_runtime.policies.export.directory import Export
from reflex_runtime.policies.policy.base import Policy
from reflex_runtime.policies.policy.observation import ActionChunk, CacheUse, Observation
from reflex_runtime.policies.policy.prefix_cache import Prefix, PrefixCache, PrefixKey, digest
from reflex_runtime.policies.policy.rtc import ChunkTails, Rtc
from reflex_runtime.processors.onnx import CPU, OnnxSession

PREFIX, DENOISE = "prefix", "denoise"
CACHE_BYTES = 256 << 20
STEADY = 0.01  # relative change of velocity below which further steps are spared
LEAST_STEPS = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Flow:
    """A resident between two steps: x after `step` of them, in the model's units."""

    prefix: Prefix
    x: NDArray[np.float32]
    step: int = 0
    noise: NDArray[np.float32] | None = None  # only if the chunk is anchored
    velocity: NDArray[np.float32] | None = None  # of the last step, only if steps are adaptive


class DecomposedPolicy(Policy):
    """Runs `vlm_prefix.onnx` and `expert_denoise.onnx`.

    A request whose prefix is cached enters at stage "denoise" and wants the steps; any other enters at "prefix" and
    wants one unit more. Requests without an episode are not cached.

    cache_bytes: limit of the prefix cache, 0 for none; prefixes of unsettled requests are not counted. max_age_chunks:
    see `PrefixCache`. provider, threads, captured_sizes: as in `OnnxSession`, for both graphs. rtc: chunks continue the
    episode's last one. adaptive: a row whose velocity no longer changes finishes in one step.

    ConfigError if the graphs do not match the export or each other.
    """

    stages = (PREFIX, DENOISE)
    inference_mode = "decomposed"

    def __init__(
        self,
        export: Export,
        slot: str = "prod",
        *,
        cache_bytes: int = CACHE_BYTES,
        max_age_chunks: int = 0,
        provider: str = CPU,
        threads: int = 1,
        captured_sizes: Sequence[int] = (),
        rtc: Rtc | None = None,
        adaptive: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(export, slot, captured_sizes)
        self.adaptive = adaptive
        self.tails = None if rtc is None else ChunkTails(rtc, clock, export.embodiment.control_rate_hz)
        self._clock = clock
        self.cache = PrefixCache(cache_bytes, max_age_chunks) if cache_bytes else None
        prefix, expert = export.graphs["prefix"], export.graphs["expert"]
        self._prefix_inputs = {role: spec.name for role, spec in prefix.inputs.items()}
        self._inputs = {role: spec.name for role, spec in expert.inputs.items()}
        self._output = expert.outputs["actions"].name
        self._prefix, self._expert = (
            OnnxSession(
                graph.file, list(graph.inputs.values()), list(graph.outputs.values()), provider, threads, captured_sizes
            )
            for graph in (prefix, expert)
        )
        for made, read in export.past_kv.items():
            left, right = self._prefix.outputs[made], self._expert.inputs[read]
            fit = len(left.dims) == len(right.dims) and all(
                a is None or b is None or a == b for a, b in zip(left.dims, right.dims, strict=True)
            )
            if not fit or left.dtype != right.dtype:
                raise ConfigError(
                    f"{expert.file}: input {read!r}: {right.dtype} {right.dims}, but {prefix.file.name} makes "
                    f"{left.dtype} {left.dims} (decomposed.past_kv_tensor_names)"
                )
        self._flows: dict[Ticket, _Flow] = {}
        self._packed: tuple[tuple[Ticket, ...], dict[str, Any]] = ((), {})

    # -- on the way in -------------------------------------------------------------------------------------------------

    def _prepared(self, observation: Observation, instruction: str) -> Observation:
        if self.cache is None or not observation.episode_id:
            return observation
        text = np.frombuffer(instruction.encode("utf-8", "surrogatepass"), np.uint8)
        seen = [observation.row(role) for role in sorted(self._prefix_inputs)]
        return replace(
            observation, prefix_key=PrefixKey(self.slot, observation.episode_id, digest(text), digest(*seen))
        )

    def _enter(self, observation: Observation) -> tuple[Observation, str, float]:
        steps = float(self.export.num_denoising_steps)
        if self.tails is not None and observation.episode_id:
            observation = replace(observation, anchor=self.tails.anchor(observation.episode_id, observation.executed))
        if self.cache is None or observation.prefix_key is None:
            return observation, PREFIX, steps + 1.0
        use, prefix = self.cache.lookup(observation.prefix_key)
        observation = replace(observation, cache=use, prefix=prefix)
        return (observation, PREFIX, steps + 1.0) if prefix is None else (observation, DENOISE, steps)

    def _at_best(self, episode: bool) -> tuple[CacheUse, str, float]:
        steps = float(self.export.num_denoising_steps)
        if self.cache is None or not episode:
            return "off", PREFIX, steps + 1.0
        return "hit", DENOISE, steps

    # -- device thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._packed = ((), {})  # a thread that was given up cannot use its captured buffers any more

    def run(self, batch: Batch) -> Sequence[Any]:
        self.drop(batch.left)
        self._forget_settled()
        return self._run_prefix(batch) if batch.stage == PREFIX else self._run_step(batch)

    def drop(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if self._flows.pop(ticket, None) is not None:
                self._packed = ((), {})

    def stop(self) -> None:
        self._flows.clear()
        self._packed = ((), {})

    def _forget_settled(self) -> None:
        """Forget settled requests. One whose first batch hung is never in `left`, because it was not resident yet."""
        self.drop([ticket for ticket in list(self._flows) if ticket.state is TicketState.SETTLED])

    def _run_prefix(self, batch: Batch) -> Sequence[Any]:
        tickets = list(batch.grants)
        seen: list[Observation] = [ticket.request.payload for ticket in tickets]
        rows = {name: np.stack([o.row(role) for o in seen]) for role, name in self._prefix_inputs.items()}
        made = self._prefix.run(rows, batch.notes)
        # No state has changed so far, and nothing below can fail: so a call that raises may be repeated.
        steps = float(self.export.num_denoising_steps)
        for i, (ticket, observation) in enumerate(zip(tickets, seen, strict=True)):
            # Copied out of the batch: a view would keep the keys and values of all its rows in memory.
            prefix = Prefix({read: made[name][i].copy() for name, read in self.export.past_kv.items()})
            self._flows[ticket] = self._begun(prefix, observation)
            if self.cache is not None and observation.prefix_key is not None:
                self.cache.insert(observation.prefix_key, prefix)
        return [More(wants=steps, stage=DENOISE)] * len(tickets)

    def _run_step(self, batch: Batch) -> Sequence[Any]:
        steps = self.export.num_denoising_steps
        flows = {ticket: flow for ticket in batch.grants if (flow := self._flow(ticket)) is not None}
        tickets = tuple(flows)
        moved: dict[Ticket, NDArray[np.float32]] = {}
        if tickets:
            rows = self._constants(tickets, flows)
            rows[self._inputs["noise"]] = np.stack([flow.x for flow in flows.values()])
            rows[self._inputs["time"]] = np.array([flow.step / steps for flow in flows.values()], np.float32)
            moved = dict(zip(tickets, self._expert.run(rows, batch.notes)[self._output], strict=True))
        results: list[Any] = []
        for ticket in batch.grants:
            flow = flows.get(ticket)
            if flow is None:
                results.append(ProcessorError("its keys and values are gone"))
            else:
                results.append(self._moved(ticket, flow, moved[ticket], steps))
        chunks = [result.value for result in results if isinstance(result, Done)]
        if chunks:
            self._packed = ((), {})
            self._note(batch.notes, chunks)
        return results

    def _note(self, notes: dict[str, Any], chunks: Sequence[ActionChunk]) -> None:
        """Add to the batch's notes how many chunks continued their episode's last one, and the steps they spared."""
        continued = sum(chunk.rtc is not None for chunk in chunks)
        if continued:
            notes["rtc"] = notes.get("rtc", 0) + continued
        spared = sum(self.export.num_denoising_steps - chunk.denoising_steps for chunk in chunks)
        if spared:
            notes["steps_spared"] = notes.get("steps_spared", 0) + spared

    def _flow(self, ticket: Ticket) -> _Flow | None:
        """The state of a ticket between steps; one with a cached prefix starts here."""
        known = self._flows.get(ticket)
        observation: Observation = ticket.request.payload
        if known is None and observation.prefix is not None:
            return self._begun(observation.prefix, observation)
        return known

    def _begun(self, prefix: Prefix, observation: Observation) -> _Flow:
        noise = self._noise(observation)
        return _Flow(prefix, noise, noise=None if observation.anchor is None else noise)

    def _moved(self, ticket: Ticket, flow: _Flow, x: NDArray[np.float32], steps: int) -> More | Done:
        """One row after a step: it continues or is finished. x: the result of the step."""
        observation: Observation = ticket.request.payload
        done = flow.step + 1
        velocity = None
        if self.adaptive and done < steps:
            velocity = (x - flow.x) * np.float32(steps)
            if done >= LEAST_STEPS and flow.velocity is not None and _steady(flow.velocity, velocity):
                x = x + velocity * np.float32((steps - done) / steps)
                return self._arrived(ticket, observation, flow, x, done)
        if done == steps:
            return self._arrived(ticket, observation, flow, x, done)
        if observation.anchor is not None and flow.noise is not None:
            x = observation.anchor.pull(x, flow.noise, done / steps)
        self._flows[ticket] = replace(flow, x=x, step=done, velocity=velocity)
        return More(wants=float(steps - done))

    def _arrived(
        self, ticket: Ticket, observation: Observation, flow: _Flow, x: NDArray[np.float32], steps: int
    ) -> Done:
        if observation.anchor is not None and flow.noise is not None:
            x = observation.anchor.pull(x, flow.noise, 1.0)
        self._flows.pop(ticket, None)
        if self.tails is not None and not ticket.cancel_requested:  # a cancelled chunk is not executed
            self.tails.remember(observation.episode_id, np.array(x), self._clock() - ticket.arrived)
        return self._chunk(observation, x, steps)

    def _constants(self, tickets: tuple[Ticket, ...], flows: dict[Ticket, _Flow]) -> dict[str, Any]:
        """State, keys and values of the rows, stacked once for as many steps as the same tickets run together."""
        packed = self._packed
        if packed[0] != tickets:
            stacked = {
                name: np.stack([flow.prefix.tensors[name] for flow in flows.values()])
                for name in self.export.past_kv.values()
            }
            if "state" in self._inputs:
                stacked[self._inputs["state"]] = np.stack([t.request.payload.row("state") for t in tickets])
            packed = self._packed = (tickets, {name: self._expert.place(a, name) for name, a in stacked.items()})
        return dict(packed[1])

    def _describe(self) -> dict[str, Any]:
        both = self._prefix.dynamic_batch and self._expert.dynamic_batch
        return {
            "provider": self._expert.provider,
            "fanout": "batched" if both else "sequential",
            "prefix_cache": None if self.cache is None else self.cache.snapshot(),
            "rtc": None if self.tails is None else asdict(self.tails.rtc) | {"episodes": len(self.tails)},
            "adaptive_steps": self.adaptive,
        }


def _steady(before: NDArray[np.float32], now: NDArray[np.float32]) -> bool:
    """Whether the velocity changes by less than 1 %."""
    return float(np.linalg.norm(now - before)) < STEADY * float(np.linalg.norm(before))
