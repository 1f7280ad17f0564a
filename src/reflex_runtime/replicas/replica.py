"""The front's end of one replica: its process, its two connections, and what it says."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.ipc.client import RuntimeClient, start_all
from reflex_runtime.ipc.client_config import ClientConfig
from reflex_runtime.ipc.frames import Codec, Notification, Reader
from reflex_runtime.ipc.peer import Handler
from reflex_runtime.ipc.spawn import Link, StartFailed, spawned
from reflex_runtime.replicas.messages import ASK, PART, SERVE, UNWATCH, AnswerPart, AskReplica, ReplicaAnswer, Serve
from reflex_runtime.replicas.quiet_start import LONGEST, QuietStart
from reflex_runtime.web.handover import HandedOver, HandoverChannel

log = logging.getLogger("reflex.server")

PROGRAM = (sys.executable, "-m", "reflex_runtime.cli.replica")
LIMITS = ClientConfig(
    start_timeout_s=86_400.0, heartbeat_s=0.5, backoff_s=0.1, backoff_max_s=10.0, steady_s=60.0, most_failures=8,
    cooldown_s=60.0,
)  # fmt: skip
REMEDY = (
    "it cannot be started again with what it serves: put that right and wait for the next try; or, while another "
    "replica is ready, load another version (POST /admin/load), with which it is started at once"
)
_PART = Reader(AnswerPart)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica. device: as it was asked for, in words. serve: what it is told to serve. env: of its process, beside
    the front's. limits: of its process."""

    name: str
    device: str
    serve: Serve
    env: Mapping[str, str]
    limits: ClientConfig = LIMITS


class Replica:
    """See the module. Everything happens on the front's loop.

    taken: called with a connection that it passes back. noted: with every notification. changed: with itself, when it
    has become ready, takes no more, or is lost. leaving: it ends, and takes no more.
    """

    def __init__(
        self,
        plan: ReplicaPlan,
        taken: Callable[[socket.socket, HandedOver], None],
        noted: Callable[[Replica, Notification, Codec], None],
        changed: Callable[[Replica], None],
    ) -> None:
        self.name, self.device, self.plan = plan.name, plan.device, plan
        self._serve = plan.serve  # what it serves from its next start on
        self._taken, self._noted, self._changed = taken, noted, changed
        self.client = RuntimeClient(
            self._open, plan.limits, name=plan.name, prepare=self._prepare, on_note=self._note,
            on_state=self._state_changed,
        )  # fmt: skip
        self.leaving = False
        self.given = 0
        self._channel: HandoverChannel | None = None
        self._watching: dict[int, Callable[[bytes], None]] = {}
        self._number = 0
        self._quiet: QuietStart | None = None  # while it starts beside others
        self._raise: asyncio.TimerHandle | None = None  # ends that, counted from when the process was started

    @property
    def live(self) -> bool:
        """Whether it takes requests."""
        return self.client.ready and not self.leaving

    def give(self, file: int, said: HandedOver) -> None:
        """Give it a connection, whose descriptor is closed here."""
        assert self._channel is not None
        self.given += 1
        self._channel.send(file, said)

    def serves(self, policy: str, sources: Mapping[str, str] = {}, faults: Sequence[str] | None = None) -> None:
        """What has changed since the beginning, for a replica that starts later. sources: by slot. faults: those of a
        drill; None: as before."""
        asked = []
        for told in self._serve.asked:
            if told["name"] == policy:
                told = told | {"sources": told["sources"] | sources}
                if faults is not None:
                    told["config"] = told["config"] | {"inject_fault": list(faults)}
            asked.append(told)
        if asked != self._serve.asked:
            self._serve = msgspec.structs.replace(self._serve, asked=asked)

    async def ask(self, asked: AskReplica, timeout: float) -> ReplicaAnswer:
        """Its answer to an HTTP request. Raises a ReflexError if there is none in time."""
        found: ReplicaAnswer = await self.client.request(ASK, asked, ReplicaAnswer, timeout)
        return found

    def watch(self, path: str, part: Callable[[bytes], None], headers: list[tuple[bytes, bytes]]) -> int:
        """Have the parts of an answer that does not end. Returns its number."""
        self._number += 1
        self._watching[self._number] = part
        call = self.client.call(ASK, AskReplica("GET", path, headers, b"", self._number))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._number

    def unwatch(self, number: int) -> None:
        """Have no more parts of that answer."""
        if self._watching.pop(number, None) is not None:
            self.client.notify(UNWATCH, number)

    def told(self) -> dict[str, Any]:
        """For /health."""
        client = self.client
        state = "leaving" if self.leaving and client.ready else client.state
        found: dict[str, Any] = {
            "name": self.name, "device": self.device, "state": state,
            "pid": client.pid, "restarts": client.restarts, "connections_given": self.given,
        }  # fmt: skip
        if client.last_error:
            found["last_error"] = client.last_error
        if client.start_failed:
            found["remedy"] = REMEDY
        return found

    # -- its life ------------------------------------------------------------------------------------------------------

    async def _open(self, handler: Handler) -> Link:
        self._close_channel()
        self.leaving = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._channel = HandoverChannel(ours, self._taken, self._takes_no_more)
            command = [*PROGRAM, str(theirs.fileno()), str(os.getpid())]
            link = await spawned(command, self.plan.env, (theirs.fileno(),))(handler)
        self._no_longer_quiet()
        if self.client.restarts and link.process is not None:
            self._quiet = QuietStart(link.process.pid)
            self._raise = asyncio.get_running_loop().call_later(LONGEST, self._no_longer_quiet)
        return link

    async def _prepare(self, client: RuntimeClient) -> None:
        serve = self._serve
        try:
            await client.request(SERVE, serve)
        finally:
            self._no_longer_quiet()
        if self._serve is not serve:
            raise StartFailed(f"{self.name}: what it serves was changed while it started")

    def _no_longer_quiet(self) -> None:
        if self._raise is not None:
            self._raise.cancel()
        if self._quiet is not None:
            self._quiet.end()
        self._quiet = self._raise = None

    def _state_changed(self, state: str) -> None:
        if state != "ready":
            self._close_channel()
            self._watching.clear()
        self._changed(self)

    def _takes_no_more(self) -> None:
        """Its end of the channel is gone, which is seen before its process has ended."""
        self.leaving = True
        self._changed(self)

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _note(self, note: Notification, codec: Codec) -> None:
        if note.method == PART:
            found: AnswerPart = _PART.read(note.params, codec)
            part = self._watching.get(found.watch)
            if part is not None:
                part(found.data)
            return
        self._noted(self, note, codec)


async def started(replicas: list[Replica]) -> None:
    """Start all of them. Raises the error of the first that cannot be started, and leaves none behind then."""
    try:
        await start_all(replica.client for replica in replicas)
    except BaseException:
        await closed(replicas, 0.0)
        raise


async def closed(replicas: list[Replica], timeout: float) -> None:
    """Let each finish what it was asked within `timeout` seconds, and end it."""
    await asyncio.gather(*(replica.client.close(timeout) for replica in replicas), return_exceptions=True)


async def answers(replicas: list[Replica], asked: AskReplica, timeout: float) -> dict[str, ReplicaAnswer]:
    """The answers of all live replicas, by name, without those that do not answer in time, and those that have ended
    since: what they said is of an earlier life."""

    async def one(replica: Replica) -> ReplicaAnswer | None:
        try:
            return await replica.ask(asked, timeout)
        except ReflexError as error:
            log.warning("%s did not answer %s: %s", replica.name, asked.path[:200], error)
            return None

    live = [replica for replica in replicas if replica.live]
    lives = [replica.client.pid for replica in live]
    found = await asyncio.gather(*(one(replica) for replica in live))
    return {
        replica.name: answer
        for replica, pid, answer in zip(live, lives, found, strict=True)
        if answer is not None and replica.live and replica.client.pid == pid
    }
