"""POST /tokenize and /detokenize of vLLM's API, and /v1/messages/count_tokens: they need only the tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from reflex_runtime.llm.api.decode import decode, token_ids
from reflex_runtime.llm.api.fields import BadRequest, FieldTable, Message
from reflex_runtime.llm.api.messages import InputTokens, counted
from reflex_runtime.llm.api.requests import chat_conversation, tokens_of
from reflex_runtime.llm.engine.tokenizer import Conversation
from reflex_runtime.web.fields import encode

if TYPE_CHECKING:
    from reflex_runtime.llm.server.lifecycle import ModelHost

TokenizerCall = tuple[str | None, Sequence[str], Callable[["ModelHost"], Awaitable[bytes]]]
"""The name of the model, hints without effect, and the function that makes the answer."""


class TokenizeFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /tokenize: a prompt, or messages. model: may be left out."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[msgspec.Raw] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: msgspec.Raw  # decoded piece by piece
    model: str | None = None


class Detokenized(msgspec.Struct):
    """The answer of /detokenize. prompt: the text, without special tokens."""

    prompt: str


class TokenIds(msgspec.Struct):
    """The answer of /tokenize. max_model_len: most tokens of a request, with its output."""

    count: int
    max_model_len: int
    tokens: list[int]


TOKENIZE: Final = FieldTable(
    TokenizeFields,
    wishes={
        "add_special_tokens": (True,), "add_generation_prompt": (True,), "continue_final_message": (False,),
        "chat_template": (), "messages[].audio": (), "messages[].function_call": (),
    },
)  # fmt: skip
DETOKENIZE: Final = FieldTable(DetokenizeFields)


def tokenize(body: bytes) -> TokenizerCall:
    """Read the body of POST /tokenize. Raises BadRequest."""
    fields, _ = decode(TOKENIZE, body)
    if (fields.prompt is None) == (fields.messages is None):
        raise BadRequest("prompt: send either prompt or messages", "prompt")
    if fields.prompt is not None and (fields.tools or fields.chat_template_kwargs):
        raise BadRequest("prompt: tools and chat_template_kwargs are only for messages; leave them out", "prompt")
    if fields.prompt is not None:
        return fields.model, (), partial(_tokenized, fields.prompt)
    conversation, _, hints = chat_conversation(fields.messages or [], fields.tools, fields.chat_template_kwargs)
    return fields.model, hints, partial(_tokenized, conversation)


def detokenize(body: bytes) -> TokenizerCall:
    """Read the body of POST /detokenize. Raises BadRequest."""
    fields, _ = decode(DETOKENIZE, body)
    return fields.model, (), partial(_detokenized, token_ids(bytes(fields.tokens), "tokens"))


def count_tokens(body: bytes) -> TokenizerCall:
    """Read the body of POST /v1/messages/count_tokens. Raises BadRequest."""
    name, conversation, hints = counted(body)
    return name, hints, partial(_counted, conversation)


async def _tokenized(what: str | Conversation, model: ModelHost) -> bytes:
    ids = await _ids(what, model)
    return encode(TokenIds(len(ids), model.limits.longest, ids))


async def _detokenized(ids: list[int], model: ModelHost) -> bytes:
    longest, most = model.limits.max_model_len, model.limits.vocab_size
    if len(ids) > longest:
        raise BadRequest(f"tokens: holds {len(ids)}, the model's context {longest}", "tokens")
    if ids and not (min(ids) >= 0 and max(ids) < most):
        wrong = next(one for one in ids if not 0 <= one < most)
        raise BadRequest(f"tokens: token id {wrong}: must be in [0, {most - 1}]", "tokens")
    return encode(Detokenized(await asyncio.to_thread(model.texts.tokenizer.decode, ids)))


async def _counted(conversation: Conversation, model: ModelHost) -> bytes:
    return encode(InputTokens(len(await _ids(conversation, model))))


async def _ids(what: str | Conversation, model: ModelHost) -> list[int]:
    """The tokens of a text, or of a conversation by the model's chat template. Raises BadRequest."""
    found = await tokens_of(model.texts, [what] if isinstance(what, str) else what, _FIELDS[type(what)])
    return found[0]


_FIELDS: Final = {str: "prompt", Conversation: "messages"}
