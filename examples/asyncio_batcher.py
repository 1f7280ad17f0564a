"""The asyncio driver with a cost budget, two clients of different appetite, and every batch seen as it forms."""

import asyncio

from reflex_runtime import Batcher, BatchFinished, Event, FlushPolicy, FunctionProcessor, GroupConfig, Request


def model(payloads: list[int]) -> list[int]:
    """Stands for a model that takes a list."""
    return [payload * payload for payload in payloads]


def watch(event: Event) -> None:
    """A sink: the one way to observe anything."""
    if isinstance(event, BatchFinished) and event.batch.id <= 5:
        members = ", ".join(str(ticket.request.client) for ticket in event.batch.grants)
        print(f"batch {event.batch.id}: {event.batch.cause.value}, {members}")


async def main() -> None:
    group = GroupConfig(flush=FlushPolicy.window(max_batch_cost=0.100, batch_timeout=0.005))
    async with Batcher({"default": FunctionProcessor(model)}, [group], sinks=[watch]) as batcher:
        modest = [batcher.run(Request(n, client="modest")) for n in range(4)]
        greedy = [batcher.run(Request(n, client="greedy")) for n in range(40)]
        answers = await asyncio.gather(*greedy, *modest)
    assert answers[-4:] == [0, 1, 4, 9]
    print(f"{len(answers)} answers")


if __name__ == "__main__":
    asyncio.run(main())
