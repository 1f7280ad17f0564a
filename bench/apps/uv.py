"""uvicorn as `reflex serve` runs it, for the applications that are compared with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn
import uvloop


def run(app: Callable[..., Any], port: int) -> None:
    """Serve until terminated."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, http="httptools", lifespan="off", ws="none", access_log=False,
        log_config=None, server_header=False, proxy_headers=False, timeout_keep_alive=75, backlog=4096,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(uvicorn.Server(config).serve())
