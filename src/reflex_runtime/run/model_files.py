"""Reads files of a model that others made, with bounds and checks.

- `check_files`: transformers, LeRobot and onnxruntime open every file of a directory; a pipe or a device in the place
  of a file would hold the load for ever.
- `read_table`: with overlapping offsets in a safetensors file another model than the trained one would load.
- `JsonObject` reads JSON as msgspec structs. msgspec checks types and bounds; errors name the file, the value found and
  the description in the field's `msgspec.Meta`.
"""

from __future__ import annotations

import difflib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, get_args

import msgspec

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.extras import needed_by

MOST_TEXT: Final = 64 << 20  # bytes of a JSON file or template; the largest tokenizers have about half of it
MOST_FILES: Final = 100_000  # of a model's directory and its folders
_AGAIN: Final = "copy it again (git lfs pull, where it was cloned)"
LFS: Final = b"version https://git-lfs."
_SUFFIXES: Final = (".json", ".safetensors", ".onnx", ".data", ".bin", ".xml", ".jinja")


def check_files(root: Path) -> None:
    """ConfigError where a directory holds a pipe or a device, or a directory with the name of a file. Linked folders
    are checked too, each once: a link may lead to a folder above it."""
    count, seen = 0, set[tuple[int, int]]()
    for folder, folders, names in os.walk(root, followlinks=True):
        there = os.stat(folder)
        if (there.st_dev, there.st_ino) in seen:
            folders.clear()
            continue
        seen.add((there.st_dev, there.st_ino))
        for name in (*names, *(name for name in folders if name.endswith(_SUFFIXES))):
            check_kind(Path(folder, name))
        count += len(names) + len(folders)
        if count > MOST_FILES:
            raise ConfigError(f"{root}: holds over {MOST_FILES} files; name the directory of one model")


def check_kind(file: Path) -> None:
    """ConfigError for a path that exists and is no file. A broken link passes: its reader fails."""
    with suppress(OSError):
        _check_kind(file, file.stat().st_mode)


def read_file(file: Path, most: int = MOST_TEXT) -> bytes:
    """All of a file. ConfigError if it is no file, cannot be read, or has over `most` bytes."""
    try:
        with open(file, "rb", opener=_without_waiting) as opened:
            _check_kind(file, os.fstat(opened.fileno()).st_mode)
            data = opened.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    if len(data) > most:
        raise ConfigError(f"{file}: has over {most} bytes, the most that are read of such a file")
    return data


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for a writer


def read_json(file: Path, **hooks: Any) -> Any:
    """The value in a JSON file. ConfigError for a file that is not JSON. hooks: of `json.loads`."""
    data = read_file(file)
    try:
        return json.loads(data, **hooks)
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{file}: is not JSON: {error}") from None


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; ConfigError naming the file."""
    value = read_json(file)
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {shorten(repr(value))}")
    return value


def json_keys(file: Path) -> frozenset[str]:
    """The keys of the JSON object in a file; none where there is no file or no object."""
    try:
        found = read_json(file)
    except ConfigError:
        return frozenset()
    return frozenset(found) if isinstance(found, dict) else frozenset()


def _check_kind(file: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFDIR: "directory"}
        raise ConfigError(f"{file}: is a {kinds.get(stat.S_IFMT(mode), 'socket')}, expected a file")


def check_fetched(file: Path, head: bytes) -> None:
    """ConfigError for a file that Git LFS has not fetched. head: its first bytes."""
    if head.startswith(LFS):
        raise ConfigError(f"{file}: a Git LFS pointer, not the file itself: run git lfs pull, and copy again")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file. start, stop: bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_table(file: Path) -> dict[str, StoredTensor]:
    """The table of a safetensors file, without its weights. ConfigError for a file that differs from its table: the
    package `safetensors` checks that every byte belongs to one tensor."""
    with needed_by(f"{file}:"):
        from safetensors import SafetensorError, safe_open
    try:
        with file.open("rb") as stream:
            check_fetched(file, stream.read(len(LFS)))
            with safe_open(str(file), framework="np"):
                stream.seek(0)
                length = int.from_bytes(stream.read(8), "little")
                table = json.loads(stream.read(length))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        raise ConfigError(f"{file}: is truncated, damaged, or not safetensors ({shorten(why)}); {_AGAIN}") from None
    table.pop("__metadata__", None)
    return {
        name: StoredTensor(entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"]))
        for name, entry in table.items()
    }


# -- JSON objects as structs -------------------------------------------------------------------------------------------

MISSING: Final = object()

CHECKPOINT_KEYS: Final = frozenset({"type", "input_features"})
"""Keys that a LeRobot policy's config.json has, and that of a language model has not."""

S = TypeVar("S", bound=msgspec.Struct)


class JsonObject:
    """One JSON object of a file. null counts as absent. within: the key at which the object stands in the file."""

    def __init__(self, file: Path, values: Any, within: str = "") -> None:
        self.file, self.within = file, within
        if not isinstance(values, dict):
            self.values: Mapping[str, Any] = {}
            self.wrong("", "an object", values)
        self.values = values

    def wrong(self, key: str, expected: str, found: Any = MISSING) -> NoReturn:
        """Raise the ConfigError for a key. found: the value, by default the one in the file."""
        value = self.get(key) if found is MISSING else found
        shown = "nothing" if value is MISSING else shorten(json.dumps(value, ensure_ascii=False, default=str))
        raise ConfigError(f"{self.file}: {self.name(key) or 'file'}: found {shown}, expected {expected}")

    def name(self, key: str) -> str:
        """The key in errors, from the top of the file."""
        return ".".join(part for part in (self.within, key) if part)

    def has(self, key: str) -> bool:
        """Whether the object has a value for the key."""
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        """The value of a key, or MISSING."""
        return self.values[key] if self.has(key) else MISSING

    def part(self, key: str) -> JsonObject:
        """The object under a key."""
        return JsonObject(self.file, self.get(key), self.name(key))

    def only(self, keys: Iterable[str]) -> None:
        """Refuse keys other than these."""
        names = list(keys)
        for key in self.values:
            if key not in names:
                near = difflib.get_close_matches(key, names, 1, 0.7)
                hint = f"did you mean {near[0]}?" if near else "there may be " + ", ".join(names)
                raise ConfigError(f"{self.file}: {self.name(key)}: no such key; {hint}")

    def read(self, kind: type[S]) -> S:
        """The object as a struct. Every field that can be wrong or missing needs a description."""
        fields = msgspec.structs.fields(kind)
        if kind.__struct_config__.forbid_unknown_fields:
            self.only(field.name for field in fields)
        asked = [field for field in fields if field.required or self.has(field.name)]
        return kind(**{field.name: self.convert(field.name, field.type) for field in asked})

    def given(self, kinds: Mapping[str, Any], *others: str) -> dict[str, Any]:
        """The values of those keys that the object has, by their types. others: keys that it may have beside them."""
        self.only([*kinds, *others])
        return {key: self.convert(key, kind) for key, kind in kinds.items() if self.has(key)}

    def different(self, key: str, kind: Any) -> tuple[str, ...]:
        """A list of texts of a type, each of them once."""
        texts: tuple[str, ...] = self.convert(key, kind)
        if len(set(texts)) < len(texts):
            self.wrong(key, described(kind))
        return texts

    def convert(self, key: str, kind: Any, value: Any = MISSING) -> Any:
        """The value of a key as a described type. value: by default the one in the file."""
        value = self.get(key) if value is MISSING else value
        try:
            return msgspec.convert(value, kind)
        except (msgspec.ValidationError, UnicodeEncodeError):  # the latter: half of a surrogate pair
            self.wrong(key, described(kind), value)


def described(kind: Any) -> str:
    """The description in the `msgspec.Meta` of a type, or of a part of the type."""
    for meta in getattr(kind, "__metadata__", ()):
        if meta.description is not None:
            return str(meta.description)
    return next(filter(None, map(described, get_args(kind))), "")


def shorten(text: str) -> str:
    """At most 80 characters of a value for an error."""
    return text if len(text) <= 80 else text[:77] + "…"
