"""An export directory as a frozen value: `reflex_config.json`, the embodiment, the model files and their hashes.

Everything a name could get wrong is found here or when the graphs are opened, never in front of a robot. Every error is
a ConfigError that names the file and the key, what was found and what is expected. `docs/exports.md` explains each key.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import GenericAlias
from typing import Annotated, Any, Final, Literal, NoReturn

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from reflex_runtime.checked import JsonObject, described
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.policies.export.wires import WireMap, read_wires
from reflex_runtime.policies.policy.tokenizer import InstructionTokenizer, WordTokenizer, read_tokenizer
from reflex_runtime.processors.onnx import TensorSpec

CONFIG_FILE: Final = "reflex_config.json"
EMBODIMENT_FILE: Final = "embodiment.json"
MODEL_FILE: Final = "model.onnx"
MODEL_PATTERNS: Final = ("*.onnx", "*.onnx.data", "*.bin", "*.safetensors")
ROLES: Final = ("tokens", "state", "noise", "time", "past_kv")  # beside the names of the images

ExportKind = Literal["monolithic", "decomposed"]
Resize = Literal["stretch", "pad"]
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
    resize: how pictures of another size are fitted: stretched, or with their aspect ratio kept and padded with black.
    wires: what the observations of other protocols mean, by wire.
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
    resize: Resize = "stretch"
    wires: Mapping[str, WireMap] = field(default_factory=dict)

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


def _whole(low: int, high: int = 1_000_000) -> Meta:
    return Meta(ge=low, le=high, description=f"an integer in [{low}, {high}]")


def _list(item: Any, count: int, what: str) -> Any:
    """The type of a list of so many items; `what` names them."""
    length = Meta(min_length=count, max_length=count, description=f"a list of {count} {what}")
    # mypy takes no variable in a type, hence not tuple[item, ...]
    return Annotated[GenericAlias(tuple, (item, ...)), length]


def _names(count: int) -> Any:
    return _list(_Name, count, "different texts")


_RANGES: Final = "pairs [low, high] of finite numbers with low < high"
_LARGEST: Final = 3.0e38  # nearly the largest number of float32
_Text = Annotated[str, Meta(pattern=r"\S", description="a text")]
_Number = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
_Name = Annotated[str, Meta(min_length=1)]
_Pixels = Annotated[int, Meta(ge=1, le=4096)]
_Size = Annotated[tuple[_Pixels, _Pixels], Meta(description="[height, width], each an integer in [1, 4096]")]
_Sizes = Annotated[dict[_Name, Any], Meta(description="an object {name: [height, width]}")]
_Names = Annotated[tuple[_Name, ...], Meta(min_length=1, description="a list of one or more different texts")]
_FileName = Annotated[str, Meta(min_length=1, description="a file name within the export directory")]
_MaxTokens = Annotated[int, _whole(1, 100_000)]
_Vocabulary = Annotated[
    dict[str, Annotated[int, Meta(ge=0)]],
    Meta(min_length=1, description="an object {word: id >= 0}, or the name of a tokenizer.json file"),
]


class _Config(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The keys of `reflex_config.json`. What depends on another key is Any here and checked where both are known."""

    model_id: _Text
    model_type: _Text
    export_kind: Annotated[ExportKind, Meta(description="'monolithic' or 'decomposed'")]
    state_dim: Annotated[int, _whole(0)]
    action_dim: Annotated[int, _whole(1)]
    chunk_size: Annotated[int, _whole(1)]
    num_denoising_steps: Annotated[int, _whole(1, 1000)]
    opset: Annotated[int, _whole(1, 1000)] | None = None
    image_size: _Size | None = None
    images: _Sizes | None = None
    resize: Annotated[Resize, Meta(description="'stretch' or 'pad'")] | None = None
    wires: Any = None
    inputs: Any = None
    outputs: Any = None
    decomposed: Any = None
    tokenizer: Any = None
    max_tokens: Any = None
    state_norm: Any = None
    action_norm: Any = None
    embodiment: Any = None
    metadata: Any = None


class _Decomposed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    vlm_prefix_onnx: Any = None
    expert_denoise_onnx: Any = None
    past_kv_tensor_names: Any = None
    expert_takes_state: Annotated[bool, Meta(description="true or false")]


def _norm_keys(dim: int) -> Any:
    vector = _list(_Number, dim, "finite numbers")
    return msgspec.defstruct("_Norm", [("mean", vector), ("std", vector)], forbid_unknown_fields=True)


def _embodiment_keys(state_dim: int, action_dim: int) -> Any:
    """The struct of the embodiment's file."""
    space = Meta(description="'absolute' or 'relative'")
    optional: dict[str, Any] = {
        "action_space": Annotated[Literal["absolute", "relative"], space],
        "action_ranges": _list(tuple[_Number, _Number], action_dim, _RANGES),
        "action_names": Any,
        "action_units": _list(str, action_dim, "texts"),  # for people; they may repeat (two joints in radians)
        "state_names": _list(str, state_dim, "texts"),
        "gripper_index": Annotated[int, _whole(0, action_dim - 1)],
        "cameras": _Sizes,
        "control_rate_hz": Annotated[float, Meta(gt=0, le=_LARGEST, description="a number > 0")],
        **dict.fromkeys(("state_norm", "action_norm", "metadata"), Any),
    }
    keys: list[Any] = [("name", _Text), *((name, kind | None, None) for name, kind in optional.items())]
    return msgspec.defstruct("_EmbodimentFile", keys, forbid_unknown_fields=True)


class _Object(JsonObject):
    """A JSON object of the export."""

    def sizes(self, key: str, values: Mapping[str, Any]) -> dict[str, Size]:
        """Every (height, width) of an object {name: [height, width]}."""
        return {name: self.convert(f"{key}.{name}", _Size, size) for name, size in values.items()}

    def different(self, key: str, kind: Any) -> tuple[str, ...]:
        """A list of texts of which none occurs twice. kind: its type, of which this checks the rest."""
        texts: tuple[str, ...] = self.convert(key, kind)
        if len(set(texts)) < len(texts):
            self.wrong(key, described(kind))
        return texts

    def norm(self, key: str, dim: int) -> Norm | None:
        if not self.has(key):
            return None
        table = _Object(self.file, self.get(key), self.name(key))
        fields = table.read(_norm_keys(dim))
        norm = Norm(_frozen(fields.mean), _frozen(fields.std))
        if not (norm.std > 0.0).all():
            table.wrong("std", "numbers > 0", norm.std.tolist())
        return norm

    def file_in(self, root: Path, key: str) -> Path:
        """A file of the directory. Links inside it are followed: model hubs store files as links."""
        name: str = self.convert(key, _FileName)
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name:
            self.wrong(key, "a relative path that stays within the export directory")
        if not (root / pure).is_file():
            self.wrong(key, f"a file that exists in {root}")
        return root / pure


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
    table = _Object(root / CONFIG_FILE, _read_json(root / CONFIG_FILE))
    config = table.read(_Config)
    images = _images(table, config)
    roles = _Roles(root, table, config, images)
    graphs = roles.graphs()
    tokenizer, max_tokens = _text(root, table, roles.inputs.has("tokens"))
    dims = {"state_norm": config.state_dim, "action_norm": config.action_dim}
    embodiment, norms = _embodiment(root, table, dims)
    for key, dim in dims.items():
        if table.has(key) and norms[key] is not None:
            table.wrong(key, "it in one file only, and the embodiment has one as well")
        norms[key] = norms[key] or table.norm(key, dim)
    return Export(
        path=root,
        config=table.values,
        model_id=config.model_id,
        model_type=config.model_type,
        export_kind=config.export_kind,
        state_dim=config.state_dim,
        action_dim=config.action_dim,
        chunk_size=config.chunk_size,
        num_denoising_steps=config.num_denoising_steps,
        opset=config.opset,
        images=images,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        embodiment=embodiment,
        graphs=graphs,
        past_kv=roles.past_kv,
        prefix_takes_state=config.export_kind == "decomposed" and "state" in graphs["prefix"].inputs,
        model_hash=model_hash(root),
        config_hash=config_hash(root),
        model_bytes=model_bytes(root),
        resize=config.resize or "stretch",
        wires=read_wires(table, images, roles.inputs.has("state")),
        **norms,
    )


def _images(table: _Object, config: _Config) -> dict[str, Size]:
    """`images`, or the single image of `image_size`; both must agree where both are given."""
    size = config.image_size
    if config.images is None:
        return {} if size is None else {"image": size}
    images = table.sizes("images", config.images)
    for name in images:
        if name in ROLES or name == "actions":
            table.wrong(f"images.{name}", "a name other than " + ", ".join((*ROLES, "actions")), name)
    if size is not None and size not in images.values():
        table.wrong("image_size", "the size of one of `images`")
    return images


def _text(root: Path, table: _Object, takes_text: bool) -> tuple[InstructionTokenizer | None, int]:
    if not takes_text:
        if table.has("tokenizer"):
            table.wrong("tokenizer", "none, because `inputs` has no role tokens", "one")
        return None, 0
    max_tokens: int = table.convert("max_tokens", _MaxTokens)
    if isinstance(table.get("tokenizer"), str):
        return read_tokenizer(table.file_in(root, "tokenizer")), max_tokens
    return WordTokenizer(table.convert("tokenizer", _Vocabulary)), max_tokens


class _Roles:
    """`inputs`, `outputs` and `decomposed`: which tensor of which graph plays which role."""

    def __init__(self, root: Path, table: _Object, config: _Config, images: Mapping[str, Size]) -> None:
        self._root, self._table, self._kind, self._images = root, table, config.export_kind, images
        split = config.export_kind == "decomposed"
        chunk = (config.chunk_size, config.action_dim)
        self.inputs = _Object(table.file, table.get("inputs"), "inputs")
        self.inputs.only([*images, "tokens", "state", "noise", *(["time", "past_kv"] if split else [])])
        self.outputs = _Object(table.file, table.get("outputs"), "outputs")
        self.outputs.only(["actions", *(["past_kv"] if split else [])])
        most = config.max_tokens
        self._specs: dict[str, tuple[str, tuple[int | None, ...]]] = {
            **{name: ("u", (*size, 3)) for name, size in images.items()},
            "tokens": ("i", (most if type(most) is int else None,)),
            "state": ("f", (config.state_dim,)),
            "noise": ("f", chunk),
            "time": ("f", ()),
            "actions": ("f", chunk),
        }
        self.past_kv: dict[str, str] = {}
        if self.inputs.has("state") and config.state_dim == 0:
            table.wrong("state_dim", "at least 1, because `inputs` has the role state")
        for name in images:
            self.inputs.convert(name, _Text)

    def graphs(self) -> dict[str, Graph]:
        """The graphs of this kind of export, with every role in the one it belongs to."""
        seen = [*self._images, *(["tokens"] if self.inputs.has("tokens") else [])]
        state = ["state"] if self.inputs.has("state") else []
        if self._kind == "monolithic":
            if self._table.has("decomposed"):
                self._table.wrong("decomposed", "none in a monolithic export")
            noise = ["noise"] if self.inputs.has("noise") else []
            if not seen and not state:
                self._table.wrong("inputs", "an image, tokens or state: something to act on")
            file = self._root / MODEL_FILE
            if not file.is_file():
                raise ConfigError(f"{file}: not found, expected the model of a monolithic export")
            return {"model": self._graph(file, [*seen, *state, *noise], ["actions"])}
        parts = _Object(self._table.file, self._table.get("decomposed"), "decomposed")
        fields = parts.read(_Decomposed)
        names = parts.different("past_kv_tensor_names", _Names)
        made, read = self._kv(self.outputs, names), self._kv(self.inputs, names)
        self.past_kv = dict(zip(made, read, strict=True))
        to_expert = fields.expert_takes_state
        if to_expert and not state:
            self.inputs.wrong("state", "a tensor name, because `expert_takes_state` is true")
        prefix, expert = (parts.file_in(self._root, key) for key in ("vlm_prefix_onnx", "expert_denoise_onnx"))
        sees = [*seen, *([] if to_expert else state)]
        if not sees:
            self._table.wrong("inputs", "an image, tokens or state for the prefix to see")
        return {
            "prefix": self._graph(prefix, sees, [], made=made),
            "expert": self._graph(expert, ["noise", "time", *(state if to_expert else [])], ["actions"], read=read),
        }

    def _kv(self, table: _Object, names: tuple[str, ...]) -> tuple[str, ...]:
        """Tensor names of the keys and values on one side: `past_kv_tensor_names` unless the role says otherwise."""
        if not table.has("past_kv"):
            return names
        if isinstance(table.get("past_kv"), str) and len(names) == 1:
            return (table.convert("past_kv", _Text),)
        return table.different("past_kv", _names(len(names)))

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
                self.inputs.wrong(role.partition("/")[0], "a tensor that no other role has", spec.name)
            names.add(spec.name)
        given = {role: self._spec(self.outputs, role) for role in outputs}
        given |= {f"past_kv/{i}": TensorSpec(name) for i, name in enumerate(made)}
        return Graph(file, taken, given)

    def _spec(self, table: _Object, role: str) -> TensorSpec:
        kind, dims = self._specs[role]
        return TensorSpec(table.convert(role, _Text), kind, dims)


def _embodiment(root: Path, config: _Object, dims: Mapping[str, int]) -> tuple[Embodiment, dict[str, Norm | None]]:
    """The file that `embodiment` names, else embodiment.json where there is one, else an unknown robot."""
    file = config.file_in(root, "embodiment") if config.has("embodiment") else root / EMBODIMENT_FILE
    if not config.has("embodiment") and not file.is_file():
        return Embodiment(), dict.fromkeys(dims)
    table, action_dim = _Object(file, _read_json(file)), dims["action_norm"]
    values = msgspec.structs.asdict(table.read(_embodiment_keys(dims["state_norm"], action_dim)))
    if table.has("action_ranges"):
        if not all(low < high for low, high in values["action_ranges"]):
            table.wrong("action_ranges", f"a list of {action_dim} {_RANGES}")
        values["action_ranges"] = _frozen(values["action_ranges"])
    if table.has("action_names"):
        values["action_names"] = table.different("action_names", _names(action_dim))
    if table.has("cameras"):
        values["cameras"] = table.sizes("cameras", values["cameras"])
    norms = {key: table.norm(key, dim) for key, dim in dims.items()}
    return Embodiment(**{key: values[key] for key in Embodiment.__slots__}), norms


def _frozen(value: Any) -> NDArray[np.float32]:
    array = np.array(value, np.float32)
    array.setflags(write=False)
    return array
