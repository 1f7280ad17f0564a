"""The block `wires` of an export: where the observations of other protocols have what the policy needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from reflex_runtime.robots.policy.robot import WireMap
from reflex_runtime.settings.json_files import JsonObject

GROOT: Final = "gr00t"
BLOCKS: Final = ("openpi", "json-numpy", "vla-eval", "lerobot", GROOT)
"""The wires that an export may describe."""

_Name = Annotated[str, Meta(min_length=1)]
_OneName = Annotated[str, Meta(min_length=1, description="a name in the observation")]
_Names = Annotated[tuple[_Name, ...], Meta(min_length=1, description="a list of names in the observation")]
_Group = tuple[_Name, Annotated[int, Meta(ge=1)]]
_Groups = Annotated[tuple[_Group, ...], Meta(min_length=1, description="a list of [group, how many numbers it has]")]
_Images = Annotated[dict[str, _Name], Meta(description="an object {camera: name in the observation}")]


# Of each preset: the names of cameras that a policy may have for each picture of the observation; the rest as above.
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


class _WireKeys(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    images: _Images | None = None
    state: _Names | None = None
    prompt: _OneName | None = None
    metadata: Annotated[dict[str, Any], Meta(description="an object")] | None = None
    dialect: Annotated[Literal["openpi", "roboarena"], Meta(description="'openpi' or 'roboarena'")] | None = None
    execute: Annotated[int, Meta(ge=1, description="a whole number >= 1")] | None = None


class _GroupKeys(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    images: _Images | None = None
    state: _Groups | None = None
    actions: _Groups | None = None
    prompt: _OneName | None = None


def read_wires(
    config: JsonObject,
    cameras: Collection[str],
    state_dim: int,
    action_dim: int,
    optional: AbstractSet[str] = frozenset(),
) -> dict[str, WireMap]:
    """What the export says of each wire. config: the whole configuration. cameras: the policy's. state_dim: 0 where it
    takes no state. optional: cameras that may be missing, and which a preset therefore need not know."""
    if not config.has("wires"):
        return {}
    said = config.get("wires")
    if isinstance(said, str):
        return {said.partition("/")[0]: _preset(config, "wires", said, cameras, state_dim > 0, optional)}
    table = JsonObject(config.file, said, "wires")
    table.only(BLOCKS)
    found: dict[str, WireMap] = {}
    for wire in BLOCKS:
        if table.has(wire) and wire == GROOT:
            found[wire] = _grouped(table, cameras, state_dim, action_dim)
        elif table.has(wire):
            found[wire] = _read(table, wire, cameras, state_dim > 0, optional)
    return found


def _read(
    table: JsonObject, wire: str, cameras: Collection[str], takes_state: bool, optional: AbstractSet[str]
) -> WireMap:
    said = table.get(wire)
    if isinstance(said, str):
        return _preset(table, wire, said, cameras, takes_state, optional)
    return _described(JsonObject(table.file, said, table.name(wire)), cameras, takes_state)


def _preset(
    table: JsonObject, key: str, name: str, cameras: Collection[str], takes_state: bool, optional: AbstractSet[str]
) -> WireMap:
    if name not in PRESETS:
        table.wrong(key, "an object, or one of " + ", ".join(PRESETS))
    pictures, state = PRESETS[name]
    images = {camera: picture for picture, names in pictures.items() for camera in names if camera in cameras}
    for camera in cameras:
        if camera not in images and camera not in optional:
            known = ", ".join(camera for names in pictures.values() for camera in names)
            table.wrong(key, f"an object, because the preset does not know the camera {camera!r} (it knows {known})")
    return WireMap(images, state if takes_state else (), "prompt")


def _described(table: JsonObject, cameras: Collection[str], takes_state: bool) -> WireMap:
    keys = table.read(_WireKeys)
    _check(table, keys, cameras, takes_state)
    if keys.dialect == "roboarena" and sorted(keys.metadata or ()) != sorted(ROBOARENA):
        table.wrong("metadata", "exactly the keys " + ", ".join(ROBOARENA) + ", because the dialect is roboarena")
    return WireMap(**{name: value for name, value in msgspec.structs.asdict(keys).items() if value is not None})


def _grouped(of: JsonObject, cameras: Collection[str], state_dim: int, action_dim: int) -> WireMap:
    """Of GR00T, whose states and actions come in groups."""
    table = JsonObject(of.file, of.get(GROOT), of.name(GROOT))
    keys = table.read(_GroupKeys)
    _check(table, keys, cameras, state_dim > 0)
    state, actions = keys.state or (), keys.actions or ()
    for key, groups, dim in (("state", state, state_dim), ("actions", actions, action_dim)):
        if groups and sum(size for _, size in groups) != dim:
            table.wrong(key, f"groups that have {dim} numbers together")
        if len(dict(groups)) < len(groups):
            table.wrong(key, "groups with different names")
    return WireMap(
        images={camera: f"video.{name}" for camera, name in (keys.images or {}).items()},
        state=tuple(f"state.{name}" for name, _ in state),
        state_sizes=tuple(size for _, size in state),
        actions=actions,
        prompt=keys.prompt or "",
    )


def _check(table: JsonObject, keys: _WireKeys | _GroupKeys, cameras: Collection[str], takes_state: bool) -> None:
    for camera in keys.images or ():
        if camera not in cameras:
            known = ", ".join(cameras) or "it has none"
            table.wrong(f"images.{camera}", f"one of the policy's images: {known}", camera)
    if keys.state and not takes_state:
        table.wrong("state", "none, because `inputs` has no role state")
