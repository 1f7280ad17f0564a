"""What the directory of an embedding model says: sentence-transformers', or a bare encoder of `transformers`.

`modules.json` lists what follows on the model: how its states become one vector (pooling), layers on that vector
(dense), and whether it gets length 1. A bare encoder has no such list: then it is mean pooling at length 1, unless
`--pooling` says otherwise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.checkpoint import read_table
from reflex_runtime.llm.model_config import CONFIG_FILE, read_json

MODULES_FILE: Final = "modules.json"
POOLING_FILE: Final = "config.json"
# how sentence-transformers writes each way of pooling, in the order in which it puts their vectors together
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_NAMES: Final = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len", **{way: way for way in _FLAGS.values()}}
_BERT_FILES: Final = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_ORDER: Final = ("Pooling", "Dense", "Normalize")
_ACTIVATIONS: Final = ("Identity", "Tanh")
_ENCODERS: Final = frozenset({
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "eurobert", "modernbert",
    "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
})  # fmt: skip
_OFFSET: Final = frozenset({"camembert", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"})
_HEADS_OF: Final = ("num_attention_heads", "n_heads", "num_heads")
_HEADS: Final = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
SCORES: Final = 1 << 30  # bytes of attention scores that a call may have: they grow with the square of a text
_UNSAID: Final = 1 << 30  # what tokenizers write for "no limit" is far above


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A layer on the pooled vector: activation(x · weightᵀ + bias). weight: [out, in] float32."""

    weight: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32] | None
    tanh: bool


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """A directory, read and checked without the model's weights.

    root, transformer: the directory, and the one of the model in it. pooling: ways, whose vectors are put together.
    normalise: the vector gets length 1. width: of the model's states; vocab_size: of its tokens; dimensions: of the
    vector. max_model_len: most tokens of a text; positions: most that the model has places for. prompt: stands before
    every text. lower: texts are lower-cased. matryoshka: lengths that a vector may be cut to; None: none, (): any.
    curve: see `SizedCost`. pairs: of tokens that look at each other, of all texts of a call: the memory of `SCORES`.
    """

    root: Path
    transformer: Path
    model_type: str
    pooling: tuple[str, ...]
    normalise: bool
    dense: tuple[DenseLayer, ...]
    width: int
    vocab_size: int
    dimensions: int
    max_model_len: int
    positions: int
    pad_id: int
    prompt: str
    lower: bool
    matryoshka: tuple[int, ...] | None
    curve: float
    pairs: int

    @classmethod
    def open(cls, directory: Path | str, pooling: str = "auto") -> EmbeddingModel:
        """Read it. pooling: another way than the directory's. ConfigError naming the file and what is wrong."""
        root = Path(directory)
        modules = _modules(root)
        transformer = root / modules[0][1] if modules else root
        config = read_json(transformer / CONFIG_FILE)
        model_type = _word(transformer / CONFIG_FILE, config, "model_type")
        if not modules:
            _check_heads(transformer, config)
        width = _number(transformer / CONFIG_FILE, config, "hidden_size", "dim", "d_model")
        model = cls(
            root=root, transformer=transformer, model_type=model_type, pooling=("mean",), normalise=not modules,
            dense=(), width=width, vocab_size=_number(transformer / CONFIG_FILE, config, "vocab_size"),
            dimensions=width, max_model_len=0, positions=_positions(transformer, config),
            pad_id=_pad(config), prompt=_prompt(root), lower=False, matryoshka=_matryoshka(root / CONFIG_FILE, config),
            curve=6.0 * width, pairs=SCORES // (4 * _number(transformer / CONFIG_FILE, config, *_HEADS_OF)),
        )  # fmt: skip
        for kind, path in modules[1:]:
            model = _followed(model, kind, root / path)
        if pooling != "auto":
            model = _pooled(model, (pooling,))
        length, lower = _limits(root, transformer, model.positions)
        return replace(model, max_model_len=min(length, isqrt(model.pairs)), lower=lower)


def is_embedding(directory: Path | str) -> bool:
    """Whether it is the directory of an embedding model. Raises nothing: what is wrong with it `open` says."""
    root = Path(directory)
    try:
        if (root / MODULES_FILE).is_file():
            return any(kind == "Pooling" for kind, _ in _modules(root))
        config = read_json(root / CONFIG_FILE) if (root / CONFIG_FILE).is_file() else {}
    except ConfigError:
        return (root / MODULES_FILE).is_file()
    generates = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    kind = config.get("model_type")
    encodes = isinstance(kind, str) and kind in _ENCODERS
    return encodes and not any(name.endswith(generates) for name in _architectures(config))


def _modules(root: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each module, in order; [] where there is no such list."""
    file = root / MODULES_FILE
    if not file.is_file():
        return []
    try:
        listed: Any = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    found = []
    for entry in listed if isinstance(listed, list) else [None]:
        kind, path = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str) or path.startswith("/") or ".." in Path(path).parts:
            raise ConfigError(f"{file}: each module must have a type and a path below this directory")
        found.append((kind.rpartition(".")[2], path))
    if not found or found[0][0] != "Transformer":
        raise ConfigError(f"{file}: the first module must be a Transformer; other kinds are not served")
    if "Pooling" not in [kind for kind, _ in found]:
        raise ConfigError(f"{file}: has no module Pooling, so it makes no vector of a text")
    order = [_ORDER.index(kind) for kind, _ in found if kind in _ORDER]
    if order != sorted(order) or order.count(0) > 1:
        told = "its modules must be one Pooling, then Dense, then Normalize: no other order is served"
        raise ConfigError(f"{file}: {told}")
    return found


def _followed(model: EmbeddingModel, kind: str, place: Path) -> EmbeddingModel:
    """The model with one more module."""
    if kind == "Pooling":
        return _pooled(model, _ways(place / POOLING_FILE))
    if kind == "Dense":
        layer = _dense(place, model.dimensions)
        return replace(model, dense=(*model.dense, layer), dimensions=len(layer.weight), normalise=False)
    if kind == "Normalize":
        return replace(model, normalise=True)
    if kind == "Dropout":  # of training
        return model
    raise ConfigError(f"{place.parent / MODULES_FILE}: has a module {kind}, which is not served")


def _pooled(model: EmbeddingModel, ways: tuple[str, ...]) -> EmbeddingModel:
    if model.dense and len(ways) != len(model.pooling):
        raise ConfigError(f"{model.root / MODULES_FILE}: its Dense module needs its own pooling; leave --pooling out")
    dimensions = model.dimensions if model.dense else model.width * len(ways)
    return replace(model, pooling=ways, dimensions=dimensions)


def _ways(file: Path) -> tuple[str, ...]:
    config = read_json(file)
    if config.get("include_prompt") is False:
        raise ConfigError(f"{file}: include_prompt=false is not served: prompts count as part of the text")
    said = config.get("pooling_mode")
    names = [said] if isinstance(said, str) else said if isinstance(said, list) else None
    if names is None:
        names = [flag for flag in _FLAGS if config.get(flag)]
    ways = tuple(_FLAGS.get(name) or _NAMES.get(name, name) for name in map(str, names))
    if not ways or not set(ways) <= set(_FLAGS.values()):
        told = f"pooling {', '.join(ways)!r}: must be one or more of {', '.join(_FLAGS.values())}"
        raise ConfigError(f"{file}: {told}")
    return ways


def _dense(place: Path, width: int) -> DenseLayer:
    config = read_json(place / POOLING_FILE)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    file = place / "model.safetensors"
    if (of := config.get("module_input_name") or "sentence_embedding") != "sentence_embedding":
        raise ConfigError(f"{place / POOLING_FILE}: module_input_name={of!r}: a layer on tokens is not served")
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"{place / POOLING_FILE}: activation {activation} is not served; Identity and Tanh are")
    if not file.is_file():
        raise ConfigError(f"{file}: not found; save the model again with a present sentence-transformers")
    held = {name: place.array(name) for name, place in read_table(file).items()}
    weight, bias = held.get("linear.weight"), held.get("linear.bias")
    sound = weight is not None and weight.ndim == 2 and weight.shape[1] == width
    if weight is None or not sound or (bias is not None and bias.shape != weight.shape[:1]):
        raise ConfigError(f"{file}: must hold linear.weight of [out, {width}], and linear.bias of [out] or none")
    return DenseLayer(weight, bias, activation == "Tanh")


def _limits(root: Path, transformer: Path, positions: int) -> tuple[int, bool]:
    """(most tokens of a text, whether it is lower-cased)."""
    said, lower = None, False
    for file in (place / name for place in dict.fromkeys((transformer, root)) for name in _BERT_FILES):
        if file.is_file():
            settings = read_json(file)
            said, lower = settings.get("max_seq_length"), bool(settings.get("do_lower_case"))
            if said is not None and (type(said) is not int or said < 1):
                raise ConfigError(f"{file}: max_seq_length={said!r}: must be a whole number of at least 1")
            break
    tokenizer = transformer / "tokenizer_config.json"
    most = read_json(tokenizer).get("model_max_length") if tokenizer.is_file() else None
    bounds = [n for n in (said, most) if isinstance(n, (int, float)) and 0 < n < _UNSAID]
    return min([positions, *map(int, bounds)]), lower


def _positions(transformer: Path, config: dict[str, Any]) -> int:
    """Most tokens that the model has places for."""
    most = _number(transformer / CONFIG_FILE, config, "max_position_embeddings")
    if config["model_type"] in _OFFSET:  # their places begin behind that of padding
        most -= _pad(config) + 1
    if most < 1:
        raise ConfigError(f"{transformer / CONFIG_FILE}: max_position_embeddings={most}: leaves no place for a text")
    return most


def _pad(config: dict[str, Any]) -> int:
    said = config.get("pad_token_id")
    return said if type(said) is int and said >= 0 else 0


def _prompt(root: Path) -> str:
    """What stands before every text: the directory's default prompt."""
    file = root / "config_sentence_transformers.json"
    if not file.is_file():
        return ""
    settings = read_json(file)
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts") or {}
    if name is None:
        return ""
    if not isinstance(name, str) or not isinstance(prompts, dict) or not isinstance(prompts.get(name), str):
        raise ConfigError(f"{file}: default_prompt_name={name!r}: there is no such prompt")
    return str(prompts[name])


def _matryoshka(file: Path, config: dict[str, Any]) -> tuple[int, ...] | None:
    dimensions = config.get("matryoshka_dimensions")
    if dimensions is None:
        return () if config.get("is_matryoshka") is True else None
    if not isinstance(dimensions, list) or not dimensions or not all(type(n) is int and n > 0 for n in dimensions):
        raise ConfigError(f"{file}: matryoshka_dimensions={dimensions!r}: must be a list of lengths")
    return tuple(sorted(dimensions))


def _check_heads(transformer: Path, config: dict[str, Any]) -> None:
    for name in _architectures(config):
        if any(head in name for head in _HEADS):
            why = "is a classifier or reranker, which makes no vector of a text, and is not served"
            raise ConfigError(f"{transformer / CONFIG_FILE}: {name} {why}")


def _architectures(config: dict[str, Any]) -> list[str]:
    """The classes that the model's weights are of."""
    named = config.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _number(file: Path, config: dict[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    raise ConfigError(f"{file}: {names[0]} is missing, or is no whole number above 0")


def _word(file: Path, config: dict[str, Any], name: str) -> str:
    value = config.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{file}: {name} is missing")
    return value
