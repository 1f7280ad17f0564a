"""/openapi.json of a model server: from the structs that decode and encode the bodies, as strict as what checks them.

Wishes that are not served are listed with the values that mean nothing; a hint may have any value. Where fields
decide about each other, the commoner ones are described: a conversation that ends with the user's turn, tools that
the model may call or not. JSON Schema cannot say that prompt and `max_tokens` share the model's context, that
`min_tokens` is at most `max_tokens`, that a biased token is in the vocabulary, that `max_tokens` of 0 needs `echo`,
that `prompt_logprobs` goes without `stream`, which texts are a schema, an expression or a grammar, that the form of
an answer is said once, that all choices of all prompts are as many as may wait, that `best_of` is `n`, that
`max_tokens` is `max_completion_tokens`, that `stream_options` needs `stream` and `top_logprobs` needs `logprobs`, and
that token ids have no point.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from reflex_runtime.ipc.messages import (
    LONGEST_GAP_MS,
    MOST_BIASED,
    MOST_LOGPROBS,
    MOST_STOP_IDS,
    MOST_STOPS,
    SHORTEST_GAP_MS,
)
from reflex_runtime.llm.api import answers, messages, responses, tokenize
from reflex_runtime.llm.api import fields as wire
from reflex_runtime.llm.api.decode import MOST_MESSAGES
from reflex_runtime.llm.api.fields import MOST_TEXTS, MOST_TOOLS, NAME
from reflex_runtime.llm.engine.generation_options import Limits
from reflex_runtime.web.access import NO_KEYS, Keys
from reflex_runtime.web.fields import ID
from reflex_runtime.web.openapi import (
    NULL,
    PAGES,
    TEXT,
    Operation,
    closed,
    content,
    described,
    maybe,
    ref,
    schemas_of,
    within,
)
from reflex_runtime.web.request import Route

ERRORS: Final = {
    "400": "invalid_request, invalid_json, context_length_exceeded: `param` names what is wrong",
    "401": "invalid_api_key: a key is set and was not sent",
    "403": "forbidden: without a key, a page of another site or a proxy asked",
    "404": "model_not_found, not_found: no such model, no such path",
    "405": "method_not_allowed: the header Allow has the right method",
    "408": "request_timeout: the head or the body did not come in time",
    "413": "too_large: the body exceeds --max-body-bytes",
    "415": "unsupported_encoding: the body is compressed, and not with gzip",
    "429": "queue_full, client_at_capacity: try again after Retry-After",
    "500": "processor_failed, processor_hung: it ran and failed",
    "503": "deadline_unreachable, not_ready, shutting_down: try again after Retry-After",
    "504": "deadline_exceeded: the deadline passed before the first token",
}


class ErrorSaid(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct):
    error: ErrorSaid


class MessageErrorSaid(msgspec.Struct):
    type: str
    message: str


class MessageError(msgspec.Struct):
    type: Literal["error"]
    error: MessageErrorSaid
    request_id: str


class AnswerPart(msgspec.Struct):
    """An item of a response, a block of a message. What else it says depends on its type."""

    type: str


class Spent(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class ResponseBody(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["completed", "incomplete"]
    model: str
    output: list[AnswerPart]
    usage: Spent


class MessageBody(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerPart]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: Spent


class TextAnswer(answers.Body):
    choices: list[answers.TextChoice]


class ChatAnswer(answers.Body):
    choices: list[answers.ChatChoice]


class _Post(NamedTuple):
    """last: of a stream, its last event. tool: a function among its tools."""

    summary: str
    body: wire.FieldTable[Any]
    answer: type[msgspec.Struct]
    last: str = ""
    tool: wire.FieldTable[Any] | None = None


_POSTS: Final = {
    "/v1/completions": _Post("Text goes on", wire.TEXT, TextAnswer, "[DONE]"),
    "/v1/chat/completions": _Post("A conversation goes on", wire.CHAT, ChatAnswer, "[DONE]", wire.TOOL),
    responses.PATH: _Post(
        "A response to a conversation", responses.RESPONSE, ResponseBody, "response.completed", responses.TOOL
    ),
    messages.PATH: _Post(
        "A message that goes on a conversation", messages.MESSAGE, MessageBody, "message_stop", messages.TOOL
    ),
    messages.COUNT: _Post("Tokens of messages", messages.TALK, messages.InputTokens, tool=messages.TOOL),
    "/tokenize": _Post("Token ids of a text or messages", tokenize.TOKENIZE, tokenize.TokenIds, tool=wire.TOOL),
    "/detokenize": _Post("The text of token ids", tokenize.DETOKENIZE, tokenize.Detokenized),
}
_GETS: Final = PAGES | {
    "/v1/models": Operation("the model that is served, and its adapters"),
    "/v1/models/{id}": Operation(
        "the model of this name", codes=("400", "404"), parameters={"id": {"type": "string", "minLength": 1}}
    ),
    "/health": Operation("200 only when ready, else 503", unready=True),
    "/status": Operation("requests that wait and run, and how batches were formed"),
    "/metrics": Operation("Prometheus text", TEXT),
    "/version": Operation("the server's version"),
}
_STRING: Final = {"type": "string"}
_SOME: Final = {"type": "string", "minLength": 1}
_STOP: Final = {"type": "string", "minLength": 1, "maxLength": 1000}
_STREAM: Final = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}


def _list(items: dict[str, Any], most: int, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _part(kind: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": {"const": kind}, "text": _STRING}, "required": ["type", "text"]}


def _said(kind: str, least: int = 0) -> dict[str, Any]:
    return {"anyOf": [_STRING, {"type": "array", "items": _part(kind), "minItems": least}]}


_OPEN: Final = {"additionalProperties": True}  # history
_OTHER: Final = {"type": "object", "properties": {"type": {"type": "string", "not": {"const": "text"}}}}
_PARTS_OF_ANSWERS: Final = {"type": "array", "items": {"anyOf": [_part("text"), _OTHER | {"required": ["type"]}]}}
_EARLIER: Final = [  # a result without content, an answer without or with parts of any type
    {"type": "object", "properties": {"role": {"const": role}, "content": content}, "required": ["role"]}
    for role, content in (("tool", NULL), ("assistant", {"anyOf": [NULL, _PARTS_OF_ANSWERS]}))
]
_ROLES: Final = {"enum": ["system", "developer", "user", "assistant"]}
_FORM: Final = closed({"type": {"enum": ["text", "json_object"]}}, "type")
_ABOUT: Final = {"description": maybe(_STRING), "strict": maybe({"type": "boolean"})}
_SCHEMA: Final = closed({"name": _STRING, "schema": {"type": "object"}} | _ABOUT, "name", "schema")
# Parts of bodies that have forms which go with others only: the commoner ones.
_COMMON: Final[dict[str, dict[str, Any]]] = {
    "ResponseFormat": {
        "anyOf": [
            _FORM,
            closed({"type": {"const": "json_schema"}, "json_schema": _SCHEMA}, "type", "json_schema"),
        ]
    },
    "StructuredOutputs": {
        "anyOf": [
            closed({name: of}, name)
            for name, of in {
                "json": {"type": "object"},
                "json_object": {"const": True},
                "regex": _SOME,
                "choice": _list(_SOME, MOST_TEXTS, 1),
                "grammar": _SOME,
            }.items()
        ]
    },
    "InputItem": closed(
        {"type": {"const": "message"}, "role": _ROLES, "content": _said("input_text")}, "role", "content"
    )
    | _OPEN,
    "FlatTool": closed(
        {"type": {"const": "function"}, "name": {"type": "string", "pattern": NAME}}
        | {"parameters": maybe({"type": "object"})}
        | _ABOUT,
        "type",
        "name",
    ),
    "TextFormat": _FORM,
    "Block": _part("text"),
    "Turn": closed({"role": {"const": "user"}, "content": _said("text", 1)}, "role", "content") | _OPEN,
    "Thinking": closed({"type": {"enum": ["adaptive", "disabled", "enabled"]}}, "type"),
    "Choosing": closed({"type": {"enum": ["auto", "none"]}}, "type"),
    "OutputConfig": closed({"effort": {}}),
}

_CHOICE: Final = {"tool_choice": {"enum": [None, "none", "auto"]}}
_NOTHING: Final[dict[str, Any]] = {"enum": [None, "", [], {}]}
# Of single bodies and structs: what their fields take.
_OWN: Final[dict[object, dict[str, Any]]] = {
    wire.CHAT: _CHOICE,
    responses.RESPONSE: _CHOICE,
    messages.MESSAGE: {"max_tokens": {"type": "integer", "minimum": 1}},
    wire.Message: {"content": _said("text")} | {"audio": _NOTHING, "function_call": _NOTHING},
}
# Parts of bodies whose fields have bounds, and the fields that they need.
_PARTS: Final[dict[type, tuple[str, ...]]] = {
    wire.Message: ("content",),
    messages.Metadata: (),
}
_EMPTY: Final[dict[str, Any]] = {"string": "", "array": [], "object": {}}


def document(
    routes: Iterable[Route],
    names: Sequence[str],
    most: int,
    limits: Limits | None,
    keys: Keys = NO_KEYS,
    named: bool = True,
) -> bytes:
    """The OpenAPI 3.1 document. names: those that may be asked for; most: choices that may wait; limits: None before
    the model is there. keys: of the server. named: whether it may name the model."""
    of_posts = [one.kind for post in _POSTS.values() for one in (post.body, post.tool) if one is not None]
    schemas = schemas_of(*of_posts, *(post.answer for post in _POSTS.values()), Error, MessageError)
    bounds = _bounds(names if named else (), most, limits)
    for kind, needed in _PARTS.items():
        _narrow(schemas[kind.__name__], bounds | _OWN.get(kind, {}), {}, needed)
    schemas[wire.Message.__name__] = {"anyOf": [schemas[wire.Message.__name__], *_EARLIER]}
    operations = dict(_GETS)
    for path, post in _POSTS.items():
        body = schemas.pop(post.body.kind.__name__)
        own = dict(_OWN.get(post.body, {}))
        if post.tool is not None:
            others = {"type": "string", "not": {"const": "custom" if post.tool is messages.TOOL else "function"}}
            items = [ref(post.tool.kind), {"type": "object", "properties": {"type": others}, "required": ["type"]}]
            own["tools"] = {"type": "array", "items": {"anyOf": items}, "maxItems": MOST_TOOLS}
        if post.body is wire.TEXT:  # 0: only the prompt, with echo
            own = {"max_tokens": within(0, bounds["max_tokens"]["maximum"])}
        _narrow(body, bounds | own, post.body.wishes)
        if path == "/tokenize":
            body = _either(body)
        codes, told, answer = ["400", "404", "413", "415", "500", "503"], "", content(ref(post.answer))
        if post.last:
            told = f"With stream, the parts of the answer as server-sent events, the last one {post.last}."
            codes, answer = [*codes, "429", "504"], answer | content(_STREAM, "text/event-stream")
        error = "MessageError" if path.startswith(messages.PATH) else "Error"
        operations[path] = Operation(post.summary, answer, codes, request=content(body), description=told, error=error)
    schemas |= {name: _COMMON[name] for name in schemas.keys() & _COMMON.keys()}
    example = {"model": names[0] if named else "MODEL", "prompt": "Once there was"}
    operations["/v1/completions"] = operations["/v1/completions"]._replace(example=example)
    return described(f"Reflex, {', '.join(names)}" if named else "Reflex", routes, operations, schemas, ERRORS, keys)


def _either(body: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt, or messages and what belongs to them."""
    fields, talk = body["properties"], ("messages", "tools", "chat_template_kwargs")
    text = {name: of for name, of in fields.items() if name not in talk} | {"prompt": _STRING}
    said = {name: of for name, of in fields.items() if name != "prompt"} | {"messages": fields["messages"]["anyOf"][0]}
    return {"anyOf": [closed(text, "prompt"), closed(said, "messages")]}


def _narrow(
    schema: dict[str, Any],
    bounds: Mapping[str, Any],
    plain: Mapping[str, tuple[Any, ...]],
    needed: Sequence[str] = (),
) -> None:
    """Add to what a struct says of its fields. bounds: by name; one that has a type holds for values of that type, any
    other is the whole schema. plain: wishes, and their values without effect. needed: fields that must be there and
    are not null."""
    for name, field in schema["properties"].items():
        arms = [arm for arm in field.get("anyOf", [field]) if arm != NULL]
        nullable = NULL in field.get("anyOf", ()) and name not in needed
        if name in plain:
            kinds = [arm.get("type") for arm in arms]
            empty = [of for kind, of in _EMPTY.items() if kind in kinds or None in kinds]
            schema["properties"][name] = {"enum": [None, *plain[name], *empty]}
            continue
        bound = bounds.get(name, {})
        if "type" in bound:
            arms = [arm | bound if arm.get("type") == bound["type"] else arm for arm in arms]
        elif bound:
            arms = bound.get("anyOf", [bound])
        arms = [*arms, NULL] if nullable and not any("enum" in arm and None in arm["enum"] for arm in arms) else arms
        schema["properties"][name] = {"anyOf": arms} if len(arms) > 1 else dict(arms[0])
    schema["required"] = [*schema["required"], *needed]


def _bounds(names: Sequence[str], most: int, limits: Limits | None) -> dict[str, dict[str, Any]]:
    """What is checked of fields beyond their types, by name. names: of the models; () where they must not be told."""
    longest, vocabulary = (2**31, 2**31) if limits is None else (limits.longest - 1, limits.vocab_size - 1)
    ids = {"type": "array", "items": within(0, vocabulary), "minItems": 1}
    penalty = {"type": "number", "minimum": -2, "maximum": 2}
    limit = within(1, longest)
    talk = {"type": "array", "minItems": 1, "maxItems": MOST_MESSAGES}
    return {
        "model": {"enum": list(names)} if names else _SOME,
        "prompt": {"anyOf": [_SOME, ids, *(_list(of, min(most, wire.MOST_PROMPTS), 1) for of in (_SOME, ids))]},
        "tokens": {"anyOf": [_list(within(0, vocabulary), min(1000, longest + 1))]},
        "messages": talk,
        "input": talk,
        "n": within(1, wire.MOST_CHOICES),
        "best_of": within(1, wire.MOST_CHOICES),
        "stop": {"anyOf": [_STOP, _list(_STOP, MOST_STOPS)]},
        "stop_sequences": _list(_SOME, MOST_STOPS),
        "seed": within(-(2**63), 2**64 - 1),
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "max_tokens": limit,
        "max_completion_tokens": limit,
        "max_output_tokens": limit,
        "user": ID,
        "user_id": ID,
        "safety_identifier": ID,
        "top_k": {"type": "integer", "minimum": -1},
        "deadline_ms": {"type": "number", "exclusiveMinimum": 0, "maximum": 600_000},
        "max_gap_ms": {"type": "number", "minimum": SHORTEST_GAP_MS, "maximum": LONGEST_GAP_MS},
        "min_p": {"type": "number", "minimum": 0, "maximum": 1},
        "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 100},
        "frequency_penalty": penalty,
        "presence_penalty": penalty,
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": numerals(vocabulary)},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MOST_BIASED,
        },
        "min_tokens": within(0, longest),
        "stop_token_ids": _list(within(0, vocabulary), MOST_STOP_IDS),
        "logprobs": within(0, MOST_LOGPROBS),
        "prompt_logprobs": within(0, MOST_LOGPROBS),
        "top_logprobs": within(0, MOST_LOGPROBS),
        "chat_template_kwargs": {"type": "object", "maxProperties": 0},
        "metadata": {
            "type": "object",
            "propertyNames": {"maxLength": responses.MOST_KEY},
            "additionalProperties": {"type": "string", "maxLength": responses.MOST_VALUE},
            "maxProperties": responses.MOST_METADATA,
        },
    }


def numerals(most: int) -> str:
    """The pattern of whole numbers from 0 to `most`, as names of fields have them."""
    digits = str(most)
    found = ["0", str(most), *(f"[1-9][0-9]{{{n}}}" for n in range(len(digits) - 1))]
    for i, digit in enumerate(digits):  # the same up to here, then a smaller one
        low, high = int(i == 0), int(digit) - 1
        if low <= high:
            found.append(f"{digits[:i]}[{low}-{high}][0-9]{{{len(digits) - i - 1}}}")
    return f"^({'|'.join(found)})$"
