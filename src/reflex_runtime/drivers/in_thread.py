"""A slow call in a thread of its own, awaited on the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Run it in a daemon thread: the process can end while it runs. If the caller is cancelled, the thread goes on."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)
        except BaseException as error:  # SystemExit, or a panic in a library's own code, must reach the caller too
            done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=run, name="reflex-load", daemon=True).start()
    return await asyncio.wrap_future(done)
