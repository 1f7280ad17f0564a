"""The event loop of our processes."""

from __future__ import annotations

import asyncio


def loop_factory() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
