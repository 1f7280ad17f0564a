"""Fields of OpenAI requests, their errors, and for every dialect the fields that have no effect (`FieldTable`).

A field of an API that is not served is a wish or a hint. A wish would change the answer: it is refused by name, like an
unknown field. A hint would not (budgets, efforts, bookkeeping, tools of other servers): it is accepted, and named in a
header. Structs of messages ignore further fields, so that history from other servers is accepted.

Fields beyond the APIs, with the names of other servers: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`stop_token_ids`, `include_stop_str_in_output`, `ignore_eos`, `structured_outputs`. Our own: `priority`, `deadline_ms`
(until the first token), `max_gap_ms` (between two tokens). `user` is the client whose fair share a request takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from reflex_runtime.core.errors import ConfigError, InFlightCapReached, QueueFull, ReflexError, TooLarge
from reflex_runtime.ipc.messages import Constraint
from reflex_runtime.llm.engine.output_parsers import Tool, ToolForm, ToolParser, forced
from reflex_runtime.llm.server.lifecycle import ModelNotFound
from reflex_runtime.web.errors import JSON, ClientError, ErrorForm, HttpResponse, Unauthorized
from reflex_runtime.web.fields import Whole, encode, printable


class BadRequest(ClientError):
    """A field is wrong. param: its name, None for the whole request. api_code: of the answer, in place of `code`."""

    def __init__(self, message: str, param: str | None = None, api_code: str | None = None) -> None:
        super().__init__(printable(message))
        self.param, self.api_code = param, api_code

    def __reduce__(self) -> Any:
        return (BadRequest, (self.message, self.param, self.api_code))


def too_deep() -> BadRequest:
    """The error for a body that could be decoded, but nests too deeply for a later step."""
    return BadRequest("its values nest too deeply")


class ApiError(NamedTuple):
    """An error as OpenAI's API has it."""

    status: int
    type: str
    code: str
    message: str
    param: str | None


def api_error(error: ReflexError) -> ApiError:
    """The error with the API's status, type and code."""
    status, code, message = error.http_status, error.code, error.message
    param = error.param if isinstance(error, BadRequest) else None
    if isinstance(error, BadRequest):
        code = error.api_code or code
    elif isinstance(error, (QueueFull, InFlightCapReached)):
        status = 429  # clients wait and retry
    elif isinstance(error, TooLarge):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, ModelNotFound):
        code, param = "model_not_found", "model"
    elif isinstance(error, Unauthorized):
        code = "invalid_api_key"
    if isinstance(error, QueueFull):
        details = error.details
        message = f"the queue is full: {details.get('max_queue')} requests wait already"
        if "max_queued_units" in details:
            waiting, most = details.get("queued_units", 0), details["max_queued_units"]
            message = f"{waiting:.0f} tokens wait already, at most {most:.0f} may"
    kind = (
        "server_error"
        if status >= 500
        else {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
    )
    return ApiError(status, kind, code, message, param)


def error_body(error: ReflexError) -> bytes:
    """The body of an error in the OpenAI API."""
    found = api_error(error)
    return encode({"error": {"message": found.message, "type": found.type, "param": found.param, "code": found.code}})


def error_form(body: Callable[[ReflexError, str], bytes]) -> ErrorForm:
    """The form of an API's errors, with `X-Should-Retry`. body: makes it of an error and the request's id."""

    def refuse(error: ReflexError, request_id: str, packed: bool) -> HttpResponse:
        retry = (b"x-should-retry", b"true" if error.retry_safe else b"false")
        return HttpResponse(api_error(error).status, body(error, request_id), JSON, [retry])

    return refuse


# -- the fields --------------------------------------------------------------------------------------------------------


MOST_TEXTS: Final = 1000  # of `structured_outputs.choice`
_ANY_OBJECT: Final = '{"type": "object"}'
MOST_TOOLS = 1024
NAME = r"^[a-zA-Z0-9_.-]{1,64}\Z"
MOST_CHOICES = 128  # of one prompt
MOST_PROMPTS = 2048  # of one request
MOST_TOKENS = 1 << 20  # of one request whose prompts are token ids


F = TypeVar("F", bound=msgspec.Struct)
Values = Mapping[str, tuple[Any, ...]]
_NONE: Final[Values] = {}


class FieldTable(Generic[F]):
    """The fields of a body, or of a tool in it: those of a struct, and those of its API without effect.

    wishes, hints: paths (`messages[].audio`), each with the values that mean nothing, besides None and empty ones. A
    wish with another value is refused, a hint is accepted and named. granted: fields for what every request gets, such
    as a cache of prompts.
    """

    def __init__(
        self, struct: type[F], wishes: Values = _NONE, hints: Values = _NONE, granted: Sequence[str] = ()
    ) -> None:
        self.wishes, self.hints = wishes, hints
        known = dict.fromkeys(path for path in (*wishes, *hints, *granted) if path.isidentifier())
        more = [(name, Any, None) for name in known if name not in struct.__struct_fields__]
        kind: Any = msgspec.defstruct(struct.__name__, more, bases=(struct,), kw_only=True, forbid_unknown_fields=True)
        self.kind: type[F] = kind
        self.decoder = msgspec.json.Decoder(self.kind)


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A schema for the answer, which always fits it: name, description and strict have no effect."""

    name: str
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an answer in the OpenAI API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an answer in vLLM's API: exactly one of these fields."""

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def constraint_of(
    where: str, kind: str | None, schema: msgspec.Raw, other: StructuredOutputs | None, place: str
) -> tuple[str, Constraint | None]:
    """The name of the field that sets the form of the answer, and the constraint. where, kind: the field of the
    dialect, and the form in it; schema, place: of a JSON schema; other: the form in vLLM's API. Raises BadRequest."""
    if other is not None:
        if kind not in (None, "text"):
            raise BadRequest(f"structured_outputs: {where} sets a form, too; send one of them", "structured_outputs")
        return "structured_outputs", _structured(other)
    if kind in (None, "text"):
        return where, None
    if kind == "json_object":
        return where, Constraint("json", _ANY_OBJECT)
    text = bytes(schema).decode()
    if not text or text == "null":
        raise BadRequest(f"{place}.schema: is missing", f"{place}.schema")
    return where, _form(where, "json", text)


def _structured(sent: StructuredOutputs) -> Constraint:
    schema, where = bytes(sent.json), "structured_outputs"
    given = {
        "json": schema.decode() if schema and schema != b"null" else None,
        "json_object": _ANY_OBJECT if sent.json_object else None,
        "regex": sent.regex,
        "choice": None if sent.choice is None else encode(sent.choice).decode(),
        "grammar": sent.grammar,
    }
    found = [(name, text) for name, text in given.items() if text is not None]
    if len(found) != 1:
        raise BadRequest(f"{where}: must have one of {', '.join(given)}, has {len(found)}", where)
    name, text = found[0]
    if name == "choice" and not (sent.choice and len(sent.choice) <= MOST_TEXTS and all(sent.choice)):
        raise BadRequest(f"{where}.choice: must be 1 to {MOST_TEXTS} texts, none of them empty", f"{where}.choice")
    if name == "json" and text.startswith('"'):  # a schema inside of a string
        text = msgspec.json.decode(text, type=str)
    return _form(where, "json" if name == "json_object" else name, text)


def _form(where: str, kind: Any, text: str) -> Constraint:
    try:
        return Constraint(kind, text)
    except ConfigError as error:
        raise BadRequest(f"{where}.{error.message}", where) from None


class CalledFunction(msgspec.Struct):
    """A function that a model called. arguments: JSON."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct):
    """A call of a tool, in an answer or sent back. Other fields are ignored."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call. parameters: a JSON Schema; only a forced call is sure to fit it."""

    name: Annotated[str, msgspec.Meta(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of `tools`."""

    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function to call."""

    name: str


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` of one function."""

    type: Literal["function"]
    function: ChosenFunction


@dataclass(frozen=True, slots=True)
class AskedTools:
    """The tools of a request. forced: the answer must be a call. several: it may be more than one."""

    tools: tuple[Tool, ...] = ()
    forced: bool = False
    several: bool = True

    def constraint(self, form: ToolForm | None) -> Constraint | None:
        """The form of a forced call; None if the answer may be text. Raises BadRequest if the model calls no tools."""
        if form is None:
            why = "this model's chat template has no tools, or writes calls in an unknown form"
            raise BadRequest(f"tools: {why}; use a model such as Qwen3 or Llama 3", "tools")
        if not self.forced:
            return None
        try:
            return forced(form, self.tools, self.several)
        except ConfigError as error:
            raise BadRequest(f"tools: all parameters together: {error.message}", "tools") from None
        except RecursionError:
            raise too_deep() from None

    def parser(self, form: ToolForm) -> ToolParser:
        """A parser for one choice."""
        return ToolParser(form, self.tools)


NO_TOOLS = AskedTools()


def asked_tools(
    sent: Sequence[ToolFunction], choice: str | ChosenFunction | None, parallel: bool | None
) -> tuple[AskedTools, list[dict[str, Any]]]:
    """The tools, and the same for a chat template. Raises BadRequest."""
    if len(sent) > MOST_TOOLS:
        raise BadRequest(f"tools: holds {len(sent)}, at most {MOST_TOOLS} are taken", "tools")
    tools = [Tool(function.name, function.parameters or {"type": "object"}) for function in sent]
    if choice == "none":
        return NO_TOOLS, []
    named = choice.name if isinstance(choice, ChosenFunction) else None
    if (choice == "required" or named is not None) and not tools:
        raise BadRequest("tool_choice: demands a call, but there are no tools", "tool_choice")
    if named is not None and named not in {tool.name for tool in tools}:
        raise BadRequest(f"tool_choice: {named[:80]!r} is none of the tools", "tool_choice")
    may = tuple(tool for tool in tools if named in (None, tool.name))
    several = parallel is not False and named is None
    shown = [{"type": "function", "function": _shown(function)} for function in sent]
    return AskedTools(may, choice == "required" or named is not None, several), shown


def _shown(function: ToolFunction) -> dict[str, Any]:
    """The function for a chat template, without absent fields: a template would write them into the prompt."""
    fields = {name: getattr(function, name) for name in ("name", "description", "parameters")}
    return {name: value for name, value in fields.items() if value is not None}


class MessagePart(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_obfuscation pads events: it has no effect here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SampledFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of every dialect: those that all APIs have, those that other servers of open models add, and our own.
    null counts as absent."""

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Whole | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Whole | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Literal["urgent", "default", "background"] | None = None
    deadline_ms: Annotated[float, msgspec.Meta(gt=0, le=600_000)] | None = None
    max_gap_ms: float | None = None


class CommonFields(SampledFields, kw_only=True):
    """Fields of completions and chats."""

    user: str | None = None
    n: Whole | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: Whole | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None


class CompletionFields(CommonFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: msgspec.Raw  # token ids are decoded piece by piece
    logprobs: Whole | None = None
    echo: bool | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message. reasoning: another name for reasoning_content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[MessagePart] | None = None
    name: str | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None


class ChatFields(CommonFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Any = None
    safety_identifier: str | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    tools: list[msgspec.Raw] | None = None  # `ToolField`, and tools of other servers
    chat_template_kwargs: dict[str, Any] | None = None


PROMPT_CACHE: Final = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
TEXT: Final = FieldTable(CompletionFields, wishes={"suffix": (), "best_of": (1,)})
TOOL: Final = FieldTable(ToolField)
CHAT: Final = FieldTable(
    ChatFields,
    wishes={
        "audio": (), "function_call": ("none", "auto"), "functions": (), "modalities": (["text"],), "moderation": (),
        "messages[].audio": (), "messages[].function_call": (),
    },
    hints={
        "metadata": (), "prediction": (), "reasoning_effort": ("none",), "service_tier": ("auto", "default"),
        "store": (False,), "verbosity": ("medium",), "web_search_options": (),
    },
    granted=PROMPT_CACHE,
)  # fmt: skip
