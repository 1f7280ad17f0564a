"""What the answers of /v1/messages and /v1/responses have in common: one choice, made of thoughts, texts and calls.

A part begins when the first of its text comes and ends before the next one; a call comes whole.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Literal

from reflex_runtime.ipc.engine import Output
from reflex_runtime.llm.engine.reasoning import Thought
from reflex_runtime.llm.engine.tools import ToolCall
from reflex_runtime.llm.serving.answers.replies import Answering, PartReader
from reflex_runtime.web.json import encode

Kind = Literal["thought", "text"]


def event(type: str, **fields: Any) -> bytes:
    """A server-sent event of that type."""
    return b"event: %b\ndata: %b\n\n" % (type.encode(), encode({"type": type, **fields}))


class PartWriter:
    """Reads the parts of an answer's outputs. A subclass makes events of them, and keeps what `whole` tells; without
    a stream its events are dropped."""

    def __init__(self, reply: Answering) -> None:
        self._reply = reply
        self._reader = PartReader() if reply.reader is None else reply.reader()
        self._finish: str | None = None
        self._stopped: str | None = None
        self._thought_tokens = 0
        self._begun = False
        self._kind: Kind | None = None
        self._pieces: list[str] = []

    @property
    def finish_reasons(self) -> list[str]:
        return [] if self._finish is None else [self._finish]

    def chunk(self, index: int, outputs: Seq[Output]) -> bytes:
        """See `Writer.chunk`."""
        events = [] if self._begun else [self._begin()]
        self._begun = True
        for output in outputs:
            self._thought_tokens += self._reader.thinking
            self._finish = output.finish
            events += map(self._take, self._reader.feed(self._shown(output), output.finish is not None))
            if output.finish is not None:
                events.append(self._close())
        return b"".join(events)

    def add(self, index: int, outputs: Seq[Output]) -> None:
        """See `Writer.add`."""
        self.chunk(index, outputs)

    def _event(self, type: str, **fields: Any) -> bytes:
        return event(type, **fields) if self._reply.asked.stream else b""

    def _take(self, part: str | Thought | ToolCall) -> bytes:
        if isinstance(part, ToolCall):
            return self._close() + self._called(part)
        kind: Kind = "thought" if isinstance(part, Thought) else "text"
        before = b"" if kind == self._kind else self._close() + self._opened(kind)
        text = part.text if isinstance(part, Thought) else part
        self._kind = kind
        self._pieces.append(text)
        return before + self._said(kind, text)

    def _close(self) -> bytes:
        kind, text = self._kind, "".join(self._pieces)
        self._kind, self._pieces = None, []
        return b"" if kind is None else self._closed(kind, text)

    def _shown(self, output: Output) -> str:
        """Its text, without the stop text that it may end with (`SamplingParams.include_stop`)."""
        if output.finish == "stop":
            ends = [stop for stop in self._reply.asked.params.stop if output.text.endswith(stop)]
            if ends:
                self._stopped = max(ends, key=len)
                return output.text[: -len(self._stopped)]
        return output.text

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        """The answer begins."""
        raise NotImplementedError

    def _opened(self, kind: Kind) -> bytes:
        """A part begins."""
        raise NotImplementedError

    def _said(self, kind: Kind, text: str) -> bytes:
        """It goes on."""
        raise NotImplementedError

    def _closed(self, kind: Kind, text: str) -> bytes:
        """It is complete, with this text."""
        raise NotImplementedError

    def _called(self, call: ToolCall) -> bytes:
        """A call."""
        raise NotImplementedError
