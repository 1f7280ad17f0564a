"""JSON files of models read as msgspec structs, with errors for people who write such files.

msgspec checks types and bounds. Its messages do not show the value and do not name the file, so the errors are made
here: from the value that was found and from the description in the field's `msgspec.Meta`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, get_args

import msgspec

from reflex_runtime.core.errors import ConfigError

MISSING: Final = object()

CHECKPOINT_KEYS: Final = frozenset({"type", "input_features"})
"""What a config.json has that is of a LeRobot policy, and not of a language model."""

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
        """Raise the ConfigError for a key. found: the value where it is not the one in the file."""
        value = self.get(key) if found is MISSING else found
        shown = "nothing" if value is MISSING else shorten(json.dumps(value, ensure_ascii=False, default=str))
        raise ConfigError(f"{self.file}: {self.name(key) or 'file'}: found {shown}, expected {expected}")

    def name(self, key: str) -> str:
        """The key as errors name it, from the top of the file."""
        return ".".join(part for part in (self.within, key) if part)

    def has(self, key: str) -> bool:
        """Whether the object has a value for the key."""
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        """The value of a key, or MISSING."""
        return self.values[key] if self.has(key) else MISSING

    def only(self, keys: Iterable[str]) -> None:
        """Refuse keys other than these."""
        names = list(keys)
        for key in self.values:
            if key not in names:
                near = difflib.get_close_matches(key, names, 1)
                expected = f"{near[0]!r}, perhaps" if near else "one of " + ", ".join(names)
                raise ConfigError(f"{self.file}: {self.name(key)}: found an unknown key, expected {expected}")

    def read(self, kind: type[S]) -> S:
        """The object as a struct. Every field that can be wrong or required needs a description."""
        fields = msgspec.structs.fields(kind)
        if kind.__struct_config__.forbid_unknown_fields:
            self.only(field.name for field in fields)
        asked = [field for field in fields if field.required or self.has(field.name)]
        return kind(**{field.name: self.convert(field.name, field.type) for field in asked})

    def convert(self, key: str, kind: Any, value: Any = MISSING) -> Any:
        """The value of a key as a described type. value: the one to convert where it is not the one in the file."""
        value = self.get(key) if value is MISSING else value
        try:
            return msgspec.convert(value, kind)
        except (msgspec.ValidationError, UnicodeEncodeError):  # the latter: half of a surrogate pair
            self.wrong(key, described(kind), value)


def json_keys(file: str | Path) -> frozenset[str]:
    """The keys of the JSON object in a file; none where there is no file or no object."""
    try:
        found = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, RecursionError):
        return frozenset()
    return frozenset(found) if isinstance(found, dict) else frozenset()


def described(kind: Any) -> str:
    """The `msgspec.Meta` of a type, or of a part of the type."""
    for meta in getattr(kind, "__metadata__", ()):
        if meta.description is not None:
            return str(meta.description)
    return next(filter(None, map(described, get_args(kind))), "")


def shorten(text: str) -> str:
    """At most 80 characters of a value for an error."""
    return text if len(text) <= 80 else text[:77] + "…"
