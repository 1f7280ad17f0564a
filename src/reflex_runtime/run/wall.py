"""What is an item's fault: everything that it raises but an interrupt.

Some libraries raise classes that are no `Exception` (Rust's `PanicException`, for one odd input). They are faults like
any other, but pass every `except Exception` and end the thread, the loop or the server that runs the item.
"""

from __future__ import annotations

import asyncio
import os
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final


class Panic(Exception):
    """What was raised is no `Exception`: its class and text. `__cause__` is it."""


_PASSED: Final = (str(Path(__file__).parents[1]) + os.sep, "<")  # ours, and frozen modules
_LIBRARIES: Final = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


def place_of(error: BaseException) -> str:
    """Where an exception was raised, `good.py, line 3`: the innermost call in code of the user's own, else in that of
    an installed package. "" where it was raised in neither."""
    found, trace = "", error.__traceback__
    own = False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        installed = "site-packages" in file or "dist-packages" in file
        if not file.startswith(_PASSED) and (installed or not file.startswith(_LIBRARIES)):
            if not (own and installed):
                found = f"{os.path.basename(file)}, line {trace.tb_lineno}"
            own = own or not installed
        trace = trace.tb_next
    return found


class Wall:
    """Around a call of a user's or a library's code: `with WALL:`. Out of it comes an Exception, or an interrupt.

    Any other class becomes a `Panic`. interrupts: what is not the item's fault, and ends whatever runs it.
    """

    def __init__(self, *interrupts: type[BaseException]) -> None:
        self._passes: tuple[type[BaseException], ...] = (Exception, *interrupts)

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, self._passes):
            return
        traceback.clear_frames(trace)  # they hold the items of the call
        raise Panic(f"{type(error).__name__}: {error}") from error


WALL: Final = Wall(KeyboardInterrupt, SystemExit, GeneratorExit)
"""Around a plain function: nobody can cancel it, so a CancelledError is its own."""
ASYNC_WALL: Final = Wall(KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Around an `await`."""
