"""What every API's answers are made of: the parts that an output's text has, and the protocol of their writers.

An API is a `ModelApi`: it reads its bodies to a `CompletionRequest`, and writes the outputs as its clients know them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import msgspec

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.ipc.engine import Output, ScoredToken
from reflex_runtime.llm.engine.reasoning import Thought, ThoughtParser
from reflex_runtime.llm.engine.tools import ToolCall, ToolParser
from reflex_runtime.llm.serving.requests.reading import CompletionRequest, DefaultsOf
from reflex_runtime.web.form import ErrorForm

Part = str | Thought | ToolCall


class Cached(msgspec.Struct):
    """cached_tokens: of the prompts, that the prefix cache had."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached


class PartReader:
    """Reads one output's text as it comes: thoughts, text and calls. thinking: whether it is inside of a thought.
    called: calls so far."""

    def __init__(self, thoughts: ThoughtParser | None = None, tools: ToolParser | None = None) -> None:
        self._thoughts, self._tools = thoughts, tools

    @property
    def thinking(self) -> bool:
        return self._thoughts is not None and self._thoughts.thinking

    @property
    def called(self) -> int:
        return 0 if self._tools is None else self._tools.called

    def feed(self, text: str, last: bool) -> list[Part]:
        """What is complete with this text. last: no more comes."""
        found: list[Part] = []
        if self._thoughts is not None:
            thought, text = self._thoughts.feed(text)
            if last:
                more, rest = self._thoughts.end()
                thought, text = thought + more, text + rest
            if thought:
                found.append(Thought(thought))
        if self._tools is None:
            return [*found, text] if text else found
        return found + self._tools.feed(text) + (self._tools.end() if last else [])


@dataclass(frozen=True, slots=True)
class Answering:
    """What the answer to one request is made from. id: of the request. choices: how many. token: a token id as text.
    usage: tokens so far. reader: makes one for each choice; None: its text is not looked into. echoes: texts with which
    the choices begin, one each. scores: the tokens of a choice's prompt, the first without a logprob, once the choice
    has its first output; None: they are not asked for."""

    id: str
    asked: CompletionRequest
    choices: int
    token: Callable[[int], str]
    usage: Callable[[], Usage]
    reader: Callable[[], PartReader] | None = None
    echoes: Seq[str] = ()
    scores: Callable[[int], Seq[ScoredToken]] | None = None


class Writer(Protocol):
    """Makes what is sent of the outputs of all choices: `chunk` and `end` as they come, or `add` and `whole`."""

    @property
    def id(self) -> str: ...
    @property
    def finish_reasons(self) -> list[str]:
        """Why each choice ended, of those that have."""

    def chunk(self, index: int, outputs: Seq[Output]) -> bytes:
        """The events of a choice's new outputs."""

    def end(self) -> bytes:
        """The last events."""

    def failed(self, error: ReflexError) -> bytes:
        """The last event of a stream that fails."""

    def add(self, index: int, outputs: Seq[Output]) -> None:
        """Keep a choice's new outputs for `whole`."""

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""


@dataclass(frozen=True, slots=True)
class ModelApi:
    """One API. path: of its endpoint. read: a body, with the defaults of a model by its name; raises BadRequest. write:
    makes the writer. form: of its errors."""

    path: str
    read: Callable[[bytes, DefaultsOf], CompletionRequest]
    write: Callable[[Answering], Writer]
    form: ErrorForm | None = None
