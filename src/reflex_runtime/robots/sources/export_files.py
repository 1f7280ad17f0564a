"""The files of an export: JSON, read strictly, with the keys of `reflex_config.json`; model files, and the hashes that
name their versions; and how a directory is written whole. Errors name file and key."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import GenericAlias
from typing import Annotated, Any, Final, Literal, NoReturn, get_args

import msgspec
from msgspec import Meta

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.spec import Resize, Size
from reflex_runtime.robots.policy.tokenizer import PROMPT, STATE_BINS, Cleaning, PromptTemplate
from reflex_runtime.run import model_files
from reflex_runtime.run.model_files import JsonObject, described

CONFIG_FILE: Final = "reflex_config.json"
WEIGHTS: Final = "model.safetensors"  # of checkpoints

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


def read_export_json(file: Path) -> Any:
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

    if not file.exists():
        told = "not found, expected in an export directory (docs/exports.md); a language model's has a config.json"
        if str(file.parent) in ("demo", "scribe"):
            told += "; the bundled model of this name is served where no directory is called so"
        raise ConfigError(f"{file}: {told}")
    return model_files.read_json(file, object_pairs_hook=no_duplicates, parse_constant=no_constant)


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


# -- model files -------------------------------------------------------------------------------------------------------


MODEL_PATTERNS: Final = ("*.onnx", "*.onnx.data", "*.bin", "*.safetensors")


def check_files(root: Path) -> list[Path]:
    """The files of an export; ConfigError for one that cannot be read or was not fetched."""
    files = sorted(file for pattern in (*MODEL_PATTERNS, "*.json") for file in root.rglob(pattern))
    for file in files:
        try:
            with file.open("rb") as stream:
                head = stream.read(len(model_files.LFS))
        except OSError as error:
            raise ConfigError(f"{file}: {'a link to nothing' if file.is_symlink() else error.strerror}") from None
        model_files.check_fetched(file, head)
    return files


def model_hash(root: Path) -> str:
    """The `files_hash` of the model files, sorted by their path within the directory."""
    return files_hash(root, (name for name, _ in _model_files(root)))


def files_hash(root: Path, names: Iterable[str]) -> str:
    """First 16 hex digits of SHA-256 over files of a directory, without those that are not there.

    Of each file: its path in UTF-8 with forward slashes, a zero byte, its size in 8 bytes (big-endian), its contents.
    """
    sha = hashlib.sha256()
    for name in names:
        file = root / name
        if not file.is_file():
            continue
        sha.update(name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "big"))
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()[:16]


def model_bytes(root: Path) -> int:
    """Total size of the files behind `model_hash`, without reading them; 0 where there is no such directory."""
    return sum(file.stat().st_size for _, file in _model_files(root))


def config_hash(root: Path) -> str:
    """First 16 hex digits of SHA-256 of the bytes of `reflex_config.json`."""
    return hashlib.sha256((root / CONFIG_FILE).read_bytes()).hexdigest()[:16]


def _model_files(root: Path) -> list[tuple[str, Path]]:
    found = {
        file.relative_to(root).as_posix(): file for p in MODEL_PATTERNS for file in root.rglob(p) if file.is_file()
    }
    return sorted(found.items())


# -- writing a directory -----------------------------------------------------------------------------------------------


def check_new(out: Path, force: bool) -> None:
    """ConfigError if `new_directory` must not write there."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out}: is a file; name a directory")
    if not any(out.iterdir()):
        return
    if not force:
        raise ConfigError(f"{out}: is not empty; name another directory, or use --force to replace this export")
    if not (out / CONFIG_FILE).is_file():
        raise ConfigError(f"{out}: --force replaces exports, and this is none (no {CONFIG_FILE}); name another one")


@contextmanager
def new_directory(out: Path, force: bool = False) -> Iterator[Path]:
    """An empty directory beside `out` to write into. At the end of the block it becomes `out`; after an error it is
    removed, and what was at `out` is as it was.

    force: replace an export that is there.
    """
    check_new(out, force)
    target = out.resolve()
    making, old = (target.with_name(f".{target.name}.{what}{os.getpid()}") for what in ("", "old."))
    making.mkdir(parents=True)
    try:
        yield making
        if target.exists():
            target.rename(old)
        making.rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        for left in (making, old):
            shutil.rmtree(left, ignore_errors=True)
