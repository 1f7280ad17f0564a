"""The client for a robot's program: asks a `reflex serve` for actions over HTTP, sync or async, and reports outcomes.

    with Client("http://127.0.0.1:8000") as client, client.episode(robot_id="r7") as episode:
        chunk = episode.act(image=picture, instruction="open the drawer", state=state)
        …
        episode.success = True

Errors, one class per error code of the server (`docs/errors.md`):

    ClientError                 code, status, retry_safe, request_id, retry_after, body
    ├── Unreachable             no answer: connection refused, reset, broken off
    │   └── TimedOut            no answer in time
    ├── BadAnswer               an unusable answer: too large, not parseable, or without usable actions
    └── ServerError             an error from the server; one class per code:
        ├── InvalidRequest · InvalidJson · NotFound · MethodNotAllowed · TooLarge · UnsupportedEncoding ·
        │   UnsupportedMediaType · RequestTimeout · InvalidConfig
        ├── Unauthorized · Forbidden
        ├── QueueFull · ClientAtCapacity · TooManyRequests · Overloaded · SloViolated
        ├── DeadlineUnreachable · DeadlineExceeded · Superseded · Cancelled
        └── NotReady · ShuttingDown · Degraded · ProcessorFailed · ProcessorHung · Internal

`Client` and `AsyncClient` share all code that does not wait: a call is a generator (`calls.py`) that yields what to
send and how long to pause, and the two classes do so. The package imports nothing from the rest of `reflex_runtime`.
"""

from reflex_runtime.client.calls import ActFields, Encoding, Picture, Priority, Retries, Wire
from reflex_runtime.client.clients import AsyncClient, AsyncEpisode, Client, Episode
from reflex_runtime.client.errors import (
    BadAnswer,
    Cancelled,
    ClientAtCapacity,
    ClientError,
    DeadlineExceeded,
    DeadlineUnreachable,
    Degraded,
    Forbidden,
    Internal,
    InvalidConfig,
    InvalidJson,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    ProcessorFailed,
    ProcessorHung,
    QueueFull,
    RequestTimeout,
    ServerError,
    ShuttingDown,
    SloViolated,
    Superseded,
    TimedOut,
    TooLarge,
    TooManyRequests,
    Unauthorized,
    Unreachable,
    UnsupportedEncoding,
    UnsupportedMediaType,
)
from reflex_runtime.client.exchange import Chunk

__all__ = [
    "ActFields", "AsyncClient", "AsyncEpisode", "BadAnswer", "Cancelled", "Chunk", "Client", "ClientAtCapacity",
    "ClientError", "DeadlineExceeded", "DeadlineUnreachable", "Degraded", "Encoding", "Episode", "Forbidden",
    "Internal", "InvalidConfig", "InvalidJson", "InvalidRequest", "MethodNotAllowed", "NotFound", "NotReady",
    "Overloaded", "Picture", "Priority", "ProcessorFailed", "ProcessorHung", "QueueFull", "RequestTimeout", "Retries",
    "ServerError", "ShuttingDown", "SloViolated", "Superseded", "TimedOut", "TooLarge", "TooManyRequests",
    "Unauthorized", "Unreachable", "UnsupportedEncoding", "UnsupportedMediaType", "Wire",
]  # fmt: skip
