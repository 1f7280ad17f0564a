"""The simplest batcher one writes by hand: a queue, a task that empties it, and the model on an executor thread.

`python -m bench.apps.byhand EXPORT PORT [WINDOW_MS]`. The task waits so many milliseconds from the first request for
others; without them it takes what is there. Pictures are decoded where a request is read, on the event loop.

No limits, no deadlines, no fairness, no metrics, and an error is the whole batch's: what it costs is what
batching costs at least.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

from bench.apps.raw import Model
from bench.apps.uv import run

MOST = 128


class ByHand:
    """The application."""

    def __init__(self, model: Any, window: float = 0.0) -> None:
        """model: of `Model`'s shape. window: seconds."""
        self.model = model
        self.window = window
        self.queue: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[Any]]] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def batches(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self.queue.get()]
            if self.window:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.window):
                        while len(batch) < MOST:
                            batch.append(await self.queue.get())
            while len(batch) < MOST and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            try:
                feeds = self.model.feeds([row for row, _ in batch])
                actions = await loop.run_in_executor(None, self.model.run, feeds)
            except Exception as error:
                for _, future in batch:
                    future.set_exception(error)
                continue
            for (_, future), chunk in zip(batch, actions, strict=True):
                future.set_result((chunk, len(batch)))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.task is None:
            self.task = asyncio.create_task(self.batches())
        body = b""
        more = True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        future = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((self.model.row(json.loads(body)), future))
        try:
            status, answer = 200, json.dumps(self.model.answer(*await future), separators=(",", ":")).encode()
        except Exception as error:
            status, answer = 500, json.dumps({"error": str(error)}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


if __name__ == "__main__":
    run(ByHand(Model(sys.argv[1]), *(float(ms) / 1e3 for ms in sys.argv[3:])), int(sys.argv[2]))
