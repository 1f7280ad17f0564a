"""A runtime process for tests, which behaves as it is told: python child.py BEHAVIOUR --connect ADDRESS.

Behaviours: well · exits (at once, status 3) · silent (never connects) · mute (connects and says nothing) · mute_at_once
(like it, and does not stay) · garbage · older (another protocol) · stranger (does not know its token) · deaf_to_end
(does not shut down, ignores SIGTERM) · parent (has a child of its own that holds the connection too) ·
leaves_one_behind (like it, in another session) · crowd (strangers come first) · json (reads nothing else).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.frames import (
    APPLICATION_ERROR,
    METHOD_NOT_FOUND,
    Codec,
    Notification,
    Reader,
    Request,
    RpcError,
)
from reflex_runtime.ipc.messages import PROTOCOL
from reflex_runtime.ipc.peer import Peer

PLAIN = Reader(Any)


class Child:
    """Answers runtime/info, echo, never (never), flood (notifies so many), fail, exit (with that status), shutdown."""

    def __init__(self, behaviour: str) -> None:
        self.behaviour = behaviour

    def called(self, peer: Peer, request: Request, codec: Codec) -> None:
        params = PLAIN.read(request.params, codec)
        match request.method:
            case "runtime/info":
                peer.respond(request, self.info())
            case "echo":
                peer.respond(request, {"params": params, "codec": codec.label})
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

    def told(self, peer: Peer, note: Notification, codec: Codec) -> None:
        peer.notify("stream.event", {"heard": PLAIN.read(note.params, codec)})

    def lost(self, peer: Peer, error: Exception | None) -> None:
        pass

    def info(self) -> dict[str, Any]:
        return {
            "name": "child",
            "version": "1",
            "protocol": PROTOCOL + (self.behaviour == "older"),
            "pid": os.getpid(),
            "codecs": ["json"] if self.behaviour == "json" else ["json", "msgpack"],
            "capabilities": [] if self.behaviour == "plain" else ["batch_generate"],
            "token": "?" if self.behaviour == "stranger" else os.environ["REFLEX_WORKER_TOKEN"],
        }


def connected(address: str) -> socket.socket:
    kind, _, where = address.partition(":")
    if kind == "stdio":
        return socket.socket(fileno=os.dup(0))
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(where)
        return sock
    host, _, port = where.partition(":")
    return socket.create_connection((host, int(port)))


def knock(address: str, said: bytes) -> socket.socket:
    """A stranger."""
    sock = connected(address)
    sock.sendall(said)
    return sock


async def serve(sock: socket.socket, behaviour: str) -> None:
    peer = Peer(Child(behaviour))
    await asyncio.get_running_loop().connect_accepted_socket(lambda: peer, sock)
    await peer.ended
    if behaviour == "deaf_to_end":
        time.sleep(1000)  # noqa: ASYNC251
    if behaviour == "lingers":
        time.sleep(1.3)  # noqa: ASYNC251


def main() -> None:
    behaviour, address = sys.argv[1], sys.argv[-1]
    if where := os.environ.get("CHILD_LOG"):  # who was ever started
        with open(where, "a") as log:
            log.write(json.dumps({"pid": os.getpid(), "address": address}) + "\n")
    strangers = []
    if behaviour == "exits":
        sys.exit(3)
    if behaviour == "silent":
        time.sleep(1000)
    if behaviour == "deaf_to_end":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "crowd":  # strangers come first, more than are let wait
        strangers = [knock(address, said) for said in (b"GET / HTTP/1.1\r\n\r\n", b"", b"J\0\0\0\2{}", *[b""] * 20)]
    sock = connected(address)
    if behaviour in ("parent", "leaves_one_behind"):
        os.set_inheritable(sock.fileno(), True)
        away = behaviour == "leaves_one_behind"
        mine = subprocess.Popen(["sleep", "1000"], close_fds=False, start_new_session=away)
        os.environ["CHILD_OF_CHILD"] = str(mine.pid)
    match behaviour:
        case "mute":
            time.sleep(1000)
        case "mute_at_once":
            sys.exit(0)
        case "garbage":
            sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            time.sleep(1000)
    asyncio.run(serve(sock, behaviour))
    del strangers


if __name__ == "__main__":
    main()
