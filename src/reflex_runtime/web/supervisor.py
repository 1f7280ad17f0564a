"""The supervisor, a small parent process: it owns the listening socket, restarts the server after a crash, and answers
callers meanwhile.

The server is a fork of the supervisor: the same program with the same arguments. It writes to a pipe when it accepts
connections, is ready, and stops accepting. A crash in native code ends only the server. The kernel then closes its
connections, so callers notice at once. The supervisor accepts new ones: until the next server accepts, it answers
`/health` with `restarting` and everything else with 503 `not_ready`, in the server's own form.
It has no thread and no event loop, because they would disturb the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import random
from typing import Any, Final, NoReturn

from reflex_runtime.pacing import Restarts
from reflex_runtime.web.errors import NotReady
from reflex_runtime.web.form import ErrorForm, Refusal
from reflex_runtime.web.json import encode

log = logging.getLogger("reflex.supervisor")

PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MOST: Final = 8  # servers in a row that lived shorter than STEADY, after which the supervisor gives up
STEADY: Final = 60.0  # seconds
FIRST, LONGEST = 0.1, 10.0  # seconds before the first and the longest wait for a new start
CALLERS: Final = 256  # connections answered here at a time; for another one the oldest is closed
CALLER_LIMIT: Final = 2.0  # seconds that one of them may take
HEAD: Final = 16_384  # bytes in which a request must name its path
_ACCEPTS, _READY, _LEAVES = b"a", b"r", b"l"
_PR_SET_PDEATHSIG: Final = 1
EXIT_LOST: Final = 1  # status of a server that lost its device, and of a supervisor that gives up


@dataclass(slots=True)
class Lives:
    """The history of the servers. restarts: their number. last_exit: how the last one ended, in words."""

    restarts: int = 0
    last_exit: str | None = None


class Parent:
    """The server's connection to its supervisor."""

    def __init__(self, lives: Lives, pipe: int) -> None:
        self.lives, self._pipe = lives, pipe

    def accepts(self) -> None:
        """From now on this process accepts connections."""
        self._tell(_ACCEPTS)

    def ready(self) -> None:
        self._tell(_READY)

    def leaves(self) -> None:
        """From now on it does not."""
        self._tell(_LEAVES)

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone: the kernel ends this process too
            os.write(self._pipe, word)


def supervise(sock: socket.socket, backlog: int, serve: Callable[[Parent], int], form: ErrorForm) -> int:
    """Run `serve` in a fork, and again after each crash. Returns the exit status.

    sock: bound; the server listens. form: of answers while there is no server. A server that ends with a status other
    than 1 has ended on purpose, and one that crashes before any was ever ready would crash again: then the supervisor
    ends too.
    """
    restarts = Restarts(FIRST, LONGEST, STEADY, MOST, LONGEST, random)
    return _Supervisor(sock, backlog, serve, form, restarts).run()


class _WaitingCaller:
    """A connection that the supervisor answers. It also reads the rest of the request, so that the caller can read the
    answer."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self.sock, self.until = sock, until
        self.head = b""
        self.answered = False


class _Supervisor:
    def __init__(
        self, sock: socket.socket, backlog: int, serve: Callable[[Parent], int], form: ErrorForm, restarts: Restarts
    ) -> None:
        self._sock, self._backlog, self._serve, self._form, self._restarts = sock, backlog, serve, form, restarts
        self._lives = Lives()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._callers: dict[socket.socket, _WaitingCaller] = {}
        self._pid = 0  # of the server; 0 while there is none
        self._pipe = -1
        self._ready_at: float | None = None  # when this server was
        self._ever_ready = False  # whether any did
        self._ending: int | None = None  # the signal that ends everything
        self._start_at = 0.0

    def run(self) -> int:
        for end in (self._woken, self._wake):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (*PASSED_ON, signal.SIGCHLD):
            signal.signal(number, self._signalled)
        self._selector.register(self._woken, selectors.EVENT_READ, self._read_wakeup)
        try:
            while True:
                now = time.monotonic()
                if not self._pid and now >= self._start_at:
                    self._fork()
                self._wait(now)
                status = self._reap()
                if status is not None:
                    return status
        finally:
            self._close()

    # -- the server ----------------------------------------------------------------------------------------------------

    def _fork(self) -> None:
        ours, theirs = os.pipe()
        above = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._close()
            os.close(ours)
            _become_server(above)
            _run_and_leave(self._serve, Parent(self._lives, theirs))
        os.close(theirs)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        os.set_blocking(ours, False)
        self._pid, self._pipe = pid, ours
        self._ready_at = None
        self._selector.register(ours, selectors.EVENT_READ, self._read_pipe)
        if self._ending is not None:  # it came while there was none
            self._pass_on(self._ending)

    def _signalled(self, number: int, frame: Any) -> None:
        if number == signal.SIGCHLD:
            return
        if number != signal.SIGHUP:
            self._ending = number
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self._pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _read_pipe(self) -> None:
        try:
            words = os.read(self._pipe, 16)
        except BlockingIOError:
            return
        if _ACCEPTS in words:
            self._listen(False)
        if _READY in words:
            self._ready_at, self._ever_ready = time.monotonic(), True
        if _LEAVES in words:
            if self._ending is None:
                self._listen(True)
            else:
                self._sock.close()  # callers are refused from now on, as without a supervisor
        if not words:
            self._drop_pipe()

    def _drop_pipe(self) -> None:
        if self._pipe >= 0:
            self._selector.unregister(self._pipe)
            os.close(self._pipe)
            self._pipe = -1

    def _reap(self) -> int | None:
        """Handle the end of the server: returns the exit status, or None to go on."""
        if not self._pid:
            return None if self._ending is None else 0
        if os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        with contextlib.suppress(OSError):  # all that it started; its group id is not reused before it is reaped
            os.killpg(self._pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pid = 0
        if self._pipe >= 0:
            self._read_pipe()  # what it reported before it ended
        self._drop_pipe()
        if self._ending is not None:
            return status if status >= 0 else 0 if -status == self._ending else EXIT_LOST
        if -status in PASSED_ON:
            return 128 - status
        return self._lost(status) if status < 0 or status == EXIT_LOST else status

    def _lost(self, status: int) -> int | None:
        lives, restarts = self._lives, self._restarts
        lives.last_exit = f"exited with status {status}" if status >= 0 else f"was ended by {_name(-status)}"
        if not self._ever_ready:
            log.error("the server %s before it was ready; it is not started again", lives.last_exit)
            return EXIT_LOST
        if self._ready_at is None:
            restarts.failed()
        else:
            restarts.lived(time.monotonic() - self._ready_at)
        if restarts.open:
            log.error("the server %s; that was loss %d in a row, giving up", lives.last_exit, restarts.failures)
            return EXIT_LOST
        lives.restarts += 1
        wait = restarts.wait()
        log.error("the server %s; restart %d in %.2f s", lives.last_exit, lives.restarts, wait)
        self._start_at = time.monotonic() + wait
        self._listen(True)
        return None

    # -- callers, while no server accepts ------------------------------------------------------------------------------

    def _wait(self, now: float) -> None:
        """Sleep until a signal, the pipe, a caller, or a time."""
        times = [caller.until for caller in self._callers.values()]
        if not self._pid:
            times.append(self._start_at)
        for key, _ in self._selector.select(max(0.0, min(times) - now) if times else None):
            key.data()
        now = time.monotonic()
        for caller in [c for c in self._callers.values() if c.until <= now]:
            self._leave(caller)

    def _read_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _listen(self, on: bool) -> None:
        """Accept connections here, or no more."""
        registered = self._sock.fileno() >= 0 and self._sock in self._selector.get_map()
        if on and not registered:
            self._sock.listen(self._backlog)
            self._sock.setblocking(False)
            self._selector.register(self._sock, selectors.EVENT_READ, self._accept)
        elif registered and not on:
            self._selector.unregister(self._sock)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return  # it left, the server took it, or there are no descriptors
        sock.setblocking(False)
        if len(self._callers) >= CALLERS:
            self._leave(next(iter(self._callers.values())))
        caller = self._callers[sock] = _WaitingCaller(sock, time.monotonic() + CALLER_LIMIT)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(caller))

    def _hear(self, caller: _WaitingCaller) -> None:
        try:
            data = caller.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leave(caller)
            return
        if caller.answered:
            return
        caller.head = (caller.head + data)[:HEAD]
        if b"\r\n\r\n" not in caller.head and len(caller.head) < HEAD:
            return
        caller.answered = True
        try:
            caller.sock.send(self._answer(caller.head))
            caller.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._leave(caller)

    def _leave(self, caller: _WaitingCaller) -> None:
        self._selector.unregister(caller.sock)
        caller.sock.close()
        del self._callers[caller.sock]

    def _answer(self, head: bytes) -> bytes:
        """Answer /health from the supervisor's own state, and all other requests with `not_ready`."""
        request_id = self._form.own_id(_header(head, b"x-request-id")) or secrets.token_hex(16)
        told: dict[str, Any] = {"state": "restarting", **asdict(self._lives)}
        if head.split(b" ", 2)[1:2] == [b"/health"]:
            body = {"status": "restarting", **told, "model_loaded": False, "request_id": request_id}
            refusal = Refusal(503, encode(body))
        else:
            message = f"the server {self._lives.last_exit} and is started again"
            refusal = self._form.refuse(NotReady(message, **told), request_id, False)
        headers = [
            (b"Content-Type", refusal.content_type),
            (b"Content-Length", b"%d" % len(refusal.body)),
            (b"Retry-After", b"1"),
            (b"X-Request-Id", request_id.encode()),
            (b"Connection", b"close"),
            *refusal.headers,
        ]
        lines = [b"%s: %s\r\n" % header for header in headers]
        return b"".join([b"HTTP/1.1 503 Service Unavailable\r\n", *lines, b"\r\n", refusal.body])

    def _close(self) -> None:
        """Close everything but the listening socket, which is closed when the supervisor ends."""
        for caller in list(self._callers.values()):
            self._leave(caller)
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._woken.close()
        self._wake.close()
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def _header(head: bytes, name: bytes) -> bytes:
    """The value of a header, b"" without it."""
    for line in head.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]:
        found, _, value = line.partition(b":")
        if found.lower() == name:
            return value.strip(b" \t")
    return b""


def _become_server(above: int) -> None:
    """In the fork: set signals as in a process of its own, which ends when its supervisor is gone."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # a Ctrl-C in a terminal is for the supervisor, which passes it on
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with(above)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def die_with(parent: int) -> None:
    """Let this process be killed when its parent, which has this id, is gone."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it was gone before that took effect
        os._exit(1)


def _run_and_leave(serve: Callable[[Parent], int], parent: Parent) -> NoReturn:
    """Run the server and exit: the fork never returns to the caller of the supervisor."""
    status = EXIT_LOST
    try:
        status = serve(parent)
    except BaseException:
        log.exception("the server ended")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
