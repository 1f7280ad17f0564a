"""The supervisor, a small parent process: it owns the listening sockets, and starts workers again that end unasked.

A worker is a fork: the same program with the same arguments, which accepts from the sockets that all share. Over a pipe
it beats from its event loop, and says when it is ready and when it ends on purpose. One that ends without a word, or
whose loop stands still, is replaced, with back-off; meanwhile callers wait in the sockets' backlog, or other workers
take them. The supervisor has no thread and no event loop, because they would disturb the fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import faulthandler
import logging
import os
import selectors
import signal
import socket
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import random
from typing import Any, Final, NoReturn

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.logs import leave
from reflex_runtime.pacing import Restarts
from reflex_runtime.settings.declare import one_line

log = logging.getLogger("reflex.supervisor")

BACKLOG: Final = 4096  # connections that wait to be accepted
ENDS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
TURNS: Final = (signal.SIGHUP, signal.SIGUSR1)  # files continue in new ones
PASSED_ON: Final = (*ENDS, *TURNS)
MOST: Final = 8  # lives in a row shorter than STEADY, after which a lone worker is given up
STEADY: Final = 60.0  # seconds
FIRST, LONGEST = 0.1, 10.0  # seconds before the first and the longest wait for a new start
BEAT: Final = 0.5  # seconds
LEAST_WATCH: Final = 4 * BEAT  # a loop that stands still for less is not hung, whatever the setting says
LAST_WORDS: Final = 2.0  # seconds in which a hung worker writes its stacks; one that the kernel has stopped cannot
_BEATS, _READY, _ENDS = b"b", b"r", b"e"
_PR_SET_PDEATHSIG: Final = 1
EXIT_LOST: Final = 1  # status of a worker that lost its device, and of a supervisor that gives up


@dataclass(slots=True)
class Lives:
    """The history of one worker. restarts: their number. last_exit: how the last one ended, in words."""

    restarts: int = 0
    last_exit: str | None = None


class Parent:
    """A worker's connection to its supervisor. number: of the worker, from 0; own_urls: where each of several workers
    has pages of its own, in their order."""

    def __init__(self, lives: Lives, pipe: int, number: int) -> None:
        self.lives, self._pipe, self.number = lives, pipe, number
        self.own_urls: Sequence[str] = ()

    def beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say every half second from now on that the loop turns."""
        self._tell(_BEATS)
        loop.call_later(BEAT, self.beat, loop)

    def ready(self) -> None:
        self._tell(_READY)

    def ends(self) -> None:
        """It ends on purpose: its status is the last word."""
        self._tell(_ENDS)

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone: the kernel ends this process too
            os.write(self._pipe, word)


@dataclass(slots=True)
class _Worker:
    number: int
    restarts: Restarts
    lives: Lives = field(default_factory=Lives)
    pid: int = 0  # 0 while there is none
    pipe: int = -1
    start_at: float = 0.0
    ready_at: float | None = None
    beat_at: float | None = None  # the last beat; None before the first
    kill_at: float | None = None  # when it is killed, if its last words have not ended it
    on_purpose: bool = False


def supervise(serve: Callable[[Parent], int], workers: int, hung_after: float) -> int:
    """Run `serve` in forks, and again after each unasked end. Returns the exit status.

    hung_after: seconds without a beat of its loop after which a worker is killed, two at least; 0 is never. A worker
    that ends on purpose ends everything with its status, and so does one that is lost before any was ever ready: it
    would be again.
    """
    return _Supervisor(serve, workers, hung_after).run()


class _Supervisor:
    def __init__(self, serve: Callable[[Parent], int], workers: int, hung_after: float) -> None:
        self._serve, self._hung_after = serve, hung_after and max(hung_after, LEAST_WATCH)
        self._workers = [
            _Worker(number, Restarts(FIRST, LONGEST, STEADY, MOST, LONGEST, random)) for number in range(workers)
        ]
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._ever_ready = False
        self._ending: int | None = None  # the signal that ends everything
        self._status: int | None = None  # of everything, once a worker has ended it

    def run(self) -> int:
        for end in (self._woken, self._wake):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (*PASSED_ON, signal.SIGCHLD):
            signal.signal(number, self._signalled)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        try:
            while True:
                now = time.monotonic()
                for worker in self._workers:
                    if not worker.pid and self._ending is None and now >= worker.start_at:
                        self._fork(worker)
                self._wait(now)
                for worker in self._workers:
                    self._reap(worker)
                if self._ending is not None and not any(worker.pid for worker in self._workers):
                    return self._status or 0
        finally:
            self._close()

    def _fork(self, worker: _Worker) -> None:
        ours, theirs = os.pipe()
        above = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        pid = os.fork()
        if pid == 0:
            self._close()
            os.close(ours)
            _become_server(above)
            _run_and_leave(self._serve, Parent(worker.lives, theirs, worker.number))
        os.close(theirs)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        os.set_blocking(ours, False)
        worker.pid, worker.pipe = pid, ours
        worker.ready_at = worker.beat_at = worker.kill_at = None
        worker.on_purpose = False
        self._selector.register(ours, selectors.EVENT_READ, worker)
        if self._ending is not None:  # it came meanwhile
            _signal(pid, self._ending)

    def _signalled(self, number: int, frame: Any) -> None:
        if number == signal.SIGCHLD:
            return
        if number in ENDS:
            self._ending = number
        for worker in self._workers:
            _signal(worker.pid, number)

    def _wait(self, now: float) -> None:
        """Sleep until a signal, a word of a worker, or a time."""
        times = [worker.start_at for worker in self._workers if not worker.pid and self._ending is None]
        if self._hung_after:
            times += [worker.beat_at + self._hung_after for worker in self._workers if worker.beat_at is not None]
            times += [worker.kill_at for worker in self._workers if worker.kill_at is not None]
        limit = max(0.0, min(times) - now) if times else None
        for key, _ in self._selector.select(limit):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                self._hear(key.data)
        after = time.monotonic()
        if limit is not None and after - now > limit + 1.0:  # this process stood still, so the beats are no evidence
            for worker in self._workers:
                worker.beat_at = None if worker.beat_at is None else after
        for worker in self._workers:
            self._check_beat(worker, after)

    def _hear(self, worker: _Worker) -> None:
        try:
            words = os.read(worker.pipe, 4096)
        except BlockingIOError:
            return
        if _BEATS in words:
            worker.beat_at = time.monotonic()
        if _READY in words:
            worker.ready_at, self._ever_ready = time.monotonic(), True
        worker.on_purpose |= _ENDS in words
        if not words or worker.on_purpose:
            worker.beat_at = None  # it drains, and needs no watch
        if not words:
            self._drop_pipe(worker)

    def _check_beat(self, worker: _Worker, now: float) -> None:
        if self._hung_after and worker.pid and worker.beat_at is not None and now - worker.beat_at >= self._hung_after:
            log.error(
                "worker %d: its event loop has stood still for %g s; its stacks follow, and it is killed",
                worker.number, self._hung_after,
            )  # fmt: skip
            worker.beat_at, worker.kill_at = None, now + LAST_WORDS
            _signal(worker.pid, signal.SIGABRT)  # faulthandler writes the stacks of all threads
        if worker.kill_at is not None and now >= worker.kill_at:
            worker.kill_at = None
            _signal(worker.pid, signal.SIGKILL)

    def _drop_pipe(self, worker: _Worker) -> None:
        if worker.pipe >= 0:
            self._selector.unregister(worker.pipe)
            os.close(worker.pipe)
            worker.pipe = -1

    def _reap(self, worker: _Worker) -> None:
        """Handle the end of a worker."""
        if not worker.pid or os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        with contextlib.suppress(OSError):  # all that it started; its group id is not reused before it is reaped
            os.killpg(worker.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        worker.pid = 0
        while worker.pipe >= 0:
            self._hear(worker)  # what it said before it ended
        if self._ending is not None:
            asked = status >= 0 or -status == self._ending
            self._status = max(self._status or 0, (status if status > 0 else 0) if asked else EXIT_LOST)
        elif worker.on_purpose:
            self._end_all(status if status >= 0 else EXIT_LOST)
        else:
            self._lost(worker, status)

    def _lost(self, worker: _Worker, status: int) -> None:
        lives, restarts = worker.lives, worker.restarts
        lives.last_exit = f"exited with status {status}" if status >= 0 else f"was ended by {_name(-status)}"
        told = f"worker {worker.number}" if len(self._workers) > 1 else "the server"
        if not self._ever_ready:
            log.error("%s %s before it was ready; it is not started again", told, lives.last_exit)
            self._end_all(EXIT_LOST)
            return
        if worker.ready_at is None:
            restarts.failed()
        else:
            restarts.lived(time.monotonic() - worker.ready_at)
        if restarts.open and len(self._workers) == 1:
            log.error("%s %s; that was loss %d in a row, giving up", told, lives.last_exit, restarts.failures)
            self._end_all(EXIT_LOST)
            return
        lives.restarts += 1
        wait = restarts.wait()
        log.error("%s %s; restart %d in %.2f s", told, lives.last_exit, lives.restarts, wait)
        worker.start_at = time.monotonic() + wait

    def _end_all(self, status: int) -> None:
        self._ending, self._status = signal.SIGTERM, status
        for worker in self._workers:
            _signal(worker.pid, signal.SIGTERM)

    def _close(self) -> None:
        """Close everything of the supervisor's own."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._woken.close()
        self._wake.close()
        for worker in self._workers:
            if worker.pipe >= 0:
                os.close(worker.pipe)
                worker.pipe = -1


def _become_server(above: int) -> None:
    """In the fork: set signals as in a process of its own, which ends when its supervisor is gone."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # a Ctrl-C in a terminal is for the supervisor, which passes it on
    closes = {signal.SIGHUP} if os.isatty(0) else set()  # its terminal; nohup gives it another standard input
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL if number in closes.union(ENDS) else signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    faulthandler.enable()
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
        if status != EXIT_LOST:
            parent.ends()
    except BaseException:
        log.exception("the server ended")
    finally:
        leave(status)


def _signal(pid: int, number: int) -> None:
    if pid > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- the sockets -------------------------------------------------------------------------------------------------------


def bind(host: str, port: int, uds: str = "") -> socket.socket:
    """A bound socket; ConfigError when the address cannot be bound. uds: the path of a Unix socket, instead."""
    if uds:
        return _bind_unix(uds)
    sock = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
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
    """A Unix socket that only this user may open. A socket that a dead server left is replaced, a live one is not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
                os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--uds={one_line(path)}: cannot be bound: {error.strerror or error}") from error
    sock.set_inheritable(True)
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        try:
            tried.connect(path)
        except OSError:
            return False
    return True


def check_tls(certfile: str, keyfile: str) -> None:
    """ConfigError when the files cannot be used to serve TLS."""
    import ssl  # here: few servers need it, and a supervisor stays small

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile or None, _no_password)
    except (OSError, ValueError) as error:
        told = f"--ssl-certfile={one_line(certfile)}" + (f" --ssl-keyfile={one_line(keyfile)}" if keyfile else "")
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"{told}: cannot be used: {one_line(why)}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def url_of(sock: socket.socket, tls: bool = False) -> str:
    """Where a socket listens, for people."""
    address = sock.getsockname()
    if isinstance(address, (str, bytes)):
        return f"unix:{os.fsdecode(address)}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http{'s' if tls else ''}://{host}:{address[1]}"
