"""A runtime process for tests, which behaves as it is told: python child.py BEHAVIOUR --connect ADDRESS.

Behaviours: well · exits (at once, status 3) · silent (never connects) · mute (connects and says nothing) · mute_at_once
(like it, and does not stay) · garbage · older (another protocol) · stranger (does not know its token) · deaf_to_end
(does not shut down, ignores SIGTERM) · parent (has a child of its own that holds the connection too) ·
leaves_one_behind (like it, in another session) · crowd (strangers come first) · json (reads nothing else).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time


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
    import asyncio  # here, with what speaks the protocol: other behaviours need no fifth of a second for imports

    from ipc.answering import serve

    asyncio.run(serve(sock, behaviour))
    del strangers


if __name__ == "__main__":
    main()
