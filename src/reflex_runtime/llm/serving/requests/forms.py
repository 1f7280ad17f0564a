"""The form that a request wants its answer to have: the fields that say it, and the constraint that they mean."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.sampling import Constraint
from reflex_runtime.llm.serving.requests.refusals import BadRequest
from reflex_runtime.web.json import encode

MOST_TEXTS: Final = 1000  # of which an answer may have to be one
_ANY_OBJECT: Final = '{"type": "object"}'


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A schema for the answer; name, description and strict are for people and other servers: it always holds."""

    name: str
    schema: msgspec.Raw = msgspec.Raw()
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an answer, as the OpenAI API has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an answer, as vLLM has it: one of them."""

    json: msgspec.Raw = msgspec.Raw()
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def constraint_of(form: ResponseFormat | None, other: StructuredOutputs | None) -> Constraint | None:
    """What `response_format` or `structured_outputs` say; the BadRequest that names what is wrong with them."""
    if other is not None:
        if form is not None and form.type != "text":
            raise BadRequest("structured_outputs: response_format says a form, too; send one", "structured_outputs")
        return _structured(other)
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Constraint("json", _ANY_OBJECT)
    schema = None if form.json_schema is None else bytes(form.json_schema.schema)
    if not schema or schema == b"null":
        raise BadRequest("response_format.json_schema.schema: is missing", "response_format.json_schema.schema")
    return _form("response_format", "json", schema.decode())


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
    if name == "json" and text.startswith('"'):  # a schema that is itself written as a text
        text = msgspec.json.decode(text, type=str)
    return _form(where, "json" if name == "json_object" else name, text)


def _form(where: str, kind: Any, text: str) -> Constraint:
    try:
        return Constraint(kind, text)
    except ConfigError as error:
        raise BadRequest(f"{where}.{error.message}", where) from None
