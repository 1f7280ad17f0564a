"""Four prompts, one message to a runtime process, and their tokens as they come."""

import asyncio
import sys

from reflex_runtime import ReflexError
from reflex_runtime.demo import model_directory
from reflex_runtime.ipc import (
    GenerateBatcher,
    GenerateBatcherConfig,
    GenerateParams,
    RuntimeClient,
    StreamRegistry,
    spawned,
)


async def main() -> None:
    async def load(client: RuntimeClient) -> None:  # after every start of the process, also when it had died
        await client.request("load_model", {"model_id": "scribe", "path": str(model_directory("scribe"))})

    registry = StreamRegistry(limit=64)
    command = [sys.executable, "-m", "reflex_runtime", "worker"]
    client = RuntimeClient(spawned(command), prepare=load, on_note=registry.note, on_lost=registry.lost)
    batcher = GenerateBatcher(client, registry, GenerateBatcherConfig(max_hold_ms=2))
    await client.start()

    async def ask(prompt: str) -> str:
        handle = registry.register()
        params = GenerateParams(stream_id=handle.id, model_id="scribe", prompt=prompt, max_tokens=12, temperature=0)
        await batcher.enqueue(params, priority="default", timeout_ms=20_000)
        return prompt + "".join([token.text async for token in handle])

    for text in await asyncio.gather(*map(ask, ["Once there was", "A batch is", "The robot", "Two cameras"])):
        print(text)
    print(client.stats()["sent"], batcher.get_stats()["batches"])
    await batcher.close()
    await client.close()


try:
    asyncio.run(main())
except ReflexError as error:  # such as a missing library, with what to install
    sys.exit(error.message)
