"""The protocols between a runtime process and its engines. The process gets a factory of engines, not a model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from reflex_runtime.ipc.messages import CheckDraft, CheckedDraft, GenerateParams, LoadModel, Tokenize


class Output(Protocol):
    """One token of output, as `llm.TokenOutput`."""

    @property
    def token_id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def held(self) -> int: ...
    @property
    def finish(self) -> str | None: ...


class ScoredToken(Protocol):
    """What the model says of a token, as `llm.sequence.Choice`."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


class OutputStream(Protocol):
    """One request's tokens, made in this process or in another.

    prompt_tokens, cached_tokens: of the prompt, and how many of them the prefix cache had; known once it has begun.
    prompt_scores: what the model says of the prompt's tokens from the second on, where that was asked for; complete
    before there is output.
    completion_tokens: so far. ended: whether no more will come; the bell has rung then, and outputs may be unread.
    """

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def prompt_scores(self) -> Sequence[ScoredToken]: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def ended(self) -> bool: ...

    def take(self, most: int | None = None) -> Sequence[Output]:
        """Unread outputs, at most so many, without waiting. Once all are read, raises the error that it ended with."""

    def close(self) -> None:
        """Take the request back unless it has ended."""


class EngineStream(OutputStream, Protocol):
    """The stream at its engine. unread: outputs. held: whether it makes no more until some are taken."""

    @property
    def unread(self) -> int: ...
    @property
    def held(self) -> bool: ...


class Engine(Protocol):
    """A loaded model. Everything is called on the loop."""

    def info(self) -> dict[str, Any]:
        """What `load_model` answers; JSON-safe."""

    def state(self) -> dict[str, Any]:
        """Its part of `runtime/state`; JSON-safe."""

    def metrics(self) -> str:
        """Prometheus text, or nothing."""

    def live(self) -> Any:
        """What has happened since it was asked last, as a `LiveSnapshot`; None if it has nothing to show."""

    async def tokenize(self, params: Tokenize) -> list[int]:
        """Token ids of a text or a conversation. Raises ConfigError."""

    async def check_draft(self, params: CheckDraft) -> CheckedDraft:
        """See `CheckDraft`. Called only where the process has the capability `draft`. Raises ReflexError."""

    async def submit(self, params: GenerateParams, bell: asyncio.Event, leader: Any) -> EngineStream:
        """Start a request. bell: set when there is something to read. leader: None, or a stream of this engine with the
        same prompt and no output yet. Raises ReflexError."""

    async def close(self, drain: bool, timeout: float) -> bool:
        """Admit nothing more; every stream has ended when it returns. Whether no thread is at work any more."""


Load = Callable[[LoadModel], Awaitable[Engine]]
