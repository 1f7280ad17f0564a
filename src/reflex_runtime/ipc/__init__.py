"""Runtime processes: models in another process, and the way to it.

    client = RuntimeClient(spawned(command), on_note=registry.note, on_lost=registry.lost)   a process, and calls to it
    batcher = GenerateBatcher(client, registry)                                    many generate calls, few messages
    stream = registry.register()                                                   where its tokens will come
    response = await batcher.enqueue(GenerateParams(stream_id=stream.id, …))       one's own response

`Worker` and `serve` are the other side. The page docs/workers.md has the protocol.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as in _NAMES, for type checkers and editors
    from reflex_runtime.ipc.client import ClientConfig as ClientConfig
    from reflex_runtime.ipc.client import RuntimeClient as RuntimeClient
    from reflex_runtime.ipc.client import WorkerUnavailable as WorkerUnavailable
    from reflex_runtime.ipc.frames import ProtocolError as ProtocolError
    from reflex_runtime.ipc.generate_batcher import GenerateBatcher as GenerateBatcher
    from reflex_runtime.ipc.generate_batcher import GenerateBatcherConfig as GenerateBatcherConfig
    from reflex_runtime.ipc.messages import GenerateParams as GenerateParams
    from reflex_runtime.ipc.peer import ConnectionLost as ConnectionLost
    from reflex_runtime.ipc.spawn import from_socket as from_socket
    from reflex_runtime.ipc.spawn import spawned as spawned
    from reflex_runtime.ipc.streams import StreamHandle as StreamHandle
    from reflex_runtime.ipc.streams import StreamRegistry as StreamRegistry
    from reflex_runtime.ipc.worker import Worker as Worker
    from reflex_runtime.ipc.worker import serve as serve

_NAMES = {
    "client": "ClientConfig RuntimeClient WorkerUnavailable",
    "frames": "ProtocolError",
    "generate_batcher": "GenerateBatcher GenerateBatcherConfig",
    "messages": "GenerateParams",
    "peer": "ConnectionLost",
    "spawn": "from_socket spawned",
    "streams": "StreamHandle StreamRegistry",
    "worker": "Worker serve",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Names are imported on first use: a runtime process does not import the front's modules."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
