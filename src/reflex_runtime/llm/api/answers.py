"""Answers, as one body or as server-sent events: the common part of all dialects, and those of completions and chats.

A dialect is a `ModelApi`: it turns a body into a `GenerationRequest`; its `Writer` gets the outputs of all choices and
writes events or one body.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.ipc.messages import SamplingParams, ScoredToken, TokenOutput
from reflex_runtime.ipc.streams import OutputStream
from reflex_runtime.llm.api.fields import CalledFunction, CalledTool, error_body
from reflex_runtime.llm.api.requests import GenerationRequest
from reflex_runtime.llm.engine.detokenizer import Detokenizer
from reflex_runtime.llm.engine.output_parsers import PartReader, Thought, ToolCall
from reflex_runtime.web.errors import ErrorForm
from reflex_runtime.web.fields import encode

Kind = Literal["thought", "text"]


class Cached(msgspec.Struct):
    """cached_tokens: tokens of the prompts that were in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """See `ReplyContext.usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """All that a `Writer` needs.

    id: the request's. streams: one for each choice. reader: makes the reader of a choice's text. echoes: the text with
    which each choice begins; empty without `echo`. firsts: the first token of each prompt, if prompts are scored.
    """

    id: str
    asked: GenerationRequest
    streams: Seq[OutputStream]
    detokenizer: Detokenizer
    reader: Callable[[], PartReader] = PartReader
    echoes: Seq[str] = ()
    firsts: Seq[ScoredToken] = ()

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many choices it has."""
        prompts = self.streams[:: self.asked.n]
        prompt = sum(s.prompt_tokens for s in prompts)
        output = 0 if self.asked.params.prompt_only else sum(s.completion_tokens for s in self.streams)
        return Usage(prompt, output, prompt + output, Cached(sum(s.cached_tokens for s in prompts)))

    def scores(self, index: int) -> list[ScoredToken]:
        """The tokens of a choice's prompt, complete once the choice has an output. Only the prompt's first choice is
        scored. The first token has no logprob."""
        n = self.asked.n
        return [self.firsts[index // n], *self.streams[index // n * n].prompt_scores]


class Writer(Protocol):
    """Writes one answer: events if it is a stream, else one body at the end."""

    @property
    def id(self) -> str: ...
    @property
    def finish_reasons(self) -> list[str]:
        """Those of the choices that have ended."""

    def add(self, index: int, outputs: Seq[TokenOutput]) -> bytes:
        """Take new outputs of a choice; returns the events for a stream, else b""."""

    def end(self) -> bytes:
        """The last events of a stream, or the body."""

    def failed(self, error: ReflexError) -> bytes:
        """The last event of a stream that fails."""


@dataclass(frozen=True, slots=True)
class ModelApi:
    """A dialect. path: of its endpoint. read: turns a body and the model's defaults into a request, or raises
    BadRequest. write: makes the writer. form: of its errors."""

    path: str
    read: Callable[[bytes, SamplingParams], GenerationRequest]
    write: Callable[[ReplyContext], Writer]
    form: ErrorForm | None = None


class PartWriter:
    """Writes an answer of one choice, part by part: thoughts, texts, calls. A subclass makes the events of a part, and
    keeps the part for the body. `_event` writes nothing if the answer is no stream."""

    def __init__(self, reply: ReplyContext) -> None:
        self._reply = reply
        self._reader = reply.reader()
        self._finish: str | None = None
        self._stopped: str | None = None
        self._thought_tokens = 0
        self._begun = False
        self._kind: Kind | None = None
        self._pieces: list[str] = []

    @property
    def finish_reasons(self) -> list[str]:
        return [] if self._finish is None else [self._finish]

    def add(self, index: int, outputs: Seq[TokenOutput]) -> bytes:
        events = [] if self._begun else [self._begin()]
        self._begun = True
        for output in outputs:
            self._thought_tokens += self._reader.thinking
            self._finish = output.finish
            events += map(self._take, self._reader.feed(self._shown(output), output.finish is not None))
            if output.finish is not None:
                events.append(self._close())
        return b"".join(events)

    def _event(self, type: str, **fields: Any) -> bytes:
        """A server-sent event of that type; b"" if the answer is no stream."""
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
        return before + self._delta(kind, text)

    def _close(self) -> bytes:
        kind, text = self._kind, "".join(self._pieces)
        self._kind, self._pieces = None, []
        return b"" if kind is None else self._closed(kind, text)

    def _shown(self, output: TokenOutput) -> str:
        """The text of an output, without a stop text at its end (`SamplingParams.include_stop`)."""
        if output.finish == "stop":
            ends = [stop for stop in self._reply.asked.params.stop if output.text.endswith(stop)]
            if ends:
                self._stopped = max(ends, key=len)
                return output.text[: -len(self._stopped)]
        return output.text

    # -- of subclasses -------------------------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        """The first event."""
        raise NotImplementedError

    def _opened(self, kind: Kind) -> bytes:
        """A part begins."""
        raise NotImplementedError

    def _delta(self, kind: Kind, text: str) -> bytes:
        """More text of the part."""
        raise NotImplementedError

    def _closed(self, kind: Kind, text: str) -> bytes:
        """The part is complete, with this text."""
        raise NotImplementedError

    def _called(self, call: ToolCall) -> bytes:
        """A part that is a call, complete."""
        raise NotImplementedError


# -- completions and chats ---------------------------------------------------------------------------------------------


DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class TextLogprobs(msgspec.Struct):
    """Logprobs of /v1/completions. text_offset: where each token's text begins in the choice, in characters."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class TopLogprob(msgspec.Struct):
    """bytes: the token's bytes of UTF-8, perhaps only a part of a character; null for a special token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Logprobs of /v1/chat/completions."""

    content: list[TokenLogprob] = msgspec.field(default_factory=list)
    refusal: None = None


class TextChoice(msgspec.Struct):
    """A choice of /v1/completions, or a part of one."""

    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: str | None


class PartOfCall(CalledTool, kw_only=True):
    """A call in a stream. index: its place among the calls of the message."""

    index: int


class ChatMessage(msgspec.Struct):
    """The message of the assistant."""

    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[CalledTool] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """A choice of /v1/chat/completions."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class Delta(msgspec.Struct, omit_defaults=True):
    """New parts of a message."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[PartOfCall] | None = None
    reasoning_content: str | None = None


class DeltaChoice(msgspec.Struct):
    """A part of a choice of /v1/chat/completions."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class Body(msgspec.Struct):
    """An answer, or a part of one. usage: null in a stream that has it at its end."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class _Choice:
    """A choice so far. length: characters, with those of an echoed prompt. texts, logprobs: kept for the body."""

    __slots__ = ("begun", "finish", "length", "logprobs", "reader", "texts")

    def __init__(self, echo: str, reader: PartReader, logprobs: Any) -> None:
        self.reader, self.logprobs, self.length = reader, logprobs, len(echo)
        self.texts = [echo]
        self.begun = False
        self.finish: str | None = None


class Answer:
    """The answer to a request of /v1/completions, or of /v1/chat/completions (`chat`). See `Writer`."""

    def __init__(self, reply: ReplyContext, chat: bool) -> None:
        self._reply, self._chat, self._token = reply, chat, reply.detokenizer.token
        asked = reply.asked
        self._scores = asked.echo and asked.params.logprobs is not None
        self._logprobs = asked.params.logprobs is not None and not asked.params.prompt_only
        self._head = (("chatcmpl-" if chat else "cmpl-") + reply.id, int(time.time()), asked.model)
        kind = "chat.completion.chunk" if chat else "text_completion"
        before, _, _ = _encode(Body(self._head[0], kind, *self._head[1:], [])).rpartition(b"]")
        self._before = b"data: " + before  # all events begin and end alike
        self._after = b'],"usage":null}\n\n' if asked.include_usage else b"]}\n\n"
        echoes = reply.echoes or [""] * len(reply.streams)
        self._choices = [_Choice(echo, reply.reader(), self._no_logprobs()) for echo in echoes]

    @property
    def id(self) -> str:
        return self._head[0]

    @property
    def finish_reasons(self) -> list[str]:
        return [choice.finish for choice in self._choices if choice.finish is not None]

    def add(self, index: int, outputs: Seq[TokenOutput]) -> bytes:
        """See `Writer.add`. An output without text makes no event, unless it has logprobs or ends the choice."""
        choice, events = self._choices[index], list[bytes]()
        stream, prompt_only = self._reply.asked.stream, self._reply.asked.params.prompt_only
        if not choice.begun:
            choice.begun = True
            events += self._begin(index, choice)
        for output in outputs:
            if prompt_only:  # the one token is not sent, only the end
                output = TokenOutput("", output.token_id, finish="length")
            logprobs = None
            if self._logprobs:
                logprobs = self._no_logprobs() if stream else choice.logprobs
                self._add_logprobs(logprobs, output, choice.length + output.held)
            choice.length += len(output.text)
            choice.finish = output.finish
            if not stream:
                choice.texts.append(output.text)
            elif output.text or logprobs is not None or output.finish is not None:
                events += self._parts(index, output, logprobs)
        return b"".join(events)

    def _begin(self, index: int, choice: _Choice) -> list[bytes]:
        """The first events: the role of a chat's message, or the echoed prompt with its logprobs."""
        scored = self._scored(index) if self._scores else None
        if not self._reply.asked.stream:
            choice.logprobs = scored or choice.logprobs
            return []
        if self._chat:
            return [self._event(DeltaChoice(index, Delta("assistant", ""), None, None))]
        return [self._event(TextChoice(choice.texts[0], index, scored, None))] if self._reply.echoes else []

    def end(self) -> bytes:
        if not self._reply.asked.stream:
            return self._body()
        if not self._reply.asked.include_usage:
            return DONE
        return self._before + b'],"usage":' + _encode(self._reply.usage()) + b"}\n\n" + DONE

    def failed(self, error: ReflexError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    # -- events --------------------------------------------------------------------------------------------------------

    def _parts(self, index: int, output: TokenOutput, logprobs: Any) -> list[bytes]:
        if not self._chat:
            return [self._event(TextChoice(output.text, index, logprobs, output.finish))]
        deltas = self._deltas(index, output)
        if logprobs is not None and not deltas:
            deltas = [Delta(content="")]
        parts = [DeltaChoice(index, delta, None if i else logprobs, None) for i, delta in enumerate(deltas)]
        if output.finish is not None:
            parts.append(DeltaChoice(index, Delta(), None, self._finished(index)))
        return [self._event(part) for part in parts]

    def _deltas(self, index: int, output: TokenOutput) -> list[Delta]:
        """Thoughts, texts and calls that are complete with this output."""
        reader = self._choices[index].reader
        number, deltas = reader.called, []
        for part in reader.feed(output.text, output.finish is not None):
            if isinstance(part, str):
                deltas.append(Delta(content=part))
            elif isinstance(part, Thought):
                deltas.append(Delta(reasoning_content=part.text))
            else:
                function = CalledFunction(part.name, part.arguments)
                deltas.append(Delta(tool_calls=[PartOfCall(part.id, function, index=number)]))
                number += 1
        return deltas

    def _finished(self, index: int) -> str | None:
        """Why a chat's choice ended: "tool_calls" if it stopped after calls."""
        choice = self._choices[index]
        return "tool_calls" if choice.finish == "stop" and choice.reader.called else choice.finish

    def _event(self, choice: Any) -> bytes:
        after = self._after
        if self._reply.asked.usage_always:
            after = b'],"usage":' + _encode(self._reply.usage()) + b"}\n\n"
        return self._before + _encode(choice) + after

    # -- the body ------------------------------------------------------------------------------------------------------

    def _body(self) -> bytes:
        choices: list[Any] = []
        for index, choice in enumerate(self._choices):
            text = "".join(choice.texts)
            logprobs = choice.logprobs if self._logprobs or self._scores else None
            if self._chat:
                made: Any = ChatChoice(index, self._message(index, text), logprobs, self._finished(index))
            else:
                made = TextChoice(text, index, logprobs, choice.finish)
            choices.append(msgspec.Raw(_encode(made)))  # one by one: no other thread runs while msgspec encodes
        id, created, model = self._head
        kind = "chat.completion" if self._chat else "text_completion"
        return _encode(Body(id, kind, created, model, choices, self._reply.usage()))

    def _message(self, index: int, text: str) -> ChatMessage:
        parts = self._choices[index].reader.feed(text, last=True)
        said = "".join(part for part in parts if isinstance(part, str))
        thought = "".join(part.text for part in parts if isinstance(part, Thought))
        calls = [
            CalledTool(part.id, CalledFunction(part.name, part.arguments))
            for part in parts
            if isinstance(part, ToolCall)
        ]
        return ChatMessage(
            "assistant", (said or None) if calls else said,
            tool_calls=calls or msgspec.UNSET, reasoning_content=thought or msgspec.UNSET,
        )  # fmt: skip

    # -- logprobs ------------------------------------------------------------------------------------------------------

    def _no_logprobs(self) -> TextLogprobs | ChatLogprobs:
        return ChatLogprobs() if self._chat else TextLogprobs()

    def _scored(self, index: int) -> TextLogprobs:
        """The logprobs of the prompt's tokens, for an echo."""
        found, offset, end = TextLogprobs(), 0, len(self._reply.echoes[index])
        stream = self._reply.detokenizer.stream()
        most = self._reply.asked.params.logprobs or 0
        for token in self._reply.scores(index):
            self._add(found, token.token_id, token.logprob, token.top[:most], min(offset, end))
            offset += len(stream.feed(token.token_id))
        return found

    def _add_logprobs(self, logprobs: TextLogprobs | ChatLogprobs, output: TokenOutput, offset: int) -> None:
        own = 0.0 if output.logprob is None else output.logprob
        if isinstance(logprobs, TextLogprobs):
            self._add(logprobs, output.token_id, own, output.top, offset)
            return
        top = [TopLogprob(self._token(id), p, self._bytes(id)) for id, p in output.top]
        id = output.token_id
        logprobs.content.append(TokenLogprob(self._token(id), own, self._bytes(id), top))

    def _bytes(self, id: int) -> list[int] | None:
        return list(self._reply.detokenizer.piece(id)) or None

    def _add(
        self, found: TextLogprobs, id: int, logprob: float | None, top: Seq[tuple[int, float]], offset: int
    ) -> None:
        """Add one token. logprob: None for the first of a prompt."""
        text = self._token(id)
        likeliest: dict[str, float] = {}
        for other, p in top:
            likeliest.setdefault(self._token(other), p)  # of two tokens with the same text the likelier one
        if logprob is not None:
            likeliest.setdefault(text, logprob)  # the token itself is always in it
        found.tokens.append(text)
        found.token_logprobs.append(logprob)
        found.top_logprobs.append(None if logprob is None else likeliest)
        found.text_offset.append(offset)
