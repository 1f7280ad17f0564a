"""/openapi.json of a model server: the served part of the OpenAI API, as strict as its validation.

Unsupported fields of that API are listed with the values that have no effect. JSON Schema cannot say that
prompt and `max_tokens` share the model's context, that `min_tokens` is at most `max_tokens`, that a biased token is in
the vocabulary, that `max_tokens` of 0 needs `echo`, that `prompt_logprobs` goes without `stream`, which texts are a
schema, an expression or a grammar, that the form of an answer is said once, that all choices of all prompts are as many
as may wait, that `best_of` is `n`, that `max_tokens` is `max_completion_tokens`, that `stream_options` needs `stream`
and `top_logprobs` needs `logprobs`, and that token ids are written without a point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reflex_runtime.core.request import PRIORITIES
from reflex_runtime.ipc.messages import LONGEST_GAP_MS, SHORTEST_GAP_MS
from reflex_runtime.ipc.sampling import MOST_BIASED, MOST_LOGPROBS, MOST_STOP_IDS, MOST_STOPS
from reflex_runtime.llm.api import answers, messages, schemas, tokenize
from reflex_runtime.llm.api import fields as wire
from reflex_runtime.llm.api.decode import MOST_MESSAGES
from reflex_runtime.llm.api.fields import MOST_TEXTS, MOST_TOOLS, CalledTool, ToolField
from reflex_runtime.llm.api.schemas import closed, maybe, model_named, numerals, ref, within, without_effect
from reflex_runtime.llm.engine.generation_options import Limits
from reflex_runtime.web.fields import MAX_ID_BYTES
from reflex_runtime.web.json import JSON_TYPE
from reflex_runtime.web.openapi import failures, finished

ERRORS = {
    "400": "invalid_request, invalid_json, context_length_exceeded: `param` names what is wrong",
    "401": "invalid_api_key: a key is set and was not sent",
    "403": "forbidden: without a key, a page of another site or a proxy asked",
    "404": "model_not_found, not_found: no such model, no such path",
    "405": "method_not_allowed: the header Allow has the right method",
    "408": "request_timeout: the head or the body did not come in time",
    "413": "too_large: the body exceeds --max-body-bytes",
    "429": "queue_full, client_at_capacity: try again after Retry-After",
    "500": "processor_failed, processor_hung: it ran and failed",
    "503": "deadline_unreachable, not_ready, shutting_down: try again after Retry-After",
    "504": "deadline_exceeded: the deadline passed before the first token",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_OBJECT = {JSON_TYPE: {"schema": {"type": "object"}}}
_GETS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "/v1/models": ("the model that is served, and its adapters", ("200",), _OBJECT),
    "/health": ("200 only when ready, else 503", ("200", "503"), _OBJECT),
    "/status": ("requests that wait and run, and how batches were formed", ("200",), _OBJECT),
    "/metrics": ("Prometheus text", ("200",), {"text/plain": {"schema": {"type": "string"}}}),
    "/version": ("the server's version", ("200",), _OBJECT),
    "/openapi.json": ("this document", ("200",), _OBJECT),
    "/docs": ("this document for people", ("200",), {"text/html": {"schema": {"type": "string"}}}),
}
_TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MOST_TEXTS}


def page_paths() -> dict[str, Any]:
    """The paths of the pages."""
    paths: dict[str, Any] = {}
    for path, (summary, codes, content) in _GETS.items():
        done = {code: {"description": "OK" if code == "200" else "not ready", "content": content} for code in codes}
        more = failures_of("401", "403", "405", "408", but=codes)
        paths[path] = {"get": {"summary": summary, "responses": done | more}}
    paths["/v1/models/{id}"] = {
        "get": {
            "summary": "the model of this name",
            "responses": {"200": {"description": "OK", "content": _OBJECT}}
            | failures_of("400", "401", "403", "404", "405", "408"),
        },
        "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}],
    }
    return paths


def failures_of(*codes: str, but: Sequence[str] = (), error: str = "Error") -> dict[str, Any]:
    """Responses of these statuses, but for some. error: name of the schema of their body."""
    return failures(ERRORS, *codes, but=but, error=error)


_STRUCTURED: dict[str, dict[str, Any]] = {
    "json": {"type": "object"},
    "json_object": {"const": True},
    "regex": {"type": "string", "minLength": 1},
    "choice": _TEXTS,
    "grammar": {"type": "string", "minLength": 1},
}


def document(
    names: Sequence[str], most: int, limits: Limits | None, unguarded: Sequence[str] | None, named: bool = True
) -> bytes:
    """The OpenAPI 3.1 document. names: those that may be asked for; most: choices that may wait; limits: None before
    the model is there. unguarded: paths without a key; None: all. named: whether it may name the model."""
    model = model_named(names, named)
    text = _post("Text goes on", _completion(model, limits, most), _choices(answers.TextChoice))
    chat = _post("A conversation goes on", _chat(model, limits), _choices(answers.ChatChoice))
    common = _common(model, limits)
    of_message = "MessageError"
    talk, said = schemas.responses_schema(common), schemas.messages_schema(common)
    response = _post("A response to a conversation", talk, schemas.RESPONSE, "response.completed")
    message = _post("A message that goes on a conversation", said, schemas.MESSAGE, "message_stop", of_message)
    counted = _small("Tokens of messages", schemas.count_schema(common), messages.InputTokens, of_message)
    content = text["requestBody"]["content"][JSON_TYPE]
    content["example"] = {"model": names[0] if named else "MODEL", "prompt": "Once there was"}
    questions = {
        "/v1/completions": text,
        "/v1/chat/completions": chat,
        "/v1/responses": response,
        "/v1/messages": message,
        "/v1/messages/count_tokens": counted,
        "/tokenize": _small("Token ids of a text or a conversation", _tokenize(model), tokenize.TokenIds),
        "/detokenize": _small("The text of token ids", _detokenize(model, limits), tokenize.Detokenized),
    }
    components = {"Error": ERROR, "MessageError": schemas.MESSAGE_ERROR}
    for kind in (
        answers.Body, answers.TextChoice, answers.ChatChoice, ToolField, CalledTool, messages.InputTokens,
        tokenize.TokenIds, tokenize.Detokenized,
    ):  # fmt: skip
        components |= answers.schemas(kind)
    paths = {path: {"post": question} for path, question in questions.items()} | page_paths()
    return finished(f"Reflex, {', '.join(names)}" if named else "Reflex", paths, components, unguarded)


def _choices(choice: type) -> dict[str, Any]:
    choices = {"type": "array", "items": ref(choice)}
    return {"allOf": [ref(answers.Body), {"type": "object", "properties": {"choices": choices}}]}


def _post(
    summary: str, request: dict[str, Any], whole: dict[str, Any], last: str = "[DONE]", error: str = "Error"
) -> dict[str, Any]:
    event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
    return {
        "summary": summary,
        "description": f"With stream, the parts of the answer as server-sent events, the last one {last}.",
        "requestBody": {"required": True, "content": {JSON_TYPE: {"schema": request}}},
        "responses": {
            "200": {
                "description": "the answer, or a stream of its parts",
                "content": {JSON_TYPE: {"schema": whole}, "text/event-stream": {"schema": event}},
            }
        }
        | failures_of(*ERRORS, error=error),
    }


def _small(summary: str, request: dict[str, Any], answer: type, error: str = "Error") -> dict[str, Any]:
    """A question that is answered without the model."""
    done = {"description": "OK", "content": {JSON_TYPE: {"schema": ref(answer)}}}
    body = {"required": True, "content": {JSON_TYPE: {"schema": request}}}
    wrong = failures_of("400", "401", "403", "404", "405", "408", "413", "500", "503", error=error)
    return {"summary": summary, "requestBody": body, "responses": {"200": done} | wrong}


def _tokenize(model: dict[str, Any]) -> dict[str, Any]:
    both = {"model": maybe(model), "return_token_strs": maybe({"type": "boolean"})}
    both |= {name: {"enum": [None, plain]} for name, plain in tokenize.PLAIN.items()}
    text = closed(both | {"prompt": {"type": "string"}}, "prompt")
    return {"anyOf": [text, closed(both | {"messages": _messages()}, "messages")]}


def _detokenize(model: dict[str, Any], limits: Limits | None) -> dict[str, Any]:
    most = 1000 if limits is None else min(1000, limits.max_model_len)
    ids = {"type": "array", "items": within(0, 2**31 if limits is None else limits.vocab_size - 1), "maxItems": most}
    return closed({"tokens": ids, "model": maybe(model)}, "tokens")


def _common(model: dict[str, Any], limits: Limits | None) -> dict[str, Any]:
    most = limits.max_model_len - 1 if limits is not None else 2**31
    vocabulary = limits.vocab_size - 1 if limits is not None else 2**31
    text = {"type": "string", "minLength": 1, "maxLength": 1000}
    options = {name: maybe({"type": "boolean"}) for name in wire.StreamOptions.__struct_fields__}
    user = {"type": "string", "maxLength": MAX_ID_BYTES, "pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$"}
    fields: dict[str, Any] = {
        "n": within(1, wire.MOST_CHOICES),
        "stream": {"type": "boolean"},
        "stream_options": {"type": "object", "properties": options, "additionalProperties": False},
        "stop": {"anyOf": [text, {"type": "array", "items": text, "maxItems": MOST_STOPS}]},
        "seed": within(-(2**63), 2**64 - 1),
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "max_tokens": within(1, most),
        "user": user,
        "top_k": {"type": "integer", "minimum": 0},
        "ignore_eos": {"type": "boolean"},
        "priority": {"enum": list(PRIORITIES)},
        "deadline_ms": {"type": "number", "exclusiveMinimum": 0, "maximum": 600_000},
        "max_gap_ms": {"type": "number", "minimum": SHORTEST_GAP_MS, "maximum": LONGEST_GAP_MS},
        "min_p": {"type": "number", "minimum": 0, "maximum": 1},
        "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 100},
        "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
        "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": numerals(vocabulary)},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MOST_BIASED,
        },
        "min_tokens": within(0, most),
        "stop_token_ids": {"type": "array", "items": within(0, vocabulary), "maxItems": MOST_STOP_IDS},
        "include_stop_str_in_output": {"type": "boolean"},
        "response_format": {"anyOf": [closed({"type": {"enum": ["text", "json_object"]}}, "type"), _schema_format()]},
        "prompt_logprobs": within(0, MOST_LOGPROBS),
        "structured_outputs": {"anyOf": [closed({name: of}, name) for name, of in _STRUCTURED.items()]},
    }
    return {"model": model} | {name: maybe(schema) for name, schema in fields.items()}


def _schema_format() -> dict[str, Any]:
    about = {"description": maybe({"type": "string"}), "strict": maybe({"type": "boolean"})}
    schema = closed({"name": {"type": "string"}, "schema": {"type": "object"}} | about, "name", "schema")
    return closed({"type": {"const": "json_schema"}, "json_schema": schema}, "type", "json_schema")


def _completion(model: dict[str, Any], limits: Limits | None, most: int) -> dict[str, Any]:
    vocabulary = limits.vocab_size - 1 if limits is not None else 2**31
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": vocabulary}, "minItems": 1}
    most = min(most, wire.MOST_PROMPTS)
    several = [{"type": "array", "items": of, "minItems": 1, "maxItems": most} for of in (text, ids)]
    fields = _common(model, limits) | {
        "prompt": {"anyOf": [text, ids, *several]},
        "logprobs": maybe(within(0, MOST_LOGPROBS)),
        "best_of": maybe(within(1, wire.MOST_CHOICES)),
        "echo": maybe({"type": "boolean"}),
        "max_tokens": maybe(within(0, 2**31 if limits is None else limits.max_model_len - 1)),
        "suffix": maybe({"const": ""}),
    }
    return closed(fields, "model", "prompt")


def _messages() -> dict[str, Any]:
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    said = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
    message = closed(
        {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": said,
            "name": maybe({"type": "string"}),
            "tool_call_id": maybe({"type": "string"}),
            "tool_calls": maybe({"type": "array", "items": ref(CalledTool)}),
            **{name: {"enum": [None, "", []]} for name in wire.OF_ANSWERS},
        },
        "role",
        "content",
    )
    return {"type": "array", "items": message, "minItems": 1, "maxItems": MOST_MESSAGES}


def _chat(model: dict[str, Any], limits: Limits | None) -> dict[str, Any]:
    common = _common(model, limits)
    fields = common | {
        "messages": _messages(),
        "max_completion_tokens": common["max_tokens"],
        "logprobs": maybe({"type": "boolean"}),
        "top_logprobs": maybe(within(0, MOST_LOGPROBS)),
        "parallel_tool_calls": maybe({"type": "boolean"}),
        "tools": maybe({"type": "array", "items": ref(ToolField), "maxItems": MOST_TOOLS}),
        "tool_choice": maybe({"enum": ["none", "auto"]}),
        "chat_template_kwargs": maybe({"type": "object", "maxProperties": 0}),
        "metadata": {},
        "prompt_cache_key": maybe({"type": "string"}),
        "prompt_cache_options": {},
        "prompt_cache_retention": maybe({"type": "string"}),
        "safety_identifier": common["user"],
    }
    empty: dict[str, list[Any]] = {"store": [], "modalities": [[]], "verbosity": [""], "service_tier": [""]}
    plain = without_effect(wire.plain_of(wire.ChatFields), empty)
    fields = plain | fields
    return closed(fields, "model", "messages")
