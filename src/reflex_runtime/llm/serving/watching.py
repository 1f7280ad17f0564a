"""What a language model's server shows to those who watch it: the live fold, its queues, its places and its cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from reflex_runtime.core.events import Event
from reflex_runtime.llm.serving.life import ServingLife
from reflex_runtime.telemetry.live import Live, LiveSnapshot
from reflex_runtime.telemetry.processes import own_process
from reflex_runtime.version import __version__
from reflex_runtime.web.watchers import Fold, Watchers


def watchers_of(models: ServingLife[Any]) -> Watchers:
    """Those who watch the server. They are sent away when it drains."""
    watchers = Watchers(partial(_ModelLive, models), models.add_sink, models.remove_sink, partial(_server, models))
    models.on_drain.append(watchers.close)
    return watchers


class _ModelLive:
    """The fold: of the models' events, or of what their processes show, once they are there."""

    def __init__(self, models: ServingLife[Any], now: float) -> None:
        self._models, self._live = models, Live(now)
        self._elsewhere: Fold | None = None
        self.events = Live.events

    def __call__(self, event: Event) -> None:
        self._live(event)

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        """See `Fold`."""
        if self._elsewhere is None and self._models.host is not None:
            self._elsewhere = self._models.host.fold()
        shown: LiveSnapshot = (self._elsewhere or self._live).snapshot(now, server)
        return shown


def _server(models: ServingLife[Any]) -> dict[str, Any]:
    told = models.health()
    workers = [] if models.host is None else models.host.processes()
    running, waiting = (None, None) if workers else (told.get("running", 0), told.get("waiting", 0))
    return {
        "product": "llm",
        "version": __version__,
        "state": models.state,
        "error": models.error,
        "unit": "tokens",
        "queues": {} if models.host is None else models.host.queues(),
        "model": told,
        "processes": [own_process(models.state, models.lives, running, waiting, models.error), *workers],
    }
