"""Models, and policies as their processors: preparing, requests, the cost model and warm-up.

A *whole* model makes a chunk of actions in one call. A *staged* model reads the scene once (`prefix`), then moves x
from noise to actions in small steps (`step`), so that requests may join and leave between the steps. A model may be
ONNX graphs, PyTorch modules or anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar, NamedTuple, TypedDict, TypeVar, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Apart, Batch, Cause, Done, Failed, More
from reflex_runtime.core.cost import CostModel, TimeCost
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.core.request import Priority, Request, Ticket, TicketState
from reflex_runtime.robots.policy.episodes import Prefix
from reflex_runtime.robots.policy.observation import (
    ActionChunk,
    CacheUse,
    Observation,
    ObservationFields,
    ObservationHistory,
    Sent,
    noise_of,
    seed_of,
    together,
)
from reflex_runtime.robots.policy.spec import DeviceOptions, PolicySpec
from reflex_runtime.robots.policy.units import Floats, shift_of, transformed
from reflex_runtime.run.onnx_session import CPU
from reflex_runtime.run.processor import BaseProcessor, Processor, run_batch
from reflex_runtime.web.errors import InvalidRequest

T = TypeVar("T")


# -- models: computation without requests, caches or episodes ---------------------------------------------------------


class PolicyModel:
    """The base of both kinds. `prepare` runs on worker threads, everything else on the device thread.

    provider: the device it runs on. batched: a call with n rows is one call, not n. captured_sizes: batch sizes it pads
    to (CUDA graphs). half: it computes in 16 bits. warming: True during the warm-up, when work that is done once for a
    shape delays no request. any_thread: its calls may run on any thread, one at a time.
    notes: of the batch that runs now, for the trace; the policy sets it before each call and a model may add to it. A
        model with captured sizes adds `captured`: whether the call ran at one of them.
    """

    provider: str = CPU
    batched: bool = True
    half: bool = False
    any_thread: bool = False
    warming: bool = False
    captured_sizes: Sequence[int] = ()

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self.notes: dict[str, Any] = {}

    def prepare(self, observation: Observation) -> Any:
        """The model's own slow work on one request; its result is kept as `observation.ready`. InvalidRequest names a
        field that the model cannot read."""
        return None

    def finish(self, rows: Sequence[Observation], x: Floats) -> Floats:
        """Actions in the robot's units, [n, chunk_size, action_dim], from the model's x, [n, chunk_size, any]: by
        default its first action_dim columns, denormalised and transformed. Not all may be finite (`ActionGuard`)."""
        spec = self.spec
        actions = x[..., : spec.action_dim] if x.shape[-1] > spec.action_dim else x
        actions = actions.astype(np.float32, copy=False)
        with np.errstate(all="ignore"):
            if spec.action_norm is not None:
                actions = spec.action_norm.denormalise(actions)
            if not spec.action_transforms:
                return actions
            states = [row.robot_state for row in rows if row.robot_state is not None]
            return transformed(actions, spec.action_transforms, np.stack(states)[:, None] if states else None)

    def shift(self, moved: Floats) -> Floats | None:
        """See `shift_of`."""
        spec = self.spec
        return shift_of(spec.action_norm, spec.action_transforms, moved, spec.action_dim)

    def start(self) -> None:
        """Called on a new device thread before its first call."""

    def describe(self) -> dict[str, Any]:
        """For /config, besides the attributes; JSON-safe."""
        return {}


class StagedModel(PolicyModel):
    """A prefix and denoise steps. A call that raises must not have changed anything, because it may be repeated.

    pads_prefix: whether `prefix` pads to the captured sizes too; `step` does.
    """

    pads_prefix: bool = True

    def prefix(self, rows: Sequence[Observation]) -> Sequence[Prefix]:
        """The prefixes of n requests, each in memory of its own."""
        raise NotImplementedError

    def pack(self, prefixes: Sequence[Any], rows: Sequence[Observation]) -> Any:
        """The first argument of `step` for n requests. Called only when the requests change."""
        raise NotImplementedError

    def step(self, packed: Any, x: Floats, k: NDArray[np.int64], n: int) -> Floats:
        """x after one more of n steps. Row i has done k[i] of them.

        x: [rows, chunk_size, x_dim], noise at k = 0, the actions (in the model's units) at k = n. Read only.
        """
        raise NotImplementedError


class WholeModel(PolicyModel):
    """One call for a whole chunk."""

    def chunk(self, rows: Sequence[Observation], noise: Floats | None) -> Floats:
        """[n, chunk_size, any] in the model's units. noise: [n, chunk_size, x_dim], None unless `spec.takes_noise`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicySource(PolicySpec):
    """A policy's description before its model is loaded, and how to load it."""

    def check(self) -> None:
        """ConfigError for faults of the files that can be found before the model is loaded."""

    def open(self, device: DeviceOptions) -> StagedModel | WholeModel:
        """Load the model onto the device; a StagedModel if `staged`. Slow. ConfigError if it cannot be loaded."""
        raise NotImplementedError

    def forget(self) -> None:
        """Free what was loaded to read it: this process will not open it."""


def stacked(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Rows of one shape as a batch; np.stack takes four times as long for small ones."""
    if not rows[0].ndim:
        return np.array(rows)
    return np.concatenate(rows).reshape(len(rows), *rows[0].shape)


def described(answer: Any) -> str:
    """Type and shape of a model's answer, for errors."""
    return f"{answer.dtype}{list(answer.shape)}" if isinstance(answer, np.ndarray) else type(answer).__name__


# -- policies: everything around a model ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class WarmUp:
    """The measured batches of a warm-up, and the tickets that finished."""

    batches: Sequence[TimedBatch]
    finished: Sequence[Ticket]

    def teach(self, model: CostModel) -> None:
        """Give the measurements to a cost model, as if the scheduler had run these batches."""
        for batch, elapsed in self.batches:
            model.observe(batch, elapsed)
        model.settled(self.finished)


class Terms(TypedDict, total=False):
    """The fields of `Request` that depend on the caller."""

    client: Hashable
    priority: Priority
    time_limit: float | None
    weight: float


class Policy(BaseProcessor):
    """A processor whose payloads are `Observation`s and whose values are `ActionChunk`s.

    slot: the scheduler group of its requests; caches are never shared between slots.
    rows: the least rows of a call of the model; missing ones are copies of the last row. Libraries choose kernels by
    the size of a call, and kernels differ in the last bits of a result. 0: a call has no copies.
    stages: of a request. padded_stages: those whose batches are padded to `captured_sizes`. caches: keeps prefixes.
    """

    stages: ClassVar[tuple[str, ...]]
    staged: ClassVar[bool]
    caches: bool = False

    def __init__(self, model: PolicyModel, slot: str = "prod", rows: int = 0) -> None:
        spec = model.spec
        if spec.staged != self.staged:
            raise ConfigError(
                f"{spec.source}: found a {spec.inference_mode} model, {type(self).__name__} is for the other kind; "
                "`load_policy` picks the right one"
            )
        self.model, self.spec, self.slot, self.rows = model, spec, slot, rows
        self.captured_sizes = tuple(model.captured_sizes)
        self.any_thread = model.any_thread
        self.padded_stages: tuple[str, ...] = self.stages
        self.fields = ObservationFields(spec)
        self.shape: Hashable = _shape(spec)
        self.history = ObservationHistory(spec.observation_steps) if spec.observation_steps > 1 else None
        steps = f"{spec.num_denoising_steps} steps"
        kinds = {use: "hit" if use in ("hit", "hit_stale") else "miss" for use in get_args(CacheUse)}
        # Requests of a shape differ in cost by whether a prefix must be computed, and by the number of steps.
        self._classes = {use: f"{kind}, {steps}" for use, kind in kinds.items()}

    # -- worker thread -------------------------------------------------------------------------------------------------

    def prepare(
        self,
        *,
        images: Mapping[str, Sent] | None = None,
        instruction: str | None = None,
        state: Sequence[float] | NDArray[Any] | None = None,
        episode_id: str | None = None,
        request_id: str = "",
        seed: int | None = None,
        executed: int | None = None,
        delay: int | None = None,
        received: float | None = None,
    ) -> Observation:
        """Check and convert the fields of a request. Slow (decoding, resizing): call it on worker threads.

        images: PNG or JPEG bytes, or uint8 [h, w, 3]; a policy with one image takes it under its own name or "image".
        Others stay undecoded: two versions behind one router may use different cameras.
        state: [state_dim], in the robot's units. seed: in [0, 2⁶⁴); default `seed_of(request_id)`. executed, delay: as
        in `ChunkTails.anchor`. received: when the server had the whole request, on the monotonic clock; default now.

        InvalidRequest names a missing or wrong field that this policy needs.
        """
        spec, fields = self.spec, self.fields
        sent = fields.found(images or {}) if spec.images else {}
        if spec.takes_text and instruction is None:  # an empty instruction is allowed
            raise InvalidRequest("instruction: missing, and this policy needs it", "instruction")
        robot_state, normalised = fields.state(state)
        tokens, mask, cut = fields.tokens(instruction or "", normalised)
        if seed is None:
            seed = seed_of(request_id) if spec.takes_noise else 0
        elif not 0 <= seed < 1 << 64:
            raise InvalidRequest("seed: must be an integer in [0, 2^64)", "seed")
        observation = Observation({}, tokens, normalised, seed, request_id, episode_id or "", executed=executed)
        observation.token_mask, observation.robot_state = mask, robot_state
        observation.delay, observation.received = delay, received
        if spec.images:
            observation.images, observation.present = fields.pictures(sent)
        if self.history is not None:
            observation.received = time.monotonic() if received is None else received
            past = self.history.before(observation.episode_id, observation) if observation.episode_id else ()
            joined = together((*past, observation), self.history.steps)
            ids = tuple(one.request_id for one in past)
            observation = replace(observation, **joined, moment=observation, past=ids)
        if instruction:
            observation.instruction = instruction
            observation.doubts = fields.doubts(instruction, cut)
        observation.ready = self.model.prepare(observation)
        return observation

    # -- event loop ----------------------------------------------------------------------------------------------------

    def request(self, observation: Observation, **terms: Unpack[Terms]) -> Request:
        """The request to submit: its shape, cost class, first stage and units, with its cached prefix if there is one.

        Quick; call it on the thread that submits, immediately before.
        """
        observation = self._enter(observation)
        return self._request(observation, observation.request_id, observation.cache, **terms)

    def reservation(self, payload: Any, request_id: str, episode_id: str, **terms: Unpack[Terms]) -> Request:
        """The request to admit before its pictures are decoded, with the lowest cost that it may have: it must not be
        refused for a deadline that it can meet. `Scheduler.prepared` then gets the result of `request`."""
        return self._request(payload, request_id, "hit" if self.caches and episode_id else "off", **terms)

    def _request(self, payload: Any, id: str, cache: CacheUse, **terms: Unpack[Terms]) -> Request:
        stage, wants = self._entry(cache in ("hit", "hit_stale"))
        return Request(
            payload=payload,
            id=id,
            group=self.slot,
            partition=self.shape,
            shape=self.shape,
            cost_class=self._classes[cache],
            stage=stage,
            wants=wants,
            **terms,
        )

    def _enter(self, observation: Observation) -> Observation:
        """The payload of a request: the observation with what its episode has kept."""
        return observation

    def _entry(self, cached: bool) -> tuple[str, float]:
        """(first stage, wanted units) of a request. cached: whether its prefix is in the cache."""
        return "", 1.0

    def run(self, batch: Batch) -> Sequence[Any]:
        raise NotImplementedError

    def cost_model(self, affine: bool = True) -> TimeCost:
        """A fresh cost model for a group of this policy; pass the method itself as `GroupConfig.cost`."""
        return TimeCost(self.stages, affine, self.captured_sizes, padded_stages=self.padded_stages)

    # -- device --------------------------------------------------------------------------------------------------------

    def warm_up(
        self,
        sizes: Sequence[int] = (1, 2, 4),
        repeats: int = 3,
        clock: Callable[[], float] = time.perf_counter,
    ) -> WarmUp:
        """Run real batches of each size, captured sizes too: one unmeasured, then `repeats` measured.

        A cost model needs two sizes and three repeats to know every stage. Every repeat of a size counts with the time
        of the fastest, so that one-off work (compiling, allocating) does not count.
        Call it on the device thread, before the first batch. A batch that fails raises its error.
        """
        if not sizes or min(sizes) < 1 or repeats < 1:
            raise ConfigError(f"warm_up: sizes={tuple(sizes)!r}, repeats={repeats!r}: sizes and repeats must be >= 1")
        sizes = sorted({min(size, self.rows or size) for size in (*sizes, *self.captured_sizes)})
        text = str(self.spec.default_prompt or getattr(self.spec.tokenizer, "example", "warm up"))
        batches: list[TimedBatch] = []
        finished: list[Ticket] = []
        # Sizes are the inner loop: after a run of one size the cost model would take the next size for drift.
        order = [(measured, size) for measured in [False] + [True] * repeats for size in sizes]
        self.model.warming = True
        try:
            for measured, size in order:
                tickets = [Ticket(self.sample(i, text), i, 0.0) for i in range(size)]
                ran = run_through(self, tickets, self.stages, group=self.slot, shape=self.shape, clock=clock)
                if measured:
                    batches += ran
                    finished += tickets
        finally:
            self.model.warming = False
        return WarmUp(_usual(batches), finished)

    def sample(self, number: int, instruction: str, without: frozenset[str] = frozenset()) -> Request:
        """A made-up request, the same for a number in every process: noise as pictures, a state within one standard
        deviation of its mean, and no episode, so that nothing is cached. without: cameras that are left out."""
        spec, rng = self.spec, np.random.Generator(np.random.PCG64(number))
        images = {name: rng.integers(0, 256, (*size, 3), np.uint8) for name, size in spec.images.items()}
        state = None
        if spec.takes_state:
            state = rng.uniform(-1.0, 1.0, spec.state_dim).astype(np.float32)
            state = state if spec.state_norm is None else spec.state_norm.denormalise(state)
        observation = self.prepare(
            images={name: image for name, image in images.items() if name not in without},
            instruction=instruction if spec.takes_text else None,
            state=state,
            request_id=f"sample-{number}",
        )
        return self.request(observation, client=number)

    def answers(self, requests: Sequence[Request], starts: Sequence[int] = ()) -> list[ActionChunk]:
        """The answers without a scheduler, by `run_through`; the first error is raised. starts: the round in which each
        request enters, so that rows are at different steps."""
        tickets = [Ticket(request, i, 0.0) for i, request in enumerate(requests)]
        run_through(self, tickets, self.stages, starts, group=self.slot, shape=self.shape)
        return [ticket.outcome.value for ticket in tickets if isinstance(ticket.outcome, Done)]

    # -- shared by both kinds ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.model.start()

    def forget(self, episode: str | None = None) -> None:
        """Forget what an episode, or every one, keeps for its next request: it has ended, or was moved."""
        if self.history is not None:
            self.history.forget(episode)

    def _remember(self, ticket: Ticket) -> bool:
        """Keep the observation of a computed chunk for its episode. False, and nothing is kept, if no robot gets it."""
        observation: Observation = ticket.request.payload
        if ticket.cancel_requested or ticket.state is TicketState.SETTLED:
            return False
        if self.history is not None and observation.moment is not None:
            self.history.remember(observation.episode_id, observation.moment)
        return True

    def _filled(self, rows: Sequence[T]) -> Sequence[T]:
        """The rows of a call: at least `self.rows`."""
        return [*rows, *[rows[-1]] * (self.rows - len(rows))] if self.rows > len(rows) else rows

    def _actions(self, rows: Sequence[Observation], x: NDArray[Any]) -> NDArray[np.float32]:
        """The model's actions in the robot's units. ProcessorError unless they have the shape that the policy declares:
        otherwise a robot could execute the actions of another row, or of other joints."""
        spec = self.spec
        wanted, found = (len(rows), spec.chunk_size, spec.action_dim), x
        numbers = isinstance(x, np.ndarray) and x.dtype.kind in "fiu" and x.ndim == 3
        if numbers and x.shape[-1] in (spec.action_dim, spec.x_dim):
            found = self.model.finish(rows, x)
            if found.shape == wanted:
                return found
        raise ProcessorError(
            f"{spec.source}: the model answered {described(found)}, not {list(wanted)} (rows, chunk_size, action_dim)"
        )

    def _noise(self, observation: Observation) -> NDArray[np.float32]:
        return noise_of(observation.seed, self.spec.horizon, self.spec.x_dim)

    def describe(self) -> dict[str, Any]:
        """The loaded policy, JSON-safe."""
        spec, model = self.spec, self.model
        return {
            "export_dir": spec.source,
            "slot": self.slot,
            "model_id": spec.model_id,
            "model_hash": spec.model_hash,
            "config_hash": spec.config_hash,
            "model_bytes": spec.model_bytes,
            "embodiment": spec.embodiment.name,
            "inference_mode": spec.inference_mode,
            "provider": model.provider,
            "fanout": "batched" if model.batched else "sequential",
            "shape": str(self.shape),
            "captured_sizes": list(self.captured_sizes),
            "rows": self.rows or None,
            **model.describe(),
            **({} if self.history is None else {"history": self.history.snapshot()}),
            **self._describe(),
            "config": dict(spec.config),
        }

    def _describe(self) -> dict[str, Any]:
        return {"prefix_cache": None}


def _usual(batches: Sequence[TimedBatch]) -> list[TimedBatch]:
    """The batches, each with the shortest time of its stage and size, which its tickets share."""
    least: dict[tuple[str, int], float] = {}
    for batch, elapsed in batches:
        kind = (batch.stage, len(batch))
        least[kind] = min(elapsed, least.get(kind, elapsed))
    usual = [TimedBatch(batch, least[batch.stage, len(batch)]) for batch, _ in batches]
    for batch, seconds in usual:
        for ticket in batch.grants:
            ticket.shared += seconds / len(batch)
    return usual


def _shape(spec: PolicySpec) -> str:
    """The input shapes, as a key that reads well in diagnostics."""
    n = f"{spec.observation_steps}," if spec.observation_steps > 1 else ""
    parts = [f"{name}[{n}{h},{w},3]" for name, (h, w) in spec.images.items()]
    if spec.takes_text:
        parts.append(f"tokens[{spec.max_tokens}]")
    if spec.takes_state:
        parts.append(f"state[{n}{spec.state_dim}]")
    return " ".join([*parts, f"actions[{spec.chunk_size},{spec.action_dim}]"])


class MonolithicPolicy(Policy):
    """Runs a whole model, one call per batch."""

    stages = ("",)
    staged = False
    model: WholeModel

    def run(self, batch: Batch) -> Sequence[Any]:
        seen: list[Observation] = [ticket.request.payload for ticket in batch.grants]
        noise = [self._noise(observation) for observation in seen] if self.spec.takes_noise else None
        rows = self._filled(seen)
        self.model.notes = batch.notes
        x = self.model.chunk(rows, None if noise is None else stacked(self._filled(noise)))
        actions = self._actions(rows, x)[: len(seen)]
        steps = self.spec.num_denoising_steps
        for ticket in batch.grants:
            self._remember(ticket)
        return [Done(ActionChunk(row, steps, o.cache)) for o, row in zip(seen, actions, strict=True)]


# -- tickets without a scheduler: for warm-up, trials and replays ------------------------------------------------------


class TimedBatch(NamedTuple):
    """A batch and the seconds of its call."""

    batch: Batch
    seconds: float


def run_through(
    processor: Processor,
    tickets: Sequence[Ticket],
    stages: Sequence[str] = ("",),
    starts: Sequence[int] = (),
    *,
    group: str = "default",
    shape: Hashable = "",
    clock: Callable[[], float] = time.perf_counter,
) -> list[TimedBatch]:
    """Run tickets to their end; those at the same stage are one batch. `ticket.outcome` is then its `Done`.

    stages: the processor's, in order. starts: the round in which each ticket enters, 0 by default; a round is one batch
    per stage, so a ticket that enters in round k is k steps behind one of round 0.

    The first error is raised as callers get it, once the unfinished tickets are dropped.
    """
    left = dict(zip(tickets, starts or [0] * len(tickets), strict=True))
    ran: list[TimedBatch] = []
    try:
        for at in count():
            for stage in stages:
                members = [ticket for ticket, start in left.items() if start <= at and ticket.stage == stage]
                if members:
                    ran.append(_run(processor, group, shape, stage, members, clock))
                    left = {ticket: start for ticket, start in left.items() if ticket.outcome is None}
            if not left:
                break
    except BaseException:
        processor.drop(list(left))
        raise
    return ran


def _run(
    processor: Processor, group: str, shape: Hashable, stage: str, members: Sequence[Ticket], clock: Callable[[], float]
) -> TimedBatch:
    batch = Batch(0, group, shape, stage, Cause.IDLE, 0.0, 0.0, 0.0, dict.fromkeys(members, 1.0))
    began = clock()
    outcomes = run_batch(processor, batch)
    ran = TimedBatch(batch, clock() - began)
    for ticket, outcome in zip(members, outcomes, strict=True):
        if isinstance(outcome, Failed | Apart):
            raise outcome.error
        if isinstance(outcome, More):
            advance(ticket, outcome)
        else:
            assert isinstance(outcome, Done)
            ticket.outcome = outcome
    return ran


def advance(ticket: Ticket, more: More) -> None:
    """Move a ticket to its next stage."""
    ticket.wants = more.wants
    ticket.stage = ticket.stage if more.stage is None else more.stage
