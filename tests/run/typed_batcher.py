"""The types of a `Batcher`'s values: those of its processors. `make lint` checks them; nothing here is run."""

from collections.abc import Sequence
from typing import Any, assert_type

from reflex_runtime import BaseProcessor, Batch, Batcher, FunctionProcessor, Processor, Request


def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


class Own(BaseProcessor):
    def run(self, batch: Batch) -> list[float | ValueError]:
        return [1.0 for _ in batch.grants]


class Untyped(BaseProcessor):
    def run(self, batch: Batch) -> Sequence[Any]:
        return []


async def values(some: Processor) -> None:
    assert_type(FunctionProcessor(lengths), FunctionProcessor[str, int])
    async with Batcher({"default": FunctionProcessor(lengths)}) as batcher:
        assert_type(await batcher.run(Request("text")), int)
    async with Batcher({"default": Own()}) as own:
        assert_type(await own.run(Request()), float)
    assert_type(Batcher({"default": Untyped()}), Batcher[Any])
    assert_type(Batcher({"default": some}), Batcher[Any])
