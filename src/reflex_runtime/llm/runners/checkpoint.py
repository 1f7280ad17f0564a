"""A Hugging Face model directory: its description, and tensors that stay in their files until asked for.

Architectures that are not ours are known to PyTorch and transformers alone; `AnyModelConfig` is what is known of them.

`Checkpoint.open` checks the whole directory before memory is taken. Every error is a ConfigError that names the file,
the key or tensor, what was found and what is expected. The safetensors format is read by `run.model_files`: numpy
has no bfloat16, and so errors can name the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.runners.model_config import (
    ARCHITECTURES,
    CONFIG_FILE,
    EMBEDDING,
    HEAD,
    ModelConfig,
    RopeScaling,
    read_config,
    token_ids,
)
from reflex_runtime.run import model_files
from reflex_runtime.run.model_files import read_object

__all__ = ["CONFIG_FILE", "EMBEDDING", "HEAD", "Checkpoint", "ModelConfig", "RopeScaling", "token_ids"]

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_WIDTHS: Final = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "bfloat16"}
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # by architecture
_BY_LENGTH: Final = ("dynamic", "longrope")  # rotations of every token change when one sequence grows beyond `original`


@dataclass(frozen=True, slots=True, eq=False)
class TensorPlace:
    """Where a tensor lies: `data` is the file's bytes, mapped, from the tensor's first to its last."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def check_dtype(self, name: str) -> None:
        """ConfigError for a type that is none of a weight. name: of the tensor."""
        if self.dtype not in _WIDTHS:
            wanted = ", ".join(_WIDTHS)
            raise ConfigError(f"{self.file}: tensor {name}: dtype {self.dtype}: must be one of {wanted}")

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """As float32, a copy unless the file holds float32 at an aligned place. Values are exact. See `check_dtype`."""
        self.check_dtype(name)
        if self.dtype == "F8_E4M3":
            return _float8()[self.data].reshape(self.shape)
        if self.dtype == "BF16":  # the upper half of a float32
            return (self.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        kind = np.float16 if self.dtype == "F16" else np.float32
        return self.data.view(kind).astype(np.float32, copy=False).reshape(self.shape)


@cache
def _float8() -> npt.NDArray[np.float32]:
    """The number of each of the 256 bytes: a sign, four bits of exponent and three of mantissa, without infinities."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[byte & 127 == 127] = np.nan
    return np.where(byte & 128, -value, value).astype(np.float32)


class Checkpoint:
    """An opened directory: `path`, `config`, and tensors by name. Made by `open`, which has checked all of it."""

    def __init__(self, path: Path, config: ModelConfig, places: dict[str, TensorPlace]) -> None:
        self.path, self.config, self._places = path, config, places

    @classmethod
    def open(cls, directory: Path | str) -> Checkpoint:
        """Read config.json and the tables of the weight files; no weight is read. ConfigError for anything wrong."""
        root = Path(directory)
        config = read_config(root / CONFIG_FILE)
        places: dict[str, TensorPlace] = {}
        for file in weight_files(root):
            places |= read_table(file)
        index = root / INDEX_FILE
        for name, shape in config.tensors().items():
            place = places.get(name)
            if place is None:
                origin = index if index.is_file() else root / WEIGHTS_FILE
                raise ConfigError(f"{origin}: tensor {name}: not found, expected shape {list(shape)}")
            place.check_dtype(name)
            if place.shape != shape:
                found = f"found shape {list(place.shape)}, expected {list(shape)}"
                raise ConfigError(f"{place.file}: tensor {name}: {found}, from the sizes in {CONFIG_FILE}")
        if not config.torch_dtype:
            config = replace(config, torch_dtype=_DTYPES[places[EMBEDDING].dtype])
        return cls(root, config, places)

    @property
    def files(self) -> list[Path]:
        """The weight files, sorted."""
        return sorted({place.file for place in self._places.values()})

    @property
    def head(self) -> str:
        """Name of the tensor [vocab_size, hidden_size] that makes logits: the embedding's where they are tied."""
        return EMBEDDING if self.config.tie_word_embeddings else HEAD

    def raw(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        """(dtype "F32", "F16" or "BF16"; its bytes, read-only; shape). They are still in the file, except those of 8
        bits, which are BF16 here, and kept for whom they are shared with."""
        place = self._places[name]
        if place.dtype == "F8_E4M3":
            wide = (place.array(name).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
            place = self._places[name] = replace(place, dtype="BF16", data=wide)
        return place.dtype, place.data, place.shape

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """See `TensorPlace.array`."""
        return self._places[name].array(name)


def is_known(directory: Path | str) -> bool:
    """Whether the checkpoint has one of our own architectures; the others need PyTorch and transformers."""
    file = Path(directory) / CONFIG_FILE
    return not file.is_file() or read_object(file).get("architectures") in [[name] for name in ARCHITECTURES]


# -- weight files ------------------------------------------------------------------------------------------------------


def weight_files(root: Path) -> list[Path]:
    """The safetensors files of a checkpoint of any architecture. ConfigError where there are none."""
    index = root / INDEX_FILE
    if not index.is_file():
        if not (root / WEIGHTS_FILE).is_file():
            raise ConfigError(
                f"{root}: has neither {WEIGHTS_FILE} nor {INDEX_FILE}, expected safetensors weights; "
                "model.save_pretrained(DIR) of transformers writes them"
            )
        return [root / WEIGHTS_FILE]
    table = read_object(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"{index}: weight_map: expected an object {{tensor: file}}")
    names = set()
    for tensor, name in table.items():
        pure = PurePosixPath(name) if isinstance(name, str) and name else PurePosixPath("/")
        if pure.is_absolute() or ".." in pure.parts:
            raise ConfigError(f"{index}: weight_map.{tensor}={name!r}: must be a file name within the directory")
        if name not in names and not (root / pure).is_file():
            raise ConfigError(f"{root / pure}: not found, but {INDEX_FILE} places tensor {tensor} there; copy it, too")
        names.add(name)
    return [root / name for name in sorted(names)]


def read_table(file: Path) -> dict[str, TensorPlace]:
    """Every tensor of one safetensors file, checked, and its bytes mapped."""
    data = np.memmap(file, np.uint8, "r") if (tensors := model_files.read_table(file)) else np.empty(0, np.uint8)
    return {
        name: TensorPlace(file, tensor.dtype, tensor.shape, data[tensor.start : tensor.stop])
        for name, tensor in tensors.items()
    }


def number(root: Path, config: dict[str, Any], *names: str) -> int:
    """The first whole number under one of these keys of config.json."""
    for name in names:
        found = config.get(name)
        if type(found) is int and found > 0:
            return found
    raise ConfigError(f"{root / CONFIG_FILE}: has no number under {' or '.join(names)}")


def longest(root: Path, config: dict[str, Any]) -> int:
    """Tokens of the longest sequence whose answer does not depend on the rest of the batch."""
    most = number(root, config, *_POSITIONS)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) in _BY_LENGTH:
        original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        return min(most, original or most)
    return most


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


_RECURRENT: Final = {
    "bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2", "nemotron_h", "recurrent_gemma", "rwkv", "xlstm",
    "zamba", "zamba2",
}  # fmt: skip


def require(root: Path) -> None:
    """ConfigError, with what to install, unless the libraries are there that know other architectures than ours. What
    they could not serve either is refused first."""
    if (kind := read_object(root / CONFIG_FILE).get("model_type")) in _RECURRENT:
        why = "keeps other state than keys and values, which is not served"
        raise ConfigError(f"{root / CONFIG_FILE}: model_type={kind!r}: {why}")
    needed = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if needed:
        named = read_object(root / CONFIG_FILE).get("architectures")
        told = f"architectures={named}: needs {' and '.join(needed)}: in a clone, pip install '.[convert]'"
        other = "or serve what `optimum-cli export openvino --task text-generation-with-past` makes of it elsewhere"
        raise ConfigError(f"{root / CONFIG_FILE}: {told}; {other}")
