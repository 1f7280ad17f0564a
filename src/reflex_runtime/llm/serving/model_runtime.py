"""The models of `reflex serve MODEL_DIR`, of any kind: found by name, in this process or others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from reflex_runtime.config import EmbeddingServeConfig, LLMServeConfig
from reflex_runtime.llm.sampling_defaults import SamplingDefaults
from reflex_runtime.llm.serving.life import ServingLife
from reflex_runtime.llm.serving.model_host import EmbeddingPlan, ModelHost, ModelPlan, Open
from reflex_runtime.llm.serving.requests.refusals import BadRequest, ModelNotFound
from reflex_runtime.llm.serving.served_model import ServedEmbedding, ServedModel
from reflex_runtime.web.json import printable

if TYPE_CHECKING:  # a runtime process loads this module and serves no HTTP
    from reflex_runtime.web.supervisor import Lives

NAMED = 20  # names that an error tells


def _named(
    models: Sequence[ServedModel], embeddings: Sequence[ServedEmbedding]
) -> dict[str, ServedModel | ServedEmbedding]:
    """What each name means. An adapter is MODEL:ADAPTER, by every name of its model."""
    found: dict[str, ServedModel | ServedEmbedding] = {}
    for model in models:
        names = (model.name, *model.plan.aliases)
        found |= dict.fromkeys(names, model)
        for adapter in model.plan.adapters:
            adapted = ServedModel(model.plan, adapter)
            found |= {f"{name}:{adapter}": adapted for name in names}
    for embedding in embeddings:
        found |= dict.fromkeys((embedding.name, *embedding.plan.aliases), embedding)
    return found


class ModelRuntime(ServingLife[ModelHost]):
    """The models of one server, of any kind. `start` returns when they are ready or have failed.

    plans: of the models that generate, embeddings: of those that make vectors, with names that differ. open: makes the
    host, called once; what it raises means that a model could not be loaded. on_fatal: called on the loop when a model
    is lost for good. lives: what the server's supervisor knows, where there is one.
    """

    def __init__(
        self,
        config: LLMServeConfig | EmbeddingServeConfig,
        plans: Sequence[ModelPlan],
        open: Open,
        on_fatal: Callable[[], None] | None = None,
        lives: Lives | None = None,
        embeddings: Sequence[EmbeddingPlan] = (),
    ) -> None:
        self.config, self.plans, self.embeddings, self._open = config, plans, embeddings, open
        self.models = [ServedModel(plan) for plan in plans]
        self.embedding_models = [ServedEmbedding(plan) for plan in embeddings]
        self._by_name = _named(self.models, self.embedding_models)
        super().__init__(config, ", ".join(model.name for model in self.all), on_fatal, lives, len(self.all) > 1)

    async def open(self) -> ModelHost:
        """See `ServingLife.open`."""
        return await self._open(self)

    @property
    def all(self) -> list[ServedModel | ServedEmbedding]:
        """Every model, adapters left out."""
        return [*self.models, *self.embedding_models]

    # -- names ---------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Every name that a request may ask for, aliases and adapters behind their model."""
        return list(self._by_name)

    def names_of(self, kind: type[ServedModel | ServedEmbedding]) -> list[str]:
        """Those of the models of this kind."""
        return [name for name, model in self._by_name.items() if isinstance(model, kind)]

    def find(self, name: str) -> ServedModel | ServedEmbedding:
        """The model of this name. Raises ModelNotFound with the names that there are."""
        found = self._by_name.get(name)
        if found is None:
            verb = "does" if len(self._by_name) == 1 else "do"
            raise ModelNotFound(printable(f"the model {name[:200]!r} does not exist; {_some(self.names)} {verb}"))
        return found

    def generating(self, name: str) -> ServedModel:
        """The language model of this name. Raises ModelNotFound, or BadRequest for one that makes vectors."""
        found = self.find(name)
        if not isinstance(found, ServedModel):
            raise _other_kind(name, "makes vectors of texts and generates none", "generate", self.names_of(ServedModel))
        return found

    def embedding(self, name: str) -> ServedEmbedding:
        """The embedding model of this name. Raises ModelNotFound, or BadRequest for one that generates."""
        found = self.find(name)
        if not isinstance(found, ServedEmbedding):
            names = self.names_of(ServedEmbedding)
            raise _other_kind(name, "generates text and makes no vectors", "make vectors", names)
        return found

    def defaults_of(self, name: str) -> SamplingDefaults:
        """How the model of this name is sampled where a request does not say it. Raises as `generating` does."""
        return self.generating(name).defaults

    def card(self, name: str) -> dict[str, Any]:
        """What /v1/models tells of this name. Raises ModelNotFound."""
        return self.find(name).card(name, self.host)


def _some(names: Sequence[str]) -> str:
    return ", ".join(repr(each) for each in names[:NAMED]) + (", …" if len(names) > NAMED else "")


def _other_kind(name: str, does: str, wanted: str, names: Sequence[str]) -> BadRequest:
    """For a model that cannot do what it is asked for. names: of those that can."""
    return BadRequest(f"model: {name!r} {does}; of this server's models these {wanted}: {_some(names)}", "model")
