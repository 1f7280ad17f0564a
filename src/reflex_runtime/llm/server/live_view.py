"""What a language model's server shows those who watch it: the live fold, its queues, its places and its cache.

With runtime processes it is asked of each of them, one moment late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.events import Event
from reflex_runtime.ipc.client import RuntimeClient
from reflex_runtime.ipc.messages import LIVE
from reflex_runtime.llm.server.lifecycle import ServerState
from reflex_runtime.observe.live import Live, LiveParts, LiveSnapshot, added, own_process
from reflex_runtime.version import __version__
from reflex_runtime.web.watchers import Fold, Watchers

WITHIN: Final = 2.0  # seconds for an answer of a process; one that takes longer shows nothing
_Told = dict[str, LiveSnapshot | None]


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


class RunsModel(Protocol):
    """A runtime process and its client."""

    name: str
    client: RuntimeClient


class WorkersLive:
    """The fold of a model in runtime processes. lines: all of them."""

    events: frozenset[type[Event]] = frozenset()

    def __init__(self, lines: Sequence[RunsModel]) -> None:
        self._lines = lines
        self._parts = LiveParts()
        self._asking: dict[str, asyncio.Task[None]] = {}

    def __call__(self, event: Event) -> None:
        """Nothing: its events come from the processes."""

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        """What the processes have answered since the last one; and ask again."""
        for line in self._lines:
            if line.name not in self._asking:
                task = self._asking[line.name] = asyncio.get_running_loop().create_task(self._ask(line))
                task.add_done_callback(lambda _, name=line.name: self._asking.pop(name))  # type: ignore[misc]
        return self._parts.snapshot(now, {**server, **self._told(server)})

    async def _ask(self, line: RunsModel) -> None:
        try:
            found: _Told = await line.client.request(LIVE, {}, _Told, WITHIN) if line.client.ready else {}
        except ReflexError:
            found = {}
        shown = next((snapshot for snapshot in found.values() if snapshot is not None), None)
        if shown is None:
            self._parts.forget(line.name)
        else:
            self._parts.take(line.name, shown)

    def _told(self, server: Mapping[str, Any]) -> dict[str, Any]:
        """The queues of the engines together, beside those of messages to each process, and how full the fullest cache
        is."""
        shown = [snapshot.server for snapshot in self._parts.newest.values()]
        queues: dict[str, Any] = {}
        for told in shown:
            for group, queue in told["queues"].items():
                queues[group] = added(queues[group], queue) if group in queues else queue
        usage = max((told["kv_cache_usage"] for told in shown), default=None)
        model = {**server.get("model", {}), **({} if usage is None else {"kv_cache_usage": usage})}
        return {"queues": {**queues, **server.get("queues", {})}, "model": model}
