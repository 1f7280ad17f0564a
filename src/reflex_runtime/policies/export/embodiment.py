"""The robot that an export was made for, and how its states and actions are normalised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from reflex_runtime.policies.export.config_file import (
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
from reflex_runtime.policies.export.norms import read_norm
from reflex_runtime.policies.policy.robot import Embodiment
from reflex_runtime.policies.policy.units import Norm, frozen

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
