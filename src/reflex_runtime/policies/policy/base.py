"""The common parts of monolithic and decomposed policies: preparing, requests, the cost model and warm-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, get_args

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.cost import CostModel
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.time_cost import TimeCost
from reflex_runtime.policies.export.directory import Export
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

    slot: the scheduler group of its requests; its caches are never shared between slots. stages: the stages of a
    request, for the cost model. inference_mode: "monolithic" or "decomposed".
    """

    stages: ClassVar[tuple[str, ...]]
    inference_mode: ClassVar[str]

    def __init__(self, export: Export, slot: str, captured_sizes: Sequence[int] = ()) -> None:
        if export.export_kind != self.inference_mode:
            raise ConfigError(
                f"{export.path}: export_kind: found {export.export_kind!r}, {type(self).__name__} expects "
                f"{self.inference_mode!r}; `load_policy` picks the right one"
            )
        self.export, self.slot = export, slot
        self.captured_sizes = tuple(captured_sizes)
        self.shape: Hashable = _shape(export)
        steps = f"{export.num_denoising_steps} steps"
        kinds = {use: "hit" if use in ("hit", "hit_stale") else "miss" for use in get_args(CacheUse)}
        self._classes = {use: f"{kind}, {steps}" for use, kind in kinds.items()}
        self._takes_state = export.takes_state
        self._takes_noise = any("noise" in graph.inputs for graph in export.graphs.values())

    # -- worker thread -------------------------------------------------------------------------------------------------

    def reads(self, camera: str) -> bool:
        """Whether it uses an image with this name: the names of its own images, and "image" if it has only one."""
        return camera in self.export.images or (camera == "image" and len(self.export.images) == 1)

    def look(self, images: Mapping[str, Sent]) -> int:
        """Pixels that `prepare` will decode, from the headers alone; InvalidRequest for a missing or wrong field."""
        pixels = sum(pixels_of(*self._found(name, images)) for name in self.export.images)
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
    ) -> Observation:
        """Check and convert the fields of a request. Slow (decoding, resizing): call it on worker threads.

        images: PNG or JPEG bytes, or uint8 [h, w, 3]; a policy with one image takes it under its own name or "image".
        Other images are ignored, undecoded: two versions behind one router may use different cameras.
        At full size one image is held at a time.
        state: [state_dim], as the robot measures it. seed: in [0, 2⁶⁴); default `seed_of(request_id)`.
        executed: actions of the episode's last chunk that have been executed; matters to real-time chunking only.

        Raises InvalidRequest naming the field when something this policy needs is missing or wrong.
        """
        export = self.export
        sent = {name: self._found(name, images or {}) for name in export.images}
        tokens = self._tokens(instruction)
        normalised = self._state(state)
        if seed is None:
            seed = seed_of(request_id) if self._takes_noise else 0
        elif not 0 <= seed < 1 << 64:
            raise InvalidRequest("seed: must be an integer in [0, 2^64)", "seed")
        seen = {name: self._image(name, *found) for name, found in sent.items()}
        observation = Observation(seen, tokens, normalised, seed, request_id, episode_id or "", executed=executed)
        if instruction:
            observation.doubts = self._doubts(instruction)
        return self._prepared(observation, instruction or "")

    def _prepared(self, observation: Observation, instruction: str) -> Observation:
        """Hook for subclasses to amend the observation."""
        return observation

    def _found(self, name: str, images: Mapping[str, Sent]) -> tuple[Sent, str]:
        """The image sent for one of its cameras, and the field name for errors about it."""
        # The field is as the caller would write it: `image` and `image_wrist` stand alone, others in `images`.
        field = name if name in ("image", "image_wrist") else f"images.{name}"
        sent = images.get(name)
        if sent is None and "image" in images and len(self.export.images) == 1:
            sent, field = images["image"], "image"
        if sent is None:
            raise InvalidRequest(f"{field}: missing, and this policy needs it", field)
        return sent, field

    def _image(self, name: str, sent: Sent, field: str) -> Image:
        (height, width), pad = self.export.images[name], self.export.resize == "pad"
        if isinstance(sent, bytes | bytearray | memoryview):
            return decode_image(bytes(sent), field, (height, width), pad)
        pixels_of(sent, field)
        return resize_image(sent, height, width, pad)

    def _doubts(self, instruction: str) -> tuple[Doubt, ...]:
        tokenizer = self.export.tokenizer
        if tokenizer is None:
            return (Doubt("instruction_ignored", "instruction: this policy reads no text; it changes nothing"),)
        if not tokenizer.knows(instruction):
            return (Doubt("instruction_unknown", "instruction: the policy knows none of its words"),)
        return ()

    def _tokens(self, instruction: str | None) -> NDArray[np.int64] | None:
        tokenizer = self.export.tokenizer
        if tokenizer is None:
            return None
        if not instruction or not instruction.strip():
            raise InvalidRequest("instruction: missing, and this policy needs it", "instruction")
        return tokenizer.encode(instruction, self.export.max_tokens)

    def _state(self, state: Sequence[float] | NDArray[Any] | None) -> NDArray[np.float32] | None:
        if state is None:
            if self._takes_state:
                raise InvalidRequest("state: missing, and this policy needs it", "state")
            return None
        try:
            sent = np.asarray(state)
        except ValueError:  # ragged lists
            sent = np.array(None)
        dim, norm = self.export.state_dim, self.export.state_norm
        if sent.shape != (dim,) or sent.dtype.kind not in "fiu":
            raise InvalidRequest(f"state: must be {dim} numbers", "state")
        values: NDArray[np.float32] = sent
        if norm is not None or sent.dtype != np.float32:
            with np.errstate(all="ignore"):  # values too large for float32 become infinite, and are refused as such
                values = sent.astype(np.float32)
                values = values if norm is None else norm.normalise(values)
        if not isfinite(sum(values.tolist())):  # for some dozen numbers twice as fast as numpy
            raise InvalidRequest("state: must be finite numbers", "state")
        return values if self._takes_state else None

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
        return TimeCost(self.stages, affine, self.captured_sizes)

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
        for measured in [False] + [True] * repeats:
            for size in sizes:  # innermost: a run of equal sizes would look like drift to the cost model at the next
                tickets = [Ticket(self._warm_request(i), i, 0.0) for i in range(size)]
                ran = run_through(self, tickets, self.stages, group=self.slot, shape=self.shape, clock=clock)
                if measured:
                    batches += ran
                    finished += tickets
        return WarmUp(_usual(batches), finished)

    def _warm_request(self, seed: int) -> Request:
        rng = np.random.Generator(np.random.PCG64(seed))
        export = self.export
        images = {name: rng.integers(0, 256, (*size, 3), np.uint8) for name, size in export.images.items()}
        tokens = None if export.tokenizer is None else export.tokenizer.encode("warm up", export.max_tokens)
        state = np.zeros(export.state_dim, np.float32) if export.takes_state else None  # the mean, once normalised
        return self.request(Observation(images, tokens, state, seed, f"warm-up-{seed}"))

    # -- shared by both kinds ------------------------------------------------------------------------------------------

    def _noise(self, observation: Observation) -> NDArray[np.float32]:
        return noise_of(observation.seed, self.export.chunk_size, self.export.action_dim)

    def _chunk(self, observation: Observation, actions: NDArray[np.float32], steps: int) -> Done:
        """The answer from one row of the model's output. steps: number of denoising steps."""
        norm = self.export.action_norm
        with np.errstate(all="ignore"):  # the guard checks for values that are not finite
            actions = np.array(actions, np.float32) if norm is None else norm.denormalise(actions)
        rtc = None if observation.anchor is None else observation.anchor.report
        return Done(ActionChunk(actions, steps, observation.cache, rtc=rtc))

    def _chunks(self, observations: Sequence[Observation], actions: NDArray[np.float32]) -> list[Done]:
        """The same for all rows at once."""
        if len(actions) != len(observations):
            raise ProcessorError(f"{self.export.path}: the graph answered {len(actions)} rows for {len(observations)}")
        norm, steps = self.export.action_norm, self.export.num_denoising_steps
        rows = actions
        if norm is not None or actions.dtype != np.float32:
            with np.errstate(all="ignore"):
                rows = actions.astype(np.float32) if norm is None else norm.denormalise(actions)
        return [Done(ActionChunk(row, steps, seen.cache)) for seen, row in zip(observations, rows, strict=True)]

    def describe(self) -> dict[str, Any]:
        """The loaded policy, JSON-safe: the export's configuration, the hashes, and how it runs."""
        export = self.export
        return {
            "export_dir": str(export.path),
            "slot": self.slot,
            "model_id": export.model_id,
            "model_hash": export.model_hash,
            "config_hash": export.config_hash,
            "model_bytes": export.model_bytes,
            "embodiment": export.embodiment.name,
            "inference_mode": self.inference_mode,
            "shape": str(self.shape),
            "captured_sizes": list(self.captured_sizes),
            **self._describe(),
            "config": dict(export.config),
        }

    def _describe(self) -> dict[str, Any]:
        raise NotImplementedError


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


def stacked(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Rows of one shape as a batch; np.stack takes four times as long for small ones."""
    return np.concatenate(rows).reshape(len(rows), *rows[0].shape)


def _shape(export: Export) -> str:
    """The input shapes, as a key that reads well in diagnostics."""
    parts = [f"{name}[{h},{w},3]" for name, (h, w) in export.images.items()]
    if export.takes_text:
        parts.append(f"tokens[{export.max_tokens}]")
    if export.takes_state:
        parts.append(f"state[{export.state_dim}]")
    return " ".join([*parts, f"actions[{export.chunk_size},{export.action_dim}]"])
