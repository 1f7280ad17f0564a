"""A function behind LitServe: `python -m bench.apps.function_litserve NAME PORT WAIT_MS`."""

from __future__ import annotations

import sys
from typing import Any

import litserve

from bench.apps.function import FUNCTIONS, Item, Root

MOST = 128


class Function(litserve.LitAPI):
    """A batch is a list of decoded bodies."""

    def setup(self, device: Any) -> None:
        self.function = FUNCTIONS[sys.argv[1]]

    def predict(self, x: list[Item], **kwargs: Any) -> list[Root]:
        return self.function(x)


if __name__ == "__main__":
    api = Function(max_batch_size=MOST, batch_timeout=float(sys.argv[3]) / 1e3)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    quiet: dict[str, Any] = {"generate_client_file": False, "log_level": "critical", "access_log": False}
    server.run(host="127.0.0.1", port=int(sys.argv[2]), num_api_servers=1, **quiet)
