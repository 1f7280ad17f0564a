"""A policy whose model makes a chunk of actions in one call per batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.robots.policy.base import Policy
from reflex_runtime.robots.policy.model import WholeModel, stacked
from reflex_runtime.robots.policy.observation import ActionChunk, CacheUse, Observation


class MonolithicPolicy(Policy):
    """Runs a whole model. It caches nothing, so every answer has `cache: off`."""

    stages = ("",)
    staged = False
    model: WholeModel

    def __init__(self, model: WholeModel, slot: str = "prod") -> None:
        super().__init__(model, slot)

    def run(self, batch: Batch) -> Sequence[Any]:
        seen: list[Observation] = [ticket.request.payload for ticket in batch.grants]
        noise = stacked([self._noise(observation) for observation in seen]) if self.spec.takes_noise else None
        self.model.notes = batch.notes
        actions = self.model.finish(seen, self.model.chunk(seen, noise))
        if len(actions) != len(seen):
            raise ProcessorError(f"{self.spec.source}: the model answered {len(actions)} rows for {len(seen)}")
        steps = self.spec.num_denoising_steps
        if self.history is not None:
            for ticket in batch.grants:
                self._remember(ticket)
        return [Done(ActionChunk(row, steps, o.cache)) for o, row in zip(seen, actions, strict=True)]

    def _enter(self, observation: Observation) -> tuple[Observation, str, float]:
        return observation, "", 1.0

    def _at_best(self, episode: bool) -> tuple[CacheUse, str, float]:
        return "off", "", 1.0

    def _describe(self) -> dict[str, Any]:
        return {"prefix_cache": None}
