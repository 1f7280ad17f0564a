"""An application of the web layer on a port, for tests that run their own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from reflex_runtime.web.app import App
from reflex_runtime.web.connection import HttpConnection
from serving.harness import PATIENCE


@asynccontextmanager
async def listening(app: App) -> AsyncIterator[int]:
    """The port of the application; the test fails if the block takes longer than PATIENCE."""
    server = await asyncio.get_running_loop().create_server(partial(HttpConnection, app), "127.0.0.1", 0)
    try:
        async with asyncio.timeout(PATIENCE):
            yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in app.connections.all():
            connection.give_up()
        await asyncio.sleep(0)
        app.bodies.close()
