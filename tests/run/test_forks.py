"""Objects with threads know their process: in a child of a fork they start anew, or say so at once."""

from __future__ import annotations

import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from reflex_runtime.run.batched import batched
from reflex_runtime.run.coordinator import BatchCoordinator
from run.helpers import PATIENCE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def in_child(work: Callable[[], Any]) -> str:
    """What `work` returns or raises in a child of a fork."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: this process has threads. It is the point
        child = os.fork()
    if not child:
        try:
            text = f"{work()}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], PATIENCE)
        if not ready:
            os.kill(child, signal.SIGKILL)
        return os.read(read, 10_000).decode() if ready else "hangs"
    finally:
        os.close(read)
        os.waitpid(child, 0)


def test_a_function_that_was_used_before_a_fork_starts_anew_in_the_child() -> None:
    @batched
    def double(numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    assert double(1) == 2
    assert in_child(lambda: double(2)) == "4"
    assert double(3) == 6
    assert double.close()


def test_so_do_the_methods_of_an_object_and_the_sinks_stay() -> None:
    class Model:
        @batched
        def double(self, numbers: list[int]) -> list[int]:
            return [2 * number for number in numbers]

    model, seen = Model(), list[str]()
    model.double.add_sink(lambda event: seen.append(type(event).__name__))
    assert model.double(1) == 2

    def work() -> Any:
        seen.clear()
        return model.double(2), "BatchFinished" in seen, Model().double(3)

    assert in_child(work) == "(4, True, 6)"


def test_a_function_may_be_forked_while_its_call_runs() -> None:
    inside: list[str] = []

    @batched
    def forks(items: list[str]) -> list[str]:
        if items == ["outer"]:
            inside.append(in_child(lambda: forks("inner")))
        return items

    assert forks("outer") == "outer"
    assert inside == ["inner"]
    assert forks.close()


def test_a_coordinator_says_at_once_that_its_thread_is_elsewhere() -> None:
    class Echo:
        id = "echo"

        def process(self, entries: Sequence[Any]) -> list[Any]:
            return [entry.frame for entry in entries]

    with BatchCoordinator(Echo()) as handle:
        assert handle.submit_and_wait("cam", 1) == 1
        for ask in (lambda: handle.submit("cam", 2), lambda: handle.submit_and_wait("cam", 2)):
            said = in_child(ask)
            assert said.startswith("Forked: reflex-echo: ")
        assert handle.submit_and_wait("cam", 3) == 3


def test_a_child_that_touches_nothing_ends_as_usual() -> None:
    @batched
    def echo(items: list[int]) -> list[int]:
        return items

    assert echo(1) == 1
    assert in_child(lambda: sys.getrefcount(echo) > 0) == "True"
    assert echo.close()
