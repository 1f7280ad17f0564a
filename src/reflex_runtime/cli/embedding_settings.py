"""What the settings of `reflex serve MODEL_DIR` mean for an embedding model, alone or beside language models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reflex_runtime.config import EmbeddingServeConfig, LLMServeConfig
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.options import flag

if TYPE_CHECKING:
    from reflex_runtime.llm.embedding.directory import EmbeddingModel
    from reflex_runtime.llm.embedding.load import LoadedEncoder
    from reflex_runtime.llm.serving.model_host import EmbeddingPlan

_SHARED: Final = ("device", "runner", "dtype", "cache_dir", "threads")  # with the language models of a server


def embedding_config(config: LLMServeConfig | EmbeddingServeConfig) -> EmbeddingServeConfig:
    """The settings of an embedding model in a server with these. Beside language models it has what is about the
    machine from the server's; the rest is its own, in its table [models.NAME]."""
    if isinstance(config, EmbeddingServeConfig):
        return config
    return EmbeddingServeConfig(**{name: getattr(config, name) for name in _SHARED})


def read_embedding(directory: Path, config: EmbeddingServeConfig) -> EmbeddingModel:
    """The directory as it is to be served. ConfigError for what can be found before the model is loaded."""
    from reflex_runtime.llm.embedding.directory import EmbeddingModel
    from reflex_runtime.llm.embedding.load import check

    model = EmbeddingModel.open(directory, config.pooling)
    try:
        check(model, config.device, config.runner, config.dtype, config.max_model_len)
    except ConfigError as error:
        name = str(error.details.get("field", ""))
        if name not in EmbeddingServeConfig.__dataclass_fields__:
            raise
        why = error.message.partition(": ")[2]
        raise ConfigError(f"{flag(name)}={getattr(config, name)}: {why}", field=name) from None
    return replace(model, max_model_len=config.max_model_len or model.max_model_len)


def load_encoder(plan: EmbeddingPlan) -> LoadedEncoder:
    """The model, ready to be run."""
    from reflex_runtime.llm.embedding.load import load

    config = plan.config
    return load(plan.model, config.device, config.runner, config.dtype, config.threads or None, config.cache_dir)
