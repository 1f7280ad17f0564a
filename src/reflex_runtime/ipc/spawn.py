"""Starts a runtime process with one end of a socket pair, notices when it hangs, and ends it: killed with all that it
started, and reaped.

The process is watched by a descriptor of it (`pidfd`), which every kind of event loop can wait for, and not by SIGCHLD,
which belongs to the owner of the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from reflex_runtime.core.errors import ConfigError, ProcessorHung, ReflexError
from reflex_runtime.ipc.frames import Reader
from reflex_runtime.ipc.messages import INFO, Info
from reflex_runtime.ipc.peer import ConnectionLost, Handler, Peer

log = logging.getLogger("reflex.ipc")
_INFO = Reader(Info)

LAST_WORDS = 0.05  # seconds to read what a process wrote before it ended
KILL_LIMIT = 10.0  # seconds that killing may take: a process inside a driver that hangs cannot be killed


class StartFailed(ReflexError):
    """A runtime process could not be started, or ended before it was ready, or took too long."""

    code, http_status = "worker_start_failed", 503


class Process:
    """A child process in a process group of its own: a Ctrl-C in a terminal does not reach it. Raises OSError.

    stdin: the descriptor that becomes its standard input. What it prints goes to this process's stderr.
    ended: its status as `subprocess` reports it, set once the process is reaped; nothing has to wait for that.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stdin: int = subprocess.DEVNULL) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._popen = subprocess.Popen(command, env=env, stdin=stdin, stdout=2, process_group=0)
        self.pid = self._popen.pid
        self._watch()

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if not self.ended.done():
            return "still runs"
        status = self.ended.result()
        if status >= 0:
            return f"exited with status {status}"
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._popen.terminate()

    async def kill(self) -> None:
        """Kill it and the rest of its group, and wait until it is reaped, also when the caller is cancelled."""
        if self.ended.done():
            return
        self._kill_group()
        try:
            await asyncio.wait({self.ended}, timeout=KILL_LIMIT)
        except asyncio.CancelledError:
            await asyncio.wait({self.ended}, timeout=1.0)
            raise
        if not self.ended.done():
            log.error("process %d could not be killed within %g s", self.pid, KILL_LIMIT)

    def _watch(self) -> None:
        try:
            fd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or a sandbox without this call
            threading.Thread(target=self._wait, name=f"reaps-{self.pid}", daemon=True).start()
        else:
            self._loop.add_reader(fd, self._over, fd)

    def _wait(self) -> None:
        self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._set)

    def _over(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        os.close(fd)
        self._kill_group()  # before it is reaped: until then its group's number is not used again
        self._popen.wait()
        self._set()

    def _set(self) -> None:
        if not self.ended.done():
            self.ended.set_result(self._popen.returncode)

    def _kill_group(self) -> None:
        if self._popen.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)


class Link:
    """A connection to a runtime, and its process where this end started one. A process that ends takes the connection
    with it, also when another process still holds its end."""

    def __init__(self, peer: Peer, process: Process | None = None) -> None:
        self.peer, self.process = peer, process
        if process is not None:
            process.ended.add_done_callback(self._without_process)

    async def kill(self, grace: float = 0.0) -> None:
        """End the connection at once, and the process unless it ends by itself within `grace` seconds."""
        self.peer.abort()
        if self.process is None:
            return
        try:
            if grace > 0:
                await asyncio.wait({self.process.ended}, timeout=grace)
        finally:
            await self.process.kill()

    def _without_process(self, _: Any) -> None:
        assert self.process is not None
        ended = ConnectionLost(f"its process {self.process.ending}")
        asyncio.get_running_loop().call_later(LAST_WORDS, self.peer.abort, ended)


Opener = Callable[[Handler], Awaitable[Link]]


def from_socket(sock: socket.socket) -> Opener:
    """A runtime at the other end of a connected stream socket. Works once: there is no process to start again."""
    sockets = [sock]

    async def opened(handler: Handler) -> Link:
        if not sockets:
            raise StartFailed("a connected socket can be used only once")
        return Link(await _peer_on(sockets.pop(), handler))

    return opened


def spawned(command: Sequence[str], env: Mapping[str, str] | None = None) -> Opener:
    """Runs the command with one end of a socket pair as its standard input: the process reads and writes frames there.

    env: added to the environment of this process. Its stdout and stderr go to the stderr of this process.
    The opener raises StartFailed, and leaves nothing behind, also when it is cancelled.
    """
    if isinstance(command, str) or not command:
        raise ConfigError(f"command={command!r}: must be a list of at least one word")

    async def opened(handler: Handler) -> Link:
        ours, theirs = socket.socketpair()
        with theirs:
            peer = await _peer_on(ours, handler)
            try:
                return Link(peer, Process(command, {**os.environ, **(env or {})}, theirs.fileno()))
            except (OSError, ValueError) as error:  # ValueError: a word with a null character
                peer.abort()
                raise StartFailed(f"{command[0]!r} cannot be run: {error}") from None

    return opened


async def _peer_on(sock: socket.socket, handler: Handler) -> Peer:
    try:
        sock.setblocking(False)
        _, peer = await asyncio.get_running_loop().connect_accepted_socket(lambda: Peer(handler), sock)
    except BaseException:
        sock.close()
        raise
    return peer


def unheard(answer: asyncio.Future[Any]) -> asyncio.Future[Any]:
    """An answer that nobody may wait for: asyncio says nothing of its error."""
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    return answer


async def beat(peer: Peer, every: float, limit: float, told: Callable[[Info], None]) -> None:
    """Ask a process every `every` seconds what it is, and end its connection when it is silent for `limit` seconds.

    told: gets what it says. A wait that takes longer by more than `every` shows that this process stood still, not the
    other: it is not counted.
    """
    loop, silent = asyncio.get_running_loop(), 0.0
    answer = unheard(peer.call(INFO, {}))
    while silent < limit:
        wait, begun = min(every, limit - silent), loop.time()
        await asyncio.sleep(wait)
        if not answer.done():
            silent += wait if loop.time() - begun <= wait + every else 0.0
            continue
        with contextlib.suppress(ReflexError):  # any answer shows that it is alive
            told(_INFO.read(await answer))
        answer, silent = unheard(peer.call(INFO, {})), 0.0
    peer.abort(ProcessorHung(f"nothing was answered for {limit:g} s"))
