"""The models of `reflex serve MODEL_DIR`: found by name, in this process or others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from reflex_runtime.config import LLMServeConfig
from reflex_runtime.llm.sampling_defaults import SamplingDefaults
from reflex_runtime.llm.serving.life import ServingLife
from reflex_runtime.llm.serving.model_host import ModelHost, ModelPlan, Open
from reflex_runtime.llm.serving.requests.refusals import ModelNotFound
from reflex_runtime.llm.serving.served_model import ServedModel
from reflex_runtime.web.json import printable

if TYPE_CHECKING:  # a runtime process loads this module and serves no HTTP
    from reflex_runtime.web.supervisor import Lives

NAMED = 20  # names that an error tells


def _named(models: Sequence[ServedModel]) -> dict[str, ServedModel]:
    """What each name means. An adapter is MODEL:ADAPTER, by every name of its model."""
    found: dict[str, ServedModel] = {}
    for model in models:
        names = (model.name, *model.plan.aliases)
        found |= dict.fromkeys(names, model)
        for adapter in model.plan.adapters:
            adapted = ServedModel(model.plan, adapter)
            found |= {f"{name}:{adapter}": adapted for name in names}
    return found


class ModelRuntime(ServingLife[ModelHost]):
    """The models of one server. `start` returns when they are ready or have failed.

    plans: of the models, with names that differ. open: makes the host, called once; what it raises means that a model
    could not be loaded. on_fatal: called on the loop when a model is lost for good. lives: what the server's supervisor
    knows, where there is one.
    """

    def __init__(
        self,
        config: LLMServeConfig,
        plans: Sequence[ModelPlan],
        open: Open,
        on_fatal: Callable[[], None] | None = None,
        lives: Lives | None = None,
    ) -> None:
        self.config, self.plans, self._open = config, plans, open
        self.models = [ServedModel(plan) for plan in plans]
        self._by_name = _named(self.models)
        super().__init__(config, ", ".join(model.name for model in self.models), on_fatal, lives)

    async def open(self) -> ModelHost:
        """See `ServingLife.open`."""
        return await self._open(self)

    # -- names ---------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Every name that a request may ask for, aliases and adapters behind their model."""
        return list(self._by_name)

    def find(self, name: str) -> ServedModel:
        """The model of this name. Raises ModelNotFound with the names that there are."""
        found = self._by_name.get(name)
        if found is None:
            names = self.names
            there = ", ".join(repr(each) for each in names[:NAMED]) + (", …" if len(names) > NAMED else "")
            verb = "does" if len(names) == 1 else "do"
            raise ModelNotFound(printable(f"the model {name[:200]!r} does not exist; {there} {verb}"))
        return found

    def defaults_of(self, name: str) -> SamplingDefaults:
        """How the model of this name is sampled where a request does not say it. Raises ModelNotFound."""
        return self.find(name).defaults

    def card(self, name: str) -> dict[str, Any]:
        """What /v1/models tells of this name. Raises ModelNotFound."""
        return self.find(name).card(name, self.host)
