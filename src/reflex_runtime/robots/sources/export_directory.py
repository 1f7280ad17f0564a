"""An export directory as a frozen value: `reflex_config.json`, the embodiment, the model files and their hashes.

A wrong name is found here or when the graphs are opened, never in front of a robot. Every error is a ConfigError that
names the file and the key, what was found and what is expected. docs/exports.md explains each key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.base import PolicySource, StagedModel, WholeModel, stacked
from reflex_runtime.robots.policy.episodes import PrefixTensors
from reflex_runtime.robots.policy.observation import Observation
from reflex_runtime.robots.policy.spec import FLOAT_LEVELS, DeviceOptions, PolicySpec, Size
from reflex_runtime.robots.policy.tokenizer import InstructionTokenizer, WordTokenizer, read_tokenizer
from reflex_runtime.robots.policy.units import AddState, Floats
from reflex_runtime.robots.sources.export_files import (
    CONFIG_FILE,
    CONFIG_KEYS,
    ExportConfig,
    Names,
    Text,
    check_files,
    configured,
    file_in,
    model_bytes,
    model_hash,
    names_of,
    read_embodiment,
    read_export_json,
    read_norm,
    read_prompt,
    read_sizes,
    read_transforms,
    read_wires,
    whole,
)
from reflex_runtime.run import model_files
from reflex_runtime.run.model_files import JsonObject
from reflex_runtime.run.onnx_session import CPU, OnnxSession, TensorSpec, fits

# -- the graphs, run by ONNX Runtime -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Graph:
    """A model file and the tensors that it must have, by role ("past_kv/0" … for keys and values)."""

    file: Path
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


class OnnxWhole(WholeModel):
    """Runs `model.onnx`. ConfigError if the graph does not match the export."""

    def __init__(self, spec: PolicySpec, graph: Graph, device: DeviceOptions) -> None:
        super().__init__(spec)
        self._graph, self._session = graph, _opened(graph, device)
        self.provider, self.captured_sizes = device.provider, tuple(device.captured_sizes)
        self.any_thread = device.provider == CPU
        self.batched, self.half = self._session.dynamic_batch, self._session.half

    def chunk(self, rows: Sequence[Observation], noise: Floats | None) -> Floats:
        given = {
            spec.name: noise if role == "noise" else stacked([row.row(role) for row in rows])
            for role, spec in self._graph.inputs.items()
        }
        actions: Floats = self._session.run(given, self.notes)[self._graph.outputs["actions"].name]
        return actions


class OnnxStaged(StagedModel):
    """Runs `vlm_prefix.onnx` and `expert_denoise.onnx`. ConfigError if they do not match the export or each other."""

    def __init__(self, spec: PolicySpec, prefix: Graph, expert: Graph, device: DeviceOptions) -> None:
        super().__init__(spec)
        # The expert's input for each of the prefix's keys-and-values outputs.
        self._past_kv = {made.name: expert.inputs[role].name for role, made in prefix.outputs.items()}
        self._prefix_inputs = {role: spec.name for role, spec in prefix.inputs.items()}
        self._inputs = {role: spec.name for role, spec in expert.inputs.items()}
        self._output = expert.outputs["actions"].name
        self._prefix, self._expert = _opened(prefix, device), _opened(expert, device)
        self.provider, self.captured_sizes = device.provider, tuple(device.captured_sizes)
        self.any_thread = device.provider == CPU
        self.batched = self._prefix.dynamic_batch and self._expert.dynamic_batch
        self.half = self._prefix.half or self._expert.half
        for made, read in self._past_kv.items():
            left, right = self._prefix.outputs[made], self._expert.inputs[read]
            if not fits(left.dims, right.dims) or left.dtype != right.dtype:
                raise ConfigError(
                    f"{expert.file}: input {read!r}: {right.dtype} {right.dims}, but {prefix.file.name} makes "
                    f"{left.dtype} {left.dims} (decomposed.past_kv_tensor_names)"
                )

    def prefix(self, rows: Sequence[Observation]) -> Sequence[PrefixTensors]:
        given = {name: np.stack([row.row(role) for row in rows]) for role, name in self._prefix_inputs.items()}
        made = self._prefix.run(given, self.notes)
        # Copied out of the batch: a view would keep the keys and values of all its rows in memory.
        pairs = self._past_kv.items()
        return [PrefixTensors({read: made[name][i].copy() for name, read in pairs}) for i in range(len(rows))]

    def pack(self, prefixes: Sequence[PrefixTensors], rows: Sequence[Observation]) -> dict[str, Any]:
        packed = {name: np.stack([prefix.tensors[name] for prefix in prefixes]) for name in self._past_kv.values()}
        if "state" in self._inputs:
            packed[self._inputs["state"]] = np.stack([row.row("state") for row in rows])
        return {name: self._expert.place(array, name) for name, array in packed.items()}

    def step(self, packed: dict[str, Any], x: Floats, k: NDArray[np.int64], n: int) -> Floats:
        time = (k / n).astype(np.float32)
        given = {**packed, self._inputs["noise"]: x, self._inputs["time"]: time}
        moved: Floats = self._expert.run(given, self.notes)[self._output]
        return moved


def _opened(graph: Graph, device: DeviceOptions) -> OnnxSession:
    inputs, outputs = list(graph.inputs.values()), list(graph.outputs.values())
    return OnnxSession(graph.file, inputs, outputs, device.provider, device.threads, device.captured_sizes)


_BUNDLED: Final = "; bundled: reflex serve demo is a robot policy, reflex serve scribe a language model"

_MaxTokens = Annotated[int, whole(1, 100_000)]
_Vocabulary = Annotated[
    dict[str, Annotated[int, Meta(ge=0)]],
    Meta(min_length=1, description="an object {word: id >= 0}, or the name of a tokenizer.json file"),
]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Export(PolicySource):
    """A checked export directory. Make one with `Export.load`.

    graphs: {"model": …}, or {"prefix": …, "expert": …} when decomposed.
    """

    path: Path
    graphs: Mapping[str, Graph]
    opset: int | None = None

    @property
    def place(self) -> str:
        return f"{self.path / CONFIG_FILE}: "

    @staticmethod
    def load(path: str | Path) -> Export:
        """Read and check the directory. `open` opens the graphs and checks them against it."""
        root = Path(path)
        check_directory(root)
        if (root / CONFIG_FILE).exists():
            check_files(root)
        return _load(root)

    def open(self, device: DeviceOptions) -> OnnxStaged | OnnxWhole:
        if not self.staged:
            return OnnxWhole(self, self.graphs["model"], device)
        return OnnxStaged(self, self.graphs["prefix"], self.graphs["expert"], device)


def check_directory(
    path: Path, what: str = "an export directory", more: str = _BUNDLED, source: str = ""
) -> None:
    """ConfigError for a path that is no directory of files. what: is expected there. more: ends the error of a missing
    path, if there is no hint. source: what stands before the path in its source, such as `lerobot:`."""
    if path.is_file() and path.suffix == ".py":
        module = ".".join(path.with_suffix("").parts) if not path.is_absolute() else path.stem
        raise ConfigError(f"{path}: is a Python file; serve a function of it: reflex serve python:{module}:FUNCTION")
    if path.is_file():
        raise ConfigError(f"{path}: is a file; name its directory, {path.parent}")
    if not path.is_dir():
        raise ConfigError(f"{path}: not found, expected {what}{_hint(path, source) or more}")
    if configured(path):
        model_files.check_files(path)


def _hint(path: Path, source: str) -> str:
    """What to do if a missing path may be MODULE:FUNCTION, or the name of a model on a hub; else ""."""
    name, colon, function = path.as_posix().partition(":")
    module = name.removesuffix(".py").replace("/", ".")
    if colon and Path(module.replace(".", "/") + ".py").is_file():
        return f"; for a function of yours: reflex serve python:{module}:{function}"
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path.as_posix()) or path.parent.exists():
        return ""
    return (
        f"{'' if source else ' or the directory of a language model'}. If {path} is the name of a model on a hub, "
        f"download it first (pip install huggingface_hub; hf download {path} --local-dir {path.name}), then: reflex "
        f"serve {source}./{path.name}"
    )


_AS_WRITTEN: Final = (
    "model_id", "model_type", "state_dim", "action_dim", "chunk_size", "num_denoising_steps", "opset",
    "observation_steps", "resize",
)  # fmt: skip


def _load(root: Path) -> Export:
    table = JsonObject(root / CONFIG_FILE, read_export_json(root / CONFIG_FILE))
    table.only(CONFIG_KEYS)
    config = table.read(ExportConfig)
    images = _images(table, config)
    graphs = _graphs(root, table, config, images)
    takes_text = table.part("inputs").has("tokens")
    tokenizer, max_tokens = _text(root, table, takes_text)
    prompt = read_prompt(table, takes_text)
    takes_state = table.part("inputs").has("state") or (prompt is not None and prompt.reads_state)
    if takes_state and not config.state_dim:
        table.wrong("state_dim", "at least 1, because `inputs` has the role state, or `prompt` reads it")
    dims = {"state_norm": config.state_dim, "action_norm": config.action_dim}
    embodiment, norms = read_embodiment(root, table, dims)
    for key, dim in dims.items():
        if table.has(key) and norms[key] is not None:
            table.wrong(key, "it in one file only: the embodiment has one, too")
        norms[key] = norms[key] or read_norm(table, key, dim)
    action_transforms = read_transforms(table, "action_transforms", config.action_dim, config.state_dim)
    takes_state = takes_state or any(isinstance(transform, AddState) for transform in action_transforms)
    optional = frozenset(config.optional_images)
    return Export(
        source=str(root),
        path=root,
        config=table.values,
        **{name: getattr(config, name) for name in _AS_WRITTEN},
        staged=config.export_kind == "decomposed",
        images=images,
        takes_state=takes_state,
        takes_text=takes_text,
        takes_noise=any("noise" in graph.inputs for graph in graphs.values()),
        x_dim=config.x_dim or 0,
        horizon=config.horizon or 0,
        optional_images=optional,
        prompt=prompt,
        state_transforms=read_transforms(table, "state_transforms", config.state_dim),
        action_transforms=action_transforms,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        embodiment=embodiment,
        graphs=graphs,
        prefix_takes_state="prefix" in graphs and "state" in graphs["prefix"].inputs,
        model_hash=model_hash(root),
        config_hash=hashlib.sha256(table.file.read_bytes()).hexdigest()[:16],
        model_bytes=model_bytes(root),
        wires=read_wires(table, images, config.state_dim if takes_state else 0, config.action_dim, optional),
        state_norm=norms["state_norm"],
        action_norm=norms["action_norm"],
    )


def _images(table: JsonObject, config: ExportConfig) -> dict[str, Size]:
    """`images`, or the single image of `image_size`; both must agree where both are given."""
    size = config.image_size
    if config.images is None:
        return {} if size is None else {"image": size}
    images = read_sizes(table, "images", config.images)
    for name in images:
        if name in ROLES:
            table.wrong(f"images.{name}", "a name other than " + ", ".join(ROLES), name)
    if size is not None and size not in images.values():
        table.wrong("image_size", "the size of one of `images`")
    return images


def _text(root: Path, table: JsonObject, takes_text: bool) -> tuple[InstructionTokenizer | None, int]:
    if not takes_text:
        if table.has("tokenizer"):
            table.wrong("tokenizer", "none, because `inputs` has no role tokens", "one")
        return None, 0
    max_tokens: int = table.convert("max_tokens", _MaxTokens)
    if isinstance(table.get("tokenizer"), str):
        return read_tokenizer(file_in(root, table, "tokenizer")), max_tokens
    words = table.convert("tokenizer", _Vocabulary)
    for word, id in words.items():  # special tokens such as [PAD] are no words, nor is the id 0 that of a word
        if id and (len(word.split()) != 1 or (word.isalnum() and word.lower() not in words)):
            table.wrong("tokenizer", "words in lower case without white space, as instructions are split", word)
    return WordTokenizer(words), max_tokens


# -- roles of tensors --------------------------------------------------------------------------------------------------


MODEL_FILE: Final = "model.onnx"
TOKEN_MASK, MASKS = "token_mask", "image_masks"
ROLES: Final = ("tokens", TOKEN_MASK, MASKS, "state", "noise", "time", "past_kv", "actions")
"""Of tensors. The names of the images are roles, too."""
_Flag = Annotated[bool, Meta(description="true or false")]


def _graphs(root: Path, table: JsonObject, config: ExportConfig, images: Mapping[str, Size]) -> dict[str, Graph]:
    """The graphs by `inputs`, `outputs` and `decomposed`, with the role of each of their tensors."""
    split, tensors = config.export_kind == "decomposed", _tensors(config, images, table.get("max_tokens"))
    inputs, outputs = table.part("inputs"), table.part("outputs")
    inputs.only([*images, "tokens", "state", "noise", *(["time", "past_kv"] if split else []), TOKEN_MASK, MASKS])
    outputs.only(["actions", "past_kv"] if split else ["actions"])
    if inputs.has(TOKEN_MASK) and not inputs.has("tokens"):
        inputs.wrong(TOKEN_MASK, "none without the role tokens")

    def scene(*roles: str) -> dict[str, TensorSpec]:
        """The images, and those of these roles and of the masks that the export has."""
        seen = [*images, *filter(inputs.has, roles)]
        if not seen:
            table.wrong("inputs", "an image, tokens or state: something to act on")
        return _named(inputs, [*seen, *filter(inputs.has, (TOKEN_MASK, MASKS))], tensors)

    if not split:
        if table.has("decomposed"):
            table.wrong("decomposed", "none in a monolithic export")
        file = root / MODEL_FILE
        if not file.is_file():
            raise ConfigError(f"{file}: not found, expected the model of a monolithic export")
        noise = _named(inputs, filter(inputs.has, ["noise"]), tensors)
        graphs = {"model": Graph(file, scene("tokens", "state") | noise, _named(outputs, ["actions"], tensors))}
    else:
        parts = table.part("decomposed")
        parts.only(("vlm_prefix_onnx", "expert_denoise_onnx", "past_kv_tensor_names", "expert_takes_state"))
        to_expert: bool = parts.convert("expert_takes_state", _Flag)
        if to_expert and not inputs.has("state"):
            inputs.wrong("state", "a tensor name, because `expert_takes_state` is true")
        names = parts.different("past_kv_tensor_names", Names)
        made, read = _past_kv(outputs, names), _past_kv(inputs, names)
        prefix, expert = (file_in(root, parts, key) for key in ("vlm_prefix_onnx", "expert_denoise_onnx"))
        steps = _named(inputs, ["noise", "time", *(["state"] if to_expert else [])], tensors)
        graphs = {
            "prefix": Graph(prefix, scene("tokens") if to_expert else scene("tokens", "state"), made),
            "expert": Graph(expert, steps | read, _named(outputs, ["actions"], tensors)),
        }
    for graph in graphs.values():
        roles: dict[str, str] = {}
        for role, spec in graph.inputs.items():
            if roles.setdefault(spec.name, role) != role:
                inputs.wrong(role.partition("/")[0], "a tensor that no other role has", spec.name)
    return graphs


def _named(table: JsonObject, roles: Iterable[str], tensors: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {role: TensorSpec(table.convert(role, Text), *tensors[role]) for role in roles}


def _past_kv(table: JsonObject, names: tuple[str, ...]) -> dict[str, TensorSpec]:
    """The tensors of keys and values of one graph: `past_kv_tensor_names`, unless the role `past_kv` names others."""
    if isinstance(table.get("past_kv"), str) and len(names) == 1:
        names = (table.convert("past_kv", Text),)
    elif table.has("past_kv"):
        names = table.different("past_kv", names_of(len(names)))
    return {f"past_kv/{i}": TensorSpec(name) for i, name in enumerate(names)}


def _tensors(
    config: ExportConfig, images: Mapping[str, Size], max_tokens: Any
) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """For each role: the kinds of numbers that its tensor may have, and its dims without the batch axis."""
    x_dim, steps = config.x_dim or config.action_dim, config.observation_steps
    history = (steps,) if steps > 1 else ()
    tokens = (max_tokens if type(max_tokens) is int else None,)
    return {
        TOKEN_MASK: ("bif", tokens),
        MASKS: ("bif", (*history, len(images))),
        **{n: ("f" if config.resize == FLOAT_LEVELS else "u", (*history, *size, 3)) for n, size in images.items()},
        "tokens": ("i", tokens),
        "state": ("f", (*history, config.state_dim)),
        "noise": ("f", (config.horizon or config.chunk_size, x_dim)),
        "time": ("f", ()),
        "actions": ("f", (config.chunk_size, x_dim)),
    }
