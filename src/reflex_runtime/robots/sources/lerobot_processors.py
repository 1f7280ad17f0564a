"""What the files of a LeRobot checkpoint say of its features and processors, read before LeRobot leaves anything out.

A feature without statistics passes LeRobot's normaliser as it is, and a robot would get z-scores for degrees. So the
statistics are looked for here, and steps that a request or an answer here has nothing for are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.sources.export_files import read_export_json
from reflex_runtime.run.model_files import read_table, shorten

WEIGHTS: Final = "model.safetensors"

SEEDED: Final = ("vqbet", "xvla", "vla_jepa", "eo1", "evo1", "fastwam", "molmoact2")
"""Types that draw from torch's own generator: served row by row, so that each row has its own seed."""

WHOLE: Final = ("act", "diffusion", "pi0_fast", *SEEDED)
"""Types with one call for a chunk that keep nothing of it in the policy object."""


class Feature(msgspec.Struct, kw_only=True):
    """An input or output of the policy."""

    type: Annotated[str, Meta(description="VISUAL, STATE, ENV or ACTION")]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1, le=1_000_000)], ...], Meta(description="a list of sizes")]


@dataclass(frozen=True, slots=True)
class Features:
    """path: the checkpoint's directory. cameras: LeRobot's feature name of each image. states: the features that make
    the state, in order, with their sizes."""

    path: Path
    cameras: Mapping[str, str]
    states: tuple[tuple[str, int], ...]


# -- processors --------------------------------------------------------------------------------------------------------


PROCESSORS: Final = ("policy_preprocessor.json", "policy_postprocessor.json")

RUN: Final = {
    "action_tokenizer_name": ("lerobot/fast-action-tokenizer", "physical-intelligence/fast"),
    "text_tokenizer_name": ("google/paligemma-3b-pt-224",),
}
"""Keys that name a repository of which LeRobot runs the code, with those that LeRobot's own configurations name."""

NORMALISERS: Final = (
    {"normalizer_processor", "molmoact2_masked_normalizer"},
    {"unnormalizer_processor", "molmoact2_masked_unnormalizer"},
)
"""Of each processor."""

RENAMING: Final = "rename_observations_processor"

STEPS: Final = frozenset().union(*NORMALISERS) | {
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
"""The steps that LeRobot runs on every request or on whole chunks: all that it has for policies but those below."""

REFUSED: Final = {
    "image_crop_resize_processor": "it crops pictures of the camera's size, which config.json does not tell",
    "xvla_rotation_6d_to_axis_angle": "it makes other actions of them than config.json tells, one by one",
}

PAIRS: Final = {
    "MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90"),
}  # fmt: skip
"""The statistics of each mode."""


class ProcessorStep(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An entry of `steps`."""

    registry_name: str
    config: dict[str, Any] = {}
    state_file: str | None = None
    class_: Any = msgspec.field(name="class", default=None)  # LeRobot takes the other name where both are there


def read_steps(file: Path) -> list[ProcessorStep]:
    """A processor's steps; none where there is no file. ConfigError for a step that cannot be applied.

    LeRobot imports what the `class` of a step names, from any module, and calls it.
    """
    if not file.is_file():
        return []
    table = read_export_json(file)
    entries = table.get("steps") if isinstance(table, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{file}: is not what LeRobot writes: expected a JSON object with `steps`")
    return [_step(file, i, entry) for i, entry in enumerate(entries)]


def _step(file: Path, i: int, entry: dict[str, Any]) -> ProcessorStep:
    name = entry.get("registry_name")
    if not isinstance(name, str):
        named = shorten(repr(entry.get("class")))
        raise ConfigError(f"{file}: steps[{i}]: names the class {named}; only steps of LeRobot itself are run")
    if name not in STEPS:
        reason = REFUSED.get(name, "only steps that are known to do all they do on a request or a chunk are run")
        told = f"{shorten(name)} is not applied: {reason}; serve it as python:module:make"
        raise ConfigError(f"{file}: steps[{i}]: {told}")
    try:
        step = msgspec.convert(entry, ProcessorStep)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: steps[{i}]: {shorten(str(error))}") from None
    check_code(file, f"steps[{i}].config.", step.config)
    return step


def check_code(file: Path, within: str, config: Mapping[str, Any]) -> None:
    """That no key names a repository of which LeRobot would run the code, other than those that it names itself."""
    for key, known in RUN.items():
        found = config.get(key)
        if found is not None and found not in known:
            raise ConfigError(
                f"{file}: {within}{key}: found {shorten(json.dumps(found))}, expected {' or '.join(known)}: LeRobot "
                "runs the code of what it names; if you trust that, serve it as python:module:make"
            )


def renames_of(file: Path, steps: Iterable[ProcessorStep], features: Iterable[str]) -> dict[str, str]:
    """The other name that an observation may have for each of the policy's features, from `rename_map`."""
    found: dict[str, str] = {}
    for step in steps:
        renames = step.config.get("rename_map") if step.registry_name == RENAMING else None
        if not isinstance(renames or {}, dict):
            raise ConfigError(f"{file}: rename_map: expected an object of names")
        for old, new in (renames or {}).items():
            if old == new or new not in features:
                continue
            if new in found or old in features:
                what = "two names are" if new in found else f"a feature of the policy, {old}, is"
                raise ConfigError(f"{file}: rename_map: {what} renamed to {new}; take that out, and send {new} itself")
            found[new] = old
    return found


class _Normaliser(msgspec.Struct, kw_only=True):
    """The configuration of a step that normalises."""

    features: dict[str, Feature] = {}
    norm_map: dict[str, Literal["IDENTITY", "MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10"]] = {}
    normalize_observation_keys: list[str] | None = None
    stats: dict[str, dict[str, Any]] | None = None

    def leaves_out(self, name: str) -> bool:
        """Whether it says itself that it leaves a feature as it is."""
        keys = self.normalize_observation_keys
        return keys is not None and name != "action" and name not in keys

    def mode(self, name: str, kind: str) -> str:
        return "IDENTITY" if self.leaves_out(name) else self.norm_map.get(kind, "IDENTITY")


def check_statistics(root: Path, config: Mapping[str, Any], inputs: Iterable[str]) -> None:
    """That both processors have the statistics of all that they normalise. inputs: the features that are served."""
    modes = config.get("normalization_mapping") or {}
    served = ((inputs, config["input_features"]), (("action",), config["output_features"]))
    for name, kinds, (wanted, features) in zip(PROCESSORS, NORMALISERS, served, strict=True):
        file = root / name
        steps = [(step, _normaliser(file, step)) for step in read_steps(file) if step.registry_name in kinds]
        for feature in wanted:
            kind = features[feature]["type"]
            used = [(step, how) for step, how in steps if how.mode(feature, kind) != "IDENTITY"]
            for step, how in used:
                _check_feature(file, step, how, feature, how.mode(feature, kind))
            named = modes.get(kind, "IDENTITY")
            if not used and named != "IDENTITY" and not any(how.leaves_out(feature) for _, how in steps):
                raise ConfigError(
                    f"{file}: no step normalises {feature}, which is {named} in config.json (normalization_mapping)"
                )


def _normaliser(file: Path, step: ProcessorStep) -> _Normaliser:
    try:
        return msgspec.convert(step.config, _Normaliser)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {step.registry_name}: {shorten(str(error))}") from None


def _check_feature(file: Path, step: ProcessorStep, how: _Normaliser, name: str, mode: str) -> None:
    """That a step normalises a feature, and with statistics of its size."""
    feature = how.features.get(name)
    if feature is None:
        raise ConfigError(f"{file}: {step.registry_name}: {name}, which is {mode}, is not in its features")
    sizes = _statistics(file, step, how)
    where = "" if step.state_file is None else f" in {step.state_file}"
    expected = feature.shape[0] if feature.type == "VISUAL" else prod(feature.shape)
    for key in PAIRS[mode]:
        size = sizes.get(f"{name}.{key}")
        if size is None:
            others = sorted(other.removesuffix(f".{key}") for other in sizes if other.endswith(f".{name}.{key}"))
            there = f" (there are those of {', '.join(map(shorten, others[:3]))})" if others else ""
            raise ConfigError(
                f"{file}: {step.registry_name} has no {key} of {name}, which is {mode}{where}{there}: LeRobot would "
                "leave it as it is. Train the policy on your robot's data, or save its processors with the statistics "
                "of that data (make_pre_post_processors(config, dataset_stats=…))"
            )
        if size != expected:
            raise ConfigError(f"{file}: the {key} of {name} has {size} numbers{where}, expected {expected}")


def _statistics(file: Path, step: ProcessorStep, how: _Normaliser) -> dict[str, int]:
    """How many numbers there are of each statistic, by its name in the state file."""
    if how.stats:  # LeRobot takes these alone
        return {f"{name}.{key}": _count(value) for name, found in how.stats.items() for key, value in found.items()}
    if step.state_file is None:
        return {}
    if Path(step.state_file).name != step.state_file:
        raise ConfigError(f"{file}: state_file: {shorten(step.state_file)} is not the name of a file beside it")
    return {name: prod(tensor.shape) for name, tensor in read_table(file.parent / step.state_file).items()}


def _count(value: Any) -> int:
    return sum(map(_count, value)) if isinstance(value, list) else 1
