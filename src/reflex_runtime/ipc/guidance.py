"""The form that a request's `guidance` means: the same as its `constraint`, in the words of the wire."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.messages import GenerateParams
from reflex_runtime.ipc.sampling import Constraint

_OF: Final = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}  # mode → the field it needs
_MOST_TEXTS: Final = 1000


def guided(params: GenerateParams) -> GenerateParams:
    """The request with the constraint that its guidance means. ConfigError for guidance that is none, and beside a
    constraint.

    mode: `json` (schema: a JSON Schema, by default any object), `regex`, `choice` (a list of texts), `grammar`; each
    with the field of its name.
    """
    guidance = params.guidance or {}
    mode: Any = guidance.get("mode")
    if mode not in list(_OF):
        raise ConfigError(f"guidance.mode={mode!r:.100}: must be one of {', '.join(_OF)}")
    if params.constraint is not None:
        raise ConfigError("guidance: the request has a constraint, too; send one")
    unknown = sorted(guidance.keys() - {"mode", _OF[mode]})
    if unknown:
        raise ConfigError(f"guidance.{unknown[0]:.100}: is no field of mode {mode!r}")
    try:
        text = _text(mode, guidance.get(_OF[mode]))
    except (TypeError, ValueError, RecursionError) as error:  # MessagePack holds what JSON cannot
        raise ConfigError(f"guidance.{_OF[mode]}: is no JSON: {error}") from None
    constraint = Constraint(mode, text)
    return msgspec.structs.replace(params, constraint=constraint, guidance=None)


def _text(mode: str, said: Any) -> str:
    if mode == "json" and isinstance(said, dict | None):
        return msgspec.json.encode(said or {"type": "object"}).decode()
    if mode == "choice" and isinstance(said, list) and 0 < len(said) <= _MOST_TEXTS:
        if all(isinstance(text, str) and text for text in said):
            return msgspec.json.encode(said).decode()
    elif mode in ("regex", "grammar") and isinstance(said, str):
        return said
    wants = {"json": "a JSON Schema, an object", "choice": f"a list of 1 to {_MOST_TEXTS} texts, none empty"}
    raise ConfigError(f"guidance.{_OF[mode]}: must be {wants.get(mode, 'a text')}")
