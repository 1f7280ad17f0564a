"""/openapi.json of /v1/responses and /v1/messages: what a request may say, and what is answered.

Where fields decide about each other, the commoner ones are described: a conversation that ends with the user's turn,
and tools that the model may call or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reflex_runtime.llm.api import messages, responses
from reflex_runtime.llm.api.decode import MOST_MESSAGES
from reflex_runtime.llm.api.fields import MOST_TOOLS, NAME, MoreFields

NULL = {"type": "null"}
_TEXT = {"type": "string"}
_PARAMETERS = {"type": "object"}


def closed(fields: dict[str, Any], *required: str) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def maybe(schema: dict[str, Any]) -> dict[str, Any]:
    """It, or null."""
    return {"anyOf": [schema, NULL]}


def within(low: int, high: int) -> dict[str, Any]:
    """A whole number in these bounds."""
    return {"type": "integer", "minimum": low, "maximum": high}


def numerals(most: int) -> str:
    """The pattern of whole numbers from 0 to `most`, as names of fields have them."""
    digits = str(most)
    found = ["0", str(most), *(f"[1-9][0-9]{{{n}}}" for n in range(len(digits) - 1))]
    for i, digit in enumerate(digits):  # the same up to here, then a smaller one
        low, high = int(i == 0), int(digit) - 1
        if low <= high:
            found.append(f"{digits[:i]}[{low}-{high}][0-9]{{{len(digits) - i - 1}}}")
    return f"^({'|'.join(found)})$"


def ref(kind: type) -> dict[str, Any]:
    """The schema of this class, which stands under its name."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def without_effect(plain: Mapping[str, tuple[Any, ...]], empty: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Fields that are known and not supported: the values that are taken. empty: those of fields whose type does not
    allow every empty value."""
    return {name: {"enum": [None, *values, *empty.get(name, ["", [], {}])]} for name, values in plain.items()}


def model_named(names: Sequence[str], named: bool) -> dict[str, Any]:
    """The name of a model: one of these, or any where they must not be told."""
    return {"enum": list(names)} if named else {"type": "string", "minLength": 1}


def _further(common: dict[str, Any]) -> dict[str, Any]:
    names = set(MoreFields.__struct_fields__) - {"structured_outputs"} | {"temperature", "top_p", "stream"}
    return {name: common[name] for name in names} | {
        "model": common["model"],
        "structured_outputs": common["structured_outputs"],
        "chat_template_kwargs": maybe({"type": "object", "maxProperties": 0}),
    }


def _part(kind: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": {"const": kind}, "text": _TEXT}, "required": ["type", "text"]}


def responses_schema(common: dict[str, Any]) -> dict[str, Any]:
    """The body of POST /v1/responses. common: fields of chats."""
    part = _part("input_text")
    item = closed(
        {
            "type": {"const": "message"},
            "role": {"enum": ["system", "developer", "user", "assistant"]},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": part}]},
        },
        "role",
        "content",
    )
    tool = closed(
        {
            "type": {"const": "function"},
            "name": {"type": "string", "pattern": NAME},
            "description": maybe(_TEXT),
            "parameters": maybe(_PARAMETERS),
            "strict": maybe({"type": "boolean"}),
        },
        "type",
        "name",
    )
    form = closed({"type": {"enum": ["text", "json_object"]}}, "type")
    empty: dict[str, list[Any]] = {
        name: [] for name in ("background", "store", "top_logprobs")
    } | {name: [""] for name in ("service_tier", "truncation", "previous_response_id")} | {"include": [[]]}  # fmt: skip
    fields = without_effect(responses.PLAIN, empty) | _further(common)
    fields |= {
        "input": {"anyOf": [_TEXT, {"type": "array", "items": item, "minItems": 1, "maxItems": MOST_MESSAGES}]},
        "instructions": maybe(_TEXT),
        "max_output_tokens": common["max_tokens"],
        "metadata": maybe(
            {
                "type": "object",
                "propertyNames": {"maxLength": responses.MOST_KEY},
                "additionalProperties": {"type": "string", "maxLength": responses.MOST_VALUE},
                "maxProperties": responses.MOST_METADATA,
            }
        ),
        "parallel_tool_calls": maybe({"type": "boolean"}),
        "prompt_cache_key": maybe(_TEXT),
        "prompt_cache_options": {},
        "prompt_cache_retention": maybe(_TEXT),
        "safety_identifier": common["user"],
        "text": maybe(closed({"format": maybe(form), "verbosity": {"enum": [None, "medium"]}})),
        "tool_choice": {"enum": [None, "none", "auto"]},
        "tools": maybe({"type": "array", "items": tool, "maxItems": MOST_TOOLS}),
        "user": common["user"],
    }
    return closed(fields, "model", "input")


def _counted(common: dict[str, Any]) -> dict[str, Any]:
    said = {"anyOf": [_TEXT, {"type": "array", "items": _part("text"), "minItems": 1}]}
    turn = closed({"role": {"const": "user"}, "content": said}, "role", "content")
    tool = closed(
        {
            "name": {"type": "string", "pattern": NAME},
            "input_schema": _PARAMETERS,
            "description": maybe(_TEXT),
            "type": {"enum": [None, "custom"]},
            "strict": maybe({"type": "boolean"}),
            "cache_control": {},
        },
        "name",
        "input_schema",
    )
    return {
        "model": common["model"],
        "chat_template_kwargs": maybe({"type": "object", "maxProperties": 0}),
        "cache_control": {},
        "context_management": {"enum": [None, "", [], {}]},
        "mcp_servers": {"enum": [None, "", [], {}]},
        "messages": {"type": "array", "items": turn, "minItems": 1, "maxItems": MOST_MESSAGES},
        "speed": {"enum": [None, "", "standard"]},
        "system": maybe({"anyOf": [_TEXT, {"type": "array", "items": _part("text")}]}),
        "thinking": maybe(closed({"type": {"enum": ["adaptive", "disabled"]}}, "type")),
        "tool_choice": maybe(closed({"type": {"enum": ["auto", "none"]}}, "type")),
        "tools": maybe({"type": "array", "items": tool, "maxItems": MOST_TOOLS}),
        "output_config": maybe(closed({"effort": {"enum": [None, "high"]}})),
    }


def count_schema(common: dict[str, Any]) -> dict[str, Any]:
    """The body of POST /v1/messages/count_tokens."""
    return closed(_counted(common), "model", "messages")


def messages_schema(common: dict[str, Any]) -> dict[str, Any]:
    """The body of POST /v1/messages."""
    empty = {name: [""] for name in ("inference_geo", "service_tier", "user_profile_id", "workspace_id")}
    counted = _counted(common)
    plain = {name: of for name, of in messages.PLAIN.items() if name not in counted}
    fields = counted | _further(common) | without_effect(plain, empty)
    (limit, _) = common["max_tokens"]["anyOf"]
    fields |= {
        "max_tokens": limit,
        "metadata": maybe(closed({"user_id": common["user"]})),
        "stop_sequences": maybe({"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 16}),
        "include_stop_str_in_output": {"enum": [None, False]},
    }
    return closed(fields, "model", "messages", "max_tokens")


RESPONSE = {
    "type": "object",
    "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
    "properties": {
        "object": {"const": "response"},
        "status": {"enum": ["completed", "incomplete"]},
        "output": {"type": "array", "items": {"type": "object", "required": ["id", "type"]}},
        "usage": {"type": "object", "required": ["input_tokens", "output_tokens", "total_tokens"]},
    },
}
MESSAGE = {
    "type": "object",
    "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
    "properties": {
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "content": {"type": "array", "items": {"type": "object", "required": ["type"]}},
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "usage": {"type": "object", "required": ["input_tokens", "output_tokens"]},
    },
}
MESSAGE_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
