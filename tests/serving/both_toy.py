"""A server of a language model and an embedding model in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reflex_runtime.config import EmbeddingServeConfig
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.embedding.load import LoadedEncoder, load
from reflex_runtime.llm.serving.local_models import opened
from reflex_runtime.llm.serving.model_host import EmbeddingPlan
from reflex_runtime.llm.serving.server import serving
from reflex_runtime.web.serve import Make

from .openai_toy import Toy


class Both(Toy):
    """A server of the toy as `toy`, and of a small embedding model as `embed` and `text-embedding-3-small`."""

    def __init__(self, root: Path, generates: bool = True, **config: Any) -> None:
        super().__init__(**config)
        self.root, self.generates = root, generates

    def making(self) -> Make:
        settings = EmbeddingServeConfig(max_queue=20)
        plans = [EmbeddingPlan("embed", settings, EmbeddingModel.open(self.root), 3.0, ("text-embedding-3-small",))]
        if not self.generates:
            plans.append(EmbeddingPlan("first", settings, EmbeddingModel.open(self.root, "cls")))
        generating = self.plans() if self.generates else []
        return serving(self.config, generating, opened(self.load, self.encoder), plans)

    def encoder(self, plan: EmbeddingPlan) -> LoadedEncoder:
        return load(plan.model, "cpu", "openvino", "auto", 1, "")

    def come(self, product: Any) -> None:
        self.batcher = product.host.device.batcher
        self.batcher.add_sink(self.log)

    def embed(self, text: Any = "robot", **fields: Any) -> Any:
        return self.post("/v1/embeddings", {"model": "embed", "input": text} | fields)
