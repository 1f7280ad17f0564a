"""The models of a runtime process: loaded, found by id, unloaded; and the protocols of their engines.

The process gets a factory of engines, not a model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from reflex_runtime.core.errors import Closed, ConfigError, Drained, ReflexError
from reflex_runtime.ipc.messages import (
    LONGEST_ID,
    CheckDraft,
    CheckedDraft,
    GenerateParams,
    LoadModel,
    ScoredToken,
    Tokenize,
    TokenOutput,
    is_id,
)
from reflex_runtime.run.dispatcher import Stream

log = logging.getLogger("reflex.ipc")

MOST_MODELS = 64


class OutputStream(Stream[TokenOutput]):
    """One request's tokens, made in this process or in another.

    prompt_tokens, cached_tokens: of the prompt, and how many of them the prefix cache had; known once it has begun.
    prompt_scores: what the model says of the prompt's tokens from the second on, where that was asked for; complete
    before there is output. completion_tokens: so far.
    """

    __slots__ = ("cached_tokens", "completion_tokens", "prompt_scores", "prompt_tokens")

    def __init__(self, bell: asyncio.Event | None, prompt_tokens: int = 0) -> None:
        super().__init__(bell)
        self.prompt_tokens, self.cached_tokens, self.completion_tokens = prompt_tokens, 0, 0
        self.prompt_scores: list[ScoredToken] = []


class EngineStream(OutputStream):
    """The stream at its engine. held: whether it makes no more until some are taken."""

    __slots__ = ("held",)

    def __init__(self, bell: asyncio.Event | None, prompt_tokens: int) -> None:
        super().__init__(bell, prompt_tokens)
        self.held = False


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


@dataclass(slots=True, eq=False)
class LoadedModel:
    """closing: the result of its engine's `close`; from then on it admits nothing."""

    id: str
    engine: Engine
    closing: asyncio.Future[bool] | None = None

    def close(self, drain: bool, timeout: float) -> asyncio.Future[bool]:
        if self.closing is None:
            self.closing = asyncio.ensure_future(self.engine.close(drain, timeout))
        return self.closing


class Models:
    """Everything that is loaded, oldest first. Checks are made at once; what takes time is a coroutine.

    end_streams: ends those of an engine with an error. grace: seconds that an engine may take to close beyond the time
    that it was given. loading: ids of those that are being loaded. shut: the process admits nothing more.
    """

    def __init__(self, load: Load, end_streams: Callable[[ReflexError, Engine], None], grace: float) -> None:
        self.loading: set[str] = set()
        self.shut = False
        self._load, self._end_streams, self._grace = load, end_streams, grace
        self._models: dict[str, LoadedModel] = {}

    def __iter__(self) -> Iterator[LoadedModel]:
        return iter(self._models.values())

    def get(self, id: str) -> LoadedModel:
        """The model of that id; without an id, the only one. Raises ConfigError, Closed."""
        self._check_open()
        model = next(iter(self)) if not id and len(self._models) == 1 else self._models.get(id)
        if model is None:
            raise ConfigError(f"model_id={id[:LONGEST_ID]!r}: must be one of {sorted(self._models)}, which are loaded")
        if model.closing is not None:
            raise Closed(f"model {model.id!r} is being unloaded")
        return model

    def load(self, asked: LoadModel) -> Coroutine[Any, Any, dict[str, Any]]:
        """Load a model; its engine's `info`. Raises ConfigError, Closed; the coroutine raises what `load` raises."""
        id = asked.model_id
        if not is_id(id):
            raise ConfigError(f"load_model: model_id={id[:50]!r}: must be 1 to {LONGEST_ID} printable characters")
        if id in self._models or id in self.loading:
            raise ConfigError(f"load_model: model_id={id!r}: it is loaded")
        if len(self._models) + len(self.loading) >= MOST_MODELS:
            raise ConfigError(f"load_model: model_id={id!r}: {MOST_MODELS} models are loaded, and no more can be")
        self._check_open()
        self.loading.add(id)
        return self._loaded(asked)

    def unload(self, id: str) -> Coroutine[Any, Any, dict[str, bool]]:
        """Close a model; its streams end with an error. clean: whether no thread of it is at work any more."""
        model = self.get(id)
        model.close(False, self._grace)
        return self._unloaded(model)

    async def close(self, drain: bool, timeout: float) -> bool:
        """Close them all. Whether no thread is at work any more."""
        clean = await asyncio.gather(*(self._closed(model, drain, timeout) for model in self))
        self._models.clear()
        return all(clean)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.shut:
            raise Closed("the runtime process shuts down")

    async def _loaded(self, asked: LoadModel) -> dict[str, Any]:
        id = asked.model_id
        try:
            engine = await self._load(asked)
        except Exception:
            self.loading.discard(id)
            raise
        self.loading.discard(id)  # not after a cancellation: a thread may still be loading
        model = LoadedModel(id, engine)
        if self.shut:
            await self._closed(model, False, self._grace)
            self._check_open()
        self._models[id] = model
        return engine.info()

    async def _unloaded(self, model: LoadedModel) -> dict[str, bool]:
        clean = await self._closed(model, False, self._grace)
        self._models.pop(model.id, None)
        return {"clean": clean}

    async def _closed(self, model: LoadedModel, drain: bool, timeout: float) -> bool:
        """Close an engine; its streams end. False when it does not close in time."""
        closing = model.close(drain, timeout)
        await asyncio.wait([closing], timeout=timeout + self._grace)
        clean = False
        if not closing.done():
            log.error("model %r does not close in time", model.id)
        elif (error := closing.exception()) is not None:
            log.error("model %r could not be closed", model.id, exc_info=error)
        else:
            clean = closing.result()
        if not drain:
            self._end_streams(Drained(f"model {model.id!r} was unloaded"), model.engine)
        return clean
