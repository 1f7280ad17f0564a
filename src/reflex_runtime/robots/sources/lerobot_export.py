"""A LeRobot checkpoint as an export directory, compared with the checkpoint before it is there.

What is compared: the written directory as `reflex serve` loads it, against LeRobot's own preprocessor, policy and
postprocessor, on made-up observations that are asked alone, in pairs and all together.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.robots.policy.base import Policy
from reflex_runtime.robots.policy.observation import ActionChunk, Observation
from reflex_runtime.robots.policy.spec import PolicySpec, Size
from reflex_runtime.robots.policy.units import Floats
from reflex_runtime.robots.sources.embodiment import EMBODIMENT_FILE
from reflex_runtime.robots.sources.export_files import CONFIG_FILE, check_new, new_directory
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
    """The checkpoint, loaded by LeRobot.

    unit: by which each joint's actions are normalised, [action_dim]. states: lowest and highest, [2, state_dim].
    Observations have pictures as robots send them; they are fitted as the served checkpoint fits them.
    """

    unit: Floats
    states: Floats

    def write(self, directory: Path, opset: int) -> dict[str, Any]:
        """Write the graphs, and return the keys of `reflex_config.json` that are about them."""

    def answer(self, episode: Sequence[Observation]) -> Floats:
        """[chunk_size, action_dim] for its last observation, by LeRobot alone, in the robot's units."""


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
    if load is None:
        spec.check()
        load = _loader(spec.model_type)
    told(f"loading {spec.model_id} ({spec.model_type}) with LeRobot")
    original = load(spec)
    with new_directory(out, force) as making:
        told(f"tracing it to ONNX, opset {opset}")
        config = config_of(spec, opset) | original.write(making, opset)
        (making / CONFIG_FILE).write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n")
        _write_embodiment(spec, making)
        told("comparing the export with the checkpoint")
        return compared(load_policy(making), original)


def _loader(kind: str) -> Callable[[LeRobotCheckpoint], Original]:
    """What loads a type with LeRobot."""
    if kind == "smolvla":
        from reflex_runtime.robots.sources.lerobot_graphs import TracedSmolVla

        return TracedSmolVla
    from reflex_runtime.robots.sources.lerobot_graphs import TracedPolicy

    return TracedPolicy


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
    episodes = made_up(spec, original.states if spec.takes_state else None)
    wanted = np.stack([original.answer(episode) for episode in episodes])
    if wanted.shape[1:] != (spec.chunk_size, spec.action_dim):
        raise NotTheSame(f"the checkpoint answers {wanted.shape[1:]}, not {(spec.chunk_size, spec.action_dim)}")
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


def _answers(policy: Policy, episodes: Sequence[Sequence[Observation]], name: str, apart: bool = False) -> Floats:
    """The answers to the last observations, of episodes that go on side by side. apart: at different denoise steps."""
    chunks: list[ActionChunk] = []
    for step, seen in enumerate(zip(*episodes, strict=True)):
        requests = [
            policy.request(
                policy.prepare(
                    images=one.images,
                    state=one.state,
                    episode_id=f"{name}-{i}",
                    request_id=f"{name}-{i}-{step}",
                    seed=one.seed,
                    instruction=one.instruction if policy.spec.takes_text else None,
                )
            )
            for i, one in enumerate(seen)
        ]
        chunks = policy.answers(requests, range(len(requests)) if apart else ())
    return np.stack([chunk.actions for chunk in chunks])


def _write_embodiment(spec: LeRobotCheckpoint, directory: Path) -> None:
    """The robot, where the checkpoint knows something of it."""
    own = spec.features.path / EMBODIMENT_FILE
    if own.is_file():
        shutil.copyfile(own, directory / EMBODIMENT_FILE)
    elif spec.embodiment.action_names is not None:
        robot = {"name": spec.embodiment.name, "action_names": list(spec.embodiment.action_names)}
        (directory / EMBODIMENT_FILE).write_text(json.dumps(robot, ensure_ascii=False, indent=2) + "\n")


def _serve(spec: LeRobotCheckpoint) -> str:
    return f"reflex serve lerobot:{spec.features.path}"


# -- made-up episodes --------------------------------------------------------------------------------------------------


EPISODES: Final = 6  # as many as instructions and shapes
_INSTRUCTIONS: Final = (
    "pick up the cube", "wipe\n", "räume den\nTisch auf", "put the red block away", " open it \n\n", "put " * 60,
)  # fmt: skip
_SHAPES: Final = ((1.0, 1.0), (1.125, 2.0), (1.75, 1.0), (0.6, 0.4), (1.5, 2.0), (1.0, 1.0))
"""Height and width of an episode's pictures, as shares of those that the export's graph reads."""


def made_up(spec: PolicySpec, states: Floats | None) -> list[list[Observation]]:
    """Episodes with what robots send: pictures of several kinds and shapes, as arrays and as files, a camera less where
    that may be, states in the training's range and outside it. The same ones every time."""
    episodes: list[list[Observation]] = []
    for number, (instruction, (high, wide)) in enumerate(zip(_INSTRUCTIONS, _SHAPES, strict=True)):
        rng = np.random.Generator(np.random.PCG64(number))
        left_out = list(spec.images)[:1] if spec.optional_images >= set(spec.images) and number == 3 else []
        episodes.append([])
        for _ in range(spec.observation_steps):
            pictures: dict[str, Any] = {}
            for i, (name, size) in enumerate(spec.images.items()):
                shape = max(1, round(size[0] * high)), max(1, round(size[1] * wide))
                if name not in left_out:
                    pictures[name] = _sent(_picture(rng, shape, number + i), number)
            state = None
            if states is not None:
                beyond = (states[1] - states[0]) * (number > 3)
                state = rng.uniform(states[0] - beyond, states[1] + beyond).astype(np.float32)
            episodes[-1].append(Observation(pictures, state=state, seed=number, instruction=instruction))
    return episodes


def _sent(picture: NDArray[np.uint8], number: int) -> Any:
    """The picture as the robot of an episode sends it: a PNG, a JPEG, or as it is."""
    if number not in (2, 4):
        return picture
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.fromarray(picture).save(file, "PNG" if number == 2 else "JPEG")
    return file.getvalue()


def _picture(rng: np.random.Generator, size: Size, kind: int) -> NDArray[np.uint8]:
    height, width = size
    if kind % 4 == 0:
        return rng.integers(0, 256, (height, width, 3), np.uint8)
    if kind % 4 == 1:  # blocks of colour
        coarse = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
        return coarse.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]
    if kind % 4 == 2:  # from dark to light
        ramp = np.linspace(0, 255, height)[:, None, None] * np.linspace(0.2, 1.0, width)[None, :, None]
        return (ramp * rng.uniform(0.3, 1.0, 3)).astype(np.uint8)
    return np.full((height, width, 3), rng.choice((0, 255)), np.uint8)
