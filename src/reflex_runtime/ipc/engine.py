"""What runs the model of a runtime process, and the streams of its tokens.

The process gets a factory of engines, not a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from reflex_runtime.ipc import messages as wire
from reflex_runtime.run.dispatcher import Stream


class OutputStream(Stream[wire.TokenOutput]):
    """One request's tokens, made in this process or in another.

    prompt_tokens, cached_tokens: of the prompt, and how many of them the prefix cache had; known once it has begun.
    prompt_scores: what the model says of the prompt's tokens from the second on, where that was asked for; complete
    before there is output. completion_tokens: so far. held: whether its engine makes no more until some are taken.
    """

    __slots__ = ("cached_tokens", "completion_tokens", "held", "prompt_scores", "prompt_tokens")

    def __init__(self, bell: asyncio.Event | None, prompt_tokens: int = 0) -> None:
        super().__init__(bell)
        self.prompt_tokens, self.cached_tokens, self.completion_tokens = prompt_tokens, 0, 0
        self.prompt_scores: list[wire.ScoredToken] = []
        self.held = False


async def merged(
    streams: Sequence[OutputStream], bell: asyncio.Event
) -> AsyncIterator[tuple[int, list[wire.TokenOutput]]]:
    """What the streams say, as (number of the stream, its new outputs). bell: the one they were submitted with.

    Raises the first error that one of them ends with.
    """
    still = dict(enumerate(streams))
    while still:
        bell.clear()
        for number, stream in list(still.items()):
            ended = stream.ended  # asked first: what comes later rings again
            outputs = stream.take()
            if outputs:
                yield number, outputs
            if ended:
                stream.take()
                del still[number]
        if still:
            await bell.wait()


class Engine(Protocol):
    """A loaded model. Everything is called on the loop."""

    def info(self) -> dict[str, Any]:
        """What `load_model` answers; JSON-safe."""

    async def tokenize(self, params: wire.Tokenize) -> list[int]:
        """Token ids of a text or a conversation. Raises ConfigError."""

    async def close(self, drain: bool, timeout: float) -> bool:
        """Admit nothing more; every stream has ended when it returns. Whether no thread is at work any more."""

    def state(self) -> dict[str, Any]:
        """Its part of `runtime/state`; JSON-safe."""
        return {"state": "ready"}

    def metrics(self) -> str:
        """Prometheus text, or nothing."""
        return ""

    def live(self) -> Any:
        """What has happened since it was asked last, as a `LiveSnapshot`; None if it has nothing to show."""
        return None

    async def submit(self, params: wire.GenerateParams, bell: asyncio.Event, leader: Any) -> OutputStream:
        """Start a request. bell: set when there is something to read. leader: None, or a stream of this engine with the
        same prompt and no output yet. Raises ReflexError."""


Load = Callable[[wire.LoadModel], Awaitable[Engine]]
