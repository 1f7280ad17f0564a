"""Messages of runtime processes: params and results of each method, and notifications of streams.

The engine uses `SamplingParams` and `GenerateParams`, too. docs/workers.md shows every message. An older end ignores
fields that a newer one adds.
"""

from __future__ import annotations

from math import inf, ulp
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import PRIORITIES
from reflex_runtime.ipc.frames import RpcError

LONGEST_ID = 200  # characters
MOST_LOGPROBS = 20
MOST_STOPS = 16
MOST_STOP_IDS = 256
MOST_BIASED = 1024
MOST_FORM = 200_000  # characters of a schema, expression or grammar


class Constraint(msgspec.Struct, frozen=True):
    """The form of an output. text: a JSON Schema, a regular expression, a JSON list of the possible texts, or a grammar
    in Lark's notation."""

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str

    def __post_init__(self) -> None:
        if not 0 < len(self.text) <= MOST_FORM:
            raise ConfigError(f"{self.kind}: has {len(self.text)} characters, must have 1 to {MOST_FORM}")


Ranges = dict[str, tuple[float, float, str]]  # of fields, if they are not None: least, most, and the rule in words


class SamplingParams(msgspec.Struct, frozen=True):
    """How output is sampled, and when it ends. Raises ConfigError that names the field, its value and its range.

    max_tokens: most tokens of output. temperature: 0 takes the likeliest token. top_p: sample from the likeliest tokens
    that together have this probability. top_k: from the k likeliest; 0 is off. min_p: from tokens whose probability is
    at least this share of the likeliest's. seed: None draws one. stop: texts before which the output ends, or after
    which with include_stop. stop_token_ids: tokens with which it ends. min_tokens: it does not end before. ignore_eos:
    it does not end with the model's end tokens. logprobs: how many alternatives to report for each token, from the
    model's own distribution; 0 reports only the token's own logprob, None nothing.

    Changes of the logits: repetition_penalty divides those of tokens in the prompt or the output (negative ones are
    multiplied); frequency_penalty is subtracted for each occurrence in the output, presence_penalty once; logit_bias,
    pairs of (id, number), is added. constraint: only tokens that fit the form remain.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    constraint: Constraint | None = None

    ranges: ClassVar[Ranges] = {
        "max_tokens": (1, inf, "must be >= 1 token"),
        "temperature": (0.0, 2.0, "must be in [0, 2]"),
        "top_p": (ulp(0.0), 1.0, "must be in (0, 1]"),
        "top_k": (0, inf, "must be >= 0, where 0 is off"),
        "seed": (-(1 << 63), (1 << 64) - 1, "must fit 64 bits"),
        "logprobs": (0, MOST_LOGPROBS, f"must be in [0, {MOST_LOGPROBS}]"),
        "min_p": (0.0, 1.0, "must be in [0, 1]"),
        "presence_penalty": (-2.0, 2.0, "must be in [-2, 2]"),
        "frequency_penalty": (-2.0, 2.0, "must be in [-2, 2]"),
        "repetition_penalty": (0.01, 100.0, "must be in [0.01, 100], where 1 is off"),
    }

    def __post_init__(self) -> None:
        for name, (low, high, rule) in self.ranges.items():
            value = getattr(self, name)
            _check(name, value, value is None or low <= value <= high, rule)
        stop = self.stop if isinstance(self.stop, str) else list(self.stop)
        well = isinstance(stop, list) and len(stop) <= MOST_STOPS and all(0 < len(text) <= 1000 for text in stop)
        _check("stop", stop, well, f"must be at most {MOST_STOPS} texts of 1 to 1000 characters")
        least, most = self.min_tokens, self.max_tokens
        _check("min_tokens", least, 0 <= least <= most, f"must be in [0, max_tokens={most}]")
        self._check_ids()

    def _check_ids(self) -> None:
        """Check token ids without a model; `Limits.check_sampling` checks them against its vocabulary."""
        well = len(self.stop_token_ids) <= MOST_STOP_IDS and all(0 <= token < 1 << 31 for token in self.stop_token_ids)
        _check("stop_token_ids", list(self.stop_token_ids), well, f"must be at most {MOST_STOP_IDS} token ids")
        bias = self.logit_bias
        well = len(bias) <= MOST_BIASED and all(0 <= token < 1 << 31 and -100.0 <= by <= 100.0 for token, by in bias)
        _check("logit_bias", dict(bias), well, f"must be at most {MOST_BIASED} ids, each with a number in [-100, 100]")

    @classmethod
    def greedy(cls, max_tokens: int = 16, **more: Any) -> Self:
        """Parameters that always take the likeliest token."""
        return cls(max_tokens=max_tokens, temperature=0.0, **more)


def _check(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value!r:.200}: {rule}")


INFO, STATE, METRICS, LIVE = "runtime/info", "runtime/state", "runtime/metrics", "runtime/live"
LOAD, CHECK_DRAFT = "load_model", "check_draft"
GENERATE, BATCH_GENERATE, CANCEL, SHUTDOWN = "generate", "batch_generate", "cancel", "shutdown"
CHUNK, STATS, EVENT, CREDIT = "stream.chunk", "stream.stats", "stream.event", "stream.credit"
PROMPT = "stream.prompt"

PROTOCOL = 1  # in runtime/info; other numbers are refused

EventName = Literal["completed", "cancelled", "error", "backpressure", "slowConsumer"]
TERMINAL: frozenset[str] = frozenset({"completed", "cancelled", "error"})

WINDOW = 64  # tokens that a stream may by default be ahead of its reader
MOST_CREDITS = 1_000_000  # tokens that one message may grant
MOST_SCORES = 1 << 19  # numbers for the tokens of a prompt: about 40 MB of JSON


def check_name(field: str, name: object) -> None:
    """Raise ConfigError unless it can be the name of a stream or a model."""
    if not (isinstance(name, str) and 0 < len(name) <= LONGEST_ID and name.isprintable()):
        raise ConfigError(f"{field}={name!r:.220}: must be 1 to {LONGEST_ID} printable characters")


class Info(msgspec.Struct):
    """The result of `runtime/info`. capabilities: optional methods, such as `batch_generate`."""

    name: str
    version: str
    protocol: int
    pid: int
    capabilities: list[str]


class LoadModel(msgspec.Struct):
    """Params of `load_model`. path: the model's directory. options: settings of `reflex serve MODEL_DIR`, by name."""

    model_id: str
    path: str = ""
    options: dict[str, Any] = {}


class GenerateParams(SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    """Params of `generate`, and of each request of `batch_generate`: what the engine needs for one choice.

    stream_id: unique among live streams. adapter: "" for none. Exactly one of `prompt`, `prompt_token_ids`, `messages`
    is set. traceparent: of the request's span, if sampled. timeout_ms: until the first token. max_gap_ms: between two
    tokens. prompt_logprobs: how many alternatives to report for each token of the prompt; None reports nothing.
    prompt_only: the one token of output is computed, and not sent, so that it needs no room in the context.
    follows: a stream with the same prompt; this request waits until that one has computed it. credits: tokens that may
    be sent before a `stream.credit`. draft_model, guidance: for other runtimes; requests that differ in them share no
    message.
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
    prompt_only: bool = False
    follows: str | None = None
    credits: int = WINDOW
    draft_model: str | None = None
    guidance: dict[str, Any] | None = None

    ranges: ClassVar[Ranges] = {
        **SamplingParams.ranges,
        "credits": (1, MOST_CREDITS, f"must be in [1, {MOST_CREDITS}] tokens"),
        "max_gap_ms": (1, 60_000, "must be in [1, 60000]"),
        "prompt_logprobs": SamplingParams.ranges["logprobs"],
    }

    @classmethod
    def of(cls, params: SamplingParams, **more: Any) -> GenerateParams:
        """A request with these sampling parameters."""
        return cls(**{name: getattr(params, name) for name in SamplingParams.__struct_fields__}, **more)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("prompt_only", self.prompt_only, not self.prompt_only or self.max_tokens == 1, "needs max_tokens=1")
        if self.priority not in PRIORITIES:
            raise ConfigError(f"priority={self.priority!r:.220}: must be one of {', '.join(PRIORITIES)}")


class BatchGenerate(msgspec.Struct):
    """Params of `batch_generate`. Each request is decoded separately, so that a wrong one fails alone."""

    requests: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=1024)]


class Started(msgspec.Struct):
    """The result of `generate`: the stream has begun."""

    stream_id: str
    prompt_tokens: int


class Item(msgspec.Struct):
    """The result of one request of a batch."""

    success: bool
    result: Started | None = None
    error: RpcError | None = None


class BatchResult(msgspec.Struct):
    """The result of `batch_generate`. results: in the order of its requests. size: number of requests. groups: the same
    by model and draft model. duration_ms: until all were started."""

    results: list[Item]
    size: int = 0
    groups: dict[str, int] = {}
    duration_ms: float = 0.0


class StreamId(msgspec.Struct):
    """Params of `cancel`. Result: {"cancelled": whether there was such a stream}."""

    stream_id: str


class Shutdown(msgspec.Struct):
    """Params of `shutdown`. drain: streams may finish within `timeout_s` seconds."""

    drain: bool = True
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 10.0


class TokenOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One token of output.

    text: that is certain with it; empty while a character is incomplete or the text may begin a stop text. top: the
    likeliest (id, logprob), if requested. held: characters of earlier tokens that were not sent before. finish: None,
    or why it is the last: `stop` (end of sequence, stop token, stop text, complete form) or `length`.
    """

    text: str
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    held: int = 0
    finish: str | None = msgspec.field(default=None, name="finish_reason")


class StreamChunk(msgspec.Struct):
    """`stream.chunk`: new tokens of a stream."""

    stream_id: str
    tokens: list[TokenOutput]
    is_final: bool


class ScoredToken(msgspec.Struct, frozen=True, array_like=True):
    """A token that was sampled or is in a prompt, with natural logarithms of the model's own probabilities at
    temperature 1. top: the likeliest (id, logprob), best first. None and () if not requested."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class StreamPrompt(msgspec.Struct):
    """`stream.prompt`: scores of the next tokens of the prompt, which begin with its second. All of them come before
    the first `stream.chunk` of the stream and of its followers."""

    stream_id: str
    tokens: list[ScoredToken]


class StreamStats(msgspec.Struct):
    """`stream.stats`, sent once, before the terminal event. ttft_ms: time to the first token; None without a token."""

    stream_id: str
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    duration_ms: float
    cached_tokens: int = 0


class StreamEvent(msgspec.Struct, omit_defaults=True):
    """`stream.event`. The last message of a stream is its one terminal event (completed, cancelled, error).
    backpressure: it is held until its reader reads. slowConsumer: it was held too long, and ends."""

    stream_id: str
    event: EventName
    error: RpcError | None = None


class Credit(msgspec.Struct):
    """`stream.credit`, from the server: further tokens that may be sent."""

    stream_id: str
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_CREDITS)]
