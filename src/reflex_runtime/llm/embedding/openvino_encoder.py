"""An encoder on the CPU, by OpenVINO: of a graph that is in the directory, or of one traced once and kept.

Graphs that people export stand in `openvino/` or `onnx/` of a directory; what they are made of is then not needed.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.any_checkpoint import require
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.embedding.encoder import laid_out
from reflex_runtime.llm.openvino_cache import GraphCache, converter
from reflex_runtime.llm.openvino_export import MODEL_FILE, PROBE_FILE
from reflex_runtime.llm.openvino_runner import check_bfloat16
from reflex_runtime.processors.quiet import telemetry_off

VERSION: Final = 1  # changes with the form of our graphs
EXPORTS: Final = ("openvino/openvino_model.xml", "openvino_model.xml", "onnx/model.onnx", "model.onnx")
_INPUTS: Final = {"input_ids", "attention_mask", "token_type_ids"}
_HINTS: Final = {"float32": "f32", "bfloat16": "bf16"}
_NEAR: Final = {"float32": 0.01, "bfloat16": 0.15}  # share of the spread of states that the graph may change


class OpenVinoEncoder:
    """An `Encoder` on the CPU. cache_dir: where a traced graph is kept; see `GraphCache`."""

    def __init__(self, model: EmbeddingModel, dtype: str, threads: int | None, cache_dir: Path | None) -> None:
        telemetry_off()
        import openvino as ov

        core = ov.Core()
        if dtype == "bfloat16":
            check_bfloat16(core)
        file = exported(model) or _traced(model, cache_dir)
        try:
            graph = core.read_model(file)
        except RuntimeError as error:
            raise ConfigError(f"{file}: cannot be read: {str(error).strip().splitlines()[-1][:300]}") from None
        inputs = {port.get_any_name() for port in graph.inputs}
        if not {"input_ids", "attention_mask"} <= inputs <= _INPUTS:
            raise ConfigError(f"{file}: takes {', '.join(sorted(inputs))}: must be input_ids and attention_mask")
        self._output = _states_of(graph, file)
        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": _HINTS[dtype], "NUM_STREAMS": 1}
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = threads
        self._request = core.compile_model(graph, "CPU", settings).create_infer_request()
        self._tensor, self._inputs = ov.Tensor, sorted(inputs)
        told = "" if file.parent.name.startswith("openvino-") else f" ({file.relative_to(model.transformer)})"
        self.name = f"openvino {_HINTS[dtype]}{told}"
        self._check(model, file, _NEAR[dtype])

    def states(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        given = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in self._inputs:
            given["token_type_ids"] = np.zeros_like(ids)
        for name in self._inputs:  # read in place
            self._request.set_tensor(name, self._tensor(given[name], shared_memory=True))
        self._request.infer(share_outputs=True)
        found: npt.NDArray[np.float32] = self._request.get_output_tensor(self._output).data
        return found

    def close(self) -> None:
        self._request = None

    def _check(self, model: EmbeddingModel, file: Path, most: float) -> None:
        """Refuse a graph that gives other states than what it was made of, or other sizes than the directory says."""
        texts = probe_texts(model)
        ids, mask = laid_out(texts, model.pad_id)
        states = self.states(ids, mask)
        if states.shape != (*ids.shape, model.width):
            raise ConfigError(f"{file}: gives {list(states.shape)} for {list(ids.shape)} tokens of width {model.width}")
        probe = file.with_name(PROBE_FILE)
        if probe.is_file():
            expected = np.load(probe, allow_pickle=False)
            inside = mask[:, :, None].astype(bool)
            off = float(np.abs(np.where(inside, states - expected, 0.0)).max() / max(np.ptp(expected), 1e-9))
            if not off <= most:
                told = f"its states differ by {off:.0%} from those of transformers, so OpenVINO cannot run it"
                raise ConfigError(f"{file}: {told}; serve it with --runner torch")


def exported(model: EmbeddingModel) -> Path | None:
    """A graph that is in the directory."""
    return next((file for name in EXPORTS if (file := model.transformer / name).is_file()), None)


def probe_texts(model: EmbeddingModel) -> list[list[int]]:
    """Tokens of a long and a short text, so that padding shows; every model has such ids."""
    long = min(12, model.positions)
    return [[5 + i for i in range(long)], [4 + i for i in range((long + 1) // 2)]]


def _traced(model: EmbeddingModel, cache_dir: Path | None) -> Path:
    """The graph made by tracing in PyTorch, in a process of its own; kept."""
    require(model.transformer)
    files = weights_of(model)
    cache = GraphCache(model.transformer, cache_dir)
    key = cache.key(files, VERSION, version("transformers"), version("torch"))
    command = converter("reflex_runtime.llm.embedding.tracing", str(model.root))
    return cache.export("embedding", key, command) / MODEL_FILE


def weights_of(model: EmbeddingModel) -> list[Path]:
    """The files of the weights. ConfigError where there are none."""
    place = model.transformer
    files = sorted(place.glob("*.safetensors")) or sorted(place.glob("pytorch_model*.bin"))
    if not files:
        raise ConfigError(f"{place}: has no weights: neither *.safetensors nor {', '.join(EXPORTS[::2])}")
    return files


def _states_of(graph: Any, file: Path) -> int:
    """The output that has the tokens' states."""
    for number, port in enumerate(graph.outputs):
        if port.get_partial_shape().rank.is_static and len(port.get_partial_shape()) == 3:
            return number
    raise ConfigError(f"{file}: has no output [texts, tokens, width]; export the model for feature extraction")
