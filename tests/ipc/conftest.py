"""A collection of garbage looks only at what the tests of a module have made: all that was imported before them, in a
run of everything, takes a quarter of a second each time, and nearly every test here collects twice."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _only_new_objects() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
