"""The spans of the requests to a language model's server, with the GenAI semantic conventions of OpenTelemetry.

https://opentelemetry.io/docs/specs/semconv/gen-ai/. Prompts and completions are never in a span.
"""

from __future__ import annotations

import time
from typing import Final

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.events import RequestAnswered
from reflex_runtime.llm.api.replies import Usage, Writer
from reflex_runtime.llm.api.requests import CompletionRequest
from reflex_runtime.observe.spans import RequestSpan, Spans
from reflex_runtime.observe.trace_context import Attribute, follow
from reflex_runtime.web.request import HttpRequest

WIRE: Final = "openai"
FIRST_TOKEN: Final = "gen_ai.first_token"  # a moment
_PROVIDER: Final = "reflex"


class GenerationSpans:
    """Makes the spans of the requests to a server's model. All of it happens on the event loop. model: its name."""

    def __init__(self, spans: Spans, model: str) -> None:
        self._spans, self._model = spans, model

    def begin(self, request: HttpRequest) -> RequestSpan:
        """The span of a request that is being answered in this task."""
        span = self._begun(request)
        follow(span.context)
        return span

    def _begun(self, request: HttpRequest) -> RequestSpan:
        route = "" if request.route is None else request.route.path
        operation = "text_completion" if route == "/v1/completions" else "chat"
        span = self._spans.begin(f"{operation} {self._model}", request.headers)
        span.attributes |= {
            "http.request.method": request.method,
            "http.route": route,
            "reflex.wire": WIRE,
            "reflex.request.id": request.request_id,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.response.model": self._model,
        }
        return span

    def used(self, span: RequestSpan, request: HttpRequest, usage: Usage) -> None:
        """What it took, also of a request that failed."""
        span.attributes |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
        }
        if span.moments:
            span.attributes["gen_ai.response.time_to_first_chunk"] = span.moments[0][1] - request.started

    def answered(self, request: HttpRequest, span: RequestSpan, answer: Writer) -> None:
        """It has its whole answer."""
        told: dict[str, Attribute] = {"id": answer.id, "finish_reasons": answer.finish_reasons}
        span.attributes |= {f"gen_ai.response.{name}": value for name, value in told.items()}
        self.ended(request, span, None)

    def failed(self, request: HttpRequest, error: ReflexError) -> None:
        """It is refused before it was read."""
        self.ended(request, self._begun(request), error)

    def ended(self, request: HttpRequest, span: RequestSpan, error: ReflexError | None) -> None:
        """It has its answer, or an error."""
        now = time.monotonic()
        outcome, status = ("ok", 200) if error is None else (error.outcome, error.http_status)
        span.attributes["http.response.status_code"] = 200 if request.begun else status
        received = request.received or now
        model, latency = str(span.attributes["gen_ai.response.model"]), now - request.started
        self._spans(
            RequestAnswered(now, model, outcome, status, latency, None, None, now - received, WIRE, error, span)
        )


def asked_in(span: RequestSpan, asked: CompletionRequest) -> None:
    """What a request asks for, without its texts."""
    params = asked.params
    span.name = f"{span.attributes['gen_ai.operation.name']} {asked.model}"
    span.attributes["gen_ai.response.model"] = asked.model
    found: dict[str, Attribute] = {
        "gen_ai.request.model": asked.model,
        "gen_ai.request.stream": asked.stream,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    if asked.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = asked.max_tokens
    if params.top_k:
        found["gen_ai.request.top_k"] = params.top_k
    if params.seed is not None and -(1 << 63) <= params.seed < 1 << 63:  # what an attribute can have
        found["gen_ai.request.seed"] = params.seed
    if asked.n > 1:
        found["gen_ai.request.choice.count"] = asked.n
    span.attributes |= found


def first_token(span: RequestSpan | None) -> None:
    """A part of the answer has come; the first one is noted."""
    if span is not None and not span.moments:
        span.moments = ((FIRST_TOKEN, time.monotonic()),)

