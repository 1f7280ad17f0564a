"""Parsers of an output's text as a stream of thoughts, text and calls of tools; and the constraint for a forced call.

A reasoning model writes a thought before its answer, between marks. With some templates the model begins the thought,
with others the prompt does: the output then starts inside of it.

The form of a model's calls is found with its chat template: it writes a known call, and the first form that reads this
call back is used (`form_of`). A call is read from its opening mark on, as JSON or by its tags: so a mark inside of an
argument is text, and the closing mark may be missing. Every call that the constraint allows can be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any, Final, Literal, NoReturn

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.messages import Constraint
from reflex_runtime.llm.engine.detokenizer import overlap
from reflex_runtime.llm.engine.logits_processors import SPACES, demands

_MOST: Final = 16  # calls in a forced answer
_KEYS: Final = ("arguments", "parameters")
_MEMBERS: Final = {"name", "id", "type", *_KEYS}
_HALF: Final = 10  # characters; no word of JSON (`true`, `-Infinity`) is longer
_GAP: Final = re.compile(r"[\s;,]*")  # between two calls, or two values
_decode: Final = json.JSONDecoder().raw_decode
_LONGEST: Final = 200  # characters of a call before its arguments
_NAMED: Final = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]+)?\s*(?:\[ARGS\])?\s*(?=\{)")
_FUNCTION: Final = re.compile(r"<function=([^>\n]+)>\s*")
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>\n?")
_PARAMETER_END: Final = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")
_FUNCTION_BEGIN, _PARAMETER_BEGIN, _FUNCTION_END = "<function=", "<parameter=", "</function>"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: a JSON Schema of its arguments."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made. arguments: JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a model writes calls.

    mark, close: stand before and after calls; close may be missing. bare: an answer may be calls without a mark. begin,
    between, end: text around the calls of a forced answer. middle: stands between a name and its arguments if a call is
    no JSON object. tags: a call is tags. key: of the arguments in a JSON object. several: an answer may have several.
    """

    mark: str
    close: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    bare: bool = False
    middle: str = ""
    tags: bool = False
    key: str = "arguments"
    several: bool = True


def _each(mark: str, close: str, space: str = "") -> ToolForm:
    """Marks around each call."""
    return ToolForm(mark, close, mark + space, f"{space}{close}{space}{mark}{space}", space + close)


def _list(mark: str, close: str = "") -> ToolForm:
    """Marks around a list of calls."""
    return ToolForm(mark, close, f"{mark}[", ", ", f"]{close}")


_MISTRAL: Final = "[TOOL_CALLS]"
FORMS: Final = {  # named after their first models; the first form that reads a template's calls is used
    "hermes": _each("<tool_call>", "</tool_call>", "\n"),
    "qwen3_coder": replace(_each("<tool_call>", "</tool_call>", "\n"), tags=True),
    "phi4": _each("<|tool_call|>", "<|/tool_call|>"),
    "granite": _list("<|tool_call|>"),
    "nemotron": _list("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan": _list("<tool_calls>", "</tool_calls>"),
    "mistral": _list(_MISTRAL),
    "mistral_named": ToolForm(_MISTRAL, begin=_MISTRAL, between=_MISTRAL, middle="[ARGS]"),
    "llama3": ToolForm("<|python_tag|>", between="; ", bare=True, key="parameters"),
}
THOUGHT, ANSWER = "<think>", "</think>"  # the beginning and the end of a thought
_ALL: Final = {mark for form in FORMS.values() for mark in (form.mark, form.close, form.middle, "[CALL_ID]")}
# these tokens count as text, even if the tokenizer's file marks them as special
MARKS: Final = frozenset(_ALL - {""} | {THOUGHT, ANSWER})


# -- which form --------------------------------------------------------------------------------------------------------

_KINDS: Final = {"text": "string", "count": "integer", "more": "object"}
TRIED: Final = Tool(
    "reflex_try",
    {"type": "object", "properties": {name: {"type": kind} for name, kind in _KINDS.items()}, "required": ["text"]},
)
AWKWARD: Final = {
    "text": 'say "no" \\ {x} [y]\n</tool_call> <b>; für',
    "count": -7,
    "more": {"a b": [1.5, True, None, "'"], "": {}},
}


def form_of(written: Callable[[list[dict[str, Any]]], str]) -> ToolForm | None:
    """The form whose parser reads back the calls that a template writes, or None. written: the template's text of an
    assistant's calls, each a name and arguments."""
    plain, awkward = ({"name": TRIED.name, "arguments": arguments} for arguments in ({"text": "x"}, AWKWARD))
    texts = [written([plain]), written([awkward])]
    for form in FORMS.values():
        if form.close in texts[0] and [_all(form, text) for text in texts] == [[plain], [awkward]]:
            call = texts[0][texts[0].rfind(TRIED.name) :]  # the last one: a template may list the tools before the call
            key = "parameters" if '"parameters"' in call else "arguments"
            if form.bare and texts[0].lstrip().startswith("["):
                form = replace(form, begin="[", between=", ", end="]")
            several = False
            with suppress(Exception):  # some templates refuse two calls
                several = _all(form, written([plain, awkward])) == [plain, awkward]
            return replace(form, key=key, several=several)
    return None


def _all(form: ToolForm, text: str) -> list[dict[str, Any]]:
    parser = ToolParser(form, [TRIED])
    found = [one for one in parser.feed(text) + parser.end() if isinstance(one, ToolCall)]
    return [{"name": one.name, "arguments": json.loads(one.arguments)} for one in found]


# -- forced calls ------------------------------------------------------------------------------------------------------


def forced(form: ToolForm, tools: Sequence[Tool], several: bool) -> Constraint:
    """The constraint for an output of one or several calls. Raises ConfigError for a parameter without such a form."""
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        if form.tags:
            rules += _tagged_rules(i, tool)
            continue
        begin, end = f'{{"name": {json.dumps(tool.name)}, "{form.key}": ', "}"
        if form.middle:
            begin, end = tool.name + form.middle, ""
        rules += [f"call_{i}:{_literal(begin)} args_{i}{_literal(end)}", f"args_{i}: {_json(tool.parameters)}"]
    more = f" ({json.dumps(form.between)} call){{0,{_MOST - 1}}}" if several and form.several else ""
    return Constraint("grammar", "\n".join([f"start:{_literal(form.begin)} call{more}{_literal(form.end)}", *rules]))


def _tagged_rules(i: int, tool: Tool) -> Iterator[str]:
    """Parameters in their order, each at most once. A text is anything without a closing tag; a pattern does not apply,
    because tags have no escapes."""
    named, required = _properties(tool.parameters), json.dumps(tool.parameters.get("required"))
    parts = [f"p_{i}_{j}{'' if json.dumps(name) in required else '?'}" for j, name in enumerate(named)]
    yield f'call_{i}: "<function={tool.name}>\\n" {" ".join(parts)} "{_FUNCTION_END}"'
    for j, (name, schema) in enumerate(named.items()):
        if not re.fullmatch(r"[^>\n]+", name):
            raise ConfigError(f"a parameter is named {name[:50]!r}, which the model's form of calls cannot write")
        end = r'"\n</parameter>\n"'
        if not _is_text(schema):
            defined = {key: of for key, of in tool.parameters.items() if key in ("$defs", "definitions")}
            value = _json(defined | schema if isinstance(schema, dict) else {})
        elif texts := _texts(schema):
            value = f"({' | '.join(map(json.dumps, texts))})"
        else:
            value, end = f"t_{i}_{j}", r'"\n"'
            yield f't_{i}_{j}[suffix="</parameter>"]: /(?s:.*)/'
        yield f"p_{i}_{j}:{_literal(f'<parameter={name}>' + chr(10))} {value} {end}"


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps(demands(schema) | {"x-guidance": {"whitespace_pattern": SPACES, "lenient": True}})


def _literal(text: str) -> str:
    return f" {json.dumps(text)}" if text else ""


# -- reading -----------------------------------------------------------------------------------------------------------

Calls = list[tuple[str, str]]  # the name and the arguments of each


class ToolParser:
    """Reads the calls in one output's text as a stream. called: number of calls so far.

    A part that is no call of a known tool is text.
    """

    def __init__(self, form: ToolForm, tools: Sequence[Tool]) -> None:
        self.called = 0
        self._form, self._tools = form, {tool.name: tool.parameters for tool in tools}
        self._text = ""  # not returned yet: it may be a call, or the beginning of one
        self._before = ""  # a mark and the space before it, which are text if no call follows
        self._state = "begin" if form.bare else "text"
        self._closes = False  # whether a JSON value may end in the new text; else none is parsed

    def feed(self, text: str) -> list[str | ToolCall]:
        """The parts that are complete with this text."""
        self._text += text
        self._closes = "}" in text or "]" in text
        return self._parts(last=False)

    def end(self) -> list[str | ToolCall]:
        """The parts that are left when the output has ended."""
        self._closes = True  # a mark without a call may be followed by a call
        return self._parts(last=True)

    def _parts(self, last: bool) -> list[str | ToolCall]:
        steps = {"begin": self._bare, "text": self._outside, "inside": self._inside, "behind": self._behind}
        found: list[str | ToolCall] = []
        while (part := steps[self._state](last)) is not None:
            for one in part:
                if isinstance(one, str) and found and isinstance(found[-1], str):
                    found[-1] += one
                elif one:
                    found.append(one)
        return found

    def _bare(self, last: bool) -> list[str | ToolCall] | None:
        """At the beginning of an answer: if it is nothing but calls in JSON, these calls; else it is text."""
        begun = self._text.lstrip()
        if not last and (not begun or begun[0] in "{["):
            return None
        calls, at, self._state = Calls(), 0, "text"
        while at < len(begun):
            end = _end(begun, at)
            found = self._known(_objects(begun[at:end])) if end is not None and end > 0 else []
            if not found:
                return []
            calls, at = calls + found, _behind_gap(begun, end or 0)
        self._text = ""
        return self._made(calls)

    def _outside(self, last: bool) -> list[str | ToolCall] | None:
        """In text, up to a mark. Space before a mark belongs to the call."""
        before, mark, after = self._text.partition(self._form.mark)
        sure = before if mark or last else before[: len(before) - overlap(before, self._form.mark)]
        text = sure if last and not mark and not (self.called and sure.isspace()) else sure.rstrip()
        if mark:
            self._before, self._text, self._state = sure[len(text) :] + mark, after, "inside"
            return [text]
        self._text = "" if last else self._text[len(text) :]
        return [text] if text else None

    def _inside(self, last: bool) -> list[str | ToolCall] | None:
        """After a mark: a call, or the mark is text."""
        begun = self._text.lstrip()
        found, end = self._call(begun) if begun else (None, -1)
        if found is None and not last:
            return None
        if calls := self._known(found or []):
            self._text, self._state = begun[end:], "behind"
            return self._made(calls)
        text, self._before, self._state = self._before, "", "text"
        return [text]

    def _behind(self, last: bool) -> list[str | ToolCall] | None:
        """After a call: another one, the closing mark, or text."""
        rest, close = self._text[_behind_gap(self._text) :], self._form.close
        if not last and (not rest or (close and overlap(rest, close) == len(rest))):
            return None
        if close and rest.startswith(close):
            self._text, self._state = rest[len(close) :], "text"
        elif rest[:1] in ("{", "[") and not self._form.mark.startswith(rest[: len(self._form.mark)]):
            self._before, self._text, self._state = "", rest, "inside"
        else:
            self._state = "text"
        return []

    def _call(self, text: str) -> tuple[Calls | None, int]:
        """The calls at the beginning of a text, and their end. None, -1: they are not complete; [], -1: none."""
        form = self._form
        if text[0] in "{[":
            end = _end(text) if self._closes else None
            return (None, -1) if end is None else (_objects(text[: max(0, end)]), end)
        if form.tags:
            return _tagged(text, self._tools)
        if form.middle:
            head = _NAMED.match(text)
            if head is None:
                return ([] if "{" in text or "\n" in text or len(text) > _LONGEST else None), -1
            end = _end(text, head.end()) if self._closes else None
            call = f'{{"name": {json.dumps(head[1])}, "arguments": {text[head.end() : end]}}}'
            return (None, -1) if end is None else (_objects(call) if end > 0 else [], end)
        return [], -1

    def _known(self, calls: Calls) -> Calls:
        return calls if all(name in self._tools for name, _ in calls) else []

    def _made(self, calls: Calls) -> list[str | ToolCall]:
        self.called += len(calls)
        short = self._form.mark == _MISTRAL  # its templates accept only ids of nine letters
        ids = [token_hex(5)[:9] if short else f"call_{token_hex(12)}" for _ in calls]
        return [ToolCall(id, *call) for id, call in zip(ids, calls, strict=True)]


def _behind_gap(text: str, at: int = 0) -> int:
    found = _GAP.match(text, at)
    return found.end() if found else at


def _end(text: str, at: int = 0) -> int | None:
    """The end of the JSON value that begins at `at`; None: it is not complete; -1: there is no value."""
    try:
        return _decode(text, at)[1]
    except json.JSONDecodeError as error:  # the last characters may be the beginning of a JSON word
        return None if error.msg.startswith("Unterminated") or error.pos > len(text) - _HALF else -1
    except (ValueError, RecursionError):  # a number has too many digits
        return -1


def _objects(text: str) -> Calls:
    """The calls in a JSON value; empty if any part of it is no call."""
    try:
        json.loads(text, parse_constant=_no_json)
        each = [text] if text[:1] == "{" else [one for _, one in _members(text)] if text[:1] == "[" else []
        return [_named(dict(_members(one)) if one[0] == "{" else {}) for one in each]
    except (ValueError, RecursionError):
        return []


def _named(members: dict[str, str]) -> tuple[str, str]:
    """The name and the arguments of a call from its members, each as JSON; arguments may be JSON inside of a text.
    Raises ValueError for an unknown key, and if arguments come twice."""
    name, given = json.loads(members.get("name", "0")), [members[key] for key in _KEYS if key in members]
    text = given[0] if given else "{}"
    if text[0] == '"':
        text = json.loads(text).strip()
        json.loads(text, parse_constant=_no_json)
    if not isinstance(name, str) or len(given) > 1 or text[0] != "{" or members.keys() - _MEMBERS:
        raise ValueError(name)
    return name, text


def _members(text: str) -> Iterator[tuple[str, str]]:
    """The key and the source of each member of a JSON object or list. text: valid JSON."""
    key, at = "", _behind_gap(text, 1)
    while text[at] not in "}]":
        if text[0] == "{":
            key, at = _decode(text, at)
            at = _behind_gap(text, _behind_gap(text, at) + 1)
        end = _decode(text, at)[1]
        yield key, text[at:end]
        at = _behind_gap(text, end)


def _tagged(text: str, tools: dict[str, dict[str, Any]]) -> tuple[Calls | None, int]:
    """A call in tags, and where it ends: as `ToolParser._call`."""
    if not text.startswith(_FUNCTION_BEGIN[: len(text)]):
        return [], -1
    head = _FUNCTION.match(text)
    if head is None or _FUNCTION_END not in text:  # while a call grows, each token costs only this
        return None, -1
    at, given, named = head.end(), list[str](), _properties(tools.get(head[1], {}))
    while begin := _PARAMETER.match(text, at):
        end = _PARAMETER_END.search(text, begin.end())
        if end is None:
            return None, -1
        value = _json_of(named.get(begin[1]), text[begin.end() : end.start()])
        given.append(f"{json.dumps(begin[1])}: {value}")
        at = end.end()
    if not text.startswith(_FUNCTION_END, at):
        rest = text[at : at + len(_PARAMETER_BEGIN)]
        return (None if _PARAMETER_BEGIN.startswith(rest) or _FUNCTION_END.startswith(rest) else []), -1
    return [(head[1], f"{{{', '.join(given)}}}")], at + len(_FUNCTION_END)


def _json_of(schema: Any, text: str) -> str:
    """A parameter as JSON: its JSON value or Python constant if the schema allows more than a text, else a text."""
    known = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    if not _is_text(schema):
        with suppress(ValueError, RecursionError):
            json.loads(known, parse_constant=_no_json)
            return known
    return json.dumps(text, ensure_ascii=False)


def _is_text(schema: Any) -> bool:
    """Whether only a text is valid."""
    return isinstance(schema, dict) and (schema.get("type") == "string" or bool(_texts(schema)))


def _texts(schema: dict[str, Any]) -> list[str]:
    """The allowed texts of an enum or const; empty if there are none."""
    values = schema.get("enum", [schema.get("const")])
    return values if isinstance(values, list) and all(isinstance(one, str) for one in values) else []


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _no_json(constant: str) -> NoReturn:
    raise ValueError(constant)


# -- thoughts, text and calls ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of a model's thought."""

    text: str


class ThoughtParser:
    """Reads the thought at the beginning of one output's text as a stream. thinking: the text so far ends in it.

    An output that does not begin with a thought is an answer from its first character on.
    """

    def __init__(self, begun: bool, marks: tuple[str, str] = (THOUGHT, ANSWER)) -> None:
        """begun: the prompt began the thought. marks: those of its beginning and its end."""
        self._open, self._close = marks
        # A closing mark may be several tokens; an answer without a thought may begin with the last of them.
        self._silent = [self._close[at:] for at, letter in enumerate(self._close) if at and letter in "<["]
        self._state: Literal["before", "inside", "behind", "answer"] = "inside" if begun else "before"
        self._text = ""  # not returned yet
        self._said = False  # whether any of the thought was returned

    @property
    def thinking(self) -> bool:
        return self._state == "inside"

    def feed(self, text: str) -> tuple[str, str]:
        """The parts of the thought and of the answer that are complete with this text."""
        if self._state == "answer":
            return "", text
        self._text += text
        if self._state == "before":
            self._begin()
        thought = self._inside() if self._state == "inside" else ""
        if self._state == "behind" and (found := self._text.lstrip()):
            self._state, self._text = "answer", found
        return thought, self._rest() if self._state == "answer" else ""

    def end(self) -> tuple[str, str]:
        """The rest of the thought and of the answer when the output has ended."""
        rest = self._rest()
        if self._state == "inside":
            return rest.rstrip() if self._said or not self._open.startswith(rest.strip()) else "", ""
        return "", rest if self._state == "before" else ""

    def _begin(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(self._open):
            self._state, self._text = "inside", begun[len(self._open) :]
        elif mark := next(filter(begun.startswith, self._silent), ""):
            self._state, self._text = "behind", begun[len(mark) :]
        elif not any(mark.startswith(begun) for mark in (self._open, *self._silent)):
            self._state = "answer"

    def _inside(self) -> str:
        if not self._said:  # a model may repeat the mark that the prompt ends with
            begun = self._text.lstrip()
            if not begun or (begun != self._open and self._open.startswith(begun)):
                return ""
            self._text = begun.removeprefix(self._open).lstrip()
        before, closed, after = self._text.partition(self._close)
        if closed:
            self._state, self._text = "behind", after
            return before.rstrip()
        sure = self._text[: len(self._text) - overlap(self._text, self._close)].rstrip()
        self._text = self._text[len(sure) :]
        self._said = self._said or bool(sure)
        return sure

    def _rest(self) -> str:
        rest, self._text = self._text, ""
        return rest


@dataclass(slots=True)
class PartReader:
    """Reads one output's text as a stream: thoughts, text and calls. thinking: whether the text so far ends in a
    thought. called: number of calls so far."""

    thoughts: ThoughtParser | None = None
    tools: ToolParser | None = None

    @property
    def thinking(self) -> bool:
        return self.thoughts is not None and self.thoughts.thinking

    @property
    def called(self) -> int:
        return 0 if self.tools is None else self.tools.called

    def feed(self, text: str, last: bool) -> list[str | Thought | ToolCall]:
        """The parts that are complete with this text. last: the output has ended."""
        found: list[str | Thought | ToolCall] = []
        if self.thoughts is not None:
            thought, text = self.thoughts.feed(text)
            if last:
                more, rest = self.thoughts.end()
                thought, text = thought + more, text + rest
            if thought:
                found.append(Thought(thought))
        if self.tools is None:
            return [*found, text] if text else found
        return found + self.tools.feed(text) + (self.tools.end() if last else [])
