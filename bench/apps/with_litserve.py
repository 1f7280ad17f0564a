"""The same model behind LitServe, batched dynamically."""

from __future__ import annotations

import sys
from typing import Any

import litserve

from bench.apps.raw import Model

MOST, WAIT = 128, 0.005


class Batches(litserve.LitAPI):
    """A batch is a list of decoded bodies."""

    def __init__(self, export: str) -> None:
        super().__init__(max_batch_size=MOST, batch_timeout=WAIT, api_path="/act")
        self.export = export

    def setup(self, device: Any) -> None:
        self.model = Model(self.export)

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # an annotation would become a schema
        return self.model.row(request)

    def batch(self, inputs: list[Any]) -> Any:
        return self.model.feeds(inputs)

    def predict(self, x: Any, **kwargs: Any) -> Any:
        return [(chunk, len(x["state"])) for chunk in self.model.run(x)]

    def unbatch(self, output: Any) -> Any:
        return output

    def encode_response(self, output: Any, **kwargs: Any) -> Any:
        return {"actions": output[0], "batch": {"size": output[1]}}


if __name__ == "__main__":
    server = litserve.LitServer(Batches(sys.argv[1]), accelerator="cpu", workers_per_device=1)
    port = int(sys.argv[2])
    server.run(host="127.0.0.1", port=port, num_api_servers=1, generate_client_file=False, log_level="error")
