"""The parts of an output's text: thoughts, text and tool calls; how they are read, and what forces a call.

Models write calls as text. Which form they learned stands in their chat template: Hermes and Qwen put each call between
marks, Llama 3 writes an object alone, Mistral a list of them. A reasoning model writes a thought before its answer,
between marks. Some templates leave it to the model to begin a thought, others begin it in the prompt: the output is
inside of it then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Final, Literal

from reflex_runtime.ipc.messages import Constraint
from reflex_runtime.llm.engine.detokenizer import overlap

ToolFormat = Literal["hermes", "llama3", "mistral"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
THOUGHT, ANSWER = "<think>", "</think>"  # a thought begins, and ends
MARKS: Final = frozenset({OPEN, CLOSE, THOUGHT, ANSWER, "[TOOL_CALLS]"})  # tokens that are text, also if special ones
_GAP: Final = re.compile(r"[ \n\t;]*")
_MOST: Final = 16  # calls that are forced at once
_SPACE: Final = r"\x20?"  # between the tokens of forced arguments: a weak model would spend its answer on blanks
_ARGUMENTS: Final = {"hermes": "arguments", "llama3": "parameters", "mistral": "arguments"}


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


def format_of(template: str) -> ToolFormat | None:
    """The form that a chat template teaches; None where it knows no tools, or a form that is not known here."""
    if "tools" not in template:
        return None
    if OPEN in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3" if '"parameters"' in template or "python_tag" in template else None


def forced(form: ToolFormat, tools: Sequence[Tool], several: bool) -> Constraint:
    """The constraint under which an output is one call of these tools, or several."""
    key, rules = _ARGUMENTS[form], [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        schema = tool.parameters | {"x-guidance": {"whitespace_pattern": _SPACE}}
        begin = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        rules += [f'call_{i}: {begin} args_{i} "}}"', f"args_{i}: %json {json.dumps(schema)}"]
    begin, between, end = {
        "hermes": (f"{OPEN}\n", f"\n{CLOSE}\n{OPEN}\n", f"\n{CLOSE}"),
        "llama3": ("", "; ", ""),
        "mistral": ("[", ", ", "]"),
    }[form]
    more = f" ({json.dumps(between)} call){{0,{_MOST - 1}}}" if several else ""
    start = f"start: {_literal(begin)}call{more}{_literal(end, before=True)}"
    return Constraint("grammar", "\n".join([start, *rules]))


def _literal(text: str, before: bool = False) -> str:
    if not text:
        return ""
    return f" {json.dumps(text)}" if before else f"{json.dumps(text)} "


class ToolParser:
    """Reads the calls out of one output's text as it comes. called: how many there were.

    Text that turns out to be no call of a known tool is text.
    """

    def __init__(self, form: ToolFormat, names: Iterable[str]) -> None:
        self.called = 0
        self._form, self._names = form, frozenset(names)
        self._text = ""  # not yet said: inside a call, or perhaps the beginning of one
        self._inside = False
        self._plain = False  # an output that began as text is text to its end, where a call has no mark

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is complete with this text."""
        self._text += text
        return self._marked() if self._form == "hermes" else self._bare()

    def end(self) -> list[str | ToolCall]:
        """What is left when the output has ended."""
        text, self._text = self._text, ""
        if self._inside:
            return [OPEN + text]
        if self._form != "hermes" and not self._plain:
            calls = _bare_calls(text, _ARGUMENTS[self._form])
            if calls and all(name in self._names for name, _ in calls):
                return [self._call(*call) for call in calls]
        return [text] if text and not (self.called and text.isspace()) else []

    def _marked(self) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            before, there, after = self._text.partition(mark)
            if not there:
                break
            if self._inside:
                call = _object(before, _ARGUMENTS["hermes"])
                well = call is not None and call[0] in self._names
                found.append(self._call(*call) if call is not None and well else OPEN + before + CLOSE)
            elif before.strip():
                found.append(before.rstrip())
            self._text, self._inside = after, not self._inside
        if not self._inside:
            said = len(self._text) - _unsure(self._text)
            if said:
                found.append(self._text[:said])
                self._text = self._text[said:]
        return found

    def _bare(self) -> list[str | ToolCall]:
        begun = self._text.lstrip()
        if not self._plain and (not begun or begun[0] in "{["):
            return []
        self._plain = True
        text, self._text = self._text, ""
        return [text]

    def _call(self, name: str, arguments: str) -> ToolCall:
        self.called += 1
        return ToolCall(f"call_{token_hex(12)}", name, arguments)


def _unsure(text: str) -> int:
    """How many characters at the end may be the beginning of a mark, or the space before one."""
    at = text.rfind("<")
    sure = text[:at] if at >= 0 and OPEN.startswith(text[at:]) else text
    return len(text) - len(sure.rstrip())


def _object(text: str, key: str) -> tuple[str, str] | None:
    """The name and the arguments of one call, if the text is one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _named(found, key)


def _bare_calls(text: str, key: str) -> list[tuple[str, str]]:
    """The calls that a text consists of: a list, or objects with semicolons between them. Empty if it is none."""
    decoder, at, found = json.JSONDecoder(), 0, []
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, _behind_gap(text, at))
            found += value if isinstance(value, list) else [value]
            at = _behind_gap(text, at)
    except (ValueError, RecursionError):
        return []
    calls = [_named(one, key) for one in found]
    return [call for call in calls if call is not None] if None not in calls else []


def _behind_gap(text: str, at: int) -> int:
    gap = _GAP.match(text, at)
    return gap.end() if gap else at


def _named(found: Any, key: str) -> tuple[str, str] | None:
    if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
        return None
    arguments = found.get(key, {})
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a character: only an escape can write it
        text = json.dumps(arguments)
    except (ValueError, RecursionError):  # Python reads NaN, which is no JSON
        return None
    return name, text


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of what a model thought."""

    text: str


class ThoughtParser:
    """Reads the thought at the beginning of one output's text as it comes. thinking: whether it is inside of one.

    An output that does not begin with a thought is an answer from its first character on.
    """

    def __init__(self, begun: bool) -> None:
        """begun: the prompt began the thought."""
        self._state: Literal["before", "inside", "behind", "answer"] = "inside" if begun else "before"
        self._text = ""  # not yet said
        self._said = False  # whether any of the thought was said

    @property
    def thinking(self) -> bool:
        return self._state == "inside"

    def feed(self, text: str) -> tuple[str, str]:
        """What is complete with this text: of the thought, and of the answer."""
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
        """What is left when the output has ended."""
        rest = self._rest()
        if self._state == "inside":
            return rest.rstrip() if self._said or not THOUGHT.startswith(rest.strip()) else "", ""
        return "", rest if self._state == "before" else ""

    def _begin(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(THOUGHT):
            self._state, self._text = "inside", begun[len(THOUGHT) :]
        elif not THOUGHT.startswith(begun):
            self._state = "answer"

    def _inside(self) -> str:
        if not self._said:  # a model may repeat the mark that the prompt ends with
            begun = self._text.lstrip()
            if not begun or (begun != THOUGHT and THOUGHT.startswith(begun)):
                return ""
            self._text = begun.removeprefix(THOUGHT).lstrip()
        before, closed, after = self._text.partition(ANSWER)
        if closed:
            self._state, self._text = "behind", after
            return before.rstrip()
        sure = self._text[: len(self._text) - overlap(self._text, ANSWER)].rstrip()
        self._text = self._text[len(sure) :]
        self._said = self._said or bool(sure)
        return sure

    def _rest(self) -> str:
        rest, self._text = self._text, ""
        return rest


class PartReader:
    """Reads one output's text as it comes: thoughts, text and calls. thinking: whether it is inside of a thought.
    called: calls so far."""

    def __init__(self, thoughts: ThoughtParser | None = None, tools: ToolParser | None = None) -> None:
        self._thoughts, self._tools = thoughts, tools

    @property
    def thinking(self) -> bool:
        return self._thoughts is not None and self._thoughts.thinking

    @property
    def called(self) -> int:
        return 0 if self._tools is None else self._tools.called

    def feed(self, text: str, last: bool) -> list[str | Thought | ToolCall]:
        """What is complete with this text. last: no more comes."""
        found: list[str | Thought | ToolCall] = []
        if self._thoughts is not None:
            thought, text = self._thoughts.feed(text)
            if last:
                more, rest = self._thoughts.end()
                thought, text = thought + more, text + rest
            if thought:
                found.append(Thought(thought))
        if self._tools is None:
            return [*found, text] if text else found
        return found + self._tools.feed(text) + (self._tools.end() if last else [])
