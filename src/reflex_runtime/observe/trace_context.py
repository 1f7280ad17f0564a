"""Spans and their ids, and W3C Trace Context: what callers say of the trace that their request belongs to.

https://www.w3.org/TR/trace-context/. A header that is not as the standard has it counts as none: a request is never
refused for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

MOST_PARENT: Final = 256  # bytes of traceparent; version 00 has 55, a later version may have more
MOST_STATE: Final = 512  # bytes of tracestate, and
MOST_MEMBERS: Final = 32  # of its members: a longer one is dropped, the trace is not
_current: ContextVar[SpanContext | None] = ContextVar("reflex_span", default=None)
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
_MEMBER = re.compile(rb"[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")

Attribute = str | bool | int | float | list[str]


class SpanContext(NamedTuple):
    """A span by its ids, as others refer to it. trace_id: 128 bits; span_id: 64 bits; neither is 0.

    sampled: whether it is recorded. state: the tracestate that came with it, checked.
    """

    trace_id: int
    span_id: int
    sampled: bool = True
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The header that makes it the parent of what is asked with it."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"


class Span(NamedTuple):
    """A span that has ended, as it is sent. It holds no payload.

    parent: a span id, 0 without. server: it answers a caller. error: why it failed, None where it did not; a caller's
    own mistake or cancellation is no failure. moments: (name, time). links: the spans it refers to.
    """

    name: str
    context: SpanContext
    parent: int
    server: bool
    start: float
    end: float
    attributes: dict[str, Attribute]
    error: str | None = None
    moments: tuple[tuple[str, float], ...] = ()
    links: tuple[SpanContext, ...] = ()


def parent_in(headers: Mapping[bytes, bytes]) -> SpanContext | None:
    """The span that a request names as its parent; None without a valid one. Names of headers are in lower case."""
    sent = headers.get(b"traceparent")
    return None if sent is None else parent_of(sent, headers.get(b"tracestate", b""))


def parent_of(traceparent: bytes, tracestate: bytes = b"") -> SpanContext | None:
    """The same from the values of the two headers."""
    if len(traceparent) > MOST_PARENT:
        return None
    found = _PARENT.fullmatch(traceparent.strip(b" \t"))
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5] is not None):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not (trace_id and span_id):
        return None
    return SpanContext(trace_id, span_id, bool(int(found[4], 16) & 1), _state(tracestate))


def _state(sent: bytes) -> str:
    """A tracestate in its plain form; empty where it is wrong or too long."""
    if not sent or len(sent) > MOST_STATE:
        return ""
    members = [member for part in sent.split(b",") if (member := part.strip(b" \t"))]
    keys = {member.partition(b"=")[0] for member in members}
    if len(members) > MOST_MEMBERS or len(keys) != len(members) or not all(map(_MEMBER.fullmatch, members)):
        return ""
    return b",".join(members).decode("ascii")


def current_span() -> SpanContext | None:
    """The span of the request that this code runs for, where it is known; for lines of the log."""
    return _current.get()


def follow(span: SpanContext) -> None:
    """From now on what this task logs belongs to the request."""
    _current.set(span)


@contextmanager
def within(span: SpanContext) -> Iterator[None]:
    """What is logged in between belongs to this request."""
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)
