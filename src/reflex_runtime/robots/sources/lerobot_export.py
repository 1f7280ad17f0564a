"""Exports a LeRobot checkpoint to a directory, which is kept only if it answers as the checkpoint does.

Both are loaded as by `reflex serve` and compared on made-up observations: one at a time, in pairs and all together.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.robots.policy.base import Policy
from reflex_runtime.robots.policy.observation import ActionChunk
from reflex_runtime.robots.policy.spec import PolicySpec
from reflex_runtime.robots.policy.units import Floats
from reflex_runtime.robots.sources.export_files import CONFIG_FILE, EMBODIMENT_FILE, check_new, new_directory
from reflex_runtime.robots.sources.lerobot_checkpoint import LeRobotCheckpoint
from reflex_runtime.robots.sources.load import load_policy

OPSETS: Final = (18, 23)
"""The lowest and the highest ONNX opset that is written."""

BOUND: Final = 1e-4
"""Largest allowed difference of an action, in the unit by which its joint is normalised."""

ROUNDING: Final = 1e-6
"""Allowed besides, as a share of the joint's largest action: float32 has 24 bits."""

EXPORTED: Final = ("act", "diffusion", "smolvla")
"""Types whose graphs compute the same."""


class NotTheSame(ReflexError):
    """The export computes other actions than the checkpoint; it was removed."""


class Original(Protocol):
    """The loaded checkpoint.

    policy: as it is served. unit: by which each joint's actions are normalised, [action_dim]. states: the lowest and
    the highest in training, [2, state_dim].
    """

    policy: Policy
    unit: Floats
    states: Floats

    def write(self, directory: Path, opset: int) -> dict[str, Any]:
        """Write the graphs, and return the keys of `reflex_config.json` that are about them."""


class Verified(NamedTuple):
    """The largest difference, in the robot's units and in the joints' units of normalisation. compared: answers."""

    difference: float
    in_units: float
    compared: int


def export_checkpoint(
    source: str,
    out: Path,
    *,
    opset: int = OPSETS[0],
    force: bool = False,
    load: Callable[[LeRobotCheckpoint], Original] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Verified:
    """Write `out` and compare it with the checkpoint. source: as in `LeRobotCheckpoint.load`.

    load: makes the original, with LeRobot by default. progress: called with a line before each step.

    ConfigError, with the reason, for a checkpoint that cannot be exported. NotTheSame if answers differ by more than
    BOUND; `out` is then unchanged.
    """
    check_new(out, force)
    spec = LeRobotCheckpoint.load(source)
    check_exported(spec)
    progress(f"loading {spec.model_id} ({spec.model_type}) with LeRobot")
    if load is None:
        spec.check()
        from reflex_runtime.robots.sources.lerobot_graphs import TRACED  # imports LeRobot and torch

        load = TRACED[spec.model_type]
    original = load(spec)
    with new_directory(out, force) as making:
        progress(f"tracing it to ONNX, opset {opset}")
        config = config_of(spec, opset) | original.write(making, opset)
        (making / CONFIG_FILE).write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n")
        _write_embodiment(spec, making)
        progress("comparing the export with the checkpoint")
        return compared(load_policy(making), original)


def check_exported(spec: LeRobotCheckpoint) -> None:
    """ConfigError for a type that cannot be exported."""
    serve, kind = f"reflex serve lerobot:{spec.path}", spec.model_type
    if kind not in EXPORTED:
        reason = f"only {', '.join(EXPORTED)} are known to give graphs that compute the same"
        raise ConfigError(f"{spec.source}: type {kind} is not exported: {reason}. Serve it as it is: {serve}")
    scheduler = spec.config.get("noise_scheduler_type")
    if kind == "diffusion" and scheduler != "DDIM":
        raise ConfigError(
            f"{spec.source}: noise_scheduler_type {scheduler} is not exported: it draws noise at every step, and a "
            f"graph would draw other noise. Serve it as it is ({serve}), or set DDIM in its config.json if it was "
            "trained for both"
        )


def config_of(spec: LeRobotCheckpoint, opset: int) -> dict[str, Any]:
    """The keys of `reflex_config.json` that are known before the graphs are written."""
    return {
        "model_id": spec.model_id,
        "model_type": spec.model_type,
        "opset": opset,
        "state_dim": spec.state_dim,
        "action_dim": spec.action_dim,
        "chunk_size": spec.chunk_size,
        "num_denoising_steps": spec.num_denoising_steps,
        "images": {name: list(size) for name, size in spec.images.items()},
        "wires": {wire: {"execute": read.execute} for wire, read in spec.wires.items()},
        "metadata": {"exported_from": "lerobot", "checkpoint_hash": spec.model_hash},
        **({"observation_steps": spec.observation_steps} if spec.observation_steps > 1 else {}),
        **({"horizon": spec.horizon} if spec.horizon != spec.chunk_size else {}),
    }


def compared(policy: Policy, original: Original) -> Verified:
    """Answers of the export, alone, in pairs and all together, against those of the checkpoint. Raises NotTheSame."""
    spec = policy.spec
    episodes = made_up(spec, original.states)
    wanted = np.concatenate([_answers(original.policy, [one], f"{i}") for i, one in enumerate(episodes)])
    if not np.isfinite(wanted).all():
        raise NotTheSame("the checkpoint itself answers NaN or infinite actions: use an earlier one")
    allowed = BOUND * original.unit + ROUNDING * np.abs(wanted).max(axis=(0, 1))
    largest, in_units, count = 0.0, 0.0, 0
    ways = [(size, start, False) for size in (1, 2, EPISODES) for start in range(0, EPISODES, size)]
    ways += [(EPISODES, 0, True)] if spec.staged else []
    for size, start, staggered in ways:
        rows = slice(start, start + size)
        found = _answers(policy, episodes[rows], f"{size}-{start}-{staggered}", staggered)
        differences = np.abs(found - wanted[rows])
        if not (differences <= allowed).all():  # NaN is never within
            joint = int(np.argmax((np.nan_to_num(differences, nan=np.inf) / allowed).max(axis=(0, 1))))
            raise NotTheSame(
                f"the export's answers differ from the checkpoint's: joint {joint} differs by "
                f"{differences[..., joint].max():.3g} in a batch of {size}, at most {allowed[joint]:.3g} is "
                "allowed. It was removed; serve the checkpoint as it is"
            )
        largest = max(largest, float(differences.max()))
        in_units = max(in_units, float((differences / np.maximum(original.unit, ROUNDING)).max()))
        count += len(found)
    return Verified(largest, in_units, count)


def _answers(policy: Policy, episodes: Sequence[Episode], name: str, staggered: bool = False) -> Floats:
    """The answers to the last observation of each episode. staggered: the rows are at different denoise steps."""
    chunks: list[ActionChunk] = []
    for step, seen in enumerate(zip(*episodes, strict=True)):
        requests = [
            policy.request(policy.prepare(**one, episode_id=f"{name}-{i}", request_id=f"{name}-{i}-{step}"))
            for i, one in enumerate(seen)
        ]
        chunks = policy.answers(requests, range(len(requests)) if staggered else ())
    return np.stack([chunk.actions for chunk in chunks])


def _write_embodiment(spec: LeRobotCheckpoint, directory: Path) -> None:
    """Write the robot's file, if the checkpoint has it, or the names of its actions."""
    own = spec.path / EMBODIMENT_FILE
    if own.is_file():
        shutil.copyfile(own, directory / EMBODIMENT_FILE)
    elif spec.embodiment.action_names is not None:
        robot = {"name": spec.embodiment.name, "action_names": list(spec.embodiment.action_names)}
        (directory / EMBODIMENT_FILE).write_text(json.dumps(robot, ensure_ascii=False, indent=2) + "\n")


# -- made-up episodes --------------------------------------------------------------------------------------------------


Episode = Sequence[Mapping[str, Any]]  # the fields of each of its requests
EPISODES: Final = 6  # as many as instructions and shapes
_INSTRUCTIONS: Final = (
    "pick up the cube", "wipe\n", "räume den\nTisch auf", "put the red block away", " open it \n\n", "put " * 60,
)  # fmt: skip
_SHAPES: Final = ((1.0, 1.0), (1.125, 2.0), (1.75, 1.0), (0.6, 0.4), (1.5, 2.0), (1.0, 1.0))
"""Height and width of an episode's pictures, as shares of the size that the export's graph reads."""


def made_up(spec: PolicySpec, states: Floats) -> list[Episode]:
    """Episodes as robots send them: pictures of several shapes; a missing camera in one, if it may be missing; states
    within the range of the training and beyond. They are the same every time."""
    episodes: list[Episode] = []
    for number, (instruction, (high, wide)) in enumerate(zip(_INSTRUCTIONS, _SHAPES, strict=True)):
        rng = np.random.Generator(np.random.PCG64(number))
        left_out = list(spec.images)[:1] if spec.optional_images >= set(spec.images) and number == 3 else []
        beyond = (states[1] - states[0]) * (number > 3)
        requests = []
        for _ in range(spec.observation_steps):
            pictures = {
                name: rng.integers(0, 256, (max(1, round(height * high)), max(1, round(width * wide)), 3), np.uint8)
                for name, (height, width) in spec.images.items()
                if name not in left_out
            }
            state = rng.uniform(states[0] - beyond, states[1] + beyond).astype(np.float32)
            fields = {"images": pictures, "instruction": instruction, "seed": number}
            requests.append({**fields, "state": state} if spec.takes_state else fields)
        episodes.append(requests)
    return episodes
