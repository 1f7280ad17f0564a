"""A checkpoint of an architecture that is not one of ours: what its description says, and whether it can be served.

PyTorch and transformers know such models. They compute them, or are what they are converted to OpenVINO with.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.runners.checkpoint import longest, weight_files
from reflex_runtime.llm.runners.model_config import CONFIG_FILE, read_json


@dataclass(frozen=True, slots=True)
class AnyModelConfig:
    """What `ModelConfig` says of our own architectures, as far as it is known before the model is loaded.

    token_size: numbers that one token keeps in the cache.
    """

    vocab_size: int
    max_position_embeddings: int
    torch_dtype: str
    token_size: int

    @classmethod
    def open(cls, directory: Path | str) -> AnyModelConfig:
        """Read the description; no weight is read. ConfigError for what is no decoder, or if a library is missing."""
        root = Path(directory)
        require(root)
        from reflex_runtime.llm.runners.transformers_model import describe

        config = describe(root)
        weight_files(root)
        return cls.of(root, config)

    @classmethod
    def of(cls, root: Path, config: Any) -> AnyModelConfig:
        """The same, from the description as transformers read it."""
        for name in ("vocab_size", "num_hidden_layers", "num_attention_heads"):
            if type(value := getattr(config, name, None)) is not int or value < 1:
                raise ConfigError(f"{root / CONFIG_FILE}: {name}={value!r}: must be a whole number from 1 on")
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
        tokens = longest(root, config.to_dict())
        return cls(config.vocab_size, tokens, dtype, 2 * config.num_hidden_layers * kv_heads * size)

    def cache_bytes(self, tokens: int, width: int) -> int:
        """Memory for the keys and values of so many tokens. width: bytes of a number."""
        return self.token_size * tokens * width


def require(root: Path) -> None:
    """ConfigError, with what to install, unless the libraries are there that know other architectures than ours."""
    needed = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if needed:
        named = read_json(root / CONFIG_FILE).get("architectures")
        told = f"architectures={named}: needs {' and '.join(needed)}: in a clone, pip install '.[convert]'"
        other = "or serve what `optimum-cli export openvino --task text-generation-with-past` makes of it elsewhere"
        raise ConfigError(f"{root / CONFIG_FILE}: {told}; {other}")
