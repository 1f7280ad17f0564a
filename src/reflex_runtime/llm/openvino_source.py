"""From a model directory to the OpenVINO graph that is served: an export, or one made of a checkpoint and kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reflex_runtime.llm.any_checkpoint import require
from reflex_runtime.llm.checkpoint import Checkpoint, is_known, weight_files
from reflex_runtime.llm.model_config import ModelConfig
from reflex_runtime.llm.openvino_cache import GraphCache, converter
from reflex_runtime.llm.openvino_export import (
    MODEL_FILE,
    PROBE_FILE,
    TRACED_VERSION,
    OpenVinoExport,
    is_export,
    read_graph,
)

BITS = {"int8": 8, "int4": 4}
log = logging.getLogger("reflex.llm")


@dataclass(frozen=True, slots=True)
class GraphSource:
    """model: the graph. expected: the logits after the tokens of `probe` by the reference, or None where they are not
    known. checked: whether paging must be checked. kept: what the graph's weights lie in. cache, key: where numbers of
    this very graph are kept."""

    config: ModelConfig | OpenVinoExport
    model: Any
    expected: npt.NDArray[np.float32] | None
    checked: bool
    kept: Any = None
    cache: GraphCache | None = None
    key: str = ""

    def unpaged(self, hint: str, compute: Callable[[], npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        """The logits after the tokens of `probe`, computed in `hint` before the graph is paged: of an earlier start, or
        computed now, which compiles the graph once more."""
        return compute() if self.cache is None else self.cache.array(f"logits-{hint}", self.key, compute)


def source(core: Any, root: Path, weights: str, cache: GraphCache | None) -> GraphSource:
    """The graph of a directory. weights: "auto" leaves them, "int8" and "int4" round them.

    cache: None builds a graph each time (not for architectures that only PyTorch knows). ConfigError for a directory
    that cannot be served.
    """
    if is_export(root):
        return _export(core, root, weights, cache)
    if not is_known(root):
        cache = cache or GraphCache(root)
        return _export(core, traced(root, cache), weights, cache)
    from reflex_runtime.llm import openvino_graph

    checkpoint = Checkpoint.open(root)

    def build() -> Any:
        return _rounded(openvino_graph.build(checkpoint), weights)

    key = "" if cache is None else cache.key(checkpoint.files, openvino_graph.VERSION, _rounding(weights))
    model = build() if cache is None else cache.graph(core, _kind(weights), key, build)
    return GraphSource(checkpoint.config, model, None, False, checkpoint)


def traced(root: Path, cache: GraphCache) -> Path:
    """The export made of a checkpoint by tracing it in PyTorch, in a process of its own; kept."""
    require(root)
    key = cache.key(weight_files(root), TRACED_VERSION, version("transformers"), version("torch"))
    return cache.export("traced", key, converter("reflex_runtime.llm.openvino_tracing", str(root)))


def _export(core: Any, root: Path, weights: str, cache: GraphCache | None) -> GraphSource:
    config = OpenVinoExport.open(root)
    files = [file for file in (root / MODEL_FILE, (root / MODEL_FILE).with_suffix(".bin")) if file.is_file()]
    key = "" if cache is None else cache.key(files, weights, _rounding(weights))
    if weights != "auto":

        def build() -> Any:
            return _rounded(read_graph(root), weights)

        kept = None if cache is None else cache.graph(core, _kind(weights), cache.key(files, _rounding(weights)), build)
        return GraphSource(config, build() if kept is None else kept, None, True, None, cache, key)
    probe = root / PROBE_FILE
    expected: npt.NDArray[np.float32] | None = np.load(probe, allow_pickle=False) if probe.is_file() else None
    return GraphSource(config, read_graph(root), expected, True, None, cache, key)


def _rounded(model: Any, weights: str) -> Any:
    if weights != "auto":
        from reflex_runtime.llm.openvino_weights import compress

        compress(model, BITS[weights], _told(weights))
    return model


def _rounding(weights: str) -> int:
    """The version of what rounds; 0: nothing does."""
    if weights == "auto":
        return 0
    from reflex_runtime.llm.openvino_weights import VERSION

    return VERSION


def _told(weights: str) -> Callable[[int, int], None]:
    """Progress: a line of the log every five seconds."""
    last = time.monotonic()

    def told(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() > last + 5:
            last = time.monotonic()
            log.info("%s: %d of %d matrices", weights, done, total)

    return told


def _kind(weights: str) -> str:
    return "plain" if weights == "auto" else weights
