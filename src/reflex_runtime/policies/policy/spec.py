"""What a policy expects, gives and is, whatever its files are: everything the server needs beside the model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from reflex_runtime.policies.export.config_file import Resize, Size
from reflex_runtime.policies.export.embodiment import Embodiment, Norm
from reflex_runtime.policies.export.wires import WireMap
from reflex_runtime.policies.policy.tokenizer import InstructionTokenizer
from reflex_runtime.processors.onnx import CPU


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How a model is loaded onto the device.

    provider: the execution provider, by ONNX Runtime's name; other kinds of models take the same device.
    threads: of the CPU. captured_sizes: batch sizes to capture as CUDA graphs, ascending.
    dtype: "" as the model is stored, "float32", "bfloat16" or "float16". compile: by torch.compile.
    """

    provider: str = CPU
    threads: int = 1
    captured_sizes: Sequence[int] = ()
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    compile: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicySpec:
    """What a policy expects, gives and is.

    source: as errors and /health name it: a directory, `lerobot:DIR` or `python:module:make`.
    staged: it has a prefix and denoise steps as calls of their own ("decomposed" on the wire, else "monolithic").
    config: its configuration as JSON, for /config. model_hash, config_hash: first 16 hex digits of SHA-256.
    model_bytes: size of its weights.

    images: (height, width) by image name, uint8 [height, width, 3]. resize: how pictures of another size are fitted:
        stretched, or padded with black; "none" leaves them as they came, for a model that fits them itself.
    takes_state, state_dim, state_norm: the robot's state, normalised before the model sees it if there is a state_norm.
    takes_text: an instruction is needed. tokenizer, max_tokens: how it becomes tokens; None if the model does that.
    takes_noise: the request's noise decides the answer. x_dim: width of the noise and of what is denoised.
    prefix_takes_state: the state is an input of the prefix, so that a new state needs a new prefix.
    chunk_size, action_dim, action_norm: the answer, [chunk_size, action_dim], denormalised.
    wires: what the observations of other protocols mean, by wire.
    """

    source: str
    model_id: str
    model_type: str
    staged: bool
    state_dim: int
    action_dim: int
    chunk_size: int
    num_denoising_steps: int
    images: Mapping[str, Size]
    takes_state: bool
    takes_text: bool
    takes_noise: bool
    x_dim: int
    model_hash: str
    config_hash: str
    config: Mapping[str, Any] = field(default_factory=dict)
    model_bytes: int = 0
    tokenizer: InstructionTokenizer | None = None
    max_tokens: int = 0
    state_norm: Norm | None = None
    action_norm: Norm | None = None
    embodiment: Embodiment = field(default_factory=Embodiment)
    prefix_takes_state: bool = False
    resize: Resize | Literal["none"] = "stretch"
    wires: Mapping[str, WireMap] = field(default_factory=dict)

    @property
    def inference_mode(self) -> str:
        """The kind in the words of the wire and of exports: "decomposed" for staged models, else "monolithic"."""
        return "decomposed" if self.staged else "monolithic"
