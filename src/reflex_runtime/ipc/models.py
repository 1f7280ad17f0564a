"""The models of a runtime process: loaded, found by id, unloaded. Those loaded together share an engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reflex_runtime.core.errors import Closed, ConfigError, Drained
from reflex_runtime.ipc.engine import Engine, Load
from reflex_runtime.ipc.messages import LoadModel
from reflex_runtime.ipc.outlet import LONGEST_ID, Outlets

log = logging.getLogger("reflex.ipc")

MOST_MODELS = 64


@dataclass(slots=True, eq=False)
class LoadedModels:
    """Models that were loaded together. closing: the result of their engine's `close`; from then on it admits
    nothing."""

    ids: tuple[str, ...]
    engine: Engine
    closing: asyncio.Future[bool] | None = None

    def close(self, drain: bool, timeout: float) -> asyncio.Future[bool]:
        if self.closing is None:
            self.closing = asyncio.ensure_future(self.engine.close(drain, timeout))
        return self.closing


class Models:
    """Everything that is loaded, oldest first. Checks are made at once; what takes time is a coroutine.

    loading: ids of those that are being loaded. shut: the process admits nothing more. grace: seconds that an engine
    may take to close beyond the time that it was given.
    """

    def __init__(self, load: Load, outlets: Outlets, grace: float) -> None:
        self.loading: set[str] = set()
        self.shut = False
        self._load, self._outlets, self._grace = load, outlets, grace
        self._models: dict[str, LoadedModels] = {}

    def __iter__(self) -> Iterator[LoadedModels]:
        return iter(dict.fromkeys(self._models.values()))

    def get(self, id: str) -> LoadedModels:
        """The model of that id; without an id, the only one. Raises ConfigError, Closed."""
        self._check_open()
        model = next(iter(self)) if not id and len(self._models) == 1 else self._models.get(id)
        if model is None:
            raise ConfigError(f"model_id={id[:LONGEST_ID]!r}: must be one of {sorted(self._models)}, which are loaded")
        if model.closing is not None:
            raise Closed(f"model {_named(model)} is being unloaded")
        return model

    def load(self, asked: Sequence[LoadModel]) -> Coroutine[Any, Any, dict[str, dict[str, Any]]]:
        """Load models that share an engine; its `info`. Raises ConfigError, Closed; the coroutine raises what `load`
        raises."""
        if not asked:
            raise ConfigError("load_models: models is empty")
        new = set[str]()
        for id in (model.model_id for model in asked):
            if not (0 < len(id) <= LONGEST_ID and id.isprintable()):
                raise ConfigError(f"load_model: model_id={id[:50]!r}: must be 1 to {LONGEST_ID} printable characters")
            if id in self._models or id in self.loading:
                raise ConfigError(f"load_model: model_id={id!r}: it is loaded")
            if id in new:
                raise ConfigError(f"load_models: model_id={id!r}: two models have this id")
            if len(self._models) + len(self.loading) + len(new) >= MOST_MODELS:
                raise ConfigError(f"load_model: model_id={id!r}: {MOST_MODELS} models are loaded, and no more can be")
            new.add(id)
        self._check_open()
        self.loading |= new
        return self._loaded(asked)

    def unload(self, id: str) -> Coroutine[Any, Any, dict[str, bool]]:
        """Close a model and those loaded with it; their streams end with an error. clean: whether no thread of them is
        at work any more."""
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

    async def _loaded(self, asked: Sequence[LoadModel]) -> dict[str, dict[str, Any]]:
        ids = tuple(model.model_id for model in asked)
        try:
            engine = await self._load(asked)
        except Exception:
            self.loading.difference_update(ids)
            raise
        self.loading.difference_update(ids)  # not after a cancellation: a thread may still be loading
        model = LoadedModels(ids, engine)
        if self.shut:
            await self._closed(model, False, self._grace)
            self._check_open()
        self._models |= dict.fromkeys(ids, model)
        return engine.info()

    async def _unloaded(self, model: LoadedModels) -> dict[str, bool]:
        clean = await self._closed(model, False, self._grace)
        for id in model.ids:
            self._models.pop(id, None)
        return {"clean": clean}

    async def _closed(self, model: LoadedModels, drain: bool, timeout: float) -> bool:
        """Close an engine; its streams end. False when it does not close in time."""
        closing = model.close(drain, timeout)
        await asyncio.wait([closing], timeout=timeout + self._grace)
        clean = False
        if not closing.done():
            log.error("model %s does not close in time", _named(model))
        elif (error := closing.exception()) is not None:
            log.error("model %s could not be closed", _named(model), exc_info=error)
        else:
            clean = closing.result()
        if not drain:
            self._outlets.end(Drained(f"model {_named(model)} was unloaded"), model.engine)
        return clean


def _named(model: LoadedModels) -> str:
    return ", ".join(map(repr, model.ids))
