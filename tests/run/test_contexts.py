"""A batch belongs to no caller: the context variables of one are not those of its neighbours."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.run.batched import batched
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.processor import BaseProcessor
from run.helpers import PATIENCE, asleep, run

user: ContextVar[str] = ContextVar("user", default="nobody")


def users(items: list[str]) -> list[str]:
    """Who calls, as the function sees it, for each item. What it sets is its own."""
    seen = user.get()
    user.set("the function")
    return [seen] * len(items)


@batched
def of_thread(items: list[str]) -> list[str]:
    return [user.get() for _ in items]


@batched
async def of_loop(items: list[str]) -> list[str]:
    await asyncio.sleep(0)
    return users(items)


def test_a_function_sees_no_caller() -> None:
    user.set("the test")
    assert of_thread("item") == "nobody"


def test_a_coroutine_sees_no_caller_and_changes_none() -> None:
    async def ask(name: str) -> tuple[str, str]:
        user.set(name)
        return await of_loop("item"), user.get()

    async def main() -> None:
        names = ["ann", "ben", "cai"]
        assert await asyncio.gather(*map(ask, names)) == [("nobody", name) for name in names]

    run(main())


def test_nor_does_a_batch_that_runs_on_the_loop_of_its_callers() -> None:
    class Sees(BaseProcessor):
        any_thread = True

        def run(self, batch: Batch) -> list[tuple[str, bool]]:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return [(user.get(), False)] * len(batch)
            return [(user.get(), True)] * len(batch)

    async def main() -> None:
        groups = [GroupConfig(flush=FlushPolicy.by_size(1, 0.0))]
        batcher = Batcher({"default": Sees()}, groups, clock=lambda: 64.0)  # each batch is brief
        async with batcher, asyncio.timeout(PATIENCE):
            user.set("ann")
            on_loop = False
            while not on_loop:  # after a few on the device's thread
                await asleep(batcher)
                seen, on_loop = await batcher.run(Request("item"))
                assert seen == "nobody"

    run(main())
