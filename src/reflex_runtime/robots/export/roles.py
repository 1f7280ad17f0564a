"""Which tensor of which model file plays which role: `inputs`, `outputs` and `decomposed` of an export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.export.config_file import ExportConfig, ExportObject, Names, Text, names_of
from reflex_runtime.robots.policy.observation import IMAGE_MASK
from reflex_runtime.robots.policy.robot import Size
from reflex_runtime.run.onnx_session import TensorSpec

MODEL_FILE: Final = "model.onnx"
ROLES: Final = ("tokens", "state", "noise", "time", "past_kv")  # beside the names of the images
TOKEN_MASK, MASKS = "token_mask", "image_masks"  # and image_mask/NAME


@dataclass(frozen=True, slots=True)
class Graph:
    """One model file, and the tensors the runtime expects it to have, by role ("past_kv/0" … for keys and values)."""

    file: Path
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


class Roles:
    """`inputs`, `outputs` and `decomposed`: which tensor of which graph plays which role."""

    def __init__(self, root: Path, table: ExportObject, config: ExportConfig, images: Mapping[str, Size]) -> None:
        self._root, self._table, self._kind, self._images = root, table, config.export_kind, images
        split = config.export_kind == "decomposed"
        chunk = (config.chunk_size, config.x_dim or config.action_dim)
        steps = config.observation_steps or 1
        axis = (steps,) if steps > 1 else ()  # of history
        masks = [MASKS, *(IMAGE_MASK + name for name in images)]
        # An image of an export that was written before these roles may have the name of one.
        self._optional = [role for role in (TOKEN_MASK, *masks) if role not in images]
        self.inputs = ExportObject(table.file, table.get("inputs"), "inputs")
        own = ["tokens", "state", "noise", *(["time", "past_kv"] if split else [])]
        self.inputs.only([*images, *own, *self._optional])
        self.outputs = ExportObject(table.file, table.get("outputs"), "outputs")
        self.outputs.only(["actions", *(["past_kv"] if split else [])])
        most = config.max_tokens
        self._specs: dict[str, tuple[str, tuple[int | None, ...]]] = {
            TOKEN_MASK: ("bif", (most if type(most) is int else None,)),
            MASKS: ("bif", (*axis, len(images))),
            **{IMAGE_MASK + name: ("bif", axis) for name in images},
            **{name: ("u", (*axis, *size, 3)) for name, size in images.items()},
            "tokens": ("i", (most if type(most) is int else None,)),
            "state": ("f", (*axis, config.state_dim)),
            "noise": ("f", (config.horizon or config.chunk_size, chunk[1])),
            "time": ("f", ()),
            "actions": ("f", chunk),
        }
        self.past_kv: dict[str, str] = {}
        if self.inputs.has("state") and config.state_dim == 0:
            table.wrong("state_dim", "at least 1, because `inputs` has the role state")
        for name in images:
            self.inputs.convert(name, Text)
        if TOKEN_MASK in self._optional and self.inputs.has(TOKEN_MASK) and not self.inputs.has("tokens"):
            self.inputs.wrong(TOKEN_MASK, "none without the role tokens")

    def graphs(self) -> dict[str, Graph]:
        """The graphs of this kind of export, with every role in the one it belongs to."""
        seen = [*self._images, *(["tokens"] if self.inputs.has("tokens") else [])]
        masks = [role for role in self._optional if self.inputs.has(role)]
        state = ["state"] if self.inputs.has("state") else []
        if self._kind == "monolithic":
            if self._table.has("decomposed"):
                self._table.wrong("decomposed", "none in a monolithic export")
            noise = ["noise"] if self.inputs.has("noise") else []
            if not seen and not state:
                self._table.wrong("inputs", "an image, tokens or state: something to act on")
            file = self._root / MODEL_FILE
            if not file.is_file():
                raise ConfigError(f"{file}: not found, expected the model of a monolithic export")
            return {"model": self._graph(file, [*seen, *masks, *state, *noise], ["actions"])}
        parts = ExportObject(self._table.file, self._table.get("decomposed"), "decomposed")
        fields = parts.read(_Decomposed)
        names = parts.different("past_kv_tensor_names", Names)
        made, read = self._kv(self.outputs, names), self._kv(self.inputs, names)
        self.past_kv = dict(zip(made, read, strict=True))
        to_expert = fields.expert_takes_state
        if to_expert and not state:
            self.inputs.wrong("state", "a tensor name, because `expert_takes_state` is true")
        prefix, expert = (parts.file_in(self._root, key) for key in ("vlm_prefix_onnx", "expert_denoise_onnx"))
        sees = [*seen, *([] if to_expert else state)]
        if not sees:
            self._table.wrong("inputs", "an image, tokens or state for the prefix to see")
        return {
            "prefix": self._graph(prefix, [*sees, *masks], [], made=made),
            "expert": self._graph(expert, ["noise", "time", *(state if to_expert else [])], ["actions"], read=read),
        }

    def _kv(self, table: ExportObject, names: tuple[str, ...]) -> tuple[str, ...]:
        """Tensor names of the keys and values on one side: `past_kv_tensor_names` unless the role says otherwise."""
        if not table.has("past_kv"):
            return names
        if isinstance(table.get("past_kv"), str) and len(names) == 1:
            return (table.convert("past_kv", Text),)
        return table.different("past_kv", names_of(len(names)))

    def _graph(
        self,
        file: Path,
        inputs: Sequence[str],
        outputs: Sequence[str],
        read: Sequence[str] = (),
        made: Sequence[str] = (),
    ) -> Graph:
        taken: dict[str, TensorSpec] = {role: self._spec(self.inputs, role) for role in inputs}
        taken |= {f"past_kv/{i}": TensorSpec(name) for i, name in enumerate(read)}
        names: set[str] = set()
        for role, spec in taken.items():
            if spec.name in names:
                self.inputs.wrong(role.partition("/")[0], "a tensor that no other role has", spec.name)
            names.add(spec.name)
        given = {role: self._spec(self.outputs, role) for role in outputs}
        given |= {f"past_kv/{i}": TensorSpec(name) for i, name in enumerate(made)}
        return Graph(file, taken, given)

    def _spec(self, table: ExportObject, role: str) -> TensorSpec:
        kind, dims = self._specs[role]
        return TensorSpec(table.convert(role, Text), kind, dims)


class _Decomposed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    vlm_prefix_onnx: Any = None
    expert_denoise_onnx: Any = None
    past_kv_tensor_names: Any = None
    expert_takes_state: Annotated[bool, Meta(description="true or false")]
