"""Prompts: texts, or token ids, of which there may be too many to be decoded at once."""

from __future__ import annotations

from typing import Any

import msgspec

from reflex_runtime.llm.serving.requests.decoding import at_fault
from reflex_runtime.llm.serving.requests.fields import MOST_PROMPTS, MOST_TOKENS
from reflex_runtime.llm.serving.requests.refusals import BadRequest

PIECE = 1 << 16  # bytes of token ids decoded at a time: nothing else runs meanwhile

_PROMPT = msgspec.json.Decoder(str | list[Any])
_LISTS = msgspec.json.Decoder(list[msgspec.Raw])
_IDS = msgspec.json.Decoder(list[int])


def prompts_of(sent: msgspec.Raw) -> list[str | list[int]]:
    """One text, several, token ids, or several lists of them."""
    raw = bytes(sent)
    if len(raw) > PIECE and b'"' not in raw:
        return _many_ids(raw)
    try:
        prompt = _PROMPT.decode(raw)
    except msgspec.ValidationError as error:
        raise BadRequest(at_fault(error, "prompt"), "prompt") from None
    if isinstance(prompt, str):
        found: list[str | list[int]] = [prompt]
    elif prompt and all(type(token) is int for token in prompt):
        found = [prompt]
    else:
        found = list(prompt)
    if not 1 <= len(found) <= MOST_PROMPTS:
        raise BadRequest(f"prompt: holds {len(found)} prompts, must hold 1 to {MOST_PROMPTS}", "prompt")
    kind = type(found[0])
    for one in found:
        if type(one) is not kind or not isinstance(one, (str, list)):
            raise BadRequest("prompt: must be a text, texts, token ids, or lists of token ids", "prompt")
        if isinstance(one, list) and not all(type(token) is int for token in one):
            raise BadRequest("prompt: token ids must be whole numbers", "prompt")
        if not one:
            raise BadRequest("prompt: is empty; at least one token is needed", "prompt")
    return found


def _many_ids(raw: bytes) -> list[str | list[int]]:
    """Token ids, or lists of them, of which there may be too many to be decoded at once."""
    lists, tokens = raw.count(b"[") - 1, raw.count(b",") + 1
    if tokens > MOST_TOKENS:
        raise BadRequest(f"prompt: holds {tokens} tokens, at most {MOST_TOKENS} are taken", "prompt")
    if lists > MOST_PROMPTS:
        raise BadRequest(f"prompt: holds {lists} prompts, must hold 1 to {MOST_PROMPTS}", "prompt")
    try:
        parts = [bytes(part) for part in _LISTS.decode(raw)] if lists > 0 else [raw]
        found: list[str | list[int]] = [_ids(part) for part in parts]
    except msgspec.DecodeError:
        raise BadRequest("prompt: must be a text, texts, token ids, or lists of token ids", "prompt") from None
    if [] in found:
        raise BadRequest("prompt: is empty; at least one token is needed", "prompt")
    return found


def token_ids(raw: bytes, name: str) -> list[int]:
    """A list of token ids, of which there may be too many to be decoded at once. name: of its field."""
    if (tokens := raw.count(b",") + 1) > MOST_TOKENS:
        raise BadRequest(f"{name}: holds {tokens} tokens, at most {MOST_TOKENS} are taken", name)
    try:
        return _IDS.decode(raw) if len(raw) <= PIECE else _ids(raw)
    except msgspec.DecodeError as error:
        raise BadRequest(f"{name}: must be a list of token ids. {error}".rstrip(". "), name) from None


def _ids(raw: bytes) -> list[int]:
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
