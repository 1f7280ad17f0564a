"""The types that `@batched` gives to its callers. `make lint` checks them; nothing here is run."""

from typing import assert_type

from reflex_runtime import batched


@batched
def bare(items: list[int]) -> list[str]:
    return [str(item) for item in items]


@batched(max_batch_size=3)
def called(items: list[int]) -> list[str]:
    return [str(item) for item in items]


@batched
async def coroutine(items: list[int]) -> list[str]:
    return [str(item) for item in items]


@batched(max_batch_size=3)
async def coroutine_called(items: list[int]) -> list[str]:
    return [str(item) for item in items]


class Model:
    @batched
    def bare(self, items: list[int]) -> list[str]:
        return [str(item) for item in items]

    @batched(max_batch_size=3)
    def called(self, items: list[int]) -> list[str]:
        return [str(item) for item in items]

    @batched
    async def coroutine(self, items: list[int]) -> list[str]:
        return [str(item) for item in items]

    @batched(max_batch_size=3)
    async def coroutine_called(self, items: list[int]) -> list[str]:
        return [str(item) for item in items]

    @staticmethod
    @batched
    def static(items: list[int]) -> list[str]:
        return [str(item) for item in items]


async def typed(model: Model) -> None:
    assert_type(bare(1), str)
    assert_type(called(1), str)
    assert_type(await bare.aio(1), str)
    assert_type(await coroutine(1), str)
    assert_type(await coroutine_called(1), str)
    assert_type(model.bare(1), str)
    assert_type(model.called(1), str)
    assert_type(await model.called.aio(1), str)
    assert_type(await model.coroutine(1), str)
    assert_type(await model.coroutine_called(1), str)
    assert_type(model.static(1), str)
