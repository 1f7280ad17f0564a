"""How a runtime process comes to be, and to its end: started with an address to connect to, known by its token, killed
with all that it started, reaped, and never left behind.

The front listens and the process connects, so that nothing has to be guessed: not when it is up, nor where. The
process is watched by a descriptor of it, which every kind of event loop can wait for, and not by SIGCHLD, which
belongs to whoever owns the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import msgspec

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.ipc.frames import (
    METHOD_NOT_FOUND,
    Codec,
    Notification,
    ProtocolError,
    Reader,
    RpcError,
    RpcRequest,
)
from reflex_runtime.ipc.messages import INFO
from reflex_runtime.ipc.peer import ConnectionLost, Handler, Peer, RawAnswer

log = logging.getLogger("reflex.ipc")

S = TypeVar("S", bound=asyncio.AbstractServer)

TOKEN = "REFLEX_WORKER_TOKEN"  # the variable of its environment in which a process finds its token
MOST_STRANGERS = 16  # connections that have not said who they are; one more, and the oldest is turned away
STRANGERS_FRAME = 2**20  # bytes of a frame that is read from one of them

LAST_WORDS = 0.05  # seconds for what a process that has ended wrote before it did
KILL_LIMIT = 10.0  # seconds that killing may take: a process inside of a driver that hangs cannot be killed

Transport = Literal["unix", "tcp", "stdio"]


class StartFailed(ReflexError):
    """A runtime process could not be started, or ended before it was ready, or took too long."""

    code, http_status = "worker_start_failed", 503


class Process:
    """A child process, its own group, so that a Ctrl-C in a terminal is for the front alone. Raises OSError.

    ended: its status as `subprocess` tells it; it is set when the process is reaped, which needs nobody to wait.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stdio: socket.socket | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._popen = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL if stdio is None else stdio.fileno(),
            stdout=2 if stdio is None else stdio.fileno(),  # what it prints is for people
            process_group=0,
        )
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
        """Ask it to end."""
        self._popen.terminate()

    async def kill(self) -> None:
        """End it and all that it started, and return when it is reaped. Also when the caller is cancelled."""
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
        except (AttributeError, OSError):  # not Linux, or a sandbox that knows no such call
            threading.Thread(target=self._wait, name=f"reaps-{self.pid}", daemon=True).start()
        else:
            self._loop.add_reader(fd, self._over, fd)

    def _wait(self) -> None:
        self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody wants to know
            self._loop.call_soon_threadsafe(self._set)

    def _over(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        os.close(fd)
        self._kill_group()  # before it is reaped: until then the number of its group is nobody else's
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
    with it, whoever else may hold its other end."""

    def __init__(self, peer: Peer, process: Process | None = None) -> None:
        self.peer, self.process = peer, process
        if process is not None:
            process.ended.add_done_callback(self._without_process)

    async def kill(self, grace: float = 0.0) -> None:
        """End the connection at once, and the process unless it does by itself within `grace` seconds."""
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
    """A runtime at the other end of a connected stream socket. Once: a socket that is over cannot be had again."""
    sockets = [sock]

    async def opened(handler: Handler) -> Link:
        if not sockets:
            raise StartFailed("a connected socket can be used only once")
        return Link(await _peer_on(sockets.pop(), lambda: Peer(handler)))

    return opened


def spawned(command: Sequence[str], transport: Transport = "unix", env: Mapping[str, str] | None = None) -> Opener:
    """Runs `command --connect ADDRESS` and waits for the process to connect there and to say its token.

    transport: unix (in a private directory), tcp (127.0.0.1) or stdio (its descriptors 0 and 1). env: added to the
    environment of this process. Its stderr, and without stdio its stdout, go where the stderr of this one goes.
    The opener raises StartFailed, and leaves nothing behind, also when it is cancelled.
    """
    if isinstance(command, str) or not command:
        raise ConfigError(f"command={command!r}: must be a list of at least one word")
    if transport not in get_args(Transport):
        raise ConfigError(f"transport={transport!r}: must be one of {', '.join(get_args(Transport))}")

    async def opened(handler: Handler) -> Link:
        door = _Door(handler, secrets.token_hex(32), only=transport == "stdio")
        known = {**os.environ, **(env or {}), TOKEN: door.token}
        process: Process | None = None
        try:
            async with _WAYS[transport](door) as way:
                try:
                    process = Process([*command, "--connect", way.address], known, way.stdio)
                except (OSError, ValueError) as error:  # ValueError: a word with a null character
                    raise StartFailed(f"{command[0]!r} cannot be run: {error}") from None
                finally:
                    if way.stdio is not None:
                        way.stdio.close()
                peer = await door.who_comes(process)
            return Link(peer, process)
        except BaseException:
            door.shut()
            if process is not None:
                await process.kill()
            raise

    return opened


# -- ways in -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Way:
    """Where a process connects to, or what becomes its stdin and stdout."""

    address: str
    stdio: socket.socket | None = None


@contextlib.asynccontextmanager
async def _by_unix(door: _Door) -> AsyncIterator[_Way]:
    base = tempfile.gettempdir()  # a path of a socket has at most 107 bytes
    directory = tempfile.mkdtemp(prefix="reflex-", dir=base if len(os.fsencode(base)) < 80 else "/tmp")
    path = os.path.join(directory, "socket")
    try:
        server = await _listening(asyncio.get_running_loop().create_unix_server(door.knock, path))
        try:
            yield _Way(f"unix:{path}")
        finally:
            server.close()
    finally:  # it is connected, or never will be: nothing stays in the file system, however this process ends
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.rmdir(directory)


@contextlib.asynccontextmanager
async def _by_tcp(door: _Door) -> AsyncIterator[_Way]:
    server = await _listening(asyncio.get_running_loop().create_server(door.knock, "127.0.0.1", 0))
    try:
        yield _Way(f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()


@contextlib.asynccontextmanager
async def _by_stdio(door: _Door) -> AsyncIterator[_Way]:
    ours, theirs = socket.socketpair()
    with theirs:
        await _peer_on(ours, door.knock)
        yield _Way("stdio", theirs)


_WAYS: dict[str, Callable[[_Door], contextlib.AbstractAsyncContextManager[_Way]]] = {
    "unix": _by_unix,
    "tcp": _by_tcp,
    "stdio": _by_stdio,
}


async def _listening(making: Coroutine[Any, Any, S]) -> S:
    """A server. Whoever is cancelled in the turn of the loop that this takes would leave one that is nobody's."""
    made = asyncio.ensure_future(making)
    try:
        return await asyncio.shield(made)
    except asyncio.CancelledError:
        (await made).close()
        raise


async def _peer_on(sock: socket.socket, make: Callable[[], Peer]) -> Peer:
    try:
        sock.setblocking(False)
        _, peer = await asyncio.get_running_loop().connect_accepted_socket(make, sock)
    except BaseException:
        sock.close()
        raise
    return peer


# -- who comes in ------------------------------------------------------------------------------------------------------


class _Card(msgspec.Struct):
    """What is read of the answer of `runtime/info` here: another protocol is known as such by who reads the rest."""

    token: str = ""


_CARD = Reader(_Card)


class _Door:
    """Lets in who says the token, and nobody else; a Handler of connections that have not yet. only: there will be no
    other connection than the first."""

    def __init__(self, handler: Handler, token: str, only: bool = False) -> None:
        self.token = token
        self._handler, self._only = handler, only
        self._strangers: dict[Peer, None] = {}  # oldest first
        self._come: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()

    def knock(self) -> Peer:
        """A connection came: ask who it is."""
        if len(self._strangers) >= MOST_STRANGERS:
            self._turn_away(next(iter(self._strangers)), "said nothing")
        peer = Peer(self, most=STRANGERS_FRAME)
        self._strangers[peer] = None
        peer.call(INFO, {}).add_done_callback(lambda answer: self._told(peer, answer))
        return peer

    async def who_comes(self, process: Process) -> Peer:
        """The connection of the process. Raises StartFailed when it ends before."""
        either: set[asyncio.Future[Any]] = {self._come, process.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._come.done():
            raise StartFailed(f"its process {process.ending} before it connected")
        peer = self._come.result()
        self._turn_all_away("was not the process")
        return peer

    def shut(self) -> None:
        """Nobody comes in, and who came goes."""
        self._turn_all_away("came too late")
        if not self._come.done():
            self._come.cancel()
        elif not self._come.cancelled() and self._come.exception() is None:
            self._come.result().abort()

    def called(self, peer: Peer, request: RpcRequest, codec: Codec) -> None:
        peer.refuse(request, RpcError(METHOD_NOT_FOUND, "say who you are first"))

    def told(self, peer: Peer, note: Notification, codec: Codec) -> None:
        pass

    def lost(self, peer: Peer, error: Exception | None) -> None:
        self._turn_away(peer, "ended without a word" if error is None else str(error))

    def _told(self, peer: Peer, answer: asyncio.Future[RawAnswer]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if peer not in self._strangers or answer.cancelled():
            return
        if error is not None:
            self._turn_away(peer, str(error))
            return
        try:
            card = _CARD.read(answer.result().raw, answer.result().codec)
        except ProtocolError as wrong:
            self._turn_away(peer, wrong.message)
            return
        if self._come.done() or not secrets.compare_digest(_bytes(card.token), _bytes(self.token)):
            self._turn_away(peer, "did not know the token")
            return
        del self._strangers[peer]
        peer.hand_over(self._handler)
        self._come.set_result(peer)

    def _turn_all_away(self, why: str) -> None:
        for peer in list(self._strangers):
            self._turn_away(peer, why)

    def _turn_away(self, peer: Peer, why: str) -> None:
        if peer not in self._strangers:
            return
        del self._strangers[peer]
        log.warning("a connection was turned away: %s", why)
        peer.abort()
        if self._only and not self._come.done():
            self._come.set_exception(StartFailed(f"its process did not say who it is: {why}"))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
