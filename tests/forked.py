"""Processes of the command that start at once: forks of one process that has imported what the command imports.

`python -m reflex_runtime` spends half a second of processor time on imports, and tests start hundreds of processes. A
fork is a process like any other: with its own arguments, directory, environment, descriptors and signals, and it ends
as the interpreter ends. What a fork cannot show is that the command starts from nothing; `tests/test_command.py` does.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

LARGEST = 1 << 17  # bytes of a message
PIPE = subprocess.PIPE


class Forked:
    """`reflex ARGUMENTS` as `subprocess.Popen` would give it. modules: what the process it is a fork of has imported.

    stdout, stderr: PIPE or a descriptor. Standard input is empty.
    """

    def __init__(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], modules: Sequence[str], stderr: int = PIPE
    ) -> None:
        self.returncode: int | None = None
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out_read, out = os.pipe()
        err_read, err = os.pipe() if stderr == PIPE else (-1, stderr)
        nothing = os.open(os.devnull, os.O_RDONLY)
        asked = json.dumps({"arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}).encode()
        socket.send_fds(_nursery(tuple(modules)), [asked], [nothing, out, err, theirs.fileno()])
        for fd in (nothing, out, *([err] if stderr == PIPE else [])):
            os.close(fd)
        theirs.close()
        self.stdout = os.fdopen(out_read, "rb")
        self.stderr = os.fdopen(err_read, "rb") if stderr == PIPE else None
        self.pid = int(self._status.recv(LARGEST))

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, as Popen has it. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(LARGEST))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("reflex", timeout or 0.0) from None
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _nursery(modules: tuple[str, ...]) -> socket.socket:
    """The connection to a process that has imported these; one for each process of tests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(theirs.fileno()), *modules]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# -- the other side ----------------------------------------------------------------------------------------------------


def main() -> None:
    from reflex_runtime import cli

    door = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the tests
    cli.telemetry_off()
    cli.build_parser()
    for module in sys.argv[2:]:
        import_module(module)
    gc.collect()
    gc.freeze()  # what is imported is garbage in no fork, and not looked through there
    if asked := _forks(door):
        sys.exit(cli.main(_become(*asked)))


def _forks(door: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """In each fork what was asked for; in this process None, once the tests are gone."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that says that it ended
    with selectors.DefaultSelector() as waiting:
        waiting.register(door, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fd == door.fileno():
                    message, fds, _, _ = socket.recv_fds(door, LARGEST, 4)
                    if not message:
                        for pid, _ in running.values():
                            os.kill(pid, signal.SIGKILL)
                        return None
                    status = socket.socket(fileno=fds.pop())
                    with warnings.catch_warnings(action="ignore"):  # a library's threads are stopped around a fork
                        pid = os.fork()
                    if not pid:
                        for fd, (_, other) in running.items():
                            os.close(fd)
                            other.close()
                        status.close()
                        door.close()
                        return json.loads(message), fds
                    for fd in fds:
                        os.close(fd)
                    status.send(b"%d" % pid)
                    ends = os.pidfd_open(pid)
                    running[ends] = pid, status
                    waiting.register(ends, selectors.EVENT_READ)
                else:
                    waiting.unregister(key.fd)
                    os.close(key.fd)
                    pid, status = running.pop(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with suppress(OSError):  # nobody asks any more
                        status.send(b"%d" % code)
                    status.close()


def _become(asked: dict[str, Any], fds: Sequence[int]) -> list[str]:
    """The process that was asked for, as its interpreter would have begun it; its arguments."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = os.fdopen(number, "wb", closefd=False)
        lines = number == 2 or raw.isatty()
        stream = io.TextIOWrapper(raw, "utf-8", getattr(sys, name).errors, line_buffering=lines)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests are run by nohup
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.path[0] = ""
    sys.argv = ["reflex", *asked["arguments"]]
    return list(asked["arguments"])


if __name__ == "__main__":
    main()
