"""Runtime processes: models in processes of their own, so that a step never delays the server.

    client = RuntimeClient(spawned(command), on_note=registry.note, on_lost=registry.lost)   a process, and calls to it
    batcher = GenerateBatcher(client, registry)                                    many generate calls, few messages
    stream = registry.register()                                                   the tokens of one call
    response = await batcher.enqueue(GenerateParams(stream_id=stream.id, …))       its response

`Worker` and `serve` are the process's side. docs/workers.md has the protocol.
"""

from reflex_runtime.ipc.client import ClientConfig, RuntimeClient, WorkerUnavailable
from reflex_runtime.ipc.frames import ProtocolError
from reflex_runtime.ipc.generate_batcher import GenerateBatcher, GenerateBatcherConfig
from reflex_runtime.ipc.messages import GenerateParams
from reflex_runtime.ipc.peer import ConnectionLost
from reflex_runtime.ipc.spawn import spawned
from reflex_runtime.ipc.streams import StreamHandle, StreamRegistry
from reflex_runtime.ipc.worker import Worker, serve

__all__ = [
    "ClientConfig", "ConnectionLost", "GenerateBatcher", "GenerateBatcherConfig", "GenerateParams", "ProtocolError",
    "RuntimeClient", "StreamHandle", "StreamRegistry", "Worker", "WorkerUnavailable", "serve", "spawned",
]  # fmt: skip
