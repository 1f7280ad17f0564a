"""The same model behind mosec, batched dynamically."""

from __future__ import annotations

import os
import sys
from typing import Any

from mosec import Server, Worker

from bench.apps.raw import Model

MOST, WAIT_MS = 128, 5
EXPORT = os.environ["BENCH_EXPORT"]


class Batches(Worker):
    """A batch is a list of decoded bodies."""

    def __init__(self) -> None:
        self.model = Model(EXPORT)

    def forward(self, data: list[Any]) -> list[Any]:
        """One call for all."""
        actions = self.model.run(self.model.feeds([self.model.row(item) for item in data]))
        return [{"actions": chunk, "batch": {"size": len(data)}} for chunk in actions]


if __name__ == "__main__":
    sys.argv = [sys.argv[0], "--port", sys.argv[2], "--address", "127.0.0.1", "--log-level", "error"]
    server = Server()
    server.append_worker(Batches, num=1, max_batch_size=MOST, max_wait_time=WAIT_MS)
    server.run()
