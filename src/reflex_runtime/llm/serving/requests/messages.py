"""POST /v1/messages: from a body of the Anthropic API to the same request that a chat makes.

As everywhere, a field that is not supported is refused with its name if its value would change the answer. The further
fields of `MoreFields` are taken here, too. `thinking` and results of tools are told to the chat template by the names
that templates know: `enable_thinking`, and messages with the role tool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace as changed

from reflex_runtime.llm.engine.tokenizer import Conversation
from reflex_runtime.llm.serving.requests.decoding import decode
from reflex_runtime.llm.serving.requests.fields import CommonFields, MessagePart, MoreFields, plain_of, said_as
from reflex_runtime.llm.serving.requests.forms import JsonSchemaFormat, ResponseFormat
from reflex_runtime.llm.serving.requests.reading import CompletionRequest, DefaultsOf, conversing, no_defaults
from reflex_runtime.llm.serving.requests.refusals import BadRequest, renamed
from reflex_runtime.llm.serving.requests.talks import (
    check_arguments,
    check_length,
    sent_call,
    template_variables,
    text_of,
)
from reflex_runtime.llm.serving.requests.tool_fields import AskedTools, ChosenFunction, ToolFunction, tools_of
from reflex_runtime.web.fields import Whole

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"


class Block(MessagePart):
    """A block of a message. What else it says is of a type that is not taken, or has no effect (`cache_control`)."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw()
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    """A message."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call. cache_control, eager_input_streaming: have no effect. type: those of tools
    that a server would run are refused."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    allowed_callers: Any = None
    defer_loading: Any = None
    input_examples: Any = None


class Choosing(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model may think first, where it is one that can."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Whole | None = None
    display: str | None = None


class SchemaForm(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema: msgspec.Raw


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer is to be like."""

    format: SchemaForm | None = None
    effort: str | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """user_id: the client whose fair share the request takes."""

    user_id: str | None = None


class TalkFields(MoreFields, kw_only=True):
    """A conversation, as both endpoints get it."""

    model: str
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[NamedTool] | None = None
    tool_choice: Choosing | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: Any = None
    mcp_servers: Any = None
    speed: str | None = None


class MessageFields(TalkFields, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Whole
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: str | None = None
    service_tier: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class InputTokens(msgspec.Struct):
    """What count_tokens answers."""

    input_tokens: int


PLAIN: Final = plain_of(
    MessageFields, include_stop_str_in_output=(False,), service_tier=("auto", "standard_only")
)
_BILLING: Final = "x-anthropic-billing-header:"
_message = msgspec.json.Decoder(MessageFields)
_count = msgspec.json.Decoder(TalkFields)


def message(body: bytes, defaults: DefaultsOf = no_defaults) -> CompletionRequest:
    """POST /v1/messages, or the BadRequest that names what is wrong. defaults: of a model, by its name."""
    fields = decode(_message, body, PLAIN)
    conversation, tools = _conversation(fields)
    common = CommonFields(
        model=fields.model,
        stop=fields.stop_sequences,
        temperature=fields.temperature,
        top_p=fields.top_p,
        stream=fields.stream,
        user=None if fields.metadata is None else fields.metadata.user_id,
        response_format=_form(fields.output_config),
        **said_as(MoreFields, fields),
    )
    names = {
        "stop": "stop_sequences",
        "user": "metadata.user_id",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
    }
    with renamed(names):
        asked = conversing(common, conversation, fields.max_tokens, "max_tokens", defaults, tools)
    return replace(asked, params=changed(asked.params, include_stop=True), form_field="output_config.format")


def counted(body: bytes) -> tuple[str, Conversation]:
    """POST /v1/messages/count_tokens: the model, and what it would be asked; or the BadRequest."""
    fields = decode(_count, body, PLAIN)
    for name, value in said_as(MoreFields, fields).items():
        if value is not None:
            raise BadRequest(f"{name}: is of an answer, and none is made here; leave it out", name)
    _form(fields.output_config)
    return fields.model, _conversation(fields)[0]


def _form(config: OutputConfig | None) -> ResponseFormat | None:
    if config is not None and config.effort not in (None, "high"):
        raise BadRequest("output_config.effort: is not supported here; leave it out", "output_config.effort")
    if config is None or config.format is None:
        return None
    return ResponseFormat("json_schema", JsonSchemaFormat("answer", config.format.schema))


def _conversation(fields: TalkFields) -> tuple[Conversation, AskedTools]:
    turns = fields.messages
    blocks = sum(len(turn.content) for turn in turns if isinstance(turn.content, list))
    check_length("messages", len(turns), blocks)
    if turns[-1].role == "assistant":
        raise BadRequest("messages: ends with the assistant's; to go on in one is not supported here", "messages")
    inputs = (b.input for turn in turns if isinstance(turn.content, list) for b in turn.content)
    check_arguments("messages", "inputs of their tool_use", (bytes(one).decode() for one in inputs))
    messages: list[dict[str, Any]] = []
    if system := _instructions(fields.system or ""):
        messages.append({"role": "system", "content": system})
    for i, turn in enumerate(turns):
        messages += _turn(f"messages[{i}]", turn)
    tools, shown = _tools(fields)
    more = _thinking(fields.thinking) | template_variables(fields.chat_template_kwargs)
    return Conversation(messages, shown, more), tools


def _instructions(system: str | list[Block]) -> str:
    """Without the line of billing that some agents send first. Its value differs in every request, so no prompt would
    begin like an earlier one."""
    text = text_of("system", system, "text")
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _thinking(said: Thinking | None) -> dict[str, Any]:
    if said is None:
        return {}
    if said.type == "enabled" or said.budget_tokens is not None:
        told = "no budget is held here; send type adaptive or disabled"
        raise BadRequest(f"thinking.budget_tokens: {told}", "thinking.budget_tokens")
    if said.type == "between_tools" or said.display not in (None, "summarized"):
        name = "thinking.type" if said.type == "between_tools" else "thinking.display"
        raise BadRequest(f"{name}: is not supported here; leave it out", name)
    return {"enable_thinking": said.type == "adaptive"}


def _tools(fields: TalkFields) -> tuple[AskedTools, list[dict[str, Any]]]:
    sent = []
    for i, tool in enumerate(fields.tools or ()):
        where = f"tools[{i}]"
        if tool.type not in (None, "custom") or tool.input_schema is None:
            raise BadRequest(f"{where}: must be a custom tool, with its input_schema", where)
        for name in ("allowed_callers", "defer_loading", "input_examples"):
            if getattr(tool, name) not in (None, False, [], ["direct"]):
                raise BadRequest(f"{where}.{name}: is not supported here; leave it out", f"{where}.{name}")
        sent.append(ToolFunction(tool.name, tool.description, tool.input_schema, tool.strict))
    named: str | ChosenFunction | None = None
    parallel = True
    if (choice := fields.tool_choice) is not None:
        if (choice.type == "tool") != (choice.name is not None):
            raise BadRequest("tool_choice.name: goes with type tool, and with no other", "tool_choice.name")
        named = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
        if choice.name is not None:
            named = ChosenFunction(choice.name)
        parallel = not choice.disable_parallel_tool_use
    return tools_of(sent, named, parallel)


def _turn(where: str, turn: Turn) -> Iterator[dict[str, Any]]:
    """A message as chat templates know it: a result of a tool is a message of its own, before what is said with it."""
    blocks = [Block("text", turn.content)] if isinstance(turn.content, str) else turn.content
    texts, calls, thoughts = [], [], []
    for i, block in enumerate(blocks):
        name = f"{where}.content[{i}]"
        if block.type == "text" and block.text is not None:
            texts.append(block.text)
        elif block.type == "tool_result" and turn.role == "user":
            yield _result(name, block)
        elif block.type == "tool_use" and turn.role == "assistant" and block.id is not None and block.name is not None:
            calls.append(sent_call(f"{name}.input", block.id, block.name, bytes(block.input).decode()))
        elif block.type == "thinking" and turn.role == "assistant" and block.thinking is not None:
            thoughts.append(block.thinking)
        else:
            told = "only text, and tool_use, tool_result and thinking where they belong, each whole, are taken"
            raise BadRequest(f"{name}: has type {block.type[:50]!r}; {told}", name)
    if not (texts or calls or thoughts):
        if any(block.type == "tool_result" for block in blocks):
            return
        raise BadRequest(f"{where}.content: is empty", f"{where}.content")
    found: dict[str, Any] = {"role": turn.role, "content": "\n".join(texts)}
    if calls:
        found["tool_calls"] = calls
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    yield found


def _result(where: str, block: Block) -> dict[str, Any]:
    if block.tool_use_id is None:
        raise BadRequest(f"{where}.tool_use_id: is missing", f"{where}.tool_use_id")
    text = text_of(f"{where}.content", block.content or "", "text")
    if block.is_error:
        text = f"Error: {text}"  # templates know no other way to say so
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
