"""Runtime processes: started on one end of a socket pair, watched for hangs, killed with their children, and reaped.

A thread waits for the end of each process, on any event loop. SIGCHLD is left to the main thread of the program.
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
from reflex_runtime.ipc.messages import INFO
from reflex_runtime.ipc.peer import ConnectionLost, Handler, Peer
from reflex_runtime.run.process import ending

log = logging.getLogger("reflex.ipc")

LAST_READ_S = 0.05  # to read what a process wrote before it ended
KILL_LIMIT = 10.0  # seconds that killing may take: a process inside of a driver that hangs cannot be killed


class StartFailed(ReflexError):
    """A runtime process could not be started, or ended before it was ready, or took too long."""

    code, http_status = "worker_start_failed", 503


class Process:
    """A child process in its own process group, so that Ctrl-C in a terminal does not reach it.

    ended: a future of its exit status, as `subprocess` has it; set when the process is reaped.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._popen, self.pid = popen, popen.pid
        threading.Thread(target=self._wait, name=f"waits-for-{self.pid}", daemon=True).start()

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        return ending(self.ended.result()) if self.ended.done() else "still runs"

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._popen.terminate()

    async def kill(self) -> None:
        """Kill its group and wait until it is reaped; if the caller is cancelled, for a tenth of the limit at most."""
        if self.ended.done():
            return
        self._kill_group()
        try:
            await asyncio.wait({self.ended}, timeout=KILL_LIMIT)
        except asyncio.CancelledError:
            await asyncio.wait({self.ended}, timeout=KILL_LIMIT / 10)
            raise
        if not self.ended.done():
            log.error("process %d could not be killed within %g s", self.pid, KILL_LIMIT)

    def _wait(self) -> None:
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except (AttributeError, OSError):  # not on every system
            self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._over)

    def _over(self) -> None:
        self._kill_group()  # its children; before it is reaped, because its number may be reused afterwards
        self.ended.set_result(self._popen.wait())

    def _kill_group(self) -> None:
        if self._popen.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)


class Link:
    """A connection to a runtime, and its process if this end started it. The connection ends with the process, even if
    another process has the socket, too. ended: done when the process has ended, without one when the connection has."""

    def __init__(self, peer: Peer, process: Process | None = None) -> None:
        self.peer, self.process = peer, process
        self.ended: asyncio.Future[Any] = peer.ended if process is None else process.ended
        if process is not None:
            process.ended.add_done_callback(self._without_process)

    async def kill(self, grace: float = 0.0) -> None:
        """End the connection at once, and kill the process unless it exits within `grace` seconds."""
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
        asyncio.get_running_loop().call_later(LAST_READ_S, self.peer.abort, ended)


Opener = Callable[[Handler], Awaitable[Link]]


def spawned(command: Sequence[str], env: Mapping[str, str] | None = None) -> Opener:
    """An opener that runs a command with one end of a socket pair as its standard input, to read and write frames.

    The command's stdout and stderr go to this process's stderr. env: added to this process's environment. The opener
    raises StartFailed; then no process is left.
    """
    if isinstance(command, str) or not command:
        raise ConfigError(f"command={command!r}: must be a list of at least one word")

    def run(stdin: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env={**os.environ, **(env or {})}, stdin=stdin, stdout=2, process_group=0)

    async def opened(handler: Handler) -> Link:
        ours, theirs = socket.socketpair()
        with theirs:
            peer = await _peer_on(ours, handler)
            try:
                return Link(peer, Process(run(theirs.fileno())))
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
    """The same future; asyncio will not log its error if nobody waits for it."""
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    return answer


async def beat(peer: Peer, every: float, limit: float) -> None:
    """Call a process every `every` seconds, and end its connection when it is silent for `limit` seconds.

    A wait that ends late by more than `every` is not counted: this process itself was stopped.
    """
    loop, silent = asyncio.get_running_loop(), 0.0
    answer = unheard(peer.call(INFO, {}))
    while silent < limit:
        wait, begun = min(every, limit - silent), loop.time()
        await asyncio.sleep(wait)
        if answer.done():  # an error is an answer, too
            answer, silent = unheard(peer.call(INFO, {})), 0.0
        elif loop.time() - begun <= wait + every:
            silent += wait
    peer.abort(ProcessorHung(f"it did not answer for {limit:g} s"))
