"""What a serving process keeps of the memory that was freed."""

import gc
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest

from reflex_runtime.drivers.process_memory import KEPT, LARGE, freeze_loaded, prepare_memory

MB = 2**20
ON_FOUR_THREADS = f"""
import threading

from reflex_runtime.drivers.process_memory import prepare_memory

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
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_memory_is_kept_once_for_all_threads() -> None:
    library = Library()
    prepare_memory({}, lambda name: library)
    assert library.set == {-8: 1, -3: LARGE, -1: KEPT}
    assert gc.get_threshold() == (50_000, 20, 100)


@pytest.mark.parametrize(("name", "value"), [("MALLOC_ARENA_MAX", "4"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")])
def test_settings_of_the_environment_stay(name: str, value: str) -> None:
    library = Library()
    prepare_memory({name: value}, lambda name: library)
    assert library.set == {}


def test_another_c_library_is_left_alone() -> None:
    prepare_memory({}, lambda name: object())
    assert gc.get_threshold() == (50_000, 20, 100)


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
    loaded: list[object] = []
    freeze_loaded()
    assert gc.get_freeze_count() > 0
    assert all(item is not loaded for item in gc.get_objects())
