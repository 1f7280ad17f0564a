"""What a language model's server shows to those who watch it: the live fold, its queues, its places and its cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from reflex_runtime.core.events import Event
from reflex_runtime.llm.serving.lifecycle import ServerState
from reflex_runtime.telemetry.live import Live, LiveSnapshot, own_process
from reflex_runtime.version import __version__
from reflex_runtime.web.watchers import Fold, Watchers


def watchers_of(model: ServerState) -> Watchers:
    """Those who watch the server. They are sent away when it drains."""
    watchers = Watchers(partial(_ModelLive, model), model.add_sink, model.remove_sink, partial(_server, model))
    model.on_drain.append(watchers.close)
    return watchers


class _ModelLive:
    """The fold: of the model's events, or of what their processes show, once they are there."""

    def __init__(self, model: ServerState, now: float) -> None:
        self._model, self._live = model, Live(now)
        self._elsewhere: Fold | None = None
        self.events = Live.events

    def __call__(self, event: Event) -> None:
        self._live(event)

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        """See `Fold`."""
        if self._elsewhere is None and self._model.host is not None:
            self._elsewhere = self._model.host.fold()
        shown: LiveSnapshot = (self._elsewhere or self._live).snapshot(now, server)
        return shown


def _server(model: ServerState) -> dict[str, Any]:
    told = model.health()
    workers = [] if model.host is None else model.host.processes()
    running, waiting = (None, None) if workers else (told.get("running", 0), told.get("waiting", 0))
    return {
        "product": "llm",
        "version": __version__,
        "state": model.state,
        "error": model.error,
        "unit": "tokens",
        "queues": {} if model.host is None else model.host.queues(),
        "model": told,
        "processes": [own_process(model.state, model.lives, running, waiting, model.error), *workers],
    }
