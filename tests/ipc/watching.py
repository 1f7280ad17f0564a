"""What tests of clients and their processes share: who saw what, on either kind of loop, and that nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from ipc.answering import PLAIN, Child
from ipc.virtual import VirtualLoop
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.ipc.client import ClientConfig, RuntimeClient, State
from reflex_runtime.ipc.frames import RpcMessage
from reflex_runtime.ipc.peer import Handler, Peer
from reflex_runtime.ipc.spawn import Link, Opener, _peer_on, spawned

T = TypeVar("T")

PATIENCE = 60.0  # seconds until a test that waits is broken
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
QUICK = ClientConfig(heartbeat_s=0, backoff_s=0.01, backoff_max_s=0.05, most_failures=1000)


def run(test: Coroutine[Any, Any, T], loop: str = "asyncio") -> T:
    """A test on a loop of its own; virtual: only with runtimes in this process."""
    with asyncio.Runner(loop_factory=VirtualLoop if loop == "virtual" else LOOPS[loop]) as runner:
        return runner.run(asyncio.wait_for(test, 3 * PATIENCE))


def child(behaviour: str, **env: str) -> Opener:
    """A process that behaves so."""
    script = str(Path(__file__).with_name("child.py"))
    path = os.pathsep.join(sys.path)
    return spawned([sys.executable, script, behaviour], {"PYTHONPATH": path, **env})


def socketpair() -> Callable[[str], Awaitable[socket.socket]]:
    """Makes a runtime in this process, and answers with the front's end of its connection."""

    async def made(behaviour: str = "well") -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: Peer(Child(behaviour)), theirs)
        return ours

    return made


class Script:
    """An opener that makes runtimes in this process. Each start takes the next of `plan`, the last for ever: the
    behaviour of a child, or an error. starts: when there was one. links: those that were made."""

    def __init__(self, *plan: str | Exception) -> None:
        self.plan, self.starts, self.links = list(plan), [], []
        self.waiting: asyncio.Event | None = None

    async def __call__(self, handler: Handler) -> Link:
        self.starts.append(asyncio.get_running_loop().time())
        step = self.plan.pop(0) if len(self.plan) > 1 else self.plan[0]
        if isinstance(step, Exception):
            raise step
        if step == "wait":
            await asyncio.Event().wait()
        self.links.append(Link(await _peer_on(await socketpair()(step), handler)))
        return self.links[-1]


class Watch:
    """Listens to a client. seen: states, losses and notes as they came, each with its time."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.losses: list[ReflexError] = []
        self.lost_at: list[float] = []
        self.notes: list[Any] = []
        self._changed: list[tuple[Callable[[], Any], asyncio.Future[None]]] = []

    def client(self, opener: Opener, config: ClientConfig = QUICK, **more: Any) -> RuntimeClient:
        client = WatchedClient(opener, config, name="w", on_note=self.note, on_lost=self.lost, **more)
        client.watch = self
        return client

    def state(self, state: str) -> None:
        self.states.append(state)
        self._look()

    def lost(self, error: ReflexError) -> None:
        self.losses.append(error)
        self.lost_at.append(asyncio.get_running_loop().time())
        self._look()

    def note(self, note: RpcMessage) -> None:
        self.notes.append((note.method, PLAIN.read(note.params)))
        self._look()

    async def until(self, condition: Callable[[], Any]) -> None:
        """Looked at whenever something was told."""
        if condition():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.append((condition, future))
        await asyncio.wait_for(future, PATIENCE)

    async def times(self, state: str, n: int) -> None:
        """Until it was in a state so often."""
        await self.until(lambda: self.states.count(state) >= n)

    def _look(self) -> None:
        for entry in list(self._changed):
            condition, future = entry
            if condition():
                self._changed.remove(entry)
                if not future.done():
                    future.set_result(None)


async def failure(awaited: Awaitable[Any]) -> BaseException:
    """What it raised."""
    try:
        await asyncio.wait_for(asyncio.ensure_future(awaited), PATIENCE)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def children() -> set[int]:
    """Processes that this one has started and not reaped, zombies too."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


def descriptors() -> dict[str, str]:
    """Open descriptors, and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def alive(pid: int) -> bool:
    """Whether there is such a process that is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it is reaped just now
        return False


@contextlib.contextmanager
def nothing_left(directory: Path) -> Iterator[None]:
    """After it there is no process, descriptor or temporary file that was not there before."""
    for loop in LOOPS:  # what a kind of loop opens once and keeps is not ours
        run(asyncio.sleep(0), loop)
    gc.collect()
    old, before, had = tempfile.tempdir, children(), descriptors()
    tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = old
    gc.collect()
    assert children() <= before
    new = {name: what for name, what in descriptors().items() if name not in had}
    assert not new, new
    assert not list(directory.glob("reflex-*"))


class WatchedClient(RuntimeClient):
    """Tells its watch each new state."""

    watch: Watch

    def _become(self, state: State) -> None:
        before = self.state
        super()._become(state)
        if self.state != before:
            self.watch.state(state)
