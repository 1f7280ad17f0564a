"""A LeRobot checkpoint as an export directory, which is put in place only if it answers as the checkpoint does.

Both are compared as `reflex serve` loads them, on made-up observations alone, in pairs and all together.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.robots.policy.base import Policy
from reflex_runtime.robots.policy.observation import ActionChunk
from reflex_runtime.robots.policy.spec import PolicySpec, Size
from reflex_runtime.robots.policy.units import Floats
from reflex_runtime.robots.sources.export_files import CONFIG_FILE, EMBODIMENT_FILE, check_new, new_directory
from reflex_runtime.robots.sources.lerobot_checkpoint import LeRobotCheckpoint
from reflex_runtime.robots.sources.load import load_policy

OPSETS: Final = (18, 23)
"""The lowest and the highest ONNX opset that is written."""

BOUND: Final = 1e-4
"""Largest difference of an action, in the unit that its joint is normalised by."""

ROUNDING: Final = 1e-6
"""Beside that, a share of the joint's largest action: float32 has 24 bits."""

EXPORTED: Final = ("act", "diffusion", "smolvla")
"""Types of which there are graphs that compute the same."""

REASONS: Final = {
    "vqbet": "it draws its codes from torch's random generator, and a graph would draw others",
    "pi0_fast": "it writes its actions as tokens, one call for each, and an answer ends where they end",
    "pi0": "its graphs are not tried: the weights are 13 GB in float32",
    "pi05": "its graphs are not tried: the weights are 14 GB in float32",
}
"""Why other types are refused."""


class NotTheSame(ReflexError):
    """The export computes something else than the checkpoint; it was removed."""


class Original(Protocol):
    """The loaded checkpoint.

    policy: as it is served. unit: by which each joint's actions are normalised, [action_dim]. states: lowest and
    highest of the training, [2, state_dim].
    """

    policy: Policy
    unit: Floats
    states: Floats

    def write(self, directory: Path, opset: int) -> dict[str, Any]:
        """Write the graphs, and return the keys of `reflex_config.json` that are about them."""


@dataclass(frozen=True, slots=True)
class Verified:
    """difference: the largest, in the robot's units; and in the joint's unit of normalisation (`in_units`).
    compared: answers that were compared."""

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
    told: Callable[[str], None] = lambda line: None,
) -> Verified:
    """Write `out` and compare it with the checkpoint. source: as in `LeRobotCheckpoint.load`.

    load: of the original, LeRobot by default. told: is called with a line of each step, before it.

    ConfigError for what cannot be exported, with the reason. NotTheSame if the answers differ by more than BOUND;
    nothing is at `out` then that was not there before.
    """
    check_new(out, force)
    spec = LeRobotCheckpoint.load(source)
    check_exported(spec)
    told(f"loading {spec.model_id} ({spec.model_type}) with LeRobot")
    original = (load or _traced)(spec)
    with new_directory(out, force) as making:
        told(f"tracing it to ONNX, opset {opset}")
        config = config_of(spec, opset) | original.write(making, opset)
        (making / CONFIG_FILE).write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n")
        _write_embodiment(spec, making)
        told("comparing the export with the checkpoint")
        return compared(load_policy(making), original)


def _traced(spec: LeRobotCheckpoint) -> Original:
    spec.check()
    from reflex_runtime.robots.sources.lerobot_graphs import TRACED  # imports LeRobot and torch

    return TRACED[spec.model_type](spec)


def check_exported(spec: LeRobotCheckpoint) -> None:
    """ConfigError for a type that cannot be exported."""
    kind = spec.model_type
    if kind not in EXPORTED:
        reason = REASONS.get(kind, "only " + ", ".join(EXPORTED) + " are known to give graphs that compute the same")
        raise ConfigError(f"{spec.source}: type {kind} is not exported: {reason}. Serve it as it is: {_serve(spec)}")
    if kind == "diffusion":
        scheduler = spec.config.get("noise_scheduler_type")
        if scheduler != "DDIM":
            raise ConfigError(
                f"{spec.source}: noise_scheduler_type {scheduler} is not exported: it draws noise at every step, and a "
                f"graph would draw other noise. Serve it as it is ({_serve(spec)}), or set DDIM in its config.json if "
                "it was trained for both"
            )


def config_of(spec: LeRobotCheckpoint, opset: int) -> dict[str, Any]:
    """`reflex_config.json`, without what is known once the graphs are written."""
    config: dict[str, Any] = {
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
    }
    if spec.observation_steps > 1:
        config["observation_steps"] = spec.observation_steps
    if spec.horizon != spec.chunk_size:
        config["horizon"] = spec.horizon
    return config


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
    for size, start, apart in ways:
        rows = slice(start, start + size)
        found = _answers(policy, episodes[rows], f"{size}-{start}-{apart}", apart)
        differences = np.abs(found - wanted[rows])
        if not (differences <= allowed).all():  # NaN is never within
            joint = int(np.argmax((np.nan_to_num(differences, nan=np.inf) / allowed).max(axis=(0, 1))))
            raise NotTheSame(
                f"the export answers something else than the checkpoint: joint {joint} differs by "
                f"{differences[..., joint].max():.3g} in a batch of {size}, at most {allowed[joint]:.3g} is "
                "allowed. It was removed; serve the checkpoint as it is"
            )
        largest = max(largest, float(differences.max()))
        in_units = max(in_units, float((differences / np.maximum(original.unit, ROUNDING)).max()))
        count += len(found)
    return Verified(largest, in_units, count)


def _answers(policy: Policy, episodes: Sequence[Episode], name: str, apart: bool = False) -> Floats:
    """The answers to the last observations, of episodes that go on side by side. apart: at different denoise steps."""
    chunks: list[ActionChunk] = []
    for step, seen in enumerate(zip(*episodes, strict=True)):
        requests = [
            policy.request(policy.prepare(**one, episode_id=f"{name}-{i}", request_id=f"{name}-{i}-{step}"))
            for i, one in enumerate(seen)
        ]
        chunks = policy.answers(requests, range(len(requests)) if apart else ())
    return np.stack([chunk.actions for chunk in chunks])


def _write_embodiment(spec: LeRobotCheckpoint, directory: Path) -> None:
    """The robot, where the checkpoint knows something of it."""
    own = spec.path / EMBODIMENT_FILE
    if own.is_file():
        shutil.copyfile(own, directory / EMBODIMENT_FILE)
    elif spec.embodiment.action_names is not None:
        robot = {"name": spec.embodiment.name, "action_names": list(spec.embodiment.action_names)}
        (directory / EMBODIMENT_FILE).write_text(json.dumps(robot, ensure_ascii=False, indent=2) + "\n")


def _serve(spec: LeRobotCheckpoint) -> str:
    return f"reflex serve lerobot:{spec.path}"


# -- made-up episodes --------------------------------------------------------------------------------------------------


Episode = Sequence[Mapping[str, Any]]  # the fields of each of its requests
EPISODES: Final = 6  # as many as instructions and shapes
_INSTRUCTIONS: Final = (
    "pick up the cube", "wipe\n", "räume den\nTisch auf", "put the red block away", " open it \n\n", "put " * 60,
)  # fmt: skip
_SHAPES: Final = ((1.0, 1.0), (1.125, 2.0), (1.75, 1.0), (0.6, 0.4), (1.5, 2.0), (1.0, 1.0))
"""Height and width of an episode's pictures, as shares of those that the export's graph reads."""
_FILES: Final = {2: "PNG", 4: "JPEG"}
"""Episodes whose pictures come as files."""


def made_up(spec: PolicySpec, states: Floats) -> list[Episode]:
    """Episodes with what robots send: pictures of several kinds and shapes, as arrays and as files, a camera less where
    that may be, states in the training's range and outside it. The same ones every time."""
    episodes: list[Episode] = []
    for number, (instruction, (high, wide)) in enumerate(zip(_INSTRUCTIONS, _SHAPES, strict=True)):
        rng = np.random.Generator(np.random.PCG64(number))
        left_out = list(spec.images)[:1] if spec.optional_images >= set(spec.images) and number == 3 else []
        requests = []
        for _ in range(spec.observation_steps):
            pictures = {}
            for i, (name, (height, width)) in enumerate(spec.images.items()):
                shape = max(1, round(height * high)), max(1, round(width * wide))
                if name not in left_out:
                    pictures[name] = _picture(rng, shape, 8 if (number + i) % 2 else 1, _FILES.get(number, ""))
            beyond = (states[1] - states[0]) * (number > 3)
            state = rng.uniform(states[0] - beyond, states[1] + beyond).astype(np.float32)
            fields = {"images": pictures, "instruction": instruction, "seed": number}
            requests.append({**fields, "state": state} if spec.takes_state else fields)
        episodes.append(requests)
    return episodes


def _picture(rng: np.random.Generator, size: Size, block: int, kind: str) -> Any:
    """Blocks of colour of so many pixels. kind: of the file, "" for an array."""
    height, width = size
    coarse = rng.integers(0, 256, (-(-height // block), -(-width // block), 3), np.uint8)
    picture = np.ascontiguousarray(coarse.repeat(block, axis=0).repeat(block, axis=1)[:height, :width])
    if not kind:
        return picture
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.fromarray(picture).save(file, kind)
    return file.getvalue()
