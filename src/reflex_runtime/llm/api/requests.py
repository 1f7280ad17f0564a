"""From the body of a request to what is asked, validated. What its fields are that nothing here follows: `FieldTable`.

At the end is what APIs that take conversations read alike. Errors name a field as its caller wrote it: `where`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

import msgspec
from msgspec.structs import replace as changed

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.messages import MOST_LOGPROBS, GenerateParams, SamplingParams
from reflex_runtime.llm.api import fields as wire
from reflex_runtime.llm.api.decode import MOST_MESSAGES, MOST_VALUES, decode, functions_of, prompts_of
from reflex_runtime.llm.api.fields import BadRequest
from reflex_runtime.llm.engine.load import AUTHORS_SAY
from reflex_runtime.llm.engine.tokenizer import Conversation
from reflex_runtime.web.fields import check_id

_OWN_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt"})  # of templates: not to be overwritten
EFFORTS: Final = frozenset({"reasoning_effort", "reasoning.effort", "output_config.effort"})
"""Places of hints that a template follows which names `reasoning_effort`."""
_OF_PARAMS = re.compile(r"(?:SamplingParams\.)?(\w+)=")
_OF_MESSAGE = re.compile(r"(\w+(?:\[\d+\])?(?:\.\w+)?)[:=]")


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request that was understood.

    prompts: texts or token ids; conversation: instead of them. params: of the first choice; its max_tokens is as
    small as may be where the caller named none (max_tokens is None then): as many as there is room for. usage_always:
    all events of a stream tell the usage so far. echo: each answer begins with its prompt; prompt_only: and ends with
    it. form_field: the name under which the form of the answer was sent;
    prompt_field: the prompt, where that is not the usual one. said: what the answer repeats of the request. cut: a
    max_tokens for which there is no room asks for as many as there is. ignored: places of its hints that nothing
    follows.
    """

    model: str
    prompts: Sequence[str | list[int]]
    conversation: Conversation | None
    params: GenerateParams
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    usage_always: bool
    priority: str | None
    echo: bool = False
    prompt_only: bool = False
    form_field: str = "response_format"
    tools: wire.AskedTools = wire.NO_TOOLS
    prompt_field: str = ""
    said: dict[str, Any] = field(default_factory=dict)
    cut: bool = False
    ignored: Sequence[str] = ()

    def tier(self, by_kind: bool) -> str:
        """Its priority; of one that names none by its kind, or the default one."""
        if self.priority is not None or not by_kind:
            return self.priority or "default"
        if len(self.prompts) > 1:
            return "background"
        return "urgent" if self.stream else "default"

    @property
    def field(self) -> str:
        """The name under which the prompt was sent."""
        return self.prompt_field or ("prompt" if self.conversation is None else "messages")

    def place(self, number: int) -> str:
        """The same, of the prompt of that number."""
        return f"{self.field}[{number}]" if len(self.prompts) > 1 else self.field


PLAIN: Final = SamplingParams()  # of a model whose authors say nothing of how it is sampled


def completion(body: bytes, defaults: SamplingParams = PLAIN) -> CompletionRequest:
    """POST /v1/completions, or the BadRequest that names what is wrong. defaults: how the model's authors sample it."""
    fields, hints = decode(wire.TEXT, body)
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise BadRequest(f"best_of={fields.best_of}: must equal n={fields.n or 1}, or be left out", "best_of")
    most = 16 if fields.max_tokens is None else fields.max_tokens
    nothing = most == 0 and bool(fields.echo)  # the prompt alone: one token is made, and not told
    most = 1 if nothing else most
    asked = _asked(fields, prompts_of(fields.prompt), None, most, "max_tokens", fields.logprobs, defaults)
    asked = replace(asked, ignored=hints)
    if not fields.echo:
        return asked
    params = changed(asked.params, prompt_logprobs=fields.logprobs)
    return replace(asked, echo=True, prompt_only=nothing, params=params)


def chat(body: bytes, defaults: SamplingParams = PLAIN) -> CompletionRequest:
    """POST /v1/chat/completions, or the BadRequest that names what is wrong. defaults: the model's."""
    fields, hints = decode(wire.CHAT, body)
    asked = chat_request(fields, defaults)
    return replace(asked, ignored=[*hints, *asked.ignored])


def chat_request(fields: wire.ChatFields, defaults: SamplingParams = PLAIN) -> CompletionRequest:
    """What these fields ask for, or the BadRequest that names what is wrong. defaults: the model's."""
    check_length("messages", len(fields.messages))
    calls = (call for message in fields.messages for call in message.tool_calls or ())
    check_arguments("messages", "arguments of their tool_calls", (call.function.arguments for call in calls))
    messages = [_message(i, message) for i, message in enumerate(fields.messages)]
    both = fields.max_completion_tokens, fields.max_tokens
    if None not in both and both[0] != both[1]:
        differ = f"max_tokens={both[1]}: differs from max_completion_tokens={both[0]}; send one of them"
        raise BadRequest(differ, "max_tokens")
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    if fields.top_logprobs is not None and not fields.logprobs:
        raise BadRequest("top_logprobs: needs logprobs to be true", "top_logprobs")
    if fields.top_logprobs is not None and not 0 <= fields.top_logprobs <= MOST_LOGPROBS:
        raise BadRequest(f"top_logprobs={fields.top_logprobs}: must be in [0, {MOST_LOGPROBS}]", "top_logprobs")
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    choice = fields.tool_choice.function if isinstance(fields.tool_choice, wire.ChosenTool) else fields.tool_choice
    found, hints = functions_of(fields.tools, wire.TOOL)
    functions = {f"{where}.function": tool.function for where, tool in found.items()}
    tools, shown = wire.tools_of(functions, choice, fields.parallel_tool_calls)
    variables = effort_of(fields.reasoning_effort) | template_variables(fields.chat_template_kwargs)
    conversation = Conversation(messages, shown, variables)
    asked = conversing(fields, conversation, getattr(fields, name), name, defaults, tools, logprobs)
    return replace(asked, ignored=hints)


def conversing(
    fields: wire.CommonFields,
    conversation: Conversation,
    max_tokens: int | None,
    limit_name: str,
    defaults: SamplingParams,
    tools: wire.AskedTools,
    logprobs: int | None = None,
) -> CompletionRequest:
    """A request of any API that takes conversations. limit_name: of the field that says max_tokens."""
    asked = _asked(fields, [], conversation, max_tokens, limit_name, logprobs, defaults)
    if tools.forced and asked.params.constraint is not None:
        raise BadRequest(f"tool_choice: demands a call, and {asked.form_field} another form; send one", "tool_choice")
    return replace(asked, tools=tools) if tools.tools else asked


def _asked(
    fields: wire.CommonFields,
    prompts: Sequence[str | list[int]],
    conversation: Conversation | None,
    max_tokens: int | None,
    limit_name: str,
    logprobs: int | None,
    defaults: SamplingParams,
) -> CompletionRequest:
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= wire.MOST_CHOICES:
        raise BadRequest(f"n={n}: must be in [1, {wire.MOST_CHOICES}]", "n")
    if fields.stream_options is not None and not fields.stream:
        raise BadRequest("stream_options: needs stream to be true", "stream_options")
    return CompletionRequest(
        model=fields.model,
        prompts=prompts,
        conversation=conversation,
        params=_params(fields, max_tokens, limit_name, logprobs, defaults),
        max_tokens=max_tokens,
        n=n,
        stream=bool(fields.stream),
        include_usage=fields.stream_options is not None and bool(fields.stream_options.include_usage),
        usage_always=fields.stream_options is not None and bool(fields.stream_options.continuous_usage_stats),
        priority=fields.priority,
        form_field="response_format" if fields.structured_outputs is None else "structured_outputs",
    )


def _params(
    fields: wire.CommonFields, max_tokens: int | None, limit_name: str, logprobs: int | None, defaults: SamplingParams
) -> GenerateParams:
    said: dict[str, Any] = {name: getattr(fields, name) for name in AUTHORS_SAY}
    if said["top_k"] == -1:  # of all tokens, as other servers write it
        said["top_k"] = 0
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    least = fields.min_tokens or 0
    clients = [client_named(name, getattr(fields, name, None)) for name in ("user", "safety_identifier")]
    try:
        return GenerateParams(
            max_tokens=max(1, least) if max_tokens is None else max_tokens,
            seed=None if fields.seed == -1 else fields.seed,  # -1: any, as other servers write it
            stop=stop,
            stop_token_ids=tuple(fields.stop_token_ids or ()),
            include_stop=bool(fields.include_stop_str_in_output),
            min_tokens=least,
            ignore_eos=bool(fields.ignore_eos),
            logprobs=logprobs,
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            logit_bias=tuple(_bias(fields.logit_bias)),
            constraint=wire.constraint_of(fields.response_format, fields.structured_outputs),
            client=next(filter(None, clients), ""),
            timeout_ms=time_limit_of(fields.deadline_ms),
            max_gap_ms=fields.max_gap_ms,
            **{name: getattr(defaults, name) if value is None else value for name, value in said.items()},
        )
    except ConfigError as error:
        found = _OF_PARAMS.match(error.message)
        name = found[1] if found else None
        param = limit_name if name == "max_tokens" else name
        message = error.message if param is None else f"{param}={error.message.partition('=')[2]}"
        raise BadRequest(message, param) from None


def _bias(said: dict[str, float] | None) -> Iterator[tuple[int, float]]:
    for key, by in (said or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 11 and key == str(int(key))):  # each id once
            raise BadRequest(f"logit_bias: the key {key[:50]!r} is no token id", "logit_bias")
        yield int(key), by


def _message(place: int, message: wire.Message) -> dict[str, Any]:
    """As templates know it: what clients send, with the arguments of calls as objects."""
    where, history = f"messages[{place}]", message.role in ("assistant", "tool")
    if message.content is None and not history:
        raise BadRequest(f"{where}.content: is missing", f"{where}.content")
    content = content_of(f"{where}.content", message.content or "", "text", answered=message.role == "assistant")
    found: dict[str, Any] = {"role": role_of(message.role), "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    if isinstance(message.reasoning, str):
        found.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls:
        found["tool_calls"] = calls = []
        for i, call in enumerate(message.tool_calls):
            name, arguments = call.function.name, call.function.arguments
            calls.append(sent_call(f"{where}.tool_calls[{i}].function.arguments", call.id, name, arguments))
    return found


def refused(error: ConfigError, field: str) -> BadRequest:
    """A prompt or a conversation that the tokenizer, its template or the processor does not take."""
    message = error.message.removeprefix(f"{field.partition('[')[0]}: ")
    where, _, rest = message.partition(": ")
    if "/" in where or "\\" in where:  # callers need not know where the model is on this machine
        message = rest
    found = _OF_MESSAGE.match(message)
    if found is None or not (found[1].startswith(field) or found[1] in ("stop_token_ids", "logit_bias")):
        return BadRequest(f"{field}: {message}", field)
    return BadRequest(message, found[1])


def time_limit_of(deadline_ms: float | None) -> float | None:
    """The time limit, or the BadRequest that says what it may be."""
    if deadline_ms is not None and not 0.0 < deadline_ms <= 600_000.0:
        raise BadRequest(f"deadline_ms={deadline_ms:g}: must be in (0, 600000]", "deadline_ms")
    return deadline_ms


def client_named(field: str, name: str | None) -> str | None:
    """The client that a request names in this field."""
    if name is None:
        return None
    try:
        check_id(field, name)
    except Exception as error:
        raise BadRequest(str(error), field) from None
    return name


def check_length(where: str, messages: int, parts: int = 0) -> None:
    """Refuse a conversation of none or too many messages, and parts of them."""
    if not (messages and messages + parts <= MOST_MESSAGES):
        held = f"{messages} and {parts} parts" if parts else f"{messages}"
        raise BadRequest(f"{where}: holds {held}, must hold 1 to {MOST_MESSAGES}", where)


def check_arguments(where: str, what: str, texts: Iterable[str]) -> None:
    """Refuse more values in the arguments of calls than may be decoded at once: they are JSON inside of texts.

    what: as its callers know them.
    """
    if sum(text.count(",") for text in texts) > MOST_VALUES:
        raise BadRequest(f"{where}: the {what} hold more than {MOST_VALUES} values", where)


def content_of(where: str, content: str | Sequence[wire.MessagePart], *kinds: str, answered: bool = False) -> Any:
    """A content as templates know it: a text, or parts of several. kinds: the types that its parts may have. answered:
    it is an answer's, of which other parts are left out."""
    return content if isinstance(content, str) else parts_of(texts_of(where, content, *kinds, answered=answered))


def parts_of(texts: Sequence[str]) -> Any:
    """A content of these texts, as templates know it."""
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def text_of(where: str, content: str | Sequence[wire.MessagePart], *kinds: str) -> str:
    """The same as one text."""
    return content if isinstance(content, str) else "\n".join(texts_of(where, content, *kinds))


def output_of(where: str, said: Any, *kinds: str) -> str:
    """The text of what a tool returned; names of tools that it makes known are no text."""
    try:
        content = msgspec.convert(said, str | list[wire.MessagePart])
    except msgspec.ValidationError:
        raise BadRequest(f"{where}: must be a text, or a list of texts", where) from None
    if isinstance(content, list):
        content = [part for part in content if part.type != "tool_reference"]
    return text_of(where, content, *kinds)


def texts_of(where: str, parts: Sequence[wire.MessagePart], *kinds: str, answered: bool = False) -> list[str]:
    """The texts of parts; see `content_of`."""
    found = []
    for i, part in enumerate(parts):
        if part.type in kinds and part.text is not None:
            found.append(part.text)
        elif not answered or part.type in kinds:
            told = f"has type {part.type[:50]!r}; only type {kinds[0]}, with its text, is taken"
            raise BadRequest(f"{where}[{i}]: {told}", f"{where}[{i}]")
    return found


def role_of(said: str) -> str:
    """As templates know it: they have the instructions of the application under the older name."""
    return "system" if said == "developer" else said


def _no_json(constant: str) -> NoReturn:
    raise ValueError(constant)


def sent_call(where: str, id: str, name: str, text: str) -> dict[str, Any]:
    """A call that an assistant made, as templates know it. where: the name of its arguments; text: those as JSON."""
    try:
        arguments = json.loads(text or "{}", parse_constant=_no_json)
        if "\\u" in text:
            json.dumps(arguments, ensure_ascii=False).encode()  # half of a character: nothing can tokenise it
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}: must be a JSON object", where)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def effort_of(said: Any) -> dict[str, Any]:
    """An effort as templates know it."""
    found = {"reasoning_effort": said} if isinstance(said, str) and said else {}
    return found | ({"enable_thinking": False} if said == "none" else {})


def template_variables(said: dict[str, Any] | None) -> dict[str, Any]:
    """What `chat_template_kwargs` say; BadRequest for a name that is not theirs to set."""
    for name in said or {}:
        if name in _OWN_VARIABLES or not name.isidentifier() or name.startswith("_"):
            raise BadRequest(f"chat_template_kwargs: {name[:50]!r} cannot be set", "chat_template_kwargs")
    return said or {}
