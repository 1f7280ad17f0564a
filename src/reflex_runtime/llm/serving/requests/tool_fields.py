"""The tools of a request: the fields that say them, which ones its answer may call, and which ones it must."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import to_builtins

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.sampling import Constraint
from reflex_runtime.llm.engine.tools import Tool, ToolFormat, ToolParser, forced
from reflex_runtime.llm.serving.requests.refusals import BadRequest

MOST_TOOLS = 128
NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class CalledFunction(msgspec.Struct):
    """A function that a model called. arguments: JSON."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct):
    """A call of a tool, in an answer or sent back. What else it says there is not looked at."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call. parameters: a JSON Schema. strict: it holds where a call is demanded."""

    name: Annotated[str, msgspec.Meta(extra_json_schema={"pattern": NAME})]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of `tools`."""

    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function that is to be called."""

    name: str


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` of one function."""

    type: Literal["function"]
    function: ChosenFunction


@dataclass(frozen=True, slots=True)
class AskedTools:
    """tools: those that may be called. forced: whether the answer has to be a call. several: or more than one."""

    tools: tuple[Tool, ...] = ()
    forced: bool = False
    several: bool = True

    def constraint(self, form: ToolFormat | None) -> Constraint | None:
        """What the answer must be, where it has to be a call. BadRequest when the model knows no tools."""
        if form is None:
            why = "this model's chat template knows none, or writes calls in no known form"
            raise BadRequest(f"tools: {why}; models such as Qwen3 and Llama 3 have one that does", "tools")
        if not self.forced:
            return None
        try:
            return forced(form, self.tools, self.several)
        except ConfigError as error:
            raise BadRequest(f"tools: all parameters together: {error.message}", "tools") from None

    def parser(self, form: ToolFormat) -> ToolParser:
        """For one choice."""
        return ToolParser(form, (tool.name for tool in self.tools))


NO_TOOLS = AskedTools()


def tools_of(
    sent: Sequence[ToolFunction], choice: str | ChosenFunction | None, parallel: bool | None, inside: str = ""
) -> tuple[AskedTools, list[dict[str, Any]]]:
    """The tools, and what a chat template shows the model of them. BadRequest names what is wrong. inside: where in an
    entry of `tools` its function stands."""
    if len(sent) > MOST_TOOLS:
        raise BadRequest(f"tools: holds {len(sent)}, at most {MOST_TOOLS} are taken", "tools")
    tools = [Tool(function.name, function.parameters or {"type": "object"}) for function in sent]
    for i, tool in enumerate(tools):
        if not re.fullmatch(NAME, tool.name):
            name = f"tools[{i}]{inside}.name"
            raise BadRequest(f"{name}={tool.name[:80]!r}: must be 1 to 64 letters, digits, _, - or .", name)
    if choice == "none":
        return NO_TOOLS, []
    named = choice.name if isinstance(choice, ChosenFunction) else None
    if (choice == "required" or named is not None) and not tools:
        raise BadRequest("tool_choice: demands a call, and there are no tools", "tool_choice")
    if named is not None and named not in {tool.name for tool in tools}:
        raise BadRequest(f"tool_choice: {named[:80]!r} is none of the tools", "tool_choice")
    may = tuple(tool for tool in tools if named in (None, tool.name))
    several = parallel is not False and named is None
    shown = [{"type": "function", "function": _shown(function)} for function in sent]
    return AskedTools(may, choice == "required" or named is not None, several), shown


def _shown(function: Any) -> dict[str, Any]:
    """Without what was not said: templates write all of it into the prompt."""
    said: dict[str, Any] = to_builtins(function)
    return {name: value for name, value in said.items() if value is not None and name != "strict"}
