"""A function behind mosec: `python -m bench.apps.function_mosec NAME PORT WAIT_MS`."""

from __future__ import annotations

import os
import sys
from typing import Any

from mosec import Server, Worker

from bench.apps.function import FUNCTIONS, Item, Root

MOST = 128
NAME = "BENCH_FUNCTION"  # workers start with no arguments of ours


class Function(Worker):
    """A batch is a list of decoded bodies."""

    def __init__(self) -> None:
        self.function: Any = FUNCTIONS[os.environ[NAME]]

    def forward(self, data: list[Item]) -> list[Root]:
        """One call for all."""
        return self.function(data)


if __name__ == "__main__":
    os.environ[NAME], port, wait = sys.argv[1:4]
    sys.argv[1:] = ["--port", port, "--address", "127.0.0.1", "--log-level", "error"]
    server = Server()
    server.append_worker(Function, num=1, max_batch_size=MOST, max_wait_time=int(wait), route="/predict")
    server.run()
