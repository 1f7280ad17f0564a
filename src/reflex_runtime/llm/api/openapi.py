"""/openapi.json of a model server, from the structs of its bodies: names and types of fields.

Ranges, and which fields exclude each other, are not in it: an answer with status 400 names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from reflex_runtime.llm.api import answers as openai
from reflex_runtime.llm.api import fields as wire
from reflex_runtime.llm.api import messages, responses, tokenize
from reflex_runtime.web.access import NO_KEYS, Keys
from reflex_runtime.web.openapi import ERRORS, PAGES, TEXT, Operation, content, described, ref, schemas_of
from reflex_runtime.web.request import Route

_ERRORS: Final = ERRORS | {
    "400": "invalid_request, invalid_json, context_length_exceeded: `param` names what is wrong",
    "401": "invalid_api_key: a key is set and was not sent",
    "404": "model_not_found, not_found: no such model, no such path",
    "429": "queue_full, client_at_capacity: try again after Retry-After",
    "503": "deadline_unreachable, not_ready, shutting_down, worker_unavailable: try again after Retry-After",
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


class TextAnswer(openai.Body):
    choices: list[openai.TextChoice]


class ChatAnswer(openai.Body):
    choices: list[openai.ChatChoice]


class _Post(NamedTuple):
    """answer: None if it is not made of structs. last: the last event of a stream. tool: the fields of a function."""

    summary: str
    body: wire.FieldTable[Any]
    answer: type[msgspec.Struct] | None
    last: str = ""
    tool: wire.FieldTable[Any] | None = None


_POSTS: Final = {
    "/v1/completions": _Post("Complete a text", wire.TEXT, TextAnswer, "[DONE]"),
    "/v1/chat/completions": _Post("Answer a conversation", wire.CHAT, ChatAnswer, "[DONE]", wire.TOOL),
    responses.PATH: _Post("Answer a conversation", responses.RESPONSE, None, "response.completed", responses.TOOL),
    messages.PATH: _Post("Answer a conversation", messages.MESSAGE, None, "message_stop", messages.TOOL),
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
_STREAM: Final = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}


def document(routes: Iterable[Route], names: Sequence[str], keys: Keys = NO_KEYS, named: bool = True) -> bytes:
    """The OpenAPI 3.1 document. names: of the model. keys: of the server. named: whether it shows the names."""
    of_posts = [one.kind for post in _POSTS.values() for one in (post.body, post.tool) if one is not None]
    answers = (post.answer for post in _POSTS.values() if post.answer is not None)
    schemas = schemas_of(*of_posts, *answers, Error, MessageError)
    for post in _POSTS.values():
        for name in post.body.wishes:  # they are refused
            schemas[post.body.kind.__name__]["properties"].pop(name, None)
    operations = dict(_GETS)
    for path, post in _POSTS.items():
        codes, about = ["400", "404", "413", "415", "500", "503"], ""
        answer = content({"type": "object"} if post.answer is None else ref(post.answer))
        if post.last:
            about = f"With stream, the parts of the answer as server-sent events, the last one {post.last}."
            codes, answer = [*codes, "429", "504"], answer | content(_STREAM, "text/event-stream")
        if post.tool is not None:
            about = f"A tool is a {post.tool.kind.__name__}; others are left out. {about}".strip()
        error = "MessageError" if path.startswith(messages.PATH) else "Error"
        body = content(ref(post.body.kind))
        operations[path] = Operation(post.summary, answer, codes, request=body, description=about, error=error)
    example = {"model": names[0] if named else "MODEL", "prompt": "Once there was"}
    operations["/v1/completions"] = operations["/v1/completions"]._replace(example=example)
    title = f"Reflex, {', '.join(names)}" if named else "Reflex"
    return described(title, routes, operations, schemas, keys, errors=_ERRORS)
