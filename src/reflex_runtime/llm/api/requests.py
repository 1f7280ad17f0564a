"""From the fields of a body to a `GenerationRequest`, for all dialects, and the common part of conversations.

Errors name a field as the caller wrote it (`where`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import msgspec

from reflex_runtime.core.errors import ConfigError, TooLarge
from reflex_runtime.ipc.messages import Constraint, GenerateParams, SamplingParams
from reflex_runtime.llm.api import fields as wire
from reflex_runtime.llm.api.decode import MOST_MESSAGES, MOST_VALUES, decode, prompts_of, tools_of
from reflex_runtime.llm.api.fields import BadRequest
from reflex_runtime.llm.engine.load import AUTHORS_SAY
from reflex_runtime.llm.engine.tokenizer import Conversation, Texts
from reflex_runtime.web.errors import InvalidRequest
from reflex_runtime.web.fields import check_id

_OWN_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt"})  # of templates; callers set others
EFFORTS: Final = frozenset({"reasoning_effort", "reasoning.effort", "output_config.effort"})
"""Hints that have an effect if the chat template uses `reasoning_effort`."""
_OF_PARAMS = re.compile(r"(\w+)=")
_OF_MESSAGE = re.compile(r"(\w+(?:\[\d+\])?(?:\.\w+)?)[:=]")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request: its prompts, the parameters of each choice, and how the answer is written.

    prompts: texts or token ids; empty if there is a conversation. params: of the first choice. max_tokens: None fills
    the context (params.max_tokens is then the least); cut: a max_tokens beyond the context is lowered, not refused.
    n: choices for each prompt. usage_always: each event of a stream has the usage so far. echo: each answer begins with
    its prompt. form_field, prompt_field: the caller's names for the fields of the
    form and the prompt. said: fields that the answer repeats. ignored: hints without effect.
    """

    model: str
    prompts: Sequence[str | list[int]]
    conversation: Conversation | None
    params: GenerateParams
    max_tokens: int | None
    stream: bool
    priority: str | None
    n: int = 1
    include_usage: bool = False
    usage_always: bool = False
    echo: bool = False
    form_field: str = "response_format"
    tools: wire.AskedTools = wire.NO_TOOLS
    prompt_field: str = "messages"
    said: dict[str, Any] = field(default_factory=dict)
    cut: bool = False
    ignored: Sequence[str] = ()

    def tier(self, by_kind: bool) -> str:
        """Its priority. by_kind: without one, several prompts are background, and other streams urgent."""
        if self.priority is not None or not by_kind:
            return self.priority or "default"
        if len(self.prompts) > 1:
            return "background"
        return "urgent" if self.stream else "default"

    def place(self, number: int) -> str:
        """The caller's name for the field of a prompt, by its number from 0."""
        return f"{self.prompt_field}[{number}]" if len(self.prompts) > 1 else self.prompt_field


PLAIN: Final = SamplingParams()  # for a model without `generation_config.json`


def completion(body: bytes, defaults: SamplingParams = PLAIN) -> GenerationRequest:
    """POST /v1/completions. defaults: of the model. Raises BadRequest."""
    fields, hints = decode(wire.TEXT, body)
    most, echo = 16 if fields.max_tokens is None else fields.max_tokens, bool(fields.echo)
    alone = most == 0 and echo
    return _openai(
        fields, defaults, 1 if alone else most, client_of({"user": fields.user}),
        prompts=prompts_of(fields.prompt), conversation=None, prompt_field="prompt", echo=echo,
        ignored=hints,
        more={"logprobs": fields.logprobs, "prompt_logprobs": fields.logprobs if echo else None, "prompt_only": alone},
    )  # fmt: skip


def chat(body: bytes, defaults: SamplingParams = PLAIN) -> GenerationRequest:
    """POST /v1/chat/completions. defaults: of the model. Raises BadRequest."""
    fields, hints = decode(wire.CHAT, body)
    conversation, tools, more = chat_conversation(
        fields.messages, fields.tools, fields.chat_template_kwargs, fields.reasoning_effort,
        fields.tool_choice, fields.parallel_tool_calls,
    )  # fmt: skip
    both = fields.max_completion_tokens, fields.max_tokens
    if None not in both and both[0] != both[1]:
        differ = f"max_tokens={both[1]}: differs from max_completion_tokens={both[0]}; send one of them"
        raise BadRequest(differ, "max_tokens")
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    if fields.top_logprobs and not fields.logprobs:
        raise BadRequest("top_logprobs: needs logprobs to be true", "top_logprobs")
    client = client_of({"user": fields.user, "safety_identifier": fields.safety_identifier})
    return _openai(
        fields, defaults, getattr(fields, name), client, names={"max_tokens": name, "logprobs": "top_logprobs"},
        prompts=[], conversation=conversation, tools=tools, ignored=[*hints, *more],
        more={"logprobs": (fields.top_logprobs or 0) if fields.logprobs else None},
    )  # fmt: skip


def _openai(
    fields: wire.CommonFields,
    defaults: SamplingParams,
    max_tokens: int | None,
    client: str,
    *,
    names: Mapping[str, str] | None = None,
    more: dict[str, Any],
    **request: Any,
) -> GenerationRequest:
    """A request of completions or chats. more: further parameters. request: further fields of `GenerationRequest`."""
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= wire.MOST_CHOICES:
        raise BadRequest(f"n={n}: must be in [1, {wire.MOST_CHOICES}]", "n")
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise BadRequest("stream_options: needs stream to be true", "stream_options")
    form, where = fields.response_format, "response_format"
    schema = msgspec.Raw() if form is None or form.json_schema is None else form.json_schema.schema
    form_field, constraint = wire.constraint_of(
        where, None if form is None else form.type, schema, fields.structured_outputs, f"{where}.json_schema"
    )
    params = params_of(
        fields, defaults, max_tokens, client, constraint, names or {},
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        include_stop=bool(fields.include_stop_str_in_output),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=tuple(_bias(fields.logit_bias)),
        **more,
    )  # fmt: skip
    return request_of(
        fields, params, max_tokens, n=n, form_field=form_field,
        include_usage=options is not None and bool(options.include_usage),
        usage_always=options is not None and bool(options.continuous_usage_stats),
        **request,
    )  # fmt: skip


def request_of(
    fields: wire.SampledFields, params: GenerateParams, max_tokens: int | None, **more: Any
) -> GenerationRequest:
    """A request of any dialect. more: further fields. Raises BadRequest if it has both a form and a forced call."""
    request = GenerationRequest(
        model=fields.model, params=params, max_tokens=max_tokens, stream=bool(fields.stream),
        priority=fields.priority, **more,
    )  # fmt: skip
    if request.tools.forced and params.constraint is not None:
        raise BadRequest(f"tool_choice: demands a call, {request.form_field} another form; send one", "tool_choice")
    return request


def params_of(
    fields: wire.SampledFields,
    defaults: SamplingParams,
    max_tokens: int | None,
    client: str,
    constraint: Constraint | None,
    names: Mapping[str, str],
    **more: Any,
) -> GenerateParams:
    """The parameters of a request. names: the dialect's names of fields where they differ from those of parameters.
    more: parameters that only some dialects have. Raises BadRequest."""
    sampled: dict[str, Any] = {name: getattr(fields, name) for name in AUTHORS_SAY}
    if sampled["top_k"] == -1:  # on other servers: no limit
        sampled["top_k"] = 0
    least = fields.min_tokens or 0
    try:
        return GenerateParams(
            max_tokens=max(1, least) if max_tokens is None else max_tokens,
            min_tokens=least,
            seed=None if fields.seed == -1 else fields.seed,  # -1 on other servers: a random seed
            stop_token_ids=tuple(fields.stop_token_ids or ()),
            ignore_eos=bool(fields.ignore_eos),
            constraint=constraint,
            client=client,
            timeout_ms=fields.deadline_ms,
            max_gap_ms=fields.max_gap_ms,
            **{name: getattr(defaults, name) if value is None else value for name, value in sampled.items()},
            **more,
        )
    except ConfigError as error:
        found = _OF_PARAMS.match(error.message)
        if found is None:
            raise BadRequest(error.message) from None
        name = names.get(found[1], found[1])
        raise BadRequest(f"{name}={error.message.partition('=')[2]}", name) from None


def _bias(sent: dict[str, float] | None) -> Iterator[tuple[int, float]]:
    for key, by in (sent or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 11 and key == str(int(key))):  # no 07: an id comes once
            raise BadRequest(f"logit_bias: the key {key[:50]!r} is no token id", "logit_bias")
        yield int(key), by


def chat_conversation(
    messages: Sequence[wire.Message],
    tools: Sequence[msgspec.Raw] | None,
    variables: dict[str, Any] | None,
    effort: Any = None,
    choice: str | wire.ChosenTool | None = None,
    parallel: bool | None = None,
) -> tuple[Conversation, wire.AskedTools, list[str]]:
    """The conversation of a chat, its tools, and the places of hints among the tools. Raises BadRequest."""
    check_length("messages", len(messages))
    calls = (call for message in messages for call in message.tool_calls or ())
    check_arguments("messages", "arguments of their tool_calls", (call.function.arguments for call in calls))
    found = [_message(i, message) for i, message in enumerate(messages)]
    chosen = choice.function if isinstance(choice, wire.ChosenTool) else choice
    asked, shown, hints = tools_of(tools, wire.TOOL, chosen, parallel)
    return Conversation(found, shown, effort_of(effort) | template_variables(variables)), asked, hints


def _message(place: int, message: wire.Message) -> dict[str, Any]:
    """A message for a chat template, in which the arguments of calls are objects."""
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


def refused(error: ConfigError | TooLarge | RecursionError, field: str) -> BadRequest:
    """The error for a prompt or conversation, of this field, that the tokenizer, the template or the engine refuses."""
    if isinstance(error, RecursionError):  # msgspec decodes a few levels more than templates can write
        return wire.too_deep()
    if isinstance(error, TooLarge):
        message = f"{field}: {error.message}" if "[" in field else error.message
        return BadRequest(message, field, "context_length_exceeded")
    message = error.message.removeprefix("messages: ").removeprefix(f"{field.partition('[')[0]}: ")
    where, _, rest = message.partition(": ")
    if "/" in where or "\\" in where:  # callers do not get paths of this machine
        message = rest
    found = _OF_MESSAGE.match(message)
    if found is None or not (found[1].startswith(field) or found[1] in ("stop_token_ids", "logit_bias")):
        return BadRequest(f"{field}: {message}", field)
    return BadRequest(message, found[1])


async def tokens_of(texts: Texts, what: Conversation | Sequence[str], field: str) -> list[list[int]]:
    """The tokens of a conversation, or of each text. field: the caller's name for it. Raises BadRequest."""
    place = field
    try:
        if isinstance(what, Conversation):
            return [await texts.encode_chat(what)]
        if len(what) > 1:
            with suppress(ConfigError, TooLarge):  # then one by one, to name the wrong one
                return await texts.encode(what)
        found = []
        for i, text in enumerate(what):
            place = f"{field}[{i}]" if len(what) > 1 else field
            found += await texts.encode([text])
        return found
    except (ConfigError, TooLarge, RecursionError) as error:
        raise refused(error, place) from None


def client_of(named: Mapping[str, str | None]) -> str:
    """The client of a request: that of the first of these fields that names one, else "". Raises BadRequest if any of
    them is no id."""
    for name, client in named.items():
        try:
            if client:
                check_id(name, client)
        except InvalidRequest as error:
            raise BadRequest(str(error), name) from None
    return next(filter(None, named.values()), "")


def check_length(where: str, messages: int, parts: int = 0) -> None:
    """Raise BadRequest if there is no message, or if messages and parts are too many."""
    if not (messages and messages + parts <= MOST_MESSAGES):
        held = f"{messages} and {parts} parts" if parts else f"{messages}"
        raise BadRequest(f"{where}: holds {held}, must hold 1 to {MOST_MESSAGES}", where)


def check_arguments(where: str, what: str, texts: Iterable[str]) -> None:
    """Raise BadRequest for too many values in the arguments of calls, which are JSON inside of texts. what: the API's
    name for them."""
    if sum(text.count(",") for text in texts) > MOST_VALUES:
        raise BadRequest(f"{where}: the {what} hold more than {MOST_VALUES} values", where)


def content_of(where: str, content: str | Sequence[wire.MessagePart], *kinds: str, answered: bool = False) -> Any:
    """A content for a chat template: a text, or several. kinds: types of parts that are accepted. answered: the message
    is an assistant's, in which other parts are left out; else they raise BadRequest."""
    return content if isinstance(content, str) else parts_of(texts_of(where, content, *kinds, answered=answered))


def parts_of(texts: Sequence[str]) -> Any:
    """These texts as a content for a chat template."""
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def text_of(where: str, content: str | Sequence[wire.MessagePart], *kinds: str) -> str:
    """A content as one text."""
    return content if isinstance(content, str) else "\n".join(texts_of(where, content, *kinds))


def output_of(where: str, output: Any, *kinds: str) -> str:
    """The text of a tool's output; references to further tools are left out. Raises BadRequest."""
    try:
        content = msgspec.convert(output, str | list[wire.MessagePart])
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
            why = f"has type {part.type[:50]!r}; only type {kinds[0]}, with its text, is taken"
            raise BadRequest(f"{where}[{i}]: {why}", f"{where}[{i}]")
    return found


def role_of(sent: str) -> str:
    """A role for a chat template: templates know `developer` by its older name."""
    return "system" if sent == "developer" else sent


def _no_json(constant: str) -> NoReturn:
    raise ValueError(constant)


def sent_call(where: str, id: str, name: str, text: str) -> dict[str, Any]:
    """A call of an assistant for a chat template. where: the field of its arguments; text: the arguments as JSON."""
    try:
        arguments = json.loads(text or "{}", parse_constant=_no_json)
        if "\\u" in text:
            json.dumps(arguments, ensure_ascii=False).encode()  # half of a surrogate pair cannot be tokenised
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}: must be a JSON object", where)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def effort_of(sent: Any) -> dict[str, Any]:
    """Variables of a chat template for an effort; "none" turns thinking off."""
    found = {"reasoning_effort": sent} if isinstance(sent, str) and sent else {}
    return found | ({"enable_thinking": False} if sent == "none" else {})


def template_variables(sent: dict[str, Any] | None) -> dict[str, Any]:
    """The variables in `chat_template_kwargs`. Raises BadRequest for a name that cannot be set."""
    for name in sent or {}:
        if name in _OWN_VARIABLES or not name.isidentifier() or name.startswith("_"):
            raise BadRequest(f"chat_template_kwargs: {name[:50]!r} cannot be set", "chat_template_kwargs")
    return sent or {}
