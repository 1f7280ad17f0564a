"""The JSON files of an export, read strictly, and the keys of `reflex_config.json`. Errors name file and key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import GenericAlias
from typing import Annotated, Any, Final, Literal, NoReturn, get_args

import msgspec
from msgspec import Meta

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.prompt import PROMPT, STATE_BINS, Cleaning, PromptTemplate
from reflex_runtime.robots.policy.robot import Resize, Size
from reflex_runtime.settings.json_files import JsonObject, described

CONFIG_FILE: Final = "reflex_config.json"

ExportKind = Literal["monolithic", "decomposed"]


def whole(low: int, high: int = 1_000_000) -> Meta:
    """An integer between two bounds."""
    return Meta(ge=low, le=high, description=f"an integer in [{low}, {high}]")


def list_of(item: Any, count: int, what: str) -> Any:
    """The type of a list of so many items; `what` names them."""
    length = Meta(min_length=count, max_length=count, description=f"a list of {count} {what}")
    # mypy takes no variable in a type, hence not tuple[item, ...]
    return Annotated[GenericAlias(tuple, (item, ...)), length]


def names_of(count: int) -> Any:
    """The type of a list of so many different texts."""
    return list_of(Name, count, "different texts")


LARGEST: Final = 3.0e38  # nearly the largest number of float32
Text = Annotated[str, Meta(pattern=r"\S", description="a text")]
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Name = Annotated[str, Meta(min_length=1)]
_Pixels = Annotated[int, Meta(ge=1, le=4096)]
ImageSize = Annotated[tuple[_Pixels, _Pixels], Meta(description="[height, width], each an integer in [1, 4096]")]
ImageSizes = Annotated[dict[Name, Any], Meta(description="an object {name: [height, width]}")]
Names = Annotated[tuple[Name, ...], Meta(min_length=1, description="a list of one or more different texts")]
_FileName = Annotated[str, Meta(min_length=1, description="a file name within the export directory")]


class ExportConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The keys of `reflex_config.json`. What depends on another key is Any here and checked where both are known."""

    model_id: Text
    model_type: Text
    export_kind: Annotated[ExportKind, Meta(description="'monolithic' or 'decomposed'")]
    state_dim: Annotated[int, whole(0)]
    action_dim: Annotated[int, whole(1)]
    chunk_size: Annotated[int, whole(1)]
    num_denoising_steps: Annotated[int, whole(1, 1000)]
    opset: Annotated[int, whole(1, 1000)] | None = None
    image_size: ImageSize | None = None
    images: ImageSizes | None = None
    optional_images: Names | None = None
    observation_steps: Annotated[int, whole(1, 64)] | None = None
    x_dim: Annotated[int, whole(1)] | None = None
    horizon: Annotated[int, whole(1)] | None = None
    resize: Annotated[Resize, Meta(description=" or ".join(map(repr, get_args(Resize))))] | None = None
    wires: Any = None
    inputs: Any = None
    outputs: Any = None
    decomposed: Any = None
    tokenizer: Any = None
    prompt: Any = None
    max_tokens: Any = None
    state_norm: Any = None
    action_norm: Any = None
    state_transforms: Any = None
    action_transforms: Any = None
    embodiment: Any = None
    metadata: Any = None


class ExportObject(JsonObject):
    """A JSON object of the export."""

    def sizes(self, key: str, values: Mapping[str, Any]) -> dict[str, Size]:
        """Every (height, width) of an object {name: [height, width]}."""
        return {name: self.convert(f"{key}.{name}", ImageSize, size) for name, size in values.items()}

    def different(self, key: str, kind: Any) -> tuple[str, ...]:
        """A list of texts of which none occurs twice. kind: its type, of which this checks the rest."""
        texts: tuple[str, ...] = self.convert(key, kind)
        if len(set(texts)) < len(texts):
            self.wrong(key, described(kind))
        return texts

    def file_in(self, root: Path, key: str) -> Path:
        """A file of the directory. Links inside it are followed: model hubs store files as links."""
        name: str = self.convert(key, _FileName)
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name:
            self.wrong(key, "a relative path that stays within the export directory")
        if not (root / pure).is_file():
            self.wrong(key, f"a file that exists in {root}")
        return root / pure


def read_json(file: Path) -> Any:
    """The value in a JSON file; ConfigError naming what is wrong with it."""
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{file}: {key}: found twice, expected once")
            found[key] = value
        return found

    def no_constant(name: str) -> NoReturn:
        raise ConfigError(f"{file}: found {name}, expected finite numbers only")

    try:
        return json.loads(file.read_bytes(), object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except FileNotFoundError:
        told = "not found, expected in an export directory (docs/exports.md); a language model's has a config.json"
        raise ConfigError(f"{file}: {told}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: is not JSON: {error}") from error


# -- the key `prompt` --------------------------------------------------------------------------------------------------


_WORDS: Final = ", ".join(get_args(Cleaning))
_Template = Annotated[str, Meta(max_length=4096, description=f"a text with {PROMPT} once, and perhaps {STATE_BINS}")]


class _PromptKeys(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    template: _Template = PROMPT
    clean: Annotated[tuple[Cleaning, ...], Meta(max_length=8, description=f"a list of {_WORDS}")] = ()


def read_prompt(config: ExportObject, takes_text: bool) -> PromptTemplate | None:
    """The template; None without the key."""
    if not config.has("prompt"):
        return None
    if not takes_text:
        config.wrong("prompt", "none, because `inputs` has no role tokens")
    said = config.get("prompt")
    table = ExportObject(config.file, {"template": said} if isinstance(said, str) else said, "prompt")
    keys = table.read(_PromptKeys)
    places = re.findall(r"{\w*}", keys.template)
    if places.count(PROMPT) != 1 or set(places) - {PROMPT, STATE_BINS}:
        config.wrong("prompt", f"a text with {PROMPT} once, and perhaps {STATE_BINS}", keys.template)
    return PromptTemplate(keys.template, keys.clean)
