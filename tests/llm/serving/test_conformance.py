"""docs/model-apis.md: each field of the five APIs is sent to a server, and stands in the table as it is answered.

A field that a new version of a client knows has no sample here: the test says so, and asks for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from reflex_runtime.llm.api.fields import CHAT, TEXT
from reflex_runtime.llm.api.messages import MESSAGE
from reflex_runtime.llm.api.responses import RESPONSE
from serving.openai_toy import Toy

PAGE = Path(__file__).parents[3] / "docs" / "model-apis.md"
WORKS, NOTHING, HINT, REFUSED = "works", "no effect", "hint", "refused"
FUNCTION: Final = {"name": "move", "parameters": {"type": "object"}}
FORM: Final = {"type": "json_object"}
CALL: Final = {"tools": [{"type": "function", "function": FUNCTION}]}


class Api(NamedTuple):
    """path: of the endpoint. least: what a request must say. client, ours: the class of its fields in the client, and
    of those that are read here. samples: values that mean something where others would not fit; those of `SAMPLES`
    otherwise."""

    path: str
    least: dict[str, Any]
    client: str
    ours: Any
    samples: dict[str, Any]

    @property
    def known(self) -> frozenset[str]:
        """Fields of the client, and those that are read here."""
        module, _, name = self.client.rpartition(".")
        theirs = getattr(import_module(module), name)
        return frozenset(theirs.__annotations__) | frozenset(self.ours.__struct_fields__)


HI: Final = [{"role": "user", "content": "hi"}]
APIS: Final = {
    "chat completions": Api(
        "/v1/chat/completions",
        {"model": "toy", "messages": HI, "max_tokens": 2},
        "openai.types.chat.completion_create_params.CompletionCreateParamsNonStreaming",
        CHAT.kind,
        {"logprobs": True, "top_logprobs": {"top_logprobs": 2, "logprobs": True}},
    ),
    "completions": Api(
        "/v1/completions",
        {"model": "toy", "prompt": "hi", "max_tokens": 2},
        "openai.types.completion_create_params.CompletionCreateParamsNonStreaming",
        TEXT.kind,
        {"best_of": 2},
    ),
    "responses": Api(
        "/v1/responses",
        {"model": "toy", "input": "hi", "max_output_tokens": 2},
        "openai.types.responses.response_create_params.ResponseCreateParamsNonStreaming",
        RESPONSE.kind,
        {
            "metadata": {"a": "b"},
            "prompt": {"id": "p"},
            "tools": [{"type": "function"} | FUNCTION],
            "tool_choice": {"tools": [{"type": "function"} | FUNCTION], "tool_choice": "required"},
            "parallel_tool_calls": {"tools": [{"type": "function"} | FUNCTION], "parallel_tool_calls": False},
            "top_logprobs": 2,
            "stream_options": {"stream": True, "stream_options": {"include_obfuscation": True}},
        },
    ),
    "messages": Api(
        "/v1/messages",
        {"model": "toy", "messages": HI, "max_tokens": 2},
        "anthropic.types.message_create_params.MessageCreateParamsNonStreaming",
        MESSAGE.kind,
        {
            "metadata": {"user_id": "me"},
            "service_tier": "priority",
            "tools": [{"name": "move", "input_schema": {"type": "object"}}],
            "tool_choice": {
                "tools": [{"name": "move", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"},
            },
        },
    ),
}  # fmt: skip
SAMPLES: Final[dict[str, Any]] = {
    "access_programs": {"x": 1},
    "audio": {"voice": "alloy", "format": "wav"},
    "background": True,
    "background_options": {"x": 1},
    "cache_control": {"type": "ephemeral"},
    "chat_template_kwargs": {"level": 1},
    "container": "c",
    "client_metadata": {"x": "y"},
    "context_management": [{"type": "compaction"}],
    "conversation": "c",
    "deadline_ms": 60_000,
    "diagnostics": {"x": 1},
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": {"name": "move"},
    "functions": [FUNCTION],
    "ignore_eos": True,
    "image": {"x": 1},
    "include": ["message.output_text.logprobs"],
    "include_stop_str_in_output": True,
    "inference_geo": "eu",
    "instructions": "be brief",
    "logit_bias": {"97": 1},
    "logprobs": 2,
    "max_completion_tokens": 2,
    "max_gap_ms": 500,
    "max_tool_calls": 2,
    "mcp_servers": [{"url": "x"}],
    "metadata": {"a": "b"},
    "min_p": 0.1,
    "min_tokens": 1,
    "modalities": ["audio"],
    "moderation": {"mode": "score"},
    "n": 2,
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "parallel_tool_calls": CALL | {"parallel_tool_calls": False},
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5,
    "previous_response_id": "r",
    "priority": "urgent",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "high"},
    "reasoning_effort": "high",
    "repetition_penalty": 1.1,
    "response_format": FORM,
    "safety_identifier": "me",
    "seed": 3,
    "service_tier": "flex",
    "speed": "fast",
    "stop": "x",
    "stop_sequences": ["x"],
    "stop_token_ids": [97],
    "store": True,
    "stream": True,
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "structured_outputs": {"choice": ["a", "b"]},
    "suffix": "x",
    "system": "be brief",
    "temperature": 0.5,
    "text": {"format": FORM},
    "thinking": {"type": "disabled"},
    "tool_choice": CALL | {"tool_choice": "required"},
    "tools": CALL["tools"],
    "top_k": 3,
    "top_p": 0.5,
    "truncation": "auto",
    "user": "me",
    "user_profile_id": "u",
    "verbosity": "low",
    "web_search_options": {"x": 1},
    "workspace_id": "w",
}
# Taken, because it says nothing about the answer: of caches that every prompt goes through here, and of bookkeeping.
WITHOUT_EFFECT: Final = frozenset(
    {
        ("responses", "stream_options"),
        *((api, "cache_control") for api in APIS),
        *((api, f"prompt_cache_{of}") for api in APIS for of in ("key", "options", "retention")),
    }
)


@pytest.fixture(scope="module")
def toy() -> Iterator[Toy]:
    with Toy() as server:
        yield server


def answered(toy: Toy, name: str, field: str) -> str:
    """What a field is answered with."""
    api = APIS[name]
    if field in api.least:
        return WORKS
    sample = api.samples.get(field, SAMPLES.get(field))
    assert sample is not None, f"{api.path} {field}: the client knows it; add a value that means something to SAMPLES"
    asked = sample if isinstance(sample, dict) and field in sample else {field: sample}
    answer = toy.post(api.path, api.least | asked)
    if answer.status == 200:
        hints = answer.headers.get("x-reflex-ignored", "")
        return HINT if hints.startswith(field) else NOTHING if (name, field) in WITHOUT_EFFECT else WORKS
    error = answer.json["error"]
    assert answer.status == 400, (field, answer.body)
    assert error["message"].startswith(field), (field, error)
    return REFUSED


def table(toy: Toy) -> str:
    """Fields that are answered alike share a row; those that every API has come first."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for field in sorted(frozenset[str]().union(*(api.known for api in APIS.values()))):
        cells = [answered(toy, name, field) if field in api.known else "–" for name, api in APIS.items()]
        alike.setdefault(tuple(cells), []).append(f"`{field}`")
    rows = [f"| field | {' | '.join(APIS)} |", "| --- " * (1 + len(APIS)) + "|"]
    order = sorted(alike, key=lambda row: (row.count("–"), row))
    rows += [f"| {', '.join(alike[row])} | {' | '.join(row)} |" for row in order]
    return "\n".join(rows)


def test_l9_every_field_of_the_apis_stands_in_the_table_as_it_is_answered(toy: Toy) -> None:
    found = table(toy)
    assert found in PAGE.read_text("utf-8"), f"the table is now:\n{found}"


def test_l9_a_field_of_no_api_is_refused_by_all(toy: Toy) -> None:
    for api in APIS.values():
        answer = toy.post(api.path, api.least | {"temprature": 1})
        assert answer.status == 400
        assert answer.json["error"]["message"].startswith("temprature: ")


def test_l9_the_document_names_no_field_that_is_refused(toy: Toy) -> None:
    schemas = toy.get("/openapi.json").json["components"]["schemas"]
    named = [(name, field) for name, api in APIS.items() for field in schemas[api.ours.__name__]["properties"]]
    assert len(named) > 100
    assert [one for one in named if one[1] in APIS[one[0]].known and answered(toy, *one) == REFUSED] == []
