"""A LeRobot checkpoint as a policy source, read without LeRobot: faults of its files are found before it is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.base import StagedModel, WholeModel
from reflex_runtime.robots.policy.spec import LEROBOT, DeviceOptions, Embodiment, Size, WireMap
from reflex_runtime.robots.sources.export_directory import check_directory
from reflex_runtime.robots.sources.export_files import (
    EMBODIMENT_FILE,
    LEROBOT_FILE,
    WEIGHTS,
    PolicyCheckpoint,
    files_hash,
    model_bytes,
    model_hash,
    read_embodiment,
    read_export_json,
    whole,
)
from reflex_runtime.run.model_files import CHECKPOINT_KEYS, JsonObject, json_keys, read_table, shorten

SEEDED: Final = ("vqbet", "xvla", "vla_jepa", "eo1", "evo1", "fastwam", "molmoact2")
"""Types that draw from torch's global generator: served row by row, so that each row has its own seed."""

WHOLE: Final = ("act", "diffusion", "pi0_fast", *SEEDED)
"""Types with one call for a chunk, which keeps nothing in the policy object."""

STAGED: Final = ("smolvla", "pi0", "pi05")
"""Types whose prefix and steps are calls of their own."""

HISTORY: Final = ("diffusion", "vqbet")
"""Types that see several observations; LeRobot keeps them in the policy object, Reflex by episode."""

NEEDS_06: Final = (*STAGED, "pi0_fast")
"""Types that older versions of LeRobot lack, or run only with a patched transformers that was never released."""

_IMAGE, _IMAGES, _STATE, _ENVIRONMENT = (
    "observation.image", "observation.images.", "observation.state", "observation.environment_state",
)  # fmt: skip
_EMPTY: Final = "empty_camera"  # features that stand for no camera: LeRobot fills them


class Feature(msgspec.Struct, kw_only=True):
    """An input or output of the policy."""

    type: Annotated[str, Meta(description="VISUAL, STATE, ENV or ACTION")]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1, le=1_000_000)], ...], Meta(description="a list of sizes")]


_Features = Annotated[dict[str, Feature], Meta(description="an object {feature: {type, shape}}")]
_Whole = Annotated[int, whole(1)]


class _Config(msgspec.Struct, kw_only=True):
    """The keys of config.json that are read here; LeRobot itself reads the rest."""

    type: Annotated[str, Meta(min_length=1, description="a type of policy, such as act or smolvla")]
    input_features: _Features
    output_features: _Features
    n_obs_steps: Annotated[int, whole(1, 64)] = 1
    chunk_size: _Whole | None = None
    n_action_steps: _Whole | None = None
    horizon: _Whole | None = None
    action_chunk_size: _Whole | None = None
    max_action_dim: _Whole | None = None
    num_steps: Annotated[int, whole(1, 1000)] | None = None
    num_inference_steps: Annotated[int, whole(1, 1000)] | None = None
    normalization_mapping: Annotated[dict[str, str], Meta(description="an object {type: mode}")] = {}
    action_feature_names: Any = None
    repo_id: Annotated[str, Meta(min_length=1, max_length=256, description="a name")] | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeRobotCheckpoint(PolicyCheckpoint):
    """Make one with `LeRobotCheckpoint.load`."""

    @staticmethod
    def load(source: str) -> LeRobotCheckpoint:
        """Read the directory of `lerobot:DIR`, or DIR. ConfigError names file and key."""
        root = Path(source.removeprefix(LEROBOT))
        check_directory(root, "a checkpoint of LeRobot", ", with its config.json and model.safetensors", LEROBOT)
        return _load(source, root)

    def check(self) -> None:
        check_lerobot(self.source, self.model_type)
        check_weights(self.path / WEIGHTS)
        for name in PROCESSORS:
            if not (self.path / name).is_file():
                raise ConfigError(
                    f"{self.path / name}: not found: it was saved by LeRobot before 0.4. Convert it: python "
                    f"-m lerobot.processor.migrate_policy_normalization --pretrained-path {self.path}"
                )

    def open(self, device: DeviceOptions) -> StagedModel | WholeModel:
        self.check()
        check_device(device, "LeRobot checkpoints", self.staged)
        if self.staged:
            from reflex_runtime.robots.sources.lerobot_vla import LeRobotStaged

            return LeRobotStaged(self, device)
        from reflex_runtime.robots.sources.lerobot_policy import LeRobotWhole

        return LeRobotWhole(self, device)


def is_checkpoint(root: Path) -> bool:
    """Whether a directory has a LeRobot policy, whose config.json has a type and features."""
    return json_keys(root / LEROBOT_FILE) >= CHECKPOINT_KEYS


def _load(source: str, root: Path) -> LeRobotCheckpoint:
    if (root / "adapter_config.json").is_file():
        raise ConfigError(
            f"{root}: holds a PEFT adapter, not a whole policy; merge it into its base (merge_and_unload), save that "
            "with save_pretrained and serve it"
        )
    if not (root / LEROBOT_FILE).is_file():
        deeper = root / "pretrained_model"
        hint = f"; serve {deeper}" if deeper.is_dir() else ", expected what save_pretrained of LeRobot writes"
        raise ConfigError(f"{root / LEROBOT_FILE}: not found{hint}")
    table = JsonObject(root / LEROBOT_FILE, read_export_json(root / LEROBOT_FILE))
    config: _Config = table.read(_Config)
    if config.type not in (*STAGED, *WHOLE):
        raise ConfigError(
            f"{table.file}: type {config.type} is not known to predict chunks without keeping data between calls, so "
            f"robots could get each other's actions; known are {', '.join((*STAGED, *WHOLE))}. Serve it as "
            "python:module:make"
        )
    check_code(table.file, "", table.values)
    action = config.output_features.get("action")
    if action is None or len(action.shape) != 1:
        table.wrong("output_features", "a feature action with one size")
    cameras, sizes = _cameras(table, config)
    states = {
        name: config.input_features[name].shape for name in (_STATE, _ENVIRONMENT) if name in config.input_features
    }
    for name, shape in states.items():
        if len(shape) != 1:
            table.wrong(f"input_features.{name}.shape", "one size", shape)
    state_dim = sum(shape[0] for shape in states.values())
    chunk, horizon, denoising = _lengths(table, config)
    steps = [read_steps(root / name) for name in PROCESSORS]
    renamed = renames_of(root / PROCESSORS[0], steps[0], config.input_features)
    dim = action.shape[0]
    names, named = config.action_feature_names, isinstance(config.action_feature_names, list)
    named = named and len(names) == dim and all(isinstance(name, str) for name in names)
    robot = Embodiment(action_names=tuple(names) if named else None)
    return LeRobotCheckpoint(
        source=source,
        model_id=config.repo_id or root.resolve().name,
        model_type=config.type,
        staged=config.type in STAGED,
        config=dict(table.values),
        images=sizes,
        optional_images=frozenset(sizes) if config.type in STAGED and len(sizes) > 1 else frozenset(),
        other_names={c: renamed[name].removeprefix(_IMAGES) for c, name in cameras.items() if name in renamed},
        resize="none" if config.type in STAGED else "stretch",
        path=root,
        cameras=cameras,
        states=tuple((name, shape[0]) for name, shape in states.items()),
        seeded=config.type in SEEDED,
        takes_state=bool(states),
        state_dim=state_dim,
        takes_text=any("tokenizer" in step.registry_name for step in steps[0]),
        takes_noise=config.type not in ("act", "pi0_fast"),
        action_dim=dim,
        chunk_size=chunk,
        horizon=horizon,
        x_dim=config.max_action_dim or dim,
        num_denoising_steps=denoising,
        observation_steps=config.n_obs_steps if config.type in HISTORY else 1,
        prefix_takes_state=config.type in ("smolvla", "pi05"),
        embodiment=read_robot(root, state_dim, dim, robot),
        wires={"vla-eval": WireMap(execute=min(config.n_action_steps or chunk, chunk))},
        model_hash=model_hash(root),
        config_hash=files_hash(root, (LEROBOT_FILE, *PROCESSORS)),
        model_bytes=model_bytes(root),
    )


def _cameras(table: JsonObject, config: _Config) -> tuple[dict[str, str], dict[str, Size]]:
    """The feature name and the (height, width) of each camera, by the name that requests use."""
    cameras, sizes = {}, {}
    for name, feature in config.input_features.items():
        if feature.type != "VISUAL" or _EMPTY in name:
            continue
        if len(feature.shape) != 3 or feature.shape[0] != 3 or max(feature.shape) > 4096:
            table.wrong(f"input_features.{name}.shape", "[3, height, width], sizes up to 4096", feature.shape)
        camera = "image" if name == _IMAGE else name.removeprefix(_IMAGES)
        cameras[camera], sizes[camera] = name, (feature.shape[1], feature.shape[2])
    return cameras, sizes


def _lengths(table: JsonObject, config: _Config) -> tuple[int, int, int]:
    """(actions of an answer, rows of the noise, denoising steps)."""
    key, chunk, horizon = "chunk_size", config.chunk_size or config.n_action_steps, None
    steps = config.num_steps or config.num_inference_steps
    if config.type == "diffusion":
        key, chunk, horizon = "n_action_steps", config.n_action_steps, config.horizon
        steps = steps or table.values.get("num_train_timesteps")
    elif config.type == "vqbet":
        key, chunk, steps = "action_chunk_size", config.action_chunk_size, 1
    if chunk is None:
        table.wrong(key, "an integer >= 1")
    if config.type in STAGED and steps is None:
        table.wrong("num_steps" if config.type == "smolvla" else "num_inference_steps", "an integer in [1, 1000]")
    return chunk, horizon or chunk, min(int(steps or 1), 1000)


def read_robot(root: Path, state_dim: int, action_dim: int, known: Embodiment) -> Embodiment:
    """The robot of an embodiment.json in the checkpoint, because LeRobot's own files have no ranges and no rate;
    without that file `known`."""
    file = root / EMBODIMENT_FILE
    if not file.is_file():
        return known
    dims = {"state_norm": state_dim, "action_norm": action_dim}
    robot, norms = read_embodiment(root, JsonObject(root / LEROBOT_FILE, {}), dims)
    given = [key for key, norm in norms.items() if norm is not None]
    if given:
        raise ConfigError(f"{file}: {given[0]}: expected none, the checkpoint has its own")
    return robot


# -- before anything is loaded -----------------------------------------------------------------------------------------


def check_lerobot(source: str, kind: str) -> None:
    """ConfigError unless LeRobot is installed, in a version with this type."""
    try:
        found = metadata.version("lerobot")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"{source}: needs LeRobot: in a clone, pip install '.[robots]' (0.6.1 for Python 3.12 and newer; 0.4.4 "
            "for Python 3.11, without VLAs)"
        ) from None
    if kind in NEEDS_06 and tuple(map(int, re.findall(r"\d+", found)[:3])) < (0, 6, 1):
        raise ConfigError(f"{source}: {kind} needs LeRobot 0.6.1 or newer, and so Python 3.12; found LeRobot {found}")


def check_weights(file: Path) -> list[str]:
    """The names of the weights. ConfigError unless the file is as long as its table of weights needs."""
    if not file.is_file():
        raise ConfigError(f"{file}: not found: copy the whole directory that it was saved in")
    return list(read_table(file))


def check_device(device: DeviceOptions, what: str, staged: bool = True) -> None:
    """ConfigError for options that have no effect on LeRobot's code. what: the kind of checkpoint, in words."""
    if device.captured_sizes and not staged:
        raise ConfigError(
            f"--cuda-graphs: captures the steps of {', '.join(STAGED)}; leave it out for {what} of other types"
        )
    if device.compile:
        raise ConfigError(f"--compile: is for python:module:make; leave it out for {what}")


# -- processors --------------------------------------------------------------------------------------------------------
#
# A step is refused by its name, unless a single request or answer has all that it needs.


PROCESSORS: Final = ("policy_preprocessor.json", "policy_postprocessor.json")

CODE_REPOSITORIES: Final = {
    "action_tokenizer_name": ("lerobot/fast-action-tokenizer", "physical-intelligence/fast"),
    "text_tokenizer_name": ("google/paligemma-3b-pt-224",),
}
"""Keys that name a repository whose code LeRobot runs, and the repositories in LeRobot's own configurations."""

RENAMING: Final = "rename_observations_processor"

STEPS: Final = {
    "normalizer_processor", "molmoact2_masked_normalizer", "unnormalizer_processor", "molmoact2_masked_unnormalizer",
    RENAMING, "to_batch_processor", "to_batch_processor_action", "to_batch_processor_observation",
    "to_batch_processor_complementary_data", "device_processor", "tokenizer_processor", "action_tokenizer_processor",
    "smolvla_new_line_processor", "pi0_new_line_processor", "relative_actions_processor", "absolute_actions_processor",
    "pi05_prepare_state_tokenizer_processor_step", "pi0_fast_prepare_state_tokenizer_processor_step",
    "xvla_image_scale", "xvla_image_to_float", "xvla_imagenet_normalize", "xvla_add_domain_id",
    "vla_jepa_clip_actions", "vla_jepa_pre_snap_gripper", "vla_jepa_binarize_gripper", "evo1_pad_state_processor",
    "evo1_pad_action_processor", "evo1_action_processor", "eo1_conversation_template_processor", "eo1_qwen_processor",
    "fastwam_action_toggle_processor", "molmoact2_clamp_normalized", "molmoact2_pack_inputs",
    "molmoact2_state_frame_transform", "molmoact2_action_frame_transform", "molmoact2_clamp_action",
}  # fmt: skip
"""The steps that LeRobot runs on every request or on whole chunks. Two more are left out: one crops pictures of the
camera's size, the other makes actions of another size; config.json has neither size."""


class ProcessorStep(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An entry of `steps`."""

    registry_name: str
    config: dict[str, Any] = {}
    state_file: str | None = None
    class_: Any = msgspec.field(name="class", default=None)  # LeRobot prefers registry_name


_Steps = Annotated[list[dict[str, Any]], Meta(description="a list of objects, as LeRobot writes it")]


def read_steps(file: Path) -> list[ProcessorStep]:
    """A processor's steps; none without a file. ConfigError for a step that is not in `STEPS`, or names a `class` only:
    LeRobot would import it from any module, and call it.
    """
    if not file.is_file():
        return []
    entries = JsonObject(file, read_export_json(file)).convert("steps", _Steps)
    return [_step(file, i, entry) for i, entry in enumerate(entries)]


def _step(file: Path, i: int, entry: dict[str, Any]) -> ProcessorStep:
    name = entry.get("registry_name")
    if not isinstance(name, str):
        named = shorten(repr(entry.get("class")))
        raise ConfigError(f"{file}: steps[{i}]: names the class {named}; only steps of LeRobot itself are run")
    if name not in STEPS:
        reason = "only steps that are known to need no more than a request or a chunk are run"
        raise ConfigError(f"{file}: steps[{i}]: {shorten(name)} is not applied: {reason}; serve python:module:make")
    try:
        step = msgspec.convert(entry, ProcessorStep)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: steps[{i}]: {shorten(str(error))}") from None
    if step.state_file is not None and Path(step.state_file).name != step.state_file:
        found = shorten(step.state_file)
        raise ConfigError(f"{file}: steps[{i}].state_file: {found} is not the name of a file in the same directory")
    check_code(file, f"steps[{i}].config.", step.config)
    return step


def check_code(file: Path, within: str, config: Mapping[str, Any]) -> None:
    """ConfigError for a repository whose code LeRobot would run, except those of LeRobot's own configurations."""
    for key, known in CODE_REPOSITORIES.items():
        found = config.get(key)
        if found is not None and found not in known:
            raise ConfigError(
                f"{file}: {within}{key}: found {shorten(json.dumps(found))}, expected {' or '.join(known)}: LeRobot "
                "runs the code of the repository; if you trust it, serve it as python:module:make"
            )


def renames_of(file: Path, steps: Iterable[ProcessorStep], features: Iterable[str]) -> dict[str, str]:
    """The other name that observations may have for a feature of the policy, by feature, from `rename_map`."""
    found: dict[str, str] = {}
    for step in steps:
        renames = step.config.get("rename_map") if step.registry_name == RENAMING else None
        if not isinstance(renames or {}, dict) or not all(isinstance(new, str) for new in (renames or {}).values()):
            raise ConfigError(f"{file}: rename_map: expected an object of names")
        for old, new in (renames or {}).items():
            if old == new or new not in features:
                continue
            if new in found or old in features:
                what = "two names are" if new in found else f"a feature of the policy, {old}, is"
                raise ConfigError(f"{file}: rename_map: {what} renamed to {new}; take that out, and send {new} itself")
            found[new] = old
    return found
