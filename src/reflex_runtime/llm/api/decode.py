"""From the bytes of a body to its fields, in one pass of msgspec; errors name the field as the caller wrote it.

A body whose decoding would block the event loop is refused before it is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from reflex_runtime.llm.api import fields as wire
from reflex_runtime.llm.api.fields import MOST_PROMPTS, MOST_TOKENS, BadRequest, F, FieldTable
from reflex_runtime.web.errors import InvalidRequest
from reflex_runtime.web.fields import is_json, parts_of_error, printable, suggestion, whole

MOST_MESSAGES = 10_000
MOST_VALUES = 50_000  # commas in a body; of one with more, each field is checked
MOST_PLAIN = 10_000  # commas in a field that has no bound of its own
_LONG = ("prompt", "tokens")  # fields of token ids: `MOST_TOKENS`
_TALKS = ("messages", "input", "system")  # fields of conversations: `MOST_MESSAGES`
_WHOLE = (
    "n", "seed", "max_tokens", "min_tokens", "top_k", "logprobs", "max_completion_tokens", "top_logprobs",
    "max_output_tokens",
)  # fmt: skip

PIECE = 1 << 16  # bytes of token ids that are decoded at a time: no other thread runs meanwhile
_TEXTS = msgspec.json.Decoder(str | list[str])
_LISTS = msgspec.json.Decoder(list[msgspec.Raw])
_IDS = msgspec.json.Decoder(list[int])


@lru_cache
def _parts(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[msgspec.Struct]:
    """A decoder that leaves each field of this struct raw."""
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in kind.__struct_fields__]
    return msgspec.json.Decoder(msgspec.defstruct("Parts", fields, forbid_unknown_fields=True))


def decode(table: FieldTable[F], body: bytes) -> tuple[F, list[str]]:
    """The fields, and the places of hints that have a meaning. Raises BadRequest."""
    try:
        if not body.isascii():
            body.decode()  # msgspec does not check what it skips or leaves raw
        if body.count(b",") > MOST_VALUES:
            _check_values(_parts(table.kind).decode(body))
        fields = table.decoder.decode(body)
        for name in _WHOLE:
            if hasattr(fields, name):
                setattr(fields, name, whole(name, getattr(fields, name)))
    except InvalidRequest as error:
        raise BadRequest(error.message, str(error.details["field"])) from None
    except msgspec.ValidationError as error:
        if not is_json(body):
            raise BadRequest("the body is not JSON to its end", api_code="invalid_json") from None
        raise _invalid(error, table.kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", api_code="invalid_json") from None
    return fields, _hints(fields, table)


def _hints(fields: msgspec.Struct, table: FieldTable[Any], where: str = "") -> list[str]:
    """The places, after `where`, of hints with a meaning (see `FieldTable`). Raises BadRequest for a wish with one."""
    for path, values in table.wishes.items():
        for name, value in _values_at(fields, path, where):
            if not _plain(value, values):
                raise BadRequest(f"{name}: is not supported here; leave it out", name)
    hints = table.hints.items()
    found = ((name, value, values) for path, values in hints for name, value in _values_at(fields, path, where))
    return sorted(name for name, value, values in found if not _plain(value, values))


def _plain(value: Any, values: Sequence[Any]) -> bool:
    return any(value == of and isinstance(value, bool) == isinstance(of, bool) for of in values)


def _values_at(fields: Any, path: str, where: str) -> Iterator[tuple[str, Any]]:
    """The place and the value of each field on a path such as `tools[].name`, unless the value is empty."""
    name, _, rest = path.partition(".")
    plain = name.removesuffix("[]")
    found = getattr(fields, plain, None)
    for i, value in enumerate((found or ()) if name != plain else (found,)):
        place = f"{where}{plain}[{i}]" if name != plain else f"{where}{plain}"
        if rest:
            yield from _values_at(value, rest, f"{place}.")
        elif value is not None and value != [] and value != {} and value != "":
            yield place, value


class _Typed(msgspec.Struct):
    type: str | None = None


_typed = msgspec.json.Decoder(_Typed)


def tools_of(
    sent: Sequence[msgspec.Raw] | None, table: FieldTable[Any], choice: str | wire.ChosenFunction | None,
    parallel: bool | None, own: str = "function",
) -> tuple[wire.AskedTools, list[dict[str, Any]], list[str]]:  # fmt: skip
    """The tools that are functions, the same for a chat template, and the places of hints; a tool of another type than
    `own` is a hint. choice: a function, or "none", "auto" or "required". Raises BadRequest."""
    functions, hints = list[wire.ToolFunction](), list[str]()
    for i, raw in enumerate(sent or ()):
        where = f"tools[{i}]"
        try:
            if _typed.decode(raw).type not in (None, own):
                hints.append(where)
                continue
            tool = table.decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise _invalid(error, table.kind, where) from None
        functions.append(getattr(tool, "function", tool))
        hints += _hints(tool, table, f"{where}.")
    return *wire.asked_tools(functions, choice, parallel), hints


def _check_values(parts: msgspec.Struct) -> None:
    """Raise BadRequest for a field with so many values that decoding it would block the event loop."""
    for name in parts.__struct_fields__:
        raw = bytes(getattr(parts, name))
        if name in _TALKS:  # inside of a text the quotes would be escaped
            messages, kinds = raw.count(b'"role"'), raw.count(b'"type"')
            if messages > MOST_MESSAGES:
                raise BadRequest(f"{name}: holds {messages}, must hold 1 to {MOST_MESSAGES}", name)
            if kinds > MOST_MESSAGES:
                raise BadRequest(f"{name}: holds {kinds} parts, at most {MOST_MESSAGES} are taken", name)
        elif name not in _LONG and raw[:1] != b'"' and raw.count(b",") > MOST_PLAIN:  # a text is one value
            raise BadRequest(f"{name}: holds more than {MOST_PLAIN} values", name)


def _invalid(error: msgspec.ValidationError, kind: type[msgspec.Struct], inside: str = "") -> BadRequest:
    """kind: the struct that did not fit: of the body, or of the value at the place `inside`."""
    path, unknown, why = parts_of_error(error)
    param = ".".join(filter(None, (inside, path, unknown)))
    message = printable(f"{param or 'the body'}: {why}") + suggestion(str(error), kind)
    return BadRequest(message, printable(param) or None)


def prompts_of(sent: msgspec.Raw) -> list[str] | list[list[int]]:
    """One or several texts or lists of token ids. Raises BadRequest."""
    raw = bytes(sent)
    found: list[str] | list[list[int]]
    try:
        if b'"' in raw:
            texts = _TEXTS.decode(raw)
            found = [texts] if isinstance(texts, str) else texts
        else:
            found = _token_lists(raw)
    except msgspec.DecodeError:
        raise BadRequest("prompt: must be a text, texts, token ids, or lists of token ids", "prompt") from None
    if not 1 <= len(found) <= MOST_PROMPTS:
        raise BadRequest(f"prompt: holds {len(found)} prompts, must hold 1 to {MOST_PROMPTS}", "prompt")
    for i, one in enumerate(found):
        if not one:
            where = f"prompt[{i}]" if len(found) > 1 else "prompt"
            raise BadRequest(f"{where}: is empty; at least one token is needed", where)
    return found


def _token_lists(raw: bytes) -> list[list[int]]:
    """Token ids, or lists of them, decoded piece by piece."""
    lists = raw.count(b"[") - 1
    if lists > MOST_PROMPTS:
        raise BadRequest(f"prompt: holds {lists} prompts, must hold 1 to {MOST_PROMPTS}", "prompt")
    _check_tokens(raw, "prompt")
    return [_ids(bytes(part)) for part in _LISTS.decode(raw)] if lists > 0 else [_ids(raw)]


def _check_tokens(raw: bytes, name: str) -> None:
    if (tokens := raw.count(b",") + 1) > MOST_TOKENS:
        raise BadRequest(f"{name}: holds {tokens} tokens, at most {MOST_TOKENS} are taken", name)


def token_ids(raw: bytes, name: str) -> list[int]:
    """A list of token ids, decoded piece by piece. name: of its field. Raises BadRequest."""
    _check_tokens(raw, name)
    try:
        return _ids(raw)
    except msgspec.DecodeError as error:
        raise BadRequest(f"{name}: must be a list of token ids. {error}".rstrip(". "), name) from None


def _ids(raw: bytes) -> list[int]:
    if len(raw) <= PIECE:
        return _IDS.decode(raw)
    found: list[int] = []
    at, end = raw.find(b"[") + 1, raw.rfind(b"]")
    if not at or end < 0:
        raise msgspec.DecodeError
    while at < end:
        comma = raw.find(b",", at + PIECE, end)
        upto = end if comma < 0 else comma
        found += _IDS.decode(b"[%b]" % raw[at:upto])
        at = upto + 1
    return found
