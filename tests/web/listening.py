"""An application of the web layer on a port, for tests that run their own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from reflex_runtime.web.app import App
from reflex_runtime.web.serve import Host, ReflexServer, uvicorn_config
from reflex_runtime.web.supervisor import bind
from serving.harness import PATIENCE


@dataclass(frozen=True)
class Limits:
    """The settings of a server, short enough for tests that wait for them."""

    max_connections: int = 64
    idle_timeout_s: float = 60.0
    body_timeout_s: float = 60.0
    max_body_bytes: int = 16 * 2**20
    drain_timeout_s: float = 5.0
    ssl_certfile: str = ""
    ssl_keyfile: str = ""


class Ready(Host):
    """A product that is there at once."""

    async def stop(self, until: float, answered: Any) -> bool:
        async with asyncio.timeout_at(until):
            await answered()
        return True


class StillLoop(asyncio.SelectorEventLoop):
    """Its clock moves when a test moves it: no limit of time passes while the machine is busy."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()

    def time(self) -> float:
        return self.now

    async def pass_until(self, what: Callable[[], bool]) -> None:
        """Move it by a hundredth of a second in each turn until something is so."""
        while not what():
            self.now += 0.01
            await asyncio.sleep(0)


@asynccontextmanager
async def listening(app: App, limits: Limits | None = None) -> AsyncIterator[int]:
    """The port of the application; the test fails if the block takes longer than PATIENCE."""
    settings, sock, up = limits or Limits(), bind("127.0.0.1", 0), asyncio.Event()
    host = Ready()
    host.attach(app, settings.drain_timeout_s)
    server = ReflexServer(uvicorn_config(app, settings), host)
    server.on_listening = up.set
    serving = asyncio.ensure_future(server.serve([sock]))
    try:
        async with asyncio.timeout(PATIENCE):
            await up.wait()
            yield sock.getsockname()[1]
    finally:
        host.stopping.set()
        await serving
