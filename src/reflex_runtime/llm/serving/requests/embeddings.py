"""POST /v1/embeddings: the fields of a request, and what they ask for.

Beyond the API: `truncate_prompt_tokens`, as vLLM names it, cuts a text that is too long; `priority` and `deadline_ms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from reflex_runtime.core.request import PRIORITIES, Priority
from reflex_runtime.llm.serving.requests.decoding import decode
from reflex_runtime.llm.serving.requests.prompts import prompts_of
from reflex_runtime.llm.serving.requests.reading import client_named, time_limit_of
from reflex_runtime.llm.serving.requests.refusals import BadRequest
from reflex_runtime.web.fields import Whole

PATH: Final = "/v1/embeddings"
FORMATS: Final = ("float", "base64")


class EmbeddingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/embeddings. null counts as absent."""

    model: str
    input: msgspec.Raw  # millions of token ids are decoded piece by piece
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = None
    user: str | None = None
    truncate_prompt_tokens: Whole | None = None
    priority: Literal["urgent", "default", "background"] | None = None
    deadline_ms: float | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """What was asked. texts: all texts, or all token ids. truncate: most tokens of a text, -1 for as many as the model
    takes; None: a longer one is refused. time_limit: seconds until the answer."""

    model: str
    texts: list[str | list[int]]
    base64: bool
    dimensions: int | None
    truncate: int | None
    priority: Priority
    client: str | None
    time_limit: float | None


_decoder = msgspec.json.Decoder(EmbeddingFields)


def embedding(body: bytes) -> EmbeddingRequest:
    """The request in this body, or the BadRequest that names what is wrong."""
    fields = decode(_decoder, body, {})
    texts = prompts_of(fields.input, "input", "texts")
    if fields.dimensions is not None and fields.dimensions < 1:
        raise BadRequest(f"dimensions={fields.dimensions}: must be at least 1", "dimensions")
    most = fields.truncate_prompt_tokens
    if most is not None and most != -1 and most < 1:
        name = "truncate_prompt_tokens"
        raise BadRequest(f"{name}={most}: must be at least 1, or -1 for as many as the model takes", name)
    return EmbeddingRequest(
        model=fields.model,
        texts=texts,
        base64=fields.encoding_format == "base64",
        dimensions=None if fields.dimensions is None else int(fields.dimensions),
        truncate=None if most is None else int(most),
        priority=PRIORITIES[fields.priority or "default"],
        client=client_named("user", fields.user),
        time_limit=time_limit_of(fields.deadline_ms),
    )
