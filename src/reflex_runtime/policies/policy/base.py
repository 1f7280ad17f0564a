"""The common parts of monolithic and decomposed policies: preparing, requests, the cost model and warm-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from typing import Any, ClassVar, get_args

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.cost import CostModel
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Priority, Request, Ticket, TicketState
from reflex_runtime.core.time_cost import TimeCost
from reflex_runtime.policies.policy.history import Glimpse, ObservationHistory, together
from reflex_runtime.policies.policy.model import PolicyModel
from reflex_runtime.policies.policy.observation import (
    MAX_REQUEST_PIXELS,
    ActionChunk,
    CacheUse,
    Doubt,
    Image,
    Observation,
    Sent,
    decode_image,
    noise_of,
    pixels_of,
    resize_image,
    seed_of,
)
from reflex_runtime.policies.policy.spec import PolicySpec
from reflex_runtime.policies.policy.units import transformed
from reflex_runtime.processors.base import BaseProcessor
from reflex_runtime.processors.by_hand import TimedBatch, run_through
from reflex_runtime.web.errors import InvalidRequest


@dataclass(frozen=True, slots=True, eq=False)
class WarmUp:
    """The measurements of a warm-up: (batch, seconds) of every call that counts, and the tickets that finished."""

    batches: Sequence[TimedBatch]
    finished: Sequence[Ticket]

    def teach(self, model: CostModel) -> None:
        """Let a cost model learn from it as if the scheduler had run these batches."""
        for batch, elapsed in self.batches:
            model.observe(batch, elapsed)
        for ticket in self.finished:
            model.settled(ticket)


class Policy(BaseProcessor):
    """A processor whose payloads are `Observation`s and whose values are `ActionChunk`s.

    model: what computes. slot: the scheduler group of its requests; its caches are never shared between slots.
    stages: the stages of a request, for the cost model. staged: whether it is for staged models.
    padded_stages: those whose batches are padded to `captured_sizes`.
    """

    stages: ClassVar[tuple[str, ...]]
    staged: ClassVar[bool]

    def __init__(self, model: PolicyModel, slot: str) -> None:
        spec = model.spec
        if spec.staged != self.staged:
            raise ConfigError(
                f"{spec.source}: found a {spec.inference_mode} model, {type(self).__name__} is for the other kind; "
                "`load_policy` picks the right one"
            )
        self.model, self.spec, self.slot = model, spec, slot
        self.captured_sizes = tuple(model.captured_sizes)
        self.any_thread = model.any_thread
        self.padded_stages: tuple[str, ...] = self.stages
        self.shape: Hashable = _shape(spec)
        self.history = ObservationHistory(spec.observation_steps) if spec.observation_steps > 1 else None
        steps = f"{spec.num_denoising_steps} steps"
        kinds = {use: "hit" if use in ("hit", "hit_stale") else "miss" for use in get_args(CacheUse)}
        self._classes = {use: f"{kind}, {steps}" for use, kind in kinds.items()}

    # -- worker thread -------------------------------------------------------------------------------------------------

    def reads(self, camera: str) -> bool:
        """Whether it uses an image with this name: the names of its own images, and "image" if it has only one."""
        return camera in self.spec.images or (camera == "image" and len(self.spec.images) == 1)

    def look(self, images: Mapping[str, Sent]) -> int:
        """Pixels that `prepare` will decode, from the headers alone; InvalidRequest for a missing or wrong field."""
        pixels = sum(pixels_of(*found) for found in self._all_found(images).values())
        if pixels > MAX_REQUEST_PIXELS:
            most = f"at most {MAX_REQUEST_PIXELS:,} are accepted"
            raise InvalidRequest(f"images: {pixels:,} pixels to decode in all, {most}", "images")
        return pixels

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
        received: float | None = None,
    ) -> Observation:
        """Check and convert the fields of a request. Slow (decoding, resizing): call it on worker threads.

        images: PNG or JPEG bytes, or uint8 [h, w, 3]; a policy with one image takes it under its own name or "image".
        Other images are ignored, undecoded: two versions behind one router may use different cameras.
        At full size one image is held at a time.
        state: [state_dim], as the robot measures it. seed: in [0, 2⁶⁴); default `seed_of(request_id)`.
        executed: actions of the episode's last chunk that have been executed; matters to real-time chunking only.
        received: when the server had all of the request, seconds on its monotonic clock, now if None; matters only to a
        policy that sees several observations of an episode.

        Raises InvalidRequest naming the field when something this policy needs is missing or wrong.
        """
        spec = self.spec
        sent = self._all_found(images or {}) if spec.images else {}
        if spec.takes_text:
            self._check_text(instruction)
        robot_state, normalised = self._state(state)
        tokens, mask = self._tokens(instruction or "", normalised) if spec.takes_text else (None, None)
        if seed is None:
            seed = seed_of(request_id) if spec.takes_noise else 0
        elif not 0 <= seed < 1 << 64:
            raise InvalidRequest("seed: must be an integer in [0, 2^64)", "seed")
        observation = Observation({}, tokens, normalised, seed, request_id, episode_id or "", executed=executed)
        observation.token_mask, observation.robot_state = mask, robot_state
        if spec.images:
            observation.images = {
                name: self._image(name, *sent[name]) if name in sent else _black(size)
                for name, size in spec.images.items()
            }
            observation.present = {name: name in sent for name in spec.images}
        if self.history is not None:
            observation = self._with_past(observation, self.history, time.monotonic() if received is None else received)
        if instruction:
            observation.instruction = instruction
            observation.doubts = self._doubts(instruction)
        observation.ready = self.model.prepare(observation)
        return self._prepared(observation)

    def _prepared(self, observation: Observation) -> Observation:
        """Hook for subclasses to amend the observation."""
        return observation

    def _with_past(self, observation: Observation, history: ObservationHistory, received: float) -> Observation:
        """The observation behind those before it in its episode; the first one repeated where there are too few."""
        o = observation
        moment = Glimpse(o.request_id, received, o.images, o.present, o.state)  # type: ignore[arg-type]
        past = history.before(o.episode_id, moment) if o.episode_id else ()
        with_past = together((*past, moment), history.steps)
        return replace(o, **with_past, moment=moment, past=tuple(one.request_id for one in past))

    def _all_found(self, images: Mapping[str, Sent]) -> dict[str, tuple[Sent, str]]:
        """`_found` of every camera, without those that were left out and may be."""
        found = {}
        for name in self.spec.images:
            sent, field = self._found(name, images)
            if sent is not None:
                found[name] = sent, field
        return found

    def _found(self, name: str, images: Mapping[str, Sent]) -> tuple[Sent | None, str]:
        """The image sent for one of its cameras, None where it may be left out, and the field name for errors."""
        # The field is as the caller would write it: `image` and `image_wrist` stand alone, others in `images`.
        field = name if name in ("image", "image_wrist") else f"images.{name}"
        sent = images.get(name)
        if sent is None and "image" in images and len(self.spec.images) == 1:
            sent, field = images["image"], "image"
        if sent is None and name not in self.spec.optional_images:
            raise InvalidRequest(f"{field}: missing, and this policy needs it", field)
        return sent, field

    def _image(self, name: str, sent: Sent, field: str) -> Image:
        size, resize = self.spec.images[name], self.spec.resize
        if isinstance(sent, bytes | bytearray | memoryview):
            return decode_image(bytes(sent), field) if resize == "none" else decode_image(
                bytes(sent), field, size, resize
            )
        pixels_of(sent, field)
        return sent if resize == "none" else resize_image(sent, *size, resize)

    def _doubts(self, instruction: str) -> tuple[Doubt, ...]:
        tokenizer = self.spec.tokenizer
        if not self.spec.takes_text:
            return (Doubt("instruction_ignored", "instruction: this policy reads no text; it changes nothing"),)
        if tokenizer is not None and not tokenizer.knows(instruction):
            return (Doubt("instruction_unknown", "instruction: the policy knows none of its words"),)
        return ()

    def _check_text(self, instruction: str | None) -> None:
        if not instruction or not instruction.strip():
            raise InvalidRequest("instruction: missing, and this policy needs it", "instruction")

    def _tokens(
        self, instruction: str, state: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.bool_] | None]:
        """Tokens and their mask; None where its model makes the tokens."""
        tokenizer, prompt = self.spec.tokenizer, self.spec.prompt
        if tokenizer is None:
            return None, None
        return tokenizer.row(prompt.render(instruction, state) if prompt else instruction, self.spec.max_tokens)

    def _state(
        self, state: Sequence[float] | NDArray[Any] | None
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]:
        """The state after its transforms, and normalised; both None where the policy takes none."""
        if state is None:
            if self.spec.takes_state:
                raise InvalidRequest("state: missing, and this policy needs it", "state")
            return None, None
        try:
            sent = np.asarray(state)
        except ValueError:  # ragged lists
            sent = np.array(None)
        dim, norm, transforms = self.spec.state_dim, self.spec.state_norm, self.spec.state_transforms
        if sent.shape != (dim,) or sent.dtype.kind not in "fiu":
            raise InvalidRequest(f"state: must be {dim} numbers", "state")
        changed: NDArray[np.float32] = sent
        values = changed
        if norm is not None or transforms or sent.dtype != np.float32:
            with np.errstate(all="ignore"):  # values too large for float32 become infinite, and are refused as such
                changed = transformed(sent.astype(np.float32, copy=False), transforms)
                values = changed if norm is None else norm.normalise(changed)
        if not isfinite(sum(values.tolist())):  # for some dozen numbers twice as fast as numpy
            raise InvalidRequest("state: must be finite numbers", "state")
        return (changed, values) if self.spec.takes_state else (None, None)

    # -- event loop ----------------------------------------------------------------------------------------------------

    def request(
        self,
        observation: Observation,
        *,
        client: Hashable = "",
        priority: Priority = Priority.DEFAULT,
        time_limit: float | None = None,
        weight: float = 1.0,
    ) -> Request:
        """The request to submit: its shape, cost class, first stage and units, with its cached prefix if there is one.

        Quick; for the thread that submits, immediately before it does. time_limit: seconds.
        """
        observation, stage, wants = self._enter(observation)
        return Request(
            payload=observation,
            id=observation.request_id,
            group=self.slot,
            partition=self.shape,
            client=client,
            priority=priority,
            time_limit=time_limit,
            shape=self.shape,
            cost_class=self.cost_class(observation.cache),
            stage=stage,
            weight=weight,
            wants=wants,
        )

    def reservation(
        self,
        payload: Any,
        request_id: str,
        episode_id: str,
        *,
        client: Hashable = "",
        priority: Priority = Priority.DEFAULT,
        time_limit: float | None = None,
    ) -> Request:
        """The request to admit before its pictures are decoded: the cheapest that it may become, so that it is not
        refused for a deadline that it can meet. `Scheduler.prepared` gets the one of `request`."""
        cache, stage, wants = self._at_best(bool(episode_id))
        return Request(
            payload=payload,
            id=request_id,
            group=self.slot,
            partition=self.shape,
            client=client,
            priority=priority,
            time_limit=time_limit,
            shape=self.shape,
            cost_class=self.cost_class(cache),
            stage=stage,
            wants=wants,
        )

    def cost_class(self, cache: CacheUse) -> str:
        """The cost class within a shape: whether a prefix must be computed, and the number of steps."""
        return self._classes[cache]

    def _enter(self, observation: Observation) -> tuple[Observation, str, float]:
        """(payload, first stage, wanted units) of a request."""
        raise NotImplementedError

    def _at_best(self, episode: bool) -> tuple[CacheUse, str, float]:
        """(cache, first stage, wanted units) of the cheapest request, of an episode or of none."""
        raise NotImplementedError

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
        """Run real batches of each size through `run_batch`: first one that is not counted, then `repeats` measured.

        Captured sizes are always included: each is captured in the batch that is not counted.
        A cost model needs two sizes and three repeats to know every stage. Of a size it learns the fastest repeat, as
        often as there were repeats, so one-off work (compiling, allocating) does not count.
        The observations are random and have no episode, so nothing is cached. Call it on the device thread, before the
        first batch. A batch that fails raises its error: a policy that fails on noise must not be served.
        """
        if not sizes or min(sizes) < 1 or repeats < 1:
            raise ConfigError(f"warm_up: sizes={tuple(sizes)!r}, repeats={repeats!r}: sizes and repeats must be >= 1")
        sizes = sorted({*sizes, *self.captured_sizes})
        batches: list[TimedBatch] = []
        finished: list[Ticket] = []
        # Sizes are innermost: a run of equal sizes would look like drift to the cost model at the next.
        order = [(measured, size) for measured in [False] + [True] * repeats for size in sizes]
        self.model.warming = True
        try:
            for measured, size in order:
                tickets = [Ticket(self._warm_request(i), i, 0.0) for i in range(size)]
                ran = run_through(self, tickets, self.stages, group=self.slot, shape=self.shape, clock=clock)
                if measured:
                    batches += ran
                    finished += tickets
        finally:
            self.model.warming = False
        return WarmUp(_usual(batches), finished)

    def _warm_request(self, seed: int) -> Request:
        spec, rng = self.spec, np.random.Generator(np.random.PCG64(seed))
        state = None
        if spec.takes_state:  # the mean, once normalised
            state = np.zeros(spec.state_dim, np.float32) if spec.state_norm is None else spec.state_norm.middle
        observation = self.prepare(
            images={name: rng.integers(0, 256, (*size, 3), np.uint8) for name, size in spec.images.items()},
            instruction="warm up" if spec.takes_text else None,
            state=state,
            seed=seed,
            request_id=f"warm-up-{seed}",
        )
        return self.request(observation)

    def answers(self, requests: Sequence[Request], starts: Sequence[int] = ()) -> list[ActionChunk]:
        """Their answers without a scheduler, from batches of all that are under way; the first error is raised.

        starts: the round in which each enters, as in `run_through`: rows then are at different steps.
        """
        tickets = [Ticket(request, i, 0.0) for i, request in enumerate(requests)]
        run_through(self, tickets, self.stages, starts, group=self.slot, shape=self.shape)
        return [ticket.outcome.value for ticket in tickets if isinstance(ticket.outcome, Done)]

    # -- shared by both kinds ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.model.start()

    def forget(self, episode: str) -> None:
        """Forget what is carried from one request of an episode to the next: it was moved, or starts again."""
        if self.history is not None:
            self.history.forget(episode)

    def forget_all(self) -> None:
        """Forget it of all episodes: they were moved."""
        if self.history is not None:
            self.history.forget_all()

    def _remember(self, ticket: Ticket) -> None:
        """A chunk has been computed: keep its observation for the next ones of its episode."""
        observation: Observation = ticket.request.payload
        if self.history is None or observation.moment is None:
            return
        if not ticket.cancel_requested and ticket.state is not TicketState.SETTLED:  # no robot gets its chunk
            self.history.remember(observation.episode_id, observation.moment)

    def _noise(self, observation: Observation) -> NDArray[np.float32]:
        return noise_of(observation.seed, self.spec.horizon, self.spec.x_dim)

    def describe(self) -> dict[str, Any]:
        """The loaded policy, JSON-safe: its configuration, the hashes, and how it runs."""
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
            **model.describe(),
            **({} if self.history is None else {"history": self.history.snapshot()}),
            **self._describe(),
            "config": dict(spec.config),
        }

    def _describe(self) -> dict[str, Any]:
        raise NotImplementedError


@cache
def _black(size: tuple[int, int]) -> Image:
    """A black picture of that size, read only."""
    black = np.zeros((*size, 3), np.uint8)
    black.setflags(write=False)
    return black


def _usual(batches: Sequence[TimedBatch]) -> list[TimedBatch]:
    """The same batches, each with the shortest time of its stage and size; their tickets share that time."""
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
