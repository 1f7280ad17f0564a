"""POST /tokenize and /detokenize, as vLLM has them: a text or a conversation to token ids, and back.

They need the tokenizer alone; nothing is queued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.engine.generation import Generator
from reflex_runtime.llm.engine.tokenizer import Conversation
from reflex_runtime.llm.serving.requests.decoding import decode
from reflex_runtime.llm.serving.requests.fields import ChatFields, Message
from reflex_runtime.llm.serving.requests.prompts import token_ids
from reflex_runtime.llm.serving.requests.reading import chat_request, refused
from reflex_runtime.llm.serving.requests.refusals import BadRequest, too_deep
from reflex_runtime.llm.serving.requests.tool_fields import ToolField
from reflex_runtime.web.json import encode

T = TypeVar("T")
FEW = 1000  # tokens; the texts of more are made beside the loop


class TokenizeFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /tokenize: a prompt, or messages. model: may be left out. return_token_strs: each token's text,
    too. add_special_tokens, add_generation_prompt: as the model is asked; other values are refused."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolField] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None


class DetokenizeFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: msgspec.Raw  # many are decoded piece by piece
    model: str | None = None


class TextAsked(NamedTuple):
    """What /tokenize was asked. prompt: a text; or conversation. texts: each token's text is wanted, too."""

    model: str | None
    prompt: str | None
    conversation: Conversation | None
    texts: bool


class IdsAsked(NamedTuple):
    """What /detokenize was asked."""

    model: str | None
    tokens: list[int]


class TokenIds(msgspec.Struct):
    """What /tokenize answers. count: of the tokens. max_model_len: how many a request may have, output included."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """What /detokenize answers. prompt: their text, special tokens left out."""

    prompt: str


PLAIN = {
    "add_special_tokens": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template": "",
}
_PLAIN = {name: (value,) for name, value in PLAIN.items()}
_tokenize = msgspec.json.Decoder(TokenizeFields)
_detokenize = msgspec.json.Decoder(DetokenizeFields)


def tokenize_fields(body: bytes) -> TextAsked:
    """The body of POST /tokenize, or the BadRequest that names what is wrong."""
    fields = decode(_tokenize, body, _PLAIN)
    if (fields.prompt is None) == (fields.messages is None):
        raise BadRequest("prompt: send it or messages, one of them", "prompt")
    if fields.prompt is not None and (fields.tools or fields.chat_template_kwargs):
        raise BadRequest("prompt: goes without tools and chat_template_kwargs, which are for messages", "prompt")
    conversation = _conversation(fields) if fields.prompt is None else None
    return TextAsked(fields.model, fields.prompt, conversation, bool(fields.return_token_strs))


async def tokenized(asked: TextAsked, model: Generator[Any]) -> bytes:
    """The answer to POST /tokenize."""
    if asked.conversation is not None:
        ids = await of_conversation(asked.conversation, model)
    else:
        try:
            (ids,) = await model.encode([asked.prompt or ""])
        except ConfigError as error:
            raise refused(error, "prompt") from None
    texts = None
    if asked.texts:
        token = model.tokenizer.token
        texts = await beside(len(ids), lambda: [token(id) for id in ids])
    return encode(TokenIds(len(ids), model.limits.max_model_len, ids, texts))


async def of_conversation(conversation: Conversation, model: Generator[Any]) -> list[int]:
    """Its tokens in the model's own form; BadRequest where it has none."""
    try:
        return await model.encode_chat(conversation)
    except RecursionError:
        raise too_deep() from None
    except ConfigError as error:
        raise refused(error, "messages") from None


async def beside(tokens: int, work: Callable[[], T]) -> T:
    """What it returns; of many tokens it is done in a thread."""
    if tokens <= FEW:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


def _conversation(fields: TokenizeFields) -> Conversation:
    """What the chat endpoint would make of it."""
    chat = ChatFields(
        model="", messages=fields.messages or [], tools=fields.tools, chat_template_kwargs=fields.chat_template_kwargs
    )
    conversation = chat_request(chat).conversation
    assert conversation is not None
    return conversation


def detokenize_fields(body: bytes) -> IdsAsked:
    """The body of POST /detokenize, or the BadRequest that names what is wrong."""
    fields = decode(_detokenize, body, {})
    return IdsAsked(fields.model, token_ids(bytes(fields.tokens), "tokens"))


async def detokenized(asked: IdsAsked, model: Generator[Any]) -> bytes:
    """The answer to POST /detokenize."""
    longest = model.limits.max_model_len
    if len(asked.tokens) > longest:
        raise BadRequest(f"tokens: holds {len(asked.tokens)}, and the model's context {longest}", "tokens")
    most = model.limits.vocab_size
    if asked.tokens and not (min(asked.tokens) >= 0 and max(asked.tokens) < most):
        told = f"[0, {most - 1}], not {min(asked.tokens)} to {max(asked.tokens)}"
        raise BadRequest(f"tokens: must be in {told}", "tokens")
    decoder = model.tokenizer.decode
    return encode(Detokenized(await beside(len(asked.tokens), lambda: decoder(asked.tokens))))
