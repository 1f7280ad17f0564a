"""How a request for tokens is served, beside what it asks for: who asks, how soon, and what else is told or used."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from reflex_runtime.core.request import Priority
from reflex_runtime.observe.trace_context import SpanContext


@dataclass(frozen=True, slots=True)
class Terms:
    """What goes with a prompt and its sampling parameters, from an API to the engine.

    id: for people and traces; "" lets the engine name it. priority, client: see `Request`. time_limit: seconds until
    the first token; max_gap: between two of them. span: steps refer to it. adapter: the name of one of the runner's, ""
    for none. draft: guess the output, as these tokens first; None guesses as configured. prompt_logprobs: report what
    the model says of the prompt's own tokens, each with so many alternatives; see `Sequence.score`.
    """

    id: str = ""
    priority: Priority = Priority.DEFAULT
    client: Hashable = ""
    time_limit: float | None = None
    max_gap: float | None = None
    span: SpanContext | None = None
    adapter: str = ""
    draft: Sequence[int] | None = None
    prompt_logprobs: int | None = None


PLAIN = Terms()
