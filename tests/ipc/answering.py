"""The runtime of a child process that behaves well enough to be spoken to; also without a process."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.frames import (
    APPLICATION_ERROR,
    METHOD_NOT_FOUND,
    Reader,
    RpcError,
    RpcMessage,
)
from reflex_runtime.ipc.messages import PROTOCOL
from reflex_runtime.ipc.peer import Peer

PLAIN = Reader(Any)


class Child:
    """Answers runtime/info, echo, never (never), flood (notifies so many), fail, exit (with that status), shutdown."""

    def __init__(self, behaviour: str) -> None:
        self.behaviour = behaviour

    def called(self, peer: Peer, request: RpcMessage) -> None:
        params = PLAIN.read(request.params)
        match request.method:
            case "runtime/info":
                peer.respond(request, self.info())
            case "echo":
                peer.respond(request, {"params": params})
            case "ask":  # a call in the other direction
                peer.call("echo", {}).add_done_callback(lambda answer: peer.respond(request, str(answer.exception())))
            case "flood":
                for i in range(params["n"]):
                    peer.notify(params.get("method", "stream.chunk"), {"i": i})
                peer.respond(request, {})
            case "fail":
                peer.refuse(request, ConfigError("model=7: must be a path"))
            case "odd":
                peer.refuse(request, RpcError(APPLICATION_ERROR, "odd"))
            case "exit":
                os._exit(params["status"])
            case "write":
                peer._transport.write(bytes.fromhex(params["hex"]))  # type: ignore[union-attr]
            case "half":  # ends the connection and lives on
                peer.close()
            case "grandchild":
                peer.respond(request, int(os.environ["CHILD_OF_CHILD"]))
            case "never":
                pass
            case "shutdown":
                if self.behaviour != "deaf_to_end":
                    peer.notify("stream.event", {"told": params})
                    peer.close()
            case other:
                peer.refuse(request, RpcError(METHOD_NOT_FOUND, other))

    def notified(self, peer: Peer, note: RpcMessage) -> None:
        peer.notify("stream.event", {"heard": PLAIN.read(note.params)})

    def lost(self, peer: Peer, error: Exception | None) -> None:
        pass

    def info(self) -> dict[str, Any]:
        return {
            "name": "child",
            "version": "1",
            "protocol": PROTOCOL + (self.behaviour == "older"),
            "pid": os.getpid(),
            "capabilities": [] if self.behaviour == "plain" else ["batch_generate"],
        }


async def serve(sock: socket.socket, behaviour: str) -> None:
    peer = Peer(Child(behaviour))
    await asyncio.get_running_loop().connect_accepted_socket(lambda: peer, sock)
    await peer.ended
    if behaviour == "deaf_to_end":
        time.sleep(1000)  # noqa: ASYNC251
    if behaviour == "lingers":
        time.sleep(1.3)  # noqa: ASYNC251
