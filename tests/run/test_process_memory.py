"""What a serving process keeps of the memory that was freed."""

import asyncio
import gc
import os
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest

from reflex_runtime.llm.runners.runner import free_bytes
from reflex_runtime.run.process import (
    BUSY,
    COLLECTIONS,
    KEPT,
    LARGE,
    LONGEST,
    FreedMemory,
    freed_memory,
    freeze_loaded,
    give_back_when_idle,
    prepare_memory,
)

MB = 2**20
ON_FOUR_THREADS = f"""
import threading

from reflex_runtime.run.process import prepare_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def pictures():
    held = [b"1" * 150_000 for _ in range(200)]
    del held
    freed.release()
    end.wait()

prepare_memory()
freed, end = threading.Semaphore(0), threading.Event()
before = resident()
for _ in range(2):
    b"1" * 31 * {MB}
large = resident()
for _ in range(4):
    threading.Thread(target=pictures).start()
    freed.acquire()
print(large - before, resident() - before)
end.set()
"""


class Library:
    """The C library, as far as it is called."""

    def __init__(self) -> None:
        self.set: dict[int, int] = {}

    def mallopt(self, parameter: int, value: int) -> int:
        self.set[parameter] = value
        return 1


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    """Each collection looks only at what its test has made."""
    threshold = gc.get_threshold()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_memory_is_kept_once_for_all_threads() -> None:
    library = Library()
    prepare_memory({}, lambda name: library)
    assert library.set == {-8: 1, -3: LARGE, -1: KEPT}
    assert gc.get_threshold() == COLLECTIONS


@pytest.mark.parametrize(("name", "value"), [("MALLOC_ARENA_MAX", "4"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")])
def test_settings_of_the_environment_stay(name: str, value: str) -> None:
    library = Library()
    prepare_memory({name: value}, lambda name: library)
    assert library.set == {}


def test_another_c_library_is_left_alone() -> None:
    prepare_memory({}, lambda name: object())
    assert gc.get_threshold() == COLLECTIONS


def test_an_interpreter_that_cannot_be_asked_for_its_c_library_serves_too() -> None:
    def load(name: None) -> object:
        raise OSError("Dynamic loading not supported")

    prepare_memory({}, load)
    assert freed_memory(load) is None


def test_a_moment_without_a_free_descriptor_does_not_end_the_giving_back() -> None:
    def resident() -> int:
        raise OSError(24, "Too many open files")

    async def check() -> None:
        memory = FreedMemory(lambda: MB, lambda pad: None)
        memory._resident = resident
        task = asyncio.create_task(give_back_when_idle(lambda: 1, memory, 0.0))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()

    asyncio.run(check())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_what_threads_have_freed_is_used_again_and_a_large_array_goes_back() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    told = subprocess.run(
        [sys.executable, "-c", ON_FOUR_THREADS], stdout=subprocess.PIPE, text=True, check=True, env=env
    )
    large, four = (int(word) for word in told.stdout.split())
    assert large < 4 * MB, "a freed array of 31 MB stays"
    assert four < KEPT + 8 * MB, "each of four threads keeps the pictures that it has freed"


def test_loaded_objects_are_frozen() -> None:
    gc.unfreeze()
    loaded: list[object] = []
    freeze_loaded()
    assert gc.get_freeze_count() > 0
    assert all(item is not loaded for item in gc.get_objects())


class Resident:
    """Memory of a process, of which `free` bytes are free and kept."""

    def __init__(self) -> None:
        self.used, self.free, self.trims = 100 * MB, 0, 0

    def __call__(self) -> int:
        return self.used + self.free

    def trim(self, pad: int) -> None:
        self.free, self.trims = 0, self.trims + 1


def test_freed_memory_goes_back_once_the_process_has_become_much_larger() -> None:
    memory, now = Resident(), 0.0
    freed = FreedMemory(memory, memory.trim, lambda: now)
    memory.free = LARGE
    freed.give_back()
    assert memory.trims == 0
    memory.free += MB
    freed.give_back()
    assert (memory.trims, memory.free) == (1, 0)
    memory.used += 3 * LARGE  # another model: it cannot go back, and is not tried again and again
    for _ in range(3):
        freed.give_back()
    assert memory.trims == 2
    memory.used, memory.free = memory.used - 3 * LARGE, 3 * LARGE  # it was held, and is free
    freed.give_back()
    assert memory.trims == 2
    now += 1.0
    freed.give_back()
    assert (memory.trims, memory.free) == (3, 0)


def test_what_cannot_go_back_is_tried_later_and_later() -> None:
    memory, now, tries = Resident(), 0.0, list[float]()
    freed = FreedMemory(memory, lambda pad: tries.append(now), lambda: now)
    memory.used += 2 * LARGE
    while now < 2 * LONGEST:
        freed.give_back()
        now += 1.0
    gaps = [later - sooner for sooner, later in pairwise(tries)]
    assert gaps[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(gaps) <= LONGEST


def test_requests_that_waited_in_a_burst_are_collected() -> None:
    class Request:
        def __init__(self) -> None:
            self.itself = self

    request = Request()
    gc.collect()  # it is old now
    gone, memory = weakref.ref(request), Resident()
    del request
    freed = FreedMemory(memory, memory.trim)
    memory.free = 2 * LARGE
    freed.give_back()
    assert gone() is None


def test_freed_memory_goes_back_while_nobody_asks() -> None:
    memory, asked, looks = Resident(), 0, 0

    def count() -> int:
        nonlocal asked, looks
        looks += 1
        asked += looks < 5  # each time another one, until the fifth
        return asked

    async def wait() -> None:
        given = asyncio.Event()

        def trim(pad: int) -> None:
            memory.trim(pad)
            given.set()

        freed = FreedMemory(memory, trim)
        memory.free = 4 * LARGE
        task = asyncio.create_task(give_back_when_idle(count, freed, 0.0))
        await given.wait()
        task.cancel()

    asyncio.run(wait())
    assert (looks, memory.free) == (5, 0)


def test_much_freed_memory_goes_back_although_somebody_asks_all_the_time() -> None:
    memory, asked = Resident(), count()
    freed = FreedMemory(memory, memory.trim)

    async def turns() -> None:
        task = asyncio.create_task(give_back_when_idle(lambda: next(asked), freed, 0.0))
        for _ in range(3 * BUSY):
            await asyncio.sleep(0)
        task.cancel()

    memory.free = 4 * LARGE
    asyncio.run(turns())
    assert memory.trims == 0
    memory.free += MB
    asyncio.run(turns())
    assert memory.trims == 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc gives it back")
def test_this_process_can_give_back_and_another_c_library_cannot() -> None:
    freed = freed_memory()
    assert freed is not None
    assert freed._resident() > MB
    freed._trim(0)
    assert freed_memory(lambda name: object()) is None


def test_free_memory_is_that_of_the_machine_or_what_the_container_has_left(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000000 kB\nMemAvailable:    8000000 kB\n")

    def free() -> int:
        return free_bytes("cpu", meminfo, tmp_path)

    assert free() == 8_192_000_000
    for limit, stat, name in (
        ("memory.max", "memory.stat", "anon"),
        ("memory/memory.limit_in_bytes", "memory/memory.stat", "total_rss"),
    ):
        (tmp_path / limit).parent.mkdir(exist_ok=True)
        (tmp_path / limit).write_text("1000000000\n")
        assert free() == 1_000_000_000
        (tmp_path / stat).write_text(f"file 700000000\n{name} 400000000\n{name}_thp 1\n")
        assert free() == 600_000_000
        (tmp_path / stat).write_text(f"{name} 1400000000\n")  # it swaps
        assert free() == 0
        (tmp_path / limit).write_text("max\n")
        assert free() == 8_192_000_000
    meminfo.unlink()
    assert free() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
