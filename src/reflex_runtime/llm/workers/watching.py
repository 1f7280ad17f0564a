"""What the runtime processes show those who watch the server: asked of each, one moment late."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.events import Event
from reflex_runtime.ipc.client import RuntimeClient
from reflex_runtime.ipc.messages import LIVE
from reflex_runtime.telemetry.live import LiveSnapshot
from reflex_runtime.telemetry.merged_live import LiveParts, added

WITHIN: Final = 2.0  # seconds for an answer; a process that takes longer shows nothing
_Told = dict[str, LiveSnapshot | None]


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
