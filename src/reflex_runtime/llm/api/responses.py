"""POST /v1/responses of OpenAI's Responses API. Nothing is stored: clients send earlier items again, in `input`."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Final, Literal

import msgspec

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.ipc.messages import SamplingParams
from reflex_runtime.llm.api import fields as wire
from reflex_runtime.llm.api import requests
from reflex_runtime.llm.api.answers import Kind, PartWriter, ReplyContext
from reflex_runtime.llm.api.decode import decode, tools_of
from reflex_runtime.llm.api.fields import BadRequest, api_error
from reflex_runtime.llm.engine.output_parsers import ToolCall
from reflex_runtime.llm.engine.tokenizer import Conversation
from reflex_runtime.web.fields import Whole, encode

PATH: Final = "/v1/responses"
_Key = Annotated[str, msgspec.Meta(max_length=64)]  # of metadata, as OpenAI has it
_Value = Annotated[str, msgspec.Meta(max_length=512)]
_EVENTS: Final = {"thought": "response.reasoning_text", "text": "response.output_text"}


class InputItem(msgspec.Struct):
    """An item of a conversation: a message, a call, its result, or a thought. Other fields are ignored."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[wire.MessagePart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    output: Any = None


class FlatTool(wire.ToolFunction, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]


class FlatChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` of one function."""

    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the answer, which always fits it: description and strict have no effect."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The form and the verbosity of the answer."""

    format: TextFormat | None = None
    verbosity: Any = None


class Padding(msgspec.Struct, forbid_unknown_fields=True):
    """include_obfuscation pads events: it has no effect here."""

    include_obfuscation: bool | None = None


class ResponseFields(wire.SampledFields, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | list[InputItem]
    user: str | None = None
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    stream_options: Padding | None = None
    text: TextConfig | None = None
    tools: list[msgspec.Raw] | None = None  # `FlatTool`, and tools of other servers
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: Any = None


RESPONSE: Final = wire.FieldTable(
    ResponseFields,
    wishes={
        "access_programs": (), "background": (False,), "background_options": (), "conversation": (), "image": (),
        "moderation": (), "previous_response_id": (), "prompt": (), "top_logprobs": (0,),
    },
    hints={
        "client_metadata": (), "context_management": (), "include": (), "max_tool_calls": (),
        "reasoning": ({"effort": None}, {"effort": None, "summary": None}, {"effort": "none"}),
        "service_tier": ("auto", "default"), "store": (False,), "text.verbosity": ("medium",),
        "truncation": ("disabled",),
    },
    granted=wire.PROMPT_CACHE,
)  # fmt: skip
TOOL: Final = wire.FieldTable(FlatTool)
_TAKEN: Final = ("message", "function_call", "function_call_output", "reasoning")
_TEXTS: Final = ("input_text", "output_text", "text")
_HISTORY: Final = re.compile(r"\w+_(call|output|call_output|list_tools|approval_(request|response))|compaction\w*")


def response(body: bytes, defaults: SamplingParams = requests.PLAIN) -> requests.GenerationRequest:
    """POST /v1/responses. defaults: of the model. Raises BadRequest."""
    fields, hints = decode(RESPONSE, body)
    choice = fields.tool_choice
    chosen = wire.ChosenFunction(choice.name) if isinstance(choice, FlatChoice) else choice
    tools, shown, more = tools_of(fields.tools, TOOL, chosen, fields.parallel_tool_calls)
    thinks = dict(fields.reasoning) if isinstance(fields.reasoning, dict) else {"": fields.reasoning}
    variables = requests.effort_of(thinks.pop("effort", None))
    if not any(thinks.values()):
        hints = [f"{name}.effort" if name == "reasoning" else name for name in hints]
    variables |= requests.template_variables(fields.chat_template_kwargs)
    conversation = Conversation(_messages(fields), shown, variables)
    if fields.stream_options is not None and not fields.stream:
        raise BadRequest("stream_options: needs stream to be true", "stream_options")
    form, where, limit = fields.text and fields.text.format, "text.format", fields.max_output_tokens
    kind, schema = (form.type, form.schema) if form else (None, msgspec.Raw())
    field, constraint = wire.constraint_of(where, kind, schema, fields.structured_outputs, where)
    params = requests.params_of(
        fields, defaults, limit,
        requests.client_of({"user": fields.user, "safety_identifier": fields.safety_identifier}),
        constraint, {"max_tokens": "max_output_tokens"}, include_stop=bool(fields.include_stop_str_in_output),
    )  # fmt: skip
    return requests.request_of(
        fields, params, limit, prompts=[], conversation=conversation, tools=tools, form_field=field,
        prompt_field="input", said=_echoed(fields, params), ignored=[*hints, *more],
    )  # fmt: skip


def _echoed(fields: ResponseFields, params: SamplingParams) -> dict[str, Any]:
    """Fields that the answer repeats."""
    return {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": params.temperature,
        "text": {"format": _format(fields.text)},
        "tool_choice": fields.tool_choice or "auto",
        "tools": [msgspec.Raw(bytes(tool)) for tool in fields.tools or ()],
        "top_p": params.top_p,
        "truncation": "disabled",
    }


def _format(text: TextConfig | None) -> dict[str, Any]:
    if text is None or text.format is None:
        return {"type": "text"}
    form = text.format
    fields = {"type": form.type, "name": form.name, "description": form.description, "strict": form.strict}
    found = {name: value for name, value in fields.items() if value is not None}
    schema = bytes(form.schema)  # a copy: a `Raw` of msgspec keeps the whole body in memory
    return found | ({"schema": msgspec.Raw(schema)} if schema else {})


# -- the conversation --------------------------------------------------------------------------------------------------


def _messages(fields: ResponseFields) -> list[dict[str, Any]]:
    """Messages for a chat template, in which calls and thoughts are parts of the assistant's message."""
    found: list[dict[str, Any]] = []
    if fields.instructions is not None:
        found.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*found, {"role": "user", "content": fields.input}]
    items = fields.input
    parts = sum(len(item.content) for item in items if isinstance(item.content, list))
    requests.check_length("input", len(items), parts)
    requests.check_arguments("input", "arguments of its function_calls", map(_arguments, items))
    thought = ""
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if item.type == "reasoning":
            thought += requests.text_of(f"{where}.content", item.content or "", "reasoning_text")
            continue
        if item.type not in _TAKEN and _HISTORY.fullmatch(item.type):
            continue
        message = _item(where, item)
        if item.type == "function_call" and found and found[-1]["role"] == "assistant" and not thought:
            found[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        if thought and message["role"] != "assistant":  # the answer was cut after its thought
            found.append({"role": "assistant", "content": "", "reasoning_content": thought})
        elif thought:
            message["reasoning_content"] = thought
        thought = ""
        found.append(message)
    return found


def _item(where: str, item: InputItem) -> dict[str, Any]:
    if item.type == "message" and item.role is not None:
        return {"role": requests.role_of(item.role), "content": _content(f"{where}.content", item.content, item.role)}
    if item.type == "function_call" and item.call_id is not None and item.name is not None:
        call = requests.sent_call(f"{where}.arguments", item.call_id, item.name, _arguments(item))
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item.type == "function_call_output" and item.call_id is not None:
        text = requests.output_of(f"{where}.output", item.output, *_TEXTS)
        return {"role": "tool", "tool_call_id": item.call_id, "content": text}
    why = "only message, function_call, function_call_output and reasoning are accepted, with all their fields"
    raise BadRequest(f"{where}: has type {item.type[:50]!r}; {why}", where)


def _arguments(item: InputItem) -> str:
    return item.arguments if isinstance(item.arguments, str) else ""


def _content(where: str, content: str | list[wire.MessagePart] | None, role: str) -> Any:
    if content is None and role != "assistant":
        raise BadRequest(f"{where}: is missing", where)
    return requests.content_of(where, content or "", *_TEXTS, answered=role == "assistant")


class ResponseAnswer(PartWriter):
    """The answer to a request. See `Writer`."""

    def __init__(self, reply: ReplyContext) -> None:
        super().__init__(reply)
        self.id = f"resp_{reply.id}"
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._number = 0

    def end(self) -> bytes:
        status = "incomplete" if self._finish == "length" else "completed"
        body = self._response(status)
        return self._event(f"response.{status}", response=body) if self._reply.asked.stream else encode(body)

    def failed(self, error: ReflexError) -> bytes:
        found = api_error(error)
        return self._event("error", code=found.code, message=found.message, param=found.param)

    def _response(self, status: str) -> dict[str, Any]:
        begun = status == "in_progress"
        asked = self._reply.asked
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": asked.model,
            "output": [] if begun else self._items,
            "usage": None if begun else self._usage(),
            **asked.said,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._reply.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought_tokens},
            "total_tokens": usage.total_tokens,
        }

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _opened(self, kind: Kind) -> bytes:
        item = self._item(kind, "in_progress", [])
        begun = self._event("response.output_item.added", output_index=len(self._items), item=item)
        return begun + self._of_part("response.content_part.added", part=_part(kind, ""))

    def _delta(self, kind: Kind, text: str) -> bytes:
        more: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
        return self._of_part(f"{_EVENTS[kind]}.delta", delta=text, **more)

    def _closed(self, kind: Kind, text: str) -> bytes:
        more: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
        done = self._of_part(f"{_EVENTS[kind]}.done", text=text, **more)
        done += self._of_part("response.content_part.done", part=_part(kind, text))
        cut = kind == "text" and self._finish == "length"
        return done + self._add(self._item(kind, "incomplete" if cut else "completed", [_part(kind, text)]))

    def _called(self, call: ToolCall) -> bytes:
        index, id = len(self._items), f"fc_{self._reply.id}_{len(self._items)}"
        item = {"id": id, "type": "function_call", "call_id": call.id, "name": call.name}
        of = {"item_id": id, "output_index": index}
        begun = self._event(
            "response.output_item.added", output_index=index, item=item | {"arguments": "", "status": "in_progress"}
        )
        name = "response.function_call_arguments"
        said = self._event(f"{name}.delta", **of, delta=call.arguments)
        said += self._event(f"{name}.done", **of, name=call.name, arguments=call.arguments)
        return begun + said + self._add(item | {"arguments": call.arguments, "status": "completed"})

    def _add(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _id(self) -> str:
        return f"item_{self._reply.id}_{len(self._items)}"

    def _item(self, kind: Kind, status: str, content: list[Any]) -> dict[str, Any]:
        if kind == "thought":
            return {"id": self._id(), "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": self._id(), "type": "message", "role": "assistant", "content": content, "status": status}

    def _of_part(self, type: str, **fields: Any) -> bytes:
        return self._event(type, item_id=self._id(), output_index=len(self._items), content_index=0, **fields)

    def _event(self, type: str, **fields: Any) -> bytes:
        self._number += 1
        return super()._event(type, sequence_number=self._number - 1, **fields)


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
