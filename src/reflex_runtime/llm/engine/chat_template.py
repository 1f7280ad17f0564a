"""Chat templates: Jinja programs that came with a model, run in a sandbox and chosen as `transformers` does.

Whitespace, filters and functions are those that templates of model hubs are written against.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, NoReturn

from reflex_runtime.core.errors import ConfigError, needed_by
from reflex_runtime.run.model_files import read_file

SETTINGS_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
MORE_TEMPLATES: Final = "additional_chat_templates"  # a folder: a template by the name of its file
DEFAULT, TOOL_USE = "default", "tool_use"
# marks of what an assistant said, for training; as comments they do nothing but trim the same whitespace
_MARKS: Final = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")
MOST_REPEATS: Final = 1000
MOST_TEXT: Final = 1 << 25  # characters of a text that a template makes, and parts of a list: it may double them
MOST_PARTS: Final = 1 << 20  # of a value that is printed, compared or hashed
MOST_DEPTH: Final = 200
_PLAIN: Final = frozenset((str, int, float, bool, type(None)))
_OF_PAGES: Final = ("batch", "pprint", "slice", "urlencode", "urlize", "wordwrap", "xmlattr")  # make much of little
_OF_TEXTS: Final = (
    "capitalize", "center", "e", "escape", "forceescape", "indent", "lower", "safe", "striptags", "title", "trim",
    "upper", "wordcount",
)  # fmt: skip
_COMPARING: Final = (  # filters that compare or hash values, or print a name that they are given
    "attr", "dictsort", "groupby", "map", "max", "min", "reject", "rejectattr", "round", "select", "selectattr", "sort",
    "unique",
)  # fmt: skip
_TESTS: Final = (
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "filter", "ge", "greaterthan", "gt", "in", "le", "lessthan",
    "lt", "ne", "test",
)  # fmt: skip
_WIDE: Final = re.compile(r"%(\(\w*\))?[-+ #0]*(\d{4}|\*|\d*\.(\d{4}|\*))")  # a width or precision over 999, or given
_WIDE_FIELD: Final = re.compile(r"\{[^{}]*:[^{}]*(\d{4}|\{)")  # of `str.format`


class ChatTemplate:
    """The templates of a model by their names: one for all, or one of its own for conversations with tools."""

    def __init__(self, file: Path, sources: Mapping[str, str]) -> None:
        """file: that errors name."""
        self.source = "".join(sources.values())
        self._file, self._names = file, sorted(sources)
        self._programs = {name: _compile(file, sources[name]) for name in (DEFAULT, TOOL_USE) if name in sources}

    @classmethod
    def read(cls, root: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
        """From files of their own, or else the settings; None where there is none."""
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
        """The text of a conversation. begin_answer: and the beginning of the answer."""
        name = TOOL_USE if given.get("tools") and TOOL_USE in self._programs else DEFAULT
        if name not in self._programs:
            raise ConfigError(f"{self._file}: has chat templates named {', '.join(self._names)}, and no {DEFAULT}")
        return self._programs[name](given, add_generation_prompt=begin_answer)


def _read(file: Path) -> str:
    try:
        return read_file(file).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _compile(file: Path, source: str) -> Callable[..., str]:
    """Whitespace, filters and functions are those that templates of model hubs are written against."""
    with needed_by(f"{file}: its template"):
        import jinja2
        from jinja2.compiler import CodeGenerator, operators
        from jinja2.filters import make_attrgetter
        from jinja2.nodes import Const
        from jinja2.runtime import Macro
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Code(CodeGenerator):
        def visit_Concat(self, node: Any, frame: Any) -> None:  # noqa: N802 jinja2's
            """a ~ b is no operator that a sandbox intercepts."""
            self.write("concat((")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write("))")

        def visit_Compare(self, node: Any, frame: Any) -> None:  # noqa: N802 jinja2's
            """Nor is a comparison."""
            self.write("(")
            self._counted(node.expr, frame)
            for operand in node.ops:
                self.write(f" {operators[operand.op]} ")
                self._counted(operand.expr, frame)
            self.write(")")

        def visit_Dict(self, node: Any, frame: Any) -> None:  # noqa: N802 jinja2's
            self.write("{")
            for item in node.items:
                self._counted(item.key, frame)
                self.write(": ")
                self.visit(item.value, frame)
                self.write(", ")
            self.write("}")

        def _counted(self, node: Any, frame: Any) -> None:
            self.write("(" if isinstance(node, Const) else "environment.counted(")
            self.visit(node, frame)
            self.write(")")

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%", "+"})
        code_generator_class = Code
        concat = staticmethod(_joined)  # also what blocks and macros print
        counted = staticmethod(_counted)

        def getitem(self, obj: Any, argument: Any) -> Any:
            return super().getitem(obj, argument if type(argument) is str else _counted(argument))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+":
                _check_size(sum(len(value) for value in (left, right) if hasattr(value, "__len__")))
                return left + right
            if operator == "%":
                return _formatted(left, right)
            made = [value if isinstance(value, (int, float)) else len(value) for value in (left, right)]
            plain = all(isinstance(value, (int, float)) for value in (left, right))
            _check_repeats(operator == "**" or (not plain and made[0] * made[1] > MOST_REPEATS))
            return left * right

        def call(self, context: Any, function: Any, /, *given: Any, **named: Any) -> Any:
            method = getattr(function, "__wrapped__", function)  # as it wraps str.format
            if not isinstance(function, Macro):
                for value in (*given, *named.values()):
                    _counted(value)
            if getattr(method, "__name__", "") in ("count", "index"):
                _counted(getattr(method, "__self__", None))
            if isinstance(text := getattr(method, "__self__", None), str):
                if method.__name__.startswith("format"):
                    _check_repeats(_WIDE_FIELD.search(text) is not None)
                elif method.__name__ == "replace":
                    function = partial(_replaced, text)
                elif method.__name__ == "join":
                    function = partial(_joined, between=text)
                else:
                    _check_repeats(method.__name__ == "translate")
                    _check_numbers(*given, *named.values())
            return super().call(context, function, *given, **named)

    def join(values: Any, between: str = "", attribute: str | None = None) -> str:
        return _joined(map(make_attrgetter(environment, attribute), values), between)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], finalize=_shown)
    for name in _OF_PAGES:
        environment.filters.pop(name)
    for name in _OF_TEXTS:
        environment.filters[name] = _bounded(environment.filters[name])
    for name in _COMPARING:
        environment.filters[name] = _comparing(environment.filters[name])
    for name in _TESTS:
        environment.tests[name] = _comparing(environment.tests[name])
    environment.filters["format"] = lambda form, *given, **named: _formatted(_shown(form), named or given)
    environment.filters |= {"tojson": _to_json, "string": _shown, "replace": _replaced, "join": join}
    environment.globals.pop("lipsum")
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(_MARKS.sub(r"{#\1 \2#}", source)).render
    except jinja2.TemplateError as error:
        raise ConfigError(f"{file}: chat template: {error}") from error


def _check_repeats(wrong: bool) -> None:
    if wrong:
        raise ConfigError(f"the chat template computes a power, or makes over {MOST_REPEATS} characters by repeating")


def _check_size(size: int) -> None:
    if size > MOST_TEXT:
        raise ConfigError(f"the chat template makes a text or a list of over {MOST_TEXT} characters or parts")


def _counted(value: Any) -> Any:
    """A value that is printed, compared or hashed. One list may be in another twice, and that one so in a third: such
    work has no end, and no time limit stops it, so parts are counted first, each as often as it is there."""
    if type(value) in _PLAIN:
        return value
    level, size, parts, depth = [value], 0, 0, 0
    while level := [part for part in level if isinstance(part, Collection) and not isinstance(part, range)]:
        size += sum(len(part) for part in level if isinstance(part, str))
        level = [part for part in level if not isinstance(part, (str, bytes))]
        parts, depth = parts + sum(map(len, level)), depth + 1
        _check_size(size)
        if parts > MOST_PARTS or depth > MOST_DEPTH:
            raise ConfigError(f"the chat template makes a value of over {MOST_PARTS} parts or {MOST_DEPTH} levels")
        level = [part for whole in level for part in _parts(whole)]
    return value


def _parts(whole: Collection[Any]) -> Iterable[Any]:
    return [*whole, *whole.values()] if isinstance(whole, Mapping) else whole


def _shown(value: Any) -> Any:
    """A value as it is printed."""
    return value if isinstance(value, str) else str(_counted(value))


def _joined(parts: Iterable[Any], between: str = "") -> str:
    texts, size = list[str](), 0
    for part in parts:
        texts.append(_shown(part))
        size += len(texts[-1]) + len(between)
        _check_size(size)
    return between.join(texts)


def _replaced(text: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(_shown(text))
    _check_size(len(text) + (len(text) + 1 if not old else text.count(old)) * len(new))
    return str(text.replace(old, new, -1 if count is None else count))


def _check_numbers(*given: Any) -> None:
    _check_repeats(any(isinstance(value, (int, float)) and value > MOST_REPEATS for value in given))


def _formatted(left: Any, right: Any) -> Any:
    """left % right; a width is how often a space is repeated."""
    _check_repeats(isinstance(left, str) and _WIDE.search(left) is not None)
    return left % _counted(right)


def _comparing(function: Any) -> Any:
    """A filter or a test that compares or hashes what it is given."""

    apart = hasattr(function, "jinja_pass_arg")  # a context or an environment, first

    @wraps(function)
    def checked(*given: Any, **named: Any) -> Any:
        read = [list(value) if isinstance(value, Iterator) else value for value in given]
        for value in (*read[apart:], *named.values()):
            _counted(value)
        return function(*read, **named)

    return checked


def _bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that prints a value, or repeats a space."""

    def checked(text: Any, *given: Any, **named: Any) -> Any:
        _check_numbers(*given, *named.values())
        return filter(_shown(text), *given, **named)

    return checked


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    return json.dumps(_counted(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"messages: the chat template refuses them: {message}")
