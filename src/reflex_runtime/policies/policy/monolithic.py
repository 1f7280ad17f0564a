"""A policy that is one graph: image, text, state and noise in, a chunk of actions out, in one call per batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reflex_runtime.core.batch import Batch
from reflex_runtime.policies.export.directory import Export
from reflex_runtime.policies.policy.base import Policy, stacked
from reflex_runtime.policies.policy.observation import CacheUse, Observation
from reflex_runtime.processors.onnx import CPU, OnnxSession


class MonolithicPolicy(Policy):
    """Runs `model.onnx`. It has no state between calls, so every answer has `cache: off`.

    provider, threads, captured_sizes: as in `OnnxSession`. ConfigError if the graph does not match the export.
    """

    stages = ("",)
    inference_mode = "monolithic"

    def __init__(
        self,
        export: Export,
        slot: str = "prod",
        *,
        provider: str = CPU,
        threads: int = 1,
        captured_sizes: Sequence[int] = (),
    ) -> None:
        super().__init__(export, slot, captured_sizes)
        self._graph = graph = export.graphs["model"]
        inputs, outputs = list(graph.inputs.values()), list(graph.outputs.values())
        self._session = OnnxSession(graph.file, inputs, outputs, provider, threads, captured_sizes)

    def run(self, batch: Batch) -> Sequence[Any]:
        seen: list[Observation] = [ticket.request.payload for ticket in batch.grants]
        rows = {spec.name: stacked([self._row(o, role) for o in seen]) for role, spec in self._graph.inputs.items()}
        actions = self._session.run(rows, batch.notes)[self._graph.outputs["actions"].name]
        return self._chunks(seen, actions)

    def _row(self, observation: Observation, role: str) -> Any:
        return self._noise(observation) if role == "noise" else observation.row(role)

    def _enter(self, observation: Observation) -> tuple[Observation, str, float]:
        return observation, "", 1.0

    def _at_best(self, episode: bool) -> tuple[CacheUse, str, float]:
        return "off", "", 1.0

    def _describe(self) -> dict[str, Any]:
        return {
            "provider": self._session.provider,
            "fanout": "batched" if self._session.dynamic_batch else "sequential",
            "prefix_cache": None,
        }
