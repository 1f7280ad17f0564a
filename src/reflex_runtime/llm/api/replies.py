"""What every API's answers are made of: the parts that an output's text has, and the protocol of their writers.

An API is a `ModelApi`: it reads its bodies to a `CompletionRequest`, and writes the outputs as its clients know them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.ipc.messages import ScoredToken, TokenOutput
from reflex_runtime.ipc.streams import OutputStream
from reflex_runtime.llm.api.requests import CompletionRequest, DefaultsOf
from reflex_runtime.llm.engine.detokenizer import Detokenizer
from reflex_runtime.llm.engine.output_parsers import PartReader, Thought
from reflex_runtime.llm.engine.tool_calls import ToolCall
from reflex_runtime.web.errors import ErrorForm
from reflex_runtime.web.fields import encode

Kind = Literal["thought", "text"]


class Cached(msgspec.Struct):
    """cached_tokens: of the prompts, that the prefix cache had."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """See `ReplyContext.usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """What the answer to one request is made from. id: of the request. streams: of its choices. detokenizer: says what
    of tokens is text. reader: makes one for each choice; None: its text is not looked into. echoes: texts with which
    the choices begin, one each. firsts: the first token of each prompt, where it is asked what the model says of
    them."""

    id: str
    asked: CompletionRequest
    streams: Seq[OutputStream]
    detokenizer: Detokenizer
    reader: Callable[[], PartReader] | None = None
    echoes: Seq[str] = ()
    firsts: Seq[ScoredToken] = ()

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, whatever the number of its choices."""
        firsts = self.streams[:: self.asked.n]
        prompt = sum(s.prompt_tokens for s in firsts)
        made = 0 if self.asked.prompt_only else sum(s.completion_tokens for s in self.streams)
        return Usage(prompt, made, prompt + made, Cached(sum(s.cached_tokens for s in firsts)))

    def scores(self, index: int) -> list[ScoredToken]:
        """The tokens of a choice's prompt, once that has its first output: its first choice tells the others. The first
        token has no logprob."""
        n = self.asked.n
        return [self.firsts[index // n], *self.streams[index // n * n].prompt_scores]


class Writer(Protocol):
    """Makes what is sent of the outputs of all choices: `chunk` and `end` as they come, or `add` and `whole`."""

    @property
    def id(self) -> str: ...
    @property
    def finish_reasons(self) -> list[str]:
        """Why each choice ended, of those that have."""

    def chunk(self, index: int, outputs: Seq[TokenOutput]) -> bytes:
        """The events of a choice's new outputs."""

    def end(self) -> bytes:
        """The last events."""

    def failed(self, error: ReflexError) -> bytes:
        """The last event of a stream that fails."""

    def add(self, index: int, outputs: Seq[TokenOutput]) -> None:
        """Keep a choice's new outputs for `whole`."""

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""


@dataclass(frozen=True, slots=True)
class ModelApi:
    """One API. path: of its endpoint. read: a body, with the defaults of a model by its name; raises BadRequest. write:
    makes the writer. form: of its errors."""

    path: str
    read: Callable[[bytes, DefaultsOf], CompletionRequest]
    write: Callable[[ReplyContext], Writer]
    form: ErrorForm | None = None


class PartWriter:
    """Reads the parts of an answer's outputs. A subclass makes events of them, and keeps what `whole` tells; without
    a stream its events are dropped."""

    def __init__(self, reply: ReplyContext) -> None:
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

    def chunk(self, index: int, outputs: Seq[TokenOutput]) -> bytes:
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

    def add(self, index: int, outputs: Seq[TokenOutput]) -> None:
        """See `Writer.add`."""
        self.chunk(index, outputs)

    def _event(self, type: str, **fields: Any) -> bytes:
        """A server-sent event of that type."""
        if not self._reply.asked.stream:
            return b""
        return b"event: %b\ndata: %b\n\n" % (type.encode(), encode({"type": type, **fields}))

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

    def _shown(self, output: TokenOutput) -> str:
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
