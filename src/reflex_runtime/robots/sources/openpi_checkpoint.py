"""A PyTorch checkpoint of openpi as a policy source, read without PyTorch.

openpi defines a policy's observations and actions in its own code, by the name of a training configuration. The file
`reflex_openpi.json` in the checkpoint has this name.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.base import StagedModel
from reflex_runtime.robots.policy.spec import OPENPI, DeviceOptions, Embodiment
from reflex_runtime.robots.policy.tokenizer import InstructionTokenizer, PromptTemplate, read_sentencepiece
from reflex_runtime.robots.policy.units import AddState, AlohaGripper, Norm, Scaled, Transform, frozen
from reflex_runtime.robots.sources.export_directory import check_directory
from reflex_runtime.robots.sources.export_files import (
    LEROBOT_FILE,
    OPENPI_FILE,
    WEIGHTS,
    PolicyCheckpoint,
    files_hash,
    model_bytes,
    model_hash,
    read_export_json,
    read_norm,
    read_wires,
    whole,
)
from reflex_runtime.robots.sources.lerobot_checkpoint import (
    check_device,
    check_lerobot,
    check_weights,
    read_robot,
)
from reflex_runtime.run.model_files import JsonObject

SIZE: Final = (224, 224)
IMAGES: Final = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
STEPS: Final = 10  # of denoising, openpi's default
EPSILON: Final = 1e-6  # of its norms
TOKENIZER: Final = "paligemma_tokenizer.model"

_PLAIN, _WITH_STATE = "{prompt}\n", "Task: {prompt}, State: {state_bins};\nAction: "
_FLIPPED: Final = (1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1)  # signs of ALOHA's joints in the model
_GRIPPERS: Final = (6, 13)
_ANGLES: Final = (-0.6213, 1.4910)  # of ALOHA's gripper, closed and open
_ZERO: Final = 0.5476  # the angle that is 0 in the model


class _OpenpiRobot(NamedTuple):
    """optional: images that it may lack. delta: dimensions that are changes from the state, with delta_actions."""

    state_dim: int
    action_dim: int
    optional: tuple[str, ...]
    delta: tuple[bool, ...]


_ARM: Final = (True,) * 6 + (False,)
ROBOTS: Final = {
    "libero": _OpenpiRobot(8, 7, IMAGES[2:], _ARM),
    "droid": _OpenpiRobot(8, 8, IMAGES[2:], (True,) * 7 + (False,)),
    "aloha": _OpenpiRobot(14, 14, IMAGES[1:], _ARM * 2),
}


class _Training(NamedTuple):
    """chunk_size: action_horizon, unless config.json has it. state_in_prompt: discrete_state_input."""

    robot: str
    pi05: bool
    chunk_size: int
    delta_actions: bool = False
    state_in_prompt: bool = False


CONFIGS: Final = {
    "pi0_libero": _Training("libero", False, 50, delta_actions=True),
    "pi05_libero": _Training("libero", True, 10),
    "pi0_droid": _Training("droid", False, 10),
    "pi05_droid": _Training("droid", True, 15, state_in_prompt=True),
    "pi0_aloha": _Training("aloha", False, 50, delta_actions=True),
    "pi05_aloha": _Training("aloha", True, 50, delta_actions=True, state_in_prompt=True),
    "pi0_aloha_sim": _Training("aloha", False, 50),
}
"""Training configurations by openpi's names."""

_Flag = Annotated[bool, Meta(description="true or false")]
_Names = ", ".join(CONFIGS)


class _OpenpiKeys(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`reflex_openpi.json`."""

    config: Annotated[str, Meta(description=f"the configuration of openpi: one of {_Names}")]
    delta_actions: _Flag | None = None
    state_in_prompt: _Flag | None = None
    adapt_to_pi: _Flag = True
    asset_id: Annotated[str, Meta(min_length=1, description="a directory below assets")] | None = None


class _Written(msgspec.Struct, kw_only=True):
    """The keys of the converter's config.json that are read here."""

    action_dim: Annotated[int, whole(1, 4096)] = 32
    action_horizon: Annotated[int, whole(1, 4096)] | None = None
    paligemma_variant: Annotated[str, Meta(min_length=1)] = "gemma_2b"
    action_expert_variant: Annotated[str, Meta(min_length=1)] = "gemma_300m"


_Stats = Annotated[list[float], Meta(description="a list of numbers, one a dimension")]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OpenpiCheckpoint(PolicyCheckpoint):
    """Make one with `OpenpiCheckpoint.load`."""

    @staticmethod
    def load(source: str) -> OpenpiCheckpoint:
        """Read the directory of `openpi:DIR`. ConfigError names file and key."""
        root = Path(source.removeprefix(OPENPI))
        more = ", with its model.safetensors and assets"
        check_directory(root, "a PyTorch checkpoint of openpi", more, OPENPI)
        return _load(source, root)

    def check(self) -> None:
        check_lerobot(self.source, self.model_type)

    def open(self, device: DeviceOptions) -> StagedModel:
        self.check()
        check_device(device, "checkpoints of openpi")
        if device.dtype == "float16":
            raise ConfigError("--dtype=float16: checkpoints of openpi run in bfloat16 (stored) or float32")
        from reflex_runtime.robots.sources.lerobot_vla import OpenpiStaged

        return OpenpiStaged(self, device)


def _load(source: str, root: Path) -> OpenpiCheckpoint:
    keys, trained = _configured(root)
    if not (root / WEIGHTS).is_file() and (root / "params").is_dir():
        raise ConfigError(
            f"{root}: has openpi's JAX weights (params); convert them in a clone of openpi: python "
            f"examples/convert_jax_model_to_pytorch.py --config_name {keys.config} --checkpoint_dir {root} "
            f"--output_path {root}_pytorch"
        )
    names = check_weights(root / WEIGHTS)
    if trained.pi05 != ("time_mlp_in.weight" in names):
        found = "π0.5" if "time_mlp_in.weight" in names else "π0"
        raise ConfigError(f"{root / OPENPI_FILE}: config: found {keys.config}, but {WEIGHTS} is of {found}")
    written = root / LEROBOT_FILE
    sizes: _Written = JsonObject(written, read_export_json(written) if written.is_file() else {}).read(_Written)
    robot = ROBOTS[trained.robot]
    state_in_prompt = trained.state_in_prompt if keys.state_in_prompt is None else keys.state_in_prompt
    delta = trained.delta_actions if keys.delta_actions is None else keys.delta_actions
    if state_in_prompt and not trained.pi05:
        raise ConfigError(f"{root / OPENPI_FILE}: state_in_prompt: found true, expected false for π0")
    stats = _stats_file(root, keys.asset_id)
    norms = _norms(stats, trained.pi05, robot)
    aloha = trained.robot == "aloha" and keys.adapt_to_pi
    takes_state = not trained.pi05 or state_in_prompt or delta
    config = {"config": keys.config, "delta_actions": delta, "state_in_prompt": state_in_prompt}
    wires = JsonObject(root / OPENPI_FILE, {"wires": f"openpi/{trained.robot}"})
    return OpenpiCheckpoint(
        source=source,
        path=root,
        variants=(sizes.paligemma_variant, sizes.action_expert_variant),
        model_id=root.resolve().name,
        model_type="pi05" if trained.pi05 else "pi0",
        staged=True,
        config={**config, "adapt_to_pi": aloha} if trained.robot == "aloha" else config,
        images=dict.fromkeys(IMAGES, SIZE),
        optional_images=frozenset(robot.optional),
        resize="pad",
        takes_state=takes_state,
        state_dim=robot.state_dim,
        state_norm=norms["state"],
        state_transforms=(Scaled(frozen(_FLIPPED), frozen([0.0] * 14)), AlohaGripper(_GRIPPERS)) if aloha else (),
        takes_text=True,
        tokenizer=_tokenizer(root),
        max_tokens=200 if trained.pi05 else 48,
        prompt=PromptTemplate(_WITH_STATE if state_in_prompt else _PLAIN, ("strip", "underscores", "newlines")),
        action_dim=robot.action_dim,
        chunk_size=sizes.action_horizon or trained.chunk_size,
        x_dim=sizes.action_dim,
        action_norm=norms["actions"],
        action_transforms=_action_transforms(robot, delta, aloha),
        num_denoising_steps=STEPS,
        embodiment=read_robot(root, robot.state_dim, robot.action_dim, Embodiment(name=trained.robot)),
        wires=read_wires(wires, IMAGES, robot.state_dim if takes_state else 0, robot.action_dim, {*robot.optional}),
        model_hash=model_hash(root),
        config_hash=files_hash(root, (OPENPI_FILE, LEROBOT_FILE, stats.relative_to(root).as_posix())),
        model_bytes=model_bytes(root),
    )


def _configured(root: Path) -> tuple[_OpenpiKeys, _Training]:
    """(the keys of `reflex_openpi.json`, its training configuration)."""
    file = root / OPENPI_FILE
    if not file.is_file():
        raise ConfigError(
            f"{file}: not found: openpi does not write the configuration of a checkpoint's training, which defines its "
            f'observations and actions. Write it there: {{"config": NAME}}, NAME one of {_Names}'
        )
    table = JsonObject(file, read_export_json(file))
    keys: _OpenpiKeys = table.read(_OpenpiKeys)
    if keys.config not in CONFIGS:
        table.wrong("config", f"one of {_Names}; for your own, the one of the same robot, with its other keys")
    trained = CONFIGS[keys.config]
    if trained.robot != "aloha" and table.has("adapt_to_pi"):
        table.wrong("adapt_to_pi", "none, because the robot is no ALOHA")
    return keys, trained


def _stats_file(root: Path, asset_id: str | None) -> Path:
    """assets/ID/norm_stats.json."""
    files = sorted((root / "assets").rglob("norm_stats.json"))
    by_id = {file.parent.relative_to(root / "assets").as_posix(): file for file in files}
    if asset_id is None and len(by_id) != 1:
        there = "there are " + ", ".join(by_id) if by_id else "copy assets of the checkpoint that was converted there"
        raise ConfigError(f"{root / 'assets'}: expected one norm_stats.json, or asset_id in {OPENPI_FILE}: {there}")
    file = by_id.get(asset_id or next(iter(by_id)))
    if file is None:
        raise ConfigError(f"{root / OPENPI_FILE}: asset_id: found {json.dumps(asset_id)}, expected {', '.join(by_id)}")
    return file


def _norms(file: Path, quantiles: bool, robot: _OpenpiRobot) -> dict[str, Norm | None]:
    """The norms of "state" and "actions", of the first dimensions in a norm_stats.json, which openpi pads."""
    stats = JsonObject(file, read_export_json(file)).part("norm_stats")
    found = {}
    for key, dim in (("state", robot.state_dim), ("actions", robot.action_dim)):
        table, pair = stats.part(key), ("q01", "q99") if quantiles else ("mean", "std")
        norm = {name: table.convert(name, _Stats)[:dim] for name in pair} | {"epsilon": EPSILON}
        found[key] = read_norm(JsonObject(file, {key: norm}, "norm_stats"), key, dim)
    return found


def _action_transforms(robot: _OpenpiRobot, delta: bool, aloha: bool) -> tuple[Transform, ...]:
    found: list[Transform] = [AddState(frozen(robot.delta))] if delta else []
    if aloha:
        scale, offset = np.array(_FLIPPED, np.float64), np.zeros(14)
        low, high = _ANGLES
        for grip in _GRIPPERS:
            scale[grip], offset[grip] = 1 / (high - low), (_ZERO - low) / (high - low)
        found.append(Scaled(frozen(scale), frozen(offset)))
    return tuple(found)


def _tokenizer(root: Path) -> InstructionTokenizer:
    """PaliGemma's tokenizer, from the checkpoint or else from openpi's downloads."""
    cache = Path(os.environ.get("OPENPI_DATA_HOME", "~/.cache/openpi")).expanduser()
    there = [root / TOKENIZER, cache / "big_vision" / TOKENIZER]
    for file in there:
        if file.is_file():
            return read_sentencepiece(file)
    raise ConfigError(
        f"{there[0]}: not found, nor {there[1]} of openpi: the tokenizer of instructions. Copy it there from "
        f"gs://big_vision/{TOKENIZER}"
    )
