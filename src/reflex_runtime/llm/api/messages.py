"""POST /v1/messages of the Anthropic API, and its count_tokens.

For the chat template `thinking` becomes `enable_thinking`, and a tool's result becomes a message with the role tool.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.ipc.messages import Constraint, SamplingParams
from reflex_runtime.llm.api import fields as wire
from reflex_runtime.llm.api import requests
from reflex_runtime.llm.api.answers import Kind, PartWriter, ReplyContext
from reflex_runtime.llm.api.decode import decode, tools_of
from reflex_runtime.llm.api.fields import BadRequest, api_error, error_form
from reflex_runtime.llm.engine.output_parsers import ToolCall
from reflex_runtime.llm.engine.tokenizer import Conversation
from reflex_runtime.web.fields import Whole, encode

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
_BILLING: Final = "x-anthropic-billing-header:"
_DELTAS: Final = {"thought": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}


class Block(wire.MessagePart):
    """A block of a message. Other fields have no effect, such as `cache_control`."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None


class Turn(msgspec.Struct):
    """A message. Agents add later instructions with the role system."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class NamedTool(wire.ToolFunction, kw_only=True):
    """A function that the model may call."""

    parameters: dict[str, Any] | None = msgspec.field(name="input_schema")
    type: Literal["custom"] | None = None


class Choosing(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model thinks, if it can."""

    type: str
    budget_tokens: Any = None
    display: Any = None


class SchemaForm(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema: msgspec.Raw


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The form and the effort of the answer."""

    format: SchemaForm | None = None
    effort: Any = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """user_id: the client whose fair share the request takes."""

    user_id: str | None = None


class TalkFields(wire.SampledFields, kw_only=True):
    """The body of POST /v1/messages/count_tokens. `counted` refuses the sampling fields that it inherits."""

    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[msgspec.Raw] | None = None  # `NamedTool`, and tools of other servers
    tool_choice: Choosing | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessageFields(TalkFields, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Whole
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None


class InputTokens(msgspec.Struct):
    """The answer of count_tokens."""

    input_tokens: int


_WISHES: Final[wire.Values] = {
    "include_stop_str_in_output": (False,), "thinking.type": ("adaptive", "enabled", "disabled"),
}  # fmt: skip
_HINTS: Final[wire.Values] = {
    "context_management": (), "mcp_servers": (), "output_config.effort": ("high",), "speed": ("standard",),
    "thinking.budget_tokens": (), "thinking.display": ("summarized",),
}  # fmt: skip
_OF_ANSWERS: Final[wire.Values] = {
    "container": (), "diagnostics": (), "inference_geo": (), "service_tier": ("auto", "standard_only"),
    "user_profile_id": (), "workspace_id": (),
}  # fmt: skip
TALK: Final = wire.FieldTable(TalkFields, _WISHES, _HINTS, ("cache_control",))
MESSAGE: Final = wire.FieldTable(MessageFields, _WISHES, {**_HINTS, **_OF_ANSWERS}, ("cache_control",))
TOOL: Final = wire.FieldTable(
    NamedTool,
    hints={"allowed_callers": (["direct"],), "defer_loading": (False,), "input_examples": ()},
    granted=("cache_control", "eager_input_streaming"),
)


def message(body: bytes, defaults: SamplingParams = requests.PLAIN) -> requests.GenerationRequest:
    """POST /v1/messages. defaults: of the model. Raises BadRequest."""
    fields, hints = decode(MESSAGE, body)
    conversation, tools, more = _conversation(fields)
    client = requests.client_of({"metadata.user_id": fields.metadata.user_id if fields.metadata else None})
    field, constraint = _form(fields)
    params = requests.params_of(
        fields, defaults, fields.max_tokens, client, constraint, {"stop": "stop_sequences"},
        stop=tuple(fields.stop_sequences or ()), include_stop=True,
    )  # fmt: skip
    return requests.request_of(
        fields, params, fields.max_tokens, prompts=[], conversation=conversation, tools=tools, form_field=field,
        cut=True, ignored=[*hints, *more],
    )  # fmt: skip


def counted(body: bytes) -> tuple[str, Conversation, list[str]]:
    """POST /v1/messages/count_tokens: the model, the conversation, and the places of hints. Raises BadRequest."""
    fields, hints = decode(TALK, body)
    for name in wire.SampledFields.__struct_fields__:
        if name != "model" and getattr(fields, name) is not None:
            raise BadRequest(f"{name}: concerns an answer, and count_tokens makes none; leave it out", name)
    _form(fields)
    conversation, _, more = _conversation(fields)
    return fields.model, conversation, [*hints, *more]


def _form(fields: TalkFields) -> tuple[str, Constraint | None]:
    form, where = fields.output_config and fields.output_config.format, "output_config.format"
    kind, schema = ("json_schema", form.schema) if form else (None, msgspec.Raw())
    return wire.constraint_of(where, kind, schema, fields.structured_outputs, where)


def _conversation(fields: TalkFields) -> tuple[Conversation, wire.AskedTools, list[str]]:
    """The conversation, its tools, and the places of hints among the tools. Raises BadRequest."""
    turns = fields.messages
    blocks = sum(len(turn.content) for turn in turns if isinstance(turn.content, list))
    requests.check_length("messages", len(turns), blocks)
    if turns[-1].role == "assistant":
        raise BadRequest("messages: must not end with a message of the assistant: no answer is continued", "messages")
    inputs = (b.input for turn in turns if isinstance(turn.content, list) for b in turn.content)
    requests.check_arguments("messages", "inputs of their tool_use", (bytes(one).decode() for one in inputs))
    messages: list[dict[str, Any]] = []
    if system := _instructions(fields.system):
        messages.append({"role": "system", "content": system})
    for i, turn in enumerate(turns):
        messages += _turn(f"messages[{i}]", turn)
    tools, shown, hints = _tools(fields)
    more = requests.effort_of(None if fields.output_config is None else fields.output_config.effort)
    if fields.thinking is not None:
        more["enable_thinking"] = fields.thinking.type != "disabled"
    more |= requests.template_variables(fields.chat_template_kwargs)
    return Conversation(messages, shown, more), tools, hints


def _instructions(system: str | list[Block] | None) -> Any:
    """The instructions. A first line with billing data, which some agents send, is dropped: it differs in every
    request, so that the prefix cache would never have the prompt."""
    texts = [system or ""] if not isinstance(system, list) else requests.texts_of("system", system, "text")
    if texts and texts[0].startswith(_BILLING):
        texts[:1] = filter(None, (texts[0].partition("\n")[2],))
    return requests.parts_of(texts)


def _tools(fields: TalkFields) -> tuple[wire.AskedTools, list[dict[str, Any]], list[str]]:
    named: str | wire.ChosenFunction | None = None
    parallel = True
    if (choice := fields.tool_choice) is not None:
        if (choice.type == "tool") != (choice.name is not None):
            raise BadRequest("tool_choice.name: is for type tool, which needs it, and for no other", "tool_choice.name")
        named = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
        if choice.name is not None:
            named = wire.ChosenFunction(choice.name)
        parallel = not choice.disable_parallel_tool_use
    return tools_of(fields.tools, TOOL, named, parallel, "custom")


def _turn(where: str, turn: Turn) -> Iterator[dict[str, Any]]:
    """A message as messages for a chat template: each result of a tool is one, before the rest."""
    blocks = [Block("text", turn.content)] if isinstance(turn.content, str) else turn.content
    texts, calls, thoughts = [], [], []
    for i, block in enumerate(blocks):
        name = f"{where}.content[{i}]"
        if block.type == "text" and block.text is not None:
            texts.append(block.text)
        elif block.type == "tool_result" and turn.role == "user":
            yield _result(name, block)
        elif block.type == "tool_use" and turn.role == "assistant" and block.id is not None and block.name is not None:
            calls.append(requests.sent_call(f"{name}.input", block.id, block.name, bytes(block.input).decode()))
        elif block.type == "thinking" and turn.role == "assistant" and block.thinking is not None:
            thoughts.append(block.thinking)
        elif turn.role != "assistant" or block.type in ("text", "tool_use", "thinking"):
            raise BadRequest(f"{name}: a block {block.type[:50]!r} is wrong here, or lacks a field; {_BLOCKS}", name)
    if not texts and turn.role != "assistant":
        if any(block.type == "tool_result" for block in blocks):
            return
        raise BadRequest(f"{where}.content: is empty", f"{where}.content")
    found: dict[str, Any] = {"role": turn.role, "content": requests.parts_of(texts)}
    if calls:
        found["tool_calls"] = calls
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    yield found


def _result(where: str, block: Block) -> dict[str, Any]:
    if block.tool_use_id is None:
        raise BadRequest(f"{where}.tool_use_id: is missing", f"{where}.tool_use_id")
    text = requests.output_of(f"{where}.content", block.content or "", "text")
    if block.is_error:
        text = f"Error: {text}"  # templates have no field for errors
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


_BLOCKS: Final = "a user's are text and tool_result, an assistant's text, tool_use and thinking"
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageAnswer(PartWriter):
    """The answer to a request. See `Writer`."""

    def __init__(self, reply: ReplyContext) -> None:
        super().__init__(reply)
        self.id = f"msg_{reply.id}"
        self._content: list[dict[str, Any]] = []

    def end(self) -> bytes:
        if not self._reply.asked.stream:
            return encode(self._message(self._content, self._reason()))
        about = {"stop_reason": self._reason(), "stop_sequence": self._stopped}
        ended = self._event("message_delta", delta=about, usage=self._usage())
        return ended + self._event("message_stop")

    def failed(self, error: ReflexError) -> bytes:
        return b"event: error\ndata: " + _error(error, self._reply.id) + b"\n\n"

    def _message(self, content: list[Any], reason: str | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._reply.asked.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": self._stopped,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        usage = self._reply.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }

    def _reason(self) -> str | None:
        if self._finish == "length":
            full = self._reply.usage().completion_tokens >= (self._reply.asked.max_tokens or 0)
            return "max_tokens" if full else "model_context_window_exceeded"
        if self._reader.called:
            return "tool_use"
        return "stop_sequence" if self._stopped is not None else "end_turn"

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        return self._event("message_start", message=self._message([], None))

    def _opened(self, kind: Kind) -> bytes:
        return self._event("content_block_start", index=len(self._content), content_block=_block(kind, ""))

    def _delta(self, kind: Kind, text: str) -> bytes:
        type, name = _DELTAS[kind]
        return self._event("content_block_delta", index=len(self._content), delta={"type": type, name: text})

    def _closed(self, kind: Kind, text: str) -> bytes:
        return self._add(_block(kind, text))

    def _called(self, call: ToolCall) -> bytes:
        block, index = {"type": "tool_use", "id": call.id, "name": call.name}, len(self._content)
        begun = self._event("content_block_start", index=index, content_block={**block, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        said = self._event("content_block_delta", index=index, delta=delta)
        return begun + said + self._add({**block, "input": msgspec.Raw(call.arguments.encode())})

    def _add(self, block: dict[str, Any]) -> bytes:
        self._content.append(block)
        return self._event("content_block_stop", index=len(self._content) - 1)


def _block(kind: Kind, text: str) -> dict[str, Any]:
    """A content block. The API requires a thought's signature; nothing here checks one, so it is empty."""
    return {"type": "text", "text": text} if kind == "text" else {"type": "thinking", "thinking": text, "signature": ""}


def _error(error: ReflexError, request_id: str) -> bytes:
    found = api_error(error)
    kind = _TYPES.get(found.status, "api_error")
    return encode({"type": "error", "error": {"type": kind, "message": found.message}, "request_id": request_id})


FORM: Final = error_form(_error)
