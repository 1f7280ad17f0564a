"""The simplest batcher one writes by hand: a queue, a task that empties it, and the model on an executor thread.

No limits, no deadlines, no fairness, no metrics, no errors: what it costs is what batching costs at least.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np

from bench.apps.raw import open_session
from bench.apps.uv import run

MOST = 128


class ByHand:
    """The application."""

    def __init__(self, export: str) -> None:
        self.session = open_session(export)
        self.queue: asyncio.Queue[tuple[list[float], asyncio.Future[Any]]] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def batches(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self.queue.get()]
            while len(batch) < MOST and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            states = np.array([state for state, _ in batch], np.float32)
            actions = (await loop.run_in_executor(None, self.session.run, None, {"state": states}))[0].tolist()
            for (_, future), chunk in zip(batch, actions, strict=True):
                future.set_result((chunk, len(batch)))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.task is None:
            self.task = asyncio.create_task(self.batches())
        body = (await receive())["body"]
        future = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((json.loads(body)["state"], future))
        chunk, size = await future
        answer = json.dumps({"actions": chunk, "batch": {"size": size}}, separators=(",", ":")).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


if __name__ == "__main__":
    run(ByHand(sys.argv[1]), int(sys.argv[2]))
