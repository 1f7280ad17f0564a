"""The messages of a runtime process: params and results of each method, and the notifications of streams.

docs/workers.md shows every one of them. An older end ignores fields that a newer one adds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import PRIORITIES
from reflex_runtime.ipc.frames import RpcError
from reflex_runtime.ipc.sampling import MOST_LOGPROBS, SamplingParams

INFO, STATE, METRICS, LIVE = "runtime/info", "runtime/state", "runtime/metrics", "runtime/live"
LOAD, UNLOAD, TOKENIZE = "load_model", "unload_model", "tokenize"
GENERATE, BATCH_GENERATE, CANCEL, SHUTDOWN = "generate", "batch_generate", "cancel", "shutdown"
CHECK_DRAFT = "check_draft"
CHUNK, STATS, EVENT, CREDIT = "stream.chunk", "stream.stats", "stream.event", "stream.credit"
PROMPT = "stream.prompt"

DRAFT, GUIDANCE = "draft", "guidance"  # capabilities
NGRAM = "ngram"  # the draft model that looks up what was said before

PROTOCOL = 1  # in runtime/info; other numbers are refused

EventName = Literal["completed", "cancelled", "error", "backpressure", "slowConsumer"]
TERMINAL: frozenset[str] = frozenset({"completed", "cancelled", "error"})

WINDOW = 64  # tokens that a stream may be ahead of its reader, unless its request says otherwise
MOST_CREDITS = 1_000_000  # at a time
MOST_SCORES = 1 << 19  # numbers that are told of the tokens of a prompt: some 40 MB of JSON
SHORTEST_GAP_MS, LONGEST_GAP_MS = 1, 60_000  # between two tokens


class Info(msgspec.Struct):
    """The result of `runtime/info`. codecs: those that the process reads. capabilities: optional methods and features,
    such as `batch_generate`. models: the answer of `load_model` for each loaded model, by id."""

    name: str
    version: str
    protocol: int
    pid: int
    codecs: list[str]
    capabilities: list[str]
    models: dict[str, dict[str, Any]] = {}


class LoadModel(msgspec.Struct):
    """Params of `load_model`. path: the model's directory. options: settings of `reflex serve MODEL_DIR`, by name.
    only: `tokenizer` loads just the tokenizer, for `tokenize`."""

    model_id: str
    path: str = ""
    options: dict[str, Any] = {}
    only: Literal["", "tokenizer"] = ""


class UnloadModel(msgspec.Struct):
    """Params of `unload_model`. Streams of the model end with `error`."""

    model_id: str


class Tokenize(msgspec.Struct):
    """Params of `tokenize`: a text, or a conversation for the model's chat template, with tools that the model may call
    and further variables of the template. most: more tokens are an error. Result: {"token_ids": [...]}."""

    model_id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    template_kwargs: dict[str, Any] = {}
    most: int | None = None


class GenerateParams(SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    """Params of `generate`, and one of those of `batch_generate`: a request from the front to the engine.

    stream_id: unique among the streams that have not ended. adapter: the name of one that is loaded with the model, ""
    for none. prompt: one of `prompt`, `prompt_token_ids`, `messages`.
    traceparent: of the request's span, where it is recorded. timeout_ms: until the first token; max_gap_ms: between
    two. prompt_logprobs: how many alternatives to report for each token of the prompt, None for nothing. follows: a
    stream with the same prompt; this request waits until that stream has computed, and told of, it. credits: tokens
    that may be sent before `stream.credit` grants more. draft_model: what guesses the next tokens; `ngram` looks up
    what was said before. draft_token_ids: what the output is expected to begin with. guidance: see `guided`. They need
    the capabilities `draft` and `guidance`.
    """

    stream_id: str = ""
    model_id: str = ""
    adapter: str = ""
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    priority: str = "default"
    client: str = ""
    request_id: str = ""
    traceparent: str = ""
    timeout_ms: float | None = None
    max_gap_ms: float | None = None
    prompt_logprobs: int | None = None
    follows: str | None = None
    credits: int = WINDOW
    draft_model: str | None = None
    draft_token_ids: list[int] | None = None
    guidance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.priority not in PRIORITIES:
            raise ConfigError(f"priority={self.priority!r:.220}: must be one of {', '.join(PRIORITIES)}")
        if not 1 <= self.credits <= MOST_CREDITS:
            raise ConfigError(f"credits={self.credits!r}: must be in [1, {MOST_CREDITS}] tokens")
        gap, low, high = self.max_gap_ms, SHORTEST_GAP_MS, LONGEST_GAP_MS
        if gap is not None and not low <= gap <= high:
            raise ConfigError(f"max_gap_ms={gap!r}: must be in [{low}, {high}] or absent")
        told = self.prompt_logprobs
        if told is not None and not 0 <= told <= MOST_LOGPROBS:
            raise ConfigError(f"prompt_logprobs={told!r}: must be in [0, {MOST_LOGPROBS}] or absent")


class CheckDraft(msgspec.Struct):
    """Params of `check_draft`: whether the model would say these tokens behind the prompt; or, without them, whether
    `draft_model` can guess for the model."""

    model_id: str
    draft_model: str = NGRAM
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    draft_token_ids: list[int] = []


class CheckedDraft(msgspec.Struct):
    """The result of `check_draft`. compatible: whether the pair can be asked for; reason: why not. accepted: how many
    tokens of the draft, from its beginning, are the likeliest ones. token_ids: those, and the one that comes next."""

    compatible: bool
    reason: str = ""
    accepted: int = 0
    token_ids: list[int] = []


class BatchGenerate(msgspec.Struct):
    """Params of `batch_generate`. Each request is decoded by itself: a wrong one fails alone."""

    requests: list[msgspec.Raw]


class Started(msgspec.Struct):
    """The result of `generate`: the stream has begun, and its notifications follow."""

    stream_id: str
    prompt_tokens: int


class Item(msgspec.Struct):
    """The result of one request of a batch."""

    success: bool
    result: Started | None = None
    error: RpcError | None = None


class BatchResult(msgspec.Struct):
    """The result of `batch_generate`, in the order of its requests. groups: requests by model and draft model.
    duration_ms: from its arrival until all were started."""

    results: list[Item]
    size: int = 0
    groups: dict[str, int] = {}
    duration_ms: float = 0.0


class StreamId(msgspec.Struct):
    """Params of `cancel`. Result: {"cancelled": whether there was such a stream}."""

    stream_id: str


class Shutdown(msgspec.Struct):
    """Params of `shutdown`. drain: let streams finish, for at most `timeout_s` seconds."""

    drain: bool = True
    timeout_s: float = 10.0


class Token(msgspec.Struct, omit_defaults=True):
    """One token of output. text: the text to send with it. top: the likeliest (id, logprob), with `logprobs`. held:
    characters of earlier tokens that are sent only now. finish: why it is the last."""

    text: str
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    held: int = 0
    finish: str | None = msgspec.field(default=None, name="finish_reason")


class StreamChunk(msgspec.Struct):
    """`stream.chunk`: new tokens of a stream."""

    stream_id: str
    tokens: list[Token]
    is_final: bool


class PromptToken(msgspec.Struct, array_like=True):
    """One token of a prompt that was scored. top: the likeliest (id, logprob)."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class StreamPrompt(msgspec.Struct):
    """`stream.prompt`: what the model says of the next tokens of the prompt, from its second on. All of them come
    before the first `stream.chunk` of the stream, and of those that follow it."""

    stream_id: str
    tokens: list[PromptToken]


class StreamStats(msgspec.Struct):
    """`stream.stats`, once, before the terminal event. ttft_ms: None when there was no token."""

    stream_id: str
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    duration_ms: float
    cached_tokens: int = 0


class StreamEvent(msgspec.Struct, omit_defaults=True):
    """`stream.event`. A stream has exactly one terminal event (completed, cancelled, error), its last message.
    backpressure: the stream is held until its reader reads. slowConsumer: it was held too long and ends."""

    stream_id: str
    event: EventName
    error: RpcError | None = None


class Credit(msgspec.Struct):
    """`stream.credit`, from the front: the number of further tokens that the stream may send."""

    stream_id: str
    tokens: int
