"""Runtime processes: what runs models for a server in another process, and the way to it.

    client = RuntimeClient(spawned(command), on_note=registry.note, on_lost=registry.lost)   a process, and calls to it
    batcher = GenerateBatcher(client, registry)                                    many generate calls, few messages
    response = await batcher.enqueue(params)                                       one's own response; then its tokens

`Worker` and `serve` are the other side. The page docs/workers.md has the protocol.
"""

from reflex_runtime.ipc.client import ClientConfig, RuntimeClient, WorkerUnavailable
from reflex_runtime.ipc.frames import Codec, ProtocolError
from reflex_runtime.ipc.generate_batcher import GenerateBatcher
from reflex_runtime.ipc.generate_config import GenerateBatcherConfig
from reflex_runtime.ipc.peer import ConnectionLost
from reflex_runtime.ipc.registry import StreamHandle, StreamRegistry
from reflex_runtime.ipc.spawn import from_socket, spawned
from reflex_runtime.ipc.worker import Worker, serve

__all__ = [
    "ClientConfig",
    "Codec",
    "ConnectionLost",
    "GenerateBatcher",
    "GenerateBatcherConfig",
    "ProtocolError",
    "RuntimeClient",
    "StreamHandle",
    "StreamRegistry",
    "Worker",
    "WorkerUnavailable",
    "from_socket",
    "serve",
    "spawned",
]
