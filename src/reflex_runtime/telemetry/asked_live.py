"""Snapshots of one process for those who watch another: events are counted only while somebody asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from reflex_runtime.telemetry.live import Live, LiveSnapshot

UNSEEN: Final = 2.0  # seconds


class AskedLive:
    """Each that asks has a fold of its own, so that none takes what another has not seen. add, remove: a fold as a sink
    of the process's events; it is one from the first question until its asker has been silent for `UNSEEN` seconds.
    server: what the process itself tells; called before each snapshot, so that it may have events delivered. Everything
    happens on the loop."""

    def __init__(
        self, add: Callable[[Live], None], remove: Callable[[Live], None], server: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._add, self._remove, self._server = add, remove, server
        self._folds: dict[str, tuple[Live, asyncio.TimerHandle]] = {}  # by asker

    def snapshot(self, asker: str = "") -> LiveSnapshot:
        """What has happened since the last one for this asker."""
        if asker in self._folds:
            live, lapse = self._folds[asker]
            lapse.cancel()
        else:
            live = Live(time.monotonic())
            self._add(live)
        self._folds[asker] = live, asyncio.get_running_loop().call_later(UNSEEN, self._end, asker)
        told = self._server()
        return live.snapshot(time.monotonic(), told)

    def close(self) -> None:
        """The process ends."""
        for _, lapse in self._folds.values():
            lapse.cancel()

    def _end(self, asker: str) -> None:
        live, _ = self._folds.pop(asker)
        self._remove(live)
