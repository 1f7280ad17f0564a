"""`@batched` on methods: every object batches apart, and what runs for it ends when it goes."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from reflex_runtime.core.errors import Closed, ProcessorError
from reflex_runtime.run.batched import batched
from run.helpers import PATIENCE, run


class Adder:
    """Adds its own number, once its gate is open."""

    def __init__(self, by: int, is_open: bool = True) -> None:
        self.by = by
        self.calls: list[list[int]] = []
        self.entered, self.gate = threading.Event(), threading.Event()
        if is_open:
            self.gate.set()

    @batched(max_batch_size=8)
    def add(self, items: list[int]) -> list[int]:
        """Each item and the object's number."""
        self.calls.append(list(items))
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        return [item + self.by for item in items]

    @batched
    async def later(self, items: list[int]) -> list[int]:
        self.calls.append(list(items))
        return [item + self.by for item in items]

    @batched
    def fail(self, items: list[int]) -> list[int]:
        raise ValueError(self.by)

    @batched
    def count(self, items: list[Any]) -> list[int]:
        return [len(items)] * len(items)


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"{name}-")]


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(PATIENCE)
    return not any(thread.is_alive() for thread in threads)


def test_objects_batch_apart_and_side_by_side() -> None:
    held, other = Adder(1, is_open=False), Adder(100)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(held.add, 1)
        assert held.entered.wait(PATIENCE)
        assert other.add(1) == 101  # though the other object's call still runs
        rest = [pool.submit(held.add, item) for item in (2, 3)]
        held.gate.set()
        assert [f.result() for f in (first, *rest)] == [2, 3, 4]
    assert (sorted(item for call in held.calls for item in call), other.calls) == ([1, 2, 3], [[1]])
    assert held.add.close()
    assert other.add.close()


def test_coroutines_of_two_objects_never_meet() -> None:
    one, ten = Adder(1), Adder(10)

    async def main() -> list[int]:
        return await asyncio.gather(one.later(1), ten.later(1), one.later(2), ten.later(2), one.add.aio(5))

    assert run(main()) == [2, 11, 3, 12, 6]
    assert ([1, 2] in one.calls, ten.calls) == (True, [[1, 2]])
    assert one.add.close()


def test_an_object_is_told_by_identity() -> None:
    @dataclass
    class Equal:  # without a hash
        by: int
        calls: list[list[int]] = field(default_factory=list, compare=False)

        @batched
        def add(self, items: list[int]) -> list[int]:
            self.calls.append(list(items))
            return [item + self.by for item in items]

    one, same = Equal(1), Equal(1)
    assert one == same
    assert (one.add(1), same.add(2)) == (2, 3)
    other = copy.copy(one)
    other.by, other.calls = 5, []
    assert (other.add(1), one.add(1)) == (6, 2)
    assert (one.calls, same.calls, other.calls) == ([[1], [1]], [[2]], [[1]])


def test_closing_it_for_one_object_leaves_the_others() -> None:
    one, other = Adder(1), Adder(2)
    assert one.add(1) == 2
    assert one.add.close()
    with pytest.raises(Closed):
        one.add(1)
    assert other.add(1) == 3
    assert other.add.close()


def test_it_looks_like_the_method() -> None:
    adder = Adder(1)
    for method in (adder.add, Adder.add):
        assert (method.__name__, method.__doc__) == ("add", "Each item and the object's number.")  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"Adder.add is a method: call it on an object, with one item"):
        Adder.add(1)


def test_a_subclass_has_its_own_and_reaches_its_parents() -> None:
    class Twice(Adder):
        @batched
        def add(self, items: list[int]) -> list[int]:
            parent = super()
            with ThreadPoolExecutor(len(items)) as pool:
                return list(pool.map(lambda item: 2 * parent.add(item), items))

    twice = Twice(1)
    assert (twice.add(1), Adder(1).add(1)) == (4, 2)


# -- life --------------------------------------------------------------------------------------------------------------


def test_whoever_calls_keeps_the_object_alive() -> None:
    assert Adder(1).add(1) == 2
    add = Adder(2).add
    gc.collect()
    assert add(1) == 3
    assert run(Adder(3).later(1)) == 4
    assert run(Adder(3).add.aio(1)) == 4


def test_an_object_that_goes_takes_its_thread_along() -> None:
    adder = Adder(1)
    assert (adder.add(1), adder.count(adder), run(adder.later(1))) == (2, 1, 2)  # an item may be the object itself
    with pytest.raises(ProcessorError, match="ValueError: 1"):
        adder.fail(1)
    threads = [thread for name in ("add", "count", "fail") for thread in threads_of(name)]
    assert len(threads) >= 3
    gone, key = weakref.ref(adder), id(adder)
    del adder
    gc.collect()
    assert gone() is None
    assert ended(threads)
    assert not any(key in vars(Adder)[name]._bound for name in ("add", "later", "count", "fail"))


def test_an_object_may_go_while_its_own_thread_is_decided_on() -> None:
    """The garbage collector runs wherever memory is asked for: also while the lock is held that a stop needs."""
    adder = Adder(1)
    assert adder.add(1) == 2
    threads = threads_of("add")
    device = adder.add._driver.device
    box = [adder]
    del adder

    def collect() -> None:
        with device._lock:
            box.clear()
            gc.collect()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(PATIENCE)
    assert not collecting.is_alive()
    assert ended(threads)


def test_an_object_that_cannot_be_referred_to_weakly_is_told_so() -> None:
    class Slots:
        __slots__ = ()

        @batched
        def run(self, items: list[int]) -> list[int]:
            return items

    class Referable(Slots):
        __slots__ = ("__weakref__",)

    with pytest.raises(TypeError, match=r"Slots.run: a Slots cannot be referred to weakly; add '__weakref__'"):
        Slots().run(1)
    assert Referable().run(1) == 1


# -- what is no method of an object ------------------------------------------------------------------------------------


def test_static_methods_are_functions_in_either_order() -> None:
    class Holder:
        @staticmethod
        @batched
        def inner(items: list[int]) -> list[int]:
            return [-item for item in items]

        @batched
        @staticmethod
        def outer(items: list[int]) -> list[int]:
            return [-item for item in items]

        @batched()
        @staticmethod
        async def awaited(items: list[int]) -> list[int]:
            return [-item for item in items]

    assert (Holder.inner(1), Holder().inner(2), Holder.outer(3), Holder().outer(4)) == (-1, -2, -3, -4)
    assert run(Holder().awaited(5)) == -5
    assert Holder.inner.close()
    assert Holder.outer.close()


def test_class_methods_are_refused_where_they_are_written() -> None:
    with pytest.raises(TypeError, match=r"outer is a class method; write a static method, or a function outside"):

        class Outer:
            @batched
            @classmethod
            def outer(cls, items: list[int]) -> list[int]:
                return items

    with pytest.raises(TypeError, match=r"inner is a class method; write a static method, or a function outside"):

        class Inner:
            @classmethod
            @batched
            def inner(cls, items: list[int]) -> list[int]:
                return items


def test_a_method_of_something_else_than_one_list_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match=r"two\(self, .*: must take one argument besides self, the list of items"):

        class Two:
            @batched
            def two(self, a: list[int], b: int) -> list[int]:
                return a

    with pytest.raises(TypeError, match="made is a generator function; it must return a list"):

        class Made:
            @batched
            def made(self, items: list[int]) -> Any:
                yield from items
