"""Tracing without OpenTelemetry's packages: whether `--otel` can be used, and the span that log lines belong to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal, Protocol

from prometheus_client import CollectorRegistry

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.extras import not_installed

if TYPE_CHECKING:
    from reflex_runtime.observe.spans import Spans

_NEEDED: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class SpanIds(Protocol):
    """The ids of a span. trace_id: 128 bits. span_id: 64 bits."""

    @property
    def trace_id(self) -> int: ...
    @property
    def span_id(self) -> int: ...


_current: ContextVar[SpanIds | None] = ContextVar("reflex_span", default=None)


def current_span() -> SpanIds | None:
    """The span of the request that this code runs for, if known; log lines carry its ids."""
    return _current.get()


def follow(span: SpanIds) -> None:
    """Let the rest of this task belong to the span: log lines have its ids."""
    _current.set(span)


@contextmanager
def within(span: SpanIds) -> Iterator[None]:
    """A block of code that belongs to the span: log lines have its ids."""
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)


def check_otel(endpoint: str) -> None:
    """ConfigError if the packages for `--otel` are missing, or the environment has a share that is not a number."""
    if not endpoint:
        return
    try:
        installed = all(map(find_spec, _NEEDED))
    except ModuleNotFoundError:  # the package around it is missing
        installed = False
    if not installed:
        raise not_installed("opentelemetry", "--otel")
    given = os.environ.get("OTEL_TRACES_SAMPLER_ARG", "1")
    try:
        valid = 0.0 <= float(given) <= 1.0
    except ValueError:
        valid = False
    if not valid and os.environ.get("OTEL_TRACES_SAMPLER", "").endswith("traceidratio"):  # the SDK would record all
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG={given:.99}: must be a number in [0, 1]")


def spans_of(
    endpoint: str, registry: CollectorRegistry, of: Literal["requests", "steps", "frames"] = "requests"
) -> Spans | None:
    """The spans of a server, sent to this collector; None without one. registry: for their series. of: what has a
    span; see `spans.KINDS`."""
    if not endpoint:
        return None
    check_otel(endpoint)
    from reflex_runtime.observe.spans import KINDS, SpanExport

    return KINDS[of](SpanExport(endpoint, registry))
