"""What APIs that take conversations read alike: bounds, texts in parts, earlier calls, and the words of templates.

Errors name a field as its caller wrote it: `where` in what follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn

from reflex_runtime.llm.api.decode import MOST_MESSAGES, MOST_VALUES
from reflex_runtime.llm.api.errors import BadRequest
from reflex_runtime.llm.api.fields import MessagePart

_OWN_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt"})  # of templates: not to be overwritten


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


def text_of(where: str, content: str | Sequence[MessagePart], *kinds: str) -> str:
    """The text of a content. kinds: the types that its parts may have."""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in kinds or part.text is None:
            told = f"has type {part.type[:50]!r}; only type {kinds[0]}, with its text, is taken"
            raise BadRequest(f"{where}[{i}]: {told}", f"{where}[{i}]")
    return "\n".join(part.text or "" for part in content)


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


def no_effort(said: str | None) -> dict[str, Any]:
    """What templates know an effort of "none" as. said: nothing else was sent (`PLAIN`)."""
    return {"enable_thinking": False} if said == "none" else {}


def template_variables(said: dict[str, Any] | None) -> dict[str, Any]:
    """What `chat_template_kwargs` say; BadRequest for a name that is not theirs to set."""
    for name in said or {}:
        if name in _OWN_VARIABLES or not name.isidentifier() or name.startswith("_"):
            raise BadRequest(f"chat_template_kwargs: {name[:50]!r} cannot be set", "chat_template_kwargs")
    return said or {}
