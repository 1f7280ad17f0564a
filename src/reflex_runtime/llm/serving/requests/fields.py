"""The fields of OpenAI requests: those that are supported, and those that are known and refused.

`reading.py` makes requests of them. A field of the OpenAI API that is not supported here is refused with its name
if its value would change the answer. An unknown field is always refused. No field is ignored silently.

Beyond theirs, as other servers of open models name them: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`stop_token_ids`, `include_stop_str_in_output`, `ignore_eos`, `structured_outputs`. Ours: `priority` (urgent, default,
background), `deadline_ms` (until the first token), `max_gap_ms` (between two tokens). `user` is the client whose fair
share a request takes. How a request is sampled that does not say it is the model's own default.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from reflex_runtime.llm.serving.requests.forms import ResponseFormat, StructuredOutputs
from reflex_runtime.llm.serving.requests.tool_fields import CalledTool, ChosenTool, ToolField
from reflex_runtime.web.fields import Whole

MOST_CHOICES = 128  # of one prompt
MOST_PROMPTS = 2048  # of one request
MOST_TOKENS = 1 << 20  # of one request, where prompts come as token ids


class MessagePart(msgspec.Struct):
    """A part of a message's content. What else it says is of a type that is not taken."""

    type: str
    text: str | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_obfuscation concerns padding only: it has no effect here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class MoreFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every kind of request may say beyond its API, and a seed."""

    seed: Whole | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Whole | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Literal["urgent", "default", "background"] | None = None
    deadline_ms: float | None = None
    max_gap_ms: float | None = None


def said_as(kind: type[MoreFields], fields: MoreFields) -> dict[str, Any]:
    """What a request says in the fields of that kind."""
    return {name: getattr(fields, name) for name in kind.__struct_fields__}


class SampledFields(MoreFields, kw_only=True):
    """What requests of OpenAI's APIs may say of what is generated, and how. null counts as absent."""

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None


class CommonFields(SampledFields, kw_only=True):
    """What completions and chats may say."""

    n: Whole | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: Whole | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: Whole | None = None


class CompletionFields(CommonFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: msgspec.Raw  # millions of token ids are decoded piece by piece
    logprobs: Whole | None = None
    best_of: Whole | None = None
    echo: bool | None = None
    suffix: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message; what an answer brings along as null may be sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[MessagePart] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatFields(CommonFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    metadata: Any = None
    modalities: list[str] | None = None
    moderation: Any = None
    parallel_tool_calls: bool | None = None
    prediction: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    reasoning_effort: Any = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    tools: list[ToolField] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    verbosity: str | None = None
    web_search_options: Any = None


OF_ANSWERS = ("refusal", "annotations", "audio", "function_call")  # in a message
# Values without effect, of fields that are not supported by any API that knows them. None and empty values have none
# either.
PLAIN: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "audio": (),
    "background": (False,),
    "background_options": (),
    "container": (),
    "context_management": (),
    "conversation": (),
    "diagnostics": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "image": (),
    "include": (),
    "inference_geo": (),
    "max_tool_calls": (),
    "mcp_servers": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "previous_response_id": (),
    "reasoning": ({"effort": None}, {"effort": None, "summary": None}, {"effort": "none"}),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "speed": ("standard",),
    "store": (False,),
    "suffix": (),
    "truncation": ("disabled",),
    "user_profile_id": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "workspace_id": (),
}


def plain_of(kind: type[msgspec.Struct], **own: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """The values of `PLAIN` of the fields of a body. own: of fields that another API supports or knows otherwise."""
    return {name: of for name, of in (PLAIN | own).items() if name in kind.__struct_fields__}
