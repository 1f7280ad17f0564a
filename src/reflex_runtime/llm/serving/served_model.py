"""One model of a server, as its clients know it: its names, its settings, and what generates for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from reflex_runtime.llm.serving.generation import Generator
from reflex_runtime.llm.serving.model_host import ModelHost, ModelPlan


class ServedModel:
    """One model of a server. ready: returns what runs it, or raises the error that says why it cannot be asked."""

    def __init__(self, plan: ModelPlan, ready: Callable[[], ModelHost]) -> None:
        self.plan, self.name, self.config, self.defaults = plan, plan.name, plan.config, plan.defaults
        self.created = int(time.time())
        self._ready = ready

    @property
    def generator(self) -> Generator[Any]:
        """What generates for it. Raises where it is not there yet, or accepts no more requests."""
        return self._ready().generator(self.name)

    def card(self, name: str, host: ModelHost | None) -> dict[str, Any]:
        """The model under one of its names, as /v1/models tells it. host: None before it is loaded."""
        card: dict[str, Any] = {"id": name, "object": "model", "created": self.created, "owned_by": "reflex"}
        card |= {"root": self.name, "parent": None}
        if host is not None:
            card["max_model_len"] = host.generator(self.name).limits.max_model_len
            card["sampling_defaults"] = asdict(self.defaults)
        return card
