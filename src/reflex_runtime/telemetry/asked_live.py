"""Snapshots of one process for those who watch another: events are counted only while somebody asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from reflex_runtime.telemetry.live import Live, LiveSnapshot

UNSEEN: Final = 2.0  # seconds


class AskedLive:
    """add, remove: it as a sink of the process's events; it is one from the first question until nobody has asked for
    `UNSEEN` seconds. server: what the process itself tells; called before each snapshot, so that it may have events
    delivered. Everything happens on the loop."""

    def __init__(
        self, add: Callable[[Live], None], remove: Callable[[Live], None], server: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._add, self._remove, self._server = add, remove, server
        self._live: Live | None = None
        self._lapse: asyncio.TimerHandle | None = None

    def snapshot(self) -> LiveSnapshot:
        """What has happened since the last one."""
        if self._live is None:
            self._live = Live(time.monotonic())
            self._add(self._live)
        if self._lapse is not None:
            self._lapse.cancel()
        self._lapse = asyncio.get_running_loop().call_later(UNSEEN, self._end)
        told = self._server()
        return self._live.snapshot(time.monotonic(), told)

    def close(self) -> None:
        """The process ends."""
        if self._lapse is not None:
            self._lapse.cancel()

    def _end(self) -> None:
        if self._live is not None:
            self._remove(self._live)
            self._live = None
