"""The description of a policy, whatever its files are: all that the server must know besides the model itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Final, Literal, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.tokenizer import InstructionTokenizer, PromptTemplate
from reflex_runtime.robots.policy.units import AddState, Norm, Transform
from reflex_runtime.run.model_files import shorten
from reflex_runtime.run.onnx_session import CPU

Resize = Literal["stretch", "pad", "pad-smolvla-float"]
FLOAT_LEVELS: Final = "pad-smolvla-float"
"""The `resize` that makes float32 pictures, whose levels 0 … 255 are not rounded."""
Size = tuple[int, int]  # height, width in pixels


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How a model is loaded onto the device.

    provider: by ONNX Runtime's name; other kinds of models take the same device. threads: of the CPU.
    captured_sizes: batch sizes to capture as CUDA graphs, ascending. compile: by torch.compile.
    """

    provider: str = CPU
    threads: int = 1
    captured_sizes: Sequence[int] = ()
    dtype: Literal["stored", "float32", "bfloat16", "float16"] = "stored"
    compile: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Embodiment:
    """The robot of a policy.

    action_space: "absolute" (targets), "relative" (changes), or None if unknown. action_ranges: float32
    [action_dim, 2], lowest and highest value of the robot, or None. cameras: (height, width) by name. control_rate_hz:
    actions executed per second.
    """

    name: str = "unknown"
    action_space: Literal["absolute", "relative"] | None = None
    action_ranges: NDArray[np.float32] | None = None
    action_names: tuple[str, ...] | None = None
    action_units: tuple[str, ...] | None = None
    state_names: tuple[str, ...] | None = None
    gripper_index: int | None = None
    cameras: Mapping[str, Size] | None = None
    control_rate_hz: float | None = None


@dataclass(frozen=True, slots=True)
class WireMap:
    """The names of a policy's inputs in the observations of one wire. Inputs without one have the policy's names.

    images: by camera. state: the names of the parts of the state, in order. prompt: the name of the instruction.
    metadata: announced by the wire besides its own. dialect: for openpi. execute: for vla-eval, how many actions of a
    chunk are used; 0 is all. state_sizes, actions: for wires with groups, the sizes of the parts of state and actions.
    """

    images: Mapping[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    prompt: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dialect: Literal["openpi", "roboarena"] = "openpi"
    execute: int = 0
    state_sizes: tuple[int, ...] = ()
    actions: tuple[tuple[str, int], ...] = ()


class Wire(NamedTuple):
    """A protocol of requests, and its modules in `robots/wires`.

    routes: the module with `routes(handler)`. listener: the module with `listener(app, handler)`, for a port of its own
    whose address is in the setting `setting`. clients: their name in the log. described: exports may have it.
    """

    routes: str = ""
    listener: str = ""
    setting: str = ""
    clients: str = ""
    described: bool = False


WIRES: Final = {
    "act": Wire("act"),
    "openpi": Wire("openpi", described=True),
    "json-numpy": Wire(described=True),  # on /act
    "oip": Wire("oip", "oip", "oip_grpc", "OIP over gRPC"),
    "vla-eval": Wire("vla_eval", described=True),
    "gr00t": Wire("", "groot", "gr00t", "GR00T", described=True),
    "lerobot": Wire("", "lerobot", "lerobot", "LeRobot", described=True),
}
"""By the names in metrics and recordings."""

LEROBOT: Final = "lerobot:"
OPENPI: Final = "openpi:"
PYTHON: Final = "python:"
"""The prefixes of sources that are no export directories."""

_RANGES = (
    ("action_dim", 1, 1_000_000),
    ("chunk_size", 1, 1_000_000),
    ("state_dim", 0, 1_000_000),
    ("num_denoising_steps", 1, 1000),
    ("observation_steps", 1, 64),
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicySpec:
    """The inputs and outputs of a policy, and its model's properties.

    source: in errors and /health: a directory, `lerobot:DIR`, `openpi:DIR` or `python:module:make`.
    staged: prefix and denoise steps are calls of their own ("decomposed" on the wire, else "monolithic").
    config: JSON-safe, for /config. model_hash, config_hash: first 16 hex digits of SHA-256; filled in where empty.

    images: (height, width) by name, uint8 [height, width, 3] unless `resize` is `FLOAT_LEVELS`. resize: how pictures of
        another size are fitted; "none" leaves that to the model. other_names: by image, another name in requests.
    optional_images: those that a request may leave out, but not all of its images: the model gets black pictures and
        `Observation.present`.
    observation_steps: observations of an episode that the model sees together, the newest last (`ObservationHistory`).
        Images and state have an axis of that length in front if it is above 1.
    state_transforms: applied to the state before `state_norm`. action_transforms: applied to the denormalised actions.
    takes_text: an instruction is needed. default_prompt: for requests that have none. tokenizer, max_tokens: how it
        becomes tokens; None if the model does that. prompt: the text to tokenize; None for the instruction unchanged.
    takes_noise: the answer depends on the request's noise. x_dim, horizon: width and rows of what is denoised; 0 is
        action_dim and chunk_size. Only whole models may have another horizon.
    prefix_takes_state: a new state needs a new prefix.
    """

    model_id: str
    staged: bool
    action_dim: int
    chunk_size: int
    source: str = ""
    model_type: str = "custom"
    images: Mapping[str, Size] = field(default_factory=dict)
    resize: Resize | Literal["none"] = "stretch"
    other_names: Mapping[str, str] = field(default_factory=dict)
    takes_state: bool = False
    state_dim: int = 0
    state_norm: Norm | None = None
    takes_text: bool = False
    default_prompt: str | None = None
    tokenizer: InstructionTokenizer | None = None
    max_tokens: int = 0
    takes_noise: bool = True
    x_dim: int = 0
    horizon: int = 0
    prefix_takes_state: bool = False
    num_denoising_steps: int = 1
    action_norm: Norm | None = None
    embodiment: Embodiment = field(default_factory=Embodiment)
    wires: Mapping[str, WireMap] = field(default_factory=dict)
    prompt: PromptTemplate | None = None
    optional_images: frozenset[str] = frozenset()
    observation_steps: int = 1
    state_transforms: Sequence[Transform] = ()
    action_transforms: Sequence[Transform] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    model_hash: str = ""
    config_hash: str = ""
    model_bytes: int = 0

    def __post_init__(self) -> None:
        """Fill x_dim and horizon; ConfigError for a wrong field."""
        if not self.x_dim:
            object.__setattr__(self, "x_dim", self.action_dim)
        if not self.horizon:
            object.__setattr__(self, "horizon", self.chunk_size)
        if not self.model_id.strip():
            self.wrong("model_id", "a text")
        for name, low, high in _RANGES:
            if not (isinstance(getattr(self, name), Integral) and low <= getattr(self, name) <= high):
                self.wrong(name, f"an integer in [{low}, {high}]")
        if not isinstance(self.images, Mapping):
            self.wrong("images", "a dict of (height, width) by name")
        for name, size in self.images.items():
            if np.shape(size) != (2,) or not all(1 <= pixels <= 4096 for pixels in size):
                self.wrong("images", f"of {name} (height, width), each in [1, 4096]")
        if unknown := sorted(self.optional_images - self.images.keys()):
            there = ", ".join(self.images) or "there are none"
            self.wrong("optional_images", f"names of `images`: {there}", unknown[0])
        if self.x_dim < self.action_dim:
            self.wrong("x_dim", f"at least action_dim, {self.action_dim}")
        if self.staged and self.horizon != self.chunk_size:
            self.wrong("horizon", "none in a decomposed policy, whose x has chunk_size rows")
        self._check_sizes()
        if self.prompt is not None and self.tokenizer is None:
            self.wrong("prompt", "none without a tokenizer: the model makes its own text")
        if not self.takes_state and self.reads_state:
            self.wrong("takes_state", "True, because the prompt or AddState reads the state")
        if self.takes_state and not self.state_dim:
            self.wrong("state_dim", "at least 1, because the policy reads a state")
        if not (self.images or self.takes_state or self.takes_text):
            self.wrong("images", "one, or takes_state or takes_text: something to act on")
        if self.observation_steps > 1 and not self.images and not self.takes_state:
            self.wrong("observation_steps", "1, because there are neither images nor a state to look back to")

    def _check_sizes(self) -> None:
        """Check the sizes of arrays and names: NumPy would use one number for all joints."""
        robot, dim = self.embodiment, self.action_dim
        for name, count in (("state_norm", self.state_dim), ("action_norm", dim)):
            norm: Norm | None = getattr(self, name)
            shapes = [np.shape(getattr(norm, part, 0)) for part in ("offset", "scale")]
            if norm is not None and shapes != [(count,)] * 2:
                self.wrong(name, f"a Norm with offset and scale of shape [{count}]", shapes)
        ranges = robot.action_ranges
        if ranges is not None and (not isinstance(ranges, np.ndarray) or ranges.shape != (dim, 2)):
            self.wrong("embodiment", f"action_ranges, an array of shape [{dim}, 2]", np.shape(ranges))
        if robot.action_names is not None and len(robot.action_names) != dim:
            self.wrong("embodiment", f"{dim} action_names", robot.action_names)
        if self.tokenizer is not None and self.max_tokens < 1:
            self.wrong("max_tokens", "at least 1, because there is a tokenizer")

    def wrong(self, name: str, expected: str, found: object = None) -> NoReturn:
        """Raise the ConfigError for a field. found: the wrong value, by default the field's."""
        value = getattr(self, name) if found is None else found
        shown = shorten(json.dumps(value, ensure_ascii=False, default=str))
        raise ConfigError(f"{self.place}{name}: found {shown}, expected {expected}")

    @property
    def place(self) -> str:
        """What stands before a field's name in errors."""
        return "PolicySpec."

    @property
    def reads_state(self) -> bool:
        """Whether the text or the answers depend on the state, whatever the model's inputs are."""
        adds = any(isinstance(transform, AddState) for transform in self.action_transforms)
        return adds or (self.prompt is not None and self.prompt.reads_state)

    @property
    def inference_mode(self) -> str:
        """The kind by its name in wires and exports: "decomposed" for staged models, else "monolithic"."""
        return "decomposed" if self.staged else "monolithic"
