"""From the directory of an embedding model to what runs it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.any_checkpoint import require
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.embedding.encoder import Encoder
from reflex_runtime.llm.embedding.openvino_encoder import OpenVinoEncoder, exported, weights_of
from reflex_runtime.llm.load import choose
from reflex_runtime.llm.tokenizer import HFTokenizer, Tokenizer


class LoadedEncoder(NamedTuple):
    """A model that is ready to be run."""

    model: EmbeddingModel
    encoder: Encoder
    tokenizer: Tokenizer


def check(model: EmbeddingModel, device: str, runner: str, dtype: str, max_model_len: int) -> tuple[str, str]:
    """The device and the runner. ConfigError, whose `field` names the option, for what cannot be."""
    device, runner = choose(device, runner, dtype)
    if max_model_len > model.positions:
        told = f"must be at most {model.positions}, what the model has places for"
        raise ConfigError(f"max_model_len={max_model_len}: {told}", field="max_model_len")
    if dtype == "bfloat16" and runner == "openvino":
        from reflex_runtime.llm.openvino_runner import check_bfloat16

        check_bfloat16()
    if runner == "torch" or exported(model) is None:
        weights_of(model)
        require(model.transformer)
    return device, runner


def load(
    model: EmbeddingModel, device: str, runner: str, dtype: str, threads: int | None, cache_dir: str
) -> LoadedEncoder:
    """Load it. dtype: what it computes in; `auto` is float32. ConfigError naming what is wrong."""
    device, runner = choose(device, runner, dtype)
    tokenizer = HFTokenizer.load(model.transformer, as_written=True)
    chosen = "float32" if dtype == "auto" else dtype
    if runner == "openvino":
        encoder: Encoder = OpenVinoEncoder(model, chosen, threads, Path(cache_dir) if cache_dir else None)
    else:
        from reflex_runtime.llm.embedding.transformers_encoder import TorchEncoder

        encoder = TorchEncoder(model, device, chosen, threads)
    return LoadedEncoder(model, encoder, tokenizer)
