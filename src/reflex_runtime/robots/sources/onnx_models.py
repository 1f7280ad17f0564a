"""Exports as models: the ONNX graphs of an export directory, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.model import StagedModel, WholeModel, stacked
from reflex_runtime.robots.policy.observation import Observation
from reflex_runtime.robots.policy.prefix_cache import PrefixTensors
from reflex_runtime.robots.policy.spec import DeviceOptions, PolicySpec
from reflex_runtime.robots.policy.units import Floats
from reflex_runtime.run.onnx_session import CPU, OnnxSession, TensorSpec, fits


@dataclass(frozen=True, slots=True)
class Graph:
    """One model file, and the tensors the runtime expects it to have, by role ("past_kv/0" … for keys and values)."""

    file: Path
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


class OnnxWhole(WholeModel):
    """Runs `model.onnx`. ConfigError if the graph does not match the export."""

    def __init__(self, spec: PolicySpec, graph: Graph, device: DeviceOptions) -> None:
        super().__init__(spec)
        self._graph, self._session = graph, _opened(graph, device)
        self.provider, self.captured_sizes = device.provider, tuple(device.captured_sizes)
        self.any_thread = device.provider == CPU
        self.batched, self.half = self._session.dynamic_batch, self._session.half

    def chunk(self, rows: Sequence[Observation], noise: Floats | None) -> Floats:
        given = {
            spec.name: noise if role == "noise" else stacked([row.row(role) for row in rows])
            for role, spec in self._graph.inputs.items()
        }
        actions: Floats = self._session.run(given, self.notes)[self._graph.outputs["actions"].name]
        return actions


class OnnxStaged(StagedModel):
    """Runs `vlm_prefix.onnx` and `expert_denoise.onnx`. ConfigError if they do not match the export or each other.

    past_kv: the expert's input name for each of the prefix's keys-and-values outputs.
    """

    def __init__(
        self, spec: PolicySpec, prefix: Graph, expert: Graph, past_kv: Mapping[str, str], device: DeviceOptions
    ) -> None:
        super().__init__(spec)
        self._past_kv = past_kv
        self._prefix_inputs = {role: spec.name for role, spec in prefix.inputs.items()}
        self._inputs = {role: spec.name for role, spec in expert.inputs.items()}
        self._output = expert.outputs["actions"].name
        self._prefix, self._expert = _opened(prefix, device), _opened(expert, device)
        self.provider, self.captured_sizes = device.provider, tuple(device.captured_sizes)
        self.any_thread = device.provider == CPU
        self.batched = self._prefix.dynamic_batch and self._expert.dynamic_batch
        self.half = self._prefix.half or self._expert.half
        for made, read in past_kv.items():
            left, right = self._prefix.outputs[made], self._expert.inputs[read]
            if not fits(left.dims, right.dims) or left.dtype != right.dtype:
                raise ConfigError(
                    f"{expert.file}: input {read!r}: {right.dtype} {right.dims}, but {prefix.file.name} makes "
                    f"{left.dtype} {left.dims} (decomposed.past_kv_tensor_names)"
                )

    def prefix(self, rows: Sequence[Observation]) -> Sequence[PrefixTensors]:
        given = {name: np.stack([row.row(role) for row in rows]) for role, name in self._prefix_inputs.items()}
        made = self._prefix.run(given, self.notes)
        # Copied out of the batch: a view would keep the keys and values of all its rows in memory.
        return [
            PrefixTensors({read: made[name][i].copy() for name, read in self._past_kv.items()})
            for i in range(len(rows))
        ]

    def pack(self, prefixes: Sequence[PrefixTensors], rows: Sequence[Observation]) -> dict[str, Any]:
        packed = {name: np.stack([prefix.tensors[name] for prefix in prefixes]) for name in self._past_kv.values()}
        if "state" in self._inputs:
            packed[self._inputs["state"]] = np.stack([row.row("state") for row in rows])
        return {name: self._expert.place(array, name) for name, array in packed.items()}

    def step(self, packed: dict[str, Any], x: Floats, k: NDArray[np.int64], n: int) -> Floats:
        time = (k / n).astype(np.float32)
        given = {**packed, self._inputs["noise"]: x, self._inputs["time"]: time}
        moved: Floats = self._expert.run(given, self.notes)[self._output]
        return moved


def _opened(graph: Graph, device: DeviceOptions) -> OnnxSession:
    inputs, outputs = list(graph.inputs.values()), list(graph.outputs.values())
    return OnnxSession(graph.file, inputs, outputs, device.provider, device.threads, device.captured_sizes)
