"""The files of an export: its JSON, read strictly; its model files, whose hashes name their versions; and how a
directory is written completely or not at all. Errors name file and key."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import GenericAlias
from typing import Annotated, Any, Final, Literal, NoReturn, get_args

import msgspec
import numpy as np
from msgspec import Meta

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.base import PolicySource
from reflex_runtime.robots.policy.spec import WIRES, Embodiment, Resize, Size, WireMap
from reflex_runtime.robots.policy.tokenizer import PROMPT, STATE_BINS, Cleaning, PromptTemplate
from reflex_runtime.robots.policy.units import AddState, AlohaGripper, Binarised, Norm, Scaled, Transform, frozen
from reflex_runtime.run import model_files
from reflex_runtime.run.model_files import JsonObject

CONFIG_FILE: Final = "reflex_config.json"
LEROBOT_FILE: Final = "config.json"
OPENPI_FILE: Final = "reflex_openpi.json"
WEIGHTS: Final = "model.safetensors"  # of checkpoints

ExportKind = Literal["monolithic", "decomposed"]


def whole(low: int, high: int = 1_000_000) -> Meta:
    """The bounds of an integer, with their text."""
    return Meta(ge=low, le=high, description=f"an integer in [{low}, {high}]")


def list_of(item: Any, count: int, what: str) -> Any:
    """The type of a list of `count` items; `what` names them."""
    length = Meta(min_length=count, max_length=count, description=f"a list of {count} {what}")
    return Annotated[GenericAlias(tuple, (item, ...)), length]  # mypy takes no variable in a type


def names_of(count: int) -> Any:
    """The type of a list of `count` different texts."""
    return list_of(Name, count, "different texts")


LARGEST: Final = 3.0e38  # nearly the largest number of float32
Text = Annotated[str, Meta(pattern=r"\S", description="a text")]
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Name = Annotated[str, Meta(min_length=1)]
_Pixels = Annotated[int, Meta(ge=1, le=4096)]
ImageSize = Annotated[tuple[_Pixels, _Pixels], Meta(description="[height, width], each an integer in [1, 4096]")]
ImageSizes = Annotated[dict[Name, Any], Meta(description="an object {name: [height, width]}")]
Names = Annotated[tuple[Name, ...], Meta(min_length=1, description="a list of one or more different texts")]
_FileName = Annotated[str, Meta(min_length=1, description="a file name within the export directory")]


class ExportConfig(msgspec.Struct, kw_only=True):
    """The keys of `reflex_config.json` whose checks need no other key."""

    model_id: Text
    model_type: Text
    export_kind: Annotated[ExportKind, Meta(description="'monolithic' or 'decomposed'")]
    state_dim: Annotated[int, whole(0)]
    action_dim: Annotated[int, whole(1)]
    chunk_size: Annotated[int, whole(1)]
    num_denoising_steps: Annotated[int, whole(1, 1000)]
    opset: Annotated[int, whole(1, 1000)] | None = None
    image_size: ImageSize | None = None
    images: ImageSizes | None = None
    optional_images: Names = ()
    observation_steps: Annotated[int, whole(1, 64)] = 1
    x_dim: Annotated[int, whole(1)] | None = None
    horizon: Annotated[int, whole(1)] | None = None
    resize: Annotated[Resize, Meta(description=" or ".join(map(repr, get_args(Resize))))] = "stretch"


CONFIG_KEYS: Final = (
    *ExportConfig.__struct_fields__, "wires", "inputs", "outputs", "decomposed", "tokenizer", "prompt", "max_tokens",
    "state_norm", "action_norm", "state_transforms", "action_transforms", "embodiment", "metadata",
)  # fmt: skip


def read_sizes(table: JsonObject, key: str, values: Mapping[str, Any]) -> dict[str, Size]:
    """Every (height, width) of an object {name: [height, width]}."""
    return {name: table.convert(f"{key}.{name}", ImageSize, size) for name, size in values.items()}


def file_in(root: Path, table: JsonObject, key: str) -> Path:
    """The file of the directory that a key names. Links are followed: model hubs store files as links."""
    name: str = table.convert(key, _FileName)
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name:
        table.wrong(key, "a relative path that stays within the export directory")
    if not (root / pure).is_file():
        table.wrong(key, f"a file that exists in {root}")
    return root / pure


def read_export_json(file: Path) -> Any:
    """The value in a JSON file; ConfigError for a missing file, invalid JSON, a repeated key, NaN or infinity."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{file}: {key}: found twice, expected once")
            found[key] = value
        return found

    def no_constant(name: str) -> NoReturn:
        raise ConfigError(f"{file}: found {name}, expected finite numbers only")

    if not file.exists():
        why = "not found, expected in an export directory (docs/exports.md); a language model has a config.json"
        if str(file.parent) in ("demo", "scribe"):
            why += "; the bundled model of this name is served only if no directory has this name"
        raise ConfigError(f"{file}: {why}")
    return model_files.read_json(file, object_pairs_hook=no_duplicates, parse_constant=no_constant)


# -- the key `prompt` --------------------------------------------------------------------------------------------------

_WORDS: Final = ", ".join(get_args(Cleaning))
_Template = Annotated[str, Meta(max_length=4096, description=f"a text with {PROMPT} once, and perhaps {STATE_BINS}")]


class _PromptKeys(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    template: _Template = PROMPT
    clean: Annotated[tuple[Cleaning, ...], Meta(max_length=8, description=f"a list of {_WORDS}")] = ()


def read_prompt(config: JsonObject, takes_text: bool) -> PromptTemplate | None:
    """The template; None without the key."""
    if not config.has("prompt"):
        return None
    if not takes_text:
        config.wrong("prompt", "none, because `inputs` has no role tokens")
    given = config.get("prompt")
    table = JsonObject(config.file, {"template": given} if isinstance(given, str) else given, "prompt")
    keys = table.read(_PromptKeys)
    places = re.findall(r"{\w*}", keys.template)
    if places.count(PROMPT) != 1 or set(places) - {PROMPT, STATE_BINS}:
        config.wrong("prompt", f"a text with {PROMPT} once, and perhaps {STATE_BINS}", keys.template)
    return PromptTemplate(keys.template, keys.clean)


# -- normalisation and transforms -------------------------------------------------------------------------------------


PAIRS: Final = {
    "MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90"),
}  # fmt: skip
"""The statistics of each kind of normalisation, by LeRobot's names: around a mean, or of a range to [-1, 1]."""
EPSILON: Final = Annotated[float, Meta(ge=0.0, le=1.0, description="a number in [0, 1]")]
_LIST: Final = Annotated[list[Any], Meta(max_length=16, description="a list of at most 16 objects")]
_FLAGS: Final = Annotated[tuple[bool, ...], Meta(min_length=1, description="a list of true and false")]
_NUMBER: Final = Annotated[Number, Meta(description="a number")]
_BINARISE: Final = ("threshold", "below", "above")


def read_norm(config: JsonObject, key: str, dim: int) -> Norm | None:
    """The normalisation under a key of `dim` elements; None without the key."""
    if not config.has(key):
        return None
    table = config.part(key)
    table.only([*(name for pair in PAIRS.values() for name in pair), "epsilon"])
    found = [pair for pair in PAIRS.values() if table.has(pair[0]) or table.has(pair[1])]
    if len(found) > 1:
        config.wrong(key, "one pair of " + ", ".join(" and ".join(pair) for pair in PAIRS.values()))
    low, high = found[0] if found else PAIRS["MEAN_STD"]
    vector = list_of(Number, dim, "finite numbers")
    first, second = (np.array(table.convert(name, vector), np.float64) for name in (low, high))
    epsilon = table.convert("epsilon", EPSILON) if table.has("epsilon") else 0.0
    around_mean = low == "mean"
    norm = Norm(frozen(first), frozen(second + epsilon)) if around_mean else Norm.of_range(first, second, epsilon)
    if not (norm.scale > 0.0).all():
        at_least = "numbers > 0" if around_mean else f"numbers above {low}, or an epsilon"
        table.wrong(high, at_least, second.tolist())
    return norm


_KINDS: Final = {"state_transforms": ("aloha_gripper",), "action_transforms": ("add_state", "binarise")}


def read_transforms(config: JsonObject, key: str, dim: int, state_dim: int = 0) -> tuple[Transform, ...]:
    """The key `state_transforms` or `action_transforms`, for values with `dim` numbers; empty without it."""
    vector, many = list_of(Number, dim, "finite numbers"), f"a list of integers in [0, {dim - 1}]"
    places = Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=dim)], ...], Meta(min_length=1, max_length=dim, description=many)
    ]
    kinds = {"scale": vector, "offset": vector, "aloha_gripper": places, "add_state": _FLAGS, "binarise": Any}
    kinds = {name: kinds[name] for name in ("scale", "offset", *_KINDS[key])}
    found: list[Transform] = []
    for i, values in enumerate(config.convert(key, _LIST) if config.has(key) else ()):
        table = JsonObject(config.file, values, config.name(f"{key}[{i}]"))
        given = table.given(kinds)
        if len({"scale" if name == "offset" else name for name in given}) != 1:
            config.wrong(f"{key}[{i}]", "one of scale and offset, " + ", ".join(_KINDS[key]), values)
        if "aloha_gripper" in given:
            found.append(AlohaGripper(given["aloha_gripper"]))
        elif "add_state" in given:
            if len(given["add_state"]) > min(dim, state_dim):
                table.wrong("add_state", f"at most {min(dim, state_dim)}, one for each number of action and state")
            found.append(AddState(frozen(given["add_state"])))
        elif "binarise" in given:
            inner = table.part("binarise")
            inner.only(("dims", *_BINARISE))
            numbers = (inner.convert(name, _NUMBER) for name in _BINARISE)
            found.append(Binarised(inner.convert("dims", places), *numbers))
        else:
            found.append(Scaled(frozen(given.get("scale", [1.0] * dim)), frozen(given.get("offset", [0.0] * dim))))
    return tuple(found)


# -- the robot ---------------------------------------------------------------------------------------------------------


EMBODIMENT_FILE: Final = "embodiment.json"
_RANGES: Final = "pairs [low, high] of finite numbers with low < high"
_Space = Annotated[Literal["absolute", "relative"], Meta(description="'absolute' or 'relative'")]
_Rate = Annotated[float, Meta(gt=0, le=LARGEST, description="a number > 0")]


def read_embodiment(
    root: Path, config: JsonObject, dims: Mapping[str, int]
) -> tuple[Embodiment, dict[str, Norm | None]]:
    """The robot and its norms, from the file that `embodiment` names, else from embodiment.json; an unknown robot if
    there is neither. dims: of state and action, by the keys of their norms."""
    file = file_in(root, config, "embodiment") if config.has("embodiment") else root / EMBODIMENT_FILE
    if not config.has("embodiment") and not file.is_file():
        return Embodiment(), dict.fromkeys(dims)
    table, action_dim = JsonObject(file, read_export_json(file)), dims["action_norm"]
    kinds = {
        "action_space": _Space,
        "action_ranges": list_of(tuple[Number, Number], action_dim, _RANGES),
        "action_names": names_of(action_dim),
        "action_units": list_of(str, action_dim, "texts"),  # for people; they may repeat (two joints in radians)
        "state_names": list_of(str, dims["state_norm"], "texts"),
        "gripper_index": Annotated[int, whole(0, action_dim - 1)],
        "cameras": ImageSizes,
        "control_rate_hz": _Rate,
    }
    values = table.given(kinds, "name", *dims, "metadata") | {"name": table.convert("name", Text)}
    if "action_ranges" in values:
        if not all(low < high for low, high in values["action_ranges"]):
            table.wrong("action_ranges", f"a list of {action_dim} {_RANGES}")
        values["action_ranges"] = frozen(values["action_ranges"])
    if "action_names" in values:
        table.different("action_names", kinds["action_names"])
    if "cameras" in values:
        values["cameras"] = read_sizes(table, "cameras", values["cameras"])
    return Embodiment(**values), {key: read_norm(table, key, dim) for key, dim in dims.items()}


# -- wires -------------------------------------------------------------------------------------------------------------


GROOT: Final = "gr00t"
BLOCKS: Final = tuple(name for name, wire in WIRES.items() if wire.described)

_OneName = Annotated[str, Meta(min_length=1, description="a name in the observation")]
_Names = Annotated[tuple[Name, ...], Meta(min_length=1, description="a list of names in the observation")]
_Group = tuple[Name, Annotated[int, Meta(ge=1)]]
_Groups = Annotated[tuple[_Group, ...], Meta(min_length=1, description="a list of [group, how many numbers it has]")]
_Images = Annotated[dict[str, Name], Meta(description="an object {camera: name in the observation}")]

# For each preset: by picture of the observation the names that a policy may have for its camera; the state's names.
PRESETS: Final[Mapping[str, tuple[Mapping[str, tuple[str, ...]], tuple[str, ...]]]] = {
    "openpi/libero": (
        {
            "observation/image": ("image", "base_0_rgb"),
            "observation/wrist_image": ("wrist_image", "image_wrist", "left_wrist_0_rgb"),
        },
        ("observation/state",),
    ),
    "openpi/droid": (
        {
            "observation/exterior_image_1_left": ("exterior_image_1_left", "image", "base_0_rgb"),
            "observation/wrist_image_left": ("wrist_image_left", "image_wrist", "left_wrist_0_rgb"),
        },
        ("observation/joint_position", "observation/gripper_position"),
    ),
    "openpi/aloha": (
        {
            "images/cam_high": ("cam_high", "image", "base_0_rgb"),
            "images/cam_low": ("cam_low",),
            "images/cam_left_wrist": ("cam_left_wrist", "left_wrist_0_rgb"),
            "images/cam_right_wrist": ("cam_right_wrist", "right_wrist_0_rgb"),
        },
        ("state",),
    ),
}

ROBOARENA: Final = (
    "image_resolution", "needs_wrist_camera", "n_external_cameras", "needs_stereo_camera", "needs_session_id",
    "action_space",
)  # fmt: skip


_NAMED: Final = {
    "images": _Images,
    "state": _Names,
    "prompt": _OneName,
    "metadata": Annotated[dict[str, Any], Meta(description="an object")],
    "dialect": Annotated[Literal["openpi", "roboarena"], Meta(description="'openpi' or 'roboarena'")],
    "execute": Annotated[int, Meta(ge=1, description="a whole number >= 1")],
}
_GROUPED: Final = {"images": _Images, "state": _Groups, "actions": _Groups, "prompt": _OneName}


def read_wires(
    config: JsonObject,
    cameras: Collection[str],
    state_dim: int,
    action_dim: int,
    optional: AbstractSet[str] = frozenset(),
) -> dict[str, WireMap]:
    """The key `wires`. cameras: the policy's. state_dim: 0 if it takes no state. optional: cameras that requests, and
    so a preset, may lack."""
    if not config.has("wires"):
        return {}
    named = config.get("wires")
    if isinstance(named, str):
        return {named.partition("/")[0]: _preset(config, "wires", named, cameras, state_dim, optional)}
    table = config.part("wires")
    table.only(BLOCKS)
    found: dict[str, WireMap] = {}
    for wire in filter(table.has, BLOCKS):
        block = table.get(wire)
        if isinstance(block, str) and wire != GROOT:
            found[wire] = _preset(table, wire, block, cameras, state_dim, optional)
        else:
            found[wire] = _described(table.part(wire), wire == GROOT, cameras, state_dim, action_dim)
    return found


def _preset(
    table: JsonObject, key: str, name: str, cameras: Collection[str], state_dim: int, optional: AbstractSet[str]
) -> WireMap:
    if name not in PRESETS:
        table.wrong(key, "an object, or one of " + ", ".join(PRESETS))
    pictures, state = PRESETS[name]
    images = {camera: picture for picture, names in pictures.items() for camera in names if camera in cameras}
    for camera in cameras:
        if camera not in images and camera not in optional:
            has = ", ".join(camera for names in pictures.values() for camera in names)
            table.wrong(key, f"an object, because the preset has no camera {camera!r} (it has {has})")
    return WireMap(images, state if state_dim else (), "prompt")


def _described(
    table: JsonObject, grouped: bool, cameras: Collection[str], state_dim: int, action_dim: int
) -> WireMap:
    """A described wire. grouped: states and actions are groups of numbers, as in GR00T."""
    keys = table.given(_GROUPED if grouped else _NAMED)
    for camera in keys.get("images", ()):
        if camera not in cameras:
            has = ", ".join(cameras) or "it has none"
            table.wrong(f"images.{camera}", f"one of the policy's images: {has}", camera)
    if "state" in keys and not state_dim:
        table.wrong("state", "none, because `inputs` has no role state")
    if keys.get("dialect") == "roboarena" and sorted(keys.get("metadata", ())) != sorted(ROBOARENA):
        table.wrong("metadata", "exactly the keys " + ", ".join(ROBOARENA) + ", because the dialect is roboarena")
    if not grouped:
        return WireMap(**keys)
    groups = {"state": (), "actions": (), **keys}
    for key, dim in (("state", state_dim), ("actions", action_dim)):
        if groups[key] and sum(size for _, size in groups[key]) != dim:
            table.wrong(key, f"groups that have {dim} numbers together")
        if len(dict(groups[key])) < len(groups[key]):
            table.wrong(key, "groups with different names")
    return WireMap(
        images={camera: f"video.{name}" for camera, name in keys.get("images", {}).items()},
        state=tuple(f"state.{name}" for name, _ in groups["state"]),
        state_sizes=tuple(size for _, size in groups["state"]),
        actions=groups["actions"],
        prompt=keys.get("prompt", ""),
    )


# -- checkpoints -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicyCheckpoint(PolicySource):
    """A checked directory of LeRobot or openpi, for the code that runs it.

    cameras: LeRobot's feature name of each image. states: the features that make the state, in order, with their sizes.
    seeded: the model draws from torch's global generator. variants: openpi's names of its two transformers.
    """

    path: Path
    cameras: Mapping[str, str] = field(default_factory=dict)
    states: tuple[tuple[str, int], ...] = ()
    seeded: bool = False
    variants: tuple[str, str] = ("", "")


# -- model files -------------------------------------------------------------------------------------------------------


SUFFIXES: Final = (".onnx", ".onnx.data", ".bin", ".safetensors")


def check_files(root: Path) -> list[Path]:
    """The files of an export; ConfigError for a file that cannot be read, or is a pointer of Git LFS."""
    files = _files(root, (*SUFFIXES, ".json"))
    for file in files:
        try:
            with file.open("rb") as stream:
                head = stream.read(len(model_files.LFS))
        except OSError as error:
            raise ConfigError(f"{file}: {'a link to nothing' if file.is_symlink() else error.strerror}") from None
        model_files.check_fetched(file, head)
    return files


def model_hash(root: Path) -> str:
    """The `files_hash` of the model files, sorted by their path within the directory."""
    return files_hash(root, (file.relative_to(root).as_posix() for file in _files(root)))


def files_hash(root: Path, names: Iterable[str]) -> str:
    """First 16 hex digits of SHA-256 over those files of a directory that exist.

    Of each file: its path in UTF-8 with forward slashes, a zero byte, its size in 8 bytes (big-endian), its contents.
    """
    sha = hashlib.sha256()
    for name in names:
        file = root / name
        if not file.is_file():
            continue
        sha.update(name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "big"))
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()[:16]


def configured(root: Path) -> bool:
    """Whether a directory has a policy's configuration. Others are refused, and not searched: they may be large."""
    return any((root / name).exists() for name in (CONFIG_FILE, LEROBOT_FILE, OPENPI_FILE))


def model_bytes(root: Path) -> int:
    """Total size of the files that `model_hash` covers, without reading them."""
    return sum(file.stat().st_size for file in _files(root) if file.is_file())


def _files(root: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The files of a directory with these suffixes, also broken links, sorted by their path within it."""
    found = [file for file in root.rglob("*") if file.name.endswith(suffixes) and not file.is_dir()]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


# -- writing a directory -----------------------------------------------------------------------------------------------


def check_new(out: Path, force: bool) -> None:
    """ConfigError if `new_directory` must not write to `out`."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out}: is a file; name a directory")
    if not any(out.iterdir()):
        return
    if not force:
        raise ConfigError(f"{out}: is not empty; name another directory, or use --force to replace this export")
    if not (out / CONFIG_FILE).is_file():
        raise ConfigError(f"{out}: --force replaces exports, and this is none (no {CONFIG_FILE}); name another one")


@contextmanager
def new_directory(out: Path, force: bool = False) -> Iterator[Path]:
    """An empty directory beside `out` to write into. At the end of the block it becomes `out`; after an error it is
    removed, and `out` is unchanged. force: replace an export at `out`."""
    check_new(out, force)
    target = out.resolve()
    making, old = (target.with_name(f".{target.name}.{what}{os.getpid()}") for what in ("", "old."))
    making.mkdir(parents=True)
    try:
        yield making
        if target.exists():
            target.rename(old)
        making.rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        for left in (making, old):
            shutil.rmtree(left, ignore_errors=True)
