"""LeRobot policies that make a chunk in one call.

`select_action` is never called, and `predict_action_chunk` only where it keeps nothing: both have queues in the policy
object, which all robots would share. Policies that see several observations are called below these queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from reflex_runtime.robots.lerobot.features import SEEDED, Features
from reflex_runtime.robots.lerobot.loading import Batch, LoadedPolicy, Prepared, stacked_batch
from reflex_runtime.robots.models.torch_models import taken
from reflex_runtime.robots.policy.model import WholeModel
from reflex_runtime.robots.policy.observation import Observation
from reflex_runtime.robots.policy.spec import DeviceOptions, PolicySpec
from reflex_runtime.robots.policy.units import Floats


class LeRobotWhole(WholeModel):
    """A LeRobot policy of one of the types in `features.WHOLE`."""

    def __init__(self, spec: PolicySpec, features: Features, device: DeviceOptions) -> None:
        super().__init__(spec)
        self.loaded = LoadedPolicy(spec, features, device)
        self.provider, self.half = device.provider, self.loaded.half
        self.batched = spec.model_type not in SEEDED

    def prepare(self, observation: Observation) -> Prepared:
        return self.loaded.prepare(observation)

    def chunk(self, rows: Sequence[Observation], noise: Floats | None) -> Floats:
        with torch.inference_mode():
            given = None if noise is None else torch.from_numpy(noise).to(self.loaded.device)
            return taken(self._called(rows, given))

    def finish(self, rows: Sequence[Observation], x: Floats) -> Floats:
        return self.loaded.finish(rows, torch.from_numpy(x))

    def _called(self, rows: Sequence[Observation], noise: Any) -> Any:
        """Actions [n, chunk, dim]. Chosen anew at each call: a bound method kept here would be a cycle, and an unloaded
        policy would stay in memory."""
        kind, predict = self.spec.model_type, self.loaded.policy.predict_action_chunk
        if kind == "diffusion":
            return self._diffusion(rows, noise)
        if kind in SEEDED:
            return self._by_row(self._vqbet if kind == "vqbet" else predict, rows)
        return predict(self._batch(rows))

    def _batch(self, rows: Sequence[Observation]) -> Batch:
        return self.loaded.on_device(stacked_batch([row.ready.batch for row in rows]))

    def _diffusion(self, rows: Sequence[Observation], noise: Any) -> Any:
        batch = self._batch(rows)
        model, config = self.loaded.policy.diffusion, self.loaded.config
        if config.image_features:
            batch["observation.images"] = torch.stack([batch[name] for name in config.image_features], dim=-4)
        condition = model._prepare_global_conditioning(batch)
        # A scheduler that adds noise at every step draws it from a generator of each row: its answer is its own.
        drawn = [torch.Generator(device=condition.device).manual_seed(row.seed % (1 << 63)) for row in rows]
        x = model.conditional_sample(len(rows), global_cond=condition, generator=drawn, noise=noise)
        first = config.n_obs_steps - 1
        return x[:, first : first + config.n_action_steps]

    def _vqbet(self, batch: Batch) -> Any:
        config = self.loaded.config
        batch["observation.images"] = torch.stack([batch[name] for name in config.image_features], dim=-4)
        return self.loaded.policy.vqbet(batch, rollout=True)[:, : config.action_chunk_size]

    def _by_row(self, call: Callable[[Batch], Any], rows: Sequence[Observation]) -> Any:
        """Row by row: it draws from torch's own generator, which is seeded for each."""
        if len(rows) > 1:
            self.notes["fanout"] = "sequential"
        answers = []
        with torch.random.fork_rng():
            for row in rows:
                torch.manual_seed(row.seed % (1 << 63))
                answers.append(call(self.loaded.on_device(row.ready.batch)))
        return torch.cat(answers)
