"""The robot that an export was made for, and how its states and actions are normalised and transformed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from reflex_runtime.robots.export.config_file import (
    LARGEST,
    ExportObject,
    ImageSizes,
    Number,
    Text,
    list_of,
    names_of,
    read_json,
    whole,
)
from reflex_runtime.robots.policy.robot import Embodiment
from reflex_runtime.robots.policy.units import AddState, AlohaGripper, Binarised, Norm, Scaled, Transform, frozen

PAIRS: Final = (("mean", "std"), ("min", "max"), ("q01", "q99"), ("q10", "q90"))
"""The kinds of normalisation, by their keys: around a mean, or a range that becomes [-1, 1]."""
EPSILON: Final = Annotated[float, Meta(ge=0.0, le=1.0, description="a number in [0, 1]")]
_LIST: Final = Annotated[list[Any], Meta(max_length=16, description="a list of at most 16 objects")]
_FLAGS: Final = Annotated[tuple[bool, ...], Meta(min_length=1, description="a list of true and false")]


def read_norm(config: ExportObject, key: str, dim: int) -> Norm | None:
    """The normalisation under a key of `dim` elements; None without the key."""
    if not config.has(key):
        return None
    table = ExportObject(config.file, config.get(key), config.name(key))
    table.only([*(name for pair in PAIRS for name in pair), "epsilon"])
    found = [pair for pair in PAIRS if table.has(pair[0]) or table.has(pair[1])]
    if len(found) > 1:
        config.wrong(key, "one pair of " + ", ".join(" and ".join(pair) for pair in PAIRS))
    low, high = found[0] if found else PAIRS[0]
    vector = list_of(Number, dim, "finite numbers")
    first, second = (np.array(table.convert(name, vector), np.float64) for name in (low, high))
    epsilon = table.convert("epsilon", EPSILON) if table.has("epsilon") else 0.0
    around_mean = (low, high) == PAIRS[0]
    norm = Norm(frozen(first), frozen(second + epsilon)) if around_mean else Norm.of_range(first, second, epsilon)
    if not (norm.scale > 0.0).all():
        at_least = "numbers > 0" if around_mean else f"numbers above {low}, or an epsilon"
        table.wrong(high, at_least, second.tolist())
    return norm


def read_state_transforms(config: ExportObject, dim: int) -> tuple[Transform, ...]:
    """The key `state_transforms`; empty without it."""
    return tuple(
        _scaled(table, dim) or AlohaGripper(_places(table, "aloha_gripper", dim))
        for table in _steps(config, "state_transforms", ("aloha_gripper",))
    )


def read_action_transforms(config: ExportObject, dim: int, state_dim: int) -> tuple[Transform, ...]:
    """The key `action_transforms`; empty without it."""
    found: list[Transform] = []
    for table in _steps(config, "action_transforms", ("add_state", "binarise")):
        scaled = _scaled(table, dim)
        if scaled is not None:
            found.append(scaled)
        elif table.has("add_state"):
            mask: tuple[bool, ...] = table.convert("add_state", _FLAGS)
            if len(mask) > min(dim, state_dim):
                table.wrong("add_state", f"at most {min(dim, state_dim)} of them, as the action and the state have")
            found.append(AddState(frozen(mask)))
        else:
            inner = ExportObject(table.file, table.get("binarise"), table.name("binarise"))
            keys = inner.read(_Binarise)
            found.append(Binarised(_places(inner, "dims", dim), keys.threshold, keys.below, keys.above))
    return tuple(found)


class _Binarise(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    dims: Any
    threshold: Annotated[Number, Meta(description="a number")]
    below: Annotated[Number, Meta(description="a number")]
    above: Annotated[Number, Meta(description="a number")]


def _steps(config: ExportObject, key: str, kinds: Sequence[str]) -> list[ExportObject]:
    """The objects of a list of transforms, each with the keys of one kind."""
    if not config.has(key):
        return []
    tables = []
    for i, values in enumerate(config.convert(key, _LIST)):
        table = ExportObject(config.file, values, config.name(f"{key}[{i}]"))
        table.only(["scale", "offset", *kinds])
        scaled = table.has("scale") or table.has("offset")
        if scaled + sum(map(table.has, kinds)) != 1:
            config.wrong(f"{key}[{i}]", "one of scale and offset, " + ", ".join(kinds), values)
        tables.append(table)
    return tables


def _scaled(table: ExportObject, dim: int) -> Scaled | None:
    """The transform of `scale` and `offset`; None where the object has neither."""
    if not table.has("scale") and not table.has("offset"):
        return None
    vector = list_of(Number, dim, "finite numbers")
    scale = table.convert("scale", vector) if table.has("scale") else [1.0] * dim
    offset = table.convert("offset", vector) if table.has("offset") else [0.0] * dim
    return Scaled(frozen(scale), frozen(offset))


def _places(table: ExportObject, key: str, dim: int) -> tuple[int, ...]:
    place = Annotated[int, Meta(ge=0, lt=dim)]
    many = Meta(min_length=1, max_length=dim, description=f"a list of integers in [0, {dim - 1}]")
    places: tuple[int, ...] = table.convert(key, Annotated[tuple[place, ...], many])
    return places


# -- the robot ---------------------------------------------------------------------------------------------------------


EMBODIMENT_FILE: Final = "embodiment.json"
_RANGES: Final = "pairs [low, high] of finite numbers with low < high"


def read_embodiment(
    root: Path, config: ExportObject, dims: Mapping[str, int]
) -> tuple[Embodiment, dict[str, Norm | None]]:
    """The file that `embodiment` names, else embodiment.json where there is one, else an unknown robot."""
    file = config.file_in(root, "embodiment") if config.has("embodiment") else root / EMBODIMENT_FILE
    if not config.has("embodiment") and not file.is_file():
        return Embodiment(), dict.fromkeys(dims)
    table, action_dim = ExportObject(file, read_json(file)), dims["action_norm"]
    values = msgspec.structs.asdict(table.read(_embodiment_keys(dims["state_norm"], action_dim)))
    if table.has("action_ranges"):
        if not all(low < high for low, high in values["action_ranges"]):
            table.wrong("action_ranges", f"a list of {action_dim} {_RANGES}")
        values["action_ranges"] = frozen(values["action_ranges"])
    if table.has("action_names"):
        values["action_names"] = table.different("action_names", names_of(action_dim))
    if table.has("cameras"):
        values["cameras"] = table.sizes("cameras", values["cameras"])
    norms = {key: read_norm(table, key, dim) for key, dim in dims.items()}
    return Embodiment(**{key: values[key] for key in Embodiment.__slots__}), norms


def _embodiment_keys(state_dim: int, action_dim: int) -> Any:
    """The struct of the embodiment's file."""
    space = Meta(description="'absolute' or 'relative'")
    optional: dict[str, Any] = {
        "action_space": Annotated[Literal["absolute", "relative"], space],
        "action_ranges": list_of(tuple[Number, Number], action_dim, _RANGES),
        "action_names": Any,
        "action_units": list_of(str, action_dim, "texts"),  # for people; they may repeat (two joints in radians)
        "state_names": list_of(str, state_dim, "texts"),
        "gripper_index": Annotated[int, whole(0, action_dim - 1)],
        "cameras": ImageSizes,
        "control_rate_hz": Annotated[float, Meta(gt=0, le=LARGEST, description="a number > 0")],
        **dict.fromkeys(("state_norm", "action_norm", "metadata"), Any),
    }
    keys: list[Any] = [("name", Text), *((name, kind | None, None) for name, kind in optional.items())]
    return msgspec.defstruct("_EmbodimentFile", keys, forbid_unknown_fields=True)
