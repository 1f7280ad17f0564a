"""A runtime process for tests: python child.py BEHAVIOUR, with its connection as standard input.

Behaviours: well · exits (at once, status 3) · mute (says nothing) · garbage · older (another protocol) · deaf_to_end
(does not shut down, ignores SIGTERM) · parent (has a child of its own that holds the connection too) ·
leaves_one_behind (like it, in another session).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time


def main() -> None:
    behaviour = sys.argv[1]
    if where := os.environ.get("CHILD_LOG"):  # who was ever started
        with open(where, "a") as log:
            log.write(json.dumps({"pid": os.getpid()}) + "\n")
    if behaviour == "exits":
        sys.exit(3)
    if behaviour == "deaf_to_end":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=os.dup(0))
    if behaviour in ("parent", "leaves_one_behind"):
        os.set_inheritable(sock.fileno(), True)
        away = behaviour == "leaves_one_behind"
        mine = subprocess.Popen(["sleep", "1000"], close_fds=False, start_new_session=away)
        os.environ["CHILD_OF_CHILD"] = str(mine.pid)
    match behaviour:
        case "mute":
            time.sleep(1000)
        case "garbage":
            sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            time.sleep(1000)
    import asyncio  # here, with what speaks the protocol: other behaviours need no fifth of a second for imports

    from ipc.answering import serve

    asyncio.run(serve(sock, behaviour))


if __name__ == "__main__":
    main()
