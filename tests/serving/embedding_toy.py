"""A server of a small embedding model in this process: a real graph in ONNX, and a gate before each of its calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llm.embedding.directories import write_graph
from reflex_runtime.config import EmbeddingServeConfig
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.embedding.load import LoadedEncoder, load
from reflex_runtime.llm.serving.local_models import opened
from reflex_runtime.llm.serving.model_host import EmbeddingPlan
from reflex_runtime.llm.serving.server import serving
from reflex_runtime.web.serve import Make

from .harness import Answer
from .openai_toy import Caller, Gate, Toy


class GatedEncoder(Gate):
    """The encoder of the graph. sizes: places of each call. fails: the error of a call with these ids, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder: Any = None
        self.fails: Callable[[npt.NDArray[np.int64]], Exception | None] = lambda ids: None

    @property
    def name(self) -> str:
        return str(self.encoder.name)

    def states(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        self.pass_through(ids.size)
        if (error := self.fails(ids)) is not None:
            raise error
        found: npt.NDArray[np.float32] = self.encoder.states(ids, mask)
        return found

    def close(self) -> None:
        self.encoder.close()


class EmbeddingToy(Toy):
    """`reflex serve` of a directory of `write_graph`, under the name toy."""

    settings = EmbeddingServeConfig

    def __init__(self, root: Path, **config: Any) -> None:
        super().__init__(GatedEncoder(), **config)
        self.embedding = EmbeddingModel.open(root)

    def loaded(self, plan: EmbeddingPlan) -> LoadedEncoder:
        found = load(plan.model, "cpu", "openvino", "auto", 1, "")
        self.runner.encoder = found.encoder
        return found._replace(encoder=self.runner)

    def making(self) -> Make:
        plans = [EmbeddingPlan(self.config.served_model_name, self.config, self.embedding)]
        make = serving(self.config, [], opened(self.load, self.loaded), plans)

        def made(on_lost: Any, lives: Any) -> Any:
            app, service = make(on_lost, lives)
            self.bodies = app.bodies
            return app, service

        return made

    def come(self, product: Any) -> None:
        self.batcher = product.host.device.batcher
        self.batcher.add_sink(self.log)

    def embed(self, text: Any = "robot", **fields: Any) -> Answer:
        return self.post("/v1/embeddings", {"model": "toy", "input": text} | fields)

    def asking(self, text: Any, name: str, **fields: Any) -> Caller:
        """A connection on which a vector was asked for and nothing read. name: the request's id."""
        return Caller(self.port, "/v1/embeddings", {"model": "toy", "input": text} | fields, name)

    def vectors(self, text: Any, **fields: Any) -> npt.NDArray[np.float32]:
        answer = self.embed(text, **fields)
        assert answer.status == 200, answer.body
        return np.array([each["embedding"] for each in answer.json["data"]], np.float32)


def toy_directory(root: Path, matryoshka: Any = None) -> Path:
    """matryoshka: what its config.json says of lengths that vectors may be cut to."""
    write_graph(root)
    if matryoshka is not None:
        config = root / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"matryoshka_dimensions": matryoshka}))
    return root


