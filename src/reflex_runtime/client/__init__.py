"""The client for a robot's program: gets actions from `reflex serve` over HTTP, sync or async, and reports outcomes.

    with Client("http://127.0.0.1:8000") as client, client.episode(robot_id="r7") as episode:
        chunk = episode.act(image=picture, instruction="open the drawer", state=state)
        …
        episode.success = True

Errors (`docs/errors.md` has the codes):

    ClientError                 code, status, retry_safe, request_id, retry_after, body
    ├── Unreachable             no answer: connection refused, reset, broken off
    │   └── TimedOut            no answer in time
    ├── BadAnswer               an unusable answer: too large, not parseable, or without usable actions
    └── ServerError             an error from the server
        ├── BadRequest          the request or its key is wrong
        │   └── NotFound
        ├── StaleRequest        too late: send a newer observation
        ├── ServerBusy          it did not run: retry later
        └── ProcessorFailed     it ran and failed

The package imports nothing from the rest of `reflex_runtime` but `pacing`.
"""

from reflex_runtime.client.calls import ActFields, Encoding, Picture, Priority
from reflex_runtime.client.clients import AsyncClient, Client, Episode
from reflex_runtime.client.errors import (
    BadAnswer,
    BadRequest,
    ClientError,
    NotFound,
    ProcessorFailed,
    ServerBusy,
    ServerError,
    StaleRequest,
    TimedOut,
    Unreachable,
)
from reflex_runtime.client.exchange import Chunk

__all__ = [
    "ActFields", "AsyncClient", "BadAnswer", "BadRequest", "Chunk", "Client", "ClientError", "Encoding",
    "Episode", "NotFound", "Picture", "Priority", "ProcessorFailed", "ServerBusy", "ServerError",
    "StaleRequest", "TimedOut", "Unreachable",
]  # fmt: skip
