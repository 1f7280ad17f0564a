"""Fields of OpenAI requests, their errors, and for every dialect the fields without effect (`FieldTable`).

A wish would change the answer: it is refused by name, like a field of no API. A hint would not: it is taken, and named
in a header; budgets, efforts, bookkeeping, tools of other servers are hints. Structs of messages ignore further fields:
history of other servers is taken.

Beyond the APIs, with the names of other servers: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`stop_token_ids`, `include_stop_str_in_output`, `ignore_eos`, `structured_outputs`. Our own: `priority`, `deadline_ms`
(until the first token), `max_gap_ms` (between two tokens). `user` is the client whose fair share a request takes.
Sampling defaults are the model's.
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
    """A field is wrong. param: its name, None for the whole request. told: the error code in the answer."""

    def __init__(self, message: str, param: str | None = None, told: str | None = None) -> None:
        super().__init__(printable(message))
        self.param, self.told = param, told

    def __reduce__(self) -> Any:
        return (BadRequest, (self.message, self.param, self.told))


def too_deep() -> BadRequest:
    """For a body that was decoded, and is too deep for what follows."""
    return BadRequest("its values nest too deeply")


class Told(NamedTuple):
    """An error of the API."""

    status: int
    type: str
    code: str
    message: str
    param: str | None


def told(error: ReflexError) -> Told:
    """An error with the API's status, type and code."""
    status, code, message = error.http_status, error.code, error.message
    param = error.param if isinstance(error, BadRequest) else None
    if isinstance(error, BadRequest):
        code = error.told or code
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
    return Told(status, kind, code, message, param)


def error_body(error: ReflexError) -> bytes:
    """The body of an error."""
    found = told(error)
    return encode({"error": {"message": found.message, "type": found.type, "param": found.param, "code": found.code}})


def error_form(body: Callable[[ReflexError, str], bytes]) -> ErrorForm:
    """The errors of an API, with `X-Should-Retry`. body: of an error and the request's id."""

    def refuse(error: ReflexError, request_id: str, packed: bool) -> HttpResponse:
        retry = (b"x-should-retry", b"true" if error.retry_safe else b"false")
        return HttpResponse(told(error).status, body(error, request_id), JSON, [retry])

    return refuse


# -- the fields --------------------------------------------------------------------------------------------------------


MOST_TEXTS: Final = 1000  # of a choice
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

    The latter by path (`messages[].audio`), with values that mean nothing, as None and empty values do. wishes: are
    refused. hints: are taken and named. granted: every request gets them, such as a cache of prompts.
    """

    def __init__(
        self, followed: type[F], wishes: Values = _NONE, hints: Values = _NONE, granted: Sequence[str] = ()
    ) -> None:
        self.wishes, self.hints = wishes, hints
        known = dict.fromkeys(path for path in (*wishes, *hints, *granted) if path.isidentifier())
        more = [(name, Any, None) for name in known if name not in followed.__struct_fields__]
        kind: Any = msgspec.defstruct(
            followed.__name__, more, bases=(followed,), kw_only=True, forbid_unknown_fields=True
        )
        self.kind: type[F] = kind
        self.decoder = msgspec.json.Decoder(self.kind)


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A schema for the answer. It always holds: name, description and strict have no effect."""

    name: str
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an answer in the OpenAI API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an answer in vLLM's API: one of these."""

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def constraint_of(
    where: str, kind: str | None, schema: msgspec.Raw, other: StructuredOutputs | None, place: str
) -> tuple[str, Constraint | None]:
    """The field that has the form of the answer, and the constraint. where, kind, schema: as the API has it; place: of
    the schema; other: as vLLM has it. Raises BadRequest."""
    if other is not None:
        if kind not in (None, "text"):
            raise BadRequest(f"structured_outputs: {where} says a form, too; send one", "structured_outputs")
        return "structured_outputs", _structured(other)
    if kind in (None, "text"):
        return where, None
    if kind == "json_object":
        return where, Constraint("json", _ANY_OBJECT)
    text = bytes(schema).decode()
    if not text or text == "null":
        raise BadRequest(f"{place}.schema: is missing", f"{place}.schema")
    return where, _form(where, "json", text)


def _structured(said: StructuredOutputs) -> Constraint:
    schema, where = bytes(said.json), "structured_outputs"
    given = {
        "json": schema.decode() if schema and schema != b"null" else None,
        "json_object": _ANY_OBJECT if said.json_object else None,
        "regex": said.regex,
        "choice": None if said.choice is None else encode(said.choice).decode(),
        "grammar": said.grammar,
    }
    found = [(name, text) for name, text in given.items() if text is not None]
    if len(found) != 1:
        raise BadRequest(f"{where}: must say one of {', '.join(given)}, says {len(found)}", where)
    name, text = found[0]
    if name == "choice" and not (said.choice and len(said.choice) <= MOST_TEXTS and all(said.choice)):
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
    """A function that the model may call. parameters: a JSON Schema, which a forced call fits."""

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
    """tools: that may be called. forced: the answer has to be a call. several: or more than one."""

    tools: tuple[Tool, ...] = ()
    forced: bool = False
    several: bool = True

    def constraint(self, form: ToolForm | None) -> Constraint | None:
        """The form of a forced call. Raises BadRequest if the model has no tools."""
        if form is None:
            why = "this model's chat template knows none, or writes calls in no known form"
            raise BadRequest(f"tools: {why}; models such as Qwen3 and Llama 3 have one that does", "tools")
        if not self.forced:
            return None
        try:
            return forced(form, self.tools, self.several)
        except ConfigError as error:
            raise BadRequest(f"tools: all parameters together: {error.message}", "tools") from None
        except RecursionError:
            raise too_deep() from None

    def parser(self, form: ToolForm) -> ToolParser:
        """The parser of one choice."""
        return ToolParser(form, self.tools)


NO_TOOLS = AskedTools()


def asked_tools(
    sent: Sequence[ToolFunction], choice: str | ChosenFunction | None, parallel: bool | None
) -> tuple[AskedTools, list[dict[str, Any]]]:
    """The tools, and their form for a chat template. Raises BadRequest."""
    if len(sent) > MOST_TOOLS:
        raise BadRequest(f"tools: holds {len(sent)}, at most {MOST_TOOLS} are taken", "tools")
    tools = [Tool(function.name, function.parameters or {"type": "object"}) for function in sent]
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


def _shown(function: ToolFunction) -> dict[str, Any]:
    """Without absent fields: templates write all of them into the prompt."""
    said = {name: getattr(function, name) for name in ("name", "description", "parameters")}
    return {name: value for name, value in said.items() if value is not None}


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
    """Fields of every dialect: what all APIs have, what other servers of open models add, and our own. null counts as
    absent."""

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
    """One message. reasoning: another name of reasoning_content."""

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
