"""Processes that have the command's imports behind them: half a second of CPU time less for each run of a test.

One process per pytest process imports what `reflex serve` and `reflex feeds` import, and forks at its top level for
every `Forked`. The fork runs its code as `python -c` would: its own environment, directory and descriptors, its
threads awaited and its exit functions called at the end. What the interpreter does after that is left out: it looks at
every object that was imported, so that all their pages are copied, which takes as long as starting a server.
What a test can no longer see there is that, and an import that is missing, or slow: those tests start a `Popen`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO, Final

PATIENCE: Final = 60.0  # seconds until a test gives up
_TESTS: Final = Path(__file__).parent
_SIZE: Final = 64  # bytes of a message in either direction

# Each request is five descriptors: the program, where to tell pid and status, and the three standard ones.
_FORKS = """
import atexit, contextlib, gc, json, os, select, signal, socket, sys, threading, traceback
sys.path += os.environ["TESTS"].split(":")
from reflex_runtime.run.process import telemetry_off
telemetry_off()
import uvloop, httptools, onnxruntime, numpy.random
import reflex_runtime.web.serve
import reflex_runtime.feeds.session, reflex_runtime.feeds.plan
import reflex_runtime.run.coordinator
import feeds.chaos, feeds.markers  # sources of their own, for `reflex feeds`
import reflex_runtime.feeds.detectors.onnx, reflex_runtime.feeds.runtime.runtime, reflex_runtime.feeds.pages
import reflex_runtime.feeds.sources.video, reflex_runtime.feeds.plan
import reflex_runtime.feeds.outputs, reflex_runtime.feeds.stages
import encodings.idna, shlex, PIL.ImageFile, rich._emoji_codes
import reflex_runtime.llm.engine.toy, reflex_runtime.llm.server.local_model, reflex_runtime.ipc.worker
import reflex_runtime.robots.sources.export_directory, reflex_runtime.robots.app
from reflex_runtime.cli import VERBS, build_parser
from reflex_runtime.web.supervisor import die_with
for words in [[verb] for verb in VERBS] + [["serve", "scribe"]]:
    build_parser(words)
gc.collect()
gc.freeze()  # no collection in a fork looks through what is imported, and so copies it
with open("/proc/self/stat") as stat:
    threads = int(stat.read().rpartition(")")[2].split()[17])
assert threads == 1, f"{threads} threads: a fork would lose all but one"

def serve(asked):
    running, parent = {}, os.getpid()
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        for ready in select.select([asked, woken], [], [])[0]:
            if ready is woken:
                woken.recv(4096)
                while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    told = running.pop(ended[0])
                    with contextlib.suppress(OSError):  # a test that failed waits for nothing
                        os.write(told, b"%d" % os.waitstatus_to_exitcode(ended[1]))
                    os.close(told)
                continue
            word, received, _, _ = socket.recv_fds(asked, 1, 5)
            if not word:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                die_with(parent)  # which ends with the tests, however those end
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (asked, woken, wake):
                    end.close()
                for other in running.values():
                    os.close(other)
                return received
            running[pid] = received[1]
            for other in (received[0], *received[2:]):
                os.close(other)

def become(program, told, *standard):
    os.setpgid(0, 0)  # as a runtime process, which is killed with all that it started
    os.write(told, b"%d" % os.getpid())
    os.close(told)
    for number, other in enumerate(standard):
        os.dup2(other, number)
        os.close(other)
    with open(program, encoding="utf-8") as text:
        wanted = json.load(text)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests are run by nohup
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])
    return wanted["code"]

def run(code):
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    else:
        return 0
    return 1

status = run(become(*serve(socket.socket(fileno=int(sys.argv.pop())))))
threading._shutdown()
atexit._run_exitfuncs()
for stream in (sys.stdout, sys.stderr):
    try:
        stream.flush()
    except OSError:
        status = status or 120  # as the interpreter does
os._exit(status & 255)
"""


@cache
def _forks() -> socket.socket:
    """The process that forks, as a connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _FORKS, str(theirs.fileno())],
            # One thread of OpenBLAS, so that there is one in all.
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "TESTS": f"{_TESTS}:{_TESTS.parent}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


class Forked:
    """As `subprocess.Popen([sys.executable, "-c", code])` in a process group of its own, with what the tests use of
    it. stdin: a descriptor, else it is empty."""

    def __init__(
        self,
        code: str,
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdin: int | None = None,
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.PIPE,
    ) -> None:
        self.returncode: int | None = None
        self._waiting = threading.Lock()
        self._status, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as theirs:
            theirs.enter_context(told)
            program, text = os.pipe()
            theirs.callback(os.close, program)
            nothing = os.open(os.devnull, os.O_RDWR)
            theirs.callback(os.close, nothing)
            standard = [nothing if stdin is None else stdin]
            streams: list[IO[bytes] | None] = []
            for wanted in (stdout, stderr):
                if wanted == subprocess.PIPE:
                    read, wanted = os.pipe()
                    theirs.callback(os.close, wanted)
                    streams.append(open(read, "rb"))  # noqa: SIM115
                else:
                    streams.append(None)
                standard.append(nothing if wanted == subprocess.DEVNULL else wanted)
            self.stdout, self.stderr = streams
            socket.send_fds(_forks(), [b"."], [program, told.fileno(), *standard])
        pid = self._status.recv(_SIZE)
        if not pid:
            raise RuntimeError("the process that forks has ended: see its standard error")
        self.pid = int(pid)
        with open(text, "w", encoding="utf-8") as file:
            json.dump({"env": dict(env), "cwd": str(cwd or Path.cwd()), "code": code}, file)

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        """What it writes until it ends, on both; it is ended and TimeoutExpired raised if that takes too long."""
        read: list[bytes] = [b"", b""]

        def drain(number: int, stream: IO[bytes] | None) -> None:
            if stream is not None:
                with stream:
                    read[number] = stream.read()

        drains = [threading.Thread(target=drain, args=pair) for pair in enumerate((self.stdout, self.stderr))]
        for thread in drains:
            thread.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            for thread in drains:
                thread.join()
        return read[0], read[1]

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self._waiting.locked():  # another thread waits, so there is something to wait for
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The same, once it has ended."""
        with self._waiting:
            if self.returncode is None:
                if not select.select([self._status], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
                self.returncode = int(self._status.recv(_SIZE))
                self._status.close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def reflex(
    *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """`reflex ARGUMENTS`, to its end. env: beside that of the tests, of which no REFLEX_ variable counts. before:
    Python to run in its process first."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("REFLEX_")} | dict(env or {})
    words = ["reflex", *map(str, arguments)]
    code = f"{before}\nimport sys; from reflex_runtime.cli import main; sys.argv = {words!r}; sys.exit(main())"
    process = Forked(code, env=clean, cwd=cwd, stdout=subprocess.PIPE)
    out, err = process.communicate(PATIENCE)
    assert process.returncode is not None
    return subprocess.CompletedProcess(words, process.returncode, out.decode(), err.decode())
