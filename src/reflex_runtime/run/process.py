"""A process around its drivers: event loop, slow calls, forks, memory, and no telemetry.

By default glibc has a memory pool for each thread, and returns little to the system after arrays of some megabytes were
freed. Pictures are decoded on several threads and batches filled on two, so every pool grows to its own peak: of a
server of 245 MB, 120 MB were unused.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakSet

from reflex_runtime.core.errors import Closed


def loop_factory() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# -- telemetry of the inference libraries ------------------------------------------------------------------------------


def telemetry_off() -> None:
    """Switch off telemetry of the inference libraries. Call it before importing onnxruntime or openvino.

    onnxruntime reads its variable when it is imported; child processes inherit it. openvino reports its import through
    the package `openvino_telemetry`, and uses a stub where that is missing.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # its import fails: the stub is used


# -- a slow call -------------------------------------------------------------------------------------------------------


T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Run it in a daemon thread, so that the process can end meanwhile. Cancelling the caller does not stop it."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)
        except BaseException as error:  # a SystemExit or a panic would end the caller's loop
            done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=run, name="reflex-load", daemon=True).start()
    return await asyncio.wrap_future(done)


# -- another process ---------------------------------------------------------------------------------------------------


def ending(status: int) -> str:
    """How a process ended, in words. status: as `subprocess` gives it."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


# -- a fork ------------------------------------------------------------------------------------------------------------


_with_threads: WeakSet[Any] = WeakSet()


def tell_of_forks(one: Any) -> None:
    """Call its `forked()` first in every process that is forked from this one: its threads are not there, and may hold
    locks."""
    _with_threads.add(one)


def _tell_all() -> None:
    for one in list(_with_threads):
        one.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell_all)


class Forked(Closed):
    """The object belongs to the parent process."""


class ForkedLock:
    """The lock of an object whose threads stayed in the parent process: raises instead of waiting."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        raise Forked(f"{self._name}: its threads are in the process that this one was forked from: make a new one here")

    def __exit__(self, *_: object) -> None:
        return


# -- memory ------------------------------------------------------------------------------------------------------------


LARGE: Final = 16 * 2**20
"""Bytes: larger arrays get memory from the system, which they return when they are freed. Fresh pages cost 1 ms per
20 MB, more than copying batches of 32 pictures."""
KEPT: Final = 2 * LARGE  # bytes at the end of the pool that may stay unused
IDLE: Final = 0.25  # seconds without a new request after which freed memory is returned
BUSY: Final = 40  # times as long with requests, after which it is returned too
LONGEST: Final = 600.0  # most seconds between two tries, after some that returned nothing

COLLECTIONS: Final = (10_000, 3, 1_000)  # `gc.set_threshold`: requests make few cycles, and each collection visits the
# waiting ones, 1.5 ms for 10,000 of them
_MALLOC: Final = ((-8, 1), (-3, LARGE), (-1, KEPT))  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h


def prepare_memory(environ: Mapping[str, str] = os.environ, load: Callable[[None], Any] = ctypes.CDLL) -> None:
    """Set up this process to serve, before threads start: running ones keep their pools.

    Settings of malloc in the environment stay. Without glibc only Python's collector is set.
    """
    gc.set_threshold(*COLLECTIONS)
    if any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = _function("mallopt", load)
    if mallopt is not None:
        for parameter, value in _MALLOC:
            mallopt(parameter, value)


def freeze_loaded() -> None:
    """Collect now, and exclude all objects from later collections: loaded ones stay."""
    gc.collect()
    gc.freeze()


class FreedMemory:
    """Memory that this process freed and its allocator kept.

    resident: bytes of memory that the process has. trim: gives free memory back, also between used parts.
    """

    def __init__(
        self, resident: Callable[[], int], trim: Callable[[int], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._resident, self._trim, self._clock = resident, trim, clock
        self._least = resident()  # so far
        self._wait, self._next = 0.0, -inf  # seconds between tries, and when the next one may be

    def give_back(self, large: int = LARGE) -> None:
        """Give it back if the process has grown by `large` bytes. That takes some milliseconds; after a try that gave
        nothing back the next one is later and later.

        Requests and connections are in reference cycles. Those that waited in a burst are old by then, and only a full
        collection finds them.
        """
        resident = self._resident()
        self._least = min(self._least, resident)
        if resident <= self._least + large or self._clock() < self._next:
            return
        gc.collect()
        self._trim(0)
        left = self._resident()
        self._least = min(self._least, left)
        self._wait = 0.0 if left < resident - LARGE // 2 else min(2 * self._wait or 1.0, LONGEST)
        self._next = self._clock() + self._wait


def freed_memory(load: Callable[[None], Any] = ctypes.CDLL) -> FreedMemory | None:
    """`FreedMemory` of this process; None without Linux and glibc."""
    trim = _function("malloc_trim", load)
    return FreedMemory(_resident, trim) if trim is not None and _STATM.exists() else None


def _function(name: str, load: Callable[[None], Any]) -> Callable[..., Any] | None:
    """A function of the C library, or None."""
    try:
        found: Callable[..., Any] | None = getattr(load(None), name, None)
    except OSError:  # the interpreter is linked statically
        return None
    return found


_STATM: Final = Path("/proc/self/statm")


def _resident() -> int:
    return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


CGROUP: Final = Path("/sys/fs/cgroup")
_GROUP_FILES: Final = (  # of versions 2 and 1: the limit, and what is used and no cache of files
    ("memory.max", "memory.stat", "anon"),
    ("memory/memory.limit_in_bytes", "memory/memory.stat", "total_rss"),
)


def container_memory(cgroup: Path = CGROUP) -> tuple[int, int] | None:
    """(bytes that the container may use, bytes that its processes use); None without a limit."""
    for limit, stat, name in _GROUP_FILES:
        with suppress(OSError, UnicodeDecodeError):
            text, used = (cgroup / limit).read_text(encoding="ascii").strip(), 0
            if text.isdigit():  # else "max": no limit
                with suppress(OSError):
                    lines = map(str.split, (cgroup / stat).read_text(encoding="ascii").splitlines())
                    used = sum(int(words[1]) for words in lines if words[0] == name)
                return int(text), used
    return None


async def give_back_when_idle(asked: Callable[[], int], freed: FreedMemory, idle: float = IDLE) -> None:
    """Give memory back between requests, until cancelled. asked: the number of requests so far. While they never pause,
    only much memory goes back, and seldom."""
    before, busy = -1, 0
    while True:
        await asyncio.sleep(idle)
        now = asked()
        busy = 0 if now == before else busy + 1
        if busy % BUSY == 0:
            with suppress(OSError):  # no file may be open just now
                freed.give_back(4 * LARGE if busy else LARGE)
        before = now
