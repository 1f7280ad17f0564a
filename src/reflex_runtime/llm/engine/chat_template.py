"""Chat templates: Jinja programs of a model, run in a sandbox and chosen as `transformers` chooses them.

Handling of whitespace, filters and functions are as the templates of model hubs expect them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.extras import needed_by
from reflex_runtime.run.model_files import read_file

SETTINGS_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
MORE_TEMPLATES: Final = "additional_chat_templates"  # a folder: a template by the name of its file
DEFAULT, TOOL_USE = "default", "tool_use"
# tags around an assistant's text, for training; they become comments, which trim the same whitespace
_MARKS: Final = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")


class ChatTemplate:
    """The templates of a model by their names: one for all, or one of its own for conversations with tools."""

    def __init__(self, file: Path, sources: Mapping[str, str]) -> None:
        """file: for errors."""
        self.source = "".join(sources.values())
        self._file, self._names = file, sorted(sources)
        self._programs = {name: _compile(file, sources[name]) for name in (DEFAULT, TOOL_USE) if name in sources}

    @classmethod
    def read(cls, root: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
        """The templates in files of their own, else those in the settings; None if there are none."""
        files = {path.stem: path for path in sorted((root / MORE_TEMPLATES).glob("*.jinja"))}
        if (root / TEMPLATE_FILE).is_file():
            files[DEFAULT] = root / TEMPLATE_FILE
        if files:
            return cls(files.get(DEFAULT, root / MORE_TEMPLATES), {name: _read(file) for name, file in files.items()})
        file, found = root / SETTINGS_FILE, settings.get("chat_template")
        if found is None:
            return None
        if isinstance(found, list):  # several, by name
            found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        named = found if isinstance(found, dict) else {DEFAULT: found}
        for source in named.values():
            if not isinstance(source, str):
                raise ConfigError(f"{file}: chat_template: must be a Jinja template, found {type(source).__name__}")
        return cls(file, named)

    def render(self, given: Mapping[str, Any], begin_answer: bool = True) -> str:
        """The text of a conversation. begin_answer: with the beginning of the answer."""
        name = TOOL_USE if given.get("tools") and TOOL_USE in self._programs else DEFAULT
        if name not in self._programs:
            raise ConfigError(f"{self._file}: has chat templates named {', '.join(self._names)}, but no {DEFAULT}")
        return self._programs[name](given, add_generation_prompt=begin_answer)


def _read(file: Path) -> str:
    try:
        return read_file(file).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _compile(file: Path, source: str) -> Callable[..., str]:
    with needed_by(f"{file}: its template"):
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(_MARKS.sub(r"{#\1 \2#}", source)).render
    except jinja2.TemplateError as error:
        raise ConfigError(f"{file}: chat template, line {getattr(error, 'lineno', '?')}: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"messages: the chat template refuses them: {message}")
