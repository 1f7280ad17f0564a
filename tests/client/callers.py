"""One caller for both kinds of client, and a clock that only sleeping moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from reflex_runtime.client import AsyncClient, Client, Episode

from .stub import NAMED


class Time:
    """A clock that only sleeping moves. during: called at each sleep with its number."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        self.during: Callable[[int], Any] = lambda number: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        self.during(len(self.pauses))

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


class Caller:
    """A `Client` or an `AsyncClient`, called the same way."""

    def __init__(self, kind: str, url: str, time: Time, **options: Any) -> None:
        self.kind, self.time = kind, time
        more = {"clock": time, "spread": lambda: 0.0} | options
        if kind == "sync":
            self.client: Any = Client(url, sleep=time.sleep, **more)
        else:
            self.runner = asyncio.Runner()
            self.client = AsyncClient(url, sleep=time.sleep_async, **more)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.client, name)
        if name == "act":
            method = partial(method, **NAMED)
        if self.kind == "sync":
            return method  # type: ignore[no-any-return]
        return lambda *args, **fields: self.runner.run(method(*args, **fields))

    def episode(self, body: Callable[[Any, Callable[..., Any]], Any], **options: Any) -> Episode:
        """Run `body(episode, act)` as an episode; returns the episode."""
        if self.kind == "sync":
            with self.client.episode(**options) as episode:
                body(episode, episode.act)
            return episode  # type: ignore[no-any-return]

        async def run() -> Any:
            async with self.client.episode(**options) as episode:
                steps: list[Any] = []
                body(episode, lambda **fields: steps.append(fields))
                for fields in steps:
                    await episode.act(**fields)
            return episode

        return self.runner.run(run())  # type: ignore[no-any-return]

    def end(self) -> None:
        self.close()
        if self.kind == "async":
            self.runner.close()


Make = Callable[..., Caller]
