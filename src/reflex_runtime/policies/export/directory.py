"""An export directory as a frozen value: `reflex_config.json`, the embodiment, the model files and their hashes.

Everything a name could get wrong is found here or when the graphs are opened, never in front of a robot. Every error is
a ConfigError that names the file and the key, what was found and what is expected. `docs/exports.md` explains each key.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.policies.policy.tokenizer import InstructionTokenizer, WordTokenizer, read_tokenizer
from reflex_runtime.processors.onnx import TensorSpec

CONFIG_FILE: Final = "reflex_config.json"
EMBODIMENT_FILE: Final = "embodiment.json"
MODEL_FILE: Final = "model.onnx"
MODEL_PATTERNS: Final = ("*.onnx", "*.onnx.data", "*.bin", "*.safetensors")
ROLES: Final = ("tokens", "state", "noise", "time", "past_kv")  # beside the names of the images

ExportKind = Literal["monolithic", "decomposed"]
Size = tuple[int, int]  # height, width in pixels


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """normalised = (value − mean) / std, element by element; float32 [dim], std > 0."""

    mean: NDArray[np.float32]
    std: NDArray[np.float32]

    def normalise(self, value: NDArray[np.float32]) -> NDArray[np.float32]:
        """Into the model's units; the last axis is dim."""
        return ((value - self.mean) / self.std).astype(np.float32, copy=False)

    def denormalise(self, value: NDArray[np.float32]) -> NDArray[np.float32]:
        """Into the robot's units; the last axis is dim."""
        return (value * self.std + self.mean).astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class Embodiment:
    """The robot a policy was made for.

    action_space: "absolute" (targets), "relative" (changes), or None when the file does not say.
    action_ranges: float32 [action_dim, 2], lowest and highest value the robot takes, or None.
    cameras: (height, width) by name. control_rate_hz: actions executed per second.
    """

    name: str = "unknown"
    action_space: Literal["absolute", "relative"] | None = None
    action_ranges: NDArray[np.float32] | None = None
    action_names: tuple[str, ...] | None = None
    action_units: tuple[str, ...] | None = None
    state_names: tuple[str, ...] | None = None
    gripper_index: int | None = None
    cameras: Mapping[str, Size] | None = None
    control_rate_hz: float | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """One model file, and the tensors the runtime expects it to have, by role ("past_kv/0" … for keys and values)."""

    file: Path
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """A checked export directory. Make one with `Export.load`.

    config: the parsed file as it is. images: (height, width) by image name.
    graphs: {"model": …}, or {"prefix": …, "expert": …} when decomposed.
    past_kv: when decomposed, the expert's input name for each of the prefix's keys-and-values outputs.
    prefix_takes_state: the state is an input of the prefix, not of the expert.
    model_hash, config_hash: first 16 hex digits of SHA-256. model_bytes: total size of the files behind model_hash.
    """

    path: Path
    config: Mapping[str, Any]
    model_id: str
    model_type: str
    export_kind: ExportKind
    state_dim: int
    action_dim: int
    chunk_size: int
    num_denoising_steps: int
    opset: int | None
    images: Mapping[str, Size]
    tokenizer: InstructionTokenizer | None
    max_tokens: int
    state_norm: Norm | None
    action_norm: Norm | None
    embodiment: Embodiment
    graphs: Mapping[str, Graph]
    past_kv: Mapping[str, str]
    prefix_takes_state: bool
    model_hash: str
    config_hash: str
    model_bytes: int

    @staticmethod
    def load(path: str | Path) -> Export:
        """Read and check the directory. The graphs themselves are opened, and checked against it, by the policy."""
        root = Path(path)
        if not root.is_dir():
            raise ConfigError(f"{root}: not found, expected an export directory{_hint(root)}")
        return _load(root)

    @property
    def takes_state(self) -> bool:
        """Whether the model reads the robot's state."""
        return any("state" in graph.inputs for graph in self.graphs.values())

    @property
    def takes_text(self) -> bool:
        """Whether the model reads an instruction."""
        return any("tokens" in graph.inputs for graph in self.graphs.values())


def _hint(path: Path) -> str:
    """What to do where the name of a model on a hub was given."""
    name = path.as_posix()
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) or path.parent.exists():
        return ""
    there = path.name
    return (
        f" or the directory of a language model. If {name} is the name of a model on a hub, download it first (pip "
        f"install huggingface_hub; hf download {name} --local-dir {there}), then: reflex serve ./{there}"
    )


def model_hash(root: Path) -> str:
    """First 16 hex digits of SHA-256 over the model files, sorted by their path within the directory.

    Of each file: its path in UTF-8 with forward slashes, a zero byte, its size in 8 bytes (big-endian), its contents.
    """
    sha = hashlib.sha256()
    for name, file in _model_files(root):
        sha.update(name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "big"))
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()[:16]


def model_bytes(root: Path) -> int:
    """Total size of the files behind `model_hash`, without reading them; 0 where there is no such directory."""
    return sum(file.stat().st_size for _, file in _model_files(root))


def config_hash(root: Path) -> str:
    """First 16 hex digits of SHA-256 of the bytes of `reflex_config.json`."""
    return hashlib.sha256((root / CONFIG_FILE).read_bytes()).hexdigest()[:16]


def _model_files(root: Path) -> list[tuple[str, Path]]:
    found = {
        file.relative_to(root).as_posix(): file for p in MODEL_PATTERNS for file in root.rglob(p) if file.is_file()
    }
    return sorted(found.items())


# -- reading -----------------------------------------------------------------------------------------------------------

_KEYS: Final = (
    "model_id",
    "model_type",
    "export_kind",
    "state_dim",
    "action_dim",
    "chunk_size",
    "num_denoising_steps",
    "opset",
    "image_size",
    "images",
    "inputs",
    "outputs",
    "decomposed",
    "tokenizer",
    "max_tokens",
    "state_norm",
    "action_norm",
    "embodiment",
    "metadata",
)
_DECOMPOSED_KEYS: Final = ("vlm_prefix_onnx", "expert_denoise_onnx", "past_kv_tensor_names", "expert_takes_state")
_EMBODIMENT_KEYS: Final = (
    "name",
    "action_space",
    "action_ranges",
    "action_names",
    "action_units",
    "state_names",
    "gripper_index",
    "cameras",
    "control_rate_hz",
    "state_norm",
    "action_norm",
    "metadata",
)


class _Table:
    """One JSON object, read strictly: each getter checks a key and names it, with the file, when it is wrong."""

    def __init__(self, file: Path, values: Any, allowed: Iterable[str], within: str = "") -> None:
        self.file, self.within = file, within
        if not isinstance(values, dict):
            self.wrong("", values, "an object")
        self.values: dict[str, Any] = values
        names = list(allowed)
        for key in self.values:
            if key not in names:
                near = difflib.get_close_matches(key, names, 1)
                self.wrong(key, None, f"{near[0]!r}, perhaps" if near else "one of " + ", ".join(names), unknown=True)

    def wrong(self, key: str, found: Any, expected: str, unknown: bool = False) -> NoReturn:
        name = ".".join(part for part in (self.within, key) if part)
        if unknown:
            raise ConfigError(f"{self.file}: {name}: found an unknown key, expected {expected}")
        shown = "nothing" if found is _MISSING else _shorten(json.dumps(found, ensure_ascii=False, default=str))
        raise ConfigError(f"{self.file}: {name or 'file'}: found {shown}, expected {expected}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        value = self.values.get(key)
        return _MISSING if value is None else value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not value.strip():
            self.wrong(key, value, "a text")
        return value

    def choice(self, key: str, choices: Sequence[str]) -> str:
        value = self.get(key)
        if value not in choices:
            self.wrong(key, value, " or ".join(repr(c) for c in choices))
        return cast("str", value)

    def integer(self, key: str, low: int, high: int = 1_000_000) -> int:
        value = self.get(key)
        if not _is_int(value) or not low <= value <= high:
            self.wrong(key, value, f"an integer in [{low}, {high}]")
        return cast("int", value)

    def number(self, key: str) -> float:
        value = self.get(key)
        if not _is_number(value) or not value > 0:
            self.wrong(key, value, "a number > 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            self.wrong(key, value, "true or false")
        return value

    def texts(self, key: str, count: int | None = None) -> tuple[str, ...]:
        value = self.get(key)
        fine = isinstance(value, list) and all(isinstance(v, str) and v for v in value)
        if not fine or not value or len(set(value)) != len(value) or (count is not None and len(value) != count):
            self.wrong(key, value, f"a list of {count or 'one or more'} different texts")
        return tuple(value)

    def labels(self, key: str, count: int) -> tuple[str, ...]:
        """Texts for people; they may repeat (two joints in radians)."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != count or not all(isinstance(v, str) for v in value):
            self.wrong(key, value, f"a list of {count} texts")
        return tuple(value)

    def sizes(self, key: str) -> dict[str, Size]:
        value = self.get(key)
        if not isinstance(value, dict) or not all(name for name in value):
            self.wrong(key, value, "an object {name: [height, width]}")
        return {name: self.size(f"{key}.{name}", size) for name, size in value.items()}

    def size(self, key: str, value: Any) -> Size:
        if not isinstance(value, list) or len(value) != 2 or not all(_is_int(v) and 1 <= v <= 4096 for v in value):
            self.wrong(key, value, "[height, width], each an integer in [1, 4096]")
        return value[0], value[1]

    def norm(self, key: str, dim: int) -> Norm:
        table = _Table(self.file, self.get(key), ("mean", "std"), ".".join(p for p in (self.within, key) if p))
        mean, std = (table.vector(name, dim) for name in ("mean", "std"))
        if not (std > 0.0).all():
            table.wrong("std", std.tolist(), "numbers > 0")
        return Norm(mean, std)

    def vector(self, key: str, dim: int) -> NDArray[np.float32]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) != dim or not all(_is_number(v) for v in value):
            self.wrong(key, value, f"a list of {dim} finite numbers")
        return _frozen(value)

    def ranges(self, key: str, dim: int) -> NDArray[np.float32]:
        value = self.get(key)
        pairs = isinstance(value, list) and all(
            isinstance(pair, list) and len(pair) == 2 and all(_is_number(v) for v in pair) and pair[0] < pair[1]
            for pair in value
        )
        if not pairs or len(value) != dim:
            self.wrong(key, value, f"a list of {dim} pairs [low, high] of finite numbers with low < high")
        return _frozen(value)

    def file_in(self, root: Path, key: str, value: Any) -> Path:
        """A file of the directory. Links inside it are followed: model hubs store files as links."""
        if not isinstance(value, str) or not value:
            self.wrong(key, value, "a file name within the export directory")
        pure = PurePosixPath(value)
        if pure.is_absolute() or ".." in pure.parts or "\\" in value or ":" in value:
            self.wrong(key, value, "a relative path that stays within the export directory")
        if not (root / pure).is_file():
            self.wrong(key, value, f"a file that exists in {root}")
        return root / pure


_MISSING: Final = object()


def _read_json(file: Path) -> Any:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{file}: {key}: found twice, expected once")
        return dict(pairs)

    def no_constant(name: str) -> NoReturn:
        raise ConfigError(f"{file}: found {name}, expected finite numbers only")

    try:
        return json.loads(file.read_bytes(), object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except FileNotFoundError:
        raise ConfigError(f"{file}: not found, expected the export's configuration") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: is not JSON: {error}") from error


def _load(root: Path) -> Export:
    file = root / CONFIG_FILE
    table = _Table(file, _read_json(file), _KEYS)
    kind = cast("ExportKind", table.choice("export_kind", ("monolithic", "decomposed")))
    state_dim, action_dim = table.integer("state_dim", 0), table.integer("action_dim", 1)
    images = _images(table)
    reader = _Roles(root, table, kind, images, state_dim, action_dim, table.integer("chunk_size", 1))
    graphs = reader.graphs()
    tokenizer, max_tokens = _text(root, table, reader.inputs.has("tokens"))
    steps = table.integer("num_denoising_steps", 1, 1000)
    embodiment, its_norms = _embodiment(root, table, state_dim, action_dim)
    norms: dict[str, Norm | None] = {}
    for key, dim in (("state_norm", state_dim), ("action_norm", action_dim)):
        if table.has(key) and key in its_norms:
            table.wrong(key, table.get(key), "it in one file only, and the embodiment has one as well")
        norms[key] = table.norm(key, dim) if table.has(key) else its_norms.get(key)
    return Export(
        path=root,
        config=table.values,
        model_id=table.text("model_id"),
        model_type=table.text("model_type"),
        export_kind=kind,
        state_dim=state_dim,
        action_dim=action_dim,
        chunk_size=reader.chunk_size,
        num_denoising_steps=steps,
        opset=table.integer("opset", 1, 1000) if table.has("opset") else None,
        images=images,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        state_norm=norms["state_norm"],
        action_norm=norms["action_norm"],
        embodiment=embodiment,
        graphs=graphs,
        past_kv=reader.past_kv,
        prefix_takes_state=kind == "decomposed" and "state" in graphs["prefix"].inputs,
        model_hash=model_hash(root),
        config_hash=config_hash(root),
        model_bytes=model_bytes(root),
    )


def _images(table: _Table) -> dict[str, Size]:
    """`images`, or the single image of `image_size`; both must agree where both are given."""
    size = table.size("image_size", table.get("image_size")) if table.has("image_size") else None
    if not table.has("images"):
        return {} if size is None else {"image": size}
    images = table.sizes("images")
    for name in images:
        if name in ROLES or name == "actions":
            table.wrong(f"images.{name}", name, "a name other than " + ", ".join((*ROLES, "actions")))
    if size is not None and size not in images.values():
        table.wrong("image_size", list(size), "the size of one of `images`")
    return images


def _text(root: Path, table: _Table, takes_text: bool) -> tuple[InstructionTokenizer | None, int]:
    if not takes_text:
        if table.has("tokenizer"):
            table.wrong("tokenizer", "one", "none, because `inputs` has no role tokens")
        return None, 0
    max_tokens = table.integer("max_tokens", 1, 100_000)
    value = table.get("tokenizer")
    if isinstance(value, str):
        return read_tokenizer(table.file_in(root, "tokenizer", value)), max_tokens
    if not isinstance(value, dict) or not value or not all(_is_int(v) and v >= 0 for v in value.values()):
        table.wrong("tokenizer", value, "an object {word: id >= 0}, or the name of a tokenizer.json file")
    return WordTokenizer(value), max_tokens


class _Roles:
    """`inputs`, `outputs` and `decomposed`: which tensor of which graph plays which role."""

    def __init__(
        self,
        root: Path,
        table: _Table,
        kind: ExportKind,
        images: Mapping[str, Size],
        state_dim: int,
        action_dim: int,
        chunk_size: int,
    ) -> None:
        self._root, self._table, self._kind, self._images = root, table, kind, images
        self.chunk_size = chunk_size
        chunk = (chunk_size, action_dim)
        roles = [*images, "tokens", "state", "noise", *(["time", "past_kv"] if kind == "decomposed" else [])]
        self.inputs = _Table(table.file, table.get("inputs"), roles, "inputs")
        self.outputs = _Table(
            table.file, table.get("outputs"), ["actions", *(["past_kv"] if kind == "decomposed" else [])], "outputs"
        )
        self._specs: dict[str, tuple[str, tuple[int | None, ...]]] = {
            **{name: ("u", (*size, 3)) for name, size in images.items()},
            "tokens": ("i", (table.get("max_tokens") if _is_int(table.get("max_tokens")) else None,)),
            "state": ("f", (state_dim,)),
            "noise": ("f", chunk),
            "time": ("f", ()),
            "actions": ("f", chunk),
        }
        self.past_kv: dict[str, str] = {}
        if self.inputs.has("state") and state_dim == 0:
            table.wrong("state_dim", 0, "at least 1, because `inputs` has the role state")
        for name in images:
            self.inputs.text(name)

    def graphs(self) -> dict[str, Graph]:
        """The graphs of this kind of export, with every role in the one it belongs to."""
        seen = [*self._images, *(["tokens"] if self.inputs.has("tokens") else [])]
        state = ["state"] if self.inputs.has("state") else []
        if self._kind == "monolithic":
            if self._table.has("decomposed"):
                self._table.wrong("decomposed", self._table.get("decomposed"), "none in a monolithic export")
            noise = ["noise"] if self.inputs.has("noise") else []
            if not seen and not state:
                self._table.wrong("inputs", self.inputs.values, "an image, tokens or state: something to act on")
            file = self._root / MODEL_FILE
            if not file.is_file():
                raise ConfigError(f"{file}: not found, expected the model of a monolithic export")
            return {"model": self._graph(file, [*seen, *state, *noise], ["actions"])}
        parts = _Table(self._table.file, self._table.get("decomposed"), _DECOMPOSED_KEYS, "decomposed")
        names = parts.texts("past_kv_tensor_names")
        made, read = self._kv(self.outputs, names), self._kv(self.inputs, names)
        self.past_kv = dict(zip(made, read, strict=True))
        to_expert = parts.flag("expert_takes_state")
        if to_expert and not state:
            self.inputs.wrong("state", _MISSING, "a tensor name, because `expert_takes_state` is true")
        prefix, expert = (
            parts.file_in(self._root, k, parts.get(k)) for k in ("vlm_prefix_onnx", "expert_denoise_onnx")
        )
        sees = [*seen, *([] if to_expert else state)]
        if not sees:
            self._table.wrong("inputs", self.inputs.values, "an image, tokens or state for the prefix to see")
        return {
            "prefix": self._graph(prefix, sees, [], made=made),
            "expert": self._graph(expert, ["noise", "time", *(state if to_expert else [])], ["actions"], read=read),
        }

    def _kv(self, table: _Table, names: tuple[str, ...]) -> tuple[str, ...]:
        """Tensor names of the keys and values on one side: `past_kv_tensor_names` unless the role says otherwise."""
        value = table.get("past_kv")
        if value is _MISSING:
            return names
        if isinstance(value, str) and len(names) == 1:
            return (table.text("past_kv"),)
        return table.texts("past_kv", len(names))

    def _graph(
        self,
        file: Path,
        inputs: Sequence[str],
        outputs: Sequence[str],
        read: Sequence[str] = (),
        made: Sequence[str] = (),
    ) -> Graph:
        taken: dict[str, TensorSpec] = {role: self._spec(self.inputs, role) for role in inputs}
        taken |= {f"past_kv/{i}": TensorSpec(name) for i, name in enumerate(read)}
        names: set[str] = set()
        for role, spec in taken.items():
            if spec.name in names:
                self.inputs.wrong(role.partition("/")[0], spec.name, "a tensor that no other role has")
            names.add(spec.name)
        given = {role: self._spec(self.outputs, role) for role in outputs}
        given |= {f"past_kv/{i}": TensorSpec(name) for i, name in enumerate(made)}
        return Graph(file, taken, given)

    def _spec(self, table: _Table, role: str) -> TensorSpec:
        kind, dims = self._specs[role]
        return TensorSpec(table.text(role), kind, dims)


def _embodiment(root: Path, config: _Table, state_dim: int, action_dim: int) -> tuple[Embodiment, dict[str, Norm]]:
    """The file that `embodiment` names, else embodiment.json where there is one, else an unknown robot."""
    if config.has("embodiment"):
        file = config.file_in(root, "embodiment", config.get("embodiment"))
    else:
        file = root / EMBODIMENT_FILE
        if not file.is_file():
            return Embodiment(), {}
    table = _Table(file, _read_json(file), _EMBODIMENT_KEYS)
    has = table.has
    space = table.choice("action_space", ("absolute", "relative")) if has("action_space") else None
    embodiment = Embodiment(
        name=table.text("name"),
        action_space=cast("Literal['absolute', 'relative'] | None", space),
        action_ranges=table.ranges("action_ranges", action_dim) if has("action_ranges") else None,
        action_names=table.texts("action_names", action_dim) if has("action_names") else None,
        action_units=table.labels("action_units", action_dim) if has("action_units") else None,
        state_names=table.labels("state_names", state_dim) if has("state_names") else None,
        gripper_index=table.integer("gripper_index", 0, action_dim - 1) if has("gripper_index") else None,
        cameras=table.sizes("cameras") if has("cameras") else None,
        control_rate_hz=table.number("control_rate_hz") if has("control_rate_hz") else None,
    )
    dims = {"state_norm": state_dim, "action_norm": action_dim}
    return embodiment, {key: table.norm(key, dim) for key, dim in dims.items() if has(key)}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """A finite number that float32 can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and abs(value) <= 3.0e38


def _frozen(value: Any) -> NDArray[np.float32]:
    array = np.array(value, np.float32)
    array.setflags(write=False)
    return array


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "…"
