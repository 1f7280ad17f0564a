"""A LeRobot checkpoint as a policy source: what its files say, read without LeRobot.

Everything that can be found wrong before gigabytes are loaded is found here.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.model import PolicySource, StagedModel, WholeModel
from reflex_runtime.robots.policy.spec import LEROBOT, DeviceOptions, Embodiment, Size, WireMap
from reflex_runtime.robots.sources.embodiment import read_embodiment
from reflex_runtime.robots.sources.export_directory import check_directory, from_hub
from reflex_runtime.robots.sources.export_files import (
    ExportObject,
    files_hash,
    model_bytes,
    model_hash,
    read_export_json,
    whole,
)
from reflex_runtime.robots.sources.lerobot_processors import (
    PROCESSORS,
    WEIGHTS,
    WHOLE,
    Feature,
    Features,
    check_code,
    check_statistics,
    read_steps,
    renames_of,
)
from reflex_runtime.run.model_files import CHECKPOINT_KEYS, JsonObject, json_keys, read_table
from reflex_runtime.run.onnx_session import CPU, CUDA

CONFIG_FILE: Final = "config.json"
STAGED: Final = ("smolvla", "pi0", "pi05")
"""Types whose prefix and steps are calls of their own."""

HISTORY: Final = ("diffusion", "vqbet")
"""Types that see several observations; LeRobot keeps them in the policy object, Reflex by episode."""

REFUSED: Final = {
    "lingbot_va": "it keeps a cache and the actions that were executed in the policy object, for all callers",
    "multi_task_dit": "it keeps observations in queues of the policy object, for all callers",
    "groot": "LeRobot runs the code of any repository that its files name; serve it as python:module:make",
    "wall_x": "LeRobot runs the code of any repository that its files name; serve it as python:module:make",
    "tdmpc": "it plans from the plan before, which it keeps in the policy object for all callers",
    "gaussian_actor": "it is a policy for training with rewards and has no chunk to predict",
    "sac": "it is a policy for training with rewards and has no chunk to predict",
    "reward_classifier": "it judges observations and has no actions",
}
"""Types that cannot be served, with the reason."""

NEEDS_06: Final = ("pi0", "pi05", "pi0_fast")
"""Types whose code in older versions needs a patched transformers that no registry has."""

_IMAGE, _IMAGES, _STATE, _ENVIRONMENT = (
    "observation.image", "observation.images.", "observation.state", "observation.environment_state",
)  # fmt: skip
_EMPTY: Final = "empty_camera"  # features that stand for no camera: LeRobot fills them


_Features = Annotated[dict[str, Feature], Meta(description="an object {feature: {type, shape}}")]
_Whole = Annotated[int, whole(1)]


class _Config(msgspec.Struct, kw_only=True):
    """The keys of config.json that matter here; LeRobot itself reads the rest."""

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
class LeRobotCheckpoint(PolicySource):
    """A checked checkpoint directory. Make one with `LeRobotCheckpoint.load`."""

    features: Features

    @staticmethod
    def load(source: str) -> LeRobotCheckpoint:
        """Read the directory of `lerobot:DIR`, or DIR. ConfigError names file and key."""
        root = Path(source.removeprefix(LEROBOT))
        hint = from_hub(root, LEROBOT) or ", with its config.json and model.safetensors"
        check_directory(root, hint, "a checkpoint of LeRobot")
        return _load(source, root)

    def check(self) -> None:
        check_lerobot(self.source, self.model_type)
        check_weights(self.features.path / WEIGHTS)
        for name in PROCESSORS:
            if not (self.features.path / name).is_file():
                raise ConfigError(
                    f"{self.features.path / name}: not found: it was saved by LeRobot before 0.4. Convert it: python "
                    f"-m lerobot.processor.migrate_policy_normalization --pretrained-path {self.features.path}"
                )
        served = (*self.features.cameras.values(), *(name for name, _ in self.features.states))
        check_statistics(self.features.path, self.config, served)

    def open(self, device: DeviceOptions) -> StagedModel | WholeModel:
        self.check()
        check_device(device, "LeRobot checkpoints", self.staged)
        if self.staged:
            from reflex_runtime.robots.sources.lerobot_vla import LeRobotStaged

            return LeRobotStaged(self, self.features, device)
        from reflex_runtime.robots.sources.lerobot_policy import LeRobotWhole

        return LeRobotWhole(self, self.features, device)


def is_checkpoint(root: Path) -> bool:
    """Whether a directory has a LeRobot policy: config.json names a type and its features."""
    return json_keys(root / CONFIG_FILE) >= CHECKPOINT_KEYS


def _load(source: str, root: Path) -> LeRobotCheckpoint:
    if (root / "adapter_config.json").is_file():
        raise ConfigError(
            f"{root}: holds a PEFT adapter and not a whole policy; merge it into its base (merge_and_unload), save "
            "that with save_pretrained and serve it"
        )
    table = JsonObject(root / CONFIG_FILE, _config_of(root))
    config: _Config = table.read(_Config)
    if config.type in REFUSED:
        raise ConfigError(f"{table.file}: type {config.type} cannot be served: {REFUSED[config.type]}")
    if config.type not in (*STAGED, *WHOLE):
        raise ConfigError(
            f"{table.file}: type {config.type} is not known to keep nothing between calls, and robots could get each "
            f"other's actions; known are {', '.join((*STAGED, *WHOLE))}. Serve it as python:module:make"
        )
    check_code(table.file, "", table.values)
    action = config.output_features.get("action")
    if action is None or len(action.shape) != 1:
        table.wrong("output_features", "a feature action with one size")
    cameras, sizes = _cameras(table, config)
    given = [name for name in (_STATE, _ENVIRONMENT) if name in config.input_features]
    states = tuple((name, _flat(table, config, name)) for name in given)
    chunk, horizon, denoising = _lengths(table, config)
    steps = [read_steps(root / name) for name in PROCESSORS]
    renamed = renames_of(root / PROCESSORS[0], steps[0], config.input_features)
    dim = action.shape[0]
    names = _names(config, dim)
    robot = read_robot(root, sum(size for _, size in states), dim)
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
        features=Features(root, cameras, states),
        takes_state=bool(states),
        state_dim=sum(size for _, size in states),
        takes_text=any("tokenizer" in step.registry_name for step in steps[0]),
        takes_noise=config.type not in ("act", "pi0_fast"),
        action_dim=dim,
        chunk_size=chunk,
        horizon=horizon,
        x_dim=config.max_action_dim or dim,
        num_denoising_steps=denoising,
        observation_steps=config.n_obs_steps if config.type in HISTORY else 1,
        prefix_takes_state=config.type in ("smolvla", "pi05"),
        embodiment=robot or Embodiment(action_names=names),
        wires={"vla-eval": WireMap(execute=min(config.n_action_steps or chunk, chunk))},
        model_hash=model_hash(root),
        config_hash=files_hash(root, (CONFIG_FILE, *PROCESSORS)),
        model_bytes=model_bytes(root),
    )


def _config_of(root: Path) -> Any:
    if not (root / CONFIG_FILE).is_file():
        deeper = root / "pretrained_model"
        hint = f"; serve {deeper}" if deeper.is_dir() else ", expected what save_pretrained of LeRobot writes"
        raise ConfigError(f"{root / CONFIG_FILE}: not found{hint}")
    return read_export_json(root / CONFIG_FILE)


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


def _flat(table: JsonObject, config: _Config, name: str) -> int:
    shape = config.input_features[name].shape
    if len(shape) != 1:
        table.wrong(f"input_features.{name}.shape", "one size", shape)
    return shape[0]


def _lengths(table: JsonObject, config: _Config) -> tuple[int, int, int]:
    """(actions of an answer, rows of the noise, denoising steps)."""
    if config.type == "diffusion":
        chunk, horizon, steps = config.n_action_steps, config.horizon, config.num_inference_steps
        steps = steps or table.values.get("num_train_timesteps")
        key = "n_action_steps"
    elif config.type == "vqbet":
        chunk, horizon, steps, key = config.action_chunk_size, None, 1, "action_chunk_size"
    else:
        chunk, horizon, key = config.chunk_size or config.n_action_steps, None, "chunk_size"
        steps = config.num_steps or config.num_inference_steps
    if chunk is None:
        table.wrong(key, "an integer >= 1")
    if config.type in STAGED and steps is None:
        table.wrong("num_steps" if config.type == "smolvla" else "num_inference_steps", "an integer in [1, 1000]")
    return chunk, horizon or chunk, min(int(steps or 1), 1000)


def _names(config: _Config, dim: int) -> tuple[str, ...] | None:
    found = config.action_feature_names
    if isinstance(found, list) and len(found) == dim and all(isinstance(name, str) for name in found):
        return tuple(found)
    return None


def read_robot(root: Path, state_dim: int, action_dim: int) -> Embodiment | None:
    """The robot, where an embodiment.json lies in the checkpoint: LeRobot's own files have no ranges and no rate."""
    if not (root / "embodiment.json").is_file():
        return None
    dims = {"state_norm": state_dim, "action_norm": action_dim}
    robot, norms = read_embodiment(root, ExportObject(root / CONFIG_FILE, {}), dims)
    given = [key for key, norm in norms.items() if norm is not None]
    if given:
        raise ConfigError(f"{root / 'embodiment.json'}: {given[0]}: expected none, the checkpoint has its own")
    return robot


# -- before anything is loaded -----------------------------------------------------------------------------------------


def check_lerobot(source: str, kind: str) -> None:
    """That LeRobot is there, in a version with this type."""
    try:
        found = metadata.version("lerobot")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"{source}: needs LeRobot: in a clone, pip install '.[robots]' (0.6.1 for Python 3.12 and newer; 0.4.4 "
            "for Python 3.11, which has no π0 and π0.5)"
        ) from None
    if kind in NEEDS_06 and tuple(map(int, found.split(".")[:2])) < (0, 5):
        raise ConfigError(
            f"{source}: {kind} needs LeRobot 0.6.1 or newer, and so Python 3.12; found LeRobot {found}, which needs a "
            "patched transformers for it"
        )


def check_weights(file: Path) -> list[str]:
    """That the weights are there and whole, by the outline of the file. Returns their names."""
    if not file.is_file():
        raise ConfigError(f"{file}: not found: copy the whole directory that it was saved in")
    return list(read_table(file))


def check_device(device: DeviceOptions, what: str, staged: bool = True) -> None:
    """ConfigError for what the options ask for that checkpoints on LeRobot's code cannot do. what: their name."""
    if device.captured_sizes and not staged:
        raise ConfigError(
            f"--cuda-graphs: captures the steps of {', '.join(STAGED)}; leave it out for {what} of other types"
        )
    if device.compile:
        raise ConfigError(f"--compile: is for python:module:make; leave it out for {what}")
    if device.provider not in (CPU, CUDA):
        raise ConfigError(f"--provider={device.provider}: {what} run on cpu or cuda")
