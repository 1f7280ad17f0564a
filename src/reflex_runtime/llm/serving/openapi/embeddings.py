"""What /openapi.json says of embedding models, as strict as their validation.

JSON Schema cannot say how many tokens a text has, that all texts share what may wait, and that token ids are written
without a point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reflex_runtime.core.request import PRIORITIES
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.serving.answers.embeddings import EmbeddingList
from reflex_runtime.llm.serving.openapi.pages import ERRORS, failures_of
from reflex_runtime.llm.serving.openapi.schemas import closed, maybe, model_named, ref, within
from reflex_runtime.llm.serving.requests.embeddings import FORMATS, PATH
from reflex_runtime.llm.serving.requests.fields import MOST_PROMPTS
from reflex_runtime.web.fields import MAX_ID_BYTES
from reflex_runtime.web.json import JSON_TYPE


@dataclass(frozen=True, slots=True)
class DescribedEmbeddings:
    """The embedding models of a document. names: every name; most: texts that may wait, of each model; limits: each
    model. What all of them take is described."""

    names: Sequence[str]
    most: Sequence[int]
    limits: Sequence[EmbeddingModel]


def embedding_paths(models: DescribedEmbeddings, named: bool) -> tuple[dict[str, Any], type]:
    """What embedding models are asked, and the kind of its answer. named: whether it may name them."""
    request = {"required": True, "content": {JSON_TYPE: {"schema": _fields(models, named)}}}
    example = {"model": models.names[0] if named else "MODEL", "input": "Once there was"}
    request["content"][JSON_TYPE]["example"] = example  # type: ignore[index]
    done = {"description": "a vector of each text", "content": {JSON_TYPE: {"schema": ref(EmbeddingList)}}}
    embed = {"summary": "Vectors of texts", "requestBody": request, "responses": {"200": done} | failures_of(*ERRORS)}
    return {PATH: {"post": embed}}, EmbeddingList


def _dimensions(each: Sequence[EmbeddingModel]) -> dict[str, Any]:
    """The lengths of vectors that every model takes."""
    if all(model.matryoshka == () for model in each):
        return within(1, min(model.dimensions for model in each))
    lengths = [
        set(range(1, model.dimensions + 1)) if model.matryoshka == () else {*(model.matryoshka or ()), model.dimensions}
        for model in each
    ]
    return {"enum": sorted(set.intersection(*lengths))}


def _fields(models: DescribedEmbeddings, named: bool) -> dict[str, Any]:
    each, text = models.limits, {"type": "string", "minLength": 1}
    longest, vocabulary = min(model.max_model_len for model in each), min(model.vocab_size for model in each)
    ids = {"type": "array", "items": within(0, vocabulary - 1), "minItems": 1, "maxItems": longest}
    most, user = min(*models.most, MOST_PROMPTS), r"^[^\u0000-\u001f\u007f-\u009f]*$"
    several = [{"type": "array", "items": of, "minItems": 1, "maxItems": most} for of in (text, ids)]
    return closed(
        {
            "model": model_named(models.names, named),
            "input": {"anyOf": [text, ids, *several]},
            "encoding_format": maybe({"enum": list(FORMATS)}),
            "dimensions": maybe(_dimensions(each)),
            "user": maybe({"type": "string", "maxLength": MAX_ID_BYTES, "pattern": user}),
            "truncate_prompt_tokens": maybe({"anyOf": [{"const": -1}, within(1, longest)]}),
            "priority": maybe({"enum": list(PRIORITIES)}),
            "deadline_ms": maybe({"type": "number", "exclusiveMinimum": 0, "maximum": 600_000}),
        },
        "model",
        "input",
    )
