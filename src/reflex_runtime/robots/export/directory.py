"""An export directory as a frozen value: `reflex_config.json`, the embodiment, the model files and their hashes.

Everything a name could get wrong is found here or when the graphs are opened, never in front of a robot. Every error is
a ConfigError that names the file and the key, what was found and what is expected. `docs/exports.md` explains each key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.export.config_file import (
    CONFIG_FILE,
    ExportConfig,
    ExportObject,
    read_json,
    read_prompt,
    whole,
)
from reflex_runtime.robots.export.embodiment import (
    read_action_transforms,
    read_embodiment,
    read_norm,
    read_state_transforms,
)
from reflex_runtime.robots.export.model_files import check_files, config_hash, model_bytes, model_hash
from reflex_runtime.robots.export.roles import MASKS, ROLES, Graph, Roles
from reflex_runtime.robots.export.wires import read_wires
from reflex_runtime.robots.models.onnx_models import OnnxStaged, OnnxWhole
from reflex_runtime.robots.policy.model import PolicySource
from reflex_runtime.robots.policy.observation import IMAGE_MASK
from reflex_runtime.robots.policy.robot import Size
from reflex_runtime.robots.policy.spec import DeviceOptions
from reflex_runtime.robots.policy.tokenizer import InstructionTokenizer, WordTokenizer, read_tokenizer
from reflex_runtime.robots.policy.units import AddState

_BUNDLED: Final = "; bundled: reflex serve demo is a robot policy, reflex serve scribe a language model"

_MaxTokens = Annotated[int, whole(1, 100_000)]
_Vocabulary = Annotated[
    dict[str, Annotated[int, Meta(ge=0)]],
    Meta(min_length=1, description="an object {word: id >= 0}, or the name of a tokenizer.json file"),
]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Export(PolicySource):
    """A checked export directory. Make one with `Export.load`.

    config: the parsed file as it is.
    graphs: {"model": …}, or {"prefix": …, "expert": …} when decomposed.
    past_kv: when decomposed, the expert's input name for each of the prefix's keys-and-values outputs.
    """

    path: Path
    graphs: Mapping[str, Graph]
    past_kv: Mapping[str, str]
    opset: int | None = None

    @property
    def masked(self) -> bool:
        """Whether a graph takes masks of the images."""
        roles = {role for graph in self.graphs.values() for role in graph.inputs if role not in self.images}
        return any(role == MASKS or role.startswith(IMAGE_MASK) for role in roles)

    @staticmethod
    def load(path: str | Path) -> Export:
        """Read and check the directory. The graphs themselves are opened, and checked against it, by `open`."""
        root = Path(path)
        check_directory(root, _hint(root))
        check_files(root)
        return _load(root)

    def open(self, device: DeviceOptions) -> OnnxStaged | OnnxWhole:
        if not self.staged:
            return OnnxWhole(self, self.graphs["model"], device)
        return OnnxStaged(self, self.graphs["prefix"], self.graphs["expert"], self.past_kv, device)


def check_directory(path: Path, hint: str = "", what: str = "an export directory") -> None:
    """ConfigError for what is no directory. hint: for a path that does not exist. what: is expected there."""
    if path.is_file():
        raise ConfigError(f"{path}: is a file; name its directory, {path.parent}")
    if not path.is_dir():
        raise ConfigError(f"{path}: not found, expected {what}{hint or _BUNDLED}")


def _hint(path: Path) -> str:
    """What to do where the name of a model on a hub was given."""
    download = from_hub(path)
    return f" or the directory of a language model{download}" if download else ""


def from_hub(path: Path, source: str = "") -> str:
    """How to download what may be the name of a model on a hub, "" for any other path. source: what its source begins
    with."""
    name = path.as_posix()
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) or path.parent.exists():
        return ""
    there = path.name
    return (
        f". If {name} is the name of a model on a hub, download it first (pip "
        f"install huggingface_hub; hf download {name} --local-dir {there}), then: reflex serve {source}./{there}"
    )


def _load(root: Path) -> Export:
    table = ExportObject(root / CONFIG_FILE, read_json(root / CONFIG_FILE))
    config = table.read(ExportConfig)
    images = _images(table, config)
    optional = _optional_images(table, config, images)
    roles = Roles(root, table, config, images)
    graphs = roles.graphs()
    tokenizer, max_tokens = _text(root, table, roles.inputs.has("tokens"))
    prompt = read_prompt(table, roles.inputs.has("tokens"))
    dims = {"state_norm": config.state_dim, "action_norm": config.action_dim}
    embodiment, norms = read_embodiment(root, table, dims)
    for key, dim in dims.items():
        if table.has(key) and norms[key] is not None:
            table.wrong(key, "it in one file only, and the embodiment has one as well")
        norms[key] = norms[key] or read_norm(table, key, dim)
    x_dim = config.x_dim or config.action_dim
    if x_dim < config.action_dim:
        table.wrong("x_dim", f"at least action_dim, {config.action_dim}")
    if config.horizon is not None and config.export_kind == "decomposed":
        table.wrong("horizon", "none in a decomposed export: x has chunk_size rows")
    takes_state = any("state" in graph.inputs for graph in graphs.values())
    action_transforms = read_action_transforms(table, config.action_dim, config.state_dim)
    for key, reads in (
        ("prompt", prompt is not None and prompt.reads_state),
        ("action_transforms", any(isinstance(transform, AddState) for transform in action_transforms)),
    ):
        if reads and config.state_dim == 0:
            table.wrong("state_dim", f"at least 1, because `{key}` reads the state")
        takes_state = takes_state or reads
    if config.observation_steps is not None and config.observation_steps > 1 and not images and not takes_state:
        table.wrong("observation_steps", "1, because there are neither images nor a state to look back to")
    return Export(
        source=str(root),
        path=root,
        config=table.values,
        model_id=config.model_id,
        model_type=config.model_type,
        staged=config.export_kind == "decomposed",
        state_dim=config.state_dim,
        action_dim=config.action_dim,
        chunk_size=config.chunk_size,
        num_denoising_steps=config.num_denoising_steps,
        opset=config.opset,
        images=images,
        takes_state=takes_state,
        takes_text=any("tokens" in graph.inputs for graph in graphs.values()),
        takes_noise=any("noise" in graph.inputs for graph in graphs.values()),
        x_dim=x_dim,
        horizon=config.horizon or config.chunk_size,
        optional_images=optional,
        observation_steps=config.observation_steps or 1,
        prompt=prompt,
        state_transforms=read_state_transforms(table, config.state_dim),
        action_transforms=action_transforms,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        embodiment=embodiment,
        graphs=graphs,
        past_kv=roles.past_kv,
        prefix_takes_state="prefix" in graphs and "state" in graphs["prefix"].inputs,
        model_hash=model_hash(root),
        config_hash=config_hash(root),
        model_bytes=model_bytes(root),
        resize=config.resize or "stretch",
        wires=read_wires(table, images, config.state_dim if takes_state else 0, config.action_dim, optional),
        state_norm=norms["state_norm"],
        action_norm=norms["action_norm"],
    )


def _images(table: ExportObject, config: ExportConfig) -> dict[str, Size]:
    """`images`, or the single image of `image_size`; both must agree where both are given."""
    size = config.image_size
    if config.images is None:
        return {} if size is None else {"image": size}
    images = table.sizes("images", config.images)
    for name in images:
        if name in ROLES or name == "actions":
            table.wrong(f"images.{name}", "a name other than " + ", ".join((*ROLES, "actions")), name)
    if size is not None and size not in images.values():
        table.wrong("image_size", "the size of one of `images`")
    return images


def _optional_images(table: ExportObject, config: ExportConfig, images: Mapping[str, Size]) -> frozenset[str]:
    names = config.optional_images or ()
    for name in names:
        if name not in images:
            table.wrong("optional_images", "names of `images`: " + (", ".join(images) or "there are none"), name)
    if names and len(set(names)) == len(images):
        table.wrong("optional_images", "fewer than all images: a request must show something")
    return frozenset(names)


def _text(root: Path, table: ExportObject, takes_text: bool) -> tuple[InstructionTokenizer | None, int]:
    if not takes_text:
        if table.has("tokenizer"):
            table.wrong("tokenizer", "none, because `inputs` has no role tokens", "one")
        return None, 0
    max_tokens: int = table.convert("max_tokens", _MaxTokens)
    if isinstance(table.get("tokenizer"), str):
        return read_tokenizer(table.file_in(root, "tokenizer")), max_tokens
    return WordTokenizer(table.convert("tokenizer", _Vocabulary)), max_tokens
