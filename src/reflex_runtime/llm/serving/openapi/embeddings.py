"""/openapi.json of an embedding server, as strict as its validation.

JSON Schema cannot say how many tokens a text has, that all texts share what may wait, and that token ids are written
without a point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reflex_runtime.core.request import PRIORITIES
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.serving.answers import completions as answers
from reflex_runtime.llm.serving.answers.embeddings import EmbeddingList
from reflex_runtime.llm.serving.openapi.pages import ERROR, ERRORS, failures_of, page_paths
from reflex_runtime.llm.serving.openapi.schemas import closed, maybe, ref, within
from reflex_runtime.llm.serving.requests.embeddings import FORMATS, PATH
from reflex_runtime.llm.serving.requests.fields import MOST_PROMPTS
from reflex_runtime.web.fields import MAX_ID_BYTES
from reflex_runtime.web.json import JSON_TYPE
from reflex_runtime.web.openapi import finished


def document(name: str, model: EmbeddingModel, most: int, unguarded: Sequence[str] | None) -> bytes:
    """The OpenAPI 3.1 document. most: texts that may wait. unguarded: paths without a key; None: all."""
    request = {"required": True, "content": {JSON_TYPE: {"schema": _fields(name, model, most)}}}
    request["content"][JSON_TYPE]["example"] = {"model": name, "input": "Once there was"}  # type: ignore[index]
    done = {"description": "a vector of each text", "content": {JSON_TYPE: {"schema": ref(EmbeddingList)}}}
    embed = {"summary": "Vectors of texts", "requestBody": request, "responses": {"200": done} | failures_of(*ERRORS)}
    schemas = {"Error": ERROR} | answers.schemas(EmbeddingList)
    return finished(f"Reflex, {name}", {PATH: {"post": embed}} | page_paths(), schemas, unguarded)


def _fields(name: str, model: EmbeddingModel, most: int) -> dict[str, Any]:
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "items": within(0, model.vocab_size - 1), "minItems": 1, "maxItems": model.max_model_len}
    most, user = min(most, MOST_PROMPTS), r"^[^\u0000-\u001f\u007f-\u009f]*$"
    several = [{"type": "array", "items": of, "minItems": 1, "maxItems": most} for of in (text, ids)]
    whole = model.dimensions
    dimensions = {"enum": [whole]} if not model.matryoshka else {"enum": sorted({*model.matryoshka, whole})}
    if model.matryoshka == ():
        dimensions = within(1, whole)
    return closed(
        {
            "model": {"const": name},
            "input": {"anyOf": [text, ids, *several]},
            "encoding_format": maybe({"enum": list(FORMATS)}),
            "dimensions": maybe(dimensions),
            "user": maybe({"type": "string", "maxLength": MAX_ID_BYTES, "pattern": user}),
            "truncate_prompt_tokens": maybe({"anyOf": [{"const": -1}, within(1, model.max_model_len)]}),
            "priority": maybe({"enum": list(PRIORITIES)}),
            "deadline_ms": maybe({"type": "number", "exclusiveMinimum": 0, "maximum": 600_000}),
        },
        "model",
        "input",
    )
