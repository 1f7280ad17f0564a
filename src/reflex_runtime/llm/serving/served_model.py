"""One model of a server, as its clients know it: its names and its settings."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

from reflex_runtime.llm.serving.model_host import EmbeddingPlan, ModelHost, ModelPlan

if TYPE_CHECKING:  # a runtime process loads this module and serves no HTTP
    from reflex_runtime.web.exchange import Exchange

UNKNOWN: Final = "unknown"  # the model of a request that names none that is served, in counts
S = TypeVar("S", bound="ServedModel | ServedEmbedding")


class ServedModel:
    """One language model of a server, or an adapter of one. adapter: its name, "" for the model itself."""

    def __init__(self, plan: ModelPlan, adapter: str = "") -> None:
        self.plan, self.adapter, self.config, self.defaults = plan, adapter, plan.config, plan.defaults
        self.name = f"{plan.name}:{adapter}" if adapter else plan.name
        self.created = int(time.time())

    def card(self, name: str, host: ModelHost | None) -> dict[str, Any]:
        """The model under one of its names, as /v1/models tells it. host: None before it is loaded."""
        card: dict[str, Any] = {"id": name, "object": "model", "created": self.created, "owned_by": "reflex"}
        card |= {"root": self.plan.name, "parent": self.plan.name if self.adapter else None}
        if host is not None:
            card["max_model_len"] = host.generator(self.plan.name).limits.max_model_len
            card["sampling_defaults"] = asdict(self.defaults)
        return card


class ServedEmbedding:
    """One embedding model of a server."""

    def __init__(self, plan: EmbeddingPlan) -> None:
        self.plan, self.model, self.config, self.name = plan, plan.model, plan.config, plan.name
        self.created = int(time.time())

    def card(self, name: str, host: ModelHost | None) -> dict[str, Any]:
        """The model under one of its names, as /v1/models tells it."""
        model = self.model
        card: dict[str, Any] = {"id": name, "object": "model", "created": self.created, "owned_by": "reflex"}
        card |= {"root": self.name, "parent": None, "max_model_len": model.max_model_len}
        return card | {"dimensions": model.dimensions, "pooling": list(model.pooling), "normalised": model.normalise}


def counted(exchange: Exchange, model: S) -> S:
    """The model, under whose name the answer of the request is counted from now on."""
    exchange.about = model.plan.name
    return model
