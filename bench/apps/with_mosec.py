"""The same model behind mosec, batched dynamically."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from mosec import Server, Worker

from bench.apps.raw import open_session

MOST, WAIT_MS = 128, 5
EXPORT = os.environ["BENCH_EXPORT"]


class Model(Worker):
    """A batch is a list of decoded bodies."""

    def __init__(self) -> None:
        self.session = open_session(EXPORT)

    def forward(self, data: list[Any]) -> list[Any]:
        """One call for all."""
        states = np.array([item["state"] for item in data], np.float32)
        actions = self.session.run(None, {"state": states})[0].tolist()
        return [{"actions": chunk, "batch": {"size": len(data)}} for chunk in actions]


if __name__ == "__main__":
    sys.argv = [sys.argv[0], "--port", sys.argv[2], "--address", "127.0.0.1", "--log-level", "error"]
    server = Server()
    server.append_worker(Model, num=1, max_batch_size=MOST, max_wait_time=WAIT_MS)
    server.run()
