"""What the tests of this folder serve: functions as users write them, right ones and careless ones."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np
import PIL.Image
import pydantic
from numpy.typing import NDArray

from reflex_runtime import batched

print("a module that prints when it is imported")

# -- kinds of functions ------------------------------------------------------------------------------------------------


def double(numbers: list[int]) -> list[int]:
    """Twice the number.

    The rest is for the readers of the code.
    """
    return [2 * number for number in numbers]


async def double_async(numbers: list[int]) -> list[int]:
    await asyncio.sleep(0)
    return [2 * number for number in numbers]


@batched
def double_batched(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


@batched(max_batch_size=4)
async def double_batched_async(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


class Doubler:
    """A model that loads."""

    def setup(self, device: str) -> None:
        self.device, self.thread = device, threading.current_thread()

    def predict(self, numbers: list[int]) -> list[int]:
        assert self.device == "cpu"
        assert self.thread is threading.current_thread()
        return [2 * number for number in numbers]


class AsyncDoubler:
    async def setup(self) -> None:
        await asyncio.sleep(0)
        self.factor = 2

    async def predict(self, numbers: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [self.factor * number for number in numbers]


class BatchedDoubler:
    @batched
    def predict(self, numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]


class WithoutSetup:
    def predict(self, numbers: Sequence[int]) -> list[int]:
        return [2 * number for number in numbers]


class _Called:
    def __call__(self, numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]


class _CalledAsync:
    async def __call__(self, numbers: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [2 * number for number in numbers]


def _times(numbers: list[int], factor: int) -> list[int]:
    return [factor * number for number in numbers]


called = _Called()
called_async = _CalledAsync()
partial = functools.partial(_times, factor=2)
plain_lambda = lambda numbers: [2 * number for number in numbers]  # noqa: E731
root = np.sqrt
length = len
estimator = Doubler.__new__(WithoutSetup)
KINDS = (
    "double", "double_async", "double_batched", "double_batched_async", "Doubler", "AsyncDoubler", "BatchedDoubler",
    "WithoutSetup", "called", "called_async", "partial", "plain_lambda", "estimator",
)  # fmt: skip

# -- types -------------------------------------------------------------------------------------------------------------


class Box(msgspec.Struct):
    left: float
    right: float = 1.0


@dataclass
class Person:
    name: str
    age: int = 0
    boxes: list[Box] = field(default_factory=list)


@dataclass
class Family:
    name: str
    age: int = 0
    children: list[Family] = field(default_factory=list)


class Query(TypedDict):
    text: str
    top: int | None


class Order(pydantic.BaseModel):
    count: Annotated[int, pydantic.Field(ge=1)]
    name: str = "nobody"


class Scene(msgspec.Struct):
    """Everything in one."""

    camera: PIL.Image.Image
    matrix: NDArray[np.float32]
    kind: Literal["day", "night"] = "day"
    person: Person | None = None
    raw: bytes = b""


def arrays(items: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    assert all(item.dtype == np.float32 for item in items)
    return [item * 2 for item in items]


def whole(items: list[NDArray[np.uint8]]) -> list[int]:
    return [int(item.sum()) for item in items]


def any_array(items: list[np.ndarray]) -> list[str]:
    return [f"{item.dtype} {item.shape}" for item in items]


def boxes(items: list[Box]) -> list[Box]:
    return [Box(item.right, item.left) for item in items]


def people(items: list[Person]) -> list[str]:
    return [f"{item.name} {item.age} {len(item.boxes)}" for item in items]


def families(items: list[Family]) -> list[int]:
    return [1 + len(item.children) for item in items]


def queries(items: list[Query]) -> list[Query]:
    return [{"text": item["text"].upper(), "top": item.get("top")} for item in items]


def orders(items: list[Order]) -> list[Order]:
    return [Order(count=item.count + 1, name=item.name) for item in items]


def pictures(items: list[PIL.Image.Image]) -> list[PIL.Image.Image]:
    return [item.resize((item.width * 2, item.height)) for item in items]


def raw_bytes(items: list[bytes]) -> list[bytes]:
    return [item[::-1] for item in items]


def texts(items: list[str]) -> list[str]:
    return [item.upper() for item in items]


def words(items: list[Literal["yes", "no"]]) -> list[bool]:
    return [item == "yes" for item in items]


def maybe(items: list[int | None]) -> list[int | None]:
    return items


def scenes(items: list[Scene]) -> list[dict[str, Any]]:
    return [
        {
            "size": list(item.camera.size), "sum": item.matrix.sum(), "kind": item.kind, "raw": len(item.raw),
            "name": item.person.name if item.person else None,
        }
        for item in items
    ]  # fmt: skip


def anything(items):  # type: ignore[no-untyped-def]
    return items


TYPES = (
    "arrays", "whole", "any_array", "boxes", "people", "families", "queries", "orders", "pictures", "raw_bytes",
    "texts", "words", "maybe", "scenes", "anything",
)  # fmt: skip

# -- results and faults ------------------------------------------------------------------------------------------------


class Panic(BaseException):
    """As that of Rust."""


_once: set[str] = set()
_loop: list[Any] = []


def result(items: list[str]) -> list[Any]:
    """A result of the kind that the item names. What it names may also be raised, for the whole call."""
    for item in items:
        fault(item, items)
    if "short" in items:
        return [1] * (len(items) - 1)
    if "dict" in items:
        return dict.fromkeys(items, 1)  # type: ignore[return-value]
    if "generator" in items:
        return (item for item in items)  # type: ignore[return-value]
    if "none" in items:
        return None  # type: ignore[return-value]
    if "clear" in items:
        count = len(items)
        items.clear()
        return [1] * count
    return [made(item) for item in items]


RAISED = {
    "raises": ValueError, "panic": Panic, "exit": SystemExit, "interrupt": KeyboardInterrupt,
    "left": GeneratorExit, "cancelled": asyncio.CancelledError, "memory": MemoryError, "deep": RecursionError,
    "stop": StopIteration,
}  # fmt: skip


def fault(item: str, items: list[str]) -> None:
    if item in RAISED:
        raise RAISED[item]("it is " + item)
    if item == "once" and item not in _once:
        _once.add(item)
        raise ValueError("only this time")


def made(item: str) -> Any:
    nested: list[Any] = []
    nested.append(nested)
    return {
        "array": np.arange(3), "scalar": np.float32(1.5), "index": np.int64(7), "truth": np.bool_(True),
        "picture": PIL.Image.new("RGB", (2, 1)), "bytes": b"\0\xff", "nothing": None, "nan": float("nan"),
        "huge": 10**30, "set": {1}, "objects": np.array([object()]), "circle": nested, "complex": 1j,
        "own error": ValueError("of this item"), "object": object(), "tuple": (1, 2), "struct": Box(1.0),
        "model": Order(count=1), "text": np.str_("text"), "keys": {(1, 2): 3}, "surrogate": "\ud800",
    }.get(item, item)  # fmt: skip


# -- careless ones -----------------------------------------------------------------------------------------------------

_database = sqlite3.connect(":memory:")
_seen: contextvars.ContextVar[int] = contextvars.ContextVar("_seen", default=0)


def database(items: list[int]) -> list[int]:
    return [_database.execute("select ?", (item,)).fetchone()[0] for item in items]


def own_loop(items: list[int]) -> list[int]:
    async def one(item: int) -> int:
        await asyncio.sleep(0)
        return item + 1

    async def every() -> list[int]:
        return await asyncio.gather(*map(one, items))

    return asyncio.run(every())


def contexts(items: list[int]) -> list[int]:
    """What a call sets, the next one does not see."""
    before = _seen.get()
    _seen.set(before + 1)
    return [before] * len(items)


def threads(items: list[int]) -> list[int]:
    found: dict[int, int] = {}
    workers = [
        threading.Thread(target=lambda i=i, item=item: found.update({i: item + 1})) for i, item in enumerate(items)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [found[i] for i in range(len(items))]


CARELESS = ("database", "own_loop", "contexts", "threads")

# -- streams -----------------------------------------------------------------------------------------------------------

_closed: list[str] = []
_kept: list[Iterator[str]] = []


def counts(items: list[int]) -> Iterator[list[int | None]]:
    """0, 1, … up to the item, of all that came together."""
    try:
        for step in range(max(items)):
            yield [step if step < item else None for item in items]
    finally:
        _closed.append(f"counts {items}")


def each(items: list[int]) -> list[Iterator[int]]:
    return [_each(item) for item in items]


def _each(item: int) -> Iterator[int]:
    try:
        for step in range(item):
            if item == 13 and step == 3:
                raise ValueError("thirteen")
            if item == 14:
                raise ValueError("at once")
            if item == 15 and step == 1:
                raise SystemExit(15)
            yield step
    finally:
        _closed.append(f"each {item}")


async def counts_async(items: list[int]) -> AsyncIterator[list[int]]:
    try:
        for step in range(max(items)):
            await asyncio.sleep(0)
            yield [step] * len(items)
    finally:
        _closed.append(f"async {items}")


def endless(items: list[int]) -> list[Iterator[str]]:
    _kept.extend(_endless(item) for item in items)  # so that forgetting them closes none
    return _kept[-len(items) :]


def _endless(item: int) -> Iterator[str]:
    try:
        while True:
            yield "x" * item
    finally:
        _closed.append(f"endless {item}")
        if item == 16:
            raise ValueError("it does not close")


async def endless_async(items: list[int]) -> AsyncIterator[list[str]]:
    try:
        while True:
            await asyncio.sleep(0)
            yield ["x" * item for item in items]
    finally:
        _closed.append(f"endless_async {items}")


def closed(items: list[int]) -> list[list[str]]:
    """Which generators were closed."""
    return [list(_closed) for _ in items]


STREAMS = ("counts", "each", "counts_async", "endless", "endless_async", "closed")

# -- time --------------------------------------------------------------------------------------------------------------

_gate = threading.Event()


def slow(items: list[int]) -> list[int]:
    time.sleep(0.002)
    return [len(items)] * len(items)


_computed: list[str] = []


def computed(items: list[str]) -> list[Any]:
    """The item; of "?" all that came before."""
    _computed.extend(items)
    return [_computed if item == "?" else item for item in items]


def hangs(items: list[int]) -> list[int]:
    """One that gets 13 does not come back."""
    if 13 in items:
        _gate.wait()
    return items
