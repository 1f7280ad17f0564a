"""The supervisor, a small parent process: it owns the listening sockets, and restarts workers that end unexpectedly.

A worker is a fork that accepts from the shared sockets. It writes into shared memory when its event loop last turned,
when it was ready, and whether it ends on purpose. A worker that ends otherwise, or whose loop hangs, is replaced with
back-off; meanwhile callers wait in the backlog of the sockets, or other workers accept them. The supervisor has no
threads and no event loop, which would disturb the fork: it blocks its signals and waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import faulthandler
import logging
import mmap
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Sequence
from math import inf
from random import random
from typing import Final, NoReturn

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.logs import leave
from reflex_runtime.pacing import Restarts
from reflex_runtime.run.process import ending
from reflex_runtime.settings.declare import one_line

log = logging.getLogger("reflex.supervisor")

BACKLOG: Final = 4096  # connections that may wait to be accepted
ENDS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
TURNS: Final = (signal.SIGHUP, signal.SIGUSR1)  # files continue in new ones
PASSED_ON: Final = (*ENDS, *TURNS)  # to all workers
AWAITED: Final = (*PASSED_ON, signal.SIGCHLD, signal.SIGALRM)
MOST: Final = 8  # ends in a row, each less than STEADY after the start; then an only worker is not restarted
STEADY: Final = 60.0  # seconds
FIRST, LONGEST = 0.1, 10.0  # seconds before the first and the longest wait for a new start
BEAT: Final = 0.5  # seconds between two beats of a worker's loop
LEAST_WATCH: Final = 4 * BEAT  # seconds without a beat after which a loop may count as hung, at least
LAST_WORDS: Final = 2.0  # seconds for a hung worker to write its stacks, unless the kernel has stopped it
LONG: Final = 3600.0  # seconds between two looks, if no beats are watched
_PR_SET_PDEATHSIG: Final = 1
_ENDED: Final = os.WEXITED | os.WNOHANG | os.WNOWAIT  # for `os.waitid`: None while the process runs
EXIT_LOST: Final = 1  # status of a worker that lost its device, and of a supervisor that gives up


class Shared(ctypes.Structure):
    """Written by a worker, read by its supervisor. beat: when the loop last turned; ready: when the worker was ready;
    both 0 until then. on_purpose: the worker ended by itself, with another status than EXIT_LOST."""

    _fields_ = (("beat", ctypes.c_double), ("ready", ctypes.c_double), ("on_purpose", ctypes.c_bool))
    beat: float
    ready: float
    on_purpose: bool


class Parent:
    """A worker's link to its supervisor. number: of the worker, from 0. restarts: how often it was started again;
    last_exit: how its last process ended, in words. own_urls: the addresses of the pages of several workers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.restarts = 0
        self.last_exit: str | None = None
        self.own_urls: Sequence[str] = ()
        self.shared = Shared.from_buffer(mmap.mmap(-1, ctypes.sizeof(Shared)))

    def beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write every half second from now on that the loop turns."""
        self.shared.beat = time.monotonic()
        loop.call_later(BEAT, self.beat, loop)

    def ready(self) -> None:
        self.shared.ready = time.monotonic()


class _Worker(Parent):
    """pid: 0 while it has no process. start_at: when the next one may start."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.back_off = Restarts(FIRST, LONGEST, STEADY, MOST, LONGEST, random)
        self.pid, self.start_at = 0, 0.0

    def hung_at(self, after: float) -> float:
        """When it counts as hung: `after` seconds after its last beat. inf while it is not watched."""
        watched = after and self.pid and self.shared.beat and not self.shared.on_purpose
        return self.shared.beat + after if watched else inf


def supervise(serve: Callable[[Parent], int], workers: int, hung_after: float) -> int:
    """Run `serve` in forks, and again after each unexpected end. Returns the exit status.

    hung_after: seconds without a beat after which a worker is killed, two at least; 0 is never. If a worker ends on
    purpose, or unexpectedly before any was ready, all end.
    """
    return _Supervisor(serve, workers, hung_after).run()


class _Supervisor:
    def __init__(self, serve: Callable[[Parent], int], workers: int, hung_after: float) -> None:
        self._serve, self._hung_after = serve, hung_after and max(hung_after, LEAST_WATCH)
        self._workers = [_Worker(number) for number in range(workers)]
        self._once_ready = False  # whether any worker ever was
        self._ending: int | None = None  # the signal that ends all workers, once it was sent
        self._status = 0  # exit status

    def run(self) -> int:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the kernel keeps no exit status
        before = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
        try:
            while self._ending is None or any(worker.pid for worker in self._workers):
                for worker in self._workers:
                    if not worker.pid and self._ending is None and time.monotonic() >= worker.start_at:
                        self._fork(worker)
                self._wait()
                for worker in self._workers:
                    if time.monotonic() >= worker.hung_at(self._hung_after):
                        self._end_hung(worker)
                    if worker.pid and os.waitid(os.P_PID, worker.pid, _ENDED) is not None:
                        self._reap(worker)
            return self._status
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # drops a pending one
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _fork(self, worker: _Worker) -> None:
        shared, above = worker.shared, os.getpid()
        shared.beat, shared.ready, shared.on_purpose = 0.0, 0.0, False
        worker.pid = os.fork()
        if worker.pid == 0:
            _become_server(above)
            _run_and_leave(self._serve, worker)
        with contextlib.suppress(OSError):
            os.setpgid(worker.pid, worker.pid)

    def _wait(self) -> None:
        """Sleep until a signal or a time, and pass the signal on."""
        now = time.monotonic()
        times = [now + (self._hung_after or LONG), *(worker.hung_at(self._hung_after) for worker in self._workers)]
        times += [worker.start_at for worker in self._workers if not worker.pid and self._ending is None]
        limit = max(0.0, min(times) - now)
        signal.setitimer(signal.ITIMER_REAL, max(limit, 1e-6))
        came = signal.sigwait(AWAITED)  # Python's sigtimedwait returns garbage after a pause (Ctrl-Z) beyond its time
        after = time.monotonic()
        if after - now > limit + 1.0:  # this process was stopped, and perhaps the workers too: old beats prove nothing
            for worker in self._workers:
                worker.shared.beat = after if worker.shared.beat else 0.0
        if came in PASSED_ON:
            self._ending = came if came in ENDS else self._ending
            self._signal_all(came)

    def _end_hung(self, worker: _Worker) -> None:
        log.error(
            "worker %d: its event loop has stood still for %g s; its stacks follow, and it is killed",
            worker.number, self._hung_after,
        )  # fmt: skip
        _signal(worker.pid, signal.SIGABRT)  # faulthandler writes the stacks of all threads
        until = time.monotonic() + LAST_WORDS
        while os.waitid(os.P_PID, worker.pid, _ENDED) is None and (left := until - time.monotonic()) > 0.0:
            signal.sigtimedwait({signal.SIGCHLD}, left)  # also of other workers, and of one that is stopped or goes on
        _signal(worker.pid, signal.SIGKILL)

    def _reap(self, worker: _Worker) -> None:
        """Handle the end of a worker."""
        with contextlib.suppress(OSError):  # its child processes; the group id is not reused until it is reaped
            os.killpg(worker.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        worker.pid = 0
        self._once_ready = self._once_ready or any(worker.shared.ready for worker in self._workers)
        if self._ending is not None:
            asked = status >= 0 or -status == self._ending
            self._status = max(self._status, max(status, 0) if asked else EXIT_LOST)
        elif worker.shared.on_purpose:
            self._end_all(status if status >= 0 else EXIT_LOST)
        else:
            self._lost(worker, status)

    def _lost(self, worker: _Worker, status: int) -> None:
        back_off, ready, now = worker.back_off, worker.shared.ready, time.monotonic()
        worker.last_exit = ending(status)
        told = f"worker {worker.number}" if len(self._workers) > 1 else "the server"
        back_off.lived(now - ready if ready else 0.0)
        if not self._once_ready:
            log.error("%s %s before it was ready; it is not started again", told, worker.last_exit)
            self._end_all(EXIT_LOST)
        elif back_off.open and len(self._workers) == 1:
            log.error("%s %s; that was loss %d in a row, giving up", told, worker.last_exit, back_off.failures)
            self._end_all(EXIT_LOST)
        else:
            worker.restarts += 1
            wait = back_off.wait()
            log.error("%s %s; restart %d in %.2f s", told, worker.last_exit, worker.restarts, wait)
            worker.start_at = now + wait

    def _end_all(self, status: int) -> None:
        self._ending, self._status = signal.SIGTERM, status
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        for worker in self._workers:
            _signal(worker.pid, number)


def _become_server(above: int) -> None:
    """In the fork: reset the signals, and end when the supervisor is gone."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # the supervisor passes on a Ctrl-C in a terminal
    closes = {signal.SIGHUP} if os.isatty(0) else set()  # of its terminal; nohup redirects standard input
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL if number in closes.union(ENDS) else signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    faulthandler.enable()
    die_with(above)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent is gone. parent: the parent's process id."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before this took effect
        os._exit(1)


def _run_and_leave(serve: Callable[[Parent], int], parent: Parent) -> NoReturn:
    """Run the server and exit, so that the fork never returns to the caller of `supervise`."""
    status = EXIT_LOST
    try:
        status = serve(parent)
        parent.shared.on_purpose = status != EXIT_LOST
    except BaseException:
        log.exception("the server ended")
    finally:
        leave(status)


def _signal(pid: int, number: int) -> None:
    if pid > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# -- the sockets -------------------------------------------------------------------------------------------------------


def bind(host: str, port: int, uds: str = "") -> socket.socket:
    """A listening socket, so that no other can be bound to its address; ConfigError if it cannot be bound. uds: path of
    a Unix socket to bind instead."""
    if uds:
        return _bind_unix(uds)
    sock = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        told = f"--host={one_line(host)} --port={port}: cannot be bound: {why}"
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            told += "; use --port N, or --port 0 for a free one"
        raise ConfigError(told) from error
    sock.set_inheritable(True)
    return sock


def _bind_unix(path: str) -> socket.socket:
    """A Unix socket that only this user may open. Replaces the socket of a dead server, but not of a live one."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
                os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--uds={one_line(path)}: cannot be bound: {error.strerror or error}") from error
    sock.set_inheritable(True)
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        return tried.connect_ex(path) == 0


def check_tls(certfile: str, keyfile: str) -> None:
    """ConfigError when the files cannot be used to serve TLS."""
    import ssl  # here: few servers need it, and the supervisor stays small

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile or None, _no_password)
    except (OSError, ValueError) as error:
        told = f"--ssl-certfile={one_line(certfile)}" + (f" --ssl-keyfile={one_line(keyfile)}" if keyfile else "")
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"{told}: cannot be used: {one_line(why)}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def url_of(sock: socket.socket, tls: bool = False) -> str:
    """An address at which programs on this machine reach the socket."""
    address = sock.getsockname()
    if isinstance(address, (str, bytes)):
        return f"unix:{os.fsdecode(address)}"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address[0], address[0])
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{address[1]}"
